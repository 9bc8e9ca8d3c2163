/* The connector as the consumer sees it: its requests, its queries and its object. engine/connector.c has its states.
 */
#include "nd_connector.h"
#include "addresses.h"
#include "nd_objects.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

static struct nd_connector *from_engine(struct connector *connector)
{
    return CONTAINER_OF(connector, struct nd_connector, connector);
}

static bool gone(const struct nd_connector *connector)
{
    return adapter_gone(connector->connector.object.adapter);
}

/* ---- Requests ---- */

/* The last word on a call: accepts its request. Under the lock. */
struct request_permit {
    struct permit permit;
    enum request_kind kind;
    OVERLAPPED *overlapped;
    bool granted;
};

static nd_status accept_request(struct permit *permit, struct connector *connector)
{
    struct request_permit *request = CONTAINER_OF(permit, struct request_permit, permit);
    HRESULT status = request_accept(&from_engine(connector)->com.source, request->kind, request->overlapped, NULL);

    request->granted = status == ND_PENDING;
    return request->granted ? ND_SUCCESS : status;
}

static struct request_permit request_permit(enum request_kind kind, OVERLAPPED *overlapped)
{
    return (struct request_permit){{accept_request}, kind, overlapped, false};
}

/* What the call returns. */
static HRESULT result_of(const struct request_permit *request, nd_status status)
{
    return request->granted ? ND_PENDING : status;
}

/* Completes the requests that the news are for. */
static void take_news(void *owner, struct connector *engine, enum connector_news news, nd_status status)
{
    struct nd_connector *connector = owner;
    struct source *source = &connector->com.source;

    UNUSED(engine);
    switch (news) {
    case NEWS_OFFERED:
    case NEWS_REFUSED:
    case NEWS_FAILED:
        /* A server that speaks no iWARP refuses like any other. */
        if (status == ND_CONNECTION_INVALID)
            status = ND_CONNECTION_REFUSED;
        else if (status == ND_IO_TIMEOUT && connector->version1)
            status = ND_TIMEOUT; /* I.6.6 */
        request_complete(source, REQUEST_CONNECT, status);
        break;
    case NEWS_ESTABLISHED:
    case NEWS_ACCEPT_FAILED:
        request_complete(source, REQUEST_ACCEPT, status);
        break;
    case NEWS_ENDED:
        request_complete_all(source, REQUEST_NOTIFY_DISCONNECT, ND_SUCCESS);
        break;
    case NEWS_DISCONNECTED:
        request_complete(source, REQUEST_DISCONNECT, connector->disconnect_result);
        break;
    case NEWS_OFFER_LOST:
    case NEWS_NONE:
        break;
    }
}

/* ---- Bind ---- */

HRESULT STDMETHODCALLTYPE nd_connector_bind(IND2Connector *self, const struct sockaddr *address, ULONG size)
{
    struct nd_connector *connector = (struct nd_connector *)self;
    struct sockaddr_storage local;

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    HRESULT status = address_take(address, size, &local);
    if (status != ND_SUCCESS)
        return status;
    if (!addresses_serve((struct sockaddr *)&local))
        return ND_INVALID_ADDRESS;
    lock_acquire(&connector->connector.lock);
    if (connector->connector.state != CONNECTOR_IDLE) {
        status = ND_ADDRESS_ALREADY_ASSOCIATED;
    } else {
        /* Binding to the same address again must work, so the old socket is closed first. */
        if (connector->socket != NO_SOCKET)
            socket_discard(connector->socket);
        connector->bound = false;
        nd_status bound;
        connector->socket = socket_bound(&local, false, &bound);
        status = bound;
        if (status == ND_SUCCESS) {
            connector->bound_address = local;
            connector->bound = true;
        }
    }
    lock_release(&connector->connector.lock);
    TRACE("connector %p: bind: 0x%08lx", (void *)self, status);
    return status;
}

/* ---- Connect ---- */

/* From the address that Bind gave, or where the peer is reached from. */
static socket_handle make_socket(struct connector *engine, const struct sockaddr_storage *peer,
                                 const struct sockaddr_storage *last, nd_status *status)
{
    struct nd_connector *connector = from_engine(engine);
    struct sockaddr_storage local = connector->bound_address;
    socket_handle socket = connector->socket;

    UNUSED(last);
    if (connector->bound && local.ss_family != peer->ss_family) {
        *status = ND_INVALID_ADDRESS;
        return NO_SOCKET;
    }
    connector->socket = NO_SOCKET;
    if (socket != NO_SOCKET)
        return socket;
    if (!connector->bound) {
        local = *peer;
        if (!addresses_serve((const struct sockaddr *)peer)) {
            memset(&local, 0, sizeof local);
            local.ss_family = peer->ss_family;
        }
        address_set_port((struct sockaddr *)&local, connector->local_port);
    }
    return socket_bound(&local, false, status);
}

