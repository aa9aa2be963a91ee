/* python/attention.c - attention for Python. */
#include "attention/attention.h"
#include "core/pool.h"

#include "module.h"

/* Positions and windows lie within it, so that their differences fit. */
static const int64_t FARTHEST = (int64_t)1 << 60;

/* Bytes of an element as stored; int4 holds two values in one. */
static const size_t items[CTX_FORMATS] = {4, 2, 2, 1, 1};

static int integer_of(PyObject *obj, const char *what, int64_t *out) {
    *out = PyLong_AsLongLong(obj);
    if (*out == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            *out = INT64_MAX;
        } else {
            return -1;
        }
    }
    if (*out <= FARTHEST && *out >= -FARTHEST) return 0;
    PyErr_Format(PyExc_ValueError, "%s: beyond 2^60", what);
    return -1;
}

/* int64 numbers that ascend from first to last, within FARTHEST. */
static int ascending(const int64_t *at, size_t first, size_t last, const char *what) {
    for (size_t i = first; i < last; i++)
        if (at[i] > FARTHEST || at[i] < -FARTHEST || (i > first && at[i] < at[i - 1])) {
            PyErr_Format(PyExc_ValueError, "%s: do not ascend at %zu, or lie beyond 2^60", what, i);
            return -1;
        }
    return 0;
}

/* Is it an array of `axes` axes with the last one contiguous? Its other steps in bytes. It is all inside of one allocation. */
static int fits(const region *of, int axes, size_t item, const size_t *shape, const char *what, size_t *steps) {
    const Py_buffer *view = &of->view;
    int good = view->ndim == axes && (size_t)view->itemsize == item && view->shape && view->strides;
    for (int i = 0; good && i < axes; i++) {
        good = (size_t)view->shape[i] == shape[i];
        if (i < axes - 1) steps[i] = (size_t)view->strides[i]; /* hold has refused negative ones */
        else good = good && (view->shape[i] <= 1 || (size_t)view->strides[i] == item);
    }
    if (good) return 1;
    PyErr_Format(PyExc_ValueError, "%s: needs %d axes of %zu-byte items, the last contiguous, as the plane says", what, axes, item);
    return 0;
}

static region *array(held *h, PyObject *obj, int axes, size_t item, const size_t *shape, const char *what, size_t *steps) {
    region *buffer = hold(h, obj, 0, what);
    return buffer && fits(buffer, axes, item, shape, what, steps) ? buffer : NULL;
}

/* Three fields: format, data, scales. */
static int plane_of(held *h, PyObject *const *fields, size_t heads, size_t tokens, size_t dim, const char *what, ctx_plane *out) {
    size_t format, steps[3] = {0};
    if (size_of(fields[0], what, &format) < 0) return -1;
    if (format >= CTX_FORMATS || (format == CTX_ROWS_INT4 && dim % CTX_ATTEND_GROUP)) {
        PyErr_Format(PyExc_ValueError, "%s: format %zu of %zu values a row is none", what, format, dim);
        return -1;
    }
    out->format = (ctx_format)format;
    const size_t shape[3] = {heads, tokens, format == CTX_ROWS_INT4 ? dim / 2 : dim};
    const region *data = array(h, fields[1], 3, items[format], shape, what, steps);
    if (!data) return -1;
    out->at = data->view.buf, out->head = steps[0], out->row = steps[1];
    if (format == CTX_ROWS_INT8) {
        const region *scales = array(h, fields[2], 2, 4, shape, what, steps);
        if (!scales) return -1;
        out->scales = scales->view.buf, out->scale_head = steps[0];
    } else if (format == CTX_ROWS_INT4) {
        const size_t groups[4] = {heads, 2, dim / CTX_ATTEND_GROUP, tokens};
        const region *scales = array(h, fields[2], 4, 1, groups, what, steps);
        if (!scales) return -1;
        out->scales = scales->view.buf;
        out->scale_head = steps[0], out->scale_low = steps[1], out->scale_group = steps[2];
    } else if (fields[2] != Py_None) {
        PyErr_Format(PyExc_ValueError, "%s: a format without scales", what);
        return -1;
    }
    return 0;
}

enum { PART_FIELDS = 12, PART_BUFFERS = 7, CALL_BUFFERS = 4 };

