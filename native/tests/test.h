/* test.h - what the C tests share: a check that stops, a seeded generator, exactly sized memory, every table. */
#ifndef CTXREUSE_TEST_H
#define CTXREUSE_TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/ctxreuse.h"

#define CHECK(condition, ...)                                                      \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);        \
            fprintf(stderr, __VA_ARGS__);                                          \
            fputc('\n', stderr);                                                   \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

extern uint64_t random_state;

/* xorshift64* (Vigna 2016): the same numbers on every machine. */
static inline uint64_t random64(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 0x2545f4914f6cdd1dull;
}

static inline size_t below(size_t limit) { return (size_t)(random64() >> 33) % limit; }

/* Exactly `bytes` long, so that the address sanitizer sees the first byte read or written behind it. */
static inline uint8_t *random_bytes(size_t bytes) {
    uint8_t *at = malloc(bytes ? bytes : 1);
    CHECK(at, "no memory");
    for (size_t i = 0; i < bytes; i++) at[i] = (uint8_t)(random64() >> 56);
    return at;
}

enum { TABLES = 4 }; /* more than any machine has */

/* Every table that this machine can use, best first; how many. */
static inline size_t all_tables(const ctx_kernels *tables[TABLES]) {
    size_t count = 0;
    while (count < TABLES && (tables[count] = ctx_usable(count))) count++;
    return count;
}

static inline const ctx_kernels *generic_table(void) {
    const ctx_kernels *tables[TABLES];
    return tables[all_tables(tables) - 1];
}

void test_numbers(void);
void test_boxes(void);
void test_checksums(void);
void test_rans(void);
void test_attend(void);
void test_linear(void);
void test_decoder(void);
void test_drift(void);
void test_policy(void);
void test_suffix(void);

#endif
