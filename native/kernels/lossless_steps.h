/* lossless_steps.h - the steps of lossless packing, 64 values at a time, as loops that a compiler vectorises for the
 * instruction set of the file that includes this one. That file may define LOSSLESS_MASK, LOSSLESS_EXPAND and
 * LOSSLESS_COMPRESS, which no compiler finds by itself.
 */
#ifndef CTXREUSE_LOSSLESS_STEPS_H
#define CTXREUSE_LOSSLESS_STEPS_H

#include "../lossless.h"
#include "scalar.h"

enum { LANES = 64, FINE = 3 /* exponents whose mantissa's first bit is coded */, ESCAPE = 15 };

#define EACH_LANE for (int i = 0; i < LANES; i++)
#define INLINE static inline __attribute__((always_inline))

INLINE void put_le64(uint8_t *at, uint64_t x) {
    for (int i = 0; i < 8; i++) at[i] = (uint8_t)(x >> 8 * i);
}

/* Append n bits to the tail's. Behind the last there is room for 9 bytes. */
INLINE void put_bits(ctx_lossless_steps *s, uint64_t bits, unsigned n) {
    uint8_t *at = s->first_bits + s->bits / 8;
    const unsigned shift = s->bits % 8;
    const uint8_t before = (uint8_t)(*at & ((1u << shift) - 1));
    put_le64(at, bits << shift | before);
    at[8] = (uint8_t)(bits >> 1 >> (63 - shift));
    s->bits += n;
}

/* 64 bits from one on. */
INLINE uint64_t get_bits(const ctx_lossless_steps *s, size_t bit) {
    const uint8_t *at = s->first_bits + bit / 8;
    const unsigned shift = bit % 8;
    return get64(at) >> shift | (uint64_t)at[8] << 1 << (63 - shift);
}

#define PER_DTYPE(call)                               \
    do {                                              \
        if (s->dtype == CTX_BF16) call(CTX_BF16);     \
        else if (s->dtype == CTX_FP16) call(CTX_FP16);\
        else call(CTX_FP32);                          \
    } while (0)

#ifndef LOSSLESS_MASK
/* Bit i is byte i, of 64 bytes that are 0 or 1: a multiplication moves eight of them together. */
INLINE uint64_t LOSSLESS_MASK(const uint8_t *flags) {
    uint64_t mask = 0;
    for (int i = 0; i < 8; i++) mask |= (get64(flags + 8 * i) * 0x0102040810204080u >> 56) << 8 * i;
    return mask;
}
#endif

#ifndef LOSSLESS_EXPAND
/* The low bits of `bits`, in order, to where the mask has ones. */
INLINE uint64_t LOSSLESS_EXPAND(uint64_t bits, uint64_t mask) {
    uint64_t out = 0;
    for (; mask; mask &= mask - 1, bits >>= 1) out |= (mask & (0 - mask)) & (0 - (bits & 1));
    return out;
}

INLINE uint64_t LOSSLESS_COMPRESS(uint64_t bits, uint64_t mask) {
    uint64_t out = 0;
    for (int at = 0; mask; mask &= mask - 1, at++) out |= (uint64_t)((bits & mask & (0 - mask)) != 0) << at;
    return out;
}
#endif

INLINE int mantissa_bits(ctx_dtype dtype) { return dtype == CTX_FP16 ? 10 : 7; }

/* The upper halves of 64 values: fp16, bf16, or what is bf16 in an fp32. */
INLINE void load_halves(ctx_dtype dtype, const uint8_t *values, uint16_t half[LANES]) {
    if (dtype != CTX_FP32) {
        memcpy(half, values, 2 * LANES);
        return;
    }
    EACH_LANE half[i] = (uint16_t)(get32(values + 4 * i) >> 16);
}

INLINE void exponents_of(ctx_dtype dtype, const uint16_t half[LANES], uint8_t exponent[LANES]) {
    const int bits = mantissa_bits(dtype), mask = dtype == CTX_FP16 ? 31 : 255;
    EACH_LANE exponent[i] = (uint8_t)(half[i] >> bits & mask);
}

INLINE void symbols_of(ctx_dtype dtype, const uint16_t half[LANES], uint8_t top, uint8_t flip, uint8_t symbol[LANES]) {
    const int bits = mantissa_bits(dtype);
    uint8_t exponent[LANES];
    exponents_of(dtype, half, exponent);
    EACH_LANE {
        const uint8_t first = (uint8_t)(half[i] >> (bits - 1) & 1), sign = (uint8_t)(half[i] >> 15);
        const uint8_t down = (uint8_t)(top - exponent[i]);
        const uint8_t fine = (uint8_t)(2 * down + 1 - first), coarse = (uint8_t)(down > 11 ? ESCAPE : down + FINE);
        const uint8_t level = down < FINE ? fine : coarse;
        symbol[i] = level == ESCAPE ? ESCAPE : (uint8_t)(level | (sign ^ flip) << 4);
    }
}

/* ---- Choosing --------------------------------------------------------------------------------------------------- */

