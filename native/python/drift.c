/* python/drift.c - the correction of relocated rows of one layer: buffers to boxes of rows, and numbers of one size. */
#include "module.h"

#include "linear/drift.h"

enum { KEYS = 0, VALUES = 4, SHAPE = 8, SPANS, COS, SIN, INTERLEAVED, NUMBERS, THREADS = NUMBERS + 6, ARGUMENTS };

/* Spans that ascend and lie inside of `tokens` rows; how many rows they are. */
static int spans_of(held *h, PyObject *obj, size_t tokens, ctx_drift *d, size_t *rows) {
    const region *found = hold_numbers(h, obj, 0, sizeof(int64_t), "spans");
    if (!found) return -1;
    d->rows = found->view.buf, d->runs = found->bytes / sizeof *d->rows, *rows = 0;
    int good = found->bytes % sizeof *d->rows == 0;
    for (size_t i = 0; good && i < d->runs; i++) {
        const int64_t *at = d->rows[i];
        good = at[0] >= (i ? d->rows[i - 1][1] : 0) && at[0] <= at[1] && (uint64_t)at[1] <= tokens;
        *rows += (size_t)(at[1] - at[0]);
    }
    if (good) return 0;
    PyErr_Format(PyExc_ValueError, "spans: do not ascend in %zu rows", tokens);
    return -1;
}

static const float *numbers_of(held *h, PyObject *obj, const char *what, size_t *count) {
    const region *found = hold_numbers(h, obj, 0, sizeof(float), what);
    if (!found) return NULL;
    *count = found->bytes / sizeof(float);
    return found->view.buf;
}

/* The planes' boxes and all numbers, which must fit each other. */
static int drift_of(held *h, PyObject *const *args, ctx_drift *d) {
    static const char *const names[] = {"x", "mean", "reach", "prior", "dk", "dv"};
    const float **const to[] = {&d->x, &d->mean, &d->reach, &d->prior, &d->dk, &d->dv};
    size_t shape[3], rows, angles, sines, counts[6], width;
    box keys, values;
    if (sizes_of(args[SHAPE], "shape", 0, shape) < 0 || box_of(h, args + KEYS, 1, "keys", &keys) < 0 || box_of(h, args + VALUES, 1, "values", &values) < 0 ||
        place(&keys, shape) < 0 || place(&values, shape) < 0 || spans_of(h, args[SPANS], shape[1], d, &rows) < 0 ||
        !(d->cos = numbers_of(h, args[COS], "cos", &angles)) || !(d->sin = numbers_of(h, args[SIN], "sin", &sines)))
        return -1;
    for (int i = 0; i < 6; i++)
        if (!(*to[i] = numbers_of(h, args[NUMBERS + i], names[i], &counts[i]))) return -1;
    d->interleaved = PyObject_IsTrue(args[INTERLEAVED]);
    if (d->interleaved < 0) return -1;
    d->keys = keys.view, d->values = values.view, d->heads = shape[0], d->dim = shape[2];
    d->half = rows ? angles / rows : 0, d->samples = d->runs ? counts[3] / d->runs : 0;
    width = shape[0] * shape[2]; /* the boxes passed: it cannot overflow unless there are no rows */
    if (keys.view.dtype != values.view.dtype || keys.view.strides[2] != 1 || values.view.strides[2] != 1 || angles != rows * d->half || sines != angles ||
        d->half > d->dim / 2 || counts[1] != d->runs * width || counts[2] != d->runs || counts[3] != d->runs * d->samples ||
        counts[0] != counts[3] * width || counts[4] != counts[0] || counts[5] != counts[0]) {
        PyErr_SetString(PyExc_ValueError, "keys, values, angles and samples do not fit each other");
        return -1;
    }
    return 0;
}

/* (keys, dtype, offset, strides, values, dtype, offset, strides, shape, spans, cos, sin, interleaved, x, mean, reach, prior, dk, dv, threads) */
static PyObject *drift_correct(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    ctx_drift d = {0};
    held h = {0};
    size_t threads;
    ctx_status status = CTX_OK;
    (void)module;
    if (!k || arity(nargs, ARGUMENTS, "drift_correct") < 0 || size_of(args[THREADS], "threads", &threads) < 0 || held_room(&h, 11) < 0) return NULL;
    const int failed = drift_of(&h, args, &d) < 0;
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        status = ctx_drift_correct(k, &d, threads);
        Py_END_ALLOW_THREADS
    }
    release(&h);
    if (failed) return NULL;
    return status == CTX_OK ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

PyMethodDef drift_methods[] = {
    FAST(drift_correct),
    {NULL, NULL, 0, NULL},
};
