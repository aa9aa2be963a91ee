/* python/klt.c - the transform coder for Python. */
#include "klt/klt.h"

#include <string.h>

#include "module.h"

static const char CAPSULE[] = "ctxreuse._native.klt_plane";

/* By ctx_klt_reason; what is wrong with the bytes. */
static const char *const reasons[CTX_KLT_REASONS] = {
    "", "checksum", "head", "count", "length", "rans", "escapes", "scale", "low", "merge", "table", "memory",
};

/* A capsule's context is the tuple of what its plane points to. */
static void free_plane(PyObject *capsule) {
    PyObject *kept = PyCapsule_GetContext(capsule);
    ctx_klt_free(PyCapsule_GetPointer(capsule, CAPSULE));
    Py_XDECREF(kept);
}

static const ctx_klt_plane *plane_of(PyObject *obj) {
    const ctx_klt_plane *plane = PyCapsule_GetPointer(obj, CAPSULE);
    if (!plane) {
        PyErr_Clear();
        PyErr_SetString(PyExc_TypeError, "plane: not made by klt_plane");
    }
    return plane;
}

static int number_of(PyObject *obj, const char *what, double *out) {
    *out = PyFloat_AsDouble(obj);
    if (*out != -1 || !PyErr_Occurred()) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s: needs a number", what);
    return -1;
}

/* ---- Preparing --------------------------------------------------------------------------------------------------- */

/* (first, heads, inverse_energy, unit, mean, gain, forward, whole, quantum, basis, table, shift, refine) */
enum { MEAN, GAIN, FORWARD, WHOLE, QUANTUM, BASIS, TABLE, SHIFT, REFINE, ARRAYS, FIELDS = 4 + ARRAYS };
static const struct {
    const char *name;
    size_t item;
} arrays[ARRAYS] = {{"mean", 4}, {"gain", 4}, {"forward", 4}, {"whole", 2}, {"quantum", 4}, {"basis", 2},
                      {"table", 1}, {"shift", 1}, {"refine", 1}};

static int spec_of(PyObject *obj, size_t dim, held *h, ctx_klt_spec *s) {
    PyObject *fields = fields_of(obj, FIELDS, "group");
    const region *got[ARRAYS];
    size_t channels;
    double unit = 0;
    if (!fields) return -1;
    int failed = size_of(PyTuple_GetItem(fields, 0), "first", &s->first) < 0 ||
                 size_of(PyTuple_GetItem(fields, 1), "heads", &s->heads) < 0 ||
                 number_of(PyTuple_GetItem(fields, 2), "inverse_energy", &s->inverse_energy) < 0 ||
                 number_of(PyTuple_GetItem(fields, 3), "unit", &unit) < 0;
    for (int i = 0; !failed && i < ARRAYS; i++)
        failed = !(got[i] = hold_numbers(h, PyTuple_GetItem(fields, 4 + i), 0, arrays[i].item, arrays[i].name));
    Py_DECREF(fields); /* its buffers are held */
    if (failed) return -1;
    s->components = got[TABLE]->bytes;
    s->refined = got[REFINE]->bytes;
    s->unit = (float)unit;
    const size_t floats = s->unit ? 0 : s->components, whole = s->components - floats;
    if (__builtin_mul_overflow(s->heads, dim, &channels) || channels > CTX_KLT_CHANNELS || s->components > CTX_KLT_CHANNELS ||
        got[MEAN]->bytes != 4 * channels || got[GAIN]->bytes != 4 * channels || got[SHIFT]->bytes != s->components ||
        got[FORWARD]->bytes != 4 * floats * channels || got[WHOLE]->bytes != 2 * whole * channels ||
        got[QUANTUM]->bytes != 4 * whole || got[BASIS]->bytes != 2 * s->components * channels) {
        PyErr_Format(PyExc_ValueError, "group: arrays do not fit %zu heads of %zu channels and %zu components", s->heads, dim,
                     s->components);
        return -1;
    }
    s->mean = got[MEAN]->view.buf, s->gain = got[GAIN]->view.buf, s->forward = got[FORWARD]->view.buf;
    s->whole = got[WHOLE]->view.buf, s->quantum = got[QUANTUM]->view.buf;
    s->basis = got[BASIS]->view.buf, s->table = got[TABLE]->view.buf, s->shift = got[SHIFT]->view.buf;
    s->refine = got[REFINE]->view.buf;
    return 0;
}

