/* python/boxes.c - boxes of elements for Python: rotation, runs of blocks, and huge pages for the memory they lie in. */
#include "module.h"

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

/* (dst, dtype, offset, strides, src, dtype, offset, strides, shape, cos, sin, interleaved) */
static PyObject *rope_shift(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    size_t shape[3];
    box dst, src;
    const region *cos, *sin;
    held h = {0};
    PyObject *result = NULL;
    (void)module;
    if (!k || arity(nargs, 12, "rope_shift") < 0 || sizes_of(args[8], "shape", 0, shape) < 0) return NULL;
    const int interleaved = PyObject_IsTrue(args[11]);
    if (interleaved >= 0 && (cos = hold_numbers(&h, args[9], 0, sizeof(float), "cos")) &&
        (sin = hold_numbers(&h, args[10], 0, sizeof(float), "sin")) && box_of(&h, args, 1, "dst", &dst) == 0 &&
        box_of(&h, args + 4, 0, "src", &src) == 0 && place(&dst, shape) == 0 && place(&src, shape) == 0) {
        const size_t half = cos->bytes / sizeof(float);
        ctx_status status = CTX_OK;
        if (cos->bytes != sin->bytes) {
            PyErr_SetString(PyExc_ValueError, "cos, sin: must have the same length");
        } else if (half > shape[2] / 2) {
            PyErr_Format(PyExc_ValueError, "cos: %zu angles rotate more than dim %zu elements", half, shape[2]);
        } else {
            MOVE(volume(shape, dst.view.dtype), status = ctx_rope_shift(k, &dst.view, &src.view, shape, cos->view.buf,
                                                                        sin->view.buf, half, interleaved));
            result = status == CTX_OK ? Py_NewRef(Py_None) : PyErr_NoMemory();
        }
    }
    release(&h);
    return result;
}

/* The planes of a run, their token counts and checksums. */
typedef struct planes {
    size_t blocks, tokens;
    ctx_dtype dtype;
    uint8_t **at;
    size_t *counts;
    uint64_t *sums;
} planes;

enum { PLANES, OFFSETS, COUNTS, SUMS, LISTS };

/* Planes must be long enough for the checksum's kernel, or empty. */
static int planes_of(planes *run, held *h, PyObject *const *lists, size_t heads, size_t dim) {
    run->at = PyMem_Calloc(run->blocks + 1, sizeof *run->at);
    run->counts = PyMem_Calloc(run->blocks + 1, sizeof *run->counts);
    run->sums = PyMem_Calloc(run->blocks + 1, sizeof *run->sums);
    if (!run->at || !run->counts || !run->sums) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < (Py_ssize_t)run->blocks; i++) {
        size_t offset, *count = &run->counts[i], bytes = 0;
        const region *buffer;
        if (size_of(PyTuple_GetItem(lists[OFFSETS], i), "offset", &offset) < 0 ||
            size_of(PyTuple_GetItem(lists[COUNTS], i), "token count", count) < 0 ||
            !(buffer = hold(h, PyTuple_GetItem(lists[PLANES], i), 0, "block")))
            return -1;
        if (offset > buffer->bytes || __builtin_mul_overflow(heads, *count, &bytes) ||
            __builtin_mul_overflow(bytes, dim, &bytes) || __builtin_mul_overflow(bytes, ctx_dtype_bytes(run->dtype), &bytes) ||
            bytes > buffer->bytes - offset || __builtin_add_overflow(run->tokens, *count, &run->tokens)) {
            PyErr_Format(PyExc_ValueError, "block %zd: plane [%zu, %zu, %zu] at byte %zu leaves the buffer of %zu bytes", i, heads,
                         *count, dim, offset, buffer->bytes);
            return -1;
        }
        run->at[i] = (uint8_t *)buffer->view.buf + offset;
        if (checksum_of(PyTuple_GetItem(lists[SUMS], i), bytes ? bytes : SIZE_MAX, "block", &run->sums[i]) < 0) return -1;
    }
    return 0;
}

/* (tensor, dtype, offset, strides, planes, offsets, planes_dtype, heads, dim, token_counts, checksums) -> index of the first
 * plane whose XXH3-64 differs, or -1 */
