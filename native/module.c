/* module.c - the Python door: ctxreuse._native, limited API 3.11. Checks every argument (arguments.c), then calls the core.
 *
 * Each entry takes positional arguments only; ctxreuse/_native.pyi names them. All buffers are held, as Py_buffer,
 * until the entry returns; the GIL is released while more than GIL_BYTES are moved.
 */
#include "arguments.h"
#include "module_attend.h"
#include "module_lossless.h"
#include "module_policy.h"
#include "module_klt.h"
#include "module_rans.h"

#include <stdlib.h>
#include <string.h>

/* Releasing and taking the GIL costs about 100 ns uncontended; copying 16 KiB from the cache costs a little more. */
enum { GIL_BYTES = 16 << 10 };

/* Bytes of a destination that passed its check; it has that many distinct elements, so this cannot overflow. */
static size_t volume(const size_t shape[3], ctx_dtype dtype) {
    if (shape[0] == 0 || shape[1] == 0 || shape[2] == 0) return 0;
    return shape[0] * shape[1] * shape[2] * ctx_dtype_bytes(dtype);
}

#define MOVE(amount, statement)                        \
    do {                                               \
        if ((amount) > GIL_BYTES) {                    \
            Py_BEGIN_ALLOW_THREADS statement;          \
            Py_END_ALLOW_THREADS                       \
        } else {                                       \
            statement;                                 \
        }                                              \
    } while (0)

static const ctx_kernels *table(void) {
    const ctx_kernels *k = ctx_active();
    if (!k) PyErr_SetString(PyExc_RuntimeError, "no kernel table is active");
    return k;
}

/* ---- Boxes ------------------------------------------------------------------------------------------------------- */

/* Two views of a box of the same shape, parsed from (buffer, dtype, offset, strides) twice. */
typedef struct pair {
    region dst_buffer, src_buffer;
    ctx_view dst, src;
} pair;

static int pair_of(PyObject *const *args, const size_t shape[3], pair *out) {
    size_t dst_offset, src_offset;
    if (dtype_of(args[1], "dst_dtype", &out->dst.dtype) < 0 || size_of(args[2], "dst_offset", &dst_offset) < 0 ||
        sizes_of(args[3], "dst_strides", 1, out->dst.strides) < 0 ||
        dtype_of(args[5], "src_dtype", &out->src.dtype) < 0 || size_of(args[6], "src_offset", &src_offset) < 0 ||
        sizes_of(args[7], "src_strides", 1, out->src.strides) < 0)
        return -1;
    if (take(args[0], 1, "dst", &out->dst_buffer) < 0) return -1;
    if (take(args[4], 0, "src", &out->src_buffer) < 0) {
        PyBuffer_Release(&out->dst_buffer.view);
        return -1;
    }
    if (place(&out->dst_buffer, dst_offset, shape, 1, "dst", &out->dst) == 0 &&
        place(&out->src_buffer, src_offset, shape, 0, "src", &out->src) == 0)
        return 0;
    PyBuffer_Release(&out->src_buffer.view);
    PyBuffer_Release(&out->dst_buffer.view);
    return -1;
}

static void pair_release(pair *views) {
    PyBuffer_Release(&views->src_buffer.view);
    PyBuffer_Release(&views->dst_buffer.view);
}

static PyObject *copy3(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    size_t shape[3];
    pair views;
    (void)module;
    if (!k || arity(nargs, 9, "copy3") < 0 || sizes_of(args[8], "shape", 0, shape) < 0 ||
        pair_of(args, shape, &views) < 0)
        return NULL;
    MOVE(volume(shape, views.dst.dtype), ctx_copy3(k, &views.dst, &views.src, shape));
    pair_release(&views);
    Py_RETURN_NONE;
}

