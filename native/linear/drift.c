/* linear/drift.c - rows of K and V corrected by a regression: a few rows at a time, all of it in the first cache. */
#include "drift.h"

#include <math.h>
#include <stdlib.h>

#include "core/pool.h"

enum { ROWS = 8 /* that are not packed (linear.h) */, PIECE = 8 * ROWS };

typedef struct call {
    const ctx_kernels *k;
    const ctx_linear_kernels *kernels;
    const ctx_drift *d;
    _Atomic int failed;
} call;

/* Rows r.. of a run; the first of it has the angles at `angle`. */
typedef struct some {
    size_t run, row, count, angle;
} some;

static uint8_t *row_of(const ctx_view *of, size_t head, size_t row) {
    return of->at + (head * of->strides[0] + row * of->strides[1]) * ctx_dtype_bytes(of->dtype);
}

/* Add `step` [count, heads, dim] to rows of V, or rotated to rows of K. */
static void add(const call *c, const ctx_view *to, some at, float *step, float *row, int rotated) {
    const ctx_drift *d = c->d;
    void (*const rotate)(uint8_t *, size_t, const uint8_t *, size_t, size_t, const float *, const float *, size_t) =
        (d->interleaved ? c->k->rope_pairs : c->k->rope_half)[CTX_FP32][CTX_FP32];
    for (size_t r = 0; r < at.count; r++, step += d->heads * d->dim) {
        const size_t angle = (at.angle + r) * d->half, bytes = d->dim * sizeof *step;
        if (rotated && d->half) rotate((uint8_t *)step, bytes, (uint8_t *)step, bytes, d->heads, d->cos + angle, d->sin + angle, d->half);
        for (size_t h = 0; h < d->heads; h++) {
            uint8_t *there = row_of(to, h, at.row + r);
            c->k->convert[to->dtype][CTX_FP32]((uint8_t *)row, there, d->dim);
            for (size_t i = 0; i < d->dim; i++) row[i] += step[h * d->dim + i];
            c->k->convert[CTX_FP32][to->dtype](there, (uint8_t *)row, d->dim);
        }
    }
}

/* `room`: ROWS rows of V, ROWS of weights, and one head's row. */
static void correct(const call *c, some at, float *room) {
    const ctx_drift *d = c->d;
    const size_t width = d->heads * d->dim, sampled = at.run * d->samples;
    const float *mean = d->mean + at.run * width;
    float *y = room, *w = y + ROWS * width, *row = w + ROWS * d->samples, like[ROWS];
    for (size_t r = 0; r < at.count; r++) {
        float *of = y + r * width, far = 0;
        for (size_t h = 0; h < d->heads; h++) c->k->convert[d->values.dtype][CTX_FP32]((uint8_t *)(of + h * d->dim), row_of(&d->values, h, at.row + r), d->dim);
        for (size_t i = 0; i < width; i++) of[i] -= mean[i];
        const ctx_linear length = {.w = (const uint8_t *)of, .x = of, .y = &far, .rows = 1, .outputs = 1, .inputs = width};
        c->kernels->run(&length, 0, 1, NULL);
        like[r] = far > d->reach[at.run] ? sqrtf(d->reach[at.run] / far) : 1; /* a row unlike all samples is taken for the farthest of those */
    }
    const ctx_linear products = {.w = (const uint8_t *)(d->x + sampled * width), .x = y, .y = w, .rows = at.count, .outputs = d->samples, .inputs = width};
    c->kernels->run(&products, 0, d->samples, NULL);
    for (size_t r = 0; r < at.count; r++)
        for (size_t i = 0; i < d->samples; i++) w[r * d->samples + i] = w[r * d->samples + i] * like[r] + d->prior[sampled + i];
    c->kernels->mix(w, d->dv + sampled * width, y, at.count, d->samples, width);
    add(c, &d->values, at, y, row, 0);
    c->kernels->mix(w, d->dk + sampled * width, y, at.count, d->samples, width);
    add(c, &d->keys, at, y, row, 1);
}

static size_t pieces_of(const int64_t rows[2]) { return (size_t)(rows[1] - rows[0] + PIECE - 1) / PIECE; }

static void correct_piece(void *what, size_t piece) {
    call *c = what;
    const ctx_drift *d = c->d;
    some at = {0};
    for (size_t of; piece >= (of = pieces_of(d->rows[at.run])); piece -= of) at.angle += (size_t)(d->rows[at.run][1] - d->rows[at.run][0]), at.run++;
    const size_t first = (size_t)d->rows[at.run][0], end = (size_t)d->rows[at.run][1], begin = first + piece * PIECE;
    const size_t last = end - begin < PIECE ? end : begin + PIECE;
    float *room = malloc((ROWS * (d->heads * d->dim + d->samples) + d->dim) * sizeof *room);
    if (!room) {
        c->failed = 1;
        return;
    }
    at.angle += begin - first;
    for (at.row = begin; at.row < last; at.row += at.count, at.angle += at.count) {
        at.count = last - at.row < ROWS ? last - at.row : ROWS;
        correct(c, at, room);
    }
    free(room);
}

ctx_status ctx_drift_correct(const ctx_kernels *k, const ctx_drift *d, size_t threads) {
    call c = {.k = k, .kernels = ctx_linear_of(k), .d = d};
    size_t pieces = 0;
    for (size_t i = 0; i < d->runs; i++) pieces += pieces_of(d->rows[i]);
    ctx_pool_run(correct_piece, &c, pieces, threads);
    return c.failed ? CTX_NO_MEMORY : CTX_OK;
}
