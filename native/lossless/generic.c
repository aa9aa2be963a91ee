/* lossless/generic.c - lossless packing as plain loops over 64 values, which compilers vectorise for the base set of any
 * machine (on aarch64 that is NEON): always usable, and the reference for the others.
 */
#include "steps.h"

#define EACH_LANE for (int i = 0; i < LANES; i++)

/* Bit i is byte i, of 64 bytes that are 0 or 1: a multiplication moves eight of them together. */
INLINE uint64_t mask_of(const uint8_t *flags) {
    uint64_t mask = 0;
    for (int i = 0; i < 8; i++) mask |= (get64(flags + 8 * i) * 0x0102040810204080u >> 56) << 8 * i;
    return mask;
}

/* The low bits of `bits`, in order, to where the mask has ones. */
INLINE uint64_t expand(uint64_t bits, uint64_t mask) {
    uint64_t out = 0;
    for (; mask; mask &= mask - 1, bits >>= 1) out |= (mask & (0 - mask)) & (0 - (bits & 1));
    return out;
}

INLINE uint64_t compress(uint64_t bits, uint64_t mask) {
    uint64_t out = 0;
    for (int at = 0; mask; mask &= mask - 1, at++) out |= (uint64_t)((bits & mask & (0 - mask)) != 0) << at;
    return out;
}

/* The inverse of mask_of. */
INLINE void flags_of(uint64_t mask, uint8_t flags[LANES]) {
    for (int i = 0; i < 8; i++) {
        const uint64_t bits = (mask >> 8 * i & 255) * 0x0101010101010101u & 0x8040201008040201u;
        put_le64(flags + 8 * i, ((bits + 0x00406070787c7e7fu) | bits) >> 7 & 0x0101010101010101u);
    }
}

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


/* Add what a step's symbols cost to each class: in words, for few instruction sets multiply more of them at once. */
INLINE void add_costs(const ctx_lossless_model *model, const uint8_t symbol[LANES], uint32_t sum[CTX_LOSSLESS_CLASSES]) {
    uint8_t counts[2][CTX_RANS_SYMBOLS] = {{0}};
    uint16_t part[CTX_LOSSLESS_CLASSES] = {0};
    for (int i = 0; i < LANES; i += 2 * SAMPLED) counts[0][symbol[i]]++, counts[1][symbol[i + SAMPLED]]++;
    for (int s = 0; s < CTX_RANS_SYMBOLS; s++) {
        const uint16_t *row = model->cost[s], n = (uint16_t)(counts[0][s] + counts[1][s]);
        if (n == 0) continue;
        for (int c = 0; c < CTX_LOSSLESS_CLASSES; c++) part[c] = (uint16_t)(part[c] + n * row[c]);
    }
    for (int c = 0; c < CTX_LOSSLESS_CLASSES; c++) sum[c] += part[c];
}

/* Top exponent over the whole row; flip by its first step. */
INLINE void choose_row(const ctx_lossless_model *model, const ctx_lossless_steps *s, ctx_dtype dtype, size_t row) {
    const size_t stride = LANES * ctx_dtype_bytes(dtype), sampled = sampled_steps(s);
    const uint8_t *values = s->values + row * s->steps_per_row * stride;
    uint16_t half[LANES];
    uint8_t exponent[LANES], symbol[LANES], top = 0, flip = 0;
    uint32_t sum[CTX_LOSSLESS_CLASSES] = {0};
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
        add_costs(model, symbol, sum);
    }
    s->top[row] = top;
    s->flip[row] = flip;
    uint8_t found = 0; /* the first of the least cost */
    for (uint8_t c = 1; c < CTX_LOSSLESS_CLASSES; c++) found = sum[c] < sum[found] ? c : found;
    s->class_of[row] = found;
}

static void choose(const ctx_lossless_model *model, const ctx_lossless_steps *s) {
#define CHOOSE(dtype) \
    for (size_t row = 0; row < s->rows; row++) choose_row(model, s, dtype, row)
    PER_DTYPE(CHOOSE);
}

/* ---- Splitting -------------------------------------------------------------------------------------------------- */

INLINE void put_low(ctx_dtype dtype, const uint8_t *values, const uint16_t half[LANES], uint8_t *low) {
    if (dtype == CTX_FP16) {
        uint8_t ninth[LANES];
        EACH_LANE low[i] = (uint8_t)half[i];
        EACH_LANE ninth[i] = (uint8_t)(half[i] >> 8 & 1);
        put_le64(low + LANES, mask_of(ninth));
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
    for (int i = 0; i < LANES; i++) {
        if (symbol[i] != ESCAPE && present >> symbol[i] & 1) continue;
        symbol[i] = ESCAPE;
        s->exponents[s->escapes] = (uint8_t)(half[i] >> bits & (dtype == CTX_FP16 ? 31 : 255));
        s->signs[s->escapes++] = (uint8_t)(half[i] >> 15);
    }
    EACH_LANE flags[i] = (symbol[i] & 15) >= 2 * FINE;
    const uint64_t mask = mask_of(flags);
    put_bits(s, compress(mask_of(first), mask), (unsigned)__builtin_popcountll(mask));
}

static void split(const ctx_lossless_model *model, ctx_lossless_steps *s) {
    s->bits = s->escapes = 0;
#define SPLIT(dtype)                                                      \
    for (size_t row = 0, step = 0; row < s->rows; row++)                  \
        for (size_t i = 0; i < s->steps_per_row; i++, step++) split_step(model, s, dtype, step, row)
    PER_DTYPE(SPLIT);
}

/* ---- Joining ---------------------------------------------------------------------------------------------------- */

static void count(const uint8_t *symbols, size_t steps, size_t *bits, size_t *escapes) {
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
        uint8_t ninth[LANES];
        flags_of(get64(low + LANES), ninth);
        EACH_LANE mantissa[i] = (uint16_t)(low[i] | ninth[i] << 8);
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
    const uint64_t mask = mask_of(flags);
    const uint64_t known = expand(get_bits(s, *bit), mask);
    *bit += (unsigned)__builtin_popcountll(mask);
    EACH_LANE {
        const uint8_t level = symbol[i] & 15;
        exponent[i] = (uint8_t)(top - (level < 2 * FINE ? level >> 1 : level - FINE));
        sign[i] = (uint8_t)(symbol[i] >> 4 ^ flip);
    }
    flags_of(known, first);
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

static void join(const ctx_lossless_steps *s) {
    size_t bit = 0, escape = 0;
#define JOIN(dtype)                                                       \
    for (size_t row = 0, step = 0; row < s->rows; row++)                  \
        for (size_t i = 0; i < s->steps_per_row; i++, step++) join_step(s, dtype, step, row, &bit, &escape)
    PER_DTYPE(JOIN);
}

const ctx_lossless_coder ctx_lossless_generic = {
    .choose = choose, .split = split, .count = count, .join = join};