static PyObject *rope_shift(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    size_t shape[3];
    pair views;
    region cos, sin;
    ctx_status status = CTX_OK;
    (void)module;
    if (!k || arity(nargs, 12, "rope_shift") < 0 || sizes_of(args[8], "shape", 0, shape) < 0) return NULL;
    int interleaved = PyObject_IsTrue(args[11]);
    if (interleaved < 0 || take(args[9], 0, "cos", &cos) < 0) return NULL;
    if (take(args[10], 0, "sin", &sin) < 0) {
        PyBuffer_Release(&cos.view);
        return NULL;
    }
    const size_t half = cos.bytes / sizeof(float);
    int failed = 1;
    if (cos.view.itemsize != 4 || sin.view.itemsize != 4 || !PyBuffer_IsContiguous(&cos.view, 'C') ||
        !PyBuffer_IsContiguous(&sin.view, 'C') || ((uintptr_t)cos.view.buf | (uintptr_t)sin.view.buf) % sizeof(float))
        PyErr_SetString(PyExc_ValueError, "cos, sin: need contiguous aligned float32 buffers");
    else if (cos.bytes != sin.bytes)
        PyErr_SetString(PyExc_ValueError, "cos, sin: must have the same length");
    else if (half > shape[2] / 2)
        PyErr_Format(PyExc_ValueError, "cos: %zu angles rotate more than dim %zu elements", half, shape[2]);
    else if (pair_of(args, shape, &views) == 0) {
        failed = 0;
        MOVE(volume(shape, views.dst.dtype),
             status = ctx_rope_shift(k, &views.dst, &views.src, shape, cos.view.buf, sin.view.buf, half, interleaved));
        pair_release(&views);
    }
    PyBuffer_Release(&sin.view);
    PyBuffer_Release(&cos.view);
    if (failed) return NULL;
    if (status != CTX_OK) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* ---- Runs of blocks ---------------------------------------------------------------------------------------------- */

/* What scatter_run and gather_run share: the planes, their token counts and the buffers held for them. */
typedef struct planes {
    size_t blocks, held, tokens;
    ctx_dtype dtype;
    region *buffers;
    uint8_t **at;
    size_t *counts;
} planes;

static void planes_release(planes *run) {
    for (size_t i = 0; i < run->held; i++) PyBuffer_Release(&run->buffers[i].view);
    PyMem_Free(run->buffers);
    PyMem_Free(run->at);
    PyMem_Free(run->counts);
}

static int planes_fill(planes *run, PyObject *buffers, PyObject *offsets, PyObject *counts, size_t heads, size_t dim,
                       int writable, const char *what) {
    const Py_ssize_t blocks = PyTuple_Size(buffers);
    if (PyTuple_Size(offsets) != blocks || PyTuple_Size(counts) != blocks) {
        PyErr_Format(PyExc_ValueError, "%s: %zd buffers, %zd offsets and %zd token counts must be as many", what, blocks,
                     PyTuple_Size(offsets), PyTuple_Size(counts));
        return -1;
    }
    run->blocks = (size_t)blocks;
    run->buffers = PyMem_Calloc(run->blocks + 1, sizeof *run->buffers);
    run->at = PyMem_Calloc(run->blocks + 1, sizeof *run->at);
    run->counts = PyMem_Calloc(run->blocks + 1, sizeof *run->counts);
    if (!run->buffers || !run->at || !run->counts) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < run->blocks; i++) {
        size_t offset, *count = &run->counts[i], plane = 0;
        if (size_of(PyTuple_GetItem(offsets, (Py_ssize_t)i), "offset", &offset) < 0 ||
            size_of(PyTuple_GetItem(counts, (Py_ssize_t)i), "token count", count) < 0 ||
            take(PyTuple_GetItem(buffers, (Py_ssize_t)i), writable, what, &run->buffers[i]) < 0)
            return -1;
        run->held++;
        region *buffer = &run->buffers[i];
        if (offset > buffer->bytes || __builtin_mul_overflow(heads, *count, &plane) ||
            __builtin_mul_overflow(plane, dim, &plane) ||
            __builtin_mul_overflow(plane, ctx_dtype_bytes(run->dtype), &plane) || plane > buffer->bytes - offset ||
            __builtin_add_overflow(run->tokens, *count, &run->tokens)) {
            PyErr_Format(PyExc_ValueError, "%s %zu: plane [%zu, %zu, %zu] at byte %zu leaves the buffer of %zu bytes",
                         what, i, heads, *count, dim, offset, buffer->bytes);
            return -1;
        }
        run->at[i] = (uint8_t *)buffer->view.buf + offset;
    }
    return 0;
}

static int planes_of(planes *run, PyObject *buffers, PyObject *offsets, PyObject *counts, size_t heads, size_t dim,
                     int writable, const char *what) {
    PyObject *tuples[3] = {tuple_of(buffers, what), NULL, NULL};
    if (tuples[0]) tuples[1] = tuple_of(offsets, "offsets");
    if (tuples[1]) tuples[2] = tuple_of(counts, "token_counts");
    int failed = !tuples[2] || planes_fill(run, tuples[0], tuples[1], tuples[2], heads, dim, writable, what) < 0;
    for (int i = 0; i < 3; i++) Py_XDECREF(tuples[i]);
    return failed ? -1 : 0;
}

