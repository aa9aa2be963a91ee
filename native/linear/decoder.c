/* linear/decoder.c - the steps of a decoder layer before and after its attention. */
#include "decoder.h"

#include <stdlib.h>

#include "core/pool.h"

/* Rotate pairs (i, i + dim/2) of each head: x * cos + rotate_half(x) * sin. */
static void rotate(float *x, size_t heads, size_t dim, const float *cos, const float *sin) {
    const size_t half = dim / 2;
    for (; heads; heads--, x += dim)
        for (size_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i + half] + a * sin[i + half];
        }
}

static ctx_linear part_of(const ctx_decoder_layer *l, ctx_layer_part which, ctx_dtype dtype, const float *x, float *y, size_t rows) {
    ctx_linear a = l->parts[which];
    a.x = x, a.y = y, a.rows = rows, a.rounded = dtype == CTX_BF16;
    return a;
}

/* What is done to single rows before, between and after linear layers; some rows at a time, by several threads. */
enum { SOME = 16 };

typedef struct steps {
    const ctx_kernels *k;
    const ctx_linear_kernels *kernels;
    const ctx_decoder_layer *l;
    ctx_dtype dtype;
    size_t rows;
    const uint8_t *x, *cos, *sin, *attended;
    uint8_t *q, *keys, *values, *y;
    float *h, *sum, *step, *to[3], *angles; /* [rows, ...]; angles [rows, 2, dim] */
} steps;

typedef struct run {
    size_t first, count;
} run;

static run run_of(const steps *s, size_t piece) {
    const size_t first = piece * SOME, left = s->rows - first;
    return (run){first, left < SOME ? left : SOME};
}

static void each(void (*step)(void *, size_t), steps *s, size_t threads) { ctx_pool_run(step, s, (s->rows + SOME - 1) / SOME, threads); }

static void norm_rows(const steps *s, ctx_norm which, const float *x, float *y, size_t rows, size_t width) {
    if (s->l->norms[which])
        for (size_t r = 0; r < rows; r++) s->kernels->norm(x + r * width, s->l->norms[which], s->l->eps, y + r * width, width);
}

/* Rows of `width` numbers of a buffer to fp32, and back. */
static void read_rows(const steps *s, run of, const uint8_t *x, float *to, size_t width) {
    s->k->convert[s->dtype][CTX_FP32]((uint8_t *)(to + of.first * width), x + of.first * width * ctx_dtype_bytes(s->dtype), of.count * width);
}
static void write_rows(const steps *s, run of, const float *x, uint8_t *to, size_t width) {
    s->k->convert[CTX_FP32][s->dtype](to + of.first * width * ctx_dtype_bytes(s->dtype), (const uint8_t *)(x + of.first * width), of.count * width);
}

static void enter_norm(void *what, size_t piece) {
    const steps *s = what;
    const run of = run_of(s, piece);
    const size_t width = ctx_layer_hidden(s->l);
    read_rows(s, of, s->x, s->h, width);
    norm_rows(s, CTX_NORM_ENTER, s->h + of.first * width, s->h + of.first * width, of.count, width);
}

static void enter_rotate(void *what, size_t piece) {
    const steps *s = what;
    const run of = run_of(s, piece);
    const size_t dim = s->l->dim;
    float *cos = s->angles, *sin = s->angles + s->rows * dim;
    read_rows(s, of, s->cos, cos, dim);
    read_rows(s, of, s->sin, sin, dim);
    for (int i = 0; i < 2; i++) {
        const size_t heads = i ? s->l->kv_heads : s->l->heads;
        float *of_rows = s->to[i] + of.first * heads * dim;
        norm_rows(s, i ? CTX_NORM_K : CTX_NORM_Q, of_rows, of_rows, of.count * heads, dim);
        for (size_t r = 0; r < of.count; r++) rotate(of_rows + r * heads * dim, heads, dim, cos + (of.first + r) * dim, sin + (of.first + r) * dim);
    }
    write_rows(s, of, s->to[0], s->q, s->l->heads * dim);
    write_rows(s, of, s->to[1], s->keys, s->l->kv_heads * dim);
    write_rows(s, of, s->to[2], s->values, s->l->kv_heads * dim);
}

