// emulator.h: CUDA's language as C++, for sources that are compiled for the CPU.
#pragma once

#define KDTREE_EMULATOR 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#include "runtime.h"

// A thread of the operating system runs one block at a time. Sanitizers look after ordinary variables only: under
// them a launch has one such thread (and build.py takes __shared__ out of `extern __shared__`).
#ifdef EMULATOR_ASAN
#define __shared__ static
#else
#define __shared__ thread_local
#endif

#include "atomics.h"
#include "cuda_math.h"
#include "types.h"
#include "warp.h"

#define threadIdx (emulator::worker->current->index)
#define blockIdx (emulator::worker->block_index)
#define blockDim (emulator::worker->block_size)
#define gridDim (emulator::worker->grid_size)
#define warpSize 32

#undef assert
#define assert(condition) \
    ((condition) ? void(0)       \
                 : emulator::fail("assertion failed at %s:%d: %s", emulator::file_of(__FILE__), __LINE__, #condition))
inline void __trap(EMULATOR_CALLER) { emulator::fail("__trap at %s:%d", emulator::file_of(file), line); }

extern "C" {
int printf(const char* format, ...);
void* memcpy(void* to, const void* from, size_t bytes) noexcept;
void* memset(void* to, int value, size_t bytes) noexcept;
}

extern "C" {  // as where an extern "C" kernel declares it
#ifdef EMULATOR_ASAN
alignas(1024) unsigned char dynamic_shared[emulator::MAX_SHARED_BYTES];
#else
alignas(1024) thread_local unsigned char dynamic_shared[emulator::MAX_SHARED_BYTES];
#endif
}

// What Python calls, one for each kernel of the source.
#define EMULATOR_ENTRY(kernel)                                                                    \
    extern "C" __attribute__((visibility("default"))) int emulate_##kernel(emulator::Launch* launch) \
    {                                                                                             \
        return emulator::launch(*launch, #kernel, emulator::Call<kernel>::call,                   \
                                []() -> unsigned char* { return dynamic_shared; });               \
    }
