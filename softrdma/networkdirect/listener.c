#include "listener.h"
#include "addresses.h"
#include "nd_connector.h"
#include "nd_objects.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

/* How many connections are accepted before other sockets of the worker get their turn. */
#define ACCEPT_ROUND 64

struct listener {
    struct com com;
    struct object object;
    struct lock lock;
    socket_handle socket;
    struct sockaddr_storage address;
    bool listening, closed;
    ULONG backlog;                /* 0: no limit */
    struct stream *first, **last; /* requests that no GetConnectionRequest has asked for */
    ULONG count;
    HANDLE arrival, wait; /* the socket's event, and the wait that posts accept_io when it is set */
    struct io accept_io;
    bool accept_posted; /* while true, holds a reference and the transport */
};

HRESULT STDMETHODCALLTYPE listener_bind(IND2Listener *self, const struct sockaddr *address, ULONG size)
{
    struct listener *listener = (struct listener *)self;
    struct sockaddr_storage local;

    if (adapter_gone(listener->object.adapter))
        return ND_DEVICE_REMOVED;
    HRESULT status = address_take(address, size, &local);
    if (status != ND_SUCCESS)
        return status;
    if (!address_is_wildcard((struct sockaddr *)&local) && !addresses_serve((struct sockaddr *)&local))
        return ND_INVALID_ADDRESS;
    lock_acquire(&listener->lock);
    if (listener->socket != NO_SOCKET) {
        status = ND_ADDRESS_ALREADY_ASSOCIATED;
    } else {
        nd_status bound;
        listener->socket = socket_bound(&local, true, &bound);
        status = bound;
        if (listener->socket == NO_SOCKET)
            TRACE("listener %p: no socket for port %u: 0x%08lx", (void *)listener,
                  address_port((struct sockaddr *)&local), status);
    }
    lock_release(&listener->lock);
    return status;
}

/* ---- Accepting ---- */

/* The connections come from plain accept, called when the socket's event is set. Under Wine, sockets from AcceptEx
 * cost one more system call in each operation. */
static struct stream *make_stream(struct listener *listener, socket_handle accepted)
{
    struct sockaddr_storage local = {0}, peer = {0};
    int peer_size = sizeof peer;
    u_long blocking = 0;

    WSAEventSelect(accepted, NULL, 0); /* inherited from the listening socket */
    ioctlsocket(accepted, FIONBIO, &blocking);
    SetHandleInformation((HANDLE)accepted, HANDLE_FLAG_INHERIT, 0);
    /* A wildcard listener also gets connections to addresses that the adapter does not serve. */
    if (!socket_address(accepted, &local) || getpeername(accepted, (struct sockaddr *)&peer, &peer_size) != 0 ||
        (address_is_wildcard((struct sockaddr *)&listener->address) && !addresses_serve((struct sockaddr *)&local))) {
        socket_discard(accepted);
        return NULL;
    }
    struct stream *stream = stream_create(listener->object.adapter, accepted, true);
    if (stream == NULL)
        return NULL;
    stream->local = local;
    stream->peer = peer;
    stream->listener = listener;
    object_hold(&listener->object);
    TRACE("listener %p: stream %p from port %u", (void *)listener, (void *)stream,
          address_port((struct sockaddr *)&peer));
    return stream;
}

static void accept_done(struct io *io, nd_status error, size_t bytes)
{
    struct listener *listener = CONTAINER_OF(io, struct listener, accept_io);

    UNUSED(error);
    UNUSED(bytes);
    for (int i = 0;; i++) {
        if (i == ACCEPT_ROUND) {
            worker_post(&listener->accept_io);
            return;
        }
        lock_acquire(&listener->lock);
        socket_handle accepted = listener->closed ? NO_SOCKET : accept(listener->socket, NULL, NULL);
        if (accepted == NO_SOCKET) {
            listener->accept_posted = false;
            /* Selected again because Wine can signal a connection that was already accepted, and then not the next
             * one. */
            if (!listener->closed)
                WSAEventSelect(listener->socket, listener->arrival, FD_ACCEPT);
        }
        lock_release(&listener->lock);
        if (accepted == NO_SOCKET)
            break;
        struct stream *stream = make_stream(listener, accepted);
        if (stream == NULL)
            continue;
        stream_accepted(stream);
        stream_drop(stream);
    }
    object_drop(&listener->object);
    transport_unhold();
}

