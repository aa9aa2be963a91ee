/* policy/hazard.c - the hazard policy's runs, queues and ghosts: the same to the bit as tests/oracle/policy/hazard.py.
 *
 * A run's blocks hang on each other, so it is known by its last one and walked by parents. A ghost is a block of the arena
 * that is not held; the parent of one went after it and is forgotten after it.
 */
#include "hazard.h"

#include <stdlib.h>

/* `history` of a block: its tokens less one, as a block has 1 to 4,096 (ModelSpace), and uses above them. */
enum { TOKENS = (1 << 12) - 1, USES_AT = 12, MOST_USES = 13 };
/* Ghosts that are remembered for each held block end here. */
static const double MOST_GHOSTS = 1 << 18;

static const policy_queue EMPTY = {POLICY_NONE, POLICY_NONE, 0};

static uint32_t any_find(const policy_shadow *shadow, uint64_t id) { return policy_arena_find(shadow->arena, shadow->seat, id); }

/* ---- Room ------------------------------------------------------------------------------------------------------- */

policy_hazard *policy_hazard_new(void) {
    policy_hazard *hazard = calloc(1, sizeof *hazard);
    if (!hazard) return NULL;
    if (hazard_table_start(&hazard->table) < 0) {
        free(hazard);
        return NULL;
    }
    for (int age = 0; age < HAZARD_AGES; age++) hazard->ages[age] = EMPTY;
    for (int level = 0; level < HAZARD_LEVELS; level++) hazard->levels[level] = EMPTY;
    hazard->fresh = hazard->ghosts = EMPTY;
    hazard->run_free = hazard->use_free = POLICY_NONE;
    hazard->least = 1 << 16;
    hazard->ratio = 2.0;
    return hazard;
}

void policy_hazard_free(policy_hazard *hazard) {
    if (!hazard) return;
    free(hazard->table.rows);
    free(hazard->runs);
    free(hazard->uses);
    free(hazard->path);
    free(hazard);
}

size_t policy_hazard_bytes(const policy_hazard *hazard) {
    return sizeof *hazard + hazard->table.room * sizeof(hazard_row) + hazard->run_room * sizeof(hazard_run) +
           hazard->use_room * sizeof(hazard_use) + hazard->path_room * sizeof(uint32_t);
}

/* *all holds `room` items; it has to hold `need`. */
static int grow(void **all, uint32_t *room, uint64_t need, size_t item) {
    if (need <= *room) return 0;
    need += need / 16 + 16;
    if (need >= HAZARD_SETTLED) return -1;
    void *grown = realloc(*all, (size_t)need * item);
    if (!grown) return -1;
    *all = grown;
    *room = (uint32_t)need;
    return 0;
}

static uint64_t depth_of(const policy_shadow *shadow, uint32_t place) {
    uint64_t depth = 0;
    for (; place != POLICY_NONE; place = policy_parent(shadow, place)) depth++;
    return depth;
}

int policy_hazard_reserve(policy_shadow *shadow, uint32_t above, uint32_t more) {
    policy_hazard *hazard = shadow->hazard;
    uint64_t path = depth_of(shadow, above) + more;
    void *runs = hazard->runs, *uses = hazard->uses, *steps = hazard->path;
    int failed = grow(&runs, &hazard->run_room, hazard->run_count + path, sizeof *hazard->runs) < 0;
    hazard->runs = runs;
    failed |= grow(&uses, &hazard->use_room, (uint64_t)hazard->use_count + 1, sizeof *hazard->uses) < 0;
    hazard->uses = uses;
    failed |= grow(&steps, &hazard->path_room, path, sizeof *hazard->path) < 0;
    hazard->path = steps;
    return failed ? -1 : 0;
}

/* ---- Queues of runs --------------------------------------------------------------------------------------------- */

static void push(policy_hazard *hazard, policy_queue *queue, int by, uint32_t at) {
    hazard_run *run = hazard->runs + at;
    run->link[by] = (policy_link){queue->tail, POLICY_NONE};
    if (queue->tail != POLICY_NONE) hazard->runs[queue->tail].link[by].next = at;
    else queue->head = at;
    queue->tail = at;
    queue->count++;
}

static void push_head(policy_hazard *hazard, policy_queue *queue, int by, uint32_t at) {
    hazard_run *run = hazard->runs + at;
    run->link[by] = (policy_link){POLICY_NONE, queue->head};
    if (queue->head != POLICY_NONE) hazard->runs[queue->head].link[by].prev = at;
    else queue->tail = at;
    queue->head = at;
    queue->count++;
}

