/* rans/neon.c - entropy coding with 64 lanes as eight pairs of registers: 8 high words and 8 low words of states.
 *
 * Symbols of slots come from permutes of 64 table bytes, four of them for 256 slots. Words come and go eight lanes at a time.
 */
#include <arm_neon.h>

#include "scalar.h"
#include "words.h"

typedef struct state {
    uint16x8_t high[8], low[8];
} state;

static inline void put_state(const state *s, uint32_t x[64]) {
    for (int i = 0; i < 8; i++) {
        vst1q_u32(x + 8 * i, vreinterpretq_u32_u16(vzip1q_u16(s->low[i], s->high[i])));
        vst1q_u32(x + 8 * i + 4, vreinterpretq_u32_u16(vzip2q_u16(s->low[i], s->high[i])));
    }
}

static inline void get_state(state *s, const uint32_t x[64]) {
    for (int i = 0; i < 8; i++) {
        const uint16x8_t a = vreinterpretq_u16_u32(vld1q_u32(x + 8 * i)), b = vreinterpretq_u16_u32(vld1q_u32(x + 8 * i + 4));
        s->low[i] = vuzp1q_u16(a, b);
        s->high[i] = vuzp2q_u16(a, b);
    }
}

static inline uint8x16x4_t load64(const uint8_t *at) {
    const uint8x16x4_t four = {{vld1q_u8(at), vld1q_u8(at + 16), vld1q_u8(at + 32), vld1q_u8(at + 48)}};
    return four;
}

static inline uint8x16_t look_up(const uint8_t entries[32], uint8x16_t symbols) {
    const uint8x16x2_t two = {{vld1q_u8(entries), vld1q_u8(entries + 16)}};
    return vqtbl2q_u8(two, symbols);
}

/* High words of products. */
static inline uint16x8_t mulhi(uint16x8_t a, uint16x8_t b) {
    const uint32x4_t low = vmull_u16(vget_low_u16(a), vget_low_u16(b)), high = vmull_high_u16(a, b);
    return vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
}

/* A mask of words as a set of eight lanes. */
static inline unsigned set_of(uint16x8_t mask) {
    static const uint16_t bits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u16(vandq_u16(mask, vld1q_u16(bits)));
}

static inline size_t bytes_of(unsigned set) { return 2 * (size_t)vaddv_u8(vcnt_u8(vcreate_u8(set))); }

/* ---- Decoding --------------------------------------------------------------------------------------------------- */

/* x = freq * (x >> 8) + bias, then the next words for lanes below 2^16. */
static inline void advance(uint16x8_t *high, uint16x8_t *low, uint16x8_t freq, uint16x8_t bias, const uint8_t **word) {
    const uint16x8_t shifted = vsriq_n_u16(vshlq_n_u16(*high, 8), *low, 8);
    const uint16x8_t l = vmlaq_u16(bias, shifted, freq);
    const uint16x8_t h = vmlaq_u16(mulhi(shifted, freq), vshrq_n_u16(*high, 8), freq);
    const uint16x8_t carried = vsubq_u16(h, vcltq_u16(l, bias)); /* a mask is -1 */
    const uint16x8_t small = vceqzq_u16(carried);
    const unsigned set = set_of(small);
    const uint8x16_t words = vqtbl1q_u8(vld1q_u8(*word), vreinterpretq_u8_u16(vld1q_u16(EXPAND[set])));
    *high = vbslq_u16(small, l, carried);
    *low = vbslq_u16(small, vreinterpretq_u16_u8(words), l);
    *word += bytes_of(set);
}

static inline void decode_step(state *s, const uint8_t **word, const ctx_rans_tables *tables, size_t table, uint8_t *symbols) {
    const ctx_rans_table *t = &tables->at[table];
    const uint8x16x4_t first = load64(t->symbol), second = load64(t->symbol + 64);
    const uint8x16x4_t third = load64(t->symbol + 128), fourth = load64(t->symbol + 192);
    for (int i = 0; i < 4; i++) {
        uint16x8_t *high = s->high + 2 * i, *low = s->low + 2 * i;
        const uint8x16_t slots = vuzp1q_u8(vreinterpretq_u8_u16(low[0]), vreinterpretq_u8_u16(low[1]));
        uint8x16_t found = vqtbl4q_u8(first, slots); /* 0 beyond the 64 bytes */
        found = vqtbx4q_u8(found, second, vsubq_u8(slots, vdupq_n_u8(64)));
        found = vqtbx4q_u8(found, third, vsubq_u8(slots, vdupq_n_u8(128)));
        found = vqtbx4q_u8(found, fourth, vsubq_u8(slots, vdupq_n_u8(192)));
        const uint8x16_t freq = look_up(t->freq, found), bias = vsubq_u8(slots, look_up(t->cum, found));
        vst1q_u8(symbols + 16 * i, found);
        advance(&high[0], &low[0], vmovl_u8(vget_low_u8(freq)), vmovl_u8(vget_low_u8(bias)), word);
        advance(&high[1], &low[1], vmovl_high_u8(freq), vmovl_high_u8(bias), word);
    }
}

