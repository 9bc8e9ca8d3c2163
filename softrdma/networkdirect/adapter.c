#include "addresses.h"
#include "nd_connector.h"
#include "listener.h"
#include "nd_objects.h"

#include <stdlib.h>

static struct adapter *adapter_of(IND2Adapter *self)
{
    return &((struct nd_adapter *)self)->adapter;
}

static HRESULT STDMETHODCALLTYPE adapter_overlapped_file(IND2Adapter *self, HANDLE *out)
{
    HANDLE handle = NULL;

    if (adapter_gone(adapter_of(self)))
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
    struct adapter *adapter = adapter_of(self);
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
    if (adapter_gone(adapter_of(self)))
        return ND_DEVICE_REMOVED;
    return addresses_list(list, size);
}

static HRESULT STDMETHODCALLTYPE adapter_create_cq(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth,
                                                   USHORT group, KAFFINITY affinity, void **out)
{
    struct adapter *adapter = adapter_of(self);

    UNUSED(group); /* there is only one processor group (G.1.3) */
    return adapter_gone(adapter) ? ND_DEVICE_REMOVED : nd_cq_create(adapter, iid, file, depth, affinity, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_region(IND2Adapter *self, REFIID iid, HANDLE file, void **out)
{
    struct adapter *adapter = adapter_of(self);
    return adapter_gone(adapter) ? ND_DEVICE_REMOVED : nd_region_create(adapter, iid, file, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_window(IND2Adapter *self, REFIID iid, void **out)
{
    struct adapter *adapter = adapter_of(self);
    return adapter_gone(adapter) ? ND_DEVICE_REMOVED : nd_window_create(adapter, iid, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_srq(IND2Adapter *self, REFIID iid, HANDLE file, ULONG depth,
                                                    ULONG max_sge, ULONG threshold, USHORT group, KAFFINITY affinity,
                                                    void **out)
{
    struct adapter *adapter = adapter_of(self);

    UNUSED(group);
    UNUSED(affinity);
    return adapter_gone(adapter) ? ND_DEVICE_REMOVED
                                 : nd_srq_create(adapter, iid, file, depth, max_sge, threshold, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_qp(IND2Adapter *self, REFIID iid, IUnknown *receive_cq,
                                                   IUnknown *initiator_cq, void *context, ULONG receive_depth,
                                                   ULONG initiator_depth, ULONG max_receive_sge,
                                                   ULONG max_initiator_sge, ULONG inline_size, void **out)
{
    struct adapter *adapter = adapter_of(self);
    struct queue_pair_limits limits = {
        .receive_depth = receive_depth,
        .initiator_depth = initiator_depth,
        .receive_sge = max_receive_sge,
        .initiator_sge = max_initiator_sge,
        .inline_size = inline_size,
    };

    if (adapter_gone(adapter))
        return ND_DEVICE_REMOVED;
    struct completion_queue *receive = cq_from(receive_cq, adapter), *initiator = cq_from(initiator_cq, adapter);
    if (receive == NULL)
        return ND_INVALID_PARAMETER_2;
    if (initiator == NULL)
        return ND_INVALID_PARAMETER_3;
    if (receive_depth > MAX_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_5;
    if (initiator_depth > MAX_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_6;
    if (max_receive_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_7;
    if (max_initiator_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_8;
    if (inline_size > MAX_INLINE_DATA)
        return ND_INVALID_PARAMETER_9;
    return nd_qp_create(adapter, iid, receive, initiator, NULL, context, &limits, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_qp_with_srq(IND2Adapter *self, REFIID iid, IUnknown *receive_cq,
                                                            IUnknown *initiator_cq, IUnknown *shared, void *context,
                                                            ULONG initiator_depth, ULONG max_initiator_sge,
                                                            ULONG inline_size, void **out)
{
    struct adapter *adapter = adapter_of(self);
    struct queue_pair_limits limits = {
        .initiator_depth = initiator_depth,
        .initiator_sge = max_initiator_sge,
        .inline_size = inline_size,
    };

    if (adapter_gone(adapter))
        return ND_DEVICE_REMOVED;
    struct completion_queue *receive = cq_from(receive_cq, adapter), *initiator = cq_from(initiator_cq, adapter);
    struct shared_queue *srq = srq_from(shared, adapter);
    if (receive == NULL)
        return ND_INVALID_PARAMETER_2;
    if (initiator == NULL)
        return ND_INVALID_PARAMETER_3;
    if (srq == NULL)
        return ND_INVALID_PARAMETER_4;
    if (initiator_depth > MAX_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_6;
    if (max_initiator_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_7;
    if (inline_size > MAX_INLINE_DATA)
        return ND_INVALID_PARAMETER_8;
    return nd_qp_create(adapter, iid, receive, initiator, srq, context, &limits, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_connector(IND2Adapter *self, REFIID iid, HANDLE file, void **out)
{
    struct adapter *adapter = adapter_of(self);
    return adapter_gone(adapter) ? ND_DEVICE_REMOVED : nd_connector_create(adapter, iid, file, out);
}

static HRESULT STDMETHODCALLTYPE adapter_create_listener(IND2Adapter *self, REFIID iid, HANDLE file, void **out)
{
    struct adapter *adapter = adapter_of(self);
    return adapter_gone(adapter) ? ND_DEVICE_REMOVED : listener_create(adapter, iid, file, out);
}

bool nd_adapter_start(struct nd_adapter *adapter, const struct object_class *class, const struct object_view *as)
{
    InitializeSRWLock(&adapter->sources_lock);
    com_start(&adapter->com, as);
    if (!adapter_start(&adapter->adapter, class, NULL))
        return false;
    com_attach(&adapter->com, &adapter->adapter.object);
    return true;
}

static void adapter_destroy(struct object *object)
{
    struct nd_adapter *adapter = CONTAINER_OF(object, struct nd_adapter, adapter.object);

    adapter_end(&adapter->adapter);
    free(adapter);
}

static const struct object_class class = {
    .kind = KIND_ADAPTER,
    .destroy = adapter_destroy,
};

static const struct IND2Adapter_methods methods = {
    COM_METHODS(IND2Adapter),   adapter_overlapped_file,  adapter_query,
    adapter_addresses,          adapter_create_cq,        adapter_create_region,
    adapter_create_window,      adapter_create_srq,       adapter_create_qp,
    adapter_create_qp_with_srq, adapter_create_connector, adapter_create_listener,
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
    if (!nd_adapter_start(adapter, &class, &view)) {
        free(adapter);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = adapter;
    return ND_SUCCESS;
}
