"""The drafter's transition head."""

import numpy as np

from kdtree_nb.config.drafter import MAX_CANDIDATES as MAX_K
from kdtree_nb.config.drafter import MAX_TRANSITION_RANK as MAX_RANK
from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import transition as reference

_condition = Kernel("transition.cu", "condition")


def condition(
    log_probs: Array, token_ids: Array, gates: Array, parent_table: Array, child_table: Array
) -> tuple[Array, Array]:
    """Conditionals of each depth's candidates: see :func:`kdtree_nb.reference.transition.condition`.

    Parameters
    ----------
    log_probs : float32 [L, K]
        K at most 256 on a GPU, where NaN, in the tables too, counts as −inf.
    token_ids : int32 [L, K]
    gates : float32 [L, rank]
        rank at most 256 on a GPU.
    parent_table, child_table : float32 [V, rank]

    Returns
    -------
    log_probs : float32 [L, K, K]
    children : int32 [L, K, K]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if not runs_cuda(log_probs):
        return reference.condition(log_probs, token_ids, gates, parent_table, child_table)
    reference.check_condition(log_probs, token_ids, gates, parent_table, child_table)
    (length, width), rank = log_probs.shape, gates.shape[1]
    if width > MAX_K:
        raise ValueError(f"condition: K={width}, expected at most {MAX_K}")
    if rank > MAX_RANK:
        raise ValueError(f"condition: rank={rank}, expected at most {MAX_RANK}")
    xp, shape = array_module(log_probs), (length, width, width)
    conditionals, children = xp.empty(shape, np.float32), xp.empty(shape, np.int32)
    if children.size:
        arrays = log_probs, token_ids, gates, parent_table, child_table, conditionals, children
        _condition((length * width,), (MAX_K,), (*arrays, np.int32(width), np.int32(rank)))
    return conditionals, children
