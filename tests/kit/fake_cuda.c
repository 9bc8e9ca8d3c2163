/* A CUDA driver without a device.
 *
 * Its memory has addresses that the processor cannot use, and a view by which tests see it. It is exported as a memfd,
 * which soft0 takes for a dma-buf: the exported pages of the view become those of the memfd. Or it is exported as a
 * file that cannot be mapped. A copy between the host and the device has happened when its stream is synchronized, no
 * sooner. The driver checks every argument, and counts the calls in which it found a mistake. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709,
    SIZE = 64 * 4096,
    MOST_ATTRIBUTES = 32
};

struct fake_cuda_settings {
    int32_t init_error;
    int32_t attributes_error;
    int32_t export_error;
    int32_t query_error;
    int32_t setting_error;
    int32_t busy; /* how often a stream is not ready yet */
    int32_t memory_type;
    int32_t managed;
    int32_t shareable;
    int32_t device;
    int32_t has_context; /* whether the memory belongs to a context */
    int32_t unmappable;  /* a descriptor that exports are copies of; 0: they are memfds */
    int32_t lost;        /* whether the context has been destroyed */
    int32_t freed;       /* whether the memory has been freed */
    int32_t create_error;
    int32_t copy_error;
    int32_t wait_error;
    int32_t wait_ms; /* how long a stream is waited for */
    uint64_t number; /* of the allocation */
    uint64_t pool;
    uint64_t range_size;
};

struct fake_cuda_seen {
    uint64_t mistakes;
    uint64_t stream;
    uint64_t queries;
    uint64_t synchronized; /* the place of the last call that found a stream ready, among all calls */
    uint64_t set_sync;     /* the address whose later copies are synchronous */
    uint64_t exports;
    uint64_t exported; /* the place of the last export among all calls */
    uint64_t start;
    uint64_t size;
    uint64_t retained;
    uint64_t contexts; /* how many are on the stacks of all threads */
    uint64_t inits;
    uint64_t streams;  /* those that have not been destroyed */
    uint64_t reads;    /* copies that have happened, from the device */
    uint64_t writes;   /* the same, to the device */
    uint64_t waits;    /* how many calls wait for a stream now */
    uint64_t thread;   /* that asked last whether a stream is ready */
    uint64_t exporter; /* the thread of the last export */
};

struct stream {
    int magic;
    const void *context;
    struct copy *first;
};

struct copy {
    struct copy *next;
    void *to;
    const void *from;
    size_t size;
    int is_write;
    uint8_t staged[];
};

struct fake_cuda_settings fake_cuda_settings = {.memory_type = 2, .shareable = 1, .has_context = 1, .number = 1};
struct fake_cuda_seen fake_cuda_seen;

static uint8_t *memory, *view;
static uint64_t calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const int context_of_memory, primary_context;
static _Thread_local const void *current[8];
static _Thread_local int depth;

static int mistake(int error)
{
    __atomic_fetch_add(&fake_cuda_seen.mistakes, 1, __ATOMIC_SEQ_CST);
    return error;
}

