// tree_attention_mma: absorbed MLA attention of a draft tree's nodes, bf16 in, fp32 softmax and sums, tensor cores.
//
// Idea      A row's keys lie in the order of their positions: the prefix, then the node's own path. They are cut at
//           absolute positions into tiles of 64, and its tiles into splits, of which it has more the longer it is.
//           A block takes one split of one node for up to 64 heads: Q, two tiles of the cache and P lie in shared
//           memory. The tile that is multiplied as keys is then multiplied as values; the other one is under way.
//           The sum of a row's weights is its product with one more column of values, all ones.
//           combine_splits joins a row's splits from first to last.
// Grid      attend_split: (nodes, heads / ROWS, splits that the cache has room for), 256 threads; combine_splits:
//           (nodes, heads), 128 threads; from first_row on as many nodes as there is room for their partial sums.
// Shared    Q, two tiles, P, the warps' largest scores, the path (tree_attention_mma.py, Geometry).
// Invariant Which tiles a split has depends on the row's position alone, what is added in which order within one on
//           nothing: a row has the same bits alone, in a prompt, in a chain or in a tree, wherever its cache rows lie.
#include <cuda_bf16.h>

#include "ptx.cuh"

constexpr int TILE = 64;                         // keys
constexpr int LATENT = KV_LORA + ROPE;
constexpr int CHUNKS = LATENT / 8;               // 16 bytes each
constexpr int PITCH = (CHUNKS + 7) / 8 * 8;      // chunks from row to row in shared memory
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int KEY_WARPS = ROWS == 64 ? 4 : 8;    // warps that share a row: its keys, then its outputs
constexpr int HEIGHT = ROWS == 16 ? 1 : 2;       // of a warp: how often 16 rows
constexpr int WIDTH = TILE / KEY_WARPS / 8;      // and how often 8 keys
constexpr int PAIRS = (KV_LORA / 64 + (KV_LORA % 64 > 0) + KEY_WARPS - 1) / KEY_WARPS * 4;  // and 16 outputs
constexpr int MAX_PATH = 1024;                   // ancestors of a node
constexpr unsigned ONES = 0x3f803f80u;           // two bfloat16

// Where the chunk even + low of a row lies, even a constant and low below 8 or, where even is no multiple of 8, below 2:
// the chunks of one number in 8 rows lie in different banks.
__device__ __forceinline__ int place(int row, int even, int low, int pitch)
{
    return row * pitch + even / 8 * 8 + (even % 8 ^ (low ^ row % 8));
}

__device__ __forceinline__ int tiles_of(int keys) { return (keys + TILE - 1) / TILE; }

// Tiles in each split of a row with so many tiles, but for the last.
__device__ __forceinline__ int split_length(int tiles, int min_tiles, int max_splits)
{
    return max(min_tiles, (tiles + max_splits - 1) / max_splits);
}

// Two numbers as bfloat16, the first in the low half.
__device__ __forceinline__ unsigned two_bfloat16(float low, float high)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<unsigned&>(both);
}

// 16 inputs of 16 or 8 keys, as B.
__device__ __forceinline__ void load_keys(unsigned (&b)[4], const uint4* keys, int first, int step)
{
    const int lane = threadIdx.x % 32;
    ldmatrix_x4(b, keys + place(first + lane / 16 * 8 + lane % 8, 2 * step, lane / 8 % 2, PITCH));
}

__device__ __forceinline__ void load_keys(unsigned (&b)[2], const uint4* keys, int first, int step)
{
    const int lane = threadIdx.x % 32;
    ldmatrix_x2(b, keys + place(first + lane % 8, 2 * step, lane / 8 % 2, PITCH));
}

