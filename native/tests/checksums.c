/* checksums.c - XXH3 against values of the reference library, and the checked scatter against copy and hash apart. */
#include "test.h"

static const struct {
    size_t bytes;
    uint64_t sum;
} KNOWN[] = {
    /* xxHash 0.8 over byte i = (167*i + (i >> 8)) mod 256 */
    {241, 0x9dc4f9091538415e},  {255, 0x717d95ff74337bf2},  {256, 0xf10740cc92f50822},  {1023, 0x8b843abc83dc6901},
    {1024, 0x538a456f0d08c251}, {1025, 0x66637a3581e4fd54}, {1088, 0x4eacbd686468c2ad}, {2048, 0x0dc0c08d9925bede},
    {4097, 0xbf9ea4860bf4641e}, {49152, 0x11e81eeffe2de0cf},
};

static void test_known(const ctx_kernels *k) {
    for (size_t n = 0; n < sizeof KNOWN / sizeof *KNOWN; n++) {
        uint8_t *at = random_bytes(KNOWN[n].bytes);
        for (size_t i = 0; i < KNOWN[n].bytes; i++) at[i] = (uint8_t)(i * 167 + (i >> 8));
        CHECK(ctx_xxh3(k, at, KNOWN[n].bytes) == KNOWN[n].sum, "%s, %zu bytes", k->name, KNOWN[n].bytes);
        free(at);
    }
}

/* Two blocks into a tensor with gaps between heads; every other round aligned, so that both ways of copying are taken. */
static void test_scatter(const ctx_kernels *k, int round) {
    const size_t heads = 1 + below(3), dim = below(2) ? 64 : 1 + below(40), odd = round % 2 ? 4 * below(4) : 0;
    size_t counts[2], sizes[2], room = 1 + below(3), tokens = 0;
    uint8_t *planes[2], *held[2];
    uint64_t sums[2];
    for (int i = 0; i < 2; i++) {
        counts[i] = below(4) ? 4 * (1 + below(16)) : 1 + below(70);
        while (heads * counts[i] * dim * 4 <= 240) counts[i]++;
        sizes[i] = heads * counts[i] * dim * 4;
        size_t offset = below(17);
        held[i] = random_bytes(sizes[i] + offset);
        planes[i] = held[i] + offset;
        sums[i] = ctx_xxh3(generic_table(), planes[i], sizes[i]);
        tokens += counts[i];
    }
    room = tokens + 16 * below(2);
    const size_t bytes = heads * room * dim * 4;
    uint8_t *memory = NULL, *want = random_bytes(bytes);
    CHECK(posix_memalign((void **)&memory, 64, bytes + odd) == 0, "no memory");
    memcpy(memory + odd, want, bytes);
    const ctx_view got = {memory + odd, CTX_FP32, {room * dim, dim, 1}};
    CHECK(ctx_scatter_checked(k, &got, planes, CTX_FP32, counts, sums, 2, heads, dim) == 2, "%s refused", k->name);
    CHECK(ctx_scatter_checked(k, &got, planes, CTX_FP32, counts, sums, 2, 0, dim) == 2, "%s: nothing to write", k->name);
    for (size_t i = 0, token = 0; i < 2; token += counts[i++]) {
        const ctx_view plane = {planes[i], CTX_FP32, {counts[i] * dim, dim, 1}}, here = {want + token * dim * 4, CTX_FP32, {room * dim, dim, 1}};
        ctx_copy3(k, &here, &plane, (const size_t[3]){heads, counts[i], dim});
    }
    CHECK(memcmp(memory + odd, want, bytes) == 0, "%s: %zu heads, %zu dim", k->name, heads, dim);
    const size_t bad = below(2);
    planes[bad][below(sizes[bad])] ^= (uint8_t)(1 << below(8));
    CHECK(ctx_scatter_checked(k, &got, planes, CTX_FP32, counts, sums, 2, heads, dim) == bad, "%s believed it", k->name);
    for (int i = 0; i < 2; i++) free(held[i]);
    free(memory);
    free(want);
}

void test_checksums(void) {
    const ctx_kernels *tables[TABLES];
    const size_t count = all_tables(tables);
    for (size_t t = 0; t < count; t++) {
        test_known(tables[t]);
        for (int round = 0; round < 300; round++) test_scatter(tables[t], round);
    }
}
