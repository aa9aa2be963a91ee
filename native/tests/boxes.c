/* boxes.c - random boxes in random layouts: bounds against enumeration, copies and rotations against their definition. */
#include "test.h"

enum { ROUNDS = 4000 };

typedef struct held {
    uint8_t *memory;
    size_t bytes, offset;
    ctx_view view;
} held;

/* A layout of distinct elements: the axes in random order, with random gaps. A source may repeat an axis (stride 0). */
static held random_layout(const size_t shape[3], int source) {
    held box = {0};
    size_t order[3] = {0, 1, 2}, next = below(8) == 0 ? 1 + below(3) : 1, reach = 0;
    box.view.dtype = (ctx_dtype)below(CTX_DTYPES);
    for (size_t i = 3; i > 1; i--) {
        size_t j = below(3) ? i - 1 : below(i), swapped = order[i - 1];
        order[i - 1] = order[j];
        order[j] = swapped;
    }
    for (int i = 2; i >= 0; i--) {
        size_t axis = order[i], n = shape[axis];
        box.view.strides[axis] = source && below(12) == 0 ? 0 : n == 1 && below(4) == 0 ? SIZE_MAX / 2 : next;
        if (n > 1) reach += (n - 1) * box.view.strides[axis];
        next = reach + 1 + (below(3) ? 0 : below(5));
    }
    int empty = shape[0] == 0 || shape[1] == 0 || shape[2] == 0;
    box.offset = below(3) ? 0 : below(9);
    box.bytes = box.offset + (empty ? 0 : (reach + 1) * ctx_dtype_bytes(box.view.dtype));
    box.memory = random_bytes(box.bytes);
    box.view.at = box.memory + box.offset;
    CHECK(empty || ctx_view_check(box.bytes, box.offset, box.view.dtype, box.view.strides, shape, !source) == CTX_OK,
          "a layout that fits was refused");
    CHECK(empty || ctx_view_check(box.bytes - 1, box.offset, box.view.dtype, box.view.strides, shape, 0) != CTX_OK,
          "one byte too few was accepted");
    return box;
}

static uint8_t *element(const ctx_view *view, size_t h, size_t t, size_t d) {
    return view->at + (h * view->strides[0] + t * view->strides[1] + d * view->strides[2]) * ctx_dtype_bytes(view->dtype);
}

static void random_shape(size_t shape[3]) {
    shape[0] = below(20) ? 1 + below(4) : 0;
    shape[1] = below(20) ? 1 + below(below(3) ? 9 : 140) : 0;
    shape[2] = below(20) ? 1 + below(below(3) ? 70 : 140) : 0;
}

static void define_copy(const ctx_view *dst, const ctx_view *src, const size_t shape[3]) {
    for (size_t h = 0; h < shape[0]; h++)
        for (size_t t = 0; t < shape[1]; t++)
            for (size_t d = 0; d < shape[2]; d++)
                generic_table()->convert[src->dtype][dst->dtype](element(dst, h, t, d), element(src, h, t, d), 1);
}

static void define_rope(const ctx_view *dst, const ctx_view *src, const size_t shape[3], const float *cos,
                        const float *sin, size_t half, int interleaved) {
    const ctx_kernels *g = generic_table();
    for (size_t h = 0; h < shape[0]; h++)
        for (size_t t = 0; t < shape[1]; t++) {
            for (size_t i = 0; i < half; i++) {
                size_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : half + i;
                float x1, x2;
                g->convert[src->dtype][CTX_FP32]((uint8_t *)&x1, element(src, h, t, first), 1);
                g->convert[src->dtype][CTX_FP32]((uint8_t *)&x2, element(src, h, t, second), 1);
                float a = x1 * cos[i], b = x2 * sin[i], c = x2 * cos[i], d = x1 * sin[i], out[2] = {a - b, c + d};
                const uint32_t nan = 0x7fc00000;
                for (int j = 0; j < 2; j++) {
                    if (out[j] != out[j]) memcpy(&out[j], &nan, 4);
                    g->convert[CTX_FP32][dst->dtype](element(dst, h, t, j ? second : first), (uint8_t *)&out[j], 1);
                }
            }
            for (size_t d = 2 * half; d < shape[2]; d++)
                g->convert[src->dtype][dst->dtype](element(dst, h, t, d), element(src, h, t, d), 1);
        }
}

/* Run `statement` with each table on a copy of dst's memory and compare all of it, gaps too, with `want`. */
#define EACH_TABLE(dst, want, statement)                                                                      \
    do {                                                                                                      \
        const ctx_kernels *tables[TABLES];                                                                    \
        size_t count = all_tables(tables);                                                                    \
        for (size_t each = 0; each < count; each++) {                                                         \
            const ctx_kernels *k = tables[each];                                                              \
            uint8_t *copy = malloc((dst).bytes + 1);                                                          \
            memcpy(copy, (dst).memory, (dst).bytes);                                                          \
            copy = realloc(copy, (dst).bytes ? (dst).bytes : 1);                                              \
            ctx_view to = (dst).view;                                                                         \
            to.at = copy + (dst).offset;                                                                      \
            statement;                                                                                        \
            CHECK(memcmp(copy, want, (dst).bytes) == 0, "%s: round %d, shape %zu %zu %zu, types %d to %d",    \
                  k->name, round, shape[0], shape[1], shape[2], src.view.dtype, (dst).view.dtype);            \
            free(copy);                                                                                       \
        }                                                                                                     \
    } while (0)

