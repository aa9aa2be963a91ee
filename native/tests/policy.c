/* policy.c - shadows and resident sets under random requests, sensible and not; the Python tests compare their answers. */
#include "policy/hazard.h"
#include "policy/residents.h"
#include "policy/tree.h"
#include "test.h"

enum { LONGEST = 40, NUMBERS = 400, ROUNDS = 3000 };

typedef struct leader {
    policy_residents *residents;
    const policy_shadow *shadow;
    size_t gone;
} leader;

static void left(void *context, uint64_t id) {
    leader *f = context;
    f->gone++;
    policy_residents_left(f->residents, id);
}

static void key_of(uint64_t id, uint8_t key[POLICY_KEY]) {
    memset(key, 0, POLICY_KEY);
    memcpy(key, &id, sizeof id);
}

static void none(void *context, uint64_t id) {
    (void)context;
    (void)id;
}

/* A chain of numbers that grows from one of ten roots, forks at random, and now and then makes no sense. */
static size_t draw(uint64_t *ids, uint32_t *sizes, uint32_t *tokens) {
    size_t n = below(LONGEST + 1);
    uint64_t at = below(10);
    int wild = below(20) == 0;
    for (size_t i = 0; i < n; i++) {
        ids[i] = wild ? below(NUMBERS) : at * 0x9e3779b97f4a7c15ull;
        at = at * 3 + 11 + below(2);
        sizes[i] = (uint32_t)(wild && below(9) == 0 ? UINT32_MAX : 1 + below(50));
        tokens[i] = (uint32_t)below(100);
    }
    return n;
}

static void check(const policy_shadow *shadow) {
    const char *wrong = policy_check(shadow);
    CHECK(!wrong, "kind %d: %s", (int)shadow->kind, wrong);
    uint64_t *ids = malloc(((size_t)shadow->count + 1) * sizeof *ids);
    CHECK(ids, "no memory");
    CHECK(policy_order(shadow, ids, SIZE_MAX) == (ptrdiff_t)shadow->count, "kind %d: the order is incomplete", (int)shadow->kind);
    CHECK(policy_match(shadow, ids, shadow->count) == shadow->count, "the order names what is not held");
    free(ids);
}

static void learnt(policy_shadow *shadow) {
    size_t rows = policy_hazard_learnt(shadow, NULL);
    double *all = malloc(rows * POLICY_LEARNT * sizeof *all), *again = malloc(rows * POLICY_LEARNT * sizeof *again);
    CHECK(rows > 10 && all && again, "%zu classes were seen", rows);
    policy_hazard_learnt(shadow, all);
    all[POLICY_LEARNT] = 1e9;
    CHECK(policy_hazard_teach(shadow, all, rows) == -1, "there is no such class");
    policy_hazard_learnt(shadow, all);
    all[5] = -1;
    CHECK(policy_hazard_teach(shadow, all, rows) == -1, "less than nothing");
    policy_hazard_learnt(shadow, all);
    CHECK(policy_hazard_teach(shadow, all, rows) == 0, "teach");
    CHECK(policy_hazard_learnt(shadow, again) == rows, "other classes were learnt");
    CHECK(memcmp(all, again, rows * POLICY_LEARNT * sizeof *all) == 0, "other numbers were learnt");
    CHECK(policy_hazard_ghosts(shadow) > 40, "no ghosts for what is held");
    free(all);
    free(again);
}

static void test_shadow(policy_kind kind, policy_kind other) {
    policy_shadow *shadow = policy_new(kind, 1500, 1e-3, 1e-5, 0.5, NULL), *rival = policy_new(other, 1500, 1e-3, 1e-5, 0.5, shadow);
    policy_residents *residents = policy_residents_new();
    CHECK(shadow && rival && residents, "no memory");
    if (shadow->hazard) policy_hazard_remember(shadow, 40, 0.5);
    leader f = {residents, shadow, 0};
    uint64_t ids[LONGEST];
    uint32_t sizes[LONGEST], tokens[LONGEST];
    uint8_t key[POLICY_KEY];
    size_t hit, went = 0;
    double clock = 0;
    for (int round = 0; round < ROUNDS; round++) {
        size_t n = draw(ids, sizes, tokens), held = policy_match(f.shadow, ids, n);
        const policy_shadow *before = f.shadow;
        clock += (double)below(3) * (below(40) == 0 ? 5000 : 1);
        CHECK(policy_request(shadow, ids, sizes, tokens, n, clock, &hit, f.shadow == shadow ? left : none, &f) == 0, "request");
        CHECK(f.shadow != shadow || hit == held, "%zu hits, %zu held", hit, held);
        CHECK(policy_request(rival, ids, sizes, tokens, n, clock, &hit, f.shadow == rival ? left : none, &f) == 0, "request");
        for (size_t i = 0; i < n; i++) {
            int followed = policy_holds(f.shadow, ids[i]);
            if (followed) policy_residents_came(residents, ids[i]);
            key_of(ids[i], key);
            CHECK(policy_residents_hold(residents, key, sizes[i], tokens[i], followed) == 0, "hold");
        }
        while (residents->head != POLICY_NONE && residents->orphans > 100) policy_residents_drop(residents, residents->head), went++;
        if (below(50) == 0) {
            f.shadow = before == shadow ? rival : shadow;
            CHECK(policy_residents_follow(residents, before, f.shadow) == 0, "follow");
        }
        if (n) policy_mark(below(2) ? shadow : rival, ids[below(n)], (uint32_t)below(40), clock);
        if (n && below(9) == 0) policy_drop(shadow, ids[n - 1]);
        if (below(99) == 0) policy_hold(shadow, ids[0], 0, 0, 5, 0, 5), policy_use(shadow, ids, 1, clock), policy_fit(shadow, none, NULL);
        if (round % 50 == 0) check(shadow);
    }
    check(shadow);
    check(rival);
    CHECK(f.gone > 100 && went > 100, "nothing went");
    CHECK(policy_beyond(shadow, shadow) == 0, "more than itself");
    CHECK(policy_bytes(shadow) > (size_t)shadow->count * sizeof(policy_block), "bytes");
    while (residents->count) {
        uint32_t place = 0;
        for (uint32_t at = 0; at < residents->hash.size; at++)
            if (policy_hash_at(&residents->hash, at) != POLICY_NONE) place = policy_hash_at(&residents->hash, at);
        policy_residents_drop(residents, place);
    }
    CHECK(!residents->orphans && !residents->tokens && residents->head == POLICY_NONE, "an empty residents has orphans or tokens");
    if (shadow->hazard) learnt(shadow);
    policy_free(shadow);
    policy_free(rival);
    policy_residents_free(residents);
}

