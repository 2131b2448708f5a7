// embed: rows of a table, as float32.
//
// Grid      (tokens), any number of threads.
// Invariant elementwise.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "turn.cuh"

extern "C" __global__ void embed(const VALUE* __restrict__ table,      // [rows, features]
                                 const int* token_ids,                 // [tokens], −1 in padding
                                 float* __restrict__ y,                // [tokens, features]
                                 int features)
{
    take_turn();
    const VALUE* row = table + size_t(max(token_ids[blockIdx.x], 0)) * features;
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        y[size_t(blockIdx.x) * features + i] = float(row[i]);
}
