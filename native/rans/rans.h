/* rans/rans.h - entropy coding of small alphabets: interleaved rANS streams (Duda 2013, arXiv 1311.2540), many in one call.
 *
 * A stream codes n symbols below 32 with 64 lanes of 32-bit state, 16-bit words and probabilities of 8 bits. Symbol i
 * belongs to lane i % 64 and step i / 64; every step has a table of its own. Bytes: 64 states (u32, little-endian) as the
 * decoder starts with them, then the words (u16, little-endian) as it reads them, in a step by ascending lane.
 *
 *   decode   slot = x & 255, s = symbol of slot, x = freq[s] * (x >> 8) + slot - cum[s]; x < 2^16: x = x << 16 | word
 *   encode   backwards; x >= freq[s] << 24: emit the low word, x >>= 16; then x = (x / freq[s]) << 8 | x % freq[s] + cum[s]
 *
 * States lie in [2^16, 2^32). The encoder starts with 2^16 + seed[lane], and the decoder gives the seeds back: 16 bits a
 * lane that cost nothing. A decoder that ends elsewhere, or with words left or missing, has met corrupt bytes.
 * Every instruction set gives the same bytes. A lane emits at most one word in two symbols: after an emission x < 2^16,
 * so the next state is below 2^24, which no threshold is.
 */
#ifndef CTXREUSE_RANS_H
#define CTXREUSE_RANS_H

#include "core/ctxreuse.h"

enum { CTX_RANS_LANES = 64, CTX_RANS_SYMBOLS = 32, CTX_RANS_STATES = 256 /* bytes of the states */ };

typedef enum ctx_rans_status {
    CTX_RANS_OK = 0,
    CTX_RANS_CORRUPT = 1, /* decode: the bytes are no stream of these tables and sizes */
    CTX_RANS_SYMBOL = 2,  /* encode, count: a symbol is 32 or more, or its table gives it no frequency */
    CTX_RANS_TABLE = 3,   /* a step names no table */
} ctx_rans_status;

/* One prepared table; what each instruction set wants to load. 896 bytes, a multiple of 64. */
typedef struct ctx_rans_table {
    uint8_t symbol[256];    /* of a slot */
    uint16_t threshold[32]; /* freq << 8 | shift | flags below; a symbol without frequency never emits */
    uint16_t reciprocal[32];
    uint16_t rest[32];      /* 256 - freq */
    uint16_t start[32];     /* cum */
    uint32_t above[32];     /* first slot above symbol s, its top bit flipped for signed comparison, in all four bytes */
    uint8_t freq[32], cum[32]; /* 255 for what has none: it never emits */
    /* The same for byte permutes; with `raise` added to a dividend, these divide by 1 as well. */
    uint8_t reciprocal_low[32], reciprocal_high[32], rest_byte[32], raise[32];
    uint8_t power[32];      /* 2^(7 - shift): the shift as a multiplication */
    uint8_t absent[32];     /* 128 for a symbol without frequency */
} ctx_rans_table;

/* Flags in the low byte of a threshold; bits 0 to 3 are the shift, of 0 to 7. */
enum { CTX_RANS_ONE = 16 /* freq is 1 */, CTX_RANS_DOWN = 32 /* reciprocal rounded down */, CTX_RANS_ABSENT = 64 };

typedef struct ctx_rans_tables {
    size_t count;
    const ctx_rans_table *at; /* aligned to 64 bytes */
    const uint8_t *down;      /* [count] 1 where a reciprocal of the table is rounded down */
    const uint8_t *last;      /* [count] highest symbol with a frequency */
} ctx_rans_tables;

/* Prepare freqs[count][32]. NULL without memory; *bad gets the first table whose frequencies do not sum to 256 with at
 * least two of them present, or count. Immutable afterwards, so any thread may use it. */
ctx_rans_tables *ctx_rans_prepare(const uint8_t *freqs, size_t count, size_t *bad);
void ctx_rans_free(ctx_rans_tables *tables);

/* One stream. steps: [ceil(n / 64)] numbers of tables. */
typedef struct ctx_rans_job {
    uint8_t *data;   /* decode: its bytes. encode: room of ctx_rans_bound(n) bytes, at whose end the stream will lie */
    size_t bytes;    /* of the stream; encode sets it */
    uint8_t *symbols;
    size_t n;
    const uint16_t *steps;
    uint16_t *seeds; /* [64]; encode reads them, decode writes them */
    ctx_rans_status status;
} ctx_rans_job;

/* Bytes that suffice for any stream of n symbols. n is at most SIZE_MAX / 2. */
static inline size_t ctx_rans_bound(size_t n) { return CTX_RANS_STATES + n; }
static inline size_t ctx_rans_steps(size_t n) { return n / CTX_RANS_LANES + (n % CTX_RANS_LANES != 0); }

/* Code streams with the kernels of table k. Each job's status says how it ended; returns the first that is not OK, or
 * count. Nothing outside of the job's buffers is touched, whatever the bytes, symbols and steps are. */
size_t ctx_rans_encode(const ctx_kernels *k, const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count);
size_t ctx_rans_decode(const ctx_kernels *k, const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count);

/* Add to counts[tables][32] how often each symbol stands under each table. Counts wrap at 2^32. */
ctx_rans_status ctx_rans_count(const ctx_kernels *k, const uint8_t *symbols, size_t n, const uint16_t *steps,
                               size_t tables, uint32_t *counts);

/* One implementation; rans.c picks the one that belongs to a kernel table and that the processor can run. */
typedef struct ctx_rans_coder {
    void (*encode)(const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count); /* steps are checked */
    void (*decode)(const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count);
    /* Counts of one run of n symbols under one table; returns the OR of all symbols. */
    uint8_t (*count)(const uint8_t *symbols, size_t n, uint32_t counts[32]);
} ctx_rans_coder;

/* Name of the implementation that k uses here ("avx2" on a processor with AVX-512 but without VBMI2). */
const char *ctx_rans_name(const ctx_kernels *k);

#endif
