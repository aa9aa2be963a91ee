/* module_rans.h - entries of the entropy coder in ctxreuse._native; ctxreuse/_native.pyi names their arguments. */
#ifndef CTXREUSE_MODULE_RANS_H
#define CTXREUSE_MODULE_RANS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "rans.h"

/* NULL with TypeError set unless obj was made by rans_tables. */
const ctx_rans_tables *rans_tables_of(PyObject *obj);

PyObject *rans_tables(PyObject *module, PyObject *freqs);
PyObject *rans_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *rans_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *rans_count(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *rans_name(PyObject *module, PyObject *unused);

#endif
