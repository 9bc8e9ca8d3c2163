/* See connector.h.
 *
 * The lock is outside of the engine's others. Streams are handled after it was released, so an event may find that the
 * connector has moved on and has another stream, or none.
 */
#include "connector.h"
#include "queue_pair.h"
#include "trace.h"

#include <string.h>

/* How often an attempt that insists is made again, and after what time; each time is twice the one before. A program
 * that has just got its peer's message connects sooner than with a card, where resolving takes longer. Its peer may
 * have sent that message just before it listens. */
#define INSIST_TIMES 3u
#define INSIST_MS    10u

/* What becomes of the stream and the queue pair. */
enum parting { STAY, LEAVE, WITHDRAW, ABORT, DISCONNECT };
enum offer_change { KEEP, TAKE, FORGET };

struct step {
    enum connector_state next; /* 0: this event does nothing in this state */
    enum connector_news news;
    enum parting parting;
    enum offer_change offer;
};

static const struct step steps[CONNECTOR_STATES][CONNECTOR_EVENTS] = {
    [CONNECTOR_IDLE] = {[CALL_RESERVE] = {.next = CONNECTOR_RESERVED},
                        [CALL_ADOPT] = {.next = CONNECTOR_REQUESTED, .offer = TAKE},
                        [CALL_CONNECT] = {.next = CONNECTOR_CONNECTING, .offer = FORGET},
                        [CALL_CLOSE] = {.next = CONNECTOR_CLOSED}},
    [CONNECTOR_RESERVED] = {[CALL_UNRESERVE] = {.next = CONNECTOR_IDLE},
                            [CALL_ADOPT] = {.next = CONNECTOR_REQUESTED, .offer = TAKE},
                            [CALL_CLOSE] = {.next = CONNECTOR_CLOSED}},
    [CONNECTOR_CONNECTING] =
        {[PEER_OFFERS] = {.next = CONNECTOR_OFFERED, .news = NEWS_OFFERED, .offer = TAKE},
         [PEER_REFUSES] = {.next = CONNECTOR_IDLE, .news = NEWS_REFUSED, .parting = LEAVE, .offer = TAKE},
         [ATTEMPT_FAILS] = {.next = CONNECTOR_IDLE, .news = NEWS_FAILED, .parting = LEAVE, .offer = FORGET},
         [ATTEMPT_ENDS] = {.next = CONNECTOR_FAILED, .news = NEWS_FAILED, .parting = LEAVE, .offer = FORGET},
         [CALL_CANCEL] = {.next = CONNECTOR_FAILED, .parting = ABORT},
         [CALL_CLOSE] = {.next = CONNECTOR_CLOSED, .parting = ABORT}},
    [CONNECTOR_OFFERED] =
        {[CALL_COMPLETE] = {.next = CONNECTOR_ESTABLISHED},
         [CALL_REJECT] = {.next = CONNECTOR_IDLE, .parting = WITHDRAW, .offer = FORGET},
         [ATTEMPT_FAILS] = {.next = CONNECTOR_FAILED, .news = NEWS_OFFER_LOST, .parting = LEAVE, .offer = FORGET},
         [ATTEMPT_ENDS] = {.next = CONNECTOR_FAILED, .news = NEWS_OFFER_LOST, .parting = LEAVE, .offer = FORGET},
         [CALL_CLOSE] = {.next = CONNECTOR_CLOSED, .parting = WITHDRAW}},
    [CONNECTOR_REQUESTED] = {[CALL_ACCEPT] = {.next = CONNECTOR_ACCEPTING},
                             [CALL_REJECT] = {.next = CONNECTOR_IDLE, .parting = WITHDRAW, .offer = FORGET},
                             [CALL_CLOSE] = {.next = CONNECTOR_CLOSED, .parting = WITHDRAW}},
    [CONNECTOR_ACCEPTING] =
        {[PEER_CONTINUES] = {.next = CONNECTOR_ESTABLISHED, .news = NEWS_ESTABLISHED, .offer = FORGET},
         [ATTEMPT_FAILS] = {.next = CONNECTOR_FAILED, .news = NEWS_ACCEPT_FAILED, .parting = LEAVE, .offer = FORGET},
         [ATTEMPT_ENDS] = {.next = CONNECTOR_FAILED, .news = NEWS_ACCEPT_FAILED, .parting = LEAVE, .offer = FORGET},
         [CALL_CANCEL] = {.next = CONNECTOR_FAILED, .parting = ABORT},
         [CALL_CLOSE] = {.next = CONNECTOR_CLOSED, .parting = WITHDRAW}},
    [CONNECTOR_ESTABLISHED] = {[CALL_DISCONNECT] = {.next = CONNECTOR_DISCONNECTING},
                               [CONNECTION_LOST] = {.next = CONNECTOR_FAILED, .parting = ABORT},
                               [CONNECTION_ENDS] = {.next = CONNECTOR_PEER_GONE, .news = NEWS_ENDED},
                               [CONNECTION_ENDS_FOR_GOOD] = {.next = CONNECTOR_DISCONNECTED,
                                                             .news = NEWS_ENDED,
                                                             .parting = LEAVE},
                               [CALL_CLOSE] = {.next = CONNECTOR_CLOSED, .parting = DISCONNECT}},
    [CONNECTOR_PEER_GONE] = {[CALL_DISCONNECT] = {.next = CONNECTOR_DISCONNECTING},
                             [CALL_CLOSE] = {.next = CONNECTOR_CLOSED, .parting = DISCONNECT}},
    [CONNECTOR_DISCONNECTING] =
        {[CALL_DISCONNECT] = {.next = CONNECTOR_DISCONNECTING},
         [CONNECTION_ENDS] = {.next = CONNECTOR_DISCONNECTED, .news = NEWS_DISCONNECTED, .parting = LEAVE},
         [CONNECTION_ENDS_FOR_GOOD] = {.next = CONNECTOR_DISCONNECTED, .news = NEWS_DISCONNECTED, .parting = LEAVE},
         [CALL_CLOSE] = {.next = CONNECTOR_CLOSED, .parting = DISCONNECT}},
    [CONNECTOR_DISCONNECTED] = {[CALL_CLOSE] = {.next = CONNECTOR_CLOSED}},
    [CONNECTOR_FAILED] = {[CALL_CLOSE] = {.next = CONNECTOR_CLOSED}},
};

