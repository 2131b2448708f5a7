"""A product with an INT4 weight, which is dequantised on the fly."""

from kdtree_nb.kernels.gemm import check_rows, float_type, launch_gemm, place_of
from kdtree_nb.kernels.launch import Array, Kernel, runs_cuda
from kdtree_nb.quantization import CODES_PER_WORD, GROUP_SIZE, QuantizedWeight
from kdtree_nb.reference import linear

_w4a16_gemm = Kernel("w4a16_gemm.cu")


def w4a16_gemm(x: Array, qweight: Array, scales: Array) -> Array:
    """``x · dequantize(qweight, scales)ᵀ``, accumulated in fp32; a row's bits do not depend on the other rows.

    Parameters
    ----------
    x : float32 [rows, in]
        Rows may lie apart; each is contiguous.
    qweight : int32 [out, in / 8]
        As in :class:`~kdtree_nb.quantization.QuantizedWeight`.
    scales : float32, bfloat16 (on a GPU its bits as uint16) or float16 [out, in / 32]

    Returns
    -------
    float32 [rows, out]

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    out_features, in_features = len(qweight), qweight.shape[-1] * CODES_PER_WORD
    if qweight.ndim != 2 or in_features % GROUP_SIZE or scales.shape != (out_features, in_features // GROUP_SIZE):
        raise ValueError(
            f"w4a16_gemm: qweight {list(qweight.shape)} and scales {list(scales.shape)}, "
            f"expected [out, in/8] and [out, in/32] with in a multiple of group_size={GROUP_SIZE}"
        )
    check_rows("w4a16_gemm", x, in_features)
    if not runs_cuda(x):
        return linear.linear(x, linear.tile(QuantizedWeight(qweight, scales).dequantized.astype(x.dtype)))
    kernel = _w4a16_gemm.specialize(SCALE=float_type("w4a16_gemm", "scales", scales))
    y = place_of("w4a16_gemm", x, out_features, None)
    launch_gemm(kernel, x[None], (qweight, scales), y)
    return y[0]
