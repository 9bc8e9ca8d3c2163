/* See pairing.h.
 *
 * The end that connects tries again while nobody answers: the peer's program may not be ready yet. Either end gives up
 * only when requests have waited for the queue pair's retry time. So it is with a connection that has ended. The end
 * that accepts may get the peer's connection before its own program has named the peer. Such a connection waits for a
 * while (greeting.h).
 *
 * A peer proves itself by the numbers and the PSNs of both ends, by its address, and on this machine by its user. A
 * program may stay in RTR, and then nobody here knows its own PSN. So an end that connects waits a moment for RTS, and
 * greets without that PSN if RTS does not come. At least one PSN is compared.
 */
#include "pairing.h"
#include "address.h"
#include "listener.h"
#include "face.h"
#include "greeting.h"
#include "numbers.h"
#include "owner.h"
#include "soft_connector.h"
#include "trace.h"
#include "watch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define RETRY_MS     20
#define RETRY_MAX_MS 250
/* The least time that requests wait for a peer that does not answer. */
#define PATIENCE_MS 2000
#define WATCH_MS    100

/* How far a pairing is, and what moves it. 0: this event does nothing in this state. */
enum pairing_state { LOOKING = 1, CONNECTED, LEFT /* the peer has gone */, OVER, PAIRING_STATES };
enum pairing_event { PEER_FOUND, PEER_GONE, QP_FAILED, GIVEN_UP, PAIRING_EVENTS };

static const enum pairing_state next_states[PAIRING_STATES][PAIRING_EVENTS] = {
    [LOOKING] = {[PEER_FOUND] = CONNECTED, [PEER_GONE] = LEFT, [QP_FAILED] = OVER, [GIVEN_UP] = OVER},
    [CONNECTED] = {[PEER_GONE] = LEFT, [GIVEN_UP] = OVER},
    [LEFT] = {[GIVEN_UP] = OVER},
};

/* What connects a queue pair. It has references of its own: the queue pair's destruction only marks it. */
struct pairing {
    _Atomic int32_t references;
    pthread_mutex_t lock;
    struct soft_qp *qp;        /* NULL once the queue pair lets go */
    struct queue_pair *engine; /* held */
    struct connector *connector;
    struct ear *ear;                   /* where the peer is expected; NULL if this end connects */
    struct sockaddr_storage own, peer; /* the peer's with the port of its number */
    uint32_t number, peer_number;
    uint32_t peer_psn;
    _Atomic uint32_t psn; /* NO_PSN until the queue pair may send */
    uint32_t inbound, outbound;
    bool active; /* this end connects */
    enum pairing_state state;
    struct timer timer; /* until the next attempt; holds a reference while set */
    uint32_t wait_ms;
    struct timer watch; /* while it is not connected; holds a reference while set */
    uint64_t asked_ms;  /* since when requests have waited; 0: none has */
    uint64_t patience_ms;
};

/* ---- One connection ---- */

static void pairing_drop(struct pairing *pairing)
{
    if (--pairing->references > 0)
        return;
    object_drop(&pairing->engine->object);
    pthread_mutex_destroy(&pairing->lock);
    free(pairing);
}

/* Under its lock. Returns whether the state is another one now. */
static bool move(struct pairing *pairing, enum pairing_event event)
{
    enum pairing_state next = next_states[pairing->state][event];

    if (next != 0)
        pairing->state = next;
    return next != 0;
}

/* Whether attempts and offers still count. Under its lock. */
static bool is_open(const struct pairing *pairing)
{
    return pairing->state == LOOKING || pairing->state == CONNECTED;
}

/* Under its lock. The caller has another reference. */
static void cancel(struct pairing *pairing, struct timer *timer)
{
    if (timer_cancel(timer))
        pairing->references--;
}

/* Under its lock. The caller closes what it returns, without the lock. */
static struct connector *take_connector(struct pairing *pairing)
{
    struct connector *connector = pairing->connector;

    pairing->connector = NULL;
    return connector;
}

static void try_to_connect(struct pairing *pairing);

static void timer_ran_out(struct timer *timer)
{
    struct pairing *pairing = CONTAINER_OF(timer, struct pairing, timer);

    try_to_connect(pairing);
    pairing_drop(pairing);
}

