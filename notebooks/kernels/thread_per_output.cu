// thread_per_output: y = x · dequantize(qweight, scales)ᵀ, the plain loop.
//
// Idea      a thread computes one element of y, from the first input to the last.
// Grid      (outputs / 128, rows), 128 threads.
// Invariant a thread knows one row of x and no other.
extern "C" __global__ void thread_per_output(const float* __restrict__ x,           // [rows, in]
                                             const unsigned* __restrict__ qweight,  // [out, in / 8]
                                             const float* __restrict__ scales,      // [out, in / 32]
                                             float* __restrict__ y,                 // [rows, out]
                                             int rows, int out_features, int in_features)
{
    const size_t out = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (out >= out_features)
        return;
    float sum = 0.0f;
    for (int i = 0; i < in_features; ++i) {
        const unsigned word = qweight[out * (in_features / 8) + i / 8];
        const float scale = scales[out * (in_features / 32) + i / 32];
        const float w = float(int(word >> (4 * (i % 8)) & 15) - 8) * scale;
        sum = fmaf(w, x[row * in_features + i], sum);
    }
    y[row * out_features + out] = sum;
}
