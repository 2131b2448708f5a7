"""Root-mean-square normalisation."""

import numpy as np

from kdtree_nb.kernels.gemm import check_rows, elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, array_module, pointer, runs_cuda
from kdtree_nb.reference import norm

_rms_norm = Kernel("rms_norm.cu")


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``x / sqrt(mean(x²) + eps) · weight`` of each row: float32 [rows, features], weight [features].

    Rows of x may lie apart; each is contiguous.
    """
    check_rows("rms_norm", x, weight.shape[0])
    if not runs_cuda(x):
        return norm.rms_norm(x, weight, eps)
    y = array_module(x).empty(x.shape, np.float32)
    if y.size:
        rows, features = x.shape
        sizes = (np.int32(features), np.float32(eps), elements(x, 0))
        _rms_norm((rows,), (threads_for(features),), (pointer(x), weight, y, *sizes))
    return y
