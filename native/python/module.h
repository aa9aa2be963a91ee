/* python/module.h - the parts of ctxreuse._native: each source's entries, whose arguments ctxreuse/_native.pyi names. */
#ifndef CTXREUSE_MODULE_H
#define CTXREUSE_MODULE_H

#include "arguments.h"
#include "policy/residents.h"
#include "rans/rans.h"

/* Each ends with an empty entry. */
extern PyMethodDef box_methods[], rans_methods[], klt_methods[], lossless_methods[], attention_methods[], linear_methods[], decoder_methods[],
    drift_methods[],
    policy_methods[], residents_methods[], tree_methods[], suffix_methods[], memory_methods[], places_methods[];

/* NULL with TypeError set unless obj was made by rans_tables. */
const ctx_rans_tables *rans_tables_of(PyObject *obj);

/* The shadow of a capsule; NULL with ValueError set if it is none. */
policy_shadow *policy_shadow_of(PyObject *capsule);
/* The same of a resident set. */
policy_residents *residents_of(PyObject *capsule);

#endif
