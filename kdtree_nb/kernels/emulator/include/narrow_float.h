// narrow_float.h: what __half and __nv_bfloat16 share: 16-bit floats, rounded to nearest even as the GPU does.
#pragma once

#include "cuda_math.h"

namespace emulator {

// A format of 16 bits: 1 sign, EXPONENT bits, MANTISSA bits.
template <int EXPONENT, int MANTISSA> struct Narrow {
    static constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;
    static constexpr int INFINITE = ((1 << EXPONENT) - 1) << MANTISSA;

    // From a double, in one rounding.
    static unsigned short round(double x)
    {
        const unsigned long long all = bits<unsigned long long>(x), fraction = all & 0xfffffffffffffull;
        const unsigned short sign = (unsigned short)(all >> 48 & 0x8000);
        const int exponent = int(all >> 52 & 0x7ff) - 1023;
        if (exponent == 1024)
            return fraction ? 0x7fff : (unsigned short)(sign | INFINITE);  // the GPU has one NaN
        if (exponent > BIAS)
            return (unsigned short)(sign | INFINITE);
        if (exponent < -BIAS - MANTISSA - 1)
            return sign;
        const int below = exponent < 1 - BIAS ? 1 - BIAS - exponent : 0;  // > 0: the result is subnormal
        const unsigned long long significand = fraction | 1ull << 52;
        const int drop = 52 - MANTISSA + below;
        unsigned long long kept = significand >> drop;
        const unsigned long long rest = significand & ((1ull << drop) - 1), half = 1ull << (drop - 1);
        kept += rest > half || (rest == half && (kept & 1));
        // The leading bit of a normal number, and a carry out of the mantissa, add 1 to the exponent.
        return (unsigned short)(sign | ((below ? 0 : (unsigned long long)(exponent + BIAS - 1) << MANTISSA) + kept));
    }

    static float widen(unsigned short x)
    {
        const unsigned sign = unsigned(x & 0x8000) << 16, exponent = (x & 0x7fffu) >> MANTISSA;
        const unsigned fraction = x & ((1u << MANTISSA) - 1);
        if (exponent == (1u << EXPONENT) - 1)
            return bits<float>(sign | 0x7f800000u | fraction << (23 - MANTISSA));
        if (exponent || EXPONENT == 8)  // bfloat16 is the upper half of a float, subnormals as well
            return bits<float>(sign | (exponent + 127 - BIAS) << 23 | fraction << (23 - MANTISSA));
        const float value = float(fraction) * bits<float>(unsigned(127 + 1 - BIAS - MANTISSA) << 23);
        return sign ? -value : value;
    }

    // x · y + z in one rounding. The product is exact; what the sum loses goes into its last bit (round to odd).
    static unsigned short fused(double x, double y, double z)
    {
        const double product = x * y, sum = product + z;
        const double of_z = sum - product, error = (product - (sum - of_z)) + (z - of_z);
        long long odd = bits<long long>(sum);
        if (error != 0.0 && isfinite(sum) && !(odd & 1))
            odd += (error > 0.0) == (sum > 0.0) ? 1 : -1;
        return round(bits<double>(odd));
    }
};

}  // namespace emulator