/* The connection is over, or will never be. */
static void give_up(struct pairing *pairing, nd_status first)
{
    pthread_mutex_lock(&pairing->lock);
    move(pairing, GIVEN_UP);
    struct connector *connector = take_connector(pairing);
    struct soft_qp *qp = pairing->qp;
    if (qp != NULL)
        soft_qp_ended(qp);
    pthread_mutex_unlock(&pairing->lock);
    connector_close(connector);
    qp_fail(pairing->engine, first);
}

static void look_at_requests(struct timer *timer);

/* Under its lock. */
static void watch(struct pairing *pairing)
{
    if (pairing->watch.set)
        return;
    pairing->references++;
    timer_set(&pairing->watch, WATCH_MS, look_at_requests);
}

/* The peer has gone. The queue pair keeps its state until a request fails or its program moves it, as it would be with
 * a card. */
static void let_go(struct pairing *pairing)
{
    if (adapter_gone(pairing->engine->object.adapter)) {
        give_up(pairing, ND_CANCELED);
        return;
    }
    pthread_mutex_lock(&pairing->lock);
    struct connector *connector = take_connector(pairing);
    if (move(pairing, PEER_GONE)) {
        pairing->asked_ms = 0;
        watch(pairing);
    }
    pthread_mutex_unlock(&pairing->lock);
    connector_close(connector);
}

static void look_at_requests(struct timer *timer)
{
    struct pairing *pairing = CONTAINER_OF(timer, struct pairing, watch);
    uint64_t now = now_ms();

    pthread_mutex_lock(&pairing->lock);
    if (pairing->asked_ms == 0 && qp_has_requests(pairing->engine))
        pairing->asked_ms = now;
    bool over = pairing->qp == NULL ||
                (pairing->state == LEFT ? qp_state(pairing->engine) != QP_LINGERING : pairing->state != LOOKING);
    bool late = !over && pairing->asked_ms != 0 && now - pairing->asked_ms > pairing->patience_ms;
    if (!over && !late)
        watch(pairing);
    pthread_mutex_unlock(&pairing->lock);
    if (late) {
        TRACE("queue pair 0x%x: nobody answers for 0x%x", pairing->number, pairing->peer_number);
        give_up(pairing, ND_IO_TIMEOUT);
    }
    pairing_drop(pairing);
}

/* After an attempt of this pairing, unless another one has replaced it. NULL: none could be begun. */
static void try_again(struct pairing *pairing, struct connector *connector)
{
    pthread_mutex_lock(&pairing->lock);
    bool mine = pairing->connector == connector;
    if (mine)
        pairing->connector = NULL;
    if (mine && is_open(pairing) && !pairing->timer.set) {
        pairing->references++;
        timer_set(&pairing->timer, pairing->wait_ms, timer_ran_out);
        pairing->wait_ms = pairing->wait_ms * 2 < RETRY_MAX_MS ? pairing->wait_ms * 2 : RETRY_MAX_MS;
    }
    pthread_mutex_unlock(&pairing->lock);
    if (mine && connector != NULL)
        connector_close(connector);
}

/* Another user's program may listen on the port of a peer that has gone. */
static void offered(struct pairing *pairing, struct connector *connector)
{
    struct connector_offer offer = connector_offer(connector);

    if (!owner_is_trusted(&offer.local, &offer.peer)) {
        try_again(pairing, connector);
        return;
    }
    pthread_mutex_lock(&pairing->lock);
    bool mine = pairing->connector == connector;
    if (mine)
        move(pairing, PEER_FOUND);
    pthread_mutex_unlock(&pairing->lock);
    if (mine && connector_complete(connector, NULL) != ND_SUCCESS)
        give_up(pairing, ND_IO_TIMEOUT);
}

static void take_news(void *owner, struct connector *connector, enum connector_news news, nd_status status)
{
    struct pairing *pairing = owner;

    pairing->references++; /* what follows may let go of the connector, and then nobody waits for this call */
    switch (news) {
    case NEWS_OFFERED:
        offered(pairing, connector);
        break;
    case NEWS_ESTABLISHED:
        pthread_mutex_lock(&pairing->lock);
        if (pairing->connector == connector)
            move(pairing, PEER_FOUND);
        pthread_mutex_unlock(&pairing->lock);
        break;
    case NEWS_ENDED:
    case NEWS_DISCONNECTED:
        let_go(pairing);
        break;
    case NEWS_REFUSED:
    case NEWS_FAILED:
    case NEWS_OFFER_LOST:
    case NEWS_ACCEPT_FAILED:
        /* An accepted connection that fails may come again. */
        if (pairing->active && status != ND_CANCELED && status != ND_DEVICE_REMOVED)
            try_again(pairing, connector);
        else if (status == ND_CANCELED || status == ND_DEVICE_REMOVED)
            give_up(pairing, ND_CANCELED);
        break;
    case NEWS_NONE:
        break;
    }
    pairing_drop(pairing);
}