/* ---- Encoding --------------------------------------------------------------------------------------------------- */

/* What was encoded, so that a symbol without a code is noticed once a stream. */
typedef struct seen {
    uint8x16_t bytes; /* OR of symbols, and 128 for one without frequency */
} seen;

static inline void seen_none(seen *checked) { checked->bytes = vdupq_n_u8(0); }
static inline int seen_bad(const seen *checked) { return vmaxvq_u8(checked->bytes) >= CTX_RANS_SYMBOLS; }

typedef struct entries {
    uint16x8_t threshold, reciprocal, rest, power, raise, cum;
} entries;

/* One digit of a division; returns quotient << 8 | remainder of a dividend below freq << 8. */
static inline uint16x8_t divide(uint16x8_t dividend, const entries *e) {
    const uint16x8_t product = mulhi(vaddq_u16(dividend, e->raise), e->reciprocal);
    const uint16x8_t quotient = vshrq_n_u16(vmulq_u16(product, e->power), 7);
    return vmlaq_u16(dividend, quotient, e->rest); /* 256 q + (dividend - freq q) */
}

/* Emit words of lanes that would overflow, then x = x / freq << 8 | x % freq + cum, by long division in bytes. */
static inline uint8_t *put_symbols(uint16x8_t *high, uint16x8_t *low, uint8_t *word, const entries *e) {
    const uint16x8_t full = vcgeq_u16(*high, e->threshold), byte = vdupq_n_u16(0x00ff);
    const unsigned set = set_of(full);
    vst1q_u8(word - 16, vqtbl1q_u8(vreinterpretq_u8_u16(*low), vreinterpretq_u8_u16(vld1q_u16(COMPRESS[set]))));
    const uint16x8_t l = vbslq_u16(full, *high, *low), h = vbicq_u16(*high, full);
    const uint16x8_t two = divide(h, e);
    const uint16x8_t one = divide(vsriq_n_u16(vshlq_n_u16(two, 8), l, 8), e);
    const uint16x8_t none = divide(vbslq_u16(byte, l, vshlq_n_u16(one, 8)), e);
    *high = vsriq_n_u16(two, one, 8);
    *low = vaddq_u16(none, e->cum);
    return word - bytes_of(set);
}

static inline void encode_step(state *s, seen *checked, uint8_t **word, const ctx_rans_tables *tables, size_t table,
                               const uint8_t *symbols) {
    const ctx_rans_table *t = &tables->at[table];
    for (int i = 3; i >= 0; i--) {
        const uint8x16_t given = vld1q_u8(symbols + 16 * i);
        /* Only of what is masked has every byte an entry: a frequency of 0 would emit without end. */
        const uint8x16_t of = vandq_u8(given, vdupq_n_u8(31));
        checked->bytes = vorrq_u8(checked->bytes, vorrq_u8(given, look_up(t->absent, of)));
        const uint8x16_t freq = look_up(t->freq, of), m = look_up(t->reciprocal_low, of);
        const uint8x16_t n = look_up(t->reciprocal_high, of), rest = look_up(t->rest_byte, of);
        const uint8x16_t power = look_up(t->power, of), raise = look_up(t->raise, of), cum = look_up(t->cum, of);
        const entries high = {vshll_high_n_u8(freq, 8), vreinterpretq_u16_u8(vzip2q_u8(m, n)), vmovl_high_u8(rest),
                              vmovl_high_u8(power), vmovl_high_u8(raise), vmovl_high_u8(cum)};
        const entries low = {vshll_n_u8(vget_low_u8(freq), 8), vreinterpretq_u16_u8(vzip1q_u8(m, n)),
                             vmovl_u8(vget_low_u8(rest)), vmovl_u8(vget_low_u8(power)), vmovl_u8(vget_low_u8(raise)),
                             vmovl_u8(vget_low_u8(cum))};
        *word = put_symbols(&s->high[2 * i + 1], &s->low[2 * i + 1], *word, &high);
        *word = put_symbols(&s->high[2 * i], &s->low[2 * i], *word, &low);
    }
}

static uint8_t count_run(const uint8_t *symbols, size_t n, uint32_t counts[32]) { return rans_count_scalar(symbols, n, counts); }

#define CODER ctx_rans_neon
#include "loops.inc"
