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

/* (first, heads, inverse_energy, large, unit, mean, gain, forward, whole, quantum, basis, table, shift, refine) */
enum { MEAN, GAIN, FORWARD, WHOLE, QUANTUM, BASIS, TABLE, SHIFT, REFINE, ARRAYS, FIELDS = 5 + ARRAYS };
static const struct {
    const char *name;
    size_t item;
} arrays[ARRAYS] = {{"mean", 4}, {"gain", 4}, {"forward", 4}, {"whole", 2}, {"quantum", 4}, {"basis", 2},
                      {"table", 1}, {"shift", 1}, {"refine", 1}};

static int spec_of(PyObject *obj, size_t parts, size_t dim, held *h, ctx_klt_spec *s) {
    PyObject *fields = fields_of(obj, FIELDS, "group");
    const region *got[ARRAYS];
    size_t channels;
    double unit = 0;
    if (!fields) return -1;
    int failed = size_of(PyTuple_GetItem(fields, 0), "first", &s->first) < 0 ||
                 size_of(PyTuple_GetItem(fields, 1), "heads", &s->heads) < 0 ||
                 number_of(PyTuple_GetItem(fields, 2), "inverse_energy", &s->inverse_energy) < 0 ||
                 (s->large = PyObject_IsTrue(PyTuple_GetItem(fields, 3))) < 0 ||
                 number_of(PyTuple_GetItem(fields, 4), "unit", &unit) < 0;
    for (int i = 0; !failed && i < ARRAYS; i++)
        failed = !(got[i] = hold_numbers(h, PyTuple_GetItem(fields, 5 + i), 0, arrays[i].item, arrays[i].name));
    Py_DECREF(fields); /* its buffers are held */
    if (failed) return -1;
    s->components = got[TABLE]->bytes;
    s->refined = got[REFINE]->bytes;
    s->unit = (float)unit;
    const size_t floats = s->unit ? 0 : s->components, whole = s->components - floats;
    if (__builtin_mul_overflow(s->heads, dim, &channels) || __builtin_mul_overflow(channels, parts, &channels) ||
        channels > CTX_KLT_CHANNELS || s->components > CTX_KLT_CHANNELS ||
        got[MEAN]->bytes != 4 * channels || got[GAIN]->bytes != 4 * channels || got[SHIFT]->bytes != s->components ||
        got[FORWARD]->bytes != 4 * floats * channels || got[WHOLE]->bytes != 2 * whole * channels ||
        got[QUANTUM]->bytes != 4 * whole || got[BASIS]->bytes != 2 * s->components * channels) {
        PyErr_Format(PyExc_ValueError, "group: arrays do not fit %zu heads of %zu channels and %zu components", parts * s->heads, dim,
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

/* (tables, parts, heads, dim, level, step, nested, rope, base, groups) */
static PyObject *klt_plane(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_rans_tables *tables;
    const ctx_klt_plane *base = NULL;
    size_t parts, heads, dim, level, rope;
    double step;
    const char *wrong = NULL;
    (void)module;
    if (arity(nargs, 10, "klt_plane") < 0 || !(tables = rans_tables_of(args[0])) || size_of(args[1], "parts", &parts) < 0 ||
        size_of(args[2], "heads", &heads) < 0 || size_of(args[3], "dim", &dim) < 0 || size_of(args[4], "level", &level) < 0 ||
        number_of(args[5], "step", &step) < 0 || size_of(args[7], "rope", &rope) < 0)
        return NULL;
    const int nested = PyObject_IsTrue(args[6]);
    if (nested < 0 || (args[8] != Py_None && !(base = plane_of(args[8])))) return NULL;
    PyObject *groups = tuple_of(args[9], "groups"), *result = NULL;
    if (!groups) return NULL;
    const size_t count = (size_t)PyTuple_Size(groups);
    held h = {0};
    ctx_klt_spec *specs = PyMem_Calloc(count + 1, sizeof *specs);
    int failed = !specs;
    if (failed) PyErr_NoMemory();
    failed = failed || held_room(&h, count * ARRAYS) < 0;
    for (size_t i = 0; !failed && i < count; i++)
        failed = spec_of(PyTuple_GetItem(groups, (Py_ssize_t)i), parts, dim, &h, &specs[i]) < 0;
    if (!failed) {
        ctx_klt_plane *plane = ctx_klt_prepare(tables, parts, heads, dim, specs, count, level > 255 ? -1 : (int)level,
                                               (float)step, nested, rope > CTX_KLT_PAIRS ? -1 : (int)rope, base, &wrong);
        if (plane)
            result = capsule_of(plane, args[0], args[8]);
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

/* ---- Places ------------------------------------------------------------------------------------------------------ */

/* What a call works on: planes, and rows of each of their parts in one tensor. `rows`: of all its streams or sources together. */
typedef struct places {
    size_t planes, parts, rows; /* parts: of all planes */
    const ctx_klt_plane **plane;
    const region *tensor;
    ctx_dtype dtype;
    const uint8_t *layout; /* [parts] of LAYOUT int64 */
    const region *const *angles; /* [turns] cos and sin of all rows */
    size_t turns;
} places;

/* Of a part: byte offset of its first row, three strides, and which angles turn it, -1 for none. */

enum { OFFSET, HEADS, ROWS, DIM, TURN, LAYOUT };

static int64_t number_at(const uint8_t *numbers, size_t i) {
    int64_t value;
    memcpy(&value, numbers + 8 * i, 8);
    return value;
}

static int planes_of(PyObject *obj, places *out) {
    if (!PyTuple_Check(obj)) {
        PyErr_SetString(PyExc_TypeError, "planes: needs a tuple");
        return -1;
    }
    out->planes = (size_t)PyTuple_Size(obj);
    if (!(out->plane = PyMem_Calloc(out->planes + 1, sizeof *out->plane))) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < out->planes; i++) {
        if (!(out->plane[i] = plane_of(PyTuple_GetItem(obj, (Py_ssize_t)i)))) break;
        out->parts += out->plane[i]->parts;
        if (out->plane[i]->tables == out->plane[0]->tables) continue;
        PyErr_SetString(PyExc_ValueError, "planes: they have several tables");
        break;
    }
    if (!PyErr_Occurred()) return 0;
    PyMem_Free(out->plane);
    return -1;
}

/* From (tensor, dtype, layout). */
static int tensor_of(held *h, PyObject *const *args, int writable, places *out) {
    if (!(out->tensor = hold(h, args[0], writable, "tensor")) || dtype_of(args[1], "tensor", &out->dtype) < 0) return -1;
    const region *layout = hold_numbers(h, args[2], 0, 8, "layout");
    if (!layout) return -1;
    out->layout = layout->view.buf;
    if (layout->bytes == 8 * LAYOUT * out->parts) return 0;
    PyErr_Format(PyExc_ValueError, "layout: needs %zu numbers", LAYOUT * out->parts);
    return -1;
}

static PyObject *angles_of(PyObject *obj, places *of) {
    PyObject *tuple = tuple_of(obj, "angles");
    of->turns = tuple ? (size_t)PyTuple_Size(tuple) / 2 : 0;
    return tuple;
}

/* Cosines and sines of all rows, float [rows][half] each, cosines first. */
static int hold_angles(held *h, PyObject *tuple, places *of, const region **room) {
    of->angles = room;
    for (size_t i = 0; i < 2 * of->turns; i++)
        if (!(room[i] = hold_numbers(h, PyTuple_GetItem(tuple, (Py_ssize_t)i), 0, sizeof(float), "angles"))) return -1;
    return 0;
}

/* What turns part `i` of all, which is one of the plane's. Of several parts, those of V are not turned. */
static int turn_of(const places *of, const ctx_klt_plane *plane, size_t i, const float **cos, const float **sin, size_t *half) {
    const int64_t turn = number_at(of->layout, LAYOUT * i + TURN);
    *cos = *sin = NULL, *half = 0;
    if (turn == -1 && (plane->rope == CTX_KLT_NO_ROPE || plane->parts > 1 || !of->rows)) return 0;
    size_t numbers = 0, bytes = 0;
    if (turn >= 0 && (uint64_t)turn < of->turns) {
        const region *first = of->angles[2 * turn], *second = of->angles[2 * turn + 1];
        numbers = first->bytes / sizeof(float), bytes = second->bytes;
        *cos = first->view.buf, *sin = second->view.buf, *half = of->rows ? numbers / of->rows : 0;
        if (plane->rope != CTX_KLT_NO_ROPE && bytes == first->bytes && *half <= plane->dim / 2 && *half * of->rows == numbers &&
            (*half || !of->rows))
            return 0;
    }
    PyErr_Format(PyExc_ValueError, "angles: %zu and %zu bytes do not fit %zu tokens of a plane that %s", numbers * sizeof(float), bytes,
                 of->rows, plane->rope == CTX_KLT_NO_ROPE ? "is not rotated" : "is rotated");
    return -1;
}

/* Part `i` of all: its first row and what turns it. */
static int part_of(const places *of, const ctx_klt_plane *plane, size_t i, int writable, ctx_klt_part *out) {
    box here = {.buffer = of->tensor, .writable = writable, .what = "tensor", .view = {.dtype = of->dtype}};
    size_t numbers[TURN];
    for (size_t j = 0; j < TURN; j++) {
        const int64_t number = number_at(of->layout, LAYOUT * i + j);
        if (number < 0) {
            PyErr_SetString(PyExc_ValueError, "layout: a number is negative");
            return -1;
        }
        numbers[j] = (size_t)number;
    }
    here.offset = numbers[OFFSET];
    memcpy(here.view.strides, numbers + HEADS, sizeof here.view.strides);
    *out = (ctx_klt_part){.half = 0};
    if (place(&here, (const size_t[3]){plane->heads, of->rows, plane->dim}) < 0 || turn_of(of, plane, i, &out->cos, &out->sin, &out->half) < 0)
        return -1;
    out->rows = here.view;
    return 0;
}

/* A place for each stream of each plane, plane by plane, of sources of so many tokens; `parts`: room for [sources] times all
 * parts. All rows must lie in the tensor, and be distinct if they are written. */
static int place_all(const places *of, int writable, const size_t *tokens, size_t sources, ctx_klt_place *out, ctx_klt_part *parts) {
    for (size_t i = 0, first = 0; i < of->planes; first += of->plane[i++]->parts) {
        const size_t count = of->plane[i]->parts;
        for (size_t p = 0; p < count; p++) {
            ctx_klt_part whole;
            if (part_of(of, of->plane[i], first + p, writable, &whole) < 0) return -1;
            for (size_t j = 0, row = 0; j < sources; row += tokens[j++]) {
                ctx_klt_part *here = &parts[j * count + p];
                *here = whole;
                here->rows.at += row * whole.rows.strides[1] * ctx_dtype_bytes(of->dtype);
                if (whole.half) here->cos += row * whole.half, here->sin += row * whole.half;
            }
        }
        for (size_t j = 0; j < sources; j++, parts += count) *out++ = (ctx_klt_place){of->plane[i], parts, tokens[j]};
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

static PyObject *result_of(ctx_klt_result result, size_t streams) {
    if (result.reason == CTX_KLT_OK) Py_RETURN_NONE;
    if (result.reason == CTX_KLT_MEMORY) return PyErr_NoMemory();
    return Py_BuildValue("snnnO", reasons[result.reason], (Py_ssize_t)(result.place / streams), (Py_ssize_t)(result.place % streams),
                         (Py_ssize_t)result.cell, result.refinement ? Py_True : Py_False);
}

/* The kernels' checksum is of long bytes only; short ones, which are rare, are compared by the package. 1 where they differ,
 * -1 with an exception. */
static int short_differs(const uint8_t *at, size_t bytes, uint64_t sum) {
    PyObject *module = PyImport_ImportModule("xxhash");
    PyObject *found = module ? PyObject_CallMethod(module, "xxh3_64_intdigest", "y#", (const char *)at, (Py_ssize_t)bytes) : NULL;
    const uint64_t value = found ? PyLong_AsUnsignedLongLong(found) : 0;
    Py_XDECREF(module);
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : value != sum;
}

/* Whether the call is to compare the sum of so many bytes: if so 1, and 0 if it has been compared, or -1. */
static int compare(const region *sums, size_t i, const uint8_t *at, size_t bytes, uint64_t *sum, int *differs) {
    *sum = sums ? (uint64_t)number_at(sums->view.buf, i) : 0;
    if (!sums || bytes >= LONG_HASH) return sums != NULL;
    const int wrong = short_differs(at, bytes, *sum);
    *differs |= wrong > 0;
    return wrong < 0 ? -1 : 0;
}

/* ---- Decoding ---------------------------------------------------------------------------------------------------- */

/* The streams of a source: where in its bytes that of each plane lies (two int64 each), and their checksums or None. */
static int spans_of(held *h, PyObject *const fields[3], size_t planes, const char *what, const uint8_t **at, const uint8_t **spans,
                    const region **sums) {
    const region *data = hold(h, fields[0], 0, what), *span = data ? hold(h, fields[1], 0, "spans") : NULL;
    const region *sum = !span || fields[2] == Py_None ? NULL : hold(h, fields[2], 0, "checksums");
    if (!span || (!sum && fields[2] != Py_None)) return -1;
    *at = data->view.buf, *spans = span->view.buf, *sums = sum;
    int wrong = !PyBuffer_IsContiguous(&data->view, 'C') || !PyBuffer_IsContiguous(&span->view, 'C') || span->bytes != 16 * planes ||
                (sum && (!PyBuffer_IsContiguous(&sum->view, 'C') || sum->bytes != 8 * planes));
    for (size_t i = 0; !wrong && i < planes; i++) {
        const int64_t first = number_at(*spans, 2 * i), bytes = number_at(*spans, 2 * i + 1);
        wrong = first < 0 || bytes < 0 || (size_t)first > data->bytes || (size_t)bytes > data->bytes - (size_t)first;
    }
    if (!wrong) return 0;
    PyErr_Format(PyExc_ValueError, "%s: spans and checksums do not fit %zu planes in %zu bytes", what, planes, data->bytes);
    return -1;
}

/* One source: (tokens, buffer, spans, checksums or None, buffer, spans, checksums of its refinements, or None). Its streams
 * are every `step`th from s on. *wrong: a short one whose checksum differs, plane by plane and base before refinement. */
static int source_of(held *h, PyObject *obj, const places *of, size_t step, ctx_klt_stream *s, size_t *tokens, ctx_klt_result *wrong) {
    PyObject *tuple = fields_of(obj, 7, "source"), *fields[7];
    const uint8_t *data[2] = {NULL, NULL}, *spans[2];
    const region *sums[2] = {NULL, NULL};
    if (!tuple) return -1;
    for (int i = 0; i < 7; i++) fields[i] = PyTuple_GetItem(tuple, i);
    const int refined = fields[4] != Py_None;
    const int failed = size_of(fields[0], "token count", tokens) < 0 ||
                       spans_of(h, fields + 1, of->planes, "stream", &data[0], &spans[0], &sums[0]) < 0 ||
                       (refined && spans_of(h, fields + 4, of->planes, "refinement", &data[1], &spans[1], &sums[1]) < 0);
    Py_DECREF(tuple);
    if (failed) return -1;
    if (*tokens > UINT16_MAX) {
        PyErr_Format(PyExc_ValueError, "token count: %zu is more than a stream can have", *tokens);
        return -1;
    }
    for (size_t i = 0; i < of->planes; i++, s += step) {
        int differs[2] = {0, 0};
        s->at = data[0] + number_at(spans[0], 2 * i), s->bytes = (size_t)number_at(spans[0], 2 * i + 1);
        if ((s->checked = compare(sums[0], i, s->at, s->bytes, &s->sum, &differs[0])) < 0) return -1;
        if (refined) {
            if (!of->plane[i]->base) {
                PyErr_SetString(PyExc_ValueError, "refinement: the plane's level refines no other");
                return -1;
            }
            s->more = data[1] + number_at(spans[1], 2 * i), s->more_bytes = (size_t)number_at(spans[1], 2 * i + 1);
            if ((s->more_checked = compare(sums[1], i, s->more, s->more_bytes, &s->more_sum, &differs[1])) < 0) return -1;
        }
        if ((differs[0] || differs[1]) && !wrong->reason)
            *wrong = (ctx_klt_result){.reason = CTX_KLT_CHECKSUM, .place = i * step, .refinement = !differs[0]};
    }
    return 0;
}

/* (planes, tensor, dtype, layout, sources, raw_dtype, angles, times) */
static PyObject *klt_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    enum { BESIDE = 3 /* buffers: tensor, layout, times */, EACH = 6 };
    const ctx_kernels *k = table();
    places of = {0};
    ctx_dtype raw;
    timed time;
    held h = {0};
    PyObject *result = NULL, *list = NULL, *turns = NULL;
    size_t *tokens = NULL;
    ctx_klt_place *at = NULL;
    ctx_klt_part *parts = NULL;
    ctx_klt_stream *streams = NULL;
    const region **angles = NULL;
    ctx_klt_result told = {.reason = CTX_KLT_OK};
    (void)module;
    if (!k || arity(nargs, 8, "klt_decode") < 0 || dtype_of(args[5], "raw dtype", &raw) < 0 || planes_of(args[0], &of) < 0) return NULL;
    if (!(list = tuple_of(args[4], "sources")) || !(turns = angles_of(args[6], &of))) goto done;
    const size_t count = (size_t)PyTuple_Size(list), all = of.planes * count;
    if (!(tokens = PyMem_Calloc(count + 1, sizeof *tokens)) || !(at = PyMem_Calloc(all + 1, sizeof *at)) ||
        !(parts = PyMem_Calloc(of.parts * count + 1, sizeof *parts)) ||
        !(streams = PyMem_Calloc(all + 1, sizeof *streams)) || !(angles = PyMem_Calloc(2 * of.turns + 1, sizeof *angles))) {
        PyErr_NoMemory();
        goto done;
    }
    if (held_room(&h, EACH * count + 2 * of.turns + BESIDE) < 0 || tensor_of(&h, args + 1, 1, &of) < 0 ||
        timed_of(&h, args[7], CTX_KLT_DECODE_PARTS, &time) < 0 || hold_angles(&h, turns, &of, angles) < 0)
        goto done;
    for (size_t i = 0; i < count; of.rows += tokens[i++]) {
        const int had = told.reason != CTX_KLT_OK;
        if (source_of(&h, PyTuple_GetItem(list, (Py_ssize_t)i), &of, count, streams + i, &tokens[i], &told) < 0) goto done;
        if (!had && told.reason) told.place += i;
    }
    if (place_all(&of, 1, tokens, count, at, parts) < 0) goto done;
    if (!told.reason) {
        PyThreadState *saved = PyEval_SaveThread();
        told = ctx_klt_decode(k, at, streams, all, raw, clock_of(&time));
        PyEval_RestoreThread(saved);
        clock_add(&time);
    }
    result = result_of(told, count);
done:
    release(&h);
    PyMem_Free(angles);
    PyMem_Free(at);
    PyMem_Free(parts);
    PyMem_Free(streams);
    PyMem_Free(tokens);
    PyMem_Free(of.plane);
    Py_XDECREF(turns);
    Py_XDECREF(list);
    return result;
}

/* ---- Encoding ---------------------------------------------------------------------------------------------------- */

/* Bytes of all streams at most, or SIZE_MAX. */
static size_t room_of(places *of, const int64_t *counts, size_t streams, ctx_dtype raw) {
    size_t room = 1;
    for (size_t i = 0; i < streams; i++) {
        for (size_t p = 0; p < of->planes; p++) {
            if (counts[i] < 1 || counts[i] > UINT16_MAX || ((size_t)counts[i] + 63) / 64 * of->plane[p]->groups > UINT16_MAX) {
                PyErr_Format(PyExc_ValueError, "token count: a stream cannot have %lld tokens", (long long)counts[i]);
                return SIZE_MAX;
            }
            if (__builtin_add_overflow(room, ctx_klt_bound(of->plane[p], (size_t)counts[i], raw), &room)) {
                PyErr_SetString(PyExc_ValueError, "token count: too many streams");
                return SIZE_MAX;
            }
        }
        of->rows += (size_t)counts[i];
    }
    return room;
}

/* The checksums that the parts' rows must have. */
static int check_rows(const places *of, const region *sums, size_t streams, const ctx_klt_place *at, ctx_klt_part *parts, ctx_klt_result *wrong) {
    int fits = streams == 1 && sums->bytes == 8 * of->parts;
    for (size_t i = 0, next = 0; fits && i < of->planes; i++)
        for (size_t p = 0; fits && p < at[i].plane->parts; p++, next++) {
            ctx_klt_part *part = &parts[next];
            const size_t *strides = part->rows.strides, dim = of->plane[i]->dim, plane = of->rows * dim;
            int differs = 0;
            if (!(fits = strides[2] == 1 && strides[1] == dim && strides[0] == plane)) break;
            part->checked = compare(sums, next, part->rows.at, of->plane[i]->heads * plane * ctx_dtype_bytes(of->dtype), &part->sum, &differs);
            if (part->checked < 0) return -1;
            if (differs && !wrong->reason) *wrong = (ctx_klt_result){.reason = CTX_KLT_CHECKSUM, .place = i};
        }
    if (!fits) PyErr_SetString(PyExc_ValueError, "checksums: needs one for each part, whose rows lie side by side");
    return fits ? 0 : -1;
}

/* The streams' bytes, and where each lies: two int64 each. */
static PyObject *streams_of(const uint8_t *out, const ctx_klt_coded *coded, size_t count) {
    const size_t end = count ? coded[count - 1].at + coded[count - 1].bytes : 0;
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)out, (Py_ssize_t)end), *result = NULL;
    PyObject *spans = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(16 * count));
    for (size_t i = 0; spans && i < count; i++) {
        const int64_t span[2] = {(int64_t)coded[i].at, (int64_t)coded[i].bytes};
        memcpy(PyBytes_AsString(spans) + 16 * i, span, sizeof span);
    }
    if (bytes && spans) result = PyTuple_Pack(2, bytes, spans);
    Py_XDECREF(bytes);
    Py_XDECREF(spans);
    return result;
}

/* (planes, tensor, dtype, layout, checksums or None, counts, raw_first, raw_dtype, angles, refinement, times): the streams,
 * or what is wrong. */
static PyObject *klt_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    enum { BESIDE = 5 /* buffers: tensor, layout, checksums, counts, times */ };
    const ctx_kernels *k = table();
    places of = {0};
    ctx_dtype raw;
    timed time;
    held h = {0};
    const region *tokens_of, *sums = NULL, **angles = NULL;
    size_t raw_first, *tokens = NULL;
    PyObject *result = NULL, *turns = NULL;
    ctx_klt_place *at = NULL;
    ctx_klt_part *parts = NULL;
    ctx_klt_coded *coded = NULL;
    uint8_t *out = NULL;
    ctx_klt_result told = {.reason = CTX_KLT_OK};
    (void)module;
    if (!k || arity(nargs, 11, "klt_encode") < 0 || size_of(args[6], "raw_first", &raw_first) < 0 ||
        dtype_of(args[7], "raw dtype", &raw) < 0)
        return NULL;
    const int refinement = PyObject_IsTrue(args[9]);
    if (refinement < 0) return NULL;
    if (planes_of(args[0], &of) < 0) return NULL;
    if (!(turns = angles_of(args[8], &of))) goto done;
    if (!(angles = PyMem_Calloc(2 * of.turns + 1, sizeof *angles))) goto no_memory;
    if (held_room(&h, 2 * of.turns + BESIDE) < 0 || tensor_of(&h, args + 1, 0, &of) < 0 ||
        !(tokens_of = hold_numbers(&h, args[5], 0, 8, "token counts")) || timed_of(&h, args[10], CTX_KLT_ENCODE_PARTS, &time) < 0 ||
        (args[4] != Py_None && !(sums = hold_numbers(&h, args[4], 0, 8, "checksums"))) || hold_angles(&h, turns, &of, angles) < 0)
        goto done;
    for (size_t i = 0; refinement && i < of.planes; i++)
        if (!of.plane[i]->base) {
            PyErr_SetString(PyExc_ValueError, "refinement: the plane's level refines no other");
            goto done;
        }
    const size_t streams = tokens_of->bytes / 8, count = of.planes * streams;
    const size_t room = room_of(&of, tokens_of->view.buf, streams, raw);
    if (room == SIZE_MAX) goto done;
    if (!(tokens = PyMem_Calloc(streams + 1, sizeof *tokens)) || !(at = PyMem_Calloc(count + 1, sizeof *at)) ||
        !(parts = PyMem_Calloc(of.parts * streams + 1, sizeof *parts)) || !(coded = PyMem_Calloc(count + 1, sizeof *coded)) || !(out = PyMem_Malloc(room)))
        goto no_memory;
    for (size_t i = 0, row = 0; i < streams; row += tokens[i++]) {
        tokens[i] = (size_t)number_at(tokens_of->view.buf, i);
        for (size_t p = 0; p < of.planes; p++) coded[p * streams + i].raw_first = raw_first > row ? raw_first - row : 0;
    }
    if (place_all(&of, 0, tokens, streams, at, parts) < 0 || (sums && check_rows(&of, sums, streams, at, parts, &told) < 0)) goto done;
    if (!told.reason) {
        PyThreadState *saved = PyEval_SaveThread();
        told = ctx_klt_encode(k, at, coded, count, raw, refinement, out, clock_of(&time));
        PyEval_RestoreThread(saved);
        clock_add(&time);
    }
    result = told.reason ? result_of(told, streams) : streams_of(out, coded, count);
    goto done;
no_memory:
    PyErr_NoMemory();
done:
    release(&h);
    PyMem_Free(angles);
    PyMem_Free(tokens);
    PyMem_Free(at);
    PyMem_Free(parts);
    PyMem_Free(coded);
    PyMem_Free(out);
    PyMem_Free(of.plane);
    Py_XDECREF(turns);
    return result;
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
    {"klt_name", klt_name, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
