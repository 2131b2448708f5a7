// swiglu: silu(gate) · up, for the two halves of one product's rows.
//
// Idea      one thread an element: one row is then work for several multiprocessors.
// Grid      (rows, width / threads).
// Invariant elementwise.
#include <cuda_bf16.h>

#include "swiglu.cuh"
#include "turn.cuh"

extern "C" __global__ void swiglu(const float* gate_up,               // [rows, 2 · width], row_stride apart
                                  OUT* __restrict__ y,                // [rows, width], float or bfloat16
                                  int width, long long row_stride)
{
    take_turn();
    const size_t row = blockIdx.x;
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width)
        return;
    const float gate = gate_up[row * row_stride + i], up = gate_up[row * row_stride + width + i];
    y[row * width + i] = OUT(swiglu_of(gate, up));
}
