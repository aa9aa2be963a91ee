/* lossless/lossless.h - planes of floats, packed without loss: exponents and signs by rANS, what is noise as it is.
 *
 * A plane [heads, tokens, dim] of fp32, fp16 or bf16 becomes a stream that decodes to the same bits. Little-endian:
 *
 *   u8 scheme = 2, u8 element type (ctx_dtype; types above are for others to read), u8 axes (at most 8), u8 0, u32 length[axes]
 *   the section of the first 64 * floor(tokens / 64) tokens, then that of the rest; a section without tokens is left out
 *
 * Other than three axes: the last is dim, the one before it tokens (1 if there is none), all before are heads.
 *
 * Section: u8 mode, u8 base, u16 0, u32 rans bytes, u32 tail bytes, then its body.
 *   mode 0   the elements as they are, [heads, section's tokens, dim]; no rans, no tail
 *   mode 1   classes | low bits | rans stream | tail without its first 128 bytes, which travel as the seeds of the stream
 *
 * Order. Values are channel-major: channel c = head * dim + d, then token. 64 successive ones make a step; with fewer than
 * 64 tokens (the rest), floor(64 / tokens) whole channels make a step, whose other lanes repeat its first ones; the last
 * step's missing values are zeros. A *row* is what shares a class: a channel, or in the rest a step.
 *
 * Classes. Each row has a class (0-31), a shift (0-15) and a flip (0 or 1): one byte class | shift << 5, then for every
 * four rows a byte of 2 bits each: bit 3 of the shift, flip. Its top exponent is base - shift; class k codes its
 * steps with table k of tables.inc, so no table travels.
 *
 * Symbols. With d = top exponent - exponent: levels 0-5 are d = 0, 1, 2 with the mantissa's first bit in front of it
 * (2 d + 1 - bit), levels 6-14 are d = 3 to 11, level 15 is everything else, and all that the class has no frequency for.
 * Symbol = level + 16 * (sign ^ flip), but 15 for level 15.
 *
 * Low bits of a step: the mantissa without its first bit, 6 bits of bf16 and fp32 (48 bytes: byte i holds value i and, on
 * top, two bits of value 48 + i % 16, low ones first), 9 bits of fp16 (64 bytes, then the ninth bits); then for fp32 the 64
 * low halves. The upper half of an fp32 is a bf16.
 *
 * Tail: the mantissas' first bits where the level is 6 or more, in order, to whole bytes; the exponents of level 15, a byte
 * each; their signs, to whole bytes; zeros up to 128 bytes.
 *
 * Streams are hostile: all lengths are checked before anything is written to the plane.
 */
#ifndef CTXREUSE_LOSSLESS_H
#define CTXREUSE_LOSSLESS_H

#include "rans/rans.h"

enum {
    CTX_LOSSLESS_SCHEME = 2,
    CTX_LOSSLESS_AXES = 8,
    CTX_LOSSLESS_HEADER = 16, /* of three axes */
    CTX_LOSSLESS_SECTION = 12,
    CTX_LOSSLESS_CLASSES = 32,
};

/* Most bytes of a stream of n bytes of elements: it is never longer than that. */
static inline size_t ctx_lossless_bound(size_t n) { return n + CTX_LOSSLESS_HEADER + 2 * CTX_LOSSLESS_SECTION; }

typedef enum ctx_lossless_status {
    CTX_LOSSLESS_OK = 0,
    CTX_LOSSLESS_CORRUPT = 1,
    CTX_LOSSLESS_MEMORY = 2,
} ctx_lossless_status;

/* Pack a box that passed ctx_view_check into out[ctx_lossless_bound(bytes)]; sets *bytes. shape[i] < 2^32 and fewer than
 * 2^31 elements. Every table gives the same bytes. */
ctx_lossless_status ctx_lossless_encode(const ctx_kernels *k, const ctx_view *src, const size_t shape[3], uint8_t *out,
                                        size_t *bytes);

/* One stream, and the box that it must fill: of its own shape and type, checked with `distinct`. */
typedef struct ctx_lossless_job {
    const uint8_t *data;
    size_t bytes;
    ctx_view dst;
    size_t shape[3];
    const uint64_t *sum; /* XXH3-64 that the stream must have, if not NULL; then it has more than 240 bytes */
} ctx_lossless_job;

/* Unpack streams; *failed gets the first one that is not right, or count. Boxes of earlier jobs are then written, that one
 * and later ones may be written in part. */
ctx_lossless_status ctx_lossless_decode(const ctx_kernels *k, const ctx_lossless_job *jobs, size_t count, size_t *failed);

/* ---- Kernels: steps of 64 values. Arrays hold whole steps; nothing needs alignment ------------------------------- */

/* What the coders share about a run of steps. */
typedef struct ctx_lossless_steps {
    ctx_dtype dtype;
    size_t rows, steps_per_row;
    uint8_t *values, *symbols, *low; /* [steps][64] elements and symbols, [steps][ctx_lossless_low_bytes] */
    uint8_t *top, *flip, *class_of; /* [rows] */
    uint8_t *first_bits;            /* bits of the tail; 9 bytes of room behind */
    uint8_t *exponents, *signs;     /* of level 15; room for one a value, signs: a byte each */
    size_t bits, escapes;           /* how many there are */
} ctx_lossless_steps;

/* Costs of coding, in sixteenths of a bit: [symbol][class]; the symbols that a class has. */
typedef struct ctx_lossless_model {
    uint16_t cost[CTX_RANS_SYMBOLS][CTX_LOSSLESS_CLASSES];
    uint32_t present[CTX_LOSSLESS_CLASSES];
    const ctx_rans_tables *tables;
} ctx_lossless_model;

typedef struct ctx_lossless_coder {
    /* Choose the top, flip and class of each row. */
    void (*choose)(const ctx_lossless_model *model, const ctx_lossless_steps *s);
    /* Write symbols, low bits and the tail's parts; sets bits and escapes. */
    void (*split)(const ctx_lossless_model *model, ctx_lossless_steps *s);
    /* How many first bits and escapes symbols [64 n] have. */
    void (*count)(const uint8_t *symbols, size_t steps, size_t *bits, size_t *escapes);
    /* The inverse of split. */
    void (*join)(const ctx_lossless_steps *s);
} ctx_lossless_coder;

static inline size_t ctx_lossless_low_bytes(ctx_dtype dtype) { return dtype == CTX_FP32 ? 176 : dtype == CTX_FP16 ? 72 : 48; }

#endif
