#include "shared_receive_queue.h"
#include "completion_queue.h"
#include "guarded_copy.h"
#include "queue_pair.h"

#include <stdlib.h>

bool ring_start(struct receive_ring *ring, ULONG depth)
{
    ring->depth = depth;
    ring->entries = depth == 0 ? NULL : calloc(depth, sizeof *ring->entries);
    return depth == 0 || ring->entries != NULL;
}

HRESULT sge_take(ND2_SGE *out, const ND2_SGE *sge, ULONG sge_count, ULONG max_sge, uint64_t *total)
{
    *total = 0;
    if (sge_count > max_sge)
        return ND_DATA_OVERRUN;
    if (sge_count > 0 && (sge == NULL || !guarded_copy(out, sge, sge_count * sizeof *sge)))
        return ND_ACCESS_VIOLATION;
    for (ULONG i = 0; i < sge_count; i++)
        *total += out[i].BufferLength;
    return *total > MAX_TRANSFER_LENGTH ? ND_BUFFER_OVERFLOW : ND_SUCCESS;
}

HRESULT ring_add(struct receive_ring *ring, void *context, const ND2_SGE *sge, ULONG sge_count, ULONG max_sge)
{
    uint64_t total;
    struct receive receive;

    HRESULT status = sge_take(receive.sge, sge, sge_count, max_sge, &total);
    if (status != ND_SUCCESS)
        return status;
    if (ring->count == ring->depth)
        return ND_NO_MORE_ENTRIES;
    receive.context = context;
    receive.sge_count = sge_count;
    ring->entries[(ring->first + ring->count++) % ring->depth] = receive;
    return ND_SUCCESS;
}

bool ring_take(struct receive_ring *ring, struct receive *out)
{
    if (ring->count == 0)
        return false;
    *out = ring->entries[ring->first];
    ring->first = (ring->first + 1) % ring->depth;
    ring->count--;
    return true;
}

bool srq_take(struct shared_queue *srq, struct queue_pair *queue_pair, struct receive *out)
{
    AcquireSRWLockExclusive(&srq->lock);
    bool taken = ring_take(&srq->ring, out);
    if (!taken && !queue_pair->waiting) {
        queue_pair->waiting = true;
        queue_pair->next_waiting = NULL;
        object_hold(&queue_pair->object);
        *srq->last_waiting = queue_pair;
        srq->last_waiting = &queue_pair->next_waiting;
    }
    ReleaseSRWLockExclusive(&srq->lock);
    return taken;
}

static struct queue_pair *pop_waiting(struct shared_queue *srq)
{
    AcquireSRWLockExclusive(&srq->lock);
    struct queue_pair *first = srq->waiting;
    if (first != NULL) {
        srq->waiting = first->next_waiting;
        if (srq->waiting == NULL)
            srq->last_waiting = &srq->waiting;
        first->waiting = false;
    }
    ReleaseSRWLockExclusive(&srq->lock);
    return first;
}

void srq_forget(struct shared_queue *srq, struct queue_pair *queue_pair)
{
    AcquireSRWLockExclusive(&srq->lock);
    bool found = queue_pair->waiting;
    if (found) {
        struct queue_pair **at = &srq->waiting;
        while (*at != queue_pair)
            at = &(*at)->next_waiting;
        *at = queue_pair->next_waiting;
        if (srq->last_waiting == &queue_pair->next_waiting)
            srq->last_waiting = at;
        queue_pair->waiting = false;
    }
    ReleaseSRWLockExclusive(&srq->lock);
    if (found)
        object_drop(&queue_pair->object);
}

void srq_notify(struct shared_queue *srq)
{
    AcquireSRWLockShared(&srq->lock);
    bool below = srq->ring.count < srq->threshold;
    ReleaseSRWLockShared(&srq->lock);
    if (below)
        request_complete_all(&srq->source, REQUEST_NOTIFY, ND_SUCCESS);
}

static HRESULT STDMETHODCALLTYPE srq_receive(IND2SharedReceiveQueue *self, void *context, const ND2_SGE *sge,
                                             ULONG sge_count)
{
    struct shared_queue *srq = (struct shared_queue *)self;
    struct queue_pair *queue_pair;

    if (!adapter_request(srq->object.adapter))
        return ND_DEVICE_REMOVED;
    AcquireSRWLockExclusive(&srq->lock);
    HRESULT status = ring_add(&srq->ring, context, sge, sge_count, srq->max_sge);
    ReleaseSRWLockExclusive(&srq->lock);
    if (status != ND_SUCCESS)
        return status;
    /* One entry serves one queue pair. A queue pair that finds none waits again, at the end of the list. */
    queue_pair = pop_waiting(srq);
    if (queue_pair != NULL) {
        qp_resume(queue_pair);
        object_drop(&queue_pair->object);
    }
    return ND_SUCCESS;
}

