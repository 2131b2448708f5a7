"""Rotary positions, from a table."""

from typing import Any

import numpy as np

from kdtree_nb.kernels.gemm import elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, c_type, empty_beside, pointer, runs_cuda
from kdtree_nb.reference.rope import rotate

_rope = Kernel("rope.cu")

Table = tuple[Array, Array]
"""Cosines and sines, float32 [positions, rope / 2]: :func:`kdtree_nb.reference.rope.rope_table`."""


def rope(x: Array, table: Table, prefix_len: Array, depths: Array, dtype: Any = np.float32) -> Array:
    """Rotate the pairs at each head's end by its token's position, prefix_len + depth.

    Parameters
    ----------
    x : float32 [tokens, heads, plain + rope]
        Pairs interleaved; tokens and heads may lie apart. What comes before the pairs is passed on.
    prefix_len : int32 [1]
    depths : int32 [tokens]
        −1 in padding, which is rotated like the root. No position may lie beyond the table.
    dtype : float32 or bfloat16
        To which the result is rounded.

    Returns
    -------
    dtype [tokens, heads, plain + rope], rotated even elements first, then odd ones.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    features = 2 * table[0].shape[1]
    if x.ndim != 3 or x.shape[2] < features or depths.shape != x.shape[:1]:
        raise ValueError(
            f"rope: x {list(x.shape)} and depths {list(depths.shape)}, "
            f"expected [tokens, heads, {features} or more] and [tokens]"
        )
    if x.strides[2] != x.itemsize:
        raise ValueError(f"rope: the heads of x are not contiguous (strides {x.strides})")
    plain = x.shape[2] - features
    y = empty_beside(x, x.shape, dtype)
    if not runs_cuda(x):
        positions = int(prefix_len[0]) + np.maximum(depths, 0)
        y[..., :plain] = x[..., :plain]
        y[..., plain:] = rotate(x[..., plain:], table[0][positions], table[1][positions])
    elif y.size:
        tokens, heads, _ = x.shape
        sizes = (np.int32(plain), np.int32(features // 2), elements(x, 0), elements(x, 1))
        arrays = (pointer(x), *table, prefix_len, depths, y)
        _rope.specialize(OUT=c_type(y))((tokens, heads), (threads_for(max(plain, features // 2)),), (*arrays, *sizes))
    return y
