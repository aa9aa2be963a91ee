/* attention/attention.c - the loop over parts, tiles and query rows; who sees what; and which table does it. */
#include "attention.h"
#include "core/arena.h"
#include "core/pool.h"
#include "core/variants.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

extern const ctx_attend_kernels ctx_attend_avx512, ctx_attend_avx2, ctx_attend_neon, ctx_attend_generic;

static const ctx_variant variants[] = {
    CTX_AVX512(ctx_attend, CTX_CPU_VNNI | CTX_CPU_F16C | CTX_CPU_FMA)
    CTX_AVX2(ctx_attend, CTX_CPU_F16C | CTX_CPU_FMA)
    CTX_NEON(ctx_attend)
    CTX_GENERIC(ctx_attend)
};

static size_t multiple(const ctx_variant *row) { return ((const ctx_attend_kernels *)row->table)->multiple; }

static const ctx_variant *chosen(const ctx_kernels *k, size_t dim) {
    const ctx_variant *row = ctx_variant_of(variants, k->name);
    while (dim % multiple(row)) row = ctx_variant_here(row + 1);
    return row;
}

const char *ctx_attend_name(const ctx_kernels *k, size_t dim) { return chosen(k, dim)->name; }

static const float LOG2E = 1.44269504f, LN2 = 0.69314718f;

/* What one call works in. */
typedef struct work {
    ctx_queries queries;
    float *o, *m, *l, *factor, *s;
    size_t *low, *high; /* rows of the part that each query row sees */
    uint32_t *pairs;
    uint8_t *room;
} work;

static void lay_out(arena *a, work *w, size_t rows, size_t dim) {
    w->queries.high = cut(a, rows * dim, 1);
    w->queries.low = cut(a, rows * dim, 1);
    w->queries.step = cut(a, rows, sizeof(float));
    w->queries.sums = cut(a, rows * (dim / CTX_ATTEND_GROUP + 1), sizeof(float));
    w->queries.bias = cut(a, rows * 2, sizeof(int32_t));
    w->pairs = cut(a, rows * (dim / 2 + 1), sizeof(uint32_t));
    w->o = cut(a, rows * dim, sizeof(float));
    w->m = cut(a, rows, sizeof(float));
    w->l = cut(a, rows, sizeof(float));
    w->factor = cut(a, rows, sizeof(float));
    w->s = cut(a, rows * CTX_ATTEND_TILE, sizeof(float));
    w->low = cut(a, rows, sizeof(size_t));
    w->high = cut(a, rows, sizeof(size_t));
    w->room = cut(a, ctx_attend_room(dim), 1);
}

/* ---- Who sees what ------------------------------------------------------------------------------------------------ */

/* The first row of first..last whose position is above x. */
static size_t above(const ctx_part *p, size_t first, size_t last, int64_t x) {
    if (!p->at_rows) {
        const int64_t row = x - p->at; /* both within +-2^61 */
        if (row < (int64_t)first) return first;
        return row >= (int64_t)last ? last : (size_t)row + 1;
    }
    while (first < last) {
        const size_t middle = first + (last - first) / 2;
        if (p->at_rows[middle] > x) last = middle;
        else first = middle + 1;
    }
    return first;
}

/* Rows that each query row sees, and the range that any sees; 0 if there is none. */
static int see(const ctx_attention *a, const ctx_part *p, size_t from, size_t rows, size_t first, size_t last, work *w,
               size_t *lowest, size_t *highest) {
    *lowest = last, *highest = first;
    for (size_t r = 0; r < rows; r++) {
        w->low[r] = first, w->high[r] = last;
        if (p->placed) {
            const int64_t x = a->positions[(from + r) % a->queries];
            w->high[r] = above(p, first, last, x);
            if (a->window) w->low[r] = above(p, first, last, x - a->window);
        }
        if (w->low[r] >= w->high[r]) continue;
        if (w->low[r] < *lowest) *lowest = w->low[r];
        if (w->high[r] > *highest) *highest = w->high[r];
    }
    return *lowest < *highest;
}

/* Scores of a tile that starts at row `base` and that a query row does not see become -inf; so do those up to `end`. */
static void hide(const ctx_part *p, work *w, size_t rows, size_t base, size_t count, size_t end) {
    for (size_t r = 0; r < rows; r++) {
        float *s = w->s + r * CTX_ATTEND_TILE;
        const size_t low = w->low[r] > base ? w->low[r] - base : 0, high = w->high[r] > base ? w->high[r] - base : 0;
        for (size_t t = 0; t < low && t < end; t++) s[t] = -INFINITY;
        for (size_t t = high < count ? high : count; t < end; t++) s[t] = -INFINITY;
    }
    size_t i = 0, above_i = p->hidden_count;
    while (i < above_i) {
        const size_t middle = i + (above_i - i) / 2;
        if (p->hidden[middle] < (int64_t)base) i = middle + 1;
        else above_i = middle;
    }
    for (; i < p->hidden_count && p->hidden[i] < (int64_t)(base + count); i++)
        for (size_t r = 0; r < rows; r++) w->s[r * CTX_ATTEND_TILE + ((size_t)p->hidden[i] - base)] = -INFINITY;
}

