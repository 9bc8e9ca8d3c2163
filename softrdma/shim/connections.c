/* Faults of connections that librdmacm makes.
 *
 * An event that the shim made has to make the channel's descriptor readable, and only the library can do that. So the
 * shim has an identifier of its own look for the peer's address on the same channel. Its event comes soon, well or not,
 * and rdma_get_cm_event() gives the shim's event in place of it.
 */
#include "shim.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KICK_TIMEOUT_MS    2000
#define USE_NS             100000 /* so long, until it is looked again whether an identifier is in use */
#define REJECT_NO_LISTENER 8      /* of InfiniBand's connection manager, "invalid service id" */
#define REJECT_CONSUMER    28
#define ANY_TIME_LATER     (FAULT_BIT(FAULT_LOSE) | FAULT_BIT(FAULT_DISCONNECT) | FAULT_BIT(FAULT_MUTE))

struct identifier {
    struct object object; /* first */
    struct rdma_cm_id *id;
    unsigned library;
    uint32_t qp_num; /* of a queue pair that the program itself connects; 0: it has that of librdmacm, or none */
    unsigned uses;   /* without the lock: it must not be destroyed yet */
    bool waits;      /* calls with it wait for their end: it has no channel of the program's */
    bool removed;    /* DEVICE_REMOVAL has to be told */
    bool has_ended;  /* DISCONNECTED was told by the shim */
};

struct made_event {
    struct made_event *next;
    struct rdma_cm_event event;
    struct rdma_cm_id *kick; /* the shim's identifier; NULL: its event has come */
    bool given, dropped;
    char data[FAULT_MAX_DATA];
};

static struct made_event *made_events;

/* ---- Identifiers ---- */

void identifier_take(unsigned library, struct rdma_cm_id *id, bool waits)
{
    struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, id);

    if (identifier == NULL)
        identifier = object_new(OBJECT_ID, id, sizeof *identifier);
    if (identifier == NULL)
        return;
    identifier->id = id;
    identifier->library = library;
    identifier->waits = waits;
    /* A removal after some time has to be told also if the program opens no device itself. */
    if (has_faults_at(AT_ADAPTER))
        thread_wake();
}

static void identifier_release(struct rdma_cm_id *id)
{
    struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, id);

    if (identifier != NULL)
        identifier->uses--;
}

void identifier_forget(struct rdma_cm_id *id)
{
    struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, id);

    for (; identifier != NULL && identifier->uses > 0; identifier = (struct identifier *)object_find(OBJECT_ID, id)) {
        unlock();
        nanosleep(&(struct timespec){.tv_nsec = USE_NS}, NULL);
        lock();
    }
    if (identifier != NULL)
        object_free(&identifier->object);
    for (struct made_event *made = made_events; made != NULL; made = made->next)
        if (made->event.id == id && !made->given)
            made->dropped = true;
}

static bool waits(struct rdma_cm_id *id)
{
    const struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, id);

    return identifier != NULL && identifier->waits;
}

/* ---- Events ---- */

static void made_free(struct made_event *made)
{
    struct made_event **at = &made_events;

    while (*at != NULL && *at != made)
        at = &(*at)->next;
    if (*at != NULL)
        *at = made->next;
    free(made);
}

/* Without the lock: the library may call others of verbs. */
static int say(unsigned library, struct rdma_cm_id *id, enum rdma_cm_event_type type, int status,
               const struct fault *fault)
{
    struct made_event *made = calloc(1, sizeof *made);
    struct rdma_cm_id *kick = NULL;

    if (made == NULL)
        return ENOMEM;
    made->event.id = id;
    made->event.event = type;
    made->event.status = status;
    if (fault != NULL && fault->data_size > 0) {
        memcpy(made->data, fault->data, fault->data_size);
        made->event.param.conn.private_data = made->data;
        made->event.param.conn.private_data_len = (uint8_t)fault->data_size;
    }
    inside++;
    int error = REAL(library, rdma_create_id)(id->channel, &kick, NULL, RDMA_PS_TCP) != 0 ? errno : 0;
    if (error == 0) {
        lock();
        made->kick = kick;
        made->next = made_events;
        made_events = made;
        unlock();
        if (REAL(library, rdma_resolve_addr)(kick, NULL, rdma_get_peer_addr(id), KICK_TIMEOUT_MS) != 0) {
            error = errno;
            lock();
            made_free(made);
            unlock();
            REAL(library, rdma_destroy_id)(kick);
        }
    } else
        free(made);
    inside--;
    return error;
}

