/* attention/avx512.c - attention with sixteen lanes; int8 and int4 by dot products of bytes (VPDPBUSD).
 *
 * K is transposed by strips of 32 tokens, so that a register holds one value (float formats) or four (bytes) of 16
 * tokens and sums of scores need no adding across lanes. V goes in as it lies (floats), or four tokens interleaved. Bytes:
 *   scores   (k + 128, or a nibble) unsigned  x  the two bytes of q, signed; biases take the 128 out again
 *   values   v signed                         x  the two bytes of the weights times their scales, unsigned
 * int4 weights carry a group's step, so each 128 bits of V (a group's packed bytes) have their own.
 */
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define ATTEND ctx_attend_avx512
#define OWN_PAIRS
#define LANES 16
#define OWN_TILES
#define MULTIPLE 16

static inline float nearest(float x) { return rintf(x); }

/* Sums of several rows stay in registers only if every loop over them is unrolled before registers are given out. */
#define UNROLL _Pragma("GCC unroll 8")

#include "loops.inc"
#include "avx512_layout.h"

/* Lanes of 16 from t that are below n. */
static inline __mmask16 below(size_t t, size_t n) { return n >= t + 16 ? 0xffff : n <= t ? 0 : (__mmask16)((1u << (n - t)) - 1); }
static inline __m512i dword(const void *at) {
    int32_t word;
    memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}
/* sum += the products of bytes, unsigned times signed, by fours. As assembly, for compilers copy the sum before they add. */
ALWAYS void add_products(__m512i *sum, __m512i bytes, __m512i with) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(bytes), "v"(with));
}
/* int4's steps, and its lows in steps. */
static inline __m512 wide_steps(const uint8_t *at, __mmask16 mask) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(mask, at)), 7));
}
static inline __m512 wide_lows(const uint8_t *at, __mmask16 mask) {
    const __m512 eighths = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, at)));
    return _mm512_mul_ps(eighths, _mm512_set1_ps(0.125f));
}
static inline __m512 joined(__m512i high, __m512i low) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256), _mm512_cvtepi32_ps(low));
}

/* Lines of what comes next, fetched a few at a time between the sums of the first query rows: a tile's sums take as long as
 * its bytes, and neither waits for the other then (int8, 8 heads of 128, 8,192 tokens: 2.1 to 1.24 ms). */
typedef struct fetch {
    uintptr_t at;
    size_t each;
} fetch;
static inline fetch fetch_of(const ctx_rows *rows, size_t steps) {
    return (fetch){(uintptr_t)rows->ahead, ((rows->ahead_bytes + 63) / 64 + steps - 1) / steps};
}
static inline void fetch_some(fetch *f) {
    for (size_t i = 0; i < f->each; i++, f->at += 64) _mm_prefetch((const char *)f->at, _MM_HINT_T1);
}

/* Calls f(first row, how many as a constant) for all rows, by threes, fours or sixes. */
#define BY_THREES(rows, f) /* the last four as two and two */    \
    for (size_t r = 0; r < (rows);) {                            \
        const size_t left = (rows) - r;                          \
        const size_t here = left == 4 ? 2 : left < 3 ? left : 3; \
        if (here == 1) f(r, 1);                                  \
        else if (here == 2) f(r, 2);                             \
        else f(r, 3);                                            \
        r += here;                                               \
    }
#define BY_FOURS(rows, f)                                        \
    for (size_t r = 0; r < (rows); r += 4) {                     \
        switch ((rows) - r) {                                    \
            case 1: f(r, 1); break;                              \
            case 2: f(r, 2); break;                              \
            case 3: f(r, 3); break;                              \
            default: f(r, 4);                                    \
        }                                                        \
    }
#define BY_SIXES(rows, f)                                        \
    for (size_t r = 0; r < (rows); r += 6) {                     \
        switch ((rows) - r) {                                    \
            case 1: f(r, 1); break;                              \
            case 2: f(r, 2); break;                              \
            case 3: f(r, 3); break;                              \
            case 4: f(r, 4); break;                              \
            case 5: f(r, 5); break;                              \
            default: f(r, 6);                                    \
        }                                                        \
    }

