// cache_commit: move the accepted nodes' rows to the end of the prefix, in place, in every layer.
//
// Idea      One thread a column, row after row. The path ascends, so a row is only ever overwritten after it was
//           read: row j receives node path[j] ≥ j.
// Grid      (layers, features / threads), any number of threads.
#include <cuda_bf16.h>

#include "turn.cuh"

extern "C" __global__ void cache_commit(VALUE* cache,                        // [layers, capacity, features]
                                        const int* prefix_len,               // [1]
                                        const int* path,                     // [max_path]
                                        const int* length,                   // [1]
                                        int features, long long layer_stride)
{
    take_turn();
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= features)
        return;
    VALUE* rows = cache + blockIdx.x * layer_stride + size_t(*prefix_len) * features + column;
    for (int j = 0; j < *length; ++j)
        rows[size_t(j) * features] = rows[size_t(path[j]) * features];
}
