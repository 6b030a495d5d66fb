/* A small fake of the CUDA driver: device memory is a memfd, a stream is a thread, an event is a flag.
 *
 * It has what radixkv calls and nothing else; what it lacks is CUDA_ERROR_NOT_FOUND, as in a driver that is too old. Where
 * the real driver refuses, so does this one: sizes beside the granularity, calls without a context that need one, access
 * to what is not mapped or not granted (a fault). What it cannot tell: speed, kernels, caches, what hardware does.
 */
#define _GNU_SOURCE
#include "control.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define GRANULARITY (2u << 20)
#define DEVICES_MAX 8
#define DRIVER_VERSION 13000

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713, NOT_SUPPORTED = 801,
};

typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Prop;
typedef struct { Location location; int flags; } Access;

typedef struct { int fd, device; size_t size; } Memory;      /* CUmemGenericAllocationHandle */
typedef struct { int device, retained; atomic_int dead; } Context;
typedef struct Range { char *at; size_t size; int mapped; struct Range *next; } Range;

typedef struct Event { atomic_int done; Context *context; } Event;
typedef struct Task { void *to; const void *from; size_t size; Event *event; struct Task *next; } Task;
typedef struct Stream {
    Context *context;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Task *first, *last;
    int busy, ending;
} Stream;

static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static int initialized, devices;
static Context contexts[DEVICES_MAX];
static size_t used[DEVICES_MAX];
static Range *ranges, *pinned;
static _Thread_local Context *current;

/* -- helpers ------------------------------------------------------------------------------------------------------ */

static size_t memory_bytes(void)
{
    int mib = atomic_load(&control()[MEMORY_MIB]);
    return (size_t)(mib ? mib : 1024) << 20;
}

static int alive(Context *context)
{
    return context ? atomic_load(&context->dead) : INVALID_CONTEXT;
}

static Range **find(Range **list, char *at)
{
    while (*list && !((*list)->at <= at && at < (*list)->at + (*list)->size))
        list = &(*list)->next;
    return list;
}

static void add(Range **list, char *at, size_t size)
{
    Range *range = calloc(1, sizeof *range);
    *range = (Range){at, size, 0, *list};
    *list = range;
}

static void drop(Range **place)
{
    Range *range = *place;
    *place = range->next;
    free(range);
}

static void note_holder(void)
{
    atomic_int *words = control();
    for (int i = HOLDERS; i < LINGER; i++) {
        int free_place = 0;
        if (atomic_load(&words[i]) == getpid() || atomic_compare_exchange_strong(&words[i], &free_place, getpid()))
            return;
    }
}

/* -- starting, devices, contexts ------------------------------------------------------------------------------------ */

EXPORT int cuInit(unsigned flags)
{
    const char *count = getenv("FAKE_CUDA_DEVICES");
    devices = count ? atoi(count) : 2;
    if (devices <= 0)
        return NO_DEVICE;
    initialized = 1;
    return flags ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version) { *version = DRIVER_VERSION; return SUCCESS; }

EXPORT int cuDeviceGetCount(int *count) { *count = devices; return initialized ? SUCCESS : NOT_INITIALIZED; }

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    if (!initialized)
        return NOT_INITIALIZED;
    *device = ordinal;
    return ordinal < 0 || ordinal >= devices ? INVALID_DEVICE : SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int length, int device)
{
    snprintf(name, length, "Fake device %d", device);
    return SUCCESS;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char uuid[16], int device)
{
    memset(uuid, 0xfa, 16);
    uuid[15] = (unsigned char)device;
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = memory_bytes(); return SUCCESS; }

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    enum { VMM = 102, POSIX_FD = 103, MAJOR = 75, MINOR = 76 };
    const char *without = getenv("FAKE_CUDA_WITHOUT");
    (void)device;
    *value = 0;
    if (attribute == VMM)
        *value = !(without && strstr(without, "vmm"));
    else if (attribute == POSIX_FD)
        *value = !(without && strstr(without, "fd"));
    else if (attribute == MAJOR)
        *value = 9;
    else if (attribute != MINOR)
        return INVALID_VALUE;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(Context **context, int device)
{
    if (!initialized)
        return NOT_INITIALIZED;
    if (device < 0 || device >= devices)
        return INVALID_DEVICE;
    pthread_mutex_lock(&big);
    *context = &contexts[device];
    if (!contexts[device].retained++) {
        contexts[device].device = device;
        atomic_fetch_add(&control()[CONTEXTS], 1);
        note_holder();
    }
    pthread_mutex_unlock(&big);
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    pthread_mutex_lock(&big);
    int wrong = contexts[device].retained <= 0;
    contexts[device].retained -= !wrong;
    pthread_mutex_unlock(&big);
    return wrong ? INVALID_CONTEXT : SUCCESS;
}

