/* klt.h - planes of K or V to coded streams and back: a linear transform a card brings, integers, interleaved rANS.
 *
 * A plane is [heads, tokens, dim] of one layer. Its heads are cut into groups, each with a transform of its own, and its
 * tokens into cells of 64. Stream, little-endian:
 *
 *   0   u8 scheme (1), u8 level, u8 part (0 whole, 1 refinement), u8 0, u16 tokens, u16 cells
 *   8   per cell, tokens first, groups inside: u64 raw mask, u32 rANS bytes, u16 escapes, u16 0
 *   ... per cell: rANS stream | low bits | escapes i16 | raw tokens [raw, heads of the group, dim]
 *
 * Symbols go component by component, q + 15 of 0..30 or 31 for an escape; the token's scale code is its lane's seed.
 * With shift k the symbol codes (q + 2^(k-1)) >> k and the k low bits follow as bit planes.
 *
 *   decode   x[d] = mean[d] + s * step * gain[d] * sum over c of q[c] * basis[c][d]      (sum: 32 bits, wrapping)
 *   encode   q[c] = rint(sum over d of forward[c][d] * (x[d] - mean[d]) / s / step)      (fp32, d upwards, no contraction)
 *
 * with s = 2^((code - 0x8000) / 32) of the token's RMS over the group. K is un-rotated before and rotated after. A
 * refinement carries q - 3 * q_base of a level whose step is a third of its base's.
 *
 * The decoder takes any bytes: it reads nothing outside of the streams, writes nothing outside of the destination box,
 * and says what is wrong with them. All instruction sets give the same bytes and the same numbers.
 */
#ifndef CTXREUSE_KLT_H
#define CTXREUSE_KLT_H

#include <string.h>

#include "rans.h"

enum {
    CTX_KLT_TOKENS = 64,    /* of a cell */
    CTX_KLT_CHANNELS = 512, /* most of a group: escapes of a cell then fit 16 bits */
    CTX_KLT_BLOCK = 16,     /* channels that stand together in a prepared basis */
    CTX_KLT_SHIFT = 10,     /* most low bits: q and its rounding fit 16 bits */
    CTX_KLT_HEAD = 8, CTX_KLT_ENTRY = 16,
};

typedef enum ctx_klt_reason {
    CTX_KLT_OK = 0,
    CTX_KLT_CHECKSUM, /* the stream's XXH3-64 is not the given one */
    CTX_KLT_HEADER,   /* scheme, level or part is another one */
    CTX_KLT_COUNT,    /* tokens or cells are not those expected */
    CTX_KLT_LENGTH,   /* a cell's entry is impossible, or the bytes are more or fewer than the entries say */
    CTX_KLT_RANS,     /* no rANS stream of these tables and this length */
    CTX_KLT_ESCAPES,  /* symbols and list disagree in the number of escapes */
    CTX_KLT_SCALE,    /* a scale code out of range, or one where none belongs */
    CTX_KLT_LOW,      /* a low bit is set where no token is */
    CTX_KLT_MERGE,    /* a refinement that does not fit its base */
    CTX_KLT_TABLE,    /* encode: a table codes neither a symbol nor an escape; cannot be after ctx_klt_prepare */
    CTX_KLT_MEMORY,
    CTX_KLT_REASONS
} ctx_klt_reason;

/* What a card says about one group at one level. Arrays are read by ctx_klt_prepare only. */
typedef struct ctx_klt_spec {
    size_t first, heads;     /* channels = heads * dim, head by head */
    size_t components;       /* coded ones, at most channels */
    size_t refined;          /* components of the base level; 0 without base */
    double inverse_energy;   /* 2^(-2 log_rms) / channels */
    const float *mean, *gain;     /* [channels] */
    const float *forward;         /* [components][channels] */
    const int16_t *basis;         /* [components][channels], within +-8191 */
    const uint8_t *table, *shift; /* [components] */
    const uint8_t *refine;        /* [refined] tables of the refinement's symbols */
} ctx_klt_spec;

