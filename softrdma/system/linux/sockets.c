/* Sockets with completion.
 *
 * Each direction of a socket has a lock, which is held during its system calls: they do not block. An operation that
 * cannot go on waits in its direction. If the socket becomes ready after the attempt that failed, an edge follows, and
 * the worker needs the lock to handle it. So it finds the operation. Callbacks run without the lock. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "address.h"
#include "forking.h"
#include "internal.h"
#include "transport.h"
#include "watch.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

/* So many answers in a row show that the program answers messages. */
#define ANSWERS 8
/* An answer that has not come within this time has to be shown anew. */
#define SOON_MS 1

static nd_status status_of(int error)
{
    static const struct {
        int error;
        nd_status status;
    } statuses[] = {
        {ECANCELED, ND_CANCELED},
        {ECONNREFUSED, ND_CONNECTION_REFUSED},
        {ENETUNREACH, ND_NETWORK_UNREACHABLE},
        {ENETDOWN, ND_NETWORK_UNREACHABLE},
        {EHOSTUNREACH, ND_HOST_UNREACHABLE},
        {EHOSTDOWN, ND_HOST_UNREACHABLE},
        {ETIMEDOUT, ND_IO_TIMEOUT},
        {EADDRNOTAVAIL, ND_INVALID_ADDRESS},
        {EADDRINUSE, ND_ADDRESS_ALREADY_EXISTS},
        {EMFILE, ND_INSUFFICIENT_RESOURCES},
        {ENFILE, ND_INSUFFICIENT_RESOURCES},
        {ENOMEM, ND_INSUFFICIENT_RESOURCES},
        {ENOBUFS, ND_INSUFFICIENT_RESOURCES},
        {ENOSPC, ND_INSUFFICIENT_RESOURCES},
    };

    for (size_t i = 0; i < sizeof statuses / sizeof *statuses; i++)
        if (statuses[i].error == error)
            return statuses[i].status;
    return ND_CONNECTION_ABORTED;
}

static bool would_block(int error)
{
    return error == EAGAIN || error == EWOULDBLOCK;
}

static void set_option(int handle, int level, int option)
{
    int on = 1;

    setsockopt(handle, level, option, &on, sizeof on);
}

/* ---- Handles ---- */

