/* A CUDA driver without a device.
 *
 * Its memory has addresses that the processor cannot use, and a view by which tests see it. It is exported as a memfd,
 * which soft0 takes for a dma-buf: the exported pages of the view become those of the memfd. The driver checks every
 * argument, and counts the calls in which it found a mistake. */
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
    NOT_READY = 600,
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
};

struct fake_cuda_settings fake_cuda_settings = {.memory_type = 2, .shareable = 1, .has_context = 1};
struct fake_cuda_seen fake_cuda_seen;

static uint8_t *memory, *view;
static uint64_t calls;
static const int context_of_memory, primary_context;
static _Thread_local const void *current[8];
static _Thread_local int depth;

static int mistake(int error)
{
    fake_cuda_seen.mistakes++;
    return error;
}

uint64_t fake_cuda_memory(void)
{
    if (!memory) {
        memory = mmap(NULL, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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
    calls++;
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
        if (!is_ours(address) && fake_cuda_settings.memory_type != 1)
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

int cuMemGetHandleForAddressRange(void *handle, uint64_t start, size_t size, int kind, unsigned long long flags)
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
    fake_cuda_seen.exported = calls;
    if (fake_cuda_settings.export_error)
        return fake_cuda_settings.export_error;

    uint8_t *shown = view + (start - (uintptr_t)memory);
    int fd = memfd_create("memory of a device", MFD_CLOEXEC);

    if (fd < 0 || ftruncate(fd, size) || write(fd, shown, size) != (ssize_t)size ||
        mmap(shown, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        abort();
    *(int *)handle = fd;
    return SUCCESS;
}
