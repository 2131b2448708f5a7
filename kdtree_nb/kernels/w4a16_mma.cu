// w4a16_mma: y = x · dequantize(weight)ᵀ on tensor cores: bf16 x, INT4 codes, bf16 scales, fp32 sums.
//
// Idea      A weight is stored in the order in which it is used (w4a16_mma.py): its outputs in tiles of 16, the rows
//           of mma's A, its inputs in steps of 64, two groups; a lane's codes of a tile and a step are 16 bytes. The
//           rows of x are mma's 8 columns B, so that 1 to 8 rows cost the same. A nibble becomes a bfloat16 with one
//           AND-OR and an exact subtraction, a group's sum meets its scale in fp32: no weight is ever rounded.
//           A warp keeps STAGES steps under way with cp.async, each lane for itself: nothing waits but for memory.
// Split     The inputs are cut into PARTS parts, a warp each. A block holds PARTS / SLICES of them for TILES tiles. It
//           adds FAN parts at a time. With several slices these sums go to memory, and the slice that arrives last,
//           as a ticket says, adds them; it leaves the ticket as it was found.
// Grid      (outputs / (16 · TILES), SLICES, rows / ROWS), 32 · PARTS / SLICES threads.
// Shared    Ring and sums, one after the other: the larger of WARPS · STAGES · sizeof(Stage) and sizeof(Sums).
// Invariant An element is a sum over groups within a part, over FAN parts, over SUMS of these, always first to last:
//           its order depends on in_features alone, not on TILES, ROWS, SLICES, the number of rows or its row's place.
#include <cuda_bf16.h>

#include "ptx.cuh"

constexpr int STEP = 64;    // inputs
constexpr int PARTS = 16;
constexpr int FAN = 4;
constexpr int SUMS = PARTS / FAN;
constexpr int WARPS = PARTS / SLICES;
constexpr int THREADS = 32 * WARPS;
constexpr int OUTPUTS = 16 * TILES;

// A warp's operands of one step: of x, for 8 rows and 32 inputs each, lane (row, pair) holds inputs 8 · pair, + 1, … + 7.
struct Stage {
    uint4 x[ROWS / 8][2][32];
    uint4 codes[TILES][32];
    uint2 scales[TILES][8];
};

// By warp; 4 more outputs than there are, so that the lanes of a fragment meet different banks.
using Sums = float[WARPS][ROWS][OUTPUTS + 4];

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
#pragma unroll
    for (int group = 0; group < 2; ++group) {
        uint4 x[ROWS / 8];
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
            x[n] = stage.x[n][group][lane];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const uint2 words = reinterpret_cast<const uint2*>(&stage.codes[t][lane])[group];
            const unsigned scales = reinterpret_cast<const unsigned*>(&stage.scales[t][lane / 4])[group];
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a16_mma(const uint4* __restrict__ x,       // [rows, in / 8], 8 bfloat16 each
              const uint4* __restrict__ codes,   // [tiles, steps, 32]: by lane
              const uint4* __restrict__ scales,  // [tiles, steps, 4]: 8 bfloat16 each, of rows 2 · i and 2 · i + 1 …
              float* __restrict__ sums,          // [SUMS, rows, out] where SLICES > 1
              int* __restrict__ tickets,         // [rows / ROWS, outputs / OUTPUTS] zeros, likewise
              float* __restrict__ y,             // [rows, out]
              int rows, int out_features, int in_features)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_of_lane = lane / 4, pair = lane % 4;
    const int first_row = blockIdx.z * ROWS, first_out = blockIdx.x * OUTPUTS;
    const int steps = (in_features + STEP - 1) / STEP, part = blockIdx.y * WARPS + warp;
    const int first = part * steps / PARTS, last = (part + 1) * steps / PARTS;
    Stage* const ring = reinterpret_cast<Stage*>(dynamic_shared) + warp * STAGES;

    const auto fetch = [&](Stage& stage, int step) {
        const size_t at = size_t(blockIdx.x) * TILES * steps + step;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
            cp_async_16(&stage.codes[t][lane], codes + (at + size_t(t) * steps) * 32 + lane);
        if (lane < 4 * TILES)
            cp_async_16(&stage.scales[row_of_lane][2 * pair], scales + (at + size_t(row_of_lane) * steps) * 4 + pair);
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
            for (int group = 0; group < 2; ++group) {
                const int row = first_row + 8 * n + row_of_lane, k = step * STEP + group * 32 + 8 * pair;
                const bool exists = row < rows && k < in_features;
                cp_async_16(&stage.x[n][group][lane], exists ? x + (size_t(row) * in_features + k) / 8 : x, exists);
            }
    };

    float sum[TILES][ROWS / 8][4] = {};
    for (int i = 0; i < STAGES; ++i) {
        if (first + i < last)
            fetch(ring[i], first + i);
        cp_async_commit();
    }
    for (int step = first, slot = 0; step < last; ++step, slot = slot + 1 < STAGES ? slot + 1 : 0) {
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // the other lanes' copies as well
        multiply(ring[slot], sum);
        __syncwarp();  // all lanes have read the slot
        if (step + STAGES < last)
            fetch(ring[slot], step + STAGES);
        cp_async_commit();
    }

    Sums& of_warps = *reinterpret_cast<Sums*>(dynamic_shared);
    __syncthreads();  // all warps have left the ring
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                of_warps[warp][8 * n + 2 * pair + i % 2][16 * t + row_of_lane + i / 2 * 8] = sum[t][n][i];
    __syncthreads();
    const int rows_here = min(ROWS, rows - first_row), outs_here = min(OUTPUTS, out_features - first_out);
    const size_t product = size_t(rows) * out_features;
    for (int i = threadIdx.x; i < rows_here * OUTPUTS; i += THREADS) {
        const int row = i / OUTPUTS, out = i % OUTPUTS;
        if (out >= outs_here)
            continue;
        const size_t at = size_t(first_row + row) * out_features + first_out + out;
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < WARPS / FAN; ++s) {
            float value = of_warps[s * FAN][row][out];
#pragma unroll
            for (int w = 1; w < FAN; ++w)
                value += of_warps[s * FAN + w][row][out];
            if (SLICES > 1)
                sums[(blockIdx.y * (WARPS / FAN) + s) * product + at] = value;
            total += value;
        }
        if (SLICES == 1)
            y[at] = total;
    }
    if (SLICES == 1)
        return;

    __shared__ bool is_last;
    int* const ticket = tickets + blockIdx.z * gridDim.x + blockIdx.x;
    __threadfence();  // this thread's sums are written before the block takes its ticket
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(ticket, 1) == SLICES - 1;
        if (is_last)
            *ticket = 0;
    }
    __syncthreads();
    if (!is_last)
        return;
    __threadfence();  // the other blocks' sums are read after their tickets
    for (int i = threadIdx.x; i < rows_here * OUTPUTS; i += THREADS) {
        const int row = i / OUTPUTS, out = i % OUTPUTS;
        if (out >= outs_here)
            continue;
        const size_t at = size_t(first_row + row) * out_features + first_out + out;
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < SUMS; ++s)
            total += __ldcg(sums + s * product + at);
        y[at] = total;
    }
}
