/* Event channels and events.
 *
 * An identifier counts its events: those in the list of its channel, those that the program took, and those that it
 * acknowledged. It is destroyed when every event that was taken is acknowledged.
 */
#include "cm.h"
#include "forking.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool cm_foreign(uint32_t generation)
{
    return generation != system_generation;
}

/* ---- Channels ---- */

EXPORT struct rdma_event_channel *rdma_create_event_channel(void)
{
    struct cm_channel *channel = NULL;

    if (CM_FAULT(NULL, PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL) != 0)
        return NULL;
    channel = event_source_new(EVENTS_OF_CM_CHANNEL, offsetof(struct cm_channel, events), false);
    if (channel == NULL)
        return NULL;
    soft_live[PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL] += soft_own_calls == 0;
    channel->rdma.fd = channel->events.fd;
    channel->generation = system_generation;
    return &channel->rdma;
}

static void event_free(struct cm_event *event)
{
    connector_close(event->connector);
    free(event);
}

/* Events that event_remove() takes out, in their order. */
struct taken {
    const struct cm_id *owner; /* NULL: the events of all */
    struct cm_event *first, **last;
    uint32_t count;
    bool moves; /* each of them gets a new ticket, in `tickets` */
    struct event *tickets, **last_ticket;
};

static bool take_out(const struct event *event, const void *what)
{
    struct taken *taken = (struct taken *)what;
    struct cm_event *content = ((const struct cm_ticket *)event)->what;

    if (taken->owner != NULL && content->owner != taken->owner)
        return false;
    if (taken->moves) {
        struct cm_ticket *ticket = calloc(1, sizeof *ticket);
        if (ticket == NULL)
            return false;
        ticket->what = content;
        *taken->last_ticket = &ticket->event;
        taken->last_ticket = &ticket->event.next;
    }
    content->next = NULL;
    *taken->last = content;
    taken->last = &content->next;
    taken->count++;
    return true;
}

static void free_all(struct cm_event *event)
{
    while (event != NULL) {
        struct cm_event *next = event->next;
        event_free(event);
        event = next;
    }
}

/* The identifier may be gone afterwards, unless the program has the event. */
static void left_queue(struct cm_id *id, bool given)
{
    pthread_mutex_lock(&id->lock);
    id->queued--;
    id->given += given;
    pthread_cond_broadcast(&id->acknowledged);
    pthread_mutex_unlock(&id->lock);
}

EXPORT void rdma_destroy_event_channel(struct rdma_event_channel *rdma)
{
    struct cm_channel *channel = (struct cm_channel *)rdma;
    struct taken taken = {.last = &taken.first};

    if (channel == NULL)
        return;
    if (cm_foreign(channel->generation)) {
        event_source_close(EVENTS_OF_CM_CHANNEL, &channel->events, NULL, NULL);
        return;
    }
    event_source_close(EVENTS_OF_CM_CHANNEL, &channel->events, take_out, &taken);
    for (struct cm_event *event = taken.first; event != NULL; event = event->next)
        left_queue(event->owner, false);
    free_all(taken.first);
    soft_live[PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL] -= soft_own_calls == 0;
}

void cm_own_channel_end(struct rdma_event_channel *channel)
{
    soft_own_calls++;
    rdma_destroy_event_channel(channel);
    soft_own_calls--;
}

static struct event_queue *queue_of(const struct cm_id *id)
{
    return id->rdma.channel != NULL ? &((struct cm_channel *)id->rdma.channel)->events : NULL;
}

/* ---- Queueing ---- */

struct cm_event *cm_event_new(struct cm_id *owner, enum rdma_cm_event_type type, int status)
{
    struct cm_event *event = calloc(1, sizeof *event);

    if (event == NULL)
        event = atomic_exchange(&owner->spare_event, NULL);
    if (event == NULL)
        return NULL;
    event->owner = owner;
    event->rdma.id = &owner->rdma;
    event->rdma.event = type;
    event->rdma.status = status;
    return event;
}

void cm_event_set_parameters(struct cm_event *event, const struct connector_offer *offer)
{
    struct rdma_conn_param *out = &event->rdma.param.conn;

    out->private_data_len = (uint8_t)(offer->private_size < UINT8_MAX ? offer->private_size : UINT8_MAX);
    if (out->private_data_len > 0) {
        memcpy(event->private_data, offer->private_data, out->private_data_len);
        out->private_data = event->private_data;
    }
    out->responder_resources = (uint8_t)offer->inbound;
    out->initiator_depth = (uint8_t)offer->outbound;
    /* What a peer that wants no limit says. iWARP has no such counts. */
    out->flow_control = 1;
    out->retry_count = out->rnr_retry_count = 7;
}

