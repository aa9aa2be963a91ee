/* rans/avx2.c - entropy coding with 64 lanes as four pairs of registers: 16 high words and 16 low words of states.
 *
 * Without permutes of 32 bytes or more, the symbol of a slot is found by counting the symbols that end at or below it, and
 * what belongs to a symbol by one byte shuffle for tables of 16 symbols, two for 32. Words come and go eight lanes at a time.
 */
#include <immintrin.h>

#include "scalar.h"
#include "words.h"

typedef struct state {
    __m256i high[4], low[4];
} state;

#define EACH for (int i = 0; i < 4; i++)

static inline __m256i load(const void *at) { return _mm256_loadu_si256(at); }
static inline __m256i bytes16(const uint8_t *at) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)at)); }
static inline __m256i upper_byte(__m256i words) { return _mm256_srli_epi16(words, 8); }
static inline __m256i lower_byte(__m256i words) { return _mm256_and_si256(words, _mm256_set1_epi16(0x00ff)); }

static inline void put_state(const state *s, uint32_t x[64]) {
    uint16_t high[64], low[64];
    EACH _mm256_storeu_si256((void *)(high + 16 * i), s->high[i]);
    EACH _mm256_storeu_si256((void *)(low + 16 * i), s->low[i]);
    for (int lane = 0; lane < CTX_RANS_LANES; lane++) x[lane] = (uint32_t)high[lane] << 16 | low[lane];
}

static inline void get_state(state *s, const uint32_t x[64]) {
    uint16_t high[64], low[64];
    for (int lane = 0; lane < CTX_RANS_LANES; lane++) high[lane] = (uint16_t)(x[lane] >> 16), low[lane] = (uint16_t)x[lane];
    EACH s->high[i] = load(high + 16 * i);
    EACH s->low[i] = load(low + 16 * i);
}

/* Entries of 32 bytes for symbols below 16, or below 32 if `wide`. */
static inline __attribute__((always_inline)) __m256i look_up(const uint8_t entries[32], __m256i symbols, int wide) {
    const __m256i low = _mm256_shuffle_epi8(bytes16(entries), symbols);
    if (!wide) return low;
    /* Bit 4 of each byte as its sign. */
    return _mm256_blendv_epi8(low, _mm256_shuffle_epi8(bytes16(entries + 16), symbols), _mm256_slli_epi16(symbols, 3));
}

/* Sets of eight lanes from two masks of words: lanes 0-7 of a, of b, then lanes 8-15 of a, of b, a byte each. */
static inline uint32_t sets(__m256i a, __m256i b) { return (uint32_t)_mm256_movemask_epi8(_mm256_packs_epi16(a, b)); }

/* ---- Decoding --------------------------------------------------------------------------------------------------- */

static inline __m128i take_words(const uint8_t **word, uint32_t set) {
    const __m128i next = _mm_loadu_si128((const void *)*word);
    *word += 2 * _mm_popcnt_u32(set);
    return _mm_shuffle_epi8(next, _mm_loadu_si128((const void *)EXPAND[set]));
}

/* x = freq * (x >> 8) + bias; returns which lanes fell below 2^16. Those have moved up already. */
static inline __m256i advance(__m256i *high, __m256i *low, __m256i freq, __m256i bias) {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i shifted = _mm256_or_si256(_mm256_slli_epi16(*high, 8), upper_byte(*low));
    const __m256i l = _mm256_add_epi16(_mm256_mullo_epi16(shifted, freq), bias);
    const __m256i whole = _mm256_cmpeq_epi16(_mm256_max_epu16(l, bias), l); /* -1 where nothing is carried */
    const __m256i h = _mm256_add_epi16(_mm256_mulhi_epu16(shifted, freq), _mm256_mullo_epi16(upper_byte(*high), freq));
    const __m256i carried = _mm256_add_epi16(h, _mm256_add_epi16(whole, one));
    const __m256i small = _mm256_cmpeq_epi16(carried, _mm256_setzero_si256());
    *high = _mm256_blendv_epi8(carried, l, small);
    *low = l;
    return small;
}

