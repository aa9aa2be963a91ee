/* attention/avx512_pairs.h - bf16 rows times queries and weights of bf16, two products a lane (VDPBF16PS). Included by avx512.c.
 *
 * Twice the products of fp32 an instruction: what many queries, as of a prompt, are bound by. K is transposed by words of two
 * values, V interleaved by two tokens. Sums are fp32.
 */
#ifndef CTXREUSE_ATTEND_AVX512_PAIRS_H
#define CTXREUSE_ATTEND_AVX512_PAIRS_H

#include "core/pairs_x86.h"

/* 32 floats rounded to bf16, as words of two. */
BF16 static inline __m512i rounded(const float *x) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
}

BF16 static void pairs(ctx_queries *a) {
    for (size_t i = 0; i < a->rows * a->dim; i += 16)
        _mm256_storeu_si256((void *)(a->pairs + i / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(a->q + i)));
}

ALWAYS void pair_scores(float *s, const ctx_queries *a, size_t r, const size_t rows, const uint32_t *strip) {
    const size_t words = a->dim / 2;
    const uint32_t *q = a->pairs + r * words;
    __m512 sum[6][2];
    UNROLL
    for (size_t i = 0; i < rows; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (size_t w = 0; w < words; w++) {
        const __m512i k0 = _mm512_load_si512(strip + w * STRIP), k1 = _mm512_load_si512(strip + w * STRIP + 16);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            const __m512i of = dword(q + i * words + w);
            add_pairs(&sum[i][0], k0, of);
            add_pairs(&sum[i][1], k1, of);
        }
    }
    put_scores(s, a, r, rows, sum);
}

/* A tile of V by twos of tokens, [tokens / 2][dim] words. The last of an odd number stands with zeros. */
static void interleave_pairs(uint32_t *tile, const ctx_rows *v, size_t dim) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                           36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    for (size_t t = 0; t < v->count; t += 2, tile += dim)
        for (size_t d = 0; d < dim; d += 16) {
            const uint8_t *at = v->at + t * v->step + 2 * d;
            const __m256i a = _mm256_loadu_si256((const void *)at);
            const __m256i b = t + 1 < v->count ? _mm256_loadu_si256((const void *)(at + v->step)) : _mm256_setzero_si256();
            const __m512i both = _mm512_permutex2var_epi16(_mm512_castsi256_si512(a), first, _mm512_castsi256_si512(b));
            _mm512_store_si512(tile + d, both);
        }
}

ALWAYS void pair_values(float *o, const uint32_t *p, const float *factor, const size_t rows, const size_t width, size_t dim,
                        const uint32_t *v, size_t twos) {
    __m512 sum[6][4];
    take_sums(sum, o, factor, rows, width, dim);
    for (size_t t = 0; t < twos; t++, v += dim) {
        __m512i of[4];
        UNROLL
        for (size_t w = 0; w < width; w++) of[w] = _mm512_load_si512(v + 16 * w);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            const __m512i weight = dword(p + i * TILE + t);
            UNROLL
            for (size_t w = 0; w < width; w++) add_pairs(&sum[i][w], of[w], weight);
        }
    }
    put_sums(o, sum, rows, width, dim);
}

ALWAYS void pair_rows(float *o, const uint32_t *p, const float *factor, const size_t rows, size_t dim, const uint32_t *v, size_t twos) {
    size_t d = 0;
    for (; d + 64 <= dim; d += 64) pair_values(o + d, p, factor, rows, 4, dim, v + d, twos);
    for (; d < dim; d += 16) pair_values(o + d, p, factor, rows, 1, dim, v + d, twos);
}

/* As values; the weights become words of two where they lie. */
BF16 static void values_by_pairs(float *o, float *s, const float *factor, size_t rows, size_t dim, const ctx_rows *v, uint32_t *tile) {
    const size_t twos = (v->count + 1) / 2;
    interleave_pairs(tile, v, dim);
    for (size_t r = 0; r < rows; r++)
        for (size_t t = 0; t < v->count; t += 32) {
            const __m512i both = rounded(s + r * TILE + t);
            memcpy(s + r * TILE + t / 2, &both, sizeof both);
        }
    const uint32_t *p = (const uint32_t *)(const void *)s;
#define PAIR_ROWS(r, n) pair_rows(o + r * dim, p + r * TILE, factor + r, n, dim, tile, twos)
    BY_SIXES(rows, PAIR_ROWS)
}

#endif
