/* module_keys.h - paths of keys, and counts that come with them, for the doors of policies.
 *
 * A path comes as one buffer of keys `stride` bytes apart: 8 (numbers) or 32 (the store's keys, of which a shadow reads the
 * first 8 bytes; a roster keeps all). Functions that return int give 0, or -1 with an exception set.
 */
#ifndef CTXREUSE_MODULE_KEYS_H
#define CTXREUSE_MODULE_KEYS_H

#include "arguments.h"
#include "policy.h"

/* Keys as they came, and their ids; let go of by the caller. */
typedef struct keys {
    region raw;
    size_t n, stride;
    uint64_t *ids, near[128];
} keys;

int keys_of(PyObject *obj, PyObject *stride, keys *out);
void let_go(keys *path);
/* Key i, with zeros behind a short one. */
void key_at(const keys *path, size_t i, uint8_t key[POLICY_KEY]);

/* A buffer of n uint32; released by the caller. */
int counts_of(PyObject *obj, const char *what, size_t n, region *out);
/* A size, at most UINT32_MAX. */
int small_of(PyObject *obj, const char *what, uint32_t *out);

#endif