/* The event is the program's, unless it is NULL. */
struct rdma_cm_event *connection_event(unsigned library, struct rdma_cm_event *event)
{
    struct rdma_cm_event *result = event;

    lock();
    const struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, event->id);
    bool twice = event->event == RDMA_CM_EVENT_DISCONNECTED && identifier != NULL && identifier->has_ended;
    struct made_event *made = made_events;
    while (made != NULL && (made->kick == NULL || made->kick != event->id))
        made = made->next;
    struct rdma_cm_id *kick = made != NULL ? made->kick : NULL;
    if (made != NULL) {
        made->kick = NULL;
        made->given = true;
        result = made->dropped ? NULL : &made->event;
        struct qp *qp = result != NULL && result->id->qp != NULL ? qp_of(result->id->qp) : NULL;
        /* As the libraries do. */
        if (qp != NULL && result->event == RDMA_CM_EVENT_REJECTED) {
            qp_fail(qp);
            queue_deliver(qp, &qp->sends);
        }
        if (made->dropped)
            made_free(made);
    }
    unlock();
    if (kick == NULL && !twice)
        return event;
    inside++;
    REAL(library, rdma_ack_cm_event)(event);
    if (kick != NULL)
        REAL(library, rdma_destroy_id)(kick);
    inside--;
    return twice ? NULL : result;
}

bool connection_acknowledged(struct rdma_cm_event *event)
{
    lock();
    struct made_event *made = made_events;
    while (made != NULL && &made->event != event)
        made = made->next;
    bool own = made != NULL;
    if (own)
        made_free(made);
    unlock();
    return own;
}

void connections_of_channel_end(unsigned library, struct rdma_event_channel *channel)
{
    for (;;) {
        lock();
        struct made_event *made = made_events;
        while (made != NULL && (made->kick == NULL || made->kick->channel != channel))
            made = made->next;
        struct rdma_cm_id *kick = made != NULL ? made->kick : NULL;
        if (made != NULL)
            made_free(made);
        unlock();
        if (kick == NULL)
            return;
        inside++;
        REAL(library, rdma_destroy_id)(kick);
        inside--;
    }
}

/* ---- Queue pairs ---- */

struct numbered {
    const struct ibv_device *device;
    uint32_t qp_num;
    struct qp *found;
};

static void is_numbered(struct object *object, void *what)
{
    struct numbered *numbered = what;
    struct qp *qp = (struct qp *)object;

    if (qp->ibv->qp_num == numbered->qp_num && qp->ibv->context->device == numbered->device)
        numbered->found = qp;
}

void identifier_uses(struct rdma_cm_id *id, const struct rdma_conn_param *parameters)
{
    struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, id);

    if (identifier != NULL && parameters != NULL && id->qp == NULL)
        identifier->qp_num = parameters->qp_num;
}

/* librdmacm's context of the device is another one than the program's. */
struct qp *identifier_qp(struct rdma_cm_id *id)
{
    const struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, id);

    if (id->verbs == NULL || identifier == NULL)
        return NULL;
    if (id->qp != NULL)
        return qp_of(id->qp);
    struct numbered numbered = {id->verbs->device, identifier->qp_num, NULL};
    if (identifier->qp_num != 0)
        each_object(OBJECT_QP, is_numbered, &numbered);
    return numbered.found;
}

/* ---- Faults ---- */

static const struct fault *fault_of(struct rdma_cm_id *id, bool passive)
{
    uint8_t peer[16] = {[10] = 0xFF, [11] = 0xFF};
    const struct sockaddr *address = &id->route.addr.dst_addr;

    if (address->sa_family == AF_INET6)
        memcpy(peer, &((const struct sockaddr_in6 *)address)->sin6_addr, sizeof peer);
    else
        memcpy(peer + 12, &((const struct sockaddr_in *)address)->sin_addr, 4);
    lock();
    const struct qp *qp = identifier_qp(id);
    const struct place place = {
        .at = AT_CONNECTION,
        .queue_pair = qp != NULL ? qp->number : 0,
        .peer = peer,
        .kinds = passive ? ANY_TIME_LATER : 0,
        .caller = caller,
    };
    unlock();
    struct scenario *now = scenario_now();
    return now != NULL ? scenario_at(now, &place) : NULL;
}

static void end_later(struct rdma_cm_id *id, const struct fault *fault)
{
    lock();
    struct qp *qp = identifier_qp(id);
    if (qp != NULL) {
        qp->ends = true;
        qp->ends_after = fault->bytes;
        qp->sent = 0;
    }
    unlock();
}

