#include "adapter.h"
#include "face.h"
#include "queue_pair.h"
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

nd_status window_prepare(struct window *window, struct region *region, uint64_t address, uint64_t size, uint32_t flags,
                         struct bind *bind)
{
    struct token_table *table = &region->object.adapter->tokens;
    nd_status status = ND_SUCCESS;

    lock_share(&table->lock);
    if (size == 0)
        status = ND_INVALID_PARAMETER_5;
    else if (region->slot == 0 || address < region->address || size > region->size ||
             address - region->address > region->size - size)
        status = ND_ACCESS_VIOLATION;
    else if (!region->may_bind || region->domain != window->domain)
        status = ND_ACCESS_VIOLATION;
    else if ((flags & ND_OP_FLAG_ALLOW_WRITE) != 0 && (region->flags & ND_MR_FLAG_ALLOW_LOCAL_WRITE) == 0)
        status = ND_ACCESS_VIOLATION;
    bind->region = region;
    bind->window = window;
    bind->address = address;
    bind->size = size;
    bind->flags = flags;
    bind->region_token = region->token;
    lock_unshare(&table->lock);
    return status;
}

void window_accept(struct bind *bind)
{
    if (bind->has_key)
        bind->window->latest_generation = bind->key >> 1;
    else
        bind->key = (uint8_t)token_make(0, (uint8_t)++bind->window->latest_generation, true);
}

bool window_bind(const struct bind *bind, const struct queue_pair *queue_pair)
{
    struct window *window = bind->window;
    struct region *region = bind->region;
    struct token_table *table = &region->object.adapter->tokens;

    lock_acquire(&table->lock);
    bool allowed = window->region == NULL && region->slot != 0 && region->token == bind->region_token &&
                   window->domain == queue_pair->domain;
    if (allowed) {
        window->key = bind->key;
        window->region = region;
        window->queue_pair = queue_pair;
        window->address = bind->address;
        window->size = bind->size;
        window->flags = bind->flags;
        window->next_bound = table->bound;
        table->bound = window;
        region->bound_windows++;
    }
    lock_release(&table->lock);
    return allowed;
}

bool window_invalidate(struct window *window, const struct queue_pair *queue_pair)
{
    struct token_table *table = &window->object.adapter->tokens;

    lock_acquire(&table->lock);
    bool bound = window->region != NULL && window->queue_pair == queue_pair;
    if (bound)
        window_unbind(table, window);
    lock_release(&table->lock);
    return bound;
}

bool window_invalidate_token(struct adapter *adapter, uint32_t token, const struct queue_pair *queue_pair,
                             void **context)
{
    struct token_table *table = &adapter->tokens;
    uint32_t host = ntohl(token);

    *context = NULL;
    lock_acquire(&table->lock);
    const struct token_slot *slot = tokens_named(table, host);
    struct window *window = slot != NULL ? slot->window : NULL;
    bool found =
        window != NULL && window->region != NULL && window->key == (uint8_t)host && window->queue_pair == queue_pair;
    if (found) {
        window_unbind(table, window);
        *context = face_window_invalidated(window);
    }
    lock_release(&table->lock);
    return found;
}

void windows_forget(struct adapter *adapter, const struct queue_pair *queue_pair)
{
    struct token_table *table = &adapter->tokens;
    struct window *next;

    lock_acquire(&table->lock);
    for (struct window *window = table->bound; window != NULL; window = next) {
        next = window->next_bound;
        if (window->queue_pair == queue_pair)
            window_unbind(table, window);
    }
    lock_release(&table->lock);
}

static void window_closed(struct object *object)
{
    struct window *window = CONTAINER_OF(object, struct window, object);
    struct token_table *table = &object->adapter->tokens;

    lock_acquire(&table->lock);
    window_unbind(table, window);
    /* A Bind that is still queued must not reach the next owner of the slot. */
    tokens_slot(table, window->slot)->window = NULL;
    lock_release(&table->lock);
}

static void window_destroy(struct object *object)
{
    struct window *window = CONTAINER_OF(object, struct window, object);
    struct token_table *table = &object->adapter->tokens;

    lock_acquire(&table->lock);
    window_unbind(table, window);
    tokens_slot(table, window->slot)->generation = (uint8_t)window->latest_generation & 127;
    tokens_give_back(table, window->slot);
    lock_release(&table->lock);
    free(window);
}

static const struct object_class class = {
    .kind = KIND_WINDOW,
    .closed = window_closed,
    .destroy = window_destroy,
};

nd_status window_create(struct adapter *adapter, const void *domain, void *face, struct window **out)
{
    struct token_table *table = &adapter->tokens;
    struct window *window = calloc(1, sizeof *window);

    if (window == NULL)
        return ND_NO_MEMORY;
    window->domain = domain;
    lock_acquire(&table->lock);
    window->slot = tokens_take(table);
    if (window->slot != 0) {
        struct token_slot *entry = tokens_slot(table, window->slot);
        entry->window = window;
        window->latest_generation = entry->generation;
    }
    lock_release(&table->lock);
    if (window->slot == 0 || !object_start(&window->object, &class, adapter, face)) {
        lock_acquire(&table->lock);
        if (window->slot != 0)
            tokens_give_back(table, window->slot);
        lock_release(&table->lock);
        free(window);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = window;
    return ND_SUCCESS;
}
