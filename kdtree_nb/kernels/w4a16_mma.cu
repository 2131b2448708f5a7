// w4a16_mma: y = x · dequantize(weight)ᵀ on tensor cores: bf16 x, INT4 codes, bf16 scales, fp32 sums.
//
// Idea      A block computes TILES tiles of 16 outputs for ROWS rows, as w4a16_mma.cuh says.
// Grid      (outputs / (16 · TILES), rows / ROWS), 32 · PARTS threads.
// Invariant An element's order of summation depends on PARTS and IN_FEATURES alone.
#include "turn.cuh"
#include "w4a16_mma.cuh"

constexpr int UNROLL = TILES * ROWS > 32 || PER_PART > 8 ? 1 : PER_PART;  // where the code stays short

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a16_mma(const uint4* x,                    // [rows, in / 8], 8 bfloat16 each
              const uint4* __restrict__ codes,   // [tiles, steps, 32], by lane
              const uint4* __restrict__ scales,  // [tiles, steps, 4], 8 bfloat16 each
              float* __restrict__ y,             // [rows, out]
              int rows, int out_features)
{
    const int first_row = blockIdx.y * ROWS, first_out = blockIdx.x * OUTPUTS, row = first_row + threadIdx.x % 32 / 4;
    let_next_begin();
    const Sums* sums =
        sums_of_parts<UNROLL>(x, codes, scales, size_t(blockIdx.x) * TILES, row, rows - row, wait_for_turn);
    const int rows_here = min(ROWS, rows - first_row);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows_here * OUTPUTS; i += THREADS) {
        const int row = i / OUTPUTS, out = i % OUTPUTS;
        if (first_out + out < out_features)
            y[size_t(first_row + row) * out_features + first_out + out] = total_of(sums, row, out);
    }
}
