/* INDAdapter: the file on which all requests complete, and registered memory.
 *
 * A registration belongs to the adapter object. Registrations that are left when the adapter is released end with it.
 */
#include "objects.h"

#include "../addresses.h"
#include "../listener.h"
#include "trace.h"

#include <stdlib.h>

static bool gone(INDAdapter *self)
{
    return adapter_gone(&((struct nd_adapter *)self)->adapter);
}

static HANDLE STDMETHODCALLTYPE adapter_file(INDAdapter *self)
{
    return ((struct version1_adapter *)self)->file;
}

static HRESULT STDMETHODCALLTYPE adapter_query(INDAdapter *self, DWORD version, ND_ADAPTER_INFO *out, SIZE_T *size)
{
    static const ND_ADAPTER_INFO info = {
        .VendorId = SOFTND_VENDOR_ID,
        .DeviceId = SOFTND_DEVICE_ID,
        .MaxInboundSge = MAX_SGE,
        .MaxInboundRequests = MAX_QUEUE_DEPTH,
        .MaxInboundLength = MAX_TRANSFER_LENGTH,
        .MaxOutboundSge = MAX_SGE,
        .MaxOutboundRequests = MAX_QUEUE_DEPTH,
        .MaxOutboundLength = MAX_TRANSFER_LENGTH,
        .MaxInlineData = MAX_INLINE_DATA,
        .MaxInboundReadLimit = MAX_READ_LIMIT,
        .MaxOutboundReadLimit = MAX_READ_LIMIT,
        .MaxCqEntries = MAX_CQ_DEPTH,
        .MaxRegistrationSize = MAX_REGISTRATION_SIZE,
        .MaxWindowSize = MAX_REGISTRATION_SIZE,
        .LargeRequestThreshold = LARGE_REQUEST,
        .MaxCallerData = MAX_PRIVATE_DATA,
        .MaxCalleeData = MAX_PRIVATE_DATA,
    };
    SIZE_T have = sizeof info, need = sizeof info;

    if (gone(self))
        return ND_DEVICE_REMOVED;
    if (version != ND_VERSION_1)
        return ND_INVALID_PARAMETER_1;
    if (size != NULL && (!guarded_copy(&have, size, sizeof have) || !guarded_copy(size, &need, sizeof need)))
        return ND_INVALID_PARAMETER_3;
    if (out == NULL || have < need)
        return ND_BUFFER_OVERFLOW;
    return guarded_copy(out, &info, sizeof info) ? ND_SUCCESS : ND_INVALID_PARAMETER_2;
}

static HRESULT STDMETHODCALLTYPE adapter_control(INDAdapter *self, DWORD code, const void *in, SIZE_T in_size,
                                                 void *out, SIZE_T out_size, SIZE_T *returned, OVERLAPPED *overlapped)
{
    UNUSED(code);
    UNUSED(in);
    UNUSED(in_size);
    UNUSED(out);
    UNUSED(out_size);
    UNUSED(returned);
    UNUSED(overlapped);
    return gone(self) ? ND_DEVICE_REMOVED : ND_NOT_SUPPORTED;
}

static HRESULT STDMETHODCALLTYPE adapter_create_cq(INDAdapter *self, SIZE_T entries, INDCompletionQueue **out)
{
    struct version1_adapter *adapter = (struct version1_adapter *)self;

    if (!version1_clear(out))
        return ND_INVALID_PARAMETER_2;
    if (gone(self))
        return ND_DEVICE_REMOVED;
    if (entries == 0 || entries > MAX_CQ_DEPTH)
        return ND_INVALID_PARAMETER_1;
    return nd_cq_new(&adapter->base.adapter, &version1_completion_queue_view, adapter->file, (ULONG)entries, 0,
                     (void **)out);
}

/* ---- Memory ---- */

