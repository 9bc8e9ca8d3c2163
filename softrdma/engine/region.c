#include "adapter.h"
#include "trace.h"

#include <stdlib.h>

static nd_status check_arguments(const struct region *region, const void *buffer, size_t size, uint64_t address,
                                 uint32_t flags)
{
    if ((flags & ~REGION_FLAGS) != 0)
        return ND_INVALID_PARAMETER_3;
    if (size == 0)
        return buffer == NULL ? ND_INVALID_PARAMETER : ND_INVALID_BUFFER_SIZE;
    if (size > MAX_REGISTRATION_SIZE)
        return ND_INVALID_PARAMETER;
    if (region->device == NULL &&
        !memory_allows(buffer, size, (flags & (ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_ALLOW_REMOTE_WRITE)) != 0))
        return ND_ACCESS_VIOLATION;
    return address + (size - 1) < address ? ND_INVALID_PARAMETER : ND_SUCCESS;
}

static nd_status register_buffer(struct region *region, const void *buffer, size_t size, uint64_t address,
                                 uint32_t flags)
{
    struct token_table *table = &region->object.adapter->tokens;
    nd_status status = ND_INVALID_DEVICE_STATE;

    lock_acquire(&table->lock);
    if (region->slot == 0) {
        uint32_t slot = tokens_take(table);
        status = slot == 0 ? ND_INSUFFICIENT_RESOURCES : ND_SUCCESS;
        if (slot != 0) {
            struct token_slot *entry = tokens_slot(table, slot);
            entry->generation = (entry->generation + 1) & 127;
            entry->region = region;
            region->slot = slot;
            region->token = token_make(slot, entry->generation, false);
            region->address = address;
            region->shift = (uintptr_t)buffer - address;
            region->size = size;
            /* A remote right implies the local one (D.3.4). */
            region->flags = (flags & 4) != 0 ? flags | ND_MR_FLAG_ALLOW_LOCAL_WRITE : flags;
        }
    }
    lock_release(&table->lock);
    return status;
}

nd_status region_end(struct region *region, bool force)
{
    struct token_table *table = &region->object.adapter->tokens;
    nd_status status = ND_INVALID_DEVICE_STATE;

    lock_acquire(&table->lock);
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
    lock_release(&table->lock);
    return status;
}

nd_status region_begin(struct region *region, const void *buffer, size_t size, uint64_t address, uint32_t flags)
{
    nd_status status = check_arguments(region, buffer, size, address, flags);

    if (status == ND_SUCCESS)
        status = register_buffer(region, buffer, size, address, flags);
    TRACE("region %p: register %p+%llu flags 0x%x: 0x%08x", (void *)region, buffer, (unsigned long long)size, flags,
          (unsigned)status);
    return status;
}

uint32_t region_local_token(const struct region *region)
{
    return htonl(region->token);
}

uint32_t region_remote_token(const struct region *region)
{
    return region->token == 0 ? 0 : htonl(region->token | 1);
}

static void region_closed(struct object *object)
{
    struct region *region = CONTAINER_OF(object, struct region, object);

    /* The region was released while registered: the registration ends and stays counted as leaked (D.6.7). */
    if (region_end(region, true) == ND_SUCCESS)
        TRACE("region %p: released while registered", (void *)object);
}

static void region_destroy(struct object *object)
{
    free(CONTAINER_OF(object, struct region, object));
}

static const struct object_class class = {
    .kind = KIND_REGION,
    .closed = region_closed,
    .destroy = region_destroy,
};

struct region *region_hold(struct adapter *adapter, uint32_t token)
{
    struct token_table *table = &adapter->tokens;
    uint32_t host = ntohl(token);

    lock_share(&table->lock);
    const struct token_slot *slot = tokens_named(table, host);
    struct region *region = slot != NULL ? slot->region : NULL;
    if (region != NULL && region->token != host)
        region = NULL;
    if (region != NULL)
        object_hold(&region->object);
    lock_unshare(&table->lock);
    return region;
}

struct region *region_next(struct adapter *adapter, uint32_t *slot)
{
    struct token_table *table = &adapter->tokens;
    struct region *region = NULL;

    /* Slot 0 belongs to no region, and the table has no memory before the first registration. */
    if (*slot == 0)
        *slot = 1;
    lock_share(&table->lock);
    for (; *slot < table->used && region == NULL; ++*slot)
        region = tokens_slot(table, *slot)->region;
    if (region != NULL)
        object_hold(&region->object);
    lock_unshare(&table->lock);
    return region;
}

nd_status region_create(struct adapter *adapter, const void *domain, void *face, struct region **out)
{
    struct region *region = calloc(1, sizeof *region);

    if (region == NULL)
        return ND_NO_MEMORY;
    region->domain = domain;
    region->may_bind = true;
    if (!object_start(&region->object, &class, adapter, face)) {
        free(region);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = region;
    return ND_SUCCESS;
}
