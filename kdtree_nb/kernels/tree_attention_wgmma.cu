// tree_attention_wgmma: attend_split of tree_attention_mma.cu for Hopper, with its warpgroup products.
//
// Idea      Two warpgroups share a tile of 64 keys and its 64 heads. Each multiplies 32 of the keys, they tell each other
//           their weights, and each multiplies all weights with half of the outputs. The next tile's keys are queued
//           behind the values, so that the tensor cores go on meanwhile. Weights are relative to a reference that both
//           know before the scores: the row's largest score in the first tile. It is raised where a weight would
//           exceed 2 ** MOST; a block without such a row neither seeks the largest score nor fades its sums. Part of
//           Q stays in registers: with 32 keys a product waits for what it reads from shared memory.
// Grid      (nodes, heads / 64, splits that the cache has room for), 256 threads.
// Shared    Q and two tiles, each in blocks of 64 numbers of 64 rows; the other's weights; largest scores; the path.
// Invariant As there. The products of a row's keys are added 16 by 16, the warpgroup's own 32 before the other's. Whether
//           a row's reference is raised follows from the row's scores alone, whoever calls for it.
#include "ptx.cuh"
#include "tree_attention.cuh"
#include "turn.cuh"

constexpr int LATENT = KV_LORA + ROPE;
constexpr int CHUNKS = LATENT / 8;                           // 16 bytes each
constexpr int BLOCKS = (LATENT + 63) / 64;                   // of 64 inputs
constexpr int BLOCK = 64 * 8;                                // of 64 rows: 16 bytes
constexpr int OUTPUT_BLOCKS = (KV_LORA + 127) / 128;         // of a warpgroup; the last may reach into the rotary part
constexpr unsigned long long STEP = 32 >> 4;                 // in a descriptor: 16 inputs,
constexpr unsigned long long KEYS_16 = 16 * 128 >> 4;        // 16 keys
constexpr unsigned long long NEXT_BLOCK = 16 * BLOCK >> 4;
constexpr float MOST = 8.0f;
constexpr int STEPS = LATENT / 16, HELD = STEPS < 16 ? STEPS : 16;  // the last from registers

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_split_wgmma(const uint4* queries,                // [N, heads, LATENT / 8], 8 bfloat16 each
                       const uint4* cache,                  // [capacity, LATENT / 8]
                       const int* prefix_len,               // [1]
                       const int* parents,                  // [N]
                       const int* depths,                   // [N], −1 in padding
                       float2* __restrict__ partial,        // [rows, splits, heads, KV_LORA / 2]
                       float2* __restrict__ stats,          // [rows, splits, heads]: reference, sum of weights
                       int first_row, int nodes, int heads, int min_splits, int max_splits, float scale)
{
    wait_for_turn();
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* const query = reinterpret_cast<uint4*>(dynamic_shared);               // [BLOCKS, 64, 8]
    uint4* const ring = query + BLOCKS * BLOCK;                                  // [2, BLOCKS, TILE, 8]
    uint4* const exchange = ring + 2 * BLOCKS * BLOCK;                           // [2, 2, 128]
    float* const maxima = reinterpret_cast<float*>(exchange + 2 * 2 * 128);      // [2, 64]
    unsigned short* const path = reinterpret_cast<unsigned short*>(maxima + 128);  // [MAX_PATH]

    const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // so that a warp has it once
    const int in_warpgroup = threadIdx.x % 128;
    const int own_row = threadIdx.x / 32 % 4 * 16 + group;  // and the eighth after it
    const int row = blockIdx.x, node = first_row + row, first_head = blockIdx.y * 64, split = blockIdx.z;
    const int prefix = *prefix_len, depth = depths[node], length = prefix + depth + 1;
    const int per_split = split_length(tiles_of(length), min_splits, max_splits);
    const int first_tile = split * per_split, end_tile = min(first_tile + per_split, tiles_of(length));
    if (depth < 0 || first_tile >= end_tile)
        return;

    // 32 rows at a time, 8 threads each; chunk 8 · block + i of a row lies in that block
    const int row_of_thread = threadIdx.x / 8, chunk_of_thread = threadIdx.x % 8;
    const int place = row_of_thread * 8 + (chunk_of_thread ^ row_of_thread % 8);
    const auto copy_row = [&](uint4* to, const uint4* from, bool exists) {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            if (CHUNKS % 8 == 0 || 8 * block + chunk_of_thread < CHUNKS)
                cp_async_16(to + block * BLOCK, from + 8 * block, exists);
    };
#pragma unroll
    for (int r = 0; r < 64; r += THREADS / 8) {
        const int head = first_head + r + row_of_thread;
        const uint4* from = queries + (size_t(node) * heads + (head < heads ? head : 0)) * CHUNKS + chunk_of_thread;
        copy_row(query + r * 8 + place, from, head < heads);
    }
    const int first_depth = max(0, first_tile * TILE - prefix);
    if (end_tile * TILE > prefix)
        write_path(path, reinterpret_cast<int*>(ring), parents, nodes, node, depth, first_depth);
    const auto fetch = [&](int tile) {
        uint4* const to = ring + tile % 2 * BLOCKS * BLOCK + place;
#pragma unroll
        for (int key = 0; key < TILE; key += THREADS / 8) {
            const int position = tile * TILE + key + row_of_thread, at = position - prefix;
            int slot = position;
            if (at >= 0)  // behind the row's last key, the node itself stands in: finite where the row is
                slot = prefix + (at < depth ? path[at - first_depth] : node);
            copy_row(to + key * 8, cache + size_t(slot) * CHUNKS + chunk_of_thread, true);
        }
        cp_async_commit();
    };
    fetch(first_tile);

    float score[16] = {};  // rows own_row, own_row + 8; of each eight keys two
    const unsigned long long query_matrix = matrix_descriptor(query);
    const unsigned long long key_matrix = matrix_descriptor(ring) + warpgroup * 2 * KEYS_16;
    const unsigned long long value_matrix = matrix_descriptor(ring) + warpgroup * OUTPUT_BLOCKS * NEXT_BLOCK;
    const auto await_copies = [] {
        cp_async_wait<0>();
        fence_shared_for_wgmma();
        __syncthreads();
    };
    await_copies();
    unsigned held[HELD][4];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int r = threadIdx.x / 32 % 4 * 16 + lane % 16, chunk = 2 * (STEPS - HELD + i) + lane / 16;
        ldmatrix_x4(held[i], query + chunk / 8 * BLOCK + r * 8 + (chunk % 8 ^ r % 8));
    }
    const auto multiply_keys = [&](int tile) {
        const unsigned long long keys = key_matrix + tile % 2 * BLOCKS * NEXT_BLOCK;
        const unsigned long long queries_here = anew(query_matrix);  // else 20 descriptors fill 40 registers
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const unsigned long long at = step / 4 * NEXT_BLOCK + step % 4 * STEP;
            if (step < STEPS - HELD)
                wgmma_m64n32k16(score, queries_here + at, keys + at, step > 0);
            else
                wgmma_m64n32k16(score, held[step - (STEPS - HELD)], keys + at, step > 0);
        }
        wgmma_commit();
    };
    multiply_keys(first_tile);

    float output[OUTPUT_BLOCKS][32] = {};
    float reference[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; ++tile) {
        wgmma_wait<1>();
        __syncthreads();  // both warpgroups have left the other tile
        if (tile + 1 < end_tile)
            fetch(tile + 1);
        wgmma_wait<0>();
        wgmma_use(score);

        const int visible = length - tile * TILE - warpgroup * 32 - 2 * pair;
#pragma unroll
        for (int i = 0; i < 16; ++i)
            score[i] *= scale;
        if (tile + 1 == end_tile)
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (i / 4 * 8 + i % 2 >= visible)
                    score[i] = -INFINITY;

        uint4* const own = exchange + warpgroup * 256 + in_warpgroup;
        unsigned weights[2][4];  // 16 keys each
        float added[2], excess = -INFINITY;
        const auto weigh = [&] {
            added[0] = added[1] = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; i += 2) {
                const int half = i / 2 % 2;
                const float low = score[i] - reference[half], high = score[i + 1] - reference[half];
                const unsigned both = two_bfloat16(exp2f(low), exp2f(high));
                excess = fmaxf(excess, fmaxf(low, high));
                weights[i / 8][i / 2 % 4] = both;
                added[half] += __uint_as_float(both << 16) + __uint_as_float(both & 0xffff0000u);
            }
            own[0] = make_uint4(weights[0][0], weights[0][1], weights[0][2], weights[0][3]);
            own[128] = make_uint4(weights[1][0], weights[1][1], weights[1][2], weights[1][3]);
        };
        weigh();
        if (__syncthreads_or(excess > MOST)) {  // in the first tile, then seldom
            float best[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                best[half] = -INFINITY;
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    best[half] = fmaxf(best[half], fmaxf(score[4 * n + 2 * half], score[4 * n + 2 * half + 1]));
                best[half] = fmaxf(best[half], __shfl_xor_sync(0xffffffffu, best[half], 1));
                best[half] = fmaxf(best[half], __shfl_xor_sync(0xffffffffu, best[half], 2));
                if (pair == 0)
                    maxima[warpgroup * 64 + own_row + 8 * half] = best[half];
            }
            __syncthreads();
            float fade[2] = {1.0f, 1.0f};  // of the sums so far
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                best[half] = fmaxf(best[half], maxima[(1 - warpgroup) * 64 + own_row + 8 * half]);
                if (best[half] - reference[half] > MOST) {
                    fade[half] = exp2f(reference[half] - best[half]);
                    reference[half] = best[half];
                }
                sum[half] *= fade[half];
            }