/* The references that a connector gives up. They are dropped after its lock was released. */
struct parted {
    struct stream *stream;
    struct queue_pair *qp;
    enum parting parting;
};

static void take_offer(struct connector *connector)
{
    /* The stream's own values are final by now: nothing writes them after the start-up frame. */
    const struct stream *stream = connector->stream;
    bool passive = connector->state == CONNECTOR_REQUESTED;
    struct connector_offer *offer = &connector->offer;

    memcpy(offer->private_data, stream->private_data, stream->private_size);
    offer->private_size = stream->private_size;
    offer->has_private_data = true;
    offer->inbound = passive ? stream->peer_outbound : smaller(stream->peer_outbound, stream->own_inbound);
    offer->outbound = passive ? stream->peer_inbound : smaller(stream->peer_inbound, stream->own_outbound);
    offer->local = stream->local;
    offer->peer = stream->peer;
}

/* Under the lock. Every change of the state is made here. False: the table has no such step. */
static bool make_step(struct connector *connector, enum connector_event event, nd_status status, struct parted *parted)
{
    const struct step *step = &steps[connector->state][event];

    if (step->next == 0)
        return false;
    TRACE("connector %p: state %d, event %d: state %d, status 0x%08x", (void *)connector, connector->state, event,
          step->next, (unsigned)status);
    connector->state = step->next;
    if (step->news != NEWS_NONE && connector->untold_count < COUNT_OF(connector->untold)) {
        connector->untold[connector->untold_count].news = step->news;
        connector->untold[connector->untold_count++].status = status;
    }
    if (step->offer == TAKE)
        take_offer(connector);
    else if (step->offer == FORGET)
        connector->offer.has_private_data = false;
    if (step->parting != STAY) {
        *parted = (struct parted){connector->stream, connector->qp, step->parting};
        connector->stream = NULL;
        connector->qp = NULL;
    }
    return true;
}

