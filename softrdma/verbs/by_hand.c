/* See by_hand.h.
 *
 * The end that connects tries again while nobody answers: the peer's program may not be ready yet. Either end gives up only
 * when requests have waited for the queue pair's retry time. So it is with a connection that has ended. The end that accepts may get the peer's connection before its
 * own program has named the peer. Such a connection waits in a list for a while.
 */
#include "by_hand.h"
#include "address.h"
#include "connection.h"
#include "forking.h"
#include "face.h"
#include "trace.h"
#include "watch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define PORT_QUEUE_PAIRS 256u
#define PORT_TRIES 64
#define RETRY_MS 20
#define RETRY_MAX_MS 250
/* How long a connection waits for the queue pair that it is for. */
#define UNCLAIMED_MS 10000
#define UNCLAIMED_MAX 256u
/* The least time that requests wait for a peer that does not answer. */
#define PATIENCE_MS 2000
#define WATCH_MS 100

struct port {
    struct port *next;
    uint16_t number;
    unsigned used;
    struct soft_qp *queue_pairs[PORT_QUEUE_PAIRS];
    unsigned next_index;
    socket_handle handles[2]; /* of IPv4 and IPv6, until they listen */
    struct listener *listeners[2];
};

/* The private data of a start-up frame. */
struct greeting {
    uint8_t magic[8];
    uint8_t to[4], from[4];
};

static const uint8_t magic[8] = {'s', 'o', 'f', 't', 'q', 'p', 0, 1};

struct unclaimed {
    struct unclaimed *next;
    struct connector *connector;
    uint32_t to, from;
    uint64_t until_ms;
};

/* What connects a queue pair. It has references of its own: the queue pair's destruction only marks it. */
struct hand {
    _Atomic int32_t references;
    pthread_mutex_t lock;
    struct soft_qp *qp; /* NULL once the queue pair lets go */
    struct queue_pair *engine; /* held */
    struct connector *connector;
    struct sockaddr_storage own, peer; /* the peer's with the port of its number */
    uint32_t number, peer_number;
    uint32_t inbound, outbound;
    bool active, done;
    bool left; /* the peer has gone */
    _Atomic bool connected;
    struct timer timer; /* until the next attempt; holds a reference while set */
    uint32_t wait_ms;
    struct timer watch; /* while it is not connected; holds a reference while set */
    bool watching;
    uint64_t asked_ms; /* since when requests have waited; 0: none has */
    uint64_t patience_ms;
};

/* Outside of all others. */
static pthread_mutex_t ports_lock = PTHREAD_MUTEX_INITIALIZER;
static struct port *ports;
static struct unclaimed *unclaimed;
static unsigned unclaimed_count;

/* ---- Numbers ---- */

/* Not as for a listener: then Linux could give one port to two sockets that do not listen yet. */
static bool open_port(struct port *port)
{
    struct sockaddr_storage any4 = {.ss_family = AF_INET}, any6 = {.ss_family = AF_INET6}, bound;
    nd_status status;

    for (int i = 0; i < PORT_TRIES; i++) {
        port->handles[0] = socket_bound(&any4, false, &status);
        if (port->handles[0] == NO_SOCKET)
            return false;
        if (socket_address(port->handles[0], &bound)) {
            port->number = address_port((struct sockaddr *)&bound);
            address_set_port((struct sockaddr *)&any6, port->number);
            port->handles[1] = socket_bound(&any6, false, &status);
            /* A machine without IPv6 has no such address. */
            if (port->handles[1] != NO_SOCKET ||
                (status != ND_SHARING_VIOLATION && status != ND_TOO_MANY_OPENED_FILES))
                return true;
        }
        socket_discard(port->handles[0]);
    }
    return false;
}

int number_take(struct soft_qp *qp, uint32_t *number)
{
    int error = 0;

    pthread_mutex_lock(&ports_lock);
    struct port *port = ports;
    while (port != NULL && port->used == PORT_QUEUE_PAIRS)
        port = port->next;
    if (port == NULL) {
        port = calloc(1, sizeof *port);
        if (port == NULL) {
            error = ENOMEM;
        } else if (!open_port(port)) {
            free(port);
            error = EMFILE;
        } else {
            port->next = ports;
            ports = port;
        }
    }
    if (error == 0) {
        /* A number that was just given back is used again as late as possible. */
        while (port->queue_pairs[port->next_index % PORT_QUEUE_PAIRS] != NULL)
            port->next_index++;
        unsigned index = port->next_index++ % PORT_QUEUE_PAIRS;
        port->queue_pairs[index] = qp;
        port->used++;
        *number = (uint32_t)port->number << 8 | index;
    }
    pthread_mutex_unlock(&ports_lock);
    return error;
}

