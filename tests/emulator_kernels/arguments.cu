// Parameters of all kinds, for the checks of a launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* a comment with extern "C" __global__ void not_a_kernel(int x) in it */
extern "C" __global__ void __launch_bounds__(BLOCK, (2)) arguments(const float* __restrict__ x,  // [n], or null
                                                                   const TYPE* typed,
                                                                   const unsigned int* words, const uint4 *vectors,
                                                                   const void* anything, double* y,  // [8], written
                                                                   int i, long long l, float f, unsigned u, bool b)
{
    y[0] = x ? double(x[0]) : -1.0;
    y[1] = float(typed[0]);
    y[2] = words[0];
    y[3] = vectors[0].w;
    y[4] = anything ? 1.0 : 0.0;
    y[5] = double(i) + double(l);
    y[6] = f;
    y[7] = u + (b ? 0.5 : 0.0);
}

extern "C" __global__ void last_row(const float* x, float* y, long long stride, int row)
{
    y[threadIdx.x] = x[row * stride + threadIdx.x];
}

extern "C" __global__ void no_parameters() {}
