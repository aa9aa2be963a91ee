/* core/tiles_x86.h - square transposes in registers, shared by the AVX2 and AVX-512 tables. */
#ifndef CTXREUSE_TILES_X86_H
#define CTXREUSE_TILES_X86_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define TILE16 8
#define TILE32 8

/* Three rounds of interleaving (2-, 4-, 8-byte units) transpose 8 rows of 8 two-byte elements. */
static inline void tile16(uint8_t *dst, size_t dst_step, const uint8_t *src, size_t src_step) {
    __m128i r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm_loadu_si128((const __m128i *)(src + (size_t)i * src_step));
    for (int i = 0; i < 4; i++) {
        t[i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        t[i + 4] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    for (int h = 0; h < 8; h += 4) {
        r[h] = _mm_unpacklo_epi32(t[h], t[h + 1]);
        r[h + 1] = _mm_unpackhi_epi32(t[h], t[h + 1]);
        r[h + 2] = _mm_unpacklo_epi32(t[h + 2], t[h + 3]);
        r[h + 3] = _mm_unpackhi_epi32(t[h + 2], t[h + 3]);
    }
    for (int h = 0; h < 8; h += 4) {
        t[h] = _mm_unpacklo_epi64(r[h], r[h + 2]);
        t[h + 1] = _mm_unpackhi_epi64(r[h], r[h + 2]);
        t[h + 2] = _mm_unpacklo_epi64(r[h + 1], r[h + 3]);
        t[h + 3] = _mm_unpackhi_epi64(r[h + 1], r[h + 3]);
    }
    for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i *)(dst + (size_t)i * dst_step), t[i]);
}

static inline void tile32(uint8_t *dst, size_t dst_step, const uint8_t *src, size_t src_step) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float *)(const void *)(src + (size_t)i * src_step));
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int h = 0; h < 8; h += 4) {
        r[h] = _mm256_shuffle_ps(t[h], t[h + 2], 0x44);
        r[h + 1] = _mm256_shuffle_ps(t[h], t[h + 2], 0xee);
        r[h + 2] = _mm256_shuffle_ps(t[h + 1], t[h + 3], 0x44);
        r[h + 3] = _mm256_shuffle_ps(t[h + 1], t[h + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) _mm256_storeu_ps((float *)(void *)(dst + (size_t)i * dst_step), t[i]);
}

#endif
