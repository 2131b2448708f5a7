// gemv: y = dequantize(qweight, scales) · x, one warp a row, 8 codes a thread and step.
//
// What the emulator's speed is measured with: [1024, 512] is 32,768 threads.
extern "C" __global__ void gemv(const unsigned* __restrict__ qweight,  // [rows, columns / 8]
                                const float* __restrict__ scales,      // [rows, columns / 32]
                                const float* __restrict__ x,           // [columns]
                                float* __restrict__ y,                 // [rows]
                                int columns)
{
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int word = lane; word < columns / 8; word += 32) {
        const unsigned codes = qweight[row * (columns / 8) + word];
        const float scale = scales[row * (columns / 32) + word / 4];
        float part = 0.0f;
        for (int i = 0; i < 8; ++i)
            part = fmaf(float(int(codes >> (4 * i) & 15) - 8), x[word * 8 + i], part);
        sum = fmaf(part, scale, sum);
    }
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0)
        y[row] = sum;
}