/* Shadows that share an arena are filled from one tree, some with less room than it takes: then places differ. */
static void test_fill(void) {
    enum { NODES = 600 };
    context_tree *tree = calloc(1, sizeof *tree);
    uint32_t order[NODES];
    uint8_t key[POLICY_KEY];
    CHECK(tree && context_tree_reserve(tree, NODES) == 0, "no memory");
    tree->free = POLICY_NONE;
    for (uint32_t i = 0; i < NODES; i++) {
        uint32_t parent = i && below(9) ? (below(3) ? i - 1 : (uint32_t)below(i < 5 ? i : 5)) : POLICY_NONE;
        key_of(random64(), key);
        order[NODES - 1 - i] = context_tree_add(tree, key, parent, 16, 5, 0);
    }
    policy_shadow *shadows[POLICY_KINDS];
    for (int i = 0; i < POLICY_KINDS; i++) {
        shadows[i] = policy_new((policy_kind)i, i % 3 ? 5 * NODES : 1000, 1e-3, 1e-5, 0.5, i ? shadows[0] : NULL);
        CHECK(shadows[i] && policy_fill(shadows[i], tree, order, NODES, 1.0) == 0, "fill");
        CHECK(shadows[i]->count == NODES, "%u blocks of kind %d", shadows[i]->count, i);
        policy_fit(shadows[i], none, NULL);
        for (int k = 0; k <= i; k++) check(shadows[k]);
    }
    CHECK(shadows[1]->arena == shadows[0]->arena && shadows[0]->arena->used < 2 * NODES, "blocks are not shared");
    for (int i = 0; i < POLICY_KINDS; i++) policy_free(shadows[i]);
    context_tree_free(tree);
}

static uint64_t listed(const void *owner, uint32_t place) { return ((const uint64_t *)owner)[place]; }

/* Slots with room for all distances, and for hardly any, as in a very large table. */
static void test_hash(uint32_t bits) {
    enum { PLACES = 800 };
    uint64_t ids[PLACES] = {0};
    uint8_t held[PLACES] = {0};
    policy_hash hash = {0};
    CHECK(policy_hash_reserve(&hash, PLACES, ids, listed) == 0, "no memory");
    uint32_t size = hash.size, count = 0;
    if (bits) hash.bits = bits;
    for (int i = 0; i < PLACES; i++) ids[i] = random64();
    for (int round = 0; round < 20000; round++) {
        uint32_t place = (uint32_t)below(PLACES), at = policy_hash_start(&hash, ids[place]);
        uint32_t found = policy_hash_next(&hash, ids[place], &at, ids, listed);
        CHECK(found == (held[place] ? place : POLICY_NONE), "found %u for %u", found, place);
        if (held[place]) {
            policy_hash_remove(&hash, ids[place], place, ids, listed);
            ids[place] = random64();
        } else {
            policy_hash_add(&hash, ids[place], place);
        }
        held[place] ^= 1;
        count += held[place] ? 1 : -1u;
        CHECK(hash.count == count, "%u of %u are counted", hash.count, count);
    }
    CHECK(hash.size == size && count > PLACES / 3, "%u entries", count);
    CHECK(policy_hash_reserve(&hash, UINT32_MAX / 2, ids, listed) == -1, "more than places have bits");
    policy_hash_warm(&hash, ids, PLACES, ids, sizeof *ids);
    free(hash.slots);
}

void test_policy(void) {
    test_hash(0);
    test_hash(31);
    test_hash(30);
    test_fill();
    for (int kind = 0; kind < POLICY_KINDS; kind++) test_shadow((policy_kind)kind, (policy_kind)((kind + 1) % POLICY_KINDS));
}
