/* See connection.h.
 *
 * States, and the calls and events that change them:
 *
 *   IDLE         connect -> CONNECTING; a listener makes it REQUESTED
 *   CONNECTING   accepted -> OFFERED; refused, failed -> OVER
 *   OFFERED      complete -> ESTABLISHED; reject -> OVER
 *   REQUESTED    accept -> ACCEPTING; reject -> OVER
 *   ACCEPTING    first message -> ESTABLISHED; failed -> OVER
 *   ESTABLISHED  ended by either side -> OVER
 *
 * The lock is outside of the engine's. Streams are handled after it was released, so an event may find that the
 * connector has moved on. Events are delivered one at a time by whichever thread finds nobody delivering.
 */
#include "connection.h"
#include "address.h"
#include "face.h"
#include "watch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* How often a listener without descriptors tries again. */
#define ACCEPT_AGAIN_MS 50
/* How many connections a listener takes before other sockets of the worker get their turn. */
#define ACCEPT_ROUND 64
/* How often an attempt that insists is made again, and after what time; each time is twice the one before. A program
 * that has just got its peer's message connects sooner than with a card, where resolving takes longer. Its peer may
 * have sent that message just before it listens. */
#define INSIST_TIMES 3u
#define INSIST_MS    10u

enum state { IDLE, CONNECTING, OFFERED, REQUESTED, ACCEPTING, ESTABLISHED, OVER };

struct pending_event {
    enum connector_event_type type;
    nd_status status;
};

struct connector {
    struct object object;
    pthread_mutex_t lock;
    pthread_cond_t idle; /* nobody delivers */
    enum state state;
    struct stream *stream;
    struct queue_pair *qp; /* held while connecting and connected */
    const struct connector_owner *methods;
    void *owner;
    bool closed, delivering;
    pthread_t deliverer;
    struct pending_event events[4]; /* an attempt and its connection have at most three */
    unsigned event_count;
    struct connector_offer offer;
    uint8_t private_data[MPA_MAX_PRIVATE_DATA];
    unsigned insists;     /* how often it still tries again */
    uint8_t service_type; /* 0: what the socket has */
};

struct listener {
    struct object object;
    pthread_mutex_t lock;
    pthread_cond_t idle;
    struct watch watch;
    struct timer again; /* to accept what could not be accepted; holds a reference while set */
    socket_handle handle;
    bool closed, delivering, waits;
    pthread_t deliverer;
    bool wildcard;
    listener_arrived *arrived;
    void *owner;
};

/* The references that a connector gives up. They are dropped after its lock was released. */
struct detached {
    struct stream *stream;
    struct queue_pair *qp;
};

static struct detached detach(struct connector *connector)
{
    struct detached detached = {connector->stream, connector->qp};

    connector->stream = NULL;
    connector->qp = NULL;
    return detached;
}

enum teardown { KEEP_STREAM, WITHDRAW_STREAM, ABORT_STREAM };

static void tear_down(struct detached detached, enum teardown teardown)
{
    if (detached.stream != NULL) {
        stream_lock(detached.stream);
        struct connector *connector = detached.stream->connector;
        detached.stream->connector = NULL;
        if (teardown == ABORT_STREAM)
            stream_abort(detached.stream);
        else if (teardown == WITHDRAW_STREAM && detached.stream->phase != STREAM_CLOSED)
            stream_withdraw(detached.stream);
        stream_unlock(detached.stream);
        if (detached.qp != NULL)
            qp_detach(detached.qp, detached.stream);
        if (connector != NULL)
            object_drop(&connector->object);
        stream_drop(detached.stream);
    }
    if (detached.qp != NULL)
        object_drop(&detached.qp->object);
}

/* Under the connector's lock, and the stream's or while no other thread knows the stream. */
static void attach(struct connector *connector, struct stream *stream)
{
    stream->connector = connector;
    object_hold(&connector->object);
    connector->stream = stream;
    stream_hold(stream);
}

