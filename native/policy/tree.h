/* policy/tree.h - the nodes of a context tree: one cached block in 64 bytes, found by its whole key. Not thread-safe. */
#ifndef CTXREUSE_POLICY_TREE_H
#define CTXREUSE_POLICY_TREE_H

#include "residents.h"

typedef struct tree_node {
    uint8_t key[POLICY_KEY];
    uint64_t nbytes, state_nbytes;
    uint32_t parent, depth, children; /* parent: a place, or the next free one */
    uint32_t kind;                    /* the owner's: what it knows of a block beside these numbers; POLICY_NONE: free */
} tree_node;

typedef struct context_tree {
    tree_node *nodes;
    uint32_t room, used, free, count;
    uint64_t tokens, nbytes;
    policy_hash hash;
} context_tree;

/* A record on disk, as rows of them are loaded. */
typedef struct tree_row {
    uint8_t key[POLICY_KEY], parent[POLICY_KEY];
    uint64_t depth, nbytes, state_nbytes, used;
    uint32_t tokens, kind;
} tree_row;

/* Nodes in a line, each the only child of the one before, that have the same kind and are all pinned or none. */
typedef struct tree_run {
    uint64_t head, tip;      /* ids of its first and its last node */
    uint64_t nbytes;         /* of blocks and states */
    uint32_t parent;         /* number of the run that it continues; POLICY_NONE: of none */
    uint32_t start, tokens;  /* tokens before it, and its own */
    uint32_t blocks, states; /* nodes with a block, and with a state */
    uint32_t kind, children, pinned;
} tree_run;

/* The first 8 bytes of a node's key as the policies' id. */
static inline uint64_t tree_id(const tree_node *node) {
    uint64_t id = 0;
    for (int i = 7; i >= 0; i--) id = id << 8 | node->key[i];
    return id;
}
void context_tree_free(context_tree *tree);
static inline int context_tree_has(const context_tree *tree, size_t place) {
    return place < tree->used && tree->nodes[place].kind != POLICY_NONE;
}
uint32_t context_tree_find(const context_tree *tree, const uint8_t key[POLICY_KEY]);
static inline uint32_t context_tree_tokens(const context_tree *tree, const tree_node *node) {
    return node->depth - (node->parent == POLICY_NONE ? 0 : tree->nodes[node->parent].depth);
}
/* Room for so many more; -1 without memory. */
int context_tree_reserve(context_tree *tree, uint32_t more);
/* A new node, for which there is room. */
uint32_t context_tree_add(context_tree *tree, const uint8_t key[POLICY_KEY], uint32_t parent, uint32_t tokens, uint64_t nbytes,
                          uint32_t kind);
/* A leaf goes. */
void context_tree_remove(context_tree *tree, uint32_t place);
/* Fill an empty tree with rows in the given order, parents first; `used` gets the use of each place, raised to that of its
 * children, and `lost` 1 for each row that cannot be reached or makes no sense; `uses` counts the nodes of
 * each kind. Returns how many
 * keys begin with the same 8 bytes as another; -1 without memory. */
ptrdiff_t context_tree_load(context_tree *tree, const tree_row *rows, const uint32_t *order, size_t n, uint64_t *used, uint8_t *lost,
                            uint64_t *uses, size_t kinds);
/* All runs, in an array to be freed, and how many; `pinned` has a byte for each place. For each place, if `run_of` is not
 * NULL, the number of its run. -1 without memory. */
ptrdiff_t context_tree_runs(const context_tree *tree, const uint8_t *pinned, tree_run **runs, uint32_t *run_of);

#endif
