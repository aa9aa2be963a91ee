/* policy/kinds.c - what the policies do differently: tests/oracle/policy has a class of the same name for each. */
#include "kinds.h"

#include "pauses.h"

#include <math.h>
#include <stdlib.h>

/* `state` of S3-FIFO and ARC: the queue (FRESH before the first use), whether it is parked, uses. */
enum { FRESH = 2, HOME = 3, PARKED = 4, USES_AT = 3, MOST_USES = 3 };
/* `state` of GDSF: the class, whether it is parked. */
enum { CLASS = 63, CLASS_PARKED = 64, MIDDLE = 32 };
enum { SMALL = 0, MAIN = 1, SHARE = 10 };
/* LFU remembers the uses, up to MOST_NOTED. */
enum { FEWEST_GHOSTS = 1 << 16, MOST_NOTED = 255 };

/* Ghosts of LFU and ARC: a quarter of the blocks held, but so many at least. */
static uint32_t most_ghosts(const policy_shadow *shadow) {
    return shadow->count / 4 > FEWEST_GHOSTS ? shadow->count / 4 : FEWEST_GHOSTS;
}

static policy_queue *home_of(policy_shadow *shadow, uint32_t place) { return &shadow->queues[shadow->state[place] & HOME]; }

static uint32_t uses_of(const policy_shadow *shadow, uint32_t place) { return shadow->state[place] >> USES_AT; }

/* True for what the running request spares. */
static int kept(const policy_shadow *shadow, uint32_t place) { return shadow->arena->owners[place] & POLICY_KEPT; }

void policy_queue_push(policy_shadow *shadow, policy_queue *queue, uint32_t place) {
    policy_link *links = shadow->links;
    links[place] = (policy_link){queue->tail, POLICY_NONE};
    if (queue->tail != POLICY_NONE) links[queue->tail].next = place;
    else queue->head = place;
    queue->tail = place;
    queue->count++;
}

static void push_head(policy_shadow *shadow, policy_queue *queue, uint32_t place) {
    policy_link *links = shadow->links;
    links[place] = (policy_link){POLICY_NONE, queue->head};
    if (queue->head != POLICY_NONE) links[queue->head].prev = place;
    else queue->tail = place;
    queue->head = place;
    queue->count++;
}

void policy_queue_take(policy_shadow *shadow, policy_queue *queue, uint32_t place) {
    policy_link *links = shadow->links, link = links[place];
    if (link.prev != POLICY_NONE) links[link.prev].next = link.next;
    else queue->head = link.next;
    if (link.next != POLICY_NONE) links[link.next].prev = link.prev;
    else queue->tail = link.prev;
    queue->count--;
}

/* ---- LFU -------------------------------------------------------------------------------------------------------- */

int policy_kind_reserve(policy_shadow *shadow, uint32_t more) {
    if (shadow->kind != POLICY_LFU) return 0;
    uint64_t need = (uint64_t)shadow->bucket_used + more + 2;
    if (need <= shadow->bucket_room) return 0;
    need += need / 4;
    if (need >= POLICY_NONE) return -1;
    policy_bucket *buckets = realloc(shadow->buckets, (size_t)need * sizeof *buckets);
    if (!buckets) return -1;
    shadow->buckets = buckets;
    shadow->bucket_room = (uint32_t)need;
    return 0;
}

/* A bucket behind `before` (POLICY_NONE: the first). */
static uint32_t bucket_new(policy_shadow *shadow, uint32_t uses, uint32_t before) {
    uint32_t at = shadow->bucket_free;
    if (at != POLICY_NONE) shadow->bucket_free = shadow->buckets[at].next;
    else at = shadow->bucket_used++;
    uint32_t behind = before == POLICY_NONE ? shadow->bucket_first : shadow->buckets[before].next;
    shadow->buckets[at] = (policy_bucket){{POLICY_NONE, POLICY_NONE, 0}, uses, before, behind};
    if (before == POLICY_NONE) shadow->bucket_first = at;
    else shadow->buckets[before].next = at;
    if (behind != POLICY_NONE) shadow->buckets[behind].prev = at;
    return at;
}

