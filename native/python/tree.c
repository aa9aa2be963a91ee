/* python/tree.c - context trees for Python, as capsules; policies filled from one; LMDB files walked. The GIL guards them.
 *
 * A node is named by its place, which stays the same until it is removed.
 */
#include "policy/tree.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "keys.h"
#include "lmdb/walk.h"

#define TREE "ctxreuse.tree"

static context_tree *tree_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, TREE); }
static void tree_end(PyObject *capsule) { context_tree_free(tree_of(capsule)); }

/* 1 and the key's bytes; 0 for bytes of another length, which are no key; -1 with an exception. */
static int key_of(PyObject *obj, const uint8_t **key) {
    char *raw;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(obj, &raw, &length) < 0) return -1;
    *key = (const uint8_t *)raw;
    return length == POLICY_KEY;
}

/* The node at a place. */
static tree_node *node_of(context_tree *tree, PyObject *place) {
    size_t at;
    if (!tree || size_of(place, "place", &at) < 0) return NULL;
    if (context_tree_has(tree, at)) return tree->nodes + at;
    PyErr_Format(PyExc_KeyError, "no node at %zu", at);
    return NULL;
}

static PyObject *place_object(uint32_t place) { return PyLong_FromLong(place == POLICY_NONE ? -1 : (long)place); }

static PyObject *tree_new(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    context_tree *tree = calloc(1, sizeof *tree);
    if (!tree) return PyErr_NoMemory();
    tree->free = POLICY_NONE;
    PyObject *capsule = PyCapsule_New(tree, TREE, tree_end);
    if (!capsule) context_tree_free(tree);
    return capsule;
}

/* tree -> (nodes, tokens, bytes, bytes of the arena, places) */
static PyObject *tree_figures(PyObject *module, PyObject *capsule) {
    (void)module;
    const context_tree *tree = tree_of(capsule);
    if (!tree) return NULL;
    size_t arena = sizeof *tree + (size_t)tree->room * sizeof *tree->nodes + (size_t)tree->hash.size * sizeof *tree->hash.slots;
    return Py_BuildValue("(IKKnI)", (unsigned)tree->count, (unsigned long long)tree->tokens, (unsigned long long)tree->nbytes,
                         (Py_ssize_t)arena, (unsigned)tree->used);
}

/* (tree, key) -> place or -1 */
static PyObject *tree_find(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const uint8_t *key;
    (void)module;
    if (arity(nargs, 2, "tree_find") < 0) return NULL;
    const context_tree *tree = tree_of(args[0]);
    int whole = tree ? key_of(args[1], &key) : -1;
    return whole < 0 ? NULL : place_object(whole ? context_tree_find(tree, key) : POLICY_NONE);
}

/* (tree, place) -> whether there is a node */
static PyObject *tree_has(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t place;
    (void)module;
    if (arity(nargs, 2, "tree_has") < 0) return NULL;
    const context_tree *tree = tree_of(args[0]);
    if (!tree || size_of(args[1], "place", &place) < 0) return NULL;
    return PyBool_FromLong(context_tree_has(tree, place));
}

/* (tree, key, place of the parent or -1, tokens, bytes, kind) -> place of a new node */
static PyObject *tree_add(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t tokens, nbytes, kind;
    const uint8_t *key;
    const tree_node *above = NULL;
    (void)module;
    if (arity(nargs, 6, "tree_add") < 0) return NULL;
    context_tree *tree = tree_of(args[0]);
    int whole = tree ? key_of(args[1], &key) : -1;
    long parent = whole < 0 ? 0 : PyLong_AsLong(args[2]);
    if (whole < 0 || PyErr_Occurred() || (parent != -1 && !(above = node_of(tree, args[2]))) ||
        size_of(args[3], "tokens", &tokens) < 0 || size_of(args[4], "nbytes", &nbytes) < 0 || size_of(args[5], "kind", &kind) < 0)
        return NULL;
    if (!whole || kind >= POLICY_NONE || tokens > UINT32_MAX - (above ? above->depth : 0) || context_tree_find(tree, key) != POLICY_NONE) {
        PyErr_SetString(PyExc_ValueError, "a key that is no key, or known; or a context of more than 4 Gi tokens");
        return NULL;
    }
    uint32_t at = above ? (uint32_t)(above - tree->nodes) : POLICY_NONE;
    if (context_tree_reserve(tree, 1) < 0) return PyErr_NoMemory();
    return place_object(context_tree_add(tree, key, at, (uint32_t)tokens, nbytes, (uint32_t)kind));
}

