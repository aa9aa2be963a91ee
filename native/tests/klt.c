/* klt.c - every table of the transform coder against the generic one, and hostile bytes. */
#include "klt.h"

#include <math.h>

enum { PARTS = 3 };

/* Peaks of several widths round 15, cut where they are rare, with an escape. */
static ctx_rans_tables *peaked_tables(size_t count) {
    uint8_t freqs[16][32] = {{0}};
    size_t bad;
    for (size_t i = 0; i < count; i++) {
        const int reach = (int)below(16);
        int sum = 0;
        for (int s = 15 - reach; s <= 15 + reach && s < 31; s++) {
            freqs[i][s] = (uint8_t)(s < 0 ? 0 : 1 + (int)(224.0 / (2 * reach + 2) * (1 + reach - abs(s - 15)) / (1 + reach)));
            sum += freqs[i][s];
        }
        freqs[i][31] = (uint8_t)(1 + below(4));
        if (i == 0) memset(freqs[0], 0, 31), freqs[0][0] = 60, freqs[0][1] = 100, freqs[0][2] = 60, sum = 220;
        sum += freqs[i][31];
        for (int s = 15; sum < 256; s = 15) {
            const int more = 256 - sum < 255 - freqs[i][s] ? 256 - sum : 255 - freqs[i][s];
            freqs[i][s] = (uint8_t)(freqs[i][s] + more);
            sum += more;
            if (sum < 256) freqs[i][31] = (uint8_t)(freqs[i][31] + 256 - sum), sum = 256;
        }
    }
    ctx_rans_tables *tables = ctx_rans_prepare(freqs[0], count, &bad);
    CHECK(tables && bad == count, "table %zu was refused", bad);
    return tables;
}

static float uniform(void) { return (float)below(1 << 20) / (float)(1 << 19) - 1; }
static float spread(void) { return uniform() + uniform() + uniform(); }

/* What a card could say, for one group; the base has fewer components and a step three times as large. */
typedef struct card {
    ctx_klt_spec spec, base;
    float *mean, *gain, *forward;
    int16_t *basis, *whole;
    float *quantum;
    uint8_t *table, *shift, *refine, *low_table, *low_shift;
} card;

static card random_card(size_t first, size_t parts, size_t heads, size_t dim, size_t tables) {
    const size_t C = parts * heads * dim, n = below(C + 1), refined = n ? below(n + 1) : 0, narrow = below(n + 1);
    const int bytes = below(2) != 0;
    card c = {.mean = malloc(4 * C), .gain = malloc(4 * C), .forward = malloc(4 * n * C + 1), .basis = malloc(2 * n * C + 1),
              .table = random_bytes(n), .shift = random_bytes(n), .refine = random_bytes(refined),
              .low_table = random_bytes(refined), .low_shift = random_bytes(refined)};
    for (size_t d = 0; d < C; d++) c.mean[d] = uniform(), c.gain[d] = (1 + uniform() / 2) / 8191;
    for (size_t i = 0; i < n * C; i++) {
        const float size = spread() * 3.0f / sqrtf((float)C) / (1 + (float)(i / C) / 8);
        c.forward[i] = size;
        c.basis[i] = (int16_t)(uniform() * 8191);
        if (bytes && i / C >= narrow) c.basis[i] = (int16_t)(c.basis[i] / 64 * 64);
    }
    for (size_t i = 0; i < n; i++) c.table[i] = (uint8_t)(1 + c.table[i] % (tables - 1)), c.shift[i] = i < n / 4 ? c.shift[i] % 6 : 0;
    for (size_t i = 0; i < refined; i++) {
        c.refine[i] = c.refine[i] % 8 ? 0 : 1;
        c.low_table[i] = (uint8_t)(1 + c.low_table[i] % (tables - 1));
        c.low_shift[i] = i < 2 ? c.low_shift[i] % 3 : 0;
    }
    /* Whole numbers, now and then too large for either kind. */
    const int large = below(2) != 0;
    const float unit = below(2) ? 0 : below(4) ? 1024 : 1 << 14;
    c.whole = malloc(2 * n * C + 1), c.quantum = malloc(4 * n + 1);
    for (size_t i = 0; i < n * C; i++) c.whole[i] = (int16_t)(below(200) ? c.forward[i] * 4096 : below(2) ? INT16_MIN : INT16_MAX);
    for (size_t i = 0; i < n; i++) c.quantum[i] = 1 / (4096 * 1024 * (0.05f + (float)below(8) / 16));
    c.spec = (ctx_klt_spec){first, heads, n, refined, 1.0 / (double)C, large, c.mean, c.gain, c.forward, c.whole, c.quantum, unit,
                            c.basis, c.table, c.shift, c.refine};
    c.base = (ctx_klt_spec){first, heads, refined, 0, 1.0 / (double)C, large, c.mean, c.gain, c.forward, c.whole, c.quantum, unit,
                            c.basis, c.low_table, c.low_shift, NULL};
    return c;
}

