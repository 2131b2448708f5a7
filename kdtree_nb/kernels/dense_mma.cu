// dense_mma: y = x · weightᵀ on tensor cores: bf16 x and weight, fp32 sums.
//
// Idea      16 outputs are the rows of mma's A, 8 rows of x its columns B, so that 1 to 8 rows cost the same. Which 16
//           inputs a product takes is free as long as A and B agree: a lane's 8 inputs in a row are 16 bytes of it, as
//           it is stored, and serve two products. So no weight is re-ordered, and a lane multiplies what it has fetched
//           itself. A block computes TILES tiles of 16 outputs for ROWS rows; its PARTS warps share the inputs, in
//           steps of 64, and their sums meet in shared memory. A warp keeps STAGES - 1 steps under way with cp.async,
//           the first of the weight before its turn.
// Grid      (rows / ROWS, outputs / (16 · TILES), stack), 32 · PARTS threads. Blocks of the same outputs follow each
//           other, so that only the first of them reads its weights from memory.
// Shared    Ring and sums, one after the other: PARTS times the larger of STAGES · sizeof(Stage) and sizeof(Sums).
// Invariant An element is a sum over the inputs within a part, then over parts, first to last: its order depends on
//           PARTS and IN_FEATURES alone, not on TILES, ROWS, STAGES, the number of rows or its row's place.
#include <cuda_bf16.h>

#include "parts.cuh"
#include "ptx.cuh"
#include "turn.cuh"

constexpr int VECTORS = IN_FEATURES / 8;  // of a row, 16 bytes each

// A warp's operands of one step, by halves of 32 inputs: of 8 rows, lane 4 · row + p holds inputs 8 · p, + 1, …, + 7.
struct Stage {
    uint4 weight[TILES][2][2][32];  // the second 2: outputs 0 to 7, 8 to 15
    uint4 x[ROWS / 8][2][32];
};

// sum += weight · xᵀ of one step.
__device__ __forceinline__ void multiply(const Stage& stage, float (&sum)[TILES][ROWS / 8][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 x[ROWS / 8];
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
            x[n] = stage.x[n][half][lane];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const uint4 low = stage.weight[t][half][0][lane], high = stage.weight[t][half][1][lane];
            const unsigned a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n) {
                const unsigned b[2][2] = {{x[n].x, x[n].y}, {x[n].z, x[n].w}};
                mma_m16n8k16_bf16(sum[t][n], a[0], b[0], sum[t][n]);
                mma_m16n8k16_bf16(sum[t][n], a[1], b[1], sum[t][n]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    dense_mma(const uint4* x,                    // [stack, rows, in / 8], 8 bfloat16 each, strides below
              const uint4* __restrict__ weight,  // [stack, out, in / 8], 8 bfloat16 each
              OUT* __restrict__ y,               // [stack, rows, out], likewise
              int rows, int out_features, long long x_row, long long x_stack, long long y_row, long long y_stack)
{
    const int part = threadIdx.x / 32, lane = threadIdx.x % 32, row_of_lane = lane / 4, pair = lane % 4;
    const int first_row = blockIdx.x * ROWS, first_out = blockIdx.y * OUTPUTS;
    const int first = part * PER_PART;
    const int steps = steps_of_part(first);

    // Where this lane reads the next step that is to be fetched; it is not read where there is no such output or row.
    const int row = first_row + row_of_lane, out = first_out + row_of_lane;
    const uint4* from_x = x + blockIdx.z * x_stack + row * x_row + first * (STEP / 8) + pair;
    const uint4* from_weight = weight + (size_t(blockIdx.z) * out_features + out) * VECTORS + first * (STEP / 8) + pair;
    const auto exists = [&](int step, int half) {
        return IN_FEATURES % STEP == 0 || (first + step) * (STEP / 8) + 4 * half + pair < VECTORS;
    };
    const auto fetch_weight = [&](Stage& stage, int step) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int tile = 0; tile < 2 * TILES; ++tile)
                cp_async_16(&stage.weight[tile / 2][half][tile % 2][lane], from_weight + 8 * tile * VECTORS + 4 * half,
                            exists(step, half) && out + 8 * tile < out_features);
        from_weight += STEP / 8;
    };
    const auto fetch_x = [&](Stage& stage, int step) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < ROWS / 8; ++n)
                cp_async_16(&stage.x[n][half][lane], from_x + 8 * n * x_row + 4 * half,
                            exists(step, half) && row + 8 * n < rows);
        from_x += STEP / 8;
    };

    Stage* const ring = reinterpret_cast<Stage*>(dynamic_shared) + part * STAGES;
    float sum[TILES][ROWS / 8][4] = {};
    let_next_begin();
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step)
        if (step < steps)
            fetch_weight(ring[step], step);
    wait_for_turn();
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps)
            fetch_x(ring[step], step);
        cp_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        const int ahead = step + STAGES - 1;
        if (ahead < steps) {
            fetch_weight(ring[ahead % STAGES], ahead);
            fetch_x(ring[ahead % STAGES], ahead);
        }
        cp_async_commit();
        multiply(ring[step % STAGES], sum);
    }

    const Sums* sums = leave_sums(sum, part, row_of_lane, pair);
    const int rows_here = min(ROWS, rows - first_row);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows_here * OUTPUTS; i += THREADS) {
        const int r = i / OUTPUTS, o = i % OUTPUTS;
        const float total = total_of(sums, r, o);
        if (first_out + o < out_features)
            y[blockIdx.z * y_stack + (first_row + r) * y_row + first_out + o] = OUT(total);
    }
}
