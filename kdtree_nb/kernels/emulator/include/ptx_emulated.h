// ptx_emulated.h: what the functions of ptx.cuh do, in C++.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "warp.h"

namespace emulator {

// What a lane brings to an instruction of the whole warp; the others read it on its stack.
struct MmaOperands {
    float* d;
    const unsigned *a, *b;
    const float* c;
};

template <class T> T* brought(Warp& warp, int lane) { return reinterpret_cast<T*>(size_t(warp.operand[lane])); }

template <class Format> inline float half_of(unsigned pair, int upper)
{
    return Format::widen((unsigned short)(upper ? pair >> 16 : pair));
}

// The 16 products of an element are added exactly (in double), then once to c. A GPU adds them in an order and with
// a rounding that are not documented.
template <class Format> void combine_mma(Warp& warp, unsigned lanes)
{
    whole_warp(warp, lanes);
    float a[16][16], b[16][8];
    for (int lane = 0; lane < LANES; ++lane) {
        const MmaOperands& from = *brought<MmaOperands>(warp, lane);
        const int group = lane / 4, pair = lane % 4;
        for (int i = 0; i < 2; ++i)
            for (int r = 0; r < 4; ++r)
                a[group + 8 * (r & 1)][2 * pair + 8 * (r >> 1) + i] = half_of<Format>(from.a[r], i);
        for (int i = 0; i < 2; ++i)
            for (int r = 0; r < 2; ++r)
                b[2 * pair + 8 * r + i][group] = half_of<Format>(from.b[r], i);
    }
    for (int lane = 0; lane < LANES; ++lane) {
        const MmaOperands& to = *brought<MmaOperands>(warp, lane);
        for (int r = 0; r < 4; ++r) {
            const int row = lane / 4 + 8 * (r >> 1), column = 2 * (lane % 4) + (r & 1);
            double sum = 0.0;
            for (int k = 0; k < 16; ++k)
                sum += double(a[row][k]) * double(b[k][column]);
            to.d[r] = float(double(to.c[r]) + sum);
        }
    }
}

template <class Format>
inline void mma(float* d, const unsigned* a, const unsigned* b, const float* c, const Site& site)
{
    MmaOperands operands{d, a, b, c};
    worker->current->warp->operand[lane()] = reinterpret_cast<size_t>(&operands);
    meet(0xffffffffu, site, combine_mma<Format>);
}

struct MatrixRow {
    unsigned* to;
    const unsigned short* row;
};

template <int count, bool transposed> void combine_ldmatrix(Warp& warp, unsigned lanes)
{
    whole_warp(warp, lanes);
    for (int lane = 0; lane < LANES; ++lane) {
        unsigned* to = brought<MatrixRow>(warp, lane)->to;
        for (int matrix = 0; matrix < count; ++matrix) {
            auto element = [&](int row, int column) {
                const unsigned short* address = brought<MatrixRow>(warp, 8 * matrix + row)->row;
                if (size_t(address) % 16)
                    fail("%s at %s:%d: lane %d's row is not aligned to 16 bytes", warp.site[lane]->function,
                         warp.site[lane]->file(), warp.site[lane]->line, 8 * matrix + row);
                return unsigned(address[column]);
            };
            const int row = lane / 4, column = 2 * (lane % 4);
            to[matrix] = transposed ? element(column, row) | element(column + 1, row) << 16
                                    : element(row, column) | element(row, column + 1) << 16;
        }
    }
}

template <int count, bool transposed> inline void ldmatrix(unsigned* to, const void* row, const Site& site)
{
    MatrixRow operands{to, static_cast<const unsigned short*>(row)};
    worker->current->warp->operand[lane()] = reinterpret_cast<size_t>(&operands);
    meet(0xffffffffu, site, combine_ldmatrix<count, transposed>);
}

}  // namespace emulator

inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4],
                              EMULATOR_CALLER)
{
    emulator::mma<EmulatorBfloat16>(d, a, b, c, {"mma_m16n8k16_bf16", file, line});
}

inline void mma_m16n8k16_fp16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], const float (&c)[4],
                              EMULATOR_CALLER)
{
    emulator::mma<EmulatorHalf>(d, a, b, c, {"mma_m16n8k16_fp16", file, line});
}

inline void ldmatrix_x4(unsigned (&r)[4], const void* row, EMULATOR_CALLER)
{
    emulator::ldmatrix<4, false>(r, row, {"ldmatrix_x4", file, line});
}

inline void ldmatrix_x2(unsigned (&r)[2], const void* row, EMULATOR_CALLER)
{
    emulator::ldmatrix<2, false>(r, row, {"ldmatrix_x2", file, line});
}

inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, EMULATOR_CALLER)
{
    emulator::ldmatrix<4, true>(r, row, {"ldmatrix_x4_trans", file, line});
}

inline void ldmatrix_x2_trans(unsigned (&r)[2], const void* row, EMULATOR_CALLER)
{
    emulator::ldmatrix<2, true>(r, row, {"ldmatrix_x2_trans", file, line});
}

inline unsigned shared_address(const void* shared) { return emulator::shared_address(shared); }

inline void fence_shared_for_wgmma() {}

inline void wgmma_fence(EMULATOR_CALLER)
{
    emulator::meet(0xffffffffu, {"wgmma_fence", file, line}, emulator::combine_nothing);
}

inline void wgmma_commit(EMULATOR_CALLER)
{
    emulator::meet(0xffffffffu, {"wgmma_commit", file, line}, emulator::combine_wgmma_commit);
}

template <int groups_left> inline void wgmma_wait(EMULATOR_CALLER)
{
    emulator::exchange<int>(0xffffffffu, groups_left, 0, {"wgmma_wait", file, line}, emulator::combine_wgmma_wait);
}

template <int n> inline void wgmma_use(float (&)[n]) {}

inline unsigned long long anew(unsigned long long x) { return x; }

inline void wgmma_m64n32k16(float (&d)[16], unsigned long long a, unsigned long long b, bool adds, EMULATOR_CALLER)
{
    emulator::wgmma({d, nullptr, a, b, 32, false, adds}, {"wgmma_m64n32k16", file, line});
}

inline void wgmma_m64n32k16(float (&d)[16], const unsigned (&a)[4], unsigned long long b, bool adds, EMULATOR_CALLER)
{
    emulator::wgmma({d, a, 0, b, 32, false, adds}, {"wgmma_m64n32k16", file, line});
}

inline void wgmma_m64n64k16(float (&d)[32], const unsigned (&a)[4], unsigned long long b, EMULATOR_CALLER)
{
    emulator::wgmma({d, a, 0, b, 64, true, true}, {"wgmma_m64n64k16", file, line});
}

inline void cp_async_16(void* shared, const void* global, bool valid = true)
{
    emulator::copy_async(shared, global, 16, valid ? 16 : 0);
}

inline void cp_async_4(void* shared, const void* global, bool valid = true)
{
    emulator::copy_async(shared, global, 4, valid ? 4 : 0);
}

inline void cp_async_commit() { emulator::copy_commit(); }

template <int groups_left> inline void cp_async_wait() { emulator::copy_wait(groups_left); }

template <int table> inline unsigned lop3(unsigned a, unsigned b, unsigned c)
{
    unsigned result = 0;
    for (int row = 0; row < 8; ++row)
        if (table >> row & 1)
            result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    return result;
}
