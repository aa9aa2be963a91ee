/* lossless/avx2.c - lossless packing with AVX2 and BMI2: a step's 64 values are two registers of upper bytes, two of lower. */
#include <immintrin.h>

#include "steps.h"

typedef struct half { /* 32 lanes */
    __m256i high, low; /* bytes of the upper halves */
    __m256i under[2];  /* the lower halves of fp32 */
} half;

static inline __m256i load(const void *at) { return _mm256_loadu_si256(at); }
static inline void store(void *at, __m256i x) { _mm256_storeu_si256(at, x); }
static inline __m256i bytes(int x) { return _mm256_set1_epi8((char)x); }
static inline __m256i in_order(__m256i x) { return _mm256_permute4x64_epi64(x, 0xd8); }
INLINE uint64_t bits_of(const __m256i x[2]) {
    return (uint32_t)_mm256_movemask_epi8(x[0]) | (uint64_t)(uint32_t)_mm256_movemask_epi8(x[1]) << 32;
}

/* 0xff where a bit is set. */
INLINE __m256i spread(uint32_t bits) {
    const __m256i byte = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3,
                                          3, 3);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), byte), bit), bit);
}

/* Shifts of bytes, for which there are none. */
INLINE __m256i up(__m256i x, int n) { return _mm256_and_si256(_mm256_slli_epi16(x, n), bytes(0xff << n)); }
INLINE __m256i down(__m256i x, int n) { return _mm256_and_si256(_mm256_srli_epi16(x, n), bytes(0xff >> n)); }

INLINE half load_half(ctx_dtype dtype, const uint8_t *values) {
    const __m256i byte = _mm256_set1_epi16(0xff), word = _mm256_set1_epi32(0xffff);
    __m256i a = load(values), b = load(values + 32);
    half h = {.under = {_mm256_setzero_si256(), _mm256_setzero_si256()}};
    if (dtype == CTX_FP32) {
        const __m256i c = load(values + 64), d = load(values + 96);
        h.under[0] = in_order(_mm256_packus_epi32(_mm256_and_si256(a, word), _mm256_and_si256(b, word)));
        h.under[1] = in_order(_mm256_packus_epi32(_mm256_and_si256(c, word), _mm256_and_si256(d, word)));
        a = in_order(_mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)));
        b = in_order(_mm256_packus_epi32(_mm256_srli_epi32(c, 16), _mm256_srli_epi32(d, 16)));
    }
    h.low = in_order(_mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte)));
    h.high = in_order(_mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)));
    return h;
}

INLINE __m256i exponent_of(ctx_dtype dtype, const half *h) {
    if (dtype == CTX_FP16) return _mm256_and_si256(_mm256_srli_epi16(h->high, 2), bytes(31));
    return _mm256_or_si256(_mm256_add_epi8(h->high, h->high), down(h->low, 7));
}

INLINE __m256i first_of(ctx_dtype dtype, const half *h) {
    const __m256i bit = bytes(dtype == CTX_FP16 ? 2 : 0x40);
    return _mm256_cmpeq_epi8(_mm256_and_si256(dtype == CTX_FP16 ? h->high : h->low, bit), bit);
}

INLINE __m256i symbol_of(__m256i exponent, __m256i first, __m256i high, uint8_t top, uint8_t flip, __m256i *escaped) {
    const __m256i below = _mm256_sub_epi8(bytes(top), exponent), twice = _mm256_add_epi8(below, below);
    const __m256i coarse = _mm256_min_epu8(_mm256_adds_epu8(below, bytes(FINE)), bytes(ESCAPE));
    const __m256i fine = _mm256_add_epi8(twice, _mm256_add_epi8(first, bytes(1)));
    const __m256i is_fine = _mm256_cmpeq_epi8(_mm256_min_epu8(below, bytes(FINE - 1)), below);
    const __m256i level = _mm256_blendv_epi8(coarse, fine, is_fine);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(_mm256_xor_si256(high, bytes(flip << 7)), 3), bytes(16));
    *escaped = _mm256_cmpeq_epi8(level, bytes(ESCAPE));
    return _mm256_or_si256(level, _mm256_andnot_si256(*escaped, sign));
}

/* ---- Choosing --------------------------------------------------------------------------------------------------- */

INLINE uint8_t highest(__m256i x) {
    const __m128i a = _mm_max_epu8(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i pairs = _mm_and_si128(_mm_max_epu8(a, _mm_srli_epi16(a, 8)), _mm_set1_epi16(255));
    return (uint8_t)(255 - _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(255), pairs))));
}

