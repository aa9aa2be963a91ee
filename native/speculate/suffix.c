/* speculate/suffix.c - see suffix.h. */
#include "speculate/suffix.h"

#include <stdlib.h>
#include <string.h>

enum {
    FIRST = 1024, /* room of a new index */
    STEPS = 48,   /* of a chain that are followed */
    VOTES = 24,   /* places that vote */
    APART = -1,   /* between runs */
};

static const uint32_t grams[SUFFIX_ORDERS] = {8, 3};

/* A slot for two tokens of the room. */
static uint32_t slots(uint32_t room) { return room / 2; }

suffix_index *suffix_new(uint32_t most, uint64_t salt) {
    suffix_index *index = calloc(1, sizeof *index);
    if (!index) return NULL;
    index->most = most, index->salt = salt | 1;
    return index;
}

void suffix_free(suffix_index *index) {
    if (!index) return;
    free(index->tokens);
    for (int order = 0; order < SUFFIX_ORDERS; order++) free(index->before[order]), free(index->heads[order]);
    free(index);
}

size_t suffix_bytes(const suffix_index *index) {
    return sizeof *index + (size_t)index->room * sizeof(int32_t) +
           SUFFIX_ORDERS * ((size_t)index->room + slots(index->room)) * sizeof(uint32_t);
}

static void *resized(void *memory, size_t count) { return realloc(memory, count * sizeof(uint32_t)); }

/* Twice the room; nothing was written over yet. A chain goes on from both slots that its own becomes. */
static int grow(suffix_index *index) {
    uint32_t was = index->room, room = was ? 2 * was : FIRST < index->most ? FIRST : index->most;
    void *more;
    if (!(more = resized(index->tokens, room))) return -1;
    index->tokens = more;
    for (int order = 0; order < SUFFIX_ORDERS; order++) {
        if (!(more = resized(index->before[order], room))) return -1;
        index->before[order] = more;
        if (!(more = resized(index->heads[order], slots(room)))) return -1;
        index->heads[order] = more;
        if (was)
            memcpy(index->heads[order] + slots(was), index->heads[order], slots(was) * sizeof(uint32_t));
        else
            memset(index->heads[order], 0, slots(room) * sizeof(uint32_t));
    }
    index->room = room;
    return 0;
}

static uint64_t mixed(uint64_t sum, int32_t token) {
    sum = (sum ^ (uint32_t)token) * UINT64_C(0x9E3779B97F4A7C15);
    return sum ^ (sum >> 29);
}

/* The slot of the `n` tokens before position `end` of the ring; UINT32_MAX if they are of two runs. */
static uint32_t slot_in_ring(const suffix_index *index, uint64_t end, uint32_t n) {
    uint64_t sum = index->salt;
    if (end < n) return UINT32_MAX;
    for (uint64_t at = end - n; at < end; at++) {
        int32_t token = index->tokens[at & (index->room - 1)];
        if (token < 0) return UINT32_MAX;
        sum = mixed(sum, token);
    }
    return (uint32_t)(sum >> 32) & (slots(index->room) - 1);
}

static void append(suffix_index *index, int32_t token) {
    uint32_t place = (uint32_t)index->end & (index->room - 1);
    index->tokens[place] = token;
    index->end++;
    for (int order = 0; order < SUFFIX_ORDERS; order++) {
        uint32_t slot = token < 0 ? UINT32_MAX : slot_in_ring(index, index->end, grams[order]);
        index->before[order][place] = slot == UINT32_MAX ? 0 : index->heads[order][slot];
        if (slot != UINT32_MAX) index->heads[order][slot] = (uint32_t)(index->end - 1);
    }
}

int suffix_add(suffix_index *index, const int32_t *ids, size_t n, int begins) {
    begins = begins && index->end;
    while (index->room < index->most && index->end + n + begins > index->room)
        if (grow(index) < 0) return -1;
    if (begins) append(index, APART);
    for (size_t i = 0; i < n; i++) append(index, ids[i]);
    return 0;
}