/* 32 lanes whose symbols and slots stand as lane i, lane 16 + i in the bytes of word i. */
static inline __attribute__((always_inline)) void decode_half(__m256i high[2], __m256i low[2], const uint8_t **word,
                                                              const ctx_rans_table *t, __m256i slots, __m256i symbols,
                                                              uint8_t *out, int wide) {
    const __m256i freq = look_up(t->freq, symbols, wide), bias = _mm256_sub_epi8(slots, look_up(t->cum, symbols, wide));
    const __m256i a = advance(&high[0], &low[0], lower_byte(freq), lower_byte(bias));
    const __m256i b = advance(&high[1], &low[1], upper_byte(freq), upper_byte(bias));
    const uint32_t set = sets(a, b);
    const __m128i first = take_words(word, set & 255), second = take_words(word, set >> 16 & 255);
    const __m128i third = take_words(word, set >> 8 & 255), fourth = take_words(word, set >> 24);
    low[0] = _mm256_blendv_epi8(low[0], _mm256_set_m128i(second, first), a);
    low[1] = _mm256_blendv_epi8(low[1], _mm256_set_m128i(fourth, third), b);
    const __m256i packed = _mm256_packus_epi16(lower_byte(symbols), upper_byte(symbols));
    _mm256_storeu_si256((void *)out, _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline void decode_step(state *s, const uint8_t **word, const ctx_rans_tables *tables, size_t table, uint8_t *symbols) {
    const ctx_rans_table *t = &tables->at[table];
    const int last = tables->last[table];
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    __m256i slots[2], found[2];
    for (int i = 0; i < 2; i++) {
        slots[i] = _mm256_blendv_epi8(_mm256_slli_epi16(s->low[2 * i + 1], 8), s->low[2 * i], _mm256_set1_epi16(0x00ff));
        found[i] = _mm256_set1_epi8((char)last);
    }
    const __m256i a = _mm256_xor_si256(slots[0], flip), b = _mm256_xor_si256(slots[1], flip);
    for (int i = 0; i < last; i++) {
        const __m256i above = _mm256_set1_epi32((int)t->above[i]);
        found[0] = _mm256_add_epi8(found[0], _mm256_cmpgt_epi8(above, a));
        found[1] = _mm256_add_epi8(found[1], _mm256_cmpgt_epi8(above, b));
    }
    for (int i = 0; i < 2; i++) {
        if (last < 16)
            decode_half(s->high + 2 * i, s->low + 2 * i, word, t, slots[i], found[i], symbols + 32 * i, 0);
        else
            decode_half(s->high + 2 * i, s->low + 2 * i, word, t, slots[i], found[i], symbols + 32 * i, 1);
    }
}

/* ---- Encoding --------------------------------------------------------------------------------------------------- */

/* What was encoded, so that a symbol without a code is noticed once a stream. */
typedef struct seen {
    __m256i bytes; /* OR of symbols, and 128 for one without frequency */
} seen;

static inline void seen_none(seen *checked) { checked->bytes = _mm256_setzero_si256(); }
static inline int seen_bad(const seen *checked) {
    return !_mm256_testz_si256(checked->bytes, _mm256_set1_epi8((char)0xe0));
}

typedef struct entries {
    __m256i threshold, reciprocal, rest, power, raise, cum; /* words */
} entries;

/* One digit of a division; returns quotient << 8 | remainder of a dividend below freq << 8. */
static inline __m256i divide(__m256i dividend, const entries *e) {
    const __m256i product = _mm256_mulhi_epu16(_mm256_add_epi16(dividend, e->raise), e->reciprocal);
    const __m256i quotient = _mm256_srli_epi16(_mm256_mullo_epi16(product, e->power), 7);
    return _mm256_add_epi16(dividend, _mm256_mullo_epi16(quotient, e->rest)); /* 256 q + (dividend - freq q) */
}

/* x = x / freq << 8 | x % freq + cum, by long division in bytes. */
static inline void put_symbol(__m256i *high, __m256i *low, const entries *e) {
    const __m256i two = divide(*high, e);
    const __m256i one = divide(_mm256_or_si256(_mm256_slli_epi16(two, 8), upper_byte(*low)), e);
    const __m256i none = divide(_mm256_or_si256(_mm256_slli_epi16(one, 8), lower_byte(*low)), e);
    *high = _mm256_or_si256(_mm256_andnot_si256(_mm256_set1_epi16(0x00ff), two), upper_byte(one));
    *low = _mm256_add_epi16(none, e->cum);
}

static inline uint8_t *give_words(uint8_t *word, __m128i low, uint32_t set) {
    _mm_storeu_si128((void *)(word - 16), _mm_shuffle_epi8(low, _mm_loadu_si128((const void *)COMPRESS[set])));
    return word - 2 * _mm_popcnt_u32(set);
}

static inline __attribute__((always_inline)) uint8_t *encode_half(__m256i high[2], __m256i low[2], uint8_t *word,
                                                                  const ctx_rans_table *t, const uint8_t *symbols,
                                                                  seen *checked, int wide) {
    const __m128i x = _mm_loadu_si128((const void *)symbols), y = _mm_loadu_si128((const void *)(symbols + 16));
    const __m256i given = _mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)); /* lane i, lane 16 + i */
    /* Only of what is masked has every byte an entry: a frequency of 0 would emit without end. */
    const __m256i of = _mm256_and_si256(given, _mm256_set1_epi8(31));
    checked->bytes = _mm256_or_si256(checked->bytes, _mm256_or_si256(given, look_up(t->absent, of, wide)));
    if (!wide) /* symbols from 16 on are absent, but the shuffles see four bits */
        checked->bytes = _mm256_or_si256(checked->bytes, _mm256_slli_epi16(_mm256_and_si256(of, _mm256_set1_epi8(16)), 3));
    const __m256i freq = look_up(t->freq, of, wide), m = look_up(t->reciprocal_low, of, wide);
    const __m256i n = look_up(t->reciprocal_high, of, wide), rest = look_up(t->rest_byte, of, wide);
    const __m256i power = look_up(t->power, of, wide), raise = look_up(t->raise, of, wide), cum = look_up(t->cum, of, wide);
    const __m256i byte = _mm256_set1_epi16(0x00ff);
    const entries e[2] = {
        {_mm256_slli_epi16(freq, 8), _mm256_or_si256(lower_byte(m), _mm256_slli_epi16(n, 8)), lower_byte(rest),
         lower_byte(power), lower_byte(raise), lower_byte(cum)},
        {_mm256_andnot_si256(byte, freq), _mm256_or_si256(upper_byte(m), _mm256_andnot_si256(byte, n)), upper_byte(rest),
         upper_byte(power), upper_byte(raise), upper_byte(cum)},
    };
    __m256i full[2];
    for (int i = 0; i < 2; i++) full[i] = _mm256_cmpeq_epi16(_mm256_max_epu16(high[i], e[i].threshold), high[i]);
    const uint32_t set = sets(full[0], full[1]);
    word = give_words(word, _mm256_extracti128_si256(low[1], 1), set >> 24);
    word = give_words(word, _mm256_castsi256_si128(low[1]), set >> 8 & 255);
    word = give_words(word, _mm256_extracti128_si256(low[0], 1), set >> 16 & 255);
    word = give_words(word, _mm256_castsi256_si128(low[0]), set & 255);
    for (int i = 0; i < 2; i++) {
        low[i] = _mm256_blendv_epi8(low[i], high[i], full[i]);
        high[i] = _mm256_andnot_si256(full[i], high[i]);
        put_symbol(&high[i], &low[i], &e[i]);
    }
    return word;
}

