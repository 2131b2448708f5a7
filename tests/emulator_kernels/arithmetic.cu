// Intrinsics, element by element.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"

__constant__ int table[4] = {2, 3, 5, 7};

extern "C" __global__ void bits(const unsigned* x, const unsigned* y, const unsigned* z, unsigned* out, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const unsigned results[] = {
        unsigned(__popc(x[i])),
        unsigned(__ffs(int(x[i]))),
        unsigned(__clz(int(x[i]))),
        __brev(x[i]),
        __funnelshift_l(x[i], y[i], z[i]),
        __funnelshift_r(x[i], y[i], z[i]),
        __byte_perm(x[i], y[i], z[i]),
        __umulhi(x[i], y[i]),
        unsigned(__mulhi(int(x[i]), int(y[i]))),
        lop3<0xea>(x[i], y[i], z[i]),
        lop3<0x1b>(x[i], y[i], z[i]),
        unsigned(__popcll((unsigned long long)(x[i]) << 32 | y[i])),
        unsigned(__clzll((long long)((unsigned long long)(x[i]) << 32 | y[i]))),
        unsigned(min(int(x[i]), int(y[i]))),
        max(x[i], y[i]),
        unsigned(abs(int(x[i]) >> 1)),
        unsigned(table[x[i] % 4]),
    };
    for (int k = 0; k < int(sizeof results / sizeof *results); ++k)
        out[k * n + i] = results[k];
}

extern "C" __global__ void floats(const float* x, const float* y, const float* z, float* out, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    const float results[] = {
        x[i] * y[i] + z[i],
        fmaf(x[i], y[i], z[i]),
        fma(x[i], y[i], z[i]),
        __fmaf_rn(x[i], y[i], z[i]),
        __fadd_rn(__fmul_rn(x[i], y[i]), z[i]),
        __fdiv_rn(x[i], y[i]),
        sqrtf(fabsf(x[i])),
        rsqrtf(fabsf(x[i])),
        expf(x[i]),
        logf(fabsf(x[i])),
        fminf(x[i], y[i]),
        fmaxf(x[i], y[i]),
        rintf(x[i]),
        floorf(x[i]),
        __int_as_float(__float_as_int(x[i])),
        float(__float2int_rn(x[i])),
        float(__float2int_rz(x[i])),
        exp(x[i]),
        __fdividef(x[i], y[i]),
        tanhf(x[i]),
    };
    for (int k = 0; k < int(sizeof results / sizeof *results); ++k)
        out[k * n + i] = results[k];
}

extern "C" __global__ void constants(float* out)
{
    out[0] = INFINITY;
    out[1] = -INFINITY;
    out[2] = NAN;
    out[3] = float(__float2int_rn(NAN));
    out[4] = float(__float2int_rn(3e9f));
}

// There and back, and what rounds: x, y, z and the results as bits.
template <class T> __device__ void narrow(T x, T y, T z, float wide, T* out, float* back, int n)
{
    const int i = threadIdx.x + blockIdx.x * blockDim.x;
    out[i] = T(wide);
    out[n + i] = x + y;
    out[2 * n + i] = x - y;
    out[3 * n + i] = x * y;
    out[4 * n + i] = __hfma(x, y, z);
    out[5 * n + i] = -x;
    back[i] = float(x);
}

extern "C" __global__ void halves(const __half* x, const __half* y, const __half* z, const float* wide, __half* out,
                                  float* back, int n)
{
    const int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n)
        narrow(x[i], y[i], z[i], wide[i], out, back, n);
}

extern "C" __global__ void bfloats(const __nv_bfloat16* x, const __nv_bfloat16* y, const __nv_bfloat16* z,
                                   const float* wide, __nv_bfloat16* out, float* back, int n)
{
    const int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n)
        narrow(x[i], y[i], z[i], wide[i], out, back, n);
}

// Two codes of 4 bits to a word of two halves, as the fast kernels do it: lop3 into the mantissa, one subtraction.
extern "C" __global__ void unpack_pairs(const unsigned* codes, float2* out)
{
    const unsigned magic = lop3<0xea>(codes[threadIdx.x], 0x000f000fu, 0x43004300u);
    const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&magic),
                                        __bfloat162bfloat162(__float2bfloat16(136.0f)));
    out[threadIdx.x] = __bfloat1622float2(pair);
}

// Vector types: y = (w, x, y, z) of x, and their sizes.
extern "C" __global__ void vectors(const uint4* x, uint4* y, int* sizes)
{
    const uint4 v = x[threadIdx.x];
    y[threadIdx.x] = make_uint4(v.w, v.x, v.y, v.z);
    const int all[] = {sizeof(float2),         alignof(float2),  sizeof(float3),  alignof(float3), sizeof(float4),
                       alignof(float4),        sizeof(uint2),    alignof(uint2),  sizeof(short4),  alignof(short4),
                       sizeof(uchar4),         alignof(uchar4),  sizeof(double2), sizeof(__half2), alignof(__half2),
                       sizeof(__nv_bfloat162)};
    for (int i = 0; threadIdx.x == 0 && i < int(sizeof all / sizeof *all); ++i)
        sizes[i] = all[i];
}
