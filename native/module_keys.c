/* module_keys.c - paths of keys, and counts that come with them, out of Python's buffers. */
#include "module_keys.h"

#include <stdlib.h>
#include <string.h>

void let_go(keys *path) {
    if (path->ids != path->near) free(path->ids);
    PyBuffer_Release(&path->raw.view);
}

int keys_of(PyObject *obj, PyObject *stride, keys *out) {
    if (size_of(stride, "stride", &out->stride) < 0) return -1;
    if (out->stride != 8 && out->stride != POLICY_KEY) {
        PyErr_Format(PyExc_ValueError, "stride is %zu, must be 8 or 32", out->stride);
        return -1;
    }
    if (take_numbers(obj, 0, 1, "keys", &out->raw) < 0) return -1;
    out->n = out->raw.bytes / out->stride;
    out->ids = out->n <= 128 ? out->near : malloc(out->n * sizeof *out->ids);
    if (!out->ids || out->raw.bytes % out->stride) {
        if (!out->ids) PyErr_NoMemory();
        else PyErr_Format(PyExc_ValueError, "keys: %zu bytes are no multiple of %zu", out->raw.bytes, out->stride);
        let_go(out);
        return -1;
    }
    const uint8_t *at = out->raw.view.buf;
    for (size_t i = 0; i < out->n; i++, at += out->stride) {
        uint64_t id = 0;
        for (int byte = 7; byte >= 0; byte--) id = id << 8 | at[byte];
        out->ids[i] = id;
    }
    return 0;
}

void key_at(const keys *path, size_t i, uint8_t key[POLICY_KEY]) {
    memset(key, 0, POLICY_KEY);
    memcpy(key, (const uint8_t *)path->raw.view.buf + i * path->stride, path->stride);
}

int counts_of(PyObject *obj, const char *what, size_t n, region *out) {
    if (take_numbers(obj, 0, sizeof(uint32_t), what, out) < 0) return -1;
    if (out->bytes == n * sizeof(uint32_t)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: %zu bytes for %zu keys", what, out->bytes, n);
    PyBuffer_Release(&out->view);
    return -1;
}

int small_of(PyObject *obj, const char *what, uint32_t *out) {
    size_t value;
    if (size_of(obj, what, &value) < 0) return -1;
    *out = value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
    return 0;
}