/* Under ports_lock. */
static struct soft_qp **place(uint32_t number, struct port **out)
{
    for (struct port *port = ports; port != NULL; port = port->next)
        if (port->number == number >> 8) {
            if (out != NULL)
                *out = port;
            return &port->queue_pairs[number & 255];
        }
    return NULL;
}

static void close_port(struct port *port)
{
    for (int i = 0; i < 2; i++) {
        if (port->listeners[i] != NULL)
            listener_close(port->listeners[i]);
        else if (port->handles[i] != NO_SOCKET)
            socket_discard(port->handles[i]);
    }
    free(port);
}

static struct unclaimed *take_unclaimed(const struct hand *hand, uint32_t number);
static void drop_unclaimed(struct unclaimed *entry);

void number_give_back(struct soft_qp *qp)
{
    struct port *port = NULL;

    pthread_mutex_lock(&ports_lock);
    struct soft_qp **at = place(qp->ibv.qp_num, &port);
    *at = NULL;
    bool last = --port->used == 0;
    if (last) {
        struct port **link = &ports;
        while (*link != port)
            link = &(*link)->next;
        *link = port->next;
    }
    /* They are not for the next queue pair with this number. */
    struct unclaimed *late = take_unclaimed(NULL, qp->ibv.qp_num);
    pthread_mutex_unlock(&ports_lock);
    drop_unclaimed(late);
    if (last)
        close_port(port);
}

void numbers_forget(void)
{
    system_keep(ports);
    system_keep(unclaimed);
    ports = NULL;
    unclaimed = NULL;
    unclaimed_count = 0;
    pthread_mutex_init(&ports_lock, NULL);
}

struct soft_qp *soft_qp_hold(uint32_t number)
{
    pthread_mutex_lock(&ports_lock);
    struct soft_qp **at = place(number, NULL);
    struct soft_qp *qp = at != NULL ? *at : NULL;
    if (qp != NULL)
        qp->references++;
    pthread_mutex_unlock(&ports_lock);
    return qp;
}

struct soft_qp *soft_qp_numbered(uint32_t number)
{
    struct soft_qp *qp = soft_qp_hold(number);

    if (qp != NULL)
        soft_qp_drop(qp);
    return qp;
}

/* ---- One connection ---- */

static void hand_drop(struct hand *hand)
{
    if (--hand->references > 0)
        return;
    object_drop(&hand->engine->object);
    pthread_mutex_destroy(&hand->lock);
    free(hand);
}

static void try_to_connect(struct hand *hand);

static void timer_ran_out(struct timer *timer)
{
    struct hand *hand = CONTAINER_OF(timer, struct hand, timer);

    try_to_connect(hand);
    hand_drop(hand);
}

/* The connection is over, or will never be. */
static void give_up(struct hand *hand, nd_status first)
{
    pthread_mutex_lock(&hand->lock);
    hand->done = true;
    struct connector *connector = hand->connector;
    hand->connector = NULL;
    struct soft_qp *qp = hand->qp;
    if (qp != NULL)
        soft_qp_ended(qp);
    pthread_mutex_unlock(&hand->lock);
    if (connector != NULL)
        connector_close(connector);
    qp_fail(hand->engine, first);
}

static void look_at_requests(struct timer *timer);

/* Under its lock. */
static void watch(struct hand *hand)
{
    if (hand->watching)
        return;
    hand->watching = true;
    hand->references++;
    timer_set(&hand->watch, WATCH_MS, look_at_requests);
}

/* The peer has gone. The queue pair keeps its state until a request fails or its program moves it, as it would be with
 * a card. */
static void let_go(struct hand *hand)
{
    if (adapter_gone(hand->engine->object.adapter)) {
        give_up(hand, ND_CANCELED);
        return;
    }
    pthread_mutex_lock(&hand->lock);
    struct connector *connector = hand->connector;
    hand->connector = NULL;
    if (!hand->done) {
        hand->done = hand->left = true;
        hand->asked_ms = 0;
        watch(hand);
    }
    pthread_mutex_unlock(&hand->lock);
    if (connector != NULL)
        connector_close(connector);
}