static void pull(policy_hazard *hazard, policy_queue *queue, int by, uint32_t at) {
    policy_link link = hazard->runs[at].link[by];
    if (link.prev != POLICY_NONE) hazard->runs[link.prev].link[by].next = link.next;
    else queue->head = link.next;
    if (link.next != POLICY_NONE) hazard->runs[link.next].link[by].prev = link.prev;
    else queue->tail = link.prev;
    queue->count--;
}

static void unfile(policy_hazard *hazard, uint32_t at) {
    hazard_run *run = hazard->runs + at;
    if (run->level < 0) return;
    policy_queue *queue = hazard->levels + run->level;
    pull(hazard, queue, HAZARD_BY_LEVEL, at);
    if (!queue->count) hazard->filled[run->level / 64] &= ~(UINT64_C(1) << run->level % 64);
    run->level = -1;
}

static void file(policy_hazard *hazard, uint32_t at, int first) {
    hazard_run *run = hazard->runs + at;
    unfile(hazard, at);
    if (!run->held) return;
    run->level = (int16_t)hazard_table_level(&hazard->table, run->which, run->age);
    hazard->filled[run->level / 64] |= UINT64_C(1) << run->level % 64;
    (first ? push_head : push)(hazard, hazard->levels + run->level, HAZARD_BY_LEVEL, at);
}

/* ---- Runs and uses ---------------------------------------------------------------------------------------------- */

static uint32_t step_of(uint64_t value, const uint32_t *steps, int n) {
    uint32_t step = 0;
    for (int i = 0; i < n; i++) step += value >= steps[i];
    return step;
}

static void classify(policy_hazard *hazard, hazard_run *run) {
    static const uint32_t turns[] = {2, 3, 5};
    const hazard_use *use = hazard->uses + run->use;
    uint32_t which = (step_of(use->turn, turns, 3) * 6 + run->hits) * HAZARD_NEWS + use->fresh;
    run->which = (uint16_t)((which * HAZARD_LABELS + use->label) * 2 + run->less);
}

static uint32_t run_new(policy_hazard *hazard, uint32_t use, uint8_t hits, uint8_t less) {
    uint32_t at = hazard->run_free;
    if (at != POLICY_NONE) hazard->run_free = hazard->runs[at].link[HAZARD_BY_USE].next;
    else at = hazard->run_used++;
    hazard->run_count++;
    hazard_run *run = hazard->runs + at;
    *run = (hazard_run){.time = hazard->now, .use = use, .level = -1, .hits = hits, .less = less};
    run->link[HAZARD_BY_USE] = (policy_link){POLICY_NONE, hazard->uses[use].runs};
    if (run->link[HAZARD_BY_USE].next != POLICY_NONE) hazard->runs[run->link[HAZARD_BY_USE].next].link[HAZARD_BY_USE].prev = at;
    hazard->uses[use].runs = at;
    return at;
}

/* A run of which nothing is left. */
static void run_end(policy_hazard *hazard, uint32_t at) {
    hazard_run *run = hazard->runs + at;
    hazard_use *use = hazard->uses + run->use;
    policy_link link = run->link[HAZARD_BY_USE];
    pull(hazard, hazard->ages + run->age, HAZARD_BY_AGE, at);
    if (link.prev != POLICY_NONE) hazard->runs[link.prev].link[HAZARD_BY_USE].next = link.next;
    else use->runs = link.next;
    if (link.next != POLICY_NONE) hazard->runs[link.next].link[HAZARD_BY_USE].prev = link.prev;
    if (use->runs == POLICY_NONE) {
        use->runs = hazard->use_free;
        hazard->use_free = run->use;
        hazard->use_count--;
    }
    run->link[HAZARD_BY_USE].next = hazard->run_free;
    hazard->run_free = at;
    hazard->run_count--;
}

/* Forget the oldest ghost, or one whose run has no block behind it. */
static void forget(policy_shadow *shadow, uint32_t place) {
    policy_hazard *hazard = shadow->hazard;
    hazard_run *run = hazard->runs + shadow->data[place];
    policy_queue_take(shadow, &hazard->ghosts, place);
    run->tail = policy_parent(shadow, place);
    policy_arena_drop(shadow->arena, shadow->seat, place);
    if (!--run->total) run_end(hazard, shadow->data[place]);
}

static void forget_some(policy_shadow *shadow) {
    policy_hazard *hazard = shadow->hazard;
    double more = hazard->ratio * shadow->count;
    while (hazard->ghosts.count > hazard->least + (more < MOST_GHOSTS ? more : MOST_GHOSTS)) forget(shadow, hazard->ghosts.head);
}

