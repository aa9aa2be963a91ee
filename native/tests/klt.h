/* klt.h - what the tests of the transform coder share: random planes, rows, streams, and every table on the same bytes. */
#ifndef CTXREUSE_TEST_KLT_H
#define CTXREUSE_TEST_KLT_H

#include "klt/klt.h"
#include "test.h"

/* A plane with its base, and rows [heads][tokens][dim] of a type with what each coded to. Exactly sized buffers. */
typedef struct coded {
    ctx_rans_tables *tables;
    ctx_klt_plane *base, *plane;
    size_t tokens, half, raw_first;
    unsigned turned;       /* bit i: part i is rotated */
    ctx_dtype dtype, raw;
    float *cos, *sin;      /* [tokens][half] */
    uint8_t *rows;
    uint8_t *data[3];      /* the plane's stream, the base's, the refinement */
    size_t bytes[3];
} coded;

coded random_coded(size_t most_heads, size_t most_dim, size_t most_tokens);
void free_coded(coded *c);

/* Decode with each usable table and compare all: what it says, and the rows. `refined`: of the base's stream with the
 * refinement, else of the plane's. Returns the reason. */
ctx_klt_reason decode_rows(const coded *c, const uint8_t *data, size_t bytes, const uint8_t *more, size_t more_bytes);

/* `inputs` mutated streams. Returns how many still decoded. */
size_t fuzz_klt(size_t inputs);

void test_klt(void);

#endif
