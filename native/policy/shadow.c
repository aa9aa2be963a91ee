/* policy/shadow.c - shadows: serving paths, evicting, listing. */
#include "hazard.h"
#include "kinds.h"
#include "pauses.h"
#include "tree.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Blocks that a fill looks ahead. */
enum { AHEAD = 16 };

static uint32_t find(const policy_shadow *shadow, uint64_t id) {
    uint32_t at = policy_hash_start(&shadow->hash, id), place;
    place = policy_hash_next(&shadow->hash, id, &at, shadow, policy_block_id);
    return place != POLICY_NONE && shadow->blocks[place].children == POLICY_GHOST ? POLICY_NONE : place;
}

policy_shadow *policy_new(policy_kind kind, uint64_t capacity, double per_token, double per_pair, double alpha) {
    policy_shadow *shadow = calloc(1, sizeof *shadow);
    if (!shadow) return NULL;
    shadow->kind = kind;
    shadow->capacity = capacity;
    shadow->per_token = per_token;
    shadow->per_pair = per_pair;
    shadow->alpha = alpha;
    shadow->free = shadow->bucket_free = shadow->bucket_first = POLICY_NONE;
    for (int i = 0; i < POLICY_CLASSES; i++) {
        shadow->queues[i] = (policy_queue){POLICY_NONE, POLICY_NONE, 0};
        shadow->worth[i] = pow(2.0, i / 4.0);
    }
    if (kind == POLICY_HAZARD) shadow->hazard = policy_hazard_new();
    if (kind == POLICY_PAUSES) shadow->pauses = policy_pauses_new();
    if (kind >= POLICY_HAZARD && !shadow->hazard && !shadow->pauses) {
        free(shadow);
        return NULL;
    }
    return shadow;
}

void policy_free(policy_shadow *shadow) {
    if (!shadow) return;
    free(shadow->blocks);
    free(shadow->buckets);
    free(shadow->hash.slots);
    policy_ghosts_free(&shadow->ghosts);
    policy_hazard_free(shadow->hazard);
    policy_pauses_free(shadow->pauses);
    free(shadow->named);
    free(shadow);
}

size_t policy_bytes(const policy_shadow *shadow) {
    return sizeof *shadow + (size_t)shadow->room * sizeof(policy_block) + (size_t)shadow->hash.size * sizeof(uint32_t) +
           (size_t)shadow->bucket_room * sizeof(policy_bucket) + policy_ghosts_bytes(&shadow->ghosts) +
           shadow->named_room * sizeof(uint32_t) + (shadow->hazard ? policy_hazard_bytes(shadow->hazard) : 0) +
           (shadow->pauses ? policy_pauses_bytes(shadow->pauses) : 0);
}

static int reserve(policy_shadow *shadow, size_t more) {
    if (more >= POLICY_NONE / 2) return -1;
    if (policy_hash_reserve(&shadow->hash, (uint32_t)more, shadow, policy_block_id) < 0) return -1;
    if (policy_kind_reserve(shadow, (uint32_t)more) < 0) return -1;
    if (shadow->pauses && policy_pauses_reserve(shadow->pauses) < 0) return -1;
    /* All that is filed, ghosts of the hazard policy too. */
    uint64_t need = (uint64_t)shadow->hash.count + more;
    if (need <= shadow->room) return 0;
    need += need / 16;
    if (need >= POLICY_NONE) return -1;
    policy_block *blocks = realloc(shadow->blocks, (size_t)need * sizeof *blocks);
    if (!blocks) return -1;
    shadow->blocks = blocks;
    shadow->room = (uint32_t)need;
    return 0;
}

/* A block that is new at a place, filed already. */
static void start(policy_shadow *shadow, uint32_t place, uint64_t id, uint32_t parent, uint32_t nbytes, uint32_t before,
                  uint32_t tokens) {
    shadow->blocks[place] = (policy_block){
        (uint32_t)id, (uint32_t)(id >> 32), parent, nbytes, POLICY_NONE, POLICY_NONE, 0, shadow->step, 0};
    if (parent != POLICY_NONE) shadow->blocks[parent].children++;
    shadow->nbytes += nbytes;
    shadow->count++;
    if (shadow->hazard) policy_hazard_hold(shadow, place, tokens, 0);
    else policy_kind_start(shadow, place, before, tokens);
}

