/* klt/decode.c - coded planes to an engine's memory. Every length is checked before any cell is decoded. */
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#include "core/arena.h"
#include "core/scalar.h"

enum { BATCH = 4, TOKENS = CTX_KLT_TOKENS };

/* Where a cell's body lies. */
typedef struct contents {
    uint64_t mask;
    const uint8_t *rans, *low, *escapes, *raw;
    size_t rans_bytes, escape_count;
} contents;

typedef struct cell {
    size_t place, number, group, row, tokens; /* number in its stream; row in the place */
    contents whole, more;
    int refined;
} cell;

/* Memory of one call. */
typedef struct scratch {
    uint8_t *symbols[2 * BATCH]; /* [components * 64 + 64] each: a cell's, then its refinement's */
    uint16_t *steps[2 * BATCH];  /* of cells with fewer than 64 tokens */
    uint32_t *listed;            /* places of escapes among the symbols */
    int16_t *q, *q_base, *pairs; /* [components][64], pairs [components + 1][64] */
    uint8_t *quads;              /* [components + 3][64] */
    float *out;                  /* [64][dim padded to 16] */
    uint8_t *strided;            /* [64][dim] of the destination's type */
} scratch;

static uint64_t get_mask(const uint8_t *at) { return (uint64_t)get_le32(at) | (uint64_t)get_le32(at + 4) << 32; }

/* ---- What the entries say --------------------------------------------------------------------------------------- */

static ctx_klt_reason check_head(const ctx_klt_plane *p, const uint8_t *at, size_t bytes, size_t tokens, int refinement) {
    if (bytes < CTX_KLT_HEAD || at[0] != 1 || at[1] != p->level || at[2] != refinement || at[3] != 0) return CTX_KLT_HEADER;
    const size_t cells = (tokens + TOKENS - 1) / TOKENS * p->groups;
    if (get_le16(at + 4) != tokens || tokens == 0 || get_le16(at + 6) != cells) return CTX_KLT_COUNT;
    return (bytes - CTX_KLT_HEAD) / CTX_KLT_ENTRY < cells ? CTX_KLT_LENGTH : CTX_KLT_OK;
}

/* Take the body of cell `number` off [*body, end). */
static ctx_klt_reason take_part(const ctx_klt_group *g, const uint8_t *entry, size_t tokens, size_t item, int refinement,
                                const uint8_t **body, const uint8_t *end, contents *out) {
    *out = (contents){.mask = get_mask(entry), .rans_bytes = get_le32(entry + 8), .escape_count = get_le32(entry + 12)};
    const size_t low = (tokens + 7) / 8 * (refinement ? g->low_refined : g->low);
    const size_t raw = refinement ? 0 : (size_t)__builtin_popcountll(out->mask) * g->channels * item;
    if ((tokens < TOKENS && out->mask >> tokens) || (g->components == 0 && out->rans_bytes) ||
        low + 2 * out->escape_count + raw > SIZE_MAX - out->rans_bytes ||
        (size_t)(end - *body) < out->rans_bytes + low + 2 * out->escape_count + raw)
        return CTX_KLT_LENGTH;
    out->rans = *body;
    out->low = out->rans + out->rans_bytes;
    out->escapes = out->low + low;
    out->raw = out->escapes + 2 * out->escape_count;
    *body = out->raw + raw;
    return CTX_KLT_OK;
}

/* The cells of one stream, or of one refinement, into cells[...]. */
static ctx_klt_result read_entries(const ctx_klt_plane *p, const uint8_t *at, size_t bytes, size_t tokens, size_t item,
                                   int refinement, cell *cells) {
    ctx_klt_result result = {.reason = check_head(p, at, bytes, tokens, refinement), .refinement = refinement};
    if (result.reason) return result;
    const size_t count = (tokens + TOKENS - 1) / TOKENS * p->groups;
    const uint8_t *body = at + CTX_KLT_HEAD + count * CTX_KLT_ENTRY, *end = at + bytes;
    for (size_t i = 0; i < count; i++) {
        const ctx_klt_group *g = &p->group[i % p->groups];
        const size_t here = i / p->groups * TOKENS;
        contents *out = refinement ? &cells[i].more : &cells[i].whole;
        const size_t within = tokens - here < TOKENS ? tokens - here : TOKENS;
        result.cell = i;
        result.reason = take_part(g, at + CTX_KLT_HEAD + i * CTX_KLT_ENTRY, within, item, refinement, &body, end, out);
        if (!result.reason && refinement && out->mask != cells[i].whole.mask) result.reason = CTX_KLT_MERGE;
        if (result.reason) return result;
        cells[i].refined = refinement;
    }
    if (body != end) result.reason = CTX_KLT_LENGTH;
    return result;
}

