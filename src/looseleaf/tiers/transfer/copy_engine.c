/* Copies from pinned memory to the pages of a GPU, asked for by a thread that knows no Python.

   An order is some documents on their way, in parcels: layers of some of them that go together. Its
   first bytes are asked for at once, the rest a few parcels ahead of the device, or as soon as
   somebody waits for them. What is packed goes through a ring of memory on the device, where a
   kernel unpacks it. Nothing here is linked to CUDA: its calls are given, so that a test may play
   the device. */

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __APPLE__ /* conditions know no other clock there */
#define CLOCK CLOCK_REALTIME
#else
#define CLOCK CLOCK_MONOTONIC
#endif

enum { NOT_READY = 600, TO_DEVICE = 1, NO_ROOM = -2, ENDED = -1, GLANCE = 30000 /* nanoseconds */ };

/* Of the CUDA runtime, but for the last, which is the driver's; each returns 0 if it went well. */
typedef struct {
    int (*set_device)(int device);
    int (*copy)(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                int kind, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*query)(void *event);
    int (*launch)(void *kernel, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, void *stream, void **arguments, void **more);
} Calls;

/* A run of pages, and where the layers that belong there lie, one behind the other. */
typedef struct {
    int64_t first_page, num_pages;
    char *address;
    int32_t packed;
    int32_t wanted; /* with the lock held */
} Document;

typedef struct {
    int64_t first_layer, num_layers, first_document, num_documents;
} Parcel;

typedef struct Order {
    Document *documents;
    const Parcel *parcels;
    void **events;           /* of each parcel: when it is there */
    void *fence;             /* what comes before anything is written, or NULL */
    int64_t num_parcels;
    int64_t at_once;         /* bytes that are asked for without looking at the device */
    int64_t ahead;           /* parcels that may be on their way when the next is asked for */
    _Atomic int64_t asked;   /* parcels */
    _Atomic int64_t failed;  /* what the device said, 0 for nothing */
    _Atomic int64_t ended;   /* no more is asked for; from then on it is not looked at any more */
    int64_t bytes;           /* of what was asked for and wanted */
    int64_t passed;          /* by all of it, wanted or not */
    int64_t come;            /* parcels that are known to be there */
    int64_t needed;          /* the last layer that somebody waited for */
    int64_t fenced;          /* whether the stream of copies has waited for the fence */
    struct Order *next;
} Order;

/* A stretch of the ring, and when it is unpacked. */
typedef struct {
    int64_t begin, end;
    void *event;
} Stretch;

typedef struct {
    /* given */
    Calls calls;
    int64_t device;
    void *copies, *unpacking; /* streams */
    char *pages;
    int64_t page, plane, pool_pages;  /* bytes of a page's K, and from K to V; how many pages */
    char *ring;
    int64_t ring_bytes, packed_page, alignment;
    void *kernel;
    int64_t blocks, threads, shared;  /* programs a packed page's K, and what each has */
    void *ready;                      /* an event */
    Stretch *stretches;
    int64_t num_stretches;
    /* its own */
    int64_t next, oldest, used;       /* where the ring goes on; which stretches are in use */
    pthread_mutex_t lock;
    pthread_cond_t called, told;
    pthread_t thread;
    Order *orders;
    int stopped;
} Courier;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static struct timespec after(int64_t nanoseconds) {
    struct timespec t;
    clock_gettime(CLOCK, &t);
    nanoseconds += t.tv_nsec;
    t.tv_sec += nanoseconds / 1000000000;
    t.tv_nsec = nanoseconds % 1000000000;
    return t;
}

static int write_run(Courier *c, const Document *one, const Parcel *parcel) {
    int64_t width = one->num_pages * c->page;
    return c->calls.copy(c->pages + 2 * parcel->first_layer * c->plane + one->first_page * c->page, (size_t)c->plane,
                         one->address + 2 * parcel->first_layer * width, (size_t)width, (size_t)width,
                         (size_t)(2 * parcel->num_layers), TO_DEVICE, c->copies);
}

/* The next `size` bytes of the ring, which the stream of copies may write to from now on. Stretches are
   unpacked in their order, so of those in the way the last is waited for. */
