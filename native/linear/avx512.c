/* linear/avx512.c - a linear layer with sixteen lanes and fused multiply-add. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "linear.h"

#define LINEAR ctx_linear_avx512
#define LANES 16
#define MOST 4
#define FEW 8
#define total(v) _mm512_reduce_add_ps((__m512)(v))

/* Eight sums at once, added in the order of _mm512_reduce_add_ps: halves, quarters, then pairs of a quarter. */
#define UNROLL _Pragma("GCC unroll 8")
#define OWN_TOTALS
#define totals(sums, to) _mm256_storeu_ps(to, totals8((const __m512 *)(sums)))
_Static_assert(CTX_GROUP == 8, "totals8 adds a whole group");
static inline __m256 totals8(const __m512 *v) {
    __m512 half[4], quarter[2];
    UNROLL for (int i = 0; i < 4; i++)
        half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xee));
    UNROLL for (int i = 0; i < 2; i++) { /* sums i, i + 2, i + 4, i + 6 */
        const __m512 a = half[i], b = half[i + 2];
        quarter[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    const __m512 a = quarter[0], b = quarter[1]; /* lanes of four: sums 0 4 2 6, and 1 5 3 7 */
    const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(c, c, 0x88), _mm512_shuffle_ps(c, c, 0xdd));
    /* Of each lane of four the first two: 0 1 | 4 5 | 2 3 | 6 7. */
    const __m512i order = _mm512_setr_epi32(0, 1, 8, 9, 4, 5, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sum));
}

#define OWN_LOADS
#define halves(at) (vec) _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(at))), 16)
#define codes(at) (vec) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(at))))

#include "avx512_pairs.h"
#include "loops.inc"