static void bucket_leave(policy_shadow *shadow, uint32_t place) {
    uint32_t at = shadow->data[place];
    policy_bucket *bucket = shadow->buckets + at;
    policy_queue_take(shadow, &bucket->queue, place);
    if (bucket->queue.count) return;
    if (bucket->prev != POLICY_NONE) shadow->buckets[bucket->prev].next = bucket->next;
    else shadow->bucket_first = bucket->next;
    if (bucket->next != POLICY_NONE) shadow->buckets[bucket->next].prev = bucket->prev;
    bucket->next = shadow->bucket_free;
    shadow->bucket_free = at;
}

/* How often a block was used before it went, as far as that is remembered. */
static uint32_t recalled(policy_shadow *shadow, uint64_t id) {
    uint32_t ghost = policy_ghosts_find(&shadow->ghosts, id), uses;
    if (ghost == POLICY_NONE) return 0;
    uses = shadow->ghosts.note[ghost];
    policy_ghosts_take(&shadow->ghosts, ghost);
    return uses;
}

/* O(different numbers of uses up to that one, at most 255). */
static void bucket_join(policy_shadow *shadow, uint32_t place, uint32_t uses) {
    uint32_t before = POLICY_NONE, at = shadow->bucket_first;
    while (at != POLICY_NONE && shadow->buckets[at].uses < uses) before = at, at = shadow->buckets[at].next;
    if (at == POLICY_NONE || shadow->buckets[at].uses != uses) at = bucket_new(shadow, uses, before);
    policy_queue_push(shadow, &shadow->buckets[at].queue, place);
    shadow->data[place] = at;
}

static void bucket_use(policy_shadow *shadow, uint32_t place) {
    uint32_t before = shadow->data[place];
    policy_bucket *bucket = shadow->buckets + before;
    uint32_t next = bucket->next, uses = bucket->uses + 1;
    if (next == POLICY_NONE || shadow->buckets[next].uses != uses) next = bucket_new(shadow, uses, before);
    bucket_leave(shadow, place);
    policy_queue_push(shadow, &shadow->buckets[next].queue, place);
    shadow->data[place] = next;
}

/* ---- S3-FIFO and ARC -------------------------------------------------------------------------------------------- */

static void admit(policy_shadow *shadow, uint32_t place, uint32_t queue) {
    uint8_t state = shadow->state[place];
    if ((state & HOME) != FRESH && !(state & PARKED)) policy_queue_take(shadow, home_of(shadow, place), place);
    shadow->state[place] = (uint8_t)((state & ~(HOME | PARKED)) | queue);
    policy_queue_push(shadow, &shadow->queues[queue], place);
}

static uint32_t first_queue(policy_shadow *shadow, uint64_t id) {
    policy_ghosts *ghosts = &shadow->ghosts;
    uint32_t ghost = policy_ghosts_find(ghosts, id), share;
    if (ghost == POLICY_NONE) return 0;
    if (shadow->kind == POLICY_ARC) {
        uint32_t once = ghosts->count[0], often = ghosts->count[1];
        if (ghosts->note[ghost] == 0) {
            share = often / once > 1 ? often / once : 1;
            uint64_t more = (uint64_t)shadow->wanted + share;
            shadow->wanted = more > shadow->count ? shadow->count : (uint32_t)more;
        } else {
            share = once / often > 1 ? once / often : 1;
            shadow->wanted = shadow->wanted < share ? 0 : shadow->wanted - share;
        }
    }
    policy_ghosts_take(ghosts, ghost);
    return 1;
}

static uint32_t turn(const policy_shadow *shadow) {
    uint64_t first = shadow->queues[0].count, second = shadow->queues[1].count;
    if (shadow->kind == POLICY_S3FIFO) return first * SHARE >= shadow->count || !second ? SMALL : MAIN;
    return first && (first > shadow->wanted || !second) ? 0 : 1;
}