static uint8_t *twin(const held *box, ctx_view *view) {
    uint8_t *memory = malloc(box->bytes + 1);
    memcpy(memory, box->memory, box->bytes);
    *view = box->view;
    view->at = memory + box->offset;
    return memory;
}

static void test_copy3(void) {
    for (int round = 0; round < ROUNDS; round++) {
        size_t shape[3];
        ctx_view defined;
        random_shape(shape);
        held src = random_layout(shape, 1), dst = random_layout(shape, 0);
        uint8_t *want = twin(&dst, &defined);
        define_copy(&defined, &src.view, shape);
        EACH_TABLE(dst, want, ctx_copy3(k, &to, &src.view, shape));
        free(want);
        free(src.memory);
        free(dst.memory);
    }
}

static void test_rope(void) {
    for (int round = 0; round < ROUNDS; round++) {
        size_t shape[3];
        ctx_view defined;
        random_shape(shape);
        const size_t half = below(shape[2] / 2 + 1);
        const int interleaved = (int)below(2), in_place = below(3) == 0;
        float *cos = malloc(half * 4 + 1), *sin = malloc(half * 4 + 1);
        for (size_t i = 0; i < half; i++) {
            cos[i] = (float)below(2001) / 1000 - 1;
            sin[i] = (float)below(2001) / 1000 - 1;
        }
        held src = random_layout(shape, 1), dst = random_layout(shape, 0);
        if (in_place) {
            free(src.memory);
            src = dst;
        }
        uint8_t *want = twin(&dst, &defined);
        define_rope(&defined, &src.view, shape, cos, sin, half, interleaved);
        EACH_TABLE(dst, want,
                   CHECK(ctx_rope_shift(k, &to, in_place ? &to : &src.view, shape, cos, sin, half, interleaved) == CTX_OK,
                         "no memory"));
        free(want);
        if (!in_place) free(src.memory);
        free(dst.memory);
        free(cos);
        free(sin);
    }
}

/* The check against plain enumeration on small boxes, and on numbers chosen to overflow. */
static void test_check(void) {
    enum { BYTES = 64 };
    for (int round = 0; round < 20 * ROUNDS; round++) {
        const size_t shape[3] = {below(4), below(4), below(4)}, strides[3] = {below(12), below(12), below(12)};
        const size_t offset = below(20);
        const ctx_dtype dtype = (ctx_dtype)below(CTX_DTYPES);
        uint8_t seen[256] = {0};
        int inside = 1, distinct = 1;
        for (size_t h = 0; h < shape[0]; h++)
            for (size_t t = 0; t < shape[1]; t++)
                for (size_t d = 0; d < shape[2]; d++) {
                    size_t at = h * strides[0] + t * strides[1] + d * strides[2];
                    inside &= offset + (at + 1) * ctx_dtype_bytes(dtype) <= BYTES;
                    distinct &= !seen[at]++;
                }
        CHECK((ctx_view_check(BYTES, offset, dtype, strides, shape, 0) == CTX_OK) == inside, "round %d", round);
        if (ctx_view_check(BYTES, offset, dtype, strides, shape, 1) == CTX_OK)
            CHECK(inside && distinct, "elements share an address: round %d", round);
    }
    const size_t wild[] = {0, 1, 2, 3, 1u << 16, (size_t)1 << 31, (size_t)1 << 32, (size_t)1 << 62, (size_t)1 << 63,
                           SIZE_MAX / 2, SIZE_MAX / 3, SIZE_MAX / 4 + 1, SIZE_MAX - 1, SIZE_MAX};
    const size_t kinds = sizeof wild / sizeof wild[0];
    for (int round = 0; round < 20 * ROUNDS; round++) {
        size_t v[7];
        for (int i = 0; i < 7; i++) v[i] = wild[below(kinds)];
        const size_t strides[3] = {v[0], v[1], v[2]}, shape[3] = {v[3], v[4], v[5]};
        if (ctx_view_check(BYTES, v[6], CTX_FP32, strides, shape, 0) != CTX_OK) continue;
        CHECK(v[6] <= BYTES, "offset outside");
        if (!shape[0] || !shape[1] || !shape[2]) continue;
        long double reach = 0; /* exact enough: any overflow is far beyond 64 */
        for (int i = 0; i < 3; i++) reach += (long double)(shape[i] - 1) * (long double)strides[i];
        CHECK((reach + 1) * 4 + (long double)v[6] <= BYTES, "outside: round %d", round);
    }
}

void test_boxes(void) {
    test_check();
    test_copy3();
    test_rope();
}
