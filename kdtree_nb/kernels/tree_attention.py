"""Attention of a draft tree's nodes over the latent cache."""

from typing import Any

import numpy as np

from kdtree_nb.config.model import MAX_KV_LORA
from kdtree_nb.kernels.launch import Array, Kernel, array_module, runs_cuda
from kdtree_nb.reference import attention as reference

SPLIT, HEADS, THREADS = 512, 8, 256
"""Positions in a split, heads and threads in a block, as in ``tree_attention.cu``."""
SCRATCH_BYTES = 2**28
"""Of the partial sums of one launch; rows that do not fit go into the next."""
_attend_split, _combine_splits = (Kernel("tree_attention.cu", name) for name in ("attend_split", "combine_splits"))


def check_shapes(kernel: str, queries: Array, cache: Array, parents: Array, depths: Array) -> None:
    """Raise a ValueError, which names all four, unless they fit each other as :func:`tree_attention` says."""
    if (
        queries.ndim != 3
        or cache.shape != (len(cache), queries.shape[2])
        or not parents.shape == depths.shape == queries.shape[:1]
    ):
        raise ValueError(
            f"{kernel}: queries {list(queries.shape)}, cache {list(cache.shape)}, parents {list(parents.shape)}, "
            f"depths {list(depths.shape)} do not fit"
        )


def scratch(nodes: int, splits: int, heads: int, kv_lora: int, most_bytes: int, xp: Any) -> tuple[Array, Array]:
    """Memory for the partial sums of a launch, and for their maxima and weights, of as many rows as there is room for.

    Returns
    -------
    float32 [rows, splits, heads, kv_lora], float32 [rows, splits, heads, 2]
    """
    rows = max(1, min(nodes, most_bytes // (4 * splits * heads * kv_lora)))
    return xp.empty((rows, splits, heads, kv_lora), np.float32), xp.empty((rows, splits, heads, 2), np.float32)


def tree_attention(
    queries: Array,
    cache: Array,
    prefix_len: Array,
    parents: Array,
    depths: Array,
    kv_lora_rank: int,
    scale: float,
) -> Array:
    """Absorbed MLA attention to prefix, ancestors and self: :func:`kdtree_nb.reference.attention.tree_attention`.

    Parameters
    ----------
    queries : float32 [N, heads, kv_lora + rope]
    cache : float32 [capacity, kv_lora + rope]
        One layer's; node i in row prefix_len + i.
    prefix_len : int32 [1]
    parents, depths : int32 [N]
        −1 in padding, whose rows come back as zeros.

    Returns
    -------
    float32 [N, heads, kv_lora]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    check_shapes("tree_attention", queries, cache, parents, depths)
    if not runs_cuda(queries):
        return reference.tree_attention(queries, cache, int(prefix_len[0]), parents, kv_lora_rank, scale)
    nodes, heads, latent = queries.shape
    if not 0 < kv_lora_rank <= min(latent, MAX_KV_LORA):
        raise ValueError(f"tree_attention: kv_lora_rank={kv_lora_rank}, expected 1 to {min(latent, MAX_KV_LORA)}")
    xp, splits = array_module(queries), -(-len(cache) // SPLIT)
    output = xp.empty((nodes, heads, kv_lora_rank), np.float32)
    if not output.size:
        return output
    partial, stats = scratch(nodes, splits, heads, kv_lora_rank, SCRATCH_BYTES, xp)
    rows = len(partial)
    for first in range(0, nodes, rows):
        count, first_row = min(rows, nodes - first), np.int32(first)
        _attend_split(
            (count, splits, -(-heads // HEADS)),
            (THREADS,),
            (queries, cache, prefix_len, parents, depths, partial, stats, first_row)
            + (np.int32(heads), np.int32(kv_lora_rank), np.int32(latent), np.float32(scale)),
            shared_bytes=HEADS * latent * 4,
        )
        sizes = (first_row, np.int32(splits), np.int32(kv_lora_rank))
        _combine_splits((count, heads), (128,), (partial, stats, prefix_len, depths, output, *sizes))
    return output
