/* core/avx512.c - sixteen fp32 lanes. VCVTNEPS2BF16 is not used: it flushes subnormals, which other tables keep. */
#include "tiles_x86.h"

#define TABLE ctx_avx512
#define TABLE_NAME "avx512"
#define LANES 16
typedef __m512 vec;

static inline vec load_fp32(const uint8_t *at) { return _mm512_loadu_ps(at); }
static inline vec load_fp16(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
static inline vec load_bf16(const uint8_t *at) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline void store_fp32(uint8_t *at, vec v) { _mm512_storeu_ps(at, v); }
static inline void store_fp16(uint8_t *at, vec v) {
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline __m512i round_bf16(__m512i bits, __m512i high) {
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
}
static inline void store_bf16(uint8_t *at, vec v) {
    __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    __m512i words = _mm512_mask_or_epi32(round_bf16(bits, high), nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(words));
}
static inline void store_bf16_canonical(uint8_t *at, vec v) {
    __m512i bits = _mm512_castps_si512(v);
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(round_bf16(bits, _mm512_srli_epi32(bits, 16))));
}

static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec canon(vec v) {
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(v, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}
static inline vec load_twice(const float *at) {
    __m512 eight = _mm512_castps256_ps512(_mm256_loadu_ps(at));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), eight);
}
static inline vec swap(vec v) { return _mm512_permute_ps(v, 0xb1); }
static inline vec flip_even(vec v) {
    return _mm512_xor_ps(v, _mm512_castsi512_ps(_mm512_set1_epi64(0x80000000)));
}

#define STRIPES
static void stripes(uint64_t acc[8], const uint8_t *src, const uint8_t *secret, size_t n) {
    __m512i sum = _mm512_loadu_si512(acc);
    for (size_t j = 0; j < n; j++, src += 64, secret += 8) {
        __m512i data = _mm512_loadu_si512(src), v = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
        __m512i product = _mm512_mul_epu32(v, _mm512_srli_epi64(v, 32));
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(data, _MM_PERM_BADC)));
    }
    _mm512_storeu_si512(acc, sum);
}
static void copy_stripes(uint64_t acc[8], uint8_t *dst, const uint8_t *src, const uint8_t *secret, size_t n) {
    __m512i sum = _mm512_loadu_si512(acc);
    for (size_t j = 0; j < n; j++, src += 64, secret += 8, dst += 64) {
        __m512i data = _mm512_loadu_si512(src), v = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
        __m512i product = _mm512_mul_epu32(v, _mm512_srli_epi64(v, 32));
        _mm512_stream_si512((void *)dst, data);
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(data, _MM_PERM_BADC)));
    }
    _mm512_storeu_si512(acc, sum);
}
static void fence(void) { _mm_sfence(); }

#include "loops.inc"