static PyObject *capsule_of(ctx_klt_plane *plane, PyObject *tables, PyObject *base) {
    PyObject *capsule = PyCapsule_New(plane, CAPSULE, free_plane);
    if (!capsule) {
        ctx_klt_free(plane);
        return NULL;
    }
    PyObject *kept = PyTuple_Pack(2, tables, base);
    if (kept && PyCapsule_SetContext(capsule, kept) == 0) return capsule;
    Py_XDECREF(kept);
    Py_DECREF(capsule);
    return NULL;
}

/* (tables, heads, dim, level, step, nested, rope, base, groups) */
static PyObject *klt_plane(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_rans_tables *tables;
    const ctx_klt_plane *base = NULL;
    size_t heads, dim, level, rope;
    double step;
    const char *wrong = NULL;
    (void)module;
    if (arity(nargs, 9, "klt_plane") < 0 || !(tables = rans_tables_of(args[0])) || size_of(args[1], "heads", &heads) < 0 ||
        size_of(args[2], "dim", &dim) < 0 || size_of(args[3], "level", &level) < 0 || number_of(args[4], "step", &step) < 0 ||
        size_of(args[6], "rope", &rope) < 0)
        return NULL;
    const int nested = PyObject_IsTrue(args[5]);
    if (nested < 0 || (args[7] != Py_None && !(base = plane_of(args[7])))) return NULL;
    PyObject *groups = tuple_of(args[8], "groups"), *result = NULL;
    if (!groups) return NULL;
    const size_t count = (size_t)PyTuple_Size(groups);
    held h = {0};
    ctx_klt_spec *specs = PyMem_Calloc(count + 1, sizeof *specs);
    int failed = !specs;
    if (failed) PyErr_NoMemory();
    failed = failed || held_room(&h, count * ARRAYS) < 0;
    for (size_t i = 0; !failed && i < count; i++)
        failed = spec_of(PyTuple_GetItem(groups, (Py_ssize_t)i), dim, &h, &specs[i]) < 0;
    if (!failed) {
        ctx_klt_plane *plane = ctx_klt_prepare(tables, heads, dim, specs, count, level > 255 ? -1 : (int)level, (float)step,
                                               nested, rope > CTX_KLT_PAIRS ? -1 : (int)rope, base, &wrong);
        if (plane)
            result = capsule_of(plane, args[0], args[7]);
        else if (wrong)
            PyErr_Format(PyExc_ValueError, "plane: %s", wrong);
        else
            PyErr_NoMemory();
    }
    release(&h);
    PyMem_Free(specs);
    Py_DECREF(groups);
    return result;
}

/* ---- Angles ------------------------------------------------------------------------------------------------------ */

/* cos and sin [tokens, half]; both empty: no rotation. */
typedef struct angles {
    const float *cos, *sin;
    size_t half;
} angles;

