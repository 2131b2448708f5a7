// mla_inputs: what absorbed attention takes of a token's projections: its queries, and in the cache its latent and key.
//
// Idea      A block each for the latent, the key and every head, so that none waits for what another one reads. The
//           latent is normalised; the key and a head's end are rotated, by cos and sin from a table, so that they are
//           the specification's to the bit. What a head has before its end goes through the product that absorbs the
//           keys' weight, whose result is expected before the rotated part. Row prefix_len + i of the cache belongs to
//           node i of the tree.
//           What counts is the wait: prefix_len is asked for first and used last, so that other loads are under way
//           beside it, and a head's numbers and pairs have a thread each.
// Grid      (tokens, 2 + heads): the latent, which takes longest, the key, the heads; THREADS threads, which depends on
//           the size of the latent alone.
// Invariant what a token leaves depends on it and its position alone; the order of the latent's sum is fixed.
#include <cuda_bf16.h>

#include "norm.cuh"
#include "turn.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_inputs(const float* queries,               // [tokens, heads, nope + rope], query_token and query_head apart
               const float* compressed,            // [tokens, kv_lora + rope], compressed_token apart
               const float* weight,                // [kv_lora]
               const float* __restrict__ cosines,  // [positions, rope / 2]
               const float* __restrict__ sines,    // [positions, rope / 2]
               const int* prefix_len,              // [1]
               const int* depths,                  // [tokens], −1 in padding
               OUT* plain,                         // [tokens, heads, nope]
               OUT* absorbed,                      // [tokens, heads, kv_lora + rope], of which the end is written
               OUT* cache,                         // [capacity, kv_lora + rope]
               int nope, int kv_lora, int pairs, float eps, long long query_token, long long query_head,
               long long compressed_token)
{
    const int token = blockIdx.x, width = kv_lora + 2 * pairs;
    Values latent, scale;
    let_next_begin();
    if (blockIdx.y == 0)
        load_values(scale, weight, kv_lora);
    wait_for_turn();
    const int start = *prefix_len;
    const float* in = compressed + token * compressed_token;
    if (blockIdx.y == 0) {
        load_values(latent, in, kv_lora);
        write_normed(latent, scale, cache + size_t(start + token) * width, kv_lora, eps);
        return;
    }
    const size_t position = start + max(depths[token], 0);
    OUT* out;
    int passed_on = 0;
    if (blockIdx.y == 1) {
        in += kv_lora;
        out = cache + size_t(start + token) * width + kv_lora;
    } else {
        const int heads = gridDim.y - 2, head = blockIdx.y - 2;
        const size_t row = size_t(token) * heads + head;
        in = queries + token * query_token + head * query_head;
        out = absorbed + row * width + kv_lora;
        plain += row * nope;
        passed_on = nope;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < passed_on + pairs; i += THREADS) {
        if (i < passed_on) {
            plain[i] = OUT(in[i]);
            continue;
        }
        const int pair = i - passed_on;
        const float even = in[passed_on + 2 * pair], odd = in[passed_on + 2 * pair + 1];
        const float c = cosines[position * pairs + pair], s = sines[position * pairs + pair];
        out[pair] = OUT(even * c - odd * s);
        out[pairs + pair] = OUT(odd * c + even * s);
    }
}
