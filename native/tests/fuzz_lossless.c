/* fuzz_lossless.c - lossless planes on every instruction set, and hostile bytes: ctxreuse_fuzz_lossless INPUTS [SEED].
 *
 * Every input is a plane of random size, kind of numbers and strides that goes there and back with each table, or its
 * stream changed, cut or lengthened: all tables must say the same of it. The suite gives 20,000; for ten million see
 * fuzz_rans.c.
 */
#include "lossless/lossless.h"
#include "test.h"

uint64_t random_state = 0x9e3779b97f4a7c15ull;

/* Elements that look like channels of a cache, or like nothing. */
static void fill(uint8_t *at, size_t count, ctx_dtype dtype, size_t dim) {
    const size_t item = ctx_dtype_bytes(dtype), kind = below(4);
    const int bits = dtype == CTX_FP16 ? 10 : 7, most = dtype == CTX_FP16 ? 31 : 255;
    uint8_t base[64];
    for (int i = 0; i < 64; i++) base[i] = (uint8_t)below((size_t)most + 1);
    for (size_t i = 0; i < count; i++) {
        uint64_t x = random64();
        if (kind > 0 && (kind < 3 || x >> 60)) {
            const uint32_t fall = (uint32_t)__builtin_ctzll(x | 1ull << 20), top = base[i % dim % 64];
            const uint32_t exponent = top > fall ? top - fall : 0, sign = kind == 1 ? base[i % dim % 64] & 1 : x >> 40 & 1;
            const uint32_t half = sign << 15 | exponent << bits | (x >> 48 & ((1u << bits) - 1));
            x = item == 4 ? (uint64_t)half << 16 | (x >> 20 & 0xffff) : half;
        }
        memcpy(at + i * item, &x, item); /* little-endian machines only, as the tables here are */
    }
}

typedef struct plane {
    ctx_dtype dtype;
    size_t shape[3], bytes, stream_bytes;
    uint8_t *elements, *stream;
} plane;

static plane random_plane(void) {
    static const size_t tokens[] = {64, 64, 64, 128, 1, 16, 32, 63, 65, 100, 320};
    plane p = {.dtype = (ctx_dtype)below(3), .shape = {below(3), tokens[below(11)], below(12)}};
    const size_t count = p.shape[0] * p.shape[1] * p.shape[2];
    p.bytes = count * ctx_dtype_bytes(p.dtype);
    p.elements = random_bytes(p.bytes);
    fill(p.elements, count, p.dtype, p.shape[2] ? p.shape[2] : 1);
    uint8_t *room = random_bytes(ctx_lossless_bound(p.bytes));
    const ctx_view view = {p.elements, p.dtype, {p.shape[1] * p.shape[2], p.shape[2], 1}};
    CHECK(ctx_lossless_encode(generic_table(), &view, p.shape, room, &p.stream_bytes) == CTX_LOSSLESS_OK, "encode");
    CHECK(p.stream_bytes <= ctx_lossless_bound(p.bytes), "%zu bytes", p.stream_bytes);
    p.stream = malloc(p.stream_bytes);
    memcpy(p.stream, room, p.stream_bytes);
    const ctx_kernels *tables[TABLES];
    for (size_t i = all_tables(tables); i-- > 0;) {
        size_t bytes;
        CHECK(ctx_lossless_encode(tables[i], &view, p.shape, room, &bytes) == CTX_LOSSLESS_OK, "encode");
        CHECK(bytes == p.stream_bytes && memcmp(room, p.stream, bytes) == 0, "%s: other bytes", tables[i]->name);
    }
    free(room);
    return p;
}

/* Decode with every table into memory of exactly the plane's size; 1 and the elements in `first` if it is a stream. */
static int decode_everywhere(const plane *p, const uint8_t *data, size_t bytes, uint8_t *first) {
    const ctx_kernels *tables[TABLES];
    int result = -1;
    for (size_t i = all_tables(tables); i-- > 0;) {
        uint8_t *out = random_bytes(p->bytes);
        size_t failed;
        ctx_lossless_job job = {data, bytes, {out, p->dtype, {p->shape[1] * p->shape[2], p->shape[2], 1}}, {0}, NULL};
        memcpy(job.shape, p->shape, sizeof job.shape);
        const int good = ctx_lossless_decode(tables[i], &job, 1, &failed) == CTX_LOSSLESS_OK;
        CHECK(failed == (size_t)good, "%s: %zu", tables[i]->name, failed);
        CHECK(result < 0 || result == good, "%s: says other", tables[i]->name);
        if (good && result < 0) memcpy(first, out, p->bytes);
        CHECK(!good || memcmp(first, out, p->bytes) == 0, "%s: other elements", tables[i]->name);
        result = good;
        free(out);
    }
    return result;
}

/* A changed copy of exactly its size. */
static uint8_t *changed(const plane *p, size_t *bytes) {
    const size_t kind = below(8);
    *bytes = kind == 0 ? below(p->stream_bytes + 1) : p->stream_bytes + (kind == 1 ? below(40) : 0);
    uint8_t *data = random_bytes(*bytes);
    memcpy(data, p->stream, *bytes < p->stream_bytes ? *bytes : p->stream_bytes);
    for (size_t i = below(4); kind > 1 && i < 4; i++) {
        const size_t at = below(3) ? below(*bytes) : below(*bytes < 64 ? *bytes : 64);
        data[at] = below(2) ? (uint8_t)random64() : data[at] ^ (uint8_t)(1u << below(8));
    }
    return data;
}

int main(int count, char **arguments) {
    const size_t inputs = count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
    size_t decoded = 0;
    if (inputs == 0) {
        fprintf(stderr, "usage: %s INPUTS [SEED]\n", arguments[0]);
        return 2;
    }
    if (count > 2) random_state ^= strtoull(arguments[2], NULL, 10) * 0x2545f4914f6cdd1dull;
    for (size_t done = 0; done < inputs;) {
        plane p = random_plane();
        uint8_t *out = random_bytes(p.bytes);
        CHECK(decode_everywhere(&p, p.stream, p.stream_bytes, out) == 1, "a stream was refused");
        CHECK(memcmp(out, p.elements, p.bytes) == 0, "other elements came back");
        for (int i = 0; i < 40 && done < inputs; i++, done++) {
            size_t bytes;
            uint8_t *data = changed(&p, &bytes);
            decoded += decode_everywhere(&p, data, bytes, out) == 1;
            free(data);
        }
        free(out);
        free(p.elements);
        free(p.stream);
    }
    printf("%zu inputs, %zu decoded, the rest refused\n", inputs, decoded);
    return 0;
}