static int angles_of(held *h, PyObject *const *args, const ctx_klt_plane *plane, size_t tokens, angles *out) {
    const region *cos = hold_numbers(h, args[0], 0, sizeof(float), "cos");
    const region *sin = cos ? hold_numbers(h, args[1], 0, sizeof(float), "sin") : NULL;
    if (!sin) return -1;
    const size_t numbers = cos->bytes / sizeof(float);
    *out = (angles){cos->view.buf, sin->view.buf, tokens ? numbers / tokens : 0};
    if (cos->bytes != sin->bytes || out->half > plane->dim / 2 || (tokens && out->half * tokens != numbers) ||
        (out->half == 0) != (tokens == 0 || plane->rope == CTX_KLT_NO_ROPE)) {
        PyErr_Format(PyExc_ValueError, "angles: %zu and %zu bytes do not fit %zu tokens of a plane that %s", cos->bytes, sin->bytes,
                     tokens, plane->rope == CTX_KLT_NO_ROPE ? "is not rotated" : "is rotated");
        return -1;
    }
    return 0;
}

/* The time of a call by its parts, and int64 that it is added to; NULL where it is not wanted. */
typedef struct timed {
    ctx_klt_clock clock;
    const region *buffer;
} timed;

static int timed_of(held *h, PyObject *obj, size_t parts, timed *out) {
    memset(out, 0, sizeof *out);
    if (obj == Py_None) return 0;
    if (!(out->buffer = hold_numbers(h, obj, 1, 8, "times"))) return -1;
    if (out->buffer->bytes == 8 * parts) return 0;
    PyErr_Format(PyExc_ValueError, "times: needs %zu numbers", parts);
    return -1;
}

static ctx_klt_clock *clock_of(timed *t) { return t->buffer ? &t->clock : NULL; }

static void clock_add(const timed *t) {
    int64_t *times = t->buffer ? t->buffer->view.buf : NULL;
    for (size_t i = 0; times && i < t->buffer->bytes / 8; i++) times[i] += (int64_t)t->clock.spent[i];
}

/* ---- Decoding ---------------------------------------------------------------------------------------------------- */

typedef struct run {
    size_t count, tokens;
    ctx_klt_stream *streams;
} run;

/* The bytes of a stream or refinement, and its checksum, which is not compared if it is None. */
static int bytes_of(held *h, PyObject *obj, PyObject *checksum, const char *what, const uint8_t **at, size_t *bytes,
                    uint64_t *sum, int *checked) {
    const region *buffer = hold_numbers(h, obj, 0, 1, what);
    if (!buffer) return -1;
    *at = buffer->view.buf;
    *bytes = buffer->bytes;
    *checked = checksum != Py_None;
    return *checked ? checksum_of(checksum, buffer->bytes, what, sum) : 0;
}

/* One stream: (buffer, checksum or None, refinement or None, its checksum or None, tokens). */
static int stream_of(run *r, held *h, PyObject *obj, const ctx_klt_plane *plane, ctx_klt_stream *s) {
    PyObject *tuple = fields_of(obj, 5, "stream"), *fields[5];
    if (!tuple) return -1;
    for (int i = 0; i < 5; i++) fields[i] = PyTuple_GetItem(tuple, i);
    const int failed =
        bytes_of(h, fields[0], fields[1], "stream", &s->at, &s->bytes, &s->sum, &s->checked) < 0 ||
        size_of(fields[4], "token count", &s->tokens) < 0 ||
        (fields[2] != Py_None &&
         bytes_of(h, fields[2], fields[3], "refinement", &s->more, &s->more_bytes, &s->more_sum, &s->more_checked) < 0);
    Py_DECREF(tuple);
    if (failed) return -1;
    if (s->more && !plane->base) {
        PyErr_SetString(PyExc_ValueError, "refinement: the plane's level refines no other");
        return -1;
    }
    if (s->tokens > UINT16_MAX) {
        PyErr_Format(PyExc_ValueError, "token count: %zu is more than a stream can have", s->tokens);
        return -1;
    }
    r->tokens += s->tokens;
    return 0;
}

static PyObject *result_of(ctx_klt_result result) {
    if (result.reason == CTX_KLT_OK) Py_RETURN_NONE;
    if (result.reason == CTX_KLT_MEMORY) return PyErr_NoMemory();
    return Py_BuildValue("snnO", reasons[result.reason], (Py_ssize_t)result.stream, (Py_ssize_t)result.cell,
                         result.refinement ? Py_True : Py_False);
}

