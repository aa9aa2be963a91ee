/* rans/rans.c - prepared tables of the entropy coder, the checks before its kernels run, and which kernels those are. */
#include "rans.h"
#include "core/variants.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

extern const ctx_rans_coder ctx_rans_avx512, ctx_rans_avx2, ctx_rans_neon, ctx_rans_generic;

static const ctx_variant variants[] = {
    CTX_AVX512(ctx_rans, CTX_CPU_VBMI2)
    CTX_AVX2(ctx_rans, 0)
    CTX_NEON(ctx_rans)
    CTX_GENERIC(ctx_rans)
};

static const ctx_rans_coder *coder_of(const ctx_kernels *k) { return ctx_variant_of(variants, k->name)->table; }

const char *ctx_rans_name(const ctx_kernels *k) { return ctx_variant_of(variants, k->name)->name; }

static_assert(sizeof(ctx_rans_table) == 896, "every table is aligned as the first is");

/* The reciprocal of f for dividends u < f << 8, so that the quotient is (u + down) * m >> (16 + shift) exactly; u * m
 * alone with m rounded up is exact but for 27 large f (native/tests/rans.c tries them all). f = 1 has no 16-bit m. */
static void divide_by(ctx_rans_table *t, int s, uint32_t f) {
    uint32_t shift = 0, m = 0, flags = f ? 0 : CTX_RANS_ABSENT;
    if (f == 1) {
        flags = CTX_RANS_ONE;
    } else if (f) {
        while ((2u << shift) < f) shift++;
        const uint32_t one = 1u << (16 + shift), up = (one + f - 1) / f;
        const uint32_t worst = (f << 8) - 1; /* a multiple of f less one: where rounding up shows first */
        const int exact = (uint64_t)worst * up >> (16 + shift) == worst / f;
        m = exact ? up : one / f;
        flags = exact ? 0 : CTX_RANS_DOWN;
    }
    t->threshold[s] = (uint16_t)((f ? f : 255) << 8 | shift | flags);
    t->reciprocal[s] = (uint16_t)m;
    /* (u + 1) * 65535 >> 16 is u. */
    const uint32_t bytes = f == 1 ? 65535 : m;
    t->reciprocal_low[s] = (uint8_t)bytes;
    t->reciprocal_high[s] = (uint8_t)(bytes >> 8);
    t->raise[s] = (flags & (CTX_RANS_ONE | CTX_RANS_DOWN)) != 0;
    t->power[s] = f ? (uint8_t)(128 >> shift) : 0;
}

static int fill(ctx_rans_table *t, const uint8_t freq[32], uint8_t *down, uint8_t *last) {
    uint32_t sum = 0, present = 0;
    *down = 0;
    for (int s = 0; s < CTX_RANS_SYMBOLS; s++) sum += freq[s], present += freq[s] != 0;
    if (sum != 256 || present < 2) return -1;
    uint32_t cum = 0;
    for (int s = 0; s < CTX_RANS_SYMBOLS; s++) {
        const uint32_t f = freq[s];
        divide_by(t, s, f);
        if (t->threshold[s] & CTX_RANS_DOWN) *down = 1;
        t->freq[s] = f ? (uint8_t)f : 255;
        t->absent[s] = f ? 0 : 128;
        t->cum[s] = (uint8_t)cum; /* 256 only behind the last symbol, where it is never used */
        t->start[s] = f ? (uint16_t)cum : 0;
        t->rest[s] = f ? (uint16_t)(256 - f) : 0;
        t->rest_byte[s] = f ? (uint8_t)(256 - f) : 0;
        memset(t->symbol + cum, s, f);
        cum += f;
        t->above[s] = ((cum ^ 0x80) & 0xff) * 0x01010101u;
        if (f) *last = (uint8_t)s;
    }
    return 0;
}

ctx_rans_tables *ctx_rans_prepare(const uint8_t *freqs, size_t count, size_t *bad) {
    *bad = count;
    if (count > UINT16_MAX + 1u) return NULL;
    /* One piece: header, tables at 64 bytes, the two lists. */
    const size_t lead = (sizeof(ctx_rans_tables) + 63) / 64 * 64, body = count * sizeof(ctx_rans_table);
    uint8_t *memory = aligned_alloc(64, (lead + body + 2 * count + 63) / 64 * 64);
    if (!memory) return NULL;
    ctx_rans_table *at = (ctx_rans_table *)(void *)(memory + lead);
    uint8_t *down = memory + lead + body, *last = down + count;
    memset(memory, 0, lead + body + 2 * count);
    ctx_rans_tables *tables = (ctx_rans_tables *)(void *)memory;
    *tables = (ctx_rans_tables){count, at, down, last};
    for (size_t i = 0; i < count && *bad == count; i++)
        if (fill(&at[i], freqs + i * CTX_RANS_SYMBOLS, &down[i], &last[i]) < 0) *bad = i;
    return tables;
}

void ctx_rans_free(ctx_rans_tables *tables) { free(tables); }

static int steps_fit(const uint16_t *steps, size_t count, size_t tables) {
    uint16_t most = 0;
    for (size_t i = 0; i < count; i++) most = steps[i] > most ? steps[i] : most;
    return count == 0 || most < tables;
}

static size_t run(void (*coder)(const ctx_rans_tables *, ctx_rans_job *, size_t), const ctx_rans_tables *tables,
                  ctx_rans_job *jobs, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!steps_fit(jobs[i].steps, ctx_rans_steps(jobs[i].n), tables->count)) {
            jobs[i].status = CTX_RANS_TABLE;
            return i;
        }
    coder(tables, jobs, count);
    for (size_t i = 0; i < count; i++)
        if (jobs[i].status != CTX_RANS_OK) return i;
    return count;
}

size_t ctx_rans_encode(const ctx_kernels *k, const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count) {
    return run(coder_of(k)->encode, tables, jobs, count);
}

size_t ctx_rans_decode(const ctx_kernels *k, const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count) {
    return run(coder_of(k)->decode, tables, jobs, count);
}

ctx_rans_status ctx_rans_count(const ctx_kernels *k, const uint8_t *symbols, size_t n, const uint16_t *steps,
                               size_t tables, uint32_t *counts) {
    const ctx_rans_coder *coder = coder_of(k);
    const size_t total = ctx_rans_steps(n);
    uint8_t seen = 0;
    if (!steps_fit(steps, total, tables)) return CTX_RANS_TABLE;
    for (size_t step = 0, run_end; step < total; step = run_end) {
        for (run_end = step + 1; run_end < total && steps[run_end] == steps[step];) run_end++;
        const size_t first = step * CTX_RANS_LANES, end = run_end == total ? n : run_end * CTX_RANS_LANES;
        seen |= coder->count(symbols + first, end - first, counts + (size_t)steps[step] * CTX_RANS_SYMBOLS);
    }
    return seen < CTX_RANS_SYMBOLS ? CTX_RANS_OK : CTX_RANS_SYMBOL;
}
