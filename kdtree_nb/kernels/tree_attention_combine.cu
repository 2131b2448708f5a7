// tree_attention_combine: what the splits of a row have found, joined into its attention.
//
// Idea      Each split has a reference score, the sum of its weights and their sum of values, both relative to that
//           score; it counts with the exponential of how far its reference lies below the highest one. A thread adds
//           four outputs of all splits; the first of them are under way before it is known how much each counts.
// Grid      (nodes, heads), KV_LORA / 4 threads: few, so that several blocks on a multiprocessor hide each other's ways.
// Shared    What each split has found.
// Invariant The order of a sum follows from the number of splits, and that from the row's position alone.
#include "tree_attention.cuh"
#include "turn.cuh"

constexpr int LANES = KV_LORA / 4;
constexpr int AT_ONCE = 8;  // a thread's loads under way

extern "C" __global__ void __launch_bounds__(LANES)
    combine_splits(const float4* partial,               // [rows, room, heads, KV_LORA / 4]
                   const float2* stats,                 // [rows, room, heads]
                   const int* prefix_len,               // [1]
                   const int* depths,                   // [N], −1 in padding
                   uint2* __restrict__ output,          // [N, heads, KV_LORA / 4], bfloat16
                   int first_row, int room, int min_splits, int max_splits)
{
    take_turn();
    extern __shared__ __align__(8) unsigned char dynamic_shared[];
    float2* const found = reinterpret_cast<float2*>(dynamic_shared);  // [splits]
    const int row = blockIdx.x, head = blockIdx.y, heads = gridDim.y, depth = depths[first_row + row], i = threadIdx.x;
    uint2& result = output[(size_t(first_row + row) * heads + head) * LANES + i];
    if (depth < 0) {
        result = make_uint2(0u, 0u);
        return;
    }
    const int tiles = tiles_of(*prefix_len + depth + 1), per_split = split_length(tiles, min_splits, max_splits);
    const int splits = (tiles + per_split - 1) / per_split;
    const size_t at = size_t(row) * room * heads + head;

    float4 parts[AT_ONCE];
    const auto fetch = [&](int first) {
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + j < splits)
                parts[j] = partial[(at + size_t(first + j) * heads) * LANES + i];
    };
    fetch(0);
    for (int split = i; split < splits; split += LANES)
        found[split] = stats[at + size_t(split) * heads];
    __syncthreads();
    float highest = -INFINITY;
    for (int split = 0; split < splits; ++split)
        highest = fmaxf(highest, found[split].x);

    float sum = 0.0f;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < splits; first += AT_ONCE) {
        if (first > 0)
            fetch(first);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + j < splits) {
                const float factor = exp2f(found[first + j].x - highest);
                sum = fmaf(found[first + j].y, factor, sum);
                total.x = fmaf(parts[j].x, factor, total.x);
                total.y = fmaf(parts[j].y, factor, total.y);
                total.z = fmaf(parts[j].z, factor, total.z);
                total.w = fmaf(parts[j].w, factor, total.w);
            }
    }
    result = make_uint2(two_bfloat16(total.x / sum, total.y / sum), two_bfloat16(total.z / sum, total.w / sum));
}
