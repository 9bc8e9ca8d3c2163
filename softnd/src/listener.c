#include "listener.h"
#include "addresses.h"
#include "connector.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

struct listener {
    struct object object;
    struct source source;
    SRWLOCK lock;
    SOCKET socket;
    struct sockaddr_storage address;
    bool listening, closed;
    ULONG backlog; /* 0: no limit */
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
    int error = 0;

    if (adapter_gone(listener->object.adapter))
        return ND_DEVICE_REMOVED;
    HRESULT status = address_take(address, size, &local);
    if (status != ND_SUCCESS)
        return status;
    if (!address_is_wildcard((struct sockaddr *)&local) && !addresses_serve((struct sockaddr *)&local))
        return ND_INVALID_ADDRESS;
    AcquireSRWLockExclusive(&listener->lock);
    if (listener->socket != INVALID_SOCKET) {
        status = ND_ADDRESS_ALREADY_ASSOCIATED;
    } else {
        listener->socket = stream_socket(&local, true, &error);
        if (listener->socket == INVALID_SOCKET) {
            TRACE("listener %p: no socket for port %u, error %d", (void *)listener,
                  address_port((struct sockaddr *)&local), error);
            status = error == WSAEADDRINUSE || error == WSAEACCES ? ND_SHARING_VIOLATION
                     : error == WSAENOBUFS                        ? ND_TOO_MANY_ADDRESSES
                     : error == WSAEADDRNOTAVAIL                  ? ND_INVALID_ADDRESS
                                                                  : ND_INSUFFICIENT_RESOURCES;
        }
    }
    ReleaseSRWLockExclusive(&listener->lock);
    return status;
}

/* ---- Accepting ---- */

/* The connections come from plain accept, called when the socket's event is set. Under Wine, sockets from AcceptEx
 * cost one more system call in each operation. */
static struct stream *make_stream(struct listener *listener, SOCKET accepted)
{
    struct sockaddr_storage local = {0}, peer = {0};
    int local_size = sizeof local, peer_size = sizeof peer;

    u_long blocking = 0;

