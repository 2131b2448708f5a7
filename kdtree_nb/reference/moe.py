"""Mixture of experts: DeepSeek-V3's router (arXiv 2412.19437, eq. 12–16) and the weighted sum of SwiGLU experts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.reference.linear import ROWS, Tiles, block_products


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x); where e^-x overflows to infinity, the result is the right 0."""
    with np.errstate(over="ignore"):
        return np.reciprocal(1 + np.exp(-x))


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) · up (arXiv 2002.05202)."""
    return gate * sigmoid(gate) * up


def moe_route(logits: np.ndarray, bias: np.ndarray, config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Choose each token's experts.

    Parameters
    ----------
    logits : float32 [tokens, experts]
    bias : float32 [experts]
        ``e_score_correction_bias``: takes part in the choice, never in the weights.

    Returns
    -------
    expert_ids : int32 [tokens, top_k]
        Best first; equal scores go to the lowest id.
    weights : float [tokens, top_k]
    """
    scores = sigmoid(logits)
    choice = scores + bias
    if config.n_group > 1:
        choice = _keep_best_groups(choice, config)
    expert_ids = np.argsort(-choice, axis=1, kind="stable")[:, : config.num_experts_per_tok]
    weights = scores[np.arange(len(scores))[:, None], expert_ids]
    if config.norm_topk_prob:
        weights = weights / (weights.cumsum(axis=1)[:, -1:] + 1e-20)  # in order, as a plain sum may not be
    return expert_ids.astype(np.int32), weights * config.routed_scaling_factor


def moe(
    x: np.ndarray,
    expert_ids: np.ndarray,
    weights: np.ndarray,
    expert: Callable[[int, np.ndarray], np.ndarray],
) -> np.ndarray:
    """The weighted sum of each token's experts, added in the order of its choice.

    Parameters
    ----------
    x : float [tokens, hidden]
    expert_ids, weights : [tokens, top_k]
    expert : callable
        ``expert(id, rows [n, hidden]) -> [n, hidden]``; called once for each expert that was chosen.
    """
    outputs = np.empty((*expert_ids.shape, x.shape[1]), x.dtype)
    for chosen in set(expert_ids.ravel().tolist()):
        tokens, choices = np.nonzero(expert_ids == chosen)
        outputs[tokens, choices] = expert(chosen, x.take(tokens, axis=0))
    return _sum_in_order(outputs * weights[:, :, None])


def moe_by_blocks(
    x: np.ndarray,
    expert_ids: np.ndarray,
    weights: np.ndarray,
    shared_ids: Sequence[int],
    tiles_of: Callable[[int], tuple[Tiles, Tiles]],
    dtype: Any = None,
) -> np.ndarray:
    """:func:`moe` of SwiGLU experts, and the shared ones, with few calls to NumPy: all rows lie in one array.

    A single token's pass through a small layer takes NumPy longer to call than to compute.

    Parameters
    ----------
    x, expert_ids, weights : as in :func:`moe`
    shared_ids : sequence of int
        Experts that every token has, with weight 1; added last.
    tiles_of : callable
        From an expert's id to its weights: gate above up, and down.
    dtype : optional
        To which SwiGLU's activations are rounded.
    """
    if not len(x):
        return np.zeros_like(x)
    experts, places = expert_blocks([[*chosen, *shared_ids] for chosen in expert_ids.tolist()])
    gate_up, down = zip(*map(tiles_of, experts), strict=True)
    rows = np.zeros((len(experts) * ROWS, x.shape[1]), x.dtype)
    rows[places] = x[:, None]
    gates = block_products(rows.reshape(len(experts), ROWS, -1), gate_up)
    width = gates.shape[2] // 2
    activations = swiglu(gates[..., :width], gates[..., width:])
    if dtype is not None:
        activations = activations.astype(dtype, copy=False).astype(x.dtype, copy=False)
    outputs = block_products(activations, down).reshape(rows.shape)[places]  # [tokens, top_k + shared, hidden]
    outputs[:, : weights.shape[1]] *= weights[:, :, None]
    return _sum_in_order(outputs)


def expert_blocks(chosen: Sequence[Sequence[int]]) -> tuple[list[int], np.ndarray]:
    """Give the experts of each token rows in blocks of 4, so that a block has one expert.

    Returns
    -------
    experts : list of int
        Of each block.
    places : int [tokens, experts of a token]
        Their rows.
    """
    experts: list[int] = []
    free: dict[int, list[int]] = {}  # rows that are left in an expert's last block
    places = []
    for own in chosen:
        for expert in own:
            if not free.get(expert):
                free[expert] = [*range(len(experts) * ROWS, (len(experts) + 1) * ROWS)]
                experts.append(expert)
            places.append(free[expert].pop(0))
    return experts, np.array(places).reshape(len(chosen), -1)


def _keep_best_groups(choice: np.ndarray, config: ModelConfig) -> np.ndarray:
    grouped = choice.reshape(len(choice), config.n_group, config.n_routed_experts // config.n_group)
    group_scores = _sum_in_order(np.sort(grouped, axis=2)[:, :, -2:].swapaxes(1, 2))
    kept = np.argsort(-group_scores, axis=1, kind="stable")[:, : config.topk_group]
    mask = np.zeros(group_scores.shape, bool)
    np.put_along_axis(mask, kept, True, axis=1)
    return np.where(mask[:, :, None], grouped, -np.inf).reshape(choice.shape)


def _sum_in_order(x: np.ndarray) -> np.ndarray:
    """Sum [tokens, terms, ...] from first to last: NumPy's own is pairwise or not, depending on the array's layout."""
    total = x[:, 0].copy()
    for term in range(1, x.shape[1]):
        total += x[:, term]
    return total
