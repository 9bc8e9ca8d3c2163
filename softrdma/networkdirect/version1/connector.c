/* INDConnector, which creates its endpoint, and INDListen. */
#include "objects.h"

#include "../listener.h"

static struct nd_connector *connector_of(INDConnector *self)
{
    return (struct nd_connector *)self;
}

static struct version1_adapter *adapter_of(INDConnector *self)
{
    return CONTAINER_OF(((struct com *)self)->object->adapter, struct version1_adapter, base.adapter);
}

static HRESULT STDMETHODCALLTYPE INDConnector_create_endpoint(INDConnector *self, INDCompletionQueue *inbound_queue,
                                                              INDCompletionQueue *outbound_queue,
                                                              SIZE_T inbound_entries, SIZE_T outbound_entries,
                                                              SIZE_T inbound_sge, SIZE_T outbound_sge,
                                                              SIZE_T inbound_read_limit, SIZE_T outbound_read_limit,
                                                              SIZE_T *max_inline_data, INDEndpoint **out)
{
    static const SIZE_T inline_size = MAX_INLINE_DATA;
    struct adapter *adapter = &adapter_of(self)->base.adapter;

    if (!version1_clear(out))
        return ND_INVALID_PARAMETER_10;
    if (adapter_gone(adapter))
        return ND_DEVICE_REMOVED;
    struct com *inbound = com_from(inbound_queue, &version1_completion_queue_view, adapter);
    struct com *outbound = com_from(outbound_queue, &version1_completion_queue_view, adapter);
    if (inbound == NULL)
        return ND_INVALID_PARAMETER_1;
    if (outbound == NULL)
        return ND_INVALID_PARAMETER_2;
    if (inbound_entries > MAX_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_3;
    if (outbound_entries > MAX_QUEUE_DEPTH)
        return ND_INVALID_PARAMETER_4;
    if (inbound_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_5;
    if (outbound_sge > MAX_SGE)
        return ND_INVALID_PARAMETER_6;
    if (max_inline_data != NULL && !guarded_copy(max_inline_data, &inline_size, sizeof inline_size))
        return ND_INVALID_PARAMETER_9;
    const struct queue_pair_limits limits = {
        .receive_depth = (ULONG)inbound_entries,
        .initiator_depth = (ULONG)outbound_entries,
        .receive_sge = (ULONG)inbound_sge,
        .initiator_sge = (ULONG)outbound_sge,
        .inline_size = MAX_INLINE_DATA,
    };
    HRESULT status = nd_qp_new(adapter, &version1_endpoint_view, cq_of(inbound), cq_of(outbound), NULL, NULL, &limits,
                               &connector_of(self)->connector.object, (void **)out);
    if (status != ND_SUCCESS)
        return status;
    struct nd_queue_pair *endpoint = (struct nd_queue_pair *)*out;
    endpoint->inbound_read_limit = version1_size(inbound_read_limit);
    endpoint->outbound_read_limit = version1_size(outbound_read_limit);
    return ND_SUCCESS;
}

static struct connection connection_of(INDConnector *self, INDEndpoint *endpoint, const void *private_data,
                                       SIZE_T private_size)
{
    struct queue_pair *qp = version1_endpoint_from(endpoint, &connector_of(self)->connector.object);
    const struct nd_queue_pair *face = qp == NULL ? NULL : qp->object.face;

    return (struct connection){
        .queue_pair = qp,
        .inbound = qp == NULL ? 0 : face->inbound_read_limit,
        .outbound = qp == NULL ? 0 : face->outbound_read_limit,
        .private_data = private_data,
        .private_size = version1_size(private_size),
    };
}

static HRESULT STDMETHODCALLTYPE INDConnector_connect(INDConnector *self, INDEndpoint *endpoint,
                                                      const struct sockaddr *address, SIZE_T address_size, INT protocol,
                                                      USHORT local_port, const void *private_data, SIZE_T private_size,
                                                      OVERLAPPED *overlapped)
{
    const struct connection connection = connection_of(self, endpoint, private_data, private_size);

    if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
        return ND_INVALID_PARAMETER_4;
    return nd_connector_begin(connector_of(self), &connection, address, version1_size(address_size), ntohs(local_port),
                              overlapped);
}

static HRESULT STDMETHODCALLTYPE INDConnector_accept(INDConnector *self, INDEndpoint *endpoint,
                                                     const void *private_data, SIZE_T private_size,
                                                     OVERLAPPED *overlapped)
{
    const struct connection connection = connection_of(self, endpoint, private_data, private_size);
    return nd_connector_answer(connector_of(self), &connection, overlapped);
}

static HRESULT STDMETHODCALLTYPE INDConnector_reject(INDConnector *self, const void *private_data, SIZE_T private_size)
{
    return nd_connector_reject((IND2Connector *)self, private_data, version1_size(private_size));
}

static bool give_size(SIZE_T *out, ULONG value)
{
    SIZE_T size = value;
    return out == NULL || guarded_copy(out, &size, sizeof size);
}

/* Gives the peer's private data, cut to the size of the buffer, and the read limits, which are 0 after a refusal. */
static HRESULT STDMETHODCALLTYPE INDConnector_data(INDConnector *self, SIZE_T *inbound, SIZE_T *outbound,
                                                   void *private_data, SIZE_T *private_size)
{
    IND2Connector *connector = (IND2Connector *)self;
    ULONG in = 0, out = 0, size = 0;
    SIZE_T have = 0;

    if (private_size != NULL && !guarded_copy(&have, private_size, sizeof have))
        return ND_ACCESS_VIOLATION;
    size = version1_size(have);
    HRESULT status = nd_connector_private_data(connector, private_size == NULL ? NULL : private_data, &size);
    if (status != ND_SUCCESS && status != ND_BUFFER_OVERFLOW)
        return status;
    if (private_size == NULL)
        status = ND_SUCCESS;
    nd_connector_read_limits(connector, &in, &out);
    bool given = give_size(inbound, in) && give_size(outbound, out) && give_size(private_size, size);
    return given ? status : ND_ACCESS_VIOLATION;
}

static HRESULT give_address(IND2Connector *connector,
                            HRESULT(STDMETHODCALLTYPE *getter)(IND2Connector *, struct sockaddr *, ULONG *),
                            struct sockaddr *out, SIZE_T *size)
{
    SIZE_T have;

    if (!guarded_copy(&have, size, sizeof have))
        return ND_ACCESS_VIOLATION;
    ULONG count = version1_size(have);
    HRESULT status = getter(connector, out, &count);
    if (status != ND_SUCCESS && status != ND_BUFFER_OVERFLOW)
        return status;
    return give_size(size, count) ? status : ND_ACCESS_VIOLATION;
}

static HRESULT STDMETHODCALLTYPE INDConnector_local_address(INDConnector *self, struct sockaddr *out, SIZE_T *size)
{
    return give_address((IND2Connector *)self, nd_connector_local_address, out, size);
}

static HRESULT STDMETHODCALLTYPE INDConnector_peer_address(INDConnector *self, struct sockaddr *out, SIZE_T *size)
{
    return give_address((IND2Connector *)self, nd_connector_peer_address, out, size);
}

static const struct INDConnector_methods connector_methods = {
    VERSION1_OVERLAPPED_METHODS(INDConnector, nd_connector_cancel),
    INDConnector_create_endpoint,
    INDConnector_connect,
    VERSION2_METHOD(nd_connector_complete),
    INDConnector_accept,
    INDConnector_reject,
    INDConnector_data,
    INDConnector_local_address,
    INDConnector_peer_address,
    VERSION2_METHOD(nd_connector_notify_disconnect),
    VERSION2_METHOD(nd_connector_disconnect),
};

const struct object_view version1_connector_view = {
    .methods = &connector_methods,
    .iid = &softnd_iid_INDConnector,
    .base = &softnd_iid_INDOverlapped,
};

/* ---- Listen ---- */

static HRESULT STDMETHODCALLTYPE listen_get_request(INDListen *self, INDConnector *pointer, OVERLAPPED *overlapped)
{
    struct adapter *adapter = ((struct com *)self)->object->adapter;
    struct com *connector = com_from(pointer, &version1_connector_view, adapter);

    return listener_wait((struct listener *)self, (struct nd_connector *)connector, overlapped);
}

static const struct INDListen_methods listen_methods = {
    VERSION1_OVERLAPPED_METHODS(INDListen, com_cancel),
    listen_get_request,
};

const struct object_view version1_listen_view = {
    .methods = &listen_methods,
    .iid = &softnd_iid_INDListen,
    .base = &softnd_iid_INDOverlapped,
};
