/* klt/kernels.h - what the transform coder's sources share: prepared groups, scales, and one table of kernels for each
 * instruction set.
 */
#ifndef CTXREUSE_KLT_KERNELS_H
#define CTXREUSE_KLT_KERNELS_H

#include <string.h>

#include "klt.h"

enum {
    CTX_KLT_TOKENS = 64,    /* of a cell */
    CTX_KLT_BLOCK = 16,     /* channels that stand together in a prepared basis */
    CTX_KLT_SHIFT = 10,     /* most low bits: q and its rounding fit 16 bits */
    CTX_KLT_HEAD = 8, CTX_KLT_ENTRY = 16,
};

typedef struct ctx_klt_group {
    size_t first, heads; /* of a part */
    size_t all_heads;    /* of all parts */
    size_t channels, components, refined;
    size_t blocks;       /* of 16 channels, all_heads * ceil(dim / 16); channels behind a head's last are 0 */
    size_t narrow;       /* components from here on have an int8 basis: the int16 one / 64 */
    size_t low, low_refined; /* low bits of a token, of all components and of those that the base has not */
    double inverse_energy;
    int large;
    float *mean, *gain;  /* [blocks * 16] */
    float *centre;       /* [channels] mean */
    float *forward;      /* [ceil(components / 4)][channels][4], or NULL: whole numbers */
    int16_t *whole;      /* [ceil(components / 4)][ceil(channels / 2)][4][2] */
    float *quantum;      /* [components] */
    float unit;
    int16_t *pairs;      /* [blocks][ceil(components / 2)][16][2] */
    int8_t *quads;       /* [blocks][ceil((components - narrow) / 4)][16][4] */
    int32_t *bias;       /* [blocks * 16] -128 * sum of the int8 basis */
    uint16_t *steps, *steps_refined; /* [components] table numbers of a cell of 64 tokens */
    uint8_t *shift;      /* [components] */
} ctx_klt_group;

void ctx_klt_start(ctx_klt_clock *clock);          /* NULL: nothing */
void ctx_klt_tick(ctx_klt_clock *clock, int part); /* adds what passed since the last one */

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

/* Where the rows of a cell's head come from. */
typedef struct ctx_klt_source {
    const uint8_t *at;
    size_t step;            /* bytes from row to row */
    const float *cos, *sin; /* [tokens][half] that undo the rotation of pairs (i, i + half) */
    size_t half;
} ctx_klt_source;

typedef struct ctx_klt_kernels {
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
    /* x[c] -= mean[c]; sum of x[c]^2: of c % 16 upwards, then the upper half of the sums to the lower one */
    float (*centre_row)(float *x, const float *mean, size_t channels);
    /* x[t][c] and sums as centre_row gives them of 16 tokens' rows of each head; 0 if it does not do this shape, NULL if
     * none. */
    int (*load)(float *x, float energy[16], const ctx_klt_source *from, ctx_dtype dtype, const ctx_klt_group *g, size_t dim);
    /* out[d][t][0..1] = rint(factor[t] * x[t][2 * d + 0..1]), within +-32767, of 16 tokens; rows of out are 64 tokens */
    void (*round)(int16_t *out, const float *x, const float factor[16], size_t channels);
    /* As forward, of x [ceil(channels / 2)][64][2] and the group's whole numbers. */
    void (*whole)(int16_t *q, const int16_t *x, const ctx_klt_group *g, int32_t sum[64], int32_t most[64]);
    /* q = floor((q + 1) / 3) of rows of 64, |q| <= 32001 */
    void (*thirds)(int16_t *q, size_t rows);
    /* Symbols of a row and, if shift > 0, its low bits (8 bytes a plane); symbols out of 0..30 become 31. */
    void (*symbols)(uint8_t *symbols, uint8_t *low, const int16_t *q, unsigned shift);
    /* Bits of those of 64 symbols that are 31 or whose byte in absent[32] has its top bit set; NULL: none has. */
    uint64_t (*escapes)(const uint8_t *symbols, const uint8_t *absent);
} ctx_klt_kernels;

const ctx_klt_kernels *ctx_klt_of(const ctx_kernels *k);

#endif
