/* lossless/lossless.c - streams of lossless planes: their parts, the checks before they are trusted, and which kernels code them. */
#include "lossless.h"
#include "core/arena.h"
#include "core/scalar.h"
#include "core/variants.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

extern const ctx_lossless_coder ctx_lossless_avx512, ctx_lossless_avx2, ctx_lossless_generic;

static const ctx_variant variants[] = {
    CTX_AVX512(ctx_lossless, CTX_CPU_VBMI2 | CTX_CPU_BMI2)
    CTX_AVX2(ctx_lossless, CTX_CPU_BMI2)
    CTX_GENERIC(ctx_lossless)
};

static const ctx_lossless_coder *coder_of(const ctx_kernels *k) { return ctx_variant_of(variants, k->name)->table; }

static const uint8_t frequencies[CTX_LOSSLESS_CLASSES][CTX_RANS_SYMBOLS] = {
#include "tables.inc"
};

enum { GROUP = CTX_RANS_LANES, FREE = 2 * CTX_RANS_LANES /* bytes of the tail that travel as seeds */, FINEST = 6 };

/* ---- The model: made once ---------------------------------------------------------------------------------------- */

/* 16 * (8 - log2 f), rounded up; in whole numbers, so that every machine chooses the same classes. */
static uint16_t bits_of(uint32_t f) {
    uint32_t log = 0, x = f;
    while (x >> (log + 1)) log++;
    x <<= 15 - log;
    for (int i = 0; i < 4; i++) {
        x = x * x >> 15;
        log = 2 * log + (x >> 16);
        x >>= x >> 16;
    }
    return (uint16_t)(128 - log);
}

static ctx_lossless_model *model_new(void) {
    size_t bad;
    ctx_lossless_model *model = malloc(sizeof *model);
    if (!model) return NULL;
    if (!(model->tables = ctx_rans_prepare(&frequencies[0][0], CTX_LOSSLESS_CLASSES, &bad))) {
        free(model);
        return NULL;
    }
    for (int c = 0; c < CTX_LOSSLESS_CLASSES; c++) {
        const uint8_t *f = frequencies[c];
        const uint16_t escape = (uint16_t)(bits_of(f[15]) + (8 + 1 + 1) * 16); /* exponent, sign, first bit */
        model->present[c] = 0;
        for (int s = 0; s < CTX_RANS_SYMBOLS; s++) {
            model->present[c] |= (uint32_t)(f[s] != 0) << s;
            model->cost[s][c] = f[s] && s != 15 ? (uint16_t)(bits_of(f[s]) + ((s & 15) >= FINEST ? 16 : 0)) : escape;
        }
    }
    return model;
}

static _Atomic(ctx_lossless_model *) shared;

static const ctx_lossless_model *model_get(void) {
    ctx_lossless_model *model = atomic_load(&shared), *none = NULL;
    if (model || !(model = model_new())) return model;
    if (atomic_compare_exchange_strong(&shared, &none, model)) return model;
    ctx_rans_free((ctx_rans_tables *)model->tables); /* another thread was first */
    free(model);
    return none;
}

/* ---- Sections ---------------------------------------------------------------------------------------------------- */

typedef struct section {
    ctx_lossless_steps s;
    size_t first, tokens; /* of the plane's tokens */
    size_t heads, dim, lanes, steps, raw_bytes, class_bytes, low_bytes;
    uint16_t *table_of_step, seeds[CTX_RANS_LANES];
    uint8_t *tail; /* whole; FREE bytes at least, and 9 of room */
    uint8_t *memory;
    size_t room;
    /* Decoding only. */
    const uint8_t *classes, *rans, *rest;
    size_t rans_bytes, tail_bytes, job;
    int coded;
} section;

