/* module_lossless.c - lossless packing for Python: one plane in, many consecutive blocks' planes out. */
#include "module_lossless.h"

#include "lossless.h"

enum { MOST_ELEMENTS = INT32_MAX };

static const ctx_kernels *table(void) {
    const ctx_kernels *k = ctx_active();
    if (!k) PyErr_SetString(PyExc_RuntimeError, "no kernel table is active");
    return k;
}

/* Streams count in 32 bits. */
static int volume_of(const size_t shape[3], size_t *elements) {
    if (__builtin_mul_overflow(shape[0], shape[1], elements) || __builtin_mul_overflow(*elements, shape[2], elements) ||
        *elements > MOST_ELEMENTS || shape[0] > MOST_ELEMENTS || shape[1] > MOST_ELEMENTS || shape[2] > MOST_ELEMENTS) {
        PyErr_Format(PyExc_ValueError, "plane (%zu, %zu, %zu) is too large to be packed", shape[0], shape[1], shape[2]);
        return -1;
    }
    return 0;
}

/* (src, dtype, offset, strides, shape, out) -> bytes written */
PyObject *lossless_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    size_t offset, shape[3], elements, bytes = 0;
    ctx_view view;
    region src, out;
    ctx_lossless_status status = CTX_LOSSLESS_OK;
    int failed = 1;
    (void)module;
    if (!k || arity(nargs, 6, "lossless_encode") < 0 || dtype_of(args[1], "dtype", &view.dtype) < 0 ||
        size_of(args[2], "offset", &offset) < 0 || sizes_of(args[3], "strides", 1, view.strides) < 0 ||
        sizes_of(args[4], "shape", 0, shape) < 0 || volume_of(shape, &elements) < 0 || take(args[0], 0, "src", &src) < 0)
        return NULL;
    if (take(args[5], 1, "out", &out) == 0) {
        if (out.bytes < ctx_lossless_bound(elements * ctx_dtype_bytes(view.dtype)) || !PyBuffer_IsContiguous(&out.view, 'C')) {
            PyErr_Format(PyExc_ValueError, "out: needs %zu contiguous bytes",
                         ctx_lossless_bound(elements * ctx_dtype_bytes(view.dtype)));
        } else if (place(&src, offset, shape, 0, "src", &view) == 0) {
            failed = 0;
            Py_BEGIN_ALLOW_THREADS
            status = ctx_lossless_encode(k, &view, shape, out.view.buf, &bytes);
            Py_END_ALLOW_THREADS
        }
        PyBuffer_Release(&out.view);
    }
    PyBuffer_Release(&src.view);
    if (failed) return NULL;
    return status == CTX_LOSSLESS_OK ? PyLong_FromSize_t(bytes) : PyErr_NoMemory();
}

/* The streams of a run of blocks, their places and the buffers held for them. */
typedef struct run {
    size_t blocks, held, tokens;
    region *buffers;
    ctx_lossless_job *jobs;
    uint64_t *sums;
} run;

static void run_release(run *r) {
    for (size_t i = 0; i < r->held; i++) PyBuffer_Release(&r->buffers[i].view);
    PyMem_Free(r->buffers);
    PyMem_Free(r->jobs);
    PyMem_Free(r->sums);
}

enum { SRCS, OFFSETS, SIZES, COUNTS, SUMS, LISTS };

