/* module_klt.c - the transform coder's part of the Python door. */
#include "module_klt.h"

#include <string.h>

#include "arguments.h"
#include "klt.h"
#include "module_rans.h"

static const char CAPSULE[] = "ctxreuse._native.klt_plane";

/* By ctx_klt_reason; what is wrong with the bytes. */
static const char *const reasons[CTX_KLT_REASONS] = {
    "", "checksum", "head", "count", "length", "rans", "escapes", "scale", "low", "merge", "table", "memory",
};

/* A capsule's context is the tuple of what its plane points to. */
static void free_plane(PyObject *capsule) {
    PyObject *held = PyCapsule_GetContext(capsule);
    ctx_klt_free(PyCapsule_GetPointer(capsule, CAPSULE));
    Py_XDECREF(held);
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

/* (first, heads, inverse_energy, mean, gain, forward, basis, table, shift, refine) */
enum { MEAN, GAIN, FORWARD, BASIS, TABLE, SHIFT, REFINE, ARRAYS, FIELDS = 3 + ARRAYS };
static const struct {
    const char *name;
    size_t item;
} arrays[ARRAYS] = {{"mean", 4}, {"gain", 4}, {"forward", 4}, {"basis", 2}, {"table", 1}, {"shift", 1}, {"refine", 1}};

typedef struct given {
    region held[ARRAYS];
    int count;
} given;

static int spec_of(PyObject *obj, size_t dim, given *g, ctx_klt_spec *s) {
    PyObject *fields = tuple_of(obj, "group");
    size_t channels;
    if (!fields) return -1;
    int failed = PyTuple_Size(fields) != FIELDS;
    if (failed) PyErr_Format(PyExc_ValueError, "group: needs %d fields, got %zd", FIELDS, PyTuple_Size(fields));
    failed = failed || size_of(PyTuple_GetItem(fields, 0), "first", &s->first) < 0 ||
             size_of(PyTuple_GetItem(fields, 1), "heads", &s->heads) < 0 ||
             number_of(PyTuple_GetItem(fields, 2), "inverse_energy", &s->inverse_energy) < 0;
    for (; !failed && g->count < ARRAYS; g->count++)
        failed = take_numbers(PyTuple_GetItem(fields, 3 + g->count), 0, arrays[g->count].item, arrays[g->count].name,
                              &g->held[g->count]) < 0;
    Py_DECREF(fields); /* its buffers are held */
    if (failed) return -1;
    s->components = g->held[TABLE].bytes;
    s->refined = g->held[REFINE].bytes;
    if (__builtin_mul_overflow(s->heads, dim, &channels) || channels > CTX_KLT_CHANNELS || s->components > CTX_KLT_CHANNELS ||
        g->held[MEAN].bytes != 4 * channels || g->held[GAIN].bytes != 4 * channels || g->held[SHIFT].bytes != s->components ||
        g->held[FORWARD].bytes != 4 * s->components * channels || g->held[BASIS].bytes != 2 * s->components * channels) {
        PyErr_Format(PyExc_ValueError, "group: arrays do not fit %zu heads of %zu channels and %zu components", s->heads, dim,
                     s->components);
        return -1;
    }
    s->mean = g->held[MEAN].view.buf, s->gain = g->held[GAIN].view.buf, s->forward = g->held[FORWARD].view.buf;
    s->basis = g->held[BASIS].view.buf, s->table = g->held[TABLE].view.buf, s->shift = g->held[SHIFT].view.buf;
    s->refine = g->held[REFINE].view.buf;
    return 0;
}

static PyObject *capsule_of(ctx_klt_plane *plane, PyObject *tables, PyObject *base) {
    PyObject *capsule = PyCapsule_New(plane, CAPSULE, free_plane);
    if (!capsule) {
        ctx_klt_free(plane);
        return NULL;
    }
    PyObject *held = PyTuple_Pack(2, tables, base);
    if (held && PyCapsule_SetContext(capsule, held) == 0) return capsule;
    Py_XDECREF(held);
    Py_DECREF(capsule);
    return NULL;
}

/* (tables, heads, dim, level, step, nested, rope, base, groups) */
PyObject *klt_plane(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
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
    given *held = PyMem_Calloc(count + 1, sizeof *held);
    ctx_klt_spec *specs = PyMem_Calloc(count + 1, sizeof *specs);
    int failed = !held || !specs;
    if (failed) PyErr_NoMemory();
    for (size_t i = 0; !failed && i < count; i++)
        failed = spec_of(PyTuple_GetItem(groups, (Py_ssize_t)i), dim, &held[i], &specs[i]) < 0;
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
    for (size_t i = 0; held && i < count; i++)
        while (held[i].count > 0) PyBuffer_Release(&held[i].held[--held[i].count].view);
    PyMem_Free(held);
    PyMem_Free(specs);
    Py_DECREF(groups);
    return result;
}

/* ---- Angles ------------------------------------------------------------------------------------------------------ */

/* cos and sin [tokens, half]; both empty: no rotation. */
typedef struct angles {
    region cos, sin;
    int held;
    size_t half;
} angles;

static void angles_release(angles *a) {
    if (a->held > 0) PyBuffer_Release(&a->cos.view);
    if (a->held > 1) PyBuffer_Release(&a->sin.view);
}

static int angles_of(PyObject *cos, PyObject *sin, const ctx_klt_plane *plane, size_t tokens, angles *out) {
    if (take_numbers(cos, 0, sizeof(float), "cos", &out->cos) < 0) return -1;
    out->held = 1;
    if (take_numbers(sin, 0, sizeof(float), "sin", &out->sin) < 0) return -1;
    out->held = 2;
    const size_t numbers = out->cos.bytes / sizeof(float);
    out->half = tokens ? numbers / tokens : 0;
    if (out->cos.bytes != out->sin.bytes || out->half > plane->dim / 2 || (tokens && out->half * tokens != numbers) ||
        (out->half == 0) != (tokens == 0 || plane->rope == CTX_KLT_NO_ROPE)) {
        PyErr_Format(PyExc_ValueError, "angles: %zu and %zu bytes do not fit %zu tokens of a plane that %s", out->cos.bytes,
                     out->sin.bytes, tokens, plane->rope == CTX_KLT_NO_ROPE ? "is not rotated" : "is rotated");
        return -1;
    }
    return 0;
}

/* None, or int64 that the nanoseconds of each part are added to. */
static int clock_of(PyObject *obj, size_t parts, region *buffer, ctx_klt_clock *clock, ctx_klt_clock **out) {
    *out = NULL;
    if (obj == Py_None) return 0;
    if (take_numbers(obj, 1, 8, "times", buffer) < 0) return -1;
    if (buffer->bytes != 8 * parts) {
        PyErr_Format(PyExc_ValueError, "times: needs %zu numbers", parts);
        PyBuffer_Release(&buffer->view);
        return -1;
    }
    memset(clock, 0, sizeof *clock);
    *out = clock;
    return 0;
}

static void clock_add(region *buffer, const ctx_klt_clock *clock) {
    if (!clock) return;
    int64_t *times = buffer->view.buf;
    for (size_t i = 0; i < buffer->bytes / 8; i++) times[i] += (int64_t)clock->spent[i];
    PyBuffer_Release(&buffer->view);
}

/* ---- Decoding ---------------------------------------------------------------------------------------------------- */

typedef struct run {
    size_t count, tokens, held;
    region *buffers; /* streams and refinements as they were taken */
    ctx_klt_stream *streams;
} run;

static void run_release(run *r) {
    while (r->held > 0) PyBuffer_Release(&r->buffers[--r->held].view);
    PyMem_Free(r->buffers);
    PyMem_Free(r->streams);
}

static int bytes_of(run *r, PyObject *obj, const char *what, const uint8_t **at, size_t *bytes) {
    region *buffer = &r->buffers[r->held];
    if (take_numbers(obj, 0, 1, what, buffer) < 0) return -1;
    r->held++;
    *at = buffer->view.buf;
    *bytes = buffer->bytes;
    return 0;
}

/* None: not compared. */
static int sum_of(PyObject *obj, size_t bytes, uint64_t *sum, int *checked) {
    *checked = obj != Py_None;
    if (!*checked) return 0;
    *sum = PyLong_AsUnsignedLongLong(obj);
    if (*sum == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ValueError, "checksum: needs a number of 64 bits");
        return -1;
    }
    if (bytes > 240) return 0;
    PyErr_Format(PyExc_ValueError, "a stream of %zu bytes is too short to be checked here", bytes);
    return -1;
}

