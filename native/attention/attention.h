/* attention/attention.h - attention of a few queries over many rows of K and V that stay as they are stored, quantised or not.
 *
 * A plane is [heads, tokens, dim]; its formats and the layout of scales are described in ctxreuse/kernels/attention.py. A part is
 * a run of rows of two planes. Queries are [heads_q, queries, dim]; those of the heads that share a K and V head lie side
 * by side, so to each tile of rows they are one matrix of `group * queries` rows, and each tile is read once for them.
 *
 *   tile:   s = q k^T, in powers of two;  p = 2^(s - m), m the running maximum;  o = o * 2^(m_old - m) + p v
 *
 * Guarantee: nothing outside of the planes' rows first..last is read. Results of two tables differ by rounding only (sums
 * have other orders, FMA where there is one): 1e-5 of the largest value for float formats. AVX-512 multiplies int8 and
 * int4 with queries and weights as 16-bit integers, two bytes each: there it is 3e-4. A call may allow queries and weights
 * to be rounded to bf16 over bf16 rows, for processors that multiply these twice as fast: 1e-2 there.
 */
#ifndef CTXREUSE_ATTEND_H
#define CTXREUSE_ATTEND_H

#include "core/ctxreuse.h"

enum {
    CTX_ATTEND_TILE = 128, /* tokens that are scored before their weights are made */
    CTX_ATTEND_ROWS = 128, /* most query rows at once: their sums stay in the second cache */
    CTX_ATTEND_STRIP = 32, /* tokens of K that are transposed at once */
    CTX_ATTEND_GROUP = 32, /* values that share an int4 step and low */
    CTX_ATTEND_DIM = 512,
};

typedef enum ctx_format {
    CTX_ROWS_FP32 = 0, CTX_ROWS_FP16 = 1, CTX_ROWS_BF16 = 2, CTX_ROWS_INT8 = 3, CTX_ROWS_INT4 = 4, CTX_FORMATS = 5,
} ctx_format;

/* Steps in bytes; rows and scales need no alignment. */
typedef struct ctx_plane {
    ctx_format format;
    const uint8_t *at, *scales;              /* row 0 of head 0 */
    size_t head, row;
    size_t scale_head, scale_low, scale_group; /* int4: from steps to lows, and from group to group */
} ctx_plane;

typedef struct ctx_part {
    ctx_plane k, v;
    size_t first, last;
    const float *q;           /* [heads_q, queries, dim], or NULL: the call's */
    int placed;               /* rows have positions: at_rows[row], or at + row */
    int64_t at;
    const int64_t *at_rows;   /* ascending from first to last */
    const int64_t *hidden;    /* ascending rows that are masked */
    size_t hidden_count;
} ctx_part;

typedef struct ctx_attention {
    const float *q;
    size_t heads_q, heads, queries, dim; /* heads_q a multiple of heads */
    const int64_t *positions;            /* [queries], or NULL where no part is placed; all within +-2^60 */
    int64_t window;                      /* 0: none */
    float scale, softcap;                /* softcap 0: none */
    int rounded;                         /* over bf16 rows, queries and weights may be rounded to bf16 */
    const ctx_part *parts;
    size_t count;
} ctx_attention;

/* Over rows row_first..row_last of the parts set end to end, for K and V heads head_first..head_last: o and lse of their
 * query heads (those of others are left alone), by up to `threads` threads (core/pool.h). CTX_NO_MEMORY, or CTX_OK. */
ctx_status ctx_attend(const ctx_kernels *k, const ctx_attention *a, size_t head_first, size_t head_last, size_t row_first,
                      size_t row_last, float *o, float *lse, size_t threads);

/* o[0] and lse[0] of `count` results [count, rows, dim], [count, rows] become those over all their rows. */
void ctx_attend_merge(float *o, float *lse, size_t count, size_t rows, size_t dim);

/* The table that attends for k and this dim: that of k's name, or the next that runs here. */
const char *ctx_attend_name(const ctx_kernels *k, size_t dim);

/* Rows to codes. `rows` rows of dim values, row_step bytes apart, of one head; int8: scales[row]; int4: steps and lows of
 * group g at steps and lows + g * groups_step + row. Every table gives the same bits. 0, or -1: not finite, -2: beyond half
 * floats. */
int ctx_quantise8(const ctx_kernels *k, int8_t *codes, float *scales, const uint8_t *x, ctx_dtype dtype, size_t row_step,
                  size_t rows, size_t dim);
int ctx_quantise4(const ctx_kernels *k, uint8_t *codes, uint8_t *steps, uint8_t *lows, size_t groups_step, const uint8_t *x,
                  ctx_dtype dtype, size_t row_step, size_t rows, size_t dim);

/* ---- What a table holds ------------------------------------------------------------------------------------------- */

/* Query rows of one K and V head, and their integers: q = step * (256 * high + low). */
typedef struct ctx_queries {
    const float *q; /* [rows, dim] */
    size_t rows, dim;
    float scale;        /* of scores */
    int8_t *high, *low; /* [rows, dim] */
    float *step;        /* [rows], times scale */
    float *sums;        /* [rows, dim / 32]: of the integers, by group */
    int32_t *bias;      /* [rows, 2]: -128 times the sum of high, of low */
    uint32_t *pairs;    /* [rows, dim / 2]: values by twos, rounded to bf16; NULL where they must not be */
} ctx_queries;

/* Up to a tile of rows of one head; and what will be read after them, for the caches to fetch meanwhile. */
typedef struct ctx_rows {
    ctx_format format;
    const uint8_t *at, *scales, *lows, *ahead;
    size_t step, group_step, count, ahead_bytes;
    int rounded; /* weights may be rounded to bf16 */
} ctx_rows;

typedef struct ctx_attend_kernels {
    size_t multiple; /* dims that it can */
    /* Fills in the integers; NULL where scores needs none. */
    void (*integers)(ctx_queries *a);
    /* Fills in the pairs; NULL where scores and values cannot use them. It needs CTX_CPU_BF16. */
    void (*pairs)(ctx_queries *a);
    /* s[r][t] = scale * q[r] . k[t], for t up to count rounded up to a strip (what lies behind count is any number). */
    void (*scores)(const ctx_queries *a, const ctx_rows *k, float *s, uint8_t *room);
    /* cap * tanh(s / cap) * log2(e) in place. */
    void (*cap)(float *s, size_t n, float cap);
    /* In place 2^(s - max(m, s)) of a row of a tile, whose end is -inf; adds to l and m, returns 2^(m_old - m). */
    float (*weights)(float *s, size_t n, float *m, float *l);
    /* o[r] = o[r] * factor[r] + sum of s[r][t] * v[t]; s is [rows, TILE], 0 from count to the next strip, and
     * may be overwritten. */
    void (*values)(float *o, float *s, const float *factor, size_t rows, size_t dim, const ctx_rows *v, uint8_t *room);
    int (*quantise8)(int8_t *codes, float *scale, const float *x, size_t dim);
    int (*quantise4)(uint8_t *codes, uint8_t *step, uint8_t *low, const float *x); /* one group */
} ctx_attend_kernels;

/* Bytes of `room`, which is aligned to 64: a decoded tile of V, and integer weights of four query rows. */
static inline size_t ctx_attend_room(size_t dim) {
    return CTX_ATTEND_TILE * ((dim + 63) / 64 * 64) * sizeof(float) + 4 * CTX_ATTEND_TILE * 8;
}

#endif
