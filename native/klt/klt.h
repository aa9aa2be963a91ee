/* klt/klt.h - planes of K or V to coded streams and back: a linear transform a card brings, integers, interleaved rANS.
 *
 * A plane is [heads, tokens, dim] of one layer. Its heads are cut into groups, each with a transform of its own, and its
 * tokens into cells of 64. Planes of several layers, K and V, may be coded as one, whose parts they are: then the same heads
 * of all of them make a group, part by part. Stream, little-endian:
 *
 *   0   u8 scheme (1), u8 level, u8 part (0 whole, 1 refinement), u8 0, u16 tokens, u16 cells
 *   8   per cell, tokens first, groups inside: u64 raw mask, u32 rANS bytes, u32 escapes
 *   ... per cell: rANS stream | low bits | escapes i16 | raw tokens [raw, heads of the group, dim]
 *
 * Symbols go component by component, q + 15 of 0..30 or 31 for an escape; the token's scale code is its lane's seed.
 * With shift k the symbol codes (q + 2^(k-1)) >> k and the k low bits follow as bit planes.
 *
 *   decode   x[d] = mean[d] + s * step * gain[d] * sum over c of q[c] * basis[c][d]      (sum: 32 bits, wrapping)
 *   encode   q[c] = rint(sum over d of forward[c][d] * (x[d] - mean[d]) / s / step)      (fp32, d upwards, no contraction)
 *       or   q[c] = rint(quantum[c] * sum over d of whole[c][d] * rint((x[d] - mean[d]) / s * unit))   (sum: as above)
 *
 * with s = 2^((code - 0x8000) / 32) of the token's RMS over the group (in `large` groups 1 for smaller tokens), whose squares
 * are added channel after channel in fp32; in front of whole numbers those of d % 16 each, then 16 sums by halves. K is
 * un-rotated before and rotated after. A refinement carries q - 3 * q_base of a level whose step is a third of its base's.
 *
 * The decoder takes any bytes: it reads nothing outside of the streams, writes nothing outside of the destination box,
 * and says what is wrong with them. All instruction sets give the same bytes and the same numbers.
 */
#ifndef CTXREUSE_KLT_H
#define CTXREUSE_KLT_H

#include "rans/rans.h"

enum { CTX_KLT_CHANNELS = 4096 }; /* most of a group */

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
    size_t first, heads;     /* of each part; channels = parts * heads * dim, part by part and head by head */
    size_t components;       /* coded ones, at most channels */
    size_t refined;          /* components of the base level; 0 without base */
    double inverse_energy;   /* 2^(-2 log_rms) / channels */
    int large;               /* no scale below 1: tokens of less energy stand as they are */
    const float *mean, *gain;     /* [channels] */
    const float *forward;         /* [components][channels], if there are no whole numbers */
    const int16_t *whole;         /* [components][channels] */
    const float *quantum;         /* [components] */
    float unit;                   /* 0: no whole numbers */
    const int16_t *basis;         /* [components][channels], within +-8191 */
    const uint8_t *table, *shift; /* [components] */
    const uint8_t *refine;        /* [refined] tables of the refinement's symbols */
} ctx_klt_spec;

enum { CTX_KLT_NO_ROPE = 0, CTX_KLT_HALF = 1, CTX_KLT_PAIRS = 2 };

typedef struct ctx_klt_plane {
    const ctx_rans_tables *tables;
    const struct ctx_klt_plane *base; /* or NULL */
    size_t parts, heads, dim, groups, most_components, most_channels; /* heads of each part */
    float step, inverse_step; /* inverse of the step that encoding uses: a third of it if nested */
    int level, nested, rope;
    struct ctx_klt_group *group; /* kernels.h */
} ctx_klt_plane;

/* Prepare a plane at a level. Groups cover all heads of a part in order. `base` and `tables` must outlive the plane. NULL with
 * *wrong = NULL: no memory; else *wrong says which argument cannot be. */
ctx_klt_plane *ctx_klt_prepare(const ctx_rans_tables *tables, size_t parts, size_t heads, size_t dim,
                               const ctx_klt_spec *specs, size_t groups, int level, float step, int nested, int rope,
                               const ctx_klt_plane *base, const char **wrong);
void ctx_klt_free(ctx_klt_plane *plane);

/* Rows of one part, [heads, tokens, dim] as a view that has passed ctx_view_check, and the angles of their positions:
 * [tokens, half] float, or half = 0. Rows that are encoded may be checked first: then their bytes lie side by side, more
 * than 240. */
typedef struct ctx_klt_part {
    ctx_view rows;
    const float *cos, *sin;
    size_t half;
    uint64_t sum; /* XXH3-64 of the rows' bytes, compared if `checked` */
    int checked;
} ctx_klt_part;

/* Rows of a plane: of each of its parts, all of one type. All planes of a call have the same tables. */
typedef struct ctx_klt_place {
    const ctx_klt_plane *plane;
    const ctx_klt_part *parts;
    size_t tokens;
} ctx_klt_place;

/* One stream, and its refinement if there is one. */
typedef struct ctx_klt_stream {
    const uint8_t *at, *more;  /* more: NULL without refinement */
    size_t bytes, more_bytes;
    uint64_t sum, more_sum;    /* XXH3-64, compared if `checked`, which only streams of more than 240 bytes may be */
    int checked, more_checked;
} ctx_klt_stream;

typedef struct ctx_klt_result {
    ctx_klt_reason reason;
    size_t place, cell;
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
/* Decode stream i to place i, which must have as many tokens; views are `distinct`. `raw`: type of raw tokens. On an error
 * rows of places before it may have been written, and no others. `clock`: NULL, or what is told where time goes. */
ctx_klt_result ctx_klt_decode(const ctx_kernels *k, const ctx_klt_place *places, const ctx_klt_stream *streams, size_t count,
                              ctx_dtype raw, ctx_klt_clock *clock);

/* Bytes that suffice for a stream of `tokens` tokens, or SIZE_MAX. */
size_t ctx_klt_bound(const ctx_klt_plane *plane, size_t tokens, ctx_dtype raw);

/* What a place is encoded with, and to. */
typedef struct ctx_klt_coded {
    size_t raw_first; /* the first tokens, which stand raw */
    size_t at, bytes; /* set: the stream in `out` */
} ctx_klt_coded;

/* Encode places of 1 to 65535 tokens, few enough for 65535 cells, to streams one behind the other. Angles undo the rotation. Raw tokens are written in type `raw`. `refinement`: write that,
 * relative to the base. out: ctx_klt_bound(...) bytes of each. */
ctx_klt_result ctx_klt_encode(const ctx_kernels *k, const ctx_klt_place *places, ctx_klt_coded *coded, size_t count,
                              ctx_dtype raw, int refinement, uint8_t *out, ctx_klt_clock *clock);

/* Name of the implementation that k uses here. */
const char *ctx_klt_name(const ctx_kernels *k);

#endif