/* (k format, k, k scales, v format, v, v scales, tokens, first, last, at: None, int or int64s, q or None, hidden or None) */
static int part_of(held *h, PyObject *obj, ctx_attention *a, ctx_part *p) {
    PyObject *tuple = fields_of(obj, PART_FIELDS, "part"), *fields[PART_FIELDS];
    size_t tokens;
    if (!tuple) return -1;
    for (int i = 0; i < PART_FIELDS; i++) fields[i] = PyTuple_GetItem(tuple, i);
    int failed = size_of(fields[6], "tokens", &tokens) < 0 || size_of(fields[7], "first", &p->first) < 0 ||
                 size_of(fields[8], "last", &p->last) < 0;
    if (!failed && (p->first > p->last || p->last > tokens)) {
        PyErr_Format(PyExc_ValueError, "part: rows %zu..%zu of %zu", p->first, p->last, tokens);
        failed = 1;
    }
    failed = failed || plane_of(h, fields, a->heads, tokens, a->dim, "k", &p->k) < 0 ||
             plane_of(h, fields + 3, a->heads, tokens, a->dim, "v", &p->v) < 0;
    if (!failed && fields[9] != Py_None) {
        p->placed = 1;
        if (!a->positions) {
            PyErr_SetString(PyExc_ValueError, "part: has positions, and the queries have none");
            failed = 1;
        } else if (PyLong_Check(fields[9])) {
            failed = integer_of(fields[9], "at", &p->at) < 0;
        } else {
            const region *at = hold_numbers(h, fields[9], 0, 8, "at");
            failed = !at;
            if (at && at->bytes / 8 < p->last) {
                PyErr_Format(PyExc_ValueError, "at: %zu positions for %zu rows", at->bytes / 8, p->last);
                failed = 1;
            }
            if (!failed) p->at_rows = at->view.buf, failed = ascending(p->at_rows, p->first, p->last, "at") < 0;
        }
    }
    if (!failed && fields[10] != Py_None) {
        const region *q = hold_numbers(h, fields[10], 0, sizeof(float), "q");
        failed = !q;
        if (q && q->bytes != a->heads_q * a->queries * a->dim * sizeof(float)) {
            PyErr_SetString(PyExc_ValueError, "q: of a part has another size than the call's");
            failed = 1;
        }
        if (!failed) p->q = q->view.buf;
    }
    if (!failed && fields[11] != Py_None) {
        const region *hidden = hold_numbers(h, fields[11], 0, 8, "hidden");
        failed = !hidden || ascending(hidden->view.buf, 0, hidden->bytes / 8, "hidden") < 0;
        if (!failed) p->hidden = hidden->view.buf, p->hidden_count = hidden->bytes / 8;
    }
    Py_DECREF(tuple);
    return failed ? -1 : 0;
}

/* q, o and lse of a call. */
static int call_of(held *h, PyObject *const *args, ctx_attention *a, float **o, float **lse) {
    const region *q = hold_numbers(h, args[0], 0, sizeof(float), "q");
    const region *out = q ? hold_numbers(h, args[1], 1, sizeof(float), "o") : NULL;
    const region *logs = out ? hold_numbers(h, args[2], 1, sizeof(float), "lse") : NULL;
    size_t rows, values;
    if (!logs) return -1;
    if (a->heads == 0 || a->heads_q % a->heads || a->dim == 0 || a->dim > CTX_ATTEND_DIM ||
        __builtin_mul_overflow(a->heads_q, a->queries, &rows) || __builtin_mul_overflow(rows, a->dim * sizeof(float), &values) ||
        q->bytes != values || out->bytes != values || logs->bytes != rows * sizeof(float)) {
        PyErr_Format(PyExc_ValueError, "q, o, lse: do not fit %zu query heads over %zu, %zu queries of %zu values (at most %d)",
                     a->heads_q, a->heads, a->queries, a->dim, CTX_ATTEND_DIM);
        return -1;
    }
    a->q = q->view.buf, *o = out->view.buf, *lse = logs->view.buf;
    return 0;
}

static int positions_of(held *h, PyObject *obj, ctx_attention *a) {
    if (obj == Py_None) return 0;
    const region *positions = hold_numbers(h, obj, 0, 8, "positions");
    if (!positions) return -1;
    a->positions = positions->view.buf;
    int fits = positions->bytes / 8 == a->queries;
    for (size_t i = 0; fits && i < a->queries; i++) fits = a->positions[i] <= FARTHEST && a->positions[i] >= -FARTHEST;
    if (fits) return 0;
    PyErr_Format(PyExc_ValueError, "positions: need one for each of %zu queries, within 2^60", a->queries);
    return -1;
}

