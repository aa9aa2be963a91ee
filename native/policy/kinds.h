/* policy/kinds.h - what the policies do differently: the steps of a shadow that depend on its kind. */
#ifndef CTXREUSE_POLICY_KINDS_H
#define CTXREUSE_POLICY_KINDS_H

#include "policy.h"

/* Room for what `more` blocks may need besides the arena; -1 without memory. */
int policy_kind_reserve(policy_shadow *shadow, uint32_t more);
void policy_kind_start(policy_shadow *shadow, uint32_t place, uint32_t start, uint32_t tokens);
void policy_kind_use(policy_shadow *shadow, uint32_t place);
/* Before a block leaves (`place` is still counted): what is to be remembered of it; after it has; its parent is a leaf. */
uint32_t policy_kind_remove(policy_shadow *shadow, uint32_t place);
void policy_kind_gone(policy_shadow *shadow, uint32_t memo, uint64_t id);
void policy_kind_leaf(policy_shadow *shadow, uint32_t place);
/* True for kinds whose next victim depends on the last. */
int policy_kind_restless(const policy_shadow *shadow);
/* The first leaf to go that `step` did not use, POLICY_NONE if there is none; GDSF parks heads on the way. */
uint32_t policy_kind_victim(policy_shadow *shadow);
/* Static kinds: the places in order. Start with POLICY_NONE. */
uint32_t policy_kind_after(const policy_shadow *shadow, uint32_t place);
/* Restless kinds: leaves in the order of eviction; how many. */
size_t policy_kind_leaves(const policy_shadow *shadow, uint32_t *out, size_t limit);

#endif
