/* linear/neon.c - a linear layer with four lanes and fused multiply-add. */
#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#define LINEAR ctx_linear_neon
#define LANES 4
#define MOST 4
#define FEW 8
#define total(v) vaddvq_f32((float32x4_t)(v))

#include "loops.inc"
