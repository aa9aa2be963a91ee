/* rans_avx512.c - entropy coding with 64 lanes in four registers; needs VBMI (byte permutes) and VBMI2 (expand, compress).
 *
 * A state is two words, high and low, of 32 lanes in a register each. That makes renormalisation three instructions
 * (is the high word zero; low becomes high; expand words from the stream into low) and lets 16-bit multiplications do all
 * arithmetic. Two streams take turns, because one waits for itself: a step's lookups need the words of the step before.
 */
#include <immintrin.h>

#include "rans_scalar.h"

typedef struct state {
    __m512i high[2], low[2]; /* lanes 0-31, lanes 32-63 */
} state;

#define SELECT 0xca /* ternary logic: a ? b : c */

static inline __m512i load(const void *at) { return _mm512_loadu_si512(at); }

static inline void put_state(const state *s, uint32_t x[64]) {
    uint16_t high[64], low[64];
    for (int i = 0; i < 2; i++) {
        _mm512_storeu_si512(high + 32 * i, s->high[i]);
        _mm512_storeu_si512(low + 32 * i, s->low[i]);
    }
    for (int lane = 0; lane < 64; lane++) x[lane] = (uint32_t)high[lane] << 16 | low[lane];
}

static inline void get_state(state *s, const void *x) {
    for (int i = 0; i < 2; i++) {
        const __m512i a = load((const uint8_t *)x + 128 * i), b = load((const uint8_t *)x + 128 * i + 64);
        const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                                              24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        s->low[i] = _mm512_permutex2var_epi16(a, even, b);
        s->high[i] = _mm512_permutex2var_epi16(a, _mm512_or_si512(even, _mm512_set1_epi16(1)), b);
    }
}

/* ---- Decoding --------------------------------------------------------------------------------------------------- */

enum { WORDS = 128 }; /* bytes that a step may read */

typedef struct reader {
    state s;
    const uint8_t *word, *end, *limit; /* limit: a step may begin here */
    const uint16_t *steps;
    uint8_t *symbols;
    size_t left; /* whole steps */
    int copied;
    ctx_rans_job *job;
    uint8_t tail[2 * WORDS];
} reader;

/* x = freq * (x >> 8) + bias, then the next words for lanes below 2^16. Returns how many. */
static inline unsigned advance(__m512i *high, __m512i *low, __m512i freq, __m512i bias, const uint8_t *word) {
    const __m512i shifted = _mm512_shldi_epi16(*high, *low, 8);
    const __m512i l = _mm512_add_epi16(_mm512_mullo_epi16(shifted, freq), bias);
    const __mmask32 carry = _mm512_cmplt_epu16_mask(l, bias);
    __m512i h = _mm512_add_epi16(_mm512_mulhi_epu16(shifted, freq), _mm512_mullo_epi16(_mm512_srli_epi16(*high, 8), freq));
    h = _mm512_mask_sub_epi16(h, carry, h, _mm512_set1_epi16(-1));
    const __mmask32 small = _mm512_testn_epi16_mask(h, h);
    *high = _mm512_mask_mov_epi16(h, small, l);
    *low = _mm512_mask_expand_epi16(l, small, load(word));
    return (unsigned)_mm_popcnt_u32(small);
}

