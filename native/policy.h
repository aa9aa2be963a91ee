/* policy.h - caches without contents: what an eviction policy would hold, from 8-byte ids, in an arena.
 *
 * The twins of ctxreuse/store/policy/{shadow,lru,lfu,s3fifo,arc,gdsf,hazard,roster}.py, which are the reference: the same
 * requests give the same victims. Not thread-safe. A call that has no memory for what it might have to hold fails before
 * it has changed anything.
 *
 * Words
 *   id        the first 8 bytes of a block's key, little-endian (or the number that the key is)
 *   place     index of a block in the arena; POLICY_NONE: none
 *   keep      blocks of the request that is being served: they go last (but under the hazard policy, which chooses)
 *   ghost     a block that went and is remembered; the hazard policy's stay in the arena
 */
#ifndef CTXREUSE_POLICY_H
#define CTXREUSE_POLICY_H

#include <stddef.h>
#include <stdint.h>

#define POLICY_NONE UINT32_MAX

/* ---- An open hash from 64 bits to places, whose entries lie elsewhere. ------------------------------------------ */

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

/* ---- Shadows ---------------------------------------------------------------------------------------------------- */

typedef enum policy_kind { POLICY_LRU, POLICY_LFU, POLICY_S3FIFO, POLICY_ARC, POLICY_GDSF, POLICY_HAZARD, POLICY_KINDS } policy_kind;

enum { POLICY_CLASSES = 64 };
/* `children` of a hazard policy's ghost. */
#define POLICY_GHOST UINT32_MAX

typedef struct policy_block {
    uint32_t low, high;  /* the id: two halves keep a block at 36 bytes */
    uint32_t parent;     /* place */
    uint32_t nbytes;
    uint32_t prev, next; /* in its queue; next alone where it is free */
    uint32_t children;
    uint32_t used;       /* number of the request that used it last; hazard: uses and tokens */
    uint32_t data;       /* the kind's own: see policy_kinds.c; hazard: its run */
} policy_block;

typedef struct policy_queue {
    uint32_t head, tail, count;
} policy_queue;

/* LFU: the blocks of one count of uses, in a list by count. */
typedef struct policy_bucket {
    policy_queue queue;
    uint32_t uses, prev, next;
} policy_bucket;

typedef struct policy_hazard policy_hazard;

typedef struct policy_shadow {
    policy_kind kind;
    uint64_t capacity, nbytes;
    policy_block *blocks;
    uint32_t room, used, free, count, step;
    policy_hash hash;
    policy_queue queues[POLICY_CLASSES]; /* LRU: the first; S3-FIFO, ARC: two; GDSF: by class */
    uint64_t filled;                     /* GDSF: bit of each class that has a queue */
    policy_bucket *buckets;              /* LFU */
    uint32_t bucket_room, bucket_used, bucket_free, bucket_first;
    policy_ghosts ghosts;
    uint32_t wanted;                     /* ARC */
    double per_token, per_pair, alpha;   /* GDSF */
    double worth[POLICY_CLASSES];
    policy_hazard *hazard;               /* NULL for all other kinds */
} policy_shadow;

/* What `policy_request` calls with each block that went. */
typedef void (*policy_gone_fn)(void *context, uint64_t id);

policy_shadow *policy_new(policy_kind kind, uint64_t capacity, double per_token, double per_pair, double alpha);
void policy_free(policy_shadow *shadow);
size_t policy_bytes(const policy_shadow *shadow);

/* Leading ids that are held. */
size_t policy_match(const policy_shadow *shadow, const uint64_t *ids, size_t n);
int policy_holds(const policy_shadow *shadow, uint64_t id);

/* Serve a path at `now` (seconds, which only the hazard policy minds) and hold all of it, as far as there is room. `*hit`
 * blocks were held; -1 without memory. */
int policy_request(policy_shadow *shadow, const uint64_t *ids, const uint32_t *sizes, const uint32_t *tokens, size_t n,
                   double now, size_t *hit, policy_gone_fn gone, void *context);

/* Hold one more block behind `parent` (has_parent: which is held, else nothing is done), after `start` tokens. */
int policy_hold(policy_shadow *shadow, uint64_t id, int has_parent, uint64_t parent, uint32_t nbytes, uint32_t start,
                uint32_t tokens);
/* One use of a path, of which what is not held is passed over; -1 without memory. */
int policy_use(policy_shadow *shadow, const uint64_t *ids, size_t n, double now);
/* The context that ends there paused for a reason. */
void policy_mark(policy_shadow *shadow, uint64_t id, uint32_t label);
/* Evict until the rest fits; nothing is kept. */
int policy_fit(policy_shadow *shadow, policy_gone_fn gone, void *context);
/* Remove a leaf; 0 if it is not held or no leaf. */
int policy_drop(policy_shadow *shadow, uint64_t id);

/* Up to `limit` ids in the order of eviction; -1 without memory, else how many. */
ptrdiff_t policy_order(const policy_shadow *shadow, uint64_t *out, size_t limit);
/* Bytes of what `shadow` holds and `other` does not. */
uint64_t policy_beyond(const policy_shadow *shadow, const policy_shadow *other);
/* NULL, or what is wrong inside. */
const char *policy_check(const policy_shadow *shadow);

/* ---- The kinds (policy_kinds.c), for policy.c ------------------------------------------------------------------- */

