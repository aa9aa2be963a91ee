/* python/residents.c - resident sets, what a real cache holds beside its shadows, for Python, as capsules. The GIL guards them. */
#include "keys.h"

#include <stdlib.h>

#define RESIDENTS "ctxreuse.residents"

policy_residents *residents_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, RESIDENTS); }
static void residents_end(PyObject *capsule) { policy_residents_free(residents_of(capsule)); }

static PyObject *residents_new(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    policy_residents *residents = policy_residents_new();
    if (!residents) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(residents, RESIDENTS, residents_end);
    if (!capsule) policy_residents_free(residents);
    return capsule;
}

/* (residents, key, stride, nbytes, tokens, followed) */
static PyObject *residents_hold(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint32_t nbytes, tokens;
    uint8_t key[POLICY_KEY];
    int done = -2;
    (void)module;
    if (arity(nargs, 6, "residents_hold") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    if (!residents || small_of(args[3], "nbytes", &nbytes) < 0 || small_of(args[4], "tokens", &tokens) < 0) return NULL;
    int followed = PyObject_IsTrue(args[5]);
    if (followed < 0 || keys_of(args[1], args[2], &path) < 0) return NULL;
    if (path.n == 1) {
        key_at(&path, 0, key);
        done = policy_residents_hold(residents, key, nbytes, tokens, followed);
    }
    keys_release(&path);
    if (done == 0) Py_RETURN_NONE;
    if (done == -1) return PyErr_NoMemory();
    PyErr_SetString(PyExc_ValueError, "one key is needed");
    return NULL;
}

/* (residents, key, stride) -> whether it was held, and went */
static PyObject *residents_drop(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint8_t key[POLICY_KEY];
    uint32_t place = POLICY_NONE;
    (void)module;
    if (arity(nargs, 3, "residents_drop") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    if (!residents || keys_of(args[1], args[2], &path) < 0) return NULL;
    if (path.n == 1) {
        key_at(&path, 0, key);
        place = policy_residents_find(residents, key);
    }
    keys_release(&path);
    if (place != POLICY_NONE) policy_residents_drop(residents, place);
    return PyBool_FromLong(place != POLICY_NONE);
}

/* (residents, keys, stride) -> (leading keys that are held, their sizes, their tokens) */
static PyObject *residents_match(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint8_t key[POLICY_KEY];
    (void)module;
    if (arity(nargs, 3, "residents_match") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    if (!residents || keys_of(args[1], args[2], &path) < 0) return NULL;
    uint32_t *found = malloc((2 * path.n + 1) * sizeof *found);
    policy_hash_warm(&residents->hash, path.ids, path.n, residents->entries, sizeof *residents->entries);
    size_t n = 0;
    for (; found && n < path.n; n++) {
        key_at(&path, n, key);
        uint32_t place = policy_residents_find(residents, key);
        if (place == POLICY_NONE) break;
        found[n] = residents->entries[place].nbytes;
        found[path.n + n] = residents->entries[place].tokens;
    }
    PyObject *result = found ? Py_BuildValue("(ny#y#)", (Py_ssize_t)n, (const char *)found, (Py_ssize_t)(n * 4),
                                             (const char *)(found + path.n), (Py_ssize_t)(n * 4))
                             : PyErr_NoMemory();
    free(found);
    keys_release(&path);
    return result;
}

/* (residents, keys, stride, whether they left the contender or came to it) */
static PyObject *residents_moved(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 4, "residents_moved") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    int left = residents ? PyObject_IsTrue(args[3]) : -1;
    if (left < 0 || keys_of(args[1], args[2], &path) < 0) return NULL;
    policy_hash_warm(&residents->hash, path.ids, path.n, residents->entries, sizeof *residents->entries);
    for (size_t i = 0; i < path.n; i++) (left ? policy_residents_left : policy_residents_came)(residents, path.ids[i]);
    keys_release(&path);
    Py_RETURN_NONE;
}

/* (residents, shadow that was followed, shadow that is) */
static PyObject *residents_follow(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 3, "residents_follow") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    policy_shadow *before = residents ? policy_shadow_of(args[1]) : NULL, *next = before ? policy_shadow_of(args[2]) : NULL;
    if (!next) return NULL;
    if (policy_residents_follow(residents, before, next) < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int append(PyObject *list, const policy_residents *residents, uint32_t place) {
    PyObject *key = PyBytes_FromStringAndSize((const char *)residents->entries[place].key, POLICY_KEY);
    int failed = !key || PyList_Append(list, key) < 0;
    Py_XDECREF(key);
    return failed ? -1 : 0;
}

/* (residents, limit) -> keys of orphans, the first to go first */
static PyObject *residents_orphans(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t limit;
    (void)module;
    if (arity(nargs, 2, "residents_orphans") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    if (!residents || size_of(args[1], "limit", &limit) < 0) return NULL;
    PyObject *list = PyList_New(0);
    for (uint32_t place = residents->head; list && place != POLICY_NONE && limit--; place = residents->entries[place].next)
        if (append(list, residents, place) < 0) Py_CLEAR(list);
    return list;
}

/* (residents, ids, stride) -> keys of those that are held */
static PyObject *residents_keys(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 3, "residents_keys") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    if (!residents || keys_of(args[1], args[2], &path) < 0) return NULL;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < path.n; i++) {
        uint32_t place = policy_residents_find_id(residents, path.ids[i]);
        if (place != POLICY_NONE && append(list, residents, place) < 0) Py_CLEAR(list);
    }
    keys_release(&path);
    return list;
}

/* residents -> (keys, tokens, orphans, bytes of the arena) */
static PyObject *residents_figures(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_residents *residents = residents_of(capsule);
    if (!residents) return NULL;
    return Py_BuildValue("(IKIn)", (unsigned)residents->count, (unsigned long long)residents->tokens, (unsigned)residents->orphans,
                         (Py_ssize_t)policy_residents_bytes(residents));
}

PyMethodDef residents_methods[] = {
    {"residents_new", residents_new, METH_NOARGS, NULL},
    FAST(residents_hold),
    FAST(residents_drop),
    FAST(residents_match),
    FAST(residents_moved),
    FAST(residents_follow),
    FAST(residents_orphans),
    FAST(residents_keys),
    {"residents_figures", residents_figures, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
