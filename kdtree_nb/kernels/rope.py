"""Rotary positions, from a table."""

import numpy as np

from kdtree_nb.kernels.gemm import elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module, pointer, runs_cuda
from kdtree_nb.reference.rope import rotate

_rope = Kernel("rope.cu")

Table = tuple[Array, Array]
"""Cosines and sines, float32 [positions, rope / 2]: :func:`kdtree_nb.reference.rope.rope_table`."""


def rope(x: Array, table: Table, prefix_len: Array, depths: Array) -> Array:
    """Rotate each head's pairs by its token's position, prefix_len + depth.

    Parameters
    ----------
    x : float32 [tokens, heads, rope]
        Pairs interleaved; tokens and heads may lie apart.
    prefix_len : int32 [1]
    depths : int32 [tokens]
        −1 in padding, which is rotated like the root. No position may lie beyond the table.

    Returns
    -------
    float32 [tokens, heads, rope], rotated even elements first, then odd ones.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    features = 2 * table[0].shape[1]
    if x.ndim != 3 or x.shape[2] != features or depths.shape != x.shape[:1]:
        raise ValueError(
            f"rope: x {list(x.shape)} and depths {list(depths.shape)}, "
            f"expected [tokens, heads, {features}] and [tokens]"
        )
    if x.strides[2] != x.itemsize:
        raise ValueError(f"rope: the heads of x are not contiguous (strides {x.strides})")
    if not runs_cuda(x):
        positions = int(prefix_len[0]) + np.maximum(depths, 0)
        return rotate(x, table[0][positions], table[1][positions])
    y = array_module(x).empty(x.shape, np.float32)
    if y.size:
        tokens, heads, pairs = x.shape[0], x.shape[1], features // 2
        sizes = [np.int32(heads), np.int32(pairs), elements(x, 0), elements(x, 1)]
        threads = threads_for(heads * pairs)
        grid = tokens, -(-heads * pairs // threads)
        _rope(grid, (threads,), (pointer(x), *table, prefix_len, depths, y, *sizes))
    return y
