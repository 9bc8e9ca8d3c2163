#include "memory.h"
#include "adapter.h"
#include "guarded_copy.h"

#include <stdlib.h>

/* How many freed slots wait before the first of them is used again. */
#define FREE_SLOTS_KEPT 4096u

void tokens_start(struct token_table *table)
{
    InitializeSRWLock(&table->lock);
    table->used = 1;
}

void tokens_free(struct token_table *table)
{
    for (uint32_t i = 0; i < TOKEN_CHUNKS; i++)
        free(table->chunks[i]);
}

struct token_slot *tokens_slot(struct token_table *table, uint32_t slot)
{
    return &table->chunks[slot / TOKEN_CHUNK][slot % TOKEN_CHUNK];
}

uint32_t tokens_take(struct token_table *table)
{
    bool may_grow = table->used < TOKEN_CHUNK * TOKEN_CHUNKS;

    if (may_grow && (table->free_count < FREE_SLOTS_KEPT || table->free_count == 0)) {
        uint32_t slot = table->used;
        struct token_slot **chunk = &table->chunks[slot / TOKEN_CHUNK];
        if (*chunk == NULL)
            *chunk = calloc(TOKEN_CHUNK, sizeof **chunk);
        if (*chunk != NULL) {
            table->used++;
            return slot;
        }
    }
    if (table->free_count == 0)
        return 0;
    uint32_t slot = table->free_first;
    table->free_first = tokens_slot(table, slot)->next_free;
    table->free_count--;
    return slot;
}

void tokens_give_back(struct token_table *table, uint32_t slot)
{
    struct token_slot *entry = tokens_slot(table, slot);

    entry->region = NULL;
    entry->window = NULL;
    entry->next_free = 0;
    if (table->free_count++ == 0)
        table->free_first = slot;
    else
        tokens_slot(table, table->free_last)->next_free = slot;
    table->free_last = slot;
}

static bool inside(uint64_t base, uint64_t length, uint64_t address, uint64_t size)
{
    return address >= base && size <= length && address - base <= length - size;
}

static bool region_grants(const struct adapter *adapter, const struct region *region, enum access access)
{
    switch (access) {
    case ACCESS_LOCAL_READ:
        return true;
    case ACCESS_LOCAL_WRITE:
        return (region->flags & ND_MR_FLAG_ALLOW_LOCAL_WRITE) != 0;
    case ACCESS_READ_SINK:
        return (region->flags & ND_MR_FLAG_ALLOW_LOCAL_WRITE) != 0 &&
               (!adapter->switches.strict_read_sink || (region->flags & ND_MR_FLAG_RDMA_READ_SINK) != 0);
    case ACCESS_REMOTE_READ:
        return (region->flags & ND_MR_FLAG_ALLOW_REMOTE_READ) != 0;
    case ACCESS_REMOTE_WRITE:
        return (region->flags & 4) != 0; /* the bit of the access right, B.2.2 */
    }
    return false;
}

static bool granted(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size, enum access access,
                    const struct queue_pair *queue_pair)
{
    struct token_table *table = &adapter->tokens;
    uint32_t host = ntohl(token), index = host >> 8;
    bool remote = access == ACCESS_REMOTE_READ || access == ACCESS_REMOTE_WRITE;

    if (index == 0 || index >= table->used || ((host & 1) != 0) != remote)
        return false;
    const struct token_slot *slot = tokens_slot(table, index);
    if (slot->generation != (host >> 1 & 127))
        return false;
    if (slot->region != NULL)
        return inside(slot->region->address, slot->region->size, address, size) &&
               region_grants(adapter, slot->region, access);
    const struct window *window = slot->window;
    if (window == NULL || window->region == NULL || window->queue_pair != queue_pair)
        return false;
    ULONG needed = access == ACCESS_REMOTE_WRITE ? ND_OP_FLAG_ALLOW_WRITE : ND_OP_FLAG_ALLOW_READ;
    return remote && (window->flags & needed) != 0 && inside(window->address, window->size, address, size);
}

bool memory_check(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size, enum access access,
                  const struct queue_pair *queue_pair)
{
    AcquireSRWLockShared(&adapter->tokens.lock);
    bool result = granted(adapter, token, address, size, access, queue_pair);
    ReleaseSRWLockShared(&adapter->tokens.lock);
    return result;
}

bool memory_read(struct adapter *adapter, uint32_t token, uint64_t address, void *destination, size_t size,
                 enum access access, const struct queue_pair *queue_pair)
{
    AcquireSRWLockShared(&adapter->tokens.lock);
    bool result = granted(adapter, token, address, size, access, queue_pair) &&
                  guarded_copy(destination, (const void *)(uintptr_t)address, size);
    ReleaseSRWLockShared(&adapter->tokens.lock);
    return result;
}

bool memory_write(struct adapter *adapter, uint32_t token, uint64_t address, const void *source, size_t size,
                  enum access access, const struct queue_pair *queue_pair)
{
    AcquireSRWLockShared(&adapter->tokens.lock);
    bool result = granted(adapter, token, address, size, access, queue_pair) &&
                  guarded_copy((void *)(uintptr_t)address, source, size);
    ReleaseSRWLockShared(&adapter->tokens.lock);
    return result;
}

char memory_refusal(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size,
                    const struct queue_pair *queue_pair)
{
    uint32_t host = ntohl(token), index = host >> 8;
    char reason = 'T';

    AcquireSRWLockShared(&adapter->tokens.lock);
    if (index != 0 && index < adapter->tokens.used && (host & 1) != 0) {
        const struct token_slot *slot = tokens_slot(&adapter->tokens, index);
        const struct window *window = slot->window;
        if (slot->generation != (host >> 1 & 127))
            reason = 'T';
        else if (slot->region != NULL)
            reason = inside(slot->region->address, slot->region->size, address, size) ? 'R' : 'B';
        else if (window != NULL && window->region != NULL && window->queue_pair == queue_pair)
            reason = inside(window->address, window->size, address, size) ? 'R' : 'B';
    }
    ReleaseSRWLockShared(&adapter->tokens.lock);
    return reason;
}
