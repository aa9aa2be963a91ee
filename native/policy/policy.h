/* policy/policy.h - caches without contents: what an eviction policy would hold, from 8-byte ids, in an arena that it may share.
 *
 * The same as tests/oracle/policy and ctxreuse/store/policy/shadow.py, which are the reference: the same
 * requests give the same victims. Not thread-safe. A call that has no memory for what it might have to hold fails before
 * it has changed anything.
 *
 * Words
 *   id        the first 8 bytes of a block's key, little-endian (or the number that the key is)
 *   place     index of a block in the arena; POLICY_NONE: none
 *   keep      blocks of the request that is being served: they go last (but under hazard and pauses, which choose)
 *   ghost     a block that went and is remembered; the hazard policy's stay in the arena
 */
#ifndef CTXREUSE_POLICY_H
#define CTXREUSE_POLICY_H

#include "arena.h"

typedef enum policy_kind { POLICY_LRU, POLICY_LFU, POLICY_S3FIFO, POLICY_ARC, POLICY_GDSF, POLICY_HAZARD, POLICY_PAUSES, POLICY_KINDS } policy_kind;

enum { POLICY_CLASSES = 64 };
/* `children` where they are counted in `many`, and of a hazard policy's ghost. */
enum { POLICY_MANY = 254, POLICY_GHOST = 255 };

/* Neighbours in a queue of blocks or runs. */
typedef struct policy_link {
    uint32_t prev, next;
} policy_link;

/* A block with many children. */
typedef struct policy_many {
    uint32_t place, children;
} policy_many;

typedef struct policy_queue {
    uint32_t head, tail, count;
} policy_queue;

/* LFU: the blocks of one count of uses, in a list by count. */
typedef struct policy_bucket {
    policy_queue queue;
    uint32_t uses, prev, next;
} policy_bucket;

typedef struct policy_hazard policy_hazard;
typedef struct policy_pauses policy_pauses;

typedef struct policy_shadow {
    policy_kind kind;
    uint64_t capacity, nbytes;
    uint32_t count, step;
    policy_arena *arena;
    uint8_t seat;                        /* its bit there */
    /* Columns by place, one behind the other from `links` on, as far as the arena had room when room was last made. */
    uint32_t room;
    policy_link *links;                  /* in its queue; see hazard.c and pauses.c for what else they are */
    uint32_t *data;                      /* LFU: the bucket; hazard: the run */
    uint32_t *used;                      /* GDSF: number of the request that used it last */
    uint16_t *history;                   /* hazard: uses and tokens */
    uint8_t *children;
    uint8_t *state;                      /* S3-FIFO, ARC, GDSF: see kinds.c */
    policy_many *many;                   /* by place */
    uint32_t many_count, many_room;
    uint32_t *path;                      /* scratch: places of the running request */
    size_t path_room;
    policy_queue queues[POLICY_CLASSES]; /* LRU, pauses: the first; S3-FIFO, ARC: two; GDSF: by class */
    uint64_t filled;                     /* GDSF: bit of each class that has a queue */
    policy_bucket *buckets;              /* LFU */
    uint32_t bucket_room, bucket_used, bucket_free, bucket_first;
    policy_ghosts ghosts;
    uint32_t wanted;                     /* ARC */
    double per_token, per_pair, alpha;   /* GDSF */
    double worth[POLICY_CLASSES];
    policy_hazard *hazard;               /* NULL for all other kinds */
    policy_pauses *pauses;               /* the same */
    uint32_t *named;                     /* hazard, pauses: blocks in the order of eviction */
    size_t named_room;
} policy_shadow;

/* True for a block that the shadow holds, which a ghost is not. */
static inline int policy_has(const policy_shadow *shadow, uint32_t place) {
    return shadow->arena->owners[place] & shadow->seat && shadow->children[place] != POLICY_GHOST;
}

static inline uint32_t policy_parent(const policy_shadow *shadow, uint32_t place) { return shadow->arena->blocks[place].parent; }

