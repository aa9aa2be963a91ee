/* core/generic.c - the table without vector instructions: always usable, and the reference for the others. */
#define TABLE ctx_generic
#define TABLE_NAME "generic"
#include "loops.inc"
