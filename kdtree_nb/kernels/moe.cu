// moe: the weighted sum of each token's experts, from the router's choice to [tokens, hidden], all on the device.
//
// Idea      A pair is a token and one of its experts. moe_sort puts the pairs of an expert into blocks of 8 rows;
//           a block then reads its expert's weights once for 8 rows. Two grouped products follow, the first with
//           gate, up and SwiGLU in one, and the sum over a token's experts in the order of its choice.
// Grid      moe_sort: 1 block. Products: (blocks of rows, outputs / 32); the number of blocks is known on the
//           device only, so the grid is the largest possible and the rest returns at once. moe_sum: (tokens).
// Invariant a pair's row is computed as in gemm.cuh, whatever shares its block; the sum's order is the router's.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm.cuh"

constexpr int MAX_EXPERTS = 1024;

extern "C" __global__ void moe_sort(const int* __restrict__ expert_ids,  // [pairs]
                                    int* __restrict__ block_experts,     // [max_blocks]
                                    int* __restrict__ block_pairs,       // [max_blocks, ROWS], −1: no pair
                                    int* __restrict__ num_blocks,        // [1]
                                    int pairs, int experts)
{
    __shared__ int first_block[MAX_EXPERTS + 1];
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        int count = 0;
        for (int pair = 0; pair < pairs; ++pair)
            count += expert_ids[pair] == expert;
        first_block[expert + 1] = (count + ROWS - 1) / ROWS;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        first_block[0] = 0;
        for (int expert = 0; expert < experts; ++expert)
            first_block[expert + 1] += first_block[expert];
        *num_blocks = first_block[experts];
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        size_t at = size_t(first_block[expert]) * ROWS;
        const size_t end = size_t(first_block[expert + 1]) * ROWS;
        for (int pair = 0; pair < pairs && at < end; ++pair)
            if (expert_ids[pair] == expert)
                block_pairs[at++] = pair;
        while (at < end)
            block_pairs[at++] = -1;
        for (int block = first_block[expert]; block < first_block[expert + 1]; ++block)
            block_experts[block] = expert;
    }
}

extern "C" __global__ void moe_gate_up(const float* __restrict__ x,            // [tokens, in], row_stride apart
                                       const VALUE* __restrict__ weights,      // [experts, 2 · width, in]: gate, then up
                                       const SCALE* __restrict__ scales,       // [experts, 2 · width, in / 32] or null
                                       const int* __restrict__ block_experts, const int* __restrict__ block_pairs,
                                       const int* __restrict__ num_blocks,
                                       float* __restrict__ activations,        // [pairs, width]
                                       int width, int in_features, int top_k, long long row_stride)
{
    if (blockIdx.x >= *num_blocks)
        return;
    const int out = blockIdx.y * OUTPUTS + threadIdx.x / SLICES;
    const int* pairs = block_pairs + size_t(blockIdx.x) * ROWS;
    const size_t first_out = size_t(block_experts[blockIdx.x]) * 2 * width;
    auto row = [&](int r) { return pairs[r] < 0 ? nullptr : x + pairs[r] / top_k * row_stride; };
    const float gate = gemm_tile(WEIGHT(weights, scales, first_out, in_features), out, out < width, row);
    const float up = gemm_tile(WEIGHT(weights, scales, first_out + width, in_features), out, out < width, row);
    const int pair = pairs[threadIdx.x % SLICES];
    if (pair >= 0 && out < width)
        activations[size_t(pair) * width + out] = gate * (1.0f / (1.0f + expf(-gate))) * up;
}

extern "C" __global__ void moe_down(const float* __restrict__ activations,   // [pairs, width]
                                    const VALUE* __restrict__ weights,       // [experts, hidden, width]
                                    const SCALE* __restrict__ scales,        // [experts, hidden, width / 32] or null
                                    const int* __restrict__ block_experts, const int* __restrict__ block_pairs,
                                    const int* __restrict__ num_blocks,
                                    float* __restrict__ outputs,             // [pairs, hidden]
                                    int hidden, int width)
{
    if (blockIdx.x >= *num_blocks)
        return;
    const int out = blockIdx.y * OUTPUTS + threadIdx.x / SLICES;
    const int* pairs = block_pairs + size_t(blockIdx.x) * ROWS;
    const WEIGHT weight(weights, scales, size_t(block_experts[blockIdx.x]) * hidden, width);
    const float value = gemm_tile(weight, out, out < hidden, [&](int r) {
        return pairs[r] < 0 ? nullptr : activations + size_t(pairs[r]) * width;
    });
    const int pair = pairs[threadIdx.x % SLICES];
    if (pair >= 0 && out < hidden)
        outputs[size_t(pair) * hidden + out] = value;
}

extern "C" __global__ void moe_sum(const float* __restrict__ outputs,         // [tokens, top_k, hidden]
                                   const float* __restrict__ router_weights,  // [tokens, top_k]
                                   float* __restrict__ y,                     // [tokens, hidden]
                                   int hidden, int top_k)
{
    const size_t token = blockIdx.x;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        float sum = 0.0f;
        for (int k = 0; k < top_k; ++k)
            sum += outputs[(token * top_k + k) * hidden + i] * router_weights[token * top_k + k];
        y[token * hidden + i] = sum;
    }
}
