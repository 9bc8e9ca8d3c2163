#include "shared_receive_queue.h"
#include "completion_queue.h"
#include "face.h"
#include "queue_pair.h"

#include <stdlib.h>
#include <string.h>

bool ring_start(struct receive_ring *ring, uint32_t depth)
{
    ring->depth = depth;
    ring->entries = depth == 0 ? NULL : calloc(depth, sizeof *ring->entries);
    return depth == 0 || ring->entries != NULL;
}

nd_status sge_take(ND2_SGE *out, const ND2_SGE *sge, uint32_t sge_count, uint32_t max_sge, uint64_t *total)
{
    *total = 0;
    if (sge_count > max_sge)
        return ND_DATA_OVERRUN;
    if (sge_count > 0 && (sge == NULL || !guarded_copy(out, sge, sge_count * sizeof *sge)))
        return ND_ACCESS_VIOLATION;
    for (uint32_t i = 0; i < sge_count; i++)
        *total += out[i].BufferLength;
    return *total > MAX_TRANSFER_LENGTH ? ND_BUFFER_OVERFLOW : ND_SUCCESS;
}

nd_status ring_add(struct receive_ring *ring, void *context, const ND2_SGE *sge, uint32_t sge_count, uint32_t max_sge)
{
    ND2_SGE checked[MAX_SGE];
    uint64_t total;

    nd_status status = sge_take(checked, sge, sge_count, max_sge, &total);
    if (status != ND_SUCCESS)
        return status;
    if (ring->count == ring->depth)
        return ND_NO_MORE_ENTRIES;
    uint32_t last = ring->first + ring->count++;
    struct receive *receive = &ring->entries[last < ring->depth ? last : last - ring->depth];
    receive->context = context;
    receive->sge_count = sge_count;
    memcpy(receive->sge, checked, sge_count * sizeof *checked);
    return ND_SUCCESS;
}

bool ring_take(struct receive_ring *ring, struct receive *out)
{
    if (ring->count == 0)
        return false;
    const struct receive *first = &ring->entries[ring->first];
    out->context = first->context;
    out->sge_count = first->sge_count;
    memcpy(out->sge, first->sge, first->sge_count * sizeof *first->sge);
    ring->first = ring->first + 1 < ring->depth ? ring->first + 1 : 0;
    ring->count--;
    return true;
}

bool srq_take(struct shared_queue *srq, struct queue_pair *queue_pair, struct receive *out)
{
    lock_acquire(&srq->lock);
    bool taken = ring_take(&srq->ring, out);
    if (queue_pair->woken) {
        queue_pair->woken = false;
        srq->woken--;
    }
    if (!taken && !queue_pair->waiting) {
        queue_pair->waiting = true;
        queue_pair->next_waiting = NULL;
        object_hold(&queue_pair->object);
        *srq->last_waiting = queue_pair;
        srq->last_waiting = &queue_pair->next_waiting;
    }
    lock_release(&srq->lock);
    return taken;
}

/* Whether an entry is there for a queue pair that waits. Under the lock. */
static bool should_wake(const struct shared_queue *srq)
{
    return srq->waiting != NULL && srq->woken < srq->ring.count;
}

void srq_wake(struct shared_queue *srq)
{
    for (;;) {
        lock_acquire(&srq->lock);
        struct queue_pair *first = should_wake(srq) ? srq->waiting : NULL;
        if (first != NULL) {
            srq->waiting = first->next_waiting;
            if (srq->waiting == NULL)
                srq->last_waiting = &srq->waiting;
            first->waiting = false;
            first->woken = true;
            srq->woken++;
        }
        lock_release(&srq->lock);
        if (first == NULL)
            return;
        qp_resume(first);
        object_drop(&first->object);
    }
}

void srq_forget(struct shared_queue *srq, struct queue_pair *queue_pair, bool *wake)
{
    lock_acquire(&srq->lock);
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
    if (queue_pair->woken) {
        queue_pair->woken = false;
        srq->woken--;
        *wake |= should_wake(srq);
    }
    lock_release(&srq->lock);
    if (found)
        object_drop(&queue_pair->object);
}

void srq_notify(struct shared_queue *srq)
{
    lock_acquire(&srq->lock);
    bool below = srq->ring.count < srq->threshold && !srq->silent;
    srq->notifying += below;
    lock_release(&srq->lock);
    if (!below)
        return;
    face_below_threshold(srq);
    lock_acquire(&srq->lock);
    bool last = --srq->notifying == 0 && srq->silent;
    lock_release(&srq->lock);
    if (last)
        condition_wake_all(&srq->quiet);
}

void srq_silence(struct shared_queue *srq)
{
    lock_acquire(&srq->lock);
    srq->silent = true;
    while (srq->notifying > 0)
        condition_wait(&srq->quiet, &srq->lock);
    lock_release(&srq->lock);
}

nd_status srq_receive(struct shared_queue *srq, void *context, const ND2_SGE *sge, uint32_t sge_count)
{
    if (!adapter_request(srq->object.adapter, NULL))
        return ND_DEVICE_REMOVED;
    lock_acquire(&srq->lock);
    nd_status status = ring_add(&srq->ring, context, sge, sge_count, srq->max_sge);
    bool wake = should_wake(srq);
    lock_release(&srq->lock);
    if (wake)
        srq_wake(srq);
    return status;
}

nd_status srq_modify(struct shared_queue *srq, uint32_t depth, uint32_t threshold)
{
    struct receive_ring ring = {0};
    nd_status status = ND_SUCCESS;

    if (adapter_gone(srq->object.adapter))
        return ND_DEVICE_REMOVED;
    if (depth != 0 && !ring_start(&ring, depth))
        return ND_INSUFFICIENT_RESOURCES;
    lock_acquire(&srq->lock);
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
    lock_release(&srq->lock);
    free(ring.entries);
    if (status == ND_SUCCESS)
        srq_notify(srq);
    return status;
}

static void srq_destroy(struct object *object)
{
    struct shared_queue *srq = CONTAINER_OF(object, struct shared_queue, object);

    free(srq->ring.entries);
    free(srq);
}

static const struct object_class class = {
    .kind = KIND_SHARED_QUEUE,
    .destroy = srq_destroy,
};

nd_status srq_create(struct adapter *adapter, const void *domain, uint32_t depth, uint32_t max_sge, uint32_t threshold,
                     void *face, struct shared_queue **out)
{
    struct shared_queue *srq = calloc(1, sizeof *srq);

    if (srq == NULL)
        return ND_NO_MEMORY;
    lock_start(&srq->lock);
    condition_start(&srq->quiet);
    srq->domain = domain;
    srq->max_sge = granted_sge(adapter, max_sge);
    srq->threshold = threshold;
    srq->last_waiting = &srq->waiting;
    nd_status status = ring_start(&srq->ring, depth) ? ND_SUCCESS : ND_NO_MEMORY;
    if (status == ND_SUCCESS && !object_start(&srq->object, &class, adapter, face))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        free(srq->ring.entries);
        free(srq);
        return status;
    }
    *out = srq;
    return ND_SUCCESS;
}
