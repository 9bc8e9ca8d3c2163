/* A connection attempt: Bind, Connect, CompleteConnect, Accept and Reject. */
#include "connector_state.h"
#include "addresses.h"
#include "nd_objects.h"
#include "trace.h"

#include <string.h>

/* ---- Bind ---- */

HRESULT STDMETHODCALLTYPE connector_bind(IND2Connector *self, const struct sockaddr *address, ULONG size)
{
    struct connector *connector = (struct connector *)self;
    struct sockaddr_storage local;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    HRESULT status = address_take(address, size, &local);
    if (status != ND_SUCCESS)
        return status;
    if (!addresses_serve((struct sockaddr *)&local))
        return ND_INVALID_ADDRESS;
    lock_acquire(&connector->lock);
    if (connector->state != IDLE) {
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
    lock_release(&connector->lock);
    TRACE("connector %p: bind: 0x%08lx", (void *)self, status);
    return status;
}

/* ---- Connect ---- */

/* Makes a stream from the bound socket. A repeated attempt binds a new socket. Under the lock. */
static HRESULT make_stream(struct connector *connector, const struct sockaddr_storage *peer, struct stream **out)
{
    struct sockaddr_storage local = connector->bound_address;
    socket_handle socket = connector->socket;
    nd_status status;

    connector->socket = NO_SOCKET;
    if (socket == NO_SOCKET) {
        if (!connector->bound) {
            local = *peer;
            if (!addresses_serve((const struct sockaddr *)peer)) {
                memset(&local, 0, sizeof local);
                local.ss_family = peer->ss_family;
            }
            address_set_port((struct sockaddr *)&local, connector->local_port);
        }
        socket = socket_bound(&local, false, &status);
        if (socket == NO_SOCKET)
            return status;
    }
    *out = stream_create(connector->object.adapter, socket);
    if (*out == NULL)
        return ND_INSUFFICIENT_RESOURCES;
    if (!socket_address(socket, &(*out)->local))
        (*out)->local = local;
    (*out)->peer = *peer;
    return ND_SUCCESS;
}

static ULONG capped(ULONG limit)
{
    return limit > MAX_READ_LIMIT ? MAX_READ_LIMIT : limit;
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

HRESULT connector_begin(struct connector *connector, const struct connection *connection,
                        const struct sockaddr *destination, ULONG size, USHORT local_port, OVERLAPPED *overlapped)
{
    struct queue_pair *qp = connection->queue_pair;
    struct sockaddr_storage peer;
    uint8_t private_copy[MPA_MAX_PRIVATE_DATA];
    struct stream *stream = NULL;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    HRESULT status = take_private(private_copy, connection->private_data, connection->private_size);
    if (status == ND_SUCCESS && (qp == NULL || qp->object.adapter != connector->object.adapter))
        status = ND_INVALID_PARAMETER_1;
    if (status == ND_SUCCESS)
        status = take_destination(destination, size, &peer);
    if (status != ND_SUCCESS)
        return status;

    lock_acquire(&connector->lock);
    if (connector->state != IDLE) {
        status = connector->state == FAILED || connector->state == DISCONNECTED ? ND_CONNECTION_INVALID
                                                                                : ND_CONNECTION_ACTIVE;
    } else if (connector->bound && connector->bound_address.ss_family != peer.ss_family) {
        status = ND_INVALID_ADDRESS;
    } else {
        connector->local_port = local_port;
        status = make_stream(connector, &peer, &stream);
    }
    if (status == ND_SUCCESS && !qp_attach(qp, stream))
        status = ND_CONNECTION_ACTIVE;
    if (status == ND_SUCCESS) {
        status = request_accept(&connector->com.source, REQUEST_CONNECT, overlapped, NULL);
        if (status != ND_PENDING)
            qp_detach(qp, stream);
    }
    if (status == ND_PENDING) {
        stream->revision = 2;
        stream->own_inbound = capped(connection->inbound);
        stream->own_outbound = capped(connection->outbound);
        memcpy(stream->own_private, private_copy, connection->private_size);
        stream->own_private_size = connection->private_size;
        connector_attach(connector, stream);
        object_hold(&qp->object);
        connector->queue_pair = qp;
        connector->state = CONNECTING;
        connector->has_private_data = false;
        connector->peer = peer;
        connector->local = stream->local;
        stream_hold(stream);
    }
    lock_release(&connector->lock);

    if (stream == NULL)
        return status;
    stream_lock(stream);
    if (status == ND_PENDING)
        stream_connect(stream);
    else
        stream_abort(stream);
    stream_unlock(stream);
    stream_drop(stream);
    return status;
}

HRESULT connector_time_out(struct connector *connector, OVERLAPPED *overlapped)
{
    HRESULT status = request_accept(&connector->com.source, REQUEST_CONNECT, overlapped, NULL);

    if (status == ND_PENDING)
        request_complete(&connector->com.source, REQUEST_CONNECT, ND_TIMEOUT);
    return status;
}

HRESULT STDMETHODCALLTYPE connector_connect(IND2Connector *self, IUnknown *queue_pair,
                                            const struct sockaddr *destination, ULONG size, ULONG inbound,
                                            ULONG outbound, const void *private_data, ULONG private_size,
                                            OVERLAPPED *overlapped)
{
    const struct connection connection = {qp_from(queue_pair), inbound, outbound, private_data, private_size};
    return connector_begin((struct connector *)self, &connection, destination, size, 0, overlapped);
}

HRESULT connector_fall_back(struct connector *connector, struct stream *old, struct detached *detached)
{
    struct stream *stream;
    struct queue_pair *qp = connector->queue_pair;

    *detached = (struct detached){old, NULL};
    qp_detach(qp, old);
    HRESULT status = make_stream(connector, &connector->peer, &stream);
    if (status != ND_SUCCESS)
        return status;
    stream->revision = 1;
    stream->own_inbound = old->own_inbound;
    stream->own_outbound = old->own_outbound;
    memcpy(stream->own_private, old->own_private, old->own_private_size);
    stream->own_private_size = old->own_private_size;
    if (!qp_attach(qp, stream)) {
        *detached = (struct detached){old, NULL};
        stream_lock(stream);
        stream_abort(stream);
        stream_unlock(stream);
        stream_drop(stream);
        return ND_CANCELED;
    }
    connector_attach(connector, stream);
    connector->local = stream->local;
    TRACE("connector %p: tries again with revision 1", (void *)connector);
    return ND_SUCCESS;
}

HRESULT STDMETHODCALLTYPE connector_complete(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct connector *connector = (struct connector *)self;
    struct stream *stream = NULL;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    lock_acquire(&connector->lock);
    HRESULT status = connector->state == OFFERED
                         ? request_accept(&connector->com.source, REQUEST_COMPLETE_CONNECT, overlapped, NULL)
                         : ND_CONNECTION_INVALID;
    if (status == ND_PENDING) {
        connector->state = ESTABLISHED;
        stream = connector->stream;
        stream_hold(stream);
    }
    lock_release(&connector->lock);
    if (stream == NULL)
        return status;

    stream_lock(stream);
    bool complete = stream_complete(stream);
    stream_unlock(stream);
    if (!complete) {
        lock_acquire(&connector->lock);
        bool mine = connector->stream == stream && connector->state == ESTABLISHED;
        struct detached detached = {NULL, NULL};
        if (mine) {
            connector->state = FAILED;
            detached = connector_detach(connector);
        }
        lock_release(&connector->lock);
        detached_tear_down(detached, ABORT_STREAM);
    }
    request_complete(&connector->com.source, REQUEST_COMPLETE_CONNECT, complete ? ND_SUCCESS : ND_IO_TIMEOUT);
    stream_drop(stream);
    return status;
}

/* ---- Accept and Reject ---- */

HRESULT connector_answer(struct connector *connector, const struct connection *connection, OVERLAPPED *overlapped)
{
    struct queue_pair *qp = connection->queue_pair;
    uint8_t private_copy[MPA_MAX_PRIVATE_DATA];

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    lock_acquire(&connector->lock);
    struct stream *stream = connector->state == REQUESTED ? connector->stream : NULL;
    HRESULT status = stream == NULL ? ND_CONNECTION_INVALID
                                    : take_private(private_copy, connection->private_data, connection->private_size);
    if (status == ND_SUCCESS && (qp == NULL || qp->object.adapter != connector->object.adapter))
        status = ND_INVALID_PARAMETER_1;
    if (status == ND_SUCCESS && !qp_attach(qp, stream))
        status = ND_CONNECTION_ACTIVE;
    if (status == ND_SUCCESS) {
        status = request_accept(&connector->com.source, REQUEST_ACCEPT, overlapped, NULL);
        if (status != ND_PENDING)
            qp_detach(qp, stream);
    }
    if (status == ND_PENDING) {
        object_hold(&qp->object);
        connector->queue_pair = qp;
        connector->state = ACCEPTING;
        stream_hold(stream);
    }
    lock_release(&connector->lock);
    if (status != ND_PENDING)
        return status;

    stream_lock(stream);
    ULONG inbound = capped(connection->inbound), outbound = capped(connection->outbound);
    stream->own_inbound = inbound < stream->peer_outbound ? inbound : stream->peer_outbound;
    stream->own_outbound = outbound < stream->peer_inbound ? outbound : stream->peer_inbound;
    if (!stream_reply(stream, false, private_copy, connection->private_size)) {
        stream->after.events |= EVENT_FAILED;
        stream->after.status = ND_CONNECTION_ABORTED;
    }
    stream_unlock(stream);
    stream_drop(stream);
    return status;
}

HRESULT STDMETHODCALLTYPE connector_accept(IND2Connector *self, IUnknown *queue_pair, ULONG inbound, ULONG outbound,
                                           const void *private_data, ULONG private_size, OVERLAPPED *overlapped)
{
    const struct connection connection = {qp_from(queue_pair), inbound, outbound, private_data, private_size};
    return connector_answer((struct connector *)self, &connection, overlapped);
}

HRESULT STDMETHODCALLTYPE connector_reject(IND2Connector *self, const void *private_data, ULONG private_size)
{
    struct connector *connector = (struct connector *)self;
    uint8_t private_copy[MPA_MAX_PRIVATE_DATA];
    struct detached detached = {NULL, NULL};
    bool passive = false, alive = true;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    lock_acquire(&connector->lock);
    HRESULT status = connector->state == REQUESTED || connector->state == OFFERED
                         ? take_private(private_copy, private_data, private_size)
                         : ND_CONNECTION_INVALID;
    if (status == ND_SUCCESS) {
        passive = connector->state == REQUESTED;
        detached = connector_detach(connector);
        connector->state = IDLE;
        connector->has_private_data = false;
    }
    lock_release(&connector->lock);
    if (status != ND_SUCCESS)
        return status;
    stream_lock(detached.stream);
    alive = detached.stream->phase != STREAM_CLOSED && !detached.stream->abandoned;
    if (alive && passive)
        alive = stream_reply(detached.stream, true, private_copy, private_size);
    stream_unlock(detached.stream);
    detached_tear_down(detached, WITHDRAW_STREAM);
    return alive ? ND_SUCCESS : ND_CONNECTION_ABORTED;
}
