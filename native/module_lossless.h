/* module_lossless.h - the Python door to lossless packing: what module.c lists in its table of functions. */
#ifndef CTXREUSE_MODULE_LOSSLESS_H
#define CTXREUSE_MODULE_LOSSLESS_H

#include "arguments.h"

PyObject *lossless_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *lossless_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
