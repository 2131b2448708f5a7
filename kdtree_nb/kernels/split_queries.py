"""Queries on their way to absorbed attention: one part is rotated, the other goes through a product first."""

from typing import Any, NamedTuple

import numpy as np

from kdtree_nb.kernels.gemm import elements, threads_for
from kdtree_nb.kernels.latent_write import Table
from kdtree_nb.kernels.launch import Array, Kernel, c_type, empty_beside, pointer, runs_cuda
from kdtree_nb.reference.rope import rotate

_split_queries = Kernel("split_queries.cu")


class Queries(NamedTuple):
    """``plain`` [tokens, heads, nope], and ``absorbed`` [tokens, heads, kv_lora + rope], whose end alone is written."""

    plain: Array
    absorbed: Array


def split_queries(
    x: Array, table: Table, prefix_len: Array, depths: Array, kv_lora_rank: int, dtype: Any = np.float32
) -> Queries:
    """Rotate the pairs at each head's end by its token's position, prefix_len + depth; pass on what is before them.

    Parameters
    ----------
    x : float32 [tokens, heads, nope + rope]
        Pairs interleaved; tokens and heads may lie apart.
    table : Table
    prefix_len : int32 [1]
    depths : int32 [tokens]
        −1 in padding, which is rotated like the root. No position may lie beyond the table.
    dtype : float32 or bfloat16
        Of the results, to which both parts are rounded.

    Returns
    -------
    Queries
        Rotated even elements come before odd ones. The first ``kv_lora_rank`` of ``absorbed`` are to be written still.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    rope = 2 * table[0].shape[1]
    if x.ndim != 3 or x.shape[2] < rope or depths.shape != x.shape[:1]:
        raise ValueError(
            f"split_queries: x {list(x.shape)} and depths {list(depths.shape)}, "
            f"expected [tokens, heads, {rope} or more] and [tokens]"
        )
    if x.strides[2] != x.itemsize:
        raise ValueError(f"split_queries: the heads of x are not contiguous (strides {x.strides})")
    tokens, heads, nope = *x.shape[:2], x.shape[2] - rope
    plain = empty_beside(x, (tokens, heads, nope), dtype)
    absorbed = empty_beside(x, (tokens, heads, kv_lora_rank + rope), dtype)
    if not runs_cuda(x):
        positions = int(prefix_len[0]) + np.maximum(depths, 0)
        plain[...] = x[..., :nope]
        absorbed[..., kv_lora_rank:] = rotate(x[..., nope:], table[0][positions], table[1][positions])
    elif tokens and heads:
        sizes = (*map(np.int32, (nope, kv_lora_rank, rope // 2)), elements(x, 0), elements(x, 1))
        arrays = (pointer(x), *table, prefix_len, depths, plain, absorbed)
        kernel = _split_queries.specialize(OUT=c_type(plain))
        kernel((tokens, heads), (threads_for(max(nope, rope // 2)),), (*arrays, *sizes))
    return Queries(plain, absorbed)
