// latent_write: what MLA keeps of a token: its latent, normalised, and its rotated key, into the cache.
//
// Idea      two blocks a token, so that neither half waits for what the other one reads; row prefix_len + i of the
//           cache belongs to node i of the tree.
// Grid      (tokens, 2): the latent, the key; THREADS threads, which depends on the size of the latent alone.
// Invariant a row depends on its token alone; the order of its sum is fixed.
#include <cuda_bf16.h>

#include "norm.cuh"
#include "turn.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_write(const float* compressed,  // [tokens, kv_lora + rope], token_stride apart
                 const float* weight,      // [kv_lora]
                 const float* cosines,     // [positions, rope / 2]
                 const float* sines,       // [positions, rope / 2]
                 const int* prefix_len,    // [1]
                 const int* depths,        // [tokens], −1 in padding
                 CACHE* cache,             // [capacity, kv_lora + rope]
                 int kv_lora, int pairs, float eps, long long token_stride)
{
    const int token = blockIdx.x;
    const float* in = compressed + token * token_stride;
    Values latent, scale;
    let_next_begin();
    if (blockIdx.y == 0)
        load_values(scale, weight, kv_lora);
    wait_for_turn();
    if (blockIdx.y == 0) {
        load_values(latent, in, kv_lora);
        write_normed(latent, scale, cache + size_t(*prefix_len + token) * (kv_lora + 2 * pairs), kv_lora, eps);
        return;
    }
    in += kv_lora;
    CACHE* out = cache + size_t(*prefix_len + token) * (kv_lora + 2 * pairs) + kv_lora;
    const size_t position = *prefix_len + max(depths[token], 0);
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const float c = cosines[position * pairs + pair], s = sines[position * pairs + pair];
        const float even = in[2 * pair], odd = in[2 * pair + 1];
        out[pair] = CACHE(even * c - odd * s);
        out[pairs + pair] = CACHE(odd * c + even * s);
    }
}