/* Without locks. */
static void part(struct parted parted)
{
    struct stream *stream = parted.stream;

    if (stream != NULL) {
        stream_lock(stream);
        struct connector *connector = stream->connector;
        if (parted.parting == DISCONNECT)
            stream_disconnect(stream);
        else if (parted.parting == ABORT)
            stream_abort(stream);
        else if (parted.parting == WITHDRAW && stream->phase != STREAM_CLOSED)
            stream_withdraw(stream);
        stream->connector = NULL;
        stream_unlock(stream);
        if (parted.qp != NULL)
            qp_detach(parted.qp, stream);
        if (connector != NULL)
            object_drop(&connector->object);
        stream_drop(stream);
    }
    if (parted.qp != NULL)
        object_drop(&parted.qp->object);
}

/* Tells the owner what there is to tell. Without locks. The caller has a reference. */
static void tell(struct connector *connector)
{
    lock_acquire(&connector->lock);
    if (!connector->telling) {
        connector->telling = true;
        connector->teller = thread_id();
        while (connector->untold_count > 0 && connector->state != CONNECTOR_CLOSED) {
            enum connector_news news = connector->untold[0].news;
            nd_status status = connector->untold[0].status;
            const struct connector_owner *methods = connector->methods;
            void *owner = connector->owner;
            memmove(connector->untold, connector->untold + 1, --connector->untold_count * sizeof connector->untold[0]);
            lock_release(&connector->lock);
            methods->tell(owner, connector, news, status);
            lock_acquire(&connector->lock);
        }
        connector->telling = false;
        condition_wake_all(&connector->idle);
    }
    lock_release(&connector->lock);
}

/* ---- Attempts ---- */

/* Under the lock. */
static nd_status new_stream(struct connector *connector, const struct sockaddr_storage *peer,
                            const struct sockaddr_storage *last, struct queue_pair *qp, struct stream **out)
{
    nd_status status;
    socket_handle handle = connector->methods->make_socket(connector, peer, last, &status);

    if (handle == NO_SOCKET)
        return status;
    struct stream *stream = stream_create(connector->object.adapter, handle, false);
    if (stream == NULL)
        return ND_INSUFFICIENT_RESOURCES;
    stream->peer = *peer;
    if (!socket_address(handle, &stream->local))
        memset(&stream->local, 0, sizeof stream->local);
    if (!qp_attach(qp, stream)) {
        stream_lock(stream);
        stream_abort(stream);
        stream_unlock(stream);
        stream_drop(stream);
        return ND_CONNECTION_ACTIVE;
    }
    *out = stream;
    return ND_SUCCESS;
}

/* Under the lock, and the stream's or while no other thread knows the stream. Each gets a reference to the other. */
static void attach(struct connector *connector, struct stream *stream)
{
    stream->connector = connector;
    object_hold(&connector->object);
    connector->stream = stream;
    stream_hold(stream);
}

/* A fault ends the attempt before the peer hears of it, or goes on with the connection. The stream is locked. */
static void begin_attempt(struct stream *stream, const struct fault *fault)
{
    switch (fault != NULL ? fault->kind : FAULT_KINDS) {
    case FAULT_REFUSE:
        stream_tell(stream, EVENT_FAILED, ND_CONNECTION_REFUSED);
        break;
    case FAULT_TIME_OUT:
        stream_tell(stream, EVENT_FAILED, ND_IO_TIMEOUT);
        break;
    case FAULT_REJECT:
        memcpy(stream->private_data, fault->data, fault->data_size);
        stream->private_size = (uint32_t)fault->data_size;
        stream_tell(stream, EVENT_REFUSED, ND_CONNECTION_REFUSED);
        break;
    default:
        stream->fault = fault;
        stream_connect(stream);
        return;
    }
    stream_abort(stream);
}

