/* Connector states and the calls and events that change them:
 *
 *   IDLE         Connect -> CONNECTING; GetConnectionRequest -> RESERVED
 *   CONNECTING   accepted -> OFFERED; refused, failed -> IDLE; cancelled -> FAILED
 *   OFFERED      CompleteConnect -> ESTABLISHED; Reject -> IDLE
 *   RESERVED     a request arrived -> REQUESTED; given up -> IDLE
 *   REQUESTED    Accept -> ACCEPTING; Reject -> IDLE
 *   ACCEPTING    first message -> ESTABLISHED; failed, cancelled -> FAILED
 *   ESTABLISHED  ended by the peer or an error -> PEER_GONE; Disconnect -> LEAVING
 *   PEER_GONE    Disconnect -> LEAVING
 *   LEAVING      it is known what became of all that was sent -> DISCONNECTED
 *
 * The connector's lock is the outermost; streams and requests are dealt with after it was released, on values taken
 * under it, so an event may find that the connector has moved on: then its stream is another or none.
 */
#include "connector.h"
#include "addresses.h"
#include "guarded_copy.h"
#include "queue_pair.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

enum state {
    IDLE,
    CONNECTING,
    OFFERED,
    RESERVED,
    REQUESTED,
    ACCEPTING,
    ESTABLISHED,
    PEER_GONE,
    LEAVING,
    DISCONNECTED,
    FAILED
};

struct connector {
    struct object object;
    struct source source;
    SRWLOCK lock;
    enum state state;
    struct stream *stream;
    struct queue_pair *queue_pair; /* held while connecting and connected */
    struct sockaddr_storage wish;  /* the address of Bind */
    bool bound;
    USHORT local_port; /* without Bind; 0: any */
    SOCKET socket; /* bound, not yet used */
    struct sockaddr_storage local, peer;
    ULONG inbound, outbound; /* what GetReadLimits reports */
    bool has_private_data;
    uint8_t private_data[MPA_MAX_PRIVATE_DATA];
    ULONG private_size;
    HRESULT disconnect_result;
};

static HRESULT bind_status(int error)
{
    switch (error) {
    case WSAEADDRINUSE:
    case WSAEACCES:
        return ND_SHARING_VIOLATION;
    case WSAEADDRNOTAVAIL:
        return ND_INVALID_ADDRESS;
    case WSAENOBUFS:
        return ND_TOO_MANY_ADDRESSES;
    default:
        return ND_INSUFFICIENT_RESOURCES;
    }
}

/* What the connector lets go of; used after its lock was released. */
struct released {
    struct stream *stream;
    struct queue_pair *queue_pair;
};

static struct released release(struct connector *connector)
{
    struct released released = {connector->stream, connector->queue_pair};

    connector->stream = NULL;
    connector->queue_pair = NULL;
    return released;
}

enum parting { PART_ONLY, PART_WITHDRAW, PART_CUT };

static void part(struct released released, enum parting parting)
{
    struct connector *connector;

    if (released.stream != NULL) {
        stream_lock(released.stream);
        connector = released.stream->connector;
        released.stream->connector = NULL;
        if (parting == PART_CUT)
            stream_cut(released.stream);
        else if (parting == PART_WITHDRAW && released.stream->phase != STREAM_CLOSED)
            stream_withdraw(released.stream);
        stream_unlock(released.stream);
        if (released.queue_pair != NULL)
            qp_detach(released.queue_pair, released.stream);
        if (connector != NULL)
            object_drop(&connector->object);
        stream_drop(released.stream);
    }
    if (released.queue_pair != NULL)
        object_drop(&released.queue_pair->object);
}

/* An established connection ends from this side: EVENT_ENDED follows, perhaps during the call. */
static void leave(struct stream *stream)
{
    stream_lock(stream);
    stream_leave(stream);
    stream_unlock(stream);
}

static void attach_stream(struct connector *connector, struct stream *stream)
{
    stream->connector = connector;
    object_hold(&connector->object);
    connector->stream = stream;
}

/* ---- Bind ---- */

