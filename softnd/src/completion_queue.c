#include "completion_queue.h"
#include "adapter.h"
#include "guarded_copy.h"
#include "queue_pair.h"
#include "trace.h"

#include <stdlib.h>

static ULONG capacity_for(ULONG depth)
{
    ULONG capacity = 4;

    while (capacity <= depth)
        capacity *= 2;
    return capacity;
}

/* Pages that no entry has used cost nothing, so queues of the maximum depth are cheap. */
static struct cq_entry *ring_create(ULONG capacity)
{
    return VirtualAlloc(NULL, capacity * sizeof(struct cq_entry), MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

static void ring_free(struct cq_entry *ring)
{
    if (ring != NULL)
        VirtualFree(ring, 0, MEM_RELEASE);
}

static struct cq_entry *entry_at(struct completion_queue *cq, uint64_t sequence)
{
    return &cq->ring[sequence & (cq->capacity - 1)];
}

static uint64_t newest_that_satisfies(const struct completion_queue *cq, bool any)
{
    uint64_t newest = any ? cq->last_any : cq->last_solicited;
    return newest > cq->triggered && newest > cq->taken ? newest : 0;
}

bool cq_put(struct completion_queue *cq, const struct cq_entry *entries, ULONG count, bool *notify)
{
    bool fits = true;

    AcquireSRWLockExclusive(&cq->lock);
    for (ULONG i = 0; i < count && fits; i++) {
        fits = cq->failure == ND_SUCCESS && cq->added - cq->taken < cq->capacity;
        if (!fits)
            break;
        cq->added++;
        *entry_at(cq, cq->added) = entries[i];
        cq->last_any = cq->added;
        if (entries[i].solicited || entries[i].result.Status != ND_SUCCESS)
            cq->last_solicited = cq->added;
    }
    if (!fits && cq->failure == ND_SUCCESS) {
        TRACE("cq %p: overrun at %lu entries", (void *)cq, cq->capacity);
        cq->failure = ND_BUFFER_OVERFLOW;
    }
    *notify |= cq->failure != ND_SUCCESS || (cq->any_armed && newest_that_satisfies(cq, true) != 0) ||
               (cq->solicited_armed && newest_that_satisfies(cq, false) != 0);
    ReleaseSRWLockExclusive(&cq->lock);
    return fits;
}

/* The queue overran, so its queue pairs lose their connections (G.3.1). */
static void break_users(struct completion_queue *cq)
{
    for (;;) {
        AcquireSRWLockExclusive(&cq->lock);
        struct cq_user *user = cq->users;
        while (user != NULL && user->knows_failure)
            user = user->next;
        struct queue_pair *queue_pair = user != NULL ? user->queue_pair : NULL;
        if (user != NULL) {
            user->knows_failure = true;
            object_hold(&queue_pair->object);
        }
        ReleaseSRWLockExclusive(&cq->lock);
        if (queue_pair == NULL)
            return;
        qp_break(queue_pair);
        object_drop(&queue_pair->object);
    }
}

void cq_notify(struct completion_queue *cq)
{
    AcquireSRWLockExclusive(&cq->lock);
    HRESULT status = cq->failure;
    uint64_t newest = 0;
    if (cq->any_armed)
        newest = newest_that_satisfies(cq, true);
    else if (cq->solicited_armed)
        newest = newest_that_satisfies(cq, false);
    if (newest != 0 || status != ND_SUCCESS) {
        cq->any_armed = cq->solicited_armed = false;
        if (newest > cq->triggered)
            cq->triggered = newest;
    }
    ReleaseSRWLockExclusive(&cq->lock);
    if (newest != 0 || status != ND_SUCCESS)
        request_complete_all(&cq->source, REQUEST_NOTIFY, status);
    if (status != ND_SUCCESS)
        break_users(cq);
}

bool cq_add(struct completion_queue *cq, const struct cq_entry *entries, ULONG count)
{
    bool notify = false;
    bool fits = cq_put(cq, entries, count, &notify);

    if (notify)
        cq_notify(cq);
    return fits;
}

void cq_enlist(struct completion_queue *cq, struct cq_user *user, struct queue_pair *queue_pair)
{
    user->queue_pair = queue_pair;
    AcquireSRWLockExclusive(&cq->lock);
    user->next = cq->users;
    user->link = &cq->users;
    if (user->next != NULL)
        user->next->link = &user->next;
    cq->users = user;
    ReleaseSRWLockExclusive(&cq->lock);
}

void cq_unlist(struct completion_queue *cq, struct cq_user *user)
{
    AcquireSRWLockExclusive(&cq->lock);
    *user->link = user->next;
    if (user->next != NULL)
        user->next->link = user->link;
    ReleaseSRWLockExclusive(&cq->lock);
}

HRESULT STDMETHODCALLTYPE cq_notify_request(IND2CompletionQueue *self, ULONG type, OVERLAPPED *overlapped)
{
    struct completion_queue *cq = (struct completion_queue *)self;

    if (adapter_gone(cq->object.adapter))
        return ND_DEVICE_REMOVED;
    if (type > ND_CQ_NOTIFY_SOLICITED)
        return ND_INVALID_PARAMETER_1;
    HRESULT status = request_accept(&cq->source, REQUEST_NOTIFY, overlapped, NULL);
    if (status != ND_PENDING)
        return status;
    AcquireSRWLockExclusive(&cq->lock);
    if (type == ND_CQ_NOTIFY_ANY)
        cq->any_armed = true;
    else if (type == ND_CQ_NOTIFY_SOLICITED)
        cq->solicited_armed = true;
    ReleaseSRWLockExclusive(&cq->lock);
    cq_notify(cq);
    return ND_PENDING;
}

ULONG STDMETHODCALLTYPE cq_results(IND2CompletionQueue *self, ND2_RESULT *results, ULONG count)
{
    struct completion_queue *cq = (struct completion_queue *)self;
    ULONG given = 0;

    if (results == NULL || count == 0)
        return 0;
    AcquireSRWLockExclusive(&cq->lock);
    for (; given < count && cq->taken < cq->added; given++) {
        if (!guarded_copy(&results[given], &entry_at(cq, cq->taken + 1)->result, sizeof *results))
            break;
        cq->taken++;
    }
    ReleaseSRWLockExclusive(&cq->lock);
    /* A program that finds nothing usually asks again at once. Let a worker run, because only workers add results. */
    if (given == 0)
        SwitchToThread();
    return given;
}

HRESULT STDMETHODCALLTYPE cq_resize(IND2CompletionQueue *self, ULONG depth)
{
    struct completion_queue *cq = (struct completion_queue *)self;

    if (adapter_gone(cq->object.adapter))
        return ND_DEVICE_REMOVED;
    if (depth == 0 || depth > MAX_CQ_DEPTH)
        return ND_INVALID_PARAMETER;
    ULONG capacity = capacity_for(depth);
    struct cq_entry *ring = ring_create(capacity);
    if (ring == NULL)
        return ND_INSUFFICIENT_RESOURCES;
    HRESULT status = ND_BUFFER_OVERFLOW;
    struct cq_entry *unused = ring;
    AcquireSRWLockExclusive(&cq->lock);
    if (cq->added - cq->taken <= depth) {
        for (uint64_t at = cq->taken + 1; at <= cq->added; at++)
            ring[at & (capacity - 1)] = *entry_at(cq, at);
        unused = cq->ring;
        cq->ring = ring;
        cq->capacity = capacity;
        cq->depth = depth;
        status = ND_SUCCESS;
    }
    ReleaseSRWLockExclusive(&cq->lock);
    ring_free(unused);
    return status;
}

HRESULT notify_affinity(const struct adapter *adapter, USHORT group, KAFFINITY affinity, USHORT *out_group,
                        KAFFINITY *out_affinity)
{
    DWORD_PTR process, machine;

    if (adapter_gone(adapter))
        return ND_DEVICE_REMOVED;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &process, &machine))
        return ND_NOT_SUPPORTED;
    KAFFINITY mask = (affinity & process) != 0 ? affinity & process : process;
    if (out_group == NULL || out_affinity == NULL || !guarded_copy(out_group, &group, sizeof group) ||
        !guarded_copy(out_affinity, &mask, sizeof mask))
        return ND_INVALID_PARAMETER;
    return ND_SUCCESS;
}