static ctx_klt_result read_stream(const ctx_kernels *k, const ctx_klt_place *at, const ctx_klt_stream *s, size_t item,
                                  cell *cells) {
    const ctx_klt_plane *p = at->plane;
    ctx_klt_result result = {.reason = CTX_KLT_CHECKSUM};
    if (s->checked && ctx_xxh3(k, s->at, s->bytes) != s->sum) return result;
    result.refinement = 1;
    if (s->more && s->more_checked && ctx_xxh3(k, s->more, s->more_bytes) != s->more_sum) return result;
    result = read_entries(s->more ? p->base : p, s->at, s->bytes, at->tokens, item, 0, cells);
    if (!result.reason && s->more) result = read_entries(p, s->more, s->more_bytes, at->tokens, item, 1, cells);
    return result;
}

/* ---- Symbols to integers ---------------------------------------------------------------------------------------- */

/* Places (64 * component + token) of escapes among the symbols of n components, at most `limit`; more than that is
 * limit + 1. Symbols have 64 bytes behind them. */
static size_t find_escapes(const ctx_klt_kernels *v, const uint8_t *symbols, size_t components, size_t tokens,
                           uint32_t *listed, size_t limit) {
    const size_t n = components * tokens;
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64) {
        uint64_t mask = v->escapes(symbols + i, NULL);
        if (n - i < 64) mask &= ((uint64_t)1 << (n - i)) - 1;
        for (; mask; mask &= mask - 1) {
            if (found == limit) return limit + 1;
            const uint32_t at = (uint32_t)(i + (size_t)__builtin_ctzll(mask)), c = at / (uint32_t)tokens;
            listed[found++] = c * TOKENS + at - c * (uint32_t)tokens;
        }
    }
    return found;
}

/* Rows [from, to) of a cell's integers; low bits begin at `low`, which has ceil(tokens / 8) bytes a plane. */
static ctx_klt_reason expand(const ctx_klt_kernels *v, const ctx_klt_group *g, const uint8_t *symbols, size_t tokens,
                             size_t from, size_t to, const uint8_t *low, int16_t *q) {
    const size_t plane = (tokens + 7) / 8;
    const uint8_t behind = tokens % 8 ? (uint8_t)(0xff << tokens % 8) : 0;
    v->rows(q + from * TOKENS, symbols + from * tokens, tokens, to - from);
    for (size_t c = from; c < to; c++) {
        const unsigned shift = g->shift[c];
        int16_t *row = q + c * TOKENS;
        if (!shift) continue;
        for (size_t t = 0; t < TOKENS; t++) row[t] = (int16_t)(row[t] * (1 << shift) - (1 << shift >> 1));
        for (unsigned bit = 0; bit < shift; bit++, low += plane) {
            uint8_t bits[8] = {0};
            memcpy(bits, low, plane);
            if (bits[plane - 1] & behind) return CTX_KLT_LOW;
            v->bits(row, bits, (int16_t)(1 << bit));
        }
    }
    return CTX_KLT_OK;
}

static void put_escapes(const contents *of, const uint32_t *listed, int16_t *q) {
    for (size_t i = 0; i < of->escape_count; i++) q[listed[i]] = (int16_t)get_le16(of->escapes + 2 * i);
}

/* Integers of a whole cell. With `narrow`, those of components from g->narrow on become quads; *narrow is cleared if
 * an escape does not fit a byte. */
