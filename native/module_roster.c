/* module_roster.c - rosters, what a real cache holds beside its shadows, for Python, as capsules. The GIL guards them. */
#include <stdlib.h>

#include "module_keys.h"
#include "module_policy.h"

#define ROSTER "ctxreuse.roster"

static policy_roster *roster_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, ROSTER); }
static void roster_end(PyObject *capsule) { policy_roster_free(roster_of(capsule)); }

static PyObject *roster_new(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    policy_roster *roster = policy_roster_new();
    if (!roster) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(roster, ROSTER, roster_end);
    if (!capsule) policy_roster_free(roster);
    return capsule;
}

/* (roster, key, stride, nbytes, tokens, followed) */
static PyObject *roster_hold(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint32_t nbytes, tokens;
    uint8_t key[POLICY_KEY];
    int done = -2;
    (void)module;
    if (arity(nargs, 6, "roster_hold") < 0) return NULL;
    policy_roster *roster = roster_of(args[0]);
    if (!roster || small_of(args[3], "nbytes", &nbytes) < 0 || small_of(args[4], "tokens", &tokens) < 0) return NULL;
    int followed = PyObject_IsTrue(args[5]);
    if (followed < 0 || keys_of(args[1], args[2], &path) < 0) return NULL;
    if (path.n == 1) {
        key_at(&path, 0, key);
        done = policy_roster_hold(roster, key, nbytes, tokens, followed);
    }
    let_go(&path);
    if (done == 0) Py_RETURN_NONE;
    if (done == -1) return PyErr_NoMemory();
    PyErr_SetString(PyExc_ValueError, "one key is needed");
    return NULL;
}

/* (roster, key, stride) -> whether it was held, and went */
static PyObject *roster_drop(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint8_t key[POLICY_KEY];
    uint32_t place = POLICY_NONE;
    (void)module;
    if (arity(nargs, 3, "roster_drop") < 0) return NULL;
    policy_roster *roster = roster_of(args[0]);
    if (!roster || keys_of(args[1], args[2], &path) < 0) return NULL;
    if (path.n == 1) {
        key_at(&path, 0, key);
        place = policy_roster_find(roster, key);
    }
    let_go(&path);
    if (place != POLICY_NONE) policy_roster_drop(roster, place);
    return PyBool_FromLong(place != POLICY_NONE);
}

/* (roster, keys, stride) -> (leading keys that are held, their sizes, their tokens) */
static PyObject *roster_match(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint8_t key[POLICY_KEY];
    (void)module;
    if (arity(nargs, 3, "roster_match") < 0) return NULL;
    policy_roster *roster = roster_of(args[0]);
    if (!roster || keys_of(args[1], args[2], &path) < 0) return NULL;
    uint32_t *found = malloc((2 * path.n + 1) * sizeof *found);
    policy_hash_warm(&roster->hash, path.ids, path.n, roster->entries, sizeof *roster->entries);
    size_t n = 0;
    for (; found && n < path.n; n++) {
        key_at(&path, n, key);
        uint32_t place = policy_roster_find(roster, key);
        if (place == POLICY_NONE) break;
        found[n] = roster->entries[place].nbytes;
        found[path.n + n] = roster->entries[place].tokens;
    }
    PyObject *result = found ? Py_BuildValue("(ny#y#)", (Py_ssize_t)n, (const char *)found, (Py_ssize_t)(n * 4),
                                             (const char *)(found + path.n), (Py_ssize_t)(n * 4))
                             : PyErr_NoMemory();
    free(found);
    let_go(&path);
    return result;
}

/* (roster, keys, stride, whether they left the contender or came to it) */
static PyObject *roster_moved(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 4, "roster_moved") < 0) return NULL;
    policy_roster *roster = roster_of(args[0]);
    int left = roster ? PyObject_IsTrue(args[3]) : -1;
    if (left < 0 || keys_of(args[1], args[2], &path) < 0) return NULL;
    policy_hash_warm(&roster->hash, path.ids, path.n, roster->entries, sizeof *roster->entries);
    for (size_t i = 0; i < path.n; i++) (left ? policy_roster_left : policy_roster_came)(roster, path.ids[i]);
    let_go(&path);
    Py_RETURN_NONE;
}

/* (roster, shadow that was followed, shadow that is) */
static PyObject *roster_follow(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 3, "roster_follow") < 0) return NULL;
    policy_roster *roster = roster_of(args[0]);
    policy_shadow *before = roster ? policy_shadow_of(args[1]) : NULL, *next = before ? policy_shadow_of(args[2]) : NULL;
    if (!next) return NULL;
    if (policy_roster_follow(roster, before, next) < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int append(PyObject *list, const policy_roster *roster, uint32_t place) {
    PyObject *key = PyBytes_FromStringAndSize((const char *)roster->entries[place].key, POLICY_KEY);
    int failed = !key || PyList_Append(list, key) < 0;
    Py_XDECREF(key);
    return failed ? -1 : 0;
}

/* (roster, limit) -> keys of strays, the first to go first */
static PyObject *roster_strays(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t limit;
    (void)module;
    if (arity(nargs, 2, "roster_strays") < 0) return NULL;
    policy_roster *roster = roster_of(args[0]);
    if (!roster || size_of(args[1], "limit", &limit) < 0) return NULL;
    PyObject *list = PyList_New(0);
    for (uint32_t place = roster->head; list && place != POLICY_NONE && limit--; place = roster->entries[place].next)
        if (append(list, roster, place) < 0) Py_CLEAR(list);
    return list;
}

/* (roster, ids, stride) -> keys of those that are held */
static PyObject *roster_keys(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 3, "roster_keys") < 0) return NULL;
    policy_roster *roster = roster_of(args[0]);
    if (!roster || keys_of(args[1], args[2], &path) < 0) return NULL;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < path.n; i++) {
        uint32_t place = policy_roster_find_id(roster, path.ids[i]);
        if (place != POLICY_NONE && append(list, roster, place) < 0) Py_CLEAR(list);
    }
    let_go(&path);
    return list;
}

/* roster -> (keys, tokens, strays, bytes of the arena) */
static PyObject *roster_figures(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_roster *roster = roster_of(capsule);
    if (!roster) return NULL;
    return Py_BuildValue("(IKIn)", (unsigned)roster->count, (unsigned long long)roster->tokens, (unsigned)roster->strays,
                         (Py_ssize_t)policy_roster_bytes(roster));
}

PyMethodDef roster_methods[] = {
    {"roster_new", roster_new, METH_NOARGS, NULL},
    FAST(roster_hold),
    FAST(roster_drop),
    FAST(roster_match),
    FAST(roster_moved),
    FAST(roster_follow),
    FAST(roster_strays),
    FAST(roster_keys),
    {"roster_figures", roster_figures, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