static HRESULT take_private(uint8_t *out, const void *data, ULONG size)
{
    if (size > MAX_PRIVATE_DATA)
        return ND_INVALID_BUFFER_SIZE;
    if (size > 0 && (data == NULL || !guarded_copy(out, data, size)))
        return ND_ACCESS_VIOLATION;
    return ND_SUCCESS;
}

static HRESULT take_destination(const struct sockaddr *address, ULONG size, struct sockaddr_storage *out)
{
    if (address_take(address, size, out) != ND_SUCCESS)
        return ND_INVALID_ADDRESS;
    if (address_is_wildcard((struct sockaddr *)out))
        return ND_BAD_NETWORK_NAME;
    return address_port((struct sockaddr *)out) == 0 ? ND_INVALID_ADDRESS : ND_SUCCESS;
}

/* The arguments in the engine's form, whose private data are in `private_copy`. */
static HRESULT take_arguments(const struct nd_connector *connector, const struct connection *connection,
                              uint8_t *private_copy, struct connection_arguments *out)
{
    const struct queue_pair *qp = connection->queue_pair;
    HRESULT status = take_private(private_copy, connection->private_data, connection->private_size);

    if (status == ND_SUCCESS && (qp == NULL || qp->object.adapter != connector->connector.object.adapter))
        status = ND_INVALID_PARAMETER_1;
    *out = (struct connection_arguments){false, connection->inbound, connection->outbound, private_copy,
                                         connection->private_size};
    return status;
}

HRESULT nd_connector_begin(struct nd_connector *connector, const struct connection *connection,
                           const struct sockaddr *destination, ULONG size, USHORT local_port, OVERLAPPED *overlapped)
{
    struct request_permit request = request_permit(REQUEST_CONNECT, overlapped);
    uint8_t private_copy[MPA_MAX_PRIVATE_DATA];
    struct connection_arguments arguments;
    struct sockaddr_storage peer;

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    HRESULT status = take_arguments(connector, connection, private_copy, &arguments);
    if (status == ND_SUCCESS)
        status = take_destination(destination, size, &peer);
    if (status != ND_SUCCESS)
        return status;
    lock_acquire(&connector->connector.lock);
    if (connector->connector.state == CONNECTOR_IDLE)
        connector->local_port = local_port;
    lock_release(&connector->connector.lock);
    status = connector_connect(&connector->connector, connection->queue_pair, &peer, &arguments, &request.permit);
    return result_of(&request, status);
}

HRESULT STDMETHODCALLTYPE nd_connector_connect(IND2Connector *self, IUnknown *queue_pair,
                                               const struct sockaddr *destination, ULONG size, ULONG inbound,
                                               ULONG outbound, const void *private_data, ULONG private_size,
                                               OVERLAPPED *overlapped)
{
    const struct connection connection = {qp_from(queue_pair), inbound, outbound, private_data, private_size};
    return nd_connector_begin((struct nd_connector *)self, &connection, destination, size, 0, overlapped);
}

HRESULT STDMETHODCALLTYPE nd_connector_complete(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct nd_connector *connector = (struct nd_connector *)self;
    struct request_permit request = request_permit(REQUEST_COMPLETE_CONNECT, overlapped);

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    nd_status status = connector_complete(&connector->connector, &request.permit);
    if (request.granted)
        request_complete(&connector->com.source, REQUEST_COMPLETE_CONNECT, status);
    return result_of(&request, status);
}

/* ---- Accept and Reject ---- */

HRESULT nd_connector_answer(struct nd_connector *connector, const struct connection *connection, OVERLAPPED *overlapped)
{
    struct request_permit request = request_permit(REQUEST_ACCEPT, overlapped);
    uint8_t private_copy[MPA_MAX_PRIVATE_DATA];
    struct connection_arguments arguments;

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    if (!connector_allows(&connector->connector, CALL_ACCEPT))
        return ND_CONNECTION_INVALID;
    nd_status status = take_arguments(connector, connection, private_copy, &arguments);
    if (status == ND_SUCCESS)
        status = connector_accept(&connector->connector, connection->queue_pair, &arguments, &request.permit);
    return result_of(&request, status);
}

