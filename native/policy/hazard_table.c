/* policy/hazard_table.c - the chances of a use by class and age: the same to the bit as the oracle's table. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hazard.h"

enum { EVERY = 64, STEPS = 8, LOWEST = -24, NO_ROW = UINT16_MAX };
_Static_assert(POLICY_LEARNT == 1 + 2 * HAZARD_AGES, "a row of what was learnt");

static const double PRIOR = 0.5, LEAST = 0.05, CHANCE = 0.05, DECAY = 0.99, LARGEST_UNIT = 1e6, MOST = 0.999, LARGEST_COUNT = 1e15;

/* In full: a pow() of another library could round otherwise, and a compiler may fold it. */
const double hazard_edges[HAZARD_AGES - 1] = {
    0x1.0000000000000p+2, 0x1.3333333333333p+2, 0x1.70a3d70a3d70ap+2, 0x1.ba5e353f7ced8p+2,
    0x1.096bb98c7e282p+3, 0x1.3e81450efdc9bp+3, 0x1.7e34b945308bap+3, 0x1.caa5ab1fd3dacp+3,
    0x1.133033797f1cdp+4, 0x1.4a39d75e98890p+4, 0x1.8c4568d7ea3dfp+4, 0x1.db867dcfe5e3fp+4,
    0x1.1d50b1e32388cp+5, 0x1.5660d576f770ep+5, 0x1.9ada99c1f5baap+5, 0x1.ed06521bf3accp+5,
    0x1.27d097aa5f014p+6, 0x1.62fa4f993ece4p+6, 0x1.a9f92c517e912p+6, 0x1.ff2b01fb64ae2p+6,
    0x1.32b36796d6021p+7, 0x1.700a7c4e9a68ep+7, 0x1.b9a62ec4b94aap+7, 0x1.08fd4f42d5932p+8,
    0x1.3dfcc58366b09p+8, 0x1.7d95b9d0e1a0bp+8, 0x1.c9e6defaa85a6p+8, 0x1.12bdb8fccb697p+9,
    0x1.49b07795c0e4ep+9, 0x1.8ba08f808112ap+9, 0x1.dac0ac33ce166p+9, 0x1.1cda00ebe20d7p+10,
    0x1.55d2678175a9bp+10, 0x1.9a2faf6826cb9p+10, 0x1.ec3938e361c11p+10, 0x1.275588886dda4p+11,
    0x1.6266a3d6ea391p+11, 0x1.a947f7ceb2aaep+11, 0x1.fe565c91a3337p+11, 0x1.3233d1242eb87p+12,
    0x1.6f71615e9e76fp+12, 0x1.b8ee74d7f15b8p+12, 0x1.088f12e7f736ep+13, 0x1.3d787d165bdb7p+13,
    0x1.7cf6fc813b075p+13, 0x1.c9286234ad3bfp+13, 0x1.124b6e1f9b23fp+14, 0x1.492750f2ba2b2p+14,
    0x1.8afbfabcdf66fp+14, 0x1.d9fb2ce2a5aecp+14, 0x1.1c638154c9cf4p+15, 0x1.554434cc255f1p+15,
    0x1.99850c282cd87p+15, 0x1.eb6c74fd029d5p+15, 0x1.26daac97ce5e6p+16,
};

static double width(uint32_t age) {
    if (age == 0) return hazard_edges[0];
    if (age == HAZARD_AGES - 1) return (hazard_edges[age - 1] - hazard_edges[age - 2]) * 4;
    return hazard_edges[age] - hazard_edges[age - 1];
}

int hazard_table_start(hazard_table *table) {
    *table = (hazard_table){.rows = calloc(1, sizeof *table->rows), .room = 1, .count = 1, .unit = 1.0};
    return table->rows ? 0 : -1;
}

/* The row that a slot names, made if there is none; NO_ROW without memory. */
static uint32_t row_at(hazard_table *table, uint16_t *slot) {
    if (*slot) return *slot;
    if (table->count == table->room) {
        uint32_t room = table->room + table->room / 2 + 8;
        hazard_row *rows = realloc(table->rows, room * sizeof *rows);
        if (!rows) return NO_ROW;
        table->rows = rows;
        table->room = room;
    }
    memset(table->rows + table->count, 0, sizeof *table->rows);
    *slot = (uint16_t)table->count;
    return table->count++;
}

/* A class without its tokens that were new. */
static uint32_t coarse_of(uint32_t which) {
    return which / (2 * HAZARD_LABELS) / HAZARD_NEWS * (2 * HAZARD_LABELS) + which % (2 * HAZARD_LABELS);
}

void hazard_table_tick(hazard_table *table) {
    if (++table->uses % EVERY) return;
    table->unit /= DECAY;
    if (table->unit <= LARGEST_UNIT) return;
    for (uint32_t row = 0; row < table->count; row++)
        for (int age = 0; age < HAZARD_AGES; age++) {
            table->rows[row].used[age] /= table->unit;
            table->rows[row].seen[age] /= table->unit;
        }
    table->unit = 1.0;
}

