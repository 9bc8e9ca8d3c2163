/* Registered memory: the token table of an adapter, its regions and windows.
 *
 * A token's bits in host order: 24 of index, 7 of generation, 1 that tells remote (1) from local (0). The consumer
 * and the wire get it in network order. A slot's generation changes with every registration and every bind, and
 * freed slots wait in a queue, so that a stale token is refused for long.
 *
 * Every copy to or from registered memory is made under the table's shared lock, at most one wire segment at a time;
 * Deregister and Invalidate take it exclusively, so that nothing touches the memory once they completed (D.6.6).
 */
#ifndef SOFTND_MEMORY_H
#define SOFTND_MEMORY_H

#include "../nd1.h"
#include "object.h"
#include "overlapped.h"

#include <stdbool.h>
#include <stdint.h>

struct queue_pair;

struct region {
    struct object object;
    struct source source;
    /* Under the token table's exclusive lock: */
    uint32_t slot; /* 0 when not registered */
    uint32_t token; /* host order, local */
    uint64_t address, size;
    ULONG flags;
    ULONG bound_windows;
    ND_MR_HANDLE *handle_out; /* version 1: where the handle goes when the registration completes; then NULL */
};

struct window {
    struct object object;
    uint32_t slot;
    volatile LONG latest_generation; /* of the last Bind that was accepted; 0 before the first */
    ND_RESULT *invalidate_result;    /* version 1: reported when the peer invalidates the window; may be NULL */
    /* Under the token table's exclusive lock: */
    struct region *region; /* while bound */
    const struct queue_pair *queue_pair;
    uint64_t address, size;
    ULONG flags;
    struct window *next_bound;
};

#define TOKEN_CHUNK 1024u
#define TOKEN_CHUNKS 4096u

struct token_slot {
    uint8_t generation;
    uint32_t next_free;
    struct region *region; /* a registered region, or */
    struct window *window; /* a window, bound or not */
};

struct token_table {
    SRWLOCK lock;
    struct token_slot *chunks[TOKEN_CHUNKS];
    uint32_t used;       /* slots that exist; slot 0 is never given out */
    uint32_t free_first, free_last;
    uint32_t free_count;
    struct window *bound;
};

enum access { ACCESS_LOCAL_READ, ACCESS_LOCAL_WRITE, ACCESS_READ_SINK, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE };

void tokens_start(struct token_table *table);
void tokens_free(struct token_table *table);

/* Whether the token (network order) grants the access on the whole range. `queue_pair` matters for windows. */
bool memory_check(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size, enum access access,
                  const struct queue_pair *queue_pair);
/* Checks and copies in one step; false when refused or when the memory is not there. */
bool memory_read(struct adapter *adapter, uint32_t token, uint64_t address, void *destination, size_t size,
                 enum access access, const struct queue_pair *queue_pair);
bool memory_write(struct adapter *adapter, uint32_t token, uint64_t address, const void *source, size_t size,
                  enum access access, const struct queue_pair *queue_pair);

/* Why the peer's access is refused, for a Terminate: 'T' for the token, 'B' for the bounds, 'R' for the right. */
char memory_refusal(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size,
                    const struct queue_pair *queue_pair);

HRESULT region_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out);
/* One that the consumer does not see and that accepts no requests: a registration of version 1. */
HRESULT region_new(struct adapter *adapter, struct region **out);
/* Registers a buffer; ends the registration, with `force` even if windows are bound to it. */
HRESULT region_begin(struct region *region, const void *buffer, SIZE_T size, ULONG flags);
HRESULT region_end(struct region *region, bool force);
/* The region that a local token (network order) names, held; NULL when there is none. */
struct region *region_hold(struct adapter *adapter, uint32_t token);
/* The adapter's next region from this slot (1 is the first) on, held; NULL when there is no other. */
struct region *region_next(struct adapter *adapter, uint32_t *slot);
HRESULT window_create(struct adapter *adapter, REFIID iid, void **out);

/* Region and window behind consumers' pointers; NULL when they are not. */
struct region *region_from(IUnknown *pointer);
struct window *window_from(IUnknown *pointer);

/* A bind in the queue pair's initiator queue. */
struct bind {
    struct region *region;
    struct window *window;
    uint64_t address, size;
    ULONG flags;
    uint32_t region_token; /* tells whether the region is still what it was */
    uint8_t generation;
};

/* The inline part: checks and gives the window its next token. Nothing is bound yet. */
HRESULT window_prepare(struct window *window, struct region *region, const void *buffer, SIZE_T size, ULONG flags,
                       struct bind *bind);
/* Once the request is sure to be queued. */
void window_accept(struct bind *bind);
/* In the order of the initiator queue: false when already bound or when the region went meanwhile. */
bool window_bind(const struct bind *bind, const struct queue_pair *queue_pair);
/* False when it is not bound through this queue pair. */
bool window_invalidate(struct window *window, const struct queue_pair *queue_pair);
/* A peer's Send with Invalidate: false when the token names no window bound to this queue pair. The window's result,
 * if it has one, is written: as long as the window exists, so does the result. */
bool window_invalidate_token(struct adapter *adapter, uint32_t token, const struct queue_pair *queue_pair,
                             ND_RESULT **result);
/* In network order; that of the last Bind that was accepted. */
uint32_t window_token(const struct window *window);
/* The queue pair is gone: whatever is bound through it is bound no more. */
void windows_forget(struct adapter *adapter, const struct queue_pair *queue_pair);

/* For region.c and window.c; the caller has the table exclusively. A slot of 0 means that none is left. */
uint32_t tokens_take(struct token_table *table);
void tokens_give_back(struct token_table *table, uint32_t slot);
struct token_slot *tokens_slot(struct token_table *table, uint32_t slot);
void window_unbind(struct token_table *table, struct window *window);

static inline uint32_t token_make(uint32_t slot, uint8_t generation, bool remote)
{
    return slot << 8 | (uint32_t)(generation & 127) << 1 | (remote ? 1 : 0);
}

#endif
