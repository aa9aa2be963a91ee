/* policy/tree.c - see tree.h. */
#include "tree.h"

#include <stdlib.h>
#include <string.h>

/* Rows that are looked ahead. */
enum { AHEAD = 32 };
/* Sizes beyond this are no blocks'. */
static const uint64_t MOST_BYTES = UINT64_C(1) << 48;

static uint64_t id_of_key(const uint8_t *key) {
    uint64_t id = 0;
    for (int i = 7; i >= 0; i--) id = id << 8 | key[i];
    return id;
}

static uint64_t node_id(const void *owner, uint32_t place) {
    return id_of_key(((const context_tree *)owner)->nodes[place].key);
}

void context_tree_free(context_tree *tree) {
    if (!tree) return;
    free(tree->nodes);
    free(tree->hash.slots);
    free(tree);
}

uint32_t context_tree_find(const context_tree *tree, const uint8_t key[POLICY_KEY]) {
    uint64_t id = id_of_key(key);
    uint32_t at = policy_hash_start(&tree->hash, id), place;
    do place = policy_hash_next(&tree->hash, id, &at, tree, node_id);
    while (place != POLICY_NONE && memcmp(tree->nodes[place].key, key, POLICY_KEY) != 0);
    return place;
}

int context_tree_reserve(context_tree *tree, uint32_t more) {
    uint64_t need = (uint64_t)tree->count + more;
    if (need >= POLICY_NONE / 2 || policy_hash_reserve(&tree->hash, more, tree, node_id) < 0) return -1;
    if (need <= tree->room) return 0;
    need += need / 16;
    tree_node *nodes = realloc(tree->nodes, (size_t)need * sizeof *nodes);
    if (!nodes) return -1;
    tree->nodes = nodes;
    tree->room = (uint32_t)need;
    return 0;
}

uint32_t context_tree_add(context_tree *tree, const uint8_t key[POLICY_KEY], uint32_t parent, uint32_t tokens, uint64_t nbytes,
                          uint32_t kind) {
    uint32_t place = tree->free;
    if (place != POLICY_NONE) tree->free = tree->nodes[place].parent;
    else place = tree->used++;
    tree_node *node = tree->nodes + place;
    *node = (tree_node){{0}, nbytes, 0, parent, tokens, 0, kind};
    memcpy(node->key, key, POLICY_KEY);
    if (parent != POLICY_NONE) {
        node->depth += tree->nodes[parent].depth;
        tree->nodes[parent].children++;
    }
    policy_hash_add(&tree->hash, id_of_key(key), place);
    tree->count++;
    tree->tokens += tokens;
    tree->nbytes += nbytes;
    return place;
}

void context_tree_remove(context_tree *tree, uint32_t place) {
    tree_node *node = tree->nodes + place;
    policy_hash_remove(&tree->hash, node_id(tree, place), place, tree, node_id);
    tree->tokens -= context_tree_tokens(tree, node);
    tree->nbytes -= node->nbytes + node->state_nbytes;
    tree->count--;
    if (node->parent != POLICY_NONE) tree->nodes[node->parent].children--;
    node->kind = POLICY_NONE;
    node->parent = tree->free;
    tree->free = place;
}

/* Have near what the next rows will look up: in a large tree these are misses of the processor's caches, which then happen
 * at once. */
static void warm_rows(const context_tree *tree, const tree_row *rows, const uint32_t *order, size_t n) {
    uint64_t ids[2 * AHEAD];
    size_t count = n < AHEAD ? n : AHEAD;
    for (size_t i = 0; i < count; i++) {
        ids[2 * i] = id_of_key(rows[order[i]].key);
        ids[2 * i + 1] = id_of_key(rows[order[i]].parent);
    }
    policy_hash_warm(&tree->hash, ids, 2 * count, tree->nodes, sizeof *tree->nodes);
    for (size_t i = AHEAD; i < 2 * AHEAD && i < n; i++) {
        __builtin_prefetch(rows + order[i]);
        __builtin_prefetch((const char *)(rows + order[i]) + 64);
    }
}

