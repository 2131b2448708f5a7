// w4a16_gemm: y = x · dequantize(qweight, scales)ᵀ, dequantised on the fly, accumulated in fp32.
//
// Idea      gemm.cuh. One 16-byte load is one group: 32 codes, which share one scale.
// Grid      (rows / 8, outputs / 32, stack), 256 threads.
// Invariant a row's result depends on that row alone: see gemm.cuh.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm.cuh"
#include "turn.cuh"

extern "C" __global__ void w4a16_gemm(const float* x,                     // [stack, rows, in], x_stack and x_row apart
                                      const uint4* __restrict__ qweight,  // [stack, out, in / 32], 32 codes each
                                      const SCALE* __restrict__ scales,   // [stack, out, in / 32]
                                      float* __restrict__ y,              // [stack, rows, out], likewise
                                      int rows, int out_features, int in_features, long long x_row,
                                      long long x_stack, long long y_row, long long y_stack)
{
    wait_for_turn();
    const Int4Weight<SCALE> w(qweight, scales, size_t(blockIdx.z) * out_features, in_features);
    gemm(w, x, y, rows, out_features, x_row, x_stack, y_row, y_stack);
}
