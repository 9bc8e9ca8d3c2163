/* Waits for any descriptor to become readable. For the verbs face. */
#ifndef SYSTEM_LINUX_WATCH_H
#define SYSTEM_LINUX_WATCH_H

#include "system.h"

#include <pthread.h>

struct watch;
typedef void watch_ready(struct watch *watch);

struct watch {
    int handle;
    unsigned worker;
    watch_ready *ready;
    struct channel *channel;
};

/* ready() runs on a worker each time that data or connections arrive, and once if there are some already. It has to
 * take all of them: if it leaves any, nobody tells it again before the next arrival. It may also run for nothing. */
bool watch_start(struct watch *watch, int handle, watch_ready *ready);
/* After this call ready() neither runs nor begins, unless this is called within it. The handle stays open. */
void watch_stop(struct watch *watch);

/* Takes a connection from a listening socket. Like accept4 with SOCK_NONBLOCK and SOCK_CLOEXEC, but a fork on another
 * thread cannot leave it to the child. Returns NO_SOCKET and sets errno. `peer` may be NULL. */
socket_handle socket_accept(socket_handle listening, struct sockaddr_storage *peer);
/* Like socket_bound(), for a socket that shares its port with others by SO_REUSEADDR or SO_REUSEPORT. */
socket_handle socket_sharing(const struct sockaddr_storage *address, int option, nd_status *status);
/* A socket that will connect from this address, whose port is 0. It gets a port when it connects. So ports of
 * connections that ended a short time ago can be used again, to another peer. Otherwise like socket_bound(). */
socket_handle socket_for_connecting(const struct sockaddr_storage *own, nd_status *status);
/* TCP_NODELAY and SO_KEEPALIVE. What a listening socket has, its connections have too. */
void socket_set_up(socket_handle handle);
/* IP_TOS or IPV6_TCLASS. What a listening socket has, its connections have too. The two bits of ECN are TCP's own. */
bool socket_set_service_type(socket_handle handle, uint8_t value);

#endif