/* One stream: (buffer, checksum or None, refinement or None, its checksum or None, tokens). */
static int stream_of(run *r, PyObject *obj, const ctx_klt_plane *plane, ctx_klt_stream *s) {
    PyObject *fields = tuple_of(obj, "stream");
    if (!fields) return -1;
    int failed = PyTuple_Size(fields) != 5;
    if (failed) PyErr_Format(PyExc_ValueError, "stream: needs 5 fields, got %zd", PyTuple_Size(fields));
    failed = failed || bytes_of(r, PyTuple_GetItem(fields, 0), "stream", &s->at, &s->bytes) < 0 ||
             sum_of(PyTuple_GetItem(fields, 1), s->bytes, &s->sum, &s->checked) < 0 ||
             size_of(PyTuple_GetItem(fields, 4), "token count", &s->tokens) < 0;
    if (!failed && PyTuple_GetItem(fields, 2) != Py_None)
        failed = bytes_of(r, PyTuple_GetItem(fields, 2), "refinement", &s->more, &s->more_bytes) < 0 ||
                 sum_of(PyTuple_GetItem(fields, 3), s->more_bytes, &s->more_sum, &s->more_checked) < 0;
    Py_DECREF(fields);
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

static int run_of(PyObject *obj, const ctx_klt_plane *plane, run *r) {
    PyObject *list = tuple_of(obj, "streams");
    if (!list) return -1;
    r->count = (size_t)PyTuple_Size(list);
    r->buffers = PyMem_Calloc(2 * r->count + 1, sizeof *r->buffers);
    r->streams = PyMem_Calloc(r->count + 1, sizeof *r->streams);
    int failed = !r->buffers || !r->streams;
    if (failed) PyErr_NoMemory();
    for (size_t i = 0; !failed && i < r->count; i++)
        failed = stream_of(r, PyTuple_GetItem(list, (Py_ssize_t)i), plane, &r->streams[i]) < 0;
    Py_DECREF(list);
    return failed ? -1 : 0;
}

static PyObject *result_of(ctx_klt_result result) {
    if (result.reason == CTX_KLT_OK) Py_RETURN_NONE;
    if (result.reason == CTX_KLT_MEMORY) return PyErr_NoMemory();
    return Py_BuildValue("snnO", reasons[result.reason], (Py_ssize_t)result.stream, (Py_ssize_t)result.cell,
                         result.refinement ? Py_True : Py_False);
}

/* (plane, tensor, dtype, offset, strides, streams, raw_dtype, cos, sin, times) */
PyObject *klt_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = ctx_active();
    const ctx_klt_plane *plane;
    ctx_view dst;
    ctx_dtype raw;
    region tensor, times;
    ctx_klt_clock spent, *clock;
    size_t offset;
    run r = {0};
    angles turn = {.held = 0};
    PyObject *result = NULL;
    (void)module;
    if (!k) PyErr_SetString(PyExc_RuntimeError, "no kernel table is active");
    if (!k || arity(nargs, 10, "klt_decode") < 0 || !(plane = plane_of(args[0])) ||
        dtype_of(args[2], "tensor dtype", &dst.dtype) < 0 || size_of(args[3], "tensor offset", &offset) < 0 ||
        sizes_of(args[4], "tensor strides", 1, dst.strides) < 0 || dtype_of(args[6], "raw dtype", &raw) < 0 ||
        take(args[1], 1, "tensor", &tensor) < 0)
        return NULL;
    if (clock_of(args[9], CTX_KLT_DECODE_PARTS, &times, &spent, &clock) < 0) {
        PyBuffer_Release(&tensor.view);
        return NULL;
    }
    if (run_of(args[5], plane, &r) == 0 && angles_of(args[7], args[8], plane, r.tokens, &turn) == 0) {
        const size_t shape[3] = {plane->heads, r.tokens, plane->dim};
        if (place(&tensor, offset, shape, 1, "tensor", &dst) == 0) {
            ctx_klt_result done;
            PyThreadState *saved = PyEval_SaveThread();
            done = ctx_klt_decode(k, plane, &dst, r.streams, r.count, raw, turn.cos.view.buf, turn.sin.view.buf, turn.half,
                                  clock);
            PyEval_RestoreThread(saved);
            result = result_of(done);
        }
    }
    clock_add(&times, clock);
    angles_release(&turn);
    run_release(&r);
    PyBuffer_Release(&tensor.view);
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
        const float *cos = turn->cos.view.buf, *sin = turn->sin.view.buf;
        const size_t angle = row * turn->half;
        result = ctx_klt_encode(k, plane, &here, (size_t)counts[i], turn->half ? cos + angle : cos, turn->half ? sin + angle : sin,
                                turn->half, raw_first > row ? raw_first - row : 0, raw, refinement, out + at, &bytes, clock);
        result.stream = i;
        row += (size_t)counts[i];
        at += result.reason ? 0 : bytes;
        offsets[i + 1] = (int64_t)at;
    }
    return result;
}

