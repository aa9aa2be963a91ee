/* arguments.h - how the Python door reads its arguments, all of which are hostile.
 *
 * Each function returns 0, or -1 with TypeError or ValueError set; `what` names the argument in the message. The GIL is held.
 */
#ifndef CTXREUSE_ARGUMENTS_H
#define CTXREUSE_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ctxreuse.h"

typedef struct region {
    Py_buffer view; /* released by the caller */
    size_t bytes;   /* from the first element to behind the last one */
} region;

int take(PyObject *obj, int writable, const char *what, region *out);
/* A contiguous buffer of `item`-byte numbers, aligned to them. */
int take_numbers(PyObject *obj, int writable, size_t item, const char *what, region *out);
int size_of(PyObject *obj, const char *what, size_t *out);
int dtype_of(PyObject *obj, const char *what, ctx_dtype *out);
int sizes_of(PyObject *obj, const char *what, int inner, size_t out[3]);
int arity(Py_ssize_t got, Py_ssize_t want, const char *name);

/* Check a box against its buffer and set view->at; view's type and strides are set by the caller. */
int place(region *buffer, size_t offset, const size_t shape[3], int distinct, const char *what, ctx_view *view);

/* A new reference, or NULL with TypeError set. */
PyObject *tuple_of(PyObject *obj, const char *what);

#endif
