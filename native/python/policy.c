/* python/policy.c - shadows of eviction policies for Python, as capsules. The GIL guards them.
 *
 * Paths come as keys.h says; sizes and tokens as buffers of uint32, one a key.
 */
#include "policy/hazard.h"
#include "policy/pauses.h"

#include <stdlib.h>
#include <string.h>

#include "keys.h"

#define SHADOW "ctxreuse.shadow"

policy_shadow *policy_shadow_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, SHADOW); }
static void shadow_end(PyObject *capsule) { policy_free(policy_shadow_of(capsule)); }

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

/* (kind, capacity, per_token, per_pair, alpha, shadow to share an arena with or None) -> shadow */
static PyObject *shadow_new(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t kind, capacity;
    (void)module;
    if (arity(nargs, 6, "shadow_new") < 0 || size_of(args[0], "kind", &kind) < 0 || size_of(args[1], "capacity", &capacity) < 0)
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
    const policy_shadow *beside = args[5] == Py_None ? NULL : policy_shadow_of(args[5]);
    if (!beside && args[5] != Py_None) return NULL;
    policy_shadow *shadow = policy_new((policy_kind)kind, capacity, numbers[0], numbers[1], numbers[2], beside);
    if (!shadow) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(shadow, SHADOW, shadow_end);
    if (!capsule) policy_free(shadow);
    return capsule;
}