/* Under the lock. */
static void add_event(struct connector *connector, enum connector_event_type type, nd_status status)
{
    if (!connector->closed && connector->event_count < COUNT_OF(connector->events))
        connector->events[connector->event_count++] = (struct pending_event){type, status};
}

/* Delivers what was added. Without locks. The caller has a reference. */
static void deliver(struct connector *connector)
{
    pthread_mutex_lock(&connector->lock);
    if (!connector->delivering) {
        connector->delivering = true;
        connector->deliverer = pthread_self();
        while (connector->event_count > 0 && !connector->closed) {
            struct pending_event event = connector->events[0];
            const struct connector_owner *methods = connector->methods;
            void *owner = connector->owner;
            memmove(connector->events, connector->events + 1, --connector->event_count * sizeof event);
            pthread_mutex_unlock(&connector->lock);
            methods->event(owner, connector, event.type, event.status);
            pthread_mutex_lock(&connector->lock);
        }
        connector->delivering = false;
        pthread_cond_broadcast(&connector->idle);
    }
    pthread_mutex_unlock(&connector->lock);
}

static void take_offer(struct connector *connector, struct stream *stream, bool passive)
{
    struct connector_offer *offer = &connector->offer;
    uint32_t in = stream->peer_outbound, out = stream->peer_inbound;

    memcpy(connector->private_data, stream->private_data, stream->private_size);
    offer->private_data = connector->private_data;
    offer->private_size = stream->private_size;
    offer->inbound = passive || in < stream->own_inbound ? in : stream->own_inbound;
    offer->outbound = passive || out < stream->own_outbound ? out : stream->own_outbound;
    offer->local = stream->local;
    offer->peer = stream->peer;
}

struct object *connector_object(struct connector *connector)
{
    return &connector->object;
}

/* Under the lock. */
static void make_stream(struct connector *connector, socket_handle handle, struct stream **out)
{
    if (connector->service_type != 0)
        socket_set_service_type(handle, connector->service_type);
    struct stream *stream = stream_create(connector->object.adapter, handle);

    if (stream != NULL && !socket_address(handle, &stream->local))
        memset(&stream->local, 0, sizeof stream->local);
    *out = stream;
}

/* Makes another stream for the attempt, from the same port if it is free. Under the lock. */
static nd_status replace_stream(struct connector *connector, struct stream *old, uint8_t revision,
                                struct detached *detached)
{
    struct sockaddr_storage local = old->local;
    struct stream *stream;
    nd_status status;

    *detached = (struct detached){old, NULL};
    connector->stream = NULL;
    qp_detach(connector->qp, old);
    socket_handle handle = socket_bound(&local, false, &status);
    if (handle == NO_SOCKET) {
        address_set_port((struct sockaddr *)&local, 0);
        handle = socket_for_connecting(&local, &status);
    }
    if (handle == NO_SOCKET)
        return status;
    make_stream(connector, handle, &stream);
    if (stream == NULL)
        return ND_INSUFFICIENT_RESOURCES;
    stream->peer = old->peer;
    stream->revision = revision;
    stream->own_inbound = old->own_inbound;
    stream->own_outbound = old->own_outbound;
    memcpy(stream->own_private, old->own_private, old->own_private_size);
    stream->own_private_size = old->own_private_size;
    bool attached = qp_attach(connector->qp, stream);
    if (attached) {
        attach(connector, stream);
    } else {
        stream_lock(stream);
        stream_abort(stream);
        stream_unlock(stream);
    }
    stream_drop(stream);
    return attached ? ND_SUCCESS : ND_CANCELED;
}