/* (tree, place): a leaf goes */
static PyObject *tree_remove(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 2, "tree_remove") < 0) return NULL;
    context_tree *tree = tree_of(args[0]);
    const tree_node *node = node_of(tree, args[1]);
    if (!node) return NULL;
    if (node->children) {
        PyErr_SetString(PyExc_ValueError, "the node has children");
        return NULL;
    }
    context_tree_remove(tree, (uint32_t)(node - tree->nodes));
    Py_RETURN_NONE;
}

enum { PARENT, DEPTH, TOKENS, CHILDREN, NBYTES, STATE_NBYTES, KIND };

/* (tree, place, field) -> a number */
static PyObject *tree_field(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 3, "tree_field") < 0) return NULL;
    context_tree *tree = tree_of(args[0]);
    const tree_node *node = node_of(tree, args[1]);
    if (!node) return NULL;
    switch (PyLong_AsLong(args[2])) {
    case PARENT: return place_object(node->parent);
    case DEPTH: return PyLong_FromUnsignedLong(node->depth);
    case TOKENS: return PyLong_FromUnsignedLong(context_tree_tokens(tree, node));
    case CHILDREN: return PyLong_FromUnsignedLong(node->children);
    case NBYTES: return PyLong_FromUnsignedLongLong(node->nbytes);
    case STATE_NBYTES: return PyLong_FromUnsignedLongLong(node->state_nbytes);
    case KIND: return PyLong_FromUnsignedLong(node->kind);
    default: PyErr_SetString(PyExc_ValueError, "no such field"); return NULL;
    }
}

/* (tree, place, field, number): sizes and kinds change, and in tests what never does */
static PyObject *tree_set(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    size_t value;
    (void)module;
    if (arity(nargs, 4, "tree_set") < 0) return NULL;
    context_tree *tree = tree_of(args[0]);
    tree_node *node = node_of(tree, args[1]);
    if (!node || size_of(args[3], "value", &value) < 0) return NULL;
    switch (PyLong_AsLong(args[2])) {
    case DEPTH: node->depth = (uint32_t)value; break;
    case CHILDREN: node->children = (uint32_t)value; break;
    case NBYTES: tree->nbytes += value - node->nbytes, node->nbytes = value; break;
    case STATE_NBYTES: tree->nbytes += value - node->state_nbytes, node->state_nbytes = value; break;
    case KIND: node->kind = value < POLICY_NONE ? (uint32_t)value : 0; break;
    default: PyErr_SetString(PyExc_ValueError, "no such field, or not to be set"); return NULL;
    }
    Py_RETURN_NONE;
}

/* (tree, place) -> (key, key of the parent or zeros, tokens, depth, children, bytes, bytes of the state, kind) */
static PyObject *tree_row_of(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    static const uint8_t root[POLICY_KEY] = {0};
    (void)module;
    if (arity(nargs, 2, "tree_row_of") < 0) return NULL;
    context_tree *tree = tree_of(args[0]);
    const tree_node *node = node_of(tree, args[1]);
    if (!node) return NULL;
    const uint8_t *parent = node->parent == POLICY_NONE ? root : tree->nodes[node->parent].key;
    return Py_BuildValue("(y#y#IIIKKI)", (const char *)node->key, (Py_ssize_t)POLICY_KEY, (const char *)parent, (Py_ssize_t)POLICY_KEY,
                         (unsigned)context_tree_tokens(tree, node), (unsigned)node->depth, (unsigned)node->children,
                         (unsigned long long)node->nbytes, (unsigned long long)node->state_nbytes, (unsigned)node->kind);
}

/* tree -> places of nodes with a state, 4 bytes each */
static PyObject *tree_stated(PyObject *module, PyObject *capsule) {
    size_t n = 0;
    (void)module;
    const context_tree *tree = tree_of(capsule);
    uint32_t *places = tree ? malloc(((size_t)tree->used + 1) * sizeof *places) : NULL;
    if (!places) return tree ? PyErr_NoMemory() : NULL;
    for (uint32_t place = 0; place < tree->used; place++)
        if (context_tree_has(tree, place) && tree->nodes[place].state_nbytes) places[n++] = place;
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)places, (Py_ssize_t)(n * sizeof *places));
    free(places);
    return bytes;
}

