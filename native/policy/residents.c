/* policy/residents.c - which blocks a cache really holds, by full key, and the orphans among them. */
#include "residents.h"

#include "tree.h"

#include <stdlib.h>
#include <string.h>

/* `next` of an entry that is no orphan. */
#define FOLLOWED (POLICY_NONE - 1)

static uint64_t id_of_key(const uint8_t *key) {
    uint64_t id = 0;
    for (int i = 7; i >= 0; i--) id = id << 8 | key[i];
    return id;
}

static uint64_t entry_id(const void *owner, uint32_t place) {
    return id_of_key(((const policy_residents *)owner)->entries[place].key);
}

policy_residents *policy_residents_new(void) {
    policy_residents *residents = calloc(1, sizeof *residents);
    if (residents) residents->free = residents->head = residents->tail = POLICY_NONE;
    return residents;
}

void policy_residents_free(policy_residents *residents) {
    if (!residents) return;
    free(residents->entries);
    free(residents->hash.slots);
    free(residents);
}

size_t policy_residents_bytes(const policy_residents *residents) {
    return sizeof *residents + (size_t)residents->room * sizeof(policy_entry) + (size_t)residents->hash.size * sizeof(uint32_t);
}

uint32_t policy_residents_find(const policy_residents *residents, const uint8_t key[POLICY_KEY]) {
    uint64_t id = id_of_key(key);
    uint32_t at = policy_hash_start(&residents->hash, id), place;
    do place = policy_hash_next(&residents->hash, id, &at, residents, entry_id);
    while (place != POLICY_NONE && memcmp(residents->entries[place].key, key, POLICY_KEY) != 0);
    return place;
}

uint32_t policy_residents_find_id(const policy_residents *residents, uint64_t id) {
    uint32_t at = policy_hash_start(&residents->hash, id);
    return policy_hash_next(&residents->hash, id, &at, residents, entry_id);
}

static void orphan(policy_residents *residents, uint32_t place) {
    policy_entry *entry = residents->entries + place;
    if (entry->next != FOLLOWED) return;
    entry->prev = residents->tail;
    entry->next = POLICY_NONE;
    if (residents->tail != POLICY_NONE) residents->entries[residents->tail].next = place;
    else residents->head = place;
    residents->tail = place;
    residents->orphans++;
}

/* To the head: held root first, they have to go leaf first. */
static void orphan_first(policy_residents *residents, uint32_t place) {
    policy_entry *entry = residents->entries + place;
    if (entry->next != FOLLOWED) return;
    entry->prev = POLICY_NONE;
    entry->next = residents->head;
    if (residents->head != POLICY_NONE) residents->entries[residents->head].prev = place;
    else residents->tail = place;
    residents->head = place;
    residents->orphans++;
}

static void adopt(policy_residents *residents, uint32_t place) {
    policy_entry *entry = residents->entries + place;
    if (entry->next == FOLLOWED) return;
    if (entry->prev != POLICY_NONE) residents->entries[entry->prev].next = entry->next;
    else residents->head = entry->next;
    if (entry->next != POLICY_NONE) residents->entries[entry->next].prev = entry->prev;
    else residents->tail = entry->prev;
    entry->next = FOLLOWED;
    residents->orphans--;
}

int policy_residents_reserve(policy_residents *residents, uint32_t more) {
    uint64_t need = (uint64_t)residents->count + more;
    if (policy_hash_reserve(&residents->hash, more, residents, entry_id) < 0) return -1;
    if (need <= residents->room) return 0;
    need += need / 32 + 64;
    policy_entry *entries = need < FOLLOWED ? realloc(residents->entries, (size_t)need * sizeof *entries) : NULL;
    if (!entries) return -1;
    residents->entries = entries;
    residents->room = (uint32_t)need;
    return 0;
}

int policy_residents_hold(policy_residents *residents, const uint8_t key[POLICY_KEY], uint32_t nbytes, uint32_t tokens, int followed) {
    uint32_t place = policy_residents_find(residents, key);
    if (place == POLICY_NONE) {
        if (policy_residents_reserve(residents, 1) < 0) return -1;
        place = residents->free;
        if (place != POLICY_NONE) residents->free = residents->entries[place].next;
        else place = residents->used++;
        residents->entries[place] = (policy_entry){0, 0, POLICY_NONE, FOLLOWED, {0}};
        memcpy(residents->entries[place].key, key, POLICY_KEY);
        policy_hash_add(&residents->hash, id_of_key(key), place);
        residents->count++;
    }
    policy_entry *entry = residents->entries + place;
    residents->tokens += (uint64_t)tokens - entry->tokens;
    entry->nbytes = nbytes;
    entry->tokens = tokens;
    if (!followed) orphan_first(residents, place);
    return 0;
}

int policy_residents_fill(policy_residents *residents, const context_tree *tree) {
    if (!tree->count) return 0;
    size_t room = (size_t)tree->count + tree->count / 32;
    policy_entry *entries = realloc(residents->entries, room * sizeof *entries);
    if (!entries) return -1;
    residents->entries = entries;
    residents->room = (uint32_t)room;
    if (policy_hash_copy(&residents->hash, &tree->hash) < 0) return -1;
    for (uint32_t place = 0; place < tree->used; place++) {
        const tree_node *node = tree->nodes + place;
        uint64_t nbytes = node->nbytes + node->state_nbytes;
        uint32_t size = nbytes < UINT32_MAX ? (uint32_t)nbytes : UINT32_MAX;
        entries[place] = (policy_entry){size, context_tree_tokens(tree, node), POLICY_NONE, FOLLOWED, {0}};
        memcpy(entries[place].key, node->key, POLICY_KEY);
    }
    residents->used = residents->count = tree->count;
    residents->tokens = tree->tokens;
    return 0;
}

void policy_residents_drop(policy_residents *residents, uint32_t place) {
    policy_entry *entry = residents->entries + place;
    adopt(residents, place);
    policy_hash_remove(&residents->hash, entry_id(residents, place), place, residents, entry_id);
    residents->tokens -= entry->tokens;
    residents->count--;
    entry->next = residents->free;
    residents->free = place;
}

void policy_residents_came(policy_residents *residents, uint64_t id) {
    uint32_t place = policy_residents_find_id(residents, id);
    if (place != POLICY_NONE) adopt(residents, place);
}

void policy_residents_left(policy_residents *residents, uint64_t id) {
    uint32_t place = policy_residents_find_id(residents, id);
    if (place != POLICY_NONE) orphan(residents, place);
}

int policy_residents_follow(policy_residents *residents, const policy_shadow *before, const policy_shadow *next) {
    uint64_t *ids = malloc(((size_t)before->count + 1) * sizeof *ids);
    ptrdiff_t n = ids ? policy_order(before, ids, before->count) : -1;
    if (n >= 0) {
        for (uint32_t place = residents->head, behind; place != POLICY_NONE; place = behind) {
            behind = residents->entries[place].next;
            if (policy_holds(next, entry_id(residents, place))) adopt(residents, place);
        }
        for (ptrdiff_t i = 0; i < n; i++)
            if (!policy_holds(next, ids[i])) policy_residents_left(residents, ids[i]);
    }
    free(ids);
    return n < 0 ? -1 : 0;
}
