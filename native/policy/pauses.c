/* policy/pauses.c - the pauses policy: blocks go by sessions, each session's from its end; the same as tests/oracle/policy/pauses.py.
 *
 * A leaf where no session ends is an orphan, in the shadow's first queue. Any other block is in no queue: `prev` is then the
 * first session whose tip it is, and `next` how many there are and ENDS, or POLICY_NONE.
 */
#include "pauses.h"

#include <stdlib.h>

/* Without lookups, a path that is used again within these seconds of its pause is the end of the same request. */
static const double TAIL = 0.2;
/* Sixteenths of a path whose blocks are its session's anchors. */
static const uint32_t SHARES[PAUSES_ANCHORS] = {16, 15, 12};
/* Labels that are hints. */
enum { FIRST_HINT = 24 };

static policy_queue *orphans_of(policy_shadow *shadow) { return shadow->queues; }

/* Places are less. */
static const uint32_t ENDS = UINT32_C(1) << 31;

/* How many sessions end there. */
static uint32_t ends_of(const policy_shadow *shadow, uint32_t place) {
    uint32_t next = shadow->links[place].next;
    return next >= ENDS && next != POLICY_NONE ? next - ENDS : 0;
}

static void set_ends(policy_shadow *shadow, uint32_t place, uint32_t count) {
    shadow->links[place].next = count ? count + ENDS : POLICY_NONE;
}

static int is_orphan(const policy_shadow *shadow, uint32_t place) { return !shadow->children[place] && !ends_of(shadow, place); }

static void orphan_take(policy_shadow *shadow, uint32_t place) {
    policy_queue_take(shadow, orphans_of(shadow), place);
    set_ends(shadow, place, 0);
}

/* ---- Room ------------------------------------------------------------------------------------------------------- */

policy_pauses *policy_pauses_new(void) {
    policy_pauses *pauses = calloc(1, sizeof *pauses);
    if (!pauses || pauses_table_start(&pauses->table) < 0) {
        free(pauses);
        return NULL;
    }
    pauses->free = POLICY_NONE;
    pauses->most = PAUSES_MOST;
    return pauses;
}

void policy_pauses_free(policy_pauses *pauses) {
    if (!pauses) return;
    free(pauses->table.rows);
    free(pauses->sessions);
    free(pauses->ranks);
    free(pauses->sorted);
    free(pauses->heap);
    free(pauses->anchors.slots);
    free(pauses);
}

size_t policy_pauses_bytes(const policy_pauses *pauses) {
    size_t session = sizeof *pauses->sessions + 2 * sizeof *pauses->ranks + sizeof *pauses->heap;
    return sizeof *pauses + pauses->table.room * sizeof *pauses->table.rows + pauses->room * session +
           pauses->anchors.size * sizeof(uint32_t);
}

static uint64_t anchor_id(const void *owner, uint32_t place) {
    return ((const policy_pauses *)owner)->sessions[place / PAUSES_ANCHORS].anchors[place % PAUSES_ANCHORS];
}

static int grow(void **all, uint32_t room, size_t item) {
    void *grown = realloc(*all, room * item);
    if (grown) *all = grown;
    return grown ? 0 : -1;
}

int policy_pauses_reserve(policy_pauses *pauses) {
    if (pauses->count + 2 <= pauses->room || pauses->room == pauses->most) return 0;
    uint32_t room = pauses->room + pauses->room / 2 + 16;
    if (room > pauses->most) room = pauses->most;
    if (grow((void **)&pauses->sessions, room, sizeof *pauses->sessions) < 0) return -1;
    if (grow((void **)&pauses->ranks, room, sizeof *pauses->ranks) < 0) return -1;
    if (grow((void **)&pauses->sorted, room, sizeof *pauses->sorted) < 0) return -1;
    if (grow((void **)&pauses->heap, room, sizeof *pauses->heap) < 0) return -1;
    /* All at once: places in the hash are below its size. */
    if (policy_hash_reserve(&pauses->anchors, room * PAUSES_ANCHORS - pauses->anchors.count, pauses, anchor_id) < 0) return -1;
    pauses->room = room;
    return 0;
}

/* ---- Anchors and tips ------------------------------------------------------------------------------------------- */

static uint32_t anchor(const policy_pauses *pauses, uint64_t id) {
    uint32_t at = policy_hash_start(&pauses->anchors, id);
    return policy_hash_next(&pauses->anchors, id, &at, pauses, anchor_id);
}

static void unname(policy_pauses *pauses, uint32_t place) {
    policy_hash_remove(&pauses->anchors, anchor_id(pauses, place), place, pauses, anchor_id);
    pauses->sessions[place / PAUSES_ANCHORS].named &= (uint8_t)~(1u << place % PAUSES_ANCHORS);
}

