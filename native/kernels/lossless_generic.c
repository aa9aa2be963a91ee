/* lossless_generic.c - lossless packing without instructions beyond the base set: always usable (on aarch64 that is NEON). */
#include "lossless_steps.h"

const ctx_lossless_coder ctx_lossless_generic = {
    .needs = 0, .choose = lossless_choose, .split = lossless_split, .count = lossless_count, .join = lossless_join};
