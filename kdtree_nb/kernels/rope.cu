// rope: rotate the pairs (0, 1), (2, 3), … of each head by the token's position.
//
// Idea      one thread a pair; cos and sin come from a table, so that they are the specification's to the bit.
// Grid      (tokens, heads · pairs / threads).
// Invariant elementwise.
extern "C" __global__ void rope(const float* __restrict__ x,        // [tokens, heads, rope], strides below
                                const float* __restrict__ cosines,  // [positions, rope / 2]
                                const float* __restrict__ sines,    // [positions, rope / 2]
                                const int* __restrict__ prefix_len, // [1]
                                const int* __restrict__ depths,     // [tokens], −1 in padding
                                float* __restrict__ y,              // [tokens, heads, rope]: evens, then odds
                                int heads, int pairs, long long x_token, long long x_head)
{
    const int token = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= heads * pairs)
        return;
    const int head = i / pairs, pair = i % pairs;
    const float* in = x + token * x_token + head * x_head + 2 * pair;
    float* out = y + (size_t(token) * heads + head) * 2 * pairs + pair;
    const size_t position = *prefix_len + max(depths[token], 0);
    const float c = cosines[position * pairs + pair], s = sines[position * pairs + pair];
    const float even = in[0], odd = in[1];
    out[0] = even * c - odd * s;
    out[pairs] = odd * c + even * s;
}
