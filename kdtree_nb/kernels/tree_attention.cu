// tree_attention: absorbed MLA attention of a draft tree's nodes to the prefix, to their ancestors and themselves.
//
// Idea      A row's keys lie in the order of their positions: the prefix, then the node's own path. They are cut
//           into splits of 512 positions, at absolute positions, and a split into tiles of 64. attend_split works
//           through one split of one row for 8 heads, tile by tile with a running maximum; combine_splits joins
//           a row's splits from first to last.
// Grid      attend_split: (rows, splits, heads / 8), 256 threads; combine_splits: (rows, heads); from first_row on as
//           many rows as there is room for their partial sums.
// Invariant where a key is summed depends on its position alone, so a row has the same bits alone, in a prompt, in
//           a chain or in a tree, wherever its cache rows lie.
#include "reduce.cuh"
#include "turn.cuh"

constexpr int SPLIT = 512;
constexpr int TILE = 64;
constexpr int HEADS = 8;          // a block's heads: one for each of its warps
constexpr int THREADS = 32 * HEADS;
constexpr int MAX_DIMS = 4;       // latent dimensions a thread accumulates: kv_lora up to 1,024

extern "C" __global__ void attend_split(const float* queries,                 // [N, heads, kv_lora + rope]
                                        const float* cache,                   // [capacity, kv_lora + rope]
                                        const int* prefix_len,                // [1]
                                        const int* parents,                   // [N]
                                        const int* depths,                    // [N], −1 in padding
                                        float* __restrict__ partial,          // [rows, splits, heads, kv_lora]
                                        float* __restrict__ stats,            // [rows, splits, heads, 2]: maximum, sum
                                        int first_row, int heads, int kv_lora, int latent, float scale)
{
    wait_for_turn();
    extern __shared__ unsigned char dynamic_shared[];
    float* query = reinterpret_cast<float*>(dynamic_shared);  // [HEADS, latent]
    __shared__ float score[HEADS][TILE];
    __shared__ float rescale[HEADS];
    __shared__ int slots[SPLIT];

    const int row = first_row + blockIdx.x, split = blockIdx.y, first_head = blockIdx.z * HEADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int depth = depths[row], prefix = *prefix_len;
    const int start = split * SPLIT;
    const int visible = prefix + depth + 1 - start;  // keys from this split on
    if (depth < 0 || visible <= 0)
        return;
    const int count = min(visible, SPLIT);

    for (int i = threadIdx.x; i < min(count, prefix - start); i += THREADS)
        slots[i] = start + i;
    if (threadIdx.x == 0)
        for (int node = row, at = prefix + depth - start; node >= 0 && at >= 0; node = parents[node], --at)
            if (at < SPLIT)
                slots[at] = prefix + node;
    for (int i = threadIdx.x; i < HEADS * latent; i += THREADS)
        query[i] = first_head + i / latent < heads ? queries[(size_t(row) * heads + first_head) * latent + i] : 0.0f;
    __syncthreads();

    float highest = -INFINITY, sum = 0.0f;         // of the warp's head
    float output[HEADS][MAX_DIMS] = {};            // of the thread's dimensions: threadIdx.x, + THREADS, …
    for (int tile = 0; tile < count; tile += TILE) {
        const int keys = min(TILE, count - tile);
        for (int i = threadIdx.x; i < HEADS * TILE; i += THREADS) {
            const int head = i / TILE, key = i % TILE;
            float dot = -INFINITY;
            if (key < keys) {
                const float* k = cache + size_t(slots[tile + key]) * latent;
                dot = 0.0f;
                for (int d = 0; d < latent; ++d)
                    dot = fmaf(query[head * latent + d], k[d], dot);
                dot *= scale;
            }
            score[head][key] = dot;
        }
        __syncthreads();
        const float low = score[warp][lane], high = score[warp][lane + 32];
        const float above = fmaxf(highest, warp_max(fmaxf(low, high)));
        const float p = expf(low - above), q = expf(high - above), fade = expf(highest - above);
        sum = sum * fade + warp_sum(p + q);
        highest = above;
        score[warp][lane] = p;
        score[warp][lane + 32] = q;
        if (lane == 0)
            rescale[warp] = fade;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MAX_DIMS; ++i) {
            const int d = threadIdx.x + i * THREADS;
            if (d >= kv_lora)
                break;
#pragma unroll
            for (int head = 0; head < HEADS; ++head)
                output[head][i] *= rescale[head];
            for (int key = 0; key < keys; ++key) {
                const float value = cache[size_t(slots[tile + key]) * latent + d];
#pragma unroll
                for (int head = 0; head < HEADS; ++head)
                    output[head][i] = fmaf(score[head][key], value, output[head][i]);
            }
        }
        __syncthreads();
    }

    let_next_begin();
    const size_t at = (size_t(blockIdx.x) * gridDim.y + split) * heads + first_head;
#pragma unroll
    for (int i = 0; i < MAX_DIMS; ++i)
#pragma unroll
        for (int head = 0; head < HEADS; ++head)
            if (first_head + head < heads && threadIdx.x + i * THREADS < kv_lora)
                partial[(at + head) * kv_lora + threadIdx.x + i * THREADS] = output[head][i];
    if (lane == 0 && first_head + warp < heads) {
        stats[(at + warp) * 2] = highest;
        stats[(at + warp) * 2 + 1] = sum;
    }
}

extern "C" __global__ void combine_splits(const float* partial,                // [rows, splits, heads, kv_lora]
                                          const float* stats,                  // [rows, splits, heads, 2]
                                          const int* prefix_len,               // [1]
                                          const int* depths,                   // [N], −1 in padding
                                          float* __restrict__ output,          // [N, heads, kv_lora]
                                          int first_row, int splits, int kv_lora)
{
    take_turn();
    const int row = first_row + blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const int used = depths[row] < 0 ? 0 : (*prefix_len + depths[row]) / SPLIT + 1;
    const float* stat = stats + (size_t(blockIdx.x) * splits * heads + head) * 2;
    float highest = -INFINITY, sum = 0.0f;
    for (int split = 0; split < used; ++split)
        highest = fmaxf(highest, stat[size_t(split) * heads * 2]);
    for (int split = 0; split < used; ++split)
        sum = fmaf(stat[size_t(split) * heads * 2 + 1], expf(stat[size_t(split) * heads * 2] - highest), sum);
    for (int d = threadIdx.x; d < kv_lora; d += blockDim.x) {
        float total = 0.0f;
        for (int split = 0; split < used; ++split)
            total = fmaf(partial[((size_t(blockIdx.x) * splits + split) * heads + head) * kv_lora + d],
                         expf(stat[size_t(split) * heads * 2] - highest), total);
        output[(size_t(row) * heads + head) * kv_lora + d] = used ? total / sum : 0.0f;
    }
}
