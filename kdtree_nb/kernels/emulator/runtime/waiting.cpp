// waiting.cpp: who waits for whom, who runs next, and what is reported when nobody can.
#include "block.h"

#include <stdarg.h>
#include <string.h>
#include <time.h>

#pragma GCC visibility push(hidden)

namespace emulator {

__thread Worker* worker;

namespace {

// How often threads may yield with nobody getting any further: first at once, then, as another block may have to do
// something, with a pause; 2 s in all.
constexpr int QUICK_YIELDS = 10'000, SLOW_YIELDS = 20'000;
constexpr timespec PAUSE{0, 100'000};

// Who waits where, when nobody can run.
[[noreturn]] void report_deadlock(BlockWorker& w)
{
    char text[1024] = "";
    size_t length = 0;
    auto add = [&](const char* format, auto... values) {
        if (length < sizeof text)
            length += size_t(snprintf(text + length, sizeof text - length, format, values...));
    };
    if (w.arrived)
        add("%d of %d threads wait in %s at %s:%d; ", w.arrived, w.threads_in_block, w.barrier_site->function,
            w.barrier_site->file(), w.barrier_site->line);
    for (int i = 0; i < w.warps_in_block; ++i) {
        const Warp& warp = w.warps[i];
        for (unsigned left = warp.waiting; left;) {
            const int lane = lowest(left);
            const Site& site = *warp.site[lane];
            unsigned alike = 0;  // lanes that wait at the same place for the same lanes
            for (unsigned rest = left; rest; rest &= rest - 1) {
                const int other = lowest(rest);
                if (warp.mask[other] == warp.mask[lane] && warp.site[other]->line == site.line)
                    alike |= bit(other);
            }
            left &= ~alike;
            add("in warp %d lanes 0x%08x wait in %s at %s:%d for lanes 0x%08x; ", i, alike, site.function, site.file(),
                site.line, warp.mask[lane] & warp.present & ~alike);
        }
    }
    fail("deadlock, no thread can run: %s", text);
}

// Stop the running thread and go on with one that is ready: of the same warp while there is one, as this is fastest.
void leave(BlockWorker& w, bool same_warp = true)
{
    FibreThread& from = w.running();
    if (!w.ready_warps) {
        if (w.threads_present)
            report_deadlock(w);
        switch_to(from.fibre, w.scheduler);  // the block is done
        return;
    }
    Warp* warp = from.warp;
    int lane;
    if (same_warp && warp->ready && w.grid->launch.schedule != RANDOM) {
        lane = choose(w, warp->ready, from.lane);
    } else {
        warp = &w.warps[choose(w, w.ready_warps, warp->index)];
        lane = choose(w, warp->ready);
    }
    FibreThread& to = w.threads[warp->index * LANES + lane];
    if (&to != &from) {
        w.current = &to;
        switch_to(from.fibre, to.fibre);
    }
}

void suspend(BlockWorker& w)
{
    Warp& warp = *w.current->warp;
    warp.ready &= ~bit(w.current->lane);
    if (!warp.ready)
        w.ready_warps &= ~bit(warp.index);
    leave(w);
}

void wake(BlockWorker& w, Warp& warp, unsigned lanes)
{
    warp.ready |= lanes;
    w.ready_warps |= bit(warp.index);
    w.idle_yields = 0;
}

// All lanes that `lane` waits for are here.
void complete(BlockWorker& w, Warp& warp, int lane, unsigned lanes)
{
    const Combine combine = warp.combine[lane];
    const unsigned mask = warp.mask[lane];
    for (unsigned rest = lanes; rest; rest &= rest - 1) {
        const int other = lowest(rest);
        const Site &here = *warp.site[lane], &there = *warp.site[other];
        if (warp.combine[other] != combine)
            fail("lane %d is in %s at %s:%d, lane %d in %s at %s:%d", lane, here.function, here.file(), here.line,
                 other, there.function, there.file(), there.line);
        if (warp.mask[other] != mask)
            fail("%s at %s:%d: lane %d passes mask 0x%08x, lane %d passes 0x%08x", here.function, here.file(),
                 here.line, lane, mask, other, warp.mask[other]);
    }
    combine(warp, lanes);
    warp.waiting &= ~lanes;
    wake(w, warp, lanes);
}

// Threads run on as soon as they can, or as the schedule wants.
void go_on(BlockWorker& w)
{
    if (w.grid->launch.schedule != FORWARD)
        leave(w);
}

}  // namespace

void meet(unsigned mask, const Site& site, Combine combine)
{
    BlockWorker& w = self();
    Warp& warp = *w.current->warp;
    const int lane = w.current->lane;
    if (!(mask & bit(lane)))
        fail("%s at %s:%d: mask 0x%08x does not name lane %d, which calls", site.function, site.file(), site.line, mask,
             lane);
    warp.mask[lane] = mask;
    warp.site[lane] = &site;
    warp.combine[lane] = combine;
    warp.waiting |= bit(lane);
    const unsigned lanes = mask & warp.present;
    if ((warp.waiting & lanes) != lanes)
        return suspend(w);
    complete(w, warp, lane, lanes);
    go_on(w);
}

int barrier(bool predicate, const Site& site)
{
    BlockWorker& w = self();
    if (w.threads_present < w.threads_in_block)
        fail("%s at %s:%d is not reached by all threads of the block: %d of %d have returned", site.function,
             site.file(), site.line, w.threads_in_block - w.threads_present, w.threads_in_block);
    if (!w.arrived)
        w.barrier_site = &site;
    const Site& first = *w.barrier_site;
    if (first.line != site.line || strcmp(first.path, site.path) != 0)
        fail("barriers in diverging branches: this thread is in %s at %s:%d, %d wait in %s at %s:%d", site.function,
             site.file(), site.line, w.arrived, first.function, first.file(), first.line);
    w.predicates += predicate;
    if (++w.arrived < w.threads_in_block) {
        suspend(w);
        return w.barrier_result;
    }
    const int result = w.barrier_result = w.predicates;
    w.arrived = w.predicates = 0;
    for (int i = 0; i < w.warps_in_block; ++i)
        wake(w, w.warps[i], w.warps[i].present);
    go_on(w);
    return result;
}

void finish(BlockWorker& w)
{
    Warp& warp = *w.current->warp;
    if (w.arrived)
        fail("%s at %s:%d is not reached by all threads of the block: %d wait there, this one has returned",
             w.barrier_site->function, w.barrier_site->file(), w.barrier_site->line, w.arrived);
    --w.threads_present;
    warp.present &= ~bit(w.current->lane);
    for (unsigned rest = warp.waiting; rest; rest &= rest - 1) {
        const int lane = lowest(rest);
        const unsigned lanes = warp.mask[lane] & warp.present;
        if ((warp.waiting & lanes) == lanes)
            complete(w, warp, lane, lanes);
        rest &= warp.waiting | bit(lane);
    }
    suspend(w);
}

void yield()
{
    BlockWorker& w = self();
    if (++w.idle_yields > QUICK_YIELDS)
        nanosleep(&PAUSE, nullptr);
    if (w.idle_yields > QUICK_YIELDS + SLOW_YIELDS)
        fail("threads wait in __nanosleep for what nobody does");
    leave(w, false);
}

void interleave()
{
    BlockWorker& w = self();
    if (draw(w) % 4 == 0)
        leave(w, false);
}

void fail(const char* format, ...)
{
    BlockWorker& w = self();
    char message[1536];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    record_error(w, message);
    switch_to(w.running().fibre, w.scheduler);  // nobody comes back to this stack
    __builtin_unreachable();
}

}  // namespace emulator

#pragma GCC visibility pop
