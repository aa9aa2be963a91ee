/* lossless/avx512.c - lossless packing with AVX-512: a step's 64 values are a register of upper bytes and one of lower bytes.
 *
 * Needs VBMI for byte permutes, VBMI2 for escapes, BMI2 for bits that only some lanes have.
 */
#include <immintrin.h>

#include "steps.h"

static inline __m512i load(const void *at) { return _mm512_loadu_si512(at); }
static inline void store(void *at, __m512i x) { _mm512_storeu_si512(at, x); }
static inline __m512i bytes(int x) { return _mm512_set1_epi8((char)x); }
static inline __m512i sixteen(__m128i x) { return _mm512_broadcast_i32x4(x); }

/* Shifts of bytes, for which there are none. */
INLINE __m512i up(__m512i x, int n) { return _mm512_and_si512(_mm512_slli_epi16(x, (unsigned)n), bytes(0xff << n)); }
INLINE __m512i down(__m512i x, int n) { return _mm512_and_si512(_mm512_srli_epi16(x, (unsigned)n), bytes(0xff >> n)); }

typedef struct step {
    __m512i high, low;   /* bytes of the upper halves */
    __m512i under[2];    /* the lower halves of fp32 */
} step;

INLINE step load_step(ctx_dtype dtype, const uint8_t *values) {
    const __m512i even = _mm512_set_epi8(126, 124, 122, 120, 118, 116, 114, 112, 110, 108, 106, 104, 102, 100, 98, 96, 94, 92,
                                         90, 88, 86, 84, 82, 80, 78, 76, 74, 72, 70, 68, 66, 64, 62, 60, 58, 56, 54, 52, 50,
                                         48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6,
                                         4, 2, 0);
    step s = {.under = {_mm512_setzero_si512(), _mm512_setzero_si512()}};
    __m512i a = load(values), b = load(values + 64);
    if (dtype == CTX_FP32) {
        const __m512i words = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                               22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i odd = _mm512_or_si512(words, _mm512_set1_epi16(1)), c = load(values + 128), d = load(values + 192);
        s.under[0] = _mm512_permutex2var_epi16(a, words, b);
        s.under[1] = _mm512_permutex2var_epi16(c, words, d);
        a = _mm512_permutex2var_epi16(a, odd, b);
        b = _mm512_permutex2var_epi16(c, odd, d);
    }
    s.low = _mm512_permutex2var_epi8(a, even, b);
    s.high = _mm512_permutex2var_epi8(a, _mm512_or_si512(even, bytes(1)), b);
    return s;
}

INLINE __m512i exponent_of(ctx_dtype dtype, const step *s) {
    if (dtype == CTX_FP16) return _mm512_and_si512(_mm512_srli_epi16(s->high, 2), bytes(31));
    return _mm512_or_si512(_mm512_add_epi8(s->high, s->high), down(s->low, 7));
}

INLINE __mmask64 first_of(ctx_dtype dtype, const step *s) {
    return dtype == CTX_FP16 ? _mm512_test_epi8_mask(s->high, bytes(2)) : _mm512_test_epi8_mask(s->low, bytes(0x40));
}

/* Levels; those of ESCAPE are in *escaped. */
INLINE __m512i level_of(__m512i exponent, __mmask64 first, uint8_t top, __mmask64 *escaped) {
    const __m512i below = _mm512_sub_epi8(bytes(top), exponent), twice = _mm512_add_epi8(below, below);
    const __m512i coarse = _mm512_min_epu8(_mm512_adds_epu8(below, bytes(FINE)), bytes(ESCAPE));
    const __m512i fine = _mm512_mask_add_epi8(twice, _knot_mask64(first), twice, bytes(1));
    const __m512i level = _mm512_mask_mov_epi8(coarse, _mm512_cmplt_epu8_mask(below, bytes(FINE)), fine);
    *escaped = _mm512_cmpeq_epi8_mask(level, bytes(ESCAPE));
    return level;
}

INLINE __m512i symbol_of(__m512i level, __mmask64 negative) {
    return _mm512_mask_add_epi8(level, negative, level, bytes(16));
}

/* ---- Choosing --------------------------------------------------------------------------------------------------- */