static HRESULT STDMETHODCALLTYPE connector_bind(IND2Connector *self, const struct sockaddr *address, ULONG size)
{
    struct connector *connector = (struct connector *)self;
    struct sockaddr_storage wish;
    int error;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    HRESULT status = address_take(address, size, &wish);
    if (status != ND_SUCCESS)
        return status;
    if (!addresses_serve((struct sockaddr *)&wish))
        return ND_INVALID_ADDRESS;
    AcquireSRWLockExclusive(&connector->lock);
    if (connector->state != IDLE) {
        status = ND_ADDRESS_ALREADY_ASSOCIATED;
    } else {
        /* The same address again must work, so the first socket goes first. */
        if (connector->socket != INVALID_SOCKET)
            closesocket(connector->socket);
        connector->bound = false;
        connector->socket = stream_socket(&wish, false, &error);
        status = connector->socket == INVALID_SOCKET ? bind_status(error) : ND_SUCCESS;
        if (status == ND_SUCCESS) {
            connector->wish = wish;
            connector->bound = true;
        }
    }
    ReleaseSRWLockExclusive(&connector->lock);
    TRACE("connector %p: bind: 0x%08lx", (void *)self, status);
    return status;
}

/* ---- Connect ---- */

/* Under the lock: a stream from the bound socket, or one bound anew for a repeated attempt. */
static HRESULT make_stream(struct connector *connector, const struct sockaddr_storage *peer, struct stream **out)
{
    struct sockaddr_storage local = connector->wish;
    SOCKET socket = connector->socket;
    int error, length = sizeof local;

    connector->socket = INVALID_SOCKET;
    if (socket == INVALID_SOCKET) {
        if (!connector->bound) {
            local = *peer;
            if (!addresses_serve((const struct sockaddr *)peer)) {
                memset(&local, 0, sizeof local);
                local.ss_family = peer->ss_family;
            }
            address_set_port((struct sockaddr *)&local, connector->local_port);
        }
        socket = stream_socket(&local, false, &error);
        if (socket == INVALID_SOCKET)
            return bind_status(error);
    }
    *out = stream_create(connector->object.adapter, socket);
    if (*out == NULL)
        return ND_INSUFFICIENT_RESOURCES;
    if (getsockname(socket, (struct sockaddr *)&(*out)->local, &length) != 0)
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

    AcquireSRWLockExclusive(&connector->lock);
    if (connector->state != IDLE) {
        status = connector->state == FAILED || connector->state == DISCONNECTED ? ND_CONNECTION_INVALID
                                                                                 : ND_CONNECTION_ACTIVE;
    } else if (connector->bound && connector->wish.ss_family != peer.ss_family) {
        status = ND_INVALID_ADDRESS;
    } else {
        connector->local_port = local_port;
        status = make_stream(connector, &peer, &stream);
    }
    if (status == ND_SUCCESS && !qp_attach(qp, stream))
        status = ND_CONNECTION_ACTIVE;
    if (status == ND_SUCCESS) {
        status = request_accept(&connector->source, REQUEST_CONNECT, overlapped, NULL);
        if (status != ND_PENDING)
            qp_detach(qp, stream);
    }
    if (status == ND_PENDING) {
        stream->revision = 2;
        stream->own_inbound = capped(connection->inbound);
        stream->own_outbound = capped(connection->outbound);
        memcpy(stream->own_private, private_copy, connection->private_size);
        stream->own_private_size = connection->private_size;
        attach_stream(connector, stream);
        object_hold(&qp->object);
        connector->queue_pair = qp;
        connector->state = CONNECTING;
        connector->has_private_data = false;
        connector->peer = peer;
        connector->local = stream->local;
        stream_hold(stream);
    }
    ReleaseSRWLockExclusive(&connector->lock);

    if (stream == NULL)
        return status;
    stream_lock(stream);
    if (status == ND_PENDING)
        stream_connect(stream);
    else
        stream_cut(stream);
    stream_unlock(stream);
    stream_drop(stream);
    return status;
}

HRESULT connector_time_out(struct connector *connector, OVERLAPPED *overlapped)
{
    HRESULT status = request_accept(&connector->source, REQUEST_CONNECT, overlapped, NULL);

    if (status == ND_PENDING)
        request_complete(&connector->source, REQUEST_CONNECT, ND_TIMEOUT);
    return status;
}

static HRESULT STDMETHODCALLTYPE connector_connect(IND2Connector *self, IUnknown *queue_pair,
                                                   const struct sockaddr *destination, ULONG size, ULONG inbound,
                                                   ULONG outbound, const void *private_data, ULONG private_size,
                                                   OVERLAPPED *overlapped)
{
    const struct connection connection = {qp_from(queue_pair), inbound, outbound, private_data, private_size};
    return connector_begin((struct connector *)self, &connection, destination, size, 0, overlapped);
}

