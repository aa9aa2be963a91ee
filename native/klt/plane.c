/* klt/plane.c - prepared planes of the transform coder, and which kernels serve them. */
#include "kernels.h"
#include "core/arena.h"
#include "core/variants.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

extern const ctx_klt_kernels ctx_klt_avx512, ctx_klt_avx2, ctx_klt_neon, ctx_klt_generic;

static const ctx_variant variants[] = {
    CTX_AVX512(ctx_klt, CTX_CPU_VNNI)
    CTX_AVX2(ctx_klt, 0)
    CTX_NEON(ctx_klt)
    CTX_GENERIC(ctx_klt)
};

const ctx_klt_kernels *ctx_klt_of(const ctx_kernels *k) { return ctx_variant_of(variants, k->name)->table; }
const char *ctx_klt_name(const ctx_kernels *k) { return ctx_variant_of(variants, k->name)->name; }

/* As numpy rounds them; written out, for exp2 of the C library may differ in the last bit. */
const float ctx_klt_powers[32] = {
    0x1.0000000000000p+0f, 0x1.059b0e0000000p+0f, 0x1.0b55860000000p+0f, 0x1.11301e0000000p+0f, 0x1.172b840000000p+0f, 0x1.1d48740000000p+0f,
    0x1.2387a60000000p+0f, 0x1.29e9e00000000p+0f, 0x1.306fe00000000p+0f, 0x1.371a740000000p+0f, 0x1.3dea640000000p+0f, 0x1.44e0860000000p+0f,
    0x1.4bfdae0000000p+0f, 0x1.5342b60000000p+0f, 0x1.5ab07e0000000p+0f, 0x1.6247ec0000000p+0f, 0x1.6a09e60000000p+0f, 0x1.71f75e0000000p+0f,
    0x1.7a11480000000p+0f, 0x1.82589a0000000p+0f, 0x1.8ace540000000p+0f, 0x1.93737c0000000p+0f, 0x1.9c49180000000p+0f, 0x1.a5503c0000000p+0f,
    0x1.ae89fa0000000p+0f, 0x1.b7f7700000000p+0f, 0x1.c199be0000000p+0f, 0x1.cb720e0000000p+0f, 0x1.d5818e0000000p+0f, 0x1.dfc9740000000p+0f,
    0x1.ea4afa0000000p+0f, 0x1.f507660000000p+0f,
};

static uint64_t nanoseconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void ctx_klt_start(ctx_klt_clock *clock) {
    if (clock) clock->last = nanoseconds();
}

void ctx_klt_tick(ctx_klt_clock *clock, int part) {
    if (!clock) return;
    const uint64_t now = nanoseconds();
    clock->spent[part] += now - clock->last;
    clock->last = now;
}

static size_t up(size_t n, size_t unit) { return (n + unit - 1) / unit; }

static void lay_out(arena *a, ctx_klt_group *g) {
    const size_t room = g->blocks * CTX_KLT_BLOCK, quads = up(g->components - g->narrow, 4);
    g->mean = cut(a, room, sizeof(float));
    g->gain = cut(a, room, sizeof(float));
    g->bias = cut(a, room, sizeof(int32_t));
    g->centre = cut(a, g->channels, sizeof(float));
    if (g->unit)
        g->whole = cut(a, up(g->components, 4) * up(g->channels, 2) * 8, sizeof(int16_t));
    else
        g->forward = cut(a, up(g->components, 4) * g->channels * 4, sizeof(float));
    g->quantum = cut(a, g->components, sizeof(float));
    g->pairs = cut(a, room * up(g->components, 2) * 2, sizeof(int16_t));
    g->quads = cut(a, room * quads * 4, 1);
    g->steps = cut(a, g->components, sizeof(uint16_t));
    g->steps_refined = cut(a, g->components, sizeof(uint16_t));
    g->shift = cut(a, g->components, 1);
}

/* Components from the result on can be multiplied as bytes: their basis is 64 times a byte, and they have no low bits. Even,
 * so that pairs end there. */