ptrdiff_t context_tree_load(context_tree *tree, const tree_row *rows, const uint32_t *order, size_t n, uint64_t *used, uint8_t *lost,
                            uint64_t *uses, size_t kinds) {
    static const uint8_t root[POLICY_KEY] = {0};
    if (n >= POLICY_NONE / 2 || context_tree_reserve(tree, (uint32_t)n) < 0) return -1;
    ptrdiff_t alike = 0;
    for (size_t i = 0; i < n; i++) {
        const tree_row *row = rows + order[i];
        if (i % AHEAD == 0) warm_rows(tree, rows, order + i, n - i);
        uint64_t id = id_of_key(row->key);
        uint32_t at = policy_hash_start(&tree->hash, id), other = policy_hash_next(&tree->hash, id, &at, tree, node_id);
        int first = memcmp(row->parent, root, POLICY_KEY) == 0;
        uint32_t parent = first ? POLICY_NONE : context_tree_find(tree, row->parent);
        uint64_t start = parent == POLICY_NONE ? 0 : tree->nodes[parent].depth;
        lost[order[i]] = (!first && parent == POLICY_NONE) || row->depth != start + row->tokens || row->depth > UINT32_MAX ||
                         row->nbytes > MOST_BYTES || row->state_nbytes > MOST_BYTES || row->kind >= kinds ||
                         (other != POLICY_NONE && context_tree_find(tree, row->key) != POLICY_NONE);
        if (lost[order[i]]) continue;
        alike += other != POLICY_NONE;
        uint32_t place = context_tree_add(tree, row->key, parent, row->tokens, row->nbytes, row->kind);
        tree->nodes[place].state_nbytes = row->state_nbytes;
        tree->nbytes += row->state_nbytes;
        used[place] = row->used;
        uses[row->kind]++;
    }
    /* A parent is as recent as its most recent child, also where a crash lost the renewed number. */
    for (uint32_t place = tree->used; place--;) {
        uint32_t parent = tree->nodes[place].parent;
        if (parent != POLICY_NONE && used[parent] < used[place]) used[parent] = used[place];
    }
    return alike;
}

static int heads_run(const context_tree *tree, const uint8_t *pinned, uint32_t place) {
    const tree_node *node = tree->nodes + place;
    if (node->parent == POLICY_NONE) return 1;
    const tree_node *above = tree->nodes + node->parent;
    return above->children != 1 || above->kind != node->kind || pinned[node->parent] != pinned[place];
}

ptrdiff_t context_tree_runs(const context_tree *tree, const uint8_t *pinned, tree_run **runs, uint32_t *run_of) {
    size_t count = 0;
    for (uint32_t place = 0; place < tree->used; place++) {
        run_of[place] = POLICY_NONE;
        count += context_tree_has(tree, place) && heads_run(tree, pinned, place);
    }
    tree_run *found = *runs = calloc(count ? count : 1, sizeof *found);
    if (!found) return -1;
    uint32_t next = 0;
    for (uint32_t place = 0; place < tree->used; place++) {
        if (!context_tree_has(tree, place) || run_of[place] != POLICY_NONE) continue;
        uint32_t head = place;
        while (run_of[head] == POLICY_NONE && !heads_run(tree, pinned, head)) head = tree->nodes[head].parent;
        uint32_t number = run_of[head];
        if (number == POLICY_NONE) {
            number = next++;
            found[number].kind = tree->nodes[head].kind;
            found[number].head = tree_id(tree->nodes + head);
            found[number].pinned = pinned[head];
            found[number].start = tree->nodes[head].depth - context_tree_tokens(tree, tree->nodes + head);
            run_of[head] = number;
        }
        for (uint32_t at = place; run_of[at] == POLICY_NONE; at = tree->nodes[at].parent) run_of[at] = number;
    }
    for (uint32_t place = 0; place < tree->used; place++) {
        if (!context_tree_has(tree, place)) continue;
        const tree_node *node = tree->nodes + place;
        tree_run *run = found + run_of[place];
        if (heads_run(tree, pinned, place)) run->parent = node->parent == POLICY_NONE ? POLICY_NONE : run_of[node->parent];
        run->nbytes += node->nbytes + node->state_nbytes;
        run->blocks += node->nbytes > 0;
        run->states += node->state_nbytes > 0;
        if (node->depth - run->start > run->tokens || !run->tip) {
            run->tokens = node->depth - run->start;
            run->tip = tree_id(node);
            run->children = node->children;
        }
    }
    return (ptrdiff_t)count;
}