/* One checksum a plane; planes must be long enough for the kernel, or empty. New memory, or NULL with an error set. */
static uint64_t *sums_of(PyObject *obj, const planes *run, size_t heads, size_t dim) {
    PyObject *tuple = tuple_of(obj, "checksums");
    uint64_t *sums = tuple ? PyMem_Calloc(run->blocks + 1, sizeof *sums) : NULL;
    if (tuple && !sums) PyErr_NoMemory();
    if (sums && (size_t)PyTuple_Size(tuple) != run->blocks)
        PyErr_Format(PyExc_ValueError, "checksums: %zd for %zu blocks", PyTuple_Size(tuple), run->blocks);
    for (size_t i = 0; sums && !PyErr_Occurred() && i < run->blocks; i++) {
        size_t bytes = heads * run->counts[i] * dim * ctx_dtype_bytes(run->dtype); /* planes_fill checked the product */
        if (bytes && bytes <= 240)
            PyErr_Format(PyExc_ValueError, "block %zu: a plane of %zu bytes is too short to be checked here", i, bytes);
        else
            sums[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, (Py_ssize_t)i));
    }
    Py_XDECREF(tuple);
    if (sums && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) PyErr_SetString(PyExc_ValueError, "checksum: not of 64 bits");
        PyMem_Free(sums);
        return NULL;
    }
    return sums;
}

/* (tensor, dtype, offset, strides, planes, offsets, planes_dtype, heads, dim, token_counts) */
static PyObject *run_entry(PyObject *const *args, Py_ssize_t nargs, int scatter) {
    const ctx_kernels *k = table();
    ctx_view tensor;
    region buffer;
    planes run = {0};
    size_t offset, heads, dim;
    PyObject *result = NULL;
    if (!k || arity(nargs, 10, scatter ? "scatter_run" : "gather_run") < 0 ||
        dtype_of(args[1], "tensor dtype", &tensor.dtype) < 0 || size_of(args[2], "tensor offset", &offset) < 0 ||
        sizes_of(args[3], "tensor strides", 1, tensor.strides) < 0 ||
        dtype_of(args[6], "block dtype", &run.dtype) < 0 || size_of(args[7], "heads", &heads) < 0 ||
        size_of(args[8], "dim", &dim) < 0 || take(args[0], scatter, "tensor", &buffer) < 0)
        return NULL;
    if (planes_of(&run, args[4], args[5], args[9], heads, dim, !scatter, "block") == 0) {
        const size_t shape[3] = {heads, run.tokens, dim};
        if (place(&buffer, offset, shape, scatter, "tensor", &tensor) == 0) {
            /* Distinct elements bound a scatter; a gather's planes are separate buffers, each checked. */
            size_t amount = run.tokens > GIL_BYTES || heads > GIL_BYTES || dim > GIL_BYTES
                                ? (size_t)GIL_BYTES + 1
                                : volume(shape, CTX_FP32);
            if (scatter)
                MOVE(amount, ctx_scatter_run(k, &tensor, run.at, run.dtype, run.counts, run.blocks, heads, dim));
            else
                MOVE(amount, ctx_gather_run(k, &tensor, run.at, run.dtype, run.counts, run.blocks, heads, dim));
            result = Py_NewRef(Py_None);
        }
    }
    planes_release(&run);
    PyBuffer_Release(&buffer.view);
    return result;
}

static PyObject *scatter_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    return run_entry(args, nargs, 1);
}

/* (… as scatter_run, checksums) -> index of the first plane whose XXH3-64 differs, or -1 */
static PyObject *scatter_checked(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    ctx_view tensor;
    region buffer;
    planes run = {0};
    size_t offset, heads, dim, bad = 0;
    PyObject *result = NULL;
    uint64_t *sums = NULL;
    (void)module;
    if (!k || arity(nargs, 11, "scatter_checked") < 0 || dtype_of(args[1], "tensor dtype", &tensor.dtype) < 0 ||
        size_of(args[2], "tensor offset", &offset) < 0 || sizes_of(args[3], "tensor strides", 1, tensor.strides) < 0 ||
        dtype_of(args[6], "block dtype", &run.dtype) < 0 || size_of(args[7], "heads", &heads) < 0 ||
        size_of(args[8], "dim", &dim) < 0 || take(args[0], 1, "tensor", &buffer) < 0)
        return NULL;
    if (planes_of(&run, args[4], args[5], args[9], heads, dim, 0, "block") == 0 &&
        (sums = sums_of(args[10], &run, heads, dim))) {
        const size_t shape[3] = {heads, run.tokens, dim};
        if (place(&buffer, offset, shape, 1, "tensor", &tensor) == 0) {
            MOVE(volume(shape, CTX_FP32),
                 bad = ctx_scatter_checked(k, &tensor, run.at, run.dtype, run.counts, sums, run.blocks, heads, dim));
            result = PyLong_FromSsize_t(bad == run.blocks ? -1 : (Py_ssize_t)bad);
        }
    }
    PyMem_Free(sums);
    planes_release(&run);
    PyBuffer_Release(&buffer.view);
    return result;
}

