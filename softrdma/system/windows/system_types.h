/* The types of ../../engine/system.h on Windows. */
#ifndef SYSTEM_TYPES_H
#define SYSTEM_TYPES_H

#include <winsock2.h>
#include <ws2tcpip.h>
#include <windows.h>
#include <iphlpapi.h>

struct lock {
    SRWLOCK lock;
};

struct condition {
    CONDITION_VARIABLE condition;
};

#define LOCK_INIT      {SRWLOCK_INIT}
#define CONDITION_INIT {CONDITION_VARIABLE_INIT}

/* One operation in flight. */
struct io {
    OVERLAPPED overlapped;
    io_done *done;
    unsigned worker;
};

#define IN_BUFFER_FIRST (128u * 1024)
#define IN_BUFFER_SIZE  (512u * 1024)
#define OUT_BUFFER_SIZE (1100u * 1024) /* holds a 1 MiB Write with its headers */

typedef SOCKET socket_handle;
#define NO_SOCKET INVALID_SOCKET

struct socket {
    SOCKET handle;
    unsigned worker;
};

/* Assigns a handle to a worker and returns its number in *worker. The handle's operations end there. Also for the
 * NetworkDirect face, which has other handles than sockets. */
bool worker_attach(HANDLE handle, unsigned *worker);

#endif
