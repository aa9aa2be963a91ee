/* linear/linear.c - a linear layer in pieces for several threads, and which variant computes them. */
#include "linear.h"

#include <stdlib.h>

#include "core/pool.h"
#include "core/variants.h"

extern const ctx_linear_kernels ctx_linear_avx512, ctx_linear_avx2, ctx_linear_neon, ctx_linear_generic;

static const ctx_variant variants[] = {
    CTX_AVX512(ctx_linear, CTX_CPU_FMA)
    CTX_AVX2(ctx_linear, CTX_CPU_FMA)
    CTX_NEON(ctx_linear)
    CTX_GENERIC(ctx_linear)
};

enum { PIECE = 128 << 10 /* bytes of weights: some microseconds, so that nobody waits long for the last */, BLOCK = 4 };

typedef struct job {
    const ctx_linear *linear;
    ctx_linear_fn run;
    size_t each;
    _Atomic int failed;
} job;

static void piece(void *what, size_t i) {
    job *j = what;
    const ctx_linear *a = j->linear;
    const size_t first = i * j->each, last = first + j->each < a->outputs ? first + j->each : a->outputs;
    float *room = malloc(BLOCK * a->inputs * sizeof *room);
    if (room) j->run(a, first, last, room);
    else j->failed = 1;
    free(room);
}

ctx_linear_fn ctx_linear_of(const ctx_kernels *k) { return ((const ctx_linear_kernels *)ctx_variant_of(variants, k->name)->table)->run; }

ctx_status ctx_linear_run(const ctx_kernels *k, const ctx_linear *a, size_t threads) {
    size_t blocks = PIECE / (BLOCK * a->inputs * ctx_weights_bytes(a->format) + 1);
    job j = {.linear = a, .run = ctx_linear_of(k), .each = BLOCK * (blocks ? blocks : 1)};
    ctx_pool_run(piece, &j, (a->outputs + j.each - 1) / j.each, threads);
    return j.failed ? CTX_NO_MEMORY : CTX_OK;
}