static HRESULT STDMETHODCALLTYPE cq_affinity(IND2CompletionQueue *self, USHORT *group, KAFFINITY *affinity)
{
    struct completion_queue *cq = (struct completion_queue *)self;
    return notify_affinity(cq->object.adapter, cq->group, cq->affinity, group, affinity);
}

HRESULT STDMETHODCALLTYPE cq_cancel(IND2CompletionQueue *self)
{
    struct completion_queue *cq = (struct completion_queue *)self;

    AcquireSRWLockExclusive(&cq->lock);
    cq->any_armed = cq->solicited_armed = false;
    ReleaseSRWLockExclusive(&cq->lock);
    return source_cancel(&cq->source);
}

static HRESULT STDMETHODCALLTYPE cq_result(IND2CompletionQueue *self, OVERLAPPED *overlapped, BOOL wait)
{
    UNUSED(self);
    return overlapped_result(overlapped, wait);
}

static void cq_closed(struct object *object)
{
    source_close(&CONTAINER_OF(object, struct completion_queue, object)->source);
}

static void cq_destroy(struct object *object)
{
    struct completion_queue *cq = CONTAINER_OF(object, struct completion_queue, object);

    source_free(&cq->source);
    ring_free(cq->ring);
    free(cq);
}

static const struct object_class class = {
    .kind = KIND_COMPLETION_QUEUE,
    .closed = cq_closed,
    .destroy = cq_destroy,
};