static uint32_t add(policy_shadow *shadow, uint64_t id, uint32_t parent, uint32_t nbytes, uint32_t before, uint32_t tokens) {
    uint32_t place = shadow->hazard ? policy_hazard_revive(shadow, id, parent) : POLICY_NONE;
    if (place == POLICY_NONE) {
        place = shadow->free;
        if (place != POLICY_NONE) shadow->free = shadow->blocks[place].next;
        else place = shadow->used++;
        start(shadow, place, id, parent, nbytes, before, tokens);
        policy_hash_add(&shadow->hash, id, place);
        return place;
    }
    /* A ghost of the hazard policy. */
    shadow->blocks[place].nbytes = nbytes;
    shadow->blocks[place].children = 0;
    if (parent != POLICY_NONE) shadow->blocks[parent].children++;
    shadow->nbytes += nbytes;
    shadow->count++;
    policy_hazard_hold(shadow, place, tokens, 1);
    return place;
}

static uint64_t take_out(policy_shadow *shadow, uint32_t place) {
    if (shadow->hazard) return policy_hazard_remove(shadow, place);
    policy_kind_remove(shadow, place);
    policy_block *block = shadow->blocks + place;
    uint64_t id = policy_id(block);
    uint32_t parent = block->parent, data = block->data;
    policy_hash_remove(&shadow->hash, id, place, shadow, policy_block_id);
    shadow->nbytes -= block->nbytes;
    shadow->count--;
    block->next = shadow->free;
    shadow->free = place;
    policy_kind_gone(shadow, data, id);
    if (parent != POLICY_NONE && !--shadow->blocks[parent].children) policy_kind_leaf(shadow, parent);
    return id;
}

size_t policy_match(const policy_shadow *shadow, const uint64_t *ids, size_t n) {
    size_t held = 0;
    while (held < n && find(shadow, ids[held]) != POLICY_NONE) held++;
    return held;
}

int policy_holds(const policy_shadow *shadow, uint64_t id) { return find(shadow, id) != POLICY_NONE; }

static void use(policy_shadow *shadow, const uint64_t *ids, size_t n) {
    shadow->step++;
    while (n--) {
        uint32_t place = find(shadow, ids[n]);
        if (place == POLICY_NONE) continue;
        shadow->blocks[place].used = shadow->step;
        policy_kind_use(shadow, place);
    }
}

int policy_use(policy_shadow *shadow, const uint64_t *ids, size_t n, double now) {
    if (shadow->hazard) {
        while (n && !policy_holds(shadow, ids[n - 1])) n--;
        uint32_t tip = n ? find(shadow, ids[n - 1]) : POLICY_NONE;
        if (policy_hazard_reserve(shadow, tip, 0) < 0) return -1;
        if (n) policy_hazard_use(shadow, tip, now);
        return 0;
    }
    if (shadow->pauses) {
        while (n && !policy_holds(shadow, ids[n - 1])) n--;
        if (policy_pauses_reserve(shadow->pauses) < 0) return -1;
        if (n) policy_pauses_use(shadow, ids, n, find(shadow, ids[n - 1]), now);
        return 0;
    }
    if (n >= POLICY_NONE / 2 || policy_kind_reserve(shadow, (uint32_t)n) < 0) return -1;
    use(shadow, ids, n);
    return 0;
}

int policy_lookup(policy_shadow *shadow, const uint64_t *ids, size_t n, double now) {
    if (!shadow->pauses || !n) return 0;
    if (policy_pauses_reserve(shadow->pauses) < 0) return -1;
    policy_pauses_lookup(shadow, ids, n, now);
    return 0;
}

int policy_fill(policy_shadow *shadow, const context_tree *tree, const uint32_t *order, size_t n, double now) {
    /* The same ids at the same places: so the hash is the tree's. */
    if (!tree->count) return 0;
    if (policy_kind_reserve(shadow, 1) < 0) return -1;
    size_t room = (size_t)tree->count + tree->count / 16;
    policy_block *blocks = realloc(shadow->blocks, (room ? room : 1) * sizeof *blocks);
    if (!blocks) return -1;
    shadow->blocks = blocks;
    shadow->room = (uint32_t)room;
    if (policy_hash_copy(&shadow->hash, &tree->hash) < 0) return -1;
    for (uint32_t place = 0; place < tree->used; place++) {
        const tree_node *node = tree->nodes + place;
        uint64_t id = tree_id(node), nbytes = node->nbytes + node->state_nbytes;
        uint32_t tokens = context_tree_tokens(tree, node), size = nbytes < UINT32_MAX ? (uint32_t)nbytes : UINT32_MAX;
        start(shadow, shadow->used++, id, node->parent, size, node->depth - tokens, tokens);
    }
    for (size_t i = 0, end; i < n; i = end) {
        if (i + AHEAD < n) __builtin_prefetch(shadow->blocks + order[i + AHEAD]);
        for (end = i + 1; end < n && tree->nodes[order[end - 1]].parent == order[end]; end++) {}
        if (shadow->hazard) {
            if (policy_hazard_reserve(shadow, order[i], 0) < 0) return -1;
            policy_hazard_use(shadow, order[i], now);
            continue;
        }
        if (shadow->pauses) {
            uint64_t *ids = malloc((end - i) * sizeof *ids);
            int failed = !ids || policy_pauses_reserve(shadow->pauses) < 0;
            for (size_t at = i; at < end && !failed; at++) ids[end - 1 - at] = policy_id(shadow->blocks + order[at]);
            if (!failed) policy_pauses_use(shadow, ids, end - i, order[i], now);
            free(ids);
            if (failed) return -1;
            continue;
        }
        if (policy_kind_reserve(shadow, (uint32_t)(end - i)) < 0) return -1;
        shadow->step++;
        for (size_t at = i; at < end; at++) {
            if (at + AHEAD < n) __builtin_prefetch(shadow->blocks + order[at + AHEAD]);
            shadow->blocks[order[at]].used = shadow->step;
            policy_kind_use(shadow, order[at]);
        }
    }
    return 0;
}

