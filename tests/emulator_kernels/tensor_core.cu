// The functions of ptx.cuh that load and multiply tiles; one warp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

// d = a · b + c, with a [16, 16] and b [8, 16] (its transpose) as T, staged by cp.async and loaded by ldmatrix.
template <class T, class Mma>
__device__ void multiply(const T* a, const T* b, const float* c, float* d, Mma mma)
{
    __shared__ __align__(16) T tile_a[16][24], tile_b[8][24];  // rows 48 bytes apart
    const int lane = threadIdx.x;
    cp_async_16(&tile_a[lane / 2][lane % 2 * 8], a + lane * 8);
    if (lane < 16)
        cp_async_16(&tile_b[lane / 2][lane % 2 * 8], b + lane * 8);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();

    unsigned fragment_a[4], fragment_b[2];
    ldmatrix_x4(fragment_a, &tile_a[lane % 16][lane / 16 * 8]);
    ldmatrix_x2(fragment_b, &tile_b[lane % 8][lane / 8 % 2 * 8]);
    const int at = lane / 4 * 8 + lane % 4 * 2;
    const float fragment_c[4] = {c[at], c[at + 1], c[at + 64], c[at + 65]};
    float fragment_d[4];
    mma(fragment_d, fragment_a, fragment_b, fragment_c);
    d[at] = fragment_d[0];
    d[at + 1] = fragment_d[1];
    d[at + 64] = fragment_d[2];
    d[at + 65] = fragment_d[3];
}

extern "C" __global__ void multiply_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c, float* d)
{
    multiply(a, b, c, d, [](float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
        mma_m16n8k16_bf16(d, a, b, c);
    });
}

extern "C" __global__ void multiply_fp16(const __half* a, const __half* b, const float* c, float* d)
{
    multiply(a, b, c, d, [](float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4]) {
        mma_m16n8k16_fp16(d, a, b, c);
    });
}

// The registers of all four forms of ldmatrix: [4 forms][4 registers][32 lanes].
extern "C" __global__ void load_matrices(const unsigned short* x, unsigned* y)
{
    __shared__ __align__(16) unsigned short tile[32 * 8];
    for (int i = 0; i < 8; ++i)
        tile[threadIdx.x * 8 + i] = x[threadIdx.x * 8 + i];
    __syncwarp();
    const unsigned short* row = tile + threadIdx.x * 8;
    unsigned four[4], two[2];
    auto store = [&](int form, const unsigned* registers, int count) {
        for (int r = 0; r < count; ++r)
            y[(form * 4 + r) * 32 + threadIdx.x] = registers[r];
    };
    ldmatrix_x4(four, row);
    store(0, four, 4);
    ldmatrix_x4_trans(four, row);
    store(1, four, 4);
    ldmatrix_x2(two, row);
    store(2, two, 2);
    ldmatrix_x2_trans(two, row);
    store(3, two, 2);
}

// Two groups of copies: what shared memory holds with none, one and both of them waited for; lanes 24 on copy zeros.
extern "C" __global__ void copy_groups(const int* x, int* y)
{
    __shared__ __align__(16) int first[32], second[128];
    const int lane = threadIdx.x;
    first[lane] = second[4 * lane] = -1;
    __syncwarp();
    cp_async_4(&first[lane], x + lane, lane < 24);
    cp_async_commit();
    cp_async_16(&second[4 * lane], x + 4 * lane, lane < 24);
    cp_async_commit();
    y[lane] = first[lane];  // too early
    cp_async_wait<1>();
    y[32 + lane] = first[lane];
    y[64 + lane] = second[4 * lane];  // too early
    cp_async_wait<0>();
    for (int i = 0; i < 4; ++i)
        y[96 + 4 * lane + i] = second[4 * lane + i];
}
