/* python/arguments.h - how the Python bindings reads its arguments, all of which are hostile.
 *
 * Functions that return int give 0, or -1 with an exception set; those that return a pointer give NULL then. `what` names
 * the argument in the message. The GIL is held.
 */
#ifndef CTXREUSE_ARGUMENTS_H
#define CTXREUSE_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core/ctxreuse.h"

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

/* The table in use; RuntimeError if there is none. */
const ctx_kernels *table(void);

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

int arity(Py_ssize_t got, Py_ssize_t want, const char *name);
int size_of(PyObject *obj, const char *what, size_t *out);
/* A size, at most UINT32_MAX: what is more becomes that. */
int small_of(PyObject *obj, const char *what, uint32_t *out);
/* Three sizes; with `inner`, the third may be left out and is then 1. */
int sizes_of(PyObject *obj, const char *what, int inner, size_t out[3]);
int dtype_of(PyObject *obj, const char *what, ctx_dtype *out);
/* A number that is finite as a float. */
int float_of(PyObject *obj, const char *what, float *out);
enum { LONG_HASH = 241 /* bytes that the kernel of XXH3-64 takes at least */ };
/* The XXH3-64 of `bytes` bytes, of which there must be enough for the kernel. */
int checksum_of(PyObject *obj, size_t bytes, const char *what, uint64_t *out);

/* ---- Sequences --------------------------------------------------------------------------------------------------- */

/* A tuple of our own, since a list could be changed by another thread, or by an item's __index__ or __buffer__. A new
 * reference. */
PyObject *tuple_of(PyObject *obj, const char *what);
/* The same, of `count` items. */
PyObject *fields_of(PyObject *obj, Py_ssize_t count, const char *what);

/* `count` sequences as tuples of one length, *n; from `needed` on, None gives NULL. Dropped by the caller, even on failure. */
int lists_of(PyObject *const *args, const char *const *names, int needed, int count, PyObject **lists, size_t *n);
void drop_lists(PyObject **lists, int count);

/* ---- Buffers ----------------------------------------------------------------------------------------------------- */

typedef struct region {
    Py_buffer view;
    size_t bytes; /* from the first element to behind the last one */
} region;

/* The buffers that a call holds; starts as {0}, ends with release. Eight fit without memory of their own. */
typedef struct held {
    size_t count;
    region *at, near[8];
} held;

/* Room for so many in all, before the first one is held. */
int held_room(held *h, size_t count);
/* Any buffer with non-negative strides. A strided view counts as the bytes it spans, which one allocation holds. */
region *hold(held *h, PyObject *obj, int writable, const char *what);
/* A contiguous buffer of `item`-byte numbers, aligned to them. */
region *hold_numbers(held *h, PyObject *obj, int writable, size_t item, const char *what);
void release(held *h);

/* A box of a held buffer: its place is known once its shape is. */
typedef struct box {
    ctx_view view;
    const region *buffer;
    size_t offset;
    int writable;
    const char *what;
} box;

/* From four arguments: buffer, dtype, offset, strides. */
int box_of(held *h, PyObject *const *args, int writable, const char *what, box *out);
/* Check the box against its buffer and set view.at; a writable one must have distinct elements. */
int place(box *b, const size_t shape[3]);

#endif
