/* linear/generic.c - a linear layer in plain C; compilers turn the vector type into what the base instruction set has. */
#include <stddef.h>
#include <stdint.h>

#define LINEAR ctx_linear_generic
#define LANES 4
#define MOST 2
#define FEW 8
#define total(v) ((v)[0] + (v)[1] + ((v)[2] + (v)[3]))

#include "loops.inc"
