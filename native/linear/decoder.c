/* linear/decoder.c - the steps of a decoder layer before and after its attention. */
#include "decoder.h"

#include <stdlib.h>

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

static void norm_rows(const ctx_linear_kernels *kernels, const ctx_decoder_layer *l, ctx_norm which, const float *x, float *y, size_t rows,
                      size_t width) {
    if (l->norms[which])
        for (size_t r = 0; r < rows; r++) kernels->norm(x + r * width, l->norms[which], l->eps, y + r * width, width);
}

static ctx_linear part_of(const ctx_decoder_layer *l, ctx_layer_part which, const float *x, float *y, size_t rows) {
    ctx_linear a = l->parts[which];
    a.x = x, a.y = y, a.rows = rows;
    return a;
}

ctx_status ctx_layer_enter(const ctx_kernels *k, const ctx_decoder_layer *l, ctx_dtype dtype, const uint8_t *x, const uint8_t *cos,
                           const uint8_t *sin, uint8_t *q, uint8_t *keys, uint8_t *values, size_t rows, size_t threads) {
    const ctx_linear_kernels *kernels = ctx_linear_of(k);
    const size_t hidden = rows * ctx_layer_hidden(l), angles = rows * l->dim, of_q = angles * l->heads, of_k = angles * l->kv_heads;
    float *h = malloc((hidden + 2 * angles + of_q + 2 * of_k) * sizeof *h);
    if (!h) return CTX_NO_MEMORY;
    float *c = h + hidden, *s = c + angles, *to[3] = {s + angles, s + angles + of_q, s + angles + of_q + of_k};
    k->convert[dtype][CTX_FP32]((uint8_t *)h, x, hidden);
    k->convert[dtype][CTX_FP32]((uint8_t *)c, cos, angles);
    k->convert[dtype][CTX_FP32]((uint8_t *)s, sin, angles);
    norm_rows(kernels, l, CTX_NORM_ENTER, h, h, rows, ctx_layer_hidden(l));
    const ctx_linear all[] = {part_of(l, CTX_Q, h, to[0], rows), part_of(l, CTX_K, h, to[1], rows), part_of(l, CTX_V, h, to[2], rows)};
    const ctx_status status = ctx_linear_run_all(k, all, 3, NULL, threads);
    norm_rows(kernels, l, CTX_NORM_Q, to[0], to[0], rows * l->heads, l->dim);
    norm_rows(kernels, l, CTX_NORM_K, to[1], to[1], rows * l->kv_heads, l->dim);
    for (size_t r = 0; r < rows; r++) {
        rotate(to[0] + r * l->heads * l->dim, l->heads, l->dim, c + r * l->dim, s + r * l->dim);
        rotate(to[1] + r * l->kv_heads * l->dim, l->kv_heads, l->dim, c + r * l->dim, s + r * l->dim);
    }
    k->convert[CTX_FP32][dtype](q, (const uint8_t *)to[0], of_q);
    k->convert[CTX_FP32][dtype](keys, (const uint8_t *)to[1], of_k);
    k->convert[CTX_FP32][dtype](values, (const uint8_t *)to[2], of_k);
    free(h);
    return status;
}

ctx_status ctx_layer_leave(const ctx_kernels *k, const ctx_decoder_layer *l, ctx_dtype dtype, const uint8_t *attended, const uint8_t *x,
                           uint8_t *y, size_t rows, size_t threads) {
    const ctx_linear_kernels *kernels = ctx_linear_of(k);
    const size_t width = ctx_layer_hidden(l), hidden = rows * width, inner = rows * l->parts[CTX_GATE].outputs, ins = rows * l->parts[CTX_O].inputs;
    float *o = malloc((ins + 3 * hidden + 2 * inner) * sizeof *o);
    if (!o) return CTX_NO_MEMORY;
    float *sum = o + ins, *h = sum + hidden, *step = h + hidden, *gated = step + hidden;
    k->convert[dtype][CTX_FP32]((uint8_t *)o, attended, ins);
    k->convert[dtype][CTX_FP32]((uint8_t *)sum, x, hidden);
    const ctx_linear out = part_of(l, CTX_O, o, step, rows), down = part_of(l, CTX_DOWN, gated, step, rows);
    const ctx_linear both[] = {part_of(l, CTX_GATE, h, gated, rows), part_of(l, CTX_UP, h, gated + inner, rows)};
    ctx_status status = ctx_linear_run(k, &out, threads);
    norm_rows(kernels, l, CTX_NORM_ATTENDED, step, step, rows, width);
    for (size_t i = 0; i < hidden; i++) sum[i] += step[i];
    norm_rows(kernels, l, CTX_NORM_MLP, sum, h, rows, width);
    if (status == CTX_OK) status = ctx_linear_run_all(k, both, 2, &l->gate, threads);
    if (status == CTX_OK) status = ctx_linear_run(k, &down, threads);
    norm_rows(kernels, l, CTX_NORM_LEAVE, step, step, rows, width);
    for (size_t i = 0; i < hidden; i++) sum[i] += step[i];
    k->convert[CTX_FP32][dtype](y, (const uint8_t *)sum, hidden);
    free(o);
    return status;
}
