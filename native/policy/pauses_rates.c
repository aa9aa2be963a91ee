/* policy/pauses_rates.c - how likely paused sessions return, by type and age: ctxreuse/pauses/estimator.py and hazard.py. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pauses.h"

/* Returns of a type beyond which its counts are halved; what a coarser type weighs, in expected returns. */
static const double ENOUGH = 4096, STRENGTH = 4, LARGEST = 1e12;
static const uint32_t NO_ROW = UINT32_MAX;
_Static_assert(sizeof(pauses_counts) == PAUSES_LEARNT * sizeof(double), "a row of what was learnt");

/* In full: a pow() of another library could round otherwise. */
const double pauses_ages[PAUSES_BUCKETS + 1] = {
    0x0.0p+0, 0x1.0000000000000p-1, 0x1.599999999999ap-1, 0x1.d28f5c28f5c2ap-1,
    0x1.3aed916872b03p+0, 0x1.a9271de69ad45p+0, 0x1.1efa67620ee8fp+1, 0x1.836ba52ac7541p+1,
    0x1.058242b01358cp+2, 0x1.610973a0e6eb1p+2, 0x1.dc998f4c6af09p+2, 0x1.41b473ed2e95ap+3,
    0x1.b24d3619cbb06p+3, 0x1.25275151697d8p+4, 0x1.8bc1e0fab4cfdp+4, 0x1.0b22de42d3a5fp+5,
    0x1.68a245a704200p+5, 0x1.e6db113b125e7p+5, 0x1.48a0aba179330p+6, 0x1.bba5b480639e7p+6,
    0x1.2b76403d100b0p+7, 0x1.944609ec08dbap+7, 0x1.10e279e5b92dep+8, 0x1.7064f15c86cacp+8,
    0x1.f15512a34f91cp+8, 0x1.4fb3062e3c1c0p+9, 0x1.c531aebe6abf7p+9, 0x1.31e7ef8d54daep+10,
    0x1.9cf91cfecc278p+10, 0x1.16c1c05f30344p+11, 0x1.78525d4d4de03p+11, 0x1.fc08cac1f5eebp+11,
    0x1.56ec55a952cdfp+12, 0x1.cef2407162fc7p+12, 0x1.387d1eb2ef9dap+13, 0x1.a5dc1ca4c37b4p+13,
    0x1.1cc160226a59ap+14, 0x1.806b74fb42c5dp+14, 0x1.037bbbc33378cp+15, 0x1.5e4d70adebe30p+15,
    0x1.d8e88b5131a5bp+15,
};

int pauses_bucket(double age) {
    int low = 0, high = PAUSES_BUCKETS - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (pauses_ages[middle] <= age) low = middle;
        else high = middle - 1;
    }
    return low;
}

int pauses_table_start(pauses_table *table) {
    *table = (pauses_table){.rows = calloc(1, sizeof *table->rows), .room = 1, .used = 1};
    return table->rows ? 0 : -1;
}

/* The row that a slot names, made if there is none; NO_ROW without memory. */
static uint32_t row_at(pauses_table *table, uint32_t *slot) {
    if (*slot) return *slot;
    uint32_t row = table->free;
    if (row) {
        table->free = (uint32_t)table->rows[row].total;
    } else {
        if (table->used == table->room) {
            uint32_t room = table->room + table->room / 4 + 8;
            pauses_counts *rows = realloc(table->rows, room * sizeof *rows);
            if (!rows) return NO_ROW;
            table->rows = rows;
            table->room = room;
        }
        row = table->used++;
    }
    memset(table->rows + row, 0, sizeof *table->rows);
    return *slot = row;
}

/* Rows of its types, coarse to fine; how many. */
static int rows_of(pauses_table *table, pauses_type type, uint32_t rows[4]) {
    int n = 0;
    rows[n++] = 0;
    rows[n++] = row_at(table, table->stops + type.stop);
    if (type.stop != PAUSES_RUNNING) rows[n++] = row_at(table, table->labels + type.label);
    rows[n++] = row_at(table, type.rows + type.stop);
    return n;
}

static double clipped(double age, double since, double until) {
    double low = age > since ? age : since;
    return low < until ? low : until;
}

void pauses_away(pauses_table *table, pauses_type type, double since, double until) {
    const double last = pauses_ages[PAUSES_BUCKETS];
    double seconds[PAUSES_BUCKETS];
    uint32_t rows[4];
    if (!isfinite(since) || !isfinite(until) || until <= since) return;
    if (since < 0) since = 0;
    int first = pauses_bucket(since), end = pauses_bucket(until);
    for (int i = first; i <= end; i++) seconds[i] = clipped(pauses_ages[i + 1], since, until) - clipped(pauses_ages[i], since, until);
    if (until > last) seconds[PAUSES_BUCKETS - 1] += until - (since > last ? since : last);
    for (int n = rows_of(table, type, rows), row = 0; row < n; row++)
        for (int i = first; i <= end && rows[row] != NO_ROW; i++) table->rows[rows[row]].seconds[i] += seconds[i];
}

void pauses_returned(pauses_table *table, pauses_type type, double age) {
    uint32_t rows[4];
    int at = pauses_bucket(age), n = rows_of(table, type, rows);
    for (int row = 0; row < n; row++) {
        if (rows[row] == NO_ROW) continue;
        pauses_counts *counts = table->rows + rows[row];
        counts->returns[at]++;
        counts->changes++;
        if (++counts->total <= ENOUGH) continue;
        counts->total *= 0.5;
        for (int i = 0; i < PAUSES_BUCKETS; i++) counts->returns[i] *= 0.5, counts->seconds[i] *= 0.5;
    }
}