// A row's ancestors of depth first, first + 1, …: as far as they are the first nodes in their order, as in a chain,
// all threads write them; the rest is walked.
__device__ void write_path(unsigned short* path, int* parents_here, const int* parents, int nodes, int node, int depth,
                           int first)
{
    for (int i = threadIdx.x; i < nodes; i += THREADS)
        parents_here[i] = parents[i];
    for (int at = first + threadIdx.x; at < depth; at += THREADS)
        path[at - first] = at;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int at = depth; at > first && node != at;) {
            node = parents_here[node];
            path[--at - first] = node;
        }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_split(const uint4* __restrict__ queries,   // [N, heads, LATENT / 8], 8 bfloat16 each
                 const uint4* __restrict__ cache,     // [capacity, LATENT / 8]
                 const int* __restrict__ prefix_len,  // [1]
                 const int* __restrict__ parents,     // [N]
                 const int* __restrict__ depths,      // [N], −1 in padding
                 float2* __restrict__ partial,        // [rows, splits, heads, KV_LORA / 2]
                 float2* __restrict__ stats,          // [rows, splits, heads]: largest score, sum of weights
                 int first_row, int nodes, int heads, int min_tiles, int max_splits, float scale)
{
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    uint4* const query = reinterpret_cast<uint4*>(dynamic_shared);                 // [ROWS, PITCH]
    uint4* const ring = query + ROWS * PITCH;                                      // [2, TILE, PITCH]
    uint4* const weights = ring + 2 * TILE * PITCH;                                // [ROWS, TILE / 8]
    float* const maxima = reinterpret_cast<float*>(weights + ROWS * TILE / 8);     // [ROWS, KEY_WARPS]
    unsigned short* const path = reinterpret_cast<unsigned short*>(maxima + ROWS * KEY_WARPS);  // [MAX_PATH]

    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    const int key_warp = threadIdx.x / 32 % KEY_WARPS, warp_row = threadIdx.x / 32 / KEY_WARPS * 16 * HEIGHT;
    const int first_key = key_warp * 8 * WIDTH, first_pair = key_warp * PAIRS;
    const int row = blockIdx.x, node = first_row + row, first_head = blockIdx.y * ROWS, split = blockIdx.z;
    const int prefix = *prefix_len, depth = depths[node], length = prefix + depth + 1;
    const int per_split = split_length(tiles_of(length), min_tiles, max_splits);
    const int first_tile = split * per_split, end_tile = min(first_tile + per_split, tiles_of(length));
    if (depth < 0 || first_tile >= end_tile)
        return;

    // 32 rows at a time, 8 threads each
    const int row_of_thread = threadIdx.x / 8, chunk_of_thread = threadIdx.x % 8;
#pragma unroll
    for (int first = 0; first < ROWS; first += THREADS / 8) {
        const int r = first + row_of_thread;
        const bool exists = first_head + r < heads;
        if (r >= ROWS)
            break;
        const uint4* from =
            queries + (size_t(node) * heads + (exists ? first_head + r : 0)) * CHUNKS + chunk_of_thread;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 8)
            if (CHUNKS % 8 == 0 || chunk + chunk_of_thread < CHUNKS)
                cp_async_16(query + place(r, chunk, chunk_of_thread, PITCH), from + chunk, exists);
    }
    const int first_depth = max(0, first_tile * TILE - prefix);
    if (end_tile * TILE > prefix)
        write_path(path, reinterpret_cast<int*>(ring + TILE * PITCH), parents, nodes, node, depth, first_depth);
    const auto fetch = [&](int tile) {
        uint4* const to = ring + tile % 2 * TILE * PITCH;
#pragma unroll
        for (int first = 0; first < TILE; first += THREADS / 8) {
            const int key = first + row_of_thread, position = tile * TILE + key, at = position - prefix;
            int slot = position;
            if (at >= 0)  // behind the row's last key, the node itself stands in: finite where the row is
                slot = prefix + (at < depth ? path[at - first_depth] : node);
            const uint4* from = cache + size_t(slot) * CHUNKS + chunk_of_thread;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += 8)
                if (CHUNKS % 8 == 0 || chunk + chunk_of_thread < CHUNKS)
                    cp_async_16(to + place(key, chunk, chunk_of_thread, PITCH), from + chunk);
        }
    };
    fetch(first_tile);
    cp_async_commit();

    float output[PAIRS][HEIGHT][2][4] = {};
    float highest[HEIGHT][2], sum[HEIGHT][2] = {};
#pragma unroll
    for (int m = 0; m < HEIGHT; ++m)
        highest[m][0] = highest[m][1] = -INFINITY;
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; ++tile) {
        const uint4* const keys = ring + tile % 2 * TILE * PITCH;
        cp_async_wait<0>();
        __syncthreads();  // all copies of this tile are there, and all warps have left the other one
        if (tile + 1 < end_tile)
            fetch(tile + 1);
        cp_async_commit();

        float score[HEIGHT][WIDTH][4] = {};
#pragma unroll
        for (int step = 0; step < LATENT / 16; ++step) {
            unsigned a[HEIGHT][4], b[WIDTH * 2];
#pragma unroll
            for (int m = 0; m < HEIGHT; ++m)
                ldmatrix_x4(a[m], query + place(warp_row + 16 * m + lane % 16, 2 * step, lane / 16, PITCH));
            load_keys(b, keys, first_key, step);
#pragma unroll
            for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
                for (int n = 0; n < WIDTH; ++n) {
                    const unsigned of_keys[2] = {b[2 * n], b[2 * n + 1]};
                    mma_m16n8k16_bf16(score[m][n], a[m], of_keys, score[m][n]);
                }
        }

        const int visible = length - tile * TILE - first_key;
#pragma unroll
        for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float best = -INFINITY;
#pragma unroll
                for (int n = 0; n < WIDTH; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float& s = score[m][n][2 * half + i];
                        s = 8 * n + 2 * pair + i < visible ? s * scale : -INFINITY;
                        best = fmaxf(best, s);
                    }
                best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
                best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
                if (pair == 0)
                    maxima[(warp_row + 16 * m + 8 * half + group) * KEY_WARPS + key_warp] = best;
            }
        __syncthreads();

        float fade[HEIGHT][2];  // of the sums so far
#pragma unroll
        for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = warp_row + 16 * m + 8 * half + group;
                float above = highest[m][half];
