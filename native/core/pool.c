/* core/pool.c - helpers that join the one call that is open, and sleep if none comes soon. */
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

enum { MOST = 63 /* helpers */, LOOKS = 1000 /* before sleep: 50 us where a pause takes 50 ns */ };

/* The open call. Helpers read it only between joining (`inside`) and leaving; the caller changes it only while none is in. */
static struct {
    void (*piece)(void *, size_t);
    void *what;
    size_t pieces, helpers;
    _Atomic size_t next;
} call;

static _Atomic size_t inside, sleeping;
static _Atomic uint64_t calls; /* so far */
static _Atomic int open;       /* helpers may join the last one */
static pthread_mutex_t one_call = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static size_t started; /* helpers; one_call is held */
static int forks_watched;

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static void work(void) {
    for (size_t i; (i = atomic_fetch_add(&call.next, 1)) < call.pieces;) call.piece(call.what, i);
}

static void *help(void *number) {
    uint64_t seen = 0;
    for (;;) {
        for (int i = 0; i < LOOKS && atomic_load(&calls) == seen; i++) pause_briefly();
        if (atomic_load(&calls) == seen) {
            pthread_mutex_lock(&lock);
            atomic_fetch_add(&sleeping, 1);
            while (atomic_load(&calls) == seen) pthread_cond_wait(&more, &lock);
            atomic_fetch_sub(&sleeping, 1);
            pthread_mutex_unlock(&lock);
        }
        atomic_fetch_add(&inside, 1); /* before looking whether it is open: either the caller sees this, or this sees it closed */
        seen = atomic_load(&calls);
        if (atomic_load(&open) && (size_t)(uintptr_t)number < call.helpers) work();
        atomic_fetch_sub(&inside, 1);
    }
    return NULL;
}

/* In a forked child: its parent's helpers are not there, and what they held never comes back. */
static void forget(void) {
    started = 0;
    atomic_store(&inside, 0);
    atomic_store(&sleeping, 0);
    atomic_store(&open, 0);
    one_call = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    more = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

static void start(size_t helpers) {
    if (!forks_watched) forks_watched = pthread_atfork(NULL, NULL, forget) == 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (; started < helpers; started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(uintptr_t)started)) break; /* fewer help then */
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void ctx_pool_run(void (*piece)(void *what, size_t i), void *what, size_t pieces, size_t threads) {
    size_t helpers = threads > 1 ? threads - 1 : 0;
    if (helpers > MOST) helpers = MOST;
    if (helpers && pieces > 1 && pthread_mutex_trylock(&one_call) == 0) {
        if (started < helpers) start(helpers);
        call.piece = piece, call.what = what, call.pieces = pieces, call.helpers = helpers;
        atomic_store(&call.next, 0);
        atomic_store(&open, 1);
        atomic_fetch_add(&calls, 1);
        if (atomic_load(&sleeping)) {
            pthread_mutex_lock(&lock);
            pthread_cond_broadcast(&more);
            pthread_mutex_unlock(&lock);
        }
        work();
        atomic_store(&open, 0);
        for (int looks = 0; atomic_load(&inside); looks++) looks < LOOKS ? pause_briefly() : (void)sched_yield();
        pthread_mutex_unlock(&one_call);
    } else {
        for (size_t i = 0; i < pieces; i++) piece(what, i);
    }
}