/* ---- Coming and going ------------------------------------------------------------------------------------------- */

uint32_t policy_hazard_revive(policy_shadow *shadow, uint64_t id, uint32_t parent) {
    policy_hazard *hazard = shadow->hazard;
    uint32_t place = any_find(shadow, id);
    if (place == POLICY_NONE) return place;
    if (policy_parent(shadow, place) == parent) {
        policy_queue_take(shadow, &hazard->ghosts, place);
        return place;
    }
    /* Another block then, by a key that was made up: with it goes what its run knew behind it. */
    for (uint32_t last = POLICY_NONE; last != place;) {
        last = hazard->runs[shadow->data[place]].tail;
        forget(shadow, last);
    }
    return POLICY_NONE;
}

void policy_hazard_hold(policy_shadow *shadow, uint32_t place, uint32_t tokens, int known) {
    uint32_t uses = known ? shadow->history[place] >> USES_AT : 0, less = tokens ? tokens - 1 : 0;
    if (!known) shadow->data[place] = POLICY_NONE;
    shadow->history[place] = (uint16_t)(uses << USES_AT | (less < TOKENS ? less : TOKENS));
    policy_queue_push(shadow, &shadow->hazard->fresh, place);
}

static void settle(policy_shadow *shadow) {
    policy_hazard *hazard = shadow->hazard;
    for (int level; (level = hazard_level_from(hazard, 0)) < HAZARD_LEVELS;) {
        uint32_t at = hazard->levels[level].head;
        if (!shadow->children[hazard->runs[at].back]) return;
        unfile(hazard, at);
    }
}

uint64_t policy_hazard_remove(policy_shadow *shadow, uint32_t place) {
    policy_hazard *hazard = shadow->hazard;
    const policy_block *block = shadow->arena->blocks + place;
    uint64_t id = policy_id(block);
    uint32_t at = shadow->data[place], parent = block->parent;
    shadow->nbytes -= block->nbytes;
    shadow->count--;
    if (hazard_is_fresh(shadow, place)) {
        policy_queue_take(shadow, &hazard->fresh, place);
    } else {
        hazard->runs[at].held--;
        hazard->runs[at].back = parent;
    }
    if (at == POLICY_NONE) {
        policy_arena_drop(shadow->arena, shadow->seat, place);
    } else {
        shadow->children[place] = POLICY_GHOST;
        policy_queue_push(shadow, &hazard->ghosts, place);
        if (!hazard->runs[at].held) unfile(hazard, at);
    }
    if (parent != POLICY_NONE && policy_child_left(shadow, parent)) {
        uint32_t above = shadow->data[parent];
        if (above != POLICY_NONE && hazard->runs[above].level < 0 && !hazard_is_fresh(shadow, parent)) file(hazard, above, 1);
    }
    settle(shadow);
    forget_some(shadow);
    return id;
}

/* ---- Use -------------------------------------------------------------------------------------------------------- */

static void grow_old(policy_hazard *hazard) {
    for (uint32_t age = 0; age < HAZARD_AGES - 1; age++) {
        policy_queue *queue = hazard->ages + age;
        while (queue->head != POLICY_NONE) {
            uint32_t at = queue->head;
            hazard_run *run = hazard->runs + at;
            if (hazard->now - run->time < hazard_edges[age]) break;
            pull(hazard, queue, HAZARD_BY_AGE, at);
            hazard_table_count(&hazard->table, run->which, age, (double)run->total / hazard->uses[run->use].blocks, 0);
            run->age = (uint8_t)(age + 1);
            push(hazard, queue + 1, HAZARD_BY_AGE, at);
            if (run->level >= 0) file(hazard, at, 0);
        }
    }
}

static uint32_t use_new(policy_shadow *shadow, uint32_t tip, uint32_t n) {
    static const uint32_t news[] = {513, 2561, 8193};
    policy_hazard *hazard = shadow->hazard;
    uint32_t known = 0, turn = 1, at = hazard->use_free;
    uint64_t fresh = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (shadow->data[hazard->path[i]] == POLICY_NONE) fresh += (shadow->history[hazard->path[i]] & TOKENS) + 1u;
        else if (!fresh) known++;
    }
    if (known > 1) {
        uint32_t run = shadow->data[hazard->path[known - 1]];
        if (run != POLICY_NONE) turn = hazard->uses[hazard->runs[run].use].turn + 1u;
    }
    if (at != POLICY_NONE) hazard->use_free = hazard->uses[at].runs;
    else at = hazard->use_used++;
    hazard->use_count++;
    hazard->uses[at] = (hazard_use){tip, n, POLICY_NONE, (uint8_t)(turn < 5 ? turn : 5), (uint8_t)step_of(fresh, news, 3), 0};
    return at;
}

