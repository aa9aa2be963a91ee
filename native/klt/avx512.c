/* klt/avx512.c - the transform coder with sixteen lanes: products of pairs by VPDPWSSD, of bytes by VPDPBUSD. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"

#define KLT ctx_klt_avx512
#define LANES 16
#define TILE_BLOCKS 4
#define TILE_VECS 4
#define NARROW
#define OWN_BITS /* and quads_of */
#define OWN_SYMBOLS
#define OWN_HEAD /* and load */
#define OWN_ROUND

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
typedef __m512i lanes;
static inline lanes no_lanes(void) { return _mm512_setzero_si512(); }
static inline lanes add_lanes(lanes s, const int16_t *x, const int16_t *f) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(s) : "v"(load_pairs(x)), "v"(four_bytes(f)));
    return s;
}
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

static uint64_t escapes(const uint8_t *symbols, const uint8_t *absent) {
    const __m512i of = _mm512_loadu_si512(symbols);
    const __mmask64 last = _mm512_cmpeq_epi8_mask(of, _mm512_set1_epi8(31));
    if (!absent) return last;
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

static void quads_of(uint8_t *out, const uint8_t *symbols, size_t step, size_t count) {
    const __m512i up = _mm512_set1_epi8(113), none = _mm512_set1_epi8(15);
    for (size_t r = 0; r < count; r += 4, out += 256) {
        __m512i row[4];
        for (size_t i = 0; i < 4; i++)
            row[i] = _mm512_add_epi8(up, r + i < count ? _mm512_loadu_si512(symbols + (r + i) * step) : none);
        const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
        const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), d = _mm512_unpackhi_epi8(row[2], row[3]);
        /* 128 bits at a time hold four tokens; the four of a lane stand 64 bytes apart. */
        const __m512i of[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, d),
                               _mm512_unpackhi_epi16(b, d)};
        for (size_t i = 0; i < 4; i++) {
            _mm_storeu_si128((__m128i *)(void *)(out + 16 * i), _mm512_castsi512_si128(of[i]));
            _mm_storeu_si128((__m128i *)(void *)(out + 64 + 16 * i), _mm512_extracti32x4_epi32(of[i], 1));
            _mm_storeu_si128((__m128i *)(void *)(out + 128 + 16 * i), _mm512_extracti32x4_epi32(of[i], 2));
            _mm_storeu_si128((__m128i *)(void *)(out + 192 + 16 * i), _mm512_extracti32x4_epi32(of[i], 3));
        }
    }
}

static inline void put_bf16(uint8_t *at, __m512 v) {
    const __m512i bits32 = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits32, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits32, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i *)(void *)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
}