/* ---- The loop ----------------------------------------------------------------------------------------------------- */

static ctx_rows rows_of(const ctx_plane *p, size_t head, size_t row, size_t count) {
    ctx_rows t = {.format = p->format, .at = p->at + head * p->head + row * p->row, .step = p->row, .count = count};
    if (p->format == CTX_ROWS_INT8) t.scales = p->scales + head * p->scale_head + row * sizeof(float);
    if (p->format != CTX_ROWS_INT4) return t;
    t.scales = p->scales + head * p->scale_head + row;
    t.lows = t.scales + p->scale_low;
    t.group_step = p->scale_group;
    return t;
}

/* Bytes of `count` rows that stand end to end; 0 where they do not. */
static size_t end_to_end(const ctx_plane *p, size_t dim, size_t count) {
    static const size_t eighths[CTX_FORMATS] = {32, 16, 16, 8, 4};
    return p->row == dim * eighths[p->format] / 8 ? count * p->row : 0;
}

static void tiles(const ctx_attend_kernels *k, const ctx_attention *a, const ctx_part *p, size_t head, size_t rows, size_t first,
                  size_t last, work *w) {
    for (size_t base = first; base < last; base += CTX_ATTEND_TILE) {
        const size_t count = last - base < CTX_ATTEND_TILE ? last - base : CTX_ATTEND_TILE;
        const size_t end = (count + CTX_ATTEND_STRIP - 1) / CTX_ATTEND_STRIP * CTX_ATTEND_STRIP;
        const size_t next = last - base - count < CTX_ATTEND_TILE ? last - base - count : CTX_ATTEND_TILE;
        ctx_rows keys = rows_of(&p->k, head, base, count), values = rows_of(&p->v, head, base, count);
        keys.ahead = values.at, keys.ahead_bytes = end_to_end(&p->v, a->dim, count);
        values.ahead = keys.at + count * keys.step, values.ahead_bytes = end_to_end(&p->k, a->dim, next);
        values.rounded = w->queries.pairs != NULL;
        k->scores(&w->queries, &keys, w->s, w->room);
        if (a->softcap > 0)
            for (size_t r = 0; r < rows; r++) k->cap(w->s + r * CTX_ATTEND_TILE, end, a->softcap);
        hide(p, w, rows, base, count, end);
        for (size_t r = 0; r < rows; r++)
            w->factor[r] = k->weights(w->s + r * CTX_ATTEND_TILE, end, &w->m[r], &w->l[r]);
        k->values(w->o, w->s, w->factor, rows, a->dim, &values, w->room);
    }
}

/* Query rows from..from + rows of one head, over all parts. */
static void block(const ctx_attend_kernels *k, const ctx_attention *a, size_t head, size_t from, size_t rows, size_t row_first,
                  size_t row_last, work *w, float *o, float *lse) {
    const size_t group = a->heads_q / a->heads, start = head * group * a->queries + from;
    const float *prepared = NULL;
    memset(w->o, 0, rows * a->dim * sizeof(float));
    memset(w->l, 0, rows * sizeof(float));
    for (size_t r = 0; r < rows; r++) w->m[r] = -INFINITY;
    for (size_t i = 0, before = 0; i < a->count && before < row_last; i++) {
        const ctx_part *p = &a->parts[i];
        const size_t here = p->last - p->first;
        const size_t skip = row_first > before ? row_first - before : 0, stop = row_last - before;
        before += here;
        if (skip >= here) continue;
        size_t lowest, highest;
        if (!see(a, p, from, rows, p->first + skip, p->first + (stop < here ? stop : here), w, &lowest, &highest)) continue;
        const float *q = p->q ? p->q : a->q;
        if (q != prepared) {
            w->queries.q = q + start * a->dim, w->queries.rows = rows, w->queries.dim = a->dim;
            w->queries.scale = a->softcap > 0 ? a->scale : a->scale * LOG2E;
            if (k->integers) k->integers(&w->queries);
            w->queries.pairs = a->rounded && k->pairs && ctx_cpu_has(CTX_CPU_BF16) ? w->pairs : NULL;
            if (w->queries.pairs) k->pairs(&w->queries);
            prepared = q;
        }
        tiles(k, a, p, head, rows, lowest, highest, w);
    }
    for (size_t r = 0; r < rows; r++) {
        const float total = w->l[r], inverse = total != 0 ? 1 / total : 0; /* NaN goes on */
        for (size_t d = 0; d < a->dim; d++) o[(start + r) * a->dim + d] = w->o[r * a->dim + d] * inverse;
        lse[start + r] = total != 0 ? w->m[r] * LN2 + logf(total) : -INFINITY;
    }
}