HRESULT STDMETHODCALLTYPE nd_connector_accept(IND2Connector *self, IUnknown *queue_pair, ULONG inbound, ULONG outbound,
                                              const void *private_data, ULONG private_size, OVERLAPPED *overlapped)
{
    const struct connection connection = {qp_from(queue_pair), inbound, outbound, private_data, private_size};
    return nd_connector_answer((struct nd_connector *)self, &connection, overlapped);
}

HRESULT STDMETHODCALLTYPE nd_connector_reject(IND2Connector *self, const void *private_data, ULONG private_size)
{
    struct nd_connector *connector = (struct nd_connector *)self;
    uint8_t private_copy[MPA_MAX_PRIVATE_DATA];

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    if (!connector_allows(&connector->connector, CALL_REJECT))
        return ND_CONNECTION_INVALID;
    HRESULT status = take_private(private_copy, private_data, private_size);
    return status == ND_SUCCESS ? connector_reject(&connector->connector, private_copy, private_size) : status;
}

/* ---- Queries ---- */

HRESULT STDMETHODCALLTYPE nd_connector_read_limits(IND2Connector *self, ULONG *inbound, ULONG *outbound)
{
    struct nd_connector *connector = (struct nd_connector *)self;

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    enum connector_state state = connector_state(&connector->connector);
    const struct connector_offer offer = connector_offer(&connector->connector);
    ULONG in = offer.inbound, out = offer.outbound;
    if (state != CONNECTOR_OFFERED && state != CONNECTOR_REQUESTED)
        return ND_CONNECTION_INVALID;
    if ((inbound != NULL && !guarded_copy(inbound, &in, sizeof in)) ||
        (outbound != NULL && !guarded_copy(outbound, &out, sizeof out)))
        return ND_ACCESS_VIOLATION;
    return ND_SUCCESS;
}

HRESULT STDMETHODCALLTYPE nd_connector_private_data(IND2Connector *self, void *out, ULONG *size)
{
    struct nd_connector *connector = (struct nd_connector *)self;
    ULONG have;

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    if (!guarded_copy(&have, size, sizeof have))
        return ND_ACCESS_VIOLATION;
    const struct connector_offer offer = connector_offer(&connector->connector);
    if (!offer.has_private_data)
        return ND_CONNECTION_INVALID;
    if (offer.abandoned)
        return ND_CONNECTION_ABORTED;
    ULONG whole = offer.private_size, copied = have < whole && out != NULL ? have : whole;
    if ((out != NULL && !guarded_copy(out, offer.private_data, copied)) || !guarded_copy(size, &whole, sizeof *size))
        return ND_ACCESS_VIOLATION;
    return have < whole || (out == NULL && copied > 0) ? ND_BUFFER_OVERFLOW : ND_SUCCESS;
}

static HRESULT give_address(struct nd_connector *connector, bool peer, struct sockaddr *out, ULONG *size)
{
    if (gone(connector))
        return ND_DEVICE_REMOVED;
    enum connector_state state = connector_state(&connector->connector);
    const struct connector_offer offer = connector_offer(&connector->connector);
    bool valid =
        (state >= CONNECTOR_OFFERED && state <= CONNECTOR_PEER_GONE) || (state == CONNECTOR_CONNECTING && !peer);
    return valid ? address_give(peer ? &offer.peer : &offer.local, out, size) : ND_CONNECTION_INVALID;
}

HRESULT STDMETHODCALLTYPE nd_connector_local_address(IND2Connector *self, struct sockaddr *out, ULONG *size)
{
    return give_address((struct nd_connector *)self, false, out, size);
}

HRESULT STDMETHODCALLTYPE nd_connector_peer_address(IND2Connector *self, struct sockaddr *out, ULONG *size)
{
    return give_address((struct nd_connector *)self, true, out, size);
}

/* ---- The end ---- */

HRESULT STDMETHODCALLTYPE nd_connector_notify_disconnect(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct nd_connector *connector = (struct nd_connector *)self;

    if (gone(connector))
        return ND_DEVICE_REMOVED;
    lock_acquire(&connector->connector.lock);
    enum connector_state state = connector->connector.state;
    bool over = state == CONNECTOR_PEER_GONE;
    HRESULT status = over || state == CONNECTOR_ESTABLISHED
                         ? request_accept(&connector->com.source, REQUEST_NOTIFY_DISCONNECT, overlapped, NULL)
                         : ND_CONNECTION_INVALID;
    lock_release(&connector->connector.lock);
    if (status == ND_PENDING && over)
        request_complete(&connector->com.source, REQUEST_NOTIFY_DISCONNECT, ND_SUCCESS);
    return status;
}