static inline void encode_step(state *s, seen *checked, uint8_t **word, const ctx_rans_tables *tables, size_t table,
                               const uint8_t *symbols) {
    const ctx_rans_table *t = &tables->at[table];
    for (int i = 1; i >= 0; i--) {
        if (tables->last[table] < 16)
            *word = encode_half(s->high + 2 * i, s->low + 2 * i, *word, t, symbols + 32 * i, checked, 0);
        else
            *word = encode_half(s->high + 2 * i, s->low + 2 * i, *word, t, symbols + 32 * i, checked, 1);
    }
}

/* Bytes that equal a symbol add up as -1; up to 255 of them fit into a byte. */
static uint8_t count_run(const uint8_t *symbols, size_t n, uint32_t counts[32]) {
    const size_t whole = n / 32 * 32;
    __m256i together = _mm256_setzero_si256(), most = together;
    for (size_t i = 0; i < whole; i += 32) {
        together = _mm256_or_si256(together, load(symbols + i));
        most = _mm256_max_epu8(most, load(symbols + i));
    }
    uint8_t all[32], highest[32], last = 0, rest = rans_count_scalar(symbols + whole, n - whole, counts);
    _mm256_storeu_si256((void *)all, together);
    _mm256_storeu_si256((void *)highest, most);
    for (int j = 0; j < 32; j++) rest |= all[j], last = highest[j] > last ? highest[j] : last;
    for (size_t at = 0, end; at < whole; at = end) {
        end = whole - at > 32 * 255 ? at + 32 * 255 : whole;
        for (uint8_t s = 0; s <= last && s < CTX_RANS_SYMBOLS; s++) {
            const __m256i one = _mm256_set1_epi8((char)s);
            __m256i sum = _mm256_setzero_si256();
            for (size_t i = at; i < end; i += 32) sum = _mm256_sub_epi8(sum, _mm256_cmpeq_epi8(load(symbols + i), one));
            uint64_t parts[4];
            _mm256_storeu_si256((void *)parts, _mm256_sad_epu8(sum, _mm256_setzero_si256()));
            counts[s] += (uint32_t)(parts[0] + parts[1] + parts[2] + parts[3]);
        }
    }
    return rest;
}

#define CODER ctx_rans_avx2
#include "loops.inc"
