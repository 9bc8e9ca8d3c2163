#include "adapter.h"
#include "guarded_copy.h"
#include "trace.h"

#include <stdlib.h>

#define KNOWN_FLAGS                                                                                   \
    (ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_ALLOW_REMOTE_READ | ND_MR_FLAG_ALLOW_REMOTE_WRITE | \
     ND_MR_FLAG_RDMA_READ_SINK | ND_MR_FLAG_DO_NOT_SECURE_VM)

/* Whether every page of the range exists and can be read, and also written if asked for (D.2.3). */
static bool pages_allow(const void *buffer, SIZE_T size, bool write)
{
    const DWORD readable = PAGE_READONLY | PAGE_READWRITE | PAGE_WRITECOPY | PAGE_EXECUTE_READ |
                           PAGE_EXECUTE_READWRITE | PAGE_EXECUTE_WRITECOPY;
    const DWORD writable = PAGE_READWRITE | PAGE_WRITECOPY | PAGE_EXECUTE_READWRITE | PAGE_EXECUTE_WRITECOPY;
    const char *at = buffer, *end = at + size;

    if ((uintptr_t)end < (uintptr_t)at)
        return false;
    while (at < end) {
        MEMORY_BASIC_INFORMATION page;
        if (VirtualQuery(at, &page, sizeof page) == 0 || page.State != MEM_COMMIT)
            return false;
        if ((page.Protect & PAGE_GUARD) != 0 || (page.Protect & (write ? writable : readable)) == 0)
            return false;
        at = (const char *)page.BaseAddress + page.RegionSize;
    }
    return true;
}

static HRESULT check_arguments(const void *buffer, SIZE_T size, ULONG flags)
{
    if ((flags & ~KNOWN_FLAGS) != 0)
        return ND_INVALID_PARAMETER_3;
    if (size == 0)
        return buffer == NULL ? ND_INVALID_PARAMETER : ND_INVALID_BUFFER_SIZE;
    if (size > MAX_REGISTRATION_SIZE)
        return ND_INVALID_PARAMETER;
    if (!pages_allow(buffer, size, (flags & (ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_ALLOW_REMOTE_WRITE)) != 0))
        return ND_ACCESS_VIOLATION;
    return ND_SUCCESS;
}

static HRESULT register_buffer(struct region *region, const void *buffer, SIZE_T size, ULONG flags)
{
    struct token_table *table = &region->object.adapter->tokens;
    HRESULT status = ND_INVALID_DEVICE_STATE;

    AcquireSRWLockExclusive(&table->lock);
    if (region->slot == 0) {
        uint32_t slot = tokens_take(table);
        status = slot == 0 ? ND_INSUFFICIENT_RESOURCES : ND_SUCCESS;
        if (slot != 0) {
            struct token_slot *entry = tokens_slot(table, slot);
            entry->generation = (entry->generation + 1) & 127;
            entry->region = region;
            region->slot = slot;
            region->token = token_make(slot, entry->generation, false);
            region->address = (uintptr_t)buffer;
            region->size = size;
            /* A remote right implies the local one (D.3.4). */
            region->flags = (flags & 4) != 0 ? flags | ND_MR_FLAG_ALLOW_LOCAL_WRITE : flags;
        }
    }
    ReleaseSRWLockExclusive(&table->lock);
    return status;
}

HRESULT region_end(struct region *region, bool force)
{
    struct token_table *table = &region->object.adapter->tokens;
    HRESULT status = ND_INVALID_DEVICE_STATE;

    AcquireSRWLockExclusive(&table->lock);
    if (region->slot != 0 && region->bound_windows > 0 && force) {
        struct window *next;
        for (struct window *window = table->bound; window != NULL; window = next) {
            next = window->next_bound;
            if (window->region == region)
                window_unbind(table, window);
        }
    }
    if (region->slot != 0 && region->bound_windows > 0) {
        status = ND_DEVICE_BUSY;
    } else if (region->slot != 0) {
        tokens_give_back(table, region->slot);
        region->slot = 0;
        region->token = 0;
        status = ND_SUCCESS;
    }
    ReleaseSRWLockExclusive(&table->lock);
    return status;
}

static bool refused_by_switch(struct adapter *adapter)
{
    uint64_t limit = adapter->switches.refuse_registrations_after;
    return (uint64_t)InterlockedIncrement64(&adapter->registrations) > limit && limit != SWITCH_OFF;
}

HRESULT region_begin(struct region *region, const void *buffer, SIZE_T size, ULONG flags)
{
    HRESULT status = check_arguments(buffer, size, flags);

    if (status == ND_SUCCESS && refused_by_switch(region->object.adapter))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status == ND_SUCCESS)
        status = register_buffer(region, buffer, size, flags);
    TRACE("region %p: register %p+%llu flags 0x%lx: 0x%08lx", (void *)region, buffer, (unsigned long long)size, flags,
          status);
    return status;
}

