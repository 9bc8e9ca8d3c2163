/* The adapter: limits, settings, faults, and the token table of its memory. */
#ifndef ENGINE_ADAPTER_H
#define ENGINE_ADAPTER_H

#include "memory.h"
#include "object.h"
#include "faults.h"
#include "settings.h"
#include "transport.h"

#define MAX_REGISTRATION_SIZE ((size_t)1 << 36)
#define MAX_SGE               16u
#define MAX_TRANSFER_LENGTH   (1u << 30)
#define MAX_INLINE_DATA       236u
#define MAX_READ_LIMIT        64u
/* Odd, so one less than this is even. Some programs use that depth, and return credits for half of it at a time. */
#define MAX_QUEUE_DEPTH        1025u
#define MAX_SHARED_QUEUE_DEPTH 4096u
/* libfabric asks for 262,144. The ring has a power of two above the depth, so this costs as much as that. */
#define MAX_CQ_DEPTH     524287u
#define MAX_PRIVATE_DATA 508u /* what an enhanced MPA frame can carry */
#define MIN_GRANTED_SGE  4u

struct adapter {
    struct object object;
    struct settings settings;
    struct faults *_Atomic faults; /* NULL: none, and there was none before */
    struct token_table tokens;
    struct timer timed; /* of faults that happen at a time; those up to these were there */
    uint64_t timed_ms;
    unsigned timed_number;
    _Atomic int32_t removed;
    _Atomic bool port_down;
};

/* The number of elements that a request may have if the program asked for this many. Some programs ask for 1 and use
 * 2. */
static inline uint32_t granted_sge(const struct adapter *adapter, uint32_t asked)
{
    return adapter->settings.exact_sge || asked > MIN_GRANTED_SGE ? asked : MIN_GRANTED_SGE;
}

/* adapter_start needs zeroed memory. ND_INSUFFICIENT_RESOURCES: the workers cannot be started; ND_INVALID_PARAMETER:
 * the scenario of faults cannot be used. adapter_end does not free the memory. The class is the face's, and its
 * closed() calls adapter_closed(). */
nd_status adapter_start(struct adapter *adapter, const struct object_class *class, void *face);
void adapter_closed(struct object *object);
void adapter_end(struct adapter *adapter);
/* Ends all connections and whatever waits. Later calls find the adapter gone. */
void adapter_remove(struct adapter *adapter);
static inline bool adapter_gone(const struct adapter *adapter)
{
    return adapter->removed != 0;
}
/* A request is about to be posted. False if the adapter is gone. The queue pair is NULL for a shared receive queue. */
static inline bool adapter_request(struct adapter *adapter, struct queue_pair *queue_pair)
{
    if (adapter->faults != NULL)
        faults_at_adapter(adapter, queue_pair);
    return !adapter_gone(adapter);
}

#endif
