// tree_attention.cuh: how a row's keys are cut into tiles and splits, and where its ancestors lie.
#pragma once

#include <cuda_bf16.h>

constexpr int THREADS = 256;    // of a block that takes a split
constexpr int TILE = 64;        // keys
constexpr int MAX_PATH = 1024;  // ancestors of a node
constexpr int SPLIT_TILES = 16;

__device__ __forceinline__ int tiles_of(int keys) { return (keys + TILE - 1) / TILE; }

// Tiles in each split of a row with so many tiles, but for the last: SPLIT_TILES in a split, as the bounds allow.
__device__ __forceinline__ int split_length(int tiles, int min_splits, int max_splits)
{
    const int splits = min(max_splits, max(min_splits, tiles / SPLIT_TILES));
    return (tiles + splits - 1) / splits;
}

// Two numbers as bfloat16, the first in the low half.
__device__ __forceinline__ unsigned two_bfloat16(float low, float high)
{
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<unsigned&>(both);
}

// A row's ancestors of depth first, first + 1, …: as far as they are the first nodes in their order, as in a chain,
// all threads write them; the rest is walked.
__device__ void write_path(unsigned short* path, int* parents_here, const int* parents, int nodes, int node, int depth,
                           int first)
{
    for (int i = threadIdx.x; i < nodes; i += THREADS)
        parents_here[i] = parents[i];
    for (int at = first + threadIdx.x; at < depth; at += THREADS)
        path[at - first] = at;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int at = depth; at > first && node != at;) {
            node = parents_here[node];
            path[--at - first] = node;
        }
    __syncthreads();
}

