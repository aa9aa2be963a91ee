/* linear/linear.c - a linear layer in pieces for several threads, and which variant computes them. */
#include "linear.h"

#include <stdlib.h>
#include <string.h>

#include "core/pool.h"
#include "core/variants.h"

extern const ctx_linear_kernels ctx_linear_avx512, ctx_linear_avx2, ctx_linear_neon, ctx_linear_generic;

static const ctx_variant variants[] = {
    CTX_AVX512(ctx_linear, CTX_CPU_FMA)
    CTX_AVX2(ctx_linear, CTX_CPU_FMA)
    CTX_NEON(ctx_linear)
    CTX_GENERIC(ctx_linear)
};

enum { PIECE = 128 << 10 /* bytes of weights: some microseconds, so that nobody waits long for the last */, BLOCK = CTX_GROUP };

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
    float *room = ctx_linear_room(CTX_GROUP, a->inputs);
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

float *ctx_linear_room(size_t rows, size_t inputs) {
    const size_t sets = (rows + CTX_SET - 1) / CTX_SET;
    return aligned_alloc(64, sets * CTX_SET * ctx_linear_chunks(inputs) * ctx_linear_chunk(inputs) * sizeof(float));
}

float *ctx_linear_pack(const ctx_linear *a) {
    const size_t chunks = ctx_linear_chunks(a->inputs), chunk = ctx_linear_chunk(a->inputs);
    float *packed = ctx_linear_room(a->rows, a->inputs);
    const size_t all = (a->rows + CTX_SET - 1) / CTX_SET * CTX_SET; /* a set's rows are multiplied whole: denormals there would take long */
    for (size_t r = 0; packed && r < all; r++)
        for (size_t c = 0; c < chunks; c++) {
            float *to = packed + ((r / CTX_SET * chunks + c) * CTX_SET + r % CTX_SET) * chunk;
            const size_t at = c * chunk, left = r < a->rows && at < a->inputs ? a->inputs - at : 0, count = left < chunk ? left : chunk;
            if (count) memcpy(to, a->x + r * a->inputs + at, count * sizeof *to);
            memset(to + count, 0, (chunk - count) * sizeof *to);
        }
    return packed;
}

ctx_status ctx_linear_run_all(const ctx_kernels *k, const ctx_linear *all, size_t count, const ctx_gate *gate, size_t threads) {
    ctx_linear mine[CTX_LAYERS];
    memcpy(mine, all, count * sizeof *mine);
    float *packed = NULL;
    if (all->rows > CTX_FEW && !(packed = ctx_linear_pack(all))) return CTX_NO_MEMORY;
    for (size_t i = 0; i < count; i++) mine[i].packed = packed;
    const size_t blocks = PIECE / (BLOCK * all->inputs * ctx_weights_bytes(all->format) * (gate ? 2 : 1) + 1);
    job j = {.kernels = ctx_linear_of(k), .all = mine, .each = BLOCK * (blocks ? blocks : 1), .gate = gate};
    size_t pieces = 0;
    for (size_t i = 0; i < (gate ? 1 : count); i++) pieces += (all[i].outputs + j.each - 1) / j.each;
    ctx_pool_run(piece, &j, pieces, threads);
    free(packed);
    return j.failed ? CTX_NO_MEMORY : CTX_OK;
}

ctx_status ctx_linear_run(const ctx_kernels *k, const ctx_linear *a, size_t threads) { return ctx_linear_run_all(k, a, 1, NULL, threads); }
