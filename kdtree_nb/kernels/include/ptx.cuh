// ptx.cuh: the PTX instructions that CUDA C++ has no name for, one function each.
//
// Fragments are laid out as the PTX manual draws them (section "Matrix fragments for mma.m16n8k16"); with
// group = lane / 4 and pair = lane % 4 a lane holds, two 16-bit numbers to a register, the lower one in the low half:
//   A [16, 16], row    a[0]: row group,     columns 2·pair, +1      a[2]: row group,     columns 2·pair + 8, +1
//                      a[1]: row group + 8, columns 2·pair, +1      a[3]: row group + 8, columns 2·pair + 8, +1
//   B [16, 8], column  b[0]: rows 2·pair, +1, column group          b[1]: rows 2·pair + 8, +1, column group
//   C, D [16, 8] fp32  c[0], c[1]: row group, columns 2·pair, +1    c[2], c[3]: row group + 8, the same columns
#pragma once

#ifdef KDTREE_EMULATOR
#include "ptx_emulated.h"
#else

// d = a · b + c with bfloat16 a [16, 16], b [16, 8] and fp32 c, d [16, 8].
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                                  const float (&c)[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

// The same with half-precision a and b.
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                                  const float (&c)[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
}

// The address of shared memory, as PTX takes it.
__device__ __forceinline__ unsigned shared_address(const void* shared)
{
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Matrices of 8 × 8 16-bit numbers from shared memory: matrix j's row i starts where lane 8·j + i points, at a
// multiple of 16 bytes. Lane l gets of matrix j, in r[j], row l / 4, columns 2·(l % 4) and the next.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(unsigned (&r)[2], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same, each matrix transposed: lane l gets rows 2·(l % 4) and the next of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// Start copying 16 bytes from global to shared memory, both aligned to 16. Where `valid` is false nothing is read
// and zeros are written; `global` has to be an address all the same.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// The same for 4 bytes, aligned to 4.
__device__ __forceinline__ void cp_async_4(void* shared, const void* global, bool valid = true)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

// Close a group of copies: all that this thread has started since the last group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Wait until at most `groups_left` of this thread's groups are under way. Other threads see the copies after a barrier.
template <int groups_left> __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(groups_left) : "memory");
}

// Any bitwise function of three words. The table is the function of 0xf0, 0xcc, 0xaa: (a & b) | c is 0xea.
template <int table> __device__ __forceinline__ unsigned lop3(unsigned a, unsigned b, unsigned c)
{
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, %4;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(table));
    return result;
}

#endif