#pragma unroll
                for (int i = 0; i < KEY_WARPS; ++i)
                    above = fmaxf(above, maxima[r * KEY_WARPS + i]);
#pragma unroll
                for (int n = 0; n < WIDTH; ++n) {
                    const float* s = score[m][n] + 2 * half;
                    unsigned* to = reinterpret_cast<unsigned*>(weights + place(r, 0, first_key / 8 + n, TILE / 8));
                    to[pair] = two_bfloat16(exp2f(s[0] - above), exp2f(s[1] - above));
                }
                fade[m][half] = exp2f(highest[m][half] - above);
                highest[m][half] = above;
            }
        __syncthreads();

        const uint4* const values = keys + 2 * first_pair;
        unsigned p[HEIGHT][TILE / 16][4];
        const unsigned ones[2] = {ONES, ONES};
#pragma unroll
        for (int m = 0; m < HEIGHT; ++m) {
            float product[4] = {};
#pragma unroll
            for (int step = 0; step < TILE / 16; ++step) {
                const int r = warp_row + 16 * m + lane % 16;
                ldmatrix_x4(p[m][step], weights + place(r, 2 * step, lane / 16, TILE / 8));
                mma_m16n8k16_bf16(product, p[m][step], ones, product);
            }
            sum[m][0] = fmaf(sum[m][0], fade[m][0], product[0]);
            sum[m][1] = fmaf(sum[m][1], fade[m][1], product[2]);
        }
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            if (KV_LORA / 16 % (KEY_WARPS * 4) && first_pair + j >= KV_LORA / 16)
                break;
#pragma unroll
            for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        output[j][m][n][i] *= fade[m][i / 2];
#pragma unroll
            for (int step = 0; step < TILE / 16; ++step) {
                unsigned v[4];  // 16 keys of 16 outputs
                ldmatrix_x4_trans(v, values + place(16 * step + lane % 16, 2 * j, lane / 16, PITCH));
                const unsigned b[2][2] = {{v[0], v[1]}, {v[2], v[3]}};
#pragma unroll
                for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
                    for (int n = 0; n < 2; ++n)
                        mma_m16n8k16_bf16(output[j][m][n], p[m][step], b[n], output[j][m][n]);
            }
        }
    }

    const size_t at = (size_t(row) * gridDim.z + split) * heads;
#pragma unroll
    for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = first_head + warp_row + 16 * m + 8 * half + group;
            if (head >= heads)
                continue;
            if (key_warp == 0 && pair == 0)
                stats[at + head] = make_float2(highest[m][half], sum[m][half]);
#pragma unroll
            for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    if (KV_LORA / 16 % (KEY_WARPS * 4) == 0 || first_pair + j < KV_LORA / 16)
                        partial[(at + head) * (KV_LORA / 2) + (2 * (first_pair + j) + n) * 4 + pair] =
                            make_float2(output[j][m][n][2 * half], output[j][m][n][2 * half + 1]);
        }
}

extern "C" __global__ void combine_splits(const float4* __restrict__ partial,  // [rows, splits, heads, KV_LORA / 4]
                                          const float2* __restrict__ stats,    // [rows, splits, heads]
                                          const int* __restrict__ prefix_len,  // [1]
                                          const int* __restrict__ depths,      // [N], −1 in padding
                                          uint2* __restrict__ output,          // [N, heads, KV_LORA / 4], bfloat16
                                          int first_row, int room, int min_tiles, int max_splits)
{
    const int row = blockIdx.x, head = blockIdx.y, heads = gridDim.y, depth = depths[first_row + row];
    const int tiles = tiles_of(*prefix_len + depth + 1), per_split = split_length(tiles, min_tiles, max_splits);
    const int splits = depth < 0 ? 0 : (tiles + per_split - 1) / per_split;
    const size_t at = size_t(row) * room * heads + head;
    float highest = -INFINITY, sum = 0.0f;
    for (int split = 0; split < splits; ++split)
        highest = fmaxf(highest, stats[at + size_t(split) * heads].x);
    for (int split = 0; split < splits; ++split) {
        const float2 stat = stats[at + size_t(split) * heads];
        sum = fmaf(stat.y, exp2f(stat.x - highest), sum);
    }
    for (int i = threadIdx.x; i < KV_LORA / 4; i += blockDim.x) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int split = 0; split < splits; ++split) {
            const float factor = exp2f(stats[at + size_t(split) * heads].x - highest);
            const float4 part = partial[(at + size_t(split) * heads) * (KV_LORA / 4) + i];
            total.x = fmaf(part.x, factor, total.x);
            total.y = fmaf(part.y, factor, total.y);
            total.z = fmaf(part.z, factor, total.z);
            total.w = fmaf(part.w, factor, total.w);
        }
        uint2 rounded = make_uint2(0u, 0u);
        if (splits)
            rounded = make_uint2(two_bfloat16(total.x / sum, total.y / sum), two_bfloat16(total.z / sum, total.w / sum));
        output[(size_t(first_row + row) * heads + head) * (KV_LORA / 4) + i] = rounded;
    }
}
