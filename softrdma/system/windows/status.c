#include "status.h"

nd_status handshake_status(DWORD error)
{
    switch (error) {
    case ERROR_CONNECTION_REFUSED:
    case WSAECONNREFUSED:
        return ND_CONNECTION_REFUSED;
    case ERROR_NETWORK_UNREACHABLE:
    case WSAENETUNREACH:
    case WSAENETDOWN:
    case WSAEINVAL: /* under Wine: no route from the address that the connector is bound to */
        return ND_NETWORK_UNREACHABLE;
    case ERROR_HOST_UNREACHABLE:
    case WSAEHOSTUNREACH:
    case WSAEHOSTDOWN:
        return ND_HOST_UNREACHABLE;
    case ERROR_SEM_TIMEOUT:
    case ERROR_TIMEOUT:
    case WSAETIMEDOUT:
        return ND_IO_TIMEOUT;
    case WSAEADDRNOTAVAIL:
    case ERROR_INVALID_NETNAME:
    case ERROR_INVALID_ADDRESS:
        return ND_INVALID_ADDRESS;
    case WSAEADDRINUSE:
    case ERROR_ADDRESS_ALREADY_ASSOCIATED:
        return ND_ADDRESS_ALREADY_EXISTS;
    case WSAENOBUFS:
    case WSAEMFILE:
    case ERROR_NO_SYSTEM_RESOURCES:
    case ERROR_NOT_ENOUGH_MEMORY:
    case ERROR_OUTOFMEMORY:
    case ERROR_NOT_ENOUGH_QUOTA:
    case ERROR_WORKING_SET_QUOTA:
    case ERROR_COMMITMENT_LIMIT:
        return ND_INSUFFICIENT_RESOURCES;
    case ERROR_DEVICE_REMOVED:
        return ND_DEVICE_REMOVED;
    default:
        return ND_CONNECTION_ABORTED;
    }
}