/* (plane, tensor, dtype, offset, strides, streams, raw_dtype, cos, sin, times) */
static PyObject *klt_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    enum { BESIDE = 4 /* buffers: tensor, times, cos, sin */ };
    const ctx_kernels *k = table();
    const ctx_klt_plane *plane;
    box tensor;
    ctx_dtype raw;
    timed time;
    held h = {0};
    run r = {0};
    angles turn;
    PyObject *result = NULL;
    (void)module;
    if (!k || arity(nargs, 10, "klt_decode") < 0 || !(plane = plane_of(args[0])) || dtype_of(args[6], "raw dtype", &raw) < 0)
        return NULL;
    PyObject *list = tuple_of(args[5], "streams");
    if (!list) return NULL;
    r.count = (size_t)PyTuple_Size(list);
    int failed = !(r.streams = PyMem_Calloc(r.count + 1, sizeof *r.streams));
    if (failed) PyErr_NoMemory();
    failed = failed || held_room(&h, 2 * r.count + BESIDE) < 0 || box_of(&h, args + 1, 1, "tensor", &tensor) < 0 ||
             timed_of(&h, args[9], CTX_KLT_DECODE_PARTS, &time) < 0;
    for (size_t i = 0; !failed && i < r.count; i++)
        failed = stream_of(&r, &h, PyTuple_GetItem(list, (Py_ssize_t)i), plane, &r.streams[i]) < 0;
    if (!failed && angles_of(&h, args + 7, plane, r.tokens, &turn) == 0 &&
        place(&tensor, (const size_t[3]){plane->heads, r.tokens, plane->dim}) == 0) {
        PyThreadState *saved = PyEval_SaveThread();
        const ctx_klt_result done =
            ctx_klt_decode(k, plane, &tensor.view, r.streams, r.count, raw, turn.cos, turn.sin, turn.half, clock_of(&time));
        PyEval_RestoreThread(saved);
        clock_add(&time);
        result = result_of(done);
    }
    release(&h);
    PyMem_Free(r.streams);
    Py_DECREF(list);
    return result;
}

/* ---- Encoding ---------------------------------------------------------------------------------------------------- */

/* What of the run each stream needs; bytes of all streams at most, or SIZE_MAX. */
static size_t room_of(const ctx_klt_plane *plane, const int64_t *counts, size_t streams, ctx_dtype raw, size_t *tokens) {
    size_t room = 0;
    *tokens = 0;
    for (size_t i = 0; i < streams; i++) {
        if (counts[i] < 1 || counts[i] > UINT16_MAX || ((size_t)counts[i] + 63) / 64 * plane->groups > UINT16_MAX) {
            PyErr_Format(PyExc_ValueError, "token count: a stream cannot have %lld tokens", (long long)counts[i]);
            return SIZE_MAX;
        }
        *tokens += (size_t)counts[i];
        if (__builtin_add_overflow(room, ctx_klt_bound(plane, (size_t)counts[i], raw), &room)) {
            PyErr_SetString(PyExc_ValueError, "token count: too many streams");
            return SIZE_MAX;
        }
    }
    return room;
}

static ctx_klt_result encode_run(const ctx_kernels *k, const ctx_klt_plane *plane, const ctx_view *src, const int64_t *counts,
                                 size_t streams, const angles *turn, size_t raw_first, ctx_dtype raw, int refinement,
                                 uint8_t *out, int64_t *offsets, ctx_klt_clock *clock) {
    ctx_klt_result result = {.reason = CTX_KLT_OK};
    size_t row = 0, at = 0, bytes;
    offsets[0] = 0;
    for (size_t i = 0; i < streams && !result.reason; i++) {
        ctx_view here = *src;
        here.at += row * src->strides[1] * ctx_dtype_bytes(src->dtype);
        const size_t angle = row * turn->half;
        result = ctx_klt_encode(k, plane, &here, (size_t)counts[i], turn->cos + angle, turn->sin + angle,
                                turn->half, raw_first > row ? raw_first - row : 0, raw, refinement, out + at, &bytes, clock);
        result.stream = i;
        row += (size_t)counts[i];
        at += result.reason ? 0 : bytes;
        offsets[i + 1] = (int64_t)at;
    }
    return result;
}

