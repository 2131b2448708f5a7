// moe_mma: the products of each token's INT4 experts on tensor cores: bf16 x and activations, fp32 sums.
//
// Idea      moe_pairs has put the pairs of a token and an expert into blocks of at most 8 with one expert. A block of
//           threads computes TILES tiles of its expert's weight for 8 pairs, as w4a16_mma.cuh says: it reads a weight
//           once. A tile holds 8 outputs of the weight's first half and the same 8 of its second (moe_mma.py): of gate
//           and up, what SwiGLU needs for 8 activations.
// Grid      One dimension, 32 · PARTS threads: the tiles of one block of pairs are neighbours, as they are in memory. How
//           many blocks of pairs there are is known on the device only, so the grid is for as many as there could be,
//           and those that are too many return at once.
// Invariant An element's order of summation depends on PARTS and IN_FEATURES alone, whatever shares its block.
constexpr int ROWS = 8;  // pairs of a block: each lane fetches from one of them

#include "swiglu.cuh"
#include "turn.cuh"
#include "w4a16_mma.cuh"

constexpr int HALF = OUTPUTS / 2;  // outputs of each half of the weight that a block computes

// write(pair, i, first, second) gets output i of the weight's first half and that of its second, for each pair.
template <class RowOf, class Write>
__device__ __forceinline__ void grouped_product(const uint4* x, const uint4* __restrict__ codes,
                                                const uint4* __restrict__ scales,
                                                const int* block_experts, const int* block_pairs,
                                                const int* num_blocks, int tiles, int columns, RowOf row_of,
                                                Write write)
{
    const int block = blockIdx.x / columns, column = blockIdx.x % columns;
    const int* pairs = block_pairs + size_t(block) * ROWS;
    const int blocks = *num_blocks, expert = block_experts[block], pair = pairs[threadIdx.x % 32 / 4];
    __syncwarp();  // beyond which the compiler moves none of these loads: one wait for all three
    if (block >= blocks)
        return;
    const size_t first_tile = size_t(expert) * tiles + column * TILES;
    const Sums* sums = sums_of_parts<1>(x, codes, scales, first_tile, row_of(max(pair, 0)), pair >= 0, [] {});
    let_next_begin();
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * HALF; i += THREADS) {
        const int row = i / HALF, of_half = i % HALF, out = of_half / 8 * 16 + of_half % 8;
        if (pairs[row] >= 0)
            write(pairs[row], column * HALF + of_half, total_of(sums, row, out), total_of(sums, row, out + 8));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_gate_up_mma(const uint4* x,                    // [tokens, in / 8], 8 bfloat16 each
                    const uint4* __restrict__ codes,   // [experts, tiles, steps, 32], by lane
                    const uint4* __restrict__ scales,  // [experts, tiles, steps, 4], 8 bfloat16 each
                    const int* block_experts, const int* block_pairs, const int* num_blocks,
                    __nv_bfloat16* __restrict__ activations,  // [pairs, width]
                    int tiles, int columns, int width, int top_k)
{
    wait_for_turn();
    const auto token = [&](int pair) { return pair / top_k; };
    grouped_product(x, codes, scales, block_experts, block_pairs, num_blocks, tiles, columns, token,
                    [&](int pair, int i, float gate, float up) {
                        if (i < width)
                            activations[size_t(pair) * width + i] =
                                __float2bfloat16_rn(swiglu_of(gate, up));
                    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_down_mma(const uint4* activations,               // [pairs, in / 8], 8 bfloat16 each
                 const uint4* __restrict__ codes,        // [experts, tiles, steps, 32], by lane
                 const uint4* __restrict__ scales,       // [experts, tiles, steps, 4], 8 bfloat16 each
                 const int* block_experts, const int* block_pairs, const int* num_blocks,
                 float* __restrict__ outputs,            // [pairs, hidden]
                 int tiles, int columns, int hidden)
{
    wait_for_turn();
    const int half = (hidden + 1) / 2;
    const auto row = [](int pair) { return pair; };
    grouped_product(activations, codes, scales, block_experts, block_pairs, num_blocks, tiles, columns, row,
                    [&](int pair, int i, float first, float second) {
                        float* y = outputs + size_t(pair) * hidden;
                        if (i < half)
                            y[i] = first;
                        if (half + i < hidden)
                            y[half + i] = second;
                    });
}
