/* klt/neon.c - the transform coder with four lanes; everything used is in the base of ARMv8-A. */
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define KLT ctx_klt_neon
#define LANES 4
#define TILE_BLOCKS 1
#define TILE_VECS 4

typedef int32x4x4_t sums;
typedef struct pair_block {
    int16x8x2_t low, high; /* of 8 channels: first components, second components */
} pair_block;

static inline sums no_sums(void) { return (sums){{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}}; }
static inline pair_block load_pairs(const int16_t *at) { return (pair_block){vld2q_s16(at), vld2q_s16(at + 16)}; }
static inline sums add_pairs(sums s, pair_block b, const int16_t *q) {
    for (int i = 0; i < 2; i++) {
        s.val[0] = vmlal_n_s16(s.val[0], vget_low_s16(b.low.val[i]), q[i]);
        s.val[1] = vmlal_n_s16(s.val[1], vget_high_s16(b.low.val[i]), q[i]);
        s.val[2] = vmlal_n_s16(s.val[2], vget_low_s16(b.high.val[i]), q[i]);
        s.val[3] = vmlal_n_s16(s.val[3], vget_high_s16(b.high.val[i]), q[i]);
    }
    return s;
}
typedef int32x4_t lanes;
static inline lanes no_lanes(void) { return vdupq_n_s32(0); }
static inline lanes add_lanes(lanes s, const int16_t *x, const int16_t *f) {
    const int16x4x2_t of = vld2_s16(x);
    return vmlal_n_s16(vmlal_n_s16(s, of.val[0], f[0]), of.val[1], f[1]);
}
static inline void finish(float *out, sums s, float scale, const float *gain, const float *mean) {
    for (int i = 0; i < 4; i++) {
        const float32x4_t factor = vmulq_n_f32(vld1q_f32(gain + 4 * i), scale);
        vst1q_f32(out + 4 * i, vaddq_f32(vmulq_f32(factor, vcvtq_f32_s32(s.val[i])), vld1q_f32(mean + 4 * i)));
    }
}

#include "loops.inc"
