// shared.h: shared memory before and after a block.
#pragma once

#include "runtime.h"

#ifdef EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#endif

#ifdef __linux__
#include <link.h>
#endif
#include <string.h>

#pragma GCC visibility push(hidden)

namespace emulator {

// Beyond the dynamic shared memory that a launch asks for, bytes that have to stay as they are.
constexpr int BEYOND_BYTES = 256;

inline int watched_bytes(int dynamic_bytes)
{
    return dynamic_bytes + BEYOND_BYTES < MAX_SHARED_BYTES ? dynamic_bytes + BEYOND_BYTES : MAX_SHARED_BYTES;
}

#if defined(__linux__) && !defined(EMULATOR_ASAN)

struct ThreadLocals {
    unsigned char* memory;
    size_t bytes;
};

// The thread-local memory of the library that this code is in: the __shared__ variables, dynamic_shared and worker.
inline int find_thread_locals(dl_phdr_info* info, size_t, void* found)
{
    bool here = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const size_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        const size_t address = reinterpret_cast<size_t>(&find_thread_locals);
        if (info->dlpi_phdr[i].p_type == PT_LOAD)
            here |= address >= start && address < start + info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_TLS)
            bytes = info->dlpi_phdr[i].p_memsz;
    }
    if (here)
        *static_cast<ThreadLocals*>(found) = {static_cast<unsigned char*>(info->dlpi_tls_data), bytes};
    return here;
}

// Shared memory starts with what is no number and no index: 0xff in every byte.
inline void poison_shared(unsigned char* dynamic_shared, int dynamic_bytes)
{
    static __thread ThreadLocals found;
    if (!found.memory)
        dl_iterate_phdr(find_thread_locals, &found);
    const ThreadLocals all = found;
    Worker* const running = worker;
    unsigned char* const after = dynamic_shared + MAX_SHARED_BYTES;
    memset(all.memory, 0xff, size_t(dynamic_shared - all.memory) + size_t(watched_bytes(dynamic_bytes)));
    memset(after, 0xff, size_t(all.memory + all.bytes - after));
    worker = running;
    found = all;
}

#else  // static __shared__ variables keep what the block before has left

inline void poison_shared(unsigned char* dynamic_shared, int dynamic_bytes)
{
#ifdef EMULATOR_ASAN
    __asan_unpoison_memory_region(dynamic_shared, MAX_SHARED_BYTES);
#endif
    memset(dynamic_shared, 0xff, size_t(watched_bytes(dynamic_bytes)));
#ifdef EMULATOR_ASAN
    __asan_poison_memory_region(dynamic_shared + dynamic_bytes, size_t(MAX_SHARED_BYTES - dynamic_bytes));
#endif
}

#endif

// Whether a block has written just beyond the dynamic shared memory of its launch; AddressSanitizer sees it at once.
inline bool wrote_beyond([[maybe_unused]] const unsigned char* dynamic_shared, [[maybe_unused]] int dynamic_bytes)
{
#ifndef EMULATOR_ASAN
    for (int i = dynamic_bytes; i < watched_bytes(dynamic_bytes); ++i)
        if (dynamic_shared[i] != 0xff)
            return true;
#endif
    return false;
}

}  // namespace emulator

#pragma GCC visibility pop