static HRESULT STDMETHODCALLTYPE adapter_register(INDAdapter *self, const void *buffer, SIZE_T size,
                                                  OVERLAPPED *overlapped, ND_MR_HANDLE *out)
{
    struct version1_adapter *adapter = (struct version1_adapter *)self;
    ND_MR_HANDLE probe;
    struct region *region;

    if (gone(self))
        return ND_DEVICE_REMOVED;
    if (overlapped == NULL)
        return ND_INVALID_PARAMETER;
    if (!guarded_copy(&probe, out, sizeof probe))
        return ND_INVALID_PARAMETER_4;
    if (size == 0)
        return ND_ACCESS_VIOLATION;
    HRESULT status = nd_region_new(&adapter->base.adapter, out, &region);
    if (status != ND_SUCCESS)
        return status;
    status = nd_call_fault(&adapter->base.adapter, PLACE_CALL_REG_MR);
    if (status == ND_SUCCESS)
        status = region_begin(region, buffer, size, (uintptr_t)buffer,
                              ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_RDMA_READ_SINK);
    if (status == ND_SUCCESS)
        status = request_accept(&adapter->base.com.source, REQUEST_REGION, overlapped, region);
    if (status != ND_PENDING) {
        object_close(&region->object);
        return status;
    }
    registration_made();
    request_complete(&adapter->base.com.source, REQUEST_REGION, ND_SUCCESS);
    return ND_PENDING;
}

/* Returns ND_INVALID_DEVICE_STATE if another call ended the registration first. */
static HRESULT forget(struct region *region, bool force)
{
    HRESULT status = region_end(region, force);

    if (status != ND_SUCCESS)
        return status;
    registration_ended();
    object_close(&region->object);
    return ND_SUCCESS;
}

/* The consumer learns of a registration just before its completion. It cannot deregister it earlier, so the region
 * still exists here. */
static HRESULT registered(struct source *source, struct request *request, HRESULT status)
{
    struct region *region = request->subject;

    UNUSED(source);
    if (region == NULL)
        return status;
    struct nd_region *face = region->object.face;
    ND_MR_HANDLE handle = (ND_MR_HANDLE)(uintptr_t)region_local_token(region), *out = face->handle_out;
    face->handle_out = NULL;
    if (status == ND_SUCCESS && !guarded_copy(out, &handle, sizeof handle))
        status = ND_ACCESS_VIOLATION;
    if (status != ND_SUCCESS)
        forget(region, true);
    return status;
}

static HRESULT STDMETHODCALLTYPE adapter_deregister(INDAdapter *self, ND_MR_HANDLE memory, OVERLAPPED *overlapped)
{
    struct version1_adapter *adapter = (struct version1_adapter *)self;
    char probe[sizeof *overlapped];

    if (overlapped == NULL || !guarded_copy(probe, overlapped, sizeof probe))
        return ND_INVALID_PARAMETER;
    struct region *region = region_hold(&adapter->base.adapter, version1_token(memory));
    if (region == NULL)
        return ND_INVALID_HANDLE;
    const struct nd_region *face = region->object.face;
    HRESULT status = face->handle_out == NULL ? forget(region, false) : ND_INVALID_HANDLE;
    TRACE("region %p: deregister: 0x%08lx", (void *)region, status);
    object_drop(&region->object);
    if (status != ND_SUCCESS)
        return status == ND_INVALID_DEVICE_STATE ? ND_INVALID_HANDLE : status;
    status = request_accept(&adapter->base.com.source, REQUEST_REGION, overlapped, NULL);
    if (status == ND_PENDING)
        request_complete(&adapter->base.com.source, REQUEST_REGION, ND_SUCCESS);
    return status;
}

static HRESULT STDMETHODCALLTYPE adapter_create_window(INDAdapter *self, ND_RESULT *invalidate_result,
                                                       INDMemoryWindow **out)
{
    ND_RESULT probe;

    if (!version1_clear(out))
        return ND_INVALID_PARAMETER_2;
    if (gone(self))
        return ND_DEVICE_REMOVED;
    if (invalidate_result != NULL && !guarded_copy(&probe, invalidate_result, sizeof probe))
        return ND_INVALID_PARAMETER_1;
    HRESULT status = nd_window_create((IND2Adapter *)self, &softnd_iid_IND2MemoryWindow, (void **)out);
    if (status == ND_SUCCESS)
        ((struct nd_window *)*out)->invalidate_result = invalidate_result;
    return status;
}

/* ---- Connections ---- */

static HRESULT STDMETHODCALLTYPE adapter_create_connector(INDAdapter *self, INDConnector **out)
{
    struct version1_adapter *adapter = (struct version1_adapter *)self;

    if (!version1_clear(out))
        return ND_INVALID_PARAMETER_1;
    if (gone(self))
        return ND_DEVICE_REMOVED;
    return nd_connector_new(&adapter->base.adapter, &version1_connector_view, adapter->file, (void **)out);
}

