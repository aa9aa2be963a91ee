/* core/variants.c - what the processor and the operating system offer, and the first row that it suffices for. */
#include "variants.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

/* Registers that the operating system saves on a switch: an instruction set without that is not usable even where
 * the processor has it. Raw XGETBV because its intrinsic wants -mxsave for the whole file. */
static uint64_t saved_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static uint32_t look(void) {
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
    if ((bits & CTX_CPU_AVX512) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5)) bits |= CTX_CPU_BF16;
    return bits;
}
#elif defined(__aarch64__)
static uint32_t look(void) { return CTX_CPU_NEON; }
#else
static uint32_t look(void) { return 0; }
#endif

int ctx_cpu_has(uint32_t needs) {
    enum { LOOKED = 1 << 30 };
    static _Atomic uint32_t present; /* two threads that look at once find the same */
    uint32_t bits = atomic_load_explicit(&present, memory_order_relaxed);
    if (!bits) atomic_store_explicit(&present, bits = look() | LOOKED, memory_order_relaxed);
    return !(needs & ~bits);
}

const ctx_variant *ctx_variant_here(const ctx_variant *rows) {
    while (!ctx_cpu_has(rows->needs)) rows++;
    return rows;
}

const ctx_variant *ctx_variant_of(const ctx_variant *rows, const char *name) {
    while (rows->needs && strcmp(rows->name, name) != 0) rows++;
    return ctx_variant_here(rows);
}
