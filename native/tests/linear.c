/* tests/linear.c - a linear layer by every table against doubles, on memory cut to size, by several threads. */
#include "linear/top.h"

#include <math.h>

#include "test.h"

static void one(const ctx_kernels *k, ctx_weights format, int rounded, size_t rows, size_t outputs, size_t inputs) {
    const size_t item = ctx_weights_bytes(format), ins = rows * inputs, weights = outputs * inputs;
    float *x = malloc(ins * 4), *y = malloc(rows * outputs * 4), *scales = malloc(outputs * 4), *bias = malloc(outputs * 4);
    uint8_t *w = random_bytes(weights * item);
    CHECK(x && y && scales && bias, "no memory");
    double *values = malloc(weights * sizeof *values);
    CHECK(values, "no memory");
    for (size_t i = 0; i < ins; i++) {
        uint16_t bits;
        x[i] = (float)below(2001) / 1000 - 1;
        if (!rounded) continue;
        k->convert[CTX_FP32][CTX_BF16]((uint8_t *)&bits, (const uint8_t *)&x[i], 1);
        k->convert[CTX_BF16][CTX_FP32]((uint8_t *)&x[i], (const uint8_t *)&bits, 1);
    }
    for (size_t o = 0; o < outputs; o++) scales[o] = (float)below(100) / 50, bias[o] = (float)below(100);
    for (size_t i = 0; i < weights; i++) {
        const float value = (float)below(2001) / 1000 - 1;
        float as = value;
        if (format == CTX_WEIGHTS_FP32) memcpy(w + 4 * i, &value, 4);
        if (format == CTX_WEIGHTS_BF16) {
            k->convert[CTX_FP32][CTX_BF16](w + 2 * i, (const uint8_t *)&value, 1);
            k->convert[CTX_BF16][CTX_FP32]((uint8_t *)&as, w + 2 * i, 1);
        }
        values[i] = format == CTX_WEIGHTS_INT8 ? (int8_t)w[i] : as;
    }
    const ctx_linear a = {.format = format, .w = w, .scales = scales, .bias = bias, .x = x, .y = y, .rows = rows, .outputs = outputs, .inputs = inputs, .rounded = rounded};
    CHECK(ctx_linear_run(k, &a, 1 + below(4)) == CTX_OK, "no memory");
    for (size_t r = 0; r < rows; r++)
        for (size_t o = 0; o < outputs; o++) {
            double sum = 0, size = 1;
            for (size_t i = 0; i < inputs; i++) sum += values[o * inputs + i] * x[r * inputs + i], size += fabs(values[o * inputs + i]);
            const double expected = sum * scales[o] + bias[o];
            CHECK(fabs(y[r * outputs + o] - expected) <= 1e-5 * size * (1 + scales[o]) + 1e-4, "%s, format %d, row %zu, output %zu", k->name, format, r, o);
        }
    ctx_top *tops = malloc(rows * sizeof *tops);
    CHECK(tops && ctx_linear_top(k, &a, tops, 1 + below(4)) == CTX_OK, "no memory");
    for (size_t r = 0; r < rows; r++) {
        double sum = 0;
        for (size_t o = 0; o < outputs; o++) {
            const float value = y[r * outputs + o];
            CHECK(value <= tops[r].best && (value <= tops[r].second || o == tops[r].index), "%s: a larger output", k->name);
            sum += exp((double)value - tops[r].best);
        }
        CHECK(tops[r].index < outputs && y[r * outputs + tops[r].index] == tops[r].best, "%s: another number", k->name);
        CHECK(fabs(tops[r].best + log(sum) - tops[r].total) <= 1e-4 * (1 + fabs(tops[r].total)), "%s: another sum", k->name);
    }
    free(tops);
    free(x), free(y), free(scales), free(bias), free(w), free(values);
}

/* Layers of several formats in one call, of which some processors multiply one as it lies. */
static void mixed(const ctx_kernels *k) {
    enum { ROWS = 11, OUTPUTS = 21, INPUTS = 70 };
    static float x[ROWS * INPUTS], y[CTX_LAYERS][ROWS * OUTPUTS], alone[ROWS * OUTPUTS], scales[OUTPUTS];
    ctx_linear all[CTX_LAYERS];
    for (size_t i = 0; i < ROWS * INPUTS; i++) x[i] = (float)below(256) / 128 - 1; /* bf16 holds them */
    for (size_t o = 0; o < OUTPUTS; o++) scales[o] = 0.5f;
    for (size_t i = 0; i < CTX_LAYERS; i++) {
        const ctx_weights format = i == 1 ? CTX_WEIGHTS_INT8 : CTX_WEIGHTS_BF16;
        uint8_t *w = random_bytes(OUTPUTS * INPUTS * ctx_weights_bytes(format));
        for (size_t n = 0; format == CTX_WEIGHTS_BF16 && n < OUTPUTS * INPUTS; n++) w[2 * n + 1] = 0x3f; /* .5 to 2 */
        all[i] = (ctx_linear){.format = format, .w = w, .scales = scales, .x = x, .y = y[i], .rows = ROWS, .outputs = OUTPUTS, .inputs = INPUTS, .rounded = 1};
    }
    CHECK(ctx_linear_run_all(k, all, CTX_LAYERS, NULL, 2) == CTX_OK, "no memory");
    for (size_t i = 0; i < CTX_LAYERS; i++) {
        ctx_linear one = all[i];
        one.y = alone;
        CHECK(ctx_linear_run(k, &one, 1) == CTX_OK, "no memory");
        for (size_t n = 0; n < ROWS * OUTPUTS; n++)
            CHECK(fabs((double)(alone[n] - y[i][n])) <= 1e-4 * (1 + fabs((double)alone[n])), "%s: layer %zu differs among others", k->name, i);
        free((void *)(uintptr_t)all[i].w);
    }
}

void test_linear(void) {
    const ctx_kernels *tables[TABLES];
    for (size_t t = 0, count = all_tables(tables); t < count; t++) {
        mixed(tables[t]);
        for (int format = 0; format < CTX_WEIGHTS; format++)
            for (int round = 0; round < 36; round++) { /* the last ones: several blocks of rows */
                const size_t rows = 1 + below(round < 32 ? 20 : 250), outputs = 1 + below(round < 32 ? 200 : 40);
                one(tables[t], (ctx_weights)format, round % 2, rows, outputs, round < 24 ? 1 + below(90) : CTX_CHUNK - 20 + below(800));
            }
    }
}
