// One way each of doing what CUDA leaves undefined; what the emulator has to say about them is in test_emulator.py.
#include "ptx.cuh"

extern "C" __global__ void barrier_after_return(int* y)
{
    if (threadIdx.x == 5)
        return;
    __syncthreads();
    y[threadIdx.x] = 1;
}

extern "C" __global__ void barrier_in_a_branch(int* y)
{
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    y[threadIdx.x] = 1;
}

extern "C" __global__ void shuffle_from_returned(int* y)
{
    if (threadIdx.x == 7)
        return;
    y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
}

extern "C" __global__ void shuffle_from_absent(int* y)  // with a block of 48 threads
{
    y[threadIdx.x] = __shfl_down_sync(0xffffffffu, int(threadIdx.x), 16);
}

extern "C" __global__ void shuffle_in_a_branch(int* y)
{
    if (threadIdx.x < 16)
        y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
    else
        __syncthreads();
}

extern "C" __global__ void shuffle_outside_mask(int* y)
{
    if (threadIdx.x < 16)
        y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 20);
}

extern "C" __global__ void mask_without_caller(int* y)
{
    y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0);
}

extern "C" __global__ void masks_differ(int* y)
{
    const unsigned mask = threadIdx.x == 3 ? 0x0000000fu : 0xffffffffu;
    y[threadIdx.x] = __ballot_sync(mask, 1);
}

extern "C" __global__ void functions_differ(int* y)
{
    if (threadIdx.x == 3)
        y[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
    else
        y[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
}

extern "C" __global__ void bad_width(int* y)
{
    y[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0, 12);
}

extern "C" __global__ void half_a_warp_multiplies(int* y)  // with a block of 16 threads
{
    const unsigned a[4] = {}, b[2] = {};
    float c[4] = {};
    mma_m16n8k16_bf16(c, a, b, c);
    y[threadIdx.x] = int(c[0]);
}

extern "C" __global__ void misaligned_copy(int* y)
{
    __shared__ __align__(16) int tile[8];
    cp_async_16(tile + 1, y);
    cp_async_wait<0>();
}

extern "C" __global__ void misaligned_matrix(int* y)
{
    __shared__ __align__(16) unsigned short tile[512];
    unsigned r[4];
    ldmatrix_x4(r, tile + threadIdx.x * 9);
    y[threadIdx.x] = r[0];
}

extern "C" __global__ void failing_assertion(int* y)
{
    assert(threadIdx.x != 9);
    y[threadIdx.x] = 1;
}

extern "C" __global__ void trap(int* y)
{
    if (threadIdx.x == 9)
        __trap();
    y[threadIdx.x] = 1;
}

extern "C" __global__ void beyond_dynamic_shared(int* y, int words)
{
    extern __shared__ unsigned char dynamic_shared[];
    reinterpret_cast<int*>(dynamic_shared)[words] = 1;
    y[0] = 1;
}

extern "C" __global__ void null_pointer(int* y)
{
    y[threadIdx.x] = 1;
}

extern "C" __global__ void divide(int* y, int by)
{
    y[threadIdx.x] = 7 / by;
}

extern "C" __global__ void wait_for_nobody(int* y)
{
    __shared__ int flag;
    atomicExch(&flag, 0);
    while (atomicAdd(&flag, 0) == 0)
        __nanosleep(20);
    y[threadIdx.x] = 1;
}

// For sanitizers: one element beyond an array.
extern "C" __global__ void beyond_global(int* y, int n)
{
    y[n] = 1;
}

extern "C" __global__ void beyond_static_shared(int* y, int n)
{
    __shared__ int tile[32];
    int* at = tile;
    at[n] = 1;
    y[0] = at[n];
}

extern "C" __global__ void signed_overflow(int* y, int n)
{
    y[0] = 0x7fffffff + n;
}
