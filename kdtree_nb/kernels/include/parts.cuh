// parts.cuh: a product whose inputs PARTS warps of a block share, each in steps of 64: how they are cut, and how the
// warps' sums meet in shared memory. IN_FEATURES, PARTS, TILES and ROWS are the kernel's.
//
// Invariant An element is the sum over its parts, first to last: what a part sums is fixed by PARTS and IN_FEATURES.
#pragma once

constexpr int STEP = 64;  // inputs
constexpr int STEPS = (IN_FEATURES + STEP - 1) / STEP;
constexpr int PER_PART = (STEPS + PARTS - 1) / PARTS;
constexpr int OUTPUTS = 16 * TILES;
constexpr int THREADS = 32 * PARTS;

extern __shared__ __align__(16) unsigned char dynamic_shared[];

using Sums = float[ROWS][OUTPUTS + 4];  // of a warp; the 4 bring a fragment's lanes to different banks

// How many steps a part has from the first on; the last may have none.
__device__ __forceinline__ int steps_of_part(int first)
{
    return STEPS % PARTS == 0 ? PER_PART : max(0, min(PER_PART, STEPS - first));
}

// Leave the fragments of mma.m16n8k16, where the warps' rings have been, for all threads to read. The warp is the
// part's; its lane is 4 · row_of_lane + pair.
__device__ __forceinline__ const Sums* leave_sums(const float (&sum)[TILES][ROWS / 8][4], int part, int row_of_lane,
                                                  int pair)
{
    Sums* const sums = reinterpret_cast<Sums*>(dynamic_shared);
    __syncthreads();  // all warps have left the ring
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[part][8 * n + 2 * pair + i % 2][16 * t + row_of_lane + i / 2 * 8] = sum[t][n][i];
    __syncthreads();
    return sums;
}

// An element of the product: a row of the block, an output of its tiles.
__device__ __forceinline__ float total_of(const Sums* sums, int row, int out)
{
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
        total += sums[p][row][out];
    return total;
}