static ctx_klt_reason integers(const ctx_klt_kernels *v, const ctx_klt_group *g, const contents *of, const uint8_t *symbols,
                               size_t tokens, const scratch *b, int16_t *q, int *narrow) {
    const size_t n = g->components, found = find_escapes(v, symbols, n, tokens, b->listed, of->escape_count);
    if (found != of->escape_count) return CTX_KLT_ESCAPES;
    for (size_t i = 0; i < found; i++) {
        const int16_t value = (int16_t)get_le16(of->escapes + 2 * i);
        if (b->listed[i] / TOKENS >= g->narrow && (value > 127 || value < -128)) *narrow = 0;
    }
    const size_t wide = *narrow ? g->narrow : n;
    const ctx_klt_reason reason = expand(v, g, symbols, tokens, 0, wide, of->low, q);
    if (reason) return reason;
    if (wide < n) v->quads(b->quads, symbols + wide * tokens, tokens, n - wide);
    for (size_t i = 0; i < found; i++) {
        const size_t c = b->listed[i] / TOKENS, t = b->listed[i] % TOKENS, value = get_le16(of->escapes + 2 * i);
        if (c < wide)
            q[c * TOKENS + t] = (int16_t)value;
        else
            b->quads[((c - wide) / 4 * TOKENS + t) * 4 + (c - wide) % 4] = (uint8_t)(value + 128);
    }
    return CTX_KLT_OK;
}

/* Integers of a refinement over those of its base in b->q_base. */
static ctx_klt_reason merge(const ctx_klt_kernels *v, const ctx_klt_group *g, const contents *of, const uint8_t *symbols,
                            size_t tokens, const scratch *b) {
    const size_t n = g->components, found = find_escapes(v, symbols, n, tokens, b->listed, of->escape_count);
    if (found != of->escape_count) return CTX_KLT_ESCAPES;
    int beyond = 0;
    for (size_t c = 0; c < g->refined; c++)
        for (size_t t = 0; t < tokens; t++) {
            const int base = b->q_base[c * TOKENS + t], symbol = symbols[c * tokens + t];
            const int q = 3 * base + (base < 0 ? 1 - symbol : symbol - 1);
            if (symbol != 31) beyond |= symbol > 2 || q > INT16_MAX || q < INT16_MIN;
            b->q[c * TOKENS + t] = (int16_t)q;
        }
    if (beyond) return CTX_KLT_MERGE;
    const ctx_klt_reason reason = expand(v, g, symbols, tokens, g->refined, n, of->low, b->q);
    if (!reason) put_escapes(of, b->listed, b->q);
    return reason;
}

/* ---- Integers to values ----------------------------------------------------------------------------------------- */

/* step * scale of each token, or a code that cannot be. Without components there is no stream, and no scale. */
static ctx_klt_reason scales(const ctx_klt_plane *p, const ctx_klt_group *g, const cell *c, const uint16_t seeds[64],
                             float out[64]) {
    for (size_t t = 0; t < TOKENS; t++) {
        const int power = g->components == 0 ? 0 : (int)seeds[t] - 0x8000;
        out[t] = 0;
        if (t >= c->tokens) {
            if (g->components && seeds[t]) return CTX_KLT_SCALE;
            continue;
        }
        if (power > CTX_KLT_CODES || power < -CTX_KLT_CODES || (power && c->whole.mask >> t & 1)) return CTX_KLT_SCALE;
        out[t] = ctx_klt_scale(power) * p->step;
    }
    return CTX_KLT_OK;
}

/* What one call needs to know to write values. */
typedef struct target {
    const ctx_kernels *k;
    const ctx_klt_place *places;
    ctx_dtype raw;
    ctx_klt_clock *clock;
} target;

static const ctx_klt_place *place_of(const target *to, const cell *c) { return &to->places[c->place]; }

/* The part that one of a group's heads is of. */
static const ctx_klt_part *part_of(const target *to, const cell *c, const ctx_klt_group *g, size_t head) {
    return &place_of(to, c)->parts[head / g->heads];
}