static void CALLBACK arrived(void *context, BOOLEAN timed_out)
{
    struct listener *listener = context;

    UNUSED(timed_out);
    lock_acquire(&listener->lock);
    if (!listener->closed && !listener->accept_posted) {
        listener->accept_posted = true;
        object_hold(&listener->object);
        transport_hold();
        worker_post(&listener->accept_io);
    }
    lock_release(&listener->lock);
}

HRESULT STDMETHODCALLTYPE listener_listen(IND2Listener *self, ULONG backlog)
{
    struct listener *listener = (struct listener *)self;
    HRESULT status = ND_SUCCESS;

    if (adapter_gone(listener->object.adapter))
        return ND_DEVICE_REMOVED;
    lock_acquire(&listener->lock);
    if (listener->socket == NO_SOCKET || listener->listening) {
        status = ND_INVALID_DEVICE_STATE;
    } else if (listen(listener->socket, SOMAXCONN) != 0) {
        int error = WSAGetLastError();

        TRACE("listener %p: listen failed with error %d", (void *)listener, error);
        status = error == WSAEADDRINUSE ? ND_SHARING_VIOLATION : ND_INSUFFICIENT_RESOURCES;
    } else if (!socket_address(listener->socket, &listener->address) ||
               (listener->arrival == NULL && (listener->arrival = CreateEventW(NULL, FALSE, FALSE, NULL)) == NULL) ||
               WSAEventSelect(listener->socket, listener->arrival, FD_ACCEPT) != 0 ||
               !RegisterWaitForSingleObject(&listener->wait, listener->arrival, arrived, listener, INFINITE,
                                            WT_EXECUTEINWAITTHREAD)) {
        TRACE("listener %p: its arrivals cannot be waited for, error %lu", (void *)listener, GetLastError());
        status = ND_INSUFFICIENT_RESOURCES;
    } else {
        listener->backlog = backlog;
        listener->listening = true;
    }
    lock_release(&listener->lock);
    return status;
}

/* ---- Requests ---- */

static void refuse(struct stream *stream)
{
    stream_refuse(stream);
    stream_drop(stream);
}

/* Under the lock. */
static struct stream *pop(struct listener *listener)
{
    struct stream *stream = listener->first;

    if (stream == NULL)
        return NULL;
    listener->first = stream->next_request;
    if (listener->first == NULL)
        listener->last = &listener->first;
    listener->count--;
    return stream;
}

static void hand_out(struct listener *listener, struct request *request, struct stream *stream)
{
    struct nd_connector *connector = request->subject;
    bool adopted = nd_connector_adopt(connector, stream);

    /* The connector was released while it waited, so nobody can take this request through it. */
    if (!adopted)
        stream_refuse(stream);
    request_finish(&listener->com.source, request, adopted ? ND_SUCCESS : ND_CANCELED);
    object_drop(&connector->connector.object);
    stream_drop(stream);
}

/* Matches waiting requests with waiting calls, the oldest first on both sides. */
static void match(struct listener *listener)
{
    for (;;) {
        struct request *request = NULL;
        struct stream *stream = NULL;
        lock_acquire(&listener->lock);
        if (listener->first != NULL)
            request = request_take(&listener->com.source, REQUEST_CONNECTION);
        if (request != NULL)
            stream = pop(listener);
        lock_release(&listener->lock);
        if (request == NULL)
            return;
        hand_out(listener, request, stream);
    }
}

void listener_request(struct listener *listener, struct stream *stream)
{
    stream_hold(stream);
    lock_acquire(&listener->lock);
    bool full = listener->backlog != 0 && listener->count >= listener->backlog &&
                !request_pending(&listener->com.source, REQUEST_CONNECTION);
    bool take = !listener->closed && !full;
    if (take) {
        stream->next_request = NULL;
        *listener->last = stream;
        listener->last = &stream->next_request;
        listener->count++;
    }
    lock_release(&listener->lock);
    if (take)
        match(listener);
    else
        refuse(stream);
}

