/* policy/shadow.c - shadows: serving paths, evicting, listing. */
#include "hazard.h"
#include "kinds.h"
#include "pauses.h"
#include "tree.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t find(const policy_shadow *shadow, uint64_t id) {
    uint32_t place = policy_arena_find(shadow->arena, shadow->seat, id);
    return place != POLICY_NONE && shadow->children[place] == POLICY_GHOST ? POLICY_NONE : place;
}

/* ---- Children --------------------------------------------------------------------------------------------------- */

/* Where a block with many children is counted, or would be. */
static uint32_t many_at(const policy_shadow *shadow, uint32_t place) {
    uint32_t low = 0, high = shadow->many_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (shadow->many[middle].place < place) low = middle + 1;
        else high = middle;
    }
    return low;
}

static int many_reserve(policy_shadow *shadow, uint32_t more) {
    if (shadow->many_count + more <= shadow->many_room) return 0;
    uint32_t room = shadow->many_count + more + shadow->many_room / 2;
    policy_many *many = realloc(shadow->many, room * sizeof *many);
    if (!many) return -1;
    shadow->many = many;
    shadow->many_room = room;
    return 0;
}

void policy_child_came(policy_shadow *shadow, uint32_t place) {
    if (shadow->children[place] < POLICY_MANY - 1) {
        shadow->children[place]++;
        return;
    }
    uint32_t at = many_at(shadow, place);
    policy_many *many = shadow->many + at;
    if (shadow->children[place] == POLICY_MANY) {
        many->children++;
        return;
    }
    memmove(many + 1, many, (shadow->many_count++ - at) * sizeof *many);
    *many = (policy_many){place, POLICY_MANY};
    shadow->children[place] = POLICY_MANY;
}

int policy_child_left(policy_shadow *shadow, uint32_t place) {
    if (shadow->children[place] < POLICY_MANY) return !--shadow->children[place];
    uint32_t at = many_at(shadow, place);
    policy_many *many = shadow->many + at;
    if (--many->children < POLICY_MANY) {
        memmove(many, many + 1, (--shadow->many_count - at) * sizeof *many);
        shadow->children[place] = POLICY_MANY - 1;
    }
    return 0;
}

static uint32_t children_of(const policy_shadow *shadow, uint32_t place) {
    return shadow->children[place] == POLICY_MANY ? shadow->many[many_at(shadow, place)].children : shadow->children[place];
}

/* ---- Room ------------------------------------------------------------------------------------------------------- */

policy_shadow *policy_new(policy_kind kind, uint64_t capacity, double per_token, double per_pair, double alpha,
                          const policy_shadow *beside) {
    policy_shadow *shadow = calloc(1, sizeof *shadow);
    if (!shadow) return NULL;
    shadow->kind = kind;
    shadow->capacity = capacity;
    shadow->per_token = per_token;
    shadow->per_pair = per_pair;
    shadow->alpha = alpha;
    shadow->bucket_free = shadow->bucket_first = POLICY_NONE;
    for (int i = 0; i < POLICY_CLASSES; i++) {
        shadow->queues[i] = (policy_queue){POLICY_NONE, POLICY_NONE, 0};
        shadow->worth[i] = pow(2.0, i / 4.0);
    }
    if (beside) shadow->seat = policy_arena_join(beside->arena);
    shadow->arena = shadow->seat ? beside->arena : policy_arena_new();
    if (shadow->arena && !shadow->seat) shadow->seat = policy_arena_join(shadow->arena);
    if (kind == POLICY_HAZARD) shadow->hazard = policy_hazard_new();
    if (kind == POLICY_PAUSES) shadow->pauses = policy_pauses_new();
    if (!shadow->arena || (kind >= POLICY_HAZARD && !shadow->hazard && !shadow->pauses)) {
        policy_free(shadow);
        return NULL;
    }
    return shadow;
}

void policy_free(policy_shadow *shadow) {
    if (!shadow) return;
    if (shadow->arena) policy_arena_leave(shadow->arena, shadow->seat);
    free(shadow->links);
    free(shadow->many);
    free(shadow->path);
    free(shadow->buckets);
    policy_ghosts_free(&shadow->ghosts);
    policy_hazard_free(shadow->hazard);
    policy_pauses_free(shadow->pauses);
    free(shadow->named);
    free(shadow);
}

