/* attention/avx2.c - attention with eight lanes and fused multiply-add. */
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "attention.h"

#define ATTEND ctx_attend_avx2
#define LANES 8
#define OWN_HALVES
#define OWN_NIBBLES
#define OWN_COLUMNS
#define ROWS 6
#define WIDTH 2

static inline float nearest(float x) { return rintf(x); }

static inline float total8(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#define total(v) total8((__m256)(v))

static void halves(float *out, const uint8_t *at, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(at + 2 * i))));
    for (; i < n; i++) out[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(at[2 * i] | at[2 * i + 1] << 8)));
}

static void nibbles(float *out, const uint8_t *at, float step, float low) {
    const __m128i packed = _mm_loadu_si128((const void *)at), mask = _mm_set1_epi8(15);
    const __m128i codes[2] = {_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16(packed, 4), mask)};
    for (int i = 0; i < 4; i++, out += 8) {
        const __m128i eight = i % 2 ? _mm_srli_si128(codes[i / 2], 8) : codes[i / 2];
        const __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
        _mm256_storeu_ps(out, _mm256_fmadd_ps(x, _mm256_set1_ps(step), _mm256_set1_ps(low)));
    }
}

/* Eight rows of eight values at a time, by pairs, quarters and halves. */
static void columns(float *to, const float *from, size_t dim) {
    for (size_t d = 0; d < dim; d += 8) {
        __m256 row[8], pair[8], quarter[8];
        for (int i = 0; i < 8; i++) row[i] = _mm256_loadu_ps(from + (size_t)i * dim + d);
        for (int i = 0; i < 8; i += 2) pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]), pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; j++) {
                quarter[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
                quarter[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
            }
        for (size_t i = 0; i < 4; i++) {
            _mm256_storeu_ps(to + (d + i) * CTX_ATTEND_STRIP, _mm256_permute2f128_ps(quarter[i], quarter[i + 4], 0x20));
            _mm256_storeu_ps(to + (d + i + 4) * CTX_ATTEND_STRIP, _mm256_permute2f128_ps(quarter[i], quarter[i + 4], 0x31));
        }
    }
}

#include "loops.inc"
