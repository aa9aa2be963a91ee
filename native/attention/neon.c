/* attention/neon.c - attention with four lanes and fused multiply-add. */
#include <arm_neon.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define ATTEND ctx_attend_neon
#define LANES 4
#define OWN_HALVES

static inline float nearest(float x) { return rintf(x); }

#define total(v) vaddvq_f32((float32x4_t)(v))

static void halves(float *out, const uint8_t *at, size_t n) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at + 2 * i))));
    for (; i < n; i++) out[i] = vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16((uint16_t)(at[2 * i] | at[2 * i + 1] << 8)))), 0);
}

#include "loops.inc"
