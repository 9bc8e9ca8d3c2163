#include "memory.h"
#include "adapter.h"
#include "queue_pair.h"

#include <stdlib.h>

/* How many freed slots wait before the first of them is used again. */
#define FREE_SLOTS_KEPT 4096u

void tokens_start(struct token_table *table)
{
    lock_start(&table->lock);
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

struct token_slot *tokens_named(struct token_table *table, uint32_t host)
{
    uint32_t index = host >> 8;
    return index != 0 && index < table->used ? tokens_slot(table, index) : NULL;
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
               (!adapter->settings.strict_read_sink || (region->flags & ND_MR_FLAG_RDMA_READ_SINK) != 0);
    case ACCESS_REMOTE_READ:
        return (region->flags & ND_MR_FLAG_ALLOW_REMOTE_READ) != 0;
    case ACCESS_REMOTE_WRITE:
        return (region->flags & 4) != 0; /* the bit of the access right, B.2.2 */
    }
    return false;
}

/* Who asks for an access: for his domain's regions, and for the windows that are bound to his queue pair. */
struct asker {
    const void *domain;
    const struct queue_pair *queue_pair; /* NULL: the access is a local one, so no window grants it */
};

/* The region that has the memory if the token grants this access, otherwise NULL. */
static const struct region *granted(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size,
                                    enum access access, struct asker asker)
{
    const struct queue_pair *queue_pair = asker.queue_pair;
    uint32_t host = ntohl(token), index = host >> 8;
    bool remote = access == ACCESS_REMOTE_READ || access == ACCESS_REMOTE_WRITE;

    const struct token_slot *slot = tokens_named(&adapter->tokens, host);
    if (slot == NULL || (access == ACCESS_REMOTE_READ && queue_pair->refuses_reads) ||
        (access == ACCESS_REMOTE_WRITE && queue_pair->refuses_writes))
        return NULL;
    const struct region *region = slot->region;
    if (region != NULL) {
        bool allowed = token_make(index, slot->generation, remote) == host && region->domain == asker.domain &&
                       inside(region->address, region->size, address, size) && region_grants(adapter, region, access);
        return allowed ? region : NULL;
    }
    const struct window *window = slot->window;
    if (!remote || window == NULL || window->region == NULL || window->queue_pair != queue_pair ||
        window->key != (uint8_t)host)
        return NULL;
    uint32_t needed = access == ACCESS_REMOTE_WRITE ? ND_OP_FLAG_ALLOW_WRITE : ND_OP_FLAG_ALLOW_READ;
    bool allowed = (window->flags & needed) != 0 && inside(window->address, window->size, address, size);
    return allowed ? window->region : NULL;
}

static bool check(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size, enum access access,
                  struct asker asker)
{
    lock_share(&adapter->tokens.lock);
    bool result = granted(adapter, token, address, size, access, asker) != NULL;
    lock_unshare(&adapter->tokens.lock);
    return result;
}

/* Into `out`, or else out of `data`. */
static bool copy(struct adapter *adapter, uint32_t token, uint64_t address, void *out, const void *data, size_t size,
                 enum access access, struct asker asker)
{
    bool result = false;

    lock_share(&adapter->tokens.lock);
    const struct region *region = granted(adapter, token, address, size, access, asker);
    if (region != NULL) {
        uint8_t *memory = (uint8_t *)(uintptr_t)(address + region->shift);
        if (region->device != NULL)
            result = region->device->copy(region->device, (uintptr_t)memory, out, data, size);
        else
            result = out != NULL ? guarded_copy(out, memory, size) : guarded_copy(memory, data, size);
    }
    lock_unshare(&adapter->tokens.lock);
    return result;
}

static struct asker asking(const struct queue_pair *queue_pair)
{
    return (struct asker){queue_pair->domain, queue_pair};
}

bool memory_check(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size, enum access access,
                  const struct queue_pair *queue_pair)
{
    return check(adapter, token, address, size, access, asking(queue_pair));
}

bool memory_read(struct adapter *adapter, uint32_t token, uint64_t address, void *destination, size_t size,
                 enum access access, const struct queue_pair *queue_pair)
{
    return copy(adapter, token, address, destination, NULL, size, access, asking(queue_pair));
}

bool memory_write(struct adapter *adapter, uint32_t token, uint64_t address, const void *source, size_t size,
                  enum access access, const struct queue_pair *queue_pair)
{
    return copy(adapter, token, address, NULL, source, size, access, asking(queue_pair));
}

bool elements_check(struct adapter *adapter, const ND2_SGE *sge, uint32_t count, enum access access, const void *domain)
{
    for (uint32_t i = 0; i < count; i++)
        if (sge[i].BufferLength > 0 && !check(adapter, sge[i].MemoryRegionToken, (uintptr_t)sge[i].Buffer,
                                              sge[i].BufferLength, access, (struct asker){domain, NULL}))
            return false;
    return true;
}

/* Into `out`, or else out of `data`. */
static bool elements_copy(struct adapter *adapter, const ND2_SGE *sge, uint32_t count, uint64_t offset, uint8_t *out,
                          const uint8_t *data, size_t size, enum access access, const void *domain)
{
    size_t done = 0;

    for (uint32_t i = 0; i < count && done < size; i++) {
        if (offset >= sge[i].BufferLength) {
            offset -= sge[i].BufferLength;
            continue;
        }
        uint64_t address = (uintptr_t)sge[i].Buffer + offset;
        uint64_t chunk = sge[i].BufferLength - offset;
        chunk = chunk < size - done ? chunk : size - done;
        if (!copy(adapter, sge[i].MemoryRegionToken, address, out != NULL ? out + done : NULL,
                  data != NULL ? data + done : NULL, chunk, access, (struct asker){domain, NULL}))
            return false;
        done += chunk;
        offset = 0;
    }
    return true;
}

bool elements_gather(struct adapter *adapter, const ND2_SGE *sge, uint32_t count, uint64_t offset, uint8_t *out,
                     size_t size, const void *domain)
{
    return elements_copy(adapter, sge, count, offset, out, NULL, size, ACCESS_LOCAL_READ, domain);
}

bool elements_scatter(struct adapter *adapter, const ND2_SGE *sge, uint32_t count, uint64_t offset, const uint8_t *data,
                      size_t size, enum access access, const void *domain)
{
    return elements_copy(adapter, sge, count, offset, NULL, data, size, access, domain);
}

char memory_refusal(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size,
                    const struct queue_pair *queue_pair)
{
    uint32_t host = ntohl(token);
    char reason = 'T';

    lock_share(&adapter->tokens.lock);
    const struct token_slot *slot = tokens_named(&adapter->tokens, host);
    const struct region *region = slot != NULL ? slot->region : NULL;
    const struct window *window = slot != NULL ? slot->window : NULL;
    if (region != NULL && token_make(host >> 8, slot->generation, true) == host && region->domain == queue_pair->domain)
        reason = inside(region->address, region->size, address, size) ? 'R' : 'B';
    else if (window != NULL && window->region != NULL && window->key == (uint8_t)host &&
             window->queue_pair == queue_pair)
        reason = inside(window->address, window->size, address, size) ? 'R' : 'B';
    lock_unshare(&adapter->tokens.lock);
    return reason;
}