/* (plane, tensor, dtype, offset, strides, counts, raw_first, raw_dtype, cos, sin, refinement, out, offsets, times) */
static PyObject *klt_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    const ctx_klt_plane *plane;
    box tensor;
    ctx_dtype raw;
    timed time;
    held h = {0};
    const region *tokens_of, *out, *offsets;
    size_t raw_first, tokens;
    angles turn;
    PyObject *result = NULL;
    (void)module;
    if (!k || arity(nargs, 14, "klt_encode") < 0 || !(plane = plane_of(args[0])) || size_of(args[6], "raw_first", &raw_first) < 0 ||
        dtype_of(args[7], "raw dtype", &raw) < 0)
        return NULL;
    const int refinement = PyObject_IsTrue(args[10]);
    if (refinement < 0) return NULL;
    if (refinement && !plane->base) {
        PyErr_SetString(PyExc_ValueError, "refinement: the plane's level refines no other");
        return NULL;
    }
    if (box_of(&h, args + 1, 0, "tensor", &tensor) == 0 && (tokens_of = hold_numbers(&h, args[5], 0, 8, "token counts")) &&
        (out = hold_numbers(&h, args[11], 1, 1, "out")) && (offsets = hold_numbers(&h, args[12], 1, 8, "offsets")) &&
        timed_of(&h, args[13], CTX_KLT_ENCODE_PARTS, &time) == 0) {
        const size_t streams = tokens_of->bytes / 8;
        const int64_t *counts = tokens_of->view.buf;
        const size_t room = room_of(plane, counts, streams, raw, &tokens);
        if (room == SIZE_MAX) {
        } else if (room > out->bytes || offsets->bytes != 8 * (streams + 1)) {
            PyErr_Format(PyExc_ValueError, "out: %zu streams need %zu bytes and %zu offsets", streams, room, streams + 1);
        } else if (angles_of(&h, args + 8, plane, tokens, &turn) == 0 &&
                   place(&tensor, (const size_t[3]){plane->heads, tokens, plane->dim}) == 0) {
            PyThreadState *saved = PyEval_SaveThread();
            const ctx_klt_result done = encode_run(k, plane, &tensor.view, counts, streams, &turn, raw_first, raw, refinement,
                                                   out->view.buf, offsets->view.buf, clock_of(&time));
            PyEval_RestoreThread(saved);
            clock_add(&time);
            result = result_of(done);
        }
    }
    release(&h);
    return result;
}

/* (plane, tokens, raw_dtype) */
static PyObject *klt_bound(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_klt_plane *plane;
    size_t tokens;
    ctx_dtype raw;
    (void)module;
    if (arity(nargs, 3, "klt_bound") < 0 || !(plane = plane_of(args[0])) || size_of(args[1], "tokens", &tokens) < 0 ||
        dtype_of(args[2], "raw dtype", &raw) < 0)
        return NULL;
    return PyLong_FromSize_t(ctx_klt_bound(plane, tokens, raw));
}

static PyObject *klt_name(PyObject *module, PyObject *unused) {
    const ctx_kernels *k = table();
    (void)module, (void)unused;
    return k ? PyUnicode_FromString(ctx_klt_name(k)) : NULL;
}

PyMethodDef klt_methods[] = {
    FAST(klt_plane),
    FAST(klt_decode),
    FAST(klt_encode),
    FAST(klt_bound),
    {"klt_name", klt_name, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
