/* See listener.h. */
#include "listener.h"
#include "address.h"
#include "face.h"
#include "soft_connector.h"
#include "watch.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>

/* How often a listener without descriptors tries again. */
#define ACCEPT_AGAIN_MS 50
/* How many connections a listener takes before other sockets of the worker get their turn. */
#define ACCEPT_ROUND 64

struct listener {
    struct object object;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    struct watch watch;
    struct timer again; /* to accept what could not be accepted; holds a reference while set */
    socket_handle handle;
    bool closed, delivering, waits;
    pthread_t deliverer;
    struct sockaddr_storage address;
    bool wildcard;
    listener_arrived *arrived;
    void *owner;
};

struct object *listener_object(struct listener *listener)
{
    return &listener->object;
}

/* The owner of a connector until the callee sets one. */
static void tell_nobody(void *owner, struct connector *connector, enum connector_news news, nd_status status)
{
    UNUSED(owner);
    UNUSED(connector);
    UNUSED(news);
    UNUSED(status);
}

static const struct connector_owner nobody = {.tell = tell_nobody, .make_socket = soft_make_socket};

void listener_request(struct listener *listener, struct stream *stream)
{
    struct connector *connector = NULL;

    pthread_mutex_lock(&listener->lock);
    while (!listener->closed && listener->delivering)
        pthread_cond_wait(&listener->idle, &listener->lock);
    bool take = !listener->closed;
    if (take) {
        listener->delivering = true;
        listener->deliverer = pthread_self();
    }
    pthread_mutex_unlock(&listener->lock);

    if (take && soft_connector_create(listener->object.adapter, &nobody, NULL, NO_SOCKET, &connector) == ND_SUCCESS) {
        connector_adopt(connector, stream);
        listener->arrived(listener->owner, connector);
    } else {
        stream_refuse(stream);
    }
    if (take) {
        pthread_mutex_lock(&listener->lock);
        listener->delivering = false;
        pthread_cond_broadcast(&listener->idle);
        pthread_mutex_unlock(&listener->lock);
    }
}

static void accept_all(struct listener *listener);

static void accept_again(struct timer *timer)
{
    struct listener *listener = CONTAINER_OF(timer, struct listener, again);

    pthread_mutex_lock(&listener->lock);
    listener->waits = false;
    pthread_mutex_unlock(&listener->lock);
    accept_all(listener);
    object_drop(&listener->object);
}

/* Nothing else tells that there are connections to accept. They stay with the kernel. */
static void accept_later(struct listener *listener, uint32_t delay_ms)
{
    pthread_mutex_lock(&listener->lock);
    if (!listener->waits && !listener->closed) {
        listener->waits = true;
        object_hold(&listener->object);
        timer_set(&listener->again, delay_ms, accept_again);
    }
    pthread_mutex_unlock(&listener->lock);
}

static bool connection_waits(struct listener *listener)
{
    pthread_mutex_lock(&listener->lock);
    struct pollfd state = {.fd = listener->handle, .events = POLLIN};
    bool waits = !listener->closed && poll(&state, 1, 0) != 0;
    pthread_mutex_unlock(&listener->lock);
    return waits;
}

/* No descriptor or no memory is free, which accept4() says without a connection too. Nothing tells when that changes,
 * unless a silent connection gives its own. */
static bool make_room(struct listener *listener)
{
    if (!connection_waits(listener))
        return false;
    bool room = guests_expel();

    if (!room)
        accept_later(listener, ACCEPT_AGAIN_MS);
    return room;
}

static void accept_all(struct listener *listener)
{
    for (int i = 0; i < ACCEPT_ROUND; i++) {
        struct sockaddr_storage local = listener->address, peer = {0};

        pthread_mutex_lock(&listener->lock);
        bool closed = listener->closed;
        socket_handle handle = closed ? NO_SOCKET : socket_accept(listener->handle, &peer);
        int error = errno;
        pthread_mutex_unlock(&listener->lock);
        if (closed)
            return;
        if (handle < 0) {
            if (error == ECONNABORTED || error == EINTR)
                continue;
            if ((error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS) && make_room(listener))
                continue;
            return;
        }
        struct stream *stream = NULL;
        bool served = !listener->wildcard || (socket_address(handle, &local) && soft_serves((struct sockaddr *)&local));
        if (served)
            stream = stream_create(listener->object.adapter, handle, true);
        else
            socket_discard(handle);
        if (stream == NULL)
            continue;
        stream->local = local;
        stream->peer = peer;
        stream->listener = listener;
        object_hold(&listener->object);
        stream_accepted(stream);
        stream_drop(stream);
    }
    accept_later(listener, 0);
}

static void connections_wait(struct watch *watch)
{
    accept_all(CONTAINER_OF(watch, struct listener, watch));
}

static void listener_closed(struct object *object)
{
    struct listener *listener = CONTAINER_OF(object, struct listener, object);

    watch_stop(&listener->watch);
    pthread_mutex_lock(&listener->lock);
    listener->closed = true;
    bool waited = timer_cancel(&listener->again);
    while (listener->delivering && !pthread_equal(listener->deliverer, pthread_self()))
        pthread_cond_wait(&listener->idle, &listener->lock);
    pthread_mutex_unlock(&listener->lock);
    socket_discard(listener->handle);
    if (waited)
        object_drop(&listener->object);
}

static void listener_destroy(struct object *object)
{
    struct listener *listener = CONTAINER_OF(object, struct listener, object);

    pthread_mutex_destroy(&listener->lock);
    pthread_cond_destroy(&listener->idle);
    free(listener);
}

static const struct object_class listener_class = {
    .kind = KIND_LISTENER,
    .closed = listener_closed,
    .destroy = listener_destroy,
};

nd_status listener_create(struct adapter *adapter, socket_handle handle, listener_arrived *arrived, void *owner,
                          struct listener **out)
{
    struct listener *listener = calloc(1, sizeof *listener);

    if (listener == NULL) {
        socket_discard(handle);
        return ND_NO_MEMORY;
    }
    pthread_mutex_init(&listener->lock, NULL);
    pthread_cond_init(&listener->idle, NULL);
    listener->handle = handle;
    listener->arrived = arrived;
    listener->owner = owner;
    nd_status status = socket_address(handle, &listener->address) ? ND_SUCCESS : ND_INSUFFICIENT_RESOURCES;
    listener->wildcard = address_is_wildcard((const struct sockaddr *)&listener->address);
    socket_set_up(handle);
    if (status == ND_SUCCESS && listen(handle, SOMAXCONN) != 0)
        status = errno == EADDRINUSE ? ND_SHARING_VIOLATION : ND_INSUFFICIENT_RESOURCES;
    if (status == ND_SUCCESS && !object_start(&listener->object, &listener_class, adapter, NULL))
        status = ND_INSUFFICIENT_RESOURCES;
    if (status != ND_SUCCESS) {
        socket_discard(handle);
        listener_destroy(&listener->object);
        return status;
    }
    if (!watch_start(&listener->watch, handle, connections_wait)) {
        object_close(&listener->object);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = listener;
    return ND_SUCCESS;
}

void listener_stop(struct listener *listener)
{
    shutdown(listener->handle, SHUT_RDWR);
}

void listener_close(struct listener *listener)
{
    object_close(&listener->object);
}
