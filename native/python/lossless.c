/* python/lossless.c - lossless packing for Python: one plane in, many consecutive blocks' planes out. */
#include "lossless/lossless.h"

#include "module.h"

enum { MOST_ELEMENTS = INT32_MAX };

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
static PyObject *lossless_encode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    const ctx_kernels *k = table();
    size_t shape[3], elements, bytes = 0;
    box src;
    held h = {0};
    const region *out;
    PyObject *result = NULL;
    (void)module;
    if (!k || arity(nargs, 6, "lossless_encode") < 0 || sizes_of(args[4], "shape", 0, shape) < 0 || volume_of(shape, &elements) < 0)
        return NULL;
    if (box_of(&h, args, 0, "src", &src) == 0 && (out = hold(&h, args[5], 1, "out"))) {
        const size_t bound = ctx_lossless_bound(elements * ctx_dtype_bytes(src.view.dtype));
        if (out->bytes < bound || !PyBuffer_IsContiguous(&out->view, 'C')) {
            PyErr_Format(PyExc_ValueError, "out: needs %zu contiguous bytes", bound);
        } else if (place(&src, shape) == 0) {
            ctx_lossless_status status;
            Py_BEGIN_ALLOW_THREADS
            status = ctx_lossless_encode(k, &src.view, shape, out->view.buf, &bytes);
            Py_END_ALLOW_THREADS
            result = status == CTX_LOSSLESS_OK ? PyLong_FromSize_t(bytes) : PyErr_NoMemory();
        }
    }
    release(&h);
    return result;
}

/* The streams of a run of blocks, and their checksums. */
typedef struct run {
    size_t blocks, tokens;
    ctx_lossless_job *jobs;
    uint64_t *sums;
} run;

enum { SRCS, OFFSETS, SIZES, COUNTS, SUMS, LISTS };

static int run_of(run *r, held *h, PyObject *const *lists, size_t heads, size_t dim) {
    r->jobs = PyMem_Calloc(r->blocks + 1, sizeof *r->jobs);
    r->sums = PyMem_Calloc(r->blocks + 1, sizeof *r->sums);
    if (!r->jobs || !r->sums) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < (Py_ssize_t)r->blocks; i++) {
        ctx_lossless_job *job = &r->jobs[i];
        size_t offset, count, elements;
        const region *buffer;
        if (size_of(PyTuple_GetItem(lists[OFFSETS], i), "offset", &offset) < 0 ||
            size_of(PyTuple_GetItem(lists[SIZES], i), "size", &job->bytes) < 0 ||
            size_of(PyTuple_GetItem(lists[COUNTS], i), "token count", &count) < 0)
            return -1;
        job->shape[0] = heads, job->shape[1] = count, job->shape[2] = dim;
        if (volume_of(job->shape, &elements) < 0 || !(buffer = hold(h, PyTuple_GetItem(lists[SRCS], i), 0, "srcs"))) return -1;
        if (offset > buffer->bytes || job->bytes > buffer->bytes - offset ||
            __builtin_add_overflow(r->tokens, count, &r->tokens)) {
            PyErr_Format(PyExc_ValueError, "srcs %zd: %zu bytes at byte %zu leave the buffer of %zu bytes", i, job->bytes, offset,
                         buffer->bytes);
            return -1;
        }
        job->data = (const uint8_t *)buffer->view.buf + offset;
        if (!lists[SUMS]) continue;
        if (checksum_of(PyTuple_GetItem(lists[SUMS], i), job->bytes, "srcs", &r->sums[i]) < 0) return -1;
        job->sum = &r->sums[i];
    }
    return 0;
}

/* (dst, dtype, offset, strides, heads, dim, srcs, offsets, sizes, token_counts, checksums or None) -> the first stream that
 * is not right, or -1 */
static PyObject *lossless_decode(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    static const char *const names[LISTS] = {"srcs", "offsets", "sizes", "token counts", "checksums"};
    const ctx_kernels *k = table();
    size_t heads, dim;
    box dst;
    run r = {0};
    held h = {0};
    PyObject *lists[LISTS], *result = NULL;
    (void)module;
    if (!k || arity(nargs, 11, "lossless_decode") < 0 || size_of(args[4], "heads", &heads) < 0 || size_of(args[5], "dim", &dim) < 0)
        return NULL;
    if (lists_of(args + 6, names, SUMS, LISTS, lists, &r.blocks) == 0 && held_room(&h, r.blocks + 1) == 0 &&
        box_of(&h, args, 1, "dst", &dst) == 0 && run_of(&r, &h, lists, heads, dim) == 0) {
        const size_t shape[3] = {heads, r.tokens, dim};
        if (place(&dst, shape) == 0) {
            size_t token = 0, bad = 0;
            ctx_lossless_status status;
            for (size_t i = 0; i < r.blocks; token += r.jobs[i++].shape[1]) {
                r.jobs[i].dst = dst.view;
                /* Of no tokens at all even the address may lie outside. */
                if (r.jobs[i].shape[1]) r.jobs[i].dst.at += token * dst.view.strides[1] * ctx_dtype_bytes(dst.view.dtype);
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
    PyMem_Free(r.jobs);
    PyMem_Free(r.sums);
    release(&h);
    drop_lists(lists, LISTS);
    return result;
}

PyMethodDef lossless_methods[] = {
    FAST(lossless_encode),
    FAST(lossless_decode),
    {NULL, NULL, 0, NULL},
};
