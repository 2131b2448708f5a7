// warp.h: barriers, and the functions in which the lanes of a warp exchange values.
#pragma once

#include "runtime.h"

namespace emulator {

void combine_nothing(Warp&, unsigned lanes);
void combine_shuffle(Warp&, unsigned lanes);
void combine_ballot(Warp&, unsigned lanes);
void combine_match_any(Warp&, unsigned lanes);
void combine_add(Warp&, unsigned lanes);
void combine_min(Warp&, unsigned lanes);
void combine_max(Warp&, unsigned lanes);
void combine_signed_min(Warp&, unsigned lanes);
void combine_signed_max(Warp&, unsigned lanes);
void combine_and(Warp&, unsigned lanes);
void combine_or(Warp&, unsigned lanes);
void combine_xor(Warp&, unsigned lanes);
void combine_wgmma(Warp&, unsigned lanes);
void combine_wgmma_commit(Warp&, unsigned lanes);
void combine_wgmma_wait(Warp&, unsigned lanes);

// Give up where these lanes are not a whole warp.
void whole_warp(Warp&, unsigned lanes);

// One value into the meeting and one out of it, both as their bits.
template <class Result, class T>
inline Result exchange(unsigned mask, T value, int source, const Site& site, Combine combine)
{
    static_assert(sizeof(T) <= 8, "a warp function takes at most 8 bytes");
    const Thread& self = *worker->current;
    Warp& warp = *self.warp;
    const int lane = self.lane;
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    warp.operand[lane] = bits;
    warp.source[lane] = source;
    meet(mask, site, combine);
    Result result;
    __builtin_memcpy(&result, &warp.result[lane], sizeof result);
    return result;
}

inline int lane() { return worker->current->lane; }

// What a lane brings to a wgmma: registers, the descriptors of what lies in shared memory (of a, if it has no registers).
struct WgmmaOperands {
    float* d;
    const unsigned* a;
    unsigned long long a_descriptor, b_descriptor;
    int columns;
    bool b_transposed, adds;
};

inline void wgmma(const WgmmaOperands& operands, const Site& site)
{
    worker->current->warp->operand[lane()] = reinterpret_cast<size_t>(&operands);
    meet(0xffffffffu, site, combine_wgmma);
}

inline void check_width(int width, const Site& site)
{
    if (width <= 0 || width > LANES || (width & (width - 1)))
        fail("%s at %s:%d: width %d is not a power of two up to 32", site.function, site.file(), site.line, width);
}

}  // namespace emulator

// PTX, shfl.sync: a lane whose source lies outside its segment of `width` lanes keeps its own value.
template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_CALLER)
{
    const emulator::Site site{"__shfl_sync", file, line};
    emulator::check_width(width, site);
    const int lane = emulator::lane(), first = lane & ~(width - 1);
    return emulator::exchange<T>(mask, value, first | (source & (width - 1)), site, emulator::combine_shuffle);
}

template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER)
{
    const emulator::Site site{"__shfl_up_sync", file, line};
    emulator::check_width(width, site);
    const int lane = emulator::lane(), first = lane & ~(width - 1);
    const int source = delta <= unsigned(lane - first) ? lane - int(delta) : lane;
    return emulator::exchange<T>(mask, value, source, site, emulator::combine_shuffle);
}

template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER)
{
    const emulator::Site site{"__shfl_down_sync", file, line};
    emulator::check_width(width, site);
    const int lane = emulator::lane(), last = lane | (width - 1);
    const int source = delta <= unsigned(last - lane) ? lane + int(delta) : lane;
    return emulator::exchange<T>(mask, value, source, site, emulator::combine_shuffle);
}

template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_CALLER)
{
    const emulator::Site site{"__shfl_xor_sync", file, line};
    emulator::check_width(width, site);
    const int lane = emulator::lane(), last = lane | (width - 1);
    const int source = (lane ^ (lane_mask & 31)) <= last ? lane ^ (lane_mask & 31) : lane;
    return emulator::exchange<T>(mask, value, source, site, emulator::combine_shuffle);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_CALLER)
{
    return emulator::exchange<unsigned>(mask, predicate, 0, {"__ballot_sync", file, line}, emulator::combine_ballot);
}

inline int __any_sync(unsigned mask, int predicate, EMULATOR_CALLER)
{
    return emulator::exchange<unsigned>(mask, predicate, 0, {"__any_sync", file, line}, emulator::combine_ballot) != 0;
}

inline int __all_sync(unsigned mask, int predicate, EMULATOR_CALLER)
{
    return emulator::exchange<unsigned>(mask, !predicate, 0, {"__all_sync", file, line}, emulator::combine_ballot) == 0;
}

template <class T> inline unsigned __match_any_sync(unsigned mask, T value, EMULATOR_CALLER)
{
    return emulator::exchange<unsigned>(mask, value, 0, {"__match_any_sync", file, line}, emulator::combine_match_any);
}

#define EMULATOR_REDUCE(name, T, combine)                                                              \
    inline T __reduce_##name##_sync(unsigned mask, T value, EMULATOR_CALLER)                           \
    {                                                                                                  \
        const emulator::Site site{"__reduce_" #name "_sync", file, line};                              \
        return emulator::exchange<T>(mask, value, 0, site, emulator::combine);                         \
    }
EMULATOR_REDUCE(add, unsigned, combine_add)
EMULATOR_REDUCE(add, int, combine_add)
EMULATOR_REDUCE(min, unsigned, combine_min)
EMULATOR_REDUCE(min, int, combine_signed_min)
EMULATOR_REDUCE(max, unsigned, combine_max)
EMULATOR_REDUCE(max, int, combine_signed_max)
EMULATOR_REDUCE(and, unsigned, combine_and)
EMULATOR_REDUCE(or, unsigned, combine_or)
EMULATOR_REDUCE(xor, unsigned, combine_xor)

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_CALLER)
{
    emulator::meet(mask, {"__syncwarp", file, line}, emulator::combine_nothing);
}

inline void __syncthreads(EMULATOR_CALLER) { emulator::barrier(false, {"__syncthreads", file, line}); }

inline int __syncthreads_count(int predicate, EMULATOR_CALLER)
{
    return emulator::barrier(predicate != 0, {"__syncthreads_count", file, line});
}

inline int __syncthreads_or(int predicate, EMULATOR_CALLER)
{
    return emulator::barrier(predicate != 0, {"__syncthreads_or", file, line}) != 0;
}

inline int __syncthreads_and(int predicate, EMULATOR_CALLER)
{
    return emulator::barrier(predicate == 0, {"__syncthreads_and", file, line}) == 0;
}

inline void __nanosleep(unsigned) { emulator::yield(); }
