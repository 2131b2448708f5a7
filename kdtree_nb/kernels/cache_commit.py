"""Keeping the accepted rows of the cache."""

import numpy as np

from kdtree_nb.kernels.gemm import elements, float_type, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, runs_cuda
from kdtree_nb.reference import tree as reference

_cache_commit = Kernel("cache_commit.cu")


def cache_commit(cache: Array, prefix_len: Array, path: Array, length: Array) -> None:
    """Move the accepted nodes' rows to the end of the prefix, in place: :func:`kdtree_nb.reference.tree.cache_commit`.

    Parameters
    ----------
    cache : float32 or bfloat16 (on a GPU its bits as uint16) [layers, capacity, features]
    prefix_len : int32 [1]
        Not changed.
    path : int32 [max_path]
        Ascending.
    length : int32 [1]
        How many entries of the path count.

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if cache.ndim != 3:
        raise ValueError(f"cache_commit: cache {list(cache.shape)}, expected [layers, capacity, features]")
    if not runs_cuda(cache):
        return reference.cache_commit(cache, int(prefix_len[0]), path[: int(length[0])])
    layers, _, features = cache.shape
    threads = threads_for(features)
    grid = (layers, -(-features // threads))
    if cache.size:
        kernel = _cache_commit.specialize(VALUE=float_type("cache_commit", "cache", cache))
        kernel(grid, (threads,), (cache, prefix_len, path, length, np.int32(features), elements(cache, 0)))
    return None
