/* attention/avx512_layout.h - how tiles are laid out for avx512.c: strips of K transposed, V by fours of tokens. */
#ifndef CTXREUSE_ATTEND_AVX512_TURN_H
#define CTXREUSE_ATTEND_AVX512_TURN_H

/* x[c] has in its 128-bit lane L what belongs at lane c of register L. */
ALWAYS void lanes_in_order(__m512 x[4]) {
    const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x88), b = _mm512_shuffle_f32x4(x[0], x[1], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(x[2], x[3], 0x88), d = _mm512_shuffle_f32x4(x[2], x[3], 0xdd);
    x[0] = _mm512_shuffle_f32x4(a, c, 0x88), x[2] = _mm512_shuffle_f32x4(a, c, 0xdd);
    x[1] = _mm512_shuffle_f32x4(b, d, 0x88), x[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

/* Rows and columns of 16 x 16 words change places. */
ALWAYS void turn(__m512i r[16]) {
    __m512i u[4][4];
    for (int g = 0; g < 4; g++) {
        const __m512i a = _mm512_unpacklo_epi32(r[4 * g], r[4 * g + 1]), b = _mm512_unpacklo_epi32(r[4 * g + 2], r[4 * g + 3]);
        const __m512i c = _mm512_unpackhi_epi32(r[4 * g], r[4 * g + 1]), d = _mm512_unpackhi_epi32(r[4 * g + 2], r[4 * g + 3]);
        u[0][g] = _mm512_unpacklo_epi64(a, b), u[1][g] = _mm512_unpackhi_epi64(a, b);
        u[2][g] = _mm512_unpacklo_epi64(c, d), u[3][g] = _mm512_unpackhi_epi64(c, d);
    }
    for (int c = 0; c < 4; c++) {
        __m512 x[4];
        for (int g = 0; g < 4; g++) x[g] = _mm512_castsi512_ps(u[c][g]);
        lanes_in_order(x);
        for (int g = 0; g < 4; g++) r[4 * g + c] = _mm512_castps_si512(x[g]);
    }
}

/* Row `base + t` of a strip; those behind the last are the last. */
static inline const uint8_t *row_at(const ctx_rows *k, size_t t) { return k->at + (t < k->count ? t : k->count - 1) * k->step; }

static inline __m512 sixteen(ctx_format format, const uint8_t *at) {
    if (format == CTX_ROWS_FP32) return _mm512_loadu_ps(at);
    const __m256i half = _mm256_loadu_si256((const void *)at);
    return format == CTX_ROWS_FP16 ? _mm512_cvtph_ps(half) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

ALWAYS void turn_floats_of(float *strip, const ctx_rows *k, size_t base, size_t dim, const ctx_format format) {
    for (size_t half = 0; half < STRIP; half += 16)
        for (size_t d = 0; d < dim; d += 16) {
            __m512i r[16];
            for (size_t t = 0; t < 16; t++)
                r[t] = _mm512_castps_si512(sixteen(format, row_at(k, base + half + t) + d * (format == CTX_ROWS_FP32 ? 4 : 2)));
            turn(r);
            for (size_t i = 0; i < 16; i++) _mm512_store_si512(strip + (d + i) * STRIP + half, r[i]);
        }
}

/* strip[d][32]. */
static void turn_floats(float *strip, const ctx_rows *k, size_t base, size_t dim) {
    if (k->format == CTX_ROWS_FP32) turn_floats_of(strip, k, base, dim, CTX_ROWS_FP32);
    else if (k->format == CTX_ROWS_FP16) turn_floats_of(strip, k, base, dim, CTX_ROWS_FP16);
    else turn_floats_of(strip, k, base, dim, CTX_ROWS_BF16);
}

/* What words of K become: themselves, their bytes with 128 added, or the words of their low and of their high nibbles. */
enum { AS_WORDS, AS_BYTES, AS_NIBBLES };

/* Word i of a row for 16 tokens. */
ALWAYS void put_word(uint32_t *strip, size_t i, size_t half, __m512i x, const int form) {
    const __m512i mask = _mm512_set1_epi8(15);
    if (form == AS_WORDS) {
        _mm512_store_si512(strip + i * STRIP + half, x);
        return;
    }
    if (form == AS_BYTES) {
        _mm512_store_si512(strip + i * STRIP + half, _mm512_xor_si512(x, _mm512_set1_epi8(-128)));
        return;
    }
    uint32_t *to = strip + (i / 4 * 8 + i % 4) * STRIP + half;
    _mm512_store_si512(to, _mm512_and_si512(x, mask));
    _mm512_store_si512(to + 4 * STRIP, _mm512_and_si512(_mm512_srli_epi16(x, 4), mask));
}

/* `words` words of 32 rows from byte b on. */
ALWAYS void turn_words(uint32_t *strip, const uint8_t *const rows[STRIP], size_t b, const size_t words, const int form) {
    const __mmask16 mask = (__mmask16)((1u << words) - 1);
    __m512i r[16];
    for (size_t half = 0; half < STRIP; half += 16) {
        for (size_t t = 0; t < 16; t++) r[t] = _mm512_maskz_loadu_epi32(mask, rows[half + t] + b);
        turn(r);
        for (size_t i = 0; i < words; i++) put_word(strip, b / 4 + i, half, r[i], form);
    }
}

/* The same for 8 or fewer words: two rows share a register. */
ALWAYS void turn_half(uint32_t *strip, const uint8_t *const rows[STRIP], size_t b, const size_t words, const int form) {
    const __mmask8 mask = (__mmask8)((1u << words) - 1);
    __m512i r[16];
    for (size_t t = 0; t < 16; t++)
        r[t] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi32(mask, rows[t] + b)),
                                  _mm256_maskz_loadu_epi32(mask, rows[16 + t] + b), 1);
    turn(r);
    for (size_t i = 0; i < words; i++) {
        put_word(strip, b / 4 + i, 0, r[i], form);
        put_word(strip, b / 4 + i, 16, r[8 + i], form);
    }
}

/* strip[words][32] of `bytes` bytes a row, a multiple of 16. */
ALWAYS void turn_bytes(uint32_t *strip, const ctx_rows *k, size_t base, size_t bytes, const int form) {
    const uint8_t *rows[STRIP];
    for (size_t t = 0; t < STRIP; t++) rows[t] = row_at(k, base + t);
    size_t b = 0;
    for (; bytes - b >= 64; b += 64) turn_words(strip, rows, b, 16, form);
    if (bytes - b == 48) turn_words(strip, rows, b, 12, form);
    else if (bytes - b == 32) turn_half(strip, rows, b, 8, form);
    else if (bytes - b == 16) turn_half(strip, rows, b, 4, form);
}

/* Bytes of four rows by fours: register w has in lane L the bytes 16 * L + 4 * w .. + 4, each of four rows. */
ALWAYS void fours(__m512i *out, const __m512i r[4]) {
    const __m512i a = _mm512_unpacklo_epi8(r[0], r[1]), b = _mm512_unpackhi_epi8(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi8(r[2], r[3]), d = _mm512_unpackhi_epi8(r[2], r[3]);
    _mm512_store_si512(out, _mm512_unpacklo_epi16(a, c));
    _mm512_store_si512(out + 1, _mm512_unpackhi_epi16(a, c));
    _mm512_store_si512(out + 2, _mm512_unpacklo_epi16(b, d));
    _mm512_store_si512(out + 3, _mm512_unpackhi_epi16(b, d));
}

/* A tile of V by fours of tokens, [steps][blocks of 64 bytes][4]; `across`: so many quads stand in one register (rows of
 * 64 / across bytes then). */
ALWAYS void interleave(__m512i *tile, const ctx_rows *v, size_t bytes, const size_t across) {
    __m512i r[4];
    for (size_t t = 0; t < v->count; t += 4 * across) {
        const uint8_t *rows[16];
        for (size_t i = 0; i < 4 * across; i++) rows[i] = row_at(v, t + i);
        for (size_t b = 0; b < bytes; b += 64, tile += 4) {
            const __mmask64 mask = bytes - b >= 64 ? ~0ull : (1ull << (bytes - b)) - 1;
            for (size_t i = 0; i < 4; i++) {
                if (across == 1) {
                    r[i] = _mm512_maskz_loadu_epi8(mask, rows[i] + b);
                } else if (across == 2) {
                    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const void *)rows[i])),
                                              _mm256_loadu_si256((const void *)rows[4 + i]), 1);
                } else {
                    r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)rows[i]));
                    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const void *)rows[4 + i]), 1);
                    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const void *)rows[8 + i]), 2);
                    r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const void *)rows[12 + i]), 3);
                }
            }
            fours(tile, r);
        }
    }
}

