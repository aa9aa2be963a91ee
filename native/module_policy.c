/* module_policy.c - shadows and rosters of eviction policies for Python, as capsules. The GIL guards them.
 *
 * A path comes as one buffer of keys `stride` bytes apart: 8 (numbers) or 32 (the store's keys, of which a shadow reads the
 * first 8 bytes; a roster keeps all). Sizes and tokens come as buffers of uint32, one a key.
 */
#include "module_policy.h"

#include <stdlib.h>
#include <string.h>

#include "policy.h"

#define SHADOW "ctxreuse.shadow"
#define ROSTER "ctxreuse.roster"

static policy_shadow *shadow_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, SHADOW); }
static policy_roster *roster_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, ROSTER); }
static void shadow_end(PyObject *capsule) { policy_free(shadow_of(capsule)); }
static void roster_end(PyObject *capsule) { policy_roster_free(roster_of(capsule)); }

/* Keys as they came, and their ids. */
typedef struct keys {
    region raw;
    size_t n, stride;
    uint64_t *ids, near[128];
} keys;

static void let_go(keys *path) {
    if (path->ids != path->near) free(path->ids);
    PyBuffer_Release(&path->raw.view);
}

static int keys_of(PyObject *obj, PyObject *stride, keys *out) {
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

static void key_at(const keys *path, size_t i, uint8_t key[POLICY_KEY]) {
    memset(key, 0, POLICY_KEY);
    memcpy(key, (const uint8_t *)path->raw.view.buf + i * path->stride, path->stride);
}

static int counts_of(PyObject *obj, const char *what, size_t n, region *out) {
    if (take_numbers(obj, 0, sizeof(uint32_t), what, out) < 0) return -1;
    if (out->bytes == n * sizeof(uint32_t)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: %zu bytes for %zu keys", what, out->bytes, n);
    PyBuffer_Release(&out->view);
    return -1;
}

static int small_of(PyObject *obj, const char *what, uint32_t *out) {
    size_t value;
    if (size_of(obj, what, &value) < 0) return -1;
    *out = value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
    return 0;
}

/* Ids that went, growing. Without memory some are not named, which is noticed at the end. */
typedef struct gone {
    uint64_t *ids, near[64];
    size_t n, room;
    int failed;
} gone;

static void went(void *context, uint64_t id) {
    gone *out = context;
    if (out->n == out->room) {
        size_t room = out->room * 2;
        uint64_t *ids = malloc(room * sizeof *ids);
        if (!ids) {
            out->failed = 1;
            return;
        }
        memcpy(ids, out->ids, out->n * sizeof *ids);
        if (out->ids != out->near) free(out->ids);
        out->ids = ids;
        out->room = room;
    }
    out->ids[out->n++] = id;
}

static PyObject *gone_bytes(gone *out) {
    PyObject *bytes = out->failed ? PyErr_NoMemory() : PyBytes_FromStringAndSize((const char *)out->ids, (Py_ssize_t)(out->n * 8));
    if (out->ids != out->near) free(out->ids);
    return bytes;
}

#define GONE(name) gone name = {.room = 64}; (name).ids = (name).near

/* (kind, capacity, per_token, per_pair, alpha) -> shadow */
static PyObject *shadow_new(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t kind, capacity;
    (void)module;
    if (arity(nargs, 5, "shadow_new") < 0 || size_of(args[0], "kind", &kind) < 0 || size_of(args[1], "capacity", &capacity) < 0)
        return NULL;
    double numbers[3];
    for (int i = 0; i < 3; i++) {
        numbers[i] = PyFloat_AsDouble(args[2 + i]);
        if (PyErr_Occurred()) return NULL;
    }
    if (kind >= POLICY_KINDS) {
        PyErr_Format(PyExc_ValueError, "no policy %zu", kind);
        return NULL;
    }
    policy_shadow *shadow = policy_new((policy_kind)kind, capacity, numbers[0], numbers[1], numbers[2]);
    if (!shadow) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(shadow, SHADOW, shadow_end);
    if (!capsule) policy_free(shadow);
    return capsule;
}

/* (shadow, per_token, per_pair, alpha) */
static PyObject *shadow_tune(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 4, "shadow_tune") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    double per_token = shadow ? PyFloat_AsDouble(args[1]) : 0, per_pair = shadow ? PyFloat_AsDouble(args[2]) : 0;
    double alpha = shadow ? PyFloat_AsDouble(args[3]) : 0;
    if (!shadow || PyErr_Occurred()) return NULL;
    shadow->per_token = per_token;
    shadow->per_pair = per_pair;
    shadow->alpha = alpha;
    Py_RETURN_NONE;
}

/* (shadow, keys, stride, sizes, tokens, now) -> (blocks that were held, ids that went) */
static PyObject *shadow_request(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    region sizes, tokens;
    size_t hit = 0;
    int done = -2;
    GONE(out);
    (void)module;
    if (arity(nargs, 6, "shadow_request") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    double now = shadow ? PyFloat_AsDouble(args[5]) : 0;
    if (!shadow || PyErr_Occurred() || keys_of(args[1], args[2], &path) < 0) return NULL;
    if (counts_of(args[3], "sizes", path.n, &sizes) == 0) {
        if (counts_of(args[4], "tokens", path.n, &tokens) == 0) {
            done = policy_request(shadow, path.ids, sizes.view.buf, tokens.view.buf, path.n, now, &hit, went, &out);
            PyBuffer_Release(&tokens.view);
        }
        PyBuffer_Release(&sizes.view);
    }
    let_go(&path);
    if (done < 0) return done == -1 ? PyErr_NoMemory() : NULL;
    PyObject *ids = gone_bytes(&out);
    return ids ? Py_BuildValue("(nN)", (Py_ssize_t)hit, ids) : NULL;
}

/* (shadow, key, stride, parent or None, nbytes, start, tokens) */
static PyObject *shadow_hold(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys key, parent;
    uint32_t nbytes, start, tokens;
    int done = -2;
    (void)module;
    if (arity(nargs, 7, "shadow_hold") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    if (!shadow || small_of(args[4], "nbytes", &nbytes) < 0 || small_of(args[5], "start", &start) < 0 ||
        small_of(args[6], "tokens", &tokens) < 0 || keys_of(args[1], args[2], &key) < 0)
        return NULL;
    if (args[3] == Py_None) {
        if (key.n == 1) done = policy_hold(shadow, key.ids[0], 0, 0, nbytes, start, tokens);
    } else if (keys_of(args[3], args[2], &parent) == 0) {
        if (key.n == 1 && parent.n == 1) done = policy_hold(shadow, key.ids[0], 1, parent.ids[0], nbytes, start, tokens);
        let_go(&parent);
    }
    let_go(&key);
    if (done == 0) Py_RETURN_NONE;
    if (done == -1) return PyErr_NoMemory();
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one key and one parent are needed");
    return NULL;
}

/* (shadow, keys, stride, now) */
static PyObject *shadow_use(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 4, "shadow_use") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    double now = shadow ? PyFloat_AsDouble(args[3]) : 0;
    if (!shadow || PyErr_Occurred() || keys_of(args[1], args[2], &path) < 0) return NULL;
    int done = policy_use(shadow, path.ids, path.n, now);
    let_go(&path);
    if (done < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* (shadow, key, stride, label) */
static PyObject *shadow_mark(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint32_t label;
    (void)module;
    if (arity(nargs, 4, "shadow_mark") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    if (!shadow || small_of(args[3], "label", &label) < 0 || keys_of(args[1], args[2], &path) < 0) return NULL;
    if (path.n == 1) policy_mark(shadow, path.ids[0], label);
    let_go(&path);
    Py_RETURN_NONE;
}

static policy_shadow *learner_of(PyObject *capsule) {
    policy_shadow *shadow = shadow_of(capsule);
    if (shadow && !shadow->hazard) PyErr_SetString(PyExc_ValueError, "this policy learns nothing");
    return shadow && shadow->hazard ? shadow : NULL;
}

/* (shadow, ghosts remembered at least, and for each held block) */
static PyObject *shadow_remember(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    uint32_t least;
    (void)module;
    if (arity(nargs, 3, "shadow_remember") < 0) return NULL;
    policy_shadow *shadow = learner_of(args[0]);
    double ratio = shadow ? PyFloat_AsDouble(args[2]) : 0;
    if (!shadow || PyErr_Occurred() || small_of(args[1], "least", &least) < 0) return NULL;
    policy_hazard_remember(shadow, least, ratio >= 0 ? ratio : 0);
    Py_RETURN_NONE;
}

/* shadow -> rows of doubles: a class, uses by age, paths seen by age */
static PyObject *shadow_learnt(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_shadow *shadow = learner_of(capsule);
    if (!shadow) return NULL;
    size_t bytes = policy_hazard_learnt(shadow, NULL) * POLICY_LEARNT * sizeof(double);
    double *rows = malloc(bytes + 1);
    if (!rows) return PyErr_NoMemory();
    policy_hazard_learnt(shadow, rows);
    PyObject *result = PyBytes_FromStringAndSize((const char *)rows, (Py_ssize_t)bytes);
    free(rows);
    return result;
}

/* (shadow, rows as shadow_learnt gives them, which the caller has judged) */
static PyObject *shadow_teach(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    region raw;
    (void)module;
    if (arity(nargs, 2, "shadow_teach") < 0) return NULL;
    policy_shadow *shadow = learner_of(args[0]);
    if (!shadow || take_numbers(args[1], 0, sizeof(double), "rows", &raw) < 0) return NULL;
    size_t rows = raw.bytes / (POLICY_LEARNT * sizeof(double));
    int done = raw.bytes % (POLICY_LEARNT * sizeof(double)) ? -1 : policy_hazard_teach(shadow, raw.view.buf, rows);
    PyBuffer_Release(&raw.view);
    if (done == 0) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "no rows of counts by class, or no memory");
    return NULL;
}

/* shadow -> ids that went */
static PyObject *shadow_fit(PyObject *module, PyObject *capsule) {
    GONE(out);
    (void)module;
    policy_shadow *shadow = shadow_of(capsule);
    if (!shadow) return NULL;
    policy_fit(shadow, went, &out);
    return gone_bytes(&out);
}

/* (shadow, keys, stride) -> leading blocks that are held */
static PyObject *shadow_match(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 3, "shadow_match") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    if (!shadow || keys_of(args[1], args[2], &path) < 0) return NULL;
    size_t held = policy_match(shadow, path.ids, path.n);
    let_go(&path);
    return PyLong_FromSize_t(held);
}

/* (shadow, key, stride) -> whether it was a held leaf, and went */
static PyObject *shadow_drop(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 3, "shadow_drop") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    if (!shadow || keys_of(args[1], args[2], &path) < 0) return NULL;
    int dropped = path.n == 1 && policy_drop(shadow, path.ids[0]);
    let_go(&path);
    return PyBool_FromLong(dropped);
}

/* (shadow, limit) -> ids */
static PyObject *shadow_order(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t limit;
    (void)module;
    if (arity(nargs, 2, "shadow_order") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]);
    if (!shadow || size_of(args[1], "limit", &limit) < 0) return NULL;
    if (limit > shadow->count) limit = shadow->count;
    uint64_t *ids = malloc((limit + 1) * sizeof *ids);
    ptrdiff_t n = ids ? policy_order(shadow, ids, limit) : -1;
    PyObject *bytes = n < 0 ? PyErr_NoMemory() : PyBytes_FromStringAndSize((const char *)ids, n * 8);
    free(ids);
    return bytes;
}

/* (shadow, other) -> bytes of what only the first holds */
static PyObject *shadow_beyond(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 2, "shadow_beyond") < 0) return NULL;
    policy_shadow *shadow = shadow_of(args[0]), *other = shadow ? shadow_of(args[1]) : NULL;
    return other ? PyLong_FromUnsignedLongLong(policy_beyond(shadow, other)) : NULL;
}

