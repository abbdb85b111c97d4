/* An allocator of device memory with fences, for PyTorch (see fences.py).

   Every allocation is at the end of its own mapping; the addresses after it are never mapped.
   A freed block is unmapped when its stream has finished with it, and its addresses are never
   reused. Blocks that were allocated during a graph capture stay. */

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long long address;
typedef struct { int type, id; } location_t;
typedef struct {
    int type, handle_types;
    location_t location;
    void *windows;
    unsigned char flags[8];
} properties;
typedef struct { location_t location; int flags; } access;

/* the driver functions in use, by their own names */
#define CALLS(X)                                                                                   \
    X(cuCtxGetCurrent, (void **))                                                                  \
    X(cuCtxSetCurrent, (void *))                                                                   \
    X(cuDevicePrimaryCtxRetain, (void **, int))                                                    \
    X(cuMemAddressReserve, (address *, size_t, size_t, address, unsigned long long))               \
    X(cuMemCreate, (unsigned long long *, size_t, const properties *, unsigned long long))         \
    X(cuMemMap, (address, size_t, size_t, unsigned long long, unsigned long long))                 \
    X(cuMemSetAccess, (address, size_t, const access *, size_t))                                   \
    X(cuMemUnmap, (address, size_t))                                                               \
    X(cuMemRelease, (unsigned long long))                                                          \
    X(cuMemsetD8Async, (address, unsigned char, size_t, void *))                                   \
    X(cuStreamIsCapturing, (void *, int *))                                                        \
    X(cuStreamSynchronize, (void *))

#define DECLARE(name, parameters) static int(*name) parameters;
CALLS(DECLARE)

enum { PAGE = 2 << 20, ALIGNMENT = 16, BUCKETS = 1 << 16, MOST_FREED = 64 };

typedef struct block {
    struct block *next;
    address begin, mapped;
    size_t size;
    unsigned long long handle;
    void *stream;
    int kept;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks[BUCKETS], *freed;
static int num_freed;
/* numbers of allocations, of unmapped blocks, and of blocks that stay because graphs read them */
long long looseleaf_fenced[3];

static void check(int error, const char *action) {
    if (error) {
        fprintf(stderr, "fences: %s failed with error %d\n", action, error);
        fflush(stderr);
        abort();
    }
}

static void load(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) check(-1, "to load libcuda.so.1");
#define FIND(name, parameters)                                                                     \
    if (!(*(void **)&name = dlsym(driver, #name))) check(-1, "to find " #name);
    CALLS(FIND)
}

static int is_capturing(void *stream) {
    int status = 0;
    return cuStreamIsCapturing(stream, &status) != 0 || status != 0;
}

/* unmaps freed blocks if all their streams have finished; the caller holds the lock */
static void unmap_freed(void) {
    for (block *entry = freed; entry; entry = entry->next)
        if (is_capturing(entry->stream)) return;
    void *previous = (void *)-1;
    for (block *entry = freed; entry; entry = entry->next) {
        if (entry->stream != previous && cuStreamSynchronize(entry->stream)) return;
        previous = entry->stream;
    }
    while (freed) {
        block *entry = freed;
        freed = entry->next;
        check(cuMemUnmap(entry->mapped, entry->size), "to unmap");
        check(cuMemRelease(entry->handle), "to release");
        looseleaf_fenced[1]++;
        free(entry);
    }
    num_freed = 0;
}

void *looseleaf_alloc(ptrdiff_t size, int device, void *stream) {
    if (size <= 0) return NULL;
    pthread_mutex_lock(&lock);
    if (!cuMemMap) load();
    void *context = NULL;
    cuCtxGetCurrent(&context);
    if (!context) {
        check(cuDevicePrimaryCtxRetain(&context, device), "to take the context");
        check(cuCtxSetCurrent(context), "to set the context");
    }
    block *new_block = calloc(1, sizeof(block));
    size_t exact = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    new_block->size = (exact + PAGE - 1) / PAGE * PAGE;
    new_block->stream = stream;
    new_block->kept = is_capturing(stream);
    properties kind = {.type = 1, .location = {1, device}};
    access read_write = {{1, device}, 3};
    address reserved;
    check(cuMemAddressReserve(&reserved, new_block->size + 2 * PAGE, PAGE, 0, 0), "to reserve");
    new_block->mapped = reserved + PAGE;
    check(cuMemCreate(&new_block->handle, new_block->size, &kind, 0), "to take memory");
    check(cuMemMap(new_block->mapped, new_block->size, 0, new_block->handle, 0), "to map");
    check(cuMemSetAccess(new_block->mapped, new_block->size, &read_write, 1), "to allow access");
    new_block->begin = new_block->mapped + new_block->size - exact;
    /* values that are invalid as page, row and weight */
    check(cuMemsetD8Async(new_block->mapped, 0x7f, new_block->size, stream), "to fill");
    block **bucket = &blocks[new_block->begin / PAGE % BUCKETS];
    new_block->next = *bucket;
    *bucket = new_block;
    looseleaf_fenced[0]++;
    looseleaf_fenced[2] += new_block->kept;
    pthread_mutex_unlock(&lock);
    return (void *)new_block->begin;
}

void looseleaf_free(void *pointer, ptrdiff_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    address begin = (address)pointer;
    pthread_mutex_lock(&lock);
    block **at = &blocks[begin / PAGE % BUCKETS];
    while (*at && (*at)->begin != begin) at = &(*at)->next;
    block *entry = *at;
    if (entry && !entry->kept) {
        *at = entry->next;
        entry->next = freed;
        freed = entry;
        if (++num_freed >= MOST_FREED) unmap_freed();
    }
    pthread_mutex_unlock(&lock);
}