static void look_at_requests(struct timer *timer)
{
    struct hand *hand = CONTAINER_OF(timer, struct hand, watch);
    uint64_t now = now_ms();

    pthread_mutex_lock(&hand->lock);
    hand->watching = false;
    if (hand->asked_ms == 0 && qp_has_requests(hand->engine))
        hand->asked_ms = now;
    bool over = hand->qp == NULL || (hand->left ? !qp_lingers(hand->engine) : hand->done || hand->connected);
    bool late = !over && hand->asked_ms != 0 && now - hand->asked_ms > hand->patience_ms;
    if (!over && !late)
        watch(hand);
    pthread_mutex_unlock(&hand->lock);
    if (late) {
        TRACE("queue pair 0x%x: nobody answers for 0x%x", hand->number, hand->peer_number);
        give_up(hand, ND_IO_TIMEOUT);
    }
    hand_drop(hand);
}

static void try_again(struct hand *hand)
{
    pthread_mutex_lock(&hand->lock);
    struct connector *connector = hand->connector;
    hand->connector = NULL;
    if (!hand->done) {
        hand->references++;
        timer_set(&hand->timer, hand->wait_ms, timer_ran_out);
        hand->wait_ms = hand->wait_ms * 2 < RETRY_MAX_MS ? hand->wait_ms * 2 : RETRY_MAX_MS;
    }
    pthread_mutex_unlock(&hand->lock);
    if (connector != NULL)
        connector_close(connector);
}

static void connection_event(void *owner, struct connector *connector, enum connector_event_type type, nd_status status)
{
    struct hand *hand = owner;

    hand->references++; /* what follows may let go of the connector, and then nobody waits for this call */
    switch (type) {
    case CONNECTOR_OFFERED:
        if (connector_complete(connector) == ND_SUCCESS)
            hand->connected = true;
        else
            give_up(hand, ND_IO_TIMEOUT);
        break;
    case CONNECTOR_ESTABLISHED:
        hand->connected = true;
        break;
    case CONNECTOR_ENDED:
        let_go(hand);
        break;
    case CONNECTOR_REFUSED:
    case CONNECTOR_FAILED:
        /* An accepted connection that fails may come again. */
        if (hand->active && status != ND_CANCELED && status != ND_DEVICE_REMOVED)
            try_again(hand);
        else if (status == ND_CANCELED || status == ND_DEVICE_REMOVED)
            give_up(hand, ND_CANCELED);
        break;
    }
    hand_drop(hand);
}

static const struct connector_owner hand_methods = {connection_event};

static void put_number(uint8_t *out, uint32_t number)
{
    number = htonl(number);
    memcpy(out, &number, sizeof number);
}

static uint32_t get_number(const uint8_t *data)
{
    uint32_t number;

    memcpy(&number, data, sizeof number);
    return ntohl(number);
}

static void try_to_connect(struct hand *hand)
{
    struct greeting greeting;
    struct connector *connector;
    nd_status status;

    pthread_mutex_lock(&hand->lock);
    bool done = hand->done;
    pthread_mutex_unlock(&hand->lock);
    if (done)
        return;
    status = connector_create(hand->engine->object.adapter, &hand_methods, hand, &connector);
    if (status != ND_SUCCESS) {
        try_again(hand);
        return;
    }
    memcpy(greeting.magic, magic, sizeof magic);
    put_number(greeting.to, hand->peer_number);
    put_number(greeting.from, hand->number);
    const struct connection_arguments arguments = {
        .inbound = hand->inbound,
        .outbound = hand->outbound,
        .private_data = &greeting,
        .private_size = sizeof greeting,
    };
    /* Once the hand has it, hand_close() may close it on another thread. */
    struct object *held = connector_object(connector);
    object_hold(held);
    pthread_mutex_lock(&hand->lock);
    done = hand->done;
    if (!done)
        hand->connector = connector;
    pthread_mutex_unlock(&hand->lock);
    if (done) {
        connector_close(connector);
        object_drop(held);
        return;
    }
    struct sockaddr_storage own = hand->own;
    socket_handle handle = socket_for_connecting(&own, &status);
    if (handle != NO_SOCKET)
        status = connector_connect(connector, hand->engine, handle, &hand->peer, &arguments);
    if (status != ND_SUCCESS)
        try_again(hand);
    object_drop(held);
}

/* ---- Accepting ---- */

