/* See by_hand.h.
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
#include "by_hand.h"
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

/* What connects a queue pair. It has references of its own: the queue pair's destruction only marks it. */
struct hand {
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

/* After an attempt of this hand, unless another one has replaced it. NULL: none could be begun. */
static void try_again(struct hand *hand, struct connector *connector)
{
    pthread_mutex_lock(&hand->lock);
    bool mine = hand->connector == connector;
    if (mine)
        hand->connector = NULL;
    if (mine && !hand->done && !hand->timer.set) {
        hand->references++;
        timer_set(&hand->timer, hand->wait_ms, timer_ran_out);
        hand->wait_ms = hand->wait_ms * 2 < RETRY_MAX_MS ? hand->wait_ms * 2 : RETRY_MAX_MS;
    }
    pthread_mutex_unlock(&hand->lock);
    if (mine && connector != NULL)
        connector_close(connector);
}

/* Another user's program may listen on the port of a peer that has gone. */
static void offered(struct hand *hand, struct connector *connector)
{
    struct connector_offer offer = connector_offer(connector);

    if (!owner_is_trusted(&offer.local, &offer.peer)) {
        try_again(hand, connector);
        return;
    }
    pthread_mutex_lock(&hand->lock);
    bool mine = hand->connector == connector && !hand->done;
    hand->connected = hand->connected || mine;
    pthread_mutex_unlock(&hand->lock);
    if (mine && connector_complete(connector, NULL) != ND_SUCCESS)
        give_up(hand, ND_IO_TIMEOUT);
}

static void take_news(void *owner, struct connector *connector, enum connector_news news, nd_status status)
{
    struct hand *hand = owner;

    hand->references++; /* what follows may let go of the connector, and then nobody waits for this call */
    switch (news) {
    case NEWS_OFFERED:
        offered(hand, connector);
        break;
    case NEWS_ESTABLISHED:
        pthread_mutex_lock(&hand->lock);
        hand->connected = hand->connected || hand->connector == connector;
        pthread_mutex_unlock(&hand->lock);
        break;
    case NEWS_ENDED:
    case NEWS_DISCONNECTED:
        let_go(hand);
        break;
    case NEWS_REFUSED:
    case NEWS_FAILED:
    case NEWS_OFFER_LOST:
    case NEWS_ACCEPT_FAILED:
        /* An accepted connection that fails may come again. */
        if (hand->active && status != ND_CANCELED && status != ND_DEVICE_REMOVED)
            try_again(hand, connector);
        else if (status == ND_CANCELED || status == ND_DEVICE_REMOVED)
            give_up(hand, ND_CANCELED);
        break;
    case NEWS_NONE:
        break;
    }
    hand_drop(hand);
}

static const struct connector_owner hand_methods = {.tell = take_news, .make_socket = soft_make_socket};

static void try_to_connect(struct hand *hand)
{
    uint8_t greeting[GREETING_SIZE];
    struct connector *connector;
    nd_status status;

    pthread_mutex_lock(&hand->lock);
    bool done = hand->done;
    pthread_mutex_unlock(&hand->lock);
    if (done)
        return;
    struct sockaddr_storage own = hand->own;
    socket_handle handle = socket_for_connecting(&own, &status);
    if (handle != NO_SOCKET)
        status = soft_connector_create(hand->engine->object.adapter, &hand_methods, hand, handle, &connector);
    if (status != ND_SUCCESS) {
        try_again(hand, NULL);
        return;
    }
    /* Once the hand has it, hand_close() may close it on another thread. */
    struct object *held = &connector->object;
    object_hold(held);
    pthread_mutex_lock(&hand->lock);
    done = hand->done || hand->connector != NULL;
    if (!done)
        hand->connector = connector;
    uint32_t psn = hand->psn;
    pthread_mutex_unlock(&hand->lock);
    if (done) {
        connector_close(connector);
        object_drop(held);
        return;
    }
    greeting_write(greeting, &(struct greeting){hand->peer_number, hand->number, hand->peer_psn, psn});
    const struct connection_arguments arguments = {
        .inbound = hand->inbound,
        .outbound = hand->outbound,
        .private_data = greeting,
        .private_size = sizeof greeting,
    };
    status = connector_connect(connector, hand->engine, &hand->peer, &arguments, NULL);
    if (status != ND_SUCCESS)
        try_again(hand, connector);
    object_drop(held);
}

/* ---- Accepting ---- */

/* The peer may have given up an attempt that was accepted but not completed. A connection that exists stays. */
static void accept_for(struct hand *hand, struct connector *connector)
{
    const struct connection_arguments arguments = {.inbound = hand->inbound, .outbound = hand->outbound};
    struct object *held = &connector->object;

    object_hold(held); /* as in try_to_connect */
    pthread_mutex_lock(&hand->lock);
    bool refused = hand->done || hand->connected ||
                   (hand->connector != NULL && connector_state(hand->connector) == CONNECTOR_ESTABLISHED);
    struct connector *other = refused ? connector : hand->connector;
    if (!refused)
        hand->connector = connector;
    pthread_mutex_unlock(&hand->lock);
    if (other != NULL)
        connector_close(other);
    if (refused) {
        TRACE("queue pair 0x%x: refuses a connection", hand->number);
        object_drop(held);
        return;
    }
    connector_set_owner(connector, &hand_methods, hand);
    nd_status status = connector_accept(connector, hand->engine, &arguments, NULL);
    if (status != ND_SUCCESS) {
        TRACE("queue pair 0x%x: its peer's connection cannot be accepted: 0x%08x", hand->number, (unsigned)status);
        pthread_mutex_lock(&hand->lock);
        bool mine = hand->connector == connector;
        if (mine)
            hand->connector = NULL;
        pthread_mutex_unlock(&hand->lock);
        if (mine)
            connector_close(connector);
    }
    object_drop(held);
}

enum verdict { REFUSE, WAIT, ACCEPT };

/* Whether a connection is for this hand. */
static enum verdict judge(const struct hand *hand, const struct waiting *entry)
{
    const struct greeting *greeting = &entry->greeting;
    uint32_t psn = hand->psn;

