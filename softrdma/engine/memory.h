/* Registered memory: the token table of an adapter, its regions and windows.
 *
 * A token in host order has 24 bits of index and 8 bits of key. A region's key has 7 bits of generation, and 1 bit that
 * is 1 for remote and 0 for local. A window's key has a generation too, unless the program chooses it at the bind, as
 * verbs allow. The consumer and the wire get a token in network order. A slot's generation changes with every
 * registration and every bind. Freed slots wait in a queue. So a stale token is refused for a long time.
 *
 * Regions, windows and queue pairs belong to a protection domain, which is any pointer. They work together only if they
 * have the same one.
 *
 * Every copy to or from registered memory holds the table's lock shared, for at most one wire segment. Deregister and
 * Invalidate take it exclusively, so nothing touches the memory after they completed (D.6.6).
 */
#ifndef ENGINE_MEMORY_H
#define ENGINE_MEMORY_H

#include "object.h"

struct queue_pair;

/* Memory that the processor cannot use itself, such as a GPU's. */
struct device_memory {
    /* Copies `size` bytes to `out`, or else from `data`. False if that fails. Any thread may call it, with the token
     * table's lock shared. */
    bool (*copy)(struct device_memory *memory, uint64_t address, void *out, const void *data, size_t size);
};

struct region {
    struct object object;
    const void *domain;
    struct device_memory *device; /* NULL: memory that the processor can use. Set before region_begin. */
    /* Under the token table's exclusive lock: */
    uint32_t slot;          /* 0: not registered */
    uint32_t token;         /* local token in host order */
    uint64_t address, size; /* what a peer calls them */
    uint64_t shift;         /* added to a peer's address, it gives the address of the memory; usually 0 */
    uint32_t flags;
    uint32_t bound_windows;
    bool may_bind; /* windows may be bound to it */
};

struct window {
    struct object object;
    const void *domain;
    uint32_t slot;
    _Atomic int32_t latest_generation; /* of the last accepted Bind; 0 before the first */
    /* Under the token table's exclusive lock: */
    struct region *region; /* while bound */
    const struct queue_pair *queue_pair;
    uint64_t address, size;
    uint32_t flags;
    uint8_t key;
    struct window *next_bound;
};

#define TOKEN_CHUNK  1024u
#define TOKEN_CHUNKS 4096u

struct token_slot {
    uint8_t generation;
    uint32_t next_free;
    struct region *region; /* a registered region, or */
    struct window *window; /* a window, bound or not */
};

struct token_table {
    struct lock lock;
    struct token_slot *chunks[TOKEN_CHUNKS];
    uint32_t used; /* slots that exist; slot 0 is never used */
    uint32_t free_first, free_last;
    uint32_t free_count;
    struct window *bound;
};

enum access { ACCESS_LOCAL_READ, ACCESS_LOCAL_WRITE, ACCESS_READ_SINK, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE };

/* Rights that a region may have. */
#define REGION_FLAGS                                                                               \
    (ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_ALLOW_REMOTE_READ | ND_MR_FLAG_ALLOW_REMOTE_WRITE | \
     ND_MR_FLAG_RDMA_READ_SINK | ND_MR_FLAG_DO_NOT_SECURE_VM)

void tokens_start(struct token_table *table);
void tokens_free(struct token_table *table);

/* Whether the token (network order) grants this access to the whole range. `queue_pair` is the one that asks. */
bool memory_check(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size, enum access access,
                  const struct queue_pair *queue_pair);
/* Checks and copies in one step. False if the access is refused or the memory is missing. */
bool memory_read(struct adapter *adapter, uint32_t token, uint64_t address, void *destination, size_t size,
                 enum access access, const struct queue_pair *queue_pair);
bool memory_write(struct adapter *adapter, uint32_t token, uint64_t address, const void *source, size_t size,
                  enum access access, const struct queue_pair *queue_pair);