/* Scores of `rows` query rows from r on, from their sums over 32 tokens. */
ALWAYS void put_scores(float *s, const ctx_queries *a, size_t r, const size_t rows, __m512 sum[6][2]) {
    UNROLL
    for (size_t i = 0; i < rows; i++)
        UNROLL
        for (int h = 0; h < 2; h++)
            _mm512_store_ps(s + (r + i) * TILE + 16 * h, _mm512_mul_ps(sum[i][h], _mm512_set1_ps(a->scale)));
}

/* What `width` registers of `rows` query rows were, times their factors; and their new sums. */
ALWAYS void take_sums(__m512 sum[6][4], const float *o, const float *factor, const size_t rows, const size_t width, size_t dim) {
    UNROLL
    for (size_t i = 0; i < rows; i++)
        UNROLL
        for (size_t w = 0; w < width; w++)
            sum[i][w] = _mm512_mul_ps(_mm512_loadu_ps(o + i * dim + 16 * w), _mm512_set1_ps(factor[i]));
}
ALWAYS void put_sums(float *o, __m512 sum[6][4], const size_t rows, const size_t width, size_t dim) {
    UNROLL
    for (size_t i = 0; i < rows; i++)
        UNROLL
        for (size_t w = 0; w < width; w++) _mm512_storeu_ps(o + i * dim + 16 * w, sum[i][w]);
}

#include "avx512_pairs.h"

/* ---- Queries as integers ------------------------------------------------------------------------------------------ */

static void integers(ctx_queries *a) {
    const size_t groups = a->dim / GROUP;
    for (size_t r = 0; r < a->rows; r++) {
        const float *q = a->q + r * a->dim;
        __m512 peak = _mm512_setzero_ps();
        for (size_t d = 0; d < a->dim; d += 16) peak = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(q + d)), peak);
        const float size = _mm512_reduce_max_ps(peak), inverse = size > 1e-30f && size < 1e35f ? 32512 / size : 0;
        int32_t high_sum = 0, low_sum = 0;
        for (size_t g = 0; g < groups; g++) a->sums[r * groups + g] = 0;
        for (size_t d = 0; d < a->dim; d += 16) {
            const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(q + d), _mm512_set1_ps(inverse));
            const __m512i n = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(y, y, _CMP_ORD_Q), y);
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
            const __m512i low = _mm512_sub_epi32(n, _mm512_slli_epi32(high, 8));
            _mm_storeu_si128((void *)(a->high + r * a->dim + d), _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128((void *)(a->low + r * a->dim + d), _mm512_cvtepi32_epi8(low));
            const int32_t h = _mm512_reduce_add_epi32(high), l = _mm512_reduce_add_epi32(low);
            high_sum += h, low_sum += l;
            if (d / GROUP < groups) a->sums[r * groups + d / GROUP] += (float)(256 * h + l);
        }
        a->bias[2 * r] = -128 * high_sum, a->bias[2 * r + 1] = -128 * low_sum;
        /* Not finite: scores that are not either. */
        float sum = 0;
        for (size_t d = 0; d < a->dim; d++) sum += q[d] - q[d];
        a->step[r] = inverse > 0 && sum == 0 ? a->scale / inverse : sum != 0 || size >= 1e35f ? NAN : 0;
    }
}

/* ---- Scores ------------------------------------------------------------------------------------------------------- */

