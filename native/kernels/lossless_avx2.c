/* lossless_avx2.c - lossless packing with AVX2. Bits are spread by loops: PDEP is slower than they are on some processors. */
#include <immintrin.h>

#define LOSSLESS_MASK mask_of
#include "scalar.h"
static inline __attribute__((always_inline)) uint64_t mask_of(const uint8_t *flags) {
    const __m256i low = _mm256_loadu_si256((const void *)flags), high = _mm256_loadu_si256((const void *)(flags + 32));
    return (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(low, 7)) |
           (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(high, 7)) << 32;
}
#include "lossless_steps.h"

const ctx_lossless_coder ctx_lossless_avx2 = {
    .needs = CTX_CPU_AVX2, .choose = lossless_choose, .split = lossless_split, .count = lossless_count, .join = lossless_join};