static double wide(const double *counts, int i) {
    double sum = counts[i];
    if (i > 0) sum += counts[i - 1];
    if (i < PAUSES_BUCKETS - 1) sum += counts[i + 1];
    return sum;
}

/* Python: `shrink`. */
static void shrink(const pauses_counts *counts, double *rates) {
    double expected[PAUSES_BUCKETS];
    for (int i = 0; i < PAUSES_BUCKETS; i++) expected[i] = counts->seconds[i] * rates[i];
    for (int i = 0; i < PAUSES_BUCKETS; i++)
        rates[i] = rates[i] * (wide(counts->returns, i) + STRENGTH) / (wide(expected, i) + STRENGTH);
}

void pauses_worth(const pauses_table *table, pauses_type type, float worth[PAUSES_BUCKETS]) {
    double rates[PAUSES_BUCKETS], returns[PAUSES_BUCKETS], time[PAUSES_BUCKETS], left[PAUSES_BUCKETS];
    uint32_t rows[3] = {table->stops[type.stop], type.stop == PAUSES_RUNNING ? 0 : table->labels[type.label], type.rows[type.stop]};
    int pools = 0;
    for (int i = 0; i < PAUSES_BUCKETS; i++) rates[i] = 1.0 / (10.0 + 2.0 * pauses_ages[i]);
    shrink(table->rows, rates);
    for (int i = 0; i < 3; i++)
        if (rows[i]) shrink(table->rows + rows[i], rates);
    /* Gittins' index from the last bucket on: a wait goes on as long as what comes is worth more (Python: `worth`, which
     * tries all times to stop waiting). */
    for (int i = PAUSES_BUCKETS - 1; i >= 0; i--) {
        double width = pauses_ages[i + 1] - pauses_ages[i], steps = rates[i] * width, chance = -expm1(-steps);
        double takes = steps > 1e-12 ? chance / rates[i] : width, rest = exp(-steps);
        while (pools && returns[pools - 1] * takes > chance * time[pools - 1]) {
            pools--;
            chance += rest * returns[pools];
            takes += rest * time[pools];
            rest *= left[pools];
        }
        returns[pools] = chance;
        time[pools] = takes;
        left[pools++] = rest;
        worth[i] = (float)(chance / takes);
    }
}

void pauses_drop_rows(pauses_table *table, uint32_t rows[PAUSES_STOPS]) {
    for (int stop = 0; stop < PAUSES_STOPS; stop++) {
        if (!rows[stop]) continue;
        table->rows[rows[stop]].total = table->free;
        table->free = rows[stop];
        rows[stop] = 0;
    }
}

/* ---- What was learnt -------------------------------------------------------------------------------------------- */

static const pauses_counts *kept(const pauses_table *table, int key) {
    uint32_t row = key <= PAUSES_STOPS ? table->stops[key ? key - 1 : 0] : table->labels[key - PAUSES_STOPS - 1];
    return key && !row ? NULL : table->rows + (key ? row : 0);
}

size_t policy_pauses_learnt(const policy_shadow *shadow, double *out) {
    size_t n = 0;
    for (int key = 0; key <= PAUSES_STOPS + PAUSES_LABELS; key++) {
        const pauses_counts *counts = kept(&shadow->pauses->table, key);
        if (!counts) continue;
        n++;
        if (!out) continue;
        *out++ = key;
        *out++ = counts->changes;
        memcpy(out, counts->returns, 2 * sizeof counts->returns);
        out += 2 * PAUSES_BUCKETS;
    }
    return n;
}

/* A row without its key, for counts that no sum makes infinite. */
static int sound(const double *row, double *total) {
    *total = 0;
    for (int i = 0; i < PAUSES_LEARNT; i++)
        if (!(row[i] >= 0 && row[i] <= LARGEST)) return 0;
    for (int i = 0; i < PAUSES_BUCKETS; i++) *total += row[2 + i];
    return *total <= 2 * ENOUGH && row[0] <= PAUSES_STOPS + PAUSES_LABELS;
}

int policy_pauses_teach(policy_shadow *shadow, const double *in, size_t rows) {
    pauses_table taught, *table = &shadow->pauses->table;
    if (pauses_table_start(&taught) < 0) return -1;
    for (double total; rows && sound(in, &total); rows--, in += PAUSES_LEARNT) {
        int key = (int)in[0];
        uint32_t all = 0, row = 0;
        if (key) row = row_at(&taught, key <= PAUSES_STOPS ? taught.stops + key - 1 : taught.labels + key - PAUSES_STOPS - 1);
        if (row == NO_ROW) break;
        pauses_counts *counts = taught.rows + (key ? row : all);
        counts->changes = in[1];
        counts->total = total;
        memcpy(counts->returns, in + 2, 2 * sizeof counts->returns);
    }
    if (rows) {
        free(taught.rows);
        return -1;
    }
    /* Sessions keep what they have shown. */
    for (uint32_t slot = 0; slot < shadow->pauses->used; slot++)
        for (int stop = 0; stop < PAUSES_STOPS; stop++) shadow->pauses->sessions[slot].rows[stop] = 0;
    free(table->rows);
    *table = taught;
    return 0;
}
