/* The copy engine: copies from pinned memory to the pages of a GPU, submitted by a thread without Python.

   A transfer is a set of documents, split into batches: layers of some documents that are copied together.
   The thread submits the first bytes immediately. Later batches follow a few ahead of the device, or as soon
   as a caller waits for them. Packed bytes pass through a ring buffer on the device, where a kernel unpacks
   them. This file links no CUDA library: the setup holds the functions, so that tests can simulate the
   device. */

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef __APPLE__ /* its condition variables support no other clock */
#define CLOCK CLOCK_REALTIME
#else
#define CLOCK CLOCK_MONOTONIC
#endif

enum { NOT_READY = 600, TO_DEVICE = 1, NO_ROOM = -2, ENDED = -1, POLL = 30000 /* nanoseconds */ };

/* Functions of the CUDA runtime, and of the driver (launch). Each returns 0 on success. */
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

/* A run of target pages, and the address of the first layer; layers are contiguous. */
typedef struct {
    int64_t first_page, num_pages;
    char *address;
    int32_t packed;
    int32_t active; /* guarded by the lock */
} Document;

typedef struct {
    int64_t first_layer, num_layers, first_document, num_documents;
} Batch;

typedef struct Transfer {
    Document *documents;
    const Batch *batches;
    void **events;             /* arrival of each batch */
    void *fence;               /* precedes all writes, or NULL */
    int64_t num_batches;
    int64_t immediate;         /* bytes submitted without polling the device */
    int64_t in_flight;         /* batches that may be in flight when the next is submitted */
    _Atomic int64_t submitted; /* batches */
    _Atomic int64_t error;     /* of the device, 0 for none */
    _Atomic int64_t finished;  /* the thread reads the transfer no more */
    int64_t active_bytes;      /* submitted */
    int64_t all_bytes;         /* submitted or dropped */
    int64_t arrived;           /* batches known to have arrived */
    int64_t needed_layer;      /* the last layer that a caller waited for */
    int64_t fenced;            /* whether the copy stream waits for the fence */
    struct Transfer *next;
} Transfer;

/* A region of the ring, and the event of its unpacking. */
typedef struct {
    int64_t start, end;
    void *event;
} Region;

typedef struct {
    /* setup */
    Calls calls;
    int64_t device;
    void *copy_stream, *unpack_stream;
    char *pages;
    int64_t page, plane, planes; /* bytes of a page's K, bytes from K to V, planes of a layer */
    int64_t pool_pages;
    char *ring;
    int64_t ring_bytes, packed_page, alignment;
    void *kernel;
    int64_t blocks, threads, shared; /* thread blocks per packed page's K, and the size of each */
    void *copied;                    /* event */
    Region *regions;
    int64_t num_regions;
    /* state */
    int64_t next, oldest, used; /* the next ring offset; the regions in use */
    pthread_mutex_t lock;
    pthread_cond_t work, progress;
    pthread_t thread;
    Transfer *transfers;
    int stopped;
} Engine;

static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

static struct timespec deadline(int64_t nanoseconds) {
    struct timespec t;
    clock_gettime(CLOCK, &t);
    nanoseconds += t.tv_nsec;
    t.tv_sec += nanoseconds / 1000000000;
    t.tv_nsec = nanoseconds % 1000000000;
    return t;
}

static int copy_plain(Engine *e, const Document *document, const Batch *batch) {
    int64_t width = document->num_pages * e->page;
    return e->calls.copy(e->pages + e->planes * batch->first_layer * e->plane + document->first_page * e->page,
                         (size_t)e->plane, document->address + e->planes * batch->first_layer * width, (size_t)width,
                         (size_t)width, (size_t)(e->planes * batch->num_layers), TO_DEVICE, e->copy_stream);
}

/* Allocates `size` bytes of the ring and has the copy stream wait until they are unpacked. Regions are unpacked
   in order, so the last overlapping region covers the others. */
static int allocate(Engine *e, int64_t size, Region **region) {
    int64_t start = e->next + size <= e->ring_bytes ? e->next : 0;
    int64_t end = min_of(e->ring_bytes, start + (size + e->alignment - 1) / e->alignment * e->alignment);
    int64_t reused = e->used == e->num_regions;
    if (size > e->ring_bytes) return NO_ROOM;
    for (int64_t n = 0; n < e->used; n++) {
        Region *other = &e->regions[(e->oldest + n) % e->num_regions];
        if (other->start < end && start < other->end) reused = n + 1;
    }
    if (reused) {
        Region *last = &e->regions[(e->oldest + reused - 1) % e->num_regions];
        int error = e->calls.wait(e->copy_stream, last->event, 0);
        if (error) return error;
        e->oldest = (e->oldest + reused) % e->num_regions;
        e->used -= reused;
    }
    *region = &e->regions[(e->oldest + e->used) % e->num_regions];
    e->used++;
    (*region)->start = start;
    (*region)->end = end;
    e->next = end;
    return 0;
}