void connector_event(struct connector *connector, struct stream *stream, unsigned events, nd_status status)
{
    struct detached detached = {NULL, NULL};
    struct stream *again = NULL;
    uint32_t again_ms = 0;

    pthread_mutex_lock(&connector->lock);
    if (connector->stream != stream)
        events = 0;
    if ((events & EVENT_OFFERED) != 0 && connector->state == CONNECTING) {
        connector->state = OFFERED;
        take_offer(connector, stream, false);
        add_event(connector, CONNECTOR_OFFERED, ND_SUCCESS);
    }
    bool fall_back = (events & EVENT_FALLBACK) != 0;
    bool insist = (events & EVENT_FAILED) != 0 && status == ND_CONNECTION_REFUSED && stream->sent_bytes == 0 &&
                  connector->insists > 0;
    if ((fall_back || insist) && connector->state == CONNECTING) {
        events = 0;
        if (insist)
            again_ms = INSIST_MS << (INSIST_TIMES - connector->insists--);
        /* A peer that closed without answering revision 2 may know only revision 1. */
        status = replace_stream(connector, stream, fall_back ? 1 : stream->revision, &detached);
        again = status == ND_SUCCESS ? connector->stream : NULL;
        if (again == NULL) {
            connector->state = OVER;
            add_event(connector, CONNECTOR_FAILED, status);
            detached.qp = connector->qp;
            connector->qp = NULL;
        } else {
            stream_hold(again);
        }
    }
    if ((events & (EVENT_ESTABLISHED | EVENT_ENDED)) != 0 && connector->state == ACCEPTING) {
        connector->state = ESTABLISHED;
        add_event(connector, CONNECTOR_ESTABLISHED, ND_SUCCESS);
    }
    if ((events & EVENT_ENDED) != 0 && connector->state == ESTABLISHED) {
        connector->state = OVER;
        add_event(connector, CONNECTOR_ENDED, status);
        detached = detach(connector);
    }
    if ((events & EVENT_REFUSED) != 0 && connector->state == CONNECTING) {
        take_offer(connector, stream, false);
        connector->state = OVER;
        add_event(connector, CONNECTOR_REFUSED, ND_CONNECTION_REFUSED);
        detached = detach(connector);
    } else if ((events & EVENT_FAILED) != 0 &&
               (connector->state == CONNECTING || connector->state == OFFERED || connector->state == ACCEPTING)) {
        /* Something took the TCP connection and the request, and gave no answer of iWARP. */
        if (connector->state == CONNECTING && status == ND_CONNECTION_REFUSED && stream->sent_bytes > 0)
            status = ND_CONNECTION_INVALID;
        connector->state = OVER;
        add_event(connector, CONNECTOR_FAILED, status);
        detached = detach(connector);
    }
    pthread_mutex_unlock(&connector->lock);

    tear_down(detached, KEEP_STREAM);
    deliver(connector);
    if (again != NULL) {
        stream_lock(again);
        if (again->phase == STREAM_NEW && again_ms > 0)
            stream_set_timer(again, again_ms);
        else if (again->phase == STREAM_NEW)
            stream_connect(again);
        stream_unlock(again);
        stream_drop(again);
    }
}

