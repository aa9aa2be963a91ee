/* tests/attention.c - attention by every table against doubles, on memory cut to size; quantising; numbers that are none. */
#include "attention/attention.h"

#include <math.h>

#include "test.h"

static float normal(void) { return ((float)below(1 << 20) + (float)below(1 << 20) + (float)below(1 << 20)) / (1 << 19) - 3; }

static float *normals(size_t n) {
    float *x = malloc(n ? n * sizeof *x : 1);
    CHECK(x, "no memory");
    for (size_t i = 0; i < n; i++) x[i] = normal();
    return x;
}

static const char *const names[CTX_FORMATS] = {"fp32", "fp16", "bf16", "int8", "int4"};

/* A plane in memory of exactly its size, with the numbers that it stands for. */
typedef struct made {
    ctx_plane plane;
    uint8_t *data, *scales;
    float *x; /* [heads, tokens, dim] */
} made;

static double step_of(uint8_t code) { return code < 8 ? ldexp(code, -17) : ldexp(8 + code % 8, code / 8 - 18); }

static made make(ctx_format format, size_t heads, size_t tokens, size_t dim) {
    static const size_t eighths[CTX_FORMATS] = {32, 16, 16, 8, 4};
    const size_t gap = below(2) * below(9), row = dim * eighths[format] / 8 + gap, groups = dim / 32, rows = heads * tokens;
    made m = {.x = normals(rows * dim)};
    m.plane = (ctx_plane){.format = format, .head = tokens * row, .row = row};
    uint8_t *packed = random_bytes(rows * row);
    int8_t *codes = (int8_t *)random_bytes(rows * dim + 1);
    uint8_t *pairs = random_bytes(2 * groups * rows + 2);
    float *scales = normals(rows);
    for (size_t h = 0; h < heads; h++) {
        float *x = m.x + h * tokens * dim;
        const size_t from = h * tokens;
        uint8_t *steps = pairs + h * 2 * groups * tokens, *lows = steps + groups * tokens;
        if (format == CTX_ROWS_INT8) CHECK(!ctx_quantise8(generic_table(), codes + from * dim, scales + from, (uint8_t *)x, CTX_FP32, 4 * dim, tokens, dim), "finite");
        if (format == CTX_ROWS_INT4) CHECK(!ctx_quantise4(generic_table(), (uint8_t *)codes + from * dim / 2, steps, lows, tokens, (uint8_t *)x, CTX_FP32, 4 * dim, tokens, dim), "finite");
        for (size_t t = 0; t < tokens; t++) {
            uint8_t *to = packed + (from + t) * row;
            if (format <= CTX_ROWS_BF16) {
                generic_table()->convert[CTX_FP32][format](to, (uint8_t *)(x + t * dim), dim);
                generic_table()->convert[format][CTX_FP32]((uint8_t *)(x + t * dim), to, dim);
                continue;
            }
            memcpy(to, codes + (from + t) * (dim * eighths[format] / 8), dim * eighths[format] / 8);
            for (size_t d = 0; d < dim; d++) {
                const size_t g = d / 32, i = d % 32;
                const int code = format == CTX_ROWS_INT8 ? (int8_t)to[d] : to[16 * g + i % 16] >> (i / 16 * 4) & 15;
                const float was = x[t * dim + d];
                const double step = format == CTX_ROWS_INT8 ? scales[from + t] : step_of(steps[g * tokens + t]);
                const double low = format == CTX_ROWS_INT8 ? 0 : (int8_t)lows[g * tokens + t] * step / 8;
                x[t * dim + d] = (float)(low + step * code);
                CHECK(fabs(x[t * dim + d] - was) < 1.01 * step + 1e-4, "%s: %g became %g", names[format], was, x[t * dim + d]);
            }
        }
    }
    const size_t bytes = format == CTX_ROWS_INT8 ? 4 * rows : format == CTX_ROWS_INT4 ? 2 * groups * rows : 0;
    m.data = packed, m.scales = malloc(bytes ? bytes : 1);
    memcpy(m.scales, format == CTX_ROWS_INT8 ? (void *)scales : (void *)pairs, bytes);
    m.plane.at = m.data, m.plane.scales = m.scales;
    m.plane.scale_head = format == CTX_ROWS_INT8 ? 4 * tokens : 2 * groups * tokens;
    m.plane.scale_low = groups * tokens, m.plane.scale_group = tokens;
    free(codes), free(pairs), free(scales);
    return m;
}

