/* rans.c - every coder against the generic one, exact division for all frequencies, and hostile bytes. */
#include "rans.h"

static int sound(ctx_rans_status status, size_t n, const uint8_t *symbols) {
    for (size_t i = 0; status == CTX_RANS_OK && i < n; i++)
        if (symbols[i] >= CTX_RANS_SYMBOLS) return 0;
    return 1;
}

void random_freqs(uint8_t freq[32]) {
    const size_t kind = below(6), first = below(31), most = kind == 0 ? 32 : 2 + below(31 - first);
    uint32_t sum = 0;
    memset(freq, 0, 32);
    if (kind == 1) { /* two symbols, one as likely as can be */
        const size_t other = (first + 1 + below(31)) % 32, large = below(2) ? 255 : 180 + below(76);
        freq[first] = (uint8_t)large;
        freq[other] = (uint8_t)(256 - large);
        return;
    }
    const size_t from = kind == 0 ? 0 : first;
    for (size_t i = 0; i < most; i++) {
        const uint32_t room = 256 - sum - (uint32_t)(most - i - 1), f = 1 + (uint32_t)below(kind == 2 ? room : 1 + 512 / most);
        freq[from + i] = (uint8_t)(f > room ? room : f > 255 ? 255 : f);
        sum += freq[from + i];
    }
    for (size_t i = 0; sum < 256; i = (i + 1) % most)
        if (freq[from + i] < 255) freq[from + i]++, sum++;
}

stream random_stream(size_t n, size_t tables) {
    uint8_t *freqs = malloc(32 * tables);
    size_t bad;
    stream s = {.n = n};
    const size_t steps = ctx_rans_steps(n);
    for (size_t i = 0; i < tables; i++) random_freqs(freqs + 32 * i);
    s.tables = ctx_rans_prepare(freqs, tables, &bad);
    CHECK(s.tables && bad == tables, "table %zu was refused", bad);
    free(freqs);
    s.symbols = random_bytes(n);
    s.steps = malloc(2 * steps + !steps);
    for (size_t i = 0; i < steps; i++) s.steps[i] = (uint16_t)(i && below(3) ? s.steps[i - 1] : below(tables));
    for (size_t i = 0; i < n; i++) s.symbols[i] = s.tables->at[s.steps[i / 64]].symbol[s.symbols[i]];
    for (int i = 0; i < 64; i++) s.seeds[i] = (uint16_t)random64();
    uint8_t *room = random_bytes(ctx_rans_bound(n));
    ctx_rans_job job = {.data = room, .symbols = s.symbols, .n = n, .steps = s.steps, .seeds = s.seeds};
    CHECK(ctx_rans_encode(generic_table(), s.tables, &job, 1) == 1, "status %d", job.status);
    s.bytes = job.bytes;
    s.data = malloc(s.bytes);
    memcpy(s.data, room + ctx_rans_bound(n) - s.bytes, s.bytes);
    free(room);
    return s;
}

void free_stream(stream *s) {
    ctx_rans_free(s->tables);
    free(s->symbols);
    free(s->data);
    free(s->steps);
}

ctx_rans_status decode_everywhere(const stream *s, const uint8_t *data, size_t bytes) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    uint8_t *first = malloc(s->n + !s->n), *again = malloc(s->n + !s->n), *exact = malloc(bytes + !bytes);
    uint16_t seeds[64], others[64];
    ctx_rans_status status = CTX_RANS_OK;
    memcpy(exact, data, bytes);
    for (size_t i = 0; i < count; i++) {
        ctx_rans_job job = {exact, bytes, i ? again : first, s->n, s->steps, i ? others : seeds, CTX_RANS_OK};
        ctx_rans_decode(tables[i], s->tables, &job, 1);
        CHECK(sound(job.status, s->n, job.symbols), "%s: a symbol of 32 or more", tables[i]->name);
        if (i == 0) status = job.status;
        CHECK(job.status == status, "%s says %d, %s says %d", tables[i]->name, job.status, tables[0]->name, status);
        CHECK(i == 0 || status != CTX_RANS_OK || (!memcmp(first, again, s->n) && !memcmp(seeds, others, 128)),
              "%s decodes otherwise", tables[i]->name);
    }
    if (status == CTX_RANS_OK && bytes == s->bytes && !memcmp(data, s->data, bytes))
        CHECK(!memcmp(first, s->symbols, s->n) && !memcmp(seeds, s->seeds, 128), "not what was encoded");
    free(first);
    free(again);
    free(exact);
    return status;
}