static void unname_all(policy_pauses *pauses, uint32_t slot) {
    for (uint32_t i = 0; i < PAUSES_ANCHORS; i++)
        if (pauses->sessions[slot].named >> i & 1) unname(pauses, slot * PAUSES_ANCHORS + i);
}

/* An id is the anchor of the session that had it last. */
static void name(policy_pauses *pauses, uint32_t slot, const uint64_t *ids, size_t n) {
    pauses_session *session = pauses->sessions + slot;
    unname_all(pauses, slot);
    for (uint32_t i = 0; i < PAUSES_ANCHORS; i++) {
        uint64_t id = ids[(n * SHARES[i] - 1) / 16];
        uint32_t other = anchor(pauses, id);
        if (other != POLICY_NONE) unname(pauses, other);
        session->anchors[i] = id;
        session->named |= (uint8_t)(1u << i);
        policy_hash_add(&pauses->anchors, id, slot * PAUSES_ANCHORS + i);
    }
}

/* The session ends at a block, or nowhere. */
static void arrive(policy_shadow *shadow, uint32_t slot, uint32_t tip) {
    pauses_session *sessions = shadow->pauses->sessions, *session = sessions + slot;
    session->tip = tip;
    if (tip == POLICY_NONE) return;
    if (is_orphan(shadow, tip)) orphan_take(shadow, tip);
    policy_link *link = shadow->links + tip;
    uint32_t ends = ends_of(shadow, tip);
    session->prev = POLICY_NONE;
    session->next = ends ? link->prev : POLICY_NONE;
    if (ends) sessions[link->prev].prev = slot;
    link->prev = slot;
    set_ends(shadow, tip, ends + 1);
}

static void leave(policy_shadow *shadow, uint32_t slot) {
    pauses_session *sessions = shadow->pauses->sessions, *session = sessions + slot;
    if (session->tip == POLICY_NONE) return;
    if (session->prev != POLICY_NONE) sessions[session->prev].next = session->next;
    else shadow->links[session->tip].prev = session->next;
    if (session->next != POLICY_NONE) sessions[session->next].prev = session->prev;
    set_ends(shadow, session->tip, ends_of(shadow, session->tip) - 1);
    if (is_orphan(shadow, session->tip)) policy_queue_push(shadow, orphans_of(shadow), session->tip);
    session->tip = POLICY_NONE;
}

/* A session that ends at `tip` has `place` in its context: a use up to there leaves nothing behind. Else what many fetch
 * parts of would be orphans after each part. */
static int reaches(const policy_shadow *shadow, uint32_t tip, uint32_t place) {
    if (tip != place && !shadow->children[place]) return 0;
    while (tip != POLICY_NONE && tip != place) tip = policy_parent(shadow, tip);
    return tip == place;
}

/* ---- Prompts, uses and pauses ----------------------------------------------------------------------------------- */

/* The session whose path this is, of which there is room for one more; *fresh: it is new, and has begun. */
static uint32_t session_of(policy_shadow *shadow, const uint64_t *ids, size_t n, double now, int *fresh) {
    policy_pauses *pauses = shadow->pauses;
    uint32_t place = POLICY_NONE;
    for (size_t i = n; i-- && place == POLICY_NONE;) place = anchor(pauses, ids[i]);
    *fresh = place == POLICY_NONE;
    if (!*fresh) return place / PAUSES_ANCHORS;
    if (pauses->count >= pauses->most) {
        uint32_t least = pauses_least(pauses, now);
        leave(shadow, least);
        unname_all(pauses, least);
        pauses_close(pauses, least);
    }
    uint32_t slot = pauses_open(pauses);
    pauses_begin(pauses, slot, 1, now);
    return slot;
}

void policy_pauses_lookup(policy_shadow *shadow, const uint64_t *ids, size_t n, double now) {
    policy_pauses *pauses = shadow->pauses;
    int fresh;
    uint32_t slot = session_of(shadow, ids, n, now, &fresh);
    pauses->has_lookups = 1;
    if (!fresh) pauses_begin(pauses, slot, 0, now);
    name(pauses, slot, ids, n);
}

void policy_pauses_use(policy_shadow *shadow, const uint64_t *ids, size_t n, uint32_t tip, double now) {
    policy_pauses *pauses = shadow->pauses;
    int fresh;
    uint32_t slot = session_of(shadow, ids, n, now, &fresh);
    pauses_session *session = pauses->sessions + slot;
    int again = pauses->has_lookups || (pauses->has_pauses && (session->active || now - pauses->ranks[slot].since < TAIL));
    if (!fresh && !again) pauses_begin(pauses, slot, 0, now);
    if (!reaches(shadow, session->tip, tip)) {
        leave(shadow, slot);
        arrive(shadow, slot, tip);
    }
    name(pauses, slot, ids, n);
}

