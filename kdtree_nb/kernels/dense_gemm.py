"""A product with a float weight."""

from kdtree_nb.kernels.gemm import check_rows, float_type, launch_gemm, place_of
from kdtree_nb.kernels.launch import Array, Kernel, runs_cuda
from kdtree_nb.reference import linear

_dense_gemm = Kernel("dense_gemm.cu")


def dense_gemm(x: Array, weight: Array, out: Array | None = None) -> Array:
    """``x · weightᵀ``, accumulated in fp32; a row's bits do not depend on the other rows.

    Parameters
    ----------
    x : float32 [rows, in] or [stack, rows, in]
        Rows may lie apart; each is contiguous.
    weight : float32, bfloat16 (on a GPU its bits as uint16) or float16 [out, in] or [stack, out, in]
    out : float32 [rows, out] or [stack, rows, out], optional
        Where to write the result; rows and matrices may lie apart.

    Returns
    -------
    float32 [rows, out] or [stack, rows, out], or ``out``

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if weight.ndim not in (2, 3):
        raise ValueError(f"dense_gemm: weight {list(weight.shape)}, expected [out, in] or [stack, out, in]")
    check_rows("dense_gemm", x, weight.shape[-1], weight.shape[:-2])
    if not runs_cuda(x):
        product = linear.linear(x, linear.tile(weight.astype(x.dtype)))
        if out is None:
            return product
        place_of("dense_gemm", x, weight.shape[-2], out)[...] = product
        return out
    kernel = _dense_gemm.specialize(WEIGHT=float_type("dense_gemm", "weight", weight))
    y = place_of("dense_gemm", x, weight.shape[-2], out)
    launch_gemm(kernel, x if x.ndim == 3 else x[None], (weight,), y)
    return y if x.ndim == 3 else y[0]
