/* policy/naming.c - orders of eviction of the policies that decide by chances: hazard and pauses. */
#include <stdlib.h>

#include "hazard.h"
#include "pauses.h"

/* Room for names that is kept. */
enum { MOST_NAMED = 4096 };

int policy_name(policy_naming *order, uint32_t place) {
    policy_shadow *shadow = order->shadow;
    const policy_block *block = shadow->arena->blocks + place;
    if (order->found == shadow->named_room) {
        size_t room = shadow->named_room * 2 + 64;
        uint32_t *named = realloc(shadow->named, room * sizeof *named);
        order->failed = !named;
        if (!named) return 0;
        shadow->named = named;
        shadow->named_room = room;
    }
    shadow->named[order->found++] = place;
    if (block->parent != POLICY_NONE) policy_child_left(shadow, block->parent);
    order->need -= block->nbytes < order->need ? block->nbytes : order->need;
    return order->need && order->found < order->most;
}

ptrdiff_t policy_make_order(policy_shadow *shadow, uint64_t need, size_t most) {
    policy_naming order = {shadow, 0, most, need, 0};
    if (!need || !most) return 0;
    (shadow->hazard ? policy_hazard_order : policy_pauses_order)(&order);
    for (size_t i = 0; i < order.found; i++) {
        uint32_t parent = policy_parent(shadow, shadow->named[i]);
        if (parent != POLICY_NONE) policy_child_came(shadow, parent);
    }
    return order.failed && !order.found ? -1 : (ptrdiff_t)order.found;
}

void policy_unname(policy_shadow *shadow) {
    if (shadow->named_room <= MOST_NAMED) return;
    free(shadow->named);
    shadow->named = NULL;
    shadow->named_room = 0;
}