static const struct connector_owner pairing_owner = {.tell = take_news, .make_socket = soft_make_socket};

static void try_to_connect(struct pairing *pairing)
{
    uint8_t greeting[GREETING_SIZE];
    struct connector *connector;
    nd_status status;

    pthread_mutex_lock(&pairing->lock);
    bool open = is_open(pairing);
    pthread_mutex_unlock(&pairing->lock);
    if (!open)
        return;
    struct sockaddr_storage own = pairing->own;
    socket_handle handle = socket_for_connecting(&own, &status);
    if (handle != NO_SOCKET)
        status = soft_connector_create(pairing->engine->object.adapter, &pairing_owner, pairing, handle, &connector);
    if (status != ND_SUCCESS) {
        try_again(pairing, NULL);
        return;
    }
    /* Once the pairing has it, pairing_close() may close it on another thread. */
    struct object *held = &connector->object;
    object_hold(held);
    pthread_mutex_lock(&pairing->lock);
    open = is_open(pairing) && pairing->connector == NULL;
    if (open)
        pairing->connector = connector;
    uint32_t psn = pairing->psn;
    pthread_mutex_unlock(&pairing->lock);
    if (!open) {
        connector_close(connector);
        object_drop(held);
        return;
    }
    greeting_write(greeting, &(struct greeting){pairing->peer_number, pairing->number, pairing->peer_psn, psn});
    const struct connection_arguments arguments = {
        .inbound = pairing->inbound,
        .outbound = pairing->outbound,
        .private_data = greeting,
        .private_size = sizeof greeting,
    };
    status = connector_connect(connector, pairing->engine, &pairing->peer, &arguments, NULL);
    if (status != ND_SUCCESS)
        try_again(pairing, connector);
    object_drop(held);
}

/* ---- Accepting ---- */

/* The peer may have given up an attempt that was accepted but not completed. A connection that exists stays. */
static void accept_for(struct pairing *pairing, struct connector *connector)
{
    const struct connection_arguments arguments = {.inbound = pairing->inbound, .outbound = pairing->outbound};
    struct object *held = &connector->object;

    object_hold(held); /* as in try_to_connect */
    pthread_mutex_lock(&pairing->lock);
    bool refused = pairing->state != LOOKING ||
                   (pairing->connector != NULL && connector_state(pairing->connector) == CONNECTOR_ESTABLISHED);
    struct connector *other = refused ? connector : pairing->connector;
    if (!refused)
        pairing->connector = connector;
    pthread_mutex_unlock(&pairing->lock);
    connector_close(other);
    if (refused) {
        TRACE("queue pair 0x%x: refuses a connection", pairing->number);
        object_drop(held);
        return;
    }
    connector_set_owner(connector, &pairing_owner, pairing);
    nd_status status = connector_accept(connector, pairing->engine, &arguments, NULL);
    if (status != ND_SUCCESS) {
        TRACE("queue pair 0x%x: its peer's connection cannot be accepted: 0x%08x", pairing->number, (unsigned)status);
        pthread_mutex_lock(&pairing->lock);
        bool mine = pairing->connector == connector;
        if (mine)
            pairing->connector = NULL;
        pthread_mutex_unlock(&pairing->lock);
        if (mine)
            connector_close(connector);
    }
    object_drop(held);
}

enum verdict { REFUSE, WAIT, ACCEPT };

/* Whether a connection is for this pairing. */
static enum verdict judge(const struct pairing *pairing, const struct waiting *entry)
{
    const struct greeting *greeting = &entry->greeting;
    uint32_t psn = pairing->psn;

    if (pairing->active || pairing->number != greeting->to || pairing->peer_number != greeting->from ||
        !address_same((const struct sockaddr *)&pairing->peer, (const struct sockaddr *)&entry->peer))
        return REFUSE;
    if ((psn != NO_PSN && psn != greeting->to_psn) ||
        (greeting->from_psn != NO_PSN && greeting->from_psn != pairing->peer_psn))
        return REFUSE;
    return psn == NO_PSN && greeting->from_psn == NO_PSN ? WAIT : ACCEPT;
}

