/* core/scalar.h - one element at a time: the meaning of every load, store and rotation, and each table's loop tails. */
#ifndef CTXREUSE_SCALAR_H
#define CTXREUSE_SCALAR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { BYTES_fp32 = 4, BYTES_fp16 = 2, BYTES_bf16 = 2 };

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* memcpy, not a cast: blocks lie at any byte offset, and an unaligned pointer to a wider type is undefined. */
static inline uint16_t get16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, 2);
    return value;
}

static inline uint64_t get64(const uint8_t *at) { /* little-endian, as XXH3 reads */
    uint64_t value;
    memcpy(&value, at, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static inline void put16(uint8_t *at, uint16_t value) { memcpy(at, &value, 2); }

static inline uint32_t get32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static inline void put32(uint8_t *at, uint32_t value) { memcpy(at, &value, 4); }

/* Numbers of a stream: little-endian on every machine. */
static inline uint32_t get_le16(const uint8_t *at) { return (uint32_t)at[0] | (uint32_t)at[1] << 8; }
static inline uint32_t get_le32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}
static inline void put_le16(uint8_t *at, uint32_t x) { at[0] = (uint8_t)x, at[1] = (uint8_t)(x >> 8); }
static inline void put_le32(uint8_t *at, uint32_t x) {
    at[0] = (uint8_t)x, at[1] = (uint8_t)(x >> 8), at[2] = (uint8_t)(x >> 16), at[3] = (uint8_t)(x >> 24);
}

/* Values travel as fp32 bits: a signalling NaN passed as a float may be changed on the way. */
static inline uint32_t bits_fp32(const uint8_t *at) { return get32(at); }
static inline uint32_t bits_bf16(const uint8_t *at) { return (uint32_t)get16(at) << 16; }

/* No branches from here on: the generic table's loops are then vectorised for the base instruction set (fp16 to fp32:
 * 1.9 to 4.8 GB/s). */
static inline uint32_t bits_fp16(const uint8_t *at) {
    uint32_t half = get16(at), sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
    /* A subnormal is m * 2^-24: put m behind the exponent of 2^-14 and take 2^-14 away, exactly. */
    uint32_t subnormal = to_bits(from_bits(magnitude + 0x38800000u) - 0x1p-14f);
    uint32_t normal = magnitude + (112u << 23);
    uint32_t value = magnitude < 0x00800000u ? subnormal : normal;
    value = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : value;
    value = magnitude > 0x0f800000u ? value | 0x00400000u : value;
    return sign | value;
}

static inline void set_fp32(uint8_t *at, uint32_t bits) { put32(at, bits); }

static inline void set_bf16(uint8_t *at, uint32_t bits) {
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40u;
    put16(at, (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded));
}

static inline void set_fp16(uint8_t *at, uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    /* Rounding may carry into the exponent, and from 65520 on into infinity: both are what rounding means. */
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    /* Adding 0.5 puts the unit 2^-24 of a subnormal at the mantissa's end and rounds to nearest even there. */
    uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal; /* 2^-14 */
    half = magnitude >= 0x47800000u ? 0x7c00u : half;             /* 2^16 and above */
    half = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : half;
    put16(at, (uint16_t)(sign | half));
}

static inline uint32_t canonical(float value) { return value == value ? to_bits(value) : 0x7fc00000u; }

#endif
