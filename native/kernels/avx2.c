/* avx2.c - eight fp32 lanes; halves through F16C, bfloat16 by integer arithmetic. */
#include "tiles_x86.h"

#define TABLE ctx_avx2
#define TABLE_NAME "avx2"
#define TABLE_NEEDS (CTX_CPU_AVX2 | CTX_CPU_F16C)
#define LANES 8
typedef __m256 vec;

static inline vec load_fp32(const uint8_t *at) { return _mm256_loadu_ps((const float *)(const void *)at); }
static inline vec load_fp16(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
static inline vec load_bf16(const uint8_t *at) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline void store_fp32(uint8_t *at, vec v) { _mm256_storeu_ps((float *)(void *)at, v); }
static inline void store_fp16(uint8_t *at, vec v) {
    _mm_storeu_si128((__m128i *)at, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m256i round_bf16(__m256i bits, __m256i high) {
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
static inline void store_words(uint8_t *at, __m256i words) {
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)at, packed);
}
static inline void store_bf16(uint8_t *at, vec v) {
    __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    store_words(at, _mm256_blendv_epi8(round_bf16(bits, high), quiet, nan));
}
static inline void store_bf16_canonical(uint8_t *at, vec v) {
    __m256i bits = _mm256_castps_si256(v);
    store_words(at, round_bf16(bits, _mm256_srli_epi32(bits, 16)));
}

static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec canon(vec v) {
    vec nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
static inline vec load_twice(const float *at) {
    __m256 four = _mm256_castps128_ps256(_mm_loadu_ps(at));
    return _mm256_permutevar8x32_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}
static inline vec swap(vec v) { return _mm256_permute_ps(v, 0xb1); }
static inline vec flip_even(vec v) {
    return _mm256_xor_ps(v, _mm256_castsi256_ps(_mm256_set1_epi64x(0x80000000)));
}

#include "shapes.inc"
