/* rans/avx512.c - entropy coding with 64 lanes in four registers; needs VBMI (byte permutes) and VBMI2 (expand, compress).
 *
 * A state is two words, high and low, of 32 lanes in a register each. That makes renormalisation three instructions
 * (is the high word zero; low becomes high; expand words from the stream into low) and lets 16-bit multiplications do all
 * arithmetic. Streams take turns, because one waits for itself: a step's lookups need the words of the step before. Four
 * decode 1.25 times as fast as two (Zen 4: 5.1 to 6.5 G symbols/s); encoders keep more, and two at once fill the machine.
 */
#include <immintrin.h>

#include "scalar.h"

typedef struct state {
    __m512i high[2], low[2]; /* lanes 0-31, lanes 32-63 */
} state;

#define SELECT 0xca /* ternary logic: a ? b : c */

static inline __m512i load(const void *at) { return _mm512_loadu_si512(at); }

static inline void put_state(const state *s, uint32_t x[64]) {
    uint16_t high[64], low[64];
    for (int i = 0; i < 2; i++) {
        _mm512_storeu_si512(high + 32 * i, s->high[i]);
        _mm512_storeu_si512(low + 32 * i, s->low[i]);
    }
    for (int lane = 0; lane < CTX_RANS_LANES; lane++) x[lane] = (uint32_t)high[lane] << 16 | low[lane];
}

static inline void get_state(state *s, const void *x) {
    for (int i = 0; i < 2; i++) {
        const __m512i a = load((const uint8_t *)x + 128 * i), b = load((const uint8_t *)x + 128 * i + 64);
        const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                              24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        s->low[i] = _mm512_permutex2var_epi16(a, even, b);
        s->high[i] = _mm512_permutex2var_epi16(a, _mm512_or_si512(even, _mm512_set1_epi16(1)), b);
    }
}

/* ---- Decoding --------------------------------------------------------------------------------------------------- */

/* x = freq * (x >> 8) + bias, then the next words for lanes below 2^16. Returns how many. */
static inline unsigned advance(__m512i *high, __m512i *low, __m512i freq, __m512i bias, const uint8_t *word) {
    const __m512i shifted = _mm512_shldi_epi16(*high, *low, 8);
    const __m512i l = _mm512_add_epi16(_mm512_mullo_epi16(shifted, freq), bias);
    const __mmask32 carry = _mm512_cmplt_epu16_mask(l, bias);
    __m512i h = _mm512_add_epi16(_mm512_mulhi_epu16(shifted, freq), _mm512_mullo_epi16(_mm512_srli_epi16(*high, 8), freq));
    h = _mm512_mask_sub_epi16(h, carry, h, _mm512_set1_epi16(-1));
    const __mmask32 small = _mm512_testn_epi16_mask(h, h);
    *high = _mm512_mask_mov_epi16(h, small, l);
    *low = _mm512_mask_expand_epi16(l, small, load(word));
    return (unsigned)_mm_popcnt_u32(small);
}