static size_t narrow_from(const ctx_klt_spec *s, size_t channels) {
    size_t c = s->components;
    for (int fits = 1; c > 0; c--) {
        const int16_t *row = s->basis + (c - 1) * channels;
        fits = s->shift[c - 1] == 0;
        for (size_t d = 0; fits && d < channels; d++) fits = row[d] % 64 == 0 && row[d] / 64 <= 127 && row[d] / 64 >= -128;
        if (!fits) break;
    }
    c += c & 1;
    return c < s->components ? c : s->components;
}

static void fill(ctx_klt_group *g, const ctx_klt_spec *s, size_t dim) {
    const size_t padded = ctx_klt_padded(dim), n = g->components, C = g->channels;
    const size_t pairs = up(n, 2), quads = up(n - g->narrow, 4);
    for (size_t d = 0; d < C; d++) {
        const size_t to = d / dim * padded + d % dim, block = to / CTX_KLT_BLOCK, lane = to % CTX_KLT_BLOCK;
        g->mean[to] = g->centre[d] = s->mean[d];
        g->gain[to] = s->gain[d];
        for (size_t c = 0; c < n; c++) {
            const int16_t b = s->basis[c * C + d];
            g->pairs[((block * pairs + c / 2) * CTX_KLT_BLOCK + lane) * 2 + c % 2] = b;
            if (!s->unit)
                g->forward[(c / 4 * C + d) * 4 + c % 4] = s->forward[c * C + d];
            else
                g->whole[((c / 4 * up(C, 2) + d / 2) * 4 + c % 4) * 2 + d % 2] = s->whole[c * C + d];
            if (c < g->narrow) continue;
            const size_t q = c - g->narrow;
            g->quads[((block * quads + q / 4) * CTX_KLT_BLOCK + lane) * 4 + q % 4] = (int8_t)(b / 64);
            g->bias[to] -= 128 * (b / 64);
        }
    }
    for (size_t c = 0; c < n; c++) {
        g->steps[c] = s->table[c];
        g->steps_refined[c] = c < s->refined ? s->refine[c] : s->table[c];
        g->shift[c] = s->shift[c];
        if (s->unit) g->quantum[c] = s->quantum[c];
        g->low += s->shift[c];
        g->low_refined += c < s->refined ? 0 : s->shift[c];
    }
}

static int all_finite(const float *at, size_t n, float most) {
    int fine = 1;
    for (size_t i = 0; i < n; i++) fine &= fabsf(at[i]) <= most; /* false for NaN */
    return fine;
}

/* What cannot be about a group, or NULL. Limits keep every product of the decoder finite. */
static const char *check(const ctx_klt_plane *p, const ctx_klt_spec *s, const ctx_klt_group *base) {
    const size_t channels = p->parts * s->heads * p->dim;
    if (s->heads == 0 || s->heads > CTX_KLT_CHANNELS || channels > CTX_KLT_CHANNELS) return "a group needs 1 to 4096 channels";
    if (s->components > channels) return "a group has more components than channels";
    if (!(s->inverse_energy > 0) || !isfinite(s->inverse_energy)) return "the usual energy is not a positive number";
    if (!all_finite(s->mean, channels, 0x1p100f)) return "a mean is not finite";
    if (!all_finite(s->gain, channels, 0x1p30f / p->step)) return "a gain times the step is above 2^30";
    if (!s->unit && !all_finite(s->forward, s->components * channels, 0x1p40f)) return "a forward element is not finite";
    if (s->unit && !(all_finite(s->quantum, s->components, 0x1p40f) && s->unit > 0 && s->unit <= 0x1p100f))
        return "a unit or quantum is out of range";
    for (size_t i = 0; i < s->components * channels; i++)
        if (s->basis[i] > 8191 || s->basis[i] < -8191) return "a basis element leaves +-8191";
    for (size_t c = 0; c < s->components; c++) {
        if (s->shift[c] > CTX_KLT_SHIFT) return "a shift is above 10";
        if (s->table[c] >= p->tables->count || p->tables->at[s->table[c]].absent[31]) return "a component's table has no escape or is not there";
    }
    for (size_t c = 0; c < s->refined; c++)
        if (s->refine[c] >= p->tables->count || p->tables->at[s->refine[c]].absent[31]) return "a refinement's table has no escape or is not there";
    if (s->refined != (base ? base->components : 0) || s->refined > s->components) return "a group and its base differ in components";
    if (base && (base->first != s->first || base->heads != s->heads)) return "a group and its base differ in heads";
    return NULL;
}