    if (hand->active || hand->number != greeting->to || hand->peer_number != greeting->from ||
        !address_same((const struct sockaddr *)&hand->peer, (const struct sockaddr *)&entry->peer))
        return REFUSE;
    if ((psn != NO_PSN && psn != greeting->to_psn) ||
        (greeting->from_psn != NO_PSN && greeting->from_psn != hand->peer_psn))
        return REFUSE;
    return psn == NO_PSN && greeting->from_psn == NO_PSN ? WAIT : ACCEPT;
}

/* Under numbers_lock. For ACCEPT, *out is held. */
static enum verdict find(const struct waiting *entry, struct hand **out)
{
    struct soft_qp *qp = number_owner(entry->greeting.to);

    if (qp == NULL)
        return REFUSE;
    if (qp->hand == NULL)
        return WAIT;
    enum verdict verdict = judge(qp->hand, entry);
    if (verdict == ACCEPT) {
        *out = qp->hand;
        (*out)->references++;
    }
    return verdict;
}

static void arrived(void *owner, struct connector *connector)
{
    struct connector_offer offer = connector_offer(connector);
    struct waiting *entry = calloc(1, sizeof *entry), *surplus = NULL;
    struct hand *hand = NULL;

    UNUSED(owner);
    if (entry == NULL || !greeting_read(&offer, &entry->greeting) || !owner_is_trusted(&offer.local, &offer.peer)) {
        free(entry);
        connector_close(connector);
        return;
    }
    entry->connector = connector;
    entry->peer = offer.peer;
    pthread_mutex_lock(&numbers_lock);
    enum verdict verdict = find(entry, &hand);
    if (verdict == WAIT)
        surplus = waiting_keep(entry);
    pthread_mutex_unlock(&numbers_lock);

    waiting_drop(surplus);
    if (verdict == WAIT)
        return;
    free(entry);
    if (verdict == ACCEPT) {
        accept_for(hand, connector);
        hand_drop(hand);
    } else {
        TRACE("a connection by number is refused");
        connector_close(connector);
    }
}

static bool is_decided(const struct waiting *entry, const void *hand)
{
    return entry->greeting.to == ((const struct hand *)hand)->number && judge(hand, entry) != WAIT;
}

/* The hand has learned more about its peer. */
static void look_at_waiting(struct hand *hand)
{
    pthread_mutex_lock(&numbers_lock);
    struct waiting *decided = waiting_take(is_decided, hand);
    pthread_mutex_unlock(&numbers_lock);
    for (struct waiting *next; decided != NULL; decided = next) {
        next = decided->next;
        if (judge(hand, decided) == ACCEPT)
            accept_for(hand, decided->connector);
        else
            connector_close(decided->connector);
        free(decided);
    }
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
    struct hand *hand = calloc(1, sizeof *hand);
    if (hand == NULL)
        return ENOMEM;
    int order = memcmp(&own_gid, &attributes->ah_attr.grh.dgid, sizeof own_gid);
    hand->number = qp->ibv.qp_num;
    hand->peer_number = attributes->dest_qp_num;
    hand->active = hand->number < hand->peer_number || (hand->number == hand->peer_number && order < 0);
    pthread_mutex_lock(&numbers_lock);
    int error = hand->active ? 0 : number_listen(qp, &own, arrived, &hand->ear);
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
        hand->peer_psn = attributes->rq_psn & PSN_MASK;
        hand->psn = NO_PSN;
        hand->inbound = attributes->max_dest_rd_atomic;
        /* The limit of this side's reads comes with RTS, which may be later than the connection. */
        hand->outbound = MAX_READ_LIMIT;
        hand->wait_ms = RETRY_MS;
        hand->patience_ms = PATIENCE_MS;
        qp->hand = hand;
    }
    pthread_mutex_unlock(&numbers_lock);
    if (error != 0)
        free(hand);
    return error;
}

