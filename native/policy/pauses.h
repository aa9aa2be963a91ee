/* policy/pauses.h - the pauses policy: sessions, when they return, and blocks in the order of what they are worth.
 *
 * The same as tests/oracle/policy/pauses.py with ctxreuse/pauses, which are the reference: the same requests and pauses
 * give the same victims. Words: a tip is the last held block of a session's context, an orphan a leaf where no session
 * ends, an anchor an id by which a session's next path is known, a stop a coarse reason, a label a reason with all that
 * is known of it (Python: PauseKind), a bucket a span of ages (Python: AGES).
 */
#ifndef CTXREUSE_POLICY_PAUSES_H
#define CTXREUSE_POLICY_PAUSES_H

#include "policy.h"

enum {
    PAUSES_BUCKETS = 40,
    PAUSES_STOPS = 7,
    PAUSES_RUNNING = 6, /* the stop of a session that does not pause */
    PAUSES_LABELS = 256,
    PAUSES_ANCHORS = 3,
    PAUSES_HINTS = 5,
    PAUSES_MOST = 2048 /* sessions */
};

/* Where buckets begin; the last one never ends. */
extern const double pauses_ages[PAUSES_BUCKETS + 1];

/* ---- Counts and rates (pauses_rates.c) -------------------------------------------------------------------------- */

/* Returns and seconds away of one type of pauses; `total` of the returns, `changes`: how many there were. */
typedef struct pauses_counts {
    double returns[PAUSES_BUCKETS], seconds[PAUSES_BUCKETS], total, changes;
} pauses_counts;

typedef struct pauses_table {
    pauses_counts *rows; /* the first: all pauses */
    uint32_t room, used, free;
    uint32_t stops[PAUSES_STOPS], labels[PAUSES_LABELS]; /* rows; 0: none */
} pauses_table;

/* What a pause is: a label of that stop (RUNNING has none), of a session with rows by stop. */
typedef struct pauses_type {
    uint32_t stop, label, *rows;
} pauses_type;

int pauses_table_start(pauses_table *table); /* -1 without memory */
int pauses_bucket(double age);
/* Without memory for a type that is new, what it counts is lost: it would have been advice. */
void pauses_away(pauses_table *table, pauses_type type, double since, double until);
void pauses_returned(pauses_table *table, pauses_type type, double age);
/* What keeping a context is worth, by bucket of age. */
void pauses_worth(const pauses_table *table, pauses_type type, float worth[PAUSES_BUCKETS]);
/* Forget a session's rows. */
void pauses_drop_rows(pauses_table *table, uint32_t rows[PAUSES_STOPS]);

/* ---- Sessions (pauses_sessions.c) ------------------------------------------------------------------------------- */

typedef struct pauses_session {
    double began, reported, reported_run; /* its last request; up to which age the table knows of a pause and of a run */
    double due;                           /* when it is reported next */
    double hints[PAUSES_HINTS];           /* when they were given; -INFINITY: not */
    uint64_t anchors[PAUSES_ANCHORS];
    uint32_t tick, at;                    /* orders what is due at once; place in the heap */
    uint32_t tip, prev, next;             /* a block; sessions of the same tip. `next` alone where it is free */
    uint32_t rows[PAUSES_STOPS];
    float worth[PAUSES_BUCKETS];
    uint8_t named, label, active, known, over; /* named: bits of anchors that are its own */
} pauses_session;

/* What orders sessions, apart from the rest, as all of it is looked at for each order. */
typedef struct pauses_rank {
    double value, since, edge; /* edge: age at which the next bucket begins */
    uint32_t number, slot;     /* number: 0 where the slot is free */
    uint32_t bucket, special;  /* special: closed or hinted */
} pauses_rank;

typedef struct policy_pauses {
    pauses_table table;
    pauses_session *sessions;
    pauses_rank *ranks, *sorted; /* by slot; scratch, in the order of eviction */
    uint32_t *heap;              /* slots by `due` */
    uint32_t room, used, free, count, due, most;
    uint32_t number, tick;
    policy_hash anchors; /* from ids to slot and anchor */
    uint8_t has_lookups, has_pauses;
    double now;
} policy_pauses;

uint32_t pauses_open(policy_pauses *pauses);             /* a slot, for which there is room */
void pauses_close(policy_pauses *pauses, uint32_t slot); /* that has no tip and no anchors */
/* A request of the session begins; `fresh`: it is its first. And its answer is done. */
void pauses_begin(policy_pauses *pauses, uint32_t slot, int fresh, double now);
void pauses_pause(policy_pauses *pauses, uint32_t slot, uint32_t label, double now);
void pauses_hint(policy_pauses *pauses, uint32_t slot, uint32_t hint, double now);
/* The session of least worth at `now`. */
uint32_t pauses_least(policy_pauses *pauses, double now);
/* All sessions with a tip in `sorted`, as a heap; how many. Then the first of `n` is moved behind the others. */
uint32_t pauses_rank_all(policy_pauses *pauses);
const pauses_rank *pauses_pop(policy_pauses *pauses, uint32_t n);

/* ---- The policy of a shadow, for shadow.c, kinds.c and Python ---------------------------------------------------- */

policy_pauses *policy_pauses_new(void);
void policy_pauses_free(policy_pauses *pauses);
size_t policy_pauses_bytes(const policy_pauses *pauses);
/* Room for two more sessions: a prompt's, and another one if what is used of it has no anchor; -1 without memory. */
int policy_pauses_reserve(policy_pauses *pauses);
/* A prompt comes; from the first on, uses begin no turns. Then its held part, which ends at `tip`, is used. */
void policy_pauses_lookup(policy_shadow *shadow, const uint64_t *ids, size_t n, double now);
void policy_pauses_use(policy_shadow *shadow, const uint64_t *ids, size_t n, uint32_t tip, double now);
void policy_pauses_mark(policy_shadow *shadow, uint64_t id, uint32_t label, double now);
/* A block is held from now on; goes (it is still filed); has no children left. */
void policy_pauses_hold(policy_shadow *shadow, uint32_t place);
void policy_pauses_remove(policy_shadow *shadow, uint32_t place);
void policy_pauses_leaf(policy_shadow *shadow, uint32_t place);
/* See policy_make_order. */
void policy_pauses_order(policy_naming *order);
const char *policy_pauses_check(const policy_shadow *shadow);
/* What was learnt, as rows of PAUSES_LEARNT numbers (0, 1 + stop or 8 + label; changes, returns and seconds by bucket):
 * how many rows; `out` may be NULL. And to go on from there: -1, and no change, without memory or for what cannot be. */
enum { PAUSES_LEARNT = 2 + 2 * PAUSES_BUCKETS };
size_t policy_pauses_learnt(const policy_shadow *shadow, double *out);
int policy_pauses_teach(policy_shadow *shadow, const double *in, size_t rows);

#endif