static int run_fill(run *r, PyObject *const *lists, size_t heads, size_t dim) {
    static const char *const names[LISTS] = {"srcs", "offsets", "sizes", "token_counts", "checksums"};
    r->blocks = (size_t)PyTuple_Size(lists[SRCS]);
    for (int i = 0; i < LISTS; i++)
        if (lists[i] && (size_t)PyTuple_Size(lists[i]) != r->blocks) {
            PyErr_Format(PyExc_ValueError, "%s: %zd for %zu streams", names[i], PyTuple_Size(lists[i]), r->blocks);
            return -1;
        }
    r->buffers = PyMem_Calloc(r->blocks + 1, sizeof *r->buffers);
    r->jobs = PyMem_Calloc(r->blocks + 1, sizeof *r->jobs);
    r->sums = PyMem_Calloc(r->blocks + 1, sizeof *r->sums);
    if (!r->buffers || !r->jobs || !r->sums) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < r->blocks; i++) {
        ctx_lossless_job *job = &r->jobs[i];
        size_t offset, count, elements;
        if (size_of(PyTuple_GetItem(lists[OFFSETS], (Py_ssize_t)i), "offset", &offset) < 0 ||
            size_of(PyTuple_GetItem(lists[SIZES], (Py_ssize_t)i), "size", &job->bytes) < 0 ||
            size_of(PyTuple_GetItem(lists[COUNTS], (Py_ssize_t)i), "token count", &count) < 0)
            return -1;
        job->shape[0] = heads, job->shape[1] = count, job->shape[2] = dim;
        if (volume_of(job->shape, &elements) < 0 ||
            take(PyTuple_GetItem(lists[SRCS], (Py_ssize_t)i), 0, "srcs", &r->buffers[i]) < 0)
            return -1;
        const region *buffer = &r->buffers[r->held++];
        if (offset > buffer->bytes || job->bytes > buffer->bytes - offset ||
            __builtin_add_overflow(r->tokens, count, &r->tokens)) {
            PyErr_Format(PyExc_ValueError, "srcs %zu: %zu bytes at byte %zu leave the buffer of %zu bytes", i, job->bytes,
                         offset, buffer->bytes);
            return -1;
        }
        job->data = (const uint8_t *)buffer->view.buf + offset;
        if (!lists[SUMS]) continue;
        if (job->bytes <= 240) {
            PyErr_Format(PyExc_ValueError, "srcs %zu: a stream of %zu bytes is too short to be checked here", i, job->bytes);
            return -1;
        }
        r->sums[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(lists[SUMS], (Py_ssize_t)i));
        if (PyErr_Occurred()) {
            if (PyErr_ExceptionMatches(PyExc_OverflowError)) PyErr_SetString(PyExc_ValueError, "checksum: not of 64 bits");
            return -1;
        }
        job->sum = &r->sums[i];
    }
    return 0;
}

/* (dst, dtype, offset, strides, heads, dim, srcs, offsets, sizes, token_counts, checksums or None) -> the first stream that
 * is not right, or -1 */
PyObject *lossless_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    size_t offset, heads, dim, bad = 0;
    ctx_view view;
    region dst;
    run r = {0};
    PyObject *lists[LISTS] = {NULL}, *result = NULL;
    ctx_lossless_status status;
    (void)module;
    if (!k || arity(nargs, 11, "lossless_decode") < 0 || dtype_of(args[1], "dtype", &view.dtype) < 0 ||
        size_of(args[2], "offset", &offset) < 0 || sizes_of(args[3], "strides", 1, view.strides) < 0 ||
        size_of(args[4], "heads", &heads) < 0 || size_of(args[5], "dim", &dim) < 0 || take(args[0], 1, "dst", &dst) < 0)
        return NULL;
    int failed = 0;
    for (int i = 0; i < LISTS && !failed; i++)
        if (i != SUMS || args[6 + i] != Py_None) failed = !(lists[i] = tuple_of(args[6 + i], "srcs, offsets, sizes, counts"));
    if (!failed && run_fill(&r, lists, heads, dim) == 0) {
        const size_t shape[3] = {heads, r.tokens, dim};
        if (place(&dst, offset, shape, 1, "dst", &view) == 0) {
            size_t token = 0;
            for (size_t i = 0; i < r.blocks; token += r.jobs[i++].shape[1]) {
                r.jobs[i].dst = view;
                /* Of no tokens at all even the address may lie outside. */
                if (r.jobs[i].shape[1]) r.jobs[i].dst.at += token * view.strides[1] * ctx_dtype_bytes(view.dtype);
            }
            Py_BEGIN_ALLOW_THREADS
            status = ctx_lossless_decode(k, r.jobs, r.blocks, &bad);
            Py_END_ALLOW_THREADS
            if (status == CTX_LOSSLESS_MEMORY)
                PyErr_NoMemory();
            else
                result = PyLong_FromSsize_t(status == CTX_LOSSLESS_OK ? -1 : (Py_ssize_t)bad);
        }
    }
    run_release(&r);
    for (int i = 0; i < LISTS; i++) Py_XDECREF(lists[i]);
    PyBuffer_Release(&dst.view);
    return result;
}
