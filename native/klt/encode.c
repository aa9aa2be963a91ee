/* klt/encode.c - planes of K or V to coded streams. */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "core/scalar.h"

enum { BATCH = 4, TOKENS = CTX_KLT_TOKENS, LARGEST = 32000, SUM = 1 << 18 /* times 8191 stays below 2^31 */ };

/* A cell on its way. */
typedef struct slot {
    const ctx_klt_place *place;
    const ctx_klt_group *g;
    size_t raw_first, row, tokens, escape_count; /* row in the place */
    uint64_t mask;
    uint8_t *symbols, *rans, *low; /* low: 8 bytes a plane */
    int16_t *escapes;
    uint16_t *steps;
    uint16_t seeds[TOKENS];
} slot;

/* What one call works with. */
typedef struct job {
    const ctx_kernels *k;
    const ctx_klt_kernels *v;
    ctx_dtype raw;
    int refinement;
    ctx_klt_clock *clock;
    slot slots[BATCH];
    ctx_klt_source *from; /* [heads] */
    float *x;        /* [channels][64] */
    float *rows;     /* [64][dim], or [16][channels] */
    uint8_t *packed; /* [heads][64][dim] of the source's type */
    int16_t *q;      /* [components rounded up to 4][64] */
} job;

/* The part that one of a group's heads is of. */
static const ctx_klt_part *part_of(const slot *s, size_t head) { return &s->place->parts[head / s->g->heads]; }

/* Rows of one head with elements side by side, if need be copied to `packed`; *step gets the bytes from row to row. */
static const uint8_t *rows_of(const job *j, const slot *s, size_t head, uint8_t *packed, size_t *step) {
    const ctx_view *src = &part_of(s, head)->rows;
    const size_t item = ctx_dtype_bytes(src->dtype), dim = s->place->plane->dim;
    uint8_t *first = src->at + ((s->g->first + head % s->g->heads) * src->strides[0] + s->row * src->strides[1]) * item;
    *step = src->strides[1] * item;
    if (dim == 1 || src->strides[2] == 1) return first;
    const ctx_view from = {first, src->dtype, {0, src->strides[1], src->strides[2]}}, to = {packed, src->dtype, {0, dim, 1}};
    ctx_copy3(j->k, &to, &from, (const size_t[3]){1, s->tokens, dim});
    *step = dim * item;
    return packed;
}

/* One token's vector of a head as fp32 with the rotation undone; row: in the part. */
static void load_row(const job *j, const ctx_klt_plane *p, const ctx_klt_part *at, float *out, const uint8_t *from, size_t row) {
    const ctx_dtype type = at->rows.dtype;
    const size_t item = ctx_dtype_bytes(type), rotated = 2 * at->half, angle = row * at->half;
    const ctx_rope_fn rope = (p->rope == CTX_KLT_PAIRS ? j->k->rope_pairs : j->k->rope_half)[type][CTX_FP32];
    if (rotated) rope((uint8_t *)out, 0, from, 0, 1, at->cos + angle, at->sin + angle, at->half);
    if (rotated < p->dim) j->k->convert[type][CTX_FP32]((uint8_t *)(out + rotated), from + rotated * item, p->dim - rotated);
}

/* The group's vectors as fp32, [channels][64]. */
static void load_cell(const job *j, const slot *s) {
    const ctx_klt_plane *p = s->place->plane;
    const size_t dim = p->dim;
    if (s->tokens < TOKENS) memset(j->x, 0, s->g->channels * TOKENS * sizeof(float));
    for (size_t head = 0; head < s->g->all_heads; head++) {
        size_t step;
        const uint8_t *from = rows_of(j, s, head, j->packed, &step);
        for (size_t t = 0; t < s->tokens; t++) load_row(j, p, part_of(s, head), j->rows + t * dim, from + t * step, s->row + t);
        j->k->transpose32((uint8_t *)(j->x + head * dim * TOKENS), TOKENS * sizeof(float), (const uint8_t *)j->rows,
                          dim * sizeof(float), s->tokens, dim);
    }
}

