// block_attention: a drafter's block attends to cached rows, its own among them, in both directions.
//
// Idea      One warp for a row and a head. The keys come in tiles of 32, a lane scores one of them; a running maximum
//           keeps the softmax in one pass. Then each lane sums the values of its own dimensions: lane, lane + 32, …
// Grid      (rows, heads), 32 threads.
// Invariant a row depends on its query and the keys it sees, which are taken from the first to the last.
#include <cuda_bf16.h>

#include "reduce.cuh"
#include "turn.cuh"

constexpr int MAX_SIZE = 256;         // of a head
constexpr int DIMS = MAX_SIZE / 32;   // that a lane sums

extern "C" __global__ void block_attention(const float* queries,                 // [rows, heads, size]
                                           const CACHE* keys,                    // [capacity, kv_heads, size]
                                           const CACHE* values,                  // [capacity, kv_heads, size]
                                           const int* prefix_len,                // [1] cached rows before the block
                                           OUT* __restrict__ output,             // [rows, heads, size]
                                           int kv_heads, int size, int window, float scale)
{
    take_turn();
    __shared__ float query[MAX_SIZE];
    const int row = blockIdx.x, head = blockIdx.y, heads = gridDim.y, lane = threadIdx.x;
    const int kv_head = head / (heads / kv_heads), stride = kv_heads * size;
    const int first = max(0, *prefix_len - window), end = *prefix_len + int(gridDim.x);
    const size_t at = (size_t(row) * heads + head) * size;

    for (int d = lane; d < size; d += 32)
        query[d] = queries[at + d];
    __syncwarp();

    float highest = -INFINITY, sum = 0.0f, total[DIMS] = {};
    for (int tile = first; tile < end; tile += 32) {
        float score = -INFINITY;
        if (tile + lane < end) {
            const CACHE* key = keys + size_t(tile + lane) * stride + kv_head * size;
            score = 0.0f;
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
        for (int key = 0; key < min(32, end - tile); ++key) {
            const float weight = __shfl_sync(ALL_LANES, share, key);
            const CACHE* value = values + size_t(tile + key) * stride + kv_head * size;
#pragma unroll
            for (int i = 0; i < DIMS; ++i)
                if (lane + 32 * i < size)
                    total[i] = fmaf(weight, float(value[lane + 32 * i]), total[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < DIMS; ++i)
        if (lane + 32 * i < size)
            output[at + lane + 32 * i] = OUT(total[i] / sum);
}