bool connection_fails(unsigned library, struct rdma_cm_id *id, int *result)
{
    const struct fault *fault = fault_of(id, false);
    bool iwarp =
        id->verbs != NULL && id->verbs->cmd_fd >= 0 && id->verbs->device->transport_type == IBV_TRANSPORT_IWARP;
    enum rdma_cm_event_type type = RDMA_CM_EVENT_REJECTED;
    int status;

    switch (fault != NULL ? fault->kind : FAULT_KINDS) {
    case FAULT_REFUSE:
        status = iwarp ? -ECONNREFUSED : REJECT_NO_LISTENER;
        break;
    case FAULT_REJECT:
        status = iwarp ? -ECONNREFUSED : REJECT_CONSUMER;
        break;
    case FAULT_TIME_OUT:
        type = RDMA_CM_EVENT_UNREACHABLE;
        status = -ETIMEDOUT;
        break;
    case FAULT_DISCONNECT:
        end_later(id, fault);
        return false;
    default:
        return false;
    }
    lock();
    bool directly = waits(id);
    unlock();
    int error = directly ? (fault->kind == FAULT_TIME_OUT ? ETIMEDOUT : ECONNREFUSED)
                         : say(library, id, type, status, fault->kind == FAULT_REJECT ? fault : NULL);
    if (error != 0)
        errno = error;
    *result = error != 0 ? -1 : 0;
    return true;
}

void connection_accepted(struct rdma_cm_id *id)
{
    const struct fault *fault = fault_of(id, true);

    if (fault != NULL && fault->kind == FAULT_DISCONNECT)
        end_later(id, fault);
}

struct search {
    const struct qp *qp;
    struct identifier *found;
};

static void has_qp(struct object *object, void *what)
{
    struct search *search = what;
    struct identifier *identifier = (struct identifier *)object;

    if (identifier_qp(identifier->id) == search->qp)
        search->found = identifier;
}

/* The queue pair, whose connection has to end now, as if the peer had ended it. Gives up the lock meanwhile. The peer
   is told, but the library would tell this end only when the peer has answered. */
void connection_end(struct qp *qp)
{
    struct search search = {qp, NULL};
    const struct ibv_qp *ibv = qp->ibv;

    qp->ends = false;
    each_object(OBJECT_ID, has_qp, &search);
    if (search.found == NULL) {
        qp_fail(qp);
        queue_deliver(qp, &qp->sends);
        return;
    }
    struct rdma_cm_id *id = search.found->id;
    unsigned library = search.found->library;
    bool hears = !search.found->waits && id->channel != NULL;
    search.found->has_ended = hears;
    search.found->uses++;
    unlock();
    if (hears && say(library, id, RDMA_CM_EVENT_DISCONNECTED, 0, NULL) != 0) {
        lock();
        struct identifier *identifier = (struct identifier *)object_find(OBJECT_ID, id);
        if (identifier != NULL)
            identifier->has_ended = false;
        unlock();
    }
    inside++;
    REAL(library, rdma_disconnect)(id);
    inside--;
    lock();
    identifier_release(id);
    qp = (struct qp *)object_find(OBJECT_QP, ibv);
    if (qp != NULL) {
        qp_fail(qp);
        queue_deliver(qp, &qp->sends);
    }
}

void connection_begins(struct rdma_cm_id *id)
{
    lock();
    struct qp *qp = identifier_qp(id);
    if (qp != NULL && qp->ends && qp->ends_after == 0)
        connection_end(qp);
    unlock();
}

static void mark_removed(struct object *object, void *what)
{
    struct identifier *identifier = (struct identifier *)object;

    (void)what;
    identifier->removed = identifier->id->verbs != NULL && !identifier->waits && identifier->id->channel != NULL;
}

void connections_on_removal(void)
{
    each_object(OBJECT_ID, mark_removed, NULL);
    thread_wake();
}

static void find_removed(struct object *object, void *what)
{
    if (((struct identifier *)object)->removed)
        *(struct identifier **)what = (struct identifier *)object;
}

/* Called by the thread, with the lock, which it gives up meanwhile. */
void connections_tell_removal(void)
{
    for (;;) {
        struct identifier *identifier = NULL;
        each_object(OBJECT_ID, find_removed, &identifier);
        if (identifier == NULL)
            return;
        identifier->removed = false;
        identifier->uses++;
        struct rdma_cm_id *id = identifier->id;
        unsigned library = identifier->library;
        unlock();
        say(library, id, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, NULL);
        lock();
        identifier_release(id);
    }
}
