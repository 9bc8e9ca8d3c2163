#include "face.h"
#include "nd_objects.h"

void face_below_threshold(struct shared_queue *srq)
{
    request_complete_all(&((struct com *)srq->object.face)->source, REQUEST_NOTIFY, ND_SUCCESS);
}

static HRESULT STDMETHODCALLTYPE srq_post_receive(IND2SharedReceiveQueue *self, void *context, const ND2_SGE *sge,
                                                  ULONG sge_count)
{
    HRESULT status = nd_call_fault(srq_of(self)->object.adapter, PLACE_CALL_POST_SRQ_RECV);
    return status == ND_SUCCESS ? srq_receive(srq_of(self), context, sge, sge_count) : status;
}

static HRESULT STDMETHODCALLTYPE srq_change(IND2SharedReceiveQueue *self, ULONG depth, ULONG threshold)
{
    struct shared_queue *srq = srq_of(self);

    if (adapter_gone(srq->object.adapter))
        return ND_DEVICE_REMOVED;
    if (depth > MAX_SHARED_QUEUE_DEPTH || threshold > MAX_SHARED_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER;
    return srq_modify(srq, depth, threshold);
}

static HRESULT STDMETHODCALLTYPE srq_notify_request(IND2SharedReceiveQueue *self, OVERLAPPED *overlapped)
{
    struct shared_queue *srq = srq_of(self);

    if (adapter_gone(srq->object.adapter))
        return ND_DEVICE_REMOVED;
    HRESULT status = request_accept_to_wait(&((struct com *)self)->source, REQUEST_NOTIFY, overlapped, NULL);
    if (status == ND_PENDING)
        srq_notify(srq);
    return status;
}

static HRESULT STDMETHODCALLTYPE srq_affinity(IND2SharedReceiveQueue *self, USHORT *group, KAFFINITY *affinity)
{
    return notify_affinity(srq_of(self)->object.adapter, 0, 0, group, affinity);
}

static const struct IND2SharedReceiveQueue_methods methods = {
    COM_OVERLAPPED_METHODS(IND2SharedReceiveQueue, com_cancel),
    srq_affinity,
    srq_change,
    srq_notify_request,
    srq_post_receive,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2SharedReceiveQueue,
    .base = &softnd_iid_IND2Overlapped,
};

struct shared_queue *srq_from(IUnknown *pointer, const struct adapter *adapter)
{
    struct com *com = com_from(pointer, &view, adapter);
    return com == NULL ? NULL : srq_of(com);
}

HRESULT STDMETHODCALLTYPE nd_srq_create(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth, ULONG max_sge,
                                        ULONG threshold, USHORT group, KAFFINITY affinity, void **out)
{
    struct adapter *adapter = nd_adapter_of(self);
    struct shared_queue *srq;
    HRESULT status = nd_adapter_check(self, &view, iid, out);

    UNUSED(group);
    UNUSED(affinity);
    if (status != ND_SUCCESS)
        return status;
    if (depth == 0 || depth > MAX_SHARED_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_3;
    if (max_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_4;
    if ((status = nd_call_fault(adapter, PLACE_CALL_CREATE_SRQ)) != ND_SUCCESS)
        return status;
    struct com *com = com_new(sizeof *com, &view);
    status = com_open(com, file);
    if (status == ND_SUCCESS)
        status = srq_create(adapter, adapter, depth, max_sge, threshold, com, &srq);
    return com_finish(com, status, &srq->object, out);
}
