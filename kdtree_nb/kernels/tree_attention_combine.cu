// tree_attention_combine: what the splits of a row have found, joined into its attention.
//
// Idea      Each split has its largest score, the sum of its weights and their sum of values, both relative to that
//           score; it counts with the exponential of how far its score lies below the row's. Of a head's splits each of
//           GROUPS groups adds every fourth, four outputs to a thread, and then the first group adds the others'.
// Grid      (nodes, heads), GROUPS · KV_LORA / 4 threads.
// Shared    What each split has found, and its factor.
// Invariant The order of a sum follows from the number of splits, and that from the row's position alone.
#include "tree_attention.cuh"

constexpr int GROUPS = 4;
constexpr int LANES_OF_GROUP = KV_LORA / 4;
constexpr int AT_ONCE = 8;  // a thread's loads under way

extern "C" __global__ void __launch_bounds__(GROUPS* LANES_OF_GROUP)
    combine_splits(const float4* __restrict__ partial,  // [rows, room, heads, KV_LORA / 4]
                   const float2* __restrict__ stats,    // [rows, room, heads]
                   const int* __restrict__ prefix_len,  // [1]
                   const int* __restrict__ depths,      // [N], −1 in padding
                   uint2* __restrict__ output,          // [N, heads, KV_LORA / 4], bfloat16
                   int first_row, int room, int min_tiles, int max_splits)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float2* const found = reinterpret_cast<float2*>(dynamic_shared);  // [splits]
    float* const factors = reinterpret_cast<float*>(found + room);    // [splits]
    __shared__ float4 others[GROUPS - 1][LANES_OF_GROUP];
    const int row = blockIdx.x, head = blockIdx.y, heads = gridDim.y, depth = depths[first_row + row];
    const int group = threadIdx.x / LANES_OF_GROUP, i = threadIdx.x % LANES_OF_GROUP;
    uint2& result = output[(size_t(first_row + row) * heads + head) * LANES_OF_GROUP + i];
    if (depth < 0) {
        if (group == 0)
            result = make_uint2(0u, 0u);
        return;
    }
    const int tiles = tiles_of(*prefix_len + depth + 1), per_split = split_length(tiles, min_tiles, max_splits);
    const int splits = (tiles + per_split - 1) / per_split;
    const size_t at = size_t(row) * room * heads + head;

    for (int split = threadIdx.x; split < splits; split += blockDim.x)
        found[split] = stats[at + size_t(split) * heads];
    __syncthreads();
    float highest = -INFINITY, sum = 0.0f;
    for (int split = 0; split < splits; ++split)
        highest = fmaxf(highest, found[split].x);
    for (int split = threadIdx.x; split < splits; split += blockDim.x)
        factors[split] = exp2f(found[split].x - highest);
    __syncthreads();
    for (int split = 0; split < splits; ++split)
        sum = fmaf(found[split].y, factors[split], sum);

    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = group; first < splits; first += AT_ONCE * GROUPS) {
        float4 parts[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + j * GROUPS < splits)
                parts[j] = partial[(at + size_t(first + j * GROUPS) * heads) * LANES_OF_GROUP + i];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + j * GROUPS < splits) {
                const float factor = factors[first + j * GROUPS];
                total.x = fmaf(parts[j].x, factor, total.x);
                total.y = fmaf(parts[j].y, factor, total.y);
                total.z = fmaf(parts[j].z, factor, total.z);
                total.w = fmaf(parts[j].w, factor, total.w);
            }
    }
    if (group > 0)
        others[group - 1][i] = total;
    __syncthreads();
    if (group > 0)
        return;
#pragma unroll
    for (int other = 0; other < GROUPS - 1; ++other) {
        const float4 part = others[other][i];
        total = make_float4(total.x + part.x, total.y + part.y, total.z + part.z, total.w + part.w);
    }
    result = make_uint2(two_bfloat16(total.x / sum, total.y / sum), two_bfloat16(total.z / sum, total.w / sum));
}