nd_status connector_connect(struct connector *connector, struct queue_pair *qp, socket_handle handle,
                            const struct sockaddr_storage *peer, const struct connection_arguments *arguments)
{
    struct sockaddr_storage any = {.ss_family = peer->ss_family};
    struct stream *stream = NULL;
    nd_status status = ND_SUCCESS;

    if (handle == NO_SOCKET)
        handle = socket_for_connecting(&any, &status);
    if (handle == NO_SOCKET)
        return status;
    if (arguments->private_size > MAX_PRIVATE_DATA) {
        socket_discard(handle);
        return ND_INVALID_BUFFER_SIZE;
    }
    pthread_mutex_lock(&connector->lock);
    if (connector->state != IDLE) {
        status = ND_CONNECTION_ACTIVE;
        socket_discard(handle);
    } else {
        make_stream(connector, handle, &stream);
        status = stream == NULL ? ND_INSUFFICIENT_RESOURCES : ND_SUCCESS;
    }
    if (status == ND_SUCCESS && !qp_attach(qp, stream))
        status = ND_CONNECTION_ACTIVE;
    if (status == ND_SUCCESS) {
        stream->peer = *peer;
        stream->revision = 2;
        stream->own_inbound = arguments->inbound < MAX_READ_LIMIT ? arguments->inbound : MAX_READ_LIMIT;
        stream->own_outbound = arguments->outbound < MAX_READ_LIMIT ? arguments->outbound : MAX_READ_LIMIT;
        if (arguments->private_size > 0)
            memcpy(stream->own_private, arguments->private_data, arguments->private_size);
        stream->own_private_size = arguments->private_size;
        attach(connector, stream);
        object_hold(&qp->object);
        connector->qp = qp;
        connector->state = CONNECTING;
        connector->insists = arguments->insists ? INSIST_TIMES : 0;
        connector->offer.local = stream->local;
        connector->offer.peer = *peer;
    }
    pthread_mutex_unlock(&connector->lock);
    if (stream == NULL)
        return status;
    stream_lock(stream);
    if (status == ND_SUCCESS)
        stream_connect(stream);
    else
        stream_abort(stream);
    if (stream->open) /* it has a port now */
        socket_connected(&stream->socket, &stream->local);
    struct sockaddr_storage local = stream->local;
    stream_unlock(stream);
    stream_drop(stream);
    pthread_mutex_lock(&connector->lock);
    if (connector->state == CONNECTING)
        connector->offer.local = local;
    pthread_mutex_unlock(&connector->lock);
    return status;
}

nd_status connector_complete(struct connector *connector)
{
    pthread_mutex_lock(&connector->lock);
    struct stream *stream = connector->state == OFFERED ? connector->stream : NULL;
    if (stream != NULL) {
        stream_hold(stream);
        connector->state = ESTABLISHED;
    }
    pthread_mutex_unlock(&connector->lock);
    if (stream == NULL)
        return ND_CONNECTION_INVALID;
    stream_lock(stream);
    bool complete = stream_complete(stream);
    stream_unlock(stream);
    struct detached detached = {NULL, NULL};
    if (!complete) {
        pthread_mutex_lock(&connector->lock);
        if (connector->stream == stream && connector->state == ESTABLISHED) {
            connector->state = OVER;
            detached = detach(connector);
        }
        pthread_mutex_unlock(&connector->lock);
        tear_down(detached, ABORT_STREAM);
    }
    stream_drop(stream);
    return complete ? ND_SUCCESS : ND_IO_TIMEOUT;
}

nd_status connector_accept(struct connector *connector, struct queue_pair *qp,
                           const struct connection_arguments *arguments)
{
    nd_status status = ND_SUCCESS;

    if (arguments->private_size > MAX_PRIVATE_DATA)
        return ND_INVALID_BUFFER_SIZE;
    pthread_mutex_lock(&connector->lock);
    struct stream *stream = connector->state == REQUESTED ? connector->stream : NULL;
    if (stream == NULL)
        status = ND_CONNECTION_INVALID;
    else if (!qp_attach(qp, stream))
        status = ND_CONNECTION_ACTIVE;
    if (status == ND_SUCCESS) {
        object_hold(&qp->object);
        connector->qp = qp;
        connector->state = ACCEPTING;
        stream_hold(stream);
    }
    pthread_mutex_unlock(&connector->lock);
    if (status != ND_SUCCESS)
        return status;

    stream_lock(stream);
    uint32_t inbound = arguments->inbound < MAX_READ_LIMIT ? arguments->inbound : MAX_READ_LIMIT;
    uint32_t outbound = arguments->outbound < MAX_READ_LIMIT ? arguments->outbound : MAX_READ_LIMIT;
    stream->own_inbound = inbound < stream->peer_outbound ? inbound : stream->peer_outbound;
    stream->own_outbound = outbound < stream->peer_inbound ? outbound : stream->peer_inbound;
    if (!stream_reply(stream, false, arguments->private_data, arguments->private_size)) {
        stream->after.events |= EVENT_FAILED;
        stream->after.status = ND_CONNECTION_ABORTED;
    }
    stream_unlock(stream);
    stream_drop(stream);
    return ND_SUCCESS;
}