static uint8_t *row_of(const target *to, const cell *c, const ctx_klt_group *g, size_t head) {
    const ctx_view *dst = &part_of(to, c, g, head)->rows;
    return dst->at + ((g->first + head % g->heads) * dst->strides[0] + c->row * dst->strides[1]) * ctx_dtype_bytes(dst->dtype);
}

/* Raw tokens of a head, of those that are contiguous in the destination. */
static void write_raw(const target *to, const cell *c, const ctx_klt_group *g, size_t head, uint8_t *first, size_t step) {
    const size_t item = ctx_dtype_bytes(to->raw), dim = place_of(to, c)->plane->dim;
    const ctx_dtype dtype = part_of(to, c, g, head)->rows.dtype;
    const uint8_t *raw = c->whole.raw + head * dim * item;
    for (uint64_t left = c->whole.mask; left; left &= left - 1, raw += g->channels * item)
        to->k->convert[to->raw][dtype](first + (size_t)__builtin_ctzll(left) * step, raw, dim);
}

/* One head of a cell from b->out to its rows. */
static void write_head(const target *to, const cell *c, const ctx_klt_group *g, size_t head, const scratch *b) {
    const ctx_klt_plane *p = place_of(to, c)->plane;
    const ctx_klt_part *at = part_of(to, c, g, head);
    const ctx_dtype dtype = at->rows.dtype;
    const size_t dim = p->dim, padded = ctx_klt_padded(dim), item = ctx_dtype_bytes(dtype);
    const size_t *strides = at->rows.strides, rotated = 2 * at->half, angle = c->row * at->half;
    const int strided = dim > 1 && strides[2] != 1;
    const ctx_convert_fn convert = to->k->convert[CTX_FP32][dtype];
    const ctx_rope_fn rope = (p->rope == CTX_KLT_PAIRS ? to->k->rope_pairs : to->k->rope_half)[CTX_FP32][dtype];
    uint8_t *first = row_of(to, c, g, head), *rows = strided ? b->strided : first;
    const size_t step = (strided ? dim : strides[1]) * item;
    for (size_t t = 0; t < c->tokens; t++) {
        uint8_t *row = rows + t * step;
        const uint8_t *values = (const uint8_t *)(b->out + t * padded);
        if (c->whole.mask >> t & 1) continue;
        if (rotated) rope(row, 0, values, 0, 1, at->cos + angle + t * at->half, at->sin + angle + t * at->half, at->half);
        if (rotated < dim) convert(row + rotated * item, values + rotated * sizeof(float), dim - rotated);
    }
    write_raw(to, c, g, head, rows, step);
    if (!strided) return;
    const ctx_view held = {b->strided, dtype, {0, dim, 1}}, here = {first, dtype, {0, strides[1], strides[2]}};
    ctx_copy3(to->k, &here, &held, (const size_t[3]){1, c->tokens, dim});
}