void cm_event_put(struct cm_event *event)
{
    struct cm_id *id = event->owner;
    struct cm_ticket *ticket = malloc(sizeof *ticket);

    if (ticket == NULL)
        ticket = atomic_exchange(&id->spare_ticket, NULL);
    pthread_mutex_lock(&id->lock);
    struct event_queue *queue = queue_of(id);
    bool put = ticket != NULL && queue != NULL && !id->destroyed;
    if (put) {
        ticket->what = event;
        put = event_put(queue, &ticket->event);
        id->queued += put;
    }
    pthread_mutex_unlock(&id->lock);
    if (!put) {
        free(ticket);
        event_free(event);
    }
}

void cm_report(struct cm_id *id, enum rdma_cm_event_type type, int status)
{
    struct cm_event *event = cm_event_new(id, type, status);

    if (event != NULL)
        cm_event_put(event);
}

void cm_events_forget(struct cm_id *id)
{
    struct taken taken = {.owner = id, .last = &taken.first};
    struct event_queue *queue = queue_of(id);

    if (queue != NULL)
        event_remove(queue, take_out, &taken);
    pthread_mutex_lock(&id->lock);
    id->queued -= taken.count;
    /* One that another thread is just taking counts as queued until that thread has it. */
    while (id->queued > 0 || id->done != id->given)
        pthread_cond_wait(&id->acknowledged, &id->lock);
    pthread_mutex_unlock(&id->lock);
    free_all(taken.first);
}

/* ---- Taking ---- */

/* Makes the identifier of a request. False: there was no memory, and the request is rejected. */
static bool take_request(struct cm_event *event)
{
    struct cm_id *listener = event->owner;

    pthread_mutex_lock(&listener->lock);
    listener->waiting_requests--;
    struct rdma_event_channel *channel = listener->sync ? NULL : listener->rdma.channel;
    pthread_mutex_unlock(&listener->lock);
    struct cm_id *id = cm_id_new(channel, listener->rdma.context, listener->rdma.ps, listener->rdma.qp_type);
    if (id == NULL)
        return false;
    if (cm_use_device(id) != 0) {
        rdma_destroy_id(&id->rdma);
        return false;
    }
    struct connector_offer offer = connector_offer(event->connector);
    cm_set_addresses(id, &offer.local, &offer.peer);
    if (cm_set_path(id) != 0) {
        rdma_destroy_id(&id->rdma);
        return false;
    }
    cm_event_set_parameters(event, &offer);
    id->inbound = offer.inbound;
    id->outbound = offer.outbound;
    id->state = CM_REQUESTED;
    id->connector = event->connector;
    connector_set_owner(id->connector, &cm_connector_owner, id);
    event->connector = NULL;
    event->rdma.id = &id->rdma;
    event->rdma.listen_id = &listener->rdma;
    return true;
}

/* What the program's thread does before it gets the event. False: the event is of no use to it. */
static bool prepare(struct cm_event *event)
{
    struct cm_id *id = event->owner;
    bool reported;
    int error;

    switch (event->rdma.event) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        return take_request(event);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
        if (id->rdma.qp == NULL)
            return true;
        error = cm_complete_connection(id);
        event->rdma.event = error == 0 ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_CONNECT_ERROR;
        event->rdma.status = -error;
        return true;
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_DISCONNECTED:
        pthread_mutex_lock(&id->lock);
        reported = id->attempt_reported;
        pthread_mutex_unlock(&id->lock);
        if (event->rdma.event == RDMA_CM_EVENT_REJECTED && id->rdma.qp != NULL)
            soft_qp_fail((struct soft_qp *)id->rdma.qp);
        return !reported;
    default:
        return true;
    }
}

