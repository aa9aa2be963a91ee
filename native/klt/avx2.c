/* klt/avx2.c - the transform coder with eight lanes: products of pairs by VPMADDWD. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define KLT ctx_klt_avx2
#define LANES 8
#define TILE_BLOCKS 1
#define TILE_VECS 2

typedef struct sums {
    __m256i low, high;
} sums;
typedef sums pair_block;

static inline __m256i load256(const void *at) { return _mm256_loadu_si256(at); }
static inline sums no_sums(void) { return (sums){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline pair_block load_pairs(const int16_t *at) { return (sums){load256(at), load256(at + 16)}; }
static inline sums add_pairs(sums s, pair_block b, const int16_t *q) {
    int32_t two;
    memcpy(&two, q, 4);
    const __m256i both = _mm256_set1_epi32(two);
    return (sums){_mm256_add_epi32(s.low, _mm256_madd_epi16(b.low, both)),
                  _mm256_add_epi32(s.high, _mm256_madd_epi16(b.high, both))};
}
typedef __m256i lanes;
static inline lanes no_lanes(void) { return _mm256_setzero_si256(); }
static inline lanes add_lanes(lanes s, const int16_t *x, const int16_t *f) {
    int32_t two;
    memcpy(&two, f, 4);
    return _mm256_add_epi32(s, _mm256_madd_epi16(load256(x), _mm256_set1_epi32(two)));
}
static inline void finish8(float *out, __m256i s, __m256 scale, const float *gain, const float *mean) {
    const __m256 factor = _mm256_mul_ps(scale, _mm256_loadu_ps(gain));
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_mul_ps(factor, _mm256_cvtepi32_ps(s)), _mm256_loadu_ps(mean)));
}
static inline void finish(float *out, sums s, float scale, const float *gain, const float *mean) {
    finish8(out, s.low, _mm256_set1_ps(scale), gain, mean);
    finish8(out + 8, s.high, _mm256_set1_ps(scale), gain + 8, mean + 8);
}

#include "loops.inc"
