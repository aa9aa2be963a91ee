/* policy/pauses_sessions.c - which sessions run, pause or have ended, and their worth: ctxreuse/pauses/sessions.py. */
#include <math.h>
#include <string.h>

#include "pauses.h"

/* A pause that goes on is reported whenever its age has grown by this factor, but not before so many seconds. */
static const double GROWTH = 1.3, SOON = 20.0;
/* Worth of a closed session: that of one that returns after a year. */
static const double OVER = 1 / (365 * 86400.0);
/* Half-life of a hint; what hints multiply a worth by at first (Python: HINTS), and bounds of their product. */
static const double HALF = 300.0, FACTORS[PAUSES_HINTS] = {4.0, 2.0, 1.0 / 64, 64.0, 8.0}, FEWEST = 1.0 / 64, MOST = 512.0;
enum { PREFETCH = 1, DEMOTE = 2 };
/* Labels: five bits of reason, three of what the answer was made of. */
enum { REASONS = 16, REASON = 31, NO_REASON = 7, CLOSED = 4, SUPERSEDED = 5, FIRST_TOOL = 8, TOOL_CALL = 1 };

/* ---- What is due, a heap ---------------------------------------------------------------------------------------- */

static int sooner(const policy_pauses *pauses, uint32_t a, uint32_t b) {
    const pauses_session *one = pauses->sessions + a, *other = pauses->sessions + b;
    return one->due < other->due || (one->due == other->due && one->tick < other->tick);
}

static void put(policy_pauses *pauses, uint32_t at, uint32_t slot) {
    pauses->heap[at] = slot;
    pauses->sessions[slot].at = at;
}

static void sift(policy_pauses *pauses, uint32_t at) {
    uint32_t slot = pauses->heap[at], child;
    for (; at && sooner(pauses, slot, pauses->heap[(at - 1) / 2]); at = (at - 1) / 2) put(pauses, at, pauses->heap[(at - 1) / 2]);
    for (; (child = 2 * at + 1) < pauses->due; at = child) {
        if (child + 1 < pauses->due && sooner(pauses, pauses->heap[child + 1], pauses->heap[child])) child++;
        if (!sooner(pauses, pauses->heap[child], slot)) break;
        put(pauses, at, pauses->heap[child]);
    }
    put(pauses, at, slot);
}

static void report_at(policy_pauses *pauses, uint32_t slot, double due) {
    pauses_session *session = pauses->sessions + slot;
    session->due = due;
    session->tick = ++pauses->tick;
    if (session->at == POLICY_NONE) put(pauses, pauses->due++, slot);
    sift(pauses, session->at);
}

static void report_never(policy_pauses *pauses, uint32_t slot) {
    uint32_t at = pauses->sessions[slot].at;
    if (at == POLICY_NONE) return;
    pauses->sessions[slot].at = POLICY_NONE;
    if (at == --pauses->due) return;
    put(pauses, at, pauses->heap[pauses->due]);
    sift(pauses, at);
}

/* ---- States ----------------------------------------------------------------------------------------------------- */

static pauses_type pause_of(pauses_session *session) {
    uint32_t reason = session->label & REASON;
    return (pauses_type){reason >= FIRST_TOOL ? TOOL_CALL : reason, session->label, session->rows};
}

static pauses_type run_of(pauses_session *session) { return (pauses_type){PAUSES_RUNNING, 0, session->rows}; }

/* It waits for a reason: nothing was said if the label is that of a run. */
static int waits(const pauses_session *session) {
    return !session->active && !session->over && (session->label & REASON) != PAUSES_RUNNING;
}

static double weight(const pauses_session *session, double now) {
    double product = 1.0;
    for (int hint = 0; hint < PAUSES_HINTS; hint++) {
        if (session->hints[hint] == -INFINITY) continue;
        double halvings = (now > session->hints[hint] ? now - session->hints[hint] : 0) / HALF;
        product *= pow(FACTORS[hint], pow(0.5, halvings < 1000 ? halvings : 1000));
    }
    return product < FEWEST ? FEWEST : product > MOST ? MOST : product;
}

static int hinted(const pauses_session *session) {
    for (int hint = 0; hint < PAUSES_HINTS; hint++)
        if (session->hints[hint] != -INFINITY) return 1;
    return 0;
}

/* The value by a rank's age now. */
static void appraise(const policy_pauses *pauses, pauses_rank *rank) {
    double age = pauses->now > rank->since ? pauses->now - rank->since : 0;
    if (age < rank->edge && !rank->special) return;
    const pauses_session *session = pauses->sessions + rank->slot;
    while (rank->bucket < PAUSES_BUCKETS - 1 && age >= pauses_ages[rank->bucket + 1]) rank->bucket++;
    rank->edge = rank->bucket < PAUSES_BUCKETS - 1 ? pauses_ages[rank->bucket + 1] : INFINITY;
    rank->value = session->worth[rank->bucket];
    if (rank->special) rank->value = (session->over ? OVER : rank->value) * weight(session, pauses->now);
}

static void value_anew(policy_pauses *pauses, uint32_t slot) {
    pauses_session *session = pauses->sessions + slot;
    pauses_worth(&pauses->table, session->active ? run_of(session) : pause_of(session), session->worth);
    pauses->ranks[slot].edge = -1;
    appraise(pauses, pauses->ranks + slot);
}

/* Report the seconds since the last report as seconds without a return. */
static void report(policy_pauses *pauses, uint32_t slot) {
    pauses_session *session = pauses->sessions + slot;
    double age = pauses->now - pauses->ranks[slot].since, run = pauses->now - session->began;
    if (session->over) return;
    if (waits(session) && age > session->reported) {
        pauses_away(&pauses->table, pause_of(session), session->reported, age);
        session->reported = age;
    }
    if (session->known && run > session->reported_run) {
        pauses_away(&pauses->table, run_of(session), session->reported_run, run);
        session->reported_run = run;
    }
}