INLINE uint8_t highest(__m512i x) {
    const __m256i a = _mm256_max_epu8(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    const __m128i b = _mm_max_epu8(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    /* The lowest byte of each word's complement: the word's upper byte is at least as small a number after the OR. */
    const __m128i pairs = _mm_max_epu8(b, _mm_srli_epi16(b, 8));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(_mm_and_si128(pairs, _mm_set1_epi16(255)), _mm_set1_epi16(255)));
    return (uint8_t)~_mm_cvtsi128_si32(least);
}

/* Add what a step's sampled symbols cost to each class. A row of costs is a register: adding rows is as fast as counting. */
INLINE void add_costs(const ctx_lossless_model *model, __m512i symbol, __m512i sum[2]) {
    const uint8_t *costs = (const uint8_t *)model->cost;
    uint64_t held[8]; /* symbols by eight: with the scale of an address, rows of 64 bytes */
    __m512i a = _mm512_setzero_si512(), b = a;
    store(held, _mm512_slli_epi16(symbol, 3));
#define ROW(i) load(costs + 8 * (held[i] >> 8 * shift & 255))
#pragma GCC unroll 4
    for (int shift = 0; shift < 8; shift += SAMPLED) {
        a = _mm512_add_epi16(_mm512_add_epi16(a, ROW(0)), _mm512_add_epi16(ROW(2), ROW(4)));
        b = _mm512_add_epi16(_mm512_add_epi16(b, ROW(1)), _mm512_add_epi16(ROW(3), ROW(5)));
        a = _mm512_add_epi16(a, ROW(6));
        b = _mm512_add_epi16(b, ROW(7));
    }
#undef ROW
    const __m512i all = _mm512_add_epi16(a, b);
    sum[0] = _mm512_add_epi32(sum[0], _mm512_cvtepu16_epi32(_mm512_castsi512_si256(all)));
    sum[1] = _mm512_add_epi32(sum[1], _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(all, 1)));
}

/* The first class of the least cost. */
INLINE uint8_t cheapest(const __m512i sum[2]) {
    const __m512i least = _mm512_set1_epi32((int)_mm512_reduce_min_epu32(_mm512_min_epu32(sum[0], sum[1])));
    const uint32_t low = _mm512_cmpeq_epi32_mask(sum[0], least), high = _mm512_cmpeq_epi32_mask(sum[1], least);
    return (uint8_t)_tzcnt_u32(low | high << 16);
}

INLINE void choose_one(const ctx_lossless_model *model, const ctx_lossless_steps *s, ctx_dtype dtype, size_t row) {
    const size_t stride = LANES * ctx_dtype_bytes(dtype), sampled = sampled_steps(s);
    const uint8_t *values = s->values + row * s->steps_per_row * stride;
    step v = load_step(dtype, values);
    __m512i most = exponent_of(dtype, &v), sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __mmask64 escaped;
    for (size_t i = 1; i < s->steps_per_row; i++) {
        const step w = load_step(dtype, values + i * stride);
        most = _mm512_max_epu8(most, exponent_of(dtype, &w));
    }
    const uint8_t top = highest(most);
    __m512i level = level_of(exponent_of(dtype, &v), first_of(dtype, &v), top, &escaped);
    __mmask64 sign = _mm512_movepi8_mask(v.high);
    const __mmask64 flip = 2 * _mm_popcnt_u64(sign & ~escaped) > _mm_popcnt_u64(~escaped) ? ~(__mmask64)0 : 0;
    add_costs(model, symbol_of(level, (sign ^ flip) & ~escaped), sum);
    for (size_t i = 1; i < sampled; i++) {
        v = load_step(dtype, values + i * stride);
        level = level_of(exponent_of(dtype, &v), first_of(dtype, &v), top, &escaped);
        sign = _mm512_movepi8_mask(v.high);
        add_costs(model, symbol_of(level, (sign ^ flip) & ~escaped), sum);
    }
    s->top[row] = top;
    s->flip[row] = flip != 0;
    s->class_of[row] = cheapest(sum);
}

static void choose(const ctx_lossless_model *model, const ctx_lossless_steps *s) {
#define CHOOSE(dtype) \
    for (size_t row = 0; row < s->rows; row++) choose_one(model, s, dtype, row)
    PER_DTYPE(CHOOSE);
}

/* ---- Splitting -------------------------------------------------------------------------------------------------- */

#define FORTY_EIGHT 0xffffffffffffu

