// embed: rows of a table, as float32; those behind the tokens are one token's.
//
// Grid      (rows), any number of threads.
// Invariant elementwise.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "turn.cuh"

extern "C" __global__ void embed(const VALUE* __restrict__ table,      // [vocab, features]
                                 const int* token_ids,                 // [tokens], −1 in padding
                                 float* __restrict__ y,                // [rows, features]
                                 int features, int tokens, int rest)
{
    take_turn();
    const int token = blockIdx.x < tokens ? token_ids[blockIdx.x] : rest;
    const VALUE* row = table + size_t(max(token, 0)) * features;
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        y[size_t(blockIdx.x) * features + i] = float(row[i]);
}
