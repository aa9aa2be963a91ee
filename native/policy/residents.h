/* policy/residents.h - resident sets: which blocks a cache really holds, by full key, and which of them are orphans. */
#ifndef CTXREUSE_POLICY_RESIDENTS_H
#define CTXREUSE_POLICY_RESIDENTS_H

#include "policy.h"

typedef struct policy_entry {
    uint32_t nbytes, tokens, prev, next; /* next alone where it is free; orphans are in a queue */
    uint8_t key[32];
} policy_entry;

typedef struct policy_residents {
    policy_entry *entries;
    uint32_t room, used, free, count;
    uint32_t head, tail, orphans;
    uint64_t tokens;
    policy_hash hash;
} policy_residents;

enum { POLICY_KEY = 32 };

policy_residents *policy_residents_new(void);
void policy_residents_free(policy_residents *residents);
size_t policy_residents_bytes(const policy_residents *residents);
uint32_t policy_residents_find(const policy_residents *residents, const uint8_t key[POLICY_KEY]);
uint32_t policy_residents_find_id(const policy_residents *residents, uint64_t id);
/* Room for so many more; -1 without memory. */
int policy_residents_reserve(policy_residents *residents, uint32_t more);
/* Hold what a tree holds, in an empty set, from a tree in which no place is free; none is an orphan. -1 without memory. */
struct context_tree;
int policy_residents_fill(policy_residents *residents, const struct context_tree *tree);
int policy_residents_hold(policy_residents *residents, const uint8_t key[POLICY_KEY], uint32_t nbytes, uint32_t tokens, int followed);
void policy_residents_drop(policy_residents *residents, uint32_t place);
void policy_residents_came(policy_residents *residents, uint64_t id);
void policy_residents_left(policy_residents *residents, uint64_t id);
/* Follow `next` after `before`; -1 without memory. */
int policy_residents_follow(policy_residents *residents, const policy_shadow *before, const policy_shadow *next);

#endif
