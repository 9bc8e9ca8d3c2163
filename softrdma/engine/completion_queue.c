#include "completion_queue.h"
#include "adapter.h"
#include "face.h"
#include "queue_pair.h"
#include "trace.h"

#include <stdlib.h>

static uint32_t capacity_for(uint32_t depth)
{
    uint32_t capacity = 4;

    while (capacity <= depth)
        capacity *= 2;
    return capacity;
}

static struct cq_entry *entry_at(struct completion_queue *cq, uint64_t sequence)
{
    return &cq->ring[sequence & (cq->capacity - 1)];
}

/* Under the lock: whether the queue is armed and an entry satisfies that. If so, it is armed no longer, and the next
 * cq_notify() tells the face. */
static bool trigger(struct completion_queue *cq)
{
    uint64_t newest = cq->any_armed ? cq->last_any : cq->solicited_armed ? cq->last_solicited : 0;

    if (newest <= cq->triggered || newest <= cq->taken)
        return false;
    cq->any_armed = cq->solicited_armed = false;
    cq->triggered = newest;
    return cq->due = true;
}

bool cq_put(struct completion_queue *cq, const struct cq_entry *entries, uint32_t count, bool *notify)
{
    bool fits = true;

    lock_acquire(&cq->lock);
    for (uint32_t i = 0; i < count && fits; i++) {
        fits = cq->failure == ND_SUCCESS && cq->added - cq->taken < cq->capacity;
        if (!fits)
            break;
        cq->added++;
        *entry_at(cq, cq->added) = entries[i];
        if (entries[i].silent)
            continue;
        cq->last_any = cq->added;
        if (entries[i].solicited || entries[i].result.Status != ND_SUCCESS)
            cq->last_solicited = cq->added;
    }
    if (!fits && cq->failure == ND_SUCCESS) {
        TRACE("cq %p: overrun at %u entries", (void *)cq, cq->capacity);
        cq->failure = ND_BUFFER_OVERFLOW;
    }
    *notify |= trigger(cq) || cq->failure != ND_SUCCESS;
    lock_release(&cq->lock);
    return fits;
}

/* The queue overran, so its queue pairs lose their connections (G.3.1). */
static void break_users(struct completion_queue *cq)
{
    for (;;) {
        lock_acquire(&cq->lock);
        struct cq_user *user = cq->users;
        while (user != NULL && user->knows_failure)
            user = user->next;
        struct queue_pair *queue_pair = user != NULL ? user->queue_pair : NULL;
        if (user != NULL) {
            user->knows_failure = true;
            object_hold(&queue_pair->object);
        }
        lock_release(&cq->lock);
        if (queue_pair == NULL)
            return;
        qp_pump(queue_pair);
        object_drop(&queue_pair->object);
    }
}

void cq_notify(struct completion_queue *cq)
{
    lock_acquire(&cq->lock);
    nd_status status = cq->failure;
    bool tell = (cq->due || status != ND_SUCCESS) && !cq->silent;
    if (tell) {
        cq->due = false;
        cq->notifying++;
    }
    lock_release(&cq->lock);
    if (tell) {
        face_notified(cq, status);
        lock_acquire(&cq->lock);
        bool last = --cq->notifying == 0 && cq->silent;
        lock_release(&cq->lock);
        if (last)
            condition_wake_all(&cq->quiet);
    }
    if (status != ND_SUCCESS)
        break_users(cq);
}

void cq_fail(struct completion_queue *cq)
{
    lock_acquire(&cq->lock);
    if (cq->failure == ND_SUCCESS)
        cq->failure = ND_BUFFER_OVERFLOW;
    lock_release(&cq->lock);
    cq_notify(cq);
}

void cq_enlist(struct completion_queue *cq, struct cq_user *user, struct queue_pair *queue_pair)
{
    user->queue_pair = queue_pair;
    lock_acquire(&cq->lock);
    user->next = cq->users;
    user->link = &cq->users;
    if (user->next != NULL)
        user->next->link = &user->next;
    cq->users = user;
    lock_release(&cq->lock);
}