static void learn(policy_pauses *pauses, double now) {
    if (now > pauses->now) pauses->now = now;
    while (pauses->due && pauses->sessions[pauses->heap[0]].due <= pauses->now) {
        uint32_t slot = pauses->heap[0];
        double age = pauses->now - pauses->ranks[slot].since, more = age * (GROWTH - 1);
        if (pauses->sessions[slot].over || age < SOON) {
            report_never(pauses, slot);
            continue;
        }
        report(pauses, slot);
        value_anew(pauses, slot);
        report_at(pauses, slot, pauses->now + (more > SOON ? more : SOON));
    }
}

static void enter(policy_pauses *pauses, uint32_t slot) {
    pauses_session *session = pauses->sessions + slot;
    pauses_rank *rank = pauses->ranks + slot;
    rank->since = pauses->now;
    rank->bucket = 0;
    rank->special = session->over || hinted(session);
    value_anew(pauses, slot);
    report_at(pauses, slot, pauses->now + SOON);
}

uint32_t pauses_open(policy_pauses *pauses) {
    uint32_t slot = pauses->free;
    if (slot != POLICY_NONE) pauses->free = pauses->sessions[slot].next;
    else slot = pauses->used++;
    pauses_session *session = pauses->sessions + slot;
    *session = (pauses_session){.tip = POLICY_NONE, .at = POLICY_NONE};
    for (int hint = 0; hint < PAUSES_HINTS; hint++) session->hints[hint] = -INFINITY;
    pauses->ranks[slot] = (pauses_rank){.number = ++pauses->number, .slot = slot};
    pauses->count++;
    return slot;
}

void pauses_close(policy_pauses *pauses, uint32_t slot) {
    report_never(pauses, slot);
    pauses_drop_rows(&pauses->table, pauses->sessions[slot].rows);
    pauses->ranks[slot].number = 0;
    pauses->sessions[slot].next = pauses->free;
    pauses->free = slot;
    pauses->count--;
}

void pauses_begin(policy_pauses *pauses, uint32_t slot, int fresh, double now) {
    learn(pauses, now);
    pauses_session *session = pauses->sessions + slot;
    if (!fresh && !session->over) {
        report(pauses, slot);
        if (waits(session)) pauses_returned(&pauses->table, pause_of(session), pauses->now - pauses->ranks[slot].since);
        if (session->known) pauses_returned(&pauses->table, run_of(session), pauses->now - session->began);
    }
    session->began = pauses->now;
    session->reported_run = 0;
    session->known = session->active = 1;
    session->over = 0;
    session->hints[PREFETCH] = session->hints[DEMOTE] = -INFINITY;
    enter(pauses, slot);
}

void pauses_pause(policy_pauses *pauses, uint32_t slot, uint32_t label, double now) {
    learn(pauses, now);
    pauses_session *session = pauses->sessions + slot;
    uint32_t reason = label & REASON;
    report(pauses, slot);
    if (reason >= REASONS || reason == NO_REASON) label = reason = 0;
    session->active = 0;
    session->over = reason == CLOSED || reason == SUPERSEDED;
    session->known = session->known && !session->over;
    session->label = (uint8_t)label;
    session->reported = 0;
    enter(pauses, slot);
}

void pauses_hint(policy_pauses *pauses, uint32_t slot, uint32_t hint, double now) {
    if (now > pauses->now) pauses->now = now;
    pauses->sessions[slot].hints[hint] = pauses->now;
    pauses->ranks[slot].special = 1;
}

/* ---- Order ------------------------------------------------------------------------------------------------------ */

static int lower(const pauses_rank *one, const pauses_rank *other) {
    if (one->value != other->value) return one->value < other->value;
    return one->since != other->since ? one->since < other->since : one->number < other->number;
}

uint32_t pauses_least(policy_pauses *pauses, double now) {
    uint32_t least = POLICY_NONE;
    if (now > pauses->now) pauses->now = now;
    for (uint32_t slot = 0; slot < pauses->used; slot++) {
        if (!pauses->ranks[slot].number) continue;
        appraise(pauses, pauses->ranks + slot);
        if (least == POLICY_NONE || lower(pauses->ranks + slot, pauses->ranks + least)) least = slot;
    }
    return least;
}

static void sink(pauses_rank *ranks, uint32_t n, uint32_t at) {
    pauses_rank moved = ranks[at];
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && lower(ranks + child + 1, ranks + child)) child++;
        if (!lower(ranks + child, &moved)) break;
        ranks[at] = ranks[child];
    }
    ranks[at] = moved;
}

uint32_t pauses_rank_all(policy_pauses *pauses) {
    uint32_t n = 0;
    for (uint32_t slot = 0; slot < pauses->used; slot++) {
        if (!pauses->ranks[slot].number || pauses->sessions[slot].tip == POLICY_NONE) continue;
        appraise(pauses, pauses->ranks + slot);
        pauses->sorted[n++] = pauses->ranks[slot];
    }
    for (uint32_t at = n / 2; at--;) sink(pauses->sorted, n, at);
    return n;
}

const pauses_rank *pauses_pop(policy_pauses *pauses, uint32_t n) {
    pauses_rank first = pauses->sorted[0];
    pauses->sorted[0] = pauses->sorted[n - 1];
    pauses->sorted[n - 1] = first;
    sink(pauses->sorted, n - 1, 0);
    return pauses->sorted + n - 1;
}