static PyObject *scatter_checked(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    static const char *const names[LISTS] = {"planes", "offsets", "token counts", "checksums"};
    const ctx_kernels *k = table();
    box tensor;
    planes run = {0};
    held h = {0};
    size_t heads, dim;
    PyObject *result = NULL, *lists[LISTS];
    (void)module;
    if (!k || arity(nargs, 11, "scatter_checked") < 0 || dtype_of(args[6], "block dtype", &run.dtype) < 0 ||
        size_of(args[7], "heads", &heads) < 0 || size_of(args[8], "dim", &dim) < 0)
        return NULL;
    PyObject *const given[LISTS] = {args[4], args[5], args[9], args[10]};
    if (lists_of(given, names, LISTS, LISTS, lists, &run.blocks) == 0 && held_room(&h, run.blocks + 1) == 0 &&
        box_of(&h, args, 1, "tensor", &tensor) == 0 && planes_of(&run, &h, lists, heads, dim) == 0) {
        const size_t shape[3] = {heads, run.tokens, dim};
        if (place(&tensor, shape) == 0) {
            size_t bad = 0;
            MOVE(volume(shape, CTX_FP32), bad = ctx_scatter_checked(k, &tensor.view, run.at, run.dtype, run.counts, run.sums,
                                                                    run.blocks, heads, dim));
            result = PyLong_FromSsize_t(bad == run.blocks ? -1 : (Py_ssize_t)bad);
        }
    }
    PyMem_Free(run.at);
    PyMem_Free(run.counts);
    PyMem_Free(run.sums);
    release(&h);
    drop_lists(lists, LISTS);
    return result;
}

/* (to, buffers, spans, checksums) -> index of the first span whose XXH3-64 differs, or -1; each buffer has as many spans */
static PyObject *gather_checked(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    held h = {0};
    const region *to, *spans, *sums;
    PyObject *result = NULL;
    (void)module;
    if (!k || arity(nargs, 4, "gather_checked") < 0) return NULL;
    PyObject *const buffers = tuple_of(args[1], "buffers");
    const size_t count = buffers ? (size_t)PyTuple_Size(buffers) : 0;
    const uint8_t **const at = PyMem_Calloc(count + 1, sizeof *at);
    if (buffers && !at) PyErr_NoMemory();
    if (buffers && at && held_room(&h, count + 3) == 0 && (to = hold_numbers(&h, args[0], 1, 1, "to")) &&
        (spans = hold_numbers(&h, args[2], 0, sizeof(int64_t), "spans")) &&
        (sums = hold_numbers(&h, args[3], 0, sizeof(uint64_t), "checksums"))) {
        const int64_t(*const span)[2] = spans->view.buf;
        const size_t n = spans->bytes / sizeof *span, each = count ? n / count : 0;
        size_t total = 0, bad = n;
        int fits = spans->bytes % sizeof *span == 0 && sums->bytes == n * sizeof(uint64_t) && each * count == n;
        for (size_t b = 0; fits && b < count; b++) {
            const region *const from = hold_numbers(&h, PyTuple_GetItem(buffers, (Py_ssize_t)b), 0, 1, "buffer");
            if (!from) goto done;
            at[b] = from->view.buf;
            for (size_t i = b * each; fits && i < (b + 1) * each; i++) {
                const int64_t first = span[i][0], bytes = span[i][1];
                fits = first >= 0 && bytes >= LONG_HASH && (size_t)first <= from->bytes && (size_t)bytes <= from->bytes - (size_t)first;
                total += (size_t)bytes;
            }
        }
        if (!fits || total > to->bytes) {
            PyErr_Format(PyExc_ValueError, "spans: do not fit %zu buffers, %zu bytes there and %zu checksums", count, to->bytes,
                         sums->bytes / sizeof(uint64_t));
        } else {
            MOVE(total, bad = ctx_gather_checked(k, to->view.buf, at, count, span, sums->view.buf, each));
            result = PyLong_FromSsize_t(bad == n ? -1 : (Py_ssize_t)bad);
        }
    }
done:
    release(&h);
    PyMem_Free(at);
    Py_XDECREF(buffers);
    return result;
}

/* (buffer, populate) -> bytes advised */
static PyObject *advise_hugepages(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    held h = {0};
    const region *buffer;
    PyObject *result = NULL;
    (void)module;
    if (arity(nargs, 2, "advise_hugepages") < 0) return NULL;
    const int fault_in = PyObject_IsTrue(args[1]);
    if (fault_in >= 0 && (buffer = hold(&h, args[0], fault_in, "buffer"))) {
        int64_t done;
        Py_BEGIN_ALLOW_THREADS done = ctx_advise_hugepages(buffer->view.buf, buffer->bytes, fault_in);
        Py_END_ALLOW_THREADS
        result = done < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLongLong(done);
    }
    release(&h);
    return result;
}

PyMethodDef box_methods[] = {
    FAST(scatter_checked),
    FAST(gather_checked),
    FAST(rope_shift),
    FAST(advise_hugepages),
    {NULL, NULL, 0, NULL},
};
