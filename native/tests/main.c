/* main.c - runs every C test against every table that this machine can use; ctest and tests/native call it. */
#include "klt.h"
#include "test.h"

uint64_t random_state = 0x9e3779b97f4a7c15ull;

static void test_dispatch(void) {
    CHECK(strcmp(generic_table()->name, "generic") == 0, "generic is not last");
    CHECK(ctx_use("nonesuch") == -1 && ctx_use("") == -1, "an unknown table was taken");
    printf("tables:");
    const ctx_kernels *tables[TABLES];
    for (size_t i = 0, count = all_tables(tables); i < count; i++) {
        CHECK(ctx_use(tables[i]->name) == 0 && ctx_active() == tables[i], "%s", tables[i]->name);
        printf(" %s", tables[i]->name);
    }
    printf("\n");
}

static void test_pages(void) {
    const size_t bytes = (size_t)9 << 20;
    uint8_t *at = random_bytes(bytes), first = at[0], last = at[bytes - 1];
    int64_t advised = ctx_advise_hugepages(at, bytes, 1);
    CHECK(advised == 0 || (advised >= (int64_t)6 << 20 && advised % (2 << 20) == 0), "advised %lld", (long long)advised);
    CHECK(ctx_advise_hugepages(at, 4096, 0) == 0, "no whole huge page in 4096 bytes");
    CHECK(at[0] == first && at[bytes - 1] == last, "contents changed");
    free(at);
}

int main(void) {
    test_dispatch();
    test_pages();
    test_numbers();
    test_boxes();
    test_checksums();
    test_rans();
    test_klt();
    test_attend();
    test_linear();
    test_decoder();
    test_drift();
    test_policy();
    test_suffix();
    puts("all native tests passed");
    return 0;
}
