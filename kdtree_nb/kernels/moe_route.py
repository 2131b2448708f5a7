"""The router: which experts, with which weights."""

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.kernels.gemm import check_rows, elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module, pointer, runs_cuda
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
    tokens, experts = len(logits), config.n_routed_experts
    if logits.shape != (tokens, experts) or bias.shape != (experts,):
        raise ValueError(
            f"moe_route: logits {list(logits.shape)} and bias {list(bias.shape)}, expected {experts} experts"
        )
    check_rows("moe_route", logits, experts, name="logits")
    if not runs_cuda(logits):
        expert_ids, weights = reference.moe_route(logits, bias, config)
        every = np.arange(experts, experts + shared, dtype=np.int32) + np.zeros((tokens, 1), np.int32)
        return np.hstack([expert_ids, every]), np.hstack([weights, np.ones(every.shape, weights.dtype)])
    xp, top_k = array_module(logits), config.num_experts_per_tok
    shape = tokens, top_k + shared
    expert_ids, weights = xp.empty(shape, np.int32), xp.empty(shape, np.float32)
    if tokens:
        sizes = [
            np.int32(n) for n in (experts, top_k, shared, config.n_group, config.topk_group, config.norm_topk_prob)
        ]
        scaling = np.float32(config.routed_scaling_factor)
        arrays = pointer(logits), bias, expert_ids, weights
        _moe_route((tokens,), (threads_for(experts, 1024),), (*arrays, *sizes, scaling, elements(logits, 0)))
    return expert_ids, weights
