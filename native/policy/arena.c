/* policy/arena.c - blocks that several shadows know. */
#include "arena.h"

#include <stdlib.h>
#include <string.h>

enum { ALL = POLICY_KEPT - 1 };

policy_arena *policy_arena_new(void) {
    policy_arena *arena = calloc(1, sizeof *arena);
    if (arena) arena->free = POLICY_NONE;
    return arena;
}

uint8_t policy_arena_join(policy_arena *arena) {
    uint32_t left = ~arena->seats & ALL, seat = left & (~left + 1);
    arena->seats |= seat;
    return (uint8_t)seat;
}

void policy_arena_leave(policy_arena *arena, uint8_t seat) {
    arena->seats &= ~(uint32_t)seat;
    if (!arena->seats) {
        free(arena->blocks);
        free(arena->owners);
        free(arena->hash.slots);
        free(arena);
        return;
    }
    for (uint32_t place = 0; place < arena->used; place++)
        if (arena->owners[place] & seat) policy_arena_drop(arena, seat, place);
}

int policy_arena_reserve(policy_arena *arena, uint32_t more) {
    if (policy_hash_reserve(&arena->hash, more, arena, policy_block_id) < 0) return -1;
    uint64_t need = (uint64_t)arena->hash.count + more;
    if (need <= arena->room) return 0;
    need += need / 32;
    if (need >= POLICY_NONE) return -1;
    policy_block *blocks = realloc(arena->blocks, (size_t)need * sizeof *blocks);
    if (!blocks) return -1;
    arena->blocks = blocks;
    uint8_t *owners = realloc(arena->owners, (size_t)need);
    if (!owners) return -1;
    arena->owners = owners;
    arena->room = (uint32_t)need;
    return 0;
}

uint32_t policy_arena_find(const policy_arena *arena, uint8_t seat, uint64_t id) {
    uint32_t at = policy_hash_start(&arena->hash, id), place;
    do place = policy_hash_next(&arena->hash, id, &at, arena, policy_block_id);
    while (place != POLICY_NONE && !(arena->owners[place] & seat));
    return place;
}

uint32_t policy_arena_take(policy_arena *arena, uint8_t seat, uint64_t id, uint32_t parent, uint32_t nbytes) {
    uint32_t at = policy_hash_start(&arena->hash, id), place;
    do place = policy_hash_next(&arena->hash, id, &at, arena, policy_block_id);
    while (place != POLICY_NONE && arena->blocks[place].parent != parent);
    if (place == POLICY_NONE) {
        place = arena->free;
        if (place != POLICY_NONE) arena->free = arena->blocks[place].parent;
        else place = arena->used++;
        arena->blocks[place] = (policy_block){(uint32_t)id, (uint32_t)(id >> 32), parent, nbytes};
        arena->owners[place] = 0;
        policy_hash_add(&arena->hash, id, place);
    }
    if (!(arena->owners[place] & ALL & ~(uint32_t)seat)) arena->blocks[place].nbytes = nbytes;
    arena->owners[place] |= seat;
    return place;
}

void policy_arena_drop(policy_arena *arena, uint8_t seat, uint32_t place) {
    arena->owners[place] &= (uint8_t)~seat;
    if (arena->owners[place] & ALL) return;
    policy_hash_remove(&arena->hash, policy_block_id(arena, place), place, arena, policy_block_id);
    arena->blocks[place].parent = arena->free;
    arena->free = place;
}

void policy_arena_clear(policy_arena *arena) {
    free(arena->hash.slots);
    arena->hash = (policy_hash){0};
    arena->used = 0;
    arena->free = POLICY_NONE;
}

size_t policy_arena_bytes(const policy_arena *arena) {
    return sizeof *arena + arena->room * (sizeof *arena->blocks + 1) + arena->hash.size * sizeof *arena->hash.slots;
}

const char *policy_arena_check(const policy_arena *arena) {
    uint32_t filed = 0, free = 0;
    for (uint32_t place = 0; place < arena->used; place++) {
        uint8_t owners = arena->owners[place];
        if (owners & POLICY_KEPT) return "a block is spared by no request";
        if (owners & ~arena->seats) return "a shadow that is not there has a block";
        if (!owners) continue;
        filed++;
    }
    if (filed != arena->hash.count) return "blocks are filed wrongly";
    for (uint32_t place = arena->free; place != POLICY_NONE && free <= arena->used; place = arena->blocks[place].parent) free++;
    return free + filed != arena->used ? "a place is neither free nor filed" : NULL;
}