nd_status connector_connect(struct connector *connector, struct queue_pair *qp, const struct sockaddr_storage *peer,
                            const struct connection_arguments *arguments, struct permit *permit)
{
    struct stream *stream = NULL;
    const struct fault *fault = NULL;
    nd_status status;

    if (arguments->private_size > MAX_PRIVATE_DATA)
        return ND_INVALID_BUFFER_SIZE;
    lock_acquire(&connector->lock);
    if (connector->state == CONNECTOR_FAILED || connector->state == CONNECTOR_DISCONNECTED)
        status = ND_CONNECTION_INVALID;
    else if (connector->state != CONNECTOR_IDLE)
        status = ND_CONNECTION_ACTIVE;
    else
        status = new_stream(connector, peer, NULL, qp, &stream);
    if (status == ND_SUCCESS && permit != NULL) {
        status = permit->ask(permit, connector);
        if (status != ND_SUCCESS)
            qp_detach(qp, stream);
    }
    if (status == ND_SUCCESS) {
        stream->revision = 2;
        stream->own_inbound = smaller(arguments->inbound, MAX_READ_LIMIT);
        stream->own_outbound = smaller(arguments->outbound, MAX_READ_LIMIT);
        if (arguments->private_size > 0)
            memcpy(stream->own_private, arguments->private_data, arguments->private_size);
        stream->own_private_size = arguments->private_size;
        attach(connector, stream);
        object_hold(&qp->object);
        connector->qp = qp;
        if (connector->object.adapter->faults != NULL)
            fault = faults_at_connection(qp, stream, false);
        connector->insists = arguments->insists && fault == NULL ? INSIST_TIMES : 0;
        make_step(connector, CALL_CONNECT, ND_SUCCESS, NULL);
    }
    lock_release(&connector->lock);
    if (stream == NULL)
        return status;
    stream_lock(stream);
    if (status == ND_SUCCESS)
        begin_attempt(stream, fault);
    else
        stream_abort(stream);
    stream_unlock(stream);
    stream_drop(stream);
    return status;
}

/* Another stream for the same attempt. Under the lock. */
static nd_status replace_stream(struct connector *connector, uint8_t revision, struct stream **out)
{
    struct stream *old = connector->stream, *stream;

    qp_detach(connector->qp, old);
    nd_status status = new_stream(connector, &old->peer, &old->local, connector->qp, &stream);
    if (status != ND_SUCCESS)
        return status == ND_CONNECTION_ACTIVE ? ND_CANCELED : status;
    stream->revision = revision;
    stream->own_inbound = old->own_inbound;
    stream->own_outbound = old->own_outbound;
    memcpy(stream->own_private, old->own_private, old->own_private_size);
    stream->own_private_size = old->own_private_size;
    stream->fault = old->fault;
    attach(connector, stream);
    *out = stream;
    return ND_SUCCESS;
}