static int take(Courier *c, int64_t size, Stretch **taken) {
    int64_t begin = c->next + size <= c->ring_bytes ? c->next : 0;
    int64_t end = least(c->ring_bytes, begin + (size + c->alignment - 1) / c->alignment * c->alignment);
    int64_t going = c->used == c->num_stretches;
    if (size > c->ring_bytes) return NO_ROOM;
    for (int64_t n = 0; n < c->used; n++) {
        Stretch *other = &c->stretches[(c->oldest + n) % c->num_stretches];
        if (other->begin < end && begin < other->end) going = n + 1;
    }
    if (going) {
        Stretch *last = &c->stretches[(c->oldest + going - 1) % c->num_stretches];
        int error = c->calls.wait(c->copies, last->event, 0);
        if (error) return error;
        c->oldest = (c->oldest + going) % c->num_stretches;
        c->used -= going;
    }
    *taken = &c->stretches[(c->oldest + c->used) % c->num_stretches];
    c->used++;
    (*taken)->begin = begin;
    (*taken)->end = end;
    c->next = end;
    return 0;
}

static int unpack(Courier *c, char *from, int64_t page, int64_t num_pages, const Parcel *parcel) {
    int32_t first_page = (int32_t)page, first_layer = (int32_t)parcel->first_layer;
    int32_t pool_pages = (int32_t)c->pool_pages;
    void *nothing = NULL;
    /* packed, its words, no list of pages; what stands behind is for versions of the compiler that ask for
       memory of their own, of which this kernel needs none */
    void *arguments[] = {&from,        &from,       &from,    &c->pages, &first_page,
                         &first_layer, &pool_pages, &nothing, &nothing,  &nothing};
    return c->calls.launch(c->kernel, (unsigned)(num_pages * c->blocks), (unsigned)(2 * parcel->num_layers), 1,
                           (unsigned)c->threads, 1, 1, (unsigned)c->shared, c->unpacking, arguments, NULL);
}

/* Documents whose pages are one run, in its order. */
static int write_packed(Courier *c, Document **run, int64_t count, const Parcel *parcel) {
    int64_t first = run[0]->first_page, last = run[count - 1]->first_page + run[count - 1]->num_pages;
    int64_t pitch = (last - first) * c->packed_page, planes = 2 * parcel->num_layers;
    Stretch *taken;
    int error = take(c, planes * pitch, &taken);
    if (error) return error;
    char *at = c->ring + taken->begin;
    for (int64_t n = 0; n < count && !error; n++) {
        int64_t width = run[n]->num_pages * c->packed_page;
        error = c->calls.copy(at + (run[n]->first_page - first) * c->packed_page, (size_t)pitch,
                              run[n]->address + 2 * parcel->first_layer * width, (size_t)width, (size_t)width,
                              (size_t)planes, TO_DEVICE, c->copies);
    }
    if (!error) error = c->calls.record(c->ready, c->copies);
    if (!error) error = c->calls.wait(c->unpacking, c->ready, 0);
    if (!error) error = unpack(c, at, first, last - first, parcel);
    /* also of what went wrong: the stretch is free behind it */
    int end = c->calls.record(taken->event, c->unpacking);
    return error ? error : end;
}

/* How many of `count` packed documents, by their pages, go through the ring together. */
static int64_t together(const Courier *c, Document **packed, int64_t count, const Parcel *parcel) {
    int64_t n = 1;
    for (; n < count; n++) {
        int64_t stop = packed[n]->first_page + packed[n]->num_pages;
        int64_t size = 2 * parcel->num_layers * (stop - packed[0]->first_page) * c->packed_page;
        int neighbours = packed[n - 1]->first_page + packed[n - 1]->num_pages == packed[n]->first_page;
        /* two at a time are in the ring: one is copied, one unpacked */
        if (!neighbours || 2 * size > c->ring_bytes) break;
    }
    return n;
}

static int by_page(const void *a, const void *b) {
    int64_t x = (*(Document *const *)a)->first_page, y = (*(Document *const *)b)->first_page;
    return (x > y) - (x < y);
}

/* Ask for a parcel of an order: plain documents first, since what is unpacked is behind all copies. */
static int send(Courier *c, Order *order, const Parcel *parcel) {
    int64_t packed = 0, layers = parcel->num_layers;
    Document *found[parcel->num_documents];
    int error = 0;
    if (order->asked == 0 && order->fence) error = c->calls.wait(c->unpacking, order->fence, 0);
    for (int64_t n = 0; n < parcel->num_documents && !error; n++) {
        Document *one = &order->documents[parcel->first_document + n];
        int64_t bytes = 2 * layers * one->num_pages * (one->packed ? c->packed_page : c->page);
        order->passed += bytes;
        if (!one->wanted) continue;
        order->bytes += bytes;
        if (one->packed) {
            found[packed++] = one;
            continue;
        }
        /* the first plain document may be in any parcel: those before it may be packed or not wanted */
        if (order->fence && !order->fenced) error = c->calls.wait(c->copies, order->fence, 0);
        order->fenced = 1;
        if (!error) error = write_run(c, one, parcel);
    }
    qsort(found, (size_t)packed, sizeof(*found), by_page);
    for (int64_t n = 0, count; n < packed && !error; n += count) {
        count = together(c, found + n, packed - n, parcel);
        error = write_packed(c, found + n, count, parcel);
    }
    if (!error && !packed) {
        /* the events of an order come one behind the other */
        error = c->calls.record(c->ready, c->copies);
        if (!error) error = c->calls.wait(c->unpacking, c->ready, 0);
    }
    return error ? error : c->calls.record(order->events[order->asked], c->unpacking);
}