INLINE void store_low(ctx_dtype dtype, const step *v, uint8_t *low) {
    if (dtype == CTX_FP16) {
        store(low, v->low);
        put_le64(low + 64, _mm512_test_epi8_mask(v->high, bytes(1)));
        return;
    }
    const __m512i six = _mm512_and_si512(v->low, bytes(63)), last = _mm512_shuffle_i32x4(six, six, 0xff);
    const __m512i place = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(_mm_set1_epi16(64)), _mm_set1_epi16(16), 1),
                                             _mm_set1_epi16(4), 2);
    /* Two bits each of the last sixteen, by multiplications: every part wants a shift of its own. */
    const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(last, _mm512_set1_epi16(0xff)), place);
    const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(last, 8), place);
    const __m512i parts = _mm512_or_si512(_mm512_and_si512(even, _mm512_set1_epi16(0xc0)),
                                          _mm512_slli_epi16(_mm512_and_si512(odd, _mm512_set1_epi16(0xc0)), 8));
    _mm512_mask_storeu_epi8(low, FORTY_EIGHT, _mm512_or_si512(six, parts));
    if (dtype == CTX_FP32) {
        store(low + 48, v->under[0]);
        store(low + 112, v->under[1]);
    }
}

INLINE void split_one(const ctx_lossless_model *model, ctx_lossless_steps *s, ctx_dtype dtype, size_t step_at, size_t row) {
    const step v = load_step(dtype, s->values + step_at * LANES * ctx_dtype_bytes(dtype));
    const __m512i exponent = exponent_of(dtype, &v);
    const __mmask64 first = first_of(dtype, &v), sign = _mm512_movepi8_mask(v.high);
    __mmask64 escaped;
    store_low(dtype, &v, s->low + step_at * ctx_lossless_low_bytes(dtype));
    __m512i symbol = level_of(exponent, first, s->top[row], &escaped);
    symbol = symbol_of(symbol, (s->flip[row] ? ~sign : sign) & ~escaped);
    /* Which symbols the class has, a byte each. */
    const __m512i has = _mm512_movm_epi8((__mmask64)model->present[s->class_of[row]]);
    escaped |= _mm512_testn_epi8_mask(_mm512_permutexvar_epi8(symbol, has), bytes(0xff));
    if (escaped) {
        symbol = _mm512_mask_mov_epi8(symbol, escaped, bytes(ESCAPE));
        const unsigned n = (unsigned)_mm_popcnt_u64(escaped);
        store(s->exponents + s->escapes, _mm512_maskz_compress_epi8(escaped, exponent));
        store(s->signs + s->escapes, _mm512_and_si512(_mm512_movm_epi8(_pext_u64(sign, escaped)), bytes(1)));
        s->escapes += n;
    }
    store(s->symbols + step_at * LANES, symbol);
    const __mmask64 mask = _mm512_cmpge_epu8_mask(_mm512_and_si512(symbol, bytes(15)), bytes(2 * FINE));
    put_bits(s, _pext_u64(first, mask), (unsigned)_mm_popcnt_u64(mask));
}

static void split(const ctx_lossless_model *model, ctx_lossless_steps *s) {
    s->bits = s->escapes = 0;
#define SPLIT(dtype)                                     \
    for (size_t row = 0, at = 0; row < s->rows; row++)   \
        for (size_t i = 0; i < s->steps_per_row; i++, at++) split_one(model, s, dtype, at, row)
    PER_DTYPE(SPLIT);
}

/* ---- Joining ---------------------------------------------------------------------------------------------------- */

static void count(const uint8_t *symbols, size_t steps, size_t *bits, size_t *escapes) {
    uint64_t coarse = 0, escape = 0;
    for (size_t i = 0; i < steps; i++) {
        const __m512i symbol = load(symbols + i * LANES), level = _mm512_and_si512(symbol, bytes(15));
        coarse += (uint64_t)_mm_popcnt_u64(_mm512_cmpge_epu8_mask(level, bytes(2 * FINE)));
        escape += (uint64_t)_mm_popcnt_u64(_mm512_cmpeq_epi8_mask(symbol, bytes(ESCAPE)));
    }
    *bits = coarse, *escapes = escape;
}