static void section_shape(section *c, ctx_dtype dtype, const size_t shape[3], int rest) {
    const size_t whole = shape[1] / GROUP * GROUP, channels = shape[0] * shape[2];
    c->s.dtype = dtype;
    c->heads = shape[0], c->dim = shape[2];
    c->first = rest ? whole : 0;
    c->tokens = rest ? shape[1] - whole : whole;
    if (rest) {
        const size_t together = c->tokens ? GROUP / c->tokens : 1;
        c->lanes = together * c->tokens;
        c->s.rows = c->tokens ? (channels + together - 1) / together : 0;
        c->s.steps_per_row = 1;
    } else {
        c->lanes = GROUP;
        c->s.rows = whole ? channels : 0;
        c->s.steps_per_row = whole / GROUP;
    }
    c->steps = c->s.rows * c->s.steps_per_row;
    c->raw_bytes = channels * c->tokens * ctx_dtype_bytes(dtype);
    c->class_bytes = c->s.rows + (c->s.rows + 3) / 4;
    c->low_bytes = c->steps * ctx_lossless_low_bytes(dtype);
}

static void lay_out(arena *a, section *c, size_t tail, size_t escapes) {
    const size_t lanes = c->steps * GROUP;
    c->s.values = cut(a, lanes, ctx_dtype_bytes(c->s.dtype));
    c->s.symbols = cut(a, lanes, 1);
    c->table_of_step = cut(a, c->steps, sizeof(uint16_t));
    c->s.top = cut(a, c->s.rows, 1);
    c->s.flip = cut(a, c->s.rows, 1);
    c->s.class_of = cut(a, c->s.rows, 1);
    c->tail = cut(a, tail + 9, 1);
    c->s.signs = cut(a, escapes, 1);
    c->s.exponents = cut(a, escapes, 1);
}

/* Memory for a section: what is the same in both directions, then a tail and lists of escapes of the given sizes. */
static int section_room(section *c, size_t tail, size_t escapes) {
    arena a = {NULL, 0};
    lay_out(&a, c, tail, escapes);
    if (a.used > c->room) {
        free(c->memory);
        c->room = a.used;
        if (!arena_begin(&a)) c->room = 0;
        c->memory = a.at;
    }
    if (!c->room) return -1;
    a = (arena){c->memory, 0};
    lay_out(&a, c, tail, escapes);
    return 0;
}

static void section_tables(section *c) {
    uint16_t *step = c->table_of_step;
    for (size_t row = 0; row < c->s.rows; row++)
        for (size_t i = 0; i < c->s.steps_per_row; i++) *step++ = c->s.class_of[row];
}

static ctx_view channels_of(const section *c) {
    return (ctx_view){c->s.values, c->s.dtype, {c->dim * c->tokens, 1, c->tokens}};
}

static ctx_view box_of(const section *c, const ctx_view *plane) {
    ctx_view box = *plane;
    if (c->tokens) box.at += c->first * plane->strides[1] * ctx_dtype_bytes(plane->dtype);
    return box;
}

/* ---- Encoding ---------------------------------------------------------------------------------------------------- */

/* From whole channels after one another to steps of 64, last step first since they only move upwards. */
static void widen(section *c) {
    const size_t item = ctx_dtype_bytes(c->s.dtype), lanes = c->lanes;
    const size_t held = c->heads * c->dim * c->tokens, wanted = c->steps * lanes;
    memset(c->s.values + held * item, 0, (wanted - held) * item);
    if (lanes == GROUP) return;
    for (size_t step = c->steps; step-- > 0;) {
        uint8_t *to = c->s.values + step * GROUP * item;
        memmove(to, c->s.values + step * lanes * item, lanes * item);
        memcpy(to + lanes * item, to, (GROUP - lanes) * item);
    }
}

/* One more exponent down is two bits of two rows' bytes. */
static void put_classes(const section *c, uint8_t base, uint8_t *out) {
    uint8_t *more = out + c->s.rows;
    memset(more, 0, c->class_bytes - c->s.rows);
    for (size_t row = 0; row < c->s.rows; row++) {
        const uint8_t shift = (uint8_t)(base - c->s.top[row]);
        out[row] = (uint8_t)(c->s.class_of[row] | shift << 5);
        more[row / 4] |= (uint8_t)((shift >> 3 | c->s.flip[row] << 1) << row % 4 * 2);
    }
}

/* The tail's lists behind its first bits. Returns its bytes, zeros up to FREE included. */
static size_t close_tail(section *c) {
    uint8_t *at = c->tail + (c->s.bits + 7) / 8;
    memcpy(at, c->s.exponents, c->s.escapes);
    at += c->s.escapes;
    memset(at, 0, (c->s.escapes + 7) / 8);
    for (size_t i = 0; i < c->s.escapes; i++) at[i / 8] |= (uint8_t)(c->s.signs[i] << i % 8);
    at += (c->s.escapes + 7) / 8;
    const size_t bytes = (size_t)(at - c->tail);
    if (bytes >= FREE) return bytes;
    memset(at, 0, FREE - bytes);
    return FREE;
}

