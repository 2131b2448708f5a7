// runtime.h: the threads, warps and blocks of a launch, as the functions of CUDA see them.
//
// A worker is a thread of the operating system that runs blocks, one after the other. A block's threads are fibres:
// each runs until it has to wait for others (at a barrier, in a warp function) or returns, then another one runs.
#pragma once

#include "types.h"

#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATOR_ASAN 1
#endif
#endif

#pragma GCC visibility push(hidden)

namespace emulator {

constexpr int LANES = 32;
constexpr int MAX_THREADS = 1024;
constexpr int MAX_SHARED_BYTES = 227 * 1024;

enum Schedule : int { FORWARD, REVERSE, RANDOM };

// A launch as Python describes it (ctypes: Launch in __init__.py).
struct Launch {
    unsigned grid[3];
    unsigned block[3];
    int shared_bytes;
    int workers;
    int schedule;
    unsigned long long seed;
    void** arguments;
    char error[2048];  // empty after a launch that went well
};

inline const char* file_of(const char* path)
{
    const char* name = path;
    for (const char* at = path; *at; ++at)
        if (*at == '/')
            name = at + 1;
    return name;
}

// Where the source calls a function that waits.
struct Site {
    const char* function;
    const char* path;
    int line;

    const char* file() const { return file_of(path); }
};
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

struct Warp;

// What the last lane to arrive does for all lanes that meet: from operands (and sources) to results.
using Combine = void (*)(Warp&, unsigned lanes);

struct AsyncCopies;
struct AsyncProducts;

struct Thread {
    uint3 index;
    int lane;
    Warp* warp;
    AsyncCopies* copies;
};

struct Warp {
    unsigned present;  // lanes that have not returned
    unsigned ready;    // lanes that can run
    unsigned waiting;  // lanes in a warp function
    int index;
    AsyncProducts* products;
    // Of the lanes that wait:
    unsigned mask[LANES];
    const Site* site[LANES];
    Combine combine[LANES];
    unsigned long long operand[LANES];
    int source[LANES];
    // Of the lanes that met:
    unsigned long long result[LANES];
};

struct Worker {
    Thread* current;
    uint3 block_index;
    dim3 block_size, grid_size;
    bool interleaves;  // whether threads take turns at atomic operations too
};
extern __thread Worker* worker;

// Wait until all lanes of the mask that have not returned are here, and combine.
void meet(unsigned mask, const Site& site, Combine combine);

// Wait for the whole block; the number of threads whose predicate is not zero.
int barrier(bool predicate, const Site& site);

// Let others run.
void yield();

// Let others run, now and then: at an atomic operation of a random schedule.
void interleave();

// Give up the launch. The message is printf's; kernel, block and thread are put before it.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// cp.async: nothing is copied before a wait, so that a wait which is missing shows.
void copy_async(void* to, const void* from, int bytes, int valid_bytes);
void copy_commit();
void copy_wait(int groups_left);

// Of what lies in dynamic shared memory, its distance from the beginning.
unsigned shared_address(const void* shared);

// Run a whole grid; 0, or 1 with launch.error filled in.
int launch(Launch& launch, const char* kernel, void (*call)(void** arguments), unsigned char* (*dynamic_shared)());

// A kernel's parameters from an array of pointers to them.
template <auto kernel> struct Call;
template <class... P, void (*kernel)(P...)> struct Call<kernel> {
    template <int... i> struct Indices {};
    template <int n, int... i> struct Count : Count<n - 1, n - 1, i...> {};
    template <int... i> struct Count<0, i...> {
        using type = Indices<i...>;
    };
    template <int... i> static void spread([[maybe_unused]] void** arguments, Indices<i...>)
    {
        kernel(*static_cast<P*>(arguments[i])...);
    }
    static void call(void** arguments) { spread(arguments, typename Count<sizeof...(P)>::type()); }
};

}  // namespace emulator

#pragma GCC visibility pop
