// launch.cpp: the blocks of a grid, on as many threads of the operating system as are worth it.
#include "block.h"
#include "faults.h"
#include "shared.h"

#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

#pragma GCC visibility push(hidden)

namespace emulator {

void copy_forget(Thread& thread);
void products_forget(Warp& warp);

namespace {

#ifdef EMULATOR_ASAN  // __shared__ variables are static there, so one block runs at a time
constexpr size_t STACK_BYTES = 512 * 1024;
constexpr int MOST_HELPERS = 0;
pthread_mutex_t only_launch = PTHREAD_MUTEX_INITIALIZER;
#else
constexpr size_t STACK_BYTES = 64 * 1024;
constexpr int MOST_HELPERS = 255;
#endif

// Stacks of threads that run in turn lie 17 pages and 3 cache lines apart, so that they do not share cache sets.
constexpr size_t STACK_STRIDE = STACK_BYTES + 4096 + 3 * 64;

// Another thread of the operating system has to have this much to do.
constexpr unsigned long long WORTH_A_THREAD_NS = 200'000;

void run_thread()
{
    BlockWorker& w = self();
    arrived(w.running().fibre, w.scheduler.stack ? nullptr : &w.scheduler);
    for (;;) {  // once for each block
        w.grid->call(w.grid->launch.arguments);
        finish(w);
    }
}

void run_block(BlockWorker& w, unsigned long long block)
{
    const Launch& launch = w.grid->launch;
    unsigned char* const dynamic_shared = w.grid->dynamic_shared();
    poison_shared(dynamic_shared, launch.shared_bytes);
    w.block_index = {unsigned(block % launch.grid[0]), unsigned(block / launch.grid[0] % launch.grid[1]),
                     unsigned(block / launch.grid[0] / launch.grid[1])};
    w.threads_present = w.threads_in_block;
    w.arrived = w.predicates = 0;
    w.idle_yields = 0;
    w.ready_warps = 0;
    for (int i = 0; i < w.warps_in_block; ++i) {
        const int lanes = w.threads_in_block - i * LANES;
        w.warps[i].present = w.warps[i].ready = lanes >= LANES ? ~0u : bit(lanes) - 1;
        w.warps[i].waiting = 0;
        products_forget(w.warps[i]);
        w.ready_warps |= bit(i);
    }
    for (int i = 0; i < w.threads_in_block; ++i)
        copy_forget(w.threads[i]);
    const int warp = choose(w, w.ready_warps);
    w.current = &w.threads[warp * LANES + choose(w, w.warps[warp].ready)];
    switch_to(w.scheduler, w.running().fibre);
    if (wrote_beyond(dynamic_shared, launch.shared_bytes))
        record_error(w, "the block has written beyond the dynamic shared memory that the launch asks for");
}

// Blocks until there are none left, or as many as asked for.
void work(BlockWorker& w, unsigned long long most_blocks)
{
    Grid& grid = *w.grid;
    worker = &w;
    for (; most_blocks && !__atomic_load_n(&grid.failed, __ATOMIC_ACQUIRE); --most_blocks) {
        const unsigned long long next = __atomic_fetch_add(&grid.next_block, 1, __ATOMIC_RELAXED);
        if (next >= grid.blocks)
            break;
        run_block(w, grid.launch.schedule == REVERSE ? grid.blocks - 1 - next : next);
    }
    worker = nullptr;
}

// Workers that no launch uses, with their stacks: to take one of them does not ask the system for memory.
pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
BlockWorker* idle;

BlockWorker* new_worker()
{
    const size_t state = (sizeof(BlockWorker) + 4095) & ~size_t(4095);
    const size_t bytes = state + STACK_STRIDE * MAX_THREADS;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return nullptr;
    BlockWorker* w = static_cast<BlockWorker*>(memory);  // all zeros
    w->stacks = static_cast<char*>(memory) + state;
    return w;
}

BlockWorker* take_worker(Grid& grid, int number)
{
    pthread_mutex_lock(&idle_lock);
    BlockWorker* w = idle;
    if (w)
        idle = w->next_idle;
    pthread_mutex_unlock(&idle_lock);
    if (!w && !(w = new_worker()))
        return nullptr;
    const Launch& launch = grid.launch;
    w->grid = &grid;
    w->block_size = {launch.block[0], launch.block[1], launch.block[2]};
    w->grid_size = {launch.grid[0], launch.grid[1], launch.grid[2]};
    w->threads_in_block = int(launch.block[0] * launch.block[1] * launch.block[2]);
    w->warps_in_block = (w->threads_in_block + LANES - 1) / LANES;
    w->interleaves = launch.schedule == RANDOM;
    w->random = (launch.seed + unsigned(number) + 1) * 0x9e3779b97f4a7c15ull;
    w->scheduler.stack = nullptr;
    for (int i = 0; i < w->warps_in_block; ++i)
        w->warps[i].index = i;
    for (int i = 0; i < w->threads_in_block; ++i) {
        FibreThread& thread = w->threads[i];
        thread.index = {unsigned(i) % launch.block[0], unsigned(i) / launch.block[0] % launch.block[1],
                        unsigned(i) / launch.block[0] / launch.block[1]};
        thread.lane = i % LANES;
        thread.warp = &w->warps[i / LANES];
        prepare(thread.fibre, w->stacks + size_t(i) * STACK_STRIDE, STACK_BYTES, run_thread);
    }
    return w;
}

void give_back(BlockWorker* w)
{
    pthread_mutex_lock(&idle_lock);
    w->next_idle = idle;
    idle = w;
    pthread_mutex_unlock(&idle_lock);
}

struct Helper {
    pthread_t thread;
    Grid* grid;
    int number;
};

void* help(void* argument)
{
    const Helper& helper = *static_cast<Helper*>(argument);
    if (BlockWorker* w = take_worker(*helper.grid, helper.number)) {
        work(*w, ~0ull);
        give_back(w);
    }
    return nullptr;
}

unsigned long long now_ns()
{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (unsigned long long)(time.tv_sec) * 1'000'000'000 + (unsigned long long)(time.tv_nsec);
}

}  // namespace

int launch(Launch& launch, const char* kernel, void (*call)(void** arguments), unsigned char* (*dynamic_shared)())
{
    Grid grid{launch, kernel, call, dynamic_shared, 1ull * launch.grid[0] * launch.grid[1] * launch.grid[2], 0, 0};
    BlockWorker* w = take_worker(grid, 0);
    if (!w) {
        snprintf(launch.error, sizeof launch.error, "%s: no memory for the stacks of a block", kernel);
        return 1;
    }
#ifdef EMULATOR_ASAN
    pthread_mutex_lock(&only_launch);
#else
    const FaultHandlers handlers;
#endif
    // The first block tells what the others are worth. In a schedule of its own order they run one after the other.
    const unsigned long long start = now_ns();
    work(*w, 1);
    const unsigned long long worth = (now_ns() - start) * (grid.blocks - 1) / WORTH_A_THREAD_NS;
    const int most = launch.schedule == FORWARD ? launch.workers - 1 : 0;
    Helper helpers[MOST_HELPERS + 1];
    int count = 0;
    while (count < most && count < MOST_HELPERS && (unsigned long long)(count) < worth) {
        helpers[count].grid = &grid;
        helpers[count].number = count + 1;
        if (pthread_create(&helpers[count].thread, nullptr, help, &helpers[count]))
            break;
        ++count;
    }
    work(*w, ~0ull);
    while (count)
        pthread_join(helpers[--count].thread, nullptr);
#ifdef EMULATOR_ASAN
    pthread_mutex_unlock(&only_launch);
#endif
    give_back(w);
    fflush(stdout);
    return grid.failed;
}

}  // namespace emulator

#pragma GCC visibility pop
