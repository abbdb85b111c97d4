/* A persistent thread pool for the host's part of a step.

   OpenMP would create a second pool for a second calling thread. Here any calling thread takes part:
   Python's, or the listener thread, which polls a word that a device writes. Idle threads poll before
   they sleep, because the next layer follows soon. This file is independent of Python, vectors and
   CUDA. */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { LONGEST_NAP = 2000000 }; /* nanoseconds */

typedef void (*Unit)(void *task, int64_t number);

typedef struct {
    _Atomic uint64_t ticket; /* the run's number, then its next unit: 32 bits each */
    _Atomic int64_t finished;
    _Atomic int32_t sleepers;
    _Atomic int32_t stopped;
    Unit unit;
    void *task;
    int64_t total;
    int64_t patience; /* nanoseconds of polling before sleep */
    pthread_mutex_t lock;
    pthread_cond_t called;
    int64_t threads;
    pthread_t *workers;
    struct StreamSignal *signal;
    pthread_t listener;
} HostThreads;

/* `total` calls of `unit` for one task, on any threads. */
typedef struct {
    Unit unit;
    void *task;
    int64_t total;
} Part;

/* The work of one layer: sets `num_lse` numbers to -inf, then runs the parts in order. */
typedef struct {
    HostThreads *pool;
    const Part *parts;
    int64_t num_parts;
    float *lse;
    int64_t num_lse;
    int64_t nanoseconds; /* duration of all runs */
} Layer;

/* Two words shared with a device, on separate cache lines: the device writes the address of a layer
   once its queries are copied, and waits for the reply 1. */
typedef struct StreamSignal {
    _Atomic(Layer *) request;
    char padding[56];
    _Atomic uint32_t reply;
} StreamSignal;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run units of run `number` until none remains. Taking a unit advances the ticket, which fails once
   the run is closed; so the unit, task and total that were read belong to the run. */
static void work(HostThreads *pool, uint32_t number) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool->ticket);
        int64_t unit = (int64_t)(uint32_t)ticket;
        if ((uint32_t)(ticket >> 32) != number || unit >= pool->total) return;
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1)) continue;
        pool->unit(pool->task, unit);
        atomic_fetch_add(&pool->finished, 1);
    }
}

static uint32_t await_run(HostThreads *pool, uint32_t last) {
    int64_t until = now() + pool->patience;
    for (int64_t polls = 1;; polls++) {
        uint32_t number = (uint32_t)(atomic_load(&pool->ticket) >> 32);
        if (number != last || atomic_load(&pool->stopped)) return number;
        pause_briefly();
        if (polls % 64 == 0 && now() > until) break;
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while ((uint32_t)(atomic_load(&pool->ticket) >> 32) == last && !atomic_load(&pool->stopped))
        pthread_cond_wait(&pool->called, &pool->lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
    return (uint32_t)(atomic_load(&pool->ticket) >> 32);
}

static void *live(void *arg) {
    HostThreads *pool = arg;
    uint32_t last = 0;
    while (!atomic_load(&pool->stopped)) {
        last = await_run(pool, last);
        work(pool, last);
    }
    return NULL;
}

static void wake(HostThreads *pool) {
    if (!atomic_load(&pool->sleepers)) return;
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(&pool->called);
    pthread_mutex_unlock(&pool->lock);
}

/* Run all units of a part. Calls must not overlap. */
static void run_part(HostThreads *pool, const Part *part) {
    if (!part->total) return;
    uint32_t number = (uint32_t)(atomic_load(&pool->ticket) >> 32) + 2;
    /* closed during the change: a thread with a ticket of the last run must not take a unit of this one */
    atomic_store(&pool->ticket, (uint64_t)(number - 1) << 32 | UINT32_MAX);
    pool->unit = part->unit;
    pool->task = part->task;
    pool->total = part->total;
    atomic_store(&pool->finished, 0);
    atomic_store(&pool->ticket, (uint64_t)number << 32);
    wake(pool);
    work(pool, number);
    for (int64_t polls = 1; atomic_load(&pool->finished) < part->total; polls++) {
        pause_briefly();
        if (polls % 1024 == 0) sched_yield();
    }
}

/* Run a layer. */
void looseleaf_run_layer(void *arg) {
    Layer *layer = arg;
    int64_t start = now();
    for (int64_t n = 0; n < layer->num_lse; n++) layer->lse[n] = -INFINITY;
    for (int64_t n = 0; n < layer->num_parts; n++) run_part(layer->pool, &layer->parts[n]);
    layer->nanoseconds += now() - start;
}

/* Serve the requests of a device. When idle, sleeps for a small share of the idle time. */
static void *listen(void *arg) {
    HostThreads *pool = arg;
    int64_t last = now();
    for (int64_t polls = 1; !atomic_load(&pool->stopped); polls++) {
        Layer *layer = atomic_load(&pool->signal->request);
        if (layer) {
            atomic_store(&pool->signal->request, NULL);
            looseleaf_run_layer(layer);
            atomic_store(&pool->signal->reply, 1);
            last = now();
        } else {
            pause_briefly();
            int64_t idle = polls % 64 ? 0 : now() - last;
            struct timespec nap = {0, idle / 64 < LONGEST_NAP ? idle / 64 : LONGEST_NAP};
            /* longer than the pause between two steps */
            if (idle > 16 * pool->patience) nanosleep(&nap, NULL);
        }
    }
    return NULL;
}

/* Start the listener of `signal`, which is zeroed; 0 if no thread can be started. */
int32_t looseleaf_listen(HostThreads *pool, StreamSignal *signal) {
    pool->signal = signal;
    if (pthread_create(&pool->listener, NULL, listen, pool)) pool->signal = NULL;
    return pool->signal != NULL;
}

/* NULL without memory; fewer than `threads` if the system refuses to start more. */
HostThreads *looseleaf_begin_threads(int64_t threads, int64_t patience) {
    HostThreads *pool = calloc(1, sizeof(HostThreads));
    if (!pool) return NULL;
    pool->workers = calloc((size_t)threads, sizeof(pthread_t));
    if (!pool->workers) {
        free(pool);
        return NULL;
    }
    pool->patience = patience;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->called, NULL);
    while (pool->threads < threads - 1) {
        if (pthread_create(&pool->workers[pool->threads], NULL, live, pool)) break;
        pool->threads++;
    }
    return pool;
}

void looseleaf_end_threads(HostThreads *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->stopped, 1);
    pthread_cond_broadcast(&pool->called);
    pthread_mutex_unlock(&pool->lock);
    if (pool->signal) pthread_join(pool->listener, NULL);
    for (int64_t n = 0; n < pool->threads; n++) pthread_join(pool->workers[n], NULL);
    pthread_cond_destroy(&pool->called);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}