/* Bytes of a block in each column, in their order: those that need alignment first. */
enum { LINKS, DATA, USED, HISTORY, CHILDREN, STATE, COLUMNS };

static size_t column(const policy_shadow *shadow, int which) {
    policy_kind kind = shadow->kind;
    switch (which) {
    case LINKS: return sizeof *shadow->links;
    case DATA: return kind == POLICY_LFU || kind == POLICY_HAZARD ? sizeof *shadow->data : 0;
    case USED: return kind == POLICY_GDSF ? sizeof *shadow->used : 0;
    case HISTORY: return kind == POLICY_HAZARD ? sizeof *shadow->history : 0;
    case CHILDREN: return sizeof *shadow->children;
    default: return kind >= POLICY_S3FIFO && kind <= POLICY_GDSF ? sizeof *shadow->state : 0;
    }
}

/* Bytes of a block in the columns before that one. */
static size_t columns_before(const policy_shadow *shadow, int which) {
    size_t before = 0;
    while (which--) before += column(shadow, which);
    return before;
}

/* Columns as long as the arena. */
static int widen(policy_shadow *shadow) {
    size_t room = shadow->arena->room, old = shadow->room;
    if (room <= old) return 0;
    char *all = realloc(shadow->links, room * columns_before(shadow, COLUMNS));
    if (!all) return -1;
    for (int which = COLUMNS; which--;) {
        size_t before = columns_before(shadow, which);
        memmove(all + before * room, all + before * old, column(shadow, which) * old);
    }
    shadow->links = (policy_link *)(void *)all;
    shadow->data = (uint32_t *)(void *)(all + columns_before(shadow, DATA) * room);
    shadow->used = (uint32_t *)(void *)(all + columns_before(shadow, USED) * room);
    shadow->history = (uint16_t *)(void *)(all + columns_before(shadow, HISTORY) * room);
    shadow->children = (uint8_t *)all + columns_before(shadow, CHILDREN) * room;
    shadow->state = (uint8_t *)all + columns_before(shadow, STATE) * room;
    shadow->room = (uint32_t)room;
    return 0;
}

size_t policy_bytes(const policy_shadow *shadow) {
    return sizeof *shadow + policy_arena_bytes(shadow->arena) / (size_t)__builtin_popcount(shadow->arena->seats) +
           shadow->room * columns_before(shadow, COLUMNS) + shadow->many_room * sizeof *shadow->many +
           shadow->path_room * sizeof *shadow->path + shadow->bucket_room * sizeof(policy_bucket) +
           policy_ghosts_bytes(&shadow->ghosts) + shadow->named_room * sizeof(uint32_t) +
           (shadow->hazard ? policy_hazard_bytes(shadow->hazard) : 0) + (shadow->pauses ? policy_pauses_bytes(shadow->pauses) : 0);
}

/* `n` blocks, of which no more than `parents` get a child beside those that they have or get here. */
static int reserve(policy_shadow *shadow, size_t n, uint32_t parents) {
    if (n >= POLICY_NONE / 2 || policy_arena_reserve(shadow->arena, (uint32_t)n) < 0 || widen(shadow) < 0) return -1;
    if (many_reserve(shadow, parents) < 0 || policy_kind_reserve(shadow, (uint32_t)n) < 0) return -1;
    if (shadow->pauses && policy_pauses_reserve(shadow->pauses) < 0) return -1;
    if (n <= shadow->path_room) return 0;
    uint32_t *path = realloc(shadow->path, n * sizeof *path);
    if (!path) return -1;
    shadow->path = path;
    shadow->path_room = n;
    return 0;
}

/* ---- Coming and going ------------------------------------------------------------------------------------------- */

/* A block that is the shadow's in the arena since now; `known`: it was a ghost of the hazard policy. */
static void start(policy_shadow *shadow, uint32_t place, uint32_t before, uint32_t tokens, int known) {
    uint32_t parent = policy_parent(shadow, place);
    shadow->children[place] = 0;
    if (parent != POLICY_NONE) policy_child_came(shadow, parent);
    shadow->nbytes += shadow->arena->blocks[place].nbytes;
    shadow->count++;
    if (shadow->hazard) policy_hazard_hold(shadow, place, tokens, known);
    else policy_kind_start(shadow, place, before, tokens);
}