static ctx_klt_reason write_cell(const target *to, const cell *c, const scratch *b, size_t slot, const uint16_t *seeds) {
    const ctx_klt_plane *p = place_of(to, c)->plane;
    const ctx_klt_kernels *v = ctx_klt_of(to->k);
    const ctx_klt_group *g = &p->group[c->group];
    const size_t n = g->components, padded = ctx_klt_padded(p->dim), blocks = padded / CTX_KLT_BLOCK;
    const ctx_klt_group *coded = c->refined ? &p->base->group[c->group] : g;
    int narrow = v->narrow && g->narrow < n && !c->refined, wide = 0;
    float scale[TOKENS];
    ctx_klt_reason reason = scales(p, coded, c, seeds + 2 * slot * TOKENS, scale);
    if (!reason)
        reason = integers(v, coded, &c->whole, b->symbols[2 * slot], c->tokens, b, c->refined ? b->q_base : b->q,
                          c->refined ? &wide : &narrow);
    if (!reason && c->refined) {
        const uint16_t *none = seeds + (2 * slot + 1) * TOKENS;
        for (size_t t = 0; t < TOKENS; t++)
            if (n && none[t]) return CTX_KLT_SCALE;
        reason = merge(v, g, &c->more, b->symbols[2 * slot + 1], c->tokens, b);
    }
    if (reason) return reason;
    const size_t wides = narrow ? g->narrow : n;
    v->pairs(b->pairs, b->q, wides);
    ctx_klt_tick(to->clock, CTX_KLT_INTEGERS);
    const size_t pairs = (wides + 1) / 2, quads = (n - wides + 3) / 4;
    for (size_t head = 0; head < g->all_heads; head++) {
        const ctx_klt_part *at = part_of(to, c, g, head);
        const int direct = v->head && (p->dim == 1 || at->rows.strides[2] == 1) && p->rope != CTX_KLT_PAIRS;
        const ctx_klt_rows rows = {row_of(to, c, g, head), at->rows.strides[1] * ctx_dtype_bytes(at->rows.dtype), at->rows.dtype,
                                   ~c->whole.mask & (UINT64_MAX >> (TOKENS - c->tokens)),
                                   at->half ? at->cos + c->row * at->half : at->cos,
                                   at->half ? at->sin + c->row * at->half : at->sin, at->half};
        if (direct && v->head(&rows, g, p->dim, head, b->pairs, pairs, b->quads, quads, scale, c->tokens)) {
            write_raw(to, c, g, head, rows.at, rows.step);
            continue;
        }
        v->product(b->out, padded, g, head * blocks, blocks, b->pairs, pairs, b->quads, quads, scale, c->tokens);
        write_head(to, c, g, head, b);
    }
    ctx_klt_tick(to->clock, CTX_KLT_VALUES);
    return CTX_KLT_OK;
}

/* ---- The run ---------------------------------------------------------------------------------------------------- */

static const uint16_t *steps_of(const ctx_klt_group *g, size_t tokens, int refinement, uint16_t *room) {
    const uint16_t *steps = refinement ? g->steps_refined : g->steps;
    if (tokens == TOKENS) return steps;
    for (size_t i = 0; i < ctx_rans_steps(g->components * tokens); i++) room[i] = steps[i * TOKENS / tokens];
    return room;
}

static ctx_rans_job job_of(const ctx_klt_group *g, const contents *of, size_t tokens, int refinement, const scratch *b, size_t slot,
                           uint16_t *seeds) {
    return (ctx_rans_job){.data = (uint8_t *)of->rans, .bytes = of->rans_bytes, .symbols = b->symbols[slot],
                          .n = g->components * tokens, .steps = steps_of(g, tokens, refinement, b->steps[slot]),
                          .seeds = seeds + slot * TOKENS};
}

static ctx_klt_result write_batch(const target *to, const cell *cells, size_t count, const scratch *b) {
    uint16_t seeds[2 * BATCH * TOKENS];
    ctx_rans_job jobs[2 * BATCH];
    size_t owner[2 * BATCH], used = 0;
    memset(seeds, 0, sizeof seeds);
    for (size_t i = 0; i < count; i++)
        for (int more = 0; more <= cells[i].refined; more++) {
            const ctx_klt_plane *p = place_of(to, &cells[i])->plane, *of = cells[i].refined && !more ? p->base : p;
            const ctx_klt_group *g = &of->group[cells[i].group];
            if (g->components == 0) continue;
            jobs[used] = job_of(g, more ? &cells[i].more : &cells[i].whole, cells[i].tokens, more, b, 2 * i + (size_t)more, seeds);
            owner[used++] = 2 * i + (size_t)more;
        }
    const size_t bad = ctx_rans_decode(to->k, to->places->plane->tables, jobs, used);
    ctx_klt_tick(to->clock, CTX_KLT_DECODING);
    ctx_klt_result result = {.reason = CTX_KLT_OK};
    for (size_t i = 0; i < count && !result.reason; i++) {
        result = (ctx_klt_result){.place = cells[i].place, .cell = cells[i].number};
        if (bad < used && owner[bad] / 2 == i) {
            result.reason = CTX_KLT_RANS;
            result.refinement = owner[bad] % 2 != 0;
        } else {
            result.reason = write_cell(to, &cells[i], b, i, seeds);
            result.refinement = cells[i].refined;
        }
    }
    return result;
}