/* (tree, place) -> keys from there to the root */
static PyObject *tree_line(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 2, "tree_line") < 0) return NULL;
    context_tree *tree = tree_of(args[0]);
    const tree_node *node = node_of(tree, args[1]);
    PyObject *list = node ? PyList_New(0) : NULL;
    for (; list && node; node = node->parent == POLICY_NONE ? NULL : tree->nodes + node->parent) {
        PyObject *key = PyBytes_FromStringAndSize((const char *)node->key, POLICY_KEY);
        if (!key || PyList_Append(list, key) < 0) Py_CLEAR(list);
        Py_XDECREF(key);
    }
    return list;
}

/* (tree, places with pins) -> (tree_run of each run, the number of the run of each place) as bytes */
static PyObject *tree_runs(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 2, "tree_runs") < 0) return NULL;
    const context_tree *tree = tree_of(args[0]);
    PyObject *places = tree ? PySequence_List(args[1]) : NULL, *numbers = NULL, *result = NULL;
    uint8_t *pinned = places ? calloc((size_t)tree->used + 1, 1) : NULL;
    tree_run *runs = NULL;
    if (pinned) numbers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)tree->used * 4);
    else if (places) PyErr_NoMemory();
    for (Py_ssize_t i = 0; numbers && i < PyList_Size(places); i++) {
        size_t place;
        if (size_of(PyList_GetItem(places, i), "place", &place) < 0) Py_CLEAR(numbers);
        else if (place < tree->used) pinned[place] = 1;
    }
    if (numbers) {
        ptrdiff_t count = context_tree_runs(tree, pinned, &runs, (uint32_t *)(void *)PyBytes_AsString(numbers));
        if (count < 0) PyErr_NoMemory();
        else result = Py_BuildValue("(NO)", PyBytes_FromStringAndSize((const char *)runs, count * (Py_ssize_t)sizeof *runs), numbers);
    }
    free(runs);
    free(pinned);
    Py_XDECREF(numbers);
    Py_XDECREF(places);
    return result;
}

/* (tree, keys, one byte a kind: bit 0 blocks may be used, bit 1 states)
 * -> (leading keys that may be used, place of the last, how many of them up to the last state, its place) */
static PyObject *tree_match(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    char *allowed;
    Py_ssize_t kinds, blocks = 0, stated = 0;
    uint32_t last = POLICY_NONE, deepest = POLICY_NONE;
    (void)module;
    if (arity(nargs, 3, "tree_match") < 0) return NULL;
    const context_tree *tree = tree_of(args[0]);
    Py_ssize_t n = tree ? PySequence_Size(args[1]) : -1;
    if (n < 0 || PyBytes_AsStringAndSize(args[2], &allowed, &kinds) < 0) return NULL;
    for (; blocks < n; blocks++) {
        const uint8_t *key;
        PyObject *item = PySequence_GetItem(args[1], blocks);
        int whole = item ? key_of(item, &key) : -1;
        uint32_t place = whole > 0 ? context_tree_find(tree, key) : POLICY_NONE;
        Py_XDECREF(item);
        if (whole < 0) return NULL;
        if (place == POLICY_NONE) break;
        const tree_node *node = tree->nodes + place;
        int may = node->kind < (size_t)kinds ? allowed[node->kind] : 0;
        if (!(may & 1)) break;
        last = place;
        if (node->state_nbytes && may & 2) deepest = place, stated = blocks + 1;
    }
    return Py_BuildValue("(nNnN)", blocks, place_object(last), stated, place_object(deepest));
}