static int renew(policy_shadow *shadow, uint32_t place, uint32_t queue) {
    uint32_t uses = uses_of(shadow, place);
    if (shadow->kind != POLICY_S3FIFO || uses <= (queue == SMALL ? 1u : 0u)) return 0;
    shadow->state[place] = (uint8_t)((shadow->state[place] & (HOME | PARKED)) | (queue == SMALL ? 0 : uses - 1) << USES_AT);
    admit(shadow, place, MAIN);
    return 1;
}

static void settle(policy_shadow *shadow, uint32_t which) {
    policy_queue *queue = &shadow->queues[which];
    while (queue->head != POLICY_NONE) {
        uint32_t place = queue->head;
        if (renew(shadow, place, which)) continue;
        if (!shadow->children[place]) return;
        policy_queue_take(shadow, queue, place);
        shadow->state[place] |= PARKED;
    }
}

/* Leaves of one queue with so many uses that the running request did not use (unless all is set). */
static size_t walk(const policy_shadow *shadow, int which, uint32_t least, uint32_t most, int all, uint32_t *out,
                   size_t limit) {
    size_t found = 0;
    for (uint32_t place = shadow->queues[which].head; place != POLICY_NONE && found < limit; place = shadow->links[place].next) {
        uint32_t uses = uses_of(shadow, place);
        if (!shadow->children[place] && least <= uses && uses <= most && (all || !kept(shadow, place))) out[found++] = place;
    }
    return found;
}

static size_t queue_leaves(const policy_shadow *shadow, int all, uint32_t *out, size_t limit) {
    uint32_t first = turn(shadow);
    size_t found = 0;
    if (shadow->kind == POLICY_ARC) {
        found = walk(shadow, (int)first, 0, MOST_USES, all, out, limit);
        return found + walk(shadow, (int)(1 - first), 0, MOST_USES, all, out + found, limit - found);
    }
    if (first == SMALL) {
        found = walk(shadow, SMALL, 0, 1, all, out, limit);
        found += walk(shadow, MAIN, 0, 0, all, out + found, limit - found);
        found += walk(shadow, SMALL, 2, MOST_USES, all, out + found, limit - found);
    }
    for (uint32_t uses = first == SMALL; uses <= MOST_USES; uses++)
        found += walk(shadow, MAIN, uses, uses, all, out + found, limit - found);
    if (first == MAIN) {
        found += walk(shadow, SMALL, 0, 1, all, out + found, limit - found);
        found += walk(shadow, SMALL, 2, MOST_USES, all, out + found, limit - found);
    }
    return found;
}

/* ---- GDSF ------------------------------------------------------------------------------------------------------- */

static uint32_t class_of(const policy_shadow *shadow, uint32_t nbytes, uint32_t start, uint32_t tokens) {
    double seconds = shadow->per_token * tokens + shadow->per_pair * tokens * ((double)start + (double)tokens / 2);
    double ratio = seconds * (1 << 20) / (nbytes ? nbytes : 1);
    if (!(ratio > 0)) return 0;
    double at = MIDDLE + floor(4 * log2(ratio));
    return at < 0 ? 0 : at > POLICY_CLASSES - 1 ? POLICY_CLASSES - 1 : (uint32_t)at;
}

static void class_push(policy_shadow *shadow, uint32_t place, int head) {
    uint32_t level = shadow->state[place] & CLASS;
    shadow->state[place] = (uint8_t)level;
    (head ? push_head : policy_queue_push)(shadow, &shadow->queues[level], place);
    shadow->filled |= UINT64_C(1) << level;
}

static void class_take(policy_shadow *shadow, uint32_t place) {
    uint32_t level = shadow->state[place] & CLASS;
    policy_queue_take(shadow, &shadow->queues[level], place);
    if (!shadow->queues[level].count) shadow->filled &= ~(UINT64_C(1) << level);
}

static uint32_t leaf_from(const policy_shadow *shadow, uint32_t place) {
    while (place != POLICY_NONE && shadow->children[place]) place = shadow->links[place].next;
    return place;
}

