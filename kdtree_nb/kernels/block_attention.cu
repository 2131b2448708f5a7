// block_attention: a drafter's block attends to cached rows, its own among them, in both directions.
//
// Idea      The keys of a row and a head come in tiles of 32, which WARPS warps take in turn. A lane scores one key of a
//           tile; a running maximum keeps the softmax in one pass. Then each lane sums the values of its own dimensions:
//           lane, lane + 32, … What the warps have found is joined at the end.
// Grid      (rows, heads), 32 · WARPS threads.
// Invariant a row depends on its query and the keys it sees: each warp's tiles from the first to the last, then the warps.
#include <cuda_bf16.h>

#include "reduce.cuh"
#include "turn.cuh"

constexpr int MAX_SIZE = 256;         // of a head
constexpr int DIMS = MAX_SIZE / 32;   // that a lane sums
constexpr int TILE = 32;

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    block_attention(const float* queries,      // [rows, heads, size]
                    const CACHE* keys,         // [capacity, kv_heads, size]
                    const CACHE* values,       // [capacity, kv_heads, size]
                    const int* prefix_len,     // [1] cached rows before the block
                    OUT* __restrict__ output,  // [rows, heads, size]
                    int kv_heads, int size, int window, float scale)
{
    take_turn();
    __shared__ float query[MAX_SIZE];
    __shared__ float totals[WARPS][MAX_SIZE], sums[WARPS], maxima[WARPS];
    const int row = blockIdx.x, head = blockIdx.y, heads = gridDim.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int kv_head = head / (heads / kv_heads), stride = kv_heads * size;
    const int first = max(0, *prefix_len - window), end = *prefix_len + int(gridDim.x);
    const size_t at = (size_t(row) * heads + head) * size;

    for (int d = threadIdx.x; d < size; d += blockDim.x)
        query[d] = queries[at + d];
    __syncthreads();

    float highest = -INFINITY, sum = 0.0f, total[DIMS] = {};
    for (int tile = first + TILE * warp; tile < end; tile += TILE * WARPS) {
        float score = -INFINITY;
        if (tile + lane < end) {
            const CACHE* key = keys + size_t(tile + lane) * stride + kv_head * size;
            score = 0.0f;
#pragma unroll 8
            for (int d = 0; d < size; ++d)
                score = fmaf(query[d], float(key[d]), score);
            score *= scale;
        }
        const float above = fmaxf(highest, warp_max(score));
        const float share = expf(score - above), fade = expf(highest - above);
        sum = sum * fade + warp_sum(share);
        highest = above;
#pragma unroll
        for (int i = 0; i < DIMS; ++i)
            total[i] *= fade;
        const int here = min(TILE, end - tile);
#pragma unroll
        for (int i = 0; i < DIMS; ++i) {
            if (32 * i >= size)
                break;
            const CACHE* value = values + size_t(tile) * stride + kv_head * size + min(lane + 32 * i, size - 1);
#pragma unroll 8
            for (int key = 0; key < here; ++key)
                total[i] = fmaf(__shfl_sync(ALL_LANES, share, key), float(value[size_t(key) * stride]), total[i]);
        }
    }

    if (lane == 0) {
        maxima[warp] = highest;
        sums[warp] = sum;
    }
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
        totals[warp][lane + 32 * i] = total[i];
    __syncthreads();
    for (int d = threadIdx.x; d < size; d += blockDim.x) {
        float most = -INFINITY, all = 0.0f, mixed = 0.0f;
        for (int w = 0; w < WARPS; ++w)
            most = fmaxf(most, maxima[w]);
        for (int w = 0; w < WARPS; ++w) {
            const float share = expf(maxima[w] - most);
            all = fmaf(share, sums[w], all);
            mixed = fmaf(share, totals[w][d], mixed);
        }
        output[at + d] = OUT(mixed / all);
    }
}
