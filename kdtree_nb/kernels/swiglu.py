"""silu(gate) · up."""

from typing import Any

import numpy as np

from kdtree_nb.kernels.gemm import check_rows, elements, threads_for
from kdtree_nb.kernels.launch import Array, Kernel, c_type, empty_beside, pointer, runs_cuda
from kdtree_nb.reference import moe as reference

_swiglu = Kernel("swiglu.cu")


def swiglu(gate_up: Array, dtype: Any = np.float32) -> Array:
    """``silu(gate) · up`` of rows [gate | up]: float32 [rows, 2 · width] to float32 or bfloat16 [rows, width].

    Rows of ``gate_up`` may lie apart; each is contiguous.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up {list(gate_up.shape)}, expected [rows, 2 · width]")
    check_rows("swiglu", gate_up, gate_up.shape[1], name="gate_up")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if not runs_cuda(gate_up):
        return reference.swiglu(gate_up[:, :width], gate_up[:, width:]).astype(dtype, copy=False)
    y = empty_beside(gate_up, (rows, width), dtype)
    if y.size:
        threads = threads_for(width)
        grid = rows, -(-width // threads)
        _swiglu.specialize(OUT=c_type(y))(
            grid, (threads,), (pointer(gate_up), y, np.int32(width), elements(gate_up, 0))
        )
    return y
