/* klt_avx512.c - the transform coder with sixteen lanes: products of pairs by VPDPWSSD, of bytes by VPDPBUSD. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "../klt.h"

#define KLT ctx_klt_avx512
#define KLT_NEEDS (CTX_CPU_AVX512 | CTX_CPU_VNNI)
#define LANES 16
#define TILE_BLOCKS 4
#define TILE_VECS 4
#define NARROW
#define OWN_BITS
#define OWN_SYMBOLS
#define OWN_HEAD

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

static void bits(int16_t q[64], const uint8_t mask[8], int16_t value) {
    for (int i = 0; i < 2; i++) {
        uint32_t set;
        memcpy(&set, mask + 4 * i, 4);
        const __m512i row = _mm512_loadu_si512(q + 32 * i);
        _mm512_storeu_si512(q + 32 * i, _mm512_mask_add_epi16(row, set, row, _mm512_set1_epi16(value)));
    }
}

static inline void put_bf16(uint8_t *at, __m512 v) {
    const __m512i bits32 = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits32, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits32, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i *)(void *)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
}

/* As ctx_kernels convert and rotate; no value is a NaN here but 0x7fc00000. */
static inline __attribute__((always_inline)) void put_row(uint8_t *at, ctx_dtype dtype, const __m512 *v, const int blocks) {
    for (int b = 0; b < blocks; b++) {
        if (dtype == CTX_FP16)
            _mm256_storeu_si256((__m256i *)(void *)(at + 32 * b),
                                _mm512_cvtps_ph(v[b], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        else if (dtype == CTX_BF16)
            put_bf16(at + 32 * b, v[b]);
        else
            _mm512_storeu_ps(at + 64 * b, v[b]);
    }
}

static inline __m512 canon(__m512 v) { /* only with what no card brings: sums near 2^128 */
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

/* `many` tokens of a head of `blocks` blocks: sums, values, rotation, and the rows written. */
static inline __attribute__((always_inline)) void head_tile(const int blocks, const int many, const ctx_klt_rows *rows,
                                                            const ctx_klt_group *g, size_t block, size_t token,
                                                            const int16_t *q, size_t pairs, const uint8_t *narrow,
                                                            size_t quads, const float *scale) {
    const size_t all = (g->components + 1) / 2;
    const int16_t *basis = g->pairs + block * all * 32;
    const int8_t *small = g->quads + block * quads * 64;
    __m512i s[16];
    if (quads) {
        for (int b = 0; b < blocks; b++)
            for (int t = 0; t < many; t++) s[t * blocks + b] = start(g->bias + (block + (size_t)b) * 16);
        for (size_t i = 0; i < quads; i++)
            for (int b = 0; b < blocks; b++) {
                const __m512i of = load_quads(small + ((size_t)b * quads + i) * 64);
                for (int t = 0; t < many; t++)
                    s[t * blocks + b] = add_quads(s[t * blocks + b], of, narrow + (i * 64 + token + (size_t)t) * 4);
            }
        for (int i = 0; i < 16; i++) s[i] = join(s[i]);
    } else {
        for (int i = 0; i < 16; i++) s[i] = no_sums();
    }
    for (size_t i = 0; i < pairs; i++)
        for (int b = 0; b < blocks; b++) {
            const __m512i of = load_pairs(basis + ((size_t)b * all + i) * 32);
            for (int t = 0; t < many; t++)
                s[t * blocks + b] = add_pairs(s[t * blocks + b], of, q + (i * 64 + token + (size_t)t) * 2);
        }
    for (int t = 0; t < many; t++) {
        __m512 v[16];
        const size_t row = token + (size_t)t;
        if (!(rows->written >> row & 1)) continue; /* behind the last token there are no angles */
        for (int b = 0; b < blocks; b++) {
            const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(scale[row]), _mm512_loadu_ps(g->gain + (block + (size_t)b) * 16));
            v[b] = _mm512_add_ps(_mm512_mul_ps(factor, _mm512_cvtepi32_ps(s[t * blocks + b])),
                                 _mm512_loadu_ps(g->mean + (block + (size_t)b) * 16));
        }
        if (rows->half)
            for (int b = 0; b < blocks / 2; b++) {
                const __m512 c = _mm512_loadu_ps(rows->cos + row * rows->half + 16 * b);
                const __m512 sine = _mm512_loadu_ps(rows->sin + row * rows->half + 16 * b);
                const __m512 x1 = v[b], x2 = v[b + blocks / 2];
                v[b] = _mm512_sub_ps(_mm512_mul_ps(x1, c), _mm512_mul_ps(x2, sine));
                v[b + blocks / 2] = _mm512_add_ps(_mm512_mul_ps(x2, c), _mm512_mul_ps(x1, sine));
                if (__builtin_expect(_mm512_cmp_ps_mask(v[b], v[b + blocks / 2], _CMP_UNORD_Q) != 0, 0))
                    v[b] = canon(v[b]), v[b + blocks / 2] = canon(v[b + blocks / 2]);
            }
        put_row(rows->at + row * rows->step, rows->dtype, v, blocks);
    }
}

static int head(const ctx_klt_rows *rows, const ctx_klt_group *g, size_t dim, size_t number, const int16_t *q, size_t pairs,
                const uint8_t *narrow, size_t quads, const float scale[64], size_t tokens) {
    const size_t blocks = dim / 16;
    if ((rows->half && 2 * rows->half != dim) || (dim != 64 && dim != 128 && dim != 256)) return 0;
    for (size_t t = 0; dim == 64 && t < tokens; t += 4)
        head_tile(4, 4, rows, g, number * blocks, t, q, pairs, narrow, quads, scale);
    for (size_t t = 0; dim == 128 && t < tokens; t += 2)
        head_tile(8, 2, rows, g, number * blocks, t, q, pairs, narrow, quads, scale);
    for (size_t t = 0; dim == 256 && t < tokens; t++)
        head_tile(16, 1, rows, g, number * blocks, t, q, pairs, narrow, quads, scale);
    return 1;
}

#include "klt.inc"
