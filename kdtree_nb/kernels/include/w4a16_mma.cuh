// w4a16_mma.cuh: some outputs of an INT4 weight for some rows of bfloat16 x, on tensor cores: x · weightᵀ in fp32.
//
// Idea      A weight is stored in the order in which it is used (w4a16_mma.py): its outputs in tiles of 16, the rows
//           of mma's A, its inputs in steps of 64, two groups; a lane's codes of a tile and a step are 16 bytes. The
//           rows of x are mma's 8 columns B, so that 1 to 8 rows cost the same. A nibble becomes a bfloat16 with one
//           AND-OR and an exact subtraction, a group's sum meets its scale in fp32: no weight is ever rounded.
//           A block computes TILES tiles for ROWS rows; its PARTS warps share the inputs, and their sums meet in shared
//           memory. (Were the inputs shared by blocks, sums would meet in global memory: a third slower and more.)
//           A warp keeps STAGES - 1 steps under way with cp.async and waits for nothing but memory.
// Threads   32 · PARTS.
// Shared    Ring and sums, one after the other: PARTS times the larger of STAGES · sizeof(Stage) and sizeof(Sums).
// Invariant An element is a sum over groups within a part, then over parts, first to last: its order depends on PARTS
//           and IN_FEATURES alone, not on TILES, ROWS, STAGES, the number of rows or its row's place.
#pragma once

#include <cuda_bf16.h>

#include "parts.cuh"
#include "ptx.cuh"
#include "turn.cuh"

constexpr int GROUPS = TILES * ROWS > 64 ? 1 : 2;  // unrolled: a large block has no registers for both

// A warp's operands of one step. Of 8 rows of x and one group, lane 4 · row + p holds inputs 8 · p, + 1, …, + 7.
struct Stage {
    uint4 x[ROWS / 8][2][32];
    uint4 codes[TILES][32];
    uint4 scales[TILES][4];
};

// Two codes, at bits 0 and 16 of a word, as bfloat16. 0x4300 | u is 128 + u, and u is the code + 8.
__device__ __forceinline__ unsigned two_codes(unsigned word)
{
    unsigned both = lop3<0xea>(word, 0x000f000fu, 0x43004300u), offset = 0x43084308u;
    __nv_bfloat162 codes = __hsub2(reinterpret_cast<__nv_bfloat162&>(both), reinterpret_cast<__nv_bfloat162&>(offset));
    return reinterpret_cast<unsigned&>(codes);
}

// sum += weights · xᵀ of one step.
__device__ __forceinline__ void multiply(const Stage& stage, float (&sum)[TILES][ROWS / 8][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll GROUPS
    for (int group = 0; group < 2; ++group) {
        uint4 x[ROWS / 8];
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
            x[n] = stage.x[n][group][lane];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const uint2 words = reinterpret_cast<const uint2*>(&stage.codes[t][lane])[group];
            const unsigned scales = reinterpret_cast<const unsigned*>(&stage.scales[t])[lane / 4 * 2 + group];
            const float scale = __uint_as_float(scales << 16), scale_8 = __uint_as_float(scales & 0xffff0000u);
            const unsigned a[2][4] = {
                {two_codes(words.x), two_codes(words.y), two_codes(words.x >> 4), two_codes(words.y >> 4)},
                {two_codes(words.x >> 8), two_codes(words.y >> 8), two_codes(words.x >> 12), two_codes(words.y >> 12)}};
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n) {
                const unsigned b[2][2] = {{x[n].x, x[n].y}, {x[n].z, x[n].w}};
                float of_group[4] = {};
                mma_m16n8k16_bf16(of_group, a[0], b[0], of_group);
                mma_m16n8k16_bf16(of_group, a[1], b[1], of_group);
                sum[t][n][0] = fmaf(scale, of_group[0], sum[t][n][0]);
                sum[t][n][1] = fmaf(scale, of_group[1], sum[t][n][1]);
                sum[t][n][2] = fmaf(scale_8, of_group[2], sum[t][n][2]);
                sum[t][n][3] = fmaf(scale_8, of_group[3], sum[t][n][3]);
            }
        }
    }
}

// Leave each part's sums in shared memory, for all threads to read.
//
// UNROLL      steps that are unrolled
// first_tile  the block's
// row         of x for this lane, which is row lane / 4 of the block; of ROWS > 8, the lane's next are 8 rows further
// rows_left   how many rows there are from this one on: a row that there is not is taken for zeros
// before_x    is called once, when the first of the weight is on its way
template <int UNROLL, class BeforeX>
__device__ __forceinline__ const Sums* sums_of_parts(const uint4* x,                    // [rows, IN_FEATURES / 8]
                                                     const uint4* __restrict__ codes,   // [tiles, STEPS, 32]
                                                     const uint4* __restrict__ scales,  // [tiles, STEPS, 4]
                                                     size_t first_tile, int row, int rows_left, BeforeX before_x)
{
    const int part = threadIdx.x / 32, lane = threadIdx.x % 32, row_of_lane = lane / 4, pair = lane % 4;
    const int first = part * PER_PART;
    const int steps = steps_of_part(first);

    // Where this lane reads the next step that is to be fetched.
    const size_t weight = first_tile * STEPS + first;
    const uint4* from_codes = codes + weight * 32 + lane;
    const uint4* from_scales = scales + (weight + row_of_lane * STEPS) * 4 + pair;  // of tile row_of_lane
    const uint4* from_x = x + (size_t(row) * IN_FEATURES + first * STEP) / 8 + pair;
    const auto fetch_weight = [&](Stage& stage) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
            cp_async_16(&stage.codes[t][lane], from_codes + t * STEPS * 32);
        if (lane < 4 * TILES)
            cp_async_16(&stage.scales[row_of_lane][pair], from_scales);
        from_codes += 32;
        from_scales += 4;
    };
    const auto fetch_x = [&](Stage& stage, int step) {
        const bool whole = IN_FEATURES % STEP == 0 || first + step < STEPS - 1;
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n) {
            const uint4* from = from_x + n * IN_FEATURES;  // is not read where there is no such row
            cp_async_16(&stage.x[n][0][lane], from, 8 * n < rows_left);
            cp_async_16(&stage.x[n][1][lane], from + 4, 8 * n < rows_left && whole);
        }
        from_x += STEP / 8;
    };

    Stage* const ring = reinterpret_cast<Stage*>(dynamic_shared) + part * STAGES;
    float sum[TILES][ROWS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step)
        if (step < steps)
            fetch_weight(ring[step]);
    before_x();
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps)
            fetch_x(ring[step], step);
        cp_async_commit();
    }
#pragma unroll UNROLL
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();  // the other lanes' copies as well; and all have read the slot that is now free
        const int ahead = step + STAGES - 1;
        if (ahead < steps) {
            fetch_weight(ring[ahead % STAGES]);
            fetch_x(ring[ahead % STAGES], ahead);
        }
        cp_async_commit();
        multiply(ring[step % STAGES], sum);
    }

    let_next_begin();
    return leave_sums(sum, part, row_of_lane, pair);
}