/* Add what a step's symbols cost to each class: a row of costs is two registers. */
INLINE void add_costs(const ctx_lossless_model *model, const __m256i symbol[2], uint32_t sum[CTX_LOSSLESS_CLASSES]) {
    uint8_t held[LANES];
    uint16_t all[CTX_LOSSLESS_CLASSES];
    __m256i part[4];
    for (int i = 0; i < 4; i++) part[i] = _mm256_setzero_si256();
    store(held, symbol[0]);
    store(held + 32, symbol[1]);
    for (int i = 0; i < LANES; i += SAMPLED) {
        const uint16_t *row = model->cost[held[i]];
        part[i % 4] = _mm256_add_epi16(part[i % 4], load(row));
        part[i % 4 + 1] = _mm256_add_epi16(part[i % 4 + 1], load(row + 16));
    }
    store(all, _mm256_add_epi16(part[0], part[2]));
    store(all + 16, _mm256_add_epi16(part[1], part[3]));
    for (int c = 0; c < CTX_LOSSLESS_CLASSES; c++) sum[c] += all[c];
}

INLINE uint8_t cheapest(const uint32_t sum[CTX_LOSSLESS_CLASSES]) {
    uint32_t least = sum[0];
    uint8_t found = 0;
    for (int c = 1; c < CTX_LOSSLESS_CLASSES; c++) least = sum[c] < least ? sum[c] : least;
    while (sum[found] != least) found++;
    return found;
}

INLINE void choose_one(const ctx_lossless_model *model, const ctx_lossless_steps *s, ctx_dtype dtype, size_t row) {
    const size_t stride = 32 * ctx_dtype_bytes(dtype), sampled = sampled_steps(s);
    const uint8_t *values = s->values + row * s->steps_per_row * 2 * stride;
    __m256i most = _mm256_setzero_si256(), symbol[2], escaped[2];
    uint32_t sum[CTX_LOSSLESS_CLASSES] = {0};
    uint8_t flip = 0;
    for (size_t i = 0; i < 2 * s->steps_per_row; i++) {
        const half h = load_half(dtype, values + i * stride);
        most = _mm256_max_epu8(most, exponent_of(dtype, &h));
    }
    const uint8_t top = highest(most);
    for (size_t i = 0; i < sampled; i++) {
        for (int j = 0; j < 2; j++) {
            const half h = load_half(dtype, values + (2 * i + (size_t)j) * stride);
            symbol[j] = symbol_of(exponent_of(dtype, &h), first_of(dtype, &h), h.high, top, flip, &escaped[j]);
        }
        if (i == 0) {
            const __m256i negative[2] = {_mm256_slli_epi16(symbol[0], 3), _mm256_slli_epi16(symbol[1], 3)};
            flip = 2 * _mm_popcnt_u64(bits_of(negative)) > _mm_popcnt_u64(~bits_of(escaped));
            for (int j = 0; flip && j < 2; j++)
                symbol[j] = _mm256_xor_si256(symbol[j], _mm256_andnot_si256(escaped[j], bytes(16)));
        }
        add_costs(model, symbol, sum);
    }
    s->top[row] = top;
    s->flip[row] = flip;
    s->class_of[row] = cheapest(sum);
}

static void choose(const ctx_lossless_model *model, const ctx_lossless_steps *s) {
#define CHOOSE(dtype) \
    for (size_t row = 0; row < s->rows; row++) choose_one(model, s, dtype, row)
    PER_DTYPE(CHOOSE);
}

/* ---- Splitting -------------------------------------------------------------------------------------------------- */

INLINE void store_low(ctx_dtype dtype, const half h[2], uint8_t *low) {
    if (dtype == CTX_FP16) {
        const __m256i ninth[2] = {_mm256_slli_epi16(h[0].high, 7), _mm256_slli_epi16(h[1].high, 7)};
        store(low, h[0].low);
        store(low + 32, h[1].low);
        put_le64(low + 64, bits_of(ninth));
        return;
    }
    const __m256i six[2] = {_mm256_and_si256(h[0].low, bytes(63)), _mm256_and_si256(h[1].low, bytes(63))};
    const __m128i last = _mm256_extracti128_si256(six[1], 1), two = _mm_set1_epi8((char)0xc0);
    const __m128i a = _mm_and_si128(_mm_slli_epi16(last, 6), two), b = _mm_and_si128(_mm_slli_epi16(last, 4), two);
    store(low, _mm256_or_si256(six[0], _mm256_set_m128i(b, a)));
    const __m128i c = _mm_and_si128(_mm_slli_epi16(last, 2), two);
    _mm_storeu_si128((void *)(low + 32), _mm_or_si128(_mm256_castsi256_si128(six[1]), c));
    for (int i = 0; dtype == CTX_FP32 && i < 4; i++) store(low + 48 + 32 * i, h[i / 2].under[i % 2]);
}

