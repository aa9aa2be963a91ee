/* policy/hazard_order.c - which blocks the hazard policy would evict, in that order. */
#include "hazard.h"

/* Blocks of a run from its back, and of what then is free above it, up to one that has children. */
static int walk(policy_naming *order, uint32_t place) {
    const policy_shadow *shadow = order->shadow;
    const policy_hazard *hazard = shadow->hazard;
    for (;;) {
        uint32_t at = shadow->data[place], above = policy_parent(shadow, place);
        if (shadow->children[place]) return 1;
        if (!policy_name(order, place)) return 0;
        if (above == POLICY_NONE) return 1;
        uint32_t next = shadow->data[above];
        if (next != at) {
            if (next == POLICY_NONE || hazard_is_fresh(shadow, above)) return 1;
            /* A run whose turn has not come yet waits for it. */
            if (hazard->runs[next].level >= 0 && !hazard->runs[next].seen) return 1;
        }
        place = above;
    }
}

static int walk_levels(policy_naming *order) {
    policy_hazard *hazard = order->shadow->hazard;
    for (int level = -1; (level = hazard_level_from(hazard, level + 1)) < HAZARD_LEVELS;)
        for (uint32_t at = hazard->levels[level].head; at != POLICY_NONE; at = hazard->runs[at].link[HAZARD_BY_LEVEL].next) {
            hazard->runs[at].seen = 1;
            if (!walk(order, hazard->runs[at].back)) return 0;
        }
    return 1;
}

static void walk_fresh(policy_naming *order) {
    const policy_shadow *shadow = order->shadow;
    for (uint32_t place = shadow->hazard->fresh.tail; place != POLICY_NONE; place = shadow->links[place].prev) {
        if (!policy_name(order, place)) return;
        uint32_t above = policy_parent(shadow, place);
        if (above == POLICY_NONE || shadow->data[above] == POLICY_NONE || hazard_is_fresh(shadow, above)) continue;
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

void policy_hazard_order(policy_naming *order) {
    if (walk_levels(order)) walk_fresh(order);
    unsee(order->shadow->hazard);
}