void connector_event(struct connector *connector, struct stream *stream, unsigned events, nd_status status)
{
    struct parted parted = {NULL, NULL, STAY};
    struct stream *again = NULL;
    uint32_t again_ms = 0;

    lock_acquire(&connector->lock);
    if (connector->stream != stream)
        events = 0;
    bool connecting = connector->state == CONNECTOR_CONNECTING;
    bool unanswered = connecting && (events & EVENT_FAILED) != 0 && status == ND_CONNECTION_REFUSED;
    bool insist = unanswered && stream->sent_bytes == 0 && connector->insists > 0;
    /* Something took the TCP connection and the request, and gave no answer of iWARP. */
    if (unanswered && stream->sent_bytes > 0)
        status = ND_CONNECTION_INVALID;
    if (insist || (connecting && (events & EVENT_FALLBACK) != 0)) {
        if (insist)
            again_ms = INSIST_MS << (INSIST_TIMES - connector->insists--);
        status = replace_stream(connector, insist ? stream->revision : 1, &again);
        events = again != NULL ? 0 : EVENT_FAILED;
        if (again != NULL)
            parted = (struct parted){stream, NULL, LEAVE};
    }
    if ((events & EVENT_OFFERED) != 0)
        make_step(connector, PEER_OFFERS, ND_SUCCESS, &parted);
    if ((events & (EVENT_ESTABLISHED | EVENT_ENDED)) != 0)
        make_step(connector, PEER_CONTINUES, ND_SUCCESS, &parted);
    if ((events & EVENT_ENDED) != 0)
        make_step(connector, connector->methods->disconnects ? CONNECTION_ENDS : CONNECTION_ENDS_FOR_GOOD, status,
                  &parted);
    if ((events & EVENT_REFUSED) != 0)
        make_step(connector, PEER_REFUSES, ND_CONNECTION_REFUSED, &parted);
    else if ((events & EVENT_FAILED) != 0)
        make_step(connector, status == ND_CANCELED || status == ND_DEVICE_REMOVED ? ATTEMPT_ENDS : ATTEMPT_FAILS,
                  status, &parted);
    lock_release(&connector->lock);

    part(parted);
    tell(connector);
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

/* ---- Calls ---- */

/* Makes the step of a call that goes on with the stream, which is held then. */
static nd_status begin(struct connector *connector, enum connector_event call, struct permit *permit,
                       struct stream **stream)
{
    nd_status status = ND_CONNECTION_INVALID;

    lock_acquire(&connector->lock);
    if (steps[connector->state][call].next != 0)
        status = permit != NULL ? permit->ask(permit, connector) : ND_SUCCESS;
    if (status == ND_SUCCESS) {
        make_step(connector, call, ND_SUCCESS, NULL);
        *stream = connector->stream;
        stream_hold(*stream);
    }
    lock_release(&connector->lock);
    return status;
}

bool connector_step(struct connector *connector, enum connector_event call)
{
    struct parted parted = {NULL, NULL, STAY};

    lock_acquire(&connector->lock);
    bool made = make_step(connector, call, ND_SUCCESS, &parted);
    lock_release(&connector->lock);
    part(parted);
    return made;
}

bool connector_allows(struct connector *connector, enum connector_event call)
{
    return steps[connector_state(connector)][call].next != 0;
}

enum connector_state connector_state(struct connector *connector)
{
    lock_share(&connector->lock);
    enum connector_state state = connector->state;
    lock_unshare(&connector->lock);
    return state;
}

nd_status connector_complete(struct connector *connector, struct permit *permit)
{
    struct stream *stream;
    nd_status status = begin(connector, CALL_COMPLETE, permit, &stream);

    if (status != ND_SUCCESS)
        return status;
    stream_lock(stream);
    bool complete = stream_complete(stream);
    stream_unlock(stream);
    if (!complete) {
        struct parted parted = {NULL, NULL, STAY};
        lock_acquire(&connector->lock);
        if (connector->stream == stream)
            make_step(connector, CONNECTION_LOST, ND_SUCCESS, &parted);
        lock_release(&connector->lock);
        part(parted);
    }
    stream_drop(stream);
    return complete ? ND_SUCCESS : ND_IO_TIMEOUT;
}

nd_status connector_accept(struct connector *connector, struct queue_pair *qp,
                           const struct connection_arguments *arguments, struct permit *permit)
{
    nd_status status = ND_SUCCESS;

    if (arguments->private_size > MAX_PRIVATE_DATA)
        return ND_INVALID_BUFFER_SIZE;
    lock_acquire(&connector->lock);
    struct stream *stream = connector->state == CONNECTOR_REQUESTED ? connector->stream : NULL;
    if (stream == NULL)
        status = ND_CONNECTION_INVALID;
    else if (!qp_attach(qp, stream))
        status = ND_CONNECTION_ACTIVE;
    if (status == ND_SUCCESS && permit != NULL) {
        status = permit->ask(permit, connector);
        if (status != ND_SUCCESS)
            qp_detach(qp, stream);
    }
    if (status == ND_SUCCESS) {
        object_hold(&qp->object);
        connector->qp = qp;
        make_step(connector, CALL_ACCEPT, ND_SUCCESS, NULL);
        stream_hold(stream);
    }
    lock_release(&connector->lock);
    if (status != ND_SUCCESS)
        return status;

    stream_lock(stream);
    if (connector->object.adapter->faults != NULL)
        stream->fault = faults_at_connection(qp, stream, true);
    stream->own_inbound = smaller(smaller(arguments->inbound, MAX_READ_LIMIT), stream->peer_outbound);
    stream->own_outbound = smaller(smaller(arguments->outbound, MAX_READ_LIMIT), stream->peer_inbound);
    if (!stream_reply(stream, false, arguments->private_data, arguments->private_size))
        stream_tell(stream, EVENT_FAILED, ND_CONNECTION_ABORTED);
    stream_unlock(stream);
    stream_drop(stream);
    return ND_SUCCESS;
}

nd_status connector_reject(struct connector *connector, const void *private_data, uint32_t private_size)
{
    struct parted parted = {NULL, NULL, STAY};

    if (private_size > MAX_PRIVATE_DATA)
        return ND_INVALID_BUFFER_SIZE;
    lock_acquire(&connector->lock);
    bool passive = connector->state == CONNECTOR_REQUESTED;
    bool valid = make_step(connector, CALL_REJECT, ND_SUCCESS, &parted);
    lock_release(&connector->lock);
    if (!valid)
        return ND_CONNECTION_INVALID;
    stream_lock(parted.stream);
    bool alive = parted.stream->phase != STREAM_CLOSED && !parted.stream->abandoned;
    if (alive && passive)
        alive = stream_reply(parted.stream, true, private_data, private_size);
    stream_unlock(parted.stream);
    part(parted);
    return alive ? ND_SUCCESS : ND_CONNECTION_ABORTED;
}

nd_status connector_disconnect(struct connector *connector, struct permit *permit)
{
    struct stream *stream;
    nd_status status = begin(connector, CALL_DISCONNECT, permit, &stream);

    if (status != ND_SUCCESS)
        return status;
    stream_lock(stream);
    stream_disconnect(stream);
    stream_unlock(stream);
    stream_drop(stream);
    return ND_SUCCESS;
}

bool connector_adopt(struct connector *connector, struct stream *stream)
{
    lock_acquire(&connector->lock);
    struct object *listener = NULL;
    bool valid = steps[connector->state][CALL_ADOPT].next != 0;
    if (valid) {
        stream_lock(stream);
        listener = stream_leave_listener(stream);
        attach(connector, stream);
        make_step(connector, CALL_ADOPT, ND_SUCCESS, NULL);
        lock_release(&stream->lock);
    }
    lock_release(&connector->lock);
    if (listener != NULL)
        object_drop(listener);
    return valid;
}

struct connector_offer connector_offer(struct connector *connector)
{
    lock_share(&connector->lock);
    struct connector_offer offer = connector->offer;
    if (connector->state == CONNECTOR_CONNECTING || connector->state == CONNECTOR_REQUESTED) {
        stream_lock(connector->stream);
        offer.local = connector->stream->local;
        offer.abandoned = connector->stream->abandoned;
        lock_release(&connector->stream->lock);
    }
    lock_unshare(&connector->lock);
    return offer;
}

/* ---- The object ---- */

void connector_set_owner(struct connector *connector, const struct connector_owner *methods, void *owner)
{
    lock_acquire(&connector->lock);
    connector->methods = methods;
    connector->owner = owner;
    lock_release(&connector->lock);
    tell(connector);
}

void connector_closed(struct object *object)
{
    struct connector *connector = CONTAINER_OF(object, struct connector, object);

    connector_step(connector, CALL_CLOSE);
    lock_acquire(&connector->lock);
    while (connector->telling && connector->teller != thread_id())
        condition_wait(&connector->idle, &connector->lock);
    lock_release(&connector->lock);
}

bool connector_start(struct connector *connector, const struct object_class *class, struct adapter *adapter,
                     const struct connector_owner *methods, void *owner)
{
    lock_start(&connector->lock);
    condition_start(&connector->idle);
    connector->state = CONNECTOR_IDLE;
    connector->methods = methods;
    connector->owner = owner;
    return object_start(&connector->object, class, adapter, NULL);
}