/* How many of the last tokens before `end` are those of the tail. */
static uint32_t agreement(const suffix_index *index, uint64_t end, const int32_t *tail, size_t n) {
    uint32_t same = 0, most = n < SUFFIX_DEPTH ? (uint32_t)n : SUFFIX_DEPTH;
    uint64_t first = index->end > index->room ? index->end - index->room : 0;
    if (end - first < most) most = (uint32_t)(end - first);
    while (same < most && index->tokens[(end - 1 - same) & (index->room - 1)] == tail[n - 1 - same]) same++;
    return same;
}

typedef struct voter {
    uint64_t next; /* the position of its next token */
    uint32_t weight;
} voter;

/* Places, newest first, whose last tokens are the tail's last `gram`; the rest of a long match tells how much they weigh. */
static size_t find(const suffix_index *index, int order, const int32_t *tail, size_t n, voter *voters, uint32_t *best) {
    uint32_t gram = grams[order], places[STEPS], behind = 0;
    uint64_t sum = index->salt, kept = index->end < index->room ? index->end : index->room;
    size_t steps = 0, count = 0;
    if (n < gram) return 0;
    for (size_t i = n - gram; i < n; i++) sum = mixed(sum, tail[i]);
    uint32_t place = index->heads[order][(uint32_t)(sum >> 32) & (slots(index->room) - 1)];
    while (steps < STEPS) {
        uint32_t distance = (uint32_t)index->end - place; /* 1: the newest token */
        if (!distance || distance <= behind || distance > kept) break;
        places[steps++] = behind = distance;
        __builtin_prefetch(index->tokens + (place & (index->room - 1)));
        place = index->before[order][place & (index->room - 1)];
    }
    for (size_t i = 0; i < steps && count < VOTES; i++) {
        uint64_t next = index->end - places[i] + 1;
        uint32_t same = next < index->end ? agreement(index, next, tail, n) : 0; /* the newest has nothing behind it */
        if (same < gram || index->tokens[next & (index->room - 1)] < 0) continue;
        voters[count++] = (voter){next, same * same};
        if (same > *best) *best = same;
    }
    return count;
}

/* What stands at a position; behind the end, where the text that is continued is the newest one, the draft itself: so a text
 * that repeats itself goes on doing so. */
static int32_t token_at(const suffix_index *index, uint64_t at, const int32_t *ids, int joined) {
    if (at < index->end) return index->tokens[at & (index->room - 1)];
    return joined ? ids[at - index->end] : APART;
}

/* The token that most of the voters' weight is for; those that say another one leave. Returns its share, 0 for none. */
static float vote(const suffix_index *index, voter *voters, size_t *count, int32_t *ids, size_t made, int joined) {
    int32_t said[VOTES];
    uint64_t all = 0, most = 0;
    size_t left = 0;
    for (size_t i = 0; i < *count; i++) {
        said[i] = token_at(index, voters[i].next, ids, joined);
        all += voters[i].weight;
    }
    for (size_t i = 0; i < *count; i++) {
        uint64_t weight = 0;
        for (size_t j = 0; said[i] >= 0 && j < *count; j++) weight += said[j] == said[i] ? voters[j].weight : 0;
        if (weight > most) most = weight, ids[made] = said[i]; /* of equal ones the newest */
    }
    for (size_t i = 0; most && i < *count; i++)
        if (said[i] == ids[made]) voters[left++] = (voter){voters[i].next + 1, voters[i].weight};
    *count = left;
    return most ? (float)most / (float)all : 0;
}

size_t suffix_draft(const suffix_index *index, const int32_t *tail, size_t n, size_t most, int32_t *ids, float *shares, uint32_t *matched) {
    voter voters[VOTES];
    size_t count = 0, made = 0;
    *matched = 0;
    if (!index->end) return 0;
    int joined = agreement(index, index->end, tail, n) >= grams[0];
    for (int order = 0; order < SUFFIX_ORDERS && !count; order++) count = find(index, order, tail, n, voters, matched);
    while (made < most && count) {
        float share = vote(index, voters, &count, ids, made, joined);
        if (share <= 0) break;
        shares[made++] = share;
    }
    return made;
}

size_t suffix_read(const suffix_index *index, int32_t *ids, size_t n) {
    uint64_t kept = index->end < index->room ? index->end : index->room, count = n < kept ? n : kept;
    for (uint64_t i = 0; i < count; i++) ids[i] = index->tokens[(index->end - count + i) & (index->room - 1)];
    return (size_t)count;
}
