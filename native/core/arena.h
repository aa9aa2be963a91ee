/* core/arena.h - one piece of memory cut into parts aligned to 64 bytes: measured first, then handed out.
 *
 *   arena a = {NULL, 0};
 *   lay_out(&a, ...);             every cut gives NULL and is counted
 *   if (!arena_begin(&a)) ...     no memory
 *   lay_out(&a, ...);             the same cuts give their parts; a.at is to be freed
 */
#ifndef CTXREUSE_ARENA_H
#define CTXREUSE_ARENA_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct arena {
    uint8_t *at;
    size_t used;
} arena;

static inline void *cut(arena *a, size_t count, size_t item) {
    void *part = a->at ? a->at + a->used : NULL;
    a->used += (count * item + 63) / 64 * 64;
    return part;
}

static inline int arena_begin(arena *a) {
    a->at = aligned_alloc(64, a->used);
    a->used = 0;
    return a->at != NULL;
}

#endif