/* A use takes blocks from the front of the runs that they were in. */
static void take(policy_shadow *shadow, uint32_t n) {
    policy_hazard *hazard = shadow->hazard;
    for (uint32_t i = 0; i < n;) {
        uint32_t at = shadow->data[hazard->path[i]], taken = 0;
        for (; i < n && shadow->data[hazard->path[i]] == at; i++, taken++) {
            if (!hazard_is_fresh(shadow, hazard->path[i])) continue;
            policy_queue_take(shadow, &hazard->fresh, hazard->path[i]);
            shadow->links[hazard->path[i]].next = HAZARD_SETTLED;
        }
        if (at == POLICY_NONE) continue;
        hazard_run *run = hazard->runs + at;
        hazard_table_count(&hazard->table, run->which, run->age, (double)taken / hazard->uses[run->use].blocks, 1);
        run->held -= taken < run->held ? taken : run->held;
        if (!run->held) unfile(hazard, at);
        run->total -= taken;
        if (!run->total) run_end(hazard, at);
    }
}

void policy_hazard_use(policy_shadow *shadow, uint32_t tip, double now) {
    static const uint32_t hits[] = {2, 3, 4, 7, 13};
    policy_hazard *hazard = shadow->hazard;
    uint32_t n = (uint32_t)depth_of(shadow, tip), at = POLICY_NONE, before = 0;
    for (uint32_t i = n, place = tip; i; place = policy_parent(shadow, place)) hazard->path[--i] = place;
    if (now > hazard->now) hazard->now = now;
    hazard_table_tick(&hazard->table);
    grow_old(hazard);
    uint32_t use = use_new(shadow, tip, n);
    take(shadow, n);
    for (uint32_t i = 0; i < n; i++) {
        uint16_t *history = shadow->history + hazard->path[i];
        uint32_t tokens = *history & TOKENS, uses = (*history >> USES_AT) + 1u;
        if (uses > MOST_USES) uses = MOST_USES;
        *history = (uint16_t)(uses << USES_AT | tokens);
        uint8_t step = (uint8_t)step_of(uses, hits, 5), less = tokens < before;
        before = tokens;
        if (at == POLICY_NONE || hazard->runs[at].hits != step || hazard->runs[at].less != less)
            at = run_new(hazard, use, step, less);
        shadow->data[hazard->path[i]] = at;
        hazard->runs[at].back = hazard->runs[at].tail = hazard->path[i];
        hazard->runs[at].held++;
        hazard->runs[at].total++;
    }
    for (at = hazard->uses[use].runs; at != POLICY_NONE; at = hazard->runs[at].link[HAZARD_BY_USE].next) {
        classify(hazard, hazard->runs + at);
        push(hazard, hazard->ages, HAZARD_BY_AGE, at);
        file(hazard, at, 0);
    }
}

void policy_hazard_mark(policy_shadow *shadow, uint64_t id, uint32_t label) {
    policy_hazard *hazard = shadow->hazard;
    uint32_t tip = any_find(shadow, id), at = tip == POLICY_NONE ? tip : shadow->data[tip];
    if (at == POLICY_NONE) return;
    hazard_use *use = hazard->uses + hazard->runs[at].use;
    if (use->tip != tip) return;
    use->label = label % HAZARD_LABELS;
    for (at = use->runs; at != POLICY_NONE; at = hazard->runs[at].link[HAZARD_BY_USE].next) {
        classify(hazard, hazard->runs + at);
        if (hazard->runs[at].level >= 0) file(hazard, at, 0);
    }
}

/* ---- What was learnt -------------------------------------------------------------------------------------------- */

void policy_hazard_remember(policy_shadow *shadow, uint32_t least, double ratio) {
    shadow->hazard->least = least;
    shadow->hazard->ratio = ratio;
}

uint32_t policy_hazard_ghosts(const policy_shadow *shadow) { return shadow->hazard->ghosts.count; }

size_t policy_hazard_learnt(const policy_shadow *shadow, double *out) {
    if (out) hazard_table_learnt(&shadow->hazard->table, out);
    return hazard_table_classes(&shadow->hazard->table);
}

int policy_hazard_teach(policy_shadow *shadow, const double *in, size_t rows) {
    return hazard_table_teach(&shadow->hazard->table, in, rows);
}
