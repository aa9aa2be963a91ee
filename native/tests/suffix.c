/* suffix.c - suffix indexes of all sizes under random texts: drafts are continuations that were said, or go on with what repeats itself
 * at the end, and memory stays in bounds. */
#include "speculate/suffix.h"
#include "test.h"

enum { TEXT = 96, DRAFT = 40 };

/* Whether the wanted tokens stand in a text of n and what was drafted behind it, but from before its last three on. */
static int said(const int32_t *text, size_t n, size_t made, const int32_t *want) {
    for (size_t at = 0; at + 3 < n; at++)
        if (!memcmp(text + at, want, (3 + made) * sizeof *want)) return 1;
    return 0;
}

static int32_t *copy(const int32_t *from, size_t n) { /* exactly sized, see random_bytes */
    int32_t *at = (int32_t *)random_bytes(n * sizeof *at);
    if (n) memcpy(at, from, n * sizeof *at);
    return at;
}

/* `kept` has room for a draft behind its n tokens. */
static void draft(const suffix_index *index, int32_t *kept, size_t n, const int32_t *text, size_t length) {
    int32_t *tail = copy(text, length), *ids = (int32_t *)random_bytes(DRAFT * sizeof *ids), want[3 + DRAFT];
    float *shares = (float *)random_bytes(DRAFT * sizeof *shares);
    uint32_t matched = 77;
    size_t made = suffix_draft(index, tail, length, below(DRAFT + 1), ids, shares, &matched);
    CHECK(matched <= SUFFIX_DEPTH && matched <= length, "%u match of %zu", matched, length);
    CHECK(!made || matched >= 3, "%zu tokens after a match of %u", made, matched);
    for (size_t i = 0; i < made; i++) CHECK(ids[i] >= 0 && shares[i] > 0 && shares[i] <= 1, "token %d, share %f", ids[i], shares[i]);
    if (made) {
        memcpy(want, tail + length - 3, 3 * sizeof *want);
        memcpy(want + 3, ids, made * sizeof *want);
        memcpy(kept + n, ids, made * sizeof *ids);
        CHECK(said(kept, n, made, want), "%zu tokens were never said", made);
    }
    free(tail), free(ids), free(shares);
}

static void test_size(uint32_t most, int32_t alphabet) {
    suffix_index *index = suffix_new(most, random64());
    int32_t *all = calloc(most + DRAFT, sizeof *all), text[TEXT];
    CHECK(index && all, "no memory");
    uint64_t end = 0;
    for (int round = 0; round < 200; round++) {
        size_t n = below(TEXT);
        int begins = (int)below(2);
        for (size_t i = 0; i < n; i++) text[i] = (int32_t)below((size_t)alphabet);
        int32_t *own = copy(text, n);
        CHECK(suffix_add(index, own, n, begins) == 0, "no memory");
        free(own);
        end += n + (size_t)(begins && end);
        size_t kept = suffix_read(index, all, most);
        CHECK(kept == (end < most ? end : most), "%zu kept of %llu", kept, (unsigned long long)end);
        CHECK(n <= most && !memcmp(all + kept - n, text, n * sizeof *text), "the newest text is another");
        CHECK(suffix_bytes(index) <= 20 * (size_t)most + 20 * 1024 + sizeof *index, "%zu bytes", suffix_bytes(index));
        draft(index, all, kept, text, n);
        for (size_t i = 0; i < n; i++) text[i] = (int32_t)below((size_t)alphabet);
        draft(index, all, kept, text, n);
    }
    free(all);
    suffix_free(index);
}

void test_suffix(void) {
    for (uint32_t most = 128; most <= 4096; most *= 2)
        for (int32_t alphabet = 1; alphabet <= 1000; alphabet *= 10) test_size(most, alphabet);
    suffix_free(suffix_new(1024, 0));
    suffix_free(NULL);
}