static HRESULT STDMETHODCALLTYPE adapter_listen(INDAdapter *self, SIZE_T backlog, INT protocol, USHORT port,
                                                USHORT *assigned_port, INDListen **out)
{
    struct version1_adapter *adapter = (struct version1_adapter *)self;
    struct sockaddr_storage address = adapter->address;
    struct sockaddr *name = (struct sockaddr *)&address;
    ULONG size = sizeof address;
    void *listener;

    if (!version1_clear(out))
        return ND_INVALID_PARAMETER_5;
    if (gone(self))
        return ND_DEVICE_REMOVED;
    if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
        return ND_INVALID_PARAMETER_2;
    if (port == 0 ? assigned_port == NULL || !guarded_copy(assigned_port, &port, sizeof port)
                  : assigned_port != NULL && !guarded_copy(assigned_port, &port, sizeof port))
        return ND_INVALID_PARAMETER_4;
    HRESULT status = listener_new(&adapter->base.adapter, &version1_listen_view, adapter->file, &listener);
    if (status != ND_SUCCESS)
        return status;
    address_set_port(name, ntohs(port));
    status = listener_bind(listener, name, (ULONG)address_size(name));
    if (status == ND_SUCCESS)
        status = listener_listen(listener, version1_size(backlog));
    if (status == ND_SUCCESS)
        status = listener_local_address(listener, name, &size);
    if (status != ND_SUCCESS) {
        com_release(listener);
        return status;
    }
    port = htons(address_port(name));
    if (assigned_port != NULL)
        guarded_copy(assigned_port, &port, sizeof port);
    *out = listener;
    return ND_SUCCESS;
}

/* ---- The object ---- */

static void closed(struct object *object)
{
    struct version1_adapter *adapter = CONTAINER_OF(object, struct version1_adapter, base.adapter.object);
    struct region *region;
    uint32_t slot = 1;

    adapter_closed(object);
    source_close(&adapter->base.com.source);
    /* These registrations stay counted as leaked (D.6.7). */
    while ((region = region_next(&adapter->base.adapter, &slot)) != NULL) {
        TRACE("region %p: still registered when its adapter was released", (void *)region);
        if (region_end(region, true) == ND_SUCCESS)
            object_close(&region->object);
        object_drop(&region->object);
    }
}

static void adapter_destroy(struct object *object)
{
    struct version1_adapter *adapter = CONTAINER_OF(object, struct version1_adapter, base.adapter.object);

    source_free(&adapter->base.com.source);
    if (adapter->file != NULL)
        CloseHandle(adapter->file);
    adapter_end(&adapter->base.adapter);
    free(adapter);
}

static const struct object_class class = {
    .kind = KIND_ADAPTER,
    .closed = closed,
    .destroy = adapter_destroy,
};

static const struct INDAdapter_methods methods = {
    VERSION1_OVERLAPPED_METHODS(INDAdapter, com_cancel),
    adapter_file,
    adapter_query,
    adapter_control,
    adapter_create_cq,
    adapter_register,
    adapter_deregister,
    adapter_create_window,
    adapter_create_connector,
    adapter_listen,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_INDAdapter,
    .base = &softnd_iid_INDOverlapped,
};

HRESULT version1_adapter_open(const struct sockaddr_storage *address, INDAdapter **out)
{
    struct version1_adapter *adapter = calloc(1, sizeof *adapter);

    if (adapter == NULL)
        return ND_NO_MEMORY;
    HRESULT status = nd_adapter_start(&adapter->base, &class, &view);
    if (status != ND_SUCCESS) {
        free(adapter);
        return status;
    }
    adapter->address = *address;
    adapter->base.com.source.completing = registered;
    status = overlapped_file_create(&adapter->file);
    if (status == ND_SUCCESS)
        status = source_open(&adapter->base.com.source, adapter->file);
    if (status != ND_SUCCESS) {
        com_release(&adapter->base.com);
        return status;
    }
    source_start(&adapter->base.com.source, &adapter->base.adapter, &adapter->base.adapter.object);
    *out = (INDAdapter *)adapter;
    return ND_SUCCESS;
}
