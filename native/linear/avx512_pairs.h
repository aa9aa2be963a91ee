/* linear/avx512_pairs.h - bf16 weights times rows of bf16, two products a lane (VDPBF16PS), as they lie. Included by avx512.c.
 *
 * Twice the products of fp32 an instruction, and nothing is decoded: six rows of four outputs at a time, whose sums stay in
 * registers. Each sum runs in the same order however many rows and outputs there are.
 */
#ifndef CTXREUSE_LINEAR_AVX512_PAIRS_H
#define CTXREUSE_LINEAR_AVX512_PAIRS_H

#include "core/pairs_x86.h"

#define OWN_PAIRS
#define ROUND round_row
#define PAIR_ROWS 6
#define PAIR_OUTPUTS 4

BF16 static void round_row(const float *x, uint16_t *to, size_t n) {
    for (size_t i = 0; i < ctx_linear_padded(n); i += 32) {
        __m512 of[2];
        for (size_t h = 0; h < 2; h++) {
            const size_t at = i + 16 * h, left = n > at ? n - at : 0;
            of[h] = _mm512_maskz_loadu_ps(left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1), x + at);
        }
        _mm512_store_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(of[1], of[0]));
    }
}

/* Outputs n.. of rows r..; `outputs` and `rows` are constants where this is called. */
static inline __attribute__((always_inline)) void pair_block(const ctx_linear *a, size_t n, const size_t outputs, size_t r, const size_t rows) {
    const size_t inputs = a->inputs, stride = ctx_linear_padded(inputs), whole = inputs - inputs % 32;
    const uint16_t *x = a->pairs + r * stride, *w = (const uint16_t *)(const void *)a->w + n * inputs;
    __m512 sums[PAIR_ROWS][PAIR_OUTPUTS];
    __m512i of[PAIR_OUTPUTS];
    UNROLL for (size_t i = 0; i < rows; i++)
        UNROLL for (size_t o = 0; o < outputs; o++) sums[i][o] = _mm512_setzero_ps();
    for (size_t d = 0; d < whole; d += 32) {
        if (r == 0) /* what the next group reads */
            UNROLL for (size_t o = 0; o < outputs; o++) __builtin_prefetch(w + (CTX_GROUP + o) * inputs + d);
        UNROLL for (size_t o = 0; o < outputs; o++) of[o] = _mm512_loadu_si512(w + o * inputs + d);
        UNROLL for (size_t i = 0; i < rows; i++) {
            const __m512i with = _mm512_load_si512(x + i * stride + d);
            UNROLL for (size_t o = 0; o < outputs; o++) add_pairs(&sums[i][o], of[o], with);
        }
    }
    if (whole < inputs) {
        const __mmask32 mask = (__mmask32)((1ull << (inputs - whole)) - 1);
        UNROLL for (size_t o = 0; o < outputs; o++) of[o] = _mm512_maskz_loadu_epi16(mask, w + o * inputs + whole);
        UNROLL for (size_t i = 0; i < rows; i++) {
            const __m512i with = _mm512_load_si512(x + i * stride + whole);
            UNROLL for (size_t o = 0; o < outputs; o++) add_pairs(&sums[i][o], of[o], with);
        }
    }
    UNROLL for (size_t i = 0; i < rows; i += 2) { /* eight sums at once */
        __m512 eight[CTX_GROUP];
        UNROLL for (size_t o = 0; o < PAIR_OUTPUTS; o++) {
            eight[o] = sums[i][o < outputs ? o : 0];
            eight[PAIR_OUTPUTS + o] = sums[i + 1 < rows ? i + 1 : i][o < outputs ? o : 0];
        }
        const __m256 sum = totals8(eight);
        for (size_t j = i; j < rows && j < i + 2; j++) {
            const __mmask8 there = (__mmask8)((1u << outputs) - 1);
            __m128 y = j == i ? _mm256_castps256_ps128(sum) : _mm256_extractf128_ps(sum, 1);
            if (a->scales) y = _mm_mul_ps(y, _mm_maskz_loadu_ps(there, a->scales + n));
            if (a->bias) y = _mm_add_ps(y, _mm_maskz_loadu_ps(there, a->bias + n));
            _mm_mask_storeu_ps(a->y + (r + j) * a->outputs + n, there, y);
        }
    }
}

static inline void pair_outputs(const ctx_linear *a, size_t first, size_t last) {
    for (size_t n = first; n < last; n += CTX_GROUP) /* in the first cache for all rows */
        for (size_t r = 0, rows; r < a->rows; r += rows) {
            const size_t left = a->rows - r;
            rows = left <= PAIR_ROWS ? left : left < 2 * PAIR_ROWS ? (left + 1) / 2 : PAIR_ROWS;
            for (size_t o = n, outputs; o < last && o < n + CTX_GROUP; o += outputs) {
                outputs = last - o >= PAIR_OUTPUTS ? PAIR_OUTPUTS : 1;
#define CALL(count)                                                      \
    case count:                                                          \
        if (outputs == 1) pair_block(a, o, 1, r, count);                 \
        else pair_block(a, o, PAIR_OUTPUTS, r, count);                   \
        break;
                switch (rows) { CALL(1) CALL(2) CALL(3) CALL(4) CALL(5) CALL(6) }
#undef CALL
            }
        }
}

#endif
