/* core/neon.c - four fp32 lanes; everything used is in the base of ARMv8-A, so every aarch64 machine has it. */
#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TABLE ctx_neon
#define TABLE_NAME "neon"
#define LANES 4
typedef float32x4_t vec;

/* Bytes are loaded and reinterpreted, because blocks lie at any byte offset. */
static inline vec load_fp32(const uint8_t *at) { return vreinterpretq_f32_u8(vld1q_u8(at)); }
static inline vec load_fp16(const uint8_t *at) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at))); }
static inline vec load_bf16(const uint8_t *at) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(at)), 16));
}

static inline void store_fp32(uint8_t *at, vec v) { vst1q_u8(at, vreinterpretq_u8_f32(v)); }
static inline void store_fp16(uint8_t *at, vec v) { vst1_u8(at, vreinterpret_u8_f16(vcvt_f16_f32(v))); }
static inline uint32x4_t round_bf16(uint32x4_t bits, uint32x4_t high) {
    uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    return vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}
static inline void store_bf16(uint8_t *at, vec v) {
    uint32x4_t bits = vreinterpretq_u32_f32(v), high = vshrq_n_u32(bits, 16);
    uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
    vst1_u8(at, vreinterpret_u8_u16(vmovn_u32(vbslq_u32(vceqq_f32(v, v), round_bf16(bits, high), quiet))));
}
static inline void store_bf16_canonical(uint8_t *at, vec v) {
    uint32x4_t bits = vreinterpretq_u32_f32(v);
    vst1_u8(at, vreinterpret_u8_u16(vmovn_u32(round_bf16(bits, vshrq_n_u32(bits, 16)))));
}

static inline vec mul(vec a, vec b) { return vmulq_f32(a, b); }
static inline vec add(vec a, vec b) { return vaddq_f32(a, b); }
static inline vec sub(vec a, vec b) { return vsubq_f32(a, b); }
static inline vec canon(vec v) {
    return vbslq_f32(vceqq_f32(v, v), v, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000)));
}
static inline vec load_twice(const float *at) {
    float32x2_t two = vreinterpret_f32_u8(vld1_u8((const uint8_t *)at));
    return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
}
static inline vec swap(vec v) { return vrev64q_f32(v); }
static inline vec flip_even(vec v) {
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), vreinterpretq_u32_u64(vdupq_n_u64(0x80000000))));
}

#define TILE16 8
#define TILE32 4

static inline void tile16(uint8_t *dst, size_t dst_step, const uint8_t *src, size_t src_step) {
    uint16x8_t r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = vreinterpretq_u16_u8(vld1q_u8(src + (size_t)i * src_step));
    for (int i = 0; i < 8; i += 2) {
        t[i] = vtrn1q_u16(r[i], r[i + 1]);
        t[i + 1] = vtrn2q_u16(r[i], r[i + 1]);
    }
    for (int h = 0; h < 8; h += 4)
        for (int i = h; i < h + 2; i++) {
            uint32x4_t a = vreinterpretq_u32_u16(t[i]), b = vreinterpretq_u32_u16(t[i + 2]);
            r[i] = vreinterpretq_u16_u32(vtrn1q_u32(a, b));
            r[i + 2] = vreinterpretq_u16_u32(vtrn2q_u32(a, b));
        }
    for (int i = 0; i < 4; i++) {
        uint64x2_t a = vreinterpretq_u64_u16(r[i]), b = vreinterpretq_u64_u16(r[i + 4]);
        vst1q_u8(dst + (size_t)i * dst_step, vreinterpretq_u8_u64(vtrn1q_u64(a, b)));
        vst1q_u8(dst + (size_t)(i + 4) * dst_step, vreinterpretq_u8_u64(vtrn2q_u64(a, b)));
    }
}

static inline void tile32(uint8_t *dst, size_t dst_step, const uint8_t *src, size_t src_step) {
    uint32x4_t r[4], t[4];
    for (int i = 0; i < 4; i++) r[i] = vreinterpretq_u32_u8(vld1q_u8(src + (size_t)i * src_step));
    for (int i = 0; i < 4; i += 2) {
        t[i] = vtrn1q_u32(r[i], r[i + 1]);
        t[i + 1] = vtrn2q_u32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        uint64x2_t a = vreinterpretq_u64_u32(t[i]), b = vreinterpretq_u64_u32(t[i + 2]);
        vst1q_u8(dst + (size_t)i * dst_step, vreinterpretq_u8_u64(vtrn1q_u64(a, b)));
        vst1q_u8(dst + (size_t)(i + 2) * dst_step, vreinterpretq_u8_u64(vtrn2q_u64(a, b)));
    }
}

#define STRIPES
static void stripes(uint64_t acc[8], const uint8_t *src, const uint8_t *secret, size_t n) {
    uint64x2_t sum[4];
    for (int i = 0; i < 4; i++) sum[i] = vld1q_u64(acc + 2 * i);
    for (size_t j = 0; j < n; j++, src += 64, secret += 8)
        for (int i = 0; i < 4; i++) {
            uint64x2_t data = vreinterpretq_u64_u8(vld1q_u8(src + 16 * i));
            uint64x2_t v = veorq_u64(data, vreinterpretq_u64_u8(vld1q_u8(secret + 16 * i)));
            sum[i] = vaddq_u64(sum[i], vextq_u64(data, data, 1));
            sum[i] = vmlal_u32(sum[i], vmovn_u64(v), vshrn_n_u64(v, 32));
        }
    for (int i = 0; i < 4; i++) vst1q_u64(acc + 2 * i, sum[i]);
}
static void copy_stripes(uint64_t acc[8], uint8_t *dst, const uint8_t *src, const uint8_t *secret, size_t n) {
    stripes(acc, src, secret, n);
    memcpy(dst, src, 64 * n);
}
static void fence(void) {}

#include "loops.inc"
