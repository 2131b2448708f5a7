"""Rounding to bfloat16, of what enters a product and comes from elsewhere."""

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.kernels.launch import Array, Kernel, empty_beside, runs_cuda

THREADS = 256

_to_bfloat16 = Kernel("to_bfloat16.cu")


def to_bfloat16(x: Array) -> Array:
    """Float32 [...], contiguous, to bfloat16 (on a GPU its bits as uint16) of the same shape."""
    if not runs_cuda(x):
        return x.astype(bfloat16)
    y = empty_beside(x, x.shape, bfloat16)
    if x.size:
        _to_bfloat16((-(-x.size // THREADS),), (THREADS,), (x, y, np.int64(x.size)))
    return y
