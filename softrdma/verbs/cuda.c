/* The driver's library copies the bytes. A process that has memory of a device has loaded that library, so it is not
 * loaded here.
 *
 * A copy goes to a stream of the region's own, which waits for no kernel. So it ends while a kernel waits for the bytes
 * of a peer, as a card's transfer would. A copy from pageable memory may return before the device has all of it, so
 * each is followed by a wait for the stream. (CUDA Driver API, "API synchronization behavior")
 *
 * An allocation has a number, which is never used again. So an allocation that was freed is not taken for a later one
 * at the same address.
 */
#include "cuda.h"
#include "internal.h"
#include "trace.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Of cuda.h. */
#define CUDA_SUCCESS               0
#define CUDA_ERROR_INVALID_VALUE   1
#define CU_MEMORYTYPE_DEVICE       2
#define CU_STREAM_NON_BLOCKING     1
#define ATTRIBUTE_CONTEXT          1
#define ATTRIBUTE_MEMORY_TYPE      2
#define ATTRIBUTE_BUFFER_ID        7
#define ATTRIBUTE_DEVICE_ORDINAL   9
#define ATTRIBUTE_RANGE_START_ADDR 11
#define ATTRIBUTE_RANGE_SIZE       12

/* Each returns 0 or an error. */
struct driver {
    int (*attributes)(unsigned count, const int *kinds, void **values, uint64_t address);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_synchronize)(void *stream);
    int (*copy_from)(void *to, uint64_t from, size_t size, void *stream);
    int (*copy_to)(uint64_t to, const void *from, size_t size, void *stream);
};

static const struct {
    const char *name;
    size_t place;
} calls[] = {
    {"cuPointerGetAttributes", offsetof(struct driver, attributes)},
    {"cuDevicePrimaryCtxRetain", offsetof(struct driver, primary_retain)},
    {"cuDevicePrimaryCtxRelease_v2", offsetof(struct driver, primary_release)},
    {"cuCtxPushCurrent_v2", offsetof(struct driver, push)},
    {"cuCtxPopCurrent_v2", offsetof(struct driver, pop)},
    {"cuStreamCreate", offsetof(struct driver, stream_create)},
    {"cuStreamDestroy_v2", offsetof(struct driver, stream_destroy)},
    {"cuStreamSynchronize", offsetof(struct driver, stream_synchronize)},
    {"cuMemcpyDtoHAsync_v2", offsetof(struct driver, copy_from)},
    {"cuMemcpyHtoDAsync_v2", offsetof(struct driver, copy_to)},
};

struct allocation {
    void *context; /* NULL: it belongs to none */
    unsigned type;
    unsigned long long number;
    int device;
    uint64_t start;
    size_t size;
};

struct cuda_memory {
    struct device_memory base;
    void *library;
    struct driver driver;
    struct allocation allocation;
    void *context;
    bool is_primary; /* the context is the device's primary one, which is retained */
    void *stream;
};

/* ---- The driver ---- */

static bool open_library(struct cuda_memory *memory)
{
    char name[PATH_MAX] = "libcuda.so.1";

    environment_text("NDPY_LIBCUDA", name, sizeof name);
    memory->library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    for (size_t i = 0; memory->library != NULL && i < sizeof calls / sizeof *calls; i++) {
        void *call = dlsym(memory->library, calls[i].name);
        if (call == NULL)
            return false;
        memcpy((char *)&memory->driver + calls[i].place, &call, sizeof call);
    }
    return memory->library != NULL;
}

/* What the driver says of an address. The driver answers with zeros if no memory of its own is there. */
static int describe(const struct driver *driver, uint64_t address, struct allocation *out)
{
    int kinds[] = {ATTRIBUTE_CONTEXT,        ATTRIBUTE_MEMORY_TYPE,      ATTRIBUTE_BUFFER_ID,
                   ATTRIBUTE_DEVICE_ORDINAL, ATTRIBUTE_RANGE_START_ADDR, ATTRIBUTE_RANGE_SIZE};
    void *values[] = {&out->context, &out->type, &out->number, &out->device, &out->start, &out->size};

    memset(out, 0, sizeof *out);
    return driver->attributes(sizeof kinds / sizeof *kinds, kinds, values, address);
}