typedef struct ctx_klt_group {
    size_t first, heads, channels, components, refined;
    size_t blocks;       /* of 16 channels, heads * ceil(dim / 16); channels behind a head's last are 0 */
    size_t narrow;       /* components from here on have an int8 basis: the int16 one / 64 */
    size_t low, low_refined; /* low bits of a token, of all components and of those that the base has not */
    double inverse_energy;
    float *mean, *gain;  /* [blocks * 16] */
    float *centre;       /* [channels] mean */
    float *forward;      /* [ceil(components / 4)][channels][4] */
    int16_t *pairs;      /* [blocks][ceil(components / 2)][16][2] */
    int8_t *quads;       /* [blocks][ceil((components - narrow) / 4)][16][4] */
    int32_t *bias;       /* [blocks * 16] -128 * sum of the int8 basis */
    uint16_t *steps, *steps_refined; /* [components] table numbers of a cell of 64 tokens */
    uint8_t *shift;      /* [components] */
} ctx_klt_group;

enum { CTX_KLT_NO_ROPE = 0, CTX_KLT_HALF = 1, CTX_KLT_PAIRS = 2 };

typedef struct ctx_klt_plane {
    const ctx_rans_tables *tables;
    const struct ctx_klt_plane *base; /* or NULL */
    uint32_t *known;   /* [tables] bit s: symbol s has a frequency */
    size_t heads, dim, groups, most_components, most_channels;
    float step, inverse_step; /* inverse of the step that encoding uses: a third of it if nested */
    int level, nested, rope;
    ctx_klt_group *group;
} ctx_klt_plane;

/* Prepare a plane at a level. Groups cover all heads in order. `base` and `tables` must outlive the plane. NULL with
 * *wrong = NULL: no memory; else *wrong says which argument cannot be. */
ctx_klt_plane *ctx_klt_prepare(const ctx_rans_tables *tables, size_t heads, size_t dim, const ctx_klt_spec *specs,
                               size_t groups, int level, float step, int nested, int rope, const ctx_klt_plane *base,
                               const char **wrong);
void ctx_klt_free(ctx_klt_plane *plane);

/* One stream of a run, and its refinement if there is one. */
typedef struct ctx_klt_stream {
    const uint8_t *at, *more;  /* more: NULL without refinement */
    size_t bytes, more_bytes;
    uint64_t sum, more_sum;    /* XXH3-64, compared if `checked`, which only streams of more than 240 bytes may be */
    int checked, more_checked;
    size_t tokens;             /* that it must have */
} ctx_klt_stream;

typedef struct ctx_klt_result {
    ctx_klt_reason reason;
    size_t stream, cell;
    int refinement; /* it is the refinement's bytes that are wrong */
} ctx_klt_result;

/* Where the time of a call went, in nanoseconds. `last` is set by the call. */
enum {
    CTX_KLT_CHECKS = 0, CTX_KLT_DECODING, CTX_KLT_INTEGERS, CTX_KLT_VALUES, CTX_KLT_DECODE_PARTS,
    CTX_KLT_ROWS = 0, CTX_KLT_SCALES, CTX_KLT_TRANSFORM, CTX_KLT_SYMBOLS, CTX_KLT_ENCODING, CTX_KLT_WRITING, CTX_KLT_ENCODE_PARTS
};
typedef struct ctx_klt_clock {
    uint64_t last, spent[CTX_KLT_ENCODE_PARTS];
} ctx_klt_clock;
void ctx_klt_start(ctx_klt_clock *clock);          /* NULL: nothing */
void ctx_klt_tick(ctx_klt_clock *clock, int part); /* adds what passed since the last one */

/* Decode a run of consecutive planes into a box [heads, sum(tokens), dim]; the view must have passed ctx_view_check
 * with `distinct`. cos, sin: [sum(tokens), half] float of the rows' positions, or half = 0. `raw`: type of raw tokens. On
 * an error rows before it may have been written, and no others. `clock`: NULL, or what is told where time goes. */
ctx_klt_result ctx_klt_decode(const ctx_kernels *k, const ctx_klt_plane *plane, const ctx_view *dst,
                              const ctx_klt_stream *streams, size_t count, ctx_dtype raw, const float *cos,
                              const float *sin, size_t half, ctx_klt_clock *clock);

/* Bytes that suffice for a stream of `tokens` tokens, or SIZE_MAX. */
size_t ctx_klt_bound(const ctx_klt_plane *plane, size_t tokens, ctx_dtype raw);

/* Encode one plane [heads, tokens, dim]; tokens from 1 to 65535, few enough for 65535 cells. cos, sin: [tokens, half] that
 * undo the rotation. The first raw_first tokens stand raw, in type `raw`. `refinement`: write that, relative to the base.
 * out: ctx_klt_bound(...) bytes; *bytes gets those used. */
