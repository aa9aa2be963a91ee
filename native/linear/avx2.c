/* linear/avx2.c - a linear layer with eight lanes and fused multiply-add. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define LINEAR ctx_linear_avx2
#define LANES 8
#define MOST 3
#define FEW 4

static inline float total8(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#define total(v) total8((__m256)(v))

#define OWN_LOADS
#define halves(at) (vec) _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(at))), 16)
#define codes(at) (vec) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(at))))

#include "loops.inc"
