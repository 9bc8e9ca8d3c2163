#include "address.h"
#include "compat.h"
#include "status.h"
#include "settings.h"
#include "transport.h"

#include <mswsock.h>
#include <stdio.h>
#include <string.h>

/* ---- Making sockets ---- */

static nd_status making_status(int error)
{
    return error == WSAEMFILE ? ND_TOO_MANY_OPENED_FILES : ND_INSUFFICIENT_RESOURCES;
}

static nd_status bind_status(int error)
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

/* The ports for sockets that need any. The switch PORTS names others, by the first and the last one: 20000-29999. */
static void any_ports(unsigned *first, unsigned *last)
{
    unsigned asked_first, asked_last;
    char text[32], more;

    *first = 49152;
    *last = 65535;
    if (!settings_text("PORTS", text, sizeof text) ||
        sscanf(text, "%5u-%5u%c", &asked_first, &asked_last, &more) != 2 || asked_first == 0 ||
        asked_first > asked_last || asked_last > 65535)
        return;
    *first = asked_first;
    *last = asked_last;
}

static bool bind_in_range(SOCKET handle, struct sockaddr_storage address, int *error)
{
    LARGE_INTEGER clock;
    unsigned first, last;

    any_ports(&first, &last);
    unsigned ports = last - first + 1;
    QueryPerformanceCounter(&clock);
    unsigned start = (unsigned)(clock.QuadPart * 2654435761u >> 8) ^ GetCurrentThreadId() * 40503u;
    for (unsigned i = 0; i < ports; i++) {
        address_set_port((struct sockaddr *)&address, (uint16_t)(first + (start + i) % ports));
        if (bind(handle, (struct sockaddr *)&address, address_size((struct sockaddr *)&address)) == 0)
            return true;
        *error = WSAGetLastError();
        if (*error != WSAEADDRINUSE && *error != WSAEACCES)
            return false;
    }
    *error = WSAENOBUFS;
    return false;
}

socket_handle socket_bound(const struct sockaddr_storage *address, bool listening, nd_status *status)
{
    BOOL on = TRUE;
    int error = 0;
    SOCKET result = WSASocketW(address->ss_family, SOCK_STREAM, IPPROTO_TCP, NULL, 0,
                               WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT);

    *status = result == INVALID_SOCKET ? making_status(WSAGetLastError()) : ND_SUCCESS;
    if (result == INVALID_SOCKET)
        return NO_SOCKET;
    if (listening)
        setsockopt(result, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, (const char *)&on, sizeof on);
    if (address->ss_family == AF_INET6)
        setsockopt(result, IPPROTO_IPV6, IPV6_V6ONLY, (const char *)&on, sizeof on);
    bool bound;
    if (address_port((const struct sockaddr *)address) == 0) {
        bound = bind_in_range(result, *address, &error);
    } else {
        bound = bind(result, (const struct sockaddr *)address, address_size((const struct sockaddr *)address)) == 0;
        error = bound ? 0 : WSAGetLastError();
    }
    if (bound)
        return result;
    *status = bind_status(error);
    closesocket(result);
    return NO_SOCKET;
}

bool socket_address(socket_handle handle, struct sockaddr_storage *out)
{
    int length = sizeof *out;
    return getsockname(handle, (struct sockaddr *)out, &length) == 0;
}

void socket_discard(socket_handle handle)
{
    closesocket(handle);
}

bool socket_start(struct socket *socket, socket_handle handle, bool accepted)
{
    BOOL on = TRUE;

    UNUSED(accepted);
    if (!worker_attach((HANDLE)handle, &socket->worker) ||
        !SetFileCompletionNotificationModes((HANDLE)handle,
                                            FILE_SKIP_COMPLETION_PORT_ON_SUCCESS | FILE_SKIP_SET_EVENT_ON_HANDLE)) {
        closesocket(handle);
        return false;
    }
    setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, (const char *)&on, sizeof on);
    setsockopt(handle, SOL_SOCKET, SO_KEEPALIVE, (const char *)&on, sizeof on);
    socket->handle = handle;
    return true;
}

/* ---- Operations ---- */

