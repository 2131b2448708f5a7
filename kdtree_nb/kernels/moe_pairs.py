"""Pairs of a token and one of its experts: sorted into blocks before the experts' products, summed by token after."""

from typing import NamedTuple

import numpy as np

from kdtree_nb.config.model import MAX_EXPERTS
from kdtree_nb.kernels.gemm import threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module

_sort, _sum = (Kernel("moe_pairs.cu", name) for name in ("moe_sort", "moe_sum"))


ROWS = 8
"""Pairs of a block, for the kernels of float32 and of bfloat16 alike."""


class Blocks(NamedTuple):
    """The pairs of a layer, in blocks of one expert each; memory for as many as there could be.

    experts : int32 [max_blocks]
    pairs : int32 [max_blocks, rows]
        Token · top_k + choice, or −1 where a block is not full.
    num_blocks : int32 [1]
        How many there are: known on the device only.
    """

    experts: Array
    pairs: Array
    num_blocks: Array


def check_routing(kernel: str, x: Array, expert_ids: Array, weights: Array, shared: Array | None) -> None:
    """Raise a ValueError unless expert_ids and weights are both [tokens, top_k], and ``shared``, if any, is like x."""
    tokens = len(x)
    if shared is not None and shared.shape != x.shape:
        raise ValueError(f"{kernel}: shared {list(shared.shape)}, expected {list(x.shape)}")
    if expert_ids.ndim != 2 or len(expert_ids) != tokens or weights.shape != expert_ids.shape:
        raise ValueError(
            f"{kernel}: expert_ids {list(expert_ids.shape)} and weights {list(weights.shape)}, "
            f"expected [{tokens}, top_k]"
        )


def sort_pairs(expert_ids: Array, experts: int, rows: int) -> Blocks:
    """Put the pairs of each expert into as few blocks of so many rows as they need.

    Parameters
    ----------
    expert_ids : int32 [tokens, top_k]
        At least one, each below ``experts``.

    Raises
    ------
    ValueError
        For more than 1,024 experts.
    """
    if experts > MAX_EXPERTS:
        raise ValueError(f"moe_sort: {experts} experts, expected at most {MAX_EXPERTS}")
    xp, pairs = array_module(expert_ids), expert_ids.size
    chosen = min(pairs, experts)  # at most; each of them begins a block, which the others only fill
    max_blocks = chosen + (pairs - chosen) // rows
    blocks = Blocks(xp.empty(max_blocks, np.int32), xp.empty((max_blocks, rows), np.int32), xp.empty(1, np.int32))
    _sort((1,), (threads_for(experts, MAX_EXPERTS),), (expert_ids, *blocks, np.int32(pairs), np.int32(rows)))
    return blocks


def sum_pairs(outputs: Array, weights: Array, shared: Array | None = None) -> Array:
    """The weighted sum of each token's experts, in the order of its choice.

    Parameters
    ----------
    outputs : float32 [tokens · top_k, hidden]
    weights : float32 [tokens, top_k]
    shared : float32 [tokens, hidden], optional
        Added last.

    Returns
    -------
    float32 [tokens, hidden]
    """
    (tokens, top_k), hidden = weights.shape, outputs.shape[1]
    y = array_module(outputs).empty((tokens, hidden), np.float32)
    threads = threads_for(hidden)
    arrays = outputs, weights, shared, y
    _sum((tokens, -(-hidden // threads)), (threads,), (*arrays, np.int32(hidden), np.int32(top_k)))
    return y
