// warp_per_output: y = x · dequantize(qweight, scales)ᵀ, neighbouring threads at neighbouring words.
//
// Idea      a warp computes one element of y: lane l takes the words l, l + 32, …, and the 32 sums are added by
//           shuffles.
// Grid      (outputs / 4, rows), 128 threads.
// Invariant a warp knows one row of x and no other.
#include "reduce.cuh"

extern "C" __global__ void warp_per_output(const float* __restrict__ x,           // [rows, in]
                                           const unsigned* __restrict__ qweight,  // [out, in / 8]
                                           const float* __restrict__ scales,      // [out, in / 32]
                                           float* __restrict__ y,                 // [rows, out]
                                           int rows, int out_features, int in_features)
{
    const size_t out = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    if (out >= out_features)  // all lanes of a warp, or none
        return;
    float sum = 0.0f;
    for (int at = threadIdx.x % 32; at < in_features / 8; at += 32) {
        const unsigned word = qweight[out * (in_features / 8) + at];
        const float scale = scales[out * (in_features / 32) + at / 4];
        for (int i = 0; i < 8; ++i) {
            const float w = float(int(word >> (4 * i) & 15) - 8) * scale;
            sum = fmaf(w, x[row * in_features + at * 8 + i], sum);
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        y[row * out_features + out] = sum;
}