static void free_card(card *c) {
    free(c->mean), free(c->gain), free(c->forward), free(c->basis), free(c->table), free(c->shift), free(c->refine);
    free(c->low_table), free(c->low_shift), free(c->whole), free(c->quantum);
}

/* The rows of all parts, one behind the other. */
static ctx_klt_place place_of(const coded *c, const ctx_klt_plane *plane, uint8_t *at, ctx_klt_part parts[PARTS]) {
    const size_t one = plane->heads * c->tokens * plane->dim * ctx_dtype_bytes(c->dtype);
    for (size_t i = 0; i < plane->parts; i++) {
        parts[i] = (ctx_klt_part){.rows = {at + i * one, c->dtype, {c->tokens * plane->dim, plane->dim, 1}}};
        if (c->turned >> i & 1) parts[i].cos = c->cos, parts[i].sin = c->sin, parts[i].half = c->half;
    }
    return (ctx_klt_place){plane, parts, c->tokens};
}

static uint8_t *encode(const ctx_kernels *k, const coded *c, const ctx_klt_plane *plane, int refinement, size_t *bytes) {
    uint8_t *room = malloc(ctx_klt_bound(plane, c->tokens, c->raw));
    ctx_klt_part parts[PARTS];
    const ctx_klt_place place = place_of(c, plane, c->rows, parts);
    ctx_klt_coded coded = {.raw_first = c->raw_first};
    const ctx_klt_result done = ctx_klt_encode(k, &place, &coded, 1, c->raw, refinement, room, NULL);
    CHECK(done.reason == CTX_KLT_OK, "encode: %d", done.reason);
    *bytes = coded.bytes;
    uint8_t *exact = malloc(*bytes);
    memcpy(exact, room, *bytes);
    free(room);
    return exact;
}

coded random_coded(size_t most_heads, size_t most_dim, size_t most_tokens) {
    static const size_t dims[] = {64, 1, 3, 8, 16, 20, 64, 128, 256};
    const ctx_kernels *all[TABLES];
    const size_t tables = 4 + below(12), usable = all_tables(all);
    size_t dim = dims[below(9)], heads = 1 + below(most_heads), parts = below(2) ? 1 : 1 + below(PARTS), groups = 0, first = 0;
    if (dim > most_dim) dim = 1 + below(most_dim);
    while (heads > 1 && heads * parts * dim > 512) heads--; /* more takes long */
    while (parts * dim > 512) parts--;
    coded c = {.tables = peaked_tables(tables), .tokens = 1 + below(most_tokens), .dtype = (ctx_dtype)below(3), .raw = (ctx_dtype)below(3),
               .turned = parts == 1 ? 1 : (unsigned)below(1 << PARTS)};
    const int rope = (int)below(3);
    card cards[4];
    ctx_klt_spec specs[4], bases[4];
    for (; first < heads; groups++) {
        const size_t here = groups == 3 || !below(2) ? heads - first : 1;
        cards[groups] = random_card(first, parts, here, dim, tables);
        specs[groups] = cards[groups].spec, bases[groups] = cards[groups].base;
        first += here;
    }
    const char *wrong;
    const float step = 0.05f + (float)below(8) / 16;
    c.base = ctx_klt_prepare(c.tables, parts, heads, dim, bases, groups, 0, 3 * step, 1, rope, NULL, &wrong);
    CHECK(c.base, "base: %s", wrong ? wrong : "no memory");
    c.plane = ctx_klt_prepare(c.tables, parts, heads, dim, specs, groups, 1, step, 0, rope, c.base, &wrong);
    CHECK(c.plane, "plane: %s", wrong ? wrong : "no memory");
    for (size_t i = 0; i < groups; i++) free_card(&cards[i]);
    c.half = rope && dim > 1 ? (below(2) ? dim / 2 : 1 + below(dim / 2)) : 0;
    c.raw_first = below(3) ? 0 : below(6);
    c.cos = malloc(4 * c.tokens * c.half + 1), c.sin = malloc(4 * c.tokens * c.half + 1);
    for (size_t i = 0; i < c.tokens * c.half; i++) c.cos[i] = cosf((float)i), c.sin[i] = sinf((float)i);
    const size_t values = parts * heads * c.tokens * dim;
    float *rows = malloc(4 * values);
    c.rows = malloc(values * ctx_dtype_bytes(c.dtype));
    for (size_t i = 0; i < values; i++) rows[i] = spread() * (below(100) ? 1 : below(20) ? 30 : below(4) ? 1e6f : INFINITY);
    generic_table()->convert[CTX_FP32][c.dtype](c.rows, (const uint8_t *)rows, values);
    free(rows);
    for (int i = 0; i < 3; i++) {
        const ctx_klt_plane *plane = i == 1 ? c.base : c.plane;
        c.data[i] = encode(generic_table(), &c, plane, i == 2, &c.bytes[i]);
        for (size_t j = 0; j + 1 < usable; j++) {
            size_t bytes;
            uint8_t *data = encode(all[j], &c, plane, i == 2, &bytes);
            CHECK(bytes == c.bytes[i] && memcmp(data, c.data[i], bytes) == 0, "%s encodes part %d otherwise", all[j]->name, i);
            free(data);
        }
    }
    return c;
}