static int unpack(Engine *e, char *from, int64_t page, int64_t num_pages, const Batch *batch) {
    int32_t first_page = (int32_t)page, first_plane = (int32_t)(e->planes * batch->first_layer);
    int32_t pool_pages = (int32_t)e->pool_pages;
    void *null = NULL;
    /* packed bytes, the same as words, no page list; the last are scratch pointers of newer compilers, unused */
    void *arguments[] = {&from,        &from,       &from, &e->pages, &first_page,
                         &first_plane, &pool_pages, &null, &null,     &null};
    return e->calls.launch(e->kernel, (unsigned)(num_pages * e->blocks), (unsigned)(e->planes * batch->num_layers), 1,
                           (unsigned)e->threads, 1, 1, (unsigned)e->shared, e->unpack_stream, arguments, NULL);
}

/* Copies and unpacks documents whose pages form one run, in page order. */
static int copy_packed(Engine *e, Document **run, int64_t count, const Batch *batch) {
    int64_t first = run[0]->first_page, last = run[count - 1]->first_page + run[count - 1]->num_pages;
    int64_t pitch = (last - first) * e->packed_page, planes = e->planes * batch->num_layers;
    Region *region;
    int error = allocate(e, planes * pitch, &region);
    if (error) return error;
    char *target = e->ring + region->start;
    for (int64_t n = 0; n < count && !error; n++) {
        int64_t width = run[n]->num_pages * e->packed_page;
        error = e->calls.copy(target + (run[n]->first_page - first) * e->packed_page, (size_t)pitch,
                              run[n]->address + e->planes * batch->first_layer * width, (size_t)width, (size_t)width,
                              (size_t)planes, TO_DEVICE, e->copy_stream);
    }
    if (!error) error = e->calls.record(e->copied, e->copy_stream);
    if (!error) error = e->calls.wait(e->unpack_stream, e->copied, 0);
    if (!error) error = unpack(e, target, first, last - first, batch);
    /* after an error too, because the event frees the region */
    int record_error = e->calls.record(region->event, e->unpack_stream);
    return error ? error : record_error;
}

/* The number of packed documents, sorted by page, that share one region. */
static int64_t group_size(const Engine *e, Document **packed, int64_t count, const Batch *batch) {
    int64_t n = 1;
    for (; n < count; n++) {
        int64_t stop = packed[n]->first_page + packed[n]->num_pages;
        int64_t size = e->planes * batch->num_layers * (stop - packed[0]->first_page) * e->packed_page;
        int adjacent = packed[n - 1]->first_page + packed[n - 1]->num_pages == packed[n]->first_page;
        /* the ring holds two regions: one is copied while the other is unpacked */
        if (!adjacent || 2 * size > e->ring_bytes) break;
    }
    return n;
}

static int by_page(const void *a, const void *b) {
    int64_t x = (*(Document *const *)a)->first_page, y = (*(Document *const *)b)->first_page;
    return (x > y) - (x < y);
}

/* Submits one batch. Plain documents go first, because unpacking follows all copies. */
static int submit_batch(Engine *e, Transfer *transfer, const Batch *batch) {
    int64_t num_packed = 0, layers = batch->num_layers;
    Document *packed[batch->num_documents];
    int error = 0;
    if (transfer->submitted == 0 && transfer->fence) error = e->calls.wait(e->unpack_stream, transfer->fence, 0);
    for (int64_t n = 0; n < batch->num_documents && !error; n++) {
        Document *document = &transfer->documents[batch->first_document + n];
        int64_t bytes = e->planes * layers * document->num_pages * (document->packed ? e->packed_page : e->page);
        transfer->all_bytes += bytes;
        if (!document->active) continue;
        transfer->active_bytes += bytes;
        if (document->packed) {
            packed[num_packed++] = document;
            continue;
        }
        /* the first plain document may be in any batch, so the flag is per transfer */
        if (transfer->fence && !transfer->fenced) error = e->calls.wait(e->copy_stream, transfer->fence, 0);
        transfer->fenced = 1;
        if (!error) error = copy_plain(e, document, batch);
    }
    qsort(packed, (size_t)num_packed, sizeof(*packed), by_page);
    for (int64_t n = 0, count; n < num_packed && !error; n += count) {
        count = group_size(e, packed + n, num_packed - n, batch);
        error = copy_packed(e, packed + n, count, batch);
    }
    if (!error && !num_packed) {
        /* all events are on the unpack stream, so that they complete in order */
        error = e->calls.record(e->copied, e->copy_stream);
        if (!error) error = e->calls.wait(e->unpack_stream, e->copied, 0);
    }
    return error ? error : e->calls.record(transfer->events[transfer->submitted], e->unpack_stream);
}

