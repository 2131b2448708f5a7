"""The drafter's transition head: from marginals of each depth to conditionals, given the parent's token."""

import numpy as np

from kdtree_nb.reference.moe import sigmoid


def condition(
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    gates: np.ndarray,
    parent_table: np.ndarray,
    child_table: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of each depth's candidates, given each of the candidates one depth above.

    A drafter's marginals do not know which sibling was taken. The head scores each pair of neighbours,

        score[d, i, j] = silu(parent_table[i's token] + gates[d]) · child_table[j's token],

    and reweights the candidates by it, while the rest of the vocabulary keeps its probability, so that
    nothing is as large as the vocabulary:

        log p(j | i) = log_probs[d, j] + score[d, i, j] − log Z[d, i]
        Z[d, i] = Σ_j exp(log_probs[d, j] + score[d, i, j]) + max(0, 1 − Σ_j exp(log_probs[d, j])).

    Parameters
    ----------
    log_probs : float32 [L, K]
        The marginals; −inf where there is no candidate, whose token is then never looked up.
    token_ids : int [L, K]
    gates : float32 [L, rank]
        Of the drafter's hidden states; that of depth 0 is not read.
    parent_table, child_table : float32 [V, rank]

    Returns
    -------
    log_probs : float32 [L, K, K]
        ``[d, i, r]``: of the r-th most probable child of candidate i of depth d − 1; at most 0, descending.
        −inf for a child that is no candidate, and throughout for a parent that is none. At depth 0 row 0 is
        the marginal itself, for the root is the only parent there: the other rows are −inf.
    children : int32 [L, K, K]
        Which of its depth's candidates each is; equal log-probabilities by the lower one.

    Raises
    ------
    ValueError
        If the shapes do not fit; the message names them.
    """
    check_condition(log_probs, token_ids, gates, parent_table, child_table)
    token_ids = np.where(log_probs > -np.inf, token_ids, 0)
    gated = parent_table[token_ids[:-1]] + gates[1:, None]  # [L − 1, K, rank]
    scores = (gated * sigmoid(gated)) @ child_table[token_ids[1:]].swapaxes(1, 2)
    return reweigh(log_probs, scores)


def reweigh(log_probs: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The conditionals of :func:`condition`, from marginals [L, K] and scores float32 [L − 1, K, K] of each pair."""
    depth_limit, width = log_probs.shape
    adjusted = log_probs[1:, None] + scores
    with np.errstate(divide="ignore"):
        tail = np.log(np.maximum(0, 1 - np.exp(log_probs[1:]).sum(axis=1)))  # one more candidate, which no score moves
    rest = np.broadcast_to(tail[:, None, None], (*adjusted.shape[:2], 1))
    terms = np.concatenate([adjusted, rest], axis=2)
    highest = terms.max(axis=2, keepdims=True)
    log_sum = np.log(np.exp(terms - highest).sum(axis=2, keepdims=True))
    conditionals = np.full((depth_limit, width, width), -np.inf, np.float32)
    conditionals[:1, :1] = log_probs[:1, None]
    conditionals[1:] = np.minimum(adjusted - highest - log_sum, 0)
    conditionals[1:][log_probs[:-1] == -np.inf] = -np.inf
    children = np.argsort(-conditionals, axis=2, kind="stable")
    return np.take_along_axis(conditionals, children, axis=2), children.astype(np.int32)


def check_condition(
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    gates: np.ndarray,
    parent_table: np.ndarray,
    child_table: np.ndarray,
) -> None:
    """Raise a ValueError unless the shapes are those that :func:`condition` takes."""
    if log_probs.ndim != 2 or log_probs.shape != token_ids.shape:
        raise ValueError(
            f"condition: log_probs {list(log_probs.shape)} and token_ids {list(token_ids.shape)}, "
            "expected the same [L, K]"
        )
    if gates.ndim != 2 or len(gates) != len(log_probs):
        raise ValueError(f"condition: gates {list(gates.shape)}, expected [{len(log_probs)}, rank]")
    if parent_table.ndim != 2 or parent_table.shape != child_table.shape or parent_table.shape[1] != gates.shape[1]:
        raise ValueError(
            f"condition: parent_table {list(parent_table.shape)} and child_table {list(child_table.shape)}, "
            f"expected the same [V, {gates.shape[1]}]"
        )
