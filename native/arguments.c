/* arguments.c - Python objects to sizes, buffers and views; refuses with TypeError or ValueError whatever does not fit. */
#include "arguments.h"

/* Any buffer with non-negative strides. A strided view counts as the bytes it spans, which one allocation holds. */
int take(PyObject *obj, int writable, const char *what, region *out) {
    if (PyObject_GetBuffer(obj, &out->view, PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0)) < 0) {
        if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "%s: needs a %sbuffer with strides", what, writable ? "writable " : "");
        } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s: needs an object with the buffer protocol", what);
        }
        return -1;
    }
    const Py_buffer *view = &out->view;
    out->bytes = (size_t)view->len;
    if (view->len == 0 || view->ndim == 0 || view->strides == NULL || view->shape == NULL) return 0;
    size_t end = (size_t)view->itemsize;
    for (int i = 0; i < view->ndim; i++) {
        size_t span;
        if (view->shape[i] <= 1) continue;
        if (view->strides[i] < 0 ||
            __builtin_mul_overflow((size_t)view->shape[i] - 1, (size_t)view->strides[i], &span) ||
            __builtin_add_overflow(end, span, &end)) {
            PyErr_Format(PyExc_ValueError, "%s: negative strides are not supported; pass a copy", what);
            PyBuffer_Release(&out->view);
            return -1;
        }
    }
    out->bytes = end;
    return 0;
}

int take_numbers(PyObject *obj, int writable, size_t item, const char *what, region *out) {
    if (take(obj, writable, what, out) < 0) return -1;
    if ((size_t)out->view.itemsize == item && PyBuffer_IsContiguous(&out->view, 'C') &&
        (uintptr_t)out->view.buf % item == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: needs a contiguous aligned array of %zu-byte numbers", what, item);
    PyBuffer_Release(&out->view);
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

/* A tuple of our own, since a list could be changed by another thread, or by an item's __index__ or __buffer__. */
PyObject *tuple_of(PyObject *obj, const char *what) {
    PyObject *tuple = PySequence_Tuple(obj);
    if (!tuple && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: needs a sequence", what);
    }
    return tuple;
}

/* Three sizes; with `inner`, the third may be left out and is then 1. */
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

int arity(Py_ssize_t got, Py_ssize_t want, const char *name) {
    if (got == want) return 0;
    PyErr_Format(PyExc_TypeError, "%s: takes %zd arguments, got %zd", name, want, got);
    return -1;
}

int place(region *buffer, size_t offset, const size_t shape[3], int distinct, const char *what, ctx_view *view) {
    switch (ctx_view_check(buffer->bytes, offset, view->dtype, view->strides, shape, distinct)) {
        case CTX_OK:
            view->at = (uint8_t *)buffer->view.buf + offset;
            return 0;
        case CTX_ALIASED:
            PyErr_Format(PyExc_ValueError, "%s: strides make elements share an address", what);
            return -1;
        default:
            PyErr_Format(PyExc_ValueError, "%s: box (%zu, %zu, %zu) at byte %zu leaves the buffer of %zu bytes", what,
                         shape[0], shape[1], shape[2], offset, buffer->bytes);
            return -1;
    }
}