/* The most that any of a call's planes needs. */
typedef struct sizes {
    size_t rows, base, padded;
    int refined;
} sizes;

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static void lay_out(arena *a, const sizes *most, scratch *b) {
    const size_t rows = most->rows, step = most->refined ? 1 : 2;
    for (size_t i = 0; i < 2 * BATCH; i += step) b->symbols[i] = cut(a, rows * TOKENS + 2 * TOKENS, 1);
    for (size_t i = 0; i < 2 * BATCH; i += step) b->steps[i] = cut(a, rows, sizeof(uint16_t));
    b->out = cut(a, TOKENS * most->padded, sizeof(float));
    b->strided = cut(a, TOKENS * most->padded, sizeof(float));
    b->listed = cut(a, (rows + 1) * TOKENS, sizeof(uint32_t));
    b->q = cut(a, (rows + 1) * TOKENS, sizeof(int16_t));
    b->pairs = cut(a, (rows + 1) * TOKENS, sizeof(int16_t));
    b->q_base = cut(a, (most->base + 1) * TOKENS, sizeof(int16_t));
    b->quads = cut(a, (rows + 3) * TOKENS, 1);
}

/* Memory for a call, to be freed; NULL if there is none. */
static uint8_t *room_for(const sizes *most, scratch *b) {
    arena a = {NULL, 0};
    lay_out(&a, most, b);
    if (!arena_begin(&a)) return NULL;
    lay_out(&a, most, b);
    /* Vectors read behind a short cell's symbols, and throw away what they made of it. */
    for (size_t i = 0; i < 2 * BATCH; i += most->refined ? 1 : 2) memset(b->symbols[i], 0, most->rows * TOKENS + 2 * TOKENS);
    if (most->refined) memset(b->q, 0, (most->rows + 1) * TOKENS * sizeof(int16_t));
    return a.at;
}

static size_t cells_of(const ctx_klt_place *at) { return (at->tokens + TOKENS - 1) / TOKENS * at->plane->groups; }

ctx_klt_result ctx_klt_decode(const ctx_kernels *k, const ctx_klt_place *places, const ctx_klt_stream *streams, size_t count,
                              ctx_dtype raw, ctx_klt_clock *clock) {
    ctx_klt_result result = {.reason = CTX_KLT_OK};
    const target to = {k, places, raw, clock};
    size_t all = 0, next = 0;
    sizes most = {0};
    ctx_klt_start(clock);
    for (size_t i = 0; i < count; i++) {
        const ctx_klt_plane *p = places[i].plane;
        all += cells_of(&places[i]);
        most.rows = larger(most.rows, p->most_components), most.padded = larger(most.padded, ctx_klt_padded(p->dim));
        if (!streams[i].more) continue;
        most.base = larger(most.base, p->base->most_components);
        most.refined = 1;
    }
    cell *cells = malloc((all + 1) * sizeof *cells);
    scratch b = {.out = NULL};
    uint8_t *memory = room_for(&most, &b);
    if (!cells || !memory) result.reason = CTX_KLT_MEMORY;
    for (size_t i = 0; i < count && !result.reason; i++) {
        const size_t here = cells_of(&places[i]), groups = places[i].plane->groups;
        for (size_t j = 0; j < here; j++) {
            const size_t at = j / groups * TOKENS, rest = places[i].tokens - at;
            cells[next + j] = (cell){.place = i, .number = j, .group = j % groups, .row = at, .tokens = rest < TOKENS ? rest : TOKENS};
        }
        result = read_stream(k, &places[i], &streams[i], ctx_dtype_bytes(raw), cells + next);
        result.place = i;
        next += here;
    }
    ctx_klt_tick(clock, CTX_KLT_CHECKS);
    for (size_t i = 0; i < all && !result.reason; i += BATCH) result = write_batch(&to, cells + i, all - i < BATCH ? all - i : BATCH, &b);
    free(memory);
    free(cells);
    return result;
}
