/* python/arguments.c - Python objects to sizes, buffers and views; refuses with TypeError or ValueError whatever does not fit. */
#include "arguments.h"

const ctx_kernels *table(void) {
    const ctx_kernels *k = ctx_active();
    if (!k) PyErr_SetString(PyExc_RuntimeError, "no kernel table is active");
    return k;
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

int arity(Py_ssize_t got, Py_ssize_t want, const char *name) {
    if (got == want) return 0;
    PyErr_Format(PyExc_TypeError, "%s: takes %zd arguments, got %zd", name, want, got);
    return -1;
}

int size_of(PyObject *obj, const char *what, size_t *out) {
    Py_ssize_t value = PyNumber_AsSsize_t(obj, PyExc_ValueError);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value < 0) {
        PyErr_Format(PyExc_ValueError, "%s: must not be negative, got %zd", what, value);
        return -1;
    }
    *out = (size_t)value;
    return 0;
}

int small_of(PyObject *obj, const char *what, uint32_t *out) {
    size_t value;
    if (size_of(obj, what, &value) < 0) return -1;
    *out = value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
    return 0;
}

int sizes_of(PyObject *obj, const char *what, int inner, size_t out[3]) {
    PyObject *tuple = tuple_of(obj, what);
    if (!tuple) return -1;
    Py_ssize_t count = PyTuple_Size(tuple);
    int failed = count != 3 && !(inner && count == 2);
    if (failed) PyErr_Format(PyExc_ValueError, "%s: needs %s sizes, got %zd", what, inner ? "2 or 3" : "3", count);
    out[2] = 1;
    for (Py_ssize_t i = 0; !failed && i < count; i++) failed = size_of(PyTuple_GetItem(tuple, i), what, &out[i]) < 0;
    Py_DECREF(tuple);
    return failed ? -1 : 0;
}

int dtype_of(PyObject *obj, const char *what, ctx_dtype *out) {
    size_t value;
    if (size_of(obj, what, &value) < 0) return -1;
    if (value >= CTX_DTYPES) {
        PyErr_Format(PyExc_ValueError, "%s: unknown element type %zu (0 fp32, 1 fp16, 2 bf16)", what, value);
        return -1;
    }
    *out = (ctx_dtype)value;
    return 0;
}