/* Whether the next parcel of an order is to be asked for now. */
static int is_due(Courier *c, Order *order) {
    const Parcel *parcel = &order->parcels[order->asked];
    if (order->passed < order->at_once || parcel->first_layer <= order->needed) return 1;
    int wanted = 0;
    for (int64_t n = 0; n < parcel->num_documents; n++) wanted |= order->documents[parcel->first_document + n].wanted;
    if (!wanted) return 1;
    while (order->come < order->asked && c->calls.query(order->events[order->come]) != NOT_READY) order->come++;
    return order->asked - order->come <= order->ahead;
}

/* Ask for a parcel of every order for which one is due; whether there was any. */
static int ask(Courier *c) {
    int any = 0;
    for (Order **at = &c->orders; *at;) {
        Order *order = *at;
        if (!is_due(c, order)) {
            at = &order->next;
            continue;
        }
        order->failed = send(c, order, &order->parcels[order->asked]);
        if (!order->failed) order->asked++;
        int ends = order->failed || order->asked == order->num_parcels;
        if (ends) *at = order->next;
        else at = &order->next;
        if (ends) atomic_store(&order->ended, 1);
        pthread_cond_broadcast(&c->told);
        any = 1;
    }
    return any;
}

static void *live(void *arg) {
    Courier *c = arg;
    c->calls.set_device((int)c->device);
    pthread_mutex_lock(&c->lock);
    while (!c->stopped) {
        if (!c->orders) {
            pthread_cond_wait(&c->called, &c->lock);
        } else if (!ask(c)) {
            struct timespec until = after(GLANCE);
            pthread_cond_timedwait(&c->called, &c->lock, &until);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

int64_t looseleaf_courier_bytes(void) { return (int64_t)sizeof(Courier); }

/* Begin with what is given, in memory that is all zeros and stays as long as anybody calls; 0 if the system
   gives no thread. */
int32_t looseleaf_begin_courier(Courier *c, const void *given) {
    memcpy(c, given, offsetof(Courier, next));
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
#ifndef __APPLE__
    pthread_condattr_setclock(&monotonic, CLOCK);
#endif
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->called, &monotonic);
    pthread_cond_init(&c->told, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return !pthread_create(&c->thread, NULL, live, c);
}

/* What is not asked for yet never is. Others may still wait, and ask for what they get no more. */
void looseleaf_end_courier(Courier *c) {
    pthread_mutex_lock(&c->lock);
    c->stopped = 1;
    for (Order *order = c->orders, *next; order; order = next) {
        next = order->next;
        order->failed = ENDED;
        atomic_store(&order->ended, 1);
    }
    c->orders = NULL;
    pthread_cond_broadcast(&c->called);
    pthread_cond_broadcast(&c->told);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
}

/* Take an order on; what it points to stays until it has ended. */
void looseleaf_order(Courier *c, Order *order) {
    pthread_mutex_lock(&c->lock);
    Order **last = &c->orders;
    while (*last) last = &(*last)->next;
    order->next = NULL;
    if (c->stopped) {
        order->failed = ENDED;
        order->ended = 1;
    } else {
        *last = order;
    }
    pthread_mutex_unlock(&c->lock);
    /* behind the lock: who wakes wants it */
    pthread_cond_signal(&c->called);
}

/* Wait until a parcel is asked for or the order has ended, for `nanoseconds` at most, and have those up to
   `layer` not wait for the device; whether it is asked for. */
int32_t looseleaf_await(Courier *c, Order *order, int64_t parcel, int64_t layer, int64_t nanoseconds) {
    struct timespec until = after(nanoseconds);
    pthread_mutex_lock(&c->lock);
    if (order->needed < layer) {
        order->needed = layer;
        pthread_cond_signal(&c->called);
    }
    while (order->asked <= parcel && !order->ended && !pthread_cond_timedwait(&c->told, &c->lock, &until)) {}
    int32_t asked = order->asked > parcel;
    pthread_mutex_unlock(&c->lock);
    return asked;
}

/* No more of a document is asked for. */
void looseleaf_drop(Courier *c, Document *one) {
    pthread_mutex_lock(&c->lock);
    one->wanted = 0;
    pthread_cond_signal(&c->called);
    pthread_mutex_unlock(&c->lock);
}