/* As ctx_kernels convert and rotate; no value is a NaN here but 0x7fc00000. */
static inline __attribute__((always_inline)) void put_row(uint8_t *at, const ctx_dtype dtype, const __m512 *v, const int blocks) {
#pragma GCC unroll 16
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

/* Sums are named and added to by hand: from arrays and intrinsics the compiler makes two copies a product and keeps some
 * in memory (5.8 against 5.0 us for 64 tokens x 192 channels from 54 components). Sum k is of token k / blocks and
 * block k % blocks. */
#define SIXTEEN(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11) M(12) M(13) M(14) M(15)
#define LISTED(k) s##k,
#define BIAS(k) s##k = start(g->bias + (block + (size_t)(k % blocks)) * 16);
#define JOIN(k) s##k = join(s##k);
#define NONE(k) s##k = no_sums();
#define QUAD(k)                                                                                                            \
    __asm__("vpdpbusd %2, %1, %0"                                                                                          \
            : "+v"(s##k)                                                                                                   \
            : "v"(four_bytes(narrow + (i * 64 + token + k / (size_t)blocks) * 4)),                                         \
              "v"(load_quads(small + ((size_t)(k % blocks) * quads + i) * 64)));
#define PAIR(k)                                                                                                            \
    __asm__("vpdpwssd %2, %1, %0"                                                                                          \
            : "+v"(s##k)                                                                                                   \
            : "v"(four_bytes(q + (i * 64 + token + k / (size_t)blocks) * 2)),                                              \
              "v"(load_pairs(basis + ((size_t)(k % blocks) * all + i) * 32)));

/* `many` tokens of a head of `blocks` blocks: sums, values, rotation, and the rows written. */
static inline __attribute__((always_inline)) void head_tile(const int blocks, const int many, const ctx_dtype dtype, const ctx_klt_rows *rows,
                                                            const ctx_klt_group *g, size_t block, size_t token,
                                                            const int16_t *q, size_t pairs, const uint8_t *narrow,
                                                            size_t quads, const float *scale) {
    const size_t all = (g->components + 1) / 2;
    const int16_t *basis = g->pairs + block * all * 32;
    const int8_t *small = g->quads + block * quads * 64;
    __m512i SIXTEEN(LISTED) unused;
    (void)unused;
    if (quads) {
        SIXTEEN(BIAS)
        for (size_t i = 0; i < quads; i++) { SIXTEEN(QUAD) }
        SIXTEEN(JOIN)
    } else {
        SIXTEEN(NONE)
    }
    for (size_t i = 0; i < pairs; i++) { SIXTEEN(PAIR) }
    const __m512i s[16] = {SIXTEEN(LISTED)};
#pragma GCC unroll 4
    for (int t = 0; t < many; t++) {
        __m512 v[16];
        const size_t row = token + (size_t)t;
        if (!(rows->written >> row & 1)) continue; /* behind the last token there are no angles */
#pragma GCC unroll 16
        for (int b = 0; b < blocks; b++) {
            const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(scale[row]), _mm512_loadu_ps(g->gain + (block + (size_t)b) * 16));
            v[b] = _mm512_add_ps(_mm512_mul_ps(factor, _mm512_cvtepi32_ps(s[t * blocks + b])),
                                 _mm512_loadu_ps(g->mean + (block + (size_t)b) * 16));
        }
        if (rows->half)
#pragma GCC unroll 8
            for (int b = 0; b < blocks / 2; b++) {
                const __m512 c = _mm512_loadu_ps(rows->cos + row * rows->half + 16 * b);
                const __m512 sine = _mm512_loadu_ps(rows->sin + row * rows->half + 16 * b);
                const __m512 x1 = v[b], x2 = v[b + blocks / 2];
                v[b] = _mm512_sub_ps(_mm512_mul_ps(x1, c), _mm512_mul_ps(x2, sine));
                v[b + blocks / 2] = _mm512_add_ps(_mm512_mul_ps(x2, c), _mm512_mul_ps(x1, sine));
                if (__builtin_expect(_mm512_cmp_ps_mask(v[b], v[b + blocks / 2], _CMP_UNORD_Q) != 0, 0))
                    v[b] = canon(v[b]), v[b + blocks / 2] = canon(v[b + blocks / 2]);
            }
        put_row(rows->at + row * rows->step, dtype, v, blocks);
    }
}

/* A function a type and width: which stores and how many sums must be known to the compiler. */
#define HEAD(NAME, DTYPE, BLOCKS)                                                                                          \
    static void NAME(const ctx_klt_rows *rows, const ctx_klt_group *g, size_t block, const int16_t *q, size_t pairs,       \
                     const uint8_t *narrow, size_t quads, const float scale[64], size_t tokens) {                         \
        for (size_t t = 0; t < tokens; t += 16 / BLOCKS)                                                                   \
            head_tile(BLOCKS, 16 / BLOCKS, DTYPE, rows, g, block, t, q, pairs, narrow, quads, scale);                      \
    }
HEAD(head64_fp32, CTX_FP32, 4)
HEAD(head64_fp16, CTX_FP16, 4)
HEAD(head64_bf16, CTX_BF16, 4)
HEAD(head128_fp32, CTX_FP32, 8)
HEAD(head128_fp16, CTX_FP16, 8)
HEAD(head128_bf16, CTX_BF16, 8)
HEAD(head256_fp32, CTX_FP32, 16)
HEAD(head256_fp16, CTX_FP16, 16)
HEAD(head256_bf16, CTX_BF16, 16)

static int head(const ctx_klt_rows *rows, const ctx_klt_group *g, size_t dim, size_t number, const int16_t *q, size_t pairs,
                const uint8_t *narrow, size_t quads, const float scale[64], size_t tokens) {
    static void (*const of[3][CTX_DTYPES])(const ctx_klt_rows *, const ctx_klt_group *, size_t, const int16_t *, size_t,
                                           const uint8_t *, size_t, const float[64], size_t) = {
        {head64_fp32, head64_fp16, head64_bf16}, {head128_fp32, head128_fp16, head128_bf16}, {head256_fp32, head256_fp16, head256_bf16}};
    if ((rows->half && 2 * rows->half != dim) || (dim != 64 && dim != 128 && dim != 256)) return 0;
    of[dim / 128][rows->dtype](rows, g, number * (dim / 16), q, pairs, narrow, quads, scale, tokens);
    return 1;
}

/* ---- From rows to whole numbers ---------------------------------------------------------------------------------- */

/* r[i][j] to r[j][i] */
static inline __attribute__((always_inline)) void transpose16(__m512i r[16]) {
    __m512i a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) { /* r[i + j]: column j of each 128 bits, rows i to i + 3 */
        r[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 16
    for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), high = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88), high2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        a[j] = _mm512_shuffle_i32x4(low, low2, 0x88), a[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        a[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88), a[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = a[i];
}

static inline __attribute__((always_inline)) __m512 get_row(const uint8_t *at, const ctx_dtype dtype, int block) {
    if (dtype == CTX_FP32) return _mm512_loadu_ps(at + 64 * block);
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(at + 32 * block));
    if (dtype == CTX_FP16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* A token's head of `blocks` blocks: centred values to x, squares to the sums. */
static inline __attribute__((always_inline)) __m512 load_row(const int blocks, const ctx_dtype dtype, float *x, const uint8_t *at,
                                                             const float *mean, const float *cos, const float *sin, __m512 sum) {
    __m512 v[16];
#pragma GCC unroll 16
    for (int b = 0; b < blocks; b++) v[b] = get_row(at, dtype, b);
    if (cos)
#pragma GCC unroll 8
        for (int b = 0; b < blocks / 2; b++) {
            const __m512 c = _mm512_loadu_ps(cos + 16 * b), s = _mm512_loadu_ps(sin + 16 * b);
            const __m512 one = v[b], two = v[b + blocks / 2];
            v[b] = _mm512_sub_ps(_mm512_mul_ps(one, c), _mm512_mul_ps(two, s));
            v[b + blocks / 2] = _mm512_add_ps(_mm512_mul_ps(two, c), _mm512_mul_ps(one, s));
        }
#pragma GCC unroll 16
    for (int b = 0; b < blocks; b++) {
        const __m512 d = _mm512_sub_ps(v[b], _mm512_loadu_ps(mean + 16 * b));
        _mm512_storeu_ps(x + 16 * b, d);
        sum = _mm512_add_ps(sum, _mm512_mul_ps(d, d));
    }
    return sum;
}

static inline __attribute__((always_inline)) void load_rows(const int blocks, const ctx_dtype dtype, float *x, __m512 squares[16],
                                                            const ctx_klt_source *from, const ctx_klt_group *g) {
    for (size_t t = 0; t < 16; t++) {
        __m512 sum = _mm512_setzero_ps();
        for (size_t h = 0; h < g->all_heads; h++, x += 16 * blocks) {
            const ctx_klt_source *of = &from[h];
            const float *cos = of->half ? of->cos + t * of->half : NULL, *sin = of->half ? of->sin + t * of->half : NULL;
            const uint8_t *at = of->at + t * of->step;
            const uintptr_t next = (uintptr_t)at + CTX_KLT_TOKENS * of->step; /* of the next cell, if there is one */
            for (size_t line = 0; line < 16 * (size_t)blocks * ctx_dtype_bytes(dtype); line += 64) _mm_prefetch((const char *)(next + line), _MM_HINT_T1);
            sum = load_row(blocks, dtype, x, at, g->centre + h * 16 * (size_t)blocks, cos, sin, sum);
        }
        squares[t] = sum;
    }
}

static int load(float *x, float energy[16], const ctx_klt_source *from, const ctx_dtype dtype, const ctx_klt_group *g, size_t dim) {
    __m512 squares[16];
    if (dim != 64 && dim != 128 && dim != 256) return 0;
    for (size_t h = 0; h < g->all_heads; h++)
        if (from[h].half && 2 * from[h].half != dim) return 0;
#define LOAD(BLOCKS)                                                                                                      \
    if (dtype == CTX_FP32) load_rows(BLOCKS, CTX_FP32, x, squares, from, g);                                           \
    else if (dtype == CTX_FP16) load_rows(BLOCKS, CTX_FP16, x, squares, from, g);                                      \
    else load_rows(BLOCKS, CTX_BF16, x, squares, from, g);
    if (dim == 64) { LOAD(4) }
    else if (dim == 128) { LOAD(8) }
    else { LOAD(16) }
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_castps_si512(squares[i]);
    transpose16(r);
    for (int i = 0; i < 16; i++) squares[i] = _mm512_castsi512_ps(r[i]);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) squares[i] = _mm512_add_ps(squares[i], squares[i + half]);
    _mm512_storeu_ps(energy, squares[0]);
    return 1;
}

static void round_rows(int16_t *out, const float *x, const float factor[16], size_t channels) {
    const __m512 limit = _mm512_set1_ps(32767.0f), least = _mm512_set1_ps(-32767.0f);
    size_t c = 0;
    for (; c + 32 <= channels; c += 32, out += 16 * 128) {
        __m512i r[16];
#pragma GCC unroll 16
        for (size_t t = 0; t < 16; t++) {
            const __m512 f = _mm512_set1_ps(factor[t]);
            const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(x + t * channels + c), f);
            const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(x + t * channels + c + 16), f);
            r[t] = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(a, least), limit)), /* max: NaN too */
                                      _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(b, least), limit)));
        }
        transpose16(r);
        /* 128 bits of a packed row are four words of a, then four of b. */
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + 128 * (i / 4 * 2 + i % 2 + (i & 2) * 4), r[i]);
    }
    for (size_t t = 0; c < channels && t < 16; t++)
        for (size_t d = 0; c + d < (channels + 1) / 2 * 2; d++) {
            const float v = c + d < channels ? x[t * channels + c + d] * factor[t] : 0;
            const __m128 within = _mm_min_ss(_mm_max_ss(_mm_set_ss(v), _mm512_castps512_ps128(least)), _mm512_castps512_ps128(limit));
            out[d / 2 * 128 + 2 * t + d % 2] = (int16_t)_mm_cvtss_si32(within);
        }
}

#include "loops.inc"
