#include "addresses.h"
#include "nd_connector.h"
#include "listener.h"
#include "nd_objects.h"

#include <stdlib.h>

static HRESULT STDMETHODCALLTYPE adapter_overlapped_file(IND2Adapter *self, HANDLE *out)
{
    HANDLE handle = NULL;

    if (adapter_gone(nd_adapter_of(self)))
        return ND_DEVICE_REMOVED;
    if (!guarded_copy(out, &handle, sizeof handle))
        return ND_INVALID_PARAMETER_1;
    HRESULT status = overlapped_file_create(&handle);
    if (status == ND_SUCCESS)
        *out = handle;
    return status;
}

static HRESULT STDMETHODCALLTYPE adapter_query(IND2Adapter *self, ND2_ADAPTER_INFO *out, ULONG *size)
{
    struct adapter *adapter = nd_adapter_of(self);
    ND2_ADAPTER_INFO info;
    ULONG have, need = sizeof info;

    if (adapter_gone(adapter))
        return ND_DEVICE_REMOVED;
    if (!guarded_copy(&have, size, sizeof have) || !guarded_copy(size, &need, sizeof need))
        return ND_INVALID_PARAMETER_2;
    if (out == NULL || have < need)
        return ND_BUFFER_OVERFLOW;
    if (!guarded_copy(&info, out, sizeof info))
        return ND_INVALID_PARAMETER_1;
    if (info.InfoVersion != ND_VERSION_2 && info.InfoVersion != ND_VERSION_1)
        return ND_INVALID_PARAMETER;
    info = (ND2_ADAPTER_INFO){
        .InfoVersion = info.InfoVersion,
        .VendorId = SOFTND_VENDOR_ID,
        .DeviceId = SOFTND_DEVICE_ID,
        .AdapterId = SOFTND_ADAPTER_ID,
        .MaxRegistrationSize = MAX_REGISTRATION_SIZE,
        .MaxWindowSize = MAX_REGISTRATION_SIZE,
        .MaxInitiatorSge = MAX_SGE,
        .MaxReceiveSge = MAX_SGE,
        .MaxReadSge = MAX_SGE,
        .MaxTransferLength = MAX_TRANSFER_LENGTH,
        .MaxInlineDataSize = MAX_INLINE_DATA,
        .MaxInboundReadLimit = MAX_READ_LIMIT,
        .MaxOutboundReadLimit = MAX_READ_LIMIT,
        .MaxReceiveQueueDepth = MAX_QUEUE_DEPTH,
        .MaxInitiatorQueueDepth = MAX_QUEUE_DEPTH,
        .MaxSharedReceiveQueueDepth = MAX_SHARED_QUEUE_DEPTH,
        .MaxCompletionQueueDepth = MAX_CQ_DEPTH,
        .InlineRequestThreshold = MAX_INLINE_DATA,
        .LargeRequestThreshold = LARGE_REQUEST,
        .MaxCallerData = MAX_PRIVATE_DATA,
        .MaxCalleeData = MAX_PRIVATE_DATA,
        .AdapterFlags = ND_ADAPTER_FLAG_IN_ORDER_DMA_SUPPORTED | ND_ADAPTER_FLAG_CQ_RESIZE_SUPPORTED |
                        ND_ADAPTER_FLAG_LOOPBACK_CONNECTIONS_SUPPORTED,
    };
    return guarded_copy(out, &info, sizeof info) ? ND_SUCCESS : ND_INVALID_PARAMETER_1;
}

static HRESULT STDMETHODCALLTYPE adapter_addresses(IND2Adapter *self, SOCKET_ADDRESS_LIST *list, ULONG *size)
{
    if (adapter_gone(nd_adapter_of(self)))
        return ND_DEVICE_REMOVED;
    return addresses_list(list, size);
}

HRESULT nd_adapter_check(IND2Adapter *self, const struct object_view *view, REFIID iid, void **out)
{
    return adapter_gone(nd_adapter_of(self)) ? ND_DEVICE_REMOVED : com_check_iid(view, iid, out);
}