static void drop(made *m) { free(m->data), free(m->scales), free(m->x); }

enum { PARTS = 3 };

/* A call over some parts, with what it should give. */
typedef struct call {
    ctx_attention a;
    ctx_part parts[PARTS];
    made k[PARTS], v[PARTS];
    size_t tokens[PARTS], rows;
    float *q, *turned;
    int64_t *positions, *at[PARTS], *hidden[PARTS];
    double *o, *lse;
    int coarse; /* integers are in it */
    int rounded; /* so are bf16 rows, and rounding to that is allowed */
} call;

static int seen(const call *c, size_t part, size_t row, size_t query) {
    const ctx_part *p = &c->parts[part];
    for (size_t i = 0; i < p->hidden_count; i++)
        if (p->hidden[i] == (int64_t)row) return 0;
    if (!p->placed) return 1;
    const int64_t at = p->at_rows ? p->at_rows[row] : p->at + (int64_t)row, x = c->a.positions[query];
    return at <= x && (!c->a.window || at > x - c->a.window);
}

static void expect(call *c, size_t head, size_t query) {
    const ctx_attention *a = &c->a;
    const size_t dim = a->dim, own = head / (a->heads_q / a->heads), at = head * a->queries + query;
    double top = -INFINITY, total = 0, *s = malloc((c->rows + 1) * sizeof *s);
    for (size_t i = 0, n = 0; i < a->count; i++)
        for (size_t t = c->parts[i].first; t < c->parts[i].last; t++, n++) {
            const float *q = (c->parts[i].q ? c->parts[i].q : a->q) + at * dim, *k = c->k[i].x + (own * c->tokens[i] + t) * dim;
            s[n] = 0;
            for (size_t d = 0; d < dim; d++) s[n] += (double)q[d] * k[d] * a->scale;
            if (a->softcap > 0) s[n] = a->softcap * tanh(s[n] / a->softcap);
            if (!seen(c, i, t, query)) s[n] = -INFINITY;
            if (s[n] > top) top = s[n];
        }
    for (size_t d = 0; d < dim; d++) c->o[at * dim + d] = 0;
    for (size_t i = 0, n = 0; i < a->count && top > -INFINITY; i++)
        for (size_t t = c->parts[i].first; t < c->parts[i].last; t++, n++) {
            const double p = exp(s[n] - top);
            total += p;
            for (size_t d = 0; d < dim; d++) c->o[at * dim + d] += p * c->v[i].x[(own * c->tokens[i] + t) * dim + d];
        }
    for (size_t d = 0; d < dim && total > 0; d++) c->o[at * dim + d] /= total;
    c->lse[at] = total > 0 ? top + log(total) : -INFINITY;
    free(s);
}