static uint32_t add(policy_shadow *shadow, uint64_t id, uint32_t parent, uint32_t nbytes, uint32_t before, uint32_t tokens) {
    int known = shadow->hazard && policy_hazard_revive(shadow, id, parent) != POLICY_NONE;
    uint32_t place = policy_arena_take(shadow->arena, shadow->seat, id, parent, nbytes);
    start(shadow, place, before, tokens, known);
    return place;
}

static uint64_t take_out(policy_shadow *shadow, uint32_t place) {
    if (shadow->hazard) return policy_hazard_remove(shadow, place);
    uint32_t memo = policy_kind_remove(shadow, place), parent = policy_parent(shadow, place);
    uint64_t id = policy_block_id(shadow->arena, place);
    shadow->nbytes -= shadow->arena->blocks[place].nbytes;
    shadow->count--;
    policy_arena_drop(shadow->arena, shadow->seat, place);
    policy_kind_gone(shadow, memo, id);
    if (parent != POLICY_NONE && policy_child_left(shadow, parent)) policy_kind_leaf(shadow, parent);
    return id;
}

/* ---- Requests --------------------------------------------------------------------------------------------------- */

size_t policy_match(const policy_shadow *shadow, const uint64_t *ids, size_t n) {
    size_t held = 0;
    while (held < n && find(shadow, ids[held]) != POLICY_NONE) held++;
    return held;
}

int policy_holds(const policy_shadow *shadow, uint64_t id) { return find(shadow, id) != POLICY_NONE; }


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
    shadow->step++;
    while (n--) {
        uint32_t place = find(shadow, ids[n]);
        if (place != POLICY_NONE) policy_kind_use(shadow, place);
    }
    return 0;
}

int policy_lookup(policy_shadow *shadow, const uint64_t *ids, size_t n, double now) {
    if (!shadow->pauses || !n) return 0;
    if (policy_pauses_reserve(shadow->pauses) < 0) return -1;
    policy_pauses_lookup(shadow, ids, n, now);
    return 0;
}

/* A path of a tree that is held, from its end on. */
static int use_filled(policy_shadow *shadow, const uint32_t *order, size_t n, double now) {
    const policy_arena *arena = shadow->arena;
    if (shadow->hazard) {
        if (policy_hazard_reserve(shadow, order[0], 0) < 0) return -1;
        policy_hazard_use(shadow, order[0], now);
        return 0;
    }
    if (shadow->pauses) {
        uint64_t *ids = malloc(n * sizeof *ids);
        if (!ids || policy_pauses_reserve(shadow->pauses) < 0) {
            free(ids);
            return -1;
        }
        for (size_t i = 0; i < n; i++) ids[n - 1 - i] = policy_block_id(arena, order[i]);
        policy_pauses_use(shadow, ids, n, order[0], now);
        free(ids);
        return 0;
    }
    if (policy_kind_reserve(shadow, (uint32_t)n) < 0) return -1;
    shadow->step++;
    for (size_t i = 0; i < n; i++) policy_kind_use(shadow, order[i]);
    return 0;
}

static uint32_t node_bytes(const tree_node *node) {
    uint64_t nbytes = node->nbytes + node->state_nbytes;
    return nbytes < UINT32_MAX ? (uint32_t)nbytes : UINT32_MAX;
}

/* Which blocks of a tree lie in the arena at the places that they have in the tree, as they do where another shadow was
 * filled with it: so they need not be looked up. An empty arena gets them there, and the tree's hash. How many do not, or
 * -1 without memory.
 */
static ptrdiff_t same_places(policy_shadow *shadow, const context_tree *tree, uint32_t *places) {
    policy_arena *arena = shadow->arena;
    uint32_t missing = 0;
    if (!arena->used) {
        if (policy_arena_reserve(arena, tree->count) < 0 || policy_hash_copy(&arena->hash, &tree->hash) < 0) return -1;
        for (; arena->used < tree->used; arena->used++) {
            const tree_node *node = tree->nodes + arena->used;
            uint64_t id = tree_id(node);
            arena->blocks[arena->used] = (policy_block){(uint32_t)id, (uint32_t)(id >> 32), node->parent, node_bytes(node)};
            arena->owners[arena->used] = 0;
            places[arena->used] = arena->used;
        }
        return 0;
    }
    for (uint32_t at = 0; at < tree->used; at++) {
        const tree_node *node = tree->nodes + at;
        int same = at < arena->used && arena->owners[at] && !(arena->owners[at] & shadow->seat) &&
                   policy_block_id(arena, at) == tree_id(node) && arena->blocks[at].parent == node->parent &&
                   (node->parent == POLICY_NONE || places[node->parent] != POLICY_NONE);
        places[at] = same ? at : POLICY_NONE;
        missing += !same;
    }
    return missing;
}

