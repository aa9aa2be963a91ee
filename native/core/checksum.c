/* core/checksum.c - copy the planes of a run of blocks and compute their XXH3-64 on the way, so memory is read once.
 *
 * XXH3 (Yann Collet; specification: github.com/Cyan4973/xxHash, doc/xxhash_spec.md), 64 bits, seed 0, default secret,
 * and only its form for inputs of more than 240 bytes: shorter planes are checked by the caller. The tables
 * do the stripes (64 bytes into eight accumulators); the rest happens once in 1,024 bytes and is here.
 */
#include "ctxreuse.h"
#include "scalar.h"

#include <string.h>

enum { STRIPE = 64, SECRET = 192, STRIPES = (SECRET - STRIPE) / 8, BLOCK = STRIPE * STRIPES, STEP = 4 * BLOCK };

static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u,
                      PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u;

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

typedef struct hash {
    uint64_t acc[8];
    const uint8_t *at; /* everything before it is in the accumulators */
    const uint8_t *start;
    size_t bytes;
} hash;

static hash begin(const uint8_t *start, size_t bytes) {
    return (hash){{PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1},
                  start, start, bytes};
}

static void scramble(hash *h) {
    for (int i = 0; i < 8; i++)
        h->acc[i] = (h->acc[i] ^ h->acc[i] >> 47 ^ get64(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
}

/* Take in whole blocks up to `end`; the last byte of the input never belongs to one. */
static void advance(const ctx_kernels *k, hash *h, const uint8_t *end) {
    const uint8_t *last = h->start + h->bytes - 1;
    if (end > last) end = last;
    for (; (size_t)(end - h->at) >= BLOCK; h->at += BLOCK) {
        k->stripes(h->acc, h->at, secret, STRIPES);
        scramble(h);
    }
}

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t finish(const ctx_kernels *k, hash *h) {
    const uint8_t *end = h->start + h->bytes;
    advance(k, h, end);
    k->stripes(h->acc, h->at, secret, (size_t)(end - 1 - h->at) / STRIPE);
    k->stripes(h->acc, end - STRIPE, secret + SECRET - STRIPE - 7, 1);
    uint64_t sum = h->bytes * PRIME64_1;
    for (int i = 0; i < 4; i++)
        sum += fold(h->acc[2 * i] ^ get64(secret + 11 + 16 * i), h->acc[2 * i + 1] ^ get64(secret + 19 + 16 * i));
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

uint64_t ctx_xxh3(const ctx_kernels *k, const uint8_t *at, size_t bytes) {
    hash h = begin(at, bytes);
    return finish(k, &h);
}

/* The usual case, each byte loaded once: rows of whole blocks, aligned destination. Past the caches: a plain store
 * would first read the line that it overwrites. */
static uint64_t stream_checked(const ctx_kernels *k, uint8_t *dst, size_t dst_step, const uint8_t *src, size_t rows,
                               size_t row_bytes) {
    hash h = begin(src, rows * row_bytes);
    for (size_t row = 0; row < rows; row++)
        for (size_t at = 0; at < row_bytes; at += BLOCK, h.at += BLOCK) {
            uint8_t *to = dst + row * dst_step + at;
            if (row == rows - 1 && at == row_bytes - BLOCK) {
                memcpy(to, h.at, BLOCK); /* the input's last block, which `finish` treats in its own way */
                break;
            }
            k->copy_stripes(h.acc, to, h.at, secret, STRIPES);
            scramble(&h);
        }
    k->fence();
    return finish(k, &h);
}

/* Each step is read by the hash and copied while it is in the first-level cache. */
static uint64_t copy_checked(const ctx_kernels *k, uint8_t *dst, size_t dst_step, const uint8_t *src, size_t rows,
                             size_t row_bytes) {
    const size_t bytes = rows * row_bytes;
    hash h = begin(src, bytes);
    if (row_bytes % BLOCK == 0 && ((uintptr_t)dst | dst_step) % STRIPE == 0)
        return stream_checked(k, dst, dst_step, src, rows, row_bytes);
    size_t row = 0, column = 0;
    for (size_t done = 0; done < bytes;) {
        size_t step = bytes - done < STEP ? bytes - done : STEP;
        advance(k, &h, src + done + step);
        for (size_t left = step; left;) {
            size_t part = row_bytes - column < left ? row_bytes - column : left;
            memcpy(dst + row * dst_step + column, src + done + (step - left), part);
            left -= part;
            column += part;
            if (column == row_bytes) row++, column = 0;
        }
        done += step;
    }
    return finish(k, &h);
}

size_t ctx_scatter_checked(const ctx_kernels *k, const ctx_view *tensor, uint8_t *const *planes, ctx_dtype plane_dtype,
                           const size_t *counts, const uint64_t *sums, size_t blocks, size_t heads, size_t dim) {
    const size_t size = ctx_dtype_bytes(tensor->dtype);
    /* A head's tokens are one row on both sides wherever an engine keeps [heads, tokens, dim] in that order. */
    const int rows = tensor->dtype == plane_dtype && tensor->strides[2] == 1 && tensor->strides[1] == dim;
    size_t token = 0;
    for (size_t i = 0; i < blocks; token += counts[i++]) {
        if (heads == 0 || counts[i] == 0 || dim == 0) continue; /* even its address may lie outside the tensor */
        ctx_view here = *tensor;
        here.at += token * tensor->strides[1] * size;
        if (rows) {
            size_t row_bytes = counts[i] * dim * size;
            if (copy_checked(k, here.at, tensor->strides[0] * size, planes[i], heads, row_bytes) != sums[i]) return i;
            continue;
        }
        if (ctx_xxh3(k, planes[i], heads * counts[i] * dim * ctx_dtype_bytes(plane_dtype)) != sums[i]) return i;
        const size_t shape[3] = {heads, counts[i], dim};
        const ctx_view plane = {planes[i], plane_dtype, {counts[i] * dim, dim, 1}};
        ctx_copy3(k, &here, &plane, shape);
    }
    return blocks;
}

size_t ctx_gather_checked(const ctx_kernels *k, uint8_t *dst, const uint8_t *const *buffers, size_t count,
                          const int64_t (*spans)[2], const uint64_t *sums, size_t each) {
    for (size_t i = 0; i < count * each; i++) {
        const size_t bytes = (size_t)spans[i][1];
        if (copy_checked(k, dst, bytes, buffers[i / each] + spans[i][0], 1, bytes) != sums[i]) return i;
        dst += bytes;
    }
    return count * each;
}