/* The coded form, if it is shorter than the plain one: its bytes, 0 if not, SIZE_MAX without memory. */
static size_t encode_coded(const ctx_kernels *k, section *c, const ctx_view *box, uint8_t *out) {
    const ctx_lossless_coder *coder = coder_of(k);
    const ctx_lossless_model *model = model_get();
    const size_t lanes = c->steps * GROUP, shape[3] = {c->heads, c->tokens, c->dim};
    const size_t before = c->class_bytes + c->low_bytes;
    if (!model) return SIZE_MAX;
    if (before + CTX_RANS_STATES >= c->raw_bytes) return 0;
    if (section_room(c, lanes / 8 + lanes + lanes / 8 + 16 + FREE, lanes + GROUP) < 0) return SIZE_MAX;
    const ctx_view channels = channels_of(c);
    ctx_copy3(k, &channels, box, shape);
    widen(c);
    c->s.first_bits = c->tail;
    c->tail[0] = 0;
    c->s.low = out + CTX_LOSSLESS_SECTION + c->class_bytes;
    coder->choose(model, &c->s);
    uint8_t base = 0, low;
    for (size_t row = 0; row < c->s.rows; row++) base = c->s.top[row] > base ? c->s.top[row] : base;
    low = base > 15 ? base - 15 : 0;
    for (size_t row = 0; row < c->s.rows; row++) c->s.top[row] = c->s.top[row] < low ? low : c->s.top[row];
    coder->split(model, &c->s);
    const size_t tail = close_tail(c), room = ctx_rans_bound(lanes);
    for (int i = 0; i < CTX_RANS_LANES; i++) c->seeds[i] = (uint16_t)(c->tail[2 * i] | c->tail[2 * i + 1] << 8);
    section_tables(c);
    uint8_t *coded = malloc(room);
    if (!coded) return SIZE_MAX;
    ctx_rans_job job = {.data = coded, .symbols = c->s.symbols, .n = lanes, .steps = c->table_of_step, .seeds = c->seeds};
    ctx_rans_encode(k, model->tables, &job, 1);
    const size_t total = before + job.bytes + tail - FREE;
    if (job.status == CTX_RANS_OK && total < c->raw_bytes) {
        uint8_t *at = out;
        at[0] = 1, at[1] = base, at[2] = at[3] = 0;
        put_le32(at + 4, (uint32_t)job.bytes);
        put_le32(at + 8, (uint32_t)tail);
        put_classes(c, base, at + CTX_LOSSLESS_SECTION);
        at += CTX_LOSSLESS_SECTION + before;
        memcpy(at, coded + room - job.bytes, job.bytes);
        memcpy(at + job.bytes, c->tail + FREE, tail - FREE);
    }
    free(coded);
    return total < c->raw_bytes ? total : 0;
}

static void encode_plain(const ctx_kernels *k, const section *c, const ctx_view *box, uint8_t *out) {
    const size_t shape[3] = {c->heads, c->tokens, c->dim};
    const ctx_view plain = {out + CTX_LOSSLESS_SECTION, c->s.dtype, {c->tokens * c->dim, c->dim, 1}};
    memset(out, 0, CTX_LOSSLESS_SECTION);
    ctx_copy3(k, &plain, box, shape);
}

ctx_lossless_status ctx_lossless_encode(const ctx_kernels *k, const ctx_view *src, const size_t shape[3], uint8_t *out,
                                        size_t *bytes) {
    uint8_t *at = out;
    memset(at, 0, 4);
    at[0] = CTX_LOSSLESS_SCHEME, at[1] = (uint8_t)src->dtype, at[2] = 3;
    for (int i = 0; i < 3; i++) put_le32(at + 4 + 4 * i, (uint32_t)shape[i]);
    at += CTX_LOSSLESS_HEADER;
    section c = {.memory = NULL};
    ctx_lossless_status status = CTX_LOSSLESS_OK;
    for (int rest = 0; rest < 2 && status == CTX_LOSSLESS_OK; rest++) {
        section_shape(&c, src->dtype, shape, rest);
        if (c.raw_bytes == 0) continue;
        const ctx_view box = box_of(&c, src);
        const size_t coded = encode_coded(k, &c, &box, at);
        if (coded == SIZE_MAX) status = CTX_LOSSLESS_MEMORY;
        if (coded == 0) encode_plain(k, &c, &box, at);
        at += CTX_LOSSLESS_SECTION + (coded ? coded : c.raw_bytes);
    }
    free(c.memory);
    *bytes = (size_t)(at - out);
    return status;
}

