// moe: the products of each token's experts, after moe_pairs has sorted the router's choice and before it sums.
//
// Idea      A pair is a token and one of its experts. A block of moe_pairs, 8 pairs of one expert, reads the expert's
//           weights once for 8 rows. There are two grouped products, the first with gate, up and SwiGLU in one.
// Grid      (blocks of rows, outputs / 32); the number of blocks is known on the device only, so the grid is the
//           largest possible and the rest returns at once.
// Invariant a pair's row is computed as in gemm.cuh, whatever shares its block.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm.cuh"
#include "swiglu.cuh"
#include "turn.cuh"

extern "C" __global__ void moe_gate_up(const float* x,                         // [tokens, in], row_stride apart
                                       const VALUE* __restrict__ weights,      // [experts, 2 · width, in]: gate, then up
                                       const SCALE* __restrict__ scales,       // [experts, 2 · width, in / 32] or null
                                       const int* block_experts, const int* block_pairs,
                                       const int* num_blocks,
                                       float* __restrict__ activations,        // [pairs, width]
                                       int width, int in_features, int top_k, long long row_stride)
{
    wait_for_turn();
    if (blockIdx.x >= *num_blocks)
        return;
    const int out = blockIdx.y * OUTPUTS + threadIdx.x / SLICES;
    const int* pairs = block_pairs + size_t(blockIdx.x) * ROWS;
    const size_t first_out = size_t(block_experts[blockIdx.x]) * 2 * width;
    auto row = [&](int r) { return pairs[r] < 0 ? nullptr : x + pairs[r] / top_k * row_stride; };
    const float gate = gemm_tile(WEIGHT(weights, scales, first_out, in_features), out, out < width, row);
    const float up = gemm_tile(WEIGHT(weights, scales, first_out + width, in_features), out, out < width, row);
    let_next_begin();
    const int pair = pairs[threadIdx.x % SLICES];
    if (pair >= 0 && out < width)
        activations[size_t(pair) * width + out] = swiglu_of(gate, up);
}

extern "C" __global__ void moe_down(const float* activations,                // [pairs, width]
                                    const VALUE* __restrict__ weights,       // [experts, hidden, width]
                                    const SCALE* __restrict__ scales,        // [experts, hidden, width / 32] or null
                                    const int* block_experts, const int* block_pairs,
                                    const int* num_blocks,
                                    float* __restrict__ outputs,             // [pairs, hidden]
                                    int hidden, int width)
{
    wait_for_turn();
    if (blockIdx.x >= *num_blocks)
        return;
    const int out = blockIdx.y * OUTPUTS + threadIdx.x / SLICES;
    const int* pairs = block_pairs + size_t(blockIdx.x) * ROWS;
    const WEIGHT weight(weights, scales, size_t(block_experts[blockIdx.x]) * hidden, width);
    const float value = gemm_tile(weight, out, out < hidden, [&](int r) {
        return pairs[r] < 0 ? nullptr : activations + size_t(pairs[r]) * width;
    });
    let_next_begin();
    const int pair = pairs[threadIdx.x % SLICES];
    if (pair >= 0 && out < hidden)
        outputs[size_t(pair) * hidden + out] = value;
}