/* shadow -> (blocks, bytes that they stand for, bytes of the arena) */
static PyObject *shadow_figures(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_shadow *shadow = shadow_of(capsule);
    if (!shadow) return NULL;
    return Py_BuildValue("(IKn)", (unsigned)shadow->count, (unsigned long long)shadow->nbytes, (Py_ssize_t)policy_bytes(shadow));
}

/* shadow -> None or what is wrong inside */
static PyObject *shadow_check(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_shadow *shadow = shadow_of(capsule);
    if (!shadow) return NULL;
    const char *wrong = policy_check(shadow);
    if (wrong) return PyUnicode_FromString(wrong);
    Py_RETURN_NONE;
}

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
    policy_shadow *before = roster ? shadow_of(args[1]) : NULL, *next = before ? shadow_of(args[2]) : NULL;
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

/* (roster, ids) -> keys of those that are held */
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

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

PyMethodDef policy_methods[] = {
    FAST(shadow_new),
    FAST(shadow_tune),
    FAST(shadow_request),
    FAST(shadow_hold),
    FAST(shadow_use),
    FAST(shadow_mark),
    FAST(shadow_remember),
    FAST(shadow_teach),
    FAST(shadow_match),
    FAST(shadow_drop),
    FAST(shadow_order),
    FAST(shadow_beyond),
    {"shadow_learnt", shadow_learnt, METH_O, NULL},
    {"shadow_fit", shadow_fit, METH_O, NULL},
    {"shadow_figures", shadow_figures, METH_O, NULL},
    {"shadow_check", shadow_check, METH_O, NULL},
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