int float_of(PyObject *obj, const char *what, float *out) {
    const double value = PyFloat_AsDouble(obj);
    if (value == -1 && PyErr_Occurred()) return -1;
    *out = (float)value;
    if (value == value && *out - *out == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%s: not finite", what);
    return -1;
}

int checksum_of(PyObject *obj, size_t bytes, const char *what, uint64_t *out) {
    if (bytes <= 240) {
        PyErr_Format(PyExc_ValueError, "%s: %zu bytes are too short to be checked here", what, bytes);
        return -1;
    }
    *out = PyLong_AsUnsignedLongLong(obj);
    if (*out != (uint64_t)-1 || !PyErr_Occurred()) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s: its checksum is no number of 64 bits", what);
    return -1;
}

/* ---- Sequences --------------------------------------------------------------------------------------------------- */

PyObject *tuple_of(PyObject *obj, const char *what) {
    PyObject *tuple = PySequence_Tuple(obj);
    if (!tuple && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: needs a sequence", what);
    }
    return tuple;
}

PyObject *fields_of(PyObject *obj, Py_ssize_t count, const char *what) {
    PyObject *tuple = tuple_of(obj, what);
    if (!tuple || PyTuple_Size(tuple) == count) return tuple;
    PyErr_Format(PyExc_ValueError, "%s: needs %zd fields, got %zd", what, count, PyTuple_Size(tuple));
    Py_DECREF(tuple);
    return NULL;
}

int lists_of(PyObject *const *args, const char *const *names, int needed, int count, PyObject **lists, size_t *n) {
    for (int i = 0; i < count; i++) lists[i] = NULL;
    for (int i = 0; i < count; i++) {
        if (i >= needed && args[i] == Py_None) continue;
        if (!(lists[i] = tuple_of(args[i], names[i]))) return -1;
        if (PyTuple_Size(lists[i]) != PyTuple_Size(lists[0])) {
            PyErr_Format(PyExc_ValueError, "%s: %zd for %zd of %s", names[i], PyTuple_Size(lists[i]), PyTuple_Size(lists[0]),
                         names[0]);
            return -1;
        }
    }
    *n = (size_t)PyTuple_Size(lists[0]);
    return 0;
}

void drop_lists(PyObject **lists, int count) {
    for (int i = 0; i < count; i++) Py_XDECREF(lists[i]);
}

/* ---- Buffers ----------------------------------------------------------------------------------------------------- */

int held_room(held *h, size_t count) {
    if (count <= sizeof h->near / sizeof h->near[0]) return 0;
    if ((h->at = PyMem_Calloc(count, sizeof *h->at))) return 0;
    PyErr_NoMemory();
    return -1;
}

static region *slots(held *h) { return h->at ? h->at : h->near; }

static int spans(const Py_buffer *view, size_t *bytes) {
    *bytes = (size_t)view->len;
    if (view->len == 0 || view->ndim == 0 || view->strides == NULL || view->shape == NULL) return 1;
    size_t end = (size_t)view->itemsize, span;
    for (int i = 0; i < view->ndim; i++)
        if (view->shape[i] > 1 && (view->strides[i] < 0 ||
                                   __builtin_mul_overflow((size_t)view->shape[i] - 1, (size_t)view->strides[i], &span) ||
                                   __builtin_add_overflow(end, span, &end)))
            return 0;
    *bytes = end;
    return 1;
}

region *hold(held *h, PyObject *obj, int writable, const char *what) {
    region *out = &slots(h)[h->count];
    if (PyObject_GetBuffer(obj, &out->view, PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0)) < 0) {
        if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "%s: needs a %sbuffer with strides", what, writable ? "writable " : "");
        } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s: needs an object with the buffer protocol", what);
        }
        return NULL;
    }
    h->count++;
    if (spans(&out->view, &out->bytes)) return out;
    PyErr_Format(PyExc_ValueError, "%s: negative strides are not supported; pass a copy", what);
    return NULL;
}

region *hold_numbers(held *h, PyObject *obj, int writable, size_t item, const char *what) {
    region *out = hold(h, obj, writable, what);
    if (!out || ((size_t)out->view.itemsize == item && PyBuffer_IsContiguous(&out->view, 'C') &&
                 (uintptr_t)out->view.buf % item == 0))
        return out;
    PyErr_Format(PyExc_ValueError, "%s: needs a contiguous aligned array of %zu-byte numbers", what, item);
    return NULL;
}

void release(held *h) {
    while (h->count > 0) PyBuffer_Release(&slots(h)[--h->count].view);
    PyMem_Free(h->at);
    h->at = NULL;
}

int box_of(held *h, PyObject *const *args, int writable, const char *what, box *out) {
    out->writable = writable;
    out->what = what;
    if (dtype_of(args[1], what, &out->view.dtype) < 0 || size_of(args[2], what, &out->offset) < 0 ||
        sizes_of(args[3], what, 1, out->view.strides) < 0)
        return -1;
    return (out->buffer = hold(h, args[0], writable, what)) ? 0 : -1;
}

int place(box *b, const size_t shape[3]) {
    switch (ctx_view_check(b->buffer->bytes, b->offset, b->view.dtype, b->view.strides, shape, b->writable)) {
        case CTX_OK:
            b->view.at = (uint8_t *)b->buffer->view.buf + b->offset;
            return 0;
        case CTX_ALIASED:
            PyErr_Format(PyExc_ValueError, "%s: strides make elements share an address", b->what);
            return -1;
        default:
            PyErr_Format(PyExc_ValueError, "%s: box (%zu, %zu, %zu) at byte %zu leaves the buffer of %zu bytes", b->what,
                         shape[0], shape[1], shape[2], b->offset, b->buffer->bytes);
            return -1;
    }
}
