// block_write: what attention of a drafter's layers takes of projections: queries, and in its cache keys and values.
//
// Idea      One block a token, layer and head: queries and keys are normalised, then rotated, element i of a head with
//           element i + size / 2; values are copied. Token i has position and row prefix_len + i.
// Grid      (tokens, heads + 2 · kv_heads, layers), whole warps; how many depends on the size of a head alone.
// Invariant a head depends on itself and its position alone; the order of its sum is fixed, that of rms_norm.cu.
#include <cuda_bf16.h>

#include "reduce.cuh"
#include "turn.cuh"

extern "C" __global__ void block_write(const float* projected,                // [tokens, layers, every head, size]
                                       const float* __restrict__ query_norm,  // [layers, size]
                                       const float* __restrict__ key_norm,    // [layers, size]
                                       const float* __restrict__ cosines,     // [positions, size / 2]
                                       const float* __restrict__ sines,       // [positions, size / 2]
                                       const int* prefix_len,                 // [1]
                                       float* __restrict__ queries,           // [tokens, layers, heads, size]
                                       CACHE* __restrict__ keys,              // [layers, capacity, kv_heads, size]
                                       CACHE* __restrict__ values,            // [layers, capacity, kv_heads, size]
                                       int heads, int kv_heads, int size, int capacity, float eps)
{
    take_turn();
    const int token = blockIdx.x, head = blockIdx.y, layer = blockIdx.z, half = size / 2;
    const size_t position = *prefix_len + token, row = (layer * size_t(capacity) + position) * kv_heads;
    const size_t of_layer = size_t(token) * gridDim.z + layer;
    const float* in = projected + (of_layer * gridDim.y + head) * size;
    if (head >= heads + kv_heads) {
        for (int i = threadIdx.x; i < size; i += blockDim.x)
            values[(row + head - heads - kv_heads) * size + i] = CACHE(in[i]);
        return;
    }
    const bool is_query = head < heads;
    const float* weight = (is_query ? query_norm : key_norm) + layer * size;
    const auto write = [&](int i, float turned) {
        if (is_query)
            queries[(of_layer * heads + head) * size + i] = turned;
        else
            keys[(row + head - heads) * size + i] = CACHE(turned);
    };
    float squares = 0.0f;
    for (int i = threadIdx.x; i < size; i += blockDim.x)
        squares = fmaf(in[i], in[i], squares);
    const float root = sqrtf(block_sum(squares) / size + eps);
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float c = cosines[position * half + i], s = sines[position * half + i];
        const float first = in[i] / root * weight[i], second = in[half + i] / root * weight[half + i];
        write(i, first * c - second * s);
        write(half + i, second * c + first * s);
    }
}
