/* policy/hash.c - the hash from ids to places, and ghosts. */
#include "hash.h"

#include <stdlib.h>
#include <string.h>

/* Slots that are looked at before a lookup. */
enum { NEAR = 16 };

/* Ids may be consecutive numbers (the finalizer of SplitMix64). */
static uint64_t mixed(uint64_t x) {
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Any size will do, so that the table need not double. */
static uint32_t home(const policy_hash *hash, uint64_t id) { return (uint32_t)((mixed(id) >> 32) * hash->size >> 32); }

static uint32_t after(const policy_hash *hash, uint32_t at) { return at + 1 == hash->size ? 0 : at + 1; }

static uint32_t distance(const policy_hash *hash, uint32_t from, uint32_t to) {
    return to >= from ? to - from : to + (hash->size - from);
}

/* A distance as a slot holds it. */
static uint32_t capped(const policy_hash *hash, uint32_t far) {
    uint32_t most = UINT32_MAX >> hash->bits;
    return far < most ? far : most;
}

static uint32_t slot_of(const policy_hash *hash, uint32_t place, uint32_t far) {
    return place | capped(hash, far) << hash->bits;
}

uint32_t policy_hash_start(const policy_hash *hash, uint64_t id) { return hash->size ? home(hash, id) : 0; }

uint32_t policy_hash_next(const policy_hash *hash, uint64_t id, uint32_t *at, const void *owner, policy_id_fn id_of) {
    if (!hash->size) return POLICY_NONE;
    for (uint32_t far = distance(hash, home(hash, id), *at);; far++) {
        uint32_t slot = hash->slots[*at], place = policy_hash_at(hash, *at);
        if (place == POLICY_NONE) return POLICY_NONE;
        *at = after(hash, *at);
        if (slot >> hash->bits == capped(hash, far) && id_of(owner, place) == id) return place;
    }
}

void policy_hash_warm(const policy_hash *hash, const uint64_t *ids, size_t n, const void *all, size_t item) {
    if (!hash->size) return;
    for (size_t i = 0; i < n; i++) __builtin_prefetch(hash->slots + home(hash, ids[i]));
    for (size_t i = 0; i < n; i++) {
        uint32_t at = home(hash, ids[i]);
        for (uint32_t far = 0; far < NEAR && hash->slots[at] != POLICY_NONE; far++, at = after(hash, at))
            if (hash->slots[at] >> hash->bits == capped(hash, far))
                __builtin_prefetch((const char *)all + policy_hash_at(hash, at) * item);
    }
}

/* 2**64 by the golden ratio: it spreads numbers that follow each other. */
int policy_hash_sampled(uint64_t id, uint32_t bits) {
    return !((uint32_t)(id * UINT64_C(0x9e3779b97f4a7c15) >> 32) & ((UINT32_C(1) << bits) - 1));
}

void policy_hash_add(policy_hash *hash, uint64_t id, uint32_t place) {
    uint32_t at = home(hash, id), far = 0;
    for (; hash->slots[at] != POLICY_NONE; far++) at = after(hash, at);
    hash->slots[at] = slot_of(hash, place, far);
    hash->count++;
}

int policy_hash_reserve(policy_hash *hash, uint32_t more, const void *owner, policy_id_fn id_of) {
    uint64_t need = ((uint64_t)hash->count + more) * 5 / 4 + 8;
    if (need <= hash->size) return 0;
    need += need / 32;
    /* A place is below the size, and one bit at least is for the distance. */
    if (need > UINT32_C(1) << 31) return -1;
    policy_hash grown = {malloc((size_t)need * sizeof *grown.slots), (uint32_t)need, 0, 1};
    if (!grown.slots) return -1;
    while (UINT64_C(1) << grown.bits < need) grown.bits++;
    memset(grown.slots, 0xff, (size_t)need * sizeof *grown.slots);
    for (uint32_t at = 0; at < hash->size; at++) {
        uint32_t place = policy_hash_at(hash, at);
        if (place != POLICY_NONE) policy_hash_add(&grown, id_of(owner, place), place);
    }
    free(hash->slots);
    *hash = grown;
    return 0;
}

int policy_hash_copy(policy_hash *hash, const policy_hash *from) {
    uint32_t *slots = realloc(hash->slots, (size_t)from->size * sizeof *slots + 1);
    if (!slots) return -1;
    memcpy(slots, from->slots, (size_t)from->size * sizeof *slots);
    *hash = *from;
    hash->slots = slots;
    return 0;
}

void policy_hash_remove(policy_hash *hash, uint64_t id, uint32_t place, const void *owner, policy_id_fn id_of) {
    uint32_t hole = home(hash, id);
    while (policy_hash_at(hash, hole) != place) hole = after(hash, hole);
    /* Entries behind the hole move up if that brings them no further than where their ids would have them. */
    for (uint32_t at = after(hash, hole); hash->slots[at] != POLICY_NONE; at = after(hash, at)) {
        uint32_t moved = policy_hash_at(hash, at), far = hash->slots[at] >> hash->bits, gap = distance(hash, hole, at);
        if (far == UINT32_MAX >> hash->bits) far = distance(hash, home(hash, id_of(owner, moved)), at);
        if (far < gap) continue;
        hash->slots[hole] = slot_of(hash, moved, far - gap);
        hole = at;
    }
    hash->slots[hole] = POLICY_NONE;
    hash->count--;
}

/* ---- Ghosts ----------------------------------------------------------------------------------------------------- */

static uint64_t ghost_id(const void *owner, uint32_t place) {
    const policy_ghost *ghost = ((const policy_ghosts *)owner)->all + place;
    return (uint64_t)ghost->high << 32 | ghost->low;
}

int policy_ghosts_reserve(policy_ghosts *ghosts, uint32_t more) {
    uint64_t held = (uint64_t)ghosts->count[0] + ghosts->count[1];
    if (policy_hash_reserve(&ghosts->hash, more, ghosts, ghost_id) < 0) return -1;
    if (held + more <= ghosts->room) return 0;
    uint64_t room = held + more + held / 16;
    if (room >= POLICY_NONE) return -1;
    policy_ghost *all = realloc(ghosts->all, (size_t)room * sizeof *all);
    if (!all) return -1;
    ghosts->all = all;
    uint8_t *note = realloc(ghosts->note, (size_t)room);
    if (!note) return -1;
    ghosts->note = note;
    if (!ghosts->room) {
        ghosts->free = POLICY_NONE;
        for (int queue = 0; queue < 2; queue++) ghosts->head[queue] = ghosts->tail[queue] = POLICY_NONE;
    }
    ghosts->room = (uint32_t)room;
    return 0;
}

uint32_t policy_ghosts_find(const policy_ghosts *ghosts, uint64_t id) {
    uint32_t at = policy_hash_start(&ghosts->hash, id);
    return policy_hash_next(&ghosts->hash, id, &at, ghosts, ghost_id);
}

void policy_ghosts_take(policy_ghosts *ghosts, uint32_t place) {
    policy_ghost *ghost = ghosts->all + place;
    int queue = ghosts->count[1] && ghosts->note[place] == 1;
    policy_hash_remove(&ghosts->hash, ghost_id(ghosts, place), place, ghosts, ghost_id);
    if (ghost->prev != POLICY_NONE) ghosts->all[ghost->prev].next = ghost->next;
    else ghosts->head[queue] = ghost->next;
    if (ghost->next != POLICY_NONE) ghosts->all[ghost->next].prev = ghost->prev;
    else ghosts->tail[queue] = ghost->prev;
    ghosts->count[queue]--;
    ghost->next = ghosts->free;
    ghosts->free = place;
}

void policy_ghosts_push(policy_ghosts *ghosts, uint64_t id, int queue, uint32_t note) {
    uint32_t place = policy_ghosts_find(ghosts, id);
    if (place != POLICY_NONE) policy_ghosts_take(ghosts, place);
    place = ghosts->free;
    if (place != POLICY_NONE) ghosts->free = ghosts->all[place].next;
    else place = ghosts->used++;
    ghosts->all[place] = (policy_ghost){(uint32_t)id, (uint32_t)(id >> 32), ghosts->tail[queue], POLICY_NONE};
    ghosts->note[place] = (uint8_t)note;
    if (ghosts->tail[queue] != POLICY_NONE) ghosts->all[ghosts->tail[queue]].next = place;
    else ghosts->head[queue] = place;
    ghosts->tail[queue] = place;
    ghosts->count[queue]++;
    policy_hash_add(&ghosts->hash, id, place);
}

void policy_ghosts_pop(policy_ghosts *ghosts, int queue) { policy_ghosts_take(ghosts, ghosts->head[queue]); }

size_t policy_ghosts_bytes(const policy_ghosts *ghosts) {
    return (size_t)ghosts->room * (sizeof(policy_ghost) + 1) + (size_t)ghosts->hash.size * sizeof(uint32_t);
}

void policy_ghosts_free(policy_ghosts *ghosts) {
    free(ghosts->all);
    free(ghosts->note);
    free(ghosts->hash.slots);
}
