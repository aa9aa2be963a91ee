/* core/power.h - powers of two of the compiler's vector type (core/vectors.h), and what they need. */
#ifndef CTXREUSE_POWER_H
#define CTXREUSE_POWER_H

#include <stdint.h>

#include "core/vectors.h"

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

ALWAYS vec chosen(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
ALWAYS vec most(vec a, vec b) { return chosen(a > b, a, b); }
ALWAYS vec all(float x) { return (vec){0} + x; }

/* 2^x for x <= 0, 0 below -125; the polynomial is Cephes' (1.7e-7). */
ALWAYS vec power(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to nearest even */
    const ivec gone = x < all(-125.0f);
    x = chosen(gone, all(-125.0f), x);
    const vec k = x + magic, f = x - (k - magic);
    const uvec n = ((uvec)k - 0x4b400000u) << 23;
    vec y = all(1.535336188319500e-4f);
    y = y * f + 1.339887440266574e-3f;
    y = y * f + 9.618437357674640e-3f;
    y = y * f + 5.550332471162809e-2f;
    y = y * f + 2.402264791363012e-1f;
    y = y * f + 6.931472028550421e-1f;
    y = y * f + 1.0f;
    return chosen(gone, (vec){0}, (vec)((uvec)y + n));
}

#endif
