// tree_attention_mma: absorbed MLA attention of a draft tree's nodes, bf16 in, fp32 softmax and sums, tensor cores.
//
// Idea      A row's keys lie in the order of their positions: the prefix, then the node's own path. They are cut at
//           absolute positions into tiles of 64, and its tiles into splits, of which it has more the longer it is.
//           A block takes one split of one node for up to 64 heads: Q, STAGES tiles of the cache and P lie in shared
//           memory. The tile that is multiplied as keys is then multiplied as values; the next one is under way.
//           The sum of a row's weights is its product with one more column of values, all ones.
//           combine_splits (tree_attention_combine.cu) joins a row's splits.
// Grid      (nodes, heads / ROWS, splits that the cache has room for), 256 threads; from first_row on as many nodes as
//           there is room for their partial sums.
// Shared    Q, one or two tiles, P, the warps' largest scores, the path (tree_attention_mma.py, Geometry).
// Invariant Which tiles a split has depends on the row's position alone, what is added in which order within one on
//           nothing: a row has the same bits alone, in a prompt, in a chain or in a tree, wherever its cache rows lie.
#include <cuda_bf16.h>

#include "ptx.cuh"
#include "tree_attention.cuh"
#include "turn.cuh"

constexpr int LATENT = KV_LORA + ROPE;
constexpr int CHUNKS = LATENT / 8;               // 16 bytes each
constexpr int PITCH = (CHUNKS + 7) / 8 * 8;      // chunks from row to row in shared memory
constexpr int KEY_WARPS = ROWS == 64 ? 4 : 8;    // warps that share a row: its keys, then its outputs
constexpr int HEIGHT = ROWS == 16 ? 1 : 2;       // of a warp: how often 16 rows
constexpr int WIDTH = TILE / KEY_WARPS / 8;      // and how often 8 keys
constexpr int PAIRS = (KV_LORA / 64 + (KV_LORA % 64 > 0) + KEY_WARPS - 1) / KEY_WARPS * 4;  // and 16 outputs
constexpr unsigned ONES = 0x3f803f80u;           // two bfloat16

// Where the chunk even + low of a row lies, even a constant and low below 8 or, where even is no multiple of 8, below 2:
// the chunks of one number in 8 rows lie in different banks.
__device__ __forceinline__ int place(int row, int even, int low, int pitch)
{
    return row * pitch + even / 8 * 8 + (even % 8 ^ (low ^ row % 8));
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_split(const uint4* queries,                // [N, heads, LATENT / 8], 8 bfloat16 each
                 const uint4* cache,                  // [capacity, LATENT / 8]
                 const int* prefix_len,               // [1]
                 const int* parents,                  // [N]
                 const int* depths,                   // [N], −1 in padding
                 float2* __restrict__ partial,        // [rows, splits, heads, KV_LORA / 2]
                 float2* __restrict__ stats,          // [rows, splits, heads]: largest score, sum of weights
                 int first_row, int nodes, int heads, int min_splits, int max_splits, float scale)
{
    wait_for_turn();
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    uint4* const query = reinterpret_cast<uint4*>(dynamic_shared);                 // [ROWS, PITCH]
    uint4* const ring = query + ROWS * PITCH;                                      // [STAGES, TILE, PITCH]
    uint4* const weights = ring + STAGES * TILE * PITCH;                           // [ROWS, TILE / 8]
    float* const maxima = reinterpret_cast<float*>(weights + ROWS * TILE / 8);     // [ROWS, KEY_WARPS]
    unsigned short* const path = reinterpret_cast<unsigned short*>(maxima + ROWS * KEY_WARPS);  // [MAX_PATH]

    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    const int key_warp = threadIdx.x / 32 % KEY_WARPS, warp_row = threadIdx.x / 32 / KEY_WARPS * 16 * HEIGHT;
    const int first_key = key_warp * 8 * WIDTH, first_pair = key_warp * PAIRS;
    const int row = blockIdx.x, node = first_row + row, first_head = blockIdx.y * ROWS, split = blockIdx.z;
    const int prefix = *prefix_len, depth = depths[node], length = prefix + depth + 1;
    const int per_split = split_length(tiles_of(length), min_splits, max_splits);
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
        write_path(path, reinterpret_cast<int*>(ring), parents, nodes, node, depth, first_depth);
    const auto fetch = [&](int tile) {
        uint4* const to = ring + tile % STAGES * TILE * PITCH;
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
        cp_async_commit();
    };
    fetch(first_tile);

    float output[PAIRS][HEIGHT][2][4] = {};
    float highest[HEIGHT][2], sum[HEIGHT][2] = {};
#pragma unroll
    for (int m = 0; m < HEIGHT; ++m)
        highest[m][0] = highest[m][1] = -INFINITY;
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; ++tile) {
        const uint4* const keys = ring + tile % STAGES * TILE * PITCH;
        cp_async_wait<0>();
        __syncthreads();  // all copies of this tile are there, and all warps have left the other one
        if (STAGES == 2 && tile + 1 < end_tile)
            fetch(tile + 1);

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
        if (STAGES == 1 && tile + 1 < end_tile) {
            __syncthreads();
            fetch(tile + 1);
        }
    }

    let_next_begin();
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