/* The scale code of an energy as a power of 2^(1/32), or INT_MAX where it is out of range. */
static int power_of(float energy, double inverse) {
    /* 2^((i - 15.5) / 16), as numpy rounds them. */
    static const double thresholds[16] = {
        0x1.059b0d3158574p-1, 0x1.11301d0125b51p-1, 0x1.1d4873168b9aap-1, 0x1.29e9df51fdee1p-1,
        0x1.371a7373aa9cbp-1, 0x1.44e086061892dp-1, 0x1.5342b569d4f82p-1, 0x1.6247eb03a5585p-1,
        0x1.71f75e8ec5f74p-1, 0x1.82589994cce12p-1, 0x1.93737b0cdc5e5p-1, 0x1.a5503b23e255cp-1,
        0x1.b7f76f2fb5e47p-1, 0x1.cb720dcef9069p-1, 0x1.dfc97337b9b5fp-1, 0x1.f50765b6e4540p-1};
    /* Thresholds below the i-th 32nd between 1/2 and 1, none of which holds two. */
    static const uint8_t below[32] = {0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 13, 14, 14, 15, 15, 15, 16};
    const double v = (double)energy * inverse;
    if (v == 0) return 0;
    if (!isfinite(v)) return INT32_MAX;
    int exponent;
    const double mantissa = frexp(v, &exponent);
    const int first = below[(int)((mantissa - 0.5) * 64)];
    const int power = 16 * exponent - 16 + first + (first < 16 && thresholds[first] <= mantissa);
    return power > CTX_KLT_CODES || power < -CTX_KLT_CODES ? INT32_MAX : power;
}

static void clear_token(int16_t *q, size_t components, size_t t) {
    for (size_t c = 0; c < components; c++) q[c * TOKENS + t] = 0;
}

/* floor((q + 1) / 3) of |q| <= 32001 */
static inline int16_t third(int16_t q) { return (int16_t)((int)((uint32_t)(q + 1 + 33000) * 43691u >> 17) - 11000); }

/* Tokens whose integers of the first n components leave what the decoder's sums can hold. */
static uint64_t out_of_range(const int16_t *q, size_t n, uint64_t among) {
    uint64_t bad = 0;
    for (; among; among &= among - 1) {
        const int t = __builtin_ctzll(among);
        int32_t sum = 0, most = 0;
        for (size_t c = 0; c < n; c++) {
            const int32_t size = abs(q[c * TOKENS + (size_t)t]);
            sum += size;
            most = size > most ? size : most;
        }
        if (sum >= SUM || most > LARGEST) bad |= (uint64_t)1 << t;
    }
    return bad;
}

/* What a token's numbers are multiplied by for its energy; its scale code and, if it must stand raw, its bits in the masks. */
static float factor_of(slot *s, size_t t, float energy, uint64_t *wild) {
    int power = power_of(energy, s->g->inverse_energy);
    if (s->g->large && power < 0) power = 0;
    s->seeds[t] = 0x8000;
    if (s->row + t < s->raw_first || power == INT32_MAX) {
        s->mask |= (uint64_t)1 << t;
        *wild |= (uint64_t)!isfinite(energy) << t;
        return 0;
    }
    s->seeds[t] = (uint16_t)(0x8000 + power);
    return ctx_klt_scale(-power);
}

/* Components of a cell by fp32. */
static void by_floats(const job *j, slot *s, int32_t sum[64], int32_t most[64], uint64_t *wild) {
    const ctx_klt_group *g = s->g;
    float energy[TOKENS], factor[TOKENS] = {0};
    load_cell(j, s);
    ctx_klt_tick(j->clock, CTX_KLT_ROWS);
    j->v->centre(j->x, g->centre, g->channels, energy);
    for (size_t t = 0; t < s->tokens; t++) factor[t] = factor_of(s, t, energy[t], wild);
    j->v->normalise(j->x, g->channels, factor);
    ctx_klt_tick(j->clock, CTX_KLT_SCALES);
    j->v->forward(j->q, j->x, g, s->place->plane->inverse_step, sum, most);
}

