/* Registered memory: the token table of an adapter, its regions and windows.
 *
 * A token in host order has 24 bits of index, 7 bits of generation, and 1 bit that is 1 for remote and 0 for local.
 * The consumer and the wire get it in network order. A slot's generation changes with every registration and every
 * bind. Freed slots wait in a queue. So a stale token is refused for a long time.
 *
 * Every copy to or from registered memory holds the table's lock shared, for at most one wire segment. Deregister and
 * Invalidate take it exclusively, so nothing touches the memory after they completed (D.6.6).
 */
#ifndef SOFTND_MEMORY_H
#define SOFTND_MEMORY_H

#include "../version1.h"
#include "object.h"
#include "overlapped.h"

#include <stdbool.h>
#include <stdint.h>

struct queue_pair;

struct region {
    struct object object;
    struct source source;
    /* Under the token table's exclusive lock: */
    uint32_t slot; /* 0: not registered */
    uint32_t token; /* local token in host order */
    uint64_t address, size;
    ULONG flags;
    ULONG bound_windows;
    ND_MR_HANDLE *handle_out; /* version 1: receives the handle when the registration completes; then NULL */
};

struct window {
    struct object object;
    uint32_t slot;
    volatile LONG latest_generation; /* of the last accepted Bind; 0 before the first */
    ND_RESULT *invalidate_result;    /* version 1: written when the peer invalidates the window; may be NULL */
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
    uint32_t used;       /* slots that exist; slot 0 is never used */
    uint32_t free_first, free_last;
    uint32_t free_count;
    struct window *bound;
};

enum access { ACCESS_LOCAL_READ, ACCESS_LOCAL_WRITE, ACCESS_READ_SINK, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE };

void tokens_start(struct token_table *table);
void tokens_free(struct token_table *table);

/* Whether the token (network order) grants this access to the whole range. A window also depends on `queue_pair`. */
bool memory_check(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size, enum access access,
                  const struct queue_pair *queue_pair);
/* Checks and copies in one step. False if the access is refused or the memory is missing. */
bool memory_read(struct adapter *adapter, uint32_t token, uint64_t address, void *destination, size_t size,
                 enum access access, const struct queue_pair *queue_pair);
bool memory_write(struct adapter *adapter, uint32_t token, uint64_t address, const void *source, size_t size,
                  enum access access, const struct queue_pair *queue_pair);

/* Why the peer's access is refused, for a Terminate: 'T' token, 'B' bounds, 'R' right. */
char memory_refusal(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size,
                    const struct queue_pair *queue_pair);

HRESULT region_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out);
/* A region that the consumer does not see and that accepts no requests: a registration of version 1. */
HRESULT region_new(struct adapter *adapter, struct region **out);
/* region_begin registers a buffer. region_end ends the registration, with `force` even while windows are bound. */
HRESULT region_begin(struct region *region, const void *buffer, SIZE_T size, ULONG flags);
HRESULT region_end(struct region *region, bool force);
/* The region that a local token (network order) names, held. NULL if there is none. */
struct region *region_hold(struct adapter *adapter, uint32_t token);
/* The adapter's next region from this slot on (1 is the first), held. NULL if there is none. */
struct region *region_next(struct adapter *adapter, uint32_t *slot);
HRESULT window_create(struct adapter *adapter, REFIID iid, void **out);

/* The object behind a consumer's pointer. NULL if it is not of this kind. */
struct region *region_from(IUnknown *pointer);
struct window *window_from(IUnknown *pointer);

/* A bind in the queue pair's initiator queue. */
struct bind {
    struct region *region;
    struct window *window;
    uint64_t address, size;
    ULONG flags;
    uint32_t region_token; /* to see whether the registration is still the same */
    uint8_t generation;
};

/* The synchronous half of Bind: checks the arguments and gives the window its next token. Nothing is bound yet. */
HRESULT window_prepare(struct window *window, struct region *region, const void *buffer, SIZE_T size, ULONG flags,
                       struct bind *bind);
/* Called once the request is certain to be queued. */
void window_accept(struct bind *bind);
/* Executed in the order of the initiator queue. False if the window is already bound or the region is gone. */
bool window_bind(const struct bind *bind, const struct queue_pair *queue_pair);
/* False if it is not bound through this queue pair. */
bool window_invalidate(struct window *window, const struct queue_pair *queue_pair);
/* A peer's Send with Invalidate. False if the token names no window that is bound to this queue pair. Writes the
 * window's result if it has one: the result lives as long as the window. */
bool window_invalidate_token(struct adapter *adapter, uint32_t token, const struct queue_pair *queue_pair,
                             ND_RESULT **result);
/* The token of the last accepted Bind, in network order. */
uint32_t window_token(const struct window *window);
/* The queue pair is gone: unbinds everything that was bound through it. */
void windows_forget(struct adapter *adapter, const struct queue_pair *queue_pair);

/* For region.c and window.c. The caller holds the table exclusively. Slot 0 means that no slot is left. */
uint32_t tokens_take(struct token_table *table);
void tokens_give_back(struct token_table *table, uint32_t slot);
struct token_slot *tokens_slot(struct token_table *table, uint32_t slot);
void window_unbind(struct token_table *table, struct window *window);

static inline uint32_t token_make(uint32_t slot, uint8_t generation, bool remote)
{
    return slot << 8 | (uint32_t)(generation & 127) << 1 | (remote ? 1 : 0);
}

#endif
