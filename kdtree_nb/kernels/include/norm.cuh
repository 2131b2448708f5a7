// norm.cuh: a row divided by its root mean square, by a block that holds it in registers.
//
// Idea      One of THREADS threads has VALUES elements of the row: threadIdx.x, + THREADS, …. It asks for all of them,
//           and for their weights, before it uses one: one row is one block's, so what counts is the wait, and it
//           waits once.
//           (Pointers are not __restrict__, or the compiler would put loads off until after the barrier.)
// Invariant The sum of squares is each thread's in turn, then the warps', first to last: the order depends on the
//           number of threads alone.
#pragma once

#include "reduce.cuh"

using Values = float[VALUES];

// Visit the row's elements that are this thread's.
template <class Visit> __device__ __forceinline__ void each_value(int features, Visit visit)
{
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
        const int i = v * THREADS + threadIdx.x;
        if (i < features)
            visit(v, i);
    }
}

__device__ __forceinline__ void load_values(Values& values, const float* row, int features)
{
    each_value(features, [&](int v, int i) { values[v] = row[i]; });
    __syncwarp();  // beyond which the compiler moves no load
}

// y = x / sqrt(mean(x²) + eps) · weight
template <class T>
__device__ __forceinline__ void write_normed(const Values& x, const Values& weight, T* y, int features, float eps)
{
    float squares = 0.0f;
    each_value(features, [&](int v, int) { squares = fmaf(x[v], x[v], squares); });
    const float root = sqrtf(block_sum(squares) / features + eps);
    each_value(features, [&](int v, int i) { y[i] = T(x[v] / root * weight[v]); });
}