ALWAYS void byte_scores(float *s, const ctx_queries *a, size_t r, const size_t rows, const uint32_t *strip, const ctx_rows *k,
                        size_t base, fetch *next, const int nibbles) {
    const size_t groups = nibbles ? a->dim / GROUP : 1, words = nibbles ? GROUP / 4 : a->dim / 4;
    __m512i high[4][2], low[4][2];
    __m512 sum[4][2] = {{_mm512_setzero_ps()}};
    for (size_t g = 0; g < groups; g++, strip += words * STRIP) {
        UNROLL
        for (size_t i = 0; i < rows; i++)
            UNROLL
            for (int h = 0; h < 2; h++) {
                high[i][h] = _mm512_set1_epi32(nibbles ? 0 : a->bias[2 * (r + i)]);
                low[i][h] = _mm512_set1_epi32(nibbles ? 0 : a->bias[2 * (r + i) + 1]);
            }
        const int8_t *q_high = a->high + r * a->dim + g * GROUP, *q_low = a->low + r * a->dim + g * GROUP;
        for (size_t w = 0; w < words; w++) {
            const __m512i k0 = _mm512_load_si512(strip + w * STRIP), k1 = _mm512_load_si512(strip + w * STRIP + 16);
            if (r == 0) fetch_some(next);
            UNROLL
            for (size_t i = 0; i < rows; i++) {
                const __m512i qh = dword(q_high + i * a->dim + 4 * w), ql = dword(q_low + i * a->dim + 4 * w);
                add_products(&high[i][0], k0, qh);
                add_products(&high[i][1], k1, qh);
                add_products(&low[i][0], k0, ql);
                add_products(&low[i][1], k1, ql);
            }
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            const size_t t = base + 16 * (size_t)h;
            const __mmask16 here = below(t, k->count);
            if (!nibbles) {
                const __m512 scale = _mm512_maskz_loadu_ps(here, k->scales + 4 * t);
                UNROLL
                for (size_t i = 0; i < rows; i++) sum[i][h] = _mm512_mul_ps(joined(high[i][h], low[i][h]), scale);
                continue;
            }
            const __m512 step = wide_steps(k->scales + g * k->group_step + t, here);
            const __m512 bottom = wide_lows(k->lows + g * k->group_step + t, here);
            UNROLL
            for (size_t i = 0; i < rows; i++) {
                const __m512 codes = joined(high[i][h], low[i][h]);
                const __m512 all = _mm512_fmadd_ps(bottom, _mm512_set1_ps(a->sums[(r + i) * groups + g]), codes);
                sum[i][h] = g ? _mm512_fmadd_ps(all, step, sum[i][h]) : _mm512_mul_ps(all, step);
            }
        }
    }
    UNROLL
    for (size_t i = 0; i < rows; i++)
        UNROLL
        for (int h = 0; h < 2; h++)
            _mm512_store_ps(s + (r + i) * TILE + base + 16 * h, _mm512_mul_ps(sum[i][h], _mm512_set1_ps(a->step[r + i])));
}

ALWAYS void float_scores(float *s, const ctx_queries *a, size_t r, const size_t rows, const float *strip, fetch *next) {
    __m512 sum[6][2];
    UNROLL
    for (size_t i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    const float *q = a->q + r * a->dim;
    for (size_t d = 0; d < a->dim; d++) {
        const __m512 k0 = _mm512_load_ps(strip + d * STRIP), k1 = _mm512_load_ps(strip + d * STRIP + 16);
        if (r == 0) fetch_some(next);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            const __m512 of = _mm512_set1_ps(q[i * a->dim + d]);
            sum[i][0] = _mm512_fmadd_ps(k0, of, sum[i][0]);
            sum[i][1] = _mm512_fmadd_ps(k1, of, sum[i][1]);
        }
    }
    put_scores(s, a, r, rows, sum);
}

static void scores(const ctx_queries *a, const ctx_rows *k, float *s, uint8_t *room) {
    if (a->pairs && k->format == CTX_ROWS_BF16) {
        for (size_t base = 0; base < k->count; base += STRIP) {
            turn_bytes((uint32_t *)(void *)room, k, base, 2 * a->dim, AS_WORDS);
#define WORD_SCORES(r, n) pair_scores(s + base, a, r, n, (const uint32_t *)(const void *)room)
            BY_SIXES(a->rows, WORD_SCORES)
        }
        return;
    }
    fetch next = fetch_of(k, (k->count + STRIP - 1) / STRIP * (k->format < CTX_ROWS_INT8 ? a->dim : a->dim / 4));
    for (size_t base = 0; base < k->count; base += STRIP) {
        if (k->format == CTX_ROWS_INT8) {
            turn_bytes((uint32_t *)(void *)room, k, base, a->dim, AS_BYTES);
#define BYTES(r, n) byte_scores(s, a, r, n, (const uint32_t *)(const void *)room, k, base, &next, 0)
            BY_FOURS(a->rows, BYTES)
        } else if (k->format == CTX_ROWS_INT4) {
            turn_bytes((uint32_t *)(void *)room, k, base, a->dim / 2, AS_NIBBLES);
#define NIBBLES(r, n) byte_scores(s, a, r, n, (const uint32_t *)(const void *)room, k, base, &next, 1)
            BY_FOURS(a->rows, NIBBLES)
        } else {
            turn_floats((float *)(void *)room, k, base, a->dim);
#define FLOATS(r, n) float_scores(s + base, a, r, n, (const float *)(const void *)room, &next)
            BY_SIXES(a->rows, FLOATS)
        }
    }
}

