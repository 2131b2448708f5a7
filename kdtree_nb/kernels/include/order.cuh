// order.cuh: a number as an integer with the same order, and with its token as one 64-bit key; the largest key is the
// highest number, of equal ones the lowest id.
#pragma once

typedef unsigned long long Key;

// NaN sorts as −inf, −0 as 0; no number gives 0.
__device__ __forceinline__ unsigned ordered(float value)
{
    const unsigned bits = __float_as_uint(isnan(value) ? -INFINITY : value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(unsigned ordered)
{
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__device__ __forceinline__ Key key_of(float value, int id)
{
    return Key(ordered(value)) << 32 | (0xffffffffu - unsigned(id));
}
