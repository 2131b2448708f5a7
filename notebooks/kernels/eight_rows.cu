// eight_rows: y = x · dequantize(qweight, scales)ᵀ, a weight once in a register serves 8 rows of x.
//
// Idea      as warp_per_output, with 8 sums a lane.
// Grid      (outputs / 4, rows / 8), 128 threads.
// Invariant the 8 sums never meet, and each is formed in an order that in_features alone decides.
#include "reduce.cuh"

constexpr int ROWS = 8;

extern "C" __global__ void eight_rows(const float* __restrict__ x,           // [rows, in]
                                      const unsigned* __restrict__ qweight,  // [out, in / 8]
                                      const float* __restrict__ scales,      // [out, in / 32]
                                      float* __restrict__ y,                 // [rows, out]
                                      int rows, int out_features, int in_features)
{
    const size_t out = blockIdx.x * 4 + threadIdx.x / 32;
    const int first = blockIdx.y * ROWS;
    if (out >= out_features)
        return;
    float sum[ROWS] = {};
    for (int at = threadIdx.x % 32; at < in_features / 8; at += 32) {
        const unsigned word = qweight[out * (in_features / 8) + at];
        const float scale = scales[out * (in_features / 32) + at / 4];
        for (int i = 0; i < 8; ++i) {
            const float w = float(int(word >> (4 * i) & 15) - 8) * scale;
            for (int r = 0; r < ROWS; ++r) {
                const size_t row = min(first + r, rows - 1);  // beyond the last: computed again, not written
                sum[r] = fmaf(w, x[row * in_features + at * 8 + i], sum[r]);
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        const float total = warp_sum(sum[r]);
        if (threadIdx.x % 32 == 0 && first + r < rows)
            y[size_t(first + r) * out_features + out] = total;
    }
}