/* ---- Weights ------------------------------------------------------------------------------------------------------ */

static inline __m512 power16(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440266574e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357674640e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332471162809e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264791363012e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028550421e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-125), _CMP_NLT_UQ), y, n); /* NaN stays */
}

static float weights(float *s, size_t n, float *m, float *l) {
    __m512 top = _mm512_set1_ps(*m), sum = _mm512_setzero_ps();
    for (size_t t = 0; t < n; t += 16) top = _mm512_max_ps(_mm512_load_ps(s + t), top);
    const float highest = _mm512_reduce_max_ps(top), from = highest == -INFINITY ? 0 : highest;
    for (size_t t = 0; t < n; t += 16) {
        const __m512 p = power16(_mm512_sub_ps(_mm512_load_ps(s + t), _mm512_set1_ps(from)));
        _mm512_store_ps(s + t, p);
        sum = _mm512_add_ps(sum, p);
    }
    const float factor = *m == highest ? 1 : exp2f(*m - highest);
    *l = *l * factor + _mm512_reduce_add_ps(sum);
    *m = highest;
    return factor;
}

/* ---- Values ------------------------------------------------------------------------------------------------------- */

ALWAYS void float_values(float *o, const float *s, const float *factor, const size_t rows, const size_t width, size_t dim,
                         const uint8_t *v, size_t step, size_t count, fetch *next) {
    __m512 sum[6][4];
    take_sums(sum, o, factor, rows, width, dim);
    for (size_t t = 0; t < count; t++, v += step) {
        __m512 of[4];
        UNROLL
        for (size_t w = 0; w < width; w++) of[w] = _mm512_loadu_ps(v + 64 * w);
        fetch_some(next);
        UNROLL
        for (size_t i = 0; i < rows; i++)
            UNROLL
            for (size_t w = 0; w < width; w++) sum[i][w] = _mm512_fmadd_ps(of[w], _mm512_set1_ps(s[i * TILE + t]), sum[i][w]);
    }
    put_sums(o, sum, rows, width, dim);
}

ALWAYS void float_rows(float *o, const float *s, const float *factor, const size_t rows, size_t dim, const uint8_t *v, size_t step,
                       size_t count, fetch next) {
    size_t d = 0;
    for (; d + 64 <= dim; d += 64) float_values(o + d, s, factor, rows, 4, dim, v + 4 * d, step, count, &next);
    for (; d < dim; d += 16) float_values(o + d, s, factor, rows, 1, dim, v + 4 * d, step, count, &next);
}

/* 128 weights times scales as 16-bit integers of their largest: 32 words of four tokens' high bytes, of low ones. */
ALWAYS float weigh(__m512i high[2], __m512i low[2], const float *s, const ctx_rows *v, const uint8_t *scales, const int nibbles) {
    /* Packing leaves the words of a 128-bit lane 4 words apart. */
    const __m512i order_of = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 p[TILE / 16], peak = _mm512_setzero_ps();
    for (size_t i = 0; i < TILE / 16; i++) {
        const __mmask16 here = below(16 * i, v->count);
        const __m512 scale = nibbles ? wide_steps(scales + 16 * i, here) : _mm512_maskz_loadu_ps(here, scales + 64 * i);
        p[i] = _mm512_maskz_mul_ps(here, _mm512_load_ps(s + 16 * i), scale);
        peak = _mm512_max_ps(p[i], peak);
    }
    const float size = _mm512_reduce_max_ps(peak), inverse = size > 1e-30f ? 65535 / size : 0;
    const __m512 by = _mm512_set1_ps(inverse);
    UNROLL
    for (int h = 0; h < 2; h++) {
        __m512i n[4];
        UNROLL
        for (int i = 0; i < 4; i++) n[i] = _mm512_cvtps_epi32(_mm512_mul_ps(p[4 * h + i], by));
        const __m512i a = _mm512_packus_epi32(n[0], n[1]), b = _mm512_packus_epi32(n[2], n[3]), mask = _mm512_set1_epi16(255);
        const __m512i tops = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        const __m512i ends = _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
        high[h] = _mm512_permutexvar_epi32(order_of, tops);
        low[h] = _mm512_permutexvar_epi32(order_of, ends);
    }
    return inverse > 0 ? size / 65535 : size > 0 ? 0 : size; /* NaN goes on */
}

