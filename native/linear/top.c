/* linear/top.c - the largest outputs of a linear layer: each piece reduces its own while they are in the cache, then all are merged. */
#include "top.h"

#include <math.h>
#include <stdlib.h>

#include "core/pool.h"

enum { PIECE = 64 /* outputs: with 576 inputs of one byte some 4 microseconds */ };

typedef struct job {
    const ctx_linear *linear;
    const ctx_linear_kernels *kernels;
    ctx_top *parts; /* [pieces, rows]; `total` is the sum of exponentials above `best` */
    _Atomic int failed;
} job;

static void add(ctx_top *to, float value, uint32_t index) {
    if (value > to->best) to->second = to->best, to->best = value, to->index = index;
    else if (value > to->second) to->second = value;
}

static void piece(void *what, size_t i) {
    job *j = what;
    ctx_linear a = *j->linear;
    const size_t first = i * PIECE, count = a.outputs - first < PIECE ? a.outputs - first : PIECE;
    float *y = malloc(a.rows * count * sizeof *y), *room = a.packed ? ctx_linear_room(CTX_GROUP, a.inputs) : NULL;
    if (!y || (a.packed && !room)) {
        free(y);
        free(room);
        j->failed = 1;
        return;
    }
    a.w += first * a.inputs * ctx_weights_bytes(a.format), a.outputs = count, a.y = y;
    if (a.scales) a.scales += first;
    if (a.bias) a.bias += first;
    j->kernels->run(&a, 0, count, room);
    free(room);
    for (size_t r = 0; r < a.rows; r++) {
        ctx_top top = {.best = -INFINITY, .second = -INFINITY, .index = (uint32_t)first};
        const float *row = y + r * count;
        for (size_t o = 0; o < count; o++) add(&top, row[o], (uint32_t)(first + o));
        for (size_t o = 0; o < count; o++) top.total += expf(row[o] - top.best);
        j->parts[i * a.rows + r] = top;
    }
    free(y);
}

ctx_status ctx_linear_top(const ctx_kernels *k, const ctx_linear *a, ctx_top *tops, size_t threads) {
    const size_t pieces = (a->outputs + PIECE - 1) / PIECE;
    ctx_linear mine = *a;
    void *memory = NULL;
    job j = {.linear = &mine, .kernels = ctx_linear_of(k), .parts = malloc(pieces * a->rows * sizeof *j.parts)};
    if (!j.parts || ctx_linear_pack(j.kernels, &mine, &memory, threads) != CTX_OK) {
        free(j.parts);
        return CTX_NO_MEMORY;
    }
    ctx_pool_run(piece, &j, pieces, threads);
    for (size_t r = 0; r < a->rows && !j.failed; r++) {
        ctx_top top = {.best = -INFINITY, .second = -INFINITY};
        for (size_t i = 0; i < pieces; i++) {
            const ctx_top *of = &j.parts[i * a->rows + r];
            add(&top, of->best, of->index);
            add(&top, of->second, of->index);
        }
        double sum = 0;
        for (size_t i = 0; i < pieces; i++) sum += (double)j.parts[i * a->rows + r].total * exp((double)j.parts[i * a->rows + r].best - top.best);
        top.total = top.best + (float)log(sum);
        tops[r] = top;
    }
    free(memory);
    free(j.parts);
    return j.failed ? CTX_NO_MEMORY : CTX_OK;
}
