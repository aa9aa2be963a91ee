/* scalar.h - one element at a time: the meaning of every load, store and rotation, and each table's loop tails. */
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

static inline void put16(uint8_t *at, uint16_t value) { memcpy(at, &value, 2); }

static inline uint32_t get32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static inline void put32(uint8_t *at, uint32_t value) { memcpy(at, &value, 4); }

/* Values travel as fp32 bits: a signalling NaN passed as a float may be changed on the way. */
static inline uint32_t bits_fp32(const uint8_t *at) { return get32(at); }
static inline uint32_t bits_bf16(const uint8_t *at) { return (uint32_t)get16(at) << 16; }

static inline uint32_t bits_fp16(const uint8_t *at) {
    uint32_t half = get16(at), sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude > 0x7c00u) return sign | 0x7fc00000u | magnitude << 13;
    if (magnitude == 0x7c00u) return sign | 0x7f800000u;
    if (magnitude >= 0x0400u) return sign | ((magnitude << 13) + (112u << 23));
    /* Subnormal: magnitude * 2^-24, exact in fp32. */
    return sign | to_bits((float)magnitude * 0x1p-24f);
}

static inline void set_fp32(uint8_t *at, uint32_t bits) { put32(at, bits); }

static inline void set_bf16(uint8_t *at, uint32_t bits) {
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    if ((bits & 0x7fffffffu) > 0x7f800000u) rounded = bits >> 16 | 0x40u;
    put16(at, (uint16_t)rounded);
}

static inline void set_fp16(uint8_t *at, uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu, half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    } else if (magnitude >= 0x47800000u) { /* 2^16 and above, infinity */
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) { /* normal: 2^-14 and above; 65520 and above carries into infinity */
        half = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    } else {
        /* Subnormal: adding 0.5 puts the value's unit of 2^-24 at the mantissa's end and rounds it to nearest even. */
        half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    }
    put16(at, (uint16_t)(sign | half));
}

static inline uint32_t canonical(float value) { return value == value ? to_bits(value) : 0x7fc00000u; }

#endif
