/* The connector: its events, its end, its queries and its object. connector_attempt.c has Bind, Connect, Accept and
 * Reject.
 *
 * States, and the calls and events that change them:
 *
 *   IDLE           Connect -> CONNECTING; GetConnectionRequest -> RESERVED
 *   CONNECTING     accepted -> OFFERED; refused, failed -> IDLE; canceled -> FAILED
 *   OFFERED        CompleteConnect -> ESTABLISHED; Reject -> IDLE
 *   RESERVED       a request arrived -> REQUESTED; GetConnectionRequest ended without one -> IDLE
 *   REQUESTED      Accept -> ACCEPTING; Reject -> IDLE
 *   ACCEPTING      first message -> ESTABLISHED; failed, canceled -> FAILED
 *   ESTABLISHED    ended by the peer or an error -> PEER_GONE; Disconnect -> DISCONNECTING
 *   PEER_GONE      Disconnect -> DISCONNECTING
 *   DISCONNECTING  the outcome of everything sent is known -> DISCONNECTED
 *
 * The connector's lock is the outermost one. Values are read under it; streams and requests are handled after it was
 * released. So an event may find that the connector has moved on and has another stream, or none. */
#include "connector_state.h"
#include "addresses.h"
#include "nd_objects.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

struct detached connector_detach(struct connector *connector)
{
    struct detached detached = {connector->stream, connector->queue_pair};

    connector->stream = NULL;
    connector->queue_pair = NULL;
    return detached;
}

void detached_tear_down(struct detached detached, enum teardown teardown)
{
    struct connector *connector;

    if (detached.stream != NULL) {
        stream_lock(detached.stream);
        connector = detached.stream->connector;
        detached.stream->connector = NULL;
        if (teardown == ABORT_STREAM)
            stream_abort(detached.stream);
        else if (teardown == WITHDRAW_STREAM && detached.stream->phase != STREAM_CLOSED)
            stream_withdraw(detached.stream);
        stream_unlock(detached.stream);
        if (detached.queue_pair != NULL)
            qp_detach(detached.queue_pair, detached.stream);
        if (connector != NULL)
            object_drop(&connector->object);
        stream_drop(detached.stream);
    }
    if (detached.queue_pair != NULL)
        object_drop(&detached.queue_pair->object);
}

/* Ends an established connection from this side. EVENT_ENDED follows, perhaps during the call. */
static void disconnect_stream(struct stream *stream)
{
    stream_lock(stream);
    stream_disconnect(stream);
    stream_unlock(stream);
}

void connector_attach(struct connector *connector, struct stream *stream)
{
    stream->connector = connector;
    object_hold(&connector->object);
    connector->stream = stream;
}

/* ---- Queries ---- */

/* Whether the active side has given up a request that GetConnectionRequest handed out. Under the connector's lock. */
static bool abandoned(struct connector *connector)
{
    stream_lock(connector->stream);
    bool result = connector->stream->abandoned;
    lock_release(&connector->stream->lock);
    return result;
}

HRESULT STDMETHODCALLTYPE connector_read_limits(IND2Connector *self, ULONG *inbound, ULONG *outbound)
{
    struct connector *connector = (struct connector *)self;

    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    lock_share(&connector->lock);
    bool valid = connector->state == OFFERED || connector->state == REQUESTED;
    ULONG in = connector->inbound, out = connector->outbound;
    lock_unshare(&connector->lock);
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
    lock_acquire(&connector->lock);
    if (!connector->has_private_data)
        status = ND_CONNECTION_INVALID;
    else if (connector->state == REQUESTED && abandoned(connector))
        status = ND_CONNECTION_ABORTED;
    if (status == ND_SUCCESS) {
        ULONG copied = have < connector->private_size && out != NULL ? have : connector->private_size;
        status = have < connector->private_size || (out == NULL && copied > 0) ? ND_BUFFER_OVERFLOW : ND_SUCCESS;
        if (out != NULL && !guarded_copy(out, connector->private_data, copied))
            status = ND_ACCESS_VIOLATION;
        if (!guarded_copy(size, &connector->private_size, sizeof *size))
            status = ND_ACCESS_VIOLATION;
    }
    lock_release(&connector->lock);
    return status;
}

