/* pages.c - fault pages in ahead of use: the first read of a cold map is page faults, not copying. */
#define _GNU_SOURCE
#include "ctxreuse.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__)
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; headers may be older than the kernel */
#define MADV_POPULATE_WRITE 23
#endif
#endif

int64_t ctx_populate(const void *at, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t first = (uintptr_t)at & ~(page - 1), end = (uintptr_t)at + bytes;
    if (bytes == 0) return 0;
#if defined(__linux__)
    /* The last page counts whole: it is mapped, since the buffer reaches into it. */
    int done = madvise((void *)first, end - first, MADV_POPULATE_READ);
    if (done == 0) return (int64_t)bytes;
    if (errno != EINVAL) return -1;
#endif
    const volatile uint8_t *byte = at;
    (void)byte[0];
    for (uintptr_t next = first + page; next < end; next += page) (void)*(const volatile uint8_t *)next;
    return (int64_t)bytes;
}

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
