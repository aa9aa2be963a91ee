/* attention/generic.c - attention in plain C, for any dim; compilers turn the vector type into what the base instruction set has. */
#include <stddef.h>
#include <stdint.h>

#define ATTEND ctx_attend_generic
#define LANES 4

/* Without a rounding instruction; no contraction in this file. */
static inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

#define total(v) ((v)[0] + (v)[1] + ((v)[2] + (v)[3]))

#include "loops.inc"