EXPORT int rdma_get_cm_event(struct rdma_event_channel *rdma, struct rdma_cm_event **out)
{
    struct cm_channel *channel = (struct cm_channel *)rdma;

    if (channel == NULL || out == NULL)
        return cm_fail(EINVAL);
    if (CM_FAULT(NULL, PLACE_CALL_RDMA_GET_CM_EVENT) != 0)
        return -1;
    for (;;) {
        struct cm_ticket *ticket = (struct cm_ticket *)event_take(&channel->events);
        if (ticket == NULL)
            return -1;
        struct cm_event *event = ticket->what;
        free(ticket);
        bool useful = prepare(event);
        struct cm_id *id = event->owner;
        if (!useful)
            event_free(event);
        left_queue(id, useful);
        if (useful) {
            *out = &event->rdma;
            return 0;
        }
    }
}

EXPORT int rdma_ack_cm_event(struct rdma_cm_event *rdma)
{
    struct cm_event *event = (struct cm_event *)rdma;

    if (event == NULL)
        return cm_fail(EINVAL);
    struct cm_id *id = event->owner;
    if (!cm_foreign(id->generation)) {
        pthread_mutex_lock(&id->lock);
        id->done++;
        pthread_cond_broadcast(&id->acknowledged);
        pthread_mutex_unlock(&id->lock);
    }
    free(event);
    return 0;
}

static void acknowledge_own(struct cm_id *id)
{
    if (id->rdma.event != NULL)
        rdma_ack_cm_event(id->rdma.event);
    id->rdma.event = NULL;
}

int cm_wait(struct cm_id *id)
{
    if (!id->sync)
        return 0;
    acknowledge_own(id);
    if (SOFT_OWN(rdma_get_cm_event(id->rdma.channel, &id->rdma.event)) != 0)
        return -1;
    int status = id->rdma.event->status;
    if (status == 0)
        return 0;
    if (id->rdma.event->event == RDMA_CM_EVENT_REJECTED)
        return cm_fail(ECONNREFUSED);
    return cm_fail(status < 0 ? -status : status);
}

/* ---- Moving to another channel ---- */

EXPORT int rdma_migrate_id(struct rdma_cm_id *rdma, struct rdma_event_channel *channel)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || cm_foreign(id->generation) || (id->sync && channel == NULL) ||
        (channel != NULL && cm_foreign(((struct cm_channel *)channel)->generation)))
        return cm_fail(EINVAL);
    if (channel != NULL && !event_queue_open(&((struct cm_channel *)channel)->events))
        return cm_fail(EBADF);
    bool sync = channel == NULL;
    if (sync && (channel = SOFT_OWN(rdma_create_event_channel())) == NULL)
        return -1;
    if (channel == id->rdma.channel)
        return 0;

    struct rdma_event_channel *old = id->rdma.channel;
    struct taken taken = {.owner = id, .last = &taken.first, .moves = true, .last_ticket = &taken.tickets};
    pthread_mutex_lock(&id->lock);
    bool was_sync = id->sync;
    event_remove(queue_of(id), take_out, &taken);
    while (taken.tickets != NULL) {
        struct event *ticket = taken.tickets;
        taken.tickets = ticket->next;
        event_put(&((struct cm_channel *)channel)->events, ticket);
    }
    id->rdma.channel = channel;
    id->sync = sync;
    uint32_t given = id->given;
    pthread_mutex_unlock(&id->lock);

    if (was_sync) {
        acknowledge_own(id);
        cm_own_channel_end(old);
    }
    pthread_mutex_lock(&id->lock);
    while ((int32_t)(given - id->done) > 0)
        pthread_cond_wait(&id->acknowledged, &id->lock);
    pthread_mutex_unlock(&id->lock);
    return 0;
}

/* ---- Names ---- */

EXPORT const char *rdma_event_str(enum rdma_cm_event_type event)
{
#define NAME(type) [RDMA_CM_EVENT_##type] = "RDMA_CM_EVENT_" #type
    static const char *const names[] = {
        NAME(ADDR_RESOLVED),   NAME(ADDR_ERROR),       NAME(ROUTE_RESOLVED), NAME(ROUTE_ERROR),
        NAME(CONNECT_REQUEST), NAME(CONNECT_RESPONSE), NAME(CONNECT_ERROR),  NAME(UNREACHABLE),
        NAME(REJECTED),        NAME(ESTABLISHED),      NAME(DISCONNECTED),   NAME(DEVICE_REMOVAL),
        NAME(MULTICAST_JOIN),  NAME(MULTICAST_ERROR),  NAME(ADDR_CHANGE),    NAME(TIMEWAIT_EXIT),
    };
#undef NAME
    return (size_t)event < COUNT_OF(names) ? names[event] : "UNKNOWN EVENT";
}
