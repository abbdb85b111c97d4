/* A crew of threads that is always there, and the host's part of a step that it does.

   A parallel region would find its threads again at every call, and only on the thread that made
   them. Here whoever calls works too: Python, or a thread that listens to what a device writes. Threads that found
   nothing to do look on for a while, for the next layer is not far, and then sleep. Nothing here
   knows Python, vectors or CUDA. */

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
    int64_t patience; /* nanoseconds of looking before sleep */
    pthread_mutex_t lock;
    pthread_cond_t called;
    int64_t threads;
    pthread_t *others;
    struct Bell *bell;
    pthread_t listener;
} Crew;

/* Some units over one task, each for any thread. */
typedef struct {
    Unit unit;
    void *task;
    int64_t total;
} Part;

/* What the device waits for in one layer: states are emptied, then the parts fill them in. */
typedef struct {
    Crew *crew;
    const Part *parts;
    int64_t num_parts;
    float *lse;
    int64_t num_lse;
    int64_t nanoseconds; /* how long it took, summed over calls */
} Layer;

/* Where a device rings: it writes the layer whose queries are there, and waits until it is done. Both
   lie in memory that both see, apart from each other. */
typedef struct Bell {
    _Atomic(Layer *) rung;
    char between[56];
    _Atomic uint32_t done;
} Bell;

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

/* Do units of run `number` until none is left. A unit is taken by moving the ticket on, which fails
   once the run is closed: so what was read of it is the run's. */
static void work(Crew *crew, uint32_t number) {
    for (;;) {
        uint64_t ticket = atomic_load(&crew->ticket);
        int64_t unit = (int64_t)(uint32_t)ticket;
        if ((uint32_t)(ticket >> 32) != number || unit >= crew->total) return;
        if (!atomic_compare_exchange_weak(&crew->ticket, &ticket, ticket + 1)) continue;
        crew->unit(crew->task, unit);
        atomic_fetch_add(&crew->finished, 1);
    }
}

static uint32_t await_run(Crew *crew, uint32_t last) {
    int64_t until = now() + crew->patience;
    for (int64_t looks = 1;; looks++) {
        uint32_t number = (uint32_t)(atomic_load(&crew->ticket) >> 32);
        if (number != last || atomic_load(&crew->stopped)) return number;
        pause_briefly();
        if (looks % 64 == 0 && now() > until) break;
    }
    pthread_mutex_lock(&crew->lock);
    atomic_fetch_add(&crew->sleepers, 1);
    while ((uint32_t)(atomic_load(&crew->ticket) >> 32) == last && !atomic_load(&crew->stopped))
        pthread_cond_wait(&crew->called, &crew->lock);
    atomic_fetch_sub(&crew->sleepers, 1);
    pthread_mutex_unlock(&crew->lock);
    return (uint32_t)(atomic_load(&crew->ticket) >> 32);
}

static void *live(void *arg) {
    Crew *crew = arg;
    uint32_t last = 0;
    while (!atomic_load(&crew->stopped)) {
        last = await_run(crew, last);
        work(crew, last);
    }
    return NULL;
}

static void wake(Crew *crew) {
    if (!atomic_load(&crew->sleepers)) return;
    pthread_mutex_lock(&crew->lock);
    pthread_cond_broadcast(&crew->called);
    pthread_mutex_unlock(&crew->lock);
}

/* All units of a part; one call at a time. */
static void run_part(Crew *crew, const Part *part) {
    if (!part->total) return;
    uint32_t number = (uint32_t)(atomic_load(&crew->ticket) >> 32) + 2;
    /* closed while it changes: who still holds a ticket of the run before must not take a unit of this one */
    atomic_store(&crew->ticket, (uint64_t)(number - 1) << 32 | UINT32_MAX);
    crew->unit = part->unit;
    crew->task = part->task;
    crew->total = part->total;
    atomic_store(&crew->finished, 0);
    atomic_store(&crew->ticket, (uint64_t)number << 32);
    wake(crew);
    work(crew, number);
    for (int64_t looks = 1; atomic_load(&crew->finished) < part->total; looks++) {
        pause_briefly();
        if (looks % 1024 == 0) sched_yield();
    }
}

/* The host's part of a layer. */
void looseleaf_run_layer(void *arg) {
    Layer *layer = arg;
    int64_t begun = now();
    for (int64_t n = 0; n < layer->num_lse; n++) layer->lse[n] = -INFINITY;
    for (int64_t n = 0; n < layer->num_parts; n++) run_part(layer->crew, &layer->parts[n]);
    layer->nanoseconds += now() - begun;
}

/* Calls for a device. After a while of quiet it naps, for a little of the time that it was quiet. */
static void *listen(void *arg) {
    Crew *crew = arg;
    int64_t heard = now();
    for (int64_t looks = 1; !atomic_load(&crew->stopped); looks++) {
        Layer *layer = atomic_load(&crew->bell->rung);
        if (layer) {
            atomic_store(&crew->bell->rung, NULL);
            looseleaf_run_layer(layer);
            atomic_store(&crew->bell->done, 1);
            heard = now();
        } else {
            pause_briefly();
            int64_t quiet = looks % 64 ? 0 : now() - heard;
            struct timespec nap = {0, quiet / 64 < LONGEST_NAP ? quiet / 64 : LONGEST_NAP};
            /* a step follows the last sooner than that */
            if (quiet > 16 * crew->patience) nanosleep(&nap, NULL);
        }
    }
    return NULL;
}

/* Begin to listen to `bell`, which is all zeros; 0 if the system gives no thread. */
int32_t looseleaf_listen(Crew *crew, Bell *bell) {
    crew->bell = bell;
    if (pthread_create(&crew->listener, NULL, listen, crew)) crew->bell = NULL;
    return crew->bell != NULL;
}

/* NULL if there is no memory; fewer threads than asked for where the system gives no more. */
Crew *looseleaf_begin_crew(int64_t threads, int64_t patience) {
    Crew *crew = calloc(1, sizeof(Crew));
    if (!crew) return NULL;
    crew->others = calloc((size_t)threads, sizeof(pthread_t));
    if (!crew->others) {
        free(crew);
        return NULL;
    }
    crew->patience = patience;
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->called, NULL);
    while (crew->threads < threads - 1) {
        if (pthread_create(&crew->others[crew->threads], NULL, live, crew)) break;
        crew->threads++;
    }
    return crew;
}

void looseleaf_end_crew(Crew *crew) {
    pthread_mutex_lock(&crew->lock);
    atomic_store(&crew->stopped, 1);
    pthread_cond_broadcast(&crew->called);
    pthread_mutex_unlock(&crew->lock);
    if (crew->bell) pthread_join(crew->listener, NULL);
    for (int64_t n = 0; n < crew->threads; n++) pthread_join(crew->others[n], NULL);
    pthread_cond_destroy(&crew->called);
    pthread_mutex_destroy(&crew->lock);
    free(crew->others);
    free(crew);
}