uint64_t fake_cuda_memory(void)
{
    if (!memory) {
        /* Nothing of the host's follows at once. */
        memory = mmap(NULL, 2 * SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        view = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    }
    return (uintptr_t)memory;
}

uint64_t fake_cuda_view(void)
{
    fake_cuda_memory();
    return (uintptr_t)view;
}

int cuInit(unsigned flags)
{
    fake_cuda_seen.inits++;
    return flags ? mistake(INVALID_VALUE) : fake_cuda_settings.init_error;
}

int cuGetErrorName(int error, const char **name)
{
    switch (error) {
    case INVALID_VALUE:
        *name = "CUDA_ERROR_INVALID_VALUE";
        break;
    case NOT_INITIALIZED:
        *name = "CUDA_ERROR_NOT_INITIALIZED";
        break;
    case 100:
        *name = "CUDA_ERROR_NO_DEVICE";
        break;
    case 700:
        *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
        break;
    case 801:
        *name = "CUDA_ERROR_NOT_SUPPORTED";
        break;
    default:
        *name = NULL;
        return INVALID_VALUE;
    }
    return SUCCESS;
}

static int is_ours(uint64_t address)
{
    return memory && address >= (uintptr_t)memory && address < (uintptr_t)memory + SIZE;
}

int cuPointerGetAttributes(unsigned count, const int *kinds, void **values, uint64_t address)
{
    __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    if (fake_cuda_settings.attributes_error)
        return fake_cuda_settings.attributes_error;
    if (!count || count > MOST_ATTRIBUTES)
        return mistake(INVALID_VALUE);
    for (unsigned i = 0; i < count; i++) {
        uint32_t number = 0;
        uint64_t wide = 0;
        int is_wide = 0;

        switch (kinds[i]) {
        case 1:
            wide = fake_cuda_settings.has_context ? (uintptr_t)&context_of_memory : 0;
            is_wide = 1;
            break;
        case 2:
            number = fake_cuda_settings.memory_type;
            break;
        case 7:
            wide = fake_cuda_settings.number;
            is_wide = 1;
            break;
        case 8:
            number = fake_cuda_settings.managed;
            break;
        case 9:
            number = fake_cuda_settings.device;
            break;
        case 10:
            number = fake_cuda_settings.shareable;
            break;
        case 11:
            wide = (uintptr_t)memory;
            is_wide = 1;
            break;
        case 12:
            wide = fake_cuda_settings.range_size ? fake_cuda_settings.range_size : SIZE;
            is_wide = 1;
            break;
        case 17:
            wide = fake_cuda_settings.pool;
            is_wide = 1;
            break;
        default:
            return mistake(INVALID_VALUE);
        }
        /* The driver knows nothing of other addresses, and that is no error. */
        if ((!is_ours(address) && fake_cuda_settings.memory_type != 1) || fake_cuda_settings.freed)
            number = wide = 0;
        if (is_wide)
            memcpy(values[i], &wide, sizeof wide);
        else
            memcpy(values[i], &number, sizeof number);
    }
    return SUCCESS;
}

static int is_current(void)
{
    const void *wanted = fake_cuda_settings.has_context ? &context_of_memory : &primary_context;

    return depth && current[depth - 1] == wanted;
}

int cuPointerSetAttribute(const void *value, int kind, uint64_t address)
{
    calls++;
    if (!is_current())
        return mistake(INVALID_CONTEXT);
    if (kind != 6 || *(const unsigned *)value != 1)
        return mistake(INVALID_VALUE);
    if (!fake_cuda_settings.setting_error)
        fake_cuda_seen.set_sync = address;
    return fake_cuda_settings.setting_error;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (device != fake_cuda_settings.device)
        return mistake(INVALID_VALUE);
    __atomic_fetch_add(&fake_cuda_seen.retained, 1, __ATOMIC_SEQ_CST);
    *context = (void *)&primary_context;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    if (device != fake_cuda_settings.device || !fake_cuda_seen.retained)
        return mistake(INVALID_VALUE);
    __atomic_fetch_sub(&fake_cuda_seen.retained, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void *context)
{
    if (!context || depth == 8)
        return mistake(INVALID_CONTEXT);
    if (fake_cuda_settings.lost)
        return CONTEXT_IS_DESTROYED;
    current[depth++] = context;
    __atomic_fetch_add(&fake_cuda_seen.contexts, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context)
{
    if (!depth)
        return mistake(INVALID_CONTEXT);
    *context = (void *)current[--depth];
    __atomic_fetch_sub(&fake_cuda_seen.contexts, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int cuStreamQuery(void *stream)
{
    calls++;
    if (!is_current())
        return mistake(INVALID_CONTEXT);
    fake_cuda_seen.queries++;
    fake_cuda_seen.thread = gettid();
    fake_cuda_seen.stream = (uintptr_t)stream;
    if (fake_cuda_settings.query_error)
        return fake_cuda_settings.query_error;
    if (fake_cuda_settings.busy) {
        fake_cuda_settings.busy--;
        return NOT_READY;
    }
    fake_cuda_seen.synchronized = calls;
    return SUCCESS;
}

/* Called with the lock: a page that two threads export has one copy. */
static int export_pages(int *handle, uint64_t start, size_t size, int kind, unsigned long long flags)
{
    calls++;
    if (!is_current())
        return mistake(INVALID_CONTEXT);
    if (kind != 1 || flags || start % getpagesize() || size % getpagesize() || !size || !is_ours(start) ||
        !is_ours(start + size - 1))
        return mistake(INVALID_VALUE);
    fake_cuda_seen.start = start;
    fake_cuda_seen.size = size;
    fake_cuda_seen.exports++;
    fake_cuda_seen.exporter = gettid();
    fake_cuda_seen.exported = calls;
    if (fake_cuda_settings.export_error)
        return fake_cuda_settings.export_error;

    if (fake_cuda_settings.unmappable) {
        *handle = dup(fake_cuda_settings.unmappable);
        return SUCCESS;
    }

    uint8_t *shown = view + (start - (uintptr_t)memory);
    int fd = memfd_create("memory of a device", MFD_CLOEXEC);

    if (fd < 0 || ftruncate(fd, size) || write(fd, shown, size) != (ssize_t)size ||
        mmap(shown, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        abort();
    *handle = fd;
    return SUCCESS;
}

int cuMemGetHandleForAddressRange(void *handle, uint64_t start, size_t size, int kind, unsigned long long flags)
{
    int error;

    pthread_mutex_lock(&lock);
    error = export_pages(handle, start, size, kind, flags);
    pthread_mutex_unlock(&lock);
    return error;
}

/* ---- Copies ---- */

enum { MAGIC = 0x53747265 };

int cuStreamCreate(void **out, unsigned flags)
{
    if (!is_current())
        return mistake(INVALID_CONTEXT);
    /* Another stream waits for the kernels of the default stream. */
    if (flags != 1)
        return mistake(INVALID_VALUE);
    if (fake_cuda_settings.create_error)
        return fake_cuda_settings.create_error;

    struct stream *stream = calloc(1, sizeof *stream);

    if (!stream)
        abort();
    *stream = (struct stream){.magic = MAGIC, .context = current[depth - 1]};
    *out = stream;
    __atomic_fetch_add(&fake_cuda_seen.streams, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

static int is_usable(const struct stream *stream)
{
    return is_current() && stream && stream->magic == MAGIC && stream->context == current[depth - 1];
}

int cuStreamDestroy_v2(struct stream *stream)
{
    if (!is_usable(stream) || stream->first)
        return mistake(INVALID_HANDLE);
    stream->magic = 0;
    free(stream);
    __atomic_fetch_sub(&fake_cuda_seen.streams, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

static int copy_later(struct stream *stream, uint64_t address, void *to, const void *from, size_t size)
{
    if (!is_usable(stream))
        return mistake(INVALID_HANDLE);
    if (fake_cuda_settings.copy_error)
        return fake_cuda_settings.copy_error;
    if (fake_cuda_settings.freed)
        return INVALID_VALUE;
    if (!size || !is_ours(address) || !is_ours(address + size - 1))
        return mistake(INVALID_VALUE);

    struct copy *copy = malloc(sizeof *copy + size), **last;
    uint8_t *there = view + (address - (uintptr_t)memory);

    if (!copy)
        abort();
    *copy = (struct copy){.to = to ? to : there, .from = from ? NULL : there, .size = size, .is_write = !to};
    if (from)
        memcpy(copy->staged, from, size);
    pthread_mutex_lock(&lock);
    for (last = &stream->first; *last; last = &(*last)->next)
        ;
    *last = copy;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, struct stream *stream)
{
    return copy_later(stream, from, to, NULL, size);
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, struct stream *stream)
{
    return copy_later(stream, to, NULL, from, size);
}

int cuStreamSynchronize(struct stream *stream)
{
    if (!is_usable(stream))
        return mistake(INVALID_HANDLE);
    __atomic_fetch_add(&fake_cuda_seen.waits, 1, __ATOMIC_SEQ_CST);
    usleep(fake_cuda_settings.wait_ms * 1000);
    pthread_mutex_lock(&lock);
    for (struct copy *copy = stream->first, *next; copy; copy = next) {
        next = copy->next;
        if (!fake_cuda_settings.wait_error) {
            memcpy(copy->to, copy->from ? copy->from : copy->staged, copy->size);
            ++*(copy->is_write ? &fake_cuda_seen.writes : &fake_cuda_seen.reads);
        }
        free(copy);
    }
    stream->first = NULL;
    pthread_mutex_unlock(&lock);
    __atomic_fetch_sub(&fake_cuda_seen.waits, 1, __ATOMIC_SEQ_CST);
    return fake_cuda_settings.wait_error;
}
