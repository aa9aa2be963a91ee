/* module_klt.h - entries of the transform coder in ctxreuse._native; ctxreuse/_native.pyi names their arguments. */
#ifndef CTXREUSE_MODULE_KLT_H
#define CTXREUSE_MODULE_KLT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *klt_plane(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *klt_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *klt_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *klt_bound(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *klt_name(PyObject *module, PyObject *unused);

#endif
