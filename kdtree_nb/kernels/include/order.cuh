// order.cuh: a number and its token as one 64-bit key; the largest key is the highest number, of equal ones the lowest id.
#pragma once

typedef unsigned long long Key;

// NaN sorts as −inf, −0 as 0.
__device__ __forceinline__ Key key_of(float value, int id)
{
    const unsigned bits = __float_as_uint(isnan(value) ? -INFINITY : value + 0.0f);
    const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return Key(ordered) << 32 | (0xffffffffu - unsigned(id));
}
