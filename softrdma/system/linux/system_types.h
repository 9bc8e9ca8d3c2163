/* The types of ../../engine/system.h on Linux. */
#ifndef SYSTEM_TYPES_H
#define SYSTEM_TYPES_H

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* `state` counts the sharers and has two flags. `writers` counts the threads that wait for exclusive access: while
 * there are any, nobody new shares. */
struct lock {
    _Atomic uint32_t state, writers;
};

struct condition {
    _Atomic uint32_t wakes, waiters;
};

#define LOCK_INIT      {0, 0}
#define CONDITION_INIT {0, 0}

/* One operation in flight. */
struct io {
    io_done *done;
    unsigned worker;
    /* Below: for the worker and the socket. */
    struct io *next;
    nd_status error;
    void *data;
    size_t size;
};

/* Input fits into a processor's cache. It holds messages of 128 KiB together, with their headers: the part of a segment
 * that is left over has to be moved. A connection is locked while it sends, so a large piece costs fewer changes of
 * threads. */
#define IN_BUFFER_FIRST (132u * 1024)
#define IN_BUFFER_SIZE  IN_BUFFER_FIRST
#define OUT_BUFFER_SIZE (528u * 1024) /* holds half of a 1 MiB Write with its headers */

typedef int socket_handle;
#define NO_SOCKET (-1)

/* May be freed or reused as soon as socket_close has returned and the callbacks of its operations have run: the worker
 * knows only the channel. */
struct socket {
    int handle;
    unsigned worker;
    struct channel *channel;
};

#endif
