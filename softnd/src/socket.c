/* Creates the sockets of connectors and listeners. */
#include "addresses.h"
#include "stream.h"

static bool bind_in_range(SOCKET socket, struct sockaddr_storage address, int *error)
{
    const unsigned first = 49152, ports = 16384;
    LARGE_INTEGER clock;

    QueryPerformanceCounter(&clock);
    unsigned start = (unsigned)(clock.QuadPart * 2654435761u >> 8) ^ GetCurrentThreadId() * 40503u;
    for (unsigned i = 0; i < ports; i++) {
        address_set_port((struct sockaddr *)&address, (USHORT)(first + (start + i) % ports));
        if (bind(socket, (struct sockaddr *)&address, address_size((struct sockaddr *)&address)) == 0)
            return true;
        *error = WSAGetLastError();
        if (*error != WSAEADDRINUSE && *error != WSAEACCES)
            return false;
    }
    *error = WSAENOBUFS;
    return false;
}

SOCKET stream_socket(const struct sockaddr_storage *address, bool listening, int *error)
{
    BOOL on = TRUE;
    SOCKET result = WSASocketW(address->ss_family, SOCK_STREAM, IPPROTO_TCP, NULL, 0,
                               WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT);

    *error = result == INVALID_SOCKET ? WSAGetLastError() : 0;
    if (result == INVALID_SOCKET)
        return result;
    if (listening)
        setsockopt(result, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, (const char *)&on, sizeof on);
    if (address->ss_family == AF_INET6)
        setsockopt(result, IPPROTO_IPV6, IPV6_V6ONLY, (const char *)&on, sizeof on);
    bool bound;
    if (address_port((const struct sockaddr *)address) == 0) {
        bound = bind_in_range(result, *address, error);
    } else {
        bound = bind(result, (const struct sockaddr *)address, address_size((const struct sockaddr *)address)) == 0;
        *error = bound ? 0 : WSAGetLastError();
    }
    if (bound)
        return result;
    closesocket(result);
    return INVALID_SOCKET;
}