void cq_unlist(struct completion_queue *cq, struct cq_user *user)
{
    lock_acquire(&cq->lock);
    *user->link = user->next;
    if (user->next != NULL)
        user->next->link = user->link;
    lock_release(&cq->lock);
}

void cq_arm(struct completion_queue *cq, uint32_t type)
{
    lock_acquire(&cq->lock);
    if (type == ND_CQ_NOTIFY_ANY)
        cq->any_armed = true;
    else if (type == ND_CQ_NOTIFY_SOLICITED)
        cq->solicited_armed = true;
    trigger(cq);
    lock_release(&cq->lock);
    cq_notify(cq);
}

void cq_disarm(struct completion_queue *cq)
{
    lock_acquire(&cq->lock);
    cq->any_armed = cq->solicited_armed = cq->due = false;
    lock_release(&cq->lock);
}

void cq_silence(struct completion_queue *cq)
{
    lock_acquire(&cq->lock);
    cq->silent = true;
    while (cq->notifying > 0)
        condition_wait(&cq->quiet, &cq->lock);
    lock_release(&cq->lock);
}

uint32_t cq_take(struct completion_queue *cq, struct cq_entry *entries, uint32_t count)
{
    uint32_t given = 0;

    lock_acquire(&cq->lock);
    for (; given < count && cq->taken < cq->added; given++)
        entries[given] = *entry_at(cq, ++cq->taken);
    lock_release(&cq->lock);
    return given;
}

nd_status cq_resize(struct completion_queue *cq, uint32_t depth)
{
    uint32_t capacity = capacity_for(depth);
    struct cq_entry *ring = pages_take(capacity * sizeof *ring);

    if (ring == NULL)
        return ND_INSUFFICIENT_RESOURCES;
    nd_status status = ND_BUFFER_OVERFLOW;
    struct cq_entry *unused = ring;
    uint32_t unused_capacity = capacity;
    lock_acquire(&cq->lock);
    if (cq->added - cq->taken <= depth) {
        for (uint64_t at = cq->taken + 1; at <= cq->added; at++)
            ring[at & (capacity - 1)] = *entry_at(cq, at);
        unused = cq->ring;
        unused_capacity = cq->capacity;
        cq->ring = ring;
        cq->capacity = capacity;
        cq->depth = depth;
        status = ND_SUCCESS;
    }
    lock_release(&cq->lock);
    pages_give(unused, unused_capacity * sizeof *unused);
    return status;
}

void cq_forget(struct completion_queue *cq, const void *queue_pair_context)
{
    lock_acquire(&cq->lock);
    uint64_t kept = cq->added;
    for (uint64_t at = cq->added; at > cq->taken; at--)
        if (entry_at(cq, at)->result.QueuePairContext != queue_pair_context)
            *entry_at(cq, kept--) = *entry_at(cq, at);
    cq->taken = kept;
    lock_release(&cq->lock);
}

static void cq_destroy(struct object *object)
{
    struct completion_queue *cq = CONTAINER_OF(object, struct completion_queue, object);

    pages_give(cq->ring, cq->capacity * sizeof *cq->ring);
    free(cq);
}

static const struct object_class class = {
    .kind = KIND_COMPLETION_QUEUE,
    .destroy = cq_destroy,
};

nd_status cq_create(struct adapter *adapter, uint32_t depth, void *face, struct completion_queue **out)
{
    struct completion_queue *cq = calloc(1, sizeof *cq);

    if (cq == NULL)
        return ND_NO_MEMORY;
    lock_start(&cq->lock);
    condition_start(&cq->quiet);
    cq->depth = depth;
    cq->capacity = capacity_for(depth);
    cq->ring = pages_take(cq->capacity * sizeof *cq->ring);
    nd_status status = cq->ring == NULL ? ND_NO_MEMORY : ND_SUCCESS;
    if (status == ND_SUCCESS && !object_start(&cq->object, &class, adapter, face))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        pages_give(cq->ring, cq->capacity * sizeof *cq->ring);
        free(cq);
        return status;
    }
    *out = cq;
    return ND_SUCCESS;
}
