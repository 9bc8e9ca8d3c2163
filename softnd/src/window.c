#include "adapter.h"
#include "guarded_copy.h"
#include "trace.h"

#include <stdlib.h>

void window_unbind(struct token_table *table, struct window *window)
{
    struct window **at = &table->bound;

    if (window->region == NULL)
        return;
    while (*at != window)
        at = &(*at)->next_bound;
    *at = window->next_bound;
    window->region->bound_windows--;
    window->region = NULL;
    window->queue_pair = NULL;
}

uint32_t window_token(const struct window *window)
{
    return htonl(token_make(window->slot, (uint8_t)window->latest_generation, true));
}

static UINT32 STDMETHODCALLTYPE window_remote_token(IND2MemoryWindow *self)
{
    return window_token((struct window *)self);
}

HRESULT window_prepare(struct window *window, struct region *region, const void *buffer, SIZE_T size, ULONG flags,
                       struct bind *bind)
{
    struct token_table *table = &region->object.adapter->tokens;
    uint64_t address = (uintptr_t)buffer;
    HRESULT status = ND_SUCCESS;

    if (size == 0)
        return ND_INVALID_PARAMETER_5;
    AcquireSRWLockShared(&table->lock);
    if (region->slot == 0 || address < region->address || size > region->size ||
        address - region->address > region->size - size)
        status = ND_ACCESS_VIOLATION;
    else if ((flags & ND_OP_FLAG_ALLOW_WRITE) != 0 && (region->flags & ND_MR_FLAG_ALLOW_LOCAL_WRITE) == 0)
        status = ND_ACCESS_VIOLATION;
    *bind = (struct bind){
        .region = region,
        .window = window,
        .address = address,
        .size = size,
        .flags = flags,
        .region_token = region->token,
    };
    ReleaseSRWLockShared(&table->lock);
    return status;
}

void window_accept(struct bind *bind)
{
    bind->generation = (uint8_t)InterlockedIncrement(&bind->window->latest_generation) & 127;
}

bool window_bind(const struct bind *bind, const struct queue_pair *queue_pair)
{
    struct window *window = bind->window;
    struct region *region = bind->region;
    struct token_table *table = &region->object.adapter->tokens;

    AcquireSRWLockExclusive(&table->lock);
    bool allowed = window->region == NULL && region->slot != 0 && region->token == bind->region_token;
    if (allowed) {
        tokens_slot(table, window->slot)->generation = bind->generation;
        window->region = region;
        window->queue_pair = queue_pair;
        window->address = bind->address;
        window->size = bind->size;
        window->flags = bind->flags;
        window->next_bound = table->bound;
        table->bound = window;
        region->bound_windows++;
    }
    ReleaseSRWLockExclusive(&table->lock);
    return allowed;
}

bool window_invalidate(struct window *window, const struct queue_pair *queue_pair)
{
    struct token_table *table = &window->object.adapter->tokens;

    AcquireSRWLockExclusive(&table->lock);
    bool bound = window->region != NULL && window->queue_pair == queue_pair;
    if (bound)
        window_unbind(table, window);
    ReleaseSRWLockExclusive(&table->lock);
    return bound;
}

bool window_invalidate_token(struct adapter *adapter, uint32_t token, const struct queue_pair *queue_pair,
                             ND_RESULT **result)
{
    static const ND_RESULT invalidated = {.Status = ND_SUCCESS};
    struct token_table *table = &adapter->tokens;
    uint32_t host = ntohl(token), index = host >> 8;
    bool found = false;

    *result = NULL;
    AcquireSRWLockExclusive(&table->lock);
    if (index != 0 && index < table->used && (host & 1) != 0) {
        struct token_slot *slot = tokens_slot(table, index);
        struct window *window = slot->window;
        found = window != NULL && slot->generation == (host >> 1 & 127) && window->region != NULL &&
                window->queue_pair == queue_pair;
        if (found) {
            window_unbind(table, window);
            *result = window->invalidate_result;
        }
        if (*result != NULL)
            guarded_copy(*result, &invalidated, sizeof invalidated);
    }
    ReleaseSRWLockExclusive(&table->lock);
    return found;
}

void windows_forget(struct adapter *adapter, const struct queue_pair *queue_pair)
{
    struct token_table *table = &adapter->tokens;
    struct window *next;

    AcquireSRWLockExclusive(&table->lock);
    for (struct window *window = table->bound; window != NULL; window = next) {
        next = window->next_bound;
        if (window->queue_pair == queue_pair)
            window_unbind(table, window);
    }
    ReleaseSRWLockExclusive(&table->lock);
}

static void window_closed(struct object *object)
{
    struct window *window = CONTAINER_OF(object, struct window, object);
    struct token_table *table = &object->adapter->tokens;

    AcquireSRWLockExclusive(&table->lock);
    window_unbind(table, window);
    /* A Bind that is still queued must not reach the next owner of the slot. */
    tokens_slot(table, window->slot)->window = NULL;
    ReleaseSRWLockExclusive(&table->lock);
}

static void window_destroy(struct object *object)
{
    struct window *window = CONTAINER_OF(object, struct window, object);
    struct token_table *table = &object->adapter->tokens;

    AcquireSRWLockExclusive(&table->lock);
    window_unbind(table, window);
    tokens_slot(table, window->slot)->generation = (uint8_t)window->latest_generation & 127;
    tokens_give_back(table, window->slot);
    ReleaseSRWLockExclusive(&table->lock);
    free(window);
}

static const struct object_class class = {
    .kind = KIND_WINDOW,
    .closed = window_closed,
    .destroy = window_destroy,
};

static const struct IND2MemoryWindow_methods methods = {
    OBJECT_METHODS(IND2MemoryWindow),
    window_remote_token,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2MemoryWindow,
};

struct window *window_from(IUnknown *pointer)
{
    return (struct window *)object_from(pointer, &view, NULL);
}

HRESULT window_create(struct adapter *adapter, REFIID iid, void **out)
{
    struct token_table *table = &adapter->tokens;
    HRESULT status = object_check_iid(&view, iid, out);

    if (status != ND_SUCCESS)
        return status;
    struct window *window = calloc(1, sizeof *window);
    if (window == NULL)
        return ND_NO_MEMORY;
    AcquireSRWLockExclusive(&table->lock);
    window->slot = tokens_take(table);
    if (window->slot != 0) {
        struct token_slot *entry = tokens_slot(table, window->slot);
        entry->window = window;
        window->latest_generation = entry->generation;
    }
    ReleaseSRWLockExclusive(&table->lock);
    if (window->slot == 0 || !object_start(&window->object, &class, &view, adapter)) {
        AcquireSRWLockExclusive(&table->lock);
        if (window->slot != 0)
            tokens_give_back(table, window->slot);
        ReleaseSRWLockExclusive(&table->lock);
        free(window);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = window;
    return ND_SUCCESS;
}
