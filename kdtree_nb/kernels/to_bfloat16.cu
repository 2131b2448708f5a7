// to_bfloat16: each number to the nearest bfloat16, ties to even.
//
// Grid      (elements / 256), 256 threads.
// Invariant elementwise.
#include <cuda_bf16.h>

#include "turn.cuh"

extern "C" __global__ void to_bfloat16(const float* x, __nv_bfloat16* __restrict__ y, long long elements)
{
    take_turn();
    const long long i = blockIdx.x * (long long)(blockDim.x) + threadIdx.x;
    if (i < elements)
        y[i] = __nv_bfloat16(x[i]);
}
