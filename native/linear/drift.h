/* linear/drift.h - rows of K and V that came to stand elsewhere, corrected by the change of some that were computed anew.
 *
 * A run's rows of V, less their mean, are regressed on those of its samples; the same weights serve K, whose change is known
 * as it is before rotation:
 *   w = (v - mean) x^T * min(1, reach / |v - mean|^2)^(1/2) + prior;   v += w dv;   k += rotated(w dk)
 */
#ifndef CTXREUSE_DRIFT_H
#define CTXREUSE_DRIFT_H

#include "linear.h"

typedef struct ctx_drift {
    ctx_view keys, values; /* [heads, tokens, dim], of one type, dim contiguous */
    size_t heads, dim, runs, samples, half;
    int interleaved;
    const int64_t (*rows)[2];              /* [runs]: where each begins and ends */
    const float *cos, *sin;                /* [rows of all runs, half] */
    const float *x, *mean, *reach, *prior; /* [runs, samples, heads * dim], [runs, heads * dim], [runs], [runs, samples] */
    const float *dk, *dv;                  /* as x */
} ctx_drift;

/* By up to `threads` threads. CTX_NO_MEMORY, some rows then being corrected, or CTX_OK. */
ctx_status ctx_drift_correct(const ctx_kernels *k, const ctx_drift *d, size_t threads);

#endif
