#include "nd_objects.h"

HRESULT nd_post_data(struct queue_pair *qp, struct operation *operation, const ND2_SGE *sge, ULONG sge_count)
{
    HRESULT status = nd_post_fault(qp, PLACE_CALL_POST_SEND);
    return status == ND_SUCCESS ? qp_post_data(qp, operation, sge, sge_count) : status;
}

HRESULT nd_post_bind(struct queue_pair *qp, struct operation *operation, struct region *region, struct window *window,
                     const void *buffer, SIZE_T size)
{
    HRESULT status = nd_post_fault(qp, PLACE_CALL_POST_SEND);
    return status == ND_SUCCESS ? qp_post_bind(qp, operation, region, window, (uintptr_t)buffer, size) : status;
}

HRESULT nd_receive(struct queue_pair *qp, void *context, const ND2_SGE *sge, ULONG sge_count)
{
    HRESULT status = nd_post_fault(qp, PLACE_CALL_POST_RECV);
    return status == ND_SUCCESS ? qp_receive(qp, context, sge, sge_count) : status;
}

static HRESULT STDMETHODCALLTYPE qp_send(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count,
                                         ULONG flags)
{
    struct operation operation;

    if ((flags & ~(ULONG)(FENCE_AND_SILENT | ND_OP_FLAG_SEND_AND_SOLICIT_EVENT | ND_OP_FLAG_INLINE)) != 0)
        return ND_INVALID_PARAMETER_4;
    operation_begin(&operation, context, Nd2RequestTypeSend, flags);
    return nd_post_data(qp_of(self), &operation, sge, sge_count);
}

static HRESULT transfer(IND2QueuePair *self, ND2_REQUEST_TYPE type, void *context, const ND2_SGE *sge, ULONG sge_count,
                        UINT64 remote_address, UINT32 remote_token, ULONG flags, ULONG allowed)
{
    struct operation operation;

    if ((flags & ~allowed) != 0)
        return ND_INVALID_PARAMETER_6;
    operation_begin(&operation, context, type, flags);
    operation.remote_address = remote_address;
    operation.remote_token = remote_token;
    return nd_post_data(qp_of(self), &operation, sge, sge_count);
}

static HRESULT STDMETHODCALLTYPE qp_read(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count,
                                         UINT64 remote_address, UINT32 remote_token, ULONG flags)
{
    return transfer(self, Nd2RequestTypeRead, context, sge, sge_count, remote_address, remote_token, flags,
                    FENCE_AND_SILENT);
}

static HRESULT STDMETHODCALLTYPE qp_write(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count,
                                          UINT64 remote_address, UINT32 remote_token, ULONG flags)
{
    return transfer(self, Nd2RequestTypeWrite, context, sge, sge_count, remote_address, remote_token, flags,
                    FENCE_AND_SILENT | ND_OP_FLAG_INLINE);
}

static HRESULT STDMETHODCALLTYPE qp_bind(IND2QueuePair *self, void *context, IUnknown *region_pointer,
                                         IUnknown *window_pointer, const void *buffer, SIZE_T size, ULONG flags)
{
    struct region *region = region_from(region_pointer);
    struct window *window = window_from(window_pointer);
    struct operation operation;

    if ((flags & ~(ULONG)BIND_FLAGS) != 0)
        return ND_INVALID_PARAMETER_6;
    if (region == NULL)
        return ND_INVALID_PARAMETER_2;
    if (window == NULL)
        return ND_INVALID_PARAMETER_3;
    operation_begin(&operation, context, Nd2RequestTypeBind, flags);
    return nd_post_bind(qp_of(self), &operation, region, window, buffer, size);
}

HRESULT STDMETHODCALLTYPE nd_qp_invalidate(IND2QueuePair *self, void *context, IUnknown *window_pointer, ULONG flags)
{
    struct window *window = window_from(window_pointer);
    struct operation operation;

    if ((flags & ~(ULONG)FENCE_AND_SILENT) != 0)
        return ND_INVALID_PARAMETER_3;
    if (window == NULL)
        return ND_INVALID_PARAMETER_2;
    operation_begin(&operation, context, Nd2RequestTypeInvalidate, flags);
    HRESULT status = nd_post_fault(qp_of(self), PLACE_CALL_POST_SEND);
    return status == ND_SUCCESS ? qp_post_invalidate(qp_of(self), &operation, window) : status;
}

static HRESULT STDMETHODCALLTYPE qp_post_receive(IND2QueuePair *self, void *context, const ND2_SGE *sge,
                                                 ULONG sge_count)
{
    return nd_receive(qp_of(self), context, sge, sge_count);
}

HRESULT STDMETHODCALLTYPE nd_qp_flush(IND2QueuePair *self)
{
    return qp_flush(qp_of(self));
}

static const struct IND2QueuePair_methods methods = {
    COM_METHODS(IND2QueuePair), nd_qp_flush, qp_send, qp_post_receive, qp_bind, nd_qp_invalidate, qp_read, qp_write,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2QueuePair,
};

struct queue_pair *qp_from(IUnknown *pointer)
{
    struct com *com = com_from(pointer, &view, NULL);
    return com == NULL ? NULL : qp_of(com);
}

HRESULT nd_qp_new(struct adapter *adapter, const struct object_view *as, struct completion_queue *receive_cq,
                  struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
                  const struct queue_pair_limits *limits, struct object *owner, void **out)
{
    HRESULT status = nd_call_fault(adapter, PLACE_CALL_CREATE_QP);
    struct queue_pair *qp;

    if (status != ND_SUCCESS)
        return status;
    struct nd_queue_pair *face = com_new(sizeof *face, as);
    status = face == NULL
                 ? ND_NO_MEMORY
                 : qp_create(adapter, adapter, receive_cq, initiator_cq, srq, context, limits, owner, face, &qp);

    if (status == ND_SUCCESS)
        qp->number = faults_number_queue_pair(adapter->faults);
    return com_finish(face, status, &qp->object, out);
}

HRESULT nd_qp_create(struct adapter *adapter, REFIID iid, struct completion_queue *receive_cq,
                     struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
                     const struct queue_pair_limits *limits, void **out)
{
    HRESULT status = com_check_iid(&view, iid, out);

    if (status == ND_SUCCESS)
        status = nd_qp_new(adapter, &view, receive_cq, initiator_cq, srq, context, limits, NULL, out);
    return status;
}
