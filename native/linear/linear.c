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
    const ctx_linear_kernels *kernels;
    const ctx_linear *all;
    size_t each;
    const ctx_gate *gate;
    _Atomic int failed;
} job;

static void piece(void *what, size_t i) {
    job *j = what;
    const ctx_linear *a = j->all;
    for (size_t pieces; !j->gate && i >= (pieces = (a->outputs + j->each - 1) / j->each); a++) i -= pieces;
    const size_t first = i * j->each, last = first + j->each < a->outputs ? first + j->each : a->outputs;
    float *room = malloc(BLOCK * a->inputs * sizeof *room);
    if (!room) {
        j->failed = 1;
        return;
    }
    j->kernels->run(a, first, last, room);
    if (j->gate) {
        j->kernels->run(a + 1, first, last, room);
        for (size_t r = 0; r < a->rows; r++)
            j->kernels->gate(a->y + r * a->outputs + first, a[1].y + r * a->outputs + first, last - first, *j->gate);
    }
    free(room);
}

const ctx_linear_kernels *ctx_linear_of(const ctx_kernels *k) { return ctx_variant_of(variants, k->name)->table; }

ctx_status ctx_linear_run_all(const ctx_kernels *k, const ctx_linear *all, size_t count, const ctx_gate *gate, size_t threads) {
    const size_t blocks = PIECE / (BLOCK * all->inputs * ctx_weights_bytes(all->format) * (gate ? 2 : 1) + 1);
    job j = {.kernels = ctx_linear_of(k), .all = all, .each = BLOCK * (blocks ? blocks : 1), .gate = gate};
    size_t pieces = 0;
    for (size_t i = 0; i < (gate ? 1 : count); i++) pieces += (all[i].outputs + j.each - 1) / j.each;
    ctx_pool_run(piece, &j, pieces, threads);
    return j.failed ? CTX_NO_MEMORY : CTX_OK;
}

ctx_status ctx_linear_run(const ctx_kernels *k, const ctx_linear *a, size_t threads) { return ctx_linear_run_all(k, a, 1, NULL, threads); }