int policy_fill(policy_shadow *shadow, const context_tree *tree, const uint32_t *order, size_t n, double now) {
    if (!tree->count) return 0;
    int fresh = !shadow->arena->used;
    uint32_t *places = malloc((size_t)tree->count * sizeof *places), *used = malloc((n + 1) * sizeof *used);
    ptrdiff_t missing = places && used ? same_places(shadow, tree, places) : -1;
    int failed = missing < 0 || reserve(shadow, (size_t)missing, tree->count / POLICY_MANY + 1) < 0;
    if (failed && fresh) policy_arena_clear(shadow->arena);
    for (uint32_t at = 0; at < tree->used && !failed; at++) {
        const tree_node *node = tree->nodes + at;
        uint32_t tokens = context_tree_tokens(tree, node), parent = node->parent == POLICY_NONE ? POLICY_NONE : places[node->parent];
        if (places[at] == POLICY_NONE) {
            places[at] = add(shadow, tree_id(node), parent, node_bytes(node), node->depth - tokens, tokens);
            continue;
        }
        shadow->arena->owners[at] |= shadow->seat;
        start(shadow, at, node->depth - tokens, tokens, 0);
    }
    for (size_t i = 0; i < n && !failed; i++) used[i] = places[order[i]];
    for (size_t i = 0, end; i < n && !failed; i = end) {
        for (end = i + 1; end < n && tree->nodes[order[end - 1]].parent == order[end]; end++) {}
        failed = use_filled(shadow, used + i, end - i, now) < 0;
    }
    free(places);
    free(used);
    return failed ? -1 : 0;
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
            if (!shadow->children[place]) gone(context, take_out(shadow, place));
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
            next = policy_kind_after(shadow, place);
            if (shadow->children[place] || shadow->arena->owners[place] & POLICY_KEPT) continue;
            gone(context, take_out(shadow, place));
            found = 1;
        }
    }
}

/* One use of a whole path, of which nothing goes while anything else can. */
static void use_path(policy_shadow *shadow, size_t n, policy_gone_fn gone, void *context) {
    uint8_t *owners = shadow->arena->owners;
    shadow->step++;
    for (size_t i = n; i--;) {
        owners[shadow->path[i]] |= POLICY_KEPT;
        policy_kind_use(shadow, shadow->path[i]);
    }
    evict(shadow, gone, context);
    for (size_t i = 0; i < n; i++) owners[shadow->path[i]] &= (uint8_t)~POLICY_KEPT;
}

int policy_request(policy_shadow *shadow, const uint64_t *ids, const uint32_t *sizes, const uint32_t *tokens, size_t n,
                   double now, size_t *hit, policy_gone_fn gone, void *context) {
    if (reserve(shadow, n, 1) < 0 || policy_lookup(shadow, ids, n, now) < 0) return -1;
    policy_hash_warm(&shadow->arena->hash, ids, n, shadow->arena->blocks, sizeof *shadow->arena->blocks);
    uint32_t parent = POLICY_NONE, start = 0, *path = shadow->path;
    size_t held = 0;
    for (; held < n && (path[held] = find(shadow, ids[held])) != POLICY_NONE; held++) {
        parent = path[held];
        start += tokens[held];
    }
    *hit = held;
    if (shadow->hazard && policy_hazard_reserve(shadow, parent, (uint32_t)(n - held)) < 0) return -1;
    for (size_t i = held; i < n; i++) {
        /* What is held, but not behind this, belongs to another path: keys that were made up. */
        if (find(shadow, ids[i]) != POLICY_NONE) {
            n = i;
            break;
        }
        path[i] = parent = add(shadow, ids[i], parent, sizes[i], start, tokens[i]);
        start += tokens[i];
    }
    if (shadow->kind < POLICY_HAZARD) {
        use_path(shadow, n, gone, context);
    } else {
        if (n && shadow->hazard) policy_hazard_use(shadow, parent, now);
        else if (n) policy_pauses_use(shadow, ids, n, parent, now);
        evict(shadow, gone, context);
    }
    while (n-- && shadow->nbytes > shadow->capacity) {
        if (!policy_has(shadow, path[n])) continue;
        if (shadow->children[path[n]]) break;
        gone(context, take_out(shadow, path[n]));
    }
    return 0;
}