nd_status connector_reject(struct connector *connector, const void *private_data, uint32_t private_size)
{
    struct detached detached = {NULL, NULL};
    bool passive = false, valid;

    if (private_size > MAX_PRIVATE_DATA)
        return ND_INVALID_BUFFER_SIZE;
    pthread_mutex_lock(&connector->lock);
    valid = connector->state == REQUESTED || connector->state == OFFERED;
    if (valid) {
        passive = connector->state == REQUESTED;
        detached = detach(connector);
        connector->state = OVER;
    }
    pthread_mutex_unlock(&connector->lock);
    if (!valid)
        return ND_CONNECTION_INVALID;
    stream_lock(detached.stream);
    bool alive = detached.stream->phase != STREAM_CLOSED && !detached.stream->abandoned;
    if (alive && passive)
        alive = stream_reply(detached.stream, true, private_data, private_size);
    stream_unlock(detached.stream);
    tear_down(detached, WITHDRAW_STREAM);
    return alive ? ND_SUCCESS : ND_CONNECTION_ABORTED;
}

nd_status connector_disconnect(struct connector *connector)
{
    pthread_mutex_lock(&connector->lock);
    struct stream *stream = connector->state == ESTABLISHED ? connector->stream : NULL;
    if (stream != NULL)
        stream_hold(stream);
    pthread_mutex_unlock(&connector->lock);
    if (stream == NULL)
        return ND_CONNECTION_INVALID;
    stream_lock(stream);
    stream_disconnect(stream);
    stream_unlock(stream);
    stream_drop(stream);
    return ND_SUCCESS;
}

void connector_offer(struct connector *connector, struct connector_offer *out)
{
    pthread_mutex_lock(&connector->lock);
    *out = connector->offer;
    pthread_mutex_unlock(&connector->lock);
}

bool connector_is_established(struct connector *connector)
{
    pthread_mutex_lock(&connector->lock);
    bool established = connector->state == ESTABLISHED;
    pthread_mutex_unlock(&connector->lock);
    return established;
}

bool connector_set_service_type(struct connector *connector, uint8_t value)
{
    bool set = true;

    pthread_mutex_lock(&connector->lock);
    connector->service_type = value;
    struct stream *stream = connector->stream;
    if (stream != NULL)
        stream_hold(stream);
    pthread_mutex_unlock(&connector->lock);
    if (stream == NULL)
        return set;
    stream_lock(stream);
    if (stream->open)
        set = socket_set_service_type(stream->socket.handle, value);
    stream_unlock(stream);
    stream_drop(stream);
    return set;
}

struct sockaddr_storage connector_local(struct connector *connector)
{
    pthread_mutex_lock(&connector->lock);
    struct sockaddr_storage local = connector->offer.local;
    pthread_mutex_unlock(&connector->lock);
    return local;
}

void connector_set_owner(struct connector *connector, const struct connector_owner *methods, void *owner)
{
    pthread_mutex_lock(&connector->lock);
    connector->methods = methods;
    connector->owner = owner;
    pthread_mutex_unlock(&connector->lock);
    deliver(connector);
}

static void connector_closed(struct object *object)
{
    struct connector *connector = CONTAINER_OF(object, struct connector, object);

    pthread_mutex_lock(&connector->lock);
    connector->closed = true;
    enum state state = connector->state;
    struct detached detached = detach(connector);
    connector->state = OVER;
    pthread_mutex_unlock(&connector->lock);
    if (state == ESTABLISHED && detached.stream != NULL) {
        stream_lock(detached.stream);
        stream_disconnect(detached.stream);
        stream_unlock(detached.stream);
    }
    tear_down(detached, state == ESTABLISHED ? KEEP_STREAM : state == CONNECTING ? ABORT_STREAM : WITHDRAW_STREAM);
    pthread_mutex_lock(&connector->lock);
    while (connector->delivering && !pthread_equal(connector->deliverer, pthread_self()))
        pthread_cond_wait(&connector->idle, &connector->lock);
    pthread_mutex_unlock(&connector->lock);
}