/* (tree, rows, their order, 8 bytes of room a row, 1 byte a row, 8 bytes of zeros a kind) -> keys that are alike; see context_tree_load */
static PyObject *tree_load(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    held h = {0};
    ptrdiff_t done = -2;
    (void)module;
    if (arity(nargs, 6, "tree_load") < 0) return NULL;
    context_tree *tree = tree_of(args[0]);
    const region *rows = tree ? hold_numbers(&h, args[1], 0, 1, "rows") : NULL;
    const region *order = rows ? hold_numbers(&h, args[2], 0, 4, "order") : NULL;
    const region *used = order ? hold_numbers(&h, args[3], 1, 8, "used") : NULL;
    const region *lost = used ? hold_numbers(&h, args[4], 1, 1, "lost") : NULL;
    const region *uses = lost ? hold_numbers(&h, args[5], 1, 8, "uses") : NULL;
    size_t n = rows ? rows->bytes / sizeof(tree_row) : 0;
    if (uses && (rows->bytes % sizeof(tree_row) || (uintptr_t)rows->view.buf % _Alignof(tree_row) || order->bytes / 4 > n || used->bytes / 8 < n || lost->bytes < n || tree->used))
        PyErr_SetString(PyExc_ValueError, "rows, order and room differ, or the tree is not empty");
    else if (uses) {
        const uint32_t *at = order->view.buf;
        size_t count = order->bytes / 4, i = 0;
        while (i < count && at[i] < n) i++;
        if (i < count) PyErr_SetString(PyExc_ValueError, "the order names a row that is not there");
        else done = context_tree_load(tree, rows->view.buf, at, count, used->view.buf, lost->view.buf, uses->view.buf, uses->bytes / 8);
    }
    release(&h);
    if (done >= 0) return PyLong_FromSsize_t(done);
    return done == -1 ? PyErr_NoMemory() : NULL;
}

/* (shadow, tree, places in the order of use: each path from its end, now): an empty shadow holds what the tree holds */
static PyObject *shadow_fill(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    held h = {0};
    int done = -2;
    (void)module;
    if (arity(nargs, 4, "shadow_fill") < 0) return NULL;
    policy_shadow *shadow = policy_shadow_of(args[0]);
    const context_tree *tree = shadow ? tree_of(args[1]) : NULL;
    double now = tree ? PyFloat_AsDouble(args[3]) : 0;
    const region *order = tree && !PyErr_Occurred() ? hold_numbers(&h, args[2], 0, 4, "order") : NULL;
    if (order) {
        const uint32_t *places = order->view.buf;
        size_t n = order->bytes / 4, i = 0, at = 0;
        while (i < n && places[i] < tree->used) i++;
        /* A tree in which no place is free, and parents come before children. */
        while (at < tree->used && (tree->nodes[at].parent == POLICY_NONE || tree->nodes[at].parent < at)) at++;
        if (i < n || at < tree->used || tree->used != tree->count || shadow->count)
            PyErr_SetString(PyExc_ValueError, "the shadow is not empty, or the tree is not as it was loaded");
        else done = policy_fill(shadow, tree, places, n, now);
    }
    release(&h);
    if (done == 0) Py_RETURN_NONE;
    return done == -1 ? PyErr_NoMemory() : NULL;
}