static size_t random_size(void) { return below(4) ? below(400) : 64 * below(40) + (below(2) ? below(64) : 0); }

static void test_streams(void) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    for (size_t round = 0; round < 1200; round++) {
        stream s = random_stream(round < 301 ? round : random_size(), 1 + below(4));
        CHECK(s.bytes <= ctx_rans_bound(s.n), "%zu bytes for %zu symbols", s.bytes, s.n);
        CHECK(decode_everywhere(&s, s.data, s.bytes) == CTX_RANS_OK, "round %zu", round);
        for (size_t i = 0; i < count; i++) {
            uint8_t *room = random_bytes(ctx_rans_bound(s.n));
            ctx_rans_job job = {.data = room, .symbols = s.symbols, .n = s.n, .steps = s.steps, .seeds = s.seeds};
            CHECK(ctx_rans_encode(tables[i], s.tables, &job, 1) == 1, "%s: status %d", tables[i]->name, job.status);
            CHECK(job.bytes == s.bytes && !memcmp(room + ctx_rans_bound(s.n) - s.bytes, s.data, s.bytes), "%s: round %zu",
                  tables[i]->name, round);
            free(room);
        }
        free_stream(&s);
    }
}

/* Streams of different lengths in one call, one of them broken: the others come out whole. */
static void test_batches(void) {
    enum { MOST = 7 };
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    for (size_t round = 0; round < 60; round++)
        for (size_t i = 0; i < count; i++) {
            const size_t streams = 1 + below(MOST), broken = below(MOST);
            stream s[MOST];
            ctx_rans_job jobs[MOST];
            uint16_t seeds[MOST][64];
            stream model = random_stream(64 * 40, 3);
            for (size_t j = 0; j < streams; j++) {
                s[j] = model;
                s[j].n = below(64 * 40 + 1);
                uint8_t *room = random_bytes(ctx_rans_bound(s[j].n));
                jobs[j] = (ctx_rans_job){.data = room, .symbols = model.symbols, .n = s[j].n, .steps = model.steps, .seeds = model.seeds};
            }
            CHECK(ctx_rans_encode(tables[i], model.tables, jobs, streams) == streams, "%s", tables[i]->name);
            for (size_t j = 0; j < streams; j++) {
                memmove(jobs[j].data, jobs[j].data + ctx_rans_bound(s[j].n) - jobs[j].bytes, jobs[j].bytes);
                jobs[j].symbols = random_bytes(s[j].n);
                jobs[j].seeds = seeds[j];
                if (j == broken) jobs[j].bytes -= 2;
            }
            const size_t first = ctx_rans_decode(tables[i], model.tables, jobs, streams);
            CHECK(first == (broken < streams ? broken : streams), "%s: first bad %zu", tables[i]->name, first);
            for (size_t j = 0; j < streams; j++) {
                CHECK(jobs[j].status == (j == broken ? CTX_RANS_CORRUPT : CTX_RANS_OK), "%s: stream %zu", tables[i]->name, j);
                CHECK(j == broken || !memcmp(jobs[j].symbols, model.symbols, s[j].n), "%s: stream %zu", tables[i]->name, j);
                free(jobs[j].symbols);
                free(jobs[j].data);
            }
            free_stream(&model);
        }
}

/* The division of the vector coders, digit by digit, for every dividend of every frequency. */
static void test_division(void) {
    for (uint32_t f = 1; f < 256; f++) {
        uint8_t freq[32] = {0};
        size_t bad;
        freq[0] = (uint8_t)f, freq[1] = (uint8_t)(256 - f);
        ctx_rans_tables *tables = ctx_rans_prepare(freq, 1, &bad);
        const ctx_rans_table *t = tables->at;
        const uint32_t m = t->reciprocal[0], shift = t->threshold[0] & 15, down = (t->threshold[0] & CTX_RANS_DOWN) != 0;
        const uint32_t bytes = t->reciprocal_low[0] | (uint32_t)t->reciprocal_high[0] << 8;
        CHECK((m >> 15 != 0) == (f > 1), "the reciprocal of %u does not tell it from 1", f);
        for (uint32_t u = 0; u < f << 8; u++) {
            CHECK((f == 1 ? u : (u + down) * m >> 16 >> shift) == u / f, "%u / %u", u, f);
            CHECK((((u + t->raise[0]) * bytes >> 16) * t->power[0] & 0xffff) >> 7 == u / f, "%u / %u, bytes", u, f);
        }
        ctx_rans_free(tables);
    }
}

