/* linear/top.h - the largest outputs of a linear layer and the log of the sum of exponentials of all, in one pass over its weights.
 *
 * What a token is scored by that may leave a model early: its outputs are compared where they were just computed, in the cache,
 * and none is kept.
 */
#ifndef CTXREUSE_TOP_H
#define CTXREUSE_TOP_H

#include "linear.h"

/* The largest output, the second one (-INFINITY where there is none), the log-sum-exp of all, and the number of the first. */
typedef struct ctx_top {
    float best, second, total;
    uint32_t index;
} ctx_top;

/* Of each row of `a`, whose `y` is not used; at least one output, and fewer than 2^32. Of equal outputs the first is the largest.
 * By up to `threads` threads, with the same bits for any number of them. CTX_NO_MEMORY, or CTX_OK. */
ctx_status ctx_linear_top(const ctx_kernels *k, const ctx_linear *a, ctx_top *tops, size_t threads);

#endif