/* Components of a cell by whole numbers: 16 tokens at a time, which lie in the nearest cache then. */
static void by_whole_numbers(const job *j, slot *s, int32_t sum[64], int32_t most[64], uint64_t *wild) {
    const ctx_klt_group *g = s->g;
    const ctx_klt_plane *p = s->place->plane;
    const ctx_dtype dtype = s->place->parts->rows.dtype;
    const size_t dim = p->dim, item = ctx_dtype_bytes(dtype);
    int16_t *out = (int16_t *)(void *)j->x;
    ctx_klt_source *from = j->from;
    for (size_t h = 0; h < g->all_heads; h++) {
        const ctx_klt_part *at = part_of(s, h);
        from[h] = (ctx_klt_source){.cos = at->cos + s->row * at->half, .sin = at->sin + s->row * at->half, .half = at->half};
        from[h].at = rows_of(j, s, h, j->packed + h * TOKENS * dim * item, &from[h].step);
    }
    for (size_t t = 0; t < TOKENS; t += 16, out += 32) {
        const size_t here = s->tokens <= t ? 0 : s->tokens - t < 16 ? s->tokens - t : 16;
        float energy[16], factor[16] = {0};
        const int own = here == 16 && j->v->load && p->rope != CTX_KLT_PAIRS && j->v->load(j->rows, energy, from, dtype, g, dim);
        for (size_t i = 0; i < here && !own; i++) {
            float *row = j->rows + i * g->channels;
            for (size_t h = 0; h < g->all_heads; h++)
                load_row(j, p, part_of(s, h), row + h * dim, from[h].at + i * from[h].step, s->row + t + i);
            energy[i] = j->v->centre_row(row, g->centre, g->channels);
        }
        if (here < 16) memset(j->rows + here * g->channels, 0, (16 - here) * g->channels * sizeof(float));
        for (size_t i = 0; i < here; i++) factor[i] = factor_of(s, t + i, energy[i], wild) * g->unit;
        j->v->round(out, j->rows, factor, g->channels);
        for (size_t h = 0; h < g->all_heads; h++)
            from[h].at += 16 * from[h].step, from[h].cos += 16 * from[h].half, from[h].sin += 16 * from[h].half;
    }
    ctx_klt_tick(j->clock, CTX_KLT_ROWS);
    j->v->whole(j->q, (const int16_t *)(const void *)j->x, g, sum, most);
}

/* Integers of a cell, which of its tokens stand raw, and scale codes. */
static void quantise(const job *j, slot *s) {
    const ctx_klt_group *g = s->g;
    int32_t sum[TOKENS] = {0}, most[TOKENS] = {0};
    uint64_t wild = 0, beyond = 0;
    s->mask = 0;
    memset(s->seeds, 0, sizeof s->seeds);
    (g->unit ? by_whole_numbers : by_floats)(j, s, sum, most, &wild);
    ctx_klt_tick(j->clock, CTX_KLT_TRANSFORM);
    for (size_t t = 0; t < s->tokens; t++)
        beyond |= (uint64_t)(most[t] > LARGEST || sum[t] >= SUM) << t;
    beyond &= ~s->mask;
    uint64_t raw = beyond;
    if (j->refinement && beyond) raw = out_of_range(j->q, g->refined, beyond);
    for (uint64_t left = beyond & ~raw; left; left &= left - 1) {
        int16_t *of = j->q + __builtin_ctzll(left);
        for (size_t c = 0; c < g->components; c++)
            of[c * TOKENS] = c < g->refined ? (int16_t)(3 * third(of[c * TOKENS])) : 0;
    }
    for (uint64_t left = raw | wild; left; left &= left - 1) {
        clear_token(j->q, g->components, (size_t)__builtin_ctzll(left));
        s->seeds[__builtin_ctzll(left)] = 0x8000;
    }
    s->mask |= raw;
    if (j->refinement) memset(s->seeds, 0, sizeof s->seeds);
    if (s->place->plane->nested && !j->refinement)
        j->v->thirds(j->q, g->components);
}

/* Symbols of a refined component: how q differs from three times its base. */
static void refine(uint8_t *symbols, const int16_t *q) {
    for (size_t t = 0; t < TOKENS; t++) {
        const int base = third(q[t]), r = q[t] - 3 * base;
        symbols[t] = (uint8_t)((base < 0 ? -r : r) + 1);
    }
}

/* Symbols, low bits and escapes of a cell; the job for its rANS stream. */
static ctx_rans_job code(const job *j, slot *s) {
    const ctx_klt_group *g = s->g;
    const size_t n = g->components * s->tokens, refined = j->refinement ? g->refined : 0;
    const uint16_t *steps = j->refinement ? g->steps_refined : g->steps;
    uint8_t *low = s->low;
    for (size_t c = 0; c < g->components; c++) {
        uint8_t *symbols = s->symbols + c * s->tokens;
        if (c < refined) {
            refine(symbols, j->q + c * TOKENS);
            continue;
        }
        j->v->symbols(symbols, low, j->q + c * TOKENS, g->shift[c]);
        low += 8 * g->shift[c];
    }
    s->escape_count = 0;
    for (size_t i = 0; i < n; i += 64) {
        const uint16_t table = steps[i / s->tokens];
        uint64_t mask = j->v->escapes(s->symbols + i, s->place->plane->tables->at[table].absent);
        s->steps[i / 64] = table;
        if (n - i < 64) mask &= ((uint64_t)1 << (n - i)) - 1;
        for (; mask; mask &= mask - 1) {
            const size_t at = i + (size_t)__builtin_ctzll(mask), c = (uint32_t)at / (uint32_t)s->tokens, t = at - c * s->tokens;
            s->symbols[at] = 31;
            s->escapes[s->escape_count++] = j->q[c * TOKENS + t];
            if (c < refined || !g->shift[c]) continue;
            uint8_t *plane = s->low; /* few components have low bits, and few of their values are escapes */
            for (size_t before = refined; before < c; before++) plane += 8 * g->shift[before];
            for (unsigned bit = 0; bit < g->shift[c]; bit++) plane[8 * bit + t / 8] &= (uint8_t)~(1 << t % 8);
        }
    }
    return (ctx_rans_job){.data = s->rans, .symbols = s->symbols, .n = n, .steps = s->steps, .seeds = s->seeds};
}