static void connector_destroy(struct object *object)
{
    struct connector *connector = CONTAINER_OF(object, struct connector, object);

    pthread_mutex_destroy(&connector->lock);
    pthread_cond_destroy(&connector->idle);
    free(connector);
}

static const struct object_class connector_class = {
    .kind = KIND_CONNECTOR,
    .closed = connector_closed,
    .destroy = connector_destroy,
};

nd_status connector_create(struct adapter *adapter, const struct connector_owner *methods, void *owner,
                           struct connector **out)
{
    struct connector *connector = calloc(1, sizeof *connector);

    if (connector == NULL)
        return ND_NO_MEMORY;
    pthread_mutex_init(&connector->lock, NULL);
    pthread_cond_init(&connector->idle, NULL);
    connector->methods = methods;
    connector->owner = owner;
    if (!object_start(&connector->object, &connector_class, adapter, NULL)) {
        connector_destroy(&connector->object);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = connector;
    return ND_SUCCESS;
}

void connector_close(struct connector *connector)
{
    object_close(&connector->object);
}

/* ---- Listening ---- */

struct object *listener_object(struct listener *listener)
{
    return &listener->object;
}

/* An owner that nobody has set yet. */
static void keep_events(void *owner, struct connector *connector, enum connector_event_type type, nd_status status)
{
    UNUSED(owner);
    UNUSED(connector);
    UNUSED(type);
    UNUSED(status);
}

static const struct connector_owner nobody = {keep_events};

static void refuse(struct stream *stream)
{
    stream_lock(stream);
    stream_withdraw(stream);
    stream_unlock(stream);
}

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

    stream_lock(stream);
    stream->listener = NULL;
    stream_unlock(stream);
    if (take && connector_create(listener->object.adapter, &nobody, NULL, &connector) == ND_SUCCESS) {
        pthread_mutex_lock(&connector->lock);
        stream_lock(stream);
        attach(connector, stream);
        connector->state = REQUESTED;
        take_offer(connector, stream, true);
        stream_unlock(stream);
        pthread_mutex_unlock(&connector->lock);
        listener->arrived(listener->owner, connector);
    } else {
        refuse(stream);
    }
    if (take) {
        pthread_mutex_lock(&listener->lock);
        listener->delivering = false;
        pthread_cond_broadcast(&listener->idle);
        pthread_mutex_unlock(&listener->lock);
    }
    object_drop(&listener->object); /* the stream's reference */
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

/* No descriptor or no memory is free, and nothing tells when that changes, unless a silent connection gives its own. */
static bool make_room(struct listener *listener)
{
    bool room = guests_expel();

    if (!room)
        accept_later(listener, ACCEPT_AGAIN_MS);
    return room;
}

static void accept_all(struct listener *listener)
{
    for (int i = 0; i < ACCEPT_ROUND; i++) {
        struct sockaddr_storage local = {0}, peer = {0};

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
        bool served = socket_address(handle, &local) && (!listener->wildcard || soft_serves((struct sockaddr *)&local));
        if (served)
            stream = stream_create(listener->object.adapter, handle);
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
    struct sockaddr_storage address;

    if (listener == NULL) {
        socket_discard(handle);
        return ND_NO_MEMORY;
    }
    pthread_mutex_init(&listener->lock, NULL);
    pthread_cond_init(&listener->idle, NULL);
    listener->handle = handle;
    listener->arrived = arrived;
    listener->owner = owner;
    listener->wildcard = socket_address(handle, &address) && address_is_wildcard((const struct sockaddr *)&address);
    nd_status status = ND_SUCCESS;
    if (listen(handle, SOMAXCONN) != 0)
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
