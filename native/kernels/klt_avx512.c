/* klt_avx512.c - the transform coder with sixteen lanes: products of pairs by VPDPWSSD, of bytes by VPDPBUSD. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define KLT ctx_klt_avx512
#define KLT_NEEDS (CTX_CPU_AVX512 | CTX_CPU_VNNI)
#define LANES 16
#define TILE_BLOCKS 4
#define TILE_VECS 4
#define NARROW
#define OWN_SYMBOLS

typedef __m512i sums;
typedef __m512i pair_block;
typedef __m512i quad_block;

static inline __m512i four_bytes(const void *at) {
    int32_t word;
    memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}
static inline sums no_sums(void) { return _mm512_setzero_si512(); }
static inline pair_block load_pairs(const int16_t *at) { return _mm512_loadu_si512(at); }
static inline sums add_pairs(sums s, pair_block b, const int16_t *q) { return _mm512_dpwssd_epi32(s, b, four_bytes(q)); }
static inline sums start(const int32_t *bias) { return _mm512_loadu_si512(bias); }
static inline quad_block load_quads(const int8_t *at) { return _mm512_loadu_si512(at); }
static inline sums add_quads(sums s, quad_block b, const uint8_t *q) { return _mm512_dpbusd_epi32(s, four_bytes(q), b); }
static inline sums join(sums s) { return _mm512_slli_epi32(s, 6); }
static inline void finish(float *out, sums s, float scale, const float *gain, const float *mean) {
    const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_loadu_ps(gain));
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_mul_ps(factor, _mm512_cvtepi32_ps(s)), _mm512_loadu_ps(mean)));
}

static void symbols_of(uint8_t *symbols, uint8_t *low, const int16_t *q, unsigned shift) {
    const __m512i half = _mm512_set1_epi16((short)(1 << shift >> 1));
    const __m128i by = _mm_cvtsi32_si128((int)shift);
    for (int i = 0; i < 2; i++) {
        const __m512i raised = _mm512_adds_epi16(_mm512_loadu_si512(q + 32 * i), half);
        const __m512i high = _mm512_adds_epi16(_mm512_sra_epi16(raised, by), _mm512_set1_epi16(15));
        const __m512i symbol = _mm512_min_epu16(high, _mm512_set1_epi16(31)); /* a negative one is large */
        _mm256_storeu_si256((__m256i *)(void *)(symbols + 32 * i), _mm512_cvtepi16_epi8(symbol));
        for (unsigned bit = 0; bit < shift; bit++) {
            const uint32_t mask = _mm512_test_epi16_mask(raised, _mm512_set1_epi16((short)(1 << bit)));
            memcpy(low + 8 * bit + 4 * i, &mask, 4);
        }
    }
}

static uint64_t escapes(const uint8_t *symbols, uint32_t known) {
    const __m512i of = _mm512_loadu_si512(symbols);
    const __mmask64 last = _mm512_cmpeq_epi8_mask(of, _mm512_set1_epi8(31));
    if ((known | 0x80000000u) == UINT32_MAX) return last;
    uint8_t absent[32];
    for (int s = 0; s < 32; s++) absent[s] = known >> s & 1 ? 0 : 255;
    const __m512i low = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)absent));
    const __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)(absent + 16)));
    const __mmask64 upper = _mm512_test_epi8_mask(of, _mm512_set1_epi8(16));
    return last | _mm512_movepi8_mask(_mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(low, of), upper, high, of));
}

#include "klt.inc"