static void accept_for(struct hand *hand, struct connector *connector)
{
    const struct connection_arguments arguments = {.inbound = hand->inbound, .outbound = hand->outbound};
    struct connector *former;
    struct object *held = connector_object(connector);

    object_hold(held); /* as in try_to_connect */
    pthread_mutex_lock(&hand->lock);
    former = hand->connector;
    bool done = hand->done;
    if (!done)
        hand->connector = connector;
    else
        former = connector;
    pthread_mutex_unlock(&hand->lock);
    if (former != NULL)
        connector_close(former);
    if (done) {
        object_drop(held);
        return;
    }
    connector_set_owner(connector, &hand_methods, hand);
    nd_status status = connector_accept(connector, hand->engine, &arguments);
    object_drop(held);
    if (status != ND_SUCCESS)
        TRACE("queue pair 0x%x: its peer's connection cannot be accepted: 0x%08x", hand->number, (unsigned)status);
}

/* The queue pair that a connection is for, if its program has named this peer. Under ports_lock. Its hand is held. */
static struct hand *find(uint32_t to, uint32_t from, const struct sockaddr_storage *peer)
{
    struct soft_qp **at = place(to, NULL);
    struct hand *hand = at != NULL && *at != NULL ? (*at)->hand : NULL;

    if (hand == NULL || hand->active || hand->peer_number != from ||
        !address_same_host((const struct sockaddr *)&hand->peer, (const struct sockaddr *)peer))
        return NULL;
    hand->references++;
    return hand;
}

/* Takes out the connections whose time is over and those for a number, or the one for this queue pair. Under ports_lock. */
static struct unclaimed *take_unclaimed(const struct hand *hand, uint32_t number)
{
    uint64_t now = now_ms();
    struct unclaimed *taken = NULL;

    for (struct unclaimed **at = &unclaimed; *at != NULL;) {
        struct unclaimed *entry = *at;
        struct connector_offer offer;
        bool mine = false;
        if (hand != NULL && taken == NULL && entry->to == hand->number && entry->from == hand->peer_number) {
            connector_offer(entry->connector, &offer);
            mine = address_same_host((const struct sockaddr *)&hand->peer, (const struct sockaddr *)&offer.peer);
        }
        if (!mine && (hand != NULL || (entry->until_ms > now && entry->to != number))) {
            at = &entry->next;
            continue;
        }
        *at = entry->next;
        unclaimed_count--;
        entry->next = taken;
        taken = entry;
    }
    return taken;
}

static void drop_unclaimed(struct unclaimed *entry)
{
    for (struct unclaimed *next; entry != NULL; entry = next) {
        next = entry->next;
        connector_close(entry->connector);
        free(entry);
    }
}

static void arrived(void *owner, struct connector *connector)
{
    struct connector_offer offer;
    struct greeting greeting;

    UNUSED(owner);
    connector_offer(connector, &offer);
    if (offer.private_size < sizeof greeting || memcmp(offer.private_data, magic, sizeof magic) != 0) {
        connector_close(connector);
        return;
    }
    memcpy(&greeting, offer.private_data, sizeof greeting);
    uint32_t to = get_number(greeting.to), from = get_number(greeting.from);
    struct unclaimed *entry = calloc(1, sizeof *entry);

    pthread_mutex_lock(&ports_lock);
    struct unclaimed *old = take_unclaimed(NULL, 0);
    struct hand *hand = find(to, from, &offer.peer);
    struct soft_qp **at = place(to, NULL);
    bool waits = hand == NULL && at != NULL && *at != NULL && entry != NULL && unclaimed_count < UNCLAIMED_MAX;
    if (waits) {
        *entry = (struct unclaimed){unclaimed, connector, to, from, now_ms() + UNCLAIMED_MS};
        unclaimed = entry;
        unclaimed_count++;
    }
    pthread_mutex_unlock(&ports_lock);

    drop_unclaimed(old);
    if (!waits)
        free(entry);
    if (hand != NULL) {
        accept_for(hand, connector);
        hand_drop(hand);
    } else if (!waits) {
        connector_close(connector);
    }
}

/* Under ports_lock. 0, or an errno. */
static int listen_for(struct soft_qp *qp)
{
    struct port *port = NULL;

    place(qp->ibv.qp_num, &port);
    for (int i = 0; i < 2; i++) {
        if (port->handles[i] == NO_SOCKET || port->listeners[i] != NULL)
            continue;
        nd_status status =
            listener_create(adapter_of(qp->ibv.context), port->handles[i], arrived, NULL, &port->listeners[i]);
        port->handles[i] = NO_SOCKET;
        if (status != ND_SUCCESS)
            return soft_errno(status);
    }
    return 0;
}

/* ---- For ibv_modify_qp ---- */

bool hand_names_a_peer(const struct ibv_qp_attr *attributes)
{
    static const union ibv_gid none;
    return attributes->ah_attr.is_global && memcmp(&attributes->ah_attr.grh.dgid, &none, sizeof none) != 0;
}