/* Under numbers_lock. For ACCEPT, *out is held. */
static enum verdict find(const struct waiting *entry, struct pairing **out)
{
    struct soft_qp *qp = number_owner(entry->greeting.to);

    if (qp == NULL)
        return REFUSE;
    if (qp->pairing == NULL)
        return WAIT;
    enum verdict verdict = judge(qp->pairing, entry);
    if (verdict == ACCEPT) {
        *out = qp->pairing;
        (*out)->references++;
    }
    return verdict;
}

static void arrived(void *owner, struct connector *connector)
{
    struct connector_offer offer = connector_offer(connector);
    struct waiting *entry = calloc(1, sizeof *entry), *surplus = NULL;
    struct pairing *pairing = NULL;

    UNUSED(owner);
    if (entry == NULL || !greeting_read(&offer, &entry->greeting) || !owner_is_trusted(&offer.local, &offer.peer)) {
        free(entry);
        connector_close(connector);
        return;
    }
    entry->connector = connector;
    entry->peer = offer.peer;
    pthread_mutex_lock(&numbers_lock);
    enum verdict verdict = find(entry, &pairing);
    if (verdict == WAIT)
        surplus = waiting_keep(entry);
    pthread_mutex_unlock(&numbers_lock);

    waiting_drop(surplus);
    if (verdict == WAIT)
        return;
    free(entry);
    if (verdict == ACCEPT) {
        accept_for(pairing, connector);
        pairing_drop(pairing);
    } else {
        TRACE("a connection by number is refused");
        connector_close(connector);
    }
}

static bool is_decided(const struct waiting *entry, const void *pairing)
{
    return entry->greeting.to == ((const struct pairing *)pairing)->number && judge(pairing, entry) != WAIT;
}

/* It has learned more about its peer. */
static void look_at_waiting(struct pairing *pairing)
{
    pthread_mutex_lock(&numbers_lock);
    struct waiting *decided = waiting_take(is_decided, pairing);
    pthread_mutex_unlock(&numbers_lock);
    for (struct waiting *next; decided != NULL; decided = next) {
        next = decided->next;
        if (judge(pairing, decided) == ACCEPT)
            accept_for(pairing, decided->connector);
        else
            connector_close(decided->connector);
        free(decided);
    }
}

/* ---- For ibv_modify_qp ---- */

bool pairing_names_a_peer(const struct ibv_qp_attr *attributes)
{
    static const union ibv_gid none;
    return attributes->ah_attr.is_global && memcmp(&attributes->ah_attr.grh.dgid, &none, sizeof none) != 0;
}

bool pairing_names_nobody(const struct ibv_qp_attr *attributes)
{
    return !pairing_names_a_peer(attributes) && (!attributes->ah_attr.is_global || attributes->dest_qp_num != 0);
}

static uint64_t retry_ms(const struct ibv_qp_attr *attributes)
{
    if (attributes->timeout == 0)
        return UINT64_MAX;
    uint64_t once_us = (UINT64_C(4096) << (attributes->timeout & 31)) / 1000;
    uint64_t all_ms = once_us * (attributes->retry_cnt + 1u) / 1000;
    return all_ms > PATIENCE_MS ? all_ms : PATIENCE_MS;
}