/* ---- Decoding ---------------------------------------------------------------------------------------------------- */

/* The type and the box that a stream says it holds, and the bytes of its header; 0 if that cannot be. */
static size_t parse_header(const uint8_t *data, size_t bytes, int *dtype, size_t shape[3]) {
    if (bytes < 4 || data[0] != CTX_LOSSLESS_SCHEME || data[2] > CTX_LOSSLESS_AXES || data[3]) return 0;
    const size_t axes = data[2], header = 4 + 4 * axes;
    if (bytes < header) return 0;
    *dtype = data[1];
    shape[0] = shape[1] = shape[2] = 1;
    for (size_t i = 0; i < axes; i++) {
        const size_t behind = axes - 1 - i; /* axes behind this one */
        size_t *length = &shape[behind < 2 ? 2 - behind : 0];
        if (__builtin_mul_overflow(*length, get_le32(data + 4 + 4 * i), length)) return 0;
    }
    return header;
}

/* Read a section's head; returns behind the section, NULL if it cannot be one. */
static const uint8_t *section_parse(section *c, const uint8_t *at, const uint8_t *end) {
    if (end - at < CTX_LOSSLESS_SECTION || at[0] > 1 || at[2] || at[3]) return NULL;
    const size_t left = (size_t)(end - at) - CTX_LOSSLESS_SECTION;
    c->coded = at[0];
    c->rans_bytes = get_le32(at + 4);
    c->tail_bytes = get_le32(at + 8);
    const uint8_t base = at[1];
    at += CTX_LOSSLESS_SECTION;
    c->classes = at;
    if (!c->coded) return c->raw_bytes <= left && !base && !c->rans_bytes && !c->tail_bytes ? at + c->raw_bytes : NULL;
    const size_t before = c->class_bytes + c->low_bytes;
    if (c->tail_bytes < FREE || before > left || c->rans_bytes > left - before ||
        c->tail_bytes - FREE > left - before - c->rans_bytes)
        return NULL;
    c->s.low = (uint8_t *)at + c->class_bytes; /* only read */
    c->rans = at + before;
    c->rest = c->rans + c->rans_bytes;
    return c->rest + (c->tail_bytes - FREE);
}

static void get_classes(section *c) {
    const uint8_t base = c->classes[-CTX_LOSSLESS_SECTION + 1], *more = c->classes + c->s.rows;
    for (size_t row = 0; row < c->s.rows; row++) {
        const uint8_t two = more[row / 4] >> row % 4 * 2 & 3;
        c->s.class_of[row] = c->classes[row] & 31;
        c->s.top[row] = (uint8_t)(base - (c->classes[row] >> 5 | (two & 1) << 3));
        c->s.flip[row] = two >> 1;
    }
}

/* Put the tail together and find its lists; -1 if its length is not what the symbols say. */
static int open_tail(section *c, const ctx_lossless_coder *coder) {
    coder->count(c->s.symbols, c->steps, &c->s.bits, &c->s.escapes);
    const size_t bits = (c->s.bits + 7) / 8, signs = (c->s.escapes + 7) / 8, used = bits + c->s.escapes + signs;
    if ((used < FREE ? FREE : used) != c->tail_bytes) return -1;
    for (int i = 0; i < CTX_RANS_LANES; i++)
        c->tail[2 * i] = (uint8_t)c->seeds[i], c->tail[2 * i + 1] = (uint8_t)(c->seeds[i] >> 8);
    memcpy(c->tail + FREE, c->rest, c->tail_bytes - FREE);
    memset(c->tail + c->tail_bytes, 0, 9);
    c->s.first_bits = c->tail;
    c->s.exponents = c->tail + bits;
    for (size_t i = 0; i < c->s.escapes; i++) c->s.signs[i] = c->s.exponents[c->s.escapes + i / 8] >> i % 8 & 1;
    return 0;
}