void policy_mark(policy_shadow *shadow, uint64_t id, uint32_t label, double now) {
    if (shadow->hazard) policy_hazard_mark(shadow, id, label);
    if (shadow->pauses) policy_pauses_mark(shadow, id, label, now);
}

static void evict_by_chance(policy_shadow *shadow, policy_gone_fn gone, void *context) {
    for (uint32_t before = POLICY_NONE; shadow->nbytes > shadow->capacity && shadow->count != before;) {
        ptrdiff_t n = policy_make_order(shadow, shadow->nbytes - shadow->capacity, shadow->count);
        before = shadow->count;
        for (ptrdiff_t i = 0; i < n; i++) {
            uint32_t place = shadow->named[i];
            if (!shadow->blocks[place].children) gone(context, take_out(shadow, place));
        }
    }
}

static void evict(policy_shadow *shadow, policy_gone_fn gone, void *context) {
    if (shadow->hazard || shadow->pauses) {
        evict_by_chance(shadow, gone, context);
        return;
    }
    if (policy_kind_restless(shadow)) {
        while (shadow->nbytes > shadow->capacity) {
            uint32_t place = policy_kind_victim(shadow);
            if (place == POLICY_NONE) return;
            gone(context, take_out(shadow, place));
        }
        return;
    }
    for (int found = 1; found && shadow->nbytes > shadow->capacity;) {
        found = 0;
        for (uint32_t place = policy_kind_after(shadow, POLICY_NONE), next;
             place != POLICY_NONE && shadow->nbytes > shadow->capacity; place = next) {
            const policy_block *block = shadow->blocks + place;
            next = policy_kind_after(shadow, place);
            if (block->children || block->used == shadow->step) continue;
            gone(context, take_out(shadow, place));
            found = 1;
        }
    }
}

int policy_request(policy_shadow *shadow, const uint64_t *ids, const uint32_t *sizes, const uint32_t *tokens, size_t n,
                   double now, size_t *hit, policy_gone_fn gone, void *context) {
    if (reserve(shadow, n) < 0 || policy_lookup(shadow, ids, n, now) < 0) return -1;
    policy_hash_warm(&shadow->hash, ids, n, shadow->blocks, sizeof *shadow->blocks);
    size_t held = policy_match(shadow, ids, n);
    uint32_t parent = held ? find(shadow, ids[held - 1]) : POLICY_NONE, start = 0;
    *hit = held;
    if (shadow->hazard && policy_hazard_reserve(shadow, parent, (uint32_t)(n - held)) < 0) return -1;
    for (size_t i = 0; i < held; i++) start += tokens[i];
    for (size_t i = held; i < n; i++) {
        /* What is held, but not behind this, belongs to another path: keys that were made up. */
        if (find(shadow, ids[i]) != POLICY_NONE) {
            n = i;
            break;
        }
        parent = add(shadow, ids[i], parent, sizes[i], start, tokens[i]);
        start += tokens[i];
    }
    if (shadow->kind < POLICY_HAZARD) use(shadow, ids, n);
    else if (n && shadow->hazard) policy_hazard_use(shadow, parent, now);
    else if (n) policy_pauses_use(shadow, ids, n, parent, now);
    evict(shadow, gone, context);
    while (n-- && shadow->nbytes > shadow->capacity) {
        uint32_t place = find(shadow, ids[n]);
        if (place == POLICY_NONE) continue;
        if (shadow->blocks[place].children) break;
        gone(context, take_out(shadow, place));
    }
    return 0;
}

