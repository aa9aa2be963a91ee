/* linear/linear.h - a linear layer: y = x w^T * scale + bias, with w read once where it lies.
 *
 * For the tokens of a decode step, where all time is reading w: a library's matrix product first packs w, which reads it
 * twice. And for prompts, where a library would first make fp32 of w: here that is done in the cache, or not at all where the
 * processor multiplies bf16. Weights are fp32, bf16, or int8 with a scale an output; sums are fp32. Each sum is of one row and
 * one output, and runs in the same order however many rows there are: a row has the same bits alone and among others.
 */
#ifndef CTXREUSE_LINEAR_H
#define CTXREUSE_LINEAR_H

#include "core/ctxreuse.h"

struct ctx_linear_kernels;

typedef enum ctx_weights { CTX_WEIGHTS_FP32 = 0, CTX_WEIGHTS_BF16 = 1, CTX_WEIGHTS_INT8 = 2, CTX_WEIGHTS = 3 } ctx_weights;

static inline size_t ctx_weights_bytes(ctx_weights format) { return (size_t)4 >> format; }

typedef struct ctx_linear {
    ctx_weights format;
    const uint8_t *w;           /* [outputs, inputs] */
    const float *scales, *bias; /* [outputs], or NULL: 1 and 0 */
    const float *x;             /* [rows, inputs] */
    float *y;                   /* [rows, outputs] */
    size_t rows, outputs, inputs;
    int rounded; /* x may be rounded to bf16: processors multiply that by weights that are as they lie */
    /* By ctx_linear_pack, else NULL; callers of ctx_linear_run leave both NULL. x of more rows than `few`, and in their place x
     * rounded, [rows][ctx_linear_padded], with zeros at the end. */
    const float *packed;
    const uint16_t *pairs;
} ctx_linear;

/* Of more rows than a table's `few`, groups of outputs are decoded, and multiplied with sets of rows by chunks of inputs that a
 * first-level cache holds. `packed` is [sets][chunks][CTX_SET][chunk], so that no stride of x makes its rows share a part of the cache. */
enum { CTX_SET = 12, CTX_GROUP = 8, CTX_CHUNK = 384, CTX_STEP = 16 /* what a chunk is a multiple of */ };

static inline size_t ctx_linear_chunks(size_t inputs) { return inputs ? (inputs + CTX_CHUNK - 1) / CTX_CHUNK : 1; }

/* All chunks have this length, the last with zeros behind. */
static inline size_t ctx_linear_chunk(size_t inputs) {
    const size_t chunks = ctx_linear_chunks(inputs);
    return (inputs + chunks * CTX_STEP - 1) / (chunks * CTX_STEP) * CTX_STEP;
}

/* Length of a row of `pairs`. */
static inline size_t ctx_linear_padded(size_t inputs) { return (inputs + 31) / 32 * 32; }

/* Memory for `room`, or for `packed` of so many rows. Aligned to what a vector reads: one that crosses a line of the cache is read
 * twice, which takes as long as all products. To be freed; NULL: there is none. */
float *ctx_linear_room(size_t rows, size_t inputs);

/* Sets `packed` or `pairs` of a if its rows need them; *memory is to be freed. CTX_NO_MEMORY, or CTX_OK. */
ctx_status ctx_linear_pack(const struct ctx_linear_kernels *kernels, ctx_linear *a, void **memory, size_t threads);

/* Rows r.. of a, as many as ctx_linear_block says: those that a second-level cache holds; all if they are not packed. */
ctx_linear ctx_linear_rows(const ctx_linear *a, size_t r);
size_t ctx_linear_block(const ctx_linear *a);

/* All outputs, by up to `threads` threads (core/pool.h). CTX_NO_MEMORY, or CTX_OK. */
ctx_status ctx_linear_run(const ctx_kernels *k, const ctx_linear *a, size_t threads);

typedef enum ctx_gate { CTX_GATE_SILU = 0, CTX_GATE_GELU_TANH = 1, CTX_GATES = 2 } ctx_gate;

enum { CTX_LAYERS = 3 /* at most in one call */ };

/* Several layers of the same x, their pieces shared out together. With `gate`, count is 2, and all[0].y becomes
 * gate(all[0].y) * all[1].y. */
ctx_status ctx_linear_run_all(const ctx_kernels *k, const ctx_linear *all, size_t count, const ctx_gate *gate, size_t threads);

typedef struct ctx_linear_kernels {
    size_t few; /* most rows that are not packed: up to 8 */
    /* n numbers rounded to bf16, and zeros up to ctx_linear_padded; NULL without `pairs`. It needs CTX_CPU_BF16. */
    void (*round)(const float *x, uint16_t *to, size_t n);
    /* Outputs first..last; `room` is ctx_linear_room(CTX_GROUP, inputs), if x is packed. */
    void (*run)(const ctx_linear *a, size_t first, size_t last, float *room);
    /* x = kind(x) * y. */
    void (*gate)(float *x, const float *y, size_t n, ctx_gate kind);
    /* y = x / sqrt(mean(x^2) + eps) * w; x may be y. */
    void (*norm)(const float *x, const float *w, float eps, float *y, size_t n);
    /* y [rows, width] = w [rows, n] d [n, width]. */
    void (*mix)(const float *w, const float *d, float *y, size_t rows, size_t n, size_t width);
} ctx_linear_kernels;

/* The active table's loops. */
const ctx_linear_kernels *ctx_linear_of(const ctx_kernels *k);

#endif