static inline void add_to(float *o, __m512 x, float unit, float factor, __mmask16 mask) {
    const __m512 before = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, o), _mm512_set1_ps(factor));
    _mm512_mask_storeu_ps(o, mask, _mm512_fmadd_ps(x, _mm512_set1_ps(unit), before));
}

/* `rows` (to 3) query rows over a tile of int8: `tile` is [quads][blocks of 64][4 registers]. */
ALWAYS void byte_values(float *o, const float *s, const float *factor, const size_t rows, size_t dim, const ctx_rows *v,
                        const __m512i *tile, uint32_t *words, int first) {
    const size_t quads = (v->count + 3) / 4, blocks = (dim + 63) / 64;
    fetch next = first ? fetch_of(v, quads * blocks) : (fetch){0, 0};
    float unit[3];
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        __m512i high[2], low[2];
        unit[i] = weigh(high, low, s + i * TILE, v, v->scales, 0);
        UNROLL
        for (int h = 0; h < 2; h++) {
            _mm512_store_si512(words + i * 64 + 16 * h, high[h]);
            _mm512_store_si512(words + i * 64 + 32 + 16 * h, low[h]);
        }
    }
    for (size_t b = 0; b < blocks; b++) {
        __m512i high[3][4], low[3][4];
        UNROLL
        for (size_t i = 0; i < rows; i++)
            UNROLL
            for (int w = 0; w < 4; w++) high[i][w] = low[i][w] = _mm512_setzero_si512();
        for (size_t t = 0; t < quads; t++) {
            const __m512i *of = tile + (t * blocks + b) * 4;
            fetch_some(&next);
            UNROLL
            for (size_t i = 0; i < rows; i++) {
                const __m512i ph = dword(words + i * 64 + t), pl = dword(words + i * 64 + 32 + t);
                UNROLL
                for (int w = 0; w < 4; w++) {
                    add_products(&high[i][w], ph, of[w]);
                    add_products(&low[i][w], pl, of[w]);
                }
            }
        }
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            __m512 x[4];
            UNROLL
            for (int w = 0; w < 4; w++) x[w] = joined(high[i][w], low[i][w]);
            lanes_in_order(x);
            UNROLL
            for (size_t w = 0; w < 4; w++)
                add_to(o + i * dim + b * 64 + 16 * w, x[w], unit[i], factor[i], below(b * 64 + 16 * w, dim));
        }
    }
}

/* A quad's words for the groups in a register of V: each 128 bits have their own. */
static inline __m512i spread(const uint32_t *words) {
    const __m512i order_of = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_epi32(order_of, _mm512_castsi128_si512(_mm_load_si128((const void *)words)));
}

/* `rows` (to 3) query rows over a tile of int4: its low nibbles, then its high ones. A register of V holds 4 lanes: groups of
 * one quad, or of the next ones. */