/* One more child, for which there is room if the block has many; and one less: true if none is left. */
void policy_child_came(policy_shadow *shadow, uint32_t place);
int policy_child_left(policy_shadow *shadow, uint32_t place);

/* A queue of a shadow's blocks. */
void policy_queue_push(policy_shadow *shadow, policy_queue *queue, uint32_t place);
void policy_queue_take(policy_shadow *shadow, policy_queue *queue, uint32_t place);

/* What `policy_request` calls with each block that went. */
typedef void (*policy_gone_fn)(void *context, uint64_t id);

/* `beside`: another shadow, whose arena this one shares if that has a place left, or NULL. */
policy_shadow *policy_new(policy_kind kind, uint64_t capacity, double per_token, double per_pair, double alpha,
                          const policy_shadow *beside);
void policy_free(policy_shadow *shadow);
/* Its own, and its share of the arena. */
size_t policy_bytes(const policy_shadow *shadow);

/* Leading ids that are held. */
size_t policy_match(const policy_shadow *shadow, const uint64_t *ids, size_t n);
int policy_holds(const policy_shadow *shadow, uint64_t id);

/* Serve a path at `now` (seconds, which hazard and pauses mind) and hold all of it, as far as there is room. `*hit`
 * blocks were held; -1 without memory. */
int policy_request(policy_shadow *shadow, const uint64_t *ids, const uint32_t *sizes, const uint32_t *tokens, size_t n,
                   double now, size_t *hit, policy_gone_fn gone, void *context);

/* Hold one more block behind `parent` (has_parent: which is held, else nothing is done), after `start` tokens. */
int policy_hold(policy_shadow *shadow, uint64_t id, int has_parent, uint64_t parent, uint32_t nbytes, uint32_t start,
                uint32_t tokens);
/* Hold what a tree holds, in an empty shadow, from a tree in which no place is free; then use its paths. `order`: places,
 * each path from its end to where the next path begins. -1 without memory. */
struct context_tree;
int policy_fill(policy_shadow *shadow, const struct context_tree *tree, const uint32_t *order, size_t n, double now);
/* One use of a path, of which what is not held is passed over; -1 without memory. */
int policy_use(policy_shadow *shadow, const uint64_t *ids, size_t n, double now);
/* A prompt comes, of which `policy_use` will use what is held; -1 without memory. `policy_request` does both. */
int policy_lookup(policy_shadow *shadow, const uint64_t *ids, size_t n, double now);
/* The context that ends there paused for a reason. */
void policy_mark(policy_shadow *shadow, uint64_t id, uint32_t label, double now);
/* Evict until the rest fits; nothing is kept. */
int policy_fit(policy_shadow *shadow, policy_gone_fn gone, void *context);
/* Remove a leaf; 0 if it is not held or no leaf. */
int policy_drop(policy_shadow *shadow, uint64_t id);

/* Up to `limit` ids in the order of eviction; -1 without memory, else how many. */
ptrdiff_t policy_order(const policy_shadow *shadow, uint64_t *out, size_t limit);
/* Bytes of what `shadow` holds and `other` does not. */
uint64_t policy_beyond(const policy_shadow *shadow, const policy_shadow *other);

/* An order in the making: while it is, blocks that were named are not among their parents' children. */
typedef struct policy_naming {
    policy_shadow *shadow;
    size_t found, most;
    uint64_t need;
    int failed;
} policy_naming;

/* 0 when enough is named. */
int policy_name(policy_naming *order, uint32_t place);
/* Hazard and pauses: the first to go, until `need` bytes or `most` blocks are in `named`: how many; -1 without memory. */
ptrdiff_t policy_make_order(policy_shadow *shadow, uint64_t need, size_t most);
void policy_unname(policy_shadow *shadow); /* gives the room back if it is much */

/* NULL, or what is wrong inside. */
const char *policy_check(const policy_shadow *shadow);

#endif
