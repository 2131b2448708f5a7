// block_write: what attention of a drafter's layer takes of the projections: queries, and in its cache keys and values.
//
// Idea      One block a token and head: queries and keys are normalised, then rotated, element i of a head with element
//           i + size / 2; values are copied. Token i has position and row prefix_len + i.
// Grid      (tokens, heads + 2 · kv_heads), whole warps; how many depends on the size of a head alone.
// Invariant a head depends on itself and its position alone; the order of its sum is fixed, that of rms_norm.cu.
#include "reduce.cuh"
#include "turn.cuh"

extern "C" __global__ void block_write(const float* projected,                // [tokens, heads + 2 · kv_heads, size]
                                       const float* __restrict__ query_norm,  // [size]
                                       const float* __restrict__ key_norm,    // [size]
                                       const float* __restrict__ cosines,     // [positions, size / 2]
                                       const float* __restrict__ sines,       // [positions, size / 2]
                                       const int* prefix_len,                 // [1]
                                       float* __restrict__ queries,           // [tokens, heads, size]
                                       float* __restrict__ keys,              // [capacity, kv_heads, size]
                                       float* __restrict__ values,            // [capacity, kv_heads, size]
                                       int heads, int kv_heads, int size, float eps)
{
    take_turn();
    const int token = blockIdx.x, head = blockIdx.y, half = size / 2;
    const size_t position = *prefix_len + token, row = position * kv_heads;
    const float* in = projected + (size_t(token) * gridDim.y + head) * size;
    if (head >= heads + kv_heads) {
        for (int i = threadIdx.x; i < size; i += blockDim.x)
            values[(row + head - heads - kv_heads) * size + i] = in[i];
        return;
    }
    const bool is_query = head < heads;
    const float* weight = is_query ? query_norm : key_norm;
    float* out = is_query ? queries + (size_t(token) * heads + head) * size : keys + (row + head - heads) * size;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < size; i += blockDim.x)
        squares = fmaf(in[i], in[i], squares);
    const float root = sqrtf(block_sum(squares) / size + eps);
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float c = cosines[position * half + i], s = sines[position * half + i];
        const float first = in[i] / root * weight[i], second = in[half + i] / root * weight[half + i];
        out[i] = first * c - second * s;
        out[half + i] = second * c + first * s;
    }
}
