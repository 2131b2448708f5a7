// copies.cpp: cp.async. A copy happens as late as it may: in the wait for its group.
#include "block.h"

#include <stdlib.h>
#include <string.h>

#pragma GCC visibility push(hidden)

namespace emulator {

struct AsyncCopies {
    struct Copy {
        void* to;
        const void* from;
        int bytes, valid_bytes;
        int group;
    };
    Copy* list;
    int count, capacity;
    int groups;  // closed so far
};

namespace {

AsyncCopies& copies_of_thread()
{
    AsyncCopies*& copies = worker->current->copies;
    if (!copies)
        copies = static_cast<AsyncCopies*>(calloc(1, sizeof(AsyncCopies)));
    if (!copies)
        fail("no memory for cp.async");
    return *copies;
}

}  // namespace

void copy_async(void* to, const void* from, int bytes, int valid_bytes)
{
    if ((reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from)) & size_t(bytes - 1))
        fail("cp.async of %d bytes from %p to %p: both have to be multiples of %d", bytes, from, to, bytes);
    AsyncCopies& copies = copies_of_thread();
    if (copies.count == copies.capacity) {
        const int capacity = copies.capacity ? 2 * copies.capacity : 16;
        void* list = realloc(copies.list, size_t(capacity) * sizeof(AsyncCopies::Copy));
        if (!list)
            fail("no memory for cp.async");
        copies.list = static_cast<AsyncCopies::Copy*>(list);
        copies.capacity = capacity;
    }
    copies.list[copies.count++] = {to, from, bytes, valid_bytes, copies.groups};
}

void copy_commit() { ++copies_of_thread().groups; }

void copy_wait(int groups_left)
{
    AsyncCopies& copies = copies_of_thread();
    int left = 0;
    for (int i = 0; i < copies.count; ++i) {
        const AsyncCopies::Copy copy = copies.list[i];
        if (copy.group >= copies.groups - groups_left) {
            copies.list[left++] = copy;
            continue;
        }
        memcpy(copy.to, copy.from, size_t(copy.valid_bytes));
        memset(static_cast<char*>(copy.to) + copy.valid_bytes, 0, size_t(copy.bytes - copy.valid_bytes));
    }
    copies.count = left;
}

void copy_forget(Thread& thread)
{
    if (thread.copies)
        thread.copies->count = thread.copies->groups = 0;
}

}  // namespace emulator

#pragma GCC visibility pop
