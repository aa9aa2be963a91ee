/* policy/hash.h - an open hash from 64 bits to places, whose entries lie elsewhere; and ghosts, ids of what went. */
#ifndef CTXREUSE_POLICY_HASH_H
#define CTXREUSE_POLICY_HASH_H

#include <stddef.h>
#include <stdint.h>

#define POLICY_NONE UINT32_MAX

/* A slot is a place and, in the bits above it, how far the entry lies from where its id would have it (the most that fits
 * stands for more): so lookups and removals read no entries but those that they are about, and these lie elsewhere.
 */
typedef struct policy_hash {
    uint32_t *slots;
    uint32_t size, count; /* slots and entries; at most 4 in 5 are taken */
    uint32_t bits;        /* of a place */
} policy_hash;

/* The place in a slot, or POLICY_NONE. */
static inline uint32_t policy_hash_at(const policy_hash *hash, uint32_t at) {
    uint32_t slot = hash->slots[at];
    return slot == POLICY_NONE ? slot : slot & ((UINT32_C(1) << hash->bits) - 1);
}

typedef uint64_t (*policy_id_fn)(const void *owner, uint32_t place);

/* Room for `more` entries; -1 without memory. */
int policy_hash_reserve(policy_hash *hash, uint32_t more, const void *owner, policy_id_fn id_of);
/* The first entry of that id at or after *at (start with policy_hash_start), or POLICY_NONE; *at is then behind it. */
uint32_t policy_hash_start(const policy_hash *hash, uint64_t id);
uint32_t policy_hash_next(const policy_hash *hash, uint64_t id, uint32_t *at, const void *owner, policy_id_fn id_of);
/* Have the slots of ids brought near, and the entries (`item` bytes each from `all` on) that they name: a path's lookups
 * are misses of the processor's caches in a large arena, which then happen at once instead of one by one. */
void policy_hash_warm(const policy_hash *hash, const uint64_t *ids, size_t n, const void *all, size_t item);
/* One id in 2**bits (at most 31), the same for the same id. */
int policy_hash_sampled(uint64_t id, uint32_t bits);
/* The same entries at the same places; `hash` is empty. -1 without memory. */
int policy_hash_copy(policy_hash *hash, const policy_hash *from);
void policy_hash_add(policy_hash *hash, uint64_t id, uint32_t place);
void policy_hash_remove(policy_hash *hash, uint64_t id, uint32_t place, const void *owner, policy_id_fn id_of);

/* ---- Ghosts: ids of what went, in two queues. ------------------------------------------------------------------- */

typedef struct policy_ghost {
    uint32_t low, high, prev, next;
} policy_ghost;

typedef struct policy_ghosts {
    policy_ghost *all;
    uint8_t *note; /* ARC, S3-FIFO: the queue; LFU: uses */
    uint32_t room, used, free;
    uint32_t head[2], tail[2], count[2];
    policy_hash hash;
} policy_ghosts;

int policy_ghosts_reserve(policy_ghosts *ghosts, uint32_t more);
uint32_t policy_ghosts_find(const policy_ghosts *ghosts, uint64_t id);
void policy_ghosts_push(policy_ghosts *ghosts, uint64_t id, int queue, uint32_t note); /* one that is there moves */
void policy_ghosts_take(policy_ghosts *ghosts, uint32_t place);
void policy_ghosts_pop(policy_ghosts *ghosts, int queue);
size_t policy_ghosts_bytes(const policy_ghosts *ghosts);
void policy_ghosts_free(policy_ghosts *ghosts);

#endif
