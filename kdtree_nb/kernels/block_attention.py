"""Attention of a drafter's block over its cache."""

from typing import Any

import numpy as np

from kdtree_nb.config.drafter import MAX_HEAD_DIM as MAX_SIZE
from kdtree_nb.kernels.gemm import float_type
from kdtree_nb.kernels.launch import Array, Kernel, c_type, empty_beside, runs_cuda
from kdtree_nb.reference import drafter as reference

WARPS = 16
"""Of a block, for one row and head."""
_block_attention = Kernel("block_attention.cu", defines={"WARPS": WARPS})


def block_attention(
    queries: Array, keys: Array, values: Array, prefix_len: Array, window: int | None, dtype: Any = np.float32
) -> Array:
    """Attention in both directions: :func:`kdtree_nb.reference.drafter.block_attention`.

    Parameters
    ----------
    queries : float32 [rows, heads, size]
        Rows of the block.
    keys, values : float32 or bfloat16 (on a GPU its bits as uint16) [capacity, kv_heads, size]
        The block's own in rows prefix_len + i.
    prefix_len : int32 [1]
        Cached rows before the block.
    window : int or None
        How many of those are seen, the last ones; None: all.
    dtype : float32 or bfloat16
        To which the result is rounded; scores, weights and sums are float32.

    Returns
    -------
    dtype [rows, heads, size]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if (
        queries.ndim != 3
        or keys.ndim != 3
        or keys.shape != values.shape
        or keys.shape[2] != queries.shape[2]
        or not keys.shape[1]
        or queries.shape[1] % keys.shape[1]
    ):
        raise ValueError(
            f"block_attention: queries {list(queries.shape)}, keys {list(keys.shape)} and values {list(values.shape)}, "
            "expected [rows, heads, size] and twice [capacity, kv_heads, size], heads a multiple of kv_heads"
        )
    rows, heads, size = queries.shape
    if not runs_cuda(queries):
        prefix = int(prefix_len[0])
        first = 0 if window is None else max(0, prefix - window)
        seen_keys, seen_values = (cached[first : prefix + rows].astype(np.float32) for cached in (keys, values))
        mixed = reference.block_attention(queries, seen_keys, seen_values, 0, prefix + rows - first)
        return mixed.astype(dtype, copy=False)
    if size > MAX_SIZE:
        raise ValueError(f"block_attention: heads of {size} elements, expected at most {MAX_SIZE}")
    output = empty_beside(queries, queries.shape, dtype)
    sizes = [np.int32(n) for n in (keys.shape[1], size, len(keys) if window is None else window)]
    if output.size:
        arrays = (queries, keys, values, prefix_len, output)
        kernel = _block_attention.specialize(CACHE=float_type("block_attention", "keys", keys), OUT=c_type(output))
        kernel((rows, heads), (32 * WARPS,), (*arrays, *sizes, np.float32(size**-0.5)))
    return output