static HRESULT STDMETHODCALLTYPE srq_modify(IND2SharedReceiveQueue *self, ULONG depth, ULONG threshold)
{
    struct shared_queue *srq = (struct shared_queue *)self;
    struct receive_ring ring = {0};
    HRESULT status = ND_SUCCESS;

    if (adapter_gone(srq->object.adapter))
        return ND_DEVICE_REMOVED;
    if (depth > MAX_SHARED_QUEUE_DEPTH || threshold > MAX_SHARED_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER;
    if (depth != 0 && !ring_start(&ring, depth))
        return ND_INSUFFICIENT_RESOURCES;
    AcquireSRWLockExclusive(&srq->lock);
    if (depth != 0 && depth < srq->ring.count) {
        status = ND_BUFFER_OVERFLOW;
    } else {
        struct receive moved;
        struct receive_ring old = srq->ring;
        while (depth != 0 && ring_take(&old, &moved))
            ring.entries[ring.count++] = moved;
        if (depth != 0) {
            srq->ring = ring;
            ring.entries = old.entries;
        }
        if (threshold != 0)
            srq->threshold = threshold;
    }
    ReleaseSRWLockExclusive(&srq->lock);
    free(ring.entries);
    if (status == ND_SUCCESS)
        srq_notify(srq);
    return status;
}

static HRESULT STDMETHODCALLTYPE srq_notify_request(IND2SharedReceiveQueue *self, OVERLAPPED *overlapped)
{
    struct shared_queue *srq = (struct shared_queue *)self;

    if (adapter_gone(srq->object.adapter))
        return ND_DEVICE_REMOVED;
    HRESULT status = request_accept(&srq->source, REQUEST_NOTIFY, overlapped, NULL);
    if (status == ND_PENDING)
        srq_notify(srq);
    return status;
}

static HRESULT STDMETHODCALLTYPE srq_affinity(IND2SharedReceiveQueue *self, USHORT *group, KAFFINITY *affinity)
{
    return notify_affinity(((struct shared_queue *)self)->object.adapter, 0, 0, group, affinity);
}

static HRESULT STDMETHODCALLTYPE srq_cancel(IND2SharedReceiveQueue *self)
{
    return source_cancel(&((struct shared_queue *)self)->source);
}

static HRESULT STDMETHODCALLTYPE srq_result(IND2SharedReceiveQueue *self, OVERLAPPED *overlapped, BOOL wait)
{
    UNUSED(self);
    return overlapped_result(overlapped, wait);
}

static void srq_closed(struct object *object)
{
    source_close(&CONTAINER_OF(object, struct shared_queue, object)->source);
}

static void srq_destroy(struct object *object)
{
    struct shared_queue *srq = CONTAINER_OF(object, struct shared_queue, object);

    source_free(&srq->source);
    free(srq->ring.entries);
    free(srq);
}

static const struct object_class class = {
    .kind = KIND_SHARED_QUEUE,
    .closed = srq_closed,
    .destroy = srq_destroy,
};

static const struct IND2SharedReceiveQueue_methods methods = {
    OBJECT_METHODS(IND2SharedReceiveQueue), srq_cancel, srq_result, srq_affinity, srq_modify, srq_notify_request,
    srq_receive,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2SharedReceiveQueue,
    .base = &softnd_iid_IND2Overlapped,
};

struct shared_queue *srq_from(IUnknown *pointer, const struct adapter *adapter)
{
    return (struct shared_queue *)object_from(pointer, &view, adapter);
}

HRESULT srq_create(struct adapter *adapter, REFIID iid, HANDLE file, ULONG depth, ULONG max_sge, ULONG threshold,
                   KAFFINITY affinity, void **out)
{
    HRESULT status = object_check_iid(&view, iid, out);

    UNUSED(affinity);
    if (status != ND_SUCCESS)
        return status;
    if (depth == 0 || depth > MAX_SHARED_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_3;
    if (max_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_4;
    struct shared_queue *srq = calloc(1, sizeof *srq);
    if (srq == NULL)
        return ND_NO_MEMORY;
    InitializeSRWLock(&srq->lock);
    srq->max_sge = granted_sge(adapter, max_sge);
    srq->threshold = threshold;
    srq->last_waiting = &srq->waiting;
    status = !ring_start(&srq->ring, depth) ? ND_NO_MEMORY : source_start(&srq->source, adapter, &srq->object, file);
    if (status == ND_SUCCESS && !object_start(&srq->object, &class, &view, adapter))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        source_free(&srq->source);
        free(srq->ring.entries);
        free(srq);
        return status;
    }
    *out = srq;
    return ND_SUCCESS;
}