static void test_refusals(void) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    uint8_t freq[64] = {0};
    size_t bad;
    memset(freq, 8, 32);
    freq[32] = 255;
    ctx_rans_tables *refused = ctx_rans_prepare(freq, 2, &bad); /* a sum of 255 */
    CHECK(bad == 1, "table %zu", bad);
    ctx_rans_free(refused);
    freq[33] = 1;
    ctx_rans_tables *known = ctx_rans_prepare(freq, 2, &bad);
    CHECK(bad == 2, "table %zu", bad);
    for (size_t i = 0; i < count; i++)
        for (size_t round = 0; round < 600; round++) {
            const size_t n = 1 + below(300), place = below(n);
            uint16_t steps[5] = {0}, seeds[64] = {0};
            uint8_t *symbols = random_bytes(n), *room = random_bytes(ctx_rans_bound(n));
            for (size_t j = 0; j < n && round % 3; j++) symbols[j] &= 31;
            ctx_rans_job job = {.data = room, .symbols = symbols, .n = n, .steps = steps, .seeds = seeds};
            if (round % 3 == 0) symbols[place] |= 32;
            if (round % 3 == 1) steps[place / 64] = 1, symbols[place] = 2;
            if (round % 3 == 2) steps[place / 64] = 2;
            CHECK(ctx_rans_encode(tables[i], known, &job, 1) == 0, "%s took it", tables[i]->name);
            CHECK(job.status == (round % 3 == 2 ? CTX_RANS_TABLE : CTX_RANS_SYMBOL), "%s: %d", tables[i]->name, job.status);
            free(symbols);
            free(room);
        }
    ctx_rans_free(known);
}

static void test_counts(void) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    for (size_t round = 0; round < 200; round++) {
        const size_t n = round % 8 ? below(700) : 20000 + below(9000), steps = ctx_rans_steps(n);
        uint8_t *symbols = random_bytes(n);
        uint16_t *step = malloc(2 * steps + 1);
        uint32_t want[3 * 32] = {0};
        for (size_t i = 0; i < steps; i++) step[i] = (uint16_t)(below(9) && i ? step[i - 1] : below(3));
        for (size_t i = 0; i < n; i++) want[32 * step[i / 64] + (symbols[i] %= below(2) ? 32 : 7)]++;
        for (size_t i = 0; i < count; i++) {
            uint32_t got[3 * 32] = {0};
            CHECK(ctx_rans_count(tables[i], symbols, n, step, 3, got) == CTX_RANS_OK, "%s", tables[i]->name);
            CHECK(!memcmp(got, want, sizeof want), "%s: round %zu", tables[i]->name, round);
            if (n == 0) continue;
            const size_t place = below(n);
            symbols[place] += 32;
            CHECK(ctx_rans_count(tables[i], symbols, n, step, 3, got) == CTX_RANS_SYMBOL, "%s", tables[i]->name);
            symbols[place] -= 32;
            CHECK(ctx_rans_count(tables[i], symbols, n, step, step[0], got) == CTX_RANS_TABLE, "%s", tables[i]->name);
        }
        free(symbols);
        free(step);
    }
}

size_t fuzz_rans(size_t inputs) {
    size_t decoded = 0, done = 0;
    while (done < inputs) {
        stream s = random_stream(random_size(), 1 + below(4));
        for (int use = 0; use < 64 && done < inputs; use++, done++) {
            const size_t kind = below(8), room = s.bytes + 300;
            size_t bytes = s.bytes;
            uint8_t *data = malloc(room);
            memcpy(data, s.data, bytes);
            if (kind == 0) bytes = below(bytes + 1);
            if (kind == 1) {
                const size_t more = below(room - bytes + 1);
                for (size_t i = 0; i < more; i++) data[bytes + i] = (uint8_t)random64();
                bytes += more;
            }
            if (kind == 2)
                for (size_t i = below(bytes); i < bytes; i++) data[i] = (uint8_t)random64();
            if (kind >= 3)
                for (size_t flips = 1 + below(kind); flips-- > 0;) data[below(bytes)] ^= (uint8_t)(1u << below(8));
            if (kind == 7) bytes = below(2) ? bytes : bytes - 2 * below(bytes / 2);
            decoded += decode_everywhere(&s, data, bytes) == CTX_RANS_OK;
            free(data);
        }
        free_stream(&s);
    }
    return decoded;
}

void test_rans(void) {
    test_division();
    test_refusals();
    test_streams();
    test_batches();
    test_counts();
}