    WSAEventSelect(accepted, NULL, 0); /* inherited from the listening socket */
    ioctlsocket(accepted, FIONBIO, &blocking);
    SetHandleInformation((HANDLE)accepted, HANDLE_FLAG_INHERIT, 0);
    /* A wildcard listener also gets connections to addresses that the adapter does not serve. */
    if (getsockname(accepted, (struct sockaddr *)&local, &local_size) != 0 ||
        getpeername(accepted, (struct sockaddr *)&peer, &peer_size) != 0 ||
        (address_is_wildcard((struct sockaddr *)&listener->address) &&
         !addresses_serve((struct sockaddr *)&local))) {
        closesocket(accepted);
        return NULL;
    }
    struct stream *stream = stream_create(listener->object.adapter, accepted);
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

static void accept_done(struct io *io, DWORD error, DWORD bytes)
{
    struct listener *listener = CONTAINER_OF(io, struct listener, accept_io);

    UNUSED(error);
    UNUSED(bytes);
    for (;;) {
        AcquireSRWLockExclusive(&listener->lock);
        SOCKET accepted = listener->closed ? INVALID_SOCKET : accept(listener->socket, NULL, NULL);
        if (accepted == INVALID_SOCKET) {
            listener->accept_posted = false;
            /* Selected again because Wine can signal a connection that was already accepted, and then not the next
             * one. */
            if (!listener->closed)
                WSAEventSelect(listener->socket, listener->arrival, FD_ACCEPT);
        }
        ReleaseSRWLockExclusive(&listener->lock);
        if (accepted == INVALID_SOCKET)
            break;
        struct stream *stream = make_stream(listener, accepted);
        if (stream == NULL)
            continue;
        stream_lock(stream);
        stream_accepted(stream);
        stream_unlock(stream);
        stream_drop(stream);
    }
    object_drop(&listener->object);
    transport_unhold();
}

static void CALLBACK arrived(void *context, BOOLEAN timed_out)
{
    struct listener *listener = context;

    UNUSED(timed_out);
    AcquireSRWLockExclusive(&listener->lock);
    if (!listener->closed && !listener->accept_posted) {
        listener->accept_posted = true;
        object_hold(&listener->object);
        transport_hold();
        transport_post(&listener->accept_io);
    }
    ReleaseSRWLockExclusive(&listener->lock);
}

HRESULT STDMETHODCALLTYPE listener_listen(IND2Listener *self, ULONG backlog)
{
    struct listener *listener = (struct listener *)self;
    int length = sizeof listener->address;
    HRESULT status = ND_SUCCESS;

    if (adapter_gone(listener->object.adapter))
        return ND_DEVICE_REMOVED;
    AcquireSRWLockExclusive(&listener->lock);
    if (listener->socket == INVALID_SOCKET || listener->listening) {
        status = ND_INVALID_DEVICE_STATE;
    } else if (listen(listener->socket, SOMAXCONN) != 0) {
        int error = WSAGetLastError();

        TRACE("listener %p: listen failed with error %d", (void *)listener, error);
        status = error == WSAEADDRINUSE ? ND_SHARING_VIOLATION : ND_INSUFFICIENT_RESOURCES;
    } else if (getsockname(listener->socket, (struct sockaddr *)&listener->address, &length) != 0 ||
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
    ReleaseSRWLockExclusive(&listener->lock);
    return status;
}

/* ---- Requests ---- */

static void refuse(struct stream *stream)
{
    struct listener *listener;

    stream_lock(stream);
    listener = stream->listener;
    stream->listener = NULL;
    stream_withdraw(stream);
    stream_unlock(stream);
    if (listener != NULL)
        object_drop(listener_object(listener));
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
    struct connector *connector = request->subject;
    bool adopted = connector_adopt(connector, stream);

    if (adopted) {
        stream_lock(stream);
        struct listener *held = stream->listener;
        stream->listener = NULL;
        ReleaseSRWLockExclusive(&stream->lock);
        if (held != NULL)
            object_drop(listener_object(held));
    } else {
        /* The connector was released while it waited, so nobody can take this request through it. */
        stream_hold(stream);
        refuse(stream);
    }
    request_finish(&listener->source, request, adopted ? ND_SUCCESS : ND_CANCELED);
    object_drop(connector_object(connector));
    stream_drop(stream);
}

/* Matches waiting requests with waiting calls, the oldest first on both sides. */
static void match(struct listener *listener)
{
    for (;;) {
        struct request *request = NULL;
        struct stream *stream = NULL;
        AcquireSRWLockExclusive(&listener->lock);
        if (listener->first != NULL)
            request = request_take(&listener->source, REQUEST_CONNECTION);
        if (request != NULL)
            stream = pop(listener);
        ReleaseSRWLockExclusive(&listener->lock);
        if (request == NULL)
            return;
        hand_out(listener, request, stream);
    }
}

void listener_request(struct listener *listener, struct stream *stream)
{
    stream_hold(stream);
    AcquireSRWLockExclusive(&listener->lock);
    bool full = listener->backlog != 0 && listener->count >= listener->backlog &&
                !request_pending(&listener->source, REQUEST_CONNECTION);
    bool take = !listener->closed && !full;
    if (take) {
        stream->next_request = NULL;
        *listener->last = stream;
        listener->last = &stream->next_request;
        listener->count++;
    }
    ReleaseSRWLockExclusive(&listener->lock);
    if (take)
        match(listener);
    else
        refuse(stream);
}

HRESULT listener_wait(struct listener *listener, struct connector *connector, OVERLAPPED *overlapped)
{
    if (adapter_gone(listener->object.adapter))
        return ND_DEVICE_REMOVED;
    if (connector == NULL)
        return ND_INVALID_PARAMETER_1;
    if (!listener->listening)
        return ND_INVALID_DEVICE_STATE;
    if (!connector_reserve(connector))
        return ND_CONNECTION_ACTIVE;
    HRESULT status = request_accept(&listener->source, REQUEST_CONNECTION, overlapped, connector);
    if (status == ND_PENDING)
        match(listener);
    else
        connector_unreserve(connector);
    return status;
}

static HRESULT STDMETHODCALLTYPE listener_get_request(IND2Listener *self, IUnknown *connector, OVERLAPPED *overlapped)
{
    struct listener *listener = (struct listener *)self;
    return listener_wait(listener, connector_from(connector, listener->object.adapter), overlapped);
}

static void request_abandoned(struct source *source, struct request *request)
{
    UNUSED(source);
    if (request->kind == REQUEST_CONNECTION)
        connector_unreserve(request->subject);
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

HRESULT STDMETHODCALLTYPE listener_cancel(IND2Listener *self)
{
    return source_cancel(&((struct listener *)self)->source);
}

static HRESULT STDMETHODCALLTYPE listener_result(IND2Listener *self, OVERLAPPED *overlapped, BOOL wait)
{
    UNUSED(self);
    return overlapped_result(overlapped, wait);
}

static void listener_closed(struct object *object)
{
    struct listener *listener = CONTAINER_OF(object, struct listener, object);
    struct stream *stream, *next;

    /* Waits for a running callback. None follows. */
    if (listener->wait != NULL)
        UnregisterWaitEx(listener->wait, INVALID_HANDLE_VALUE);
    AcquireSRWLockExclusive(&listener->lock);
    listener->closed = true;
    if (listener->socket != INVALID_SOCKET)
        closesocket(listener->socket);
    listener->socket = INVALID_SOCKET;
    stream = listener->first;
    listener->first = NULL;
    listener->last = &listener->first;
    ReleaseSRWLockExclusive(&listener->lock);
    source_close(&listener->source);
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
    source_free(&listener->source);
    free(listener);
}

static const struct object_class class = {
    .kind = KIND_LISTENER,
    .closed = listener_closed,
    .destroy = listener_destroy,
};

static const struct IND2Listener_methods methods = {
    OBJECT_METHODS(IND2Listener), listener_cancel, listener_result, listener_bind, listener_listen,
    listener_local_address,       listener_get_request,
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

HRESULT listener_new(struct adapter *adapter, const struct object_view *as, HANDLE file, struct listener **out)
{
    struct listener *listener = calloc(1, sizeof *listener);
    if (listener == NULL)
        return ND_NO_MEMORY;
    InitializeSRWLock(&listener->lock);
    listener->socket = INVALID_SOCKET;
    listener->last = &listener->first;
    listener->accept_io.done = accept_done;
    listener->source.abandoned = request_abandoned;
    HRESULT status = source_start(&listener->source, adapter, &listener->object, file);
    if (status == ND_SUCCESS && !object_start(&listener->object, &class, as, adapter))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        source_free(&listener->source);
        free(listener);
        return status;
    }
    *out = listener;
    return ND_SUCCESS;
}

HRESULT listener_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out)
{
    struct listener *listener;
    HRESULT status = object_check_iid(&view, iid, out);

    if (status == ND_SUCCESS)
        status = listener_new(adapter, &view, file, &listener);
    if (status == ND_SUCCESS)
        *out = listener;
    return status;
}
