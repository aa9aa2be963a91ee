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

enum {
    PIECE = 128 << 10, /* bytes of weights: some microseconds, so that nobody waits long for the last */
    CACHE = 288 << 10, /* bytes of packed x, which is read again for each group of outputs, beside a piece's weights */
};

typedef struct job {
    const ctx_linear_kernels *kernels;
    const ctx_linear *all;
    size_t each, pieces; /* outputs of a piece, pieces of a block of rows */
    const ctx_gate *gate;
    _Atomic int failed;
} job;

static void piece(void *what, size_t i) {
    job *j = what;
    const ctx_linear *of = j->all;
    const size_t r = i / j->pieces * ctx_linear_block(of);
    i %= j->pieces;
    for (size_t pieces; !j->gate && i >= (pieces = (of->outputs + j->each - 1) / j->each); of++) i -= pieces;
    const ctx_linear a = ctx_linear_rows(of, r);
    const size_t first = i * j->each, last = first + j->each < a.outputs ? first + j->each : a.outputs;
    float *room = a.packed ? ctx_linear_room(CTX_GROUP, a.inputs) : NULL;
    if (a.packed && !room) {
        j->failed = 1;
        return;
    }
    j->kernels->run(&a, first, last, room);
    if (j->gate) {
        const ctx_linear with = ctx_linear_rows(of + 1, r);
        j->kernels->run(&with, first, last, room);
        for (size_t n = 0; n < a.rows; n++) j->kernels->gate(a.y + n * a.outputs + first, with.y + n * a.outputs + first, last - first, *j->gate);
    }
    free(room);
}

const ctx_linear_kernels *ctx_linear_of(const ctx_kernels *k) { return ctx_variant_of(variants, k->name)->table; }

float *ctx_linear_room(size_t rows, size_t inputs) {
    const size_t sets = (rows + CTX_SET - 1) / CTX_SET;
    return aligned_alloc(64, sets * CTX_SET * ctx_linear_chunks(inputs) * ctx_linear_chunk(inputs) * sizeof(float));
}

size_t ctx_linear_block(const ctx_linear *a) {
    if (a->pairs) return 1 + CACHE / (ctx_linear_padded(a->inputs) * sizeof *a->pairs + 1);
    if (!a->packed) return a->rows;
    const size_t sets = CACHE / (CTX_SET * ctx_linear_chunks(a->inputs) * ctx_linear_chunk(a->inputs) * sizeof(float) + 1);
    return CTX_SET * (sets ? sets : 1);
}

ctx_linear ctx_linear_rows(const ctx_linear *a, size_t r) {
    ctx_linear part = *a;
    const size_t most = ctx_linear_block(a), left = a->rows - r;
    part.rows = left < most ? left : most, part.x += r * a->inputs, part.y += r * a->outputs;
    if (a->pairs) part.pairs += r * ctx_linear_padded(a->inputs);
    if (a->packed) part.packed += r * ctx_linear_chunks(a->inputs) * ctx_linear_chunk(a->inputs);
    return part;
}

typedef struct packing {
    const ctx_linear *a;
    void (*round)(const float *x, uint16_t *to, size_t n);
    void *to;
} packing;

static void round_set(void *what, size_t set) {
    const packing *p = what;
    const size_t inputs = p->a->inputs, end = (set + 1) * CTX_SET;
    for (size_t r = set * CTX_SET; r < p->a->rows && r < end; r++)
        p->round(p->a->x + r * inputs, (uint16_t *)p->to + r * ctx_linear_padded(inputs), inputs);
}

static void pack(void *what, size_t set) {
    const packing *p = what;
    const size_t inputs = p->a->inputs, chunks = ctx_linear_chunks(inputs), chunk = ctx_linear_chunk(inputs);
    float *to = (float *)p->to + set * chunks * CTX_SET * chunk;
    for (size_t c = 0; c < chunks; c++)
        for (size_t r = set * CTX_SET; r < (set + 1) * CTX_SET; r++, to += chunk) {
            /* Tiles are multiplied whole: denormals in rows that are not there would take long. */
            const size_t at = c * chunk, left = r < p->a->rows && at < inputs ? inputs - at : 0, count = left < chunk ? left : chunk;
            if (count) memcpy(to, p->a->x + r * inputs + at, count * sizeof *to);
            memset(to + count, 0, (chunk - count) * sizeof *to);
        }
}

ctx_status ctx_linear_pack(const ctx_linear_kernels *kernels, ctx_linear *a, void **memory, size_t threads) {
    const int pairs = a->rounded && a->format == CTX_WEIGHTS_BF16 && kernels->round && ctx_cpu_has(CTX_CPU_BF16);
    *memory = NULL;
    if (!pairs && a->rows <= kernels->few) return CTX_OK;
    *memory = pairs ? aligned_alloc(64, (a->rows + 1) * ctx_linear_padded(a->inputs) * sizeof(uint16_t) + 64) : ctx_linear_room(a->rows, a->inputs);
    if (!*memory) return CTX_NO_MEMORY;
    packing p = {a, kernels->round, *memory};
    ctx_pool_run(pairs ? round_set : pack, &p, (a->rows + CTX_SET - 1) / CTX_SET, threads);
    if (pairs) a->pairs = *memory;
    else a->packed = *memory;
    return CTX_OK;
}

ctx_status ctx_linear_run_all(const ctx_kernels *k, const ctx_linear *all, size_t count, const ctx_gate *gate, size_t threads) {
    ctx_linear mine[CTX_LAYERS];
    memcpy(mine, all, count * sizeof *mine);
    const ctx_linear_kernels *kernels = ctx_linear_of(k);
    void *memory;
    for (size_t i = 1; i < count; i++) mine->rounded &= all[i].rounded && all[i].format == all->format; /* they share what is packed */
    if (ctx_linear_pack(kernels, mine, &memory, threads) != CTX_OK) return CTX_NO_MEMORY;
    for (size_t i = 1; i < count; i++) mine[i].packed = mine->packed, mine[i].pairs = mine->pairs;
    const size_t groups = PIECE / (CTX_GROUP * all->inputs * ctx_weights_bytes(all->format) * (gate ? 2 : 1) + 1);
    job j = {.kernels = kernels, .all = mine, .each = CTX_GROUP * (groups ? groups : 1), .gate = gate};
    for (size_t i = 0; i < (gate ? 1 : count); i++) j.pieces += (all[i].outputs + j.each - 1) / j.each;
    const size_t block = ctx_linear_block(mine);
    if (j.pieces && block) ctx_pool_run(piece, &j, (all->rows + block - 1) / block * j.pieces, threads);
    free(memory);
    return j.failed ? CTX_NO_MEMORY : CTX_OK;
}

ctx_status ctx_linear_run(const ctx_kernels *k, const ctx_linear *a, size_t threads) { return ctx_linear_run_all(k, a, 1, NULL, threads); }