INLINE void split_one(const ctx_lossless_model *model, ctx_lossless_steps *s, ctx_dtype dtype, size_t step, size_t row) {
    const size_t stride = 32 * ctx_dtype_bytes(dtype);
    const uint8_t *values = s->values + 2 * step * stride;
    const half h[2] = {load_half(dtype, values), load_half(dtype, values + stride)};
    const __m256i has = spread(model->present[s->class_of[row]]);
    const __m256i positive = _mm256_permute2x128_si256(has, has, 0x00), negative = _mm256_permute2x128_si256(has, has, 0x11);
    __m256i exponent[2], first[2], symbol[2], lost[2], coarse[2];
    store_low(dtype, h, s->low + step * ctx_lossless_low_bytes(dtype));
    for (int i = 0; i < 2; i++) {
        exponent[i] = exponent_of(dtype, &h[i]);
        first[i] = first_of(dtype, &h[i]);
        symbol[i] = symbol_of(exponent[i], first[i], h[i].high, s->top[row], s->flip[row], &lost[i]);
        const __m256i there = _mm256_blendv_epi8(_mm256_shuffle_epi8(positive, symbol[i]), _mm256_shuffle_epi8(negative, symbol[i]),
                                                 _mm256_slli_epi16(symbol[i], 3));
        lost[i] = _mm256_or_si256(lost[i], _mm256_cmpeq_epi8(there, _mm256_setzero_si256()));
        symbol[i] = _mm256_blendv_epi8(symbol[i], bytes(ESCAPE), lost[i]);
        coarse[i] = _mm256_cmpgt_epi8(_mm256_and_si256(symbol[i], bytes(15)), bytes(2 * FINE - 1));
        store(s->symbols + step * LANES + 32 * i, symbol[i]);
    }
    uint64_t escaped = bits_of(lost);
    if (escaped) {
        uint8_t held[LANES];
        const __m256i high[2] = {h[0].high, h[1].high};
        const uint64_t sign = bits_of(high);
        store(held, exponent[0]);
        store(held + 32, exponent[1]);
        for (; escaped; escaped &= escaped - 1) {
            const int lane = __builtin_ctzll(escaped);
            s->exponents[s->escapes] = held[lane];
            s->signs[s->escapes++] = (uint8_t)(sign >> lane & 1);
        }
    }
    const uint64_t mask = bits_of(coarse);
    put_bits(s, _pext_u64(bits_of(first), mask), (unsigned)_mm_popcnt_u64(mask));
}

static void split(const ctx_lossless_model *model, ctx_lossless_steps *s) {
    s->bits = s->escapes = 0;
#define SPLIT(dtype)                                   \
    for (size_t row = 0, at = 0; row < s->rows; row++) \
        for (size_t i = 0; i < s->steps_per_row; i++, at++) split_one(model, s, dtype, at, row)
    PER_DTYPE(SPLIT);
}

/* ---- Joining ---------------------------------------------------------------------------------------------------- */

INLINE void load_six(const uint8_t *low, __m256i six[2]) {
    const __m256i both = load(low), more = down(both, 6);
    const __m128i third = _mm_loadu_si128((const void *)(low + 32));
    const __m128i c = _mm_and_si128(_mm_srli_epi16(third, 2), _mm_set1_epi8(0x30));
    const __m128i b = _mm_slli_epi16(_mm256_extracti128_si256(more, 1), 2);
    const __m128i last = _mm_or_si128(_mm256_castsi256_si128(more), _mm_or_si128(b, c));
    six[0] = _mm256_and_si256(both, bytes(63));
    six[1] = _mm256_set_m128i(last, _mm_and_si128(third, _mm_set1_epi8(63)));
}

