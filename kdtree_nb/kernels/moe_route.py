"""The router: which experts, with which weights."""

import numpy as np

from kdtree_nb.config import ModelConfig
from kdtree_nb.config.model import MAX_EXPERTS
from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import moe as reference

_moe_route = Kernel("moe_route.cu")


def moe_route(logits: Array, bias: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Choose each token's experts: see :func:`kdtree_nb.reference.moe.moe_route`.

    Parameters
    ----------
    logits : float32 [tokens, experts]
        At most 1,024 experts on a GPU.
    bias : float32 [experts]

    Returns
    -------
    expert_ids : int32 [tokens, top_k]
    weights : float32 [tokens, top_k]

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
    if not runs_cuda(logits):
        return reference.moe_route(logits, bias, config)
    if experts > MAX_EXPERTS:
        raise ValueError(f"moe_route: {experts} experts, expected at most {MAX_EXPERTS}")
    xp, top_k = array_module(logits), config.num_experts_per_tok
    expert_ids, weights = xp.empty((tokens, top_k), np.int32), xp.empty((tokens, top_k), np.float32)
    if tokens:
        sizes = [np.int32(n) for n in (experts, top_k, config.n_group, config.topk_group, config.norm_topk_prob)]
        scaling = np.float32(config.routed_scaling_factor)
        _moe_route((tokens,), (32,), (logits, bias, expert_ids, weights, *sizes, scaling))
    return expert_ids, weights