static PyObject *gather_run(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    return run_entry(args, nargs, 0);
}

/* ---- Pages ------------------------------------------------------------------------------------------------------- */

static PyObject *populate(PyObject *module, PyObject *obj) {
    region buffer;
    int64_t done;
    (void)module;
    if (take(obj, 0, "buffer", &buffer) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS done = ctx_populate(buffer.view.buf, buffer.bytes);
    Py_END_ALLOW_THREADS
    PyObject *result = done < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLongLong(done);
    PyBuffer_Release(&buffer.view);
    return result;
}

static PyObject *advise_hugepages(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    region buffer;
    int64_t done;
    (void)module;
    if (arity(nargs, 2, "advise_hugepages") < 0) return NULL;
    int fault_in = PyObject_IsTrue(args[1]);
    if (fault_in < 0 || take(args[0], fault_in, "buffer", &buffer) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS done = ctx_advise_hugepages(buffer.view.buf, buffer.bytes, fault_in);
    Py_END_ALLOW_THREADS
    PyObject *result = done < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLongLong(done);
    PyBuffer_Release(&buffer.view);
    return result;
}

/* ---- Tables ------------------------------------------------------------------------------------------------------ */

static PyObject *kernels(PyObject *module, PyObject *unused) {
    const ctx_kernels *const *tables;
    size_t count = ctx_usable(&tables);
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    (void)module, (void)unused;
    for (size_t i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(tables[i]->name);
        if (!name || PyTuple_SetItem(names, (Py_ssize_t)i, name) < 0) Py_CLEAR(names);
    }
    return names;
}

static PyObject *active(PyObject *module, PyObject *unused) {
    const ctx_kernels *k = table();
    (void)module, (void)unused;
    return k ? PyUnicode_FromString(k->name) : NULL;
}

static PyObject *use(PyObject *module, PyObject *name) {
    (void)module;
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (!text) return NULL;
    if (strlen(text) == (size_t)length && ctx_use(text) == 0) Py_RETURN_NONE; /* no NUL inside */
    PyErr_Format(PyExc_ValueError, "kernel table %R is not usable on this machine (known: " CTX_TABLE_NAMES ")", name);
    return NULL;
}

static int start(PyObject *module) {
    if (PyModule_AddFunctions(module, policy_methods) < 0 || PyModule_AddFunctions(module, roster_methods) < 0) return -1;
    if (ctx_active()) return 0;
    const ctx_kernels *const *tables;
    size_t count = ctx_usable(&tables);
    PyErr_Format(PyExc_ImportError,
                 "CTXREUSE_KERNELS=%s names no kernel table that runs on this machine (known: " CTX_TABLE_NAMES
                 "; best here: %s). Unset it to let ctxreuse choose.",
                 getenv("CTXREUSE_KERNELS"), count ? tables[0]->name : "none");
    return -1;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(copy3),
    FAST(scatter_run),
    FAST(scatter_checked),
    FAST(gather_run),
    FAST(rope_shift),
    FAST(advise_hugepages),
    FAST(lossless_encode),
    FAST(lossless_decode),
    FAST(rans_encode),
    FAST(rans_decode),
    FAST(rans_count),
    FAST(klt_plane),
    FAST(klt_decode),
    FAST(klt_encode),
    FAST(klt_bound),
    FAST(attend),
    FAST(attend_merge),
    FAST(attend_quantise),
    {"attend_name", attend_name, METH_O, NULL},
    {"rans_tables", rans_tables, METH_O, NULL},
    {"rans_name", rans_name, METH_NOARGS, NULL},
    {"klt_name", klt_name, METH_NOARGS, NULL},
    {"populate", populate, METH_O, NULL},
    {"kernels", kernels, METH_NOARGS, NULL},
    {"active", active, METH_NOARGS, NULL},
    {"use", use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "ctxreuse._native",
    .m_doc = "Native kernels of ctxreuse; the documented interface is ctxreuse.kernels.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