EXPORT int cuCtxSetCurrent(Context *context) { current = context; return SUCCESS; }
EXPORT int cuCtxGetCurrent(Context **context) { *context = current; return SUCCESS; }
EXPORT int cuCtxGetDevice(int *device) { if (current) *device = current->device; return current ? SUCCESS : INVALID_CONTEXT; }

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    if (!current)
        return INVALID_CONTEXT;
    *total = memory_bytes();
    *free_bytes = *total - used[current->device];
    return SUCCESS;
}

/* -- virtual memory ------------------------------------------------------------------------------------------------- */

static int check_prop(const Prop *prop)
{
    enum { PINNED = 1, DEVICE = 1, POSIX_FD = 1 };
    if (!initialized)
        return NOT_INITIALIZED;
    if (prop->type != PINNED || prop->location.type != DEVICE || prop->win32)
        return INVALID_VALUE;
    if (prop->location.id < 0 || prop->location.id >= devices)
        return INVALID_DEVICE;
    return prop->handle_types & ~POSIX_FD ? NOT_SUPPORTED : SUCCESS;
}

EXPORT int cuMemGetAllocationGranularity(size_t *granularity, const Prop *prop, int option)
{
    (void)option;
    *granularity = GRANULARITY;
    return check_prop(prop);
}