static const struct IND2CompletionQueue_methods methods = {
    OBJECT_METHODS(IND2CompletionQueue), cq_cancel, cq_result, cq_affinity, cq_resize, cq_notify_request, cq_results,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2CompletionQueue,
    .base = &softnd_iid_IND2Overlapped,
};

struct completion_queue *cq_from(IUnknown *pointer, const struct adapter *adapter)
{
    return (struct completion_queue *)object_from(pointer, &view, adapter);
}

HRESULT cq_new(struct adapter *adapter, const struct object_view *as, HANDLE file, ULONG depth, KAFFINITY affinity,
               struct completion_queue **out)
{
    struct completion_queue *cq = calloc(1, sizeof *cq);
    if (cq == NULL)
        return ND_NO_MEMORY;
    InitializeSRWLock(&cq->lock);
    cq->depth = depth;
    cq->capacity = capacity_for(depth);
    cq->affinity = affinity;
    cq->ring = ring_create(cq->capacity);
    HRESULT status = cq->ring == NULL ? ND_NO_MEMORY : source_start(&cq->source, adapter, &cq->object, file);
    if (status == ND_SUCCESS && !object_start(&cq->object, &class, as, adapter))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        source_free(&cq->source);
        ring_free(cq->ring);
        free(cq);
        return status;
    }
    *out = cq;
    return ND_SUCCESS;
}

HRESULT cq_create(struct adapter *adapter, REFIID iid, HANDLE file, ULONG depth, USHORT group, KAFFINITY affinity,
                  void **out)
{
    struct completion_queue *cq;
    HRESULT status = object_check_iid(&view, iid, out);

    UNUSED(group); /* there is only one processor group (G.1.3) */
    if (status == ND_SUCCESS && (depth == 0 || depth > MAX_CQ_DEPTH))
        status = ND_INVALID_PARAMETER_3;
    if (status == ND_SUCCESS)
        status = cq_new(adapter, &view, file, depth, affinity, &cq);
    if (status == ND_SUCCESS)
        *out = cq;
    return status;
}
