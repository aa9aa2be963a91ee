/* python/places.c - a callback for ggml's scheduler, which notes where a KV cache lies while a graph is computed. */
#include "module.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* As ctxreuse.engines.llama_cpp.places declares it: two functions of ggml, and the least address of K, then of V, of each layer. */
typedef struct {
    const char *(*name)(const void *tensor);
    void *(*data)(const void *tensor);
    uint32_t layers;
    bool done;
    uintptr_t places[];
} cache_places;

/* Asked of each tensor before it is computed; its result is never wanted. Views begin where the cache begins, or behind. */
static bool note_place(void *tensor, bool ask, void *user) {
    cache_places *seen = user;
    if (seen->done || !ask) return false;
    const char *name = seen->name(tensor);
    if (strncmp(name, "cache_k_l", 9) && strncmp(name, "cache_v_l", 9)) return false;
    char *end;
    unsigned long layer = strtoul(name + 9, &end, 10);
    if (end == name + 9 || layer >= seen->layers) return false;
    uintptr_t *place = &seen->places[(name[6] == 'v' ? seen->layers : 0) + layer], at = (uintptr_t)seen->data(tensor);
    if (at && (!*place || at < *place)) *place = at;
    return false;
}

/* The address of the callback. */
static PyObject *cache_places_callback(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyLong_FromVoidPtr((void *)(uintptr_t)note_place);
}

PyMethodDef places_methods[] = {
    {"cache_places_callback", cache_places_callback, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
