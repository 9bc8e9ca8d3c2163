/* Regions, windows, completion queues, shared receive queues and queue pairs as the consumer sees them. Each begins
 * with a struct com and leads to an object of the engine.
 *
 * NetworkDirect has no protection domains. The objects of an adapter have the adapter as their common one.
 */
#ifndef SOFTND_ND_OBJECTS_H
#define SOFTND_ND_OBJECTS_H

#include "completion_queue.h"
#include "nd_adapter.h"
#include "queue_pair.h"
#include "shared_receive_queue.h"
#include "version1.h"

struct nd_region {
    struct com com;
    ND_MR_HANDLE *handle_out; /* version 1: receives the handle when the registration completes; then NULL */
};

struct nd_window {
    struct com com;
    ND_RESULT *invalidate_result; /* version 1: written when the peer invalidates the window; may be NULL */
};

struct nd_completion_queue {
    struct com com;
    KAFFINITY affinity;
};

struct nd_queue_pair {
    struct com com;
    ULONG inbound_read_limit, outbound_read_limit; /* version 1 */
};

/* The engine's object behind an interface pointer that is known to be valid. */
static inline struct region *region_of(void *self)
{
    return CONTAINER_OF(((struct com *)self)->object, struct region, object);
}

static inline struct window *window_of(void *self)
{
    return CONTAINER_OF(((struct com *)self)->object, struct window, object);
}

static inline struct completion_queue *cq_of(void *self)
{
    return CONTAINER_OF(((struct com *)self)->object, struct completion_queue, object);
}

static inline struct shared_queue *srq_of(void *self)
{
    return CONTAINER_OF(((struct com *)self)->object, struct shared_queue, object);
}

static inline struct queue_pair *qp_of(void *self)
{
    return CONTAINER_OF(((struct com *)self)->object, struct queue_pair, object);
}

/* The engine's object behind any pointer of a consumer. NULL if it is not of this kind. */
struct region *region_from(IUnknown *pointer);
struct window *window_from(IUnknown *pointer);
struct completion_queue *cq_from(IUnknown *pointer, const struct adapter *adapter);
struct shared_queue *srq_from(IUnknown *pointer, const struct adapter *adapter);
struct queue_pair *qp_from(IUnknown *pointer);

/* memory.c */
HRESULT STDMETHODCALLTYPE nd_region_create(IND2Adapter *self, REFIID iid, HANDLE file, void **out);
/* A region that the consumer does not see and that accepts no requests: a registration of version 1. */
HRESULT nd_region_new(struct adapter *adapter, ND_MR_HANDLE *handle_out, struct region **out);
HRESULT STDMETHODCALLTYPE nd_window_create(IND2Adapter *self, REFIID iid, void **out);

/* faults.c: with what a call fails by a fault, or ND_SUCCESS. Waits if it is slow. Without locks. */
HRESULT nd_ask_fault(const struct adapter *adapter, enum fault_call call, uint32_t queue_pair);
static inline HRESULT nd_call_fault(const struct adapter *adapter, enum fault_call call)
{
    return adapter->faults != NULL ? nd_ask_fault(adapter, call, 0) : ND_SUCCESS;
}
static inline HRESULT nd_post_fault(const struct queue_pair *qp, enum fault_call call)
{
    return qp->object.adapter->faults != NULL ? nd_ask_fault(qp->object.adapter, call, qp->number) : ND_SUCCESS;
}

/* completion_queue.c */
HRESULT STDMETHODCALLTYPE nd_cq_create(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth, USHORT group,
                                       KAFFINITY affinity, void **out);
HRESULT nd_cq_new(struct adapter *adapter, const struct object_view *as, HANDLE file, ULONG depth, KAFFINITY affinity,
                  void **out);
HRESULT STDMETHODCALLTYPE nd_cq_notify(IND2CompletionQueue *self, ULONG type, OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE nd_cq_resize(IND2CompletionQueue *self, ULONG depth);
HRESULT STDMETHODCALLTYPE nd_cq_cancel(IND2CompletionQueue *self);
HRESULT notify_affinity(const struct adapter *adapter, USHORT group, KAFFINITY affinity, USHORT *out_group,
                        KAFFINITY *out_affinity);

/* shared_receive_queue.c */
HRESULT STDMETHODCALLTYPE nd_srq_create(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth, ULONG max_sge,
                                        ULONG threshold, USHORT group, KAFFINITY affinity, void **out);

/* queue_pair.c */
HRESULT nd_qp_create(struct adapter *adapter, REFIID iid, struct completion_queue *receive_cq,
                     struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
                     const struct queue_pair_limits *limits, void **out);
/* `owner` is held until the queue pair is freed; it may be NULL. */
HRESULT nd_qp_new(struct adapter *adapter, const struct object_view *as, struct completion_queue *receive_cq,
                  struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
                  const struct queue_pair_limits *limits, struct object *owner, void **out);
/* As the engine's functions, after the call's faults. */
HRESULT nd_post_data(struct queue_pair *qp, struct operation *operation, const ND2_SGE *sge, ULONG sge_count);
HRESULT nd_post_bind(struct queue_pair *qp, struct operation *operation, struct region *region, struct window *window,
                     const void *buffer, SIZE_T size);
HRESULT nd_receive(struct queue_pair *qp, void *context, const ND2_SGE *sge, ULONG sge_count);
HRESULT STDMETHODCALLTYPE nd_qp_flush(IND2QueuePair *self);
HRESULT STDMETHODCALLTYPE nd_qp_invalidate(IND2QueuePair *self, void *context, IUnknown *window_pointer, ULONG flags);

#endif
