/* policy/hazard_check.c - whether the hazard policy's runs, queues and counts fit each other. */
#include "hazard.h"

static const char *check_run(const policy_shadow *shadow, uint32_t at) {
    const policy_hazard *hazard = shadow->hazard;
    const hazard_run *run = hazard->runs + at;
    if (!run->total || run->held > run->total) return "an empty run is kept";
    if (run->seen) return "a walk has left its mark";
    if (run->level >= 0 && !run->held) return "a run that holds nothing is in a queue of levels";
    uint32_t place = run->tail;
    for (uint32_t i = run->total; i; i--) {
        if (place == POLICY_NONE || shadow->data[place] != at) return "a run is in pieces";
        if (i == run->held && place != run->back) return "a run ends elsewhere";
        int held = !hazard_is_ghost(shadow, place) && !hazard_is_fresh(shadow, place);
        if (held != (i <= run->held)) return "a run counts its blocks wrongly";
        place = policy_parent(shadow, place);
    }
    return NULL;
}

const char *policy_hazard_check(const policy_shadow *shadow) {
    const policy_hazard *hazard = shadow->hazard;
    const char *wrong = NULL;
    uint64_t total = 0, in_runs = 0, runs = 0, filed = 0, levels = 0, ghosts = 0;
    for (uint32_t age = 0; age < HAZARD_AGES && !wrong; age++)
        for (uint32_t at = hazard->ages[age].head; at != POLICY_NONE && !wrong; at = hazard->runs[at].link[HAZARD_BY_AGE].next) {
            if (hazard->runs[at].age != age) return "a run is in another age's queue";
            wrong = check_run(shadow, at);
            total += hazard->runs[at].total;
            filed += hazard->runs[at].level >= 0;
            runs++;
        }
    if (wrong) return wrong;
    for (int level = 0; level < HAZARD_LEVELS; level++) {
        int full = (int)(hazard->filled[level / 64] >> level % 64 & 1);
        if (full != (hazard->levels[level].count > 0)) return "a level's bit is wrong";
        levels += hazard->levels[level].count;
    }
    for (uint32_t place = 0; place < shadow->arena->used; place++) {
        if (!(shadow->arena->owners[place] & shadow->seat)) continue;
        ghosts += hazard_is_ghost(shadow, place);
        in_runs += shadow->data[place] != POLICY_NONE;
    }
    if (runs != hazard->run_count || total != in_runs) return "runs are counted wrongly";
    if (filed != levels) return "levels are counted wrongly";
    return ghosts != hazard->ghosts.count ? "ghosts are counted wrongly" : NULL;
}