void hazard_table_count(hazard_table *table, uint32_t which, uint32_t age, double share, int used) {
    double weight = share * table->unit;
    uint32_t rows[3] = {row_at(table, table->fine + which), row_at(table, table->middle + coarse_of(which)), 0};
    for (int i = 0; i < 3; i++) {
        if (rows[i] == NO_ROW) continue;
        table->rows[rows[i]].seen[age] += weight;
        if (used) table->rows[rows[i]].used[age] += weight;
    }
}

static void lean(const hazard_row *row, double prior, double *chances) {
    for (int age = 0; age < HAZARD_AGES; age++)
        chances[age] = (row->used[age] + prior * chances[age]) / (row->seen[age] + prior);
}

static uint8_t level_of(double rate) {
    int exponent;
    double mantissa = frexp(rate, &exponent);
    int level = (exponent - 1 - LOWEST) * STEPS + (int)((2 * mantissa - 1) * STEPS);
    return (uint8_t)(level < 0 ? 0 : level > HAZARD_LEVELS - 1 ? HAZARD_LEVELS - 1 : level);
}

/* Python: `hazards`, then `best_rates`. */
static void work_out(const hazard_table *table, uint32_t which, hazard_row *row) {
    double chances[HAZARD_AGES], use[HAZARD_AGES], time[HAZARD_AGES], left[HAZARD_AGES];
    double prior = PRIOR * table->unit;
    uint32_t middle = table->middle[coarse_of(which)];
    int pools = 0;
    for (int age = 0; age < HAZARD_AGES; age++) chances[age] = CHANCE;
    chances[0] = CHANCE * width(0) / width(1);
    lean(table->rows, LEAST * table->unit, chances);
    if (middle) lean(table->rows + middle, prior, chances);
    lean(row, prior, chances);
    for (int age = HAZARD_AGES - 1; age >= 0; age--) {
        double hazard = chances[age] > MOST ? MOST : chances[age];
        double uses = hazard, takes = width((uint32_t)age) * (1 - hazard / 2), rest = 1 - hazard;
        while (pools && use[pools - 1] * takes > uses * time[pools - 1]) {
            pools--;
            uses = uses + rest * use[pools];
            takes = takes + rest * time[pools];
            rest = rest * left[pools];
        }
        use[pools] = uses;
        time[pools] = takes;
        left[pools++] = rest;
        row->levels[age] = level_of(uses / takes);
    }
    row->known = 1;
    row->when = table->uses;
}

int hazard_table_level(hazard_table *table, uint32_t which, uint32_t age) {
    uint32_t at = row_at(table, table->fine + which);
    if (at == NO_ROW) {
        hazard_row spare = {0};
        work_out(table, which, &spare);
        return spare.levels[age];
    }
    hazard_row *row = table->rows + at;
    if (!row->known || table->uses - row->when >= EVERY) work_out(table, which, row);
    return row->levels[age];
}

size_t hazard_table_classes(const hazard_table *table) {
    size_t classes = 0;
    for (int which = 0; which < HAZARD_CLASSES; which++) classes += table->fine[which] != 0;
    return classes;
}

void hazard_table_learnt(const hazard_table *table, double *out) {
    for (int which = 0; which < HAZARD_CLASSES; which++) {
        if (!table->fine[which]) continue;
        const hazard_row *row = table->rows + table->fine[which];
        *out++ = which;
        for (int age = 0; age < HAZARD_AGES; age++, out++) {
            out[0] = row->used[age] / table->unit;
            out[HAZARD_AGES] = row->seen[age] / table->unit;
        }
        out += HAZARD_AGES;
    }
}

/* Counts that no sum makes infinite. */
static int sound(const double *row) {
    for (int i = 1; i < POLICY_LEARNT; i++)
        if (!(row[i] >= 0 && row[i] <= LARGEST_COUNT)) return 0;
    return 1;
}

int hazard_table_teach(hazard_table *table, const double *in, size_t classes) {
    hazard_table taught;
    if (hazard_table_start(&taught) < 0) return -1;
    taught.uses = table->uses;
    for (; classes; classes--, in += POLICY_LEARNT) {
        if (!(in[0] >= 0 && in[0] < HAZARD_CLASSES) || !sound(in)) break;
        uint32_t which = (uint32_t)in[0];
        uint32_t rows[3] = {row_at(&taught, taught.fine + which), row_at(&taught, taught.middle + coarse_of(which)), 0};
        if (rows[0] == NO_ROW || rows[1] == NO_ROW) break;
        for (int i = 0; i < 3; i++)
            for (int age = 0; age < HAZARD_AGES; age++) {
                taught.rows[rows[i]].used[age] += in[1 + age];
                taught.rows[rows[i]].seen[age] += in[1 + HAZARD_AGES + age];
            }
    }
    if (classes) {
        free(taught.rows);
        return -1;
    }
    free(table->rows);
    *table = taught;
    return 0;
}