static enum io_result outcome(bool done, nd_status *error)
{
    if (done)
        return IO_DONE;
    int reason = WSAGetLastError();
    if (reason == WSA_IO_PENDING)
        return IO_PENDING;
    *error = handshake_status((DWORD)reason);
    return IO_FAILED;
}

enum io_result socket_connect(struct socket *socket, struct io *io, const struct sockaddr_storage *peer,
                              nd_status *error)
{
    static LPFN_CONNECTEX connect_ex;
    GUID id = WSAID_CONNECTEX;
    DWORD bytes;

    if (connect_ex == NULL && WSAIoctl(socket->handle, SIO_GET_EXTENSION_FUNCTION_POINTER, &id, sizeof id, &connect_ex,
                                       sizeof connect_ex, &bytes, NULL, NULL) != 0) {
        *error = handshake_status((DWORD)WSAGetLastError());
        return IO_FAILED;
    }
    memset(&io->overlapped, 0, sizeof io->overlapped);
    BOOL done = connect_ex(socket->handle, (const struct sockaddr *)peer, address_size((const struct sockaddr *)peer),
                           NULL, 0, &bytes, &io->overlapped);
    return outcome(done, error);
}

enum io_result socket_send(struct socket *socket, struct io *io, const void *data, size_t size, bool more, size_t *sent,
                           nd_status *error)
{
    WSABUF chunk = {(ULONG)size, (char *)data};
    DWORD bytes = 0;

    UNUSED(more);
    memset(&io->overlapped, 0, sizeof io->overlapped);
    bool done = WSASend(socket->handle, &chunk, 1, &bytes, 0, &io->overlapped, NULL) == 0;
    *sent = done ? bytes : 0;
    return outcome(done, error);
}

enum io_result socket_receive(struct socket *socket, struct io *io, void *data, size_t size, size_t *received,
                              nd_status *error)
{
    WSABUF chunk = {(ULONG)size, data};
    DWORD bytes = 0, flags = 0;

    memset(&io->overlapped, 0, sizeof io->overlapped);
    bool done = WSARecv(socket->handle, &chunk, 1, &bytes, &flags, &io->overlapped, NULL) == 0;
    *received = done ? bytes : 0;
    return outcome(done, error);
}

/* A receive that is canceled has taken no data; one that has taken some succeeds. */
enum move socket_receive_elsewhere(struct socket *socket, struct io *io, void *data, size_t size)
{
    UNUSED(data);
    UNUSED(size);
    return CancelIoEx((HANDLE)socket->handle, &io->overlapped) ? MOVE_ENDS : MOVE_FAILED;
}

/* Windows' TCP decides for itself how long it waits for a silent host. */
void socket_probe(struct socket *socket, bool on)
{
    UNUSED(socket);
    UNUSED(on);
}

unsigned socket_unanswered(struct socket *socket, uint32_t *silent_ms)
{
    UNUSED(socket);
    *silent_ms = 0;
    return 0;
}

/* Only verbs' programs let messages wait without a limit that somebody looks at. */
bool socket_peer_ended(struct socket *socket)
{
    UNUSED(socket);
    return false;
}

void socket_connected(struct socket *socket, struct sockaddr_storage *local)
{
    int length = sizeof *local;

    setsockopt(socket->handle, SOL_SOCKET, SO_UPDATE_CONNECT_CONTEXT, NULL, 0);
    getsockname(socket->handle, (struct sockaddr *)local, &length);
}

/* ---- The end ---- */

static void set_reset(struct socket *socket, bool on)
{
    struct linger linger = {on, 0};

    setsockopt(socket->handle, SOL_SOCKET, SO_LINGER, (const char *)&linger, sizeof linger);
}

void socket_resets(struct socket *socket)
{
    set_reset(socket, true);
}

void socket_end_sending(struct socket *socket)
{
    set_reset(socket, false);
    shutdown(socket->handle, SD_SEND);
}

void socket_cancel(struct socket *socket, bool reset)
{
    if (reset)
        set_reset(socket, true);
    /* Under Wine, a send to a peer that does not read continues after its socket was closed. */
    CancelIoEx((HANDLE)socket->handle, NULL);
}

void socket_close(struct socket *socket)
{
    closesocket(socket->handle);
    socket->handle = NO_SOCKET;
}
