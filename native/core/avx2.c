/* core/avx2.c - eight fp32 lanes; halves through F16C, bfloat16 by integer arithmetic. */
#include "tiles_x86.h"

#define TABLE ctx_avx2
#define TABLE_NAME "avx2"
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

#define STRIPES
static inline __m256i stripe(__m256i sum, const uint8_t *src, const uint8_t *secret) {
    __m256i data = _mm256_loadu_si256((const __m256i *)(const void *)src);
    __m256i v = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(const void *)secret));
    __m256i product = _mm256_mul_epu32(v, _mm256_srli_epi64(v, 32));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e)));
}
static void stripes(uint64_t acc[8], const uint8_t *src, const uint8_t *secret, size_t n) {
    __m256i *held = (__m256i *)(void *)acc, low = _mm256_loadu_si256(held), high = _mm256_loadu_si256(held + 1);
    for (size_t j = 0; j < n; j++, src += 64, secret += 8) {
        low = stripe(low, src, secret);
        high = stripe(high, src + 32, secret + 32);
    }
    _mm256_storeu_si256(held, low);
    _mm256_storeu_si256(held + 1, high);
}
static inline void stream(uint8_t *dst, const uint8_t *src) {
    _mm256_stream_si256((__m256i *)(void *)dst, _mm256_loadu_si256((const __m256i *)(const void *)src));
}
static void copy_stripes(uint64_t acc[8], uint8_t *dst, const uint8_t *src, const uint8_t *secret, size_t n) {
    __m256i *held = (__m256i *)(void *)acc, low = _mm256_loadu_si256(held), high = _mm256_loadu_si256(held + 1);
    for (size_t j = 0; j < n; j++, src += 64, secret += 8, dst += 64) {
        stream(dst, src);
        stream(dst + 32, src + 32);
        low = stripe(low, src, secret);
        high = stripe(high, src + 32, secret + 32);
    }
    _mm256_storeu_si256(held, low);
    _mm256_storeu_si256(held + 1, high);
}
static void fence(void) { _mm_sfence(); }

#include "loops.inc"
