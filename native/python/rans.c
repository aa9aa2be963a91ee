/* python/rans.c - the entropy coder for Python. Arrays come as buffers; every size is checked against them. */
#include "module.h"

#include <string.h>

static const char CAPSULE[] = "ctxreuse._native.rans_tables";
/* Symbols from which the interpreter lock is released: a few microseconds of work. */
enum { GIL_SYMBOLS = 4 << 10 };

static void free_tables(PyObject *capsule) { ctx_rans_free(PyCapsule_GetPointer(capsule, CAPSULE)); }

const ctx_rans_tables *rans_tables_of(PyObject *obj) {
    const ctx_rans_tables *tables = PyCapsule_GetPointer(obj, CAPSULE);
    if (!tables) {
        PyErr_Clear();
        PyErr_SetString(PyExc_TypeError, "tables: not made by rans_tables");
    }
    return tables;
}

static PyObject *rans_tables(PyObject *module, PyObject *obj) {
    held h = {0};
    size_t bad;
    PyObject *capsule = NULL;
    (void)module;
    const region *freqs = hold_numbers(&h, obj, 0, 1, "freqs");
    const size_t count = freqs ? freqs->bytes / CTX_RANS_SYMBOLS : 0;
    if (freqs && (freqs->bytes % CTX_RANS_SYMBOLS || count == 0 || count > UINT16_MAX + 1u)) {
        PyErr_Format(PyExc_ValueError, "freqs: needs 1 to 65536 rows of 32, got %zu bytes", freqs->bytes);
    } else if (freqs) {
        ctx_rans_tables *tables = ctx_rans_prepare(freqs->view.buf, count, &bad);
        if (!tables) {
            PyErr_NoMemory();
        } else if (bad < count) {
            PyErr_Format(PyExc_ValueError, "freqs: table %zu needs a sum of 256 with at least two symbols present", bad);
            ctx_rans_free(tables);
        } else if (!(capsule = PyCapsule_New(tables, CAPSULE, free_tables))) {
            ctx_rans_free(tables);
        }
    }
    release(&h);
    return capsule;
}

/* What encode and decode share: (tables, data, places, symbols, counts, steps, seeds). */
enum { DATA, PLACES, SYMBOLS, COUNTS, STEPS, SEEDS, ARRAYS };
typedef struct call {
    held held;
    const region *arrays[ARRAYS];
    const ctx_rans_tables *tables;
    ctx_rans_job *jobs;
    size_t streams, symbols;
} call;

static void call_release(call *c) {
    release(&c->held);
    PyMem_Free(c->jobs);
}

static int jobs_fill(call *c, int encode) {
    const uint8_t *counts = c->arrays[COUNTS]->view.buf, *places = c->arrays[PLACES]->view.buf;
    const size_t room = c->arrays[DATA]->bytes, all_steps = c->arrays[STEPS]->bytes / 2;
    size_t step = 0, at = 0;
    for (size_t i = 0; i < c->streams; i++) {
        int64_t n, first, behind;
        memcpy(&n, counts + 8 * i, 8);
        if (n < 0 || (uint64_t)n > c->arrays[SYMBOLS]->bytes - c->symbols) {
            PyErr_Format(PyExc_ValueError, "counts: stream %zu has symbols outside of the array", i);
            return -1;
        }
        ctx_rans_job *job = &c->jobs[i];
        job->n = (size_t)n;
        const size_t steps = ctx_rans_steps(job->n);
        if (steps > all_steps - step) {
            PyErr_Format(PyExc_ValueError, "table_of_step: stream %zu has steps outside of the array", i);
            return -1;
        }
        if (encode) {
            if (ctx_rans_bound(job->n) > room - at) {
                PyErr_Format(PyExc_ValueError, "out: has no room for stream %zu", i);
                return -1;
            }
            job->data = (uint8_t *)c->arrays[DATA]->view.buf + at;
            at += ctx_rans_bound(job->n);
        } else {
            memcpy(&first, places + 8 * i, 8);
            memcpy(&behind, places + 8 * i + 8, 8);
            if (first < 0 || behind < first || (uint64_t)behind > room) {
                PyErr_Format(PyExc_ValueError, "offsets: stream %zu lies outside of the data", i);
                return -1;
            }
            job->data = (uint8_t *)c->arrays[DATA]->view.buf + first;
            job->bytes = (size_t)(behind - first);
        }
        job->symbols = (uint8_t *)c->arrays[SYMBOLS]->view.buf + c->symbols;
        job->steps = (const uint16_t *)c->arrays[STEPS]->view.buf + step;
        job->seeds = (uint16_t *)c->arrays[SEEDS]->view.buf + i * CTX_RANS_LANES;
        c->symbols += job->n;
        step += steps;
    }
    if (step != all_steps || c->symbols != c->arrays[SYMBOLS]->bytes) {
        PyErr_Format(PyExc_ValueError, "counts: streams of %zu symbols in %zu steps, arrays of %zu and %zu", c->symbols,
                     step, c->arrays[SYMBOLS]->bytes, all_steps);
        return -1;
    }
    return 0;
}