/* (shadow, per_token, per_pair, alpha) */
static PyObject *shadow_tune(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 4, "shadow_tune") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
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
    const uint32_t *sizes, *tokens;
    size_t hit = 0;
    int done = -2;
    GONE(out);
    (void)module;
    if (arity(nargs, 6, "shadow_request") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
    double now = shadow ? PyFloat_AsDouble(args[5]) : 0;
    if (!shadow || PyErr_Occurred() || keys_of(args[1], args[2], &path) < 0) return NULL;
    if ((sizes = counts_of(&path, args[3], "sizes")) && (tokens = counts_of(&path, args[4], "tokens")))
        done = policy_request(shadow, path.ids, sizes, tokens, path.n, now, &hit, went, &out);
    keys_release(&path);
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
    policy_shadow *shadow = policy_shadow_of(args[0]);
    if (!shadow || small_of(args[4], "nbytes", &nbytes) < 0 || small_of(args[5], "start", &start) < 0 ||
        small_of(args[6], "tokens", &tokens) < 0 || keys_of(args[1], args[2], &key) < 0)
        return NULL;
    if (args[3] == Py_None) {
        if (key.n == 1) done = policy_hold(shadow, key.ids[0], 0, 0, nbytes, start, tokens);
    } else if (keys_of(args[3], args[2], &parent) == 0) {
        if (key.n == 1 && parent.n == 1) done = policy_hold(shadow, key.ids[0], 1, parent.ids[0], nbytes, start, tokens);
        keys_release(&parent);
    }
    keys_release(&key);
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
    policy_shadow *shadow = policy_shadow_of(args[0]);
    double now = shadow ? PyFloat_AsDouble(args[3]) : 0;
    if (!shadow || PyErr_Occurred() || keys_of(args[1], args[2], &path) < 0) return NULL;
    int done = policy_use(shadow, path.ids, path.n, now);
    keys_release(&path);
    if (done < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* (shadow, keys of a prompt, stride, now) */
static PyObject *shadow_lookup(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 4, "shadow_lookup") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
    double now = shadow ? PyFloat_AsDouble(args[3]) : 0;
    if (!shadow || PyErr_Occurred() || keys_of(args[1], args[2], &path) < 0) return NULL;
    int done = policy_lookup(shadow, path.ids, path.n, now);
    keys_release(&path);
    if (done < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* (shadow, key, stride, label, now) */
static PyObject *shadow_mark(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    uint32_t label;
    (void)module;
    if (arity(nargs, 5, "shadow_mark") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
    double now = shadow ? PyFloat_AsDouble(args[4]) : 0;
    if (!shadow || PyErr_Occurred() || small_of(args[3], "label", &label) < 0 || keys_of(args[1], args[2], &path) < 0)
        return NULL;
    if (path.n == 1) policy_mark(shadow, path.ids[0], label, now);
    keys_release(&path);
    Py_RETURN_NONE;
}

static policy_shadow *learner_of(PyObject *capsule) {
    policy_shadow *shadow = policy_shadow_of(capsule);
    if (shadow && shadow->kind < POLICY_HAZARD) PyErr_SetString(PyExc_ValueError, "this policy learns nothing");
    return shadow && shadow->kind >= POLICY_HAZARD ? shadow : NULL;
}

/* (shadow, ghosts remembered at least, and for each held block) */
static PyObject *shadow_remember(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    uint32_t least;
    (void)module;
    if (arity(nargs, 3, "shadow_remember") < 0) return NULL;
    policy_shadow *shadow = learner_of(args[0]);
    double ratio = shadow ? PyFloat_AsDouble(args[2]) : 0;
    if (!shadow || PyErr_Occurred() || small_of(args[1], "least", &least) < 0) return NULL;
    if (!shadow->hazard) return PyErr_Format(PyExc_ValueError, "this policy remembers no ghosts");
    policy_hazard_remember(shadow, least, ratio >= 0 ? ratio : 0);
    Py_RETURN_NONE;
}

/* Doubles of a row of what a policy learnt. */
static size_t row_bytes(const policy_shadow *shadow) {
    return (shadow->hazard ? POLICY_LEARNT : PAUSES_LEARNT) * sizeof(double);
}

/* shadow -> rows of doubles: what they are of, and counts */
static PyObject *shadow_learnt(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_shadow *shadow = learner_of(capsule);
    if (!shadow) return NULL;
    size_t (*learnt)(const policy_shadow *, double *) = shadow->hazard ? policy_hazard_learnt : policy_pauses_learnt;
    size_t bytes = learnt(shadow, NULL) * row_bytes(shadow);
    double *rows = malloc(bytes + 1);
    if (!rows) return PyErr_NoMemory();
    learnt(shadow, rows);
    PyObject *result = PyBytes_FromStringAndSize((const char *)rows, (Py_ssize_t)bytes);
    free(rows);
    return result;
}

/* (shadow, rows as shadow_learnt gives them, which the caller has judged) */
static PyObject *shadow_teach(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    held h = {0};
    const region *raw;
    int done = -1;
    (void)module;
    if (arity(nargs, 2, "shadow_teach") < 0) return NULL;
    policy_shadow *shadow = learner_of(args[0]);
    if (!shadow || !(raw = hold_numbers(&h, args[1], 0, sizeof(double), "rows"))) {
        release(&h);
        return NULL;
    }
    if (raw->bytes % row_bytes(shadow) == 0)
        done = (shadow->hazard ? policy_hazard_teach : policy_pauses_teach)(shadow, raw->view.buf, raw->bytes / row_bytes(shadow));
    release(&h);
    if (done == 0) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "no rows of counts by class or type, or no memory");
    return NULL;
}

/* shadow -> ids that went */
static PyObject *shadow_fit(PyObject *module, PyObject *capsule) {
    GONE(out);
    (void)module;
    policy_shadow *shadow = policy_shadow_of(capsule);
    if (!shadow) return NULL;
    policy_fit(shadow, went, &out);
    return gone_bytes(&out);
}

/* (shadow, keys, stride) -> leading blocks that are held */
static PyObject *shadow_match(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 3, "shadow_match") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
    if (!shadow || keys_of(args[1], args[2], &path) < 0) return NULL;
    size_t blocks = policy_match(shadow, path.ids, path.n);
    keys_release(&path);
    return PyLong_FromSize_t(blocks);
}

/* (keys, stride, bits) -> places of those in a sample of one in 2**bits */
static PyObject *ids_sampled(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    size_t bits;
    (void)module;
    if (arity(nargs, 3, "ids_sampled") < 0 || size_of(args[2], "bits", &bits) < 0) return NULL;
    if (bits > 31) return PyErr_Format(PyExc_ValueError, "bits are 0 to 31, not %zu", bits);
    if (keys_of(args[0], args[1], &path) < 0) return NULL;
    PyObject *places = PyList_New(0);
    for (size_t i = 0; places && i < path.n; i++) {
        if (!policy_hash_sampled(path.ids[i], (uint32_t)bits)) continue;
        PyObject *place = PyLong_FromSize_t(i);
        if (!place || PyList_Append(places, place) < 0) Py_CLEAR(places);
        Py_XDECREF(place);
    }
    keys_release(&path);
    return places;
}

/* (shadow, key, stride) -> whether it was a held leaf, and went */
static PyObject *shadow_drop(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    keys path;
    (void)module;
    if (arity(nargs, 3, "shadow_drop") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
    if (!shadow || keys_of(args[1], args[2], &path) < 0) return NULL;
    int dropped = path.n == 1 && policy_drop(shadow, path.ids[0]);
    keys_release(&path);
    return PyBool_FromLong(dropped);
}

/* (shadow, limit) -> ids */
static PyObject *shadow_order(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t limit;
    (void)module;
    if (arity(nargs, 2, "shadow_order") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
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
    policy_shadow *shadow = policy_shadow_of(args[0]), *other = shadow ? policy_shadow_of(args[1]) : NULL;
    return other ? PyLong_FromUnsignedLongLong(policy_beyond(shadow, other)) : NULL;
}

/* shadow -> (blocks, bytes that they stand for, bytes of the arena) */
static PyObject *shadow_figures(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_shadow *shadow = policy_shadow_of(capsule);
    if (!shadow) return NULL;
    return Py_BuildValue("(IKn)", (unsigned)shadow->count, (unsigned long long)shadow->nbytes, (Py_ssize_t)policy_bytes(shadow));
}

/* shadow -> None or what is wrong inside */
static PyObject *shadow_check(PyObject *module, PyObject *capsule) {
    (void)module;
    policy_shadow *shadow = policy_shadow_of(capsule);
    if (!shadow) return NULL;
    const char *wrong = policy_check(shadow);
    if (wrong) return PyUnicode_FromString(wrong);
    Py_RETURN_NONE;
}

PyMethodDef policy_methods[] = {
    FAST(shadow_new),
    FAST(shadow_tune),
    FAST(shadow_request),
    FAST(shadow_hold),
    FAST(shadow_use),
    FAST(shadow_lookup),
    FAST(shadow_mark),
    FAST(shadow_remember),
    FAST(shadow_teach),
    FAST(shadow_match),
    FAST(ids_sampled),
    FAST(shadow_drop),
    FAST(shadow_order),
    FAST(shadow_beyond),
    {"shadow_learnt", shadow_learnt, METH_O, NULL},
    {"shadow_fit", shadow_fit, METH_O, NULL},
    {"shadow_figures", shadow_figures, METH_O, NULL},
    {"shadow_check", shadow_check, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
