// turn.cuh: in a recorded round a kernel begins while the one before it ends (programmatic dependent launch, from sm_90).
//
// Idea      Between two kernels memory rests: the first one's last blocks end, the second is launched, and its first
//           bytes are on their way. A kernel lets the next begin as soon as all its blocks have begun, or, with many
//           blocks, when they have little left to do but write; the next one's blocks take what room there is, and what
//           they need of the weights may be on its way before their turn comes. (They crowd where room is first: one row
//           by 4096×7168, one product behind another, took 10.6 µs where it had been 7.1, before gemm.spread.)
// Rule      Until its turn a kernel reads nothing that a kernel of the recording writes, and writes nothing: weights
//           alone. Each kernel waits for its turn, so that when one has it, all that came before have ended.
//           What is const and __restrict__ does not change while the kernel runs: the compiler may read it before the
//           wait, and does. So weights and tables have __restrict__, and nothing else that is read.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Once all blocks of this kernel have said so, or ended, the next kernel may begin.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory"); }

// Return when the kernels before this one have ended, and all they wrote is there.
__device__ __forceinline__ void wait_for_turn() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }

#else  // there kernels follow each other

__device__ __forceinline__ void let_next_begin() {}
__device__ __forceinline__ void wait_for_turn() {}

#endif

// For a short kernel, which has nothing to do before its turn.
__device__ __forceinline__ void take_turn()
{
    let_next_begin();
    wait_for_turn();
}