static const char *check_plane(const ctx_klt_plane *p, const ctx_klt_plane *base) {
    if (p->parts == 0 || p->heads == 0 || p->dim == 0 || p->groups == 0 || p->dim > CTX_KLT_CHANNELS || p->parts > CTX_KLT_CHANNELS)
        return "a plane needs heads of 1 to 4096 channels";
    if (!(p->step >= 0x1p-60f && p->step <= 0x1p30f)) return "the step leaves 2^-60 to 2^30";
    if (p->level < 0 || p->level > 255) return "the level leaves 0 to 255";
    if (p->rope < CTX_KLT_NO_ROPE || p->rope > CTX_KLT_PAIRS) return "the rotation is unknown";
    if (!base) return NULL;
    if (base->tables != p->tables || base->parts != p->parts || base->heads != p->heads || base->dim != p->dim || base->groups != p->groups ||
        base->rope != p->rope)
        return "a plane and its base differ";
    return base->nested ? NULL : "the base is not made to be refined";
}

ctx_klt_plane *ctx_klt_prepare(const ctx_rans_tables *tables, size_t parts, size_t heads, size_t dim,
                               const ctx_klt_spec *specs, size_t groups, int level, float step, int nested, int rope,
                               const ctx_klt_plane *base, const char **wrong) {
    ctx_klt_plane p = {.tables = tables, .base = base, .parts = parts, .heads = heads, .dim = dim, .groups = groups, .step = step,
                       .inverse_step = 1.0f / (nested ? step / 3.0f : step), .level = level, .nested = nested, .rope = rope};
    *wrong = check_plane(&p, base);
    if (*wrong) return NULL;
    size_t head = 0;
    for (size_t i = 0; i < groups && !*wrong; i++) {
        if (specs[i].first != head || specs[i].heads > heads - head) *wrong = "groups do not cover the heads in order";
        else *wrong = check(&p, &specs[i], base ? &base->group[i] : NULL);
        head += specs[i].heads;
    }
    if (!*wrong && head != heads) *wrong = "groups do not cover the heads in order";
    ctx_klt_plane *made = NULL;
    for (arena a = {NULL, 0}; !*wrong;) {
        ctx_klt_plane *to = cut(&a, 1, sizeof p);
        ctx_klt_group *group = cut(&a, groups, sizeof *group);
        for (size_t i = 0; i < groups; i++) {
            const ctx_klt_spec *s = &specs[i];
            const size_t all = parts * s->heads;
            ctx_klt_group g = {.first = s->first, .heads = s->heads, .all_heads = all, .channels = all * dim,
                               .components = s->components, .refined = s->refined,
                               .blocks = all * ctx_klt_padded(dim) / CTX_KLT_BLOCK,
                               .inverse_energy = s->inverse_energy, .large = s->large, .unit = s->unit};
            g.narrow = narrow_from(s, g.channels);
            lay_out(&a, &g);
            if (!a.at) continue;
            fill(&g, s, dim);
            group[i] = g;
            if (g.components > p.most_components) p.most_components = g.components;
            if (g.channels > p.most_channels) p.most_channels = g.channels;
        }
        if (a.at) {
            p.group = group;
            *to = p;
            made = to;
            break;
        }
        const size_t all = a.used;
        if (!arena_begin(&a)) break;
        memset(a.at, 0, all);
    }
    return made;
}

void ctx_klt_free(ctx_klt_plane *plane) { free(plane); }