/* (residents, tree): what the tree holds, none of them an orphan */
static PyObject *residents_fill(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arity(nargs, 2, "residents_fill") < 0) return NULL;
    policy_residents *residents = residents_of(args[0]);
    const context_tree *tree = residents ? tree_of(args[1]) : NULL;
    if (!tree) return NULL;
    if (tree->used != tree->count || residents->used || residents->hash.count) {
        PyErr_SetString(PyExc_ValueError, "the set is not empty, or the tree is not as it was loaded");
        return NULL;
    }
    if (policy_residents_fill(residents, tree) < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- Rows of an LMDB file ---------------------------------------------------------------------------------------- */

typedef struct rows {
    PyObject *bytes, *tails; /* bytearray of rows; dict from the end of a record to its number */
    size_t used, room;
    uint32_t tail;           /* of the row before, and its bytes */
    uint8_t before[256];
    size_t before_bytes;
    int wrong;               /* a record of another length */
} rows;

enum { RECORD = POLICY_KEY + 4 + 4 * 8 };

static uint64_t number(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | at[bytes];
    return value;
}

static int tail_of(rows *r, const uint8_t *tail, size_t bytes) {
    if (bytes == r->before_bytes && memcmp(tail, r->before, bytes) == 0) return 0;
    PyObject *key = PyBytes_FromStringAndSize((const char *)tail, (Py_ssize_t)bytes), *known = key ? PyDict_GetItemWithError(r->tails, key) : NULL;
    size_t which = known ? PyLong_AsSize_t(known) : (size_t)PyDict_Size(r->tails);
    if (key && !known && !PyErr_Occurred()) {
        PyObject *value = PyLong_FromSize_t(which);
        if (value) PyDict_SetItem(r->tails, key, value);
        Py_XDECREF(value);
    }
    Py_XDECREF(key);
    r->tail = (uint32_t)which;
    r->before_bytes = bytes;
    memcpy(r->before, tail, bytes);
    return PyErr_Occurred() ? -3 : 0;
}

static int take_row(void *context, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes) {
    rows *r = context;
    if (key_bytes != POLICY_KEY || !value || value_bytes < RECORD || value_bytes - RECORD > sizeof r->before) {
        r->wrong = 1;
        return -4;
    }
    if (tail_of(r, value + RECORD, value_bytes - RECORD) < 0) return -3;
    if (r->used == r->room) {
        size_t room = r->room + r->room / 2 + 256;
        if (PyByteArray_Resize(r->bytes, (Py_ssize_t)(room * sizeof(tree_row))) < 0) return -3;
        r->room = room;
    }
    tree_row *row = (tree_row *)(void *)PyByteArray_AsString(r->bytes) + r->used++;
    const uint8_t *at = value + POLICY_KEY;
    memcpy(row->key, key, POLICY_KEY);
    memcpy(row->parent, value, POLICY_KEY);
    row->tokens = (uint32_t)number(at, 4);
    row->depth = number(at + 4, 8);
    row->nbytes = number(at + 12, 8);
    row->state_nbytes = number(at + 20, 8);
    row->used = number(at + 28, 8);
    row->kind = r->tail;
    return 0;
}

/* (path of an LMDB data file, whether to look at values in pages of their own, table or None)
 * -> (first error or "", rows of the table as tree_row with `kind` the number of the record's tail, tails by number) */
static PyObject *lmdb_scan(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    char wrong[LMDB_WRONG] = "";
    const char *path, *table = NULL;
    PyObject *result = NULL, *name = NULL;
    (void)module;
    if (arity(nargs, 3, "lmdb_scan") < 0) return NULL;
    int heads = PyObject_IsTrue(args[1]);
    if (heads < 0 || !PyUnicode_FSConverter(args[0], &name)) return NULL;
    rows r = {.bytes = PyByteArray_FromStringAndSize("", 0), .tails = PyDict_New(), .before_bytes = SIZE_MAX};
    path = PyBytes_AsString(name);
    if (args[2] != Py_None) table = PyUnicode_AsUTF8AndSize(args[2], NULL);
    int file = r.bytes && r.tails && path && (table || args[2] == Py_None) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0) {
        int done = lmdb_walk(file, heads, table, take_row, &r, wrong);
        close(file);
        if (done == -2) PyErr_NoMemory();
        if (r.wrong) strcpy(wrong, "a record of another length");
        if (!PyErr_Occurred() && PyByteArray_Resize(r.bytes, (Py_ssize_t)(r.used * sizeof(tree_row))) == 0) {
            PyObject *tails = PyDict_Keys(r.tails);
            if (tails) result = Py_BuildValue("(sON)", wrong, r.bytes, tails);
        }
    } else if (!PyErr_Occurred()) {
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    }
    Py_XDECREF(r.bytes);
    Py_XDECREF(r.tails);
    Py_DECREF(name);
    return result;
}

PyMethodDef tree_methods[] = {
    {"tree_new", tree_new, METH_NOARGS, NULL},
    {"tree_figures", tree_figures, METH_O, NULL},
    {"tree_stated", tree_stated, METH_O, NULL},
    FAST(tree_find),
    FAST(tree_has),
    FAST(tree_add),
    FAST(tree_remove),
    FAST(tree_field),
    FAST(tree_set),
    FAST(tree_row_of),
    FAST(tree_line),
    FAST(tree_match),
    FAST(tree_runs),
    FAST(tree_load),
    FAST(shadow_fill),
    FAST(residents_fill),
    FAST(lmdb_scan),
    {NULL, NULL, 0, NULL},
};