static inline __attribute__((always_inline)) void decode_step(state *s, const ctx_rans_table *t, uint8_t *symbols,
                                                              const uint8_t **word) {
    const __m512i byte = _mm512_set1_epi16(0x00ff);
    /* Slots of lane i and lane 32 + i side by side. */
    const __m512i slots = _mm512_ternarylogic_epi32(byte, s->low[0], _mm512_slli_epi16(s->low[1], 8), SELECT);
    const __m512i below = _mm512_permutex2var_epi8(load(t->symbol), slots, load(t->symbol + 64));
    const __m512i above = _mm512_permutex2var_epi8(load(t->symbol + 128), slots, load(t->symbol + 192));
    const __m512i symbol = _mm512_mask_mov_epi8(below, _mm512_movepi8_mask(slots), above);
    const __m512i freq = _mm512_permutexvar_epi8(symbol, _mm512_broadcast_i64x4(_mm256_load_si256((const void *)t->freq)));
    const __m512i cum = _mm512_permutexvar_epi8(symbol, _mm512_broadcast_i64x4(_mm256_load_si256((const void *)t->cum)));
    const __m512i bias = _mm512_sub_epi8(slots, cum);
    const __m512i order = _mm512_set_epi8(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23,
                                          21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42,
                                          40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    _mm512_storeu_si512(symbols, _mm512_permutexvar_epi8(order, symbol));
    *word += 2 * advance(&s->high[0], &s->low[0], _mm512_and_si512(freq, byte), _mm512_and_si512(bias, byte), *word);
    *word += 2 * advance(&s->high[1], &s->low[1], _mm512_srli_epi16(freq, 8), _mm512_srli_epi16(bias, 8), *word);
}

/* The stream's last bytes move to where zeros follow, so that steps may read behind them; 0 when they are used up. */
static __attribute__((noinline)) int refill(reader *r) {
    if (r->copied) return 0;
    const size_t rest = (size_t)(r->end - r->word);
    memcpy(r->tail, r->word, rest);
    memset(r->tail + rest, 0, sizeof r->tail - rest);
    r->word = r->tail;
    r->end = r->limit = r->tail + rest;
    r->copied = 1;
    return 1;
}

static int begin(reader *r, ctx_rans_job *job) {
    job->status = CTX_RANS_CORRUPT;
    if (job->bytes < CTX_RANS_STATES || job->bytes % 2) return 0;
    get_state(&r->s, job->data);
    if (_mm512_testn_epi16_mask(r->s.high[0], r->s.high[0]) | _mm512_testn_epi16_mask(r->s.high[1], r->s.high[1])) return 0;
    r->word = job->data + CTX_RANS_STATES;
    r->end = job->data + job->bytes;
    /* Where fewer than WORDS bytes are left, the first test must fail. */
    r->limit = r->end - r->word >= WORDS ? r->end - WORDS : r->word - 1;
    r->steps = job->steps;
    r->symbols = job->symbols;
    r->left = job->n / CTX_RANS_LANES;
    r->copied = 0;
    r->job = job;
    return 1;
}

static void finish(const ctx_rans_tables *tables, reader *r) {
    uint32_t x[CTX_RANS_LANES];
    ctx_rans_job *job = r->job;
    const size_t rest = job->n % CTX_RANS_LANES;
    if (r->left || r->word > r->end) return; /* ran out of words */
    if (rest) {
        put_state(&r->s, x);
        r->word = rans_decode_step(&tables->at[*r->steps], x, rest, r->symbols, r->word, r->end);
        if (r->word == r->end && rans_end(job, x)) job->status = CTX_RANS_OK;
        return;
    }
    _mm512_storeu_si512(job->seeds, r->s.low[0]);
    _mm512_storeu_si512(job->seeds + 32, r->s.low[1]);
    const __m512i one = _mm512_set1_epi16(1);
    const __mmask32 wrong = _mm512_cmpneq_epi16_mask(r->s.high[0], one) | _mm512_cmpneq_epi16_mask(r->s.high[1], one);
    if (r->word == r->end && !wrong) job->status = CTX_RANS_OK;
}

/* A step of reader r, whose state and place are in registers; leaves the loop when the words are used up. */
#define DECODE_STEP(r, held, next)                                                                   \
    if (__builtin_expect(next > r->limit, 0)) {                                                      \
        r->word = next;                                                                              \
        if (!refill(r)) break;                                                                       \
        next = r->word;                                                                              \
    }                                                                                                \
    decode_step(&held, &at[r->steps[i]], r->symbols + i * CTX_RANS_LANES, &next);

static void decode_alone(const ctx_rans_table *at, reader *r) {
    state s = r->s;
    const uint8_t *word = r->word;
    const size_t steps = r->left;
    size_t i = 0;
    for (; i < steps; i++) {
        DECODE_STEP(r, s, word)
    }
    r->s = s, r->word = word, r->steps += i, r->symbols += i * CTX_RANS_LANES, r->left -= i;
}

static void decode_pair(const ctx_rans_table *at, reader *a, reader *b) {
    state s = a->s, t = b->s;
    const uint8_t *p = a->word, *q = b->word;
    const size_t steps = a->left < b->left ? a->left : b->left;
    size_t i = 0, done = 0; /* of b, of a: a corrupt b stops one step after a */
    for (; i < steps; i++) {
        DECODE_STEP(a, s, p)
        done++;
        DECODE_STEP(b, t, q)
    }
    a->s = s, a->word = p, a->steps += done, a->symbols += done * CTX_RANS_LANES, a->left -= done;
    b->s = t, b->word = q, b->steps += i, b->symbols += i * CTX_RANS_LANES, b->left -= i;
}

static void decode(const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count) {
    reader first, second;
    int waiting = 0;
    for (size_t i = 0; i < count; i++) {
        if (!begin(waiting ? &second : &first, &jobs[i])) continue;
        if (waiting) {
            decode_pair(tables->at, &first, &second);
            decode_alone(tables->at, &first);
            decode_alone(tables->at, &second);
            finish(tables, &first);
            finish(tables, &second);
        }
        waiting = !waiting;
    }
    if (!waiting) return;
    decode_alone(tables->at, &first);
    finish(tables, &first);
}

/* ---- Encoding --------------------------------------------------------------------------------------------------- */

/* Indices that move the first n words of a register to its end: 32 from ALIGN + n on. */
static const uint16_t ALIGN[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
};

/* One digit of a division: dividend = high 8 bits r:b below freq << 8; returns quotient << 8 | remainder. */
static inline __attribute__((always_inline)) __m512i divide(__m512i dividend, __m512i reciprocal, __m512i shift,
                                                            __m512i rest, __mmask32 over_one, __mmask32 down, int careful) {
    __m512i raised = dividend;
    if (careful) raised = _mm512_mask_add_epi16(dividend, down, dividend, _mm512_set1_epi16(1));
    /* A dividend by 1 is its own quotient. */
    const __m512i product = _mm512_mask_mulhi_epu16(dividend, over_one, raised, reciprocal);
    const __m512i quotient = _mm512_shrdv_epi16(product, _mm512_setzero_si512(), shift);
    return _mm512_add_epi16(dividend, _mm512_mullo_epi16(quotient, rest)); /* 256 q + (dividend - freq q) */
}

/* Emit words of lanes that would overflow, then x = x / freq << 8 | x % freq + cum, by long division in bytes. */
static inline __attribute__((always_inline)) unsigned put_symbols(__m512i *high, __m512i *low, const ctx_rans_table *t,
                                                                  const uint8_t *symbols, uint8_t *word, int careful) {
    const __m512i byte = _mm512_set1_epi16(0x00ff);
    const __m512i symbol = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)symbols));
    const __m512i threshold = _mm512_permutexvar_epi16(symbol, load(t->threshold));
    const __m512i reciprocal = _mm512_permutexvar_epi16(symbol, load(t->reciprocal));
    const __m512i rest = _mm512_permutexvar_epi16(symbol, load(t->rest));
    const __m512i start = _mm512_permutexvar_epi16(symbol, load(t->start));
    const __mmask32 over_one = _mm512_testn_epi16_mask(threshold, _mm512_set1_epi16(CTX_RANS_ONE));
    const __mmask32 down = careful ? _mm512_test_epi16_mask(threshold, _mm512_set1_epi16(CTX_RANS_DOWN)) : 0;

    const __mmask32 full = _mm512_cmpge_epu16_mask(_mm512_or_si512(*high, byte), threshold);
    const unsigned n = (unsigned)_mm_popcnt_u32(full);
    const __m512i words = _mm512_permutexvar_epi16(load(ALIGN + n), _mm512_maskz_compress_epi16(full, *low));
    _mm512_storeu_si512(word - 64, words);
    const __m512i l = _mm512_mask_mov_epi16(*low, full, *high), h = _mm512_maskz_mov_epi16(_knot_mask32(full), *high);

    const __m512i two = divide(h, reciprocal, threshold, rest, over_one, down, careful);
    const __m512i one = divide(_mm512_shldi_epi16(two, l, 8), reciprocal, threshold, rest, over_one, down, careful);
    const __m512i last = _mm512_ternarylogic_epi32(byte, l, _mm512_slli_epi16(one, 8), SELECT);
    const __m512i none = divide(last, reciprocal, threshold, rest, over_one, down, careful);
    *high = _mm512_ternarylogic_epi32(byte, _mm512_srli_epi16(one, 8), two, SELECT);
    *low = _mm512_add_epi16(none, start);
    return n;
}

