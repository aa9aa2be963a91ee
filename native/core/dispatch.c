/* core/dispatch.c - which kernel tables this machine can run, and which one is in use. */
#include "ctxreuse.h"
#include "variants.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

extern const ctx_kernels ctx_avx512, ctx_avx2, ctx_neon, ctx_generic;

static const ctx_variant variants[] = {
    CTX_AVX512(ctx, CTX_CPU_AVX2 | CTX_CPU_F16C)
    CTX_AVX2(ctx, CTX_CPU_F16C)
    CTX_NEON(ctx)
    CTX_GENERIC(ctx)
};

static _Atomic(const ctx_kernels *) active;

const ctx_kernels *ctx_usable(size_t i) {
    const ctx_variant *row = ctx_variant_here(variants);
    for (; i > 0; i--) {
        if (!row->needs) return NULL;
        row = ctx_variant_here(row + 1);
    }
    return row->table;
}

int ctx_use(const char *name) {
    const ctx_kernels *table;
    for (size_t i = 0; (table = ctx_usable(i)); i++)
        if (strcmp(table->name, name) == 0) {
            atomic_store(&active, table);
            return 0;
        }
    return -1;
}

const ctx_kernels *ctx_active(void) {
    const ctx_kernels *table = atomic_load_explicit(&active, memory_order_acquire);
    if (table) return table;
    const char *forced = getenv("CTXREUSE_KERNELS");
    if (ctx_use(forced && *forced ? forced : ctx_usable(0)->name) < 0) return NULL;
    return atomic_load(&active);
}
