/* core/pool.h - threads that share the pieces of one short call: a linear layer of a decode step takes 20 to 400 us.
 *
 * The caller works as well, and takes pieces until there are none: a helper that the system runs late costs nothing but its
 * help. Helpers look for the next call for some tens of microseconds, then sleep. One call at a time has them; others that
 * come meanwhile run alone. Helpers start when first needed, and block all signals; a forked child starts its own.
 */
#ifndef CTXREUSE_POOL_H
#define CTXREUSE_POOL_H

#include <stddef.h>

/* piece(what, i) for i below `pieces`, each once, by at most `threads` threads, the caller's among them. */
void ctx_pool_run(void (*piece)(void *what, size_t i), void *what, size_t pieces, size_t threads);

#endif