/* The class whose leaf at its cursor has the lowest score. */
static int lowest(const policy_shadow *shadow, const uint32_t *at, uint64_t live) {
    double recency[POLICY_CLASSES], low = 2, best = INFINITY;
    int cheapest = -1, dearest = -1, chosen = -1;
    for (uint64_t left = live; left; left &= left - 1) {
        int level = __builtin_ctzll(left);
        recency[level] = 1.0 / (1.0 + (double)(uint32_t)(shadow->step - shadow->used[at[level]]));
        if (recency[level] < low) low = recency[level];
        if (cheapest < 0) cheapest = level;
        dearest = level;
    }
    double span = 1.0 - low, cheap = shadow->worth[cheapest], spread = shadow->worth[dearest] - cheap;
    for (uint64_t left = live; left; left &= left - 1) {
        int level = __builtin_ctzll(left);
        double fresh = span > 0 ? (recency[level] - low) / span : 0.0;
        double worth = spread > 0 ? (shadow->worth[level] - cheap) / spread : 0.0;
        double score = fresh + shadow->alpha * worth;
        if (score < best) best = score, chosen = level;
    }
    return chosen;
}

static size_t class_leaves(const policy_shadow *shadow, int all, uint32_t *out, size_t limit) {
    uint32_t at[POLICY_CLASSES];
    uint64_t live = 0;
    size_t found = 0;
    for (uint64_t left = shadow->filled; left; left &= left - 1) {
        int level = __builtin_ctzll(left);
        at[level] = leaf_from(shadow, shadow->queues[level].head);
        if (at[level] != POLICY_NONE) live |= UINT64_C(1) << level;
    }
    while (live && found < limit) {
        int level = lowest(shadow, at, live);
        uint32_t place = at[level];
        if (all || !kept(shadow, place)) out[found++] = place;
        at[level] = leaf_from(shadow, shadow->links[place].next);
        if (at[level] == POLICY_NONE) live &= ~(UINT64_C(1) << level);
    }
    return found;
}

static void class_settle(policy_shadow *shadow) {
    for (uint64_t left = shadow->filled; left; left &= left - 1) {
        policy_queue *queue = &shadow->queues[__builtin_ctzll(left)];
        while (queue->head != POLICY_NONE && shadow->children[queue->head]) {
            uint32_t place = queue->head;
            class_take(shadow, place);
            shadow->state[place] |= CLASS_PARKED;
        }
    }
}

/* ---- All -------------------------------------------------------------------------------------------------------- */

void policy_kind_start(policy_shadow *shadow, uint32_t place, uint32_t start, uint32_t tokens) {
    const policy_block *block = shadow->arena->blocks + place;
    switch (shadow->kind) {
    case POLICY_LRU: policy_queue_push(shadow, shadow->queues, place); break;
    case POLICY_LFU: bucket_join(shadow, place, recalled(shadow, policy_id(block))); break;
    case POLICY_GDSF:
        shadow->used[place] = shadow->step;
        shadow->state[place] = (uint8_t)class_of(shadow, block->nbytes, start, tokens);
        class_push(shadow, place, 0);
        break;
    case POLICY_PAUSES: policy_pauses_hold(shadow, place); break;
    default: shadow->state[place] = FRESH;
    }
}

void policy_kind_use(policy_shadow *shadow, uint32_t place) {
    switch (shadow->kind) {
    case POLICY_LRU:
        policy_queue_take(shadow, shadow->queues, place);
        policy_queue_push(shadow, shadow->queues, place);
        break;
    case POLICY_LFU: bucket_use(shadow, place); break;
    case POLICY_GDSF:
        shadow->used[place] = shadow->step;
        if (!(shadow->state[place] & CLASS_PARKED)) class_take(shadow, place);
        class_push(shadow, place, 0);
        break;
    default:
        if ((shadow->state[place] & HOME) == FRESH) admit(shadow, place, first_queue(shadow, policy_block_id(shadow->arena, place)));
        else if (shadow->kind == POLICY_ARC) admit(shadow, place, 1);
        else if (uses_of(shadow, place) < MOST_USES) shadow->state[place] += 1u << USES_AT;
    }
}

