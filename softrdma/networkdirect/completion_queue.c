#include "face.h"
#include "nd_objects.h"

#define BATCH 32u

HRESULT STDMETHODCALLTYPE nd_cq_notify(IND2CompletionQueue *self, ULONG type, OVERLAPPED *overlapped)
{
    struct completion_queue *cq = cq_of(self);

    if (adapter_gone(cq->object.adapter))
        return ND_DEVICE_REMOVED;
    if (type > ND_CQ_NOTIFY_SOLICITED)
        return ND_INVALID_PARAMETER_1;
    cq_notify(cq);
    HRESULT status = request_accept_to_wait(&((struct com *)self)->source, REQUEST_NOTIFY, overlapped, NULL);
    if (status == ND_PENDING)
        cq_arm(cq, type);
    return status;
}

void face_notified(struct completion_queue *cq, nd_status status)
{
    request_complete_all(&((struct com *)cq->object.face)->source, REQUEST_NOTIFY, status);
}

static ULONG waiting(struct completion_queue *cq)
{
    lock_share(&cq->lock);
    uint64_t count = cq->added - cq->taken;
    lock_unshare(&cq->lock);
    return (ULONG)count;
}

/* Entries leave the queue only if they can be written to the consumer's memory. So as many places as will be used are
 * written with what they hold. */
static bool writable(ND2_RESULT *results, ULONG count)
{
    return guarded_copy(results, results, count * sizeof *results);
}

static ULONG STDMETHODCALLTYPE cq_results(IND2CompletionQueue *self, ND2_RESULT *results, ULONG count)
{
    struct completion_queue *cq = cq_of(self);
    struct cq_entry entries[BATCH];
    ND2_RESULT batch[BATCH];
    ULONG given = 0, taken = 1;

    if (results == NULL || count == 0)
        return 0;
    ULONG there = waiting(cq);
    count = count < there ? count : there;
    for (; given < count && taken > 0; given += taken) {
        ULONG wanted = count - given < BATCH ? count - given : BATCH;
        if (!writable(&results[given], wanted)) {
            /* The consumer's memory may end within the batch. */
            if (wanted == 1 || !writable(&results[given], 1))
                break;
            wanted = 1;
        }
        taken = cq_take(cq, entries, wanted);
        for (ULONG i = 0; i < taken; i++)
            batch[i] = entries[i].result;
        guarded_copy(&results[given], batch, taken * sizeof *batch);
    }
    /* A program that finds nothing usually asks again at once. Let a worker run, because only workers add results. */
    if (given == 0)
        thread_yield();
    return given;
}

HRESULT STDMETHODCALLTYPE nd_cq_resize(IND2CompletionQueue *self, ULONG depth)
{
    struct completion_queue *cq = cq_of(self);

    if (adapter_gone(cq->object.adapter))
        return ND_DEVICE_REMOVED;
    if (depth == 0 || depth > MAX_CQ_DEPTH)
        return ND_INVALID_PARAMETER;
    HRESULT status = nd_call_fault(cq->object.adapter, PLACE_CALL_RESIZE_CQ);
    return status == ND_SUCCESS ? cq_resize(cq, depth) : status;
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
    /* There is only one processor group (G.1.3). */
    return notify_affinity(cq_of(self)->object.adapter, 0, ((struct nd_completion_queue *)self)->affinity, group,
                           affinity);
}

HRESULT STDMETHODCALLTYPE nd_cq_cancel(IND2CompletionQueue *self)
{
    cq_disarm(cq_of(self));
    return com_cancel((struct com *)self);
}

static const struct IND2CompletionQueue_methods methods = {
    COM_OVERLAPPED_METHODS(IND2CompletionQueue, nd_cq_cancel), cq_affinity, nd_cq_resize, nd_cq_notify, cq_results,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2CompletionQueue,
    .base = &softnd_iid_IND2Overlapped,
};

struct completion_queue *cq_from(IUnknown *pointer, const struct adapter *adapter)
{
    struct com *com = com_from(pointer, &view, adapter);
    return com == NULL ? NULL : cq_of(com);
}

HRESULT nd_cq_new(struct adapter *adapter, const struct object_view *as, HANDLE file, ULONG depth, KAFFINITY affinity,
                  void **out)
{
    struct completion_queue *cq;
    HRESULT status = nd_call_fault(adapter, PLACE_CALL_CREATE_CQ);

    if (status != ND_SUCCESS)
        return status;
    struct nd_completion_queue *face = com_new(sizeof *face, as);
    status = com_open(face, file);
    if (status == ND_SUCCESS) {
        face->affinity = affinity;
        status = cq_create(adapter, depth, face, &cq);
    }
    return com_finish(face, status, &cq->object, out);
}

HRESULT STDMETHODCALLTYPE nd_cq_create(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth, USHORT group,
                                       KAFFINITY affinity, void **out)
{
    HRESULT status = nd_adapter_check(self, &view, iid, out);

    UNUSED(group); /* there is only one processor group (G.1.3) */
    if (status == ND_SUCCESS && (depth == 0 || depth > MAX_CQ_DEPTH))
        status = ND_INVALID_PARAMETER_3;
    return status == ND_SUCCESS ? nd_cq_new(nd_adapter_of(self), &view, file, depth, affinity, out) : status;
}
