// gemm.cuh: the product that every projection shares: 8 rows of x by 32 outputs, in exact fp32.
//
// Idea      A block of 256 threads is 32 outputs × 8 slices. Inputs come in groups of 32; slice s takes the
//           groups s, s + 8, …, so that 8 neighbouring threads read one contiguous stretch of a weight's row.
//           Each thread keeps one sum for each of the 8 rows; at the end thread (output, s) adds the 8 slices'
//           sums of row s, first to last, and holds one element of the result.
// Invariant an element's order of summation depends on in_features alone: not on the number of rows, not on
//           which of the 8 places its row has.
#pragma once

#include "turn.cuh"

constexpr int GROUP = 32;        // inputs that share a scale
constexpr int ROWS = 8;          // rows of x a block takes
constexpr int SLICES = 8;        // equal to ROWS: after the sum, a thread's slice is its row
constexpr int OUTPUTS = 32;      // outputs a block computes
constexpr int THREADS = OUTPUTS * SLICES;
constexpr int CHUNK = 32;        // groups staged in shared memory at a time
constexpr int STRIDE = GROUP * ROWS + 4;  // of a staged group: 4 more, so that 8 slices meet 8 different banks

// Weights of consecutive outputs, read group by group; what lies beyond in_features is 0.
template <class T> struct DenseWeight {
    const T* values;       // [out, in]
    int in_features;

    __device__ DenseWeight(const void* values, const void*, size_t first_out, int in_features)
        : values(static_cast<const T*>(values) + first_out * in_features), in_features(in_features)
    {
    }
    __device__ void load(int out, int group, float (&w)[GROUP]) const
    {
        const T* row = values + size_t(out) * in_features;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const int k = group * GROUP + i;
            w[i] = k < in_features ? float(row[k]) : 0.0f;
        }
    }
};

template <class Scale> struct Int4Weight {
    const uint4* codes;    // [out, in / 32]: 32 codes in offset binary
    const Scale* scales;   // [out, in / 32]
    int in_features;

    __device__ Int4Weight(const void* qweight, const void* scales, size_t first_out, int in_features)
        : codes(static_cast<const uint4*>(qweight) + first_out * (in_features / GROUP)),
          scales(static_cast<const Scale*>(scales) + first_out * (in_features / GROUP)), in_features(in_features)
    {
    }
    __device__ void load(int out, int group, float (&w)[GROUP]) const
    {
        const size_t at = size_t(out) * (in_features / GROUP) + group;
        const uint4 packed = codes[at];
        const float scale = float(scales[at]);
        const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
            w[i] = float(int(words[i / 8] >> (4 * (i % 8)) & 15) - 8) * scale;
    }
};

// The element (output threadIdx.x / 8 of the block, row threadIdx.x % 8) of x · weightᵀ.
//
// row(r)      pointer to the r-th row's in_features floats, or null: the row is then all zeros
// out_exists  false where the block's outputs reach beyond the weight's: nothing is loaded
template <class Weight, class Row>
__device__ float gemm_tile(const Weight& weight, int out, bool out_exists, Row row)
{
    __shared__ float staged[CHUNK * STRIDE];          // [group][input][row]
    __shared__ float partial[OUTPUTS][SLICES][ROWS + 1];
    const int output = threadIdx.x / SLICES, slice = threadIdx.x % SLICES;
    const int groups = (weight.in_features + GROUP - 1) / GROUP;

    float sum[ROWS] = {};
    for (int first = 0; first < groups; first += CHUNK) {
        const int count = min(CHUNK, groups - first);
        __syncthreads();  // what is in shared memory has been read: the chunk before, or another call's sums
        for (int r = 0; r < ROWS; ++r) {
            const float* x = row(r);
            for (int i = threadIdx.x; i < count * GROUP; i += THREADS) {
                const int k = first * GROUP + i;
                staged[i / GROUP * STRIDE + i % GROUP * ROWS + r] = x && k < weight.in_features ? x[k] : 0.0f;
            }
        }
        __syncthreads();
        for (int group = slice; out_exists && group < count; group += SLICES) {
            float w[GROUP];
            weight.load(out, first + group, w);
            const float* x = staged + group * STRIDE;
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    sum[r] = fmaf(w[i], x[i * ROWS + r], sum[r]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        partial[output][slice][r] = sum[r];
    __syncthreads();
    float total = 0.0f;
    for (int s = 0; s < SLICES; ++s)
        total += partial[output][s][slice];
    return total;
}

// y = x · weightᵀ for a stack of products, on a grid of (rows / 8, outputs / 32, stack) blocks; rows of x and y may
// lie apart, as may the stack's matrices; weights are dense.
template <class Weight>
__device__ void gemm(const Weight& weight, const float* x, float* y, int rows, int out_features, long long x_row,
                     long long x_stack, long long y_row, long long y_stack)
{
    const int out = blockIdx.y * OUTPUTS + threadIdx.x / SLICES;
    const int first = blockIdx.x * ROWS;
    x += blockIdx.z * x_stack;
    const float value = gemm_tile(weight, out, out < out_features, [&](int r) {
        return first + r < rows ? x + (first + r) * x_row : nullptr;
    });
    let_next_begin();
    const int row = first + threadIdx.x % SLICES;
    if (row < rows && out < out_features)
        y[blockIdx.z * y_stack + row * y_row + out] = value;
}
