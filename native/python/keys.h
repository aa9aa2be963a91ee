/* python/keys.h - paths of keys, and counts that come with them, for the bindings of policies.
 *
 * A path comes as one buffer of keys `stride` bytes apart: 8 (numbers) or 32 (the store's keys, of which a shadow reads the
 * first 8 bytes; a residents keeps all).
 */
#ifndef CTXREUSE_MODULE_KEYS_H
#define CTXREUSE_MODULE_KEYS_H

#include "module.h"
#include "policy/residents.h"

/* Keys as they came, and their ids; released by the caller. */
typedef struct keys {
    held h;
    const uint8_t *raw;
    size_t n, stride;
    uint64_t *ids, near[128];
} keys;

int keys_of(PyObject *obj, PyObject *stride, keys *out);
void keys_release(keys *path);
/* Key i, with zeros behind a short one. */
void key_at(const keys *path, size_t i, uint8_t key[POLICY_KEY]);
/* A buffer of one uint32 a key, held with them. */
const uint32_t *counts_of(keys *path, PyObject *obj, const char *what);

#endif
