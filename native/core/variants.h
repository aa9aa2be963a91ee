/* core/variants.h - which of a subject's kernels this machine runs: one row for each instruction set that has some.
 *
 * A subject lists its variants once, in order of preference, the last being the one that needs nothing:
 *
 *   extern const ctx_rans_coder ctx_rans_avx512, ctx_rans_avx2, ctx_rans_neon, ctx_rans_generic;
 *   static const ctx_variant variants[] = {
 *       CTX_AVX512(ctx_rans, CTX_CPU_VBMI2)
 *       CTX_AVX2(ctx_rans, 0)
 *       CTX_NEON(ctx_rans)
 *       CTX_GENERIC(ctx_rans)
 *   };
 *
 * CTX_HAVE_<NAME> says that the build has a row's source (CMakeLists.txt).
 */
#ifndef CTXREUSE_VARIANTS_H
#define CTXREUSE_VARIANTS_H

#include <stdint.h>

/* Bits of the processor and of the operating system's saved state that kernels may need. */
enum {
    CTX_CPU_AVX2 = 1, CTX_CPU_F16C = 2, CTX_CPU_AVX512 = 4 /* F, BW, DQ, VL */, CTX_CPU_NEON = 8,
    CTX_CPU_VBMI2 = 16, /* VBMI and VBMI2; only with CTX_CPU_AVX512 */
    CTX_CPU_VNNI = 32,  /* only with CTX_CPU_AVX512 */
    CTX_CPU_BMI2 = 64,  /* BMI1, BMI2 */
    CTX_CPU_FMA = 128,
    CTX_CPU_BF16 = 256, /* AVX512_BF16; only with CTX_CPU_AVX512 */
};

typedef struct ctx_variant {
    const char *name;
    uint32_t needs; /* CTX_CPU_* bits that must all be present; 0 in the last row only */
    const void *table;
} ctx_variant;

#ifdef CTX_HAVE_AVX512
#define CTX_AVX512(subject, needs) {"avx512", CTX_CPU_AVX512 | (needs), &subject##_avx512},
#else
#define CTX_AVX512(subject, needs)
#endif
#ifdef CTX_HAVE_AVX2
#define CTX_AVX2(subject, needs) {"avx2", CTX_CPU_AVX2 | (needs), &subject##_avx2},
#else
#define CTX_AVX2(subject, needs)
#endif
#ifdef CTX_HAVE_NEON
#define CTX_NEON(subject) {"neon", CTX_CPU_NEON, &subject##_neon},
#else
#define CTX_NEON(subject)
#endif
#define CTX_GENERIC(subject) {"generic", 0, &subject##_generic},

/* Are all these bits there? */
int ctx_cpu_has(uint32_t needs);

/* The first of the rows from there on that runs here. */
const ctx_variant *ctx_variant_here(const ctx_variant *rows);

/* The row of that name, or the next that runs here; the last one for a name that is not listed. */
const ctx_variant *ctx_variant_of(const ctx_variant *rows, const char *name);

#endif