static int call_of(PyObject *const *args, int encode, call *c) {
    static const struct {
        const char *name;
        size_t item;
    } kinds[ARRAYS] = {{"data", 1}, {"offsets", 8}, {"symbols", 1}, {"counts", 8}, {"table_of_step", 2}, {"seeds", 2}};
    const int written[ARRAYS] = {encode, encode, !encode, 0, 0, !encode};
    if (!(c->tables = rans_tables_of(args[0]))) return -1;
    for (int i = 0; i < ARRAYS; i++)
        if (!(c->arrays[i] = hold_numbers(&c->held, args[1 + i], written[i], kinds[i].item, kinds[i].name))) return -1;
    c->streams = c->arrays[COUNTS]->bytes / 8;
    if (c->arrays[PLACES]->bytes != 8 * (c->streams + 1) ||
        c->arrays[SEEDS]->bytes != c->streams * CTX_RANS_LANES * sizeof(uint16_t)) {
        PyErr_Format(PyExc_ValueError, "%zu streams need %zu offsets and 64 seeds each", c->streams, c->streams + 1);
        return -1;
    }
    if (!(c->jobs = PyMem_Calloc(c->streams + 1, sizeof *c->jobs))) {
        PyErr_NoMemory();
        return -1;
    }
    return jobs_fill(c, encode);
}

/* Move each stream to behind the one before it; together they then lie at the beginning of the room. */
static void close_up(const call *c) {
    uint8_t *to = c->arrays[DATA]->view.buf, *places = c->arrays[PLACES]->view.buf;
    int64_t offset = 0;
    memcpy(places, &offset, 8);
    for (size_t i = 0; i < c->streams; i++) {
        const ctx_rans_job *job = &c->jobs[i];
        memmove(to + offset, job->data + ctx_rans_bound(job->n) - job->bytes, job->bytes);
        offset += (int64_t)job->bytes;
        memcpy(places + 8 * i + 8, &offset, 8);
    }
}

static PyObject *run(PyObject *const *args, Py_ssize_t nargs, int encode) {
    const ctx_kernels *k = table();
    call c = {0};
    size_t first = 0;
    PyObject *result = NULL;
    if (!k || arity(nargs, 1 + ARRAYS, encode ? "rans_encode" : "rans_decode") < 0) return NULL;
    if (call_of(args, encode, &c) == 0) {
        PyThreadState *saved = c.symbols > GIL_SYMBOLS ? PyEval_SaveThread() : NULL;
        first = (encode ? ctx_rans_encode : ctx_rans_decode)(k, c.tables, c.jobs, c.streams);
        if (encode && first == c.streams) close_up(&c);
        if (saved) PyEval_RestoreThread(saved);
        if (first == c.streams)
            result = PyLong_FromLong(-1);
        else if (c.jobs[first].status == CTX_RANS_CORRUPT)
            result = PyLong_FromSize_t(first);
        else if (c.jobs[first].status == CTX_RANS_TABLE)
            PyErr_Format(PyExc_ValueError, "table_of_step: stream %zu names a table that is not there", first);
        else
            PyErr_Format(PyExc_ValueError, "symbols: stream %zu has one without a frequency", first);
    }
    call_release(&c);
    return result;
}

static PyObject *rans_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    return run(args, nargs, 1);
}

static PyObject *rans_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    return run(args, nargs, 0);
}

/* (symbols, table_of_step, counts) */
static PyObject *rans_count(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    held h = {0};
    const region *symbols, *steps, *counts;
    PyObject *result = NULL;
    (void)module;
    if (!k || arity(nargs, 3, "rans_count") < 0) return NULL;
    if ((symbols = hold_numbers(&h, args[0], 0, 1, "symbols")) && (steps = hold_numbers(&h, args[1], 0, 2, "table_of_step")) &&
        (counts = hold_numbers(&h, args[2], 1, 4, "counts"))) {
        const size_t tables = counts->bytes / (4 * CTX_RANS_SYMBOLS);
        if (counts->bytes % (4 * CTX_RANS_SYMBOLS) || steps->bytes / 2 != ctx_rans_steps(symbols->bytes)) {
            PyErr_SetString(PyExc_ValueError, "counts: rows of 32, and one step for each 64 symbols, are needed");
        } else {
            PyThreadState *saved = symbols->bytes > GIL_SYMBOLS ? PyEval_SaveThread() : NULL;
            const ctx_rans_status status =
                ctx_rans_count(k, symbols->view.buf, symbols->bytes, steps->view.buf, tables, counts->view.buf);
            if (saved) PyEval_RestoreThread(saved);
            if (status == CTX_RANS_OK)
                result = Py_NewRef(Py_None);
            else
                PyErr_SetString(PyExc_ValueError, status == CTX_RANS_TABLE ? "table_of_step: names a table that is not there"
                                                                           : "symbols: one is 32 or more");
        }
    }
    release(&h);
    return result;
}

static PyObject *rans_name(PyObject *module, PyObject *unused) {
    const ctx_kernels *k = table();
    (void)module, (void)unused;
    return k ? PyUnicode_FromString(ctx_rans_name(k)) : NULL;
}

PyMethodDef rans_methods[] = {
    FAST(rans_encode),
    FAST(rans_decode),
    FAST(rans_count),
    {"rans_tables", rans_tables, METH_O, NULL},
    {"rans_name", rans_name, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
