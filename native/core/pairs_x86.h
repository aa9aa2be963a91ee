/* core/pairs_x86.h - products of bf16 by twos (VDPBF16PS), for kernels that look for CTX_CPU_BF16 first. */
#ifndef CTXREUSE_PAIRS_X86_H
#define CTXREUSE_PAIRS_X86_H

#include <immintrin.h>

/* Of functions that round to bf16 by intrinsics. */
#define BF16 __attribute__((target("avx512bf16")))

/* sum += two products a lane. As assembly, for compilers copy the sum before they add. */
static inline __attribute__((always_inline)) void add_pairs(__m512 *sum, __m512i pairs, __m512i with) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(*sum) : "v"(pairs), "v"(with));
}

#endif
