/* python/module.c - the Python bindings: ctxreuse._native, limited API 3.11. Which kernel tables there are, and the module itself.
 *
 * Each entry takes positional arguments only and checks all of them (arguments.c) before it calls the core. All buffers are
 * held, as Py_buffer, until it returns; the GIL is released while much is moved.
 */
#include "module.h"

#include <stdlib.h>
#include <string.h>

static PyObject *kernels(PyObject *module, PyObject *unused) {
    Py_ssize_t count = 0;
    while (ctx_usable((size_t)count)) count++;
    PyObject *names = PyTuple_New(count);
    (void)module, (void)unused;
    for (Py_ssize_t i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(ctx_usable((size_t)i)->name);
        if (!name || PyTuple_SetItem(names, i, name) < 0) Py_CLEAR(names);
    }
    return names;
}

static PyObject *active(PyObject *module, PyObject *unused) {
    const ctx_kernels *k = table();
    (void)module, (void)unused;
    return k ? PyUnicode_FromString(k->name) : NULL;
}

static PyObject *use(PyObject *module, PyObject *name) {
    (void)module;
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (!text) return NULL;
    if (strlen(text) == (size_t)length && ctx_use(text) == 0) Py_RETURN_NONE; /* no NUL inside */
    PyErr_Format(PyExc_ValueError, "kernel table %R is not usable on this machine (known: " CTX_TABLE_NAMES ")", name);
    return NULL;
}

static int start(PyObject *module) {
    PyMethodDef *const parts[] = {box_methods, rans_methods, klt_methods, lossless_methods, attention_methods, linear_methods, decoder_methods, drift_methods,
                                  policy_methods, residents_methods, tree_methods, suffix_methods, memory_methods,
                                  places_methods};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (PyModule_AddFunctions(module, parts[i]) < 0) return -1;
    if (ctx_active()) return 0;
    PyErr_Format(PyExc_ImportError,
                 "CTXREUSE_KERNELS=%s names no kernel table that runs on this machine (known: " CTX_TABLE_NAMES
                 "; best here: %s). Unset it to let ctxreuse choose.",
                 getenv("CTXREUSE_KERNELS"), ctx_usable(0)->name);
    return -1;
}

static PyMethodDef methods[] = {
    {"kernels", kernels, METH_NOARGS, NULL},
    {"active", active, METH_NOARGS, NULL},
    {"use", use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "ctxreuse._native",
    .m_doc = "Native kernels of ctxreuse; the documented interface is ctxreuse.kernels.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
