/* python/suffix.c - suffix indexes for Python, as capsules. The GIL guards them. */
#include "speculate/suffix.h"

#include "module.h"

#define SUFFIX "ctxreuse.suffix"

static suffix_index *suffix_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, SUFFIX); }
static void suffix_end(PyObject *capsule) { suffix_free(suffix_of(capsule)); }

/* (tokens at most, a power of two; salt) -> index */
static PyObject *suffix_open(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t most, salt;
    (void)module;
    if (arity(nargs, 2, "suffix_open") < 0 || size_of(args[0], "most", &most) < 0 || size_of(args[1], "salt", &salt) < 0) return NULL;
    if (most < 2 || most > UINT32_C(1) << 30 || most & (most - 1)) {
        PyErr_SetString(PyExc_ValueError, "most must be a power of two, up to 2**30");
        return NULL;
    }
    suffix_index *index = suffix_new((uint32_t)most, salt);
    if (!index) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(index, SUFFIX, suffix_end);
    if (!capsule) suffix_free(index);
    return capsule;
}

/* index -> (tokens kept, tokens so far, bytes) */
static PyObject *suffix_figures(PyObject *module, PyObject *capsule) {
    (void)module;
    const suffix_index *index = suffix_of(capsule);
    if (!index) return NULL;
    uint64_t kept = index->end < index->room ? index->end : index->room;
    return Py_BuildValue("(KKn)", (unsigned long long)kept, (unsigned long long)index->end, (Py_ssize_t)suffix_bytes(index));
}

/* (index, int32 ids, whether a run begins) */
static PyObject *suffix_append(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 3, "suffix_append") < 0) return NULL;
    suffix_index *index = suffix_of(args[0]);
    int begins = index ? PyObject_IsTrue(args[2]) : -1, done = -2;
    if (begins < 0) return NULL;
    held h = {0};
    const region *ids = hold_numbers(&h, args[1], 0, sizeof(int32_t), "ids");
    if (ids) {
        const int32_t *at = ids->view.buf;
        size_t n = ids->bytes / sizeof(int32_t), good = 0;
        while (good < n && at[good] >= 0) good++;
        if (good == n)
            done = suffix_add(index, at, n, begins);
        else
            PyErr_SetString(PyExc_ValueError, "ids must be 0 or more");
    }
    release(&h);
    if (done == -1) return PyErr_NoMemory();
    if (done) return NULL;
    Py_RETURN_NONE;
}

/* (index, int32 tail, int32 ids to fill, float32 shares to fill) -> (tokens, tokens that match) */
static PyObject *suffix_continue(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 4, "suffix_continue") < 0) return NULL;
    const suffix_index *index = suffix_of(args[0]);
    if (!index) return NULL;
    held h = {0};
    size_t made = 0;
    uint32_t matched = 0;
    const region *tail = hold_numbers(&h, args[1], 0, sizeof(int32_t), "tail");
    const region *ids = tail ? hold_numbers(&h, args[2], 1, sizeof(int32_t), "ids") : NULL;
    const region *shares = ids ? hold_numbers(&h, args[3], 1, sizeof(float), "shares") : NULL;
    if (shares) {
        size_t most = ids->bytes < shares->bytes ? ids->bytes : shares->bytes;
        made = suffix_draft(index, tail->view.buf, tail->bytes / sizeof(int32_t), most / sizeof(int32_t), ids->view.buf, shares->view.buf,
                            &matched);
    }
    release(&h);
    return shares ? Py_BuildValue("(nI)", (Py_ssize_t)made, (unsigned)matched) : NULL;
}

/* (index, int32 ids to fill) -> how many of the newest tokens they are; -1 is between runs */
static PyObject *suffix_newest(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 2, "suffix_newest") < 0) return NULL;
    const suffix_index *index = suffix_of(args[0]);
    if (!index) return NULL;
    held h = {0};
    size_t count = 0;
    const region *ids = hold_numbers(&h, args[1], 1, sizeof(int32_t), "ids");
    if (ids) count = suffix_read(index, ids->view.buf, ids->bytes / sizeof(int32_t));
    release(&h);
    return ids ? PyLong_FromSize_t(count) : NULL;
}

PyMethodDef suffix_methods[] = {
    FAST(suffix_open),
    {"suffix_figures", suffix_figures, METH_O, NULL},
    FAST(suffix_append),
    FAST(suffix_continue),
    FAST(suffix_newest),
    {NULL, NULL, 0, NULL},
};