static call random_call(void) {
    call c = {.a = {.heads = 1 + below(3), .queries = 1 + below(below(3) ? 5 : 40)}};
    ctx_attention *a = &c.a;
    a->heads_q = a->heads * (1 + below(5)), a->dim = below(3) ? 16 * (1 + below(9)) : 1 + below(130);
    a->scale = 1 / sqrtf((float)a->dim), a->softcap = below(4) ? 0 : 2 + (float)below(50), a->count = 1 + below(PARTS);
    a->rounded = below(2) == 0;
    a->window = below(2) ? 0 : 1 + (int64_t)below(200);
    const size_t values = a->heads_q * a->queries * a->dim;
    c.q = normals(values), c.turned = normals(values), a->q = c.q;
    c.positions = malloc(a->queries * sizeof *c.positions), a->positions = c.positions;
    for (size_t i = 0; i < a->queries; i++) c.positions[i] = (int64_t)below(400) - 20;
    for (size_t i = 0; i < a->count; i++) {
        ctx_part *p = &c.parts[i];
        const size_t tokens = c.tokens[i] = below(4) ? 1 + below(300) : 1 + below(5);
        ctx_format formats[2];
        for (int j = 0; j < 2; j++) formats[j] = (ctx_format)below(a->dim % 32 ? CTX_ROWS_INT4 : CTX_FORMATS);
        c.k[i] = make(formats[0], a->heads, tokens, a->dim), c.v[i] = make(formats[1], a->heads, tokens, a->dim);
        c.coarse |= formats[0] >= CTX_ROWS_INT8 || formats[1] >= CTX_ROWS_INT8;
        c.rounded |= c.a.rounded && (formats[0] == CTX_ROWS_BF16 || formats[1] == CTX_ROWS_BF16);
        p->k = c.k[i].plane, p->v = c.v[i].plane;
        p->first = below(tokens + 1), p->last = p->first + below(tokens - p->first + 1);
        if (below(3)) p->first = 0, p->last = tokens;
        c.rows += p->last - p->first;
        p->q = below(2) ? c.turned : NULL, p->placed = below(3) != 0, p->at = (int64_t)below(300) - 50;
        c.at[i] = malloc(tokens * sizeof(int64_t)), c.hidden[i] = malloc(tokens * sizeof(int64_t));
        for (size_t t = 0; t < tokens; t++) c.at[i][t] = (t ? c.at[i][t - 1] : -10) + (int64_t)below(3);
        if (below(2)) p->at_rows = c.at[i];
        for (size_t t = 0; t < tokens && below(2); t++)
            if (!below(5)) c.hidden[i][p->hidden_count++] = (int64_t)t;
        p->hidden = c.hidden[i];
    }
    return c;
}

static void finish(call *c) {
    for (size_t i = 0; i < c->a.count; i++) drop(&c->k[i]), drop(&c->v[i]), free(c->at[i]), free(c->hidden[i]);
    free(c->q), free(c->turned), free(c->positions), free(c->o), free(c->lse);
}

static void compare(const call *c, const char *name, const float *o, const float *lse) {
    const size_t rows = c->a.heads_q * c->a.queries, dim = c->a.dim;
    const double limit = c->rounded ? 5e-2 : c->coarse ? 4e-4 : 2e-5;
    for (size_t r = 0; r < rows; r++) {
        CHECK(lse[r] == c->lse[r] || fabs(lse[r] - c->lse[r]) < limit, "%s: lse %g, not %g", name, lse[r], c->lse[r]);
        for (size_t d = 0; d < dim; d++) {
            const double wanted = c->o[r * dim + d];
            CHECK(fabs(o[r * dim + d] - wanted) < 3 * limit, "%s: dim %zu row %zu: %g, not %g", name, dim, r, o[r * dim + d], wanted);
        }
    }
}

static void test_calls(void) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    for (int round = 0; round < 150; round++) {
        call c = random_call();
        c.a.parts = c.parts;
        const size_t rows = c.a.heads_q * c.a.queries, values = rows * c.a.dim;
        c.o = malloc(values * sizeof *c.o), c.lse = malloc(rows * sizeof *c.lse);
        for (size_t h = 0; h < c.a.heads_q; h++)
            for (size_t i = 0; i < c.a.queries; i++) expect(&c, h, i);
        float *o = normals(2 * values), *lse = normals(2 * rows);
        const size_t cut = below(c.rows + 1), head = below(c.a.heads + 1);
        for (size_t i = 0; i < count; i++) {
            const char *name = ctx_attend_name(tables[i], c.a.dim);
            CHECK(ctx_attend(tables[i], &c.a, 0, head, 0, c.rows, o, lse, 1) == CTX_OK, "%s", name);
            CHECK(ctx_attend(tables[i], &c.a, head, c.a.heads, 0, c.rows, o, lse, 3) == CTX_OK, "%s", name);
            compare(&c, name, o, lse);
            ctx_attend(tables[i], &c.a, 0, c.a.heads, 0, cut, o, lse, 1);
            ctx_attend(tables[i], &c.a, 0, c.a.heads, cut, c.rows, o + values, lse + rows, 1);
            ctx_attend_merge(o, lse, 2, rows, c.a.dim);
            compare(&c, name, o, lse);
        }
        free(o), free(lse);
        finish(&c);
    }
}