uint32_t policy_kind_remove(policy_shadow *shadow, uint32_t place) {
    uint32_t first;
    switch (shadow->kind) {
    case POLICY_LRU: policy_queue_take(shadow, shadow->queues, place); return 0;
    case POLICY_LFU:
        first = shadow->buckets[shadow->data[place]].uses;
        bucket_leave(shadow, place);
        return first < MOST_NOTED ? first : MOST_NOTED;
    case POLICY_GDSF:
        if (!(shadow->state[place] & CLASS_PARKED)) class_take(shadow, place);
        return 0;
    case POLICY_PAUSES: policy_pauses_remove(shadow, place); return 0;
    default:
        first = turn(shadow);
        settle(shadow, first);
        if (!shadow->queues[first].count) settle(shadow, 1 - first);
        if ((shadow->state[place] & HOME) != FRESH && !(shadow->state[place] & PARKED))
            policy_queue_take(shadow, home_of(shadow, place), place);
        return shadow->state[place] & HOME;
    }
}

void policy_kind_gone(policy_shadow *shadow, uint32_t memo, uint64_t id) {
    policy_ghosts *ghosts = &shadow->ghosts;
    int s3 = shadow->kind == POLICY_S3FIFO;
    if (shadow->kind == POLICY_LFU) {
        if (policy_ghosts_reserve(ghosts, 1) < 0) return;
        policy_ghosts_push(ghosts, id, 0, memo);
        while (ghosts->count[0] > most_ghosts(shadow)) policy_ghosts_pop(ghosts, 0);
        return;
    }
    if ((!s3 && shadow->kind != POLICY_ARC) || memo == FRESH || (s3 && memo != SMALL)) return;
    /* Without memory a ghost is forgotten: it would have been advice. */
    if (policy_ghosts_reserve(ghosts, 1) < 0) return;
    policy_ghosts_push(ghosts, id, (int)memo, memo);
    uint64_t limit = s3 ? (uint64_t)shadow->count * (SHARE - 1) / SHARE : shadow->count;
    if (!s3 && limit > most_ghosts(shadow)) limit = most_ghosts(shadow);
    while ((uint64_t)ghosts->count[0] + ghosts->count[1] > limit) {
        int once = ghosts->count[0] && ((int64_t)ghosts->count[0] > (int64_t)shadow->count - shadow->wanted || !ghosts->count[1]);
        policy_ghosts_pop(ghosts, s3 || once ? 0 : 1);
    }
}

void policy_kind_leaf(policy_shadow *shadow, uint32_t place) {
    if (shadow->kind == POLICY_GDSF && shadow->state[place] & CLASS_PARKED) {
        class_push(shadow, place, 1);
    } else if ((shadow->kind == POLICY_S3FIFO || shadow->kind == POLICY_ARC) && shadow->state[place] & PARKED) {
        shadow->state[place] &= (uint8_t)~PARKED;
        push_head(shadow, home_of(shadow, place), place);
    } else if (shadow->pauses) {
        policy_pauses_leaf(shadow, place);
    }
}

int policy_kind_restless(const policy_shadow *shadow) { return shadow->kind >= POLICY_S3FIFO && shadow->kind < POLICY_HAZARD; }

uint32_t policy_kind_victim(policy_shadow *shadow) {
    uint32_t place = POLICY_NONE;
    if (shadow->kind == POLICY_GDSF) class_settle(shadow);
    (shadow->kind == POLICY_GDSF ? class_leaves : queue_leaves)(shadow, 0, &place, 1);
    return place;
}

uint32_t policy_kind_after(const policy_shadow *shadow, uint32_t place) {
    if (shadow->kind == POLICY_LRU) return place == POLICY_NONE ? shadow->queues[0].head : shadow->links[place].next;
    uint32_t bucket = place == POLICY_NONE ? shadow->bucket_first : shadow->buckets[shadow->data[place]].next;
    if (place != POLICY_NONE && shadow->links[place].next != POLICY_NONE) return shadow->links[place].next;
    return bucket == POLICY_NONE ? POLICY_NONE : shadow->buckets[bucket].queue.head;
}

size_t policy_kind_leaves(const policy_shadow *shadow, uint32_t *out, size_t limit) {
    return (shadow->kind == POLICY_GDSF ? class_leaves : queue_leaves)(shadow, 1, out, limit);
}
