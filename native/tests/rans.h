/* rans.h - what the tests of the entropy coder share: random tables, streams, and every coder on the same bytes. */
#ifndef CTXREUSE_TEST_RANS_H
#define CTXREUSE_TEST_RANS_H

#include "rans/rans.h"
#include "test.h"

/* Frequencies of a random kind: flat, peaked, with absent symbols, or the extremes 255 and 1. */
void random_freqs(uint8_t freq[32]);

/* A stream of random symbols under its tables, encoded by the generic coder. Buffers are exactly sized; free_stream. */
typedef struct stream {
    ctx_rans_tables *tables;
    size_t n, bytes;
    uint8_t *symbols, *data;
    uint16_t *steps, seeds[64];
} stream;

stream random_stream(size_t n, size_t tables);
void free_stream(stream *s);

/* Decode with each usable table and compare all: status, and on success symbols and seeds. Returns the status. */
ctx_rans_status decode_everywhere(const stream *s, const uint8_t *data, size_t bytes);

/* `inputs` mutated, cut, lengthened or random streams. Returns how many still decoded. */
size_t fuzz_rans(size_t inputs);

void test_rans(void);

#endif