static void interleave_bytes(__m512i *tile, const ctx_rows *v, size_t bytes, size_t across) {
    if (across == 1) interleave(tile, v, bytes, 1);
    else if (across == 2) interleave(tile, v, bytes, 2);
    else interleave(tile, v, bytes, 4);
}

/* out[32 quads][width] of 32 words of each of `width` (1, 2 or 4) groups. */
ALWAYS void interleave_words(uint32_t *out, const __m512i of[4][2], size_t width) {
    for (size_t h = 0; h < 2; h++) {
        if (width == 1) {
            _mm512_store_si512(out + 16 * h, of[0][h]);
            continue;
        }
        const __m512i a = _mm512_unpacklo_epi32(of[0][h], of[1][h]), b = _mm512_unpackhi_epi32(of[0][h], of[1][h]);
        if (width == 2) {
            const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            _mm512_store_si512(out + 32 * h, _mm512_permutex2var_epi64(a, first, b));
            _mm512_store_si512(out + 32 * h + 16, _mm512_permutex2var_epi64(a, second, b));
            continue;
        }
        const __m512i c = _mm512_unpacklo_epi32(of[2][h], of[3][h]), d = _mm512_unpackhi_epi32(of[2][h], of[3][h]);
        __m512 x[4] = {_mm512_castsi512_ps(_mm512_unpacklo_epi64(a, c)), _mm512_castsi512_ps(_mm512_unpackhi_epi64(a, c)),
                       _mm512_castsi512_ps(_mm512_unpacklo_epi64(b, d)), _mm512_castsi512_ps(_mm512_unpackhi_epi64(b, d))};
        lanes_in_order(x);
        for (size_t i = 0; i < 4; i++) _mm512_store_ps(out + 64 * h + 16 * i, x[i]);
    }
}

#endif