/* The peer closed without answering revision 2: once more with revision 1. */
static HRESULT fall_back(struct connector *connector, struct stream *old, struct released *released)
{
    struct stream *stream;
    struct queue_pair *qp = connector->queue_pair;

    *released = (struct released){old, NULL};
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
        *released = (struct released){old, NULL};
        stream_lock(stream);
        stream_cut(stream);
        stream_unlock(stream);
        stream_drop(stream);
        return ND_CANCELED;
    }
    attach_stream(connector, stream);
    connector->local = stream->local;
    TRACE("connector %p: once more with revision 1", (void *)connector);
    return ND_SUCCESS;
}

HRESULT STDMETHODCALLTYPE connector_complete(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct connector *connector = (struct connector *)self;
    struct stream *stream = NULL;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    AcquireSRWLockExclusive(&connector->lock);
    HRESULT status = connector->state == OFFERED
                         ? request_accept(&connector->source, REQUEST_COMPLETE_CONNECT, overlapped, NULL)
                         : ND_CONNECTION_INVALID;
    if (status == ND_PENDING) {
        connector->state = ESTABLISHED;
        stream = connector->stream;
        stream_hold(stream);
    }
    ReleaseSRWLockExclusive(&connector->lock);
    if (stream == NULL)
        return status;

    stream_lock(stream);
    bool complete = stream_complete(stream);
    stream_unlock(stream);
    if (!complete) {
        AcquireSRWLockExclusive(&connector->lock);
        bool mine = connector->stream == stream && connector->state == ESTABLISHED;
        struct released released = {NULL, NULL};
        if (mine) {
            connector->state = FAILED;
            released = release(connector);
        }
        ReleaseSRWLockExclusive(&connector->lock);
        part(released, PART_CUT);
    }
    request_complete(&connector->source, REQUEST_COMPLETE_CONNECT, complete ? ND_SUCCESS : ND_IO_TIMEOUT);
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
    AcquireSRWLockExclusive(&connector->lock);
    struct stream *stream = connector->state == REQUESTED ? connector->stream : NULL;
    HRESULT status = stream == NULL ? ND_CONNECTION_INVALID
                                    : take_private(private_copy, connection->private_data, connection->private_size);
    if (status == ND_SUCCESS && (qp == NULL || qp->object.adapter != connector->object.adapter))
        status = ND_INVALID_PARAMETER_1;
    if (status == ND_SUCCESS && !qp_attach(qp, stream))
        status = ND_CONNECTION_ACTIVE;
    if (status == ND_SUCCESS) {
        status = request_accept(&connector->source, REQUEST_ACCEPT, overlapped, NULL);
        if (status != ND_PENDING)
            qp_detach(qp, stream);
    }
    if (status == ND_PENDING) {
        object_hold(&qp->object);
        connector->queue_pair = qp;
        connector->state = ACCEPTING;
        stream_hold(stream);
    }
    ReleaseSRWLockExclusive(&connector->lock);
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

static HRESULT STDMETHODCALLTYPE connector_accept(IND2Connector *self, IUnknown *queue_pair, ULONG inbound,
                                                  ULONG outbound, const void *private_data, ULONG private_size,
                                                  OVERLAPPED *overlapped)
{
    const struct connection connection = {qp_from(queue_pair), inbound, outbound, private_data, private_size};
    return connector_answer((struct connector *)self, &connection, overlapped);
}

HRESULT STDMETHODCALLTYPE connector_reject(IND2Connector *self, const void *private_data, ULONG private_size)
{
    struct connector *connector = (struct connector *)self;
    uint8_t private_copy[MPA_MAX_PRIVATE_DATA];
    struct released released = {NULL, NULL};
    bool passive = false, alive = true;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    AcquireSRWLockExclusive(&connector->lock);
    HRESULT status = connector->state == REQUESTED || connector->state == OFFERED
                         ? take_private(private_copy, private_data, private_size)
                         : ND_CONNECTION_INVALID;
    if (status == ND_SUCCESS) {
        passive = connector->state == REQUESTED;
        released = release(connector);
        connector->state = IDLE;
        connector->has_private_data = false;
    }
    ReleaseSRWLockExclusive(&connector->lock);
    if (status != ND_SUCCESS)
        return status;
    stream_lock(released.stream);
    alive = released.stream->phase != STREAM_CLOSED && !released.stream->abandoned;
    if (alive && passive)
        alive = stream_reply(released.stream, true, private_copy, private_size);
    stream_unlock(released.stream);
    part(released, PART_WITHDRAW);
    return alive ? ND_SUCCESS : ND_CONNECTION_ABORTED;
}

/* ---- Queries ---- */

/* Whether the active side gave up a request that was handed out. Under the connector's lock. */
static bool abandoned(struct connector *connector)
{
    stream_lock(connector->stream);
    bool result = connector->stream->abandoned;
    ReleaseSRWLockExclusive(&connector->stream->lock);
    return result;
}

HRESULT STDMETHODCALLTYPE connector_read_limits(IND2Connector *self, ULONG *inbound, ULONG *outbound)
{
    struct connector *connector = (struct connector *)self;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    AcquireSRWLockShared(&connector->lock);
    bool valid = connector->state == OFFERED || connector->state == REQUESTED;
    ULONG in = connector->inbound, out = connector->outbound;
    ReleaseSRWLockShared(&connector->lock);
    if (!valid)
        return ND_CONNECTION_INVALID;
    if ((inbound != NULL && !guarded_copy(inbound, &in, sizeof in)) ||
        (outbound != NULL && !guarded_copy(outbound, &out, sizeof out)))
        return ND_ACCESS_VIOLATION;
    return ND_SUCCESS;
}

HRESULT STDMETHODCALLTYPE connector_private_data(IND2Connector *self, void *out, ULONG *size)
{
    struct connector *connector = (struct connector *)self;
    HRESULT status = ND_SUCCESS;
    ULONG have;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    if (!guarded_copy(&have, size, sizeof have))
        return ND_ACCESS_VIOLATION;
    AcquireSRWLockExclusive(&connector->lock);
    if (!connector->has_private_data)
        status = ND_CONNECTION_INVALID;
    else if (connector->state == REQUESTED && abandoned(connector))
        status = ND_CONNECTION_ABORTED;
    if (status == ND_SUCCESS) {
        ULONG part = have < connector->private_size && out != NULL ? have : connector->private_size;
        status = have < connector->private_size || (out == NULL && part > 0) ? ND_BUFFER_OVERFLOW : ND_SUCCESS;
        if (out != NULL && !guarded_copy(out, connector->private_data, part))
            status = ND_ACCESS_VIOLATION;
        if (!guarded_copy(size, &connector->private_size, sizeof *size))
            status = ND_ACCESS_VIOLATION;
    }
    ReleaseSRWLockExclusive(&connector->lock);
    return status;
}

static HRESULT give_address(struct connector *connector, bool peer, struct sockaddr *out, ULONG *size)
{
    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    AcquireSRWLockShared(&connector->lock);
    enum state state = connector->state;
    struct sockaddr_storage address = peer ? connector->peer : connector->local;
    ReleaseSRWLockShared(&connector->lock);
    bool valid = state == OFFERED || state == REQUESTED || state == ACCEPTING || state == ESTABLISHED ||
                 state == PEER_GONE || (state == CONNECTING && !peer);
    return valid ? address_give(&address, out, size) : ND_CONNECTION_INVALID;
}

HRESULT STDMETHODCALLTYPE connector_local_address(IND2Connector *self, struct sockaddr *out, ULONG *size)
{
    return give_address((struct connector *)self, false, out, size);
}

HRESULT STDMETHODCALLTYPE connector_peer_address(IND2Connector *self, struct sockaddr *out, ULONG *size)
{
    return give_address((struct connector *)self, true, out, size);
}

/* ---- The end ---- */

HRESULT STDMETHODCALLTYPE connector_notify_disconnect(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct connector *connector = (struct connector *)self;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    AcquireSRWLockExclusive(&connector->lock);
    bool valid = connector->state == ESTABLISHED || connector->state == PEER_GONE;
    bool gone = connector->state == PEER_GONE;
    HRESULT status = valid ? request_accept(&connector->source, REQUEST_NOTIFY_DISCONNECT, overlapped, NULL)
                           : ND_CONNECTION_INVALID;
    ReleaseSRWLockExclusive(&connector->lock);
    if (status == ND_PENDING && gone)
        request_complete(&connector->source, REQUEST_NOTIFY_DISCONNECT, ND_SUCCESS);
    return status;
}

HRESULT STDMETHODCALLTYPE connector_disconnect(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct connector *connector = (struct connector *)self;
    struct stream *stream = NULL;

    AcquireSRWLockExclusive(&connector->lock);
    bool valid = connector->state == ESTABLISHED || connector->state == PEER_GONE;
    HRESULT status = valid ? request_accept(&connector->source, REQUEST_DISCONNECT, overlapped, NULL)
                           : ND_CONNECTION_INVALID;
    if (status == ND_PENDING) {
        connector->disconnect_result = ND_SUCCESS;
        if (adapter_gone(connector->object.adapter))
            connector->disconnect_result = ND_DEVICE_REMOVED;
        else if (connector->queue_pair != NULL && connector->queue_pair->object.com_references == 0)
            connector->disconnect_result = ND_CANCELED;
        connector->state = LEAVING;
        stream = connector->stream;
        stream_hold(stream);
    }
    ReleaseSRWLockExclusive(&connector->lock);
    if (status != ND_PENDING)
        return status;
    leave(stream);
    stream_drop(stream);
    return status;
}

/* ---- Events ---- */

static void take_peer_data(struct connector *connector, struct stream *stream, bool passive)
{
    /* The stream's own values are final by now: nothing writes them after the start-up frame. */
    connector->private_size = stream->private_size;
    memcpy(connector->private_data, stream->private_data, stream->private_size);
    connector->has_private_data = true;
    ULONG in = stream->peer_outbound, out = stream->peer_inbound;
    connector->inbound = passive || in < stream->own_inbound ? in : stream->own_inbound;
    connector->outbound = passive || out < stream->own_outbound ? out : stream->own_outbound;
}

void connector_event(struct connector *connector, struct stream *stream, unsigned events, HRESULT status)
{
    struct released released = {NULL, NULL};
    enum request_kind finished = REQUEST_ANY;
    HRESULT result = status;
    bool ended = false, again = false;

    AcquireSRWLockExclusive(&connector->lock);
    if (connector->stream != stream)
        events = 0;
    if ((events & EVENT_OFFERED) != 0 && connector->state == CONNECTING) {
        connector->state = OFFERED;
        connector->local = stream->local;
        take_peer_data(connector, stream, false);
        finished = REQUEST_CONNECT;
        result = ND_SUCCESS;
    }
    if ((events & EVENT_FALLBACK) != 0 && connector->state == CONNECTING) {
        result = fall_back(connector, stream, &released);
        again = result == ND_SUCCESS;
        if (!again)
            events |= EVENT_FAILED;
    }
    if ((events & (EVENT_ESTABLISHED | EVENT_ENDED)) != 0 && connector->state == ACCEPTING) {
        connector->state = ESTABLISHED;
        connector->has_private_data = false;
        finished = REQUEST_ACCEPT;
        result = ND_SUCCESS;
    }
    if ((events & EVENT_ENDED) != 0 && connector->state == ESTABLISHED) {
        connector->state = PEER_GONE;
        ended = true;
    }
    if ((events & EVENT_ENDED) != 0 && connector->state == LEAVING) {
        connector->state = DISCONNECTED;
        released = release(connector);
        finished = REQUEST_DISCONNECT;
        result = connector->disconnect_result;
    }
    if ((events & EVENT_REFUSED) != 0 && connector->state == CONNECTING) {
        take_peer_data(connector, stream, false);
        connector->state = IDLE;
        released = release(connector);
        finished = REQUEST_CONNECT;
        result = ND_CONNECTION_REFUSED;
    } else if ((events & EVENT_FAILED) != 0 &&
               (connector->state == CONNECTING || connector->state == OFFERED || connector->state == ACCEPTING)) {
        finished = connector->state == ACCEPTING ? REQUEST_ACCEPT : REQUEST_CONNECT;
        if (connector->state == OFFERED)
            finished = REQUEST_ANY;
        connector->state = connector->state == CONNECTING && result != ND_CANCELED && result != ND_DEVICE_REMOVED
                               ? IDLE
                               : FAILED;
        connector->has_private_data = false;
        released = release(connector);
    }
    struct stream *next = again ? connector->stream : NULL;
    if (next != NULL)
        stream_hold(next);
    ReleaseSRWLockExclusive(&connector->lock);

    part(released, PART_ONLY);
    if (finished != REQUEST_ANY)
        request_complete(&connector->source, finished, result);
    if (ended)
        request_complete_all(&connector->source, REQUEST_NOTIFY_DISCONNECT, ND_SUCCESS);
    if (next != NULL) {
        stream_lock(next);
        stream_connect(next);
        stream_unlock(next);
        stream_drop(next);
    }
}

/* ---- For the listener ---- */

bool connector_reserve(struct connector *connector)
{
    AcquireSRWLockExclusive(&connector->lock);
    bool idle = connector->state == IDLE;
    if (idle)
        connector->state = RESERVED;
    ReleaseSRWLockExclusive(&connector->lock);
    if (idle)
        object_hold(&connector->object);
    return idle;
}

void connector_unreserve(struct connector *connector)
{
    AcquireSRWLockExclusive(&connector->lock);
    if (connector->state == RESERVED)
        connector->state = IDLE;
    ReleaseSRWLockExclusive(&connector->lock);
    object_drop(&connector->object);
}

bool connector_adopt(struct connector *connector, struct stream *stream)
{
    AcquireSRWLockExclusive(&connector->lock);
    bool reserved = connector->state == RESERVED;
    if (reserved) {
        stream_lock(stream);
        attach_stream(connector, stream);
        stream_hold(stream);
        connector->state = REQUESTED;
        connector->local = stream->local;
        connector->peer = stream->peer;
        take_peer_data(connector, stream, true);
        ReleaseSRWLockExclusive(&stream->lock);
        if (connector->socket != INVALID_SOCKET)
            closesocket(connector->socket);
        connector->socket = INVALID_SOCKET;
    }
    ReleaseSRWLockExclusive(&connector->lock);
    return reserved;
}

/* ---- The object ---- */

HRESULT STDMETHODCALLTYPE connector_cancel(IND2Connector *self)
{
    struct connector *connector = (struct connector *)self;
    struct released released = {NULL, NULL};

    AcquireSRWLockExclusive(&connector->lock);
    if (connector->state == CONNECTING || connector->state == ACCEPTING) {
        connector->state = FAILED;
        released = release(connector);
    }
    ReleaseSRWLockExclusive(&connector->lock);
    part(released, PART_CUT);
    return source_cancel(&connector->source);
}

static HRESULT STDMETHODCALLTYPE connector_result(IND2Connector *self, OVERLAPPED *overlapped, BOOL wait)
{
    UNUSED(self);
    return overlapped_result(overlapped, wait);
}

static void connector_closed(struct object *object)
{
    struct connector *connector = CONTAINER_OF(object, struct connector, object);

    AcquireSRWLockExclusive(&connector->lock);
    enum state state = connector->state;
    struct released released = release(connector);
    connector->state = FAILED;
    ReleaseSRWLockExclusive(&connector->lock);
    bool established = state == ESTABLISHED || state == PEER_GONE || state == LEAVING;
    if (established && released.stream != NULL)
        leave(released.stream);
    part(released, established ? PART_ONLY : state == CONNECTING ? PART_CUT : PART_WITHDRAW);
    source_close(&connector->source);
}

static void connector_destroy(struct object *object)
{
    struct connector *connector = CONTAINER_OF(object, struct connector, object);

    if (connector->socket != INVALID_SOCKET)
        closesocket(connector->socket);
    source_free(&connector->source);
    free(connector);
}

static const struct object_class class = {
    .kind = KIND_CONNECTOR,
    .closed = connector_closed,
    .destroy = connector_destroy,
};

static const struct IND2Connector_methods methods = {
    OBJECT_METHODS(IND2Connector), connector_cancel,        connector_result,       connector_bind,
    connector_connect,             connector_complete,      connector_accept,       connector_reject,
    connector_read_limits,         connector_private_data,  connector_local_address, connector_peer_address,
    connector_notify_disconnect,   connector_disconnect,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2Connector,
    .base = &softnd_iid_IND2Overlapped,
};

struct object *connector_object(struct connector *connector)
{
    return &connector->object;
}

struct connector *connector_from(IUnknown *pointer, const struct adapter *adapter)
{
    return (struct connector *)object_from(pointer, &view, adapter);
}

HRESULT connector_new(struct adapter *adapter, const struct object_view *as, HANDLE file, struct connector **out)
{
    struct connector *connector = calloc(1, sizeof *connector);
    if (connector == NULL)
        return ND_NO_MEMORY;
    InitializeSRWLock(&connector->lock);
    connector->socket = INVALID_SOCKET;
    HRESULT status = source_start(&connector->source, adapter, &connector->object, file);
    if (status == ND_SUCCESS && !object_start(&connector->object, &class, as, adapter))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        source_free(&connector->source);
        free(connector);
        return status;
    }
    *out = connector;
    return ND_SUCCESS;
}

HRESULT connector_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out)
{
    struct connector *connector;
    HRESULT status = object_check_iid(&view, iid, out);

    if (status == ND_SUCCESS)
        status = connector_new(adapter, &view, file, &connector);
    if (status == ND_SUCCESS)
        *out = connector;
    return status;
}
