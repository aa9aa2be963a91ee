/* module_policy.h - shadows (module_policy.c) and rosters (module_roster.c) of eviction policies, for Python. */
#ifndef CTXREUSE_MODULE_POLICY_H
#define CTXREUSE_MODULE_POLICY_H

#include "arguments.h"
#include "policy.h"

/* Each ends with an empty entry. */
extern PyMethodDef policy_methods[], roster_methods[];

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

/* The shadow of a capsule; NULL with ValueError set if it is none. */
policy_shadow *policy_shadow_of(PyObject *capsule);

#endif
