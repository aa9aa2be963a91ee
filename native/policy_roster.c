/* policy_roster.c - which blocks a cache really holds, by full key, and the strays among them. */
#include "policy.h"

#include <stdlib.h>
#include <string.h>

/* `next` of an entry that is no stray. */
#define FAITHFUL (POLICY_NONE - 1)

static uint64_t id_of_key(const uint8_t *key) {
    uint64_t id = 0;
    for (int i = 7; i >= 0; i--) id = id << 8 | key[i];
    return id;
}

static uint64_t entry_id(const void *owner, uint32_t place) {
    return id_of_key(((const policy_roster *)owner)->entries[place].key);
}

policy_roster *policy_roster_new(void) {
    policy_roster *roster = calloc(1, sizeof *roster);
    if (roster) roster->free = roster->head = roster->tail = POLICY_NONE;
    return roster;
}

void policy_roster_free(policy_roster *roster) {
    if (!roster) return;
    free(roster->entries);
    free(roster->hash.slots);
    free(roster);
}

size_t policy_roster_bytes(const policy_roster *roster) {
    return sizeof *roster + (size_t)roster->room * sizeof(policy_entry) + (size_t)roster->hash.size * sizeof(uint32_t);
}

uint32_t policy_roster_find(const policy_roster *roster, const uint8_t key[POLICY_KEY]) {
    uint64_t id = id_of_key(key);
    uint32_t at = policy_hash_start(&roster->hash, id), place;
    do place = policy_hash_next(&roster->hash, id, &at, roster, entry_id);
    while (place != POLICY_NONE && memcmp(roster->entries[place].key, key, POLICY_KEY) != 0);
    return place;
}

uint32_t policy_roster_find_id(const policy_roster *roster, uint64_t id) {
    uint32_t at = policy_hash_start(&roster->hash, id);
    return policy_hash_next(&roster->hash, id, &at, roster, entry_id);
}

static void stray(policy_roster *roster, uint32_t place) {
    policy_entry *entry = roster->entries + place;
    if (entry->next != FAITHFUL) return;
    entry->prev = roster->tail;
    entry->next = POLICY_NONE;
    if (roster->tail != POLICY_NONE) roster->entries[roster->tail].next = place;
    else roster->head = place;
    roster->tail = place;
    roster->strays++;
}

/* To the head: held root first, they have to go leaf first. */
static void stray_first(policy_roster *roster, uint32_t place) {
    policy_entry *entry = roster->entries + place;
    if (entry->next != FAITHFUL) return;
    entry->prev = POLICY_NONE;
    entry->next = roster->head;
    if (roster->head != POLICY_NONE) roster->entries[roster->head].prev = place;
    else roster->tail = place;
    roster->head = place;
    roster->strays++;
}

static void come_back(policy_roster *roster, uint32_t place) {
    policy_entry *entry = roster->entries + place;
    if (entry->next == FAITHFUL) return;
    if (entry->prev != POLICY_NONE) roster->entries[entry->prev].next = entry->next;
    else roster->head = entry->next;
    if (entry->next != POLICY_NONE) roster->entries[entry->next].prev = entry->prev;
    else roster->tail = entry->prev;
    entry->next = FAITHFUL;
    roster->strays--;
}

int policy_roster_hold(policy_roster *roster, const uint8_t key[POLICY_KEY], uint32_t nbytes, uint32_t tokens, int followed) {
    uint32_t place = policy_roster_find(roster, key);
    if (place == POLICY_NONE) {
        if (policy_hash_reserve(&roster->hash, 1, roster, entry_id) < 0) return -1;
        if (roster->count == roster->room) {
            uint64_t room = (uint64_t)roster->room + roster->room / 16 + 64;
            policy_entry *entries = room < FAITHFUL ? realloc(roster->entries, (size_t)room * sizeof *entries) : NULL;
            if (!entries) return -1;
            roster->entries = entries;
            roster->room = (uint32_t)room;
        }
        place = roster->free;
        if (place != POLICY_NONE) roster->free = roster->entries[place].next;
        else place = roster->used++;
        roster->entries[place] = (policy_entry){0, 0, POLICY_NONE, FAITHFUL, {0}};
        memcpy(roster->entries[place].key, key, POLICY_KEY);
        policy_hash_add(&roster->hash, id_of_key(key), place);
        roster->count++;
    }
    policy_entry *entry = roster->entries + place;
    roster->tokens += (uint64_t)tokens - entry->tokens;
    entry->nbytes = nbytes;
    entry->tokens = tokens;
    if (!followed) stray_first(roster, place);
    return 0;
}

void policy_roster_drop(policy_roster *roster, uint32_t place) {
    policy_entry *entry = roster->entries + place;
    come_back(roster, place);
    policy_hash_remove(&roster->hash, entry_id(roster, place), place, roster, entry_id);
    roster->tokens -= entry->tokens;
    roster->count--;
    entry->next = roster->free;
    roster->free = place;
}

void policy_roster_came(policy_roster *roster, uint64_t id) {
    uint32_t place = policy_roster_find_id(roster, id);
    if (place != POLICY_NONE) come_back(roster, place);
}

void policy_roster_left(policy_roster *roster, uint64_t id) {
    uint32_t place = policy_roster_find_id(roster, id);
    if (place != POLICY_NONE) stray(roster, place);
}

int policy_roster_follow(policy_roster *roster, const policy_shadow *before, const policy_shadow *next) {
    uint64_t *ids = malloc(((size_t)before->count + 1) * sizeof *ids);
    ptrdiff_t n = ids ? policy_order(before, ids, before->count) : -1;
    if (n >= 0) {
        for (uint32_t place = roster->head, behind; place != POLICY_NONE; place = behind) {
            behind = roster->entries[place].next;
            if (policy_holds(next, entry_id(roster, place))) come_back(roster, place);
        }
        for (ptrdiff_t i = 0; i < n; i++)
            if (!policy_holds(next, ids[i])) policy_roster_left(roster, ids[i]);
    }
    free(ids);
    return n < 0 ? -1 : 0;
}
