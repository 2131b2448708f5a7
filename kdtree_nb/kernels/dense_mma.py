"""A product of bfloat16 activations with a bfloat16 weight on tensor cores; the weight is read as it is stored."""

from math import inf, prod

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.kernels import w4a16_mma
from kdtree_nb.kernels.gemm import check_bfloat16, check_rows, elements, place_of, spread
from kdtree_nb.kernels.launch import Array, Kernel, c_type, pointer, processor_of, runs_cuda
from kdtree_nb.kernels.w4a16_mma import STEP, Plan
from kdtree_nb.reference import linear

VECTOR = 8
"""Inputs that are loaded at once: 16 bytes."""

_dense_mma = Kernel("dense_mma.cu")


class Geometry(w4a16_mma.Geometry):
    """How a launch cuts its work, as of :mod:`~kdtree_nb.kernels.w4a16_mma`, but that a weight is bfloat16."""

    @property
    def stage_bytes(self) -> int:
        """A warp's operands of one step."""
        return 2 * STEP * (16 * self.tiles + self.rows)


FEW = Plan(8, {4: (1, 8, 4), 8: (1, 8, 6), 24: (1, 24, 3), 40: (1, 40, 2), 64: (1, 64, 2), inf: (1, 72, 2)})
SOME = Plan(8, {8: (2, 8, 4), 24: (2, 24, 2), 40: (2, 40, 2), 64: (2, 64, 2), inf: (2, 72, 2)})
MIDDLE = Plan(4, {4: (1, 8, 6), **SOME.geometries})
MANY = Plan(4, {8: (2, 8, 6), 24: (4, 24, 2), 40: (4, 40, 2), 64: (4, 64, 3), inf: (4, 72, 2)})
"""By rows: a drafted tree of 16, 32 or 64 nodes has a root besides."""


def plan_of(tiles: int) -> Plan:
    """For so many tiles of 16 outputs: fewer warps share the inputs where there are more blocks."""
    for most, plan in ((160, FEW), (320, SOME), (512, MIDDLE)):
        if tiles <= most:
            return plan
    return MANY


def geometry_of(rows: int, weight: tuple[int, ...]) -> Geometry:
    """For so many rows of x and a weight [..., out, in]; the weight alone decides on the parts.

    For one row, all blocks of a plan but ``MANY`` are on their multiprocessors at once; a part has a step at least.
    """
    *stack, out_features, in_features = weight
    plan = plan_of(int(np.prod(stack, dtype=int)) * -(-out_features // 16))
    steps = -(-in_features // STEP)
    geometry = plan.geometry(rows)
    return Geometry(min(plan.parts, 1 << (steps.bit_length() - 1)), *geometry[1:])


def dense_mma(x: Array, weight: Array, out: Array | None = None) -> Array:
    """``x · weightᵀ`` with products of exact operands, summed in fp32; a row's bits do not depend on the other rows.

    Parameters
    ----------
    x : bfloat16 (on a GPU its bits as uint16) [rows, in] or [stack, rows, in]
        Rows and matrices may lie apart by multiples of 8 elements; each row is contiguous.
    weight : bfloat16 (on a GPU its bits as uint16) [out, in] or [stack, out, in]
        ``in`` is a multiple of 8.
    out : float32 or bfloat16 [rows, out] or [stack, rows, out], optional
        Where to write the result, rounded to its dtype; rows and matrices may lie apart.

    Returns
    -------
    float32 [rows, out] or [stack, rows, out], or ``out``

    Raises
    ------
    ValueError, TypeError
        If shapes or dtypes do not fit; the message names them.
    """
    if weight.ndim not in (2, 3) or not weight.shape[-1] or weight.shape[-1] % VECTOR:
        raise ValueError(
            f"dense_mma: weight {list(weight.shape)}, expected [out, in] or [stack, out, in] "
            f"with in a positive multiple of {VECTOR}"
        )
    check_rows("dense_mma", x, weight.shape[-1], weight.shape[:-2])
    check_bfloat16("dense_mma", x=x, weight=weight)
    if not runs_cuda(x):
        operands = [array.view(bfloat16).astype(np.float32) for array in (x, weight)]
        product = linear.linear(operands[0], linear.tile(operands[1]))
        if out is None:
            return product
        place_of("dense_mma", x, weight.shape[-2], out)[...] = product
        return out
    if x.size and any(stride % (VECTOR * x.itemsize) for stride in x.strides[:-1]):
        raise ValueError(f"dense_mma: the rows of x are not multiples of {VECTOR} elements apart (strides {x.strides})")
    geometry = geometry_of(x.shape[-2], weight.shape).within(processor_of(x).shared_bytes)
    return launch(x, weight, geometry, out)


def launch(x: Array, weight: Array, geometry: Geometry, out: Array | None = None) -> Array:
    """What :func:`dense_mma` does, in a given geometry."""
    stacked, (out_features, in_features) = x if x.ndim == 3 else x[None], weight.shape[-2:]
    stack, rows, _ = stacked.shape
    y = place_of("dense_mma", x, out_features, out)
    if y.size:
        kernel = _dense_mma.specialize(IN_FEATURES=in_features, OUT=c_type(y), **geometry.defines)
        grid = (-(-rows // geometry.rows), -(-out_features // (16 * geometry.tiles)), stack)
        vectors = stacked.view(np.int32)
        strides = [*(elements(stacked, axis) // VECTOR for axis in (1, 0)), elements(y, 1), elements(y, 0)]
        args = (pointer(vectors), weight.view(np.int32), pointer(y), np.int32(rows), np.int32(out_features), *strides)
        shared_bytes = spread(geometry.shared_bytes, prod(grid), processor_of(x))
        kernel(grid, (32 * geometry.parts,), args, shared_bytes)
    return y if x.ndim == 3 else y[0]
