// The functions of ptx.cuh for the products of a warpgroup; one of them.
#include "ptx.cuh"

// Rows of 64 numbers in shared memory, 16 bytes c of a row in the place of c ^ row % 8.
__device__ void stage(uint4* to, const uint4* from, int rows)
{
    for (int i = threadIdx.x; i < rows * 8; i += 128)
        to[i / 8 * 8 + (i % 8 ^ i / 8 % 8)] = from[i];
}

// d = a · bᵀ, with a [64, 64] and b [32, 64]; twice, the second from registers and added to the first. `early` holds d before the wait.
extern "C" __global__ void multiply_rows(const uint4* a, const uint4* b, float* d, float* early, int mistake)
{
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* const shared_a = reinterpret_cast<uint4*>(dynamic_shared);
    uint4* const shared_b = shared_a + 64 * 8;
    stage(shared_a, a, 64);
    stage(shared_b, b, 32);
    fence_shared_for_wgmma();
    __syncthreads();
    float sums[16];
    unsigned fragments[4][4];
    for (int step = 0; step < 4; ++step) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
        ldmatrix_x4(fragments[step], shared_a + row * 8 + ((2 * step + lane / 16) ^ row % 8));
    }
    wgmma_fence();
    for (int step = 0; step < 4; ++step)
        wgmma_m64n32k16(sums, matrix_descriptor(shared_a) + 2 * step, matrix_descriptor(shared_b) + 2 * step, step > 0);
    for (int step = 0; step < 4; ++step)
        wgmma_m64n32k16(sums, fragments[step], matrix_descriptor(shared_b) + 2 * step, true);
    wgmma_commit();
    early[threadIdx.x] = sums[threadIdx.x % 16];
    if (mistake && threadIdx.x == 77)
        shared_b[3].x ^= 1u;
    wgmma_wait<0>();
    wgmma_use(sums);
    const int row = threadIdx.x / 4 % 8 + threadIdx.x / 32 * 16, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < 16; ++i)
        d[(row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + column + i % 2] = sums[i];
}

// d = a · b, with a [64, 32] in registers and b [32, 64]; in two groups, `early` waits for the first of them.
extern "C" __global__ void multiply_columns(const unsigned* a, const uint4* b, float* d, float* early)
{
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* const shared_b = reinterpret_cast<uint4*>(dynamic_shared);
    stage(shared_b, b, 32);
    fence_shared_for_wgmma();
    __syncthreads();
    const int row = threadIdx.x / 4 % 8 + threadIdx.x / 32 * 16, pair = threadIdx.x % 4;
    float first[32] = {}, sums[32] = {};
    unsigned fragments[2][4];
    for (int step = 0; step < 2; ++step)
        for (int r = 0; r < 4; ++r)
            fragments[step][r] = a[(row + r % 2 * 8) * 16 + step * 8 + r / 2 * 4 + pair];
    wgmma_fence();
    wgmma_m64n64k16(first, fragments[0], matrix_descriptor(shared_b));
    wgmma_commit();
    for (int step = 0; step < 2; ++step)
        wgmma_m64n64k16(sums, fragments[step], matrix_descriptor(shared_b) + step * (2 * 1024 >> 4));
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_use(first);
    for (int i = 0; i < 32; ++i)
        early[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + 2 * pair + i % 2] = first[i];
    wgmma_wait<0>();
    wgmma_use(sums);
    for (int i = 0; i < 32; ++i)
        d[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + 2 * pair + i % 2] = sums[i];
}