/* (q, o, lse, heads_q, heads, queries, dim, positions, scale, window, softcap, rounded, parts, head_first, head_last,
 * row_first, row_last, threads) */
static PyObject *attend(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    ctx_attention a = {0};
    size_t head_first, head_last, row_first, row_last, rounded, threads;
    float *o, *lse;
    (void)module;
    if (!k || arity(nargs, 18, "attend") < 0 || size_of(args[3], "query heads", &a.heads_q) < 0 ||
        size_of(args[4], "heads", &a.heads) < 0 || size_of(args[5], "queries", &a.queries) < 0 ||
        size_of(args[6], "dim", &a.dim) < 0 || float_of(args[8], "scale", &a.scale) < 0 ||
        integer_of(args[9], "window", &a.window) < 0 || float_of(args[10], "softcap", &a.softcap) < 0 ||
        size_of(args[11], "rounded", &rounded) < 0 || size_of(args[13], "first head", &head_first) < 0 ||
        size_of(args[14], "last head", &head_last) < 0 || size_of(args[15], "first row", &row_first) < 0 ||
        size_of(args[16], "last row", &row_last) < 0 || size_of(args[17], "threads", &threads) < 0)
        return NULL;
    a.rounded = rounded != 0;
    if (head_last > a.heads || a.window < 0 || a.softcap < 0 || row_first > row_last) {
        PyErr_SetString(PyExc_ValueError, "heads, rows, window, softcap: out of range");
        return NULL;
    }
    PyObject *parts = tuple_of(args[12], "parts"), *result = NULL;
    if (!parts) return NULL;
    a.count = (size_t)PyTuple_Size(parts);
    held h = {0};
    ctx_part *list = PyMem_Calloc(a.count + 1, sizeof *list);
    int failed = !list;
    if (failed) PyErr_NoMemory();
    failed = failed || held_room(&h, a.count * PART_BUFFERS + CALL_BUFFERS) < 0 || call_of(&h, args, &a, &o, &lse) < 0 || positions_of(&h, args[7], &a) < 0;
    for (size_t i = 0; !failed && i < a.count; i++)
        failed = part_of(&h, PyTuple_GetItem(parts, (Py_ssize_t)i), &a, &list[i]) < 0;
    if (!failed) {
        ctx_status status;
        a.parts = list;
        PyThreadState *saved = PyEval_SaveThread();
        status = ctx_attend(k, &a, head_first, head_last, row_first, row_last, o, lse, threads);
        PyEval_RestoreThread(saved);
        result = status == CTX_OK ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    release(&h);
    PyMem_Free(list);
    Py_DECREF(parts);
    return result;
}

typedef struct each {
    const ctx_kernels *k;
    const ctx_attention *contexts;
    size_t heads;
    float *o, *lse; /* of the first context */
    _Atomic int failed;
} each;

/* One K and V head of one context. */
static void attend_head(void *what, size_t i) {
    each *e = what;
    const ctx_attention *a = &e->contexts[i / e->heads];
    const size_t at = i / e->heads * a->heads_q, head = i % e->heads;
    if (ctx_attend(e->k, a, head, head + 1, 0, a->parts->last, e->o + at * a->dim, e->lse + at, 1)) e->failed = 1;
}

/* (q, o [contexts, heads_q, dim], their dtype, keys, values: [heads, tokens, dim] of each context, dtype of these, heads_q, heads,
 * dim, scale, softcap, threads): one query a context, which sees all of its rows. */
static PyObject *attend_each(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    ctx_attention a = {.queries = 1};
    ctx_dtype dtype, stored;
    size_t threads, rows, values;
    (void)module;
    if (!k || arity(nargs, 12, "attend_each") < 0 || dtype_of(args[2], "dtype", &dtype) < 0 || dtype_of(args[5], "dtype of rows", &stored) < 0 ||
        size_of(args[6], "query heads", &a.heads_q) < 0 || size_of(args[7], "heads", &a.heads) < 0 || size_of(args[8], "dim", &a.dim) < 0 ||
        float_of(args[9], "scale", &a.scale) < 0 || float_of(args[10], "softcap", &a.softcap) < 0 || size_of(args[11], "threads", &threads) < 0)
        return NULL;
    static const char *const names[] = {"keys", "values"};
    PyObject *lists[2], *result = NULL;
    size_t count = 0;
    held h = {0};
    float *room = NULL;
    ctx_attention *contexts = NULL;
    ctx_part *parts = NULL;
    int failed = lists_of(args + 3, names, 2, 2, lists, &count) < 0 || held_room(&h, 2 * count + 2) < 0;
    const size_t item = ctx_dtype_bytes(dtype), width = ctx_dtype_bytes(stored);
    const region *q = failed ? NULL : hold_numbers(&h, args[0], 0, item, "q"), *o = q ? hold_numbers(&h, args[1], 1, item, "o") : NULL;
    failed = failed || !o;
    if (!failed && (a.heads == 0 || a.heads_q % a.heads || a.dim == 0 || a.dim > CTX_ATTEND_DIM || a.softcap < 0 ||
                    __builtin_mul_overflow(count, a.heads_q, &rows) || __builtin_mul_overflow(rows, a.dim, &values) ||
                    values > SIZE_MAX / 64 || q->bytes != values * item || o->bytes != values * item)) {
        PyErr_Format(PyExc_ValueError, "q, o: are not those of %zu contexts, %zu query heads over %zu and %zu values", count, a.heads_q, a.heads, a.dim);
        failed = 1;
    }
    if (!failed) {
        contexts = PyMem_Calloc(count + 1, sizeof *contexts), parts = PyMem_Calloc(count + 1, sizeof *parts);
        room = PyMem_Malloc((2 * values + rows + 1) * sizeof *room); /* q, o, lse */
        failed = !contexts || !parts || !room;
        if (failed) PyErr_NoMemory();
    }
    for (size_t i = 0; !failed && i < count; i++) {
        PyObject *const of[2] = {PyTuple_GetItem(lists[0], (Py_ssize_t)i), PyTuple_GetItem(lists[1], (Py_ssize_t)i)};
        ctx_plane *const planes[2] = {&parts[i].k, &parts[i].v};
        size_t shape[3] = {a.heads, 0, a.dim}, steps[3] = {0};
        for (int j = 0; !failed && j < 2; j++) {
            const region *plane = hold(&h, of[j], 0, names[j]);
            if (plane && j == 0 && plane->view.ndim == 3) shape[1] = (size_t)plane->view.shape[1];
            failed = !plane || !fits(plane, 3, width, shape, names[j], steps);
            if (!failed) *planes[j] = (ctx_plane){.format = (ctx_format)stored, .at = plane->view.buf, .head = steps[0], .row = steps[1]};
        }
        if (failed) break;
        parts[i].last = shape[1];
        contexts[i] = a, contexts[i].parts = &parts[i], contexts[i].count = 1;
        contexts[i].q = room + i * a.heads_q * a.dim;
    }
    if (!failed) {
        each e = {.k = k, .contexts = contexts, .heads = a.heads, .o = room + values, .lse = room + 2 * values};
        Py_BEGIN_ALLOW_THREADS
        k->convert[dtype][CTX_FP32]((uint8_t *)room, q->view.buf, values);
        ctx_pool_run(attend_head, &e, count * a.heads, threads);
        k->convert[CTX_FP32][dtype](o->view.buf, (uint8_t *)e.o, values);
        Py_END_ALLOW_THREADS
        result = e.failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
    }
    release(&h);
    PyMem_Free(contexts);
    PyMem_Free(parts);
    PyMem_Free(room);
    drop_lists(lists, 2);
    return result;
}

/* (o [count, rows, dim], lse [count, rows], count, rows, dim): the results of disjoint rows become o[0] and lse[0]. */
static PyObject *attend_merge(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t count, rows, dim, all, values;
    held h = {0};
    const region *o, *lse;
    PyObject *result = NULL;
    (void)module;
    if (arity(nargs, 5, "attend_merge") < 0 || size_of(args[2], "count", &count) < 0 || size_of(args[3], "rows", &rows) < 0 ||
        size_of(args[4], "dim", &dim) < 0)
        return NULL;
    if ((o = hold_numbers(&h, args[0], 1, sizeof(float), "o")) && (lse = hold_numbers(&h, args[1], 1, sizeof(float), "lse"))) {
        if (count == 0 || __builtin_mul_overflow(count, rows, &all) || all > SIZE_MAX / sizeof(float) ||
            __builtin_mul_overflow(all * sizeof(float), dim, &values) || o->bytes != values || lse->bytes != all * sizeof(float)) {
            PyErr_Format(PyExc_ValueError, "o, lse: are no %zu results of %zu rows of %zu values", count, rows, dim);
        } else {
            Py_BEGIN_ALLOW_THREADS ctx_attend_merge(o->view.buf, lse->view.buf, count, rows, dim);
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
    }
    release(&h);
    return result;
}

static int quantise(const ctx_kernels *k, ctx_dtype dtype, size_t format, const size_t shape[3], const region *x,
                    const region *codes, const region *scales) {
    const size_t rows = shape[1], dim = shape[2], groups = dim / CTX_ATTEND_GROUP;
    const size_t head = (size_t)x->view.strides[0], row = (size_t)x->view.strides[1];
    int wrong = 0;
    for (size_t h = 0; h < shape[0] && !wrong; h++) {
        const uint8_t *from = (const uint8_t *)x->view.buf + h * head;
        if (format == CTX_ROWS_INT8) {
            int8_t *to = codes->view.buf;
            float *scale = scales->view.buf;
            wrong = ctx_quantise8(k, to + h * rows * dim, scale + h * rows, from, dtype, row, rows, dim);
        } else {
            uint8_t *to = codes->view.buf;
            uint8_t *steps = (uint8_t *)scales->view.buf + h * 2 * groups * rows;
            wrong = ctx_quantise4(k, to + h * rows * dim / 2, steps, steps + groups * rows, rows, from, dtype, row, rows, dim);
        }
    }
    return wrong;
}

/* (x [heads, tokens, dim], dtype, format, codes, scales): what the planes of a format hold, contiguous. */
static PyObject *attend_quantise(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    held h = {0};
    size_t format, shape[3], values;
    ctx_dtype dtype;
    const region *x, *codes, *scales;
    PyObject *result = NULL;
    (void)module;
    if (!k || arity(nargs, 5, "attend_quantise") < 0 || dtype_of(args[1], "dtype", &dtype) < 0 ||
        size_of(args[2], "format", &format) < 0)
        return NULL;
    const int half = format == CTX_ROWS_INT4;
    if ((x = hold(&h, args[0], 0, "x")) && (codes = hold_numbers(&h, args[3], 1, 1, "codes")) &&
        (scales = hold_numbers(&h, args[4], 1, half ? 1 : 4, "scales"))) {
        const Py_buffer *view = &x->view;
        const int rows = view->ndim == 3 && view->shape && view->strides && (size_t)view->itemsize == ctx_dtype_bytes(dtype) &&
                         (view->shape[2] <= 1 || view->strides[2] == view->itemsize);
        for (int i = 0; i < 3; i++) shape[i] = rows ? (size_t)view->shape[i] : 0;
        if (!rows || (format != CTX_ROWS_INT8 && !half) || shape[2] == 0 || shape[2] > CTX_ATTEND_DIM ||
            (half && shape[2] % CTX_ATTEND_GROUP) || __builtin_mul_overflow(shape[0], shape[1], &values) ||
            values > SIZE_MAX / (4 * CTX_ATTEND_DIM)) {
            PyErr_SetString(PyExc_ValueError, "x: needs rows [heads, tokens, dim] of at most 512, in whole groups for int4");
        } else if (codes->bytes != values * shape[2] / (half ? 2 : 1) ||
                   scales->bytes != values * (half ? 2 * (shape[2] / CTX_ATTEND_GROUP) : 4)) {
            PyErr_SetString(PyExc_ValueError, "codes, scales: do not fit x");
        } else {
            int wrong;
            Py_BEGIN_ALLOW_THREADS wrong = quantise(k, dtype, format, shape, x, codes, scales);
            Py_END_ALLOW_THREADS
            if (wrong)
                PyErr_SetString(PyExc_ValueError, wrong == -1 ? "values: not finite" : "values: beyond what half floats hold");
            else
                result = Py_NewRef(Py_None);
        }
    }
    release(&h);
    return result;
}

/* Name of the table that attends to rows of so many values. */
static PyObject *attend_name(PyObject *module, PyObject *dim) {
    const ctx_kernels *k = table();
    size_t of;
    (void)module;
    if (!k || size_of(dim, "dim", &of) < 0) return NULL;
    return PyUnicode_FromString(ctx_attend_name(k, of ? of : 1));
}

PyMethodDef attention_methods[] = {
    FAST(attend),
    FAST(attend_each),
    FAST(attend_merge),
    FAST(attend_quantise),
    {"attend_name", attend_name, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