/* Whether the next batch of a transfer is due. */
static int is_due(Engine *e, Transfer *transfer) {
    const Batch *batch = &transfer->batches[transfer->submitted];
    if (transfer->all_bytes < transfer->immediate || batch->first_layer <= transfer->needed_layer) return 1;
    int active = 0;
    for (int64_t n = 0; n < batch->num_documents; n++)
        active |= transfer->documents[batch->first_document + n].active;
    if (!active) return 1;
    while (transfer->arrived < transfer->submitted &&
           e->calls.query(transfer->events[transfer->arrived]) != NOT_READY)
        transfer->arrived++;
    return transfer->submitted - transfer->arrived <= transfer->in_flight;
}

/* Submits a batch of every transfer that has one due; returns whether any was. */
static int submit_due(Engine *e) {
    int any = 0;
    for (Transfer **link = &e->transfers; *link;) {
        Transfer *transfer = *link;
        if (!is_due(e, transfer)) {
            link = &transfer->next;
            continue;
        }
        transfer->error = submit_batch(e, transfer, &transfer->batches[transfer->submitted]);
        if (!transfer->error) transfer->submitted++;
        int finished = transfer->error || transfer->submitted == transfer->num_batches;
        if (finished) *link = transfer->next;
        else link = &transfer->next;
        if (finished) atomic_store(&transfer->finished, 1);
        pthread_cond_broadcast(&e->progress);
        any = 1;
    }
    return any;
}

static void *run(void *arg) {
    Engine *e = arg;
    e->calls.set_device((int)e->device);
    pthread_mutex_lock(&e->lock);
    while (!e->stopped) {
        if (!e->transfers) {
            pthread_cond_wait(&e->work, &e->lock);
        } else if (!submit_due(e)) {
            struct timespec until = deadline(POLL);
            pthread_cond_timedwait(&e->work, &e->lock, &until);
        }
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

int64_t looseleaf_copy_engine_bytes(void) { return (int64_t)sizeof(Engine); }

/* Starts the thread. `e` is zeroed memory that outlives all callers. Returns 0 if no thread can be started. */
int32_t looseleaf_start_copy_engine(Engine *e, const void *setup) {
    memcpy(e, setup, offsetof(Engine, next));
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
#ifndef __APPLE__
    pthread_condattr_setclock(&monotonic, CLOCK);
#endif
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->work, &monotonic);
    pthread_cond_init(&e->progress, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return !pthread_create(&e->thread, NULL, run, e);
}

/* Ends the thread and fails all transfers that are not finished. Other threads may still wait and submit. */
void looseleaf_end_copy_engine(Engine *e) {
    pthread_mutex_lock(&e->lock);
    e->stopped = 1;
    for (Transfer *transfer = e->transfers, *next; transfer; transfer = next) {
        next = transfer->next;
        transfer->error = ENDED;
        atomic_store(&transfer->finished, 1);
    }
    e->transfers = NULL;
    pthread_cond_broadcast(&e->work);
    pthread_cond_broadcast(&e->progress);
    pthread_mutex_unlock(&e->lock);
    pthread_join(e->thread, NULL);
}

/* Adds a transfer. Its memory stays valid until it is finished. */
void looseleaf_submit(Engine *e, Transfer *transfer) {
    pthread_mutex_lock(&e->lock);
    Transfer **last = &e->transfers;
    while (*last) last = &(*last)->next;
    transfer->next = NULL;
    if (e->stopped) {
        transfer->error = ENDED;
        transfer->finished = 1;
    } else {
        *last = transfer;
    }
    pthread_mutex_unlock(&e->lock);
    /* after the unlock, because the awakened thread takes the lock */
    pthread_cond_signal(&e->work);
}

/* Waits up to `nanoseconds` until a batch is submitted or the transfer is finished. Batches up to `layer` no
   longer wait for the device. Returns whether the batch is submitted. */
int32_t looseleaf_await(Engine *e, Transfer *transfer, int64_t batch, int64_t layer, int64_t nanoseconds) {
    struct timespec until = deadline(nanoseconds);
    pthread_mutex_lock(&e->lock);
    if (transfer->needed_layer < layer) {
        transfer->needed_layer = layer;
        pthread_cond_signal(&e->work);
    }
    while (transfer->submitted <= batch && !transfer->finished &&
           !pthread_cond_timedwait(&e->progress, &e->lock, &until)) {}
    int32_t submitted = transfer->submitted > batch;
    pthread_mutex_unlock(&e->lock);
    return submitted;
}

/* Submits no more of a document. */
void looseleaf_drop(Engine *e, Document *document) {
    pthread_mutex_lock(&e->lock);
    document->active = 0;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
}
