// swiglu: silu(gate) · up, for the two halves of one product's rows.
//
// Grid      (rows), any number of threads.
// Invariant elementwise.
#include <cuda_bf16.h>

extern "C" __global__ void swiglu(const float* __restrict__ gate_up,  // [rows, 2 · width]
                                  OUT* __restrict__ y,                // [rows, width], float or bfloat16
                                  int width)
{
    const float* gate = gate_up + size_t(blockIdx.x) * 2 * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        y[size_t(blockIdx.x) * width + i] = OUT(gate[i] * (1.0f / (1.0f + expf(-gate[i]))) * gate[width + i]);
}