int pairing_check(struct soft_qp *qp)
{
    const struct ibv_qp_attr *attributes = &qp->attributes;
    struct sockaddr_storage all[SOFT_MAX_GIDS], peer;
    union ibv_gid own_gid;

    int count = soft_addresses(all, SOFT_MAX_GIDS);
    if (count < 0)
        return errno;
    if (attributes->ah_attr.grh.sgid_index >= count)
        return EINVAL;
    const struct sockaddr_storage own = all[attributes->ah_attr.grh.sgid_index];
    soft_gid_of((const struct sockaddr *)&own, &own_gid);
    if (!soft_address_of(&attributes->ah_attr.grh.dgid, &own, &peer) || attributes->dest_qp_num >> 8 == 0)
        return EINVAL;
    /* A queue pair has one connection, so it cannot be at both of its ends. */
    if (attributes->dest_qp_num == qp->ibv.qp_num &&
        address_same((const struct sockaddr *)&own, (struct sockaddr *)&peer))
        return EOPNOTSUPP;
    struct pairing *pairing = calloc(1, sizeof *pairing);
    if (pairing == NULL)
        return ENOMEM;
    int order = memcmp(&own_gid, &attributes->ah_attr.grh.dgid, sizeof own_gid);
    pairing->number = qp->ibv.qp_num;
    pairing->peer_number = attributes->dest_qp_num;
    pairing->active = pairing->number < pairing->peer_number || (pairing->number == pairing->peer_number && order < 0);
    pthread_mutex_lock(&numbers_lock);
    int error = pairing->active ? 0 : number_listen(qp, &own, arrived, &pairing->ear);
    if (error == 0) {
        pairing->references = 1;
        pairing->state = LOOKING;
        pthread_mutex_init(&pairing->lock, NULL);
        pairing->qp = qp;
        pairing->engine = qp->qp;
        object_hold(&pairing->engine->object);
        pairing->engine->unaware = true;
        pairing->own = own;
        pairing->peer = peer;
        address_set_port((struct sockaddr *)&pairing->peer, (uint16_t)(attributes->dest_qp_num >> 8));
        pairing->peer_psn = attributes->rq_psn & PSN_MASK;
        pairing->psn = NO_PSN;
        pairing->inbound = attributes->max_dest_rd_atomic;
        /* The limit of this side's reads comes with RTS, which may be later than the connection. */
        pairing->outbound = MAX_READ_LIMIT;
        pairing->wait_ms = RETRY_MS;
        pairing->patience_ms = PATIENCE_MS;
        qp->pairing = pairing;
    }
    pthread_mutex_unlock(&numbers_lock);
    if (error != 0)
        free(pairing);
    return error;
}

void pairing_connect(struct soft_qp *qp)
{
    struct pairing *pairing = qp->pairing;

    pthread_mutex_lock(&pairing->lock);
    watch(pairing);
    if (pairing->active) {
        pairing->references++;
        timer_set(&pairing->timer, pairing->wait_ms, timer_ran_out);
    }
    pthread_mutex_unlock(&pairing->lock);
    look_at_waiting(pairing);
}

void pairing_ready(struct soft_qp *qp)
{
    struct pairing *pairing = qp->pairing;
    uint32_t psn = qp->attributes.sq_psn & PSN_MASK;

    if (pairing == NULL || pairing->psn == psn)
        return;
    pairing->psn = psn;
    if (!pairing->active) {
        look_at_waiting(pairing);
        return;
    }
    /* An attempt without the PSN is made again. */
    pthread_mutex_lock(&pairing->lock);
    bool waits = pairing->state == LOOKING;
    struct connector *incomplete = waits ? take_connector(pairing) : NULL;
    cancel(pairing, &pairing->timer);
    pthread_mutex_unlock(&pairing->lock);
    connector_close(incomplete);
    if (waits)
        try_to_connect(pairing);
}

void pairing_set_patience(struct soft_qp *qp)
{
    struct pairing *pairing = qp->pairing;

    if (pairing == NULL)
        return;
    pthread_mutex_lock(&pairing->lock);
    pairing->patience_ms = retry_ms(&qp->attributes);
    pthread_mutex_unlock(&pairing->lock);
}

void pairing_stop(struct soft_qp *qp)
{
    struct pairing *pairing = qp->pairing;

    if (pairing == NULL)
        return;
    pthread_mutex_lock(&pairing->lock);
    struct connector *connector = move(pairing, QP_FAILED) ? take_connector(pairing) : NULL;
    cancel(pairing, &pairing->timer);
    pthread_mutex_unlock(&pairing->lock);
    connector_close(connector);
}

void pairing_close(struct soft_qp *qp)
{
    pthread_mutex_lock(&numbers_lock);
    struct pairing *pairing = qp->pairing;
    qp->pairing = NULL;
    pthread_mutex_unlock(&numbers_lock);
    if (pairing == NULL)
        return;
    pthread_mutex_lock(&pairing->lock);
    move(pairing, GIVEN_UP);
    pairing->qp = NULL;
    struct connector *connector = take_connector(pairing);
    cancel(pairing, &pairing->timer);
    cancel(pairing, &pairing->watch);
    pthread_mutex_unlock(&pairing->lock);
    connector_close(connector);
    number_unlisten(pairing->ear);
    pairing_drop(pairing);
}
