"""Root-mean-square normalisation, alone and of a residual stream that has just grown."""

from typing import Any

import numpy as np

from kdtree_nb.kernels.gemm import check_rows, elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, c_type, empty_beside, pointer, runs_cuda
from kdtree_nb.reference import norm

_rms_norm, _add_norm = (Kernel("rms_norm.cu", name) for name in ("rms_norm", "add_norm"))


def cut_of(features: int) -> dict[str, int]:
    """Of the block that holds a row: its threads, and a thread's values, 4 or fewer while there can be more threads."""
    threads = max(threads_for(features), threads_for(-(-features // 4), 1024))
    return {"THREADS": threads, "VALUES": -(-features // threads)}


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
        cut = cut_of(features)
        sizes = (np.int32(features), np.float32(eps), elements(x, 0))
        kernel = _rms_norm.specialize(OUT=c_type(y), **cut)
        kernel((rows,), (cut["THREADS"],), (pointer(x), weight, y, *sizes))
    return y


def add_norm(
    x: Array, delta: Array, weight: Array, eps: float, dtype: Any = np.float32, out: Array | None = None
) -> tuple[Array, Array]:
    """``x + delta`` and its :func:`rms_norm`, the same bits in one kernel.

    Parameters
    ----------
    x, delta : float32 [rows, features]
        Rows of x may lie apart; each is contiguous.
    weight : float32 [features]
    dtype : float32 or bfloat16
        To which the normalised rows are rounded; the sum is not.
    out : float32 [rows, features], optional
        Where the sum goes, whose rows may lie apart as well; by default a new array.

    Returns
    -------
    float32 and dtype [rows, features]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    check_rows("add_norm", x, weight.shape[0])
    total = empty_beside(x, x.shape, np.float32) if out is None else out
    if not x.shape == delta.shape == total.shape:
        raise ValueError(
            f"add_norm: x {list(x.shape)}, delta {list(delta.shape)} and out {list(total.shape)} differ in shape"
        )
    check_rows("add_norm", total, weight.shape[0], name="out")
    if not runs_cuda(x):
        total[...] = x + delta
        return total, rms_norm(total, weight, eps, dtype)
    y = empty_beside(x, x.shape, dtype)
    if y.size:
        rows, features = x.shape
        cut = cut_of(features)
        kernel = _add_norm.specialize(OUT=c_type(y), **cut)
        sizes = (np.int32(features), np.float32(eps), elements(x, 0), elements(total, 0))
        kernel((rows,), (cut["THREADS"],), (pointer(x), delta, weight, pointer(total), y, *sizes))
    return total, y
