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

INLINE uint8_t class_for(const ctx_lossless_model *model, const uint32_t counts[32], size_t total) {
    uint16_t sum[CTX_LOSSLESS_CLASSES] = {0}, least = UINT16_MAX;
    for (int s = 0; s < CTX_RANS_SYMBOLS; s++) {
        if (counts[s] == 0) continue;
        /* Of 64, so that 16 bits hold the sum: a value costs at most 18 bits of 16 units. Rounding up keeps all. */
        const uint16_t weight = (uint16_t)(total <= LANES ? counts[s] : ((uint64_t)counts[s] * 64 + total - 1) / total);
        for (int c = 0; c < CTX_LOSSLESS_CLASSES; c++) sum[c] = (uint16_t)(sum[c] + weight * model->cost[s][c]);
    }
    for (int c = 0; c < CTX_LOSSLESS_CLASSES; c++) least = sum[c] < least ? sum[c] : least;
    uint8_t found = 0;
    while (sum[found] != least) found++;
    return found;
}

INLINE void choose_row(const ctx_lossless_model *model, const ctx_lossless_steps *s, ctx_dtype dtype, size_t row) {
    const size_t item = ctx_dtype_bytes(dtype), first = row * s->steps_per_row;
    uint16_t half[LANES];
    uint8_t exponent[LANES], symbol[LANES], top = 0;
    uint8_t held[2][CTX_RANS_SYMBOLS];
    uint32_t counts[CTX_RANS_SYMBOLS] = {0}, negative = 0;
    for (size_t step = first; step < first + s->steps_per_row; step++) {
        load_halves(dtype, s->values + step * LANES * item, half);
        exponents_of(dtype, half, exponent);
        EACH_LANE top = exponent[i] > top ? exponent[i] : top;
    }
    for (size_t step = first; step < first + s->steps_per_row; step++) {
        if (s->steps_per_row > 1) load_halves(dtype, s->values + step * LANES * item, half);
        symbols_of(dtype, half, top, 0, symbol);
        memset(held, 0, sizeof held);
        for (int i = 0; i < LANES; i += 2) held[0][symbol[i]]++, held[1][symbol[i + 1]]++;
        for (int c = 0; c < CTX_RANS_SYMBOLS; c++) counts[c] += (uint32_t)held[0][c] + held[1][c];
    }
    for (int c = 16; c < CTX_RANS_SYMBOLS; c++) negative += counts[c];
    const size_t total = s->steps_per_row * LANES;
    s->top[row] = top;
    s->flip[row] = 2 * (size_t)negative > total - counts[ESCAPE];
    if (s->flip[row])
        for (int c = 0; c < ESCAPE; c++) {
            const uint32_t other = counts[c];
            counts[c] = counts[c + 16];
            counts[c + 16] = other;
        }
    s->class_of[row] = class_for(model, counts, total);
}

#define PER_DTYPE(call)                               \
    do {                                              \
        if (s->dtype == CTX_BF16) call(CTX_BF16);     \
        else if (s->dtype == CTX_FP16) call(CTX_FP16);\
        else call(CTX_FP32);                          \
    } while (0)

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
    const uint64_t mask = LOSSLESS_MASK(flags), kept = LOSSLESS_COMPRESS(LOSSLESS_MASK(first), mask);
    uint8_t *at = s->first_bits + s->bits / 8;
    const unsigned shift = s->bits % 8, count = (unsigned)__builtin_popcountll(mask);
    const uint8_t before = (uint8_t)(*at & ((1u << shift) - 1));
    put_le64(at, kept << shift | before);
    at[8] = shift ? (uint8_t)(kept >> (64 - shift)) : 0;
    s->bits += count;
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
    const uint8_t *at = s->first_bits + *bit / 8;
    const unsigned shift = *bit % 8;
    const uint64_t stored = get64(at) >> shift | (shift ? (uint64_t)at[8] << (64 - shift) : 0);
    const uint64_t known = LOSSLESS_EXPAND(stored, mask);
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
