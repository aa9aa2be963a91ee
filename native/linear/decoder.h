/* linear/decoder.h - what surrounds the attention of a decoder layer, for a decode step, or a prompt where the kernels compute it.
 *
 * Pre-norm layers with rotary positions and a gated MLP: Llama, Mistral, Qwen, Gemma 3.
 *
 *   enter:  h = norm(x);  q, k, v = linear(h), q and k with norms of each head, if there are some, and rotated
 *   leave:  x += norm(linear(attended));  x += norm(down(gate(linear(h)) * linear(h))), h = norm(x), outer norms if there are some
 *
 * In two calls a layer in place of some forty of a framework, by several threads. Numbers in between are fp32. A row has the same bits alone and
 * among others.
 */
#ifndef CTXREUSE_DECODER_H
#define CTXREUSE_DECODER_H

#include "linear.h"

typedef enum ctx_norm { CTX_NORM_ENTER, CTX_NORM_Q, CTX_NORM_K, CTX_NORM_ATTENDED, CTX_NORM_MLP, CTX_NORM_LEAVE, CTX_NORMS } ctx_norm;
typedef enum ctx_layer_part { CTX_Q, CTX_K, CTX_V, CTX_O, CTX_GATE, CTX_UP, CTX_DOWN, CTX_LAYER_PARTS } ctx_layer_part;

typedef struct ctx_decoder_layer {
    ctx_linear parts[CTX_LAYER_PARTS]; /* without x, y and rows */
    const float *norms[CTX_NORMS];     /* weights; all but ENTER and MLP may be NULL: none */
    float eps;
    size_t heads, kv_heads, dim; /* dim is even */
    ctx_gate gate;
} ctx_decoder_layer;

static inline size_t ctx_layer_hidden(const ctx_decoder_layer *l) { return l->parts[CTX_Q].inputs; }

/* x [rows, hidden], cos and sin [rows, dim], to q [rows, heads, dim], k and v [rows, kv_heads, dim], all of `dtype`. */
ctx_status ctx_layer_enter(const ctx_kernels *k, const ctx_decoder_layer *l, ctx_dtype dtype, const uint8_t *x, const uint8_t *cos,
                           const uint8_t *sin, uint8_t *q, uint8_t *keys, uint8_t *values, size_t rows, size_t threads);

/* attended [rows, heads, dim] and x [rows, hidden] to y [rows, hidden], which may be x. */
ctx_status ctx_layer_leave(const ctx_kernels *k, const ctx_decoder_layer *l, ctx_dtype dtype, const uint8_t *attended, const uint8_t *x,
                           uint8_t *y, size_t rows, size_t threads);

#endif
