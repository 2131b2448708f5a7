"""What wrappers share: the launch of ``include/gemm.cuh``, checks, sizes and strides."""

import numpy as np
from ml_dtypes import bfloat16

from kdtree_nb.kernels.gpu import Processor
from kdtree_nb.kernels.launch import Array, Kernel, array_module, c_type, pointer

ROWS, OUTPUTS, THREADS = 8, 32, 256
"""Of a block, as in ``gemm.cuh``."""
RESERVED_BYTES = 1024
"""Of shared memory, that CUDA adds to each block."""


def check_rows(kernel: str, x: Array, in_features: int, stack: tuple[int, ...] = (), name: str = "x") -> None:
    """Raise a ValueError, which names the array, unless x is [*stack, rows, in_features] with contiguous rows."""
    if x.ndim != len(stack) + 2 or (*x.shape[:-2], x.shape[-1]) != (*stack, in_features):
        expected = ", ".join(map(str, (*stack, "rows", in_features)))
        raise ValueError(f"{kernel}: {name} {list(x.shape)}, expected [{expected}]")
    if x.size and x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        raise ValueError(f"{kernel}: the rows of {name} are not contiguous (strides {x.strides})")


def place_of(kernel: str, x: Array, out_features: int, out: Array | None) -> Array:
    """Where the product of x [rows, in] or [stack, rows, in] goes: ``out``, or a new array in which heads lie together.

    Returns
    -------
    [stack, rows, out]
        Of ``out`` a view; a new one is float32 and laid out as [rows, stack, out].

    Raises
    ------
    ValueError
        If ``out`` has another shape than the result, or rows that are not contiguous.
    """
    shape = (*x.shape[:-1], out_features)
    if out is None:
        stack, rows = (1, *shape)[-3:-1]
        return array_module(x).empty((rows, stack, out_features), np.float32).swapaxes(0, 1)
    if out.shape != shape or (out.size and out_features > 1 and out.strides[-1] != out.itemsize):
        raise ValueError(
            f"{kernel}: out {list(out.shape)} with strides {out.strides}, expected {list(shape)} with contiguous rows"
        )
    return out if out.ndim == 3 else out[None]


def launch_gemm(kernel: Kernel, x: Array, weight: tuple[Array, ...], y: Array) -> None:
    """Multiply x [stack, rows, in] with a stack of weights to y [stack, rows, out]; rows of both may lie apart."""
    stack, rows, in_features = x.shape
    out_features = y.shape[2]
    if y.size:
        sizes = [np.int32(n) for n in (rows, out_features, in_features)]
        strides = [elements(x, 1), elements(x, 0), elements(y, 1), elements(y, 0)]
        grid = (-(-rows // ROWS), -(-out_features // OUTPUTS), stack)
        kernel(grid, (THREADS,), (pointer(x), *weight, pointer(y), *sizes, *strides))


def float_type(kernel: str, name: str, x: Array) -> str:
    """The name in CUDA of a float array's elements, or a TypeError if they are of no such type."""
    if x.dtype not in (np.float32, np.float16, bfloat16, np.uint16):
        raise TypeError(
            f"{kernel}: {name} is {x.dtype.name}, expected float32, bfloat16 (or its bits as uint16) or float16"
        )
    return c_type(x)


def check_bfloat16(kernel: str, **arrays: Array) -> None:
    """Raise a TypeError, which names the array, unless all are bfloat16; on a GPU its bits come as uint16."""
    for name, array in arrays.items():
        if array.dtype not in (bfloat16, np.uint16):
            raise TypeError(f"{kernel}: {name} is {array.dtype.name}, expected bfloat16 (or its bits as uint16)")


def spread(shared_bytes: int, blocks: int, processor: Processor) -> int:
    """So much shared memory for each block that no multiprocessor takes more of a launch's blocks than its share.

    Blocks go where room is first, and where a kernel before is still ending (``turn.cuh``) that is not everywhere.
    """
    if not processor.multiprocessors:
        return shared_bytes
    share = -(-blocks // processor.multiprocessors)
    one_more_fits = processor.multiprocessor_bytes // (share + 1) - RESERVED_BYTES
    return max(shared_bytes, min(one_more_fits + 1, processor.shared_bytes))


def threads_for(columns: int, most: int = 256) -> int:
    """Threads of a block that works on one row: whole warps, no more than the row has columns or ``most``."""
    return min(most, max(1, -(-columns // 32)) * 32)


def elements(x: Array, axis: int) -> np.int64:
    """How many elements lie from one index of an axis to the next."""
    return np.int64(x.strides[axis] // x.itemsize)
