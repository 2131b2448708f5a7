// rope: rotate the pairs (0, 1), (2, 3), … at the end of each head by the token's position.
//
// Idea      one thread a pair; cos and sin come from a table, so that they are the specification's to the bit.
// Grid      (tokens, heads), any number of threads.
// Invariant elementwise.
#include <cuda_bf16.h>

extern "C" __global__ void rope(const float* __restrict__ x,        // [tokens, heads, plain + rope], strides below
                                const float* __restrict__ cosines,  // [positions, rope / 2]
                                const float* __restrict__ sines,    // [positions, rope / 2]
                                const int* __restrict__ prefix_len, // [1]
                                const int* __restrict__ depths,     // [tokens], −1 in padding
                                OUT* __restrict__ y,                // [tokens, heads, plain + rope]: evens, then odds
                                int plain, int pairs, long long x_token, long long x_head)
{
    const int token = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
    const float* in = x + token * x_token + head * x_head;
    OUT* out = y + (size_t(token) * heads + head) * (plain + 2 * pairs);
    for (int i = threadIdx.x; i < plain; i += blockDim.x)
        out[i] = OUT(in[i]);

    const size_t position = *prefix_len + max(depths[token], 0);
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const float c = cosines[position * pairs + pair], s = sines[position * pairs + pair];
        const float even = in[plain + 2 * pair], odd = in[plain + 2 * pair + 1];
        out[plain + pair] = OUT(even * c - odd * s);
        out[plain + pairs + pair] = OUT(odd * c + even * s);
    }
}
