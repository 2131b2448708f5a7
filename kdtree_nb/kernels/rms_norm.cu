// rms_norm: y = x / sqrt(mean(x²) + eps) · weight, row by row; add_norm adds to x first, and keeps the sum.
//
// Idea      one block a row, which it holds in registers: norm.cuh.
// Grid      (rows), THREADS threads, whole warps; how many depends on the number of features alone.
// Invariant a row's result depends on that row alone: no sum crosses rows, and the order within it is fixed.
#include <cuda_bf16.h>

#include "norm.cuh"
#include "turn.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    rms_norm(const float* x,       // [rows, features], row_stride apart
             const float* weight,  // [features]
             OUT* y,               // [rows, features], float or bfloat16
             int features, float eps, long long row_stride)
{
    Values row, scale;
    let_next_begin();
    load_values(scale, weight, features);
    wait_for_turn();
    load_values(row, x + blockIdx.x * row_stride, features);
    write_normed(row, scale, y + size_t(blockIdx.x) * features, features, eps);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    add_norm(const float* x,       // [rows, features], row_stride apart
             const float* delta,   // [rows, features]
             const float* weight,  // [features]
             float* sum,           // [rows, features]: x + delta, sum_stride apart
             OUT* y,               // [rows, features], float or bfloat16
             int features, float eps, long long row_stride, long long sum_stride)
{
    const size_t first = size_t(blockIdx.x) * features;
    Values row, added, scale;
    let_next_begin();
    load_values(scale, weight, features);
    wait_for_turn();
    load_values(row, x + blockIdx.x * row_stride, features);
    load_values(added, delta + first, features);
    sum += blockIdx.x * sum_stride;
    each_value(features, [&](int v, int i) { sum[i] = row[v] += added[v]; });
    write_normed(row, scale, y + first, features, eps);
}
