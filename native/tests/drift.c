/* tests/drift.c - corrected rows by every table against doubles, on memory cut to size, by several threads. */
#include "linear/drift.h"

#include <math.h>

#include "test.h"

static float *floats(size_t n) {
    float *x = malloc(n ? n * sizeof *x : 1);
    CHECK(x, "no memory");
    for (size_t i = 0; i < n; i++) x[i] = (float)below(2001) / 1000 - 1;
    return x;
}

static void close_to(const char *what, float got, double expected) {
    CHECK(fabs(got - expected) <= 1e-4 * (1 + fabs(expected)), "%s: %g, not %g", what, got, expected);
}

/* One row in doubles; its planes before and after, each [heads, tokens, dim]. */
static void row(const ctx_drift *d, size_t run, size_t at, size_t angle, size_t tokens, const float *const before[2], const float *const after[2]) {
    const size_t width = d->heads * d->dim;
    const float *x = d->x + run * d->samples * width, *mean = d->mean + run * width, *cos = d->cos + angle * d->half, *sin = d->sin + angle * d->half;
    double w[8], far = 0, step[2][256] = {{0}};
    for (size_t i = 0; i < width; i++) far += pow(before[1][(i / d->dim * tokens + at) * d->dim + i % d->dim] - (double)mean[i], 2);
    for (size_t n = 0; n < d->samples; n++) {
        w[n] = 0;
        for (size_t i = 0; i < width; i++) w[n] += (before[1][(i / d->dim * tokens + at) * d->dim + i % d->dim] - (double)mean[i]) * x[n * width + i];
        w[n] = w[n] * (far > d->reach[run] ? sqrt(d->reach[run] / far) : 1) + d->prior[run * d->samples + n];
        for (size_t i = 0; i < width; i++) {
            step[0][i] += w[n] * d->dk[(run * d->samples + n) * width + i];
            step[1][i] += w[n] * d->dv[(run * d->samples + n) * width + i];
        }
    }
    for (size_t h = 0; h < d->heads; h++) {
        double *k = step[0] + h * d->dim, a, b;
        for (size_t i = 0; i < d->half; i++) {
            double *one = k + (d->interleaved ? 2 * i : i), *two = k + (d->interleaved ? 2 * i + 1 : i + d->half);
            a = *one * cos[i] - *two * sin[i], b = *two * cos[i] + *one * sin[i], *one = a, *two = b;
        }
    }
    for (int p = 0; p < 2; p++)
        for (size_t i = 0; i < width; i++) {
            const size_t place = (i / d->dim * tokens + at) * d->dim + i % d->dim;
            close_to(p ? "v" : "k", after[p][place], before[p][place] + step[p][i]);
        }
}

static void one(const ctx_kernels *k) {
    ctx_drift d = {.heads = 1 + below(3), .dim = 1 + below(40), .runs = below(4), .samples = below(8), .interleaved = (int)below(2)};
    const size_t width = d.heads * d.dim, tokens = 1 + below(300);
    int64_t spans[4][2];
    size_t rows = 0, end = 0;
    for (size_t i = 0; i < d.runs; i++) {
        const size_t first = end + below(tokens - end + 1);
        end = first + below(tokens - first + 1), rows += end - first;
        spans[i][0] = (int64_t)first, spans[i][1] = (int64_t)end;
    }
    d.half = below(d.dim / 2 + 1), d.rows = (const int64_t(*)[2])spans;
    float *planes[4], *kept[8] = {floats(d.runs * d.samples * width), floats(d.runs * width), floats(d.runs), floats(d.runs * d.samples),
                                  floats(d.runs * d.samples * width), floats(d.runs * d.samples * width), floats(rows * d.half), floats(rows * d.half)};
    for (size_t i = 0; i < d.runs; i++) kept[2][i] = (float)(1 + below(20));
    d.x = kept[0], d.mean = kept[1], d.reach = kept[2], d.prior = kept[3], d.dk = kept[4], d.dv = kept[5], d.cos = kept[6], d.sin = kept[7];
    for (int p = 0; p < 2; p++) {
        planes[p] = floats(tokens * width), planes[2 + p] = floats(tokens * width);
        memcpy(planes[2 + p], planes[p], tokens * width * sizeof(float));
    }
    d.keys = (ctx_view){.at = (uint8_t *)planes[2], .dtype = CTX_FP32, .strides = {tokens * d.dim, d.dim, 1}};
    d.values = d.keys, d.values.at = (uint8_t *)planes[3];
    CHECK(ctx_drift_correct(k, &d, 1 + below(4)) == CTX_OK, "no memory");
    size_t angle = 0;
    end = 0;
    for (size_t i = 0; i <= d.runs; i++) {
        const size_t first = i < d.runs ? (size_t)spans[i][0] : tokens, last = i < d.runs ? (size_t)spans[i][1] : tokens;
        for (; end < first; end++) /* rows of no run stay */
            for (size_t j = 0; j < 2 * width; j++) {
                const size_t at = (j / 2 / d.dim * tokens + end) * d.dim + j / 2 % d.dim;
                CHECK(planes[2 + j % 2][at] == planes[j % 2][at], "row %zu of no run has changed", end);
            }
        for (; end < last; end++, angle++) row(&d, i, end, angle, tokens, (const float *const *)planes, (const float *const *)(planes + 2));
    }
    for (int i = 0; i < 8; i++) free(kept[i]);
    for (int i = 0; i < 4; i++) free(planes[i]);
}

void test_drift(void) {
    const ctx_kernels *tables[TABLES];
    for (size_t t = 0, count = all_tables(tables); t < count; t++)
        for (int round = 0; round < 60; round++) one(tables[t]);
}