int policy_hold(policy_shadow *shadow, uint64_t id, int has_parent, uint64_t parent, uint32_t nbytes, uint32_t start,
                uint32_t tokens) {
    uint32_t above = has_parent ? find(shadow, parent) : POLICY_NONE;
    if ((has_parent && above == POLICY_NONE) || policy_holds(shadow, id)) return 0;
    if (reserve(shadow, 1, 1) < 0) return -1;
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
    if (place == POLICY_NONE || shadow->children[place]) return 0;
    take_out(shadow, place);
    return 1;
}

/* Behind the leaves: blocks with children, each as soon as the last of these is named. */
static size_t peel(const policy_shadow *shadow, uint32_t *places, size_t found, uint32_t *lost) {
    memset(lost, 0, (size_t)shadow->arena->used * sizeof *lost);
    for (size_t i = 0; i < found; i++) {
        uint32_t parent = policy_parent(shadow, places[i]);
        if (parent != POLICY_NONE && ++lost[parent] == children_of(shadow, parent)) places[found++] = parent;
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
        for (ptrdiff_t i = 0; i < named; i++) out[i] = policy_block_id(shadow->arena, shadow->named[i]);
        policy_unname(mutable);
        return named;
    }
    if (!policy_kind_restless(shadow)) {
        for (uint32_t place = POLICY_NONE; found < limit; found++) {
            place = policy_kind_after(shadow, place);
            out[found] = policy_block_id(shadow->arena, place);
        }
        return (ptrdiff_t)found;
    }
    uint32_t *places = malloc(((size_t)shadow->count + shadow->arena->used + 1) * sizeof *places);
    if (!places) return -1;
    found = policy_kind_leaves(shadow, places, limit);
    if (found < limit) found = peel(shadow, places, found, places + shadow->count);
    if (found > limit) found = limit;
    for (size_t i = 0; i < found; i++) out[i] = policy_block_id(shadow->arena, places[i]);
    free(places);
    return (ptrdiff_t)found;
}

uint64_t policy_beyond(const policy_shadow *shadow, const policy_shadow *other) {
    uint64_t nbytes = 0;
    for (uint32_t place = 0; place < shadow->arena->used; place++)
        if (policy_has(shadow, place) && !policy_holds(other, policy_block_id(shadow->arena, place)))
            nbytes += shadow->arena->blocks[place].nbytes;
    return nbytes;
}

const char *policy_check(const policy_shadow *shadow) {
    const policy_arena *arena = shadow->arena;
    uint64_t nbytes = 0, children = 0, inner = 0, count = 0;
    uint32_t many = 0;
    for (uint32_t place = 0; place < arena->used; place++) {
        if (!(arena->owners[place] & shadow->seat)) continue;
        if (place >= shadow->room) return "a place is outside the columns";
        if (shadow->children[place] == POLICY_GHOST) continue;
        const policy_block *block = arena->blocks + place;
        if (find(shadow, policy_id(block)) != place) return "a block is filed twice";
        if (block->parent != POLICY_NONE && !policy_has(shadow, block->parent)) return "the parent of a block is not held";
        if (shadow->children[place] == POLICY_MANY && (many == shadow->many_count || shadow->many[many++].place != place))
            return "a block with many children is counted elsewhere";
        nbytes += block->nbytes;
        children += children_of(shadow, place);
        inner += block->parent != POLICY_NONE;
        count++;
    }
    if (count != shadow->count) return "blocks are counted wrongly";
    if (nbytes != shadow->nbytes) return "bytes are counted wrongly";
    if (children != inner || many != shadow->many_count) return "children are counted wrongly";
    const char *wrong = shadow->hazard ? policy_hazard_check(shadow) : policy_arena_check(arena);
    if (wrong) return wrong;
    return shadow->nbytes > shadow->capacity ? "more is held than the capacity" : NULL;
}
