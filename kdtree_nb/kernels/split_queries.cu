// split_queries: a head's part without position, for the product that absorbs the keys' weight, and its rotated part in
// the place where the product's result is expected before it.
//
// Idea      one thread a number or a pair; cos and sin come from a table, so that they are the specification's to the bit.
// Grid      (tokens, heads), any number of threads.
// Invariant elementwise.
#include <cuda_bf16.h>

#include "turn.cuh"

extern "C" __global__ void split_queries(const float* x,                     // [tokens, heads, nope + rope], strides below
                                         const float* __restrict__ cosines,  // [positions, rope / 2]
                                         const float* __restrict__ sines,    // [positions, rope / 2]
                                         const int* prefix_len,              // [1]
                                         const int* depths,                  // [tokens], −1 in padding
                                         OUT* __restrict__ plain,            // [tokens, heads, nope]
                                         OUT* __restrict__ absorbed,         // [tokens, heads, kv_lora + rope]
                                         int nope, int kv_lora, int pairs, long long x_token, long long x_head)
{
    take_turn();
    const int token = blockIdx.x, head = blockIdx.y;
    const size_t row = size_t(token) * gridDim.y + head;
    const float* in = x + token * x_token + head * x_head;
    for (int i = threadIdx.x; i < nope; i += blockDim.x)
        plain[row * nope + i] = OUT(in[i]);

    const size_t position = *prefix_len + max(depths[token], 0);
    OUT* out = absorbed + row * (kv_lora + 2 * pairs) + kv_lora;
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const float c = cosines[position * pairs + pair], s = sines[position * pairs + pair];
        const float even = in[nope + 2 * pair], odd = in[nope + 2 * pair + 1];
        out[pair] = OUT(even * c - odd * s);
        out[pairs + pair] = OUT(odd * c + even * s);
    }
}
