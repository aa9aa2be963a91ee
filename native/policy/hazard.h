/* policy/hazard.h - the hazard policy's table of chances and its runs: see tests/oracle/policy/hazard*.py.
 *
 * Words: a class is what is known of a block's last use, an age a span of time since then (Python: EDGES), a level a rate
 * of use as a whole number, a run the neighbours on a path with the same last use and class.
 */
#ifndef CTXREUSE_POLICY_HAZARD_H
#define CTXREUSE_POLICY_HAZARD_H

#include "policy.h"

enum {
    HAZARD_AGES = 56,
    HAZARD_LEVELS = 256,
    HAZARD_LABELS = 32,
    HAZARD_NEWS = 4,
    HAZARD_CLASSES = 4 * 6 * HAZARD_NEWS * HAZARD_LABELS * 2,
    HAZARD_COARSE = HAZARD_CLASSES / HAZARD_NEWS
};

/* Seconds at which an age ends; the last one never does. */
extern const double hazard_edges[HAZARD_AGES - 1];

/* ---- The table (hazard_table.c) -------------------------------------------------------------------------- */

typedef struct hazard_row {
    double used[HAZARD_AGES], seen[HAZARD_AGES];
    uint32_t when; /* uses of the cache when the levels were worked out */
    uint8_t known; /* whether they were */
    uint8_t levels[HAZARD_AGES];
} hazard_row;

typedef struct hazard_table {
    hazard_row *rows; /* the first: all classes together */
    uint32_t room, count, uses;
    double unit;
    uint16_t fine[HAZARD_CLASSES], middle[HAZARD_COARSE]; /* rows; 0: none */
} hazard_table;

int hazard_table_start(hazard_table *table); /* -1 without memory */
void hazard_table_tick(hazard_table *table);
/* Without memory for a class that is new, what it counts is lost: it would have been advice. */
void hazard_table_count(hazard_table *table, uint32_t which, uint32_t age, double share, int used);
int hazard_table_level(hazard_table *table, uint32_t which, uint32_t age);
/* Rows of POLICY_LEARNT numbers in today's unit. */
size_t hazard_table_classes(const hazard_table *table);
void hazard_table_learnt(const hazard_table *table, double *out);
/* Begin anew with these; -1 without memory for a number that is no class's or counts that cannot be, and no change. */
int hazard_table_teach(hazard_table *table, const double *in, size_t classes);

/* ---- Runs (hazard.c; hazard_order.c names victims, hazard_check.c compares) ------------------------------------------- */

typedef struct hazard_run {
    double time;
    uint32_t use;
    uint32_t back, held;   /* the last held block (if any is), and how many */
    uint32_t tail, total;  /* the last block, ghosts included, and how many */
    policy_link link[3];   /* in the queues of its age and of its level, and among the runs of its use */
    uint16_t which;
    int16_t level;         /* -1: in no queue of levels */
    uint8_t age, hits, less, seen;
} hazard_run;

typedef struct hazard_use {
    uint32_t tip, blocks, runs; /* runs: the last one of its path, or where it is free the next such */
    uint8_t turn, fresh, label;
} hazard_use;

typedef struct policy_hazard {
    hazard_table table;
    hazard_run *runs;
    uint32_t run_room, run_used, run_free, run_count;
    hazard_use *uses;
    uint32_t use_room, use_used, use_free, use_count;
    policy_queue ages[HAZARD_AGES], levels[HAZARD_LEVELS];
    uint64_t filled[HAZARD_LEVELS / 64]; /* bit of each level that has a run */
    policy_queue fresh, ghosts;          /* of blocks: held and not used yet; evicted, the longest ago first */
    uint32_t *path, path_room;           /* scratch: blocks of the path that is being used */
    uint32_t least;                      /* ghosts remembered in any case, and for each held block */
    double ratio, now;
} policy_hazard;

/* Which of a run's links. */
enum { HAZARD_BY_AGE, HAZARD_BY_LEVEL, HAZARD_BY_USE };

/* `next` of a held block that was used: only those that were not, and ghosts, are in a queue. */
#define HAZARD_SETTLED (POLICY_NONE - 1)

static inline int hazard_is_ghost(const policy_shadow *shadow, uint32_t place) { return shadow->children[place] == POLICY_GHOST; }
static inline int hazard_is_fresh(const policy_shadow *shadow, uint32_t place) {
    return !hazard_is_ghost(shadow, place) && shadow->links[place].next != HAZARD_SETTLED;
}

/* The first level from that one on which has a run; HAZARD_LEVELS if there is none. */
static inline int hazard_level_from(const policy_hazard *hazard, int level) {
    while (level < HAZARD_LEVELS) {
        uint64_t left = hazard->filled[level / 64] >> level % 64;
        if (left) return level + __builtin_ctzll(left);
        level = (level / 64 + 1) * 64;
    }
    return HAZARD_LEVELS;
}

/* ---- The policy of a shadow, for shadow.c and Python ------------------------------------------------------------ */

policy_hazard *policy_hazard_new(void);
void policy_hazard_free(policy_hazard *hazard);
size_t policy_hazard_bytes(const policy_hazard *hazard);
/* Room for a use of the path to `above` (or POLICY_NONE) and `more` blocks behind it; -1 without memory. */
int policy_hazard_reserve(policy_shadow *shadow, uint32_t above, uint32_t more);
/* The ghost of that id behind that parent, no longer counted as one; POLICY_NONE if there is none. */
uint32_t policy_hazard_revive(policy_shadow *shadow, uint64_t id, uint32_t parent);
/* A block is held from now on; `known`: it was revived. */
void policy_hazard_hold(policy_shadow *shadow, uint32_t place, uint32_t tokens, int known);
/* A leaf goes; its id. */
uint64_t policy_hazard_remove(policy_shadow *shadow, uint32_t place);
/* The path to `tip` is used, for which there is room. */
void policy_hazard_use(policy_shadow *shadow, uint32_t tip, double now);
void policy_hazard_mark(policy_shadow *shadow, uint64_t id, uint32_t label);
/* See policy_make_order. */
void policy_hazard_order(policy_naming *order);
const char *policy_hazard_check(const policy_shadow *shadow);
/* How many ghosts to remember: `least`, and so many for each held block. */
void policy_hazard_remember(policy_shadow *shadow, uint32_t least, double ratio);
uint32_t policy_hazard_ghosts(const policy_shadow *shadow);
/* What was learnt, as rows of POLICY_LEARNT numbers (class, uses by age, paths seen by age): how many rows; `out` may be
 * NULL. And to go on from there: -1, and no change, without memory or for a class or counts that cannot be. */
enum { POLICY_LEARNT = 113 };
size_t policy_hazard_learnt(const policy_shadow *shadow, double *out);
int policy_hazard_teach(policy_shadow *shadow, const double *in, size_t rows);

#endif