#pragma unroll
            for (int j = 0; j < OUTPUT_BLOCKS; ++j) {
                wgmma_use(output[j]);
#pragma unroll
                for (int i = 0; i < 32; ++i)
                    output[j][i] *= fade[i / 2 % 2];
            }
            weigh();
            __syncthreads();
        }
        sum[0] += added[0];
        sum[1] += added[1];

        const unsigned long long values = value_matrix + tile % 2 * BLOCKS * NEXT_BLOCK;
        const auto multiply_values = [&](const unsigned (&p)[4], int keys_16) {
#pragma unroll
            for (int j = 0; j < OUTPUT_BLOCKS; ++j)
                if (KV_LORA % 128 == 0 || warpgroup * OUTPUT_BLOCKS + j < BLOCKS)
                    wgmma_m64n64k16(output[j], p, values + j * NEXT_BLOCK + keys_16 * KEYS_16);
        };
        const uint4 first = exchange[(1 - warpgroup) * 256 + in_warpgroup];
        const uint4 second = exchange[(1 - warpgroup) * 256 + 128 + in_warpgroup];
        const unsigned others[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
        wgmma_fence();
        multiply_values(weights[0], 2 * warpgroup);
        multiply_values(weights[1], 2 * warpgroup + 1);
        multiply_values(others[0], 2 - 2 * warpgroup);
        multiply_values(others[1], 3 - 2 * warpgroup);
        wgmma_commit();
        if (tile + 1 < end_tile) {
            await_copies();
            multiply_keys(tile + 1);
        }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < OUTPUT_BLOCKS; ++j)
        wgmma_use(output[j]);

#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        if (warpgroup == 1 && pair == 0)
            maxima[own_row + 8 * half] = sum[half];
    }
    __syncthreads();
    let_next_begin();
    const size_t at = (size_t(row) * gridDim.z + split) * heads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = first_head + own_row + 8 * half;
        if (head >= heads)
            continue;
        if (warpgroup == 0 && pair == 0)
            stats[at + head] = make_float2(reference[half], sum[half] + maxima[own_row + 8 * half]);
#pragma unroll
        for (int j = 0; j < OUTPUT_BLOCKS; ++j)
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int column = (warpgroup * OUTPUT_BLOCKS + j) * 64 + 8 * n + 2 * pair;
                if (KV_LORA % 128 == 0 || column < KV_LORA)
                    partial[((at + head) * KV_LORA + column) / 2] =
                        make_float2(output[j][4 * n + 2 * half], output[j][4 * n + 2 * half + 1]);
            }
    }
}