/* (plane, tensor, dtype, offset, strides, counts, raw_first, raw_dtype, cos, sin, refinement, out, offsets, times) */
PyObject *klt_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    enum { TENSOR, COUNTS, OUT, OFFSETS, BUFFERS };
    const ctx_kernels *k = ctx_active();
    const ctx_klt_plane *plane;
    ctx_view src;
    ctx_dtype raw;
    region held[BUFFERS], times;
    ctx_klt_clock spent, *clock = NULL;
    size_t offset, raw_first, tokens;
    int count = 0;
    angles turn = {.held = 0};
    PyObject *result = NULL;
    (void)module;
    if (!k) PyErr_SetString(PyExc_RuntimeError, "no kernel table is active");
    if (!k || arity(nargs, 14, "klt_encode") < 0 || !(plane = plane_of(args[0])) ||
        dtype_of(args[2], "tensor dtype", &src.dtype) < 0 || size_of(args[3], "tensor offset", &offset) < 0 ||
        sizes_of(args[4], "tensor strides", 1, src.strides) < 0 || size_of(args[6], "raw_first", &raw_first) < 0 ||
        dtype_of(args[7], "raw dtype", &raw) < 0)
        return NULL;
    const int refinement = PyObject_IsTrue(args[10]);
    if (refinement < 0) return NULL;
    if (refinement && !plane->base) {
        PyErr_SetString(PyExc_ValueError, "refinement: the plane's level refines no other");
        return NULL;
    }
    int failed = take(args[1], 0, "tensor", &held[TENSOR]) < 0;
    if (!failed) count = 1;
    static const struct {
        const char *name;
        int argument, writable;
        size_t item;
    } kinds[BUFFERS] = {[COUNTS] = {"token counts", 5, 0, 8}, [OUT] = {"out", 11, 1, 1}, [OFFSETS] = {"offsets", 12, 1, 8}};
    for (; !failed && count < BUFFERS; count++)
        if ((failed = take_numbers(args[kinds[count].argument], kinds[count].writable, kinds[count].item, kinds[count].name,
                                   &held[count]) < 0))
            break;
    if (!failed) failed = clock_of(args[13], CTX_KLT_ENCODE_PARTS, &times, &spent, &clock) < 0;
    if (!failed) {
        const size_t streams = held[COUNTS].bytes / 8;
        const int64_t *counts = held[COUNTS].view.buf;
        const size_t room = room_of(plane, counts, streams, raw, &tokens);
        const size_t shape[3] = {plane->heads, room == SIZE_MAX ? 0 : tokens, plane->dim};
        if (room == SIZE_MAX) {
        } else if (room > held[OUT].bytes || held[OFFSETS].bytes != 8 * (streams + 1)) {
            PyErr_Format(PyExc_ValueError, "out: %zu streams need %zu bytes and %zu offsets", streams, room, streams + 1);
        } else if (angles_of(args[8], args[9], plane, tokens, &turn) == 0 &&
                   place(&held[TENSOR], offset, shape, 0, "tensor", &src) == 0) {
            ctx_klt_result done;
            PyThreadState *saved = PyEval_SaveThread();
            done = encode_run(k, plane, &src, counts, streams, &turn, raw_first, raw, refinement, held[OUT].view.buf,
                              held[OFFSETS].view.buf, clock);
            PyEval_RestoreThread(saved);
            result = result_of(done);
        }
    }
    clock_add(&times, clock);
    angles_release(&turn);
    while (count > 0) PyBuffer_Release(&held[--count].view);
    return result;
}

/* (plane, tokens, raw_dtype) */
PyObject *klt_bound(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_klt_plane *plane;
    size_t tokens;
    ctx_dtype raw;
    (void)module;
    if (arity(nargs, 3, "klt_bound") < 0 || !(plane = plane_of(args[0])) || size_of(args[1], "tokens", &tokens) < 0 ||
        dtype_of(args[2], "raw dtype", &raw) < 0)
        return NULL;
    return PyLong_FromSize_t(ctx_klt_bound(plane, tokens, raw));
}

PyObject *klt_name(PyObject *module, PyObject *unused) {
    const ctx_kernels *k = ctx_active();
    (void)module, (void)unused;
    return PyUnicode_FromString(k ? ctx_klt_name(k) : "none");
}
