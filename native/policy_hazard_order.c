/* policy_hazard_order.c - which blocks the hazard policy would let go of, the first to go first. */
#include <stdlib.h>

#include "policy_hazard.h"

enum { MOST_NAMED = 4096 };

/* While an order is made, blocks that were named are no longer among their parents' children. */
typedef struct naming {
    policy_shadow *shadow;
    size_t found, most;
    uint64_t need;
    int failed;
} naming;

/* 0 when enough is named. */
static int name(naming *order, uint32_t place) {
    policy_hazard *hazard = order->shadow->hazard;
    const policy_block *block = order->shadow->blocks + place;
    if (order->found == hazard->out_room) {
        size_t room = hazard->out_room * 2 + 64;
        uint32_t *out = realloc(hazard->out, room * sizeof *out);
        order->failed = !out;
        if (!out) return 0;
        hazard->out = out;
        hazard->out_room = room;
    }
    hazard->out[order->found++] = place;
    if (block->parent != POLICY_NONE) order->shadow->blocks[block->parent].children--;
    order->need -= block->nbytes < order->need ? block->nbytes : order->need;
    return order->need && order->found < order->most;
}

/* Blocks of a run from its back, and of what then is free above it, up to one that has children. */
static int walk(naming *order, uint32_t place) {
    const policy_hazard *hazard = order->shadow->hazard;
    const policy_block *blocks = order->shadow->blocks;
    for (;;) {
        uint32_t at = blocks[place].data, above = blocks[place].parent;
        if (blocks[place].children) return 1;
        if (!name(order, place)) return 0;
        if (above == POLICY_NONE) return 1;
        const policy_block *next = blocks + above;
        if (next->data != at) {
            if (next->data == POLICY_NONE || hazard_is_fresh(next)) return 1;
            /* A run whose turn has not come yet waits for it. */
            if (hazard->runs[next->data].level >= 0 && !hazard->runs[next->data].seen) return 1;
        }
        place = above;
    }
}

static int walk_levels(naming *order) {
    policy_hazard *hazard = order->shadow->hazard;
    for (int level = -1; (level = hazard_level_from(hazard, level + 1)) < HAZARD_LEVELS;)
        for (uint32_t at = hazard->levels[level].head; at != POLICY_NONE; at = hazard->runs[at].link[HAZARD_BY_LEVEL].next) {
            hazard->runs[at].seen = 1;
            if (!walk(order, hazard->runs[at].back)) return 0;
        }
    return 1;
}

static void walk_fresh(naming *order) {
    const policy_block *blocks = order->shadow->blocks;
    const policy_hazard *hazard = order->shadow->hazard;
    for (uint32_t place = hazard->fresh.tail; place != POLICY_NONE; place = blocks[place].prev) {
        if (!name(order, place)) return;
        uint32_t above = blocks[place].parent;
        if (above == POLICY_NONE || blocks[above].data == POLICY_NONE || hazard_is_fresh(blocks + above)) continue;
        if (!walk(order, above)) return;
    }
}

static void unsee(policy_hazard *hazard) {
    for (int level = -1; (level = hazard_level_from(hazard, level + 1)) < HAZARD_LEVELS;)
        for (uint32_t at = hazard->levels[level].head; at != POLICY_NONE; at = hazard->runs[at].link[HAZARD_BY_LEVEL].next) {
            if (!hazard->runs[at].seen) return;
            hazard->runs[at].seen = 0;
        }
}

ptrdiff_t policy_hazard_order(policy_shadow *shadow, uint64_t need, size_t most) {
    naming order = {shadow, 0, most, need, 0};
    if (!need || !most) return 0;
    if (walk_levels(&order)) walk_fresh(&order);
    unsee(shadow->hazard);
    for (size_t i = 0; i < order.found; i++) {
        uint32_t parent = shadow->blocks[shadow->hazard->out[i]].parent;
        if (parent != POLICY_NONE) shadow->blocks[parent].children++;
    }
    return order.failed && !order.found ? -1 : (ptrdiff_t)order.found;
}

const uint32_t *policy_hazard_named(const policy_shadow *shadow) { return shadow->hazard->out; }

void policy_hazard_unname(policy_shadow *shadow) {
    if (shadow->hazard->out_room <= MOST_NAMED) return;
    free(shadow->hazard->out);
    shadow->hazard->out = NULL;
    shadow->hazard->out_room = 0;
}
