/* tests/decoder.c - decoder layers by every table against doubles, on memory cut to size, by several threads. */
#include "linear/decoder.h"

#include <math.h>

#include "test.h"

static float around(float size) { return size * ((float)below(2001) / 1000 - 1); }

static float *floats(size_t n, float size) {
    float *x = malloc(n * sizeof *x);
    CHECK(x, "no memory");
    for (size_t i = 0; i < n; i++) x[i] = around(size);
    return x;
}

static void multiply(const ctx_linear *a, const double *x, double *y) {
    for (size_t o = 0; o < a->outputs; o++) {
        float w;
        y[o] = a->bias ? a->bias[o] : 0;
        for (size_t i = 0; i < a->inputs; i++) memcpy(&w, a->w + 4 * (o * a->inputs + i), 4), y[o] += (double)w * x[i];
    }
}

static void norm(const float *w, float eps, double *x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    for (size_t i = 0; w && i < n; i++) x[i] *= w[i] / sqrt(sum / (double)n + eps);
}

static void same(const char *what, const float *got, const double *expected, size_t n) {
    for (size_t i = 0; i < n; i++) CHECK(fabs(got[i] - expected[i]) <= 2e-4 * (1 + fabs(expected[i])), "%s %zu: %g, not %g", what, i, got[i], expected[i]);
}

enum { MOST = 256 };

static void enters(const ctx_decoder_layer *l, const float *x, const float *cos, const float *sin, const float *const got[3]) {
    static const ctx_norm norms[] = {CTX_NORM_Q, CTX_NORM_K};
    const size_t half = l->dim / 2;
    double h[MOST], y[MOST], turned[MOST];
    for (size_t i = 0; i < ctx_layer_hidden(l); i++) h[i] = x[i];
    norm(l->norms[CTX_NORM_ENTER], l->eps, h, ctx_layer_hidden(l));
    for (int p = CTX_Q; p <= CTX_V; p++) {
        multiply(&l->parts[p], h, y);
        for (size_t head = 0; p < CTX_V && head < l->parts[p].outputs / l->dim; head++) {
            double *at = y + head * l->dim;
            norm(l->norms[norms[p]], l->eps, at, l->dim);
            for (size_t i = 0; i < l->dim; i++) turned[i] = at[i] * cos[i] + (i < half ? -at[i + half] : at[i - half]) * sin[i];
            memcpy(at, turned, l->dim * sizeof *at);
        }
        same("entered", got[p], y, l->parts[p].outputs);
    }
}

static void leaves(const ctx_decoder_layer *l, const float *attended, const float *x, const float *got) {
    const size_t hidden = ctx_layer_hidden(l);
    double o[MOST], sum[MOST], h[MOST], gated[MOST], up[MOST];
    for (size_t i = 0; i < l->parts[CTX_O].inputs; i++) o[i] = attended[i];
    multiply(&l->parts[CTX_O], o, sum);
    norm(l->norms[CTX_NORM_ATTENDED], l->eps, sum, hidden);
    for (size_t i = 0; i < hidden; i++) h[i] = sum[i] += x[i];
    norm(l->norms[CTX_NORM_MLP], l->eps, h, hidden);
    multiply(&l->parts[CTX_GATE], h, gated);
    multiply(&l->parts[CTX_UP], h, up);
    for (size_t i = 0; i < l->parts[CTX_UP].outputs; i++) {
        const double g = gated[i], to = 0.7978845608028654 * (g + 0.044715 * g * g * g);
        gated[i] = up[i] * (l->gate == CTX_GATE_SILU ? g / (1 + exp(-g)) : 0.5 * g * (1 + tanh(to)));
    }
    multiply(&l->parts[CTX_DOWN], gated, h);
    norm(l->norms[CTX_NORM_LEAVE], l->eps, h, hidden);
    for (size_t i = 0; i < hidden; i++) sum[i] += h[i];
    same("left", got, sum, hidden);
}

static void one(const ctx_kernels *k) {
    ctx_decoder_layer l = {.eps = 1e-6f, .heads = 1 + below(4), .kv_heads = 1 + below(3), .dim = 2 * (1 + below(20)), .gate = (ctx_gate)below(CTX_GATES)};
    const size_t hidden = 1 + below(100), inner = 1 + below(200), rows = 1 + below(6), of_q = l.heads * l.dim, of_k = l.kv_heads * l.dim;
    const size_t shapes[CTX_LAYER_PARTS][2] = {{of_q, hidden}, {of_k, hidden}, {of_k, hidden}, {hidden, of_q}, {inner, hidden}, {inner, hidden}, {hidden, inner}};
    float *kept[3 * CTX_LAYER_PARTS + CTX_NORMS + 8];
    size_t count = 0;
    for (int p = 0; p < CTX_LAYER_PARTS; p++) {
        float *w = kept[count++] = floats(shapes[p][0] * shapes[p][1], 0.2f), *bias = below(2) ? kept[count++] = floats(shapes[p][0], 1) : NULL;
        l.parts[p] = (ctx_linear){.format = CTX_WEIGHTS_FP32, .w = (const uint8_t *)w, .bias = bias, .outputs = shapes[p][0], .inputs = shapes[p][1]};
    }
    for (int n = 0; n < CTX_NORMS; n++)
        if (n == CTX_NORM_ENTER || n == CTX_NORM_MLP || below(2))
            l.norms[n] = kept[count++] = floats(n == CTX_NORM_Q || n == CTX_NORM_K ? l.dim : hidden, 1);
    float *x = kept[count++] = floats(rows * hidden, 3), *cos = kept[count++] = floats(rows * l.dim, 1), *sin = kept[count++] = floats(rows * l.dim, 1);
    float *q = kept[count++] = floats(rows * of_q, 1), *keys = kept[count++] = floats(rows * of_k, 1), *values = kept[count++] = floats(rows * of_k, 1);
    float *y = kept[count++] = floats(rows * hidden, 1);
    const size_t threads = 1 + below(4);
    CHECK(ctx_layer_enter(k, &l, CTX_FP32, (uint8_t *)x, (uint8_t *)cos, (uint8_t *)sin, (uint8_t *)q, (uint8_t *)keys, (uint8_t *)values, rows, threads) == CTX_OK, "no memory");
    CHECK(ctx_layer_leave(k, &l, CTX_FP32, (uint8_t *)q, (uint8_t *)x, (uint8_t *)y, rows, threads) == CTX_OK, "no memory");
    for (size_t r = 0; r < rows; r++) {
        const float *const got[] = {q + r * of_q, keys + r * of_k, values + r * of_k};
        enters(&l, x + r * hidden, cos + r * l.dim, sin + r * l.dim, got);
        leaves(&l, q + r * of_q, x + r * hidden, y + r * hidden);
    }
    while (count) free(kept[--count]);
}

void test_decoder(void) {
    const ctx_kernels *tables[TABLES];
    for (size_t t = 0, count = all_tables(tables); t < count; t++)
        for (int round = 0; round < 40; round++) one(tables[t]);
}
