/* klt/generic.c - the transform coder for the base instruction set. */
#include <stdint.h>

#define KLT ctx_klt_generic
#define LANES 4
#define TILE_BLOCKS 1
#define TILE_VECS 2

typedef struct sums {
    uint32_t at[16];
} sums;
typedef const int16_t *pair_block;

static inline sums no_sums(void) { return (sums){{0}}; }
static inline pair_block load_pairs(const int16_t *at) { return at; }
static inline sums add_pairs(sums s, pair_block b, const int16_t *q) {
    for (int i = 0; i < 16; i++) s.at[i] += (uint32_t)(b[2 * i] * q[0]) + (uint32_t)(b[2 * i + 1] * q[1]);
    return s;
}
typedef uint32_t lanes __attribute__((vector_size(16)));
static inline lanes no_lanes(void) { return (lanes){0}; }
static inline lanes add_lanes(lanes s, const int16_t *x, const int16_t *f) {
    for (int i = 0; i < 4; i++) s[i] += (uint32_t)(x[2 * i] * f[0]) + (uint32_t)(x[2 * i + 1] * f[1]);
    return s;
}
static inline void finish(float *out, sums s, float scale, const float *gain, const float *mean) {
    for (int i = 0; i < 16; i++) {
        const float factor = scale * gain[i];
        out[i] = factor * (float)(int32_t)s.at[i] + mean[i];
    }
}

#include "loops.inc"
