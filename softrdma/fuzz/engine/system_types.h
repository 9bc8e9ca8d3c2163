/* The types of ../../engine/system.h for the fuzzer: one thread, a clock that the input moves, and sockets whose other
 * end the input is. See world.h. */
#ifndef SYSTEM_TYPES_H
#define SYSTEM_TYPES_H

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

struct lock {
    int32_t exclusive, shared;
};

struct condition {
    uint32_t wakes;
};

#define LOCK_INIT      {0, 0}
#define CONDITION_INIT {0}

struct io {
    io_done *done;
    unsigned worker;
    struct io *next;
    nd_status error;
    size_t bytes;
};

/* Small, so that a short input fills them. A receive buffer has to hold the largest FPDU. */
#define IN_BUFFER_FIRST (66u * 1024)
#define IN_BUFFER_SIZE  (132u * 1024)
#define OUT_BUFFER_SIZE (66u * 1024)

typedef int socket_handle;
#define NO_SOCKET (-1)

struct socket {
    int handle;
    unsigned worker;
};

#endif