static HRESULT STDMETHODCALLTYPE region_register(IND2MemoryRegion *self, const void *buffer, SIZE_T size, ULONG flags,
                                                 OVERLAPPED *overlapped)
{
    struct region *region = (struct region *)self;
    struct adapter *adapter = region->object.adapter;

    if (adapter_gone(adapter))
        return ND_DEVICE_REMOVED;
    if (overlapped == NULL)
        return ND_INVALID_PARAMETER;
    HRESULT status = region_begin(region, buffer, size, flags);
    if (status != ND_SUCCESS)
        return status;
    status = request_accept(&region->source, REQUEST_REGION, overlapped, region);
    if (status != ND_PENDING) {
        region_end(region, true);
        return status;
    }
    adapter_count_registration(1, 1);
    request_complete(&region->source, REQUEST_REGION, ND_SUCCESS);
    return ND_PENDING;
}

static HRESULT STDMETHODCALLTYPE region_deregister(IND2MemoryRegion *self, OVERLAPPED *overlapped)
{
    struct region *region = (struct region *)self;
    char probe[sizeof *overlapped];

    if (overlapped == NULL || !guarded_copy(probe, overlapped, sizeof probe))
        return ND_INVALID_PARAMETER;
    HRESULT status = region_end(region, false);
    TRACE("region %p: deregister: 0x%08lx", (void *)self, status);
    if (status != ND_SUCCESS)
        return status;
    adapter_count_registration(0, -1);
    status = request_accept(&region->source, REQUEST_REGION, overlapped, NULL);
    if (status == ND_PENDING)
        request_complete(&region->source, REQUEST_REGION, ND_SUCCESS);
    return status;
}

static UINT32 STDMETHODCALLTYPE region_local_token(IND2MemoryRegion *self)
{
    return htonl(((struct region *)self)->token);
}

static UINT32 STDMETHODCALLTYPE region_remote_token(IND2MemoryRegion *self)
{
    uint32_t token = ((struct region *)self)->token;
    return token == 0 ? 0 : htonl(token | 1);
}

static HRESULT STDMETHODCALLTYPE region_cancel(IND2MemoryRegion *self)
{
    return source_cancel(&((struct region *)self)->source);
}

static HRESULT STDMETHODCALLTYPE region_result(IND2MemoryRegion *self, OVERLAPPED *overlapped, BOOL wait)
{
    UNUSED(self);
    return overlapped_result(overlapped, wait);
}

static void region_closed(struct object *object)
{
    struct region *region = CONTAINER_OF(object, struct region, object);

    source_close(&region->source);
    /* The region was released while registered: the registration ends and stays counted as leaked (D.6.7). */
    if (region_end(region, true) == ND_SUCCESS)
        TRACE("region %p: released while registered", (void *)object);
}

static void region_destroy(struct object *object)
{
    struct region *region = CONTAINER_OF(object, struct region, object);

    source_free(&region->source);
    free(region);
}

static const struct object_class class = {
    .kind = KIND_REGION,
    .closed = region_closed,
    .destroy = region_destroy,
};

static const struct IND2MemoryRegion_methods methods = {
    OBJECT_METHODS(IND2MemoryRegion), region_cancel,      region_result,       region_register,
    region_deregister,                region_local_token, region_remote_token,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2MemoryRegion,
    .base = &softnd_iid_IND2Overlapped,
};

struct region *region_from(IUnknown *pointer)
{
    return (struct region *)object_from(pointer, &view, NULL);
}

struct region *region_hold(struct adapter *adapter, uint32_t token)
{
    struct token_table *table = &adapter->tokens;
    uint32_t host = ntohl(token), index = host >> 8;
    struct region *region = NULL;

    AcquireSRWLockShared(&table->lock);
    if (index != 0 && index < table->used)
        region = tokens_slot(table, index)->region;
    if (region != NULL && region->token != host)
        region = NULL;
    if (region != NULL)
        object_hold(&region->object);
    ReleaseSRWLockShared(&table->lock);
    return region;
}

struct region *region_next(struct adapter *adapter, uint32_t *slot)
{
    struct token_table *table = &adapter->tokens;
    struct region *region = NULL;

    /* Slot 0 belongs to no region, and the table has no memory before the first registration. */
    if (*slot == 0)
        *slot = 1;
    AcquireSRWLockShared(&table->lock);
    for (; *slot < table->used && region == NULL; ++*slot)
        region = tokens_slot(table, *slot)->region;
    if (region != NULL)
        object_hold(&region->object);
    ReleaseSRWLockShared(&table->lock);
    return region;
}

HRESULT region_new(struct adapter *adapter, struct region **out)
{
    static const struct object_view none;
    struct region *region = calloc(1, sizeof *region);

    if (region == NULL)
        return ND_NO_MEMORY;
    if (!object_start(&region->object, &class, &none, adapter)) {
        free(region);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = region;
    return ND_SUCCESS;
}

HRESULT region_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out)
{
    HRESULT status = object_check_iid(&view, iid, out);

    if (status != ND_SUCCESS)
        return status;
    struct region *region = calloc(1, sizeof *region);
    if (region == NULL)
        return ND_NO_MEMORY;
    status = source_start(&region->source, adapter, &region->object, file);
    if (status == ND_SUCCESS && !object_start(&region->object, &class, &view, adapter))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        source_free(&region->source);
        free(region);
        return status;
    }
    *out = region;
    return ND_SUCCESS;
}