typedef struct writer {
    state s;
    uint8_t *word;
    __m512i seen; /* OR of symbols, and 128 for what has no frequency */
    size_t left;  /* whole steps */
    int bad;
    ctx_rans_job *job;
} writer;

static inline __attribute__((always_inline)) void encode_step(state *s, __m512i *seen, uint8_t **word, const ctx_rans_table *t,
                                                              const uint8_t *symbols, int careful) {
    const __m512i absent = _mm512_broadcast_i64x4(_mm256_load_si256((const void *)t->absent)), held = load(symbols);
    *seen = _mm512_ternarylogic_epi32(*seen, held, _mm512_permutexvar_epi8(held, absent), 0xfe);
    *word -= 2 * put_symbols(&s->high[1], &s->low[1], t, symbols + 32, *word, careful);
    *word -= 2 * put_symbols(&s->high[0], &s->low[0], t, symbols, *word, careful);
}

static void start(const ctx_rans_tables *tables, writer *w, ctx_rans_job *job) {
    uint32_t x[CTX_RANS_LANES];
    const size_t whole = job->n / CTX_RANS_LANES, rest = job->n % CTX_RANS_LANES;
    rans_seed(job, x);
    w->word = job->data + ctx_rans_bound(job->n);
    w->bad = 0;
    if (rest)
        w->word = rans_encode_step(&tables->at[job->steps[whole]], x, rest, job->symbols + whole * CTX_RANS_LANES, w->word, &w->bad);
    get_state(&w->s, x);
    w->seen = _mm512_setzero_si512();
    w->left = whole;
    w->job = job;
}

