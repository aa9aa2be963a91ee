/* core/pages.c - huge pages for the memory that an engine's tensors lie in. */
#define _GNU_SOURCE
#include "ctxreuse.h"

#include <errno.h>
#include <sys/mman.h>

#if defined(__linux__)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; headers may be older than the kernel */
#endif
#endif

int64_t ctx_advise_hugepages(void *at, size_t bytes, int populate) {
#if defined(__linux__)
    const uintptr_t huge = (uintptr_t)2 << 20;
    const uintptr_t end = ((uintptr_t)at + bytes) & ~(huge - 1);
    if ((uintptr_t)at > UINTPTR_MAX - huge) return 0;
    const uintptr_t first = ((uintptr_t)at + huge - 1) & ~(huge - 1);
    if (first >= end) return 0;
    /* EINVAL: a kernel without transparent huge pages, or a map that cannot have them. */
    if (madvise((void *)first, end - first, MADV_HUGEPAGE) < 0) return errno == EINVAL ? 0 : -1;
    if (populate && madvise((void *)first, end - first, MADV_POPULATE_WRITE) < 0 && errno != EINVAL) return -1;
    return (int64_t)(end - first);
#else
    (void)at, (void)bytes, (void)populate;
    return 0;
#endif
}