static inline __attribute__((always_inline)) void decode_step(state *s, const uint8_t **word, const ctx_rans_tables *tables,
                                                              size_t table, uint8_t *symbols) {
    const ctx_rans_table *t = &tables->at[table];
    const __m512i byte = _mm512_set1_epi16(0x00ff);
    /* Slots of lane i and lane 32 + i side by side. */
    const __m512i slots = _mm512_ternarylogic_epi32(byte, s->low[0], _mm512_slli_epi16(s->low[1], 8), SELECT);
    const __m512i below = _mm512_permutex2var_epi8(load(t->symbol), slots, load(t->symbol + 64));
    const __m512i above = _mm512_permutex2var_epi8(load(t->symbol + 128), slots, load(t->symbol + 192));
    const __m512i symbol = _mm512_mask_mov_epi8(below, _mm512_movepi8_mask(slots), above);
    const __m512i freq = _mm512_permutexvar_epi8(symbol, _mm512_broadcast_i64x4(_mm256_load_si256((const void *)t->freq)));
    const __m512i cum = _mm512_permutexvar_epi8(symbol, _mm512_broadcast_i64x4(_mm256_load_si256((const void *)t->cum)));
    const __m512i bias = _mm512_sub_epi8(slots, cum);
    const __m512i order = _mm512_set_epi8(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                          21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42,
                                          40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    _mm512_storeu_si512(symbols, _mm512_permutexvar_epi8(order, symbol));
    *word += 2 * advance(&s->high[0], &s->low[0], _mm512_and_si512(freq, byte), _mm512_and_si512(bias, byte), *word);
    *word += 2 * advance(&s->high[1], &s->low[1], _mm512_srli_epi16(freq, 8), _mm512_srli_epi16(bias, 8), *word);
}

/* ---- Encoding --------------------------------------------------------------------------------------------------- */

/* Indices that move the first n words of a register to its end: 32 from ALIGN + n on. */
static const uint16_t ALIGN[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
};

/* What was encoded, so that a symbol without a code is noticed once a stream. */
typedef struct seen {
    __m512i symbols, thresholds; /* ORs of words */
} seen;

static inline void seen_none(seen *checked) { checked->symbols = checked->thresholds = _mm512_setzero_si512(); }

static inline int seen_bad(const seen *checked) {
    return _mm512_test_epi16_mask(checked->symbols, _mm512_set1_epi16(0x00e0)) ||
           _mm512_test_epi16_mask(checked->thresholds, _mm512_set1_epi16(CTX_RANS_ABSENT));
}

/* What the symbols of 32 lanes want to know. */
typedef struct entries {
    __m512i threshold, reciprocal, rest;
    __mmask32 over_one, down;
} entries;

/* One digit of a division: 256 q of the quotient q, and what the dividend is beyond freq * q, in one word: adding q times
 * 256 - freq to the dividend does both. */
static inline __attribute__((always_inline)) __m512i times(__m512i dividend, const entries *e, int careful) {
    __m512i raised = dividend;
    if (careful) raised = _mm512_mask_add_epi16(dividend, e->down, dividend, _mm512_set1_epi16(1));
    /* A dividend by 1 is its own quotient. */
    const __m512i product = _mm512_mask_mulhi_epu16(dividend, e->over_one, raised, e->reciprocal);
    const __m512i quotient = _mm512_shrdv_epi16(product, _mm512_setzero_si512(), e->threshold);
    return _mm512_mullo_epi16(quotient, e->rest);
}

#define BOTH for (int i = 0; i < 2; i++)

/* Emit words of lanes that would overflow, then x = x / freq << 8 | x % freq + cum, by long division in bytes. The halves
 * go side by side, since what waits in one leaves the machine to the other. */
static inline __attribute__((always_inline)) uint8_t *put_symbols(state *s, const ctx_rans_table *t, const uint8_t *symbols,
                                                                  uint8_t *word, seen *checked, int careful) {
    const __m512i byte = _mm512_set1_epi16(0x00ff);
    __m512i symbol[2], low[2], two[2], one[2], last[2];
    __mmask32 kept[2], full[2];
    entries e[2];
    BOTH symbol[i] = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(symbols + 32 * i)));
    BOTH e[i].reciprocal = _mm512_permutexvar_epi16(symbol[i], load(t->reciprocal));
    BOTH e[i].over_one = _mm512_movepi16_mask(e[i].reciprocal);
    BOTH e[i].threshold = _mm512_permutexvar_epi16(symbol[i], load(t->threshold));
    BOTH e[i].down = careful ? _mm512_test_epi16_mask(e[i].threshold, _mm512_set1_epi16(CTX_RANS_DOWN)) : 0;
    BOTH e[i].rest = _mm512_permutexvar_epi16(symbol[i], load(t->rest));
    checked->symbols = _mm512_ternarylogic_epi32(checked->symbols, symbol[0], symbol[1], 0xfe);
    checked->thresholds = _mm512_ternarylogic_epi32(checked->thresholds, e[0].threshold, e[1].threshold, 0xfe);
    BOTH kept[i] = _mm512_cmplt_epu16_mask(_mm512_or_si512(s->high[i], byte), e[i].threshold);
    BOTH full[i] = _knot_mask32(kept[i]);
    BOTH low[i] = _mm512_mask_mov_epi16(s->high[i], kept[i], s->low[i]);
    BOTH two[i] = _mm512_maskz_add_epi16(kept[i], s->high[i], times(s->high[i], &e[i], careful));
    BOTH one[i] = _mm512_shldi_epi16(two[i], low[i], 8);
    BOTH one[i] = _mm512_add_epi16(one[i], times(one[i], &e[i], careful));
    for (int i = 1; i >= 0; i--) { /* lane 63 is written first */
        const unsigned n = (unsigned)_mm_popcnt_u32(full[i]);
        const __m512i words = _mm512_maskz_compress_epi16(full[i], s->low[i]);
        _mm512_storeu_si512(word - 64, _mm512_permutexvar_epi16(load(ALIGN + n), words));
        word -= 2 * n;
    }
    BOTH s->high[i] = _mm512_ternarylogic_epi32(byte, _mm512_srli_epi16(one[i], 8), two[i], SELECT);
    BOTH last[i] = _mm512_shldi_epi16(one[i], _mm512_slli_epi16(low[i], 8), 8);
    BOTH s->low[i] = _mm512_add_epi16(_mm512_add_epi16(last[i], _mm512_permutexvar_epi16(symbol[i], load(t->start))),
                                      times(last[i], &e[i], careful));
    return word;
}

static inline __attribute__((always_inline)) void encode_step(state *s, seen *checked, uint8_t **word,
                                                              const ctx_rans_tables *tables, size_t table,
                                                              const uint8_t *symbols) {
    if (__builtin_expect(tables->down[table], 0))
        *word = put_symbols(s, &tables->at[table], symbols, *word, checked, 1);
    else
        *word = put_symbols(s, &tables->at[table], symbols, *word, checked, 0);
}

static uint8_t count_run(const uint8_t *symbols, size_t n, uint32_t counts[32]) {
    __m512i most = _mm512_setzero_si512(), together = most;
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        together = _mm512_or_si512(together, load(symbols + i));
        most = _mm512_max_epu8(most, load(symbols + i));
    }
    uint8_t all[64], highest[64], last = 0, rest = rans_count_scalar(symbols + i, n - i, counts);
    _mm512_storeu_si512(all, together);
    _mm512_storeu_si512(highest, most);
    for (int j = 0; j < 64; j++) rest |= all[j], last = highest[j] > last ? highest[j] : last;
    for (uint8_t s = 0; s <= last && s < CTX_RANS_SYMBOLS; s++) {
        const __m512i one = _mm512_set1_epi8((char)s);
        uint64_t sum = 0;
        for (size_t at = 0; at < i; at += 64) sum += (uint64_t)_mm_popcnt_u64(_mm512_cmpeq_epi8_mask(load(symbols + at), one));
        counts[s] += (uint32_t)sum;
    }
    return rest;
}

#define PAIRS
#define CODER ctx_rans_avx512
#include "loops.inc"
