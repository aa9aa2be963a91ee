/* core/vectors.h - the compiler's vector type of LANES floats, which the including file defines. */
#ifndef CTXREUSE_VECTORS_H
#define CTXREUSE_VECTORS_H

#include <string.h>

#define ALWAYS static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));

static inline vec vec_of(const float *at) {
    vec v;
    memcpy(&v, at, sizeof v);
    return v;
}

static inline void put_vec(float *at, vec v) { memcpy(at, &v, sizeof v); }

#endif