ALWAYS void nibble_values(float *o, const float *s, const float *factor, const size_t rows, size_t dim, const ctx_rows *v,
                          const __m512i *tile, uint32_t *words, int first) {
    const size_t groups = dim / GROUP, width = groups < 3 ? groups : 4, across = 4 / width; /* quads in a register */
    const size_t steps = ((v->count + 3) / 4 + across - 1) / across, blocks = (groups + 3) / 4;
    fetch next = first ? fetch_of(v, steps * blocks * 2) : (fetch){0, 0};
    for (size_t b = 0; b < blocks; b++) {
        const size_t here = groups - 4 * b < 4 ? groups - 4 * b : 4;
        float unit[3][4], lows[3][4];
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            __m512i high[4][2], low[4][2];
            for (size_t g = 0; g < 4; g++) high[g][0] = high[g][1] = low[g][0] = low[g][1] = _mm512_setzero_si512();
            for (size_t g = 0; g < here; g++) {
                const size_t at = (4 * b + g) * v->group_step;
                unit[i][g] = weigh(high[g], low[g], s + i * TILE, v, v->scales + at, 1);
                __m512 sum = _mm512_setzero_ps();
                for (size_t t = 0; t < v->count; t += 16) {
                    const __mmask16 some = below(t, v->count);
                    const __m512 base = _mm512_mul_ps(wide_steps(v->scales + at + t, some), wide_lows(v->lows + at + t, some));
                    sum = _mm512_fmadd_ps(_mm512_load_ps(s + i * TILE + t), base, sum);
                }
                lows[i][g] = _mm512_reduce_add_ps(sum);
            }
            interleave_words(words + i * 256, high, width);
            interleave_words(words + i * 256 + 128, low, width);
        }
        UNROLL
        for (size_t half = 0; half < 2; half++) {
            const __m512i mask = _mm512_set1_epi8(15);
            __m512i high[3][4], low[3][4];
            UNROLL
            for (size_t i = 0; i < rows; i++)
                UNROLL
                for (size_t w = 0; w < 4; w++) high[i][w] = low[i][w] = _mm512_setzero_si512();
            for (size_t t = 0; t < steps; t++) {
                __m512i of[4];
                UNROLL
                for (size_t w = 0; w < 4; w++) {
                    const __m512i both = tile[(t * blocks + b) * 4 + w];
                    of[w] = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, mask);
                }
                fetch_some(&next);
                UNROLL
                for (size_t i = 0; i < rows; i++) {
                    const __m512i ph = spread(words + i * 256 + 4 * t), pl = spread(words + i * 256 + 128 + 4 * t);
                    UNROLL
                    for (size_t w = 0; w < 4; w++) {
                        add_products(&high[i][w], ph, of[w]);
                        add_products(&low[i][w], pl, of[w]);
                    }
                }
            }
            UNROLL
            for (size_t i = 0; i < rows; i++) {
                __m512 x[4];
                UNROLL
                for (size_t w = 0; w < 4; w++) x[w] = joined(high[i][w], low[i][w]);
                lanes_in_order(x);
                if (width == 2) x[0] = _mm512_add_ps(x[0], x[2]), x[1] = _mm512_add_ps(x[1], x[3]);
                if (width == 1) x[0] = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
                UNROLL
                for (size_t g = 0; g < 4; g++) {
                    if (g >= here) continue;
                    float *to = o + i * dim + (4 * b + g) * GROUP + 16 * half;
                    const __m512 before = _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(factor[i]), _mm512_set1_ps(lows[i][g]));
                    _mm512_storeu_ps(to, _mm512_fmadd_ps(x[g], _mm512_set1_ps(unit[i][g]), before));
                }
            }
        }
    }
}

static void values(float *o, float *s, const float *factor, size_t rows, size_t dim, const ctx_rows *v, uint8_t *room) {
    if (v->rounded && v->format == CTX_ROWS_BF16) {
        values_by_pairs(o, s, factor, rows, dim, v, (uint32_t *)(void *)room);
        return;
    }
    uint32_t *words = (uint32_t *)(void *)(room + CTX_ATTEND_TILE * ((dim + 63) / 64 * 64) * sizeof(float));
    const __m512i *tile = (const __m512i *)(const void *)room;
    if (v->format == CTX_ROWS_INT8) {
        interleave_bytes((__m512i *)(void *)room, v, dim, 1);
#define BYTE_ROWS(r, n) byte_values(o + r * dim, s + r * TILE, factor + r, n, dim, v, tile, words, r == 0)
        BY_THREES(rows, BYTE_ROWS)
        return;
    }
    if (v->format == CTX_ROWS_INT4) {
        const size_t groups = dim / GROUP;
        interleave_bytes((__m512i *)(void *)room, v, dim / 2, groups < 3 ? 4 / groups : 1);
#define NIBBLE_ROWS(r, n) nibble_values(o + r * dim, s + r * TILE, factor + r, n, dim, v, tile, words, r == 0)
        BY_THREES(rows, NIBBLE_ROWS)
        return;
    }
    const uint8_t *at = v->at;
    size_t step = v->step;
    if (v->format != CTX_ROWS_FP32) {
        for (size_t t = 0; t < v->count; t++)
            for (size_t d = 0; d < dim; d += 16)
                _mm512_store_ps((float *)(void *)room + t * dim + d, sixteen(v->format, v->at + t * v->step + 2 * d));
        at = room, step = dim * sizeof(float);
    }
    const fetch next = fetch_of(v, v->count * (dim / 64 + dim % 64 / 16)), none = {0, 0};
#define FLOAT_ROWS(r, n) float_rows(o + r * dim, s + r * TILE, factor + r, n, dim, at, step, v->count, r ? none : next)
    BY_SIXES(rows, FLOAT_ROWS)
}
