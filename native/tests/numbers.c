/* numbers.c - conversions: generic against arithmetic in double, every other table against generic bit for bit. */
#include <math.h>

#include "test.h"

enum { MANY = 1 << 17 };

static double decode(const uint8_t *at, ctx_dtype dtype) {
    uint32_t bits = 0;
    float value;
    memcpy(&bits, at, ctx_dtype_bytes(dtype));
    if (dtype == CTX_FP16) {
        int exponent = bits >> 10 & 31, mantissa = bits & 1023;
        double magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                           : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                          : ldexp(mantissa, -24);
        return bits & 0x8000 ? -magnitude : magnitude;
    }
    if (dtype == CTX_BF16) bits <<= 16;
    memcpy(&value, &bits, 4);
    return value;
}

/* The nearest value of the type, ties to even, by the definition: round(x / unit) * unit. */
static double nearest(double x, ctx_dtype dtype) {
    const int digits = dtype == CTX_FP16 ? 11 : 8, least = dtype == CTX_FP16 ? -24 : -133;
    const int top = dtype == CTX_FP16 ? 16 : 128;
    int exponent;
    if (x == 0 || isinf(x)) return x;
    frexp(x, &exponent);
    int unit = exponent - digits > least ? exponent - digits : least;
    double rounded = ldexp(rint(ldexp(x, -unit)), unit);
    return fabs(rounded) >= ldexp(1, top) ? copysign(INFINITY, x) : rounded;
}

/* Bit patterns of a type: all of a 16-bit one; of fp32 random ones, and neighbours of every fp16 and bf16 value and
 * midpoint, where rounding decides. */
static uint8_t *patterns(ctx_dtype dtype, size_t *n) {
    if (dtype != CTX_FP32) {
        uint16_t *words = malloc(65536 * 2);
        for (size_t i = 0; i < 65536; i++) words[i] = (uint16_t)i;
        *n = 65536;
        return (uint8_t *)words;
    }
    uint32_t *words = malloc(MANY * 4);
    for (size_t i = 0; i < MANY; i++) {
        uint32_t any = (uint32_t)random64(), nudge = (uint32_t)below(5) - 2;
        uint32_t narrow = (any & 0x80000000u) | ((any >> 13 & 0x3ffffu) << 12) % 0x10000000u;
        words[i] = i % 4 == 0 ? any : i % 4 == 1 ? (any & 0xffff8000u) + nudge : narrow + 0x37000000u + nudge;
    }
    *n = MANY;
    return (uint8_t *)words;
}

static void test_meaning(ctx_dtype from, ctx_dtype to) {
    size_t n, in = ctx_dtype_bytes(from), out = ctx_dtype_bytes(to);
    uint8_t *src = patterns(from, &n), *dst = malloc(n * out);
    generic_table()->convert[from][to](dst, src, n);
    for (size_t i = 0; i < n; i++) {
        double x = decode(src + i * in, from), got = decode(dst + i * out, to);
        double want = to == CTX_FP32 || isnan(x) ? x : nearest(x, to);
        CHECK(isnan(want) ? isnan(got) : got == want && signbit(got) == signbit(want),
              "type %d to %d: %a gave %a, not %a", from, to, x, got, want);
    }
    free(src);
    free(dst);
}

static void test_convert(const ctx_kernels *k, ctx_dtype from, ctx_dtype to) {
    size_t n, in = ctx_dtype_bytes(from), out = ctx_dtype_bytes(to);
    uint8_t *src = patterns(from, &n), *want = malloc(n * out), *got = malloc(n * out);
    generic_table()->convert[from][to](want, src, n);
    k->convert[from][to](got, src, n);
    for (size_t i = 0; i < n * out; i++)
        CHECK(got[i] == want[i], "%s: type %d to %d differs at element %zu", k->name, from, to, i / out);
    free(want);
    free(got);
    for (size_t length = 0; length < 70; length++) { /* every tail, at an odd address, without a byte to spare */
        uint8_t *tight = random_bytes(length * in + 1), *a = malloc(length * out + 1), *b = malloc(length * out + 1);
        a[0] = b[0] = 0;
        memcpy(tight + 1, src + below(n - 70) * in, length * in);
        generic_table()->convert[from][to](a + 1, tight + 1, length);
        k->convert[from][to](b + 1, tight + 1, length);
        CHECK(memcmp(a, b, length * out + 1) == 0, "%s: type %d to %d, length %zu", k->name, from, to, length);
        free(tight);
        free(a);
        free(b);
    }
    free(src);
}

static void test_transpose(const ctx_kernels *k) {
    for (int round = 0; round < 300; round++) {
        size_t rows = 1 + below(40), cols = 1 + below(40), bytes = round % 2 ? 4 : 2;
        size_t src_step = cols * bytes + below(9), dst_step = rows * bytes + below(9);
        uint8_t *src = random_bytes((rows - 1) * src_step + cols * bytes);
        uint8_t *dst = malloc((cols - 1) * dst_step + rows * bytes);
        (bytes == 4 ? k->transpose32 : k->transpose16)(dst, dst_step, src, src_step, rows, cols);
        for (size_t i = 0; i < rows; i++)
            for (size_t j = 0; j < cols; j++)
                CHECK(memcmp(dst + j * dst_step + i * bytes, src + i * src_step + j * bytes, bytes) == 0,
                      "%s: %zu x %zu at %zu, %zu", k->name, rows, cols, i, j);
        free(src);
        free(dst);
    }
}

void test_numbers(void) {
    const ctx_kernels *tables[TABLES];
    size_t count = all_tables(tables);
    for (int from = 0; from < CTX_DTYPES; from++)
        for (int to = 0; to < CTX_DTYPES; to++) {
            test_meaning((ctx_dtype)from, (ctx_dtype)to);
            for (size_t i = 0; i < count; i++) test_convert(tables[i], (ctx_dtype)from, (ctx_dtype)to);
        }
    for (size_t i = 0; i < count; i++) test_transpose(tables[i]);
}
