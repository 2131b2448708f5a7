// rms_norm: y = x / sqrt(mean(x²) + eps) · weight, row by row; add_norm adds to x first, and keeps the sum.
//
// Idea      one block a row, twice over it: the sum of squares, then the quotient.
// Grid      (rows), whole warps; how many depends on the number of features alone.
// Invariant a row's result depends on that row alone: no sum crosses rows, and the order within it is fixed.
#include <cuda_bf16.h>

#include "reduce.cuh"

// y = x / root · weight, where this thread's part of the sum of x² is known.
__device__ __forceinline__ void divide(const float* x, float squares, const float* weight, OUT* y, int features,
                                       float eps)
{
    const float root = sqrtf(block_sum(squares) / features + eps);
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        y[i] = OUT(x[i] / root * weight[i]);
}

extern "C" __global__ void rms_norm(const float* __restrict__ x,       // [rows, features], row_stride apart
                                    const float* __restrict__ weight,  // [features]
                                    OUT* __restrict__ y,               // [rows, features], float or bfloat16
                                    int features, float eps, long long row_stride)
{
    x += blockIdx.x * row_stride;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        squares = fmaf(x[i], x[i], squares);
    divide(x, squares, weight, y + size_t(blockIdx.x) * features, features, eps);
}

// A thread reads only those sums again that it has written itself.
extern "C" __global__ void add_norm(const float* __restrict__ x,       // [rows, features]
                                    const float* __restrict__ delta,   // [rows, features]
                                    const float* __restrict__ weight,  // [features]
                                    float* __restrict__ sum,           // [rows, features]: x + delta
                                    OUT* __restrict__ y,               // [rows, features], float or bfloat16
                                    int features, float eps)
{
    const size_t first = size_t(blockIdx.x) * features;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < features; i += blockDim.x) {
        const float grown = x[first + i] + delta[first + i];
        sum[first + i] = grown;
        squares = fmaf(grown, grown, squares);
    }
    divide(sum + first, squares, weight, y + first, features, eps);
}