static void test_quantise(void) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables), dim = 96, rows = 40;
    static const float odd[] = {0, -0.0f, 1e-38f, 1e-31f, 3e38f, -65504, 65504, 1e-7f, 6e4f, -1e-3f};
    for (int round = 0; round < 60; round++) {
        float *x = normals(rows * dim);
        for (size_t i = 0; i < rows * dim; i++) {
            if (round % 3 == 1) x[i] *= powf(10, (float)below(8) - 6);
            if (round % 3 == 2) x[i] = odd[below(round % 2 ? 10 : 4)];
        }
        if (round == 58) x[below(rows * dim)] = NAN;
        if (round == 59) x[below(rows * dim)] = -INFINITY;
        uint8_t first[2][96 * 40], codes[96 * 40];
        float scales[2][40];
        uint8_t pairs[2][2 * 3 * 40];
        int wrong[2] = {0, 0};
        for (size_t i = count; i-- > 0;) {
            const int now = i != count - 1;
            memset(scales[now], 0, sizeof scales[now]), memset(pairs[now], 0, sizeof pairs[now]), memset(codes, 0, sizeof codes);
            int failed = ctx_quantise8(tables[i], (int8_t *)codes, scales[now], (uint8_t *)x, CTX_FP32, 4 * dim, rows, dim);
            CHECK(failed == (round >= 58 ? -1 : 0), "%d", failed);
            if (!now) memcpy(first[0], codes, sizeof codes);
            CHECK(!memcmp(first[0], codes, sizeof codes) && !memcmp(scales[0], scales[now], sizeof scales[0]), "%s: int8", tables[i]->name);
            memset(codes, 0, sizeof codes);
            wrong[now] = ctx_quantise4(tables[i], codes, pairs[now], pairs[now] + 120, 40, (uint8_t *)x, CTX_FP32, 4 * dim, rows, dim);
            if (!now) memcpy(first[1], codes, sizeof codes);
            CHECK(wrong[now] == wrong[0] && (round < 58 || wrong[now]), "%d and %d", wrong[0], wrong[now]);
            CHECK(!memcmp(first[1], codes, sizeof codes) && !memcmp(pairs[0], pairs[now], sizeof pairs[0]), "%s: int4", tables[i]->name);
        }
        free(x);
    }
}

/* Any bytes as floats and scales: nothing is promised of the result but that there is one. */
static void test_any_bytes(void) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    for (int round = 0; round < 40; round++) {
        call c = random_call();
        c.a.parts = c.parts;
        for (size_t i = 0; i < c.a.count; i++) {
            made *of = below(2) ? &c.k[i] : &c.v[i];
            const size_t bytes = c.a.heads * of->plane.head, rows = c.a.heads * c.tokens[i];
            for (size_t n = 0; n < bytes; n++) of->data[n] = (uint8_t)random64();
            if (of->plane.format == CTX_ROWS_INT8)
                for (size_t n = 0; n < 4 * rows; n++) of->scales[n] = (uint8_t)random64();
        }
        if (below(2)) c.q[below(c.a.dim)] = below(2) ? NAN : INFINITY;
        const size_t rows = c.a.heads_q * c.a.queries;
        float *o = normals(rows * c.a.dim), *lse = normals(rows);
        for (size_t i = 0; i < count; i++) CHECK(ctx_attend(tables[i], &c.a, 0, c.a.heads, 0, c.rows, o, lse, 1) == CTX_OK, "%s", tables[i]->name);
        free(o), free(lse);
        finish(&c);
    }
}

void test_attend(void) {
    test_quantise();
    test_calls();
    test_any_bytes();
}
