/* An allocator of device memory with fences, for PyTorch (see fences.py).

   Every allocation has a mapping of its own, at whose end it lies, with addresses behind it that
   are never mapped. What is freed is unmapped as soon as its stream has come so far, and its
   addresses are not used again. What is allocated while a graph is captured stays. */

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long long address;
typedef struct { int type, id; } place;
typedef struct {
    int type, handle_types;
    place location;
    void *windows;
    unsigned char flags[8];
} properties;
typedef struct { place location; int flags; } access;

/* of the driver's interface: what is called, under its own names */
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
/* what was done: allocations, blocks unmapped, blocks that stay since graphs read them */
long long looseleaf_fenced[3];

static void check(int error, const char *what) {
    if (error) {
        fprintf(stderr, "fences: %s failed with error %d\n", what, error);
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

/* with the lock held: unmap what was freed, if every stream says that it has come so far */
static void unmap_freed(void) {
    for (block *one = freed; one; one = one->next)
        if (is_capturing(one->stream)) return;
    void *before = (void *)-1;
    for (block *one = freed; one; one = one->next) {
        if (one->stream != before && cuStreamSynchronize(one->stream)) return;
        before = one->stream;
    }
    while (freed) {
        block *one = freed;
        freed = one->next;
        check(cuMemUnmap(one->mapped, one->size), "to unmap");
        check(cuMemRelease(one->handle), "to release");
        looseleaf_fenced[1]++;
        free(one);
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
    block *made = calloc(1, sizeof(block));
    size_t exact = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    made->size = (exact + PAGE - 1) / PAGE * PAGE;
    made->stream = stream;
    made->kept = is_capturing(stream);
    properties kind = {.type = 1, .location = {1, device}};
    access both = {{1, device}, 3};
    address reserved;
    check(cuMemAddressReserve(&reserved, made->size + 2 * PAGE, PAGE, 0, 0), "to reserve");
    made->mapped = reserved + PAGE;
    check(cuMemCreate(&made->handle, made->size, &kind, 0), "to take memory");
    check(cuMemMap(made->mapped, made->size, 0, made->handle, 0), "to map");
    check(cuMemSetAccess(made->mapped, made->size, &both, 1), "to allow access");
    made->begin = made->mapped + made->size - exact;
    /* numbers that are no page, no row and no weight */
    check(cuMemsetD8Async(made->mapped, 0x7f, made->size, stream), "to fill");
    block **bucket = &blocks[made->begin / PAGE % BUCKETS];
    made->next = *bucket;
    *bucket = made;
    looseleaf_fenced[0]++;
    looseleaf_fenced[2] += made->kept;
    pthread_mutex_unlock(&lock);
    return (void *)made->begin;
}

void looseleaf_free(void *pointer, ptrdiff_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    address begin = (address)pointer;
    pthread_mutex_lock(&lock);
    block **at = &blocks[begin / PAGE % BUCKETS];
    while (*at && (*at)->begin != begin) at = &(*at)->next;
    block *one = *at;
    if (one && !one->kept) {
        *at = one->next;
        one->next = freed;
        freed = one;
        if (++num_freed >= MOST_FREED) unmap_freed();
    }
    pthread_mutex_unlock(&lock);
}