/* The steps of a row by which its class is chosen: more would not change much, and the sums have 32 bits. */
INLINE size_t sampled_steps(const ctx_lossless_steps *s) { return s->steps_per_row < LANES ? s->steps_per_row : LANES; }

/* The class of the least cost, the first one if there are several. */
INLINE uint8_t class_for(const ctx_lossless_model *model, const uint32_t counts[32]) {
    uint32_t sum[CTX_LOSSLESS_CLASSES] = {0};
    uint8_t found = 0;
    for (int s = 0; s < CTX_RANS_SYMBOLS; s++)
        for (int c = 0; counts[s] && c < CTX_LOSSLESS_CLASSES; c++) sum[c] += counts[s] * model->cost[s][c];
    for (uint8_t c = 1; c < CTX_LOSSLESS_CLASSES; c++) found = sum[c] < sum[found] ? c : found;
    return found;
}

/* Top exponent over the whole row; flip by its first step. */
INLINE void choose_row(const ctx_lossless_model *model, const ctx_lossless_steps *s, ctx_dtype dtype, size_t row) {
    const size_t stride = LANES * ctx_dtype_bytes(dtype), sampled = sampled_steps(s);
    const uint8_t *values = s->values + row * s->steps_per_row * stride;
    uint16_t half[LANES];
    uint8_t exponent[LANES], symbol[LANES], top = 0, flip = 0;
    uint32_t counts[CTX_RANS_SYMBOLS] = {0};
    for (size_t step = 0; step < s->steps_per_row; step++) {
        load_halves(dtype, values + step * stride, half);
        exponents_of(dtype, half, exponent);
        EACH_LANE top = exponent[i] > top ? exponent[i] : top;
    }
    for (size_t step = 0; step < sampled; step++) {
        load_halves(dtype, values + step * stride, half);
        symbols_of(dtype, half, top, flip, symbol);
        uint32_t negative = 0, known = 0;
        EACH_LANE negative += symbol[i] >> 4, known += symbol[i] != ESCAPE;
        if (step == 0 && 2 * negative > known) {
            flip = 1;
            symbols_of(dtype, half, top, flip, symbol);
        }
        for (int i = 0; i < LANES; i++) counts[symbol[i]]++;
    }
    s->top[row] = top;
    s->flip[row] = flip;
    s->class_of[row] = class_for(model, counts);
}

static void lossless_choose(const ctx_lossless_model *model, const ctx_lossless_steps *s) {
#define CHOOSE(dtype) \
    for (size_t row = 0; row < s->rows; row++) choose_row(model, s, dtype, row)
    PER_DTYPE(CHOOSE);
#undef CHOOSE
}

/* ---- Splitting -------------------------------------------------------------------------------------------------- */

INLINE void put_low(ctx_dtype dtype, const uint8_t *values, const uint16_t half[LANES], uint8_t *low) {
    if (dtype == CTX_FP16) {
        uint8_t ninth[LANES];
        EACH_LANE low[i] = (uint8_t)half[i];
        EACH_LANE ninth[i] = (uint8_t)(half[i] >> 8 & 1);
        put_le64(low + LANES, LOSSLESS_MASK(ninth));
        return;
    }
    uint8_t six[LANES];
    EACH_LANE six[i] = (uint8_t)(half[i] & 63);
    for (int part = 0; part < 3; part++)
        for (int i = 0; i < 16; i++)
            low[16 * part + i] = (uint8_t)(six[16 * part + i] | (six[48 + i] >> 2 * part & 3) << 6);
    if (dtype == CTX_FP32) EACH_LANE put16(low + 48 + 2 * i, (uint16_t)get32(values + 4 * i));
}

INLINE void split_step(const ctx_lossless_model *model, ctx_lossless_steps *s, ctx_dtype dtype, size_t step, size_t row) {
    const uint8_t *values = s->values + step * LANES * ctx_dtype_bytes(dtype);
    uint8_t *symbol = s->symbols + step * LANES, flags[LANES], first[LANES];
    const int bits = mantissa_bits(dtype);
    const uint32_t present = model->present[s->class_of[row]];
    uint16_t half[LANES];
    load_halves(dtype, values, half);
    put_low(dtype, values, half, s->low + step * ctx_lossless_low_bytes(dtype));
    symbols_of(dtype, half, s->top[row], s->flip[row], symbol);
    EACH_LANE first[i] = (uint8_t)(half[i] >> (bits - 1) & 1);
    /* A bit in a byte of four, for a shift by a byte's own amount is what few instruction sets have. */
    uint32_t seen = 0;
    EACH_LANE seen |= 1u << symbol[i];
    if (seen & (~present | 1u << ESCAPE)) {
        for (int i = 0; i < LANES; i++) {
            if (symbol[i] != ESCAPE && present >> symbol[i] & 1) continue;
            symbol[i] = ESCAPE;
            s->exponents[s->escapes] = (uint8_t)(half[i] >> bits & (dtype == CTX_FP16 ? 31 : 255));
            s->signs[s->escapes++] = (uint8_t)(half[i] >> 15);
        }
    }
    EACH_LANE flags[i] = (symbol[i] & 15) >= 2 * FINE;
    const uint64_t mask = LOSSLESS_MASK(flags);
    put_bits(s, LOSSLESS_COMPRESS(LOSSLESS_MASK(first), mask), (unsigned)__builtin_popcountll(mask));
}

