// latent_write: what MLA keeps of a token: its latent, normalised, and its rotated key, into the cache.
//
// Idea      one block a token; row prefix_len + i of the cache belongs to node i of the tree.
// Grid      (tokens), whole warps; how many depends on the size of the latent alone.
// Invariant a row depends on its token alone; the order of its sum is fixed.
#include <cuda_bf16.h>

#include "reduce.cuh"

extern "C" __global__ void latent_write(const float* __restrict__ compressed,  // [tokens, kv_lora + rope], token_stride apart
                                        const float* __restrict__ weight,      // [kv_lora]
                                        const float* __restrict__ cosines,     // [positions, rope / 2]
                                        const float* __restrict__ sines,       // [positions, rope / 2]
                                        const int* __restrict__ prefix_len,    // [1]
                                        const int* __restrict__ depths,        // [tokens], −1 in padding
                                        CACHE* __restrict__ cache,             // [capacity, kv_lora + rope]
                                        int kv_lora, int pairs, float eps, long long token_stride)
{
    const int token = blockIdx.x;
    const float* in = compressed + token * token_stride;
    CACHE* out = cache + size_t(*prefix_len + token) * (kv_lora + 2 * pairs);
    float squares = 0.0f;
    for (int i = threadIdx.x; i < kv_lora; i += blockDim.x)
        squares = fmaf(in[i], in[i], squares);
    const float root = sqrtf(block_sum(squares) / kv_lora + eps);
    for (int i = threadIdx.x; i < kv_lora; i += blockDim.x)
        out[i] = CACHE(in[i] / root * weight[i]);

    const size_t position = *prefix_len + max(depths[token], 0);
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const float c = cosines[position * pairs + pair], s = sines[position * pairs + pair];
        const float even = in[kv_lora + 2 * pair], odd = in[kv_lora + 2 * pair + 1];
        out[kv_lora + pair] = CACHE(even * c - odd * s);
        out[kv_lora + pairs + pair] = CACHE(odd * c + even * s);
    }
}