HRESULT listener_wait(struct listener *listener, struct nd_connector *connector, OVERLAPPED *overlapped)
{
    if (adapter_gone(listener->object.adapter))
        return ND_DEVICE_REMOVED;
    if (connector == NULL)
        return ND_INVALID_PARAMETER_1;
    if (!listener->listening)
        return ND_INVALID_DEVICE_STATE;
    if (!nd_connector_reserve(connector))
        return ND_CONNECTION_ACTIVE;
    HRESULT status = request_accept_to_wait(&listener->com.source, REQUEST_CONNECTION, overlapped, connector);
    if (status == ND_PENDING)
        match(listener);
    else
        nd_connector_unreserve(connector);
    return status;
}

static HRESULT STDMETHODCALLTYPE listener_get_request(IND2Listener *self, IUnknown *connector, OVERLAPPED *overlapped)
{
    struct listener *listener = (struct listener *)self;
    return listener_wait(listener, nd_connector_from(connector, listener->object.adapter), overlapped);
}

static void request_abandoned(struct source *source, struct request *request)
{
    UNUSED(source);
    if (request->kind == REQUEST_CONNECTION)
        nd_connector_unreserve(request->subject);
}

HRESULT STDMETHODCALLTYPE listener_local_address(IND2Listener *self, struct sockaddr *address, ULONG *size)
{
    struct listener *listener = (struct listener *)self;

    if (adapter_gone(listener->object.adapter))
        return ND_DEVICE_REMOVED;
    if (!listener->listening)
        return ND_INVALID_DEVICE_STATE;
    return address_give(&listener->address, address, size);
}

/* ---- The object ---- */

static void listener_closed(struct object *object)
{
    struct listener *listener = CONTAINER_OF(object, struct listener, object);
    struct stream *stream, *next;

    /* Waits for a running callback. None follows. */
    if (listener->wait != NULL)
        UnregisterWaitEx(listener->wait, INVALID_HANDLE_VALUE);
    lock_acquire(&listener->lock);
    listener->closed = true;
    if (listener->socket != NO_SOCKET)
        socket_discard(listener->socket);
    listener->socket = NO_SOCKET;
    stream = listener->first;
    listener->first = NULL;
    listener->last = &listener->first;
    lock_release(&listener->lock);
    source_close(&listener->com.source);
    for (; stream != NULL; stream = next) {
        next = stream->next_request;
        refuse(stream);
    }
}

static void listener_destroy(struct object *object)
{
    struct listener *listener = CONTAINER_OF(object, struct listener, object);

    if (listener->arrival != NULL)
        CloseHandle(listener->arrival);
    source_free(&listener->com.source);
    free(listener);
}

static const struct object_class class = {
    .kind = KIND_LISTENER,
    .closed = listener_closed,
    .destroy = listener_destroy,
};

static const struct IND2Listener_methods methods = {
    COM_OVERLAPPED_METHODS(IND2Listener, com_cancel),
    listener_bind,
    listener_listen,
    listener_local_address,
    listener_get_request,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2Listener,
    .base = &softnd_iid_IND2Overlapped,
};

struct object *listener_object(struct listener *listener)
{
    return &listener->object;
}

HRESULT listener_new(struct adapter *adapter, const struct object_view *as, HANDLE file, void **out)
{
    HRESULT status = nd_call_fault(adapter, PLACE_CALL_RDMA_CREATE_ID);
    if (status != ND_SUCCESS)
        return status;
    struct listener *listener = calloc(1, sizeof *listener);
    if (listener == NULL)
        return ND_NO_MEMORY;
    lock_start(&listener->lock);
    listener->socket = NO_SOCKET;
    listener->last = &listener->first;
    listener->accept_io.done = accept_done;
    listener->com.source.abandoned = request_abandoned;
    com_start(&listener->com, as);
    status = source_open(&listener->com.source, file);
    if (status == ND_SUCCESS && !object_start(&listener->object, &class, adapter, NULL))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        source_free(&listener->com.source);
        free(listener);
        return status;
    }
    com_attach(&listener->com, &listener->object);
    *out = listener;
    return ND_SUCCESS;
}

HRESULT STDMETHODCALLTYPE listener_create(IND2Adapter *self, REFIID iid, HANDLE file, void **out)
{
    HRESULT status = nd_adapter_check(self, &view, iid, out);

    return status == ND_SUCCESS ? listener_new(nd_adapter_of(self), &view, file, out) : status;
}
