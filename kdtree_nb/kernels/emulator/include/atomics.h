// atomics.h: CUDA's atomic functions. Blocks run at the same time, so they are atomic here too.
#pragma once

#include "runtime.h"

namespace emulator {

// Replace *address by change(old) with nobody in between; the old value.
template <class T, class Change> inline T update(T* address, Change change)
{
    if (worker->interleaves)
        interleave();
    T old, changed;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do
        changed = change(old);
    while (!__atomic_compare_exchange(address, &old, &changed, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return old;
}

template <class T> struct Same {
    using type = T;
};
template <class T> using Value = typename Same<T>::type;  // converted to the type that the address has

}  // namespace emulator

template <class T> inline T atomicAdd(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return T(old + value); });
}

template <class T> inline T atomicSub(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return T(old - value); });
}

template <class T> inline T atomicMin(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return value < old ? value : old; });
}

template <class T> inline T atomicMax(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return value > old ? value : old; });
}

template <class T> inline T atomicAnd(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return T(old & value); });
}

template <class T> inline T atomicOr(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return T(old | value); });
}

template <class T> inline T atomicXor(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return T(old ^ value); });
}

template <class T> inline T atomicExch(T* address, emulator::Value<T> value)
{
    return emulator::update(address, [=](T) { return value; });
}

template <class T> inline T atomicCAS(T* address, emulator::Value<T> compare, emulator::Value<T> value)
{
    return emulator::update(address, [=](T old) { return old == compare ? value : old; });
}

inline unsigned atomicInc(unsigned* address, unsigned limit)
{
    return emulator::update(address, [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}

inline unsigned atomicDec(unsigned* address, unsigned limit)
{
    return emulator::update(address, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