/* The body of a coded cell at `out`; its entry too. Returns behind the body. */
static uint8_t *write_body(const job *j, const slot *s, const ctx_rans_job *coded, uint8_t *entry, uint8_t *out) {
    const size_t n = coded ? coded->bytes : 0, plane = (s->tokens + 7) / 8, dim = s->place->plane->dim;
    const size_t planes = j->refinement ? s->g->low_refined : s->g->low;
    put_le32(entry, (uint32_t)s->mask);
    put_le32(entry + 4, (uint32_t)(s->mask >> 32));
    put_le32(entry + 8, (uint32_t)n);
    put_le32(entry + 12, (uint32_t)s->escape_count);
    if (n) memcpy(out, coded->data + ctx_rans_bound(coded->n) - n, n);
    out += n;
    for (size_t i = 0; i < planes; i++, out += plane) {
        memcpy(out, s->low + 8 * i, plane);
        if (s->tokens % 8) out[plane - 1] &= (uint8_t)((1 << s->tokens % 8) - 1);
    }
    for (size_t i = 0; i < s->escape_count; i++, out += 2) put_le16(out, (uint16_t)s->escapes[i]);
    if (j->refinement || !s->mask) return out;
    const size_t raw = ctx_dtype_bytes(j->raw), count = (size_t)__builtin_popcountll(s->mask);
    for (size_t head = 0; head < s->g->all_heads; head++) {
        size_t step;
        const uint8_t *from = rows_of(j, s, head, j->packed, &step);
        uint8_t *to = out + head * dim * raw;
        for (uint64_t left = s->mask; left; left &= left - 1, to += s->g->channels * raw)
            j->k->convert[s->place->parts->rows.dtype][j->raw](to, from + (size_t)__builtin_ctzll(left) * step, dim);
    }
    return out + count * s->g->channels * raw;
}

size_t ctx_klt_bound(const ctx_klt_plane *p, size_t tokens, ctx_dtype raw) {
    size_t cell = 0, all;
    for (size_t i = 0; i < p->groups; i++) {
        const ctx_klt_group *g = &p->group[i];
        cell += CTX_KLT_ENTRY + ctx_rans_bound(g->components * TOKENS) + 8 * g->low + 2 * g->components * TOKENS +
                TOKENS * g->channels * ctx_dtype_bytes(raw);
    }
    if (__builtin_mul_overflow(cell, tokens / TOKENS + 1, &all) || all > SIZE_MAX - CTX_KLT_HEAD) return SIZE_MAX;
    return all + CTX_KLT_HEAD;
}

/* The most that any of a call's planes needs. */
typedef struct sizes {
    size_t components, channels, dim;
} sizes;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static void lay_out(arena *a, const sizes *most, job *j) {
    const size_t n = most->components;
    for (int i = 0; i < BATCH; i++) {
        slot *s = &j->slots[i];
        s->symbols = cut(a, n * TOKENS + TOKENS, 1);
        s->rans = cut(a, ctx_rans_bound(n * TOKENS), 1);
        s->low = cut(a, n * CTX_KLT_SHIFT, 8);
        s->escapes = cut(a, n * TOKENS, sizeof(int16_t));
        s->steps = cut(a, n, sizeof(uint16_t));
    }
    j->from = cut(a, most->channels, sizeof *j->from); /* a head has a channel at least */
    j->x = cut(a, most->channels * TOKENS, sizeof(float));
    j->rows = cut(a, most->dim * TOKENS + most->channels * 16, sizeof(float));
    j->packed = cut(a, most->channels * TOKENS, sizeof(float));
    j->q = cut(a, (n + 4) * TOKENS, sizeof(int16_t));
}

static size_t cells_of(const ctx_klt_place *at) { return (at->tokens + TOKENS - 1) / TOKENS * at->plane->groups; }