static inline uint64_t policy_id(const policy_block *block) { return (uint64_t)block->high << 32 | block->low; }

void policy_queue_push(policy_shadow *shadow, policy_queue *queue, uint32_t place);
void policy_queue_push_head(policy_shadow *shadow, policy_queue *queue, uint32_t place);
void policy_queue_take(policy_shadow *shadow, policy_queue *queue, uint32_t place);

/* Room for what `more` blocks may need besides the arena; -1 without memory. */
int policy_kind_reserve(policy_shadow *shadow, uint32_t more);
void policy_kind_start(policy_shadow *shadow, uint32_t place, uint32_t start, uint32_t tokens);
void policy_kind_use(policy_shadow *shadow, uint32_t place);
/* Before a block leaves (`place` is still counted), and after it has, when its parent became a leaf. */
void policy_kind_remove(policy_shadow *shadow, uint32_t place);
void policy_kind_gone(policy_shadow *shadow, uint32_t data, uint64_t id);
void policy_kind_leaf(policy_shadow *shadow, uint32_t place);
/* True for kinds whose next victim depends on the last. */
int policy_kind_restless(const policy_shadow *shadow);
/* The first leaf to go that `step` did not use, POLICY_NONE if there is none; GDSF parks heads on the way. */
uint32_t policy_kind_victim(policy_shadow *shadow);
/* Static kinds: the places in order. Start with POLICY_NONE. */
uint32_t policy_kind_after(const policy_shadow *shadow, uint32_t place);
/* Restless kinds: leaves in the order of eviction; how many. */
size_t policy_kind_leaves(const policy_shadow *shadow, uint32_t *out, size_t limit);

/* ---- The hazard policy (policy_hazard.c), for policy.c and Python ----------------------------------------------- */

policy_hazard *policy_hazard_new(void);
void policy_hazard_free(policy_hazard *hazard);
size_t policy_hazard_bytes(const policy_hazard *hazard);
/* Room for a use of the path to `above` (or POLICY_NONE) and `more` blocks behind it; -1 without memory. */
int policy_hazard_reserve(policy_shadow *shadow, uint32_t above, uint32_t more);
/* The ghost of that id behind that parent, no longer counted as one; POLICY_NONE if there is none. */
uint32_t policy_hazard_revive(policy_shadow *shadow, uint64_t id, uint32_t parent);
/* A block is held from now on; `known`: it was revived. */
void policy_hazard_hold(policy_shadow *shadow, uint32_t place, uint32_t tokens, int known);
/* A leaf goes; its id. */
uint64_t policy_hazard_remove(policy_shadow *shadow, uint32_t place);
/* The path to `tip` is used, for which there is room. */
void policy_hazard_use(policy_shadow *shadow, uint32_t tip, double now);
void policy_hazard_mark(policy_shadow *shadow, uint64_t id, uint32_t label);
/* The first to go, until `need` bytes or `most` blocks are named: how many, in `policy_hazard_named`; -1 without memory. */
ptrdiff_t policy_hazard_order(policy_shadow *shadow, uint64_t need, size_t most);
const uint32_t *policy_hazard_named(const policy_shadow *shadow);
void policy_hazard_unname(policy_shadow *shadow); /* gives the room back if it is much */
const char *policy_hazard_check(const policy_shadow *shadow);
/* How many ghosts to remember: `least`, and so many for each held block. */
void policy_hazard_remember(policy_shadow *shadow, uint32_t least, double ratio);
uint32_t policy_hazard_ghosts(const policy_shadow *shadow);
/* What was learnt, as rows of POLICY_LEARNT numbers (class, uses by age, paths seen by age): how many rows; `out` may be
 * NULL. And to go on from there: -1, and no change, without memory or for a class or counts that cannot be. */
enum { POLICY_LEARNT = 113 };
size_t policy_hazard_learnt(const policy_shadow *shadow, double *out);
int policy_hazard_teach(policy_shadow *shadow, const double *in, size_t rows);

/* ---- Rosters: what is really held, and which of it are strays (policy_roster.c) --------------------------------- */

typedef struct policy_entry {
    uint32_t nbytes, tokens, prev, next; /* next alone where it is free; strays are in a queue */
    uint8_t key[32];
} policy_entry;

typedef struct policy_roster {
    policy_entry *entries;
    uint32_t room, used, free, count;
    uint32_t head, tail, strays;
    uint64_t tokens;
    policy_hash hash;
} policy_roster;

enum { POLICY_KEY = 32 };

policy_roster *policy_roster_new(void);
void policy_roster_free(policy_roster *roster);
size_t policy_roster_bytes(const policy_roster *roster);
uint32_t policy_roster_find(const policy_roster *roster, const uint8_t key[POLICY_KEY]);
uint32_t policy_roster_find_id(const policy_roster *roster, uint64_t id);
int policy_roster_hold(policy_roster *roster, const uint8_t key[POLICY_KEY], uint32_t nbytes, uint32_t tokens, int followed);
void policy_roster_drop(policy_roster *roster, uint32_t place);
void policy_roster_came(policy_roster *roster, uint64_t id);
void policy_roster_left(policy_roster *roster, uint64_t id);
/* Follow `next` after `before`; -1 without memory. */
int policy_roster_follow(policy_roster *roster, const policy_shadow *before, const policy_shadow *next);

#endif
