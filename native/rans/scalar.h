/* rans/scalar.h - one lane at a time: how a stream begins and ends, and the steps that no vector loop takes. */
#ifndef CTXREUSE_RANS_SCALAR_H
#define CTXREUSE_RANS_SCALAR_H

#include "rans.h"
#include "core/scalar.h"

/* The states of a stream; 0 if they or the length cannot be. */
static inline int rans_begin(const ctx_rans_job *job, uint32_t x[64]) {
    if (job->bytes < CTX_RANS_STATES || job->bytes % 2) return 0;
    uint32_t low = UINT32_MAX;
    for (int lane = 0; lane < CTX_RANS_LANES; lane++) {
        x[lane] = get_le32(job->data + 4 * lane);
        low = x[lane] < low ? x[lane] : low;
    }
    return low >= 0x10000;
}

/* The seeds of a stream whose words are all read; 0 if it did not end where encoders begin. */
static inline int rans_end(ctx_rans_job *job, const uint32_t x[64]) {
    uint32_t high = 0;
    for (int lane = 0; lane < CTX_RANS_LANES; lane++) {
        job->seeds[lane] = (uint16_t)x[lane];
        high |= x[lane] >> 16;
    }
    return high == 1; /* each is at least 1 */
}

/* Decode `lanes` symbols of a step. Returns behind the words read, or NULL if they do not suffice. */
static inline const uint8_t *rans_decode_step(const ctx_rans_table *t, uint32_t x[64], size_t lanes, uint8_t *symbols,
                                              const uint8_t *word, const uint8_t *end) {
    for (size_t lane = 0; lane < lanes; lane++) {
        const uint32_t slot = x[lane] & 255, s = t->symbol[slot];
        uint32_t next = t->freq[s] * (x[lane] >> 8) + slot - t->cum[s];
        symbols[lane] = (uint8_t)s;
        if (next < 0x10000) {
            if (end - word < 2) return NULL;
            next = next << 16 | (uint32_t)(word[0] | word[1] << 8);
            word += 2;
        }
        x[lane] = next;
    }
    return word;
}

/* Encode `lanes` symbols of a step, the words below `word`. Returns the first of them; sets *bad for what has no code. */
static inline uint8_t *rans_encode_step(const ctx_rans_table *t, uint32_t x[64], size_t lanes, const uint8_t *symbols,
                                        uint8_t *word, int *bad) {
    for (size_t lane = lanes; lane-- > 0;) {
        const uint32_t s = symbols[lane];
        if (s >= CTX_RANS_SYMBOLS || t->absent[s]) {
            *bad = 1;
            continue;
        }
        const uint32_t f = t->freq[s];
        uint32_t state = x[lane];
        if (state >> 24 >= f) {
            word -= 2;
            word[0] = (uint8_t)state, word[1] = (uint8_t)(state >> 8);
            state >>= 16;
        }
        x[lane] = ((state / f) << 8) + state % f + t->cum[s];
    }
    return word;
}

static inline void rans_seed(const ctx_rans_job *job, uint32_t x[64]) {
    for (int lane = 0; lane < CTX_RANS_LANES; lane++) x[lane] = 0x10000u + job->seeds[lane];
}

/* Put the states before the words, which begin at `word` and reach to the end of the job's room. */
static inline void rans_finish(ctx_rans_job *job, const uint32_t x[64], uint8_t *word, int bad) {
    for (int lane = 0; lane < CTX_RANS_LANES; lane++) put_le32(word - CTX_RANS_STATES + 4 * lane, x[lane]);
    job->bytes = (size_t)(job->data + ctx_rans_bound(job->n) - word) + CTX_RANS_STATES;
    job->status = bad ? CTX_RANS_SYMBOL : CTX_RANS_OK;
}

/* Four sums side by side, for equal symbols in a row would wait for each other. */
static inline uint8_t rans_count_scalar(const uint8_t *symbols, size_t n, uint32_t counts[32]) {
    uint32_t held[4][32] = {{0}};
    uint8_t seen = 0;
    for (size_t i = 0; i < n; i++) {
        seen |= symbols[i];
        held[i % 4][symbols[i] % 32]++;
    }
    for (int s = 0; s < 32; s++) counts[s] += held[0][s] + held[1][s] + held[2][s] + held[3][s];
    return seen;
}

#endif