EXPORT int cuMemCreate(Memory **handle, size_t size, const Prop *prop, unsigned long long flags)
{
    int wrong = check_prop(prop);
    if (wrong)
        return wrong;
    if (!size || size % GRANULARITY || flags)
        return INVALID_VALUE;
    int device = prop->location.id;
    pthread_mutex_lock(&big);
    int fits = used[device] + size <= memory_bytes();
    if (fits)
        used[device] += size;
    pthread_mutex_unlock(&big);
    if (!fits)
        return OUT_OF_MEMORY;
    int fd = memfd_create("fake-cuda-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size))
        return OUT_OF_MEMORY;
    *handle = malloc(sizeof **handle);
    **handle = (Memory){fd, device, size};
    atomic_fetch_add(&control()[ALLOCATIONS], 1);
    return SUCCESS;
}

EXPORT int cuMemRelease(Memory *handle)
{
    if (!handle)
        return INVALID_VALUE;
    close(handle->fd);
    free(handle);
    return SUCCESS;
}

EXPORT int cuMemExportToShareableHandle(int *fd, Memory *handle, int type, unsigned long long flags)
{
    if (type != 1 || flags)
        return INVALID_VALUE;
    *fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuMemImportFromShareableHandle(Memory **handle, void *os_handle, int type)
{
    if (!initialized)
        return NOT_INITIALIZED;
    int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
    off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    if (type != 1 || size <= 0)
        return INVALID_VALUE;
    *handle = malloc(sizeof **handle);
    **handle = (Memory){fd, -1, (size_t)size};
    return SUCCESS;
}

EXPORT int cuMemAddressReserve(char **at, size_t size, size_t alignment, char *wish, unsigned long long flags)
{
    (void)wish;
    if (!size || size % GRANULARITY || alignment & (alignment - 1) || flags)
        return INVALID_VALUE;
    char *got = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&big);
    add(&ranges, got, size);
    pthread_mutex_unlock(&big);
    *at = got;
    return SUCCESS;
}

EXPORT int cuMemAddressFree(char *at, size_t size)
{
    pthread_mutex_lock(&big);
    Range **place = find(&ranges, at);
    int wrong = !*place || (*place)->at != at || (*place)->size != size || (*place)->mapped;
    if (!wrong) {
        drop(place);
        munmap(at, size);
    }
    pthread_mutex_unlock(&big);
    return wrong ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuMemMap(char *at, size_t size, size_t offset, Memory *handle, unsigned long long flags)
{
    pthread_mutex_lock(&big);
    Range *range = *find(&ranges, at);
    int wrong = !range || range->at != at || range->size != size || range->mapped || offset || flags
        || size != handle->size || mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0) != at;
    if (!wrong) {
        range->mapped = 1;
        atomic_fetch_add(&control()[MAPPED], 1);
    }
    pthread_mutex_unlock(&big);
    return wrong ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuMemSetAccess(char *at, size_t size, const Access *access, size_t count)
{
    enum { READ = 1, READ_WRITE = 3 };
    pthread_mutex_lock(&big);
    Range *range = *find(&ranges, at);
    int wrong = !range || !range->mapped || count != 1 || range->size != size;
    if (!wrong)
        wrong = mprotect(at, size, access->flags == READ_WRITE ? PROT_READ | PROT_WRITE
                                   : access->flags == READ ? PROT_READ : PROT_NONE);
    pthread_mutex_unlock(&big);
    return wrong ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuMemUnmap(char *at, size_t size)
{
    pthread_mutex_lock(&big);
    Range *range = *find(&ranges, at);
    int wrong = !range || !range->mapped || range->at != at || range->size != size;
    if (!wrong) {
        mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        range->mapped = 0;
        atomic_fetch_sub(&control()[MAPPED], 1);
    }
    pthread_mutex_unlock(&big);
    return wrong ? INVALID_VALUE : SUCCESS;
}

/* -- pinned host memory ----------------------------------------------------------------------------------------------- */

EXPORT int cuMemHostRegister_v2(char *at, size_t size, unsigned flags)
{
    (void)flags;
    if (alive(current))
        return alive(current);
    pthread_mutex_lock(&big);
    int known = *find(&pinned, at) != NULL;
    if (!known)
        add(&pinned, at, size);
    pthread_mutex_unlock(&big);
    atomic_fetch_add(&control()[REGISTERED], !known);
    return known ? ALREADY_REGISTERED : SUCCESS;
}

EXPORT int cuMemHostUnregister(char *at)
{
    pthread_mutex_lock(&big);
    Range **place = find(&pinned, at);
    int known = *place != NULL;
    if (known)
        drop(place);
    pthread_mutex_unlock(&big);
    return known ? SUCCESS : NOT_REGISTERED;
}

/* -- streams and events ------------------------------------------------------------------------------------------------ */

static void wait_until_let(void)
{
    struct timespec moment = {0, 200000};
    while (atomic_load(&control()[HOLD]))
        nanosleep(&moment, NULL);
}

static void carry_out(Context *context, Task *task)
{
    atomic_int *words = control();
    if (!alive(context) && task->size) {
        int left = atomic_load(&words[FAIL_IN]);
        while (left > 0 && !atomic_compare_exchange_weak(&words[FAIL_IN], &left, left - 1))
            ;
        if (left == 1) {
            atomic_store(&context->dead, atomic_load(&words[FAIL_CODE]));
        } else {
            memcpy(task->to, task->from, task->size);
            atomic_fetch_add(&words[COPIES], 1);
        }
    }
    if (task->event)
        atomic_store(&task->event->done, 1);
}

static void *run(void *given)
{
    Stream *stream = given;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ending)
            pthread_cond_wait(&stream->changed, &stream->lock);
        if (!stream->first)
            break;
        Task *task = stream->first;
        stream->first = task->next;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        wait_until_let();
        carry_out(stream->context, task);
        free(task);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static int put(Stream *stream, Task task)
{
    int dead = alive(stream ? stream->context : current);
    if (dead || !stream)
        return dead ? dead : INVALID_HANDLE;
    Task *mine = malloc(sizeof *mine);
    *mine = task;
    mine->next = NULL;
    pthread_mutex_lock(&stream->lock);
    if (stream->first)
        stream->last->next = mine;
    else
        stream->first = mine;
    stream->last = mine;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

EXPORT int cuStreamCreate(Stream **stream, unsigned flags)
{
    (void)flags;
    if (alive(current))
        return alive(current);
    *stream = calloc(1, sizeof **stream);
    (*stream)->context = current;
    pthread_mutex_init(&(*stream)->lock, NULL);
    pthread_cond_init(&(*stream)->changed, NULL);
    return pthread_create(&(*stream)->thread, NULL, run, *stream) ? OUT_OF_MEMORY : SUCCESS;
}

EXPORT int cuStreamQuery(Stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    int busy = stream->first || stream->busy;
    pthread_mutex_unlock(&stream->lock);
    int dead = alive(stream->context);
    return dead ? dead : busy ? NOT_READY : SUCCESS;
}

EXPORT int cuStreamSynchronize(Stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return alive(stream->context);
}

EXPORT int cuStreamDestroy_v2(Stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return SUCCESS;
}

EXPORT int cuCtxSynchronize(void) { return alive(current); }

EXPORT int cuEventCreate(Event **event, unsigned flags)
{
    (void)flags;
    if (alive(current))
        return alive(current);
    *event = calloc(1, sizeof **event);
    (*event)->context = current;
    atomic_store(&(*event)->done, 1);
    return SUCCESS;
}

EXPORT int cuEventRecord(Event *event, Stream *stream)
{
    atomic_store(&event->done, 0);
    return put(stream, (Task){.event = event});
}

EXPORT int cuEventQuery(Event *event)
{
    int done = atomic_load(&event->done), dead = alive(event->context);
    return dead ? dead : done ? SUCCESS : NOT_READY;
}

EXPORT int cuEventSynchronize(Event *event)
{
    struct timespec moment = {0, 50000};
    while (!atomic_load(&event->done) && !alive(event->context))
        nanosleep(&moment, NULL);
    return alive(event->context);
}

EXPORT int cuEventDestroy_v2(Event *event) { free(event); return SUCCESS; }

/* -- copies ------------------------------------------------------------------------------------------------------------ */

EXPORT int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t size, Stream *stream)
{
    return put(stream, (Task){.to = to, .from = from, .size = size});
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t size, Stream *stream)
{
    return put(stream, (Task){.to = to, .from = from, .size = size});
}

EXPORT int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, Stream *stream)
{
    return put(stream, (Task){.to = to, .from = from, .size = size});
}

static int at_once(void *to, const void *from, size_t size)
{
    if (!alive(current))
        memmove(to, from, size);
    return alive(current);
}

EXPORT int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { return at_once(to, from, size); }
EXPORT int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { return at_once(to, from, size); }

/* -- names --------------------------------------------------------------------------------------------------------------- */

static const struct { int code; const char *name, *text; } errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
};

static int tell(int code, const char **text, int name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *text = name ? errors[i].name : errors[i].text;
            return SUCCESS;
        }
    *text = NULL;
    return INVALID_VALUE;
}

EXPORT int cuGetErrorName(int code, const char **text) { return tell(code, text, 1); }
EXPORT int cuGetErrorString(int code, const char **text) { return tell(code, text, 0); }

EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    static const char *const endings[] = {"_v2", ""};
    char full[128];
    (void)version, (void)flags;
    *function = NULL;
    for (int i = 0; i < 2 && !*function; i++) {
        Dl_info here;
        dladdr((void *)cuInit, &here);
        void *self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
        snprintf(full, sizeof full, "%s%s", name, endings[i]);
        *function = self ? dlsym(self, full) : NULL;
        if (self)
            dlclose(self);
    }
    if (status)
        *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