/* ---- Copying ---- */

static int copy_now(const struct cuda_memory *memory, uint64_t address, void *out, const void *data, size_t size)
{
    const struct driver *driver = &memory->driver;
    struct allocation now;

    int error = describe(driver, address, &now);
    if (error == CUDA_SUCCESS && now.number != memory->allocation.number)
        error = CUDA_ERROR_INVALID_VALUE;
    if (error == CUDA_SUCCESS)
        error = out != NULL ? driver->copy_from(out, address, size, memory->stream)
                            : driver->copy_to(address, data, size, memory->stream);
    return error == CUDA_SUCCESS ? driver->stream_synchronize(memory->stream) : error;
}

static bool copy(struct device_memory *base, uint64_t address, void *out, const void *data, size_t size)
{
    const struct cuda_memory *memory = CONTAINER_OF(base, struct cuda_memory, base);
    void *popped;
    int cancel = cancel_off();

    int error = memory->driver.push(memory->context);
    if (error == CUDA_SUCCESS) {
        error = copy_now(memory, address, out, data, size);
        memory->driver.pop(&popped);
    }
    cancel_as(cancel);
    if (error != CUDA_SUCCESS)
        TRACE("memory of CUDA device %d: error %d of a copy of %zu bytes at 0x%llx", memory->allocation.device, error,
              size, (unsigned long long)address);
    return error == CUDA_SUCCESS;
}

/* ---- From registering to deregistering ---- */

static bool has_all(const struct allocation *allocation, uint64_t address, size_t length)
{
    return allocation->type == CU_MEMORYTYPE_DEVICE && address >= allocation->start && length <= allocation->size &&
           address - allocation->start <= allocation->size - length;
}

static bool find(struct cuda_memory *memory, uint64_t address, size_t length)
{
    const struct driver *driver = &memory->driver;
    void *popped;

    if (!open_library(memory) || describe(driver, address, &memory->allocation) != CUDA_SUCCESS ||
        !has_all(&memory->allocation, address, length))
        return false;
    memory->context = memory->allocation.context;
    if (memory->context == NULL) {
        if (driver->primary_retain(&memory->context, memory->allocation.device) != CUDA_SUCCESS)
            return false;
        memory->is_primary = true;
    }
    if (driver->push(memory->context) != CUDA_SUCCESS)
        return false;
    if (driver->stream_create(&memory->stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        memory->stream = NULL;
    driver->pop(&popped);
    return memory->stream != NULL;
}

static void release(struct cuda_memory *memory)
{
    const struct driver *driver = &memory->driver;
    void *popped;

    /* A context that was destroyed has taken the stream along. */
    if (memory->stream != NULL && driver->push(memory->context) == CUDA_SUCCESS) {
        driver->stream_destroy(memory->stream);
        driver->pop(&popped);
    }
    if (memory->is_primary)
        driver->primary_release(memory->allocation.device);
    if (memory->library != NULL)
        dlclose(memory->library);
    free(memory);
}

struct device_memory *cuda_memory_find(uint64_t address, size_t length)
{
    struct cuda_memory *memory = calloc(1, sizeof *memory);
    int cancel = cancel_off();

    if (memory != NULL && !find(memory, address, length)) {
        release(memory);
        memory = NULL;
    }
    cancel_as(cancel);
    if (memory == NULL)
        return NULL;
    memory->base.copy = copy;
    return &memory->base;
}

void cuda_memory_free(struct device_memory *base)
{
    if (base == NULL)
        return;
    int cancel = cancel_off();
    release(CONTAINER_OF(base, struct cuda_memory, base));
    cancel_as(cancel);
}