static void stop(writer *w) {
    uint32_t x[CTX_RANS_LANES];
    const int bad = w->bad || _mm512_test_epi8_mask(w->seen, _mm512_set1_epi8((char)0xe0));
    put_state(&w->s, x);
    rans_finish(w->job, x, w->word, bad);
}

#define ENCODE_STEP(w, state, seen, word)                                                            \
    {                                                                                                \
        const size_t i = w->left - 1 - done, table = w->job->steps[i];                               \
        const uint8_t *symbols = w->job->symbols + i * CTX_RANS_LANES;                               \
        if (__builtin_expect(tables->down[table], 0))                                                \
            encode_step(&state, &seen, &word, &tables->at[table], symbols, 1);                       \
        else                                                                                         \
            encode_step(&state, &seen, &word, &tables->at[table], symbols, 0);                       \
    }

static void encode_alone(const ctx_rans_tables *tables, writer *w) {
    state s = w->s;
    uint8_t *word = w->word;
    __m512i seen = w->seen;
    for (size_t done = 0; done < w->left; done++) {
        ENCODE_STEP(w, s, seen, word)
    }
    w->s = s, w->word = word, w->seen = seen, w->left = 0;
}

static void encode_pair(const ctx_rans_tables *tables, writer *a, writer *b) {
    state s = a->s, t = b->s;
    uint8_t *p = a->word, *q = b->word;
    __m512i x = a->seen, y = b->seen;
    const size_t steps = a->left < b->left ? a->left : b->left;
    for (size_t done = 0; done < steps; done++) {
        ENCODE_STEP(a, s, x, p)
        ENCODE_STEP(b, t, y, q)
    }
    a->s = s, a->word = p, a->seen = x, a->left -= steps;
    b->s = t, b->word = q, b->seen = y, b->left -= steps;
}

static void encode(const ctx_rans_tables *tables, ctx_rans_job *jobs, size_t count) {
    writer a, b;
    for (size_t i = 0; i < count; i += 2) {
        start(tables, &a, &jobs[i]);
        if (i + 1 < count) {
            start(tables, &b, &jobs[i + 1]);
            encode_pair(tables, &a, &b);
            encode_alone(tables, &b);
            stop(&b);
        }
        encode_alone(tables, &a);
        stop(&a);
    }
}

static uint8_t count(const uint8_t *symbols, size_t n, uint32_t counts[32]) {
    __m512i most = _mm512_setzero_si512(), seen = most;
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        seen = _mm512_or_si512(seen, load(symbols + i));
        most = _mm512_max_epu8(most, load(symbols + i));
    }
    uint8_t all[64], highest[64], last = 0, rest = rans_count_scalar(symbols + i, n - i, counts);
    _mm512_storeu_si512(all, seen);
    _mm512_storeu_si512(highest, most);
    for (int j = 0; j < 64; j++) rest |= all[j], last = highest[j] > last ? highest[j] : last;
    for (uint8_t s = 0; s <= last && s < CTX_RANS_SYMBOLS; s++) {
        const __m512i one = _mm512_set1_epi8((char)s);
        uint64_t sum = 0;
        for (size_t at = 0; at < i; at += 64) sum += (uint64_t)_mm_popcnt_u64(_mm512_cmpeq_epi8_mask(load(symbols + at), one));
        counts[s] += (uint32_t)sum;
    }
    return rest;
}

const ctx_rans_coder ctx_rans_avx512 = {
    .needs = CTX_CPU_AVX512 | CTX_CPU_VBMI2, .encode = encode, .decode = decode, .count = count};
