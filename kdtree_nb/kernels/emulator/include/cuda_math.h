// cuda_math.h: CUDA's arithmetic. The fast variants (__expf, …) are the exact ones here.
#pragma once

#include "types.h"

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

// The C library's, declared here because <cmath> takes a second to compile; overloads as C++ and CUDA have them.
#define EMULATOR_MATH1(name)                           \
    extern "C" double name(double) noexcept;           \
    extern "C" float name##f(float) noexcept;          \
    inline float name(float x) { return name##f(x); }
#define EMULATOR_MATH2(name)                           \
    extern "C" double name(double, double) noexcept;   \
    extern "C" float name##f(float, float) noexcept;   \
    inline float name(float x, float y) { return name##f(x, y); }

EMULATOR_MATH1(exp) EMULATOR_MATH1(exp2) EMULATOR_MATH1(expm1)
EMULATOR_MATH1(log) EMULATOR_MATH1(log2) EMULATOR_MATH1(log10) EMULATOR_MATH1(log1p)
EMULATOR_MATH1(sqrt) EMULATOR_MATH1(cbrt) EMULATOR_MATH1(fabs)
EMULATOR_MATH1(floor) EMULATOR_MATH1(ceil) EMULATOR_MATH1(trunc) EMULATOR_MATH1(round) EMULATOR_MATH1(rint)
EMULATOR_MATH1(nearbyint)
EMULATOR_MATH1(sin) EMULATOR_MATH1(cos) EMULATOR_MATH1(tan) EMULATOR_MATH1(asin) EMULATOR_MATH1(acos)
EMULATOR_MATH1(atan) EMULATOR_MATH1(sinh) EMULATOR_MATH1(cosh) EMULATOR_MATH1(tanh) EMULATOR_MATH1(erf)
EMULATOR_MATH1(erfc)
EMULATOR_MATH2(pow) EMULATOR_MATH2(fmod) EMULATOR_MATH2(atan2) EMULATOR_MATH2(hypot) EMULATOR_MATH2(copysign)
EMULATOR_MATH2(fmin) EMULATOR_MATH2(fmax) EMULATOR_MATH2(fdim) EMULATOR_MATH2(remainder)

extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;
inline float ldexp(float x, int exponent) { return ldexpf(x, exponent); }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }

extern "C" int abs(int) noexcept;
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }

#define EMULATOR_MIN_MAX(A, B, T)                                          \
    inline T min(A a, B b) { const T x = a, y = b; return y < x ? y : x; } \
    inline T max(A a, B b) { const T x = a, y = b; return x < y ? y : x; }
EMULATOR_MIN_MAX(int, int, int)
EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
EMULATOR_MIN_MAX(int, unsigned, unsigned)
EMULATOR_MIN_MAX(unsigned, int, unsigned)
EMULATOR_MIN_MAX(long, long, long)
EMULATOR_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMULATOR_MIN_MAX(long long, long long, long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float exp10f(float x) { return powf(10.0f, x); }
inline void sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

namespace emulator {

// A conversion on the GPU takes what lies outside the range to its end, and NaN to 0.
template <class To> inline To saturate(double x, double lowest, double highest, To lowest_value, To highest_value)
{
    return x != x ? To(0) : x <= lowest ? lowest_value : x >= highest ? highest_value : To(x);
}
inline int to_int(double x) { return saturate<int>(x, -2147483648.0, 2147483647.0, -2147483647 - 1, 2147483647); }
inline unsigned to_unsigned(double x) { return saturate<unsigned>(x, 0.0, 4294967295.0, 0u, 4294967295u); }

template <class To, class From> inline To bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "");
    To result;
    __builtin_memcpy(&result, &x, sizeof result);
    return result;
}

}  // namespace emulator

inline int __float2int_rn(float x) { return emulator::to_int(rint(double(x))); }
inline int __float2int_rz(float x) { return emulator::to_int(trunc(double(x))); }
inline int __float2int_rd(float x) { return emulator::to_int(floor(double(x))); }
inline int __float2int_ru(float x) { return emulator::to_int(ceil(double(x))); }
inline unsigned __float2uint_rn(float x) { return emulator::to_unsigned(rint(double(x))); }
inline unsigned __float2uint_rz(float x) { return emulator::to_unsigned(trunc(double(x))); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }

inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits<double>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)(x)) : 64; }

inline unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i)
        reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline unsigned long long __brevll(unsigned long long x)
{
    return (unsigned long long)(__brev(unsigned(x))) << 32 | __brev(unsigned(x >> 32));
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    return unsigned(((unsigned long long)(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return unsigned(((unsigned long long)(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}

// Three bits of each nibble of the selector name a byte of high:low. (PTX's prmt reads a fourth; the compiler masks it.)
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector)
{
    const unsigned long long bytes = (unsigned long long)(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i)
        result |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return result;
}

inline int __mulhi(int x, int y) { return int((long long)(x)*y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((unsigned long long)(x)*y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return (unsigned long long)((unsigned __int128)(x)*y >> 64);
}

template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldcs(const T* address) { return *address; }
template <class T> inline T __ldcg(const T* address) { return *address; }
template <class T> inline T __ldca(const T* address) { return *address; }
template <class T> inline T __ldcv(const T* address) { return *address; }
template <class T> inline void __stcs(T* address, T value) { *address = value; }
template <class T> inline void __stcg(T* address, T value) { *address = value; }

