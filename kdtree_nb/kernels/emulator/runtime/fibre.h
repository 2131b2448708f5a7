// fibre.h: stacks that take turns on one thread of the operating system.
//
// A Fibre is a stopped stack. switch_to(from, to) stops the running one in `from` and goes on where `to` was stopped.
// By hand on x86-64 and aarch64 (the registers that a call has to keep, then the other stack), with ucontext elsewhere.
#pragma once

#include "runtime.h"

#ifdef EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__) && !defined(__aarch64__)
#define EMULATOR_UCONTEXT 1
#endif
#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

struct Fibre {
#ifdef EMULATOR_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer;
#endif
    // For AddressSanitizer, which has to know on which stack it is.
    const void* stack = nullptr;
    size_t stack_size = 0;
    void* fake_stack = nullptr;
};

#ifdef EMULATOR_UCONTEXT

inline void jump(Fibre& from, Fibre& to) { swapcontext(&from.context, &to.context); }

inline void enter_at(Fibre& fibre, char* stack, size_t size, void (*entry)())
{
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = stack;
    fibre.context.uc_stack.ss_size = size;
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, entry, 0);
}

#else

extern "C" void emulator_jump(void** from, void* to) __asm__("emulator_jump");

#if defined(__x86_64__)
__asm__(R"(
.text
.p2align 4
emulator_jump:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
)");
// Saved registers, the address to go on at, and a zero where entry's return address would be.
constexpr int SAVED_WORDS = 8, ENTRY_WORD = 6;
#else
__asm__(R"(
.text
.p2align 4
emulator_jump:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
)");
constexpr int SAVED_WORDS = 20, ENTRY_WORD = 1;
#endif

inline void jump(Fibre& from, Fibre& to) { emulator_jump(&from.stack_pointer, to.stack_pointer); }

inline void enter_at(Fibre& fibre, char* stack, size_t size, void (*entry)())
{
    const size_t top = reinterpret_cast<size_t>(stack + size) & ~size_t(15);
    void** words = reinterpret_cast<void**>(top) - SAVED_WORDS;
    for (int i = 0; i < SAVED_WORDS; ++i)
        words[i] = nullptr;
    words[ENTRY_WORD] = reinterpret_cast<void*>(entry);
    fibre.stack_pointer = words;
}

#endif

// A fibre that starts with entry(), which does not return.
inline void prepare(Fibre& fibre, char* stack, size_t size, void (*entry)())
{
    fibre.stack = stack;
    fibre.stack_size = size;
    fibre.fake_stack = nullptr;
#ifdef EMULATOR_ASAN
    __asan_unpoison_memory_region(stack, size);  // what a fibre that was given up has left
#endif
    enter_at(fibre, stack, size, entry);
}

// The first thing a new fibre does: `from` is the fibre that was stopped for it.
inline void arrived([[maybe_unused]] Fibre& at, [[maybe_unused]] Fibre* from = nullptr)
{
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(at.fake_stack, from ? &from->stack : nullptr, from ? &from->stack_size : nullptr);
#endif
}

inline void switch_to(Fibre& from, Fibre& to)
{
#ifdef EMULATOR_ASAN
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_size);
#endif
    jump(from, to);
    arrived(from);
}

}  // namespace emulator
