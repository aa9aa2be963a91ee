/* linear/avx512.c - a linear layer with sixteen lanes and fused multiply-add. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define LINEAR ctx_linear_avx512
#define LANES 16
#define MOST 4
#define total(v) _mm512_reduce_add_ps((__m512)(v))

#define OWN_LOADS
#define halves(at) (vec) _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(at))), 16)
#define codes(at) (vec) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(at))))

#include "loops.inc"