void free_coded(coded *c) {
    ctx_klt_free(c->plane), ctx_klt_free(c->base), ctx_rans_free(c->tables);
    free(c->cos), free(c->sin), free(c->rows);
    for (int i = 0; i < 3; i++) free(c->data[i]);
}

ctx_klt_reason decode_rows(const coded *c, const uint8_t *data, size_t bytes, const uint8_t *more, size_t more_bytes) {
    const ctx_kernels *all[TABLES];
    const size_t usable = all_tables(all), volume = c->plane->parts * c->plane->heads * c->tokens * c->plane->dim * ctx_dtype_bytes(c->dtype);
    const ctx_klt_stream stream = {.at = data, .bytes = bytes, .more = more, .more_bytes = more_bytes};
    uint8_t *first = calloc(volume, 1), *out = malloc(volume);
    ctx_klt_result verdict = {.reason = CTX_KLT_OK};
    for (size_t j = usable; j-- > 0;) { /* generic comes first here */
        uint8_t *to = j + 1 == usable ? first : out;
        ctx_klt_part parts[PARTS];
        const ctx_klt_place place = place_of(c, c->plane, to, parts);
        if (to == out) memset(out, 0, volume);
        const ctx_klt_result done = ctx_klt_decode(all[j], &place, &stream, 1, c->raw, NULL);
        CHECK(done.reason != CTX_KLT_MEMORY && done.reason != CTX_KLT_TABLE, "%s", all[j]->name);
        if (to == first) verdict = done;
        CHECK(done.reason == verdict.reason && done.cell == verdict.cell && done.refinement == verdict.refinement,
              "%s says %d of cell %zu, generic %d of %zu", all[j]->name, done.reason, done.cell, verdict.reason, verdict.cell);
        if (done.reason == CTX_KLT_OK) CHECK(memcmp(first, to, volume) == 0, "%s decodes other rows", all[j]->name);
    }
    free(first), free(out);
    return verdict.reason;
}

/* Bytes changed, cut, lengthened, replaced, or lengths of the head and the entries bent. Exactly sized. */
static uint8_t *mutated(const uint8_t *data, size_t bytes, size_t *size) {
    const size_t kind = below(8);
    *size = kind == 0 ? below(bytes + 1) : kind == 1 ? bytes + 1 + below(70) : bytes;
    uint8_t *at = random_bytes(*size);
    if (kind == 2 && below(8) == 0) return at;
    memcpy(at, data, *size < bytes ? *size : bytes);
    if (*size == 0) return at;
    for (size_t i = below(4) + (kind > 2); i > 0; i--) {
        const size_t entries = *size < 8 + 4 * 16 ? *size : 8 + 4 * 16, where = kind < 5 ? below(*size) : below(entries);
        at[where] = below(2) ? (uint8_t)random64() : (uint8_t)(at[where] ^ 1 << below(8));
    }
    return at;
}

size_t fuzz_klt(size_t inputs) {
    size_t decoded = 0;
    coded c = {.tokens = 0};
    for (size_t i = 0; i < inputs; i++) {
        if (i % 256 == 0) {
            if (i) free_coded(&c);
            c = random_coded(2, i % 1024 ? 8 : 64, i % 512 ? 20 : 70);
        }
        const int refined = below(3) == 0, worse = refined && below(2);
        size_t bytes, good = c.bytes[refined];
        uint8_t *bad = worse ? mutated(c.data[2], c.bytes[2], &bytes) : mutated(c.data[refined], good, &bytes);
        ctx_klt_reason reason;
        if (!refined)
            reason = decode_rows(&c, bad, bytes, NULL, 0);
        else if (worse)
            reason = decode_rows(&c, c.data[1], c.bytes[1], bad, bytes);
        else
            reason = decode_rows(&c, bad, bytes, c.data[2], c.bytes[2]);
        decoded += reason == CTX_KLT_OK;
        free(bad);
    }
    if (inputs) free_coded(&c);
    return decoded;
}

void test_klt(void) {
    for (int i = 0; i < 60; i++) {
        coded c = random_coded(4, i % 3 ? 64 : 256, i % 4 ? 80 : 200);
        CHECK(decode_rows(&c, c.data[0], c.bytes[0], NULL, 0) == CTX_KLT_OK, "the plane's stream");
        CHECK(decode_rows(&c, c.data[1], c.bytes[1], c.data[2], c.bytes[2]) == CTX_KLT_OK, "base and refinement");
        CHECK(decode_rows(&c, c.data[0], c.bytes[0] - 1, NULL, 0) != CTX_KLT_OK, "a byte is missing");
        CHECK(decode_rows(&c, c.data[1], c.bytes[1], NULL, 0) == CTX_KLT_HEADER, "the base's level");
        free_coded(&c);
    }
}
