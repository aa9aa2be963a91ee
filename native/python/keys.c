/* python/keys.c - paths of keys, and counts that come with them, out of Python's buffers. */
#include "keys.h"

#include <stdlib.h>
#include <string.h>

void keys_release(keys *path) {
    if (path->ids != path->near) free(path->ids);
    release(&path->h);
}

int keys_of(PyObject *obj, PyObject *stride, keys *out) {
    out->h.count = 0;
    out->h.at = NULL;
    if (size_of(stride, "stride", &out->stride) < 0) return -1;
    if (out->stride != 8 && out->stride != POLICY_KEY) {
        PyErr_Format(PyExc_ValueError, "stride is %zu, must be 8 or 32", out->stride);
        return -1;
    }
    const region *raw = hold_numbers(&out->h, obj, 0, 1, "keys");
    out->n = raw ? raw->bytes / out->stride : 0;
    out->ids = out->n <= 128 ? out->near : malloc(out->n * sizeof *out->ids);
    if (!out->ids) PyErr_NoMemory();
    else if (raw && raw->bytes % out->stride)
        PyErr_Format(PyExc_ValueError, "keys: %zu bytes are no multiple of %zu", raw->bytes, out->stride);
    if (PyErr_Occurred()) {
        keys_release(out);
        return -1;
    }
    out->raw = raw->view.buf;
    for (size_t i = 0; i < out->n; i++) {
        uint64_t id = 0;
        for (int byte = 7; byte >= 0; byte--) id = id << 8 | out->raw[i * out->stride + (size_t)byte];
        out->ids[i] = id;
    }
    return 0;
}

void key_at(const keys *path, size_t i, uint8_t key[POLICY_KEY]) {
    memset(key, 0, POLICY_KEY);
    memcpy(key, path->raw + i * path->stride, path->stride);
}

const uint32_t *counts_of(keys *path, PyObject *obj, const char *what) {
    const region *counts = hold_numbers(&path->h, obj, 0, sizeof(uint32_t), what);
    if (!counts || counts->bytes == path->n * sizeof(uint32_t)) return counts ? counts->view.buf : NULL;
    PyErr_Format(PyExc_ValueError, "%s: %zu bytes for %zu keys", what, counts->bytes, path->n);
    return NULL;
}