int policy_hold(policy_shadow *shadow, uint64_t id, int has_parent, uint64_t parent, uint32_t nbytes, uint32_t start,
                uint32_t tokens) {
    uint32_t above = has_parent ? find(shadow, parent) : POLICY_NONE;
    if ((has_parent && above == POLICY_NONE) || policy_holds(shadow, id)) return 0;
    if (reserve(shadow, 1) < 0) return -1;
    add(shadow, id, above, nbytes, start, tokens);
    return 0;
}

int policy_fit(policy_shadow *shadow, policy_gone_fn gone, void *context) {
    shadow->step++;
    evict(shadow, gone, context);
    return 0;
}

int policy_drop(policy_shadow *shadow, uint64_t id) {
    uint32_t place = find(shadow, id);
    if (place == POLICY_NONE || shadow->blocks[place].children) return 0;
    take_out(shadow, place);
    return 1;
}

/* Behind the leaves: blocks with children, each as soon as the last of these is named. */
static size_t peel(const policy_shadow *shadow, uint32_t *places, size_t found, uint32_t *lost) {
    memset(lost, 0, (size_t)shadow->used * sizeof *lost);
    for (size_t i = 0; i < found; i++) {
        uint32_t parent = shadow->blocks[places[i]].parent;
        if (parent != POLICY_NONE && ++lost[parent] == shadow->blocks[parent].children) places[found++] = parent;
    }
    return found;
}

ptrdiff_t policy_order(const policy_shadow *shadow, uint64_t *out, size_t limit) {
    size_t found = 0;
    if (limit > shadow->count) limit = shadow->count;
    if (shadow->kind >= POLICY_HAZARD) {
        /* Asking changes nothing that is still there when it returns. */
        policy_shadow *mutable = (policy_shadow *)(uintptr_t)shadow;
        ptrdiff_t named = policy_make_order(mutable, UINT64_MAX, limit);
        for (ptrdiff_t i = 0; i < named; i++) out[i] = policy_id(shadow->blocks + shadow->named[i]);
        policy_unname(mutable);
        return named;
    }
    if (!policy_kind_restless(shadow)) {
        for (uint32_t place = POLICY_NONE; found < limit; found++) {
            place = policy_kind_after(shadow, place);
            out[found] = policy_id(shadow->blocks + place);
        }
        return (ptrdiff_t)found;
    }
    uint32_t *places = malloc(((size_t)shadow->count + shadow->used + 1) * sizeof *places);
    if (!places) return -1;
    found = policy_kind_leaves(shadow, places, limit);
    if (found < limit) found = peel(shadow, places, found, places + shadow->count);
    if (found > limit) found = limit;
    for (size_t i = 0; i < found; i++) out[i] = policy_id(shadow->blocks + places[i]);
    free(places);
    return (ptrdiff_t)found;
}

uint64_t policy_beyond(const policy_shadow *shadow, const policy_shadow *other) {
    uint64_t nbytes = 0;
    for (uint32_t at = 0; at < shadow->hash.size; at++) {
        uint32_t place = policy_hash_at(&shadow->hash, at);
        if (place == POLICY_NONE || shadow->blocks[place].children == POLICY_GHOST) continue;
        if (!policy_holds(other, policy_block_id(shadow, place))) nbytes += shadow->blocks[place].nbytes;
    }
    return nbytes;
}

const char *policy_check(const policy_shadow *shadow) {
    uint64_t nbytes = 0, children = 0, inner = 0, count = 0, filed = 0;
    for (uint32_t at = 0; at < shadow->hash.size; at++) {
        uint32_t place = policy_hash_at(&shadow->hash, at);
        if (place == POLICY_NONE) continue;
        if (place >= shadow->used) return "a place is outside the arena";
        const policy_block *block = shadow->blocks + place;
        filed++;
        if (block->children == POLICY_GHOST) continue;
        if (find(shadow, policy_id(block)) != place) return "a block is filed twice";
        if (block->parent != POLICY_NONE && find(shadow, policy_block_id(shadow, block->parent)) != block->parent)
            return "the parent of a block is not held";
        nbytes += block->nbytes;
        children += block->children;
        inner += block->parent != POLICY_NONE;
        count++;
    }
    if (count != shadow->count || filed != shadow->hash.count) return "blocks are counted wrongly";
    if (nbytes != shadow->nbytes) return "bytes are counted wrongly";
    if (children != inner) return "children are counted wrongly";
    const char *wrong = shadow->hazard ? policy_hazard_check(shadow) : NULL;
    if (wrong) return wrong;
    return shadow->nbytes > shadow->capacity ? "more is held than the capacity" : NULL;
}