// The types and functions that cuda_fp16.h and cuda_bf16.h have alike.
//
// T, T2         the type, and the pair of two
// name          as conversions write it: __float2name
// FORMAT        emulator::Narrow
#define EMULATOR_NARROW_FLOAT(T, T2, name, FORMAT)                                                             \
    struct T##_raw {                                                                                           \
        unsigned short x;                                                                                      \
    };                                                                                                         \
    struct alignas(2) T {                                                                                      \
        unsigned short bits;                                                                                   \
        T() = default;                                                                                         \
        T(T##_raw raw) : bits(raw.x) {}                                                                        \
        T(float x) : bits(FORMAT::round(x)) {}                                                                 \
        T(double x) : bits(FORMAT::round(x)) {}                                                                \
        T(int x) : bits(FORMAT::round(x)) {}                                                                   \
        T(unsigned x) : bits(FORMAT::round(x)) {}                                                              \
        operator float() const { return FORMAT::widen(bits); }                                                 \
        explicit operator int() const { return __float2int_rz(FORMAT::widen(bits)); }                          \
    };                                                                                                         \
    struct alignas(4) T2 {                                                                                     \
        T x, y;                                                                                                \
        T2() = default;                                                                                        \
        T2(T x, T y) : x(x), y(y) {}                                                                           \
    };                                                                                                         \
    namespace emulator {                                                                                       \
    inline T make_##name(unsigned short bits) { return T(T##_raw{bits}); }                                     \
    }                                                                                                          \
    inline T __float2##name(float x) { return T(x); }                                                          \
    inline T __float2##name##_rn(float x) { return T(x); }                                                     \
    inline T __double2##name(double x) { return T(x); }                                                        \
    inline T __int2##name##_rn(int x) { return T(x); }                                                         \
    inline float __##name##2float(T x) { return float(x); }                                                    \
    inline T __ushort_as_##name(unsigned short x) { return emulator::make_##name(x); }                         \
    inline T __short_as_##name(short x) { return emulator::make_##name((unsigned short)(x)); }                 \
    inline unsigned short __##name##_as_ushort(T x) { return x.bits; }                                         \
    inline short __##name##_as_short(T x) { return short(x.bits); }                                            \
    inline T __hadd(T x, T y) { return T(double(float(x)) + double(float(y))); }                               \
    inline T __hsub(T x, T y) { return T(double(float(x)) - double(float(y))); }                               \
    inline T __hmul(T x, T y) { return T(double(float(x)) * double(float(y))); }                               \
    inline T __hdiv(T x, T y) { return T(float(x) / float(y)); }                                               \
    inline T __hfma(T x, T y, T z) { return emulator::make_##name(FORMAT::fused(float(x), float(y), float(z))); } \
    inline T __hneg(T x) { return emulator::make_##name((unsigned short)(x.bits ^ 0x8000)); }                  \
    inline T __habs(T x) { return emulator::make_##name((unsigned short)(x.bits & 0x7fff)); }                  \
    inline T __hmax(T x, T y) { return T(fmaxf(float(x), float(y))); }                                         \
    inline T __hmin(T x, T y) { return T(fminf(float(x), float(y))); }                                         \
    inline bool __hisnan(T x) { return (x.bits & 0x7fff) > FORMAT::INFINITE; }                                 \
    inline bool __hlt(T x, T y) { return float(x) < float(y); }                                                \
    inline bool __hgt(T x, T y) { return float(x) > float(y); }                                                \
    inline bool __heq(T x, T y) { return float(x) == float(y); }                                               \
    inline T operator+(T x, T y) { return __hadd(x, y); }                                                      \
    inline T operator-(T x, T y) { return __hsub(x, y); }                                                      \
    inline T operator*(T x, T y) { return __hmul(x, y); }                                                      \
    inline T operator/(T x, T y) { return __hdiv(x, y); }                                                      \
    inline T operator-(T x) { return __hneg(x); }                                                              \
    inline T& operator+=(T& x, T y) { return x = x + y; }                                                      \
    inline T& operator-=(T& x, T y) { return x = x - y; }                                                      \
    inline T& operator*=(T& x, T y) { return x = x * y; }                                                      \
    inline T2 __halves2##name##2(T x, T y) { return T2(x, y); }                                                \
    inline T2 __floats2##name##2_rn(float x, float y) { return T2(T(x), T(y)); }                               \
    inline T2 __float22##name##2_rn(float2 x) { return T2(T(x.x), T(x.y)); }                                   \
    inline T2 __float2##name##2_rn(float x) { return T2(T(x), T(x)); }                                         \
    inline T2 __##name##2##name##2(T x) { return T2(x, x); }                                                   \
    inline float2 __##name##22float2(T2 x) { return {float(x.x), float(x.y)}; }                                \
    inline float __low2float(T2 x) { return float(x.x); }                                                      \
    inline float __high2float(T2 x) { return float(x.y); }                                                     \
    inline T __low2##name(T2 x) { return x.x; }                                                                \
    inline T __high2##name(T2 x) { return x.y; }                                                               \
    inline T2 __hadd2(T2 x, T2 y) { return T2(__hadd(x.x, y.x), __hadd(x.y, y.y)); }                           \
    inline T2 __hsub2(T2 x, T2 y) { return T2(__hsub(x.x, y.x), __hsub(x.y, y.y)); }                           \
    inline T2 __hmul2(T2 x, T2 y) { return T2(__hmul(x.x, y.x), __hmul(x.y, y.y)); }                           \
    inline T2 __hfma2(T2 x, T2 y, T2 z) { return T2(__hfma(x.x, y.x, z.x), __hfma(x.y, y.y, z.y)); }           \
    inline T2 __hmax2(T2 x, T2 y) { return T2(__hmax(x.x, y.x), __hmax(x.y, y.y)); }                           \
    inline T2 __hmin2(T2 x, T2 y) { return T2(__hmin(x.x, y.x), __hmin(x.y, y.y)); }                           \
    inline T2 __hneg2(T2 x) { return T2(__hneg(x.x), __hneg(x.y)); }                                           \
    inline T2 make_##T2(T x, T y) { return T2(x, y); }
