/* python/decoder.c - decoder layers as capsules that hold their weights, and the two calls around their attention. */
#include "module.h"

#include "linear/decoder.h"

#define CAPSULE "ctxreuse.decoder_layer"

typedef struct layer {
    ctx_decoder_layer of;
    held weights;
} layer;

static void end_layer(layer *l) {
    release(&l->weights);
    PyMem_Free(l);
}

static void free_layer(PyObject *capsule) { end_layer(PyCapsule_GetPointer(capsule, CAPSULE)); }

static int numbers_of(held *h, PyObject *obj, size_t item, size_t count, const char *what, const void **out) {
    *out = NULL;
    if (obj == Py_None) return 0;
    const region *found = hold_numbers(h, obj, 0, item, what);
    if (!found) return -1;
    *out = found->view.buf;
    if (found->bytes == count * item) return 0;
    PyErr_Format(PyExc_ValueError, "%s: needs %zu numbers", what, count);
    return -1;
}

/* One of `parts`: (w [outputs, inputs], format, scales or None, bias or None, outputs, inputs). */
static int part_of(PyObject *obj, held *h, ctx_linear *a) {
    PyObject *fields = fields_of(obj, 6, "part");
    size_t format = 0, weights = 0;
    const void *w, *scales, *bias;
    if (!fields) return -1;
    int failed = size_of(PyTuple_GetItem(fields, 1), "format", &format) < 0 || size_of(PyTuple_GetItem(fields, 4), "outputs", &a->outputs) < 0 ||
                 size_of(PyTuple_GetItem(fields, 5), "inputs", &a->inputs) < 0;
    if (!failed && (format >= CTX_WEIGHTS || __builtin_mul_overflow(a->outputs, a->inputs, &weights) || !weights || weights > SIZE_MAX / 64 ||
                    PyTuple_GetItem(fields, 0) == Py_None || (format == CTX_WEIGHTS_INT8 && PyTuple_GetItem(fields, 2) == Py_None))) {
        PyErr_SetString(PyExc_ValueError, "part: format, outputs, inputs or scales do not fit");
        failed = 1;
    }
    a->format = (ctx_weights)format;
    failed = failed || numbers_of(h, PyTuple_GetItem(fields, 0), ctx_weights_bytes(a->format), weights, "weights", &w) < 0 ||
             numbers_of(h, PyTuple_GetItem(fields, 2), sizeof(float), a->outputs, "scales", &scales) < 0 ||
             numbers_of(h, PyTuple_GetItem(fields, 3), sizeof(float), a->outputs, "bias", &bias) < 0;
    Py_DECREF(fields); /* its buffers are held */
    if (!failed) a->w = w, a->scales = scales, a->bias = bias;
    return failed ? -1 : 0;
}

static int fits(const ctx_decoder_layer *l) {
    const ctx_linear *p = l->parts;
    size_t of_q, of_k;
    return l->dim % 2 == 0 && !__builtin_mul_overflow(l->heads, l->dim, &of_q) && !__builtin_mul_overflow(l->kv_heads, l->dim, &of_k) &&
           p[CTX_Q].outputs == of_q && p[CTX_O].inputs == of_q && p[CTX_K].outputs == of_k && p[CTX_V].outputs == of_k &&
           p[CTX_K].inputs == p[CTX_Q].inputs && p[CTX_V].inputs == p[CTX_Q].inputs && p[CTX_GATE].inputs == p[CTX_Q].inputs &&
           p[CTX_UP].inputs == p[CTX_Q].inputs && p[CTX_O].outputs == p[CTX_Q].inputs && p[CTX_DOWN].outputs == p[CTX_Q].inputs &&
           p[CTX_UP].outputs == p[CTX_GATE].outputs && p[CTX_DOWN].inputs == p[CTX_GATE].outputs;
}

static int fill(layer *l, PyObject *parts, PyObject *norms) {
    if (held_room(&l->weights, CTX_LAYER_PARTS * 3 + CTX_NORMS) < 0) return -1;
    for (int i = 0; i < CTX_LAYER_PARTS; i++)
        if (part_of(PyTuple_GetItem(parts, i), &l->weights, &l->of.parts[i]) < 0) return -1;
    for (int i = 0; i < CTX_NORMS; i++) {
        const size_t width = i == CTX_NORM_Q || i == CTX_NORM_K ? l->of.dim : ctx_layer_hidden(&l->of);
        const void *found;
        if (numbers_of(&l->weights, PyTuple_GetItem(norms, i), sizeof(float), width, "norm", &found) < 0) return -1;
        l->of.norms[i] = found;
    }
    if (fits(&l->of) && l->of.norms[CTX_NORM_ENTER] && l->of.norms[CTX_NORM_MLP]) return 0;
    PyErr_SetString(PyExc_ValueError, "parts, norms: are not those of one decoder layer");
    return -1;
}

