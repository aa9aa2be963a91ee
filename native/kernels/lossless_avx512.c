/* lossless_avx512.c - lossless packing with AVX-512; processors with VBMI2 have a fast PDEP and PEXT (BMI2) as well. */
#include <immintrin.h>
#include <stdint.h>

#define LOSSLESS_MASK mask_of
#define LOSSLESS_EXPAND _pdep_u64
#define LOSSLESS_COMPRESS _pext_u64
static inline __attribute__((always_inline)) uint64_t mask_of(const uint8_t *flags) {
    const __m512i bytes = _mm512_loadu_si512(flags);
    return _mm512_test_epi8_mask(bytes, bytes);
}
#include "lossless_steps.h"

const ctx_lossless_coder ctx_lossless_avx512 = {.needs = CTX_CPU_AVX512 | CTX_CPU_VBMI2,
                                                .choose = lossless_choose,
                                                .split = lossless_split,
                                                .count = lossless_count,
                                                .join = lossless_join};