INLINE __m512i load_six(const uint8_t *low) {
    const __m512i packed = _mm512_maskz_loadu_epi8(FORTY_EIGHT, low), more = down(packed, 6);
    const __m128i a = _mm512_castsi512_si128(more), b = _mm512_extracti32x4_epi32(more, 1), c = _mm512_extracti32x4_epi32(more, 2);
    const __m128i last = _mm_or_si128(a, _mm_or_si128(_mm_slli_epi16(b, 2), _mm_slli_epi16(c, 4)));
    return _mm512_inserti32x4(_mm512_and_si512(packed, bytes(63)), last, 3);
}

INLINE void join_one(const ctx_lossless_steps *s, ctx_dtype dtype, size_t step_at, size_t row, size_t *bit, size_t *escape) {
    const uint8_t *low = s->low + step_at * ctx_lossless_low_bytes(dtype);
    uint8_t *values = s->values + step_at * LANES * ctx_dtype_bytes(dtype);
    const __m512i symbol = load(s->symbols + step_at * LANES), level = _mm512_and_si512(symbol, bytes(15));
    const __mmask64 mask = _mm512_cmpge_epu8_mask(level, bytes(2 * FINE));
    const __mmask64 escaped = _mm512_cmpeq_epi8_mask(symbol, bytes(ESCAPE));
    const unsigned n = (unsigned)_mm_popcnt_u64(mask);
    const __mmask64 fine = _mm512_mask_testn_epi8_mask(_knot_mask64(mask), symbol, bytes(1));
    const __mmask64 first = fine | _pdep_u64(get_bits(s, *bit), mask);
    *bit += n;
    const __m512i below = _mm512_shuffle_epi8(sixteen(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)), level);
    __m512i exponent = _mm512_sub_epi8(bytes(s->top[row]), below), high, lower;
    __mmask64 sign = _mm512_test_epi8_mask(symbol, bytes(16));
    if (s->flip[row]) sign = ~sign;
    if (escaped) {
        const unsigned k = (unsigned)_mm_popcnt_u64(escaped);
        const __mmask64 some = _bzhi_u64(~0ull, k);
        const __m512i signs = _mm512_maskz_loadu_epi8(some, s->signs + *escape);
        exponent = _mm512_mask_expand_epi8(exponent, escaped, _mm512_maskz_loadu_epi8(some, s->exponents + *escape));
        sign = (sign & ~escaped) | _pdep_u64(_mm512_test_epi8_mask(signs, signs), escaped);
        *escape += k;
    }
    if (dtype == CTX_FP16) {
        const __mmask64 ninth = get64(low + 64);
        lower = load(low);
        high = up(_mm512_and_si512(exponent, bytes(31)), 2);
        high = _mm512_mask_add_epi8(high, first, high, bytes(2));
        high = _mm512_mask_add_epi8(high, ninth, high, bytes(1));
    } else {
        lower = _mm512_or_si512(load_six(low), up(exponent, 7));
        lower = _mm512_mask_add_epi8(lower, first, lower, bytes(0x40));
        high = down(exponent, 1);
    }
    high = _mm512_mask_add_epi8(high, sign, high, bytes(0x80));
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* what unpacking by 16 bytes wants */
    lower = _mm512_permutexvar_epi64(order, lower);
    high = _mm512_permutexvar_epi64(order, high);
    const __m512i a = _mm512_unpacklo_epi8(lower, high), b = _mm512_unpackhi_epi8(lower, high);
    if (dtype != CTX_FP32) {
        store(values, a);
        store(values + 64, b);
        return;
    }
    const __m512i c = _mm512_permutexvar_epi64(order, load(low + 48)), d = _mm512_permutexvar_epi64(order, load(low + 112));
    const __m512i e = _mm512_permutexvar_epi64(order, a), f = _mm512_permutexvar_epi64(order, b);
    store(values, _mm512_unpacklo_epi16(c, e));
    store(values + 64, _mm512_unpackhi_epi16(c, e));
    store(values + 128, _mm512_unpacklo_epi16(d, f));
    store(values + 192, _mm512_unpackhi_epi16(d, f));
}

static void join(const ctx_lossless_steps *s) {
    size_t bit = 0, escape = 0;
#define JOIN(dtype)                                    \
    for (size_t row = 0, at = 0; row < s->rows; row++) \
        for (size_t i = 0; i < s->steps_per_row; i++, at++) join_one(s, dtype, at, row, &bit, &escape)
    PER_DTYPE(JOIN);
}

const ctx_lossless_coder ctx_lossless_avx512 = {
    .choose = choose, .split = split, .count = count, .join = join};