void policy_pauses_mark(policy_shadow *shadow, uint64_t id, uint32_t label, double now) {
    policy_pauses *pauses = shadow->pauses;
    uint32_t place = anchor(pauses, id), slot = place / PAUSES_ANCHORS;
    if (place == POLICY_NONE) return;
    if (label >= FIRST_HINT && label < FIRST_HINT + PAUSES_HINTS) {
        pauses_hint(pauses, slot, label - FIRST_HINT, now);
        return;
    }
    pauses->has_pauses = 1;
    pauses_pause(pauses, slot, label, now);
}

/* ---- Coming and going ------------------------------------------------------------------------------------------- */

void policy_pauses_hold(policy_shadow *shadow, uint32_t place) {
    uint32_t above = policy_parent(shadow, place);
    policy_queue_push(shadow, orphans_of(shadow), place);
    /* Its parent's first child: that was an orphan, if no session ends there. */
    if (above != POLICY_NONE && shadow->children[above] == 1 && !ends_of(shadow, above)) orphan_take(shadow, above);
}

void policy_pauses_remove(policy_shadow *shadow, uint32_t place) {
    if (is_orphan(shadow, place)) {
        orphan_take(shadow, place);
        return;
    }
    for (uint32_t left = ends_of(shadow, place); left; left--) {
        uint32_t slot = shadow->links[place].prev;
        shadow->links[place].prev = shadow->pauses->sessions[slot].next;
        arrive(shadow, slot, policy_parent(shadow, place));
    }
}

void policy_pauses_leaf(policy_shadow *shadow, uint32_t place) {
    if (!ends_of(shadow, place)) policy_queue_push(shadow, orphans_of(shadow), place);
}

/* ---- Order ------------------------------------------------------------------------------------------------------ */

/* Blocks from the end of a context up to one that has children, or where a session ends whose turn has not come. */
static int climb(policy_naming *order, uint32_t place) {
    const policy_shadow *shadow = order->shadow;
    for (; place != POLICY_NONE && is_orphan(shadow, place); place = policy_parent(shadow, place))
        if (!policy_name(order, place)) return 0;
    return 1;
}

static int climb_orphans(policy_naming *order) {
    const policy_link *links = order->shadow->links;
    for (uint32_t place = orphans_of(order->shadow)->head; place != POLICY_NONE; place = links[place].next)
        if (!climb(order, place)) return 0;
    return 1;
}

void policy_pauses_order(policy_naming *order) {
    policy_shadow *shadow = order->shadow;
    policy_pauses *pauses = shadow->pauses;
    if (!climb_orphans(order)) return;
    uint32_t n = pauses_rank_all(pauses), left = n, going = 1;
    /* Of sessions that end at one block the last decides: while the order is made, those before it are not counted. */
    while (left && going) {
        uint32_t tip = pauses->sessions[pauses_pop(pauses, left--)->slot].tip;
        set_ends(shadow, tip, ends_of(shadow, tip) - 1);
        if (!ends_of(shadow, tip)) going = (uint32_t)climb(order, tip);
    }
    for (; left < n; left++) {
        uint32_t tip = pauses->sessions[pauses->sorted[left].slot].tip;
        set_ends(shadow, tip, ends_of(shadow, tip) + 1);
    }
}

/* ---- Check ------------------------------------------------------------------------------------------------------ */

const char *policy_pauses_check(const policy_shadow *shadow) {
    const policy_pauses *pauses = shadow->pauses;
    uint64_t orphans = 0, ended = 0, tips = 0, named = 0, known = 0;
    for (uint32_t place = 0; place < shadow->arena->used; place++) {
        if (!policy_has(shadow, place)) continue;
        uint32_t ends = ends_of(shadow, place);
        orphans += is_orphan(shadow, place);
        ended += ends;
        for (uint32_t i = 0, slot = shadow->links[place].prev; i < ends; i++, slot = pauses->sessions[slot].next)
            if (slot >= pauses->used || pauses->sessions[slot].tip != place) return "another session ends at a block";
    }
    for (uint32_t slot = 0; slot < pauses->used; slot++) {
        if (!pauses->ranks[slot].number) continue;
        known++;
        tips += pauses->sessions[slot].tip != POLICY_NONE;
        for (uint32_t i = 0; i < PAUSES_ANCHORS; i++) {
            if (!(pauses->sessions[slot].named >> i & 1)) continue;
            named++;
            if (anchor(pauses, pauses->sessions[slot].anchors[i]) != slot * PAUSES_ANCHORS + i) return "an anchor is another's";
        }
    }
    if (known != pauses->count || tips != ended) return "sessions are counted wrongly";
    if (orphans != shadow->queues->count) return "orphans are counted wrongly";
    return named != pauses->anchors.count ? "anchors are counted wrongly" : NULL;
}