/* The same for the elements of a request, which are local: `domain` is that of the queue that the request was posted
 * to. Each element must lie in its region as a whole, even if not all of it is used. The copies begin `offset` bytes
 * behind the start of the first element. */
bool elements_check(struct adapter *adapter, const ND2_SGE *sge, uint32_t count, enum access access,
                    const void *domain);
bool elements_gather(struct adapter *adapter, const ND2_SGE *sge, uint32_t count, uint64_t offset, uint8_t *out,
                     size_t size, const void *domain);
bool elements_scatter(struct adapter *adapter, const ND2_SGE *sge, uint32_t count, uint64_t offset, const uint8_t *data,
                      size_t size, enum access access, const void *domain);

/* Why the peer's access is refused, for a Terminate: 'T' token, 'B' bounds, 'R' right. */
char memory_refusal(struct adapter *adapter, uint32_t token, uint64_t address, uint64_t size,
                    const struct queue_pair *queue_pair);

/* A region without a registration. */
nd_status region_create(struct adapter *adapter, const void *domain, void *face, struct region **out);
/* region_begin registers a buffer. Peers know its first byte by `address`. region_end ends the registration, with
 * `force` even while windows are bound. */
nd_status region_begin(struct region *region, const void *buffer, size_t size, uint64_t address, uint32_t flags);
nd_status region_end(struct region *region, bool force);
/* In network order; 0 without a registration. */
uint32_t region_local_token(const struct region *region);
uint32_t region_remote_token(const struct region *region);
/* The region that a local token (network order) names, held. NULL if there is none. */
struct region *region_hold(struct adapter *adapter, uint32_t token);
/* The adapter's next region from this slot on (1 is the first), held. NULL if there is none. */
struct region *region_next(struct adapter *adapter, uint32_t *slot);
nd_status window_create(struct adapter *adapter, const void *domain, void *face, struct window **out);

/* A bind in the queue pair's initiator queue. */
struct bind {
    struct region *region;
    struct window *window;
    uint64_t address, size;
    uint32_t flags;
    uint32_t region_token; /* to see whether the registration is still the same */
    bool has_key;          /* the program chose `key` */
    uint8_t key;
};

/* The synchronous half of Bind: checks the arguments and gives the window its next token. Nothing is bound yet. */
nd_status window_prepare(struct window *window, struct region *region, uint64_t address, uint64_t size, uint32_t flags,
                         struct bind *bind);
/* Called once the request is certain to be queued. */
void window_accept(struct bind *bind);
/* Executed in the order of the initiator queue. False if the window is already bound or the region is gone. */
bool window_bind(const struct bind *bind, const struct queue_pair *queue_pair);
/* False if it is not bound through this queue pair. */
bool window_invalidate(struct window *window, const struct queue_pair *queue_pair);
/* A peer's Send with Invalidate, or a program's own by token. False if the token names no window that is bound to this
 * queue pair. *context is what face_window_invalidated() returned. */
bool window_invalidate_token(struct adapter *adapter, uint32_t token, const struct queue_pair *queue_pair,
                             void **context);
/* The token of the last accepted Bind, in network order. */
uint32_t window_token(const struct window *window);
/* The queue pair is gone: unbinds everything that was bound through it. */
void windows_forget(struct adapter *adapter, const struct queue_pair *queue_pair);

/* For region.c and window.c. The caller holds the table exclusively. Slot 0 means that no slot is left. */
uint32_t tokens_take(struct token_table *table);
void tokens_give_back(struct token_table *table, uint32_t slot);
struct token_slot *tokens_slot(struct token_table *table, uint32_t slot);
/* The slot that a token (host order) names, whatever its key. NULL: there is none. */
struct token_slot *tokens_named(struct token_table *table, uint32_t host);
void window_unbind(struct token_table *table, struct window *window);

static inline uint32_t token_make(uint32_t slot, uint8_t generation, bool remote)
{
    return slot << 8 | (uint32_t)(generation & 127) << 1 | (remote ? 1 : 0);
}

#endif
