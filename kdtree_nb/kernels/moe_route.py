"""The router: which experts, with which weights."""

from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.kernels.gemm import check_rows, elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module, c_type, empty_beside, pointer, runs_cuda
from kdtree_nb.kernels.moe_pairs import ROWS, Blocks
from kdtree_nb.kernels.swiglu import swiglu
from kdtree_nb.reference import moe as reference

_moe_route = Kernel("moe_route.cu")


def moe_route(logits: Array, bias: Array, config: ModelConfig, shared: int = 0) -> tuple[Array, Array]:
    """Choose each token's experts: see :func:`kdtree_nb.reference.moe.moe_route`.

    Parameters
    ----------
    logits : float32 [tokens, experts]
        Rows may lie apart; each is contiguous.
    bias : float32 [experts]
    shared : int
        How many experts, with the ids that follow, every token has besides: behind its choice, with weight 1.

    Returns
    -------
    expert_ids : int32 [tokens, top_k + shared]
    weights : float32 [tokens, top_k + shared]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    experts = config.n_routed_experts
    if logits.shape != (len(logits), experts) or bias.shape != (experts,):
        raise ValueError(
            f"moe_route: logits {list(logits.shape)} and bias {list(bias.shape)}, expected {experts} experts"
        )
    return routing(logits, bias, config, shared)[:2]


class Routing(NamedTuple):
    """What comes of the product that routes.

    expert_ids : int32 [tokens, top_k + shared]
    weights : float32 [tokens, top_k + shared]
    blocks : Blocks or None
        Of one token, from a kernel: it needs no sorting, as each of its experts is a block of one pair.
    activations : dtype [tokens, width] or None
        ``silu(gate) · up``, where the product had gates and ups.
    """

    expert_ids: Array
    weights: Array
    blocks: Blocks | None
    activations: Array | None


def routing(product: Array, bias: Array, config: ModelConfig, shared: int = 0, dtype: Any = np.float32) -> Routing:
    """:func:`moe_route`, and what shared experts make of their gates and ups in the same product.

    Parameters
    ----------
    product : float32 [tokens, experts + 2 · width]
        Logits; behind them, where the weight has them, gates and ups. Rows may lie apart; each is contiguous.
    bias, config, shared
        As of :func:`moe_route`.
    dtype : float32 or bfloat16
        Of the activations.
    """
    tokens, experts = len(product), config.n_routed_experts
    width, odd = divmod(product.shape[-1] - experts, 2)
    if product.ndim != 2 or width < 0 or odd or bias.shape != (experts,):
        raise ValueError(
            f"moe_route: product {list(product.shape)} and bias {list(bias.shape)}, "
            f"expected [tokens, {experts} + 2 · width] and [{experts}]"
        )
    check_rows("moe_route", product, product.shape[1], name="logits")
    logits, gate_up = product[:, :experts], product[:, experts:]
    if not runs_cuda(logits):
        expert_ids, weights = reference.moe_route(logits, bias, config)
        every = np.arange(experts, experts + shared, dtype=np.int32) + np.zeros((tokens, 1), np.int32)
        activations = swiglu(gate_up, dtype) if width else None
        return Routing(
            np.hstack([expert_ids, every]), np.hstack([weights, np.ones(every.shape, weights.dtype)]), None, activations
        )
    xp, top_k = array_module(logits), config.num_experts_per_tok
    shape = tokens, top_k + shared
    expert_ids, weights = xp.empty(shape, np.int32), xp.empty(shape, np.float32)
    activations = empty_beside(logits, (tokens, width), dtype)
    blocks = None
    if tokens == 1:
        chosen = top_k + shared
        blocks = Blocks(xp.empty(chosen, np.int32), xp.empty((chosen, ROWS), np.int32), xp.empty(1, np.int32))
    if tokens:
        choice = top_k, shared, config.n_group, config.topk_group, config.norm_topk_prob
        threads = threads_for(experts, 1024)
        args = (
            *(pointer(logits), bias, expert_ids, weights),
            *map(np.int32, (experts, *choice)),
            *(np.float32(config.routed_scaling_factor), elements(product, 0)),
            *(pointer(gate_up) if width else None, activations, np.int32(width)),
            *(blocks or (None, None, None)),
            np.int32(ROWS),
        )
        _moe_route.specialize(OUT=c_type(activations))((tokens, 1 + -(-width // threads)), (threads,), args)
    return Routing(expert_ids, weights, blocks, activations if width else None)
