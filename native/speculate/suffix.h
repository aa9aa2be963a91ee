/* speculate/suffix.h - an index of the suffixes of what was said: how a text that ends so has gone on before.
 *
 * Tokens lie in a ring; runs of them (texts) are apart by a separator. Two tables of chains find earlier places that end in
 * the same 8 or 3 tokens, newest first; each place is compared before it counts, so that a chain may hold strangers, and
 * places that were written over end it. All work is bounded: steps of a chain, tokens compared, places that vote.
 */
#ifndef CTXREUSE_SPECULATE_SUFFIX_H
#define CTXREUSE_SPECULATE_SUFFIX_H

#include <stddef.h>
#include <stdint.h>

enum { SUFFIX_ORDERS = 2, SUFFIX_DEPTH = 64 };

typedef struct suffix_index {
    int32_t *tokens;                  /* the ring; -1 between runs */
    uint32_t *before[SUFFIX_ORDERS];  /* of each place, the one before it in its chain */
    uint32_t *heads[SUFFIX_ORDERS];   /* the newest place of each chain */
    uint32_t room, most;              /* tokens now and at most, powers of two */
    uint64_t end;                     /* tokens so far */
    uint64_t salt;
} suffix_index;

/* Of at most `most` tokens (a power of two); NULL without memory. */
suffix_index *suffix_new(uint32_t most, uint64_t salt);
void suffix_free(suffix_index *index);
size_t suffix_bytes(const suffix_index *index);

/* Append tokens, none below 0; `begins`: a run. -1 without memory: nothing has changed. */
int suffix_add(suffix_index *index, const int32_t *ids, size_t n, int begins);

/* How a text that ends in tail[0..n) goes on: at most `most` tokens and of each its share of the places that agree so far.
 * Returns how many; *matched: tokens in which the best place agrees with the text's end. */
size_t suffix_draft(const suffix_index *index, const int32_t *tail, size_t n, size_t most, int32_t *ids, float *shares, uint32_t *matched);

/* The newest `n` tokens at most, separators included, oldest first; returns how many. */
size_t suffix_read(const suffix_index *index, int32_t *ids, size_t n);

#endif
