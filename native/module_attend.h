/* module_attend.h - entries of attention in ctxreuse._native; ctxreuse/_native.pyi names their arguments. */
#ifndef CTXREUSE_MODULE_ATTEND_H
#define CTXREUSE_MODULE_ATTEND_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *attend(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *attend_merge(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *attend_quantise(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *attend_name(PyObject *module, PyObject *dim);

#endif
