/* policy/arena.h - blocks that several shadows know: id, parent and size once, and which of them have each.
 *
 * The shadows of an adaptive policy see the same requests and have much the same blocks. So these lie in one arena, found
 * by one hash, and a shadow keeps beside it only what is its own, in columns by place.
 */
#ifndef CTXREUSE_POLICY_ARENA_H
#define CTXREUSE_POLICY_ARENA_H

#include "hash.h"

typedef struct policy_block {
    uint32_t low, high; /* the id */
    uint32_t parent;    /* place; where no shadow has the block, the next such */
    uint32_t nbytes;    /* as the first shadow took it in */
} policy_block;

/* Shadows of an arena, and the bit of a block that the running request spares. */
enum { POLICY_SEATS = 7, POLICY_KEPT = 1 << POLICY_SEATS };

typedef struct policy_arena {
    policy_block *blocks;
    uint8_t *owners; /* by place: bits of the shadows that have the block, ghosts included, and POLICY_KEPT */
    uint32_t room, used, free;
    uint32_t seats; /* bits that are taken */
    policy_hash hash;
} policy_arena;

static inline uint64_t policy_id(const policy_block *block) { return (uint64_t)block->high << 32 | block->low; }

/* The id of a block of an arena, for its hash. */
static inline uint64_t policy_block_id(const void *arena, uint32_t place) {
    return policy_id(((const policy_arena *)arena)->blocks + place);
}

policy_arena *policy_arena_new(void); /* NULL without memory */
/* The bit of a shadow from now on; 0 if all are taken. */
uint8_t policy_arena_join(policy_arena *arena);
/* A shadow goes; with the last one the arena is freed. */
void policy_arena_leave(policy_arena *arena, uint8_t seat);
/* Room for `more` blocks; -1 without memory. */
int policy_arena_reserve(policy_arena *arena, uint32_t more);
/* The block of that id which the shadow has, ghosts included; POLICY_NONE if there is none. */
uint32_t policy_arena_find(const policy_arena *arena, uint8_t seat, uint64_t id);
/* The shadow has a block from now on, for which there is room: its place. A size that another one knows stays. */
uint32_t policy_arena_take(policy_arena *arena, uint8_t seat, uint64_t id, uint32_t parent, uint32_t nbytes);
/* The shadow has it no longer. */
void policy_arena_drop(policy_arena *arena, uint8_t seat, uint32_t place);
/* Forget all blocks, of which no shadow has any. */
void policy_arena_clear(policy_arena *arena);
size_t policy_arena_bytes(const policy_arena *arena);
/* NULL, or what is wrong inside. */
const char *policy_arena_check(const policy_arena *arena);

#endif