static int rows_fit(const ctx_kernels *k, const ctx_klt_place *at) {
    const size_t bytes = at->plane->heads * at->tokens * at->plane->dim * ctx_dtype_bytes(at->parts->rows.dtype);
    for (size_t i = 0; i < at->plane->parts; i++)
        if (at->parts[i].checked && ctx_xxh3(k, at->parts[i].rows.at, bytes) != at->parts[i].sum) return 0;
    return 1;
}

/* Where a call stands: the next cell to take, and the place and bytes of the next one to write. */
typedef struct progress {
    size_t place, cell;
    uint8_t *entry, *body;
} progress;

/* The next cell in order into `s`; 0 if there is none. Rows are checked when their first cell is taken. */
static int take(const job *j, const ctx_klt_place *places, const ctx_klt_coded *coded, size_t count, progress *at, slot *s,
                ctx_klt_result *result) {
    if (at->place == count) return 0;
    const ctx_klt_place *from = &places[at->place];
    const size_t groups = from->plane->groups;
    if (at->cell == 0 && !rows_fit(j->k, from)) {
        *result = (ctx_klt_result){.reason = CTX_KLT_CHECKSUM, .place = at->place};
        return 0;
    }
    s->place = from;
    s->raw_first = coded[at->place].raw_first;
    s->g = &from->plane->group[at->cell % groups];
    s->row = at->cell / groups * TOKENS;
    s->tokens = from->tokens - s->row < TOKENS ? from->tokens - s->row : TOKENS;
    if (++at->cell == cells_of(from)) at->place++, at->cell = 0;
    return 1;
}

/* A cell behind those already written of its stream, which begins with the first one. */
static void write_cell(const job *j, const slot *s, const ctx_rans_job *made, ctx_klt_coded *coded, uint8_t *out, progress *at) {
    const size_t cells = cells_of(s->place);
    ctx_klt_coded *stream = &coded[at->place];
    if (at->cell == 0) {
        uint8_t *head = at->body;
        stream->at = (size_t)(head - out);
        head[0] = 1, head[1] = (uint8_t)s->place->plane->level, head[2] = (uint8_t)j->refinement, head[3] = 0;
        put_le16(head + 4, s->place->tokens);
        put_le16(head + 6, cells);
        at->entry = head + CTX_KLT_HEAD;
        at->body = at->entry + cells * CTX_KLT_ENTRY;
    }
    at->body = write_body(j, s, made, at->entry, at->body);
    at->entry += CTX_KLT_ENTRY;
    stream->bytes = (size_t)(at->body - out) - stream->at;
    if (++at->cell == cells) at->place++, at->cell = 0;
}

ctx_klt_result ctx_klt_encode(const ctx_kernels *k, const ctx_klt_place *places, ctx_klt_coded *coded, size_t count,
                              ctx_dtype raw, int refinement, uint8_t *out, ctx_klt_clock *clock) {
    job j = {.k = k, .v = ctx_klt_of(k), .raw = raw, .refinement = refinement, .clock = clock};
    sizes most = {0};
    for (size_t i = 0; i < count; i++) {
        const ctx_klt_plane *p = places[i].plane;
        most = (sizes){larger(most.components, p->most_components), larger(most.channels, p->most_channels), larger(most.dim, p->dim)};
    }
    arena a = {NULL, 0};
    lay_out(&a, &most, &j);
    if (!arena_begin(&a)) return (ctx_klt_result){.reason = CTX_KLT_MEMORY};
    lay_out(&a, &most, &j);
    ctx_klt_result result = {.reason = CTX_KLT_OK};
    progress taken = {.place = 0}, written = {.body = out};
    ctx_klt_start(clock);
    while (!result.reason && taken.place < count) {
        ctx_rans_job jobs[BATCH];
        size_t used = 0, here = 0;
        for (; here < BATCH && take(&j, places, coded, count, &taken, &j.slots[here], &result); here++) {
            quantise(&j, &j.slots[here]);
            jobs[used] = code(&j, &j.slots[here]);
            ctx_klt_tick(clock, CTX_KLT_SYMBOLS);
            used += j.slots[here].g->components != 0;
        }
        const size_t bad = used ? ctx_rans_encode(k, places->plane->tables, jobs, used) : 0;
        ctx_klt_tick(clock, CTX_KLT_ENCODING);
        if (bad < used) result = (ctx_klt_result){.reason = CTX_KLT_TABLE, .place = written.place, .cell = written.cell};
        for (size_t i = 0, next = 0; i < here && !result.reason; i++) {
            const int has = j.slots[i].g->components != 0;
            write_cell(&j, &j.slots[i], has ? &jobs[next] : NULL, coded, out, &written);
            next += (size_t)has;
        }
        ctx_klt_tick(clock, CTX_KLT_WRITING);
    }
    free(a.at);
    return result;
}