static nd_status accept_disconnect(struct permit *permit, struct connector *engine)
{
    struct nd_connector *connector = from_engine(engine);

    if (engine->state == CONNECTOR_DISCONNECTING)
        return ND_CONNECTION_INVALID;
    nd_status status = accept_request(permit, engine);
    if (gone(connector))
        connector->disconnect_result = ND_DEVICE_REMOVED;
    else if (engine->qp != NULL && ((struct com *)engine->qp->object.face)->references == 0)
        connector->disconnect_result = ND_CANCELED;
    else
        connector->disconnect_result = ND_SUCCESS;
    return status;
}

HRESULT STDMETHODCALLTYPE nd_connector_disconnect(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct request_permit request = {{accept_disconnect}, REQUEST_DISCONNECT, overlapped, false};
    nd_status status = connector_disconnect(&((struct nd_connector *)self)->connector, &request.permit);

    return result_of(&request, status);
}

HRESULT STDMETHODCALLTYPE nd_connector_cancel(IND2Connector *self)
{
    struct nd_connector *connector = (struct nd_connector *)self;

    connector_step(&connector->connector, CALL_CANCEL);
    return com_cancel(&connector->com);
}

/* ---- For the listener ---- */

bool nd_connector_reserve(struct nd_connector *connector)
{
    bool reserved = connector_step(&connector->connector, CALL_RESERVE);

    if (reserved)
        object_hold(&connector->connector.object);
    return reserved;
}

void nd_connector_unreserve(struct nd_connector *connector)
{
    connector_step(&connector->connector, CALL_UNRESERVE);
    object_drop(&connector->connector.object);
}

static void discard_socket(struct nd_connector *connector)
{
    if (connector->socket != NO_SOCKET)
        socket_discard(connector->socket);
    connector->socket = NO_SOCKET;
}

bool nd_connector_adopt(struct nd_connector *connector, struct stream *stream)
{
    bool adopted = connector_adopt(&connector->connector, stream);

    if (adopted)
        discard_socket(connector);
    return adopted;
}

/* ---- The object ---- */

static void closed(struct object *object)
{
    connector_closed(object);
    source_close(&CONTAINER_OF(object, struct nd_connector, connector.object)->com.source);
}

static void destroy(struct object *object)
{
    struct nd_connector *connector = CONTAINER_OF(object, struct nd_connector, connector.object);

    discard_socket(connector);
    source_free(&connector->com.source);
    free(connector);
}

static const struct object_class class = {
    .kind = KIND_CONNECTOR,
    .closed = closed,
    .destroy = destroy,
};

static const struct connector_owner owner = {.tell = take_news, .make_socket = make_socket, .disconnects = true};

static const struct IND2Connector_methods methods = {
    COM_OVERLAPPED_METHODS(IND2Connector, nd_connector_cancel),
    nd_connector_bind,
    nd_connector_connect,
    nd_connector_complete,
    nd_connector_accept,
    nd_connector_reject,
    nd_connector_read_limits,
    nd_connector_private_data,
    nd_connector_local_address,
    nd_connector_peer_address,
    nd_connector_notify_disconnect,
    nd_connector_disconnect,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2Connector,
    .base = &softnd_iid_IND2Overlapped,
};

struct nd_connector *nd_connector_from(IUnknown *pointer, const struct adapter *adapter)
{
    return (struct nd_connector *)com_from(pointer, &view, adapter);
}

HRESULT nd_connector_new(struct adapter *adapter, const struct object_view *as, HANDLE file, void **out)
{
    HRESULT status = nd_call_fault(adapter, PLACE_CALL_RDMA_CREATE_ID);
    if (status != ND_SUCCESS)
        return status;
    struct nd_connector *connector = calloc(1, sizeof *connector);
    if (connector == NULL)
        return ND_NO_MEMORY;
    connector->socket = NO_SOCKET;
    connector->version1 = as != &view;
    com_start(&connector->com, as);
    status = source_open(&connector->com.source, file);
    if (status == ND_SUCCESS && !connector_start(&connector->connector, &class, adapter, &owner, connector))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        destroy(&connector->connector.object);
        return status;
    }
    com_attach(&connector->com, &connector->connector.object);
    *out = connector;
    return ND_SUCCESS;
}

HRESULT STDMETHODCALLTYPE nd_connector_create(IND2Adapter *self, REFIID iid, HANDLE file, void **out)
{
    HRESULT status = nd_adapter_check(self, &view, iid, out);

    return status == ND_SUCCESS ? nd_connector_new(nd_adapter_of(self), &view, file, out) : status;
}