static socket_handle bound(const struct sockaddr_storage *address, int option_level, int option, nd_status *status)
{
    handles_lock();
    int handle = socket(address->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
    bool none_left = handle < 0 && (errno == EMFILE || errno == ENFILE);
    if (!handles_add(handle))
        handle = NO_SOCKET;
    handles_unlock();
    if (handle < 0) {
        *status = none_left ? ND_TOO_MANY_OPENED_FILES : ND_INSUFFICIENT_RESOURCES;
        return NO_SOCKET;
    }
    if (option != 0)
        set_option(handle, option_level, option);
    if (address->ss_family == AF_INET6)
        set_option(handle, IPPROTO_IPV6, IPV6_V6ONLY);
    if (bind(handle, (const struct sockaddr *)address, (socklen_t)address_size((const struct sockaddr *)address)) ==
        0) {
        *status = ND_SUCCESS;
        return handle;
    }
    if (errno == EADDRINUSE && address_port((const struct sockaddr *)address) == 0)
        *status = ND_TOO_MANY_ADDRESSES;
    else
        *status = errno == EADDRINUSE                                            ? ND_SHARING_VIOLATION
                  : errno == EACCES || errno == EPERM                            ? ND_ACCESS_DENIED
                  : errno == EADDRNOTAVAIL || errno == EINVAL || errno == ENODEV ? ND_INVALID_ADDRESS
                                                                                 : ND_INSUFFICIENT_RESOURCES;
    socket_discard(handle);
    return NO_SOCKET;
}

socket_handle socket_bound(const struct sockaddr_storage *address, bool listening, nd_status *status)
{
    return bound(address, SOL_SOCKET, listening ? SO_REUSEADDR : 0, status);
}

socket_handle socket_sharing(const struct sockaddr_storage *address, int option, nd_status *status)
{
    return bound(address, SOL_SOCKET, option, status);
}

socket_handle socket_for_connecting(const struct sockaddr_storage *own, nd_status *status)
{
    return bound(own, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, status);
}

void socket_set_up(socket_handle handle)
{
    set_option(handle, IPPROTO_TCP, TCP_NODELAY);
    set_option(handle, SOL_SOCKET, SO_KEEPALIVE);
}

bool socket_set_service_type(socket_handle handle, uint8_t value)
{
    struct sockaddr_storage own;
    int number = value;

    if (!socket_address(handle, &own))
        return false;
    bool large = own.ss_family == AF_INET6;
    return setsockopt(handle, large ? IPPROTO_IPV6 : IPPROTO_IP, large ? IPV6_TCLASS : IP_TOS, &number,
                      sizeof number) == 0;
}

bool socket_address(socket_handle handle, struct sockaddr_storage *out)
{
    socklen_t length = sizeof *out;

    return getsockname(handle, (struct sockaddr *)out, &length) == 0;
}

socket_handle socket_accept(socket_handle listening, struct sockaddr_storage *peer)
{
    socklen_t length = sizeof *peer;

    handles_lock();
    int cancel = cancel_off();
    int handle =
        accept4(listening, (struct sockaddr *)peer, peer != NULL ? &length : NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    cancel_as(cancel);
    if (!handles_add(handle)) {
        errno = ENOMEM;
        handle = NO_SOCKET;
    }
    handles_unlock();
    return handle;
}

void socket_discard(socket_handle handle)
{
    handles_lock();
    handles_close(handle);
    handles_unlock();
}

/* ---- The life of a socket ---- */

static void open_direction(struct direction *direction, int handle)
{
    lock_acquire(&direction->lock);
    direction->handle = handle;
    direction->connects = direction->empty = direction->ended = direction->holds = direction->alone = false;
    direction->answers = 0;
    lock_release(&direction->lock);
}

/* After this, no operation uses the handle. Returns the one that was waiting. */
static struct io *close_direction(struct direction *direction)
{
    lock_acquire(&direction->lock);
    struct io *io = direction->io;
    direction->io = NULL;
    direction->handle = NO_SOCKET;
    lock_release(&direction->lock);
    return io;
}

static void post_canceled(unsigned worker, struct io *io)
{
    if (io == NULL)
        return;
    io->worker = worker;
    worker_post_error(io, ND_CANCELED);
}

bool channel_usable(const struct channel *channel)
{
    return channel != NULL && channel->generation == atomic_load_explicit(&system_generation, memory_order_relaxed);
}

bool socket_start(struct socket *socket, socket_handle handle, bool accepted)
{
    handles_lock();
    bool noted = handles_add(handle);
    handles_unlock();
    if (!noted)
        return false;
    socket->worker = transport_next_worker();
    struct channel *channel = worker_take_channel(socket->worker);
    if (channel == NULL) {
        socket_discard(handle);
        return false;
    }
    if (!accepted)
        socket_set_up(handle);
    socket->handle = handle;
    socket->channel = channel;
    channel->generation = atomic_load(&system_generation);
    open_direction(&channel->in, handle);
    open_direction(&channel->out, handle);
    /* A socket that has not connected yet is watched later. Now it would look like one that has ended. */
    if (!accepted || worker_watch(socket->worker, handle, channel, true))
        return true;
    socket_close(socket);
    return false;
}

void socket_connected(struct socket *socket, struct sockaddr_storage *local)
{
    const struct sockaddr *known = (const struct sockaddr *)local;

    if (channel_usable(socket->channel) && (address_port(known) == 0 || address_is_wildcard(known)))
        socket_address(socket->handle, local);
}

static void set_reset(struct socket *socket, bool on)
{
    struct linger linger = {on, 0};

    setsockopt(socket->handle, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
}

void socket_resets(struct socket *socket)
{
    if (channel_usable(socket->channel))
        set_reset(socket, true);
}

void socket_end_sending(struct socket *socket)
{
    if (!channel_usable(socket->channel))
        return;
    set_reset(socket, false);
    struct direction *out = &socket->channel->out;
    lock_acquire(&out->lock);
    if (out->handle != NO_SOCKET)
        shutdown(out->handle, SHUT_WR);
    lock_release(&out->lock);
}

void socket_cancel(struct socket *socket, bool reset)
{
    if (!channel_usable(socket->channel))
        return;
    if (reset)
        set_reset(socket, true);
    struct io *receiving = close_direction(&socket->channel->in);
    struct io *sending = close_direction(&socket->channel->out);
    post_canceled(socket->worker, receiving);
    post_canceled(socket->worker, sending);
}

void socket_close(struct socket *socket)
{
    struct channel *channel = socket->channel;

    socket->channel = NULL;
    if (!channel_usable(channel))
        return;
    post_canceled(socket->worker, close_direction(&channel->in));
    post_canceled(socket->worker, close_direction(&channel->out));
    worker_unwatch(socket->worker, socket->handle, true);
    socket_discard(socket->handle);
    socket->handle = NO_SOCKET;
    worker_give_channel(socket->worker, channel);
}

/* ---- Operations ---- */

/* Both return 0 or an errno. */
static int try_receive(struct direction *in, void *data, size_t size, size_t *received)
{
    ssize_t count;

    if (in->empty && !in->ended)
        return EAGAIN;
    int cancel = cancel_off();
    do
        count = recv(in->handle, data, size, MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    cancel_as(cancel);
    int error = count < 0 ? errno : 0;
    in->empty = would_block(error) || (count > 0 && (size_t)count < size);
    *received = count > 0 ? (size_t)count : 0;
    return error;
}

static int try_send(struct direction *out, const void *data, size_t size, bool more, size_t *sent)
{
    int cancel = cancel_off();
    ssize_t count;

    do
        count = send(out->handle, data, size, MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    while (count < 0 && errno == EINTR);
    cancel_as(cancel);
    *sent = count > 0 ? (size_t)count : 0;
    return count < 0 ? errno : 0;
}

static enum io_result failed(int error, nd_status *status)
{
    *status = status_of(error);
    return IO_FAILED;
}

/* Ends a call that has the direction's lock. */
static enum io_result finish(struct direction *direction, struct io *io, void *data, size_t size, int error,
                             nd_status *status)
{
    bool pending = would_block(error);

    if (pending) {
        io->data = data;
        io->size = size;
        direction->io = io;
    }
    lock_release(&direction->lock);
    return pending ? IO_PENDING : error == 0 ? IO_DONE : failed(error, status);
}

enum io_result socket_receive(struct socket *socket, struct io *io, void *data, size_t size, size_t *received,
                              nd_status *error)
{
    *received = 0;
    if (!channel_usable(socket->channel))
        return failed(ECANCELED, error);
    struct direction *in = &socket->channel->in;
    lock_acquire(&in->lock);
    int result = in->handle == NO_SOCKET ? ECANCELED : try_receive(in, data, size, received);
    return finish(in, io, data, size, result, error);
}

enum move socket_receive_elsewhere(struct socket *socket, struct io *io, void *data, size_t size)
{
    if (!channel_usable(socket->channel))
        return MOVE_FAILED;
    struct direction *in = &socket->channel->in;
    lock_acquire(&in->lock);
    bool pending = in->io == io;
    if (pending) {
        io->data = data;
        io->size = size;
    }
    lock_release(&in->lock);
    return pending ? MOVE_DONE : MOVE_FAILED;
}

/* Whether what is sent may wait for other bytes, if others may follow soon. Locked. What a worker sends waits for a
 * program that has answered the last messages: so the peer gets both at once, and its program need not be woken twice.
 */
static bool may_wait(struct direction *out, bool more)
{
    bool worker = worker_here() || driving_loop_here();

    if (!more) {
        if (out->alone && !worker && out->answers < ANSWERS)
            out->answers++;
        out->alone = false;
        return false;
    }
    if (!worker)
        return driving_may_hold();
    if (out->alone)
        out->answers = 0;
    out->alone = true;
    return out->answers == ANSWERS && driving_may_hold();
}

enum io_result socket_send(struct socket *socket, struct io *io, const void *data, size_t size, bool more, size_t *sent,
                           nd_status *error)
{
    *sent = 0;
    if (!channel_usable(socket->channel))
        return failed(ECANCELED, error);
    struct direction *out = &socket->channel->out;
    lock_acquire(&out->lock);
    out->connects = false;
    more = may_wait(out, more);
    int result = out->handle == NO_SOCKET ? ECANCELED : try_send(out, data, size, more, sent);
    /* What is not held back takes along what was. */
    out->holds = more && result == 0;
    if (out->holds)
        out->holds_ms = now_ms();
    if (out->holds && !out->listed) {
        out->listed = true;
        driving_hold(socket->channel);
    }
    return finish(out, io, (void *)(uintptr_t)data, size, result, error);
}

enum io_result socket_connect(struct socket *socket, struct io *io, const struct sockaddr_storage *peer,
                              nd_status *error)
{
    if (!channel_usable(socket->channel))
        return failed(ECANCELED, error);
    struct direction *out = &socket->channel->out;
    lock_acquire(&out->lock);
    int result = ECANCELED;
    if (out->handle != NO_SOCKET) {
        int cancel = cancel_off();
        int connected =
            connect(out->handle, (const struct sockaddr *)peer, (socklen_t)address_size((const struct sockaddr *)peer));
        cancel_as(cancel);
        result = connected == 0 ? 0 : errno == EINPROGRESS || errno == EINTR ? EAGAIN : errno;
        if ((result == 0 || result == EAGAIN) && !worker_watch(socket->worker, out->handle, socket->channel, true))
            result = errno;
        out->connects = result == EAGAIN;
    }
    return finish(out, io, NULL, 0, result, error);
}

/* EAGAIN: it still connects. */
static int connect_outcome(int handle)
{
    struct pollfd state = {.fd = handle, .events = POLLOUT};
    int error = 0;
    socklen_t length = sizeof error;

    if (poll(&state, 1, 0) <= 0)
        return EAGAIN;
    if (getsockopt(handle, SOL_SOCKET, SO_ERROR, &error, &length) != 0)
        return errno;
    return error == 0 && (state.revents & (POLLERR | POLLHUP)) != 0 ? ECONNABORTED : error;
}

void channel_push(struct channel *channel)
{
    struct direction *out = &channel->out;

    lock_acquire(&out->lock);
    if (out->holds && out->handle != NO_SOCKET) {
        set_option(out->handle, IPPROTO_TCP, TCP_NODELAY);
        /* If they wait since just now, the answer may be on its way. */
        if (now_ms() - out->holds_ms > SOON_MS)
            out->answers = 0;
    }
    out->holds = out->listed = false;
    lock_release(&out->lock);
}

/* ---- Silent peers ---- */

#define PROBE_S 1
/* More than upkeep.c needs. */
#define PROBES 30
/* What Linux has by default. */
#define USUAL_PROBE_S 7200

void socket_probe(struct socket *socket, bool on)
{
    int idle = on ? PROBE_S : USUAL_PROBE_S, every = PROBE_S, count = PROBES;

    if (!channel_usable(socket->channel))
        return;
    setsockopt(socket->handle, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(socket->handle, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(socket->handle, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
}

/* A host that is there answers a retransmission, and a probe even if its program takes no data. The time alone says
 * nothing: TCP asks a peer with a closed window more and more seldom. */
unsigned socket_unanswered(struct socket *socket, uint32_t *silent_ms)
{
    struct tcp_info info = {0};
    socklen_t length = sizeof info;

    if (channel_usable(socket->channel))
        getsockopt(socket->handle, IPPROTO_TCP, TCP_INFO, &info, &length);
    *silent_ms = info.tcpi_last_ack_recv;
    return info.tcpi_retransmits + info.tcpi_probes;
}

bool socket_peer_ended(struct socket *socket)
{
    struct pollfd state = {.fd = socket->handle, .events = POLLRDHUP};

    return channel_usable(socket->channel) && poll(&state, 1, 0) > 0 &&
           (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

/* ---- Edges ---- */

static void run(struct io *io, int error, size_t bytes)
{
    io->done(io, error == 0 ? ND_SUCCESS : status_of(error), bytes);
}

static void in_ready(struct channel *channel, bool ended)
{
    struct direction *in = &channel->in;
    size_t received = 0;
    int error = EAGAIN;

    lock_acquire(&in->lock);
    struct io *io = in->io;
    in->empty = false;
    in->ended = in->ended || ended;
    if (io != NULL)
        error = try_receive(in, io->data, io->size, &received);
    if (!would_block(error))
        in->io = NULL;
    lock_release(&in->lock);
    if (!would_block(error))
        run(io, error, received);
}

static void out_ready(struct direction *out)
{
    size_t sent = 0;
    int error = EAGAIN;

    lock_acquire(&out->lock);
    struct io *io = out->io;
    if (io != NULL)
        error = out->connects ? connect_outcome(out->handle) : try_send(out, io->data, io->size, false, &sent);
    if (!would_block(error))
        out->io = NULL;
    lock_release(&out->lock);
    if (!would_block(error))
        run(io, error, sent);
}

void channel_ready(struct channel *channel, uint32_t events)
{
    if (watch_run(channel))
        return;
    if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0)
        out_ready(&channel->out);
    if ((events & (EPOLLIN | EPOLLPRI | EPOLLRDHUP | EPOLLERR | EPOLLHUP)) != 0)
        in_ready(channel, (events & (EPOLLPRI | EPOLLRDHUP | EPOLLERR | EPOLLHUP)) != 0);
}