static void narrow(section *c) {
    const size_t item = ctx_dtype_bytes(c->s.dtype);
    if (c->lanes == GROUP) return;
    for (size_t step = 1; step < c->steps; step++)
        memmove(c->s.values + step * c->lanes * item, c->s.values + step * GROUP * item, c->lanes * item);
}

/* Several sections side by side, because an entropy decoder works on two streams in turns. */
enum { WINDOW = 4 };

static size_t window_decode(const ctx_kernels *k, const ctx_lossless_job *jobs, section *open, size_t count) {
    const ctx_lossless_coder *coder = coder_of(k);
    ctx_rans_job streams[WINDOW];
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        section *c = &open[i];
        if (!c->coded) continue;
        get_classes(c);
        section_tables(c);
        streams[used++] = (ctx_rans_job){.data = (uint8_t *)c->rans, .bytes = c->rans_bytes, .symbols = c->s.symbols,
                                         .n = c->steps * GROUP, .steps = c->table_of_step, .seeds = c->seeds};
    }
    if (used) ctx_rans_decode(k, model_get()->tables, streams, used);
    used = 0;
    for (size_t i = 0; i < count; i++) {
        section *c = &open[i];
        const size_t shape[3] = {c->heads, c->tokens, c->dim};
        const ctx_view box = box_of(c, &jobs[c->job].dst);
        if (!c->coded) {
            const ctx_view plain = {(uint8_t *)c->classes, c->s.dtype, {c->tokens * c->dim, c->dim, 1}};
            ctx_copy3(k, &box, &plain, shape);
            continue;
        }
        if (streams[used++].status != CTX_RANS_OK || open_tail(c, coder) < 0) return i;
        coder->join(&c->s);
        narrow(c);
        const ctx_view channels = channels_of(c);
        ctx_copy3(k, &box, &channels, shape);
    }
    return count;
}

static ctx_lossless_status decode_all(const ctx_kernels *k, const ctx_lossless_job *jobs, size_t count, section *open,
                                      size_t *failed) {
    size_t held = 0;
    for (size_t i = 0; i < count; i++) {
        const ctx_lossless_job *job = &jobs[i];
        const uint8_t *at = job->data, *end = job->data + job->bytes;
        size_t shape[3], header;
        int dtype;
        *failed = i;
        if ((job->sum && ctx_xxh3(k, job->data, job->bytes) != *job->sum) ||
            !(header = parse_header(job->data, job->bytes, &dtype, shape)) || dtype != (int)job->dst.dtype ||
            memcmp(shape, job->shape, sizeof shape) != 0)
            return CTX_LOSSLESS_CORRUPT;
        at += header;
        for (int rest = 0; rest < 2; rest++) {
            section *c = &open[held];
            section_shape(c, job->dst.dtype, shape, rest);
            if (c->raw_bytes == 0) continue;
            c->job = i;
            if (!(at = section_parse(c, at, end))) return CTX_LOSSLESS_CORRUPT;
            if (c->coded && section_room(c, c->tail_bytes, c->tail_bytes) < 0) return CTX_LOSSLESS_MEMORY;
            held++;
        }
        if (at != end) return CTX_LOSSLESS_CORRUPT;
        if (held + 2 > WINDOW || i + 1 == count) {
            const size_t done = window_decode(k, jobs, open, held);
            if (done < held) {
                *failed = open[done].job;
                return CTX_LOSSLESS_CORRUPT;
            }
            held = 0;
        }
    }
    *failed = count;
    return CTX_LOSSLESS_OK;
}

ctx_lossless_status ctx_lossless_decode(const ctx_kernels *k, const ctx_lossless_job *jobs, size_t count, size_t *failed) {
    section open[WINDOW] = {{.memory = NULL}};
    *failed = 0;
    if (!model_get()) return CTX_LOSSLESS_MEMORY;
    const ctx_lossless_status status = decode_all(k, jobs, count, open, failed);
    for (int i = 0; i < WINDOW; i++) free(open[i].memory);
    return status;
}
