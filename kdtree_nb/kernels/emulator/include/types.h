// types.h: CUDA's vector types.
#pragma once

// No header of the system: it might use CUDA's names.
using size_t = decltype(sizeof 0);

#define EMULATOR_VECTORS(name, T)                                                              \
    struct name##1 { T x; };                                                                   \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                         \
    struct name##3 { T x, y, z; };                                                             \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };         \
    inline name##1 make_##name##1(T x) { return {x}; }                                         \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                 \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                         \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(longlong, long long)
EMULATOR_VECTORS(ulonglong, unsigned long long)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
