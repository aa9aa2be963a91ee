/* lossless/steps.h - what the files of lossless packing share: constants, and the tail's bits one step after another. */
#ifndef CTXREUSE_LOSSLESS_STEPS_H
#define CTXREUSE_LOSSLESS_STEPS_H

#include "lossless.h"
#include "core/scalar.h"

enum { LANES = 64, FINE = 3 /* exponents whose mantissa's first bit is coded */, ESCAPE = 15 };

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

INLINE int mantissa_bits(ctx_dtype dtype) { return dtype == CTX_FP16 ? 10 : 7; }

/* The steps of a row by which its class is chosen: more would not change much, and the sums have 32 bits. */
INLINE size_t sampled_steps(const ctx_lossless_steps *s) { return s->steps_per_row < LANES ? s->steps_per_row : LANES; }

/* One lane in so many decides on the class of a row: choosing is half of encoding, and sampling all of them would save
 * 0.4 % of the bytes. */
enum { SAMPLED = 2 };

#endif
