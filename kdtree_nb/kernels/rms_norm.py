"""Root-mean-square normalisation."""

from typing import Any

import numpy as np

from kdtree_nb.kernels.gemm import check_rows, elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, c_type, empty_beside, pointer, runs_cuda
from kdtree_nb.reference import norm

_rms_norm = Kernel("rms_norm.cu")


def rms_norm(x: Array, weight: Array, eps: float, dtype: Any = np.float32) -> Array:
    """``x / sqrt(mean(x²) + eps) · weight`` of each row: float32 [rows, features], weight [features].

    Rows of x may lie apart; each is contiguous. The result is rounded to ``dtype``, float32 or bfloat16.
    """
    check_rows("rms_norm", x, weight.shape[0])
    if not runs_cuda(x):
        return norm.rms_norm(x, weight, eps).astype(dtype, copy=False)
    y = empty_beside(x, x.shape, dtype)
    if y.size:
        rows, features = x.shape
        sizes = (np.int32(features), np.float32(eps), elements(x, 0))
        kernel = _rms_norm.specialize(OUT=c_type(y))
        kernel((rows,), (threads_for(features),), (pointer(x), weight, y, *sizes))
    return y
