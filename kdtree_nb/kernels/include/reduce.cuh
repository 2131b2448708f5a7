// reduce.cuh: sums and maxima over a warp or a block, in one fixed order.
#pragma once

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value)
{
    for (int step = 16; step > 0; step /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

__device__ __forceinline__ float warp_max(float value)
{
    for (int step = 16; step > 0; step /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}

// Over a whole block of at most 32 full warps; every thread gets the result.
template <class T, class Warp, class Combine>
__device__ T block_reduce(T value, Warp over_warp, Combine combine)
{
    __shared__ T of_warp[32];
    value = over_warp(value);
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[0];
#pragma unroll 8  // so that sums are read at once and only added in turn
    for (int warp = 1; warp < blockDim.x / 32; ++warp)
        value = combine(value, of_warp[warp]);
    __syncthreads();
    return value;
}

__device__ __forceinline__ float block_sum(float value)
{
    return block_reduce(value, warp_sum, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ float block_max(float value)
{
    return block_reduce(value, warp_max, [](float a, float b) { return fmaxf(a, b); });
}
