/* python/memory.c - what the C library keeps of a process's memory. */
#include "module.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

/* Give memory that was freed back to the system, where the C library keeps some. */
static PyObject *trim_memory(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
#ifdef __GLIBC__
    Py_BEGIN_ALLOW_THREADS; /* of 80 MB it takes some 50 ms */
    malloc_trim(0);
    Py_END_ALLOW_THREADS;
#endif
    Py_RETURN_NONE;
}

/* Bytes that the C library has handed out, and that it keeps of what was freed; (0, 0) where it does not say. */
static PyObject *heap_bytes(PyObject *module, PyObject *none) {
    (void)module;
    (void)none;
    size_t used = 0, kept = 0;
#if defined(__GLIBC__) && (__GLIBC__ > 2 || (__GLIBC__ == 2 && __GLIBC_MINOR__ >= 33))
    struct mallinfo2 found = mallinfo2();
    used = found.uordblks + found.hblkhd, kept = found.fordblks;
#endif
    return Py_BuildValue("nn", (Py_ssize_t)used, (Py_ssize_t)kept);
}

/* Let all threads allocate from so many arenas of the C library, where it has some (glibc: eight times the processors). */
static PyObject *limit_arenas(PyObject *module, PyObject *count) {
    (void)module;
    long arenas = PyLong_AsLong(count);
    if (arenas == -1 && PyErr_Occurred()) return NULL;
    if (arenas < 1 || arenas > 1024) return PyErr_Format(PyExc_ValueError, "%ld arenas; 1 to 1024 can be", arenas);
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, (int)arenas);
#endif
    Py_RETURN_NONE;
}

/* Let allocations of so many bytes and more be mappings of their own: pages take no memory until they are used. */
static PyObject *map_from(PyObject *module, PyObject *size) {
    (void)module;
    long bytes = PyLong_AsLong(size);
    if (bytes == -1 && PyErr_Occurred()) return NULL;
    if (bytes < 1 << 16 || bytes > 32 << 20)
        return PyErr_Format(PyExc_ValueError, "%ld bytes; 65536 to 33554432 can be", bytes);
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, (int)bytes);
#endif
    Py_RETURN_NONE;
}

/* Keep up to so many bytes of what was freed, mappings of up to 32 MiB among them: to give pages back and get them again,
 * zeroed, takes as long as some computing on them. */
static PyObject *keep_freed(PyObject *module, PyObject *size) {
    (void)module;
    long bytes = PyLong_AsLong(size);
    if (bytes == -1 && PyErr_Occurred()) return NULL;
    if (bytes < 0 || bytes > 1 << 30) return PyErr_Format(PyExc_ValueError, "%ld bytes; 0 to 1073741824 can be", bytes);
#ifdef __GLIBC__
    mallopt(M_TRIM_THRESHOLD, (int)bytes);
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
#endif
    Py_RETURN_NONE;
}

PyMethodDef memory_methods[] = {
    {"heap_bytes", heap_bytes, METH_NOARGS, NULL},
    {"keep_freed", keep_freed, METH_O, NULL},
    {"limit_arenas", limit_arenas, METH_O, NULL},
    {"map_from", map_from, METH_O, NULL},
    {"trim_memory", trim_memory, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
