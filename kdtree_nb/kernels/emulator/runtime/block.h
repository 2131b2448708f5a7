// block.h: the threads of one block, and which of them runs.
#pragma once

#include "fibre.h"
#include "warp.h"

#include <stdio.h>

#pragma GCC visibility push(hidden)

namespace emulator {

// A launch while it runs.
struct Grid {
    Launch& launch;
    const char* kernel;
    void (*call)(void** arguments);
    unsigned char* (*dynamic_shared)();  // that of the calling thread of the operating system
    unsigned long long blocks;
    unsigned long long next_block;  // atomic
    int failed;                     // atomic: 1 as soon as somebody owns launch.error
};

struct FibreThread : Thread {
    Fibre fibre;
};

struct BlockWorker : Worker {
    Grid* grid;
    Fibre scheduler;       // where the worker itself waits for the end of the block
    unsigned ready_warps;  // warps with lanes that can run
    int threads_present, threads_in_block, warps_in_block;
    int arrived;  // threads at the barrier
    int predicates, barrier_result;
    const Site* barrier_site;
    int idle_yields;  // since somebody got further
    unsigned long long random;
    BlockWorker* next_idle;
    char* stacks;
    Warp warps[MAX_THREADS / LANES];
    FibreThread threads[MAX_THREADS];

    FibreThread& running() { return *static_cast<FibreThread*>(current); }
};

inline BlockWorker& self() { return *static_cast<BlockWorker*>(worker); }

inline unsigned bit(int index) { return 1u << index; }
inline int lowest(unsigned set) { return __builtin_ctz(set); }
inline int highest(unsigned set) { return 31 - __builtin_clz(set); }

inline unsigned draw(BlockWorker& w)  // xorshift
{
    w.random ^= w.random << 13;
    w.random ^= w.random >> 7;
    w.random ^= w.random << 17;
    return unsigned(w.random >> 32);
}

// One of a set: the next after `last` in the order of the schedule, or any.
inline int choose(BlockWorker& w, unsigned set, int last)
{
    switch (w.grid->launch.schedule) {
    case FORWARD: {
        const unsigned later = set & ~((2u << last) - 1);
        return lowest(later ? later : set);
    }
    case REVERSE: {
        const unsigned earlier = set & (bit(last) - 1);
        return highest(earlier ? earlier : set);
    }
    default:
        for (unsigned skip = draw(w) % unsigned(__builtin_popcount(set)); skip; --skip)
            set &= set - 1;
        return lowest(set);
    }
}

// The first of a set.
inline int choose(BlockWorker& w, unsigned set)
{
    return choose(w, set, w.grid->launch.schedule == REVERSE ? 0 : LANES - 1);
}

// The first error of a launch is the one that is reported.
inline void record_error(BlockWorker& w, const char* message)
{
    Launch& launch = w.grid->launch;
    if (__atomic_exchange_n(&w.grid->failed, 1, __ATOMIC_ACQ_REL))
        return;
    const uint3 block = w.block_index, thread = w.current->index;
    snprintf(launch.error, sizeof launch.error, "%s, block (%u, %u, %u), thread (%u, %u, %u): %s", w.grid->kernel,
             block.x, block.y, block.z, thread.x, thread.y, thread.z, message);
}

// The running thread has returned from the kernel: it leaves and does not come back in this block.
void finish(BlockWorker& w);

}  // namespace emulator

#pragma GCC visibility pop