void hand_connect(struct soft_qp *qp)
{
    struct hand *hand = qp->hand;

    pthread_mutex_lock(&hand->lock);
    watch(hand);
    if (hand->active) {
        hand->references++;
        timer_set(&hand->timer, hand->wait_ms, timer_ran_out);
    }
    pthread_mutex_unlock(&hand->lock);
    look_at_waiting(hand);
}

void hand_ready(struct soft_qp *qp)
{
    struct hand *hand = qp->hand;
    uint32_t psn = qp->attributes.sq_psn & PSN_MASK;

    if (hand == NULL || hand->psn == psn)
        return;
    hand->psn = psn;
    if (!hand->active) {
        look_at_waiting(hand);
        return;
    }
    /* An attempt without the PSN is made again. */
    pthread_mutex_lock(&hand->lock);
    bool waits = !hand->done && !hand->connected;
    struct connector *incomplete = waits ? hand->connector : NULL;
    if (waits)
        hand->connector = NULL;
    bool timed = timer_cancel(&hand->timer);
    pthread_mutex_unlock(&hand->lock);
    if (incomplete != NULL)
        connector_close(incomplete);
    if (timed)
        hand_drop(hand);
    if (waits)
        try_to_connect(hand);
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

void hand_stop(struct soft_qp *qp)
{
    struct hand *hand = qp->hand;

    if (hand == NULL)
        return;
    pthread_mutex_lock(&hand->lock);
    struct connector *connector = hand->connected ? NULL : hand->connector;
    if (!hand->connected) {
        hand->done = true;
        hand->connector = NULL;
    }
    bool timed = timer_cancel(&hand->timer);
    pthread_mutex_unlock(&hand->lock);
    if (timed)
        hand_drop(hand);
    if (connector != NULL)
        connector_close(connector);
}

void hand_close(struct soft_qp *qp)
{
    pthread_mutex_lock(&numbers_lock);
    struct hand *hand = qp->hand;
    qp->hand = NULL;
    pthread_mutex_unlock(&numbers_lock);
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
    number_unlisten(hand->ear);
    hand_drop(hand);
}