typedef struct job {
    const ctx_attend_kernels *kernels;
    const ctx_attention *a;
    size_t head_first, all, rows, each; /* query rows of a head, of a block, and blocks of a head */
    size_t row_first, row_last;
    float *o, *lse;
    _Atomic int failed;
} job;

/* Block i of all heads, and those after it up to `last`, in the same memory. */
static void blocks(job *j, size_t i, size_t last) {
    arena room = {NULL, 0};
    work w;
    lay_out(&room, &w, j->rows, j->a->dim);
    if (!arena_begin(&room)) {
        j->failed = 1;
        return;
    }
    lay_out(&room, &w, j->rows, j->a->dim);
    for (; i < last; i++) {
        const size_t from = i % j->each * j->rows, rows = j->all - from < j->rows ? j->all - from : j->rows;
        block(j->kernels, j->a, j->head_first + i / j->each, from, rows, j->row_first, j->row_last, &w, j->o, j->lse);
    }
    free(room.at);
}

static void piece(void *what, size_t i) { blocks(what, i, i + 1); }

ctx_status ctx_attend(const ctx_kernels *k, const ctx_attention *a, size_t head_first, size_t head_last, size_t row_first,
                      size_t row_last, float *o, float *lse, size_t threads) {
    const size_t all = a->heads_q / a->heads * a->queries;
    if (all == 0 || head_first >= head_last) return CTX_OK;
    size_t rows = CTX_ATTEND_ROWS;
    if (threads > 1) { /* several pieces a thread, as those that see little end early; few rows each read K and V too often */
        const size_t share = (all * (head_last - head_first) + 4 * threads - 1) / (4 * threads), least = CTX_ATTEND_ROWS / 8;
        rows = share < least ? least : share < rows ? share : rows;
    }
    if (all < rows) rows = all;
    job j = {.kernels = chosen(k, a->dim)->table, .a = a, .head_first = head_first, .all = all, .rows = rows, .each = (all + rows - 1) / rows,
             .row_first = row_first, .row_last = row_last, .o = o, .lse = lse};
    const size_t count = (head_last - head_first) * j.each;
    if (threads > 1) ctx_pool_run(piece, &j, count, threads);
    else blocks(&j, 0, count);
    return j.failed ? CTX_NO_MEMORY : CTX_OK;
}

void ctx_attend_merge(float *o, float *lse, size_t count, size_t rows, size_t dim) {
    for (size_t r = 0; r < rows; r++) {
        float top = lse[r], total = 0;
        for (size_t i = 1; i < count; i++) top = lse[i * rows + r] > top ? lse[i * rows + r] : top;
        if (top == -INFINITY) continue; /* o is 0 and stays it */
        for (size_t i = 0; i < count; i++) total += expf(lse[i * rows + r] - top);
        for (size_t i = 0; i < count; i++) {
            const float share = expf(lse[i * rows + r] - top) / total, *from = o + (i * rows + r) * dim;
            float *to = o + r * dim;
            for (size_t d = 0; d < dim; d++) to[d] = i ? to[d] + share * from[d] : share * from[d];
        }
        lse[r] = top + logf(total);
    }
}

/* ---- Quantising --------------------------------------------------------------------------------------------------- */

int ctx_quantise8(const ctx_kernels *k, int8_t *codes, float *scales, const uint8_t *x, ctx_dtype dtype, size_t row_step,
                  size_t rows, size_t dim) {
    const ctx_attend_kernels *kernels = chosen(k, dim)->table;
    float row[CTX_ATTEND_DIM];
    int wrong = 0;
    for (size_t r = 0; r < rows && !wrong; r++) {
        k->convert[dtype][CTX_FP32]((uint8_t *)row, x + r * row_step, dim);
        wrong = kernels->quantise8(codes + r * dim, &scales[r], row, dim);
    }
    return wrong;
}

int ctx_quantise4(const ctx_kernels *k, uint8_t *codes, uint8_t *steps, uint8_t *lows, size_t groups_step, const uint8_t *x,
                  ctx_dtype dtype, size_t row_step, size_t rows, size_t dim) {
    const ctx_attend_kernels *kernels = chosen(k, dim)->table;
    float row[CTX_ATTEND_DIM];
    int wrong = 0;
    for (size_t r = 0; r < rows && !wrong; r++) {
        k->convert[dtype][CTX_FP32]((uint8_t *)row, x + r * row_step, dim);
        for (size_t g = 0; g < dim / CTX_ATTEND_GROUP && !wrong; g++)
            wrong = kernels->quantise4(codes + (r * dim + g * CTX_ATTEND_GROUP) / 2, &steps[g * groups_step + r],
                                       &lows[g * groups_step + r], row + g * CTX_ATTEND_GROUP);
    }
    return wrong;
}
