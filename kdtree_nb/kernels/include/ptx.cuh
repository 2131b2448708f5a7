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

// Let wgmma see what this thread has written to shared memory, itself or by cp.async; before the barrier that tells others.
__device__ __forceinline__ void fence_shared_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// wgmma (sm_90a only): a warpgroup, that is warps 4·i to 4·i + 3, multiplies a [64, 16] of bfloat16. Its warp w holds of
// d [64, N] rows 16·w to 16·w + 15, eight columns to four registers, each as C above, and of an a in registers the same
// rows, as A. An operand in shared memory is a matrix_descriptor. Products run on while the threads do: until the wait
// for their group nobody may touch d, an a in registers, or what lies in shared memory.

// Before the first product, and before each that takes registers which the threads have written since.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

// Close a group of products: all that this warpgroup has started since the last group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Wait until at most `groups_left` groups of products are under way.
template <int groups_left> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(groups_left) : "memory");
}

// After the wait: what reads d from here on is not moved to before it.
template <int n> __device__ __forceinline__ void wgmma_use(float (&d)[n])
{
#pragma unroll
    for (int i = 0; i < n; ++i)
        asm volatile("" : "+f"(d[i])::"memory");
}

// d = a · bᵀ, or d += a · bᵀ, with b [32, 16], both row by row in shared memory.
__device__ __forceinline__ void wgmma_m64n32k16(float (&d)[16], unsigned long long a, unsigned long long b, bool adds)
{
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, adds, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "l"(a), "l"(b), "r"(int(adds)));
}

// The same with a in registers.
__device__ __forceinline__ void wgmma_m64n32k16(float (&d)[16], const unsigned (&a)[4], unsigned long long b, bool adds)
{
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}

// d += a · b with a in registers and b [16, 64] row by row in shared memory.
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[32], const unsigned (&a)[4], unsigned long long b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
          "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// x, of which the compiler knows nothing: what follows from it is reckoned where it is used, not kept from before a loop.
__device__ __forceinline__ unsigned long long anew(unsigned long long x)
{
    asm volatile("" : "+l"(x));
    return x;
}

// Any bitwise function of three words. The table is the function of 0xf0, 0xcc, 0xaa: (a & b) | c is 0xea.
template <int table> __device__ __forceinline__ unsigned lop3(unsigned a, unsigned b, unsigned c)
{
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, %4;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(table));
    return result;
}

#endif

// Where wgmma finds 16-bit numbers in shared memory: 8 rows of 64 in 1024 bytes, at a multiple of that, number c of the
// row's 16 bytes in the place of c ^ row % 8; the next 8 rows `next_rows` bytes on. Read row by row, the next 16 numbers
// are 32 bytes on; read transposed, the next 16 rows are two steps of `next_rows` on.
__device__ __forceinline__ unsigned long long matrix_descriptor(const void* shared, int next_rows = 1024)
{
    return (shared_address(shared) & 0x3ffffu) >> 4 | 1ull << 16 | (unsigned long long)(next_rows >> 4) << 32 | 1ull << 62;
}