INLINE void join_half(ctx_dtype dtype, __m256i exponent, __m256i sign, __m256i first, __m256i low, uint32_t ninth,
                      const uint8_t *under, uint8_t *values) {
    __m256i high;
    if (dtype == CTX_FP16) {
        high = _mm256_or_si256(up(_mm256_and_si256(exponent, bytes(31)), 2), _mm256_and_si256(first, bytes(2)));
        high = _mm256_or_si256(high, _mm256_and_si256(spread(ninth), bytes(1)));
    } else {
        low = _mm256_or_si256(low, _mm256_or_si256(up(exponent, 7), _mm256_and_si256(first, bytes(0x40))));
        high = down(exponent, 1);
    }
    low = in_order(low);
    high = in_order(_mm256_or_si256(high, _mm256_and_si256(sign, bytes(0x80))));
    const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    if (dtype != CTX_FP32) {
        store(values, a);
        store(values + 32, b);
        return;
    }
    const __m256i c = in_order(load(under)), d = in_order(load(under + 32)), e = in_order(a), f = in_order(b);
    store(values, _mm256_unpacklo_epi16(c, e));
    store(values + 32, _mm256_unpackhi_epi16(c, e));
    store(values + 64, _mm256_unpacklo_epi16(d, f));
    store(values + 96, _mm256_unpackhi_epi16(d, f));
}

INLINE void join_one(const ctx_lossless_steps *s, ctx_dtype dtype, size_t step, size_t row, size_t *bit, size_t *escape) {
    const uint8_t *low = s->low + step * ctx_lossless_low_bytes(dtype);
    const size_t item = ctx_dtype_bytes(dtype);
    uint8_t *values = s->values + step * LANES * item;
    const __m256i fall = _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9,
                                          10, 11, 12);
    __m256i symbol[2], coarse[2], lost[2], six[2];
    for (int i = 0; i < 2; i++) {
        symbol[i] = load(s->symbols + step * LANES + 32 * i);
        coarse[i] = _mm256_cmpgt_epi8(_mm256_and_si256(symbol[i], bytes(15)), bytes(2 * FINE - 1));
        lost[i] = _mm256_cmpeq_epi8(symbol[i], bytes(ESCAPE));
    }
    const uint64_t mask = bits_of(coarse), known = _pdep_u64(get_bits(s, *bit), mask);
    const uint64_t ninth = dtype == CTX_FP16 ? get64(low + 64) : 0;
    *bit += (size_t)_mm_popcnt_u64(mask);
    if (dtype == CTX_FP16)
        six[0] = load(low), six[1] = load(low + 32);
    else
        load_six(low, six);
    for (int i = 0; i < 2; i++) {
        const __m256i exponent = _mm256_sub_epi8(bytes(s->top[row]), _mm256_shuffle_epi8(fall, symbol[i]));
        const __m256i even = _mm256_cmpeq_epi8(_mm256_and_si256(symbol[i], bytes(1)), _mm256_setzero_si256());
        const __m256i first = _mm256_blendv_epi8(even, spread((uint32_t)(known >> 32 * i)), coarse[i]);
        const __m256i sign = _mm256_xor_si256(_mm256_slli_epi16(symbol[i], 3), bytes(s->flip[row] << 7));
        join_half(dtype, exponent, sign, first, six[i], (uint32_t)(ninth >> 32 * i), low + 48 + 64 * i, values + 32 * item * (size_t)i);
    }
    for (uint64_t escaped = bits_of(lost); escaped; escaped &= escaped - 1) {
        const int bits = mantissa_bits(dtype), widest = dtype == CTX_FP16 ? 31 : 255;
        uint8_t *at = values + (size_t)__builtin_ctzll(escaped) * item + (item - 2);
        put16(at, (uint16_t)(s->signs[*escape] << 15 | (s->exponents[*escape] & widest) << bits | (get16(at) & ((1 << bits) - 1))));
        ++*escape;
    }
}

static void join(const ctx_lossless_steps *s) {
    size_t bit = 0, escape = 0;
#define JOIN(dtype)                                    \
    for (size_t row = 0, at = 0; row < s->rows; row++) \
        for (size_t i = 0; i < s->steps_per_row; i++, at++) join_one(s, dtype, at, row, &bit, &escape)
    PER_DTYPE(JOIN);
}

static void count(const uint8_t *symbols, size_t steps, size_t *bits, size_t *escapes) {
    size_t coarse = 0, escape = 0;
    for (size_t i = 0; i < 2 * steps; i++) {
        const __m256i symbol = load(symbols + 32 * i);
        const __m256i is_coarse = _mm256_cmpgt_epi8(_mm256_and_si256(symbol, bytes(15)), bytes(2 * FINE - 1));
        coarse += (unsigned)_mm_popcnt_u32((uint32_t)_mm256_movemask_epi8(is_coarse));
        escape += (unsigned)_mm_popcnt_u32((uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(symbol, bytes(ESCAPE))));
    }
    *bits = coarse, *escapes = escape;
}

const ctx_lossless_coder ctx_lossless_avx2 = {
    .choose = choose, .split = split, .count = count, .join = join};
