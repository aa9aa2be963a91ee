/* dispatch.c - which kernel tables this machine can run, and which one is in use. */
#include "ctxreuse.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

extern const ctx_kernels ctx_generic;
#ifdef CTX_HAVE_AVX2
extern const ctx_kernels ctx_avx2;
#endif
#ifdef CTX_HAVE_AVX512
extern const ctx_kernels ctx_avx512;
#endif
#ifdef CTX_HAVE_NEON
extern const ctx_kernels ctx_neon;
#endif

/* In order of preference. */
static const ctx_kernels *const built[] = {
#ifdef CTX_HAVE_AVX512
    &ctx_avx512,
#endif
#ifdef CTX_HAVE_AVX2
    &ctx_avx2,
#endif
#ifdef CTX_HAVE_NEON
    &ctx_neon,
#endif
    &ctx_generic,
};
enum { BUILT = sizeof built / sizeof built[0] };

static const ctx_kernels *usable[BUILT];
static size_t usable_count;
static _Atomic(const ctx_kernels *) active;
static uint32_t present;    /* CTX_CPU_* */
static atomic_int detected; /* 0 not yet, 1 in work, 2 done */

#if defined(__x86_64__)
/* Registers that the operating system saves on a switch: an instruction set without that is not usable even where
 * the processor has it. Raw XGETBV because its intrinsic wants -mxsave for the whole file. */
static uint64_t saved_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static uint32_t cpu_bits(void) {
    uint32_t a, b, c, d, bits = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    uint64_t state = saved_state();
    if ((state & 0x06) != 0x06) return 0; /* XMM, YMM */
    if (c & bit_F16C) bits |= CTX_CPU_F16C;
    if (c & bit_FMA) bits |= CTX_CPU_FMA;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return bits;
    if (b & bit_AVX2) bits |= CTX_CPU_AVX2;
    if ((b & bit_BMI) && (b & bit_BMI2)) bits |= CTX_CPU_BMI2;
    const uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if ((b & wide) == wide && (state & 0xe0) == 0xe0) bits |= CTX_CPU_AVX512; /* opmask, ZMM low and high */
    const uint32_t bytes = bit_AVX512VBMI | bit_AVX512VBMI2;
    if ((bits & CTX_CPU_AVX512) && (c & bytes) == bytes) bits |= CTX_CPU_VBMI2;
    if ((bits & CTX_CPU_AVX512) && (c & bit_AVX512VNNI)) bits |= CTX_CPU_VNNI;
    return bits;
}
#elif defined(__aarch64__)
static uint32_t cpu_bits(void) { return CTX_CPU_NEON; }
#else
static uint32_t cpu_bits(void) { return 0; }
#endif

static void detect(void) {
    int expected = 0;
    if (atomic_load(&detected) == 2) return;
    if (!atomic_compare_exchange_strong(&detected, &expected, 1)) {
        while (atomic_load(&detected) != 2) {} /* another thread is a microsecond away from done */
        return;
    }
    present = cpu_bits();
    for (size_t i = 0; i < BUILT; i++)
        if ((built[i]->needs & ~present) == 0) usable[usable_count++] = built[i];
    atomic_store(&detected, 2);
}

uint32_t ctx_cpu(void) {
    detect();
    return present;
}

size_t ctx_usable(const ctx_kernels *const **tables) {
    detect();
    *tables = usable;
    return usable_count;
}

int ctx_use(const char *name) {
    detect();
    for (size_t i = 0; i < usable_count; i++)
        if (strcmp(usable[i]->name, name) == 0) {
            atomic_store(&active, usable[i]);
            return 0;
        }
    return -1;
}

const ctx_kernels *ctx_active(void) {
    const ctx_kernels *table = atomic_load_explicit(&active, memory_order_acquire);
    if (table) return table;
    const char *forced = getenv("CTXREUSE_KERNELS");
    detect();
    if (ctx_use(forced && *forced ? forced : usable[0]->name) < 0) return NULL;
    return atomic_load(&active);
}