/* `with_shared`: the receives are those of `shared`. Then there is one parameter less. */
static HRESULT create_qp(IND2Adapter *self, REFIID iid, IUnknown *receive_cq, IUnknown *initiator_cq, bool with_shared,
                         IUnknown *shared, void *context, const struct queue_pair_limits *limits, void **out)
{
    struct adapter *adapter = nd_adapter_of(self);

    if (adapter_gone(adapter))
        return ND_DEVICE_REMOVED;
    struct completion_queue *receive = cq_from(receive_cq, adapter), *initiator = cq_from(initiator_cq, adapter);
    struct shared_queue *srq = with_shared ? srq_from(shared, adapter) : NULL;
    if (receive == NULL)
        return ND_INVALID_PARAMETER_2;
    if (initiator == NULL)
        return ND_INVALID_PARAMETER_3;
    if (with_shared && srq == NULL)
        return ND_INVALID_PARAMETER_4;
    if (limits->receive_depth > MAX_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_5;
    if (limits->initiator_depth > MAX_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_6;
    if (limits->receive_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_7;
    if (limits->initiator_sge > MAX_SGE)
        return with_shared ? ND_INVALID_PARAMETER_7 : ND_INVALID_PARAMETER_8;
    if (limits->inline_size > MAX_INLINE_DATA)
        return with_shared ? ND_INVALID_PARAMETER_8 : ND_INVALID_PARAMETER_9;
    return nd_qp_create(adapter, iid, receive, initiator, srq, context, limits, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_qp(IND2Adapter *self, REFIID iid, IUnknown *receive_cq,
                                                   IUnknown *initiator_cq, void *context, ULONG receive_depth,
                                                   ULONG initiator_depth, ULONG max_receive_sge,
                                                   ULONG max_initiator_sge, ULONG inline_size, void **out)
{
    const struct queue_pair_limits limits = {receive_depth, initiator_depth, max_receive_sge, max_initiator_sge,
                                             inline_size};
    return create_qp(self, iid, receive_cq, initiator_cq, false, NULL, context, &limits, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_qp_with_srq(IND2Adapter *self, REFIID iid, IUnknown *receive_cq,
                                                            IUnknown *initiator_cq, IUnknown *shared, void *context,
                                                            ULONG initiator_depth, ULONG max_initiator_sge,
                                                            ULONG inline_size, void **out)
{
    const struct queue_pair_limits limits = {0, initiator_depth, 0, max_initiator_sge, inline_size};
    return create_qp(self, iid, receive_cq, initiator_cq, true, shared, context, &limits, out);
}

HRESULT nd_adapter_start(struct nd_adapter *adapter, const struct object_class *class, const struct object_view *as)
{
    InitializeSRWLock(&adapter->sources_lock);
    com_start(&adapter->com, as);
    HRESULT status = adapter_start(&adapter->adapter, class, NULL);
    if (status == ND_SUCCESS)
        com_attach(&adapter->com, &adapter->adapter.object);
    return status;
}

static void adapter_destroy(struct object *object)
{
    struct nd_adapter *adapter = CONTAINER_OF(object, struct nd_adapter, adapter.object);

    adapter_end(&adapter->adapter);
    free(adapter);
}

static const struct object_class class = {
    .kind = KIND_ADAPTER,
    .closed = adapter_closed,
    .destroy = adapter_destroy,
};

static const struct IND2Adapter_methods methods = {
    COM_METHODS(IND2Adapter), adapter_overlapped_file, adapter_query, adapter_addresses, nd_cq_create,
    nd_region_create,         nd_window_create,        nd_srq_create, adapter_create_qp, adapter_create_qp_with_srq,
    nd_connector_create,      listener_create,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2Adapter,
};

HRESULT nd_adapter_create(REFIID iid, void **out)
{
    HRESULT status = com_check_iid(&view, iid, out);

    if (status != ND_SUCCESS)
        return status;
    struct nd_adapter *adapter = calloc(1, sizeof *adapter);
    if (adapter == NULL)
        return ND_NO_MEMORY;
    status = nd_adapter_start(adapter, &class, &view);
    if (status != ND_SUCCESS) {
        free(adapter);
        return status;
    }
    *out = adapter;
    return ND_SUCCESS;
}