static void lossless_split(const ctx_lossless_model *model, ctx_lossless_steps *s) {
    s->bits = s->escapes = 0;
#define SPLIT(dtype)                                                      \
    for (size_t row = 0, step = 0; row < s->rows; row++)                  \
        for (size_t i = 0; i < s->steps_per_row; i++, step++) split_step(model, s, dtype, step, row)
    PER_DTYPE(SPLIT);
#undef SPLIT
}

/* ---- Joining ---------------------------------------------------------------------------------------------------- */

static void lossless_count(const uint8_t *symbols, size_t steps, size_t *bits, size_t *escapes) {
    *bits = *escapes = 0;
    for (size_t step = 0; step < steps; step++) {
        const uint8_t *symbol = symbols + step * LANES;
        uint8_t coarse = 0, escape = 0;
        EACH_LANE coarse = (uint8_t)(coarse + ((symbol[i] & 15) >= 2 * FINE));
        EACH_LANE escape = (uint8_t)(escape + (symbol[i] == ESCAPE));
        *bits += coarse;
        *escapes += escape;
    }
}

INLINE void get_low(ctx_dtype dtype, const uint8_t *low, uint16_t mantissa[LANES]) {
    if (dtype == CTX_FP16) {
        const uint64_t ninth = get64(low + LANES);
        EACH_LANE mantissa[i] = (uint16_t)(low[i] | (ninth >> i & 1) << 8);
        return;
    }
    uint8_t six[LANES];
    for (int i = 0; i < 48; i++) six[i] = low[i] & 63;
    for (int i = 0; i < 16; i++) six[48 + i] = (uint8_t)(low[i] >> 6 | (low[16 + i] >> 6) << 2 | (low[32 + i] >> 6) << 4);
    EACH_LANE mantissa[i] = six[i];
}

INLINE void join_step(const ctx_lossless_steps *s, ctx_dtype dtype, size_t step, size_t row, size_t *bit, size_t *escape) {
    const uint8_t *symbol = s->symbols + step * LANES, *low = s->low + step * ctx_lossless_low_bytes(dtype);
    uint8_t *values = s->values + step * LANES * ctx_dtype_bytes(dtype);
    const int bits = mantissa_bits(dtype);
    const uint8_t top = s->top[row], flip = s->flip[row];
    uint16_t half[LANES], mantissa[LANES];
    uint8_t flags[LANES], exponent[LANES], sign[LANES], first[LANES], escapes = 0;
    EACH_LANE flags[i] = (symbol[i] & 15) >= 2 * FINE;
    EACH_LANE escapes |= symbol[i] == ESCAPE;
    const uint64_t mask = LOSSLESS_MASK(flags);
    const uint64_t known = LOSSLESS_EXPAND(get_bits(s, *bit), mask);
    *bit += (unsigned)__builtin_popcountll(mask);
    EACH_LANE {
        const uint8_t level = symbol[i] & 15;
        exponent[i] = (uint8_t)(top - (level < 2 * FINE ? level >> 1 : level - FINE));
        sign[i] = (uint8_t)(symbol[i] >> 4 ^ flip);
    }
    EACH_LANE first[i] = (uint8_t)(known >> i & 1);
    EACH_LANE first[i] = (uint8_t)(flags[i] ? first[i] : (symbol[i] & 1) ^ 1);
    get_low(dtype, low, mantissa);
    const int widest = dtype == CTX_FP16 ? 31 : 255;
    EACH_LANE half[i] = (uint16_t)(sign[i] << 15 | (exponent[i] & widest) << bits | first[i] << (bits - 1) | mantissa[i]);
    if (escapes)
        for (int i = 0; i < LANES; i++) {
            if (symbol[i] != ESCAPE) continue;
            half[i] = (uint16_t)(s->signs[*escape] << 15 | (s->exponents[*escape] & widest) << bits |
                                 (half[i] & ((1 << bits) - 1)));
            ++*escape;
        }
    if (dtype == CTX_FP32)
        EACH_LANE put32(values + 4 * i, (uint32_t)half[i] << 16 | get16(low + 48 + 2 * i));
    else
        memcpy(values, half, 2 * LANES);
}

static void lossless_join(const ctx_lossless_steps *s) {
    size_t bit = 0, escape = 0;
#define JOIN(dtype)                                                       \
    for (size_t row = 0, step = 0; row < s->rows; row++)                  \
        for (size_t i = 0; i < s->steps_per_row; i++, step++) join_step(s, dtype, step, row, &bit, &escape)
    PER_DTYPE(JOIN);
#undef JOIN
}

#endif
