// rms_norm: y = x / sqrt(mean(x²) + eps) · weight, row by row.
//
// Idea      one block a row, twice over it: the sum of squares, then the quotient.
// Grid      (rows), whole warps; how many depends on the number of features alone.
// Invariant a row's result depends on that row alone: no sum crosses rows, and the order within it is fixed.
#include <cuda_bf16.h>

#include "reduce.cuh"

extern "C" __global__ void rms_norm(const float* __restrict__ x,       // [rows, features], row_stride apart
                                    const float* __restrict__ weight,  // [features]
                                    OUT* __restrict__ y,               // [rows, features], float or bfloat16
                                    int features, float eps, long long row_stride)
{
    x += blockIdx.x * row_stride;
    y += size_t(blockIdx.x) * features;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        squares = fmaf(x[i], x[i], squares);
    const float root = sqrtf(block_sum(squares) / features + eps);
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        y[i] = OUT(x[i] / root * weight[i]);
}