/* (seven parts, six norms or None, eps, heads, kv_heads, dim, gate): see decoder.h. */
static PyObject *decoder_layer(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t gate;
    (void)module;
    if (arity(nargs, 7, "decoder_layer") < 0) return NULL;
    layer *l = PyMem_Calloc(1, sizeof *l);
    if (!l) return PyErr_NoMemory();
    PyObject *parts = fields_of(args[0], CTX_LAYER_PARTS, "parts"), *norms = parts ? fields_of(args[1], CTX_NORMS, "norms") : NULL;
    int failed = !norms || float_of(args[2], "eps", &l->of.eps) < 0 || size_of(args[3], "heads", &l->of.heads) < 0 ||
                 size_of(args[4], "kv_heads", &l->of.kv_heads) < 0 || size_of(args[5], "dim", &l->of.dim) < 0 || size_of(args[6], "gate", &gate) < 0;
    if (!failed && gate >= CTX_GATES) {
        PyErr_SetString(PyExc_ValueError, "gate: unknown");
        failed = 1;
    }
    if (!failed) l->of.gate = (ctx_gate)gate;
    failed = failed || fill(l, parts, norms) < 0;
    Py_XDECREF(parts);
    Py_XDECREF(norms);
    PyObject *capsule = failed ? NULL : PyCapsule_New(l, CAPSULE, free_layer);
    if (!capsule) end_layer(l);
    return capsule;
}

typedef struct given {
    const ctx_kernels *k;
    const layer *l;
    ctx_dtype dtype;
    size_t rows, threads;
} given;

/* From the capsule, and the dtype, rows and threads at the end. */
static int given_of(PyObject *const *args, Py_ssize_t nargs, Py_ssize_t want, const char *name, given *out) {
    if (arity(nargs, want, name) < 0 || !(out->k = table()) || !(out->l = PyCapsule_GetPointer(args[0], CAPSULE)) ||
        dtype_of(args[want - 3], "dtype", &out->dtype) < 0 || size_of(args[want - 2], "rows", &out->rows) < 0 ||
        size_of(args[want - 1], "threads", &out->threads) < 0)
        return -1;
    const ctx_decoder_layer *l = &out->l->of;
    const size_t widest = ctx_layer_hidden(l) + l->parts[CTX_GATE].outputs + (l->heads + 2 * l->kv_heads + 2) * l->dim;
    if (out->rows && widest < SIZE_MAX / 64 / out->rows) return 0;
    PyErr_SetString(PyExc_ValueError, "rows: out of range");
    return -1;
}

/* A buffer of rows of that many numbers. */
static uint8_t *rows_of(held *h, const given *g, PyObject *obj, int writable, size_t width, const char *what) {
    const region *found = hold_numbers(h, obj, writable, ctx_dtype_bytes(g->dtype), what);
    if (!found) return NULL;
    if (found->bytes == g->rows * width * ctx_dtype_bytes(g->dtype)) return found->view.buf;
    PyErr_Format(PyExc_ValueError, "%s: needs %zu rows of %zu numbers", what, g->rows, width);
    return NULL;
}

static PyObject *done(held *h, int failed, ctx_status status) {
    release(h);
    if (failed) return NULL;
    return status == CTX_OK ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

/* (layer, x, cos, sin, qkv, dtype, rows, threads): q, k and v follow each other in qkv. */
static PyObject *layer_enter(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    given g;
    held h = {0};
    ctx_status status = CTX_OK;
    const uint8_t *x, *cos = NULL, *sin = NULL;
    uint8_t *qkv = NULL;
    (void)module;
    if (given_of(args, nargs, 8, "layer_enter", &g) < 0) return NULL;
    const ctx_decoder_layer *l = &g.l->of;
    if ((x = rows_of(&h, &g, args[1], 0, ctx_layer_hidden(l), "x")) && (cos = rows_of(&h, &g, args[2], 0, l->dim, "cos")) &&
        (sin = rows_of(&h, &g, args[3], 0, l->dim, "sin")) && (qkv = rows_of(&h, &g, args[4], 1, (l->heads + 2 * l->kv_heads) * l->dim, "qkv"))) {
        const size_t row = g.rows * l->dim * ctx_dtype_bytes(g.dtype);
        uint8_t *keys = qkv + l->heads * row;
        Py_BEGIN_ALLOW_THREADS
        status = ctx_layer_enter(g.k, l, g.dtype, x, cos, sin, qkv, keys, keys + l->kv_heads * row, g.rows, g.threads);
        Py_END_ALLOW_THREADS
    }
    return done(&h, !qkv, status);
}

/* (layer, attended, x, y, dtype, rows, threads) */
static PyObject *layer_leave(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    given g;
    held h = {0};
    ctx_status status = CTX_OK;
    const uint8_t *attended, *x = NULL;
    uint8_t *y = NULL;
    (void)module;
    if (given_of(args, nargs, 7, "layer_leave", &g) < 0) return NULL;
    const ctx_decoder_layer *l = &g.l->of;
    if ((attended = rows_of(&h, &g, args[1], 0, l->parts[CTX_O].inputs, "attended")) &&
        (x = rows_of(&h, &g, args[2], 0, ctx_layer_hidden(l), "x")) && (y = rows_of(&h, &g, args[3], 1, ctx_layer_hidden(l), "y"))) {
        Py_BEGIN_ALLOW_THREADS
        status = ctx_layer_leave(g.k, l, g.dtype, attended, x, y, g.rows, g.threads);
        Py_END_ALLOW_THREADS
    }
    return done(&h, !y, status);
}

PyMethodDef decoder_methods[] = {
    FAST(decoder_layer),
    FAST(layer_enter),
    FAST(layer_leave),
    {NULL, NULL, 0, NULL},
};