ctx_klt_result ctx_klt_encode(const ctx_kernels *k, const ctx_klt_plane *plane, const ctx_view *src, size_t tokens,
                              const float *cos, const float *sin, size_t half, size_t raw_first, ctx_dtype raw,
                              int refinement, uint8_t *out, size_t *bytes, ctx_klt_clock *clock);

/* Scale codes are within this of 0x8000. */
enum { CTX_KLT_CODES = 2048 };
extern const float ctx_klt_powers[32]; /* 2^(i / 32) */

/* 2^(power / 32), |power| <= CTX_KLT_CODES: a table and an exponent, the same bits on every machine. */
static inline float ctx_klt_scale(int power) {
    const int octave = (power + CTX_KLT_CODES) / 32 - CTX_KLT_CODES / 32;
    const uint32_t bits = (uint32_t)(127 + octave) << 23;
    float whole;
    memcpy(&whole, &bits, 4);
    return ctx_klt_powers[(power + CTX_KLT_CODES) % 32] * whole;
}

static inline size_t ctx_klt_padded(size_t dim) { return (dim + CTX_KLT_BLOCK - 1) / CTX_KLT_BLOCK * CTX_KLT_BLOCK; }

/* ---- Kernels: one implementation for an instruction set --------------------------------------------------------- */

/* Where a head's rows go, for kernels that finish them in registers. */
typedef struct ctx_klt_rows {
    uint8_t *at;
    size_t step;      /* bytes from row to row */
    ctx_dtype dtype;
    uint64_t written; /* tokens to write */
    const float *cos, *sin; /* [64][half], pairs (i, i + half); half = 0: no rotation */
    size_t half;
} ctx_klt_rows;

typedef struct ctx_klt_kernels {
    uint32_t needs;
    int narrow; /* product takes quads */
    /* q[r][t] = symbols[r * step + t] - 15 for t < 64: rows of 64 that may reach into the next ones */
    void (*rows)(int16_t *q, const uint8_t *symbols, size_t step, size_t rows);
    /* q[t] += value where bit t is set */
    void (*bits)(int16_t q[64], const uint8_t bits[8], int16_t value);
    /* [rows][64] to [ceil(rows / 2)][64][2]; a missing row is 0 */
    void (*pairs)(int16_t *out, const int16_t *q, size_t rows);
    /* symbols to [ceil(rows / 4)][64][4] bytes q + 128; a missing row is 128 */
    void (*quads)(uint8_t *out, const uint8_t *symbols, size_t step, size_t rows);
    /* out[t][16 * b + i] of `blocks` blocks from b on, tokens rounded up to a multiple of 4. The first `pairs` pairs come
     * from the int16 basis and the rest, `quads`, from the int8 one. */
    void (*product)(float *out, size_t out_step, const ctx_klt_group *g, size_t block, size_t blocks, const int16_t *q,
                    size_t pairs, const uint8_t *narrow, size_t quads, const float scale[64], size_t tokens);
    /* The same for a whole head, rotated, converted and written; 0 if it does not do this shape, NULL if none. */
    int (*head)(const ctx_klt_rows *rows, const ctx_klt_group *g, size_t dim, size_t head, const int16_t *q, size_t pairs,
                const uint8_t *narrow, size_t quads, const float scale[64], size_t tokens);
    /* x[c][t] -= mean[c]; energy[t] = sum over c of x[c][t]^2, c upwards */
    void (*centre)(float *x, const float *mean, size_t channels, float energy[64]);
    /* x[c][t] *= factor[t] */
    void (*normalise)(float *x, size_t channels, const float factor[64]);
    /* q[c][t] = rint(inverse_step * sum over d of forward[c][d] * x[d][t]), beyond +-32000: anything beyond; sum[t] of |q| */
    void (*forward)(int16_t *q, const float *x, const ctx_klt_group *g, float inverse_step, int32_t sum[64], int32_t most[64]);
    /* Symbols of a row and, if shift > 0, its low bits (8 bytes a plane); symbols out of 0..30 become 31. */
    void (*symbols)(uint8_t *symbols, uint8_t *low, const int16_t *q, unsigned shift);
    /* Bits of those of 64 symbols that are 31 or not in `known`. */
    uint64_t (*escapes)(const uint8_t *symbols, uint32_t known);
} ctx_klt_kernels;

const ctx_klt_kernels *ctx_klt_of(const ctx_kernels *k);
const char *ctx_klt_name(const ctx_kernels *k);

#endif
