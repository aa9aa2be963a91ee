/* rans/generic.c - the entropy coder without vector instructions: always usable, and the reference for the others. */
#include "scalar.h"

static void decode_one(const ctx_rans_tables *tables, ctx_rans_job *job) {
    uint32_t x[CTX_RANS_LANES];
    const size_t steps = ctx_rans_steps(job->n);
    job->status = CTX_RANS_CORRUPT;
    if (!rans_begin(job, x)) return;
    const uint8_t *word = job->data + CTX_RANS_STATES, *end = job->data + job->bytes;
    for (size_t step = 0; step < steps && word; step++) {
        const size_t left = job->n - step * CTX_RANS_LANES, lanes = left < CTX_RANS_LANES ? left : CTX_RANS_LANES;
        word = rans_decode_step(&tables->at[job->steps[step]], x, lanes, job->symbols + step * CTX_RANS_LANES, word, end);
    }
    if (word == end && rans_end(job, x)) job->status = CTX_RANS_OK;
}

static void encode_one(const ctx_rans_tables *tables, ctx_rans_job *job) {
    uint32_t x[CTX_RANS_LANES];
    uint8_t *word = job->data + ctx_rans_bound(job->n);
    int bad = 0;
    rans_seed(job, x);
    for (size_t step = ctx_rans_steps(job->n); step-- > 0;) {
        const size_t left = job->n - step * CTX_RANS_LANES, lanes = left < CTX_RANS_LANES ? left : CTX_RANS_LANES;
        word = rans_encode_step(&tables->at[job->steps[step]], x, lanes, job->symbols + step * CTX_RANS_LANES, word, &bad);
    }
    rans_finish(job, x, word, bad);
}

static void decode(const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count) {
    for (size_t i = 0; i < count; i++) decode_one(tables, &jobs[i]);
}

static void encode(const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count) {
    for (size_t i = 0; i < count; i++) encode_one(tables, &jobs[i]);
}

static uint8_t count(const uint8_t *symbols, size_t n, uint32_t counts[32]) { return rans_count_scalar(symbols, n, counts); }

const ctx_rans_coder ctx_rans_generic = {.encode = encode, .decode = decode, .count = count};