ctx_status ctx_layer_enter(const ctx_kernels *k, const ctx_decoder_layer *l, ctx_dtype dtype, const uint8_t *x, const uint8_t *cos,
                           const uint8_t *sin, uint8_t *q, uint8_t *keys, uint8_t *values, size_t rows, size_t threads) {
    const size_t hidden = rows * ctx_layer_hidden(l), angles = rows * l->dim, of_q = angles * l->heads, of_k = angles * l->kv_heads;
    float *h = malloc((hidden + 2 * angles + of_q + 2 * of_k) * sizeof *h), *a = h + hidden, *to = a + 2 * angles;
    if (!h) return CTX_NO_MEMORY;
    steps s = {.k = k, .kernels = ctx_linear_of(k), .l = l, .dtype = dtype, .rows = rows, .x = x, .cos = cos, .sin = sin, .q = q, .keys = keys,
               .values = values, .h = h, .angles = a, .to = {to, to + of_q, to + of_q + of_k}};
    each(enter_norm, &s, threads);
    const ctx_linear all[] = {part_of(l, CTX_Q, dtype, h, s.to[0], rows), part_of(l, CTX_K, dtype, h, s.to[1], rows), part_of(l, CTX_V, dtype, h, s.to[2], rows)};
    const ctx_status status = ctx_linear_run_all(k, all, 3, NULL, threads);
    if (status == CTX_OK) each(enter_rotate, &s, threads);
    free(h);
    return status;
}

static void leave_read(void *what, size_t piece) {
    const steps *s = what;
    read_rows(s, run_of(s, piece), s->attended, s->h, s->l->parts[CTX_O].inputs);
}

static void add_step(const steps *s, run of, ctx_norm norm) {
    const size_t width = ctx_layer_hidden(s->l);
    float *sum = s->sum + of.first * width, *step = s->step + of.first * width;
    norm_rows(s, norm, step, step, of.count, width);
    for (size_t i = 0; i < of.count * width; i++) sum[i] += step[i];
}

static void leave_attended(void *what, size_t piece) {
    const steps *s = what;
    const run of = run_of(s, piece);
    const size_t width = ctx_layer_hidden(s->l);
    read_rows(s, of, s->x, s->sum, width);
    add_step(s, of, CTX_NORM_ATTENDED);
    norm_rows(s, CTX_NORM_MLP, s->sum + of.first * width, s->h + of.first * width, of.count, width);
}

static void leave_sum(void *what, size_t piece) {
    const steps *s = what;
    const run of = run_of(s, piece);
    add_step(s, of, CTX_NORM_LEAVE);
    write_rows(s, of, s->sum, s->y, ctx_layer_hidden(s->l));
}

ctx_status ctx_layer_leave(const ctx_kernels *k, const ctx_decoder_layer *l, ctx_dtype dtype, const uint8_t *attended, const uint8_t *x,
                           uint8_t *y, size_t rows, size_t threads) {
    const size_t hidden = rows * ctx_layer_hidden(l), inner = rows * l->parts[CTX_GATE].outputs, ins = rows * l->parts[CTX_O].inputs;
    float *h = malloc(((ins > hidden ? ins : hidden) + 2 * hidden + 2 * inner) * sizeof *h);
    if (!h) return CTX_NO_MEMORY;
    float *sum = h + (ins > hidden ? ins : hidden), *step = sum + hidden, *gated = step + hidden;
    steps s = {.k = k, .kernels = ctx_linear_of(k), .l = l, .dtype = dtype, .rows = rows, .x = x, .attended = attended, .y = y, .h = h, .sum = sum, .step = step};
    const ctx_linear out = part_of(l, CTX_O, dtype, h, step, rows), down = part_of(l, CTX_DOWN, dtype, gated, step, rows);
    const ctx_linear both[] = {part_of(l, CTX_GATE, dtype, h, gated, rows), part_of(l, CTX_UP, dtype, h, gated + inner, rows)};
    each(leave_read, &s, threads);
    ctx_status status = ctx_linear_run(k, &out, threads);
    if (status == CTX_OK) each(leave_attended, &s, threads);
    if (status == CTX_OK) status = ctx_linear_run_all(k, both, 2, &l->gate, threads);
    if (status == CTX_OK) status = ctx_linear_run(k, &down, threads);
    if (status == CTX_OK) each(leave_sum, &s, threads);
    free(h);
    return status;
}