bool hand_names_nobody(const struct ibv_qp_attr *attributes)
{
    return !hand_names_a_peer(attributes) && (!attributes->ah_attr.is_global || attributes->dest_qp_num != 0);
}

static uint64_t retry_ms(const struct ibv_qp_attr *attributes)
{
    if (attributes->timeout == 0)
        return UINT64_MAX;
    uint64_t once_us = (UINT64_C(4096) << (attributes->timeout & 31)) / 1000;
    uint64_t all_ms = once_us * (attributes->retry_cnt + 1u) / 1000;
    return all_ms > PATIENCE_MS ? all_ms : PATIENCE_MS;
}

int hand_check(struct soft_qp *qp)
{
    const struct ibv_qp_attr *attributes = &qp->attributes;
    struct sockaddr_storage own = {0}, peer = {0};
    union ibv_gid own_gid;

    if (ibv_query_gid(qp->ibv.context, 1, attributes->ah_attr.grh.sgid_index, &own_gid) != 0)
        return errno;
    if (!soft_address_of(&own_gid, &own) || !soft_address_of(&attributes->ah_attr.grh.dgid, &peer) ||
        own.ss_family != peer.ss_family || attributes->dest_qp_num >> 8 == 0)
        return EINVAL;
    /* A queue pair has one connection, so it cannot be at both of its ends. */
    if (attributes->dest_qp_num == qp->ibv.qp_num && address_same_host((struct sockaddr *)&own, (struct sockaddr *)&peer))
        return EOPNOTSUPP;
    struct hand *hand = calloc(1, sizeof *hand);
    if (hand == NULL)
        return ENOMEM;
    pthread_mutex_lock(&ports_lock);
    int error = listen_for(qp);
    if (error == 0) {
        hand->references = 1;
        pthread_mutex_init(&hand->lock, NULL);
        hand->qp = qp;
        hand->engine = qp->qp;
        object_hold(&hand->engine->object);
        hand->engine->unaware = true;
        hand->own = own;
        hand->peer = peer;
        address_set_port((struct sockaddr *)&hand->peer, (uint16_t)(attributes->dest_qp_num >> 8));
        hand->number = qp->ibv.qp_num;
        hand->peer_number = attributes->dest_qp_num;
        hand->inbound = attributes->max_dest_rd_atomic;
        /* The limit of this side's reads comes with RTS, which may be later than the connection. */
        hand->outbound = MAX_READ_LIMIT;
        int order = memcmp(&own_gid, &attributes->ah_attr.grh.dgid, sizeof own_gid);
        hand->active = hand->number < hand->peer_number || (hand->number == hand->peer_number && order < 0);
        hand->wait_ms = RETRY_MS;
        hand->patience_ms = PATIENCE_MS;
        qp->hand = hand;
    }
    pthread_mutex_unlock(&ports_lock);
    if (error != 0)
        free(hand);
    return error;
}

void hand_connect(struct soft_qp *qp)
{
    struct hand *hand = qp->hand;

    pthread_mutex_lock(&hand->lock);
    watch(hand);
    pthread_mutex_unlock(&hand->lock);
    if (hand->active) {
        try_to_connect(hand);
        return;
    }
    pthread_mutex_lock(&ports_lock);
    struct unclaimed *mine = take_unclaimed(hand, 0);
    pthread_mutex_unlock(&ports_lock);
    if (mine == NULL)
        return;
    accept_for(hand, mine->connector);
    free(mine);
}

void hand_set_patience(struct soft_qp *qp)
{
    struct hand *hand = qp->hand;

    if (hand == NULL)
        return;
    pthread_mutex_lock(&hand->lock);
    hand->patience_ms = retry_ms(&qp->attributes);
    pthread_mutex_unlock(&hand->lock);
}

void hand_close(struct soft_qp *qp)
{
    pthread_mutex_lock(&ports_lock);
    struct hand *hand = qp->hand;
    qp->hand = NULL;
    pthread_mutex_unlock(&ports_lock);
    if (hand == NULL)
        return;
    pthread_mutex_lock(&hand->lock);
    hand->done = true;
    hand->qp = NULL;
    struct connector *connector = hand->connector;
    hand->connector = NULL;
    bool timed = timer_cancel(&hand->timer), watched = timer_cancel(&hand->watch);
    pthread_mutex_unlock(&hand->lock);
    if (timed)
        hand_drop(hand);
    if (watched)
        hand_drop(hand);
    if (connector != NULL)
        connector_close(connector);
    hand_drop(hand);
}