static HRESULT give_address(struct connector *connector, bool peer, struct sockaddr *out, ULONG *size)
{
    if (adapter_gone(connector->object.adapter))
        return ND_DEVICE_REMOVED;
    lock_share(&connector->lock);
    enum connector_state state = connector->state;
    struct sockaddr_storage address = peer ? connector->peer : connector->local;
    lock_unshare(&connector->lock);
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
    lock_acquire(&connector->lock);
    bool valid = connector->state == ESTABLISHED || connector->state == PEER_GONE;
    bool gone = connector->state == PEER_GONE;
    HRESULT status = valid ? request_accept(&connector->com.source, REQUEST_NOTIFY_DISCONNECT, overlapped, NULL)
                           : ND_CONNECTION_INVALID;
    lock_release(&connector->lock);
    if (status == ND_PENDING && gone)
        request_complete(&connector->com.source, REQUEST_NOTIFY_DISCONNECT, ND_SUCCESS);
    return status;
}

HRESULT STDMETHODCALLTYPE connector_disconnect(IND2Connector *self, OVERLAPPED *overlapped)
{
    struct connector *connector = (struct connector *)self;
    struct stream *stream = NULL;

    lock_acquire(&connector->lock);
    bool valid = connector->state == ESTABLISHED || connector->state == PEER_GONE;
    HRESULT status =
        valid ? request_accept(&connector->com.source, REQUEST_DISCONNECT, overlapped, NULL) : ND_CONNECTION_INVALID;
    if (status == ND_PENDING) {
        connector->disconnect_result = ND_SUCCESS;
        if (adapter_gone(connector->object.adapter))
            connector->disconnect_result = ND_DEVICE_REMOVED;
        else if (connector->queue_pair != NULL && ((struct com *)connector->queue_pair->object.face)->references == 0)
            connector->disconnect_result = ND_CANCELED;
        connector->state = DISCONNECTING;
        stream = connector->stream;
        stream_hold(stream);
    }
    lock_release(&connector->lock);
    if (status != ND_PENDING)
        return status;
    disconnect_stream(stream);
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

void connector_event(struct connector *connector, struct stream *stream, unsigned events, nd_status status)
{
    struct detached detached = {NULL, NULL};
    enum request_kind finished = REQUEST_ANY;
    HRESULT result = status;
    bool ended = false, again = false;

    lock_acquire(&connector->lock);
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
        result = connector_fall_back(connector, stream, &detached);
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
    if ((events & EVENT_ENDED) != 0 && connector->state == DISCONNECTING) {
        connector->state = DISCONNECTED;
        detached = connector_detach(connector);
        finished = REQUEST_DISCONNECT;
        result = connector->disconnect_result;
    }
    if ((events & EVENT_REFUSED) != 0 && connector->state == CONNECTING) {
        take_peer_data(connector, stream, false);
        connector->state = IDLE;
        detached = connector_detach(connector);
        finished = REQUEST_CONNECT;
        result = ND_CONNECTION_REFUSED;
    } else if ((events & EVENT_FAILED) != 0 &&
               (connector->state == CONNECTING || connector->state == OFFERED || connector->state == ACCEPTING)) {
        finished = connector->state == ACCEPTING ? REQUEST_ACCEPT : REQUEST_CONNECT;
        if (connector->state == OFFERED)
            finished = REQUEST_ANY;
        connector->state =
            connector->state == CONNECTING && result != ND_CANCELED && result != ND_DEVICE_REMOVED ? IDLE : FAILED;
        connector->has_private_data = false;
        detached = connector_detach(connector);
    }
    struct stream *next = again ? connector->stream : NULL;
    if (next != NULL)
        stream_hold(next);
    lock_release(&connector->lock);

    detached_tear_down(detached, KEEP_STREAM);
    if (finished != REQUEST_ANY)
        request_complete(&connector->com.source, finished, result);
    if (ended)
        request_complete_all(&connector->com.source, REQUEST_NOTIFY_DISCONNECT, ND_SUCCESS);
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
    lock_acquire(&connector->lock);
    bool idle = connector->state == IDLE;
    if (idle)
        connector->state = RESERVED;
    lock_release(&connector->lock);
    if (idle)
        object_hold(&connector->object);
    return idle;
}

void connector_unreserve(struct connector *connector)
{
    lock_acquire(&connector->lock);
    if (connector->state == RESERVED)
        connector->state = IDLE;
    lock_release(&connector->lock);
    object_drop(&connector->object);
}

bool connector_adopt(struct connector *connector, struct stream *stream)
{
    lock_acquire(&connector->lock);
    bool reserved = connector->state == RESERVED;
    if (reserved) {
        stream_lock(stream);
        connector_attach(connector, stream);
        stream_hold(stream);
        connector->state = REQUESTED;
        connector->local = stream->local;
        connector->peer = stream->peer;
        take_peer_data(connector, stream, true);
        lock_release(&stream->lock);
        if (connector->socket != NO_SOCKET)
            socket_discard(connector->socket);
        connector->socket = NO_SOCKET;
    }
    lock_release(&connector->lock);
    return reserved;
}

/* ---- The object ---- */

HRESULT STDMETHODCALLTYPE connector_cancel(IND2Connector *self)
{
    struct connector *connector = (struct connector *)self;
    struct detached detached = {NULL, NULL};

    lock_acquire(&connector->lock);
    if (connector->state == CONNECTING || connector->state == ACCEPTING) {
        connector->state = FAILED;
        detached = connector_detach(connector);
    }
    lock_release(&connector->lock);
    detached_tear_down(detached, ABORT_STREAM);
    return source_cancel(&connector->com.source);
}

static HRESULT STDMETHODCALLTYPE connector_result(IND2Connector *self, OVERLAPPED *overlapped, BOOL wait)
{
    UNUSED(self);
    return overlapped_result(overlapped, wait);
}

static void connector_closed(struct object *object)
{
    struct connector *connector = CONTAINER_OF(object, struct connector, object);

    lock_acquire(&connector->lock);
    enum connector_state state = connector->state;
    struct detached detached = connector_detach(connector);
    connector->state = FAILED;
    lock_release(&connector->lock);
    bool established = state == ESTABLISHED || state == PEER_GONE || state == DISCONNECTING;
    if (established && detached.stream != NULL)
        disconnect_stream(detached.stream);
    detached_tear_down(detached, established ? KEEP_STREAM : state == CONNECTING ? ABORT_STREAM : WITHDRAW_STREAM);
    source_close(&connector->com.source);
}

static void connector_destroy(struct object *object)
{
    struct connector *connector = CONTAINER_OF(object, struct connector, object);

    if (connector->socket != NO_SOCKET)
        socket_discard(connector->socket);
    source_free(&connector->com.source);
    free(connector);
}

static const struct object_class class = {
    .kind = KIND_CONNECTOR,
    .closed = connector_closed,
    .destroy = connector_destroy,
};

static const struct IND2Connector_methods methods = {
    COM_METHODS(IND2Connector),  connector_cancel,       connector_result,        connector_bind,
    connector_connect,           connector_complete,     connector_accept,        connector_reject,
    connector_read_limits,       connector_private_data, connector_local_address, connector_peer_address,
    connector_notify_disconnect, connector_disconnect,
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
    return (struct connector *)com_from(pointer, &view, adapter);
}

HRESULT connector_new(struct adapter *adapter, const struct object_view *as, HANDLE file, struct connector **out)
{
    struct connector *connector = calloc(1, sizeof *connector);
    if (connector == NULL)
        return ND_NO_MEMORY;
    lock_start(&connector->lock);
    connector->socket = NO_SOCKET;
    com_start(&connector->com, as);
    HRESULT status = source_open(&connector->com.source, file);
    if (status == ND_SUCCESS && !object_start(&connector->object, &class, adapter, NULL))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        source_free(&connector->com.source);
        free(connector);
        return status;
    }
    com_attach(&connector->com, &connector->object);
    *out = connector;
    return ND_SUCCESS;
}

HRESULT connector_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out)
{
    struct connector *connector;
    HRESULT status = com_check_iid(&view, iid, out);

    if (status == ND_SUCCESS)
        status = connector_new(adapter, &view, file, &connector);
    if (status == ND_SUCCESS)
        *out = connector;
    return status;
}
