/* python/linear.c - linear layers of few rows, and their largest outputs: buffers to weights, activations of two bytes to fp32 and back. */
#include "module.h"

#include "linear/top.h"

/* One of x and y as floats: its own memory, or room of the call. */
static float *floats(const region *of, ctx_dtype dtype, float **room, size_t values) {
    if (dtype == CTX_FP32) return of->view.buf;
    if (!(*room = PyMem_Malloc(values * sizeof(float) + 1))) PyErr_NoMemory();
    return *room;
}

/* (x [rows, inputs], dtype of x and y, w [outputs, inputs], format, scales or None, bias or None, y, rows, outputs, inputs,
 * threads): all outputs to y [rows, outputs], or with `top` the largest to ctx_top y [rows]. */
static PyObject *multiply(PyObject *const *args, Py_ssize_t nargs, const char *name, int top) {
    const ctx_kernels *k = table();
    ctx_linear a = {0};
    ctx_dtype dtype;
    size_t format, threads, ins, outs, weights;
    if (!k || arity(nargs, 11, name) < 0 || dtype_of(args[1], "dtype", &dtype) < 0 || size_of(args[3], "format", &format) < 0 ||
        size_of(args[7], "rows", &a.rows) < 0 || size_of(args[8], "outputs", &a.outputs) < 0 ||
        size_of(args[9], "inputs", &a.inputs) < 0 || size_of(args[10], "threads", &threads) < 0)
        return NULL;
    if (format >= CTX_WEIGHTS || __builtin_mul_overflow(a.rows, a.inputs, &ins) || __builtin_mul_overflow(a.rows, a.outputs, &outs) ||
        __builtin_mul_overflow(a.outputs, a.inputs, &weights) || ins > SIZE_MAX / 64 || outs > SIZE_MAX / 64 || weights > SIZE_MAX / 64 ||
        (top && (!a.outputs || a.outputs > UINT32_MAX))) {
        PyErr_SetString(PyExc_ValueError, "format, rows, outputs, inputs: out of range");
        return NULL;
    }
    a.format = (ctx_weights)format, a.rounded = dtype == CTX_BF16;
    held h = {0};
    const size_t item = ctx_dtype_bytes(dtype), of_scales = a.outputs * sizeof(float);
    const size_t result = top ? a.rows * sizeof(ctx_top) : outs * item;
    const region *x = hold_numbers(&h, args[0], 0, item, "x"), *scales = NULL, *bias = NULL;
    const region *w = x ? hold_numbers(&h, args[2], 0, ctx_weights_bytes(a.format), "w") : NULL;
    const region *y = w ? hold_numbers(&h, args[6], 1, top ? sizeof(float) : item, "y") : NULL;
    int failed = !y;
    if (!failed && args[4] != Py_None) failed = !(scales = hold_numbers(&h, args[4], 0, sizeof(float), "scales"));
    if (!failed && args[5] != Py_None) failed = !(bias = hold_numbers(&h, args[5], 0, sizeof(float), "bias"));
    if (!failed && (x->bytes != ins * item || y->bytes != result || w->bytes != weights * ctx_weights_bytes(a.format) ||
                    (scales && scales->bytes != of_scales) || (bias && bias->bytes != of_scales) || (!scales && a.format == CTX_WEIGHTS_INT8))) {
        PyErr_Format(PyExc_ValueError, "x, w, scales, bias, y: are not those of %zu rows, %zu outputs and %zu inputs", a.rows, a.outputs, a.inputs);
        failed = 1;
    }
    float *room[2] = {NULL, NULL};
    if (!failed && (a.x = floats(x, dtype, &room[0], ins)) && (top || (a.y = floats(y, dtype, &room[1], outs)))) {
        ctx_status status;
        a.w = w->view.buf, a.scales = scales ? scales->view.buf : NULL, a.bias = bias ? bias->view.buf : NULL;
        Py_BEGIN_ALLOW_THREADS
        if (room[0]) k->convert[dtype][CTX_FP32]((uint8_t *)room[0], x->view.buf, ins);
        status = top ? ctx_linear_top(k, &a, y->view.buf, threads) : ctx_linear_run(k, &a, threads);
        if (room[1]) k->convert[CTX_FP32][dtype](y->view.buf, (uint8_t *)room[1], outs);
        Py_END_ALLOW_THREADS
        failed = status != CTX_OK;
        if (failed) PyErr_NoMemory();
    } else {
        failed = 1;
    }
    PyMem_Free(room[0]);
    PyMem_Free(room[1]);
    release(&h);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *linear(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    return multiply(args, nargs, "linear", 0);
}

static PyObject *linear_top(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    return multiply(args, nargs, "linear_top", 1);
}

PyMethodDef linear_methods[] = {
    FAST(linear),
    FAST(linear_top),
    {NULL, NULL, 0, NULL},
};
