/* module_policy.h - shadows and rosters of eviction policies, for Python. */
#ifndef CTXREUSE_MODULE_POLICY_H
#define CTXREUSE_MODULE_POLICY_H

#include "arguments.h"

/* Ends with an empty entry. */
extern PyMethodDef policy_methods[];

#endif
