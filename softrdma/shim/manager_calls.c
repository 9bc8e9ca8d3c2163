/* The functions that stand in for those of librdmacm. */
#include "shim.h"
#include "stand_ins.h"

static struct rdma_event_channel *stand_in_rdma_create_event_channel(unsigned library)
{
    int error = may_open() ? call_fault(PLACE_CALL_RDMA_CREATE_EVENT_CHANNEL, NULL, (uint64_t)live[LIVE_EVENT_CHANNEL])
                           : EINVAL;

    if (error != 0)
        return null_with(error);
    inside++;
    struct rdma_event_channel *channel = REAL(library, rdma_create_event_channel)();
    inside--;
    live_change(LIVE_EVENT_CHANNEL, channel != NULL);
    return channel;
}

static void stand_in_rdma_destroy_event_channel(unsigned library, struct rdma_event_channel *channel)
{
    connections_of_channel_end(library, channel);
    REAL(library, rdma_destroy_event_channel)(channel);
    live_change(LIVE_EVENT_CHANNEL, -1);
}

#define INSIDE(call)         \
    ({                       \
        inside++;            \
        int result = (call); \
        inside--;            \
        result;              \
    })

static void note_id(unsigned library, struct rdma_cm_id *id, bool waits)
{
    lock();
    identifier_take(library, id, waits);
    unlock();
}

static void forget_id(struct rdma_cm_id *id)
{
    lock();
    identifier_forget(id);
    unlock();
}

static int stand_in_rdma_create_id(unsigned library, struct rdma_event_channel *channel, struct rdma_cm_id **id,
                                   void *context, enum rdma_port_space space)
{
    int error = may_open() ? call_fault(PLACE_CALL_RDMA_CREATE_ID, NULL, (uint64_t)live[LIVE_ID]) : EINVAL;

    if (error != 0)
        return minus_with(error);
    int result = INSIDE(REAL(library, rdma_create_id)(channel, id, context, space));
    if (result == 0)
        note_id(library, *id, channel == NULL);
    live_change(LIVE_ID, result == 0);
    return result;
}

/* What librdmacm made for an identifier, and softverbs without asking anybody. */
static void forget_of_id(struct rdma_cm_id *id)
{
    struct ibv_comp_channel *channels[] = {id->send_cq_channel, id->recv_cq_channel};

    lock();
    qp_destroyed(id->qp);
    cq_destroyed(id->send_cq);
    cq_destroyed(id->recv_cq);
    for (unsigned i = 0; i < COUNT_OF(channels); i++) {
        struct channel *channel =
            channels[i] != NULL ? (struct channel *)object_find(OBJECT_CHANNEL, channels[i]) : NULL;
        if (channel != NULL)
            channel_forget(channel);
    }
    unlock();
}

static void take_of_id(unsigned library, struct rdma_cm_id *id)
{
    /* librdmacm never closes its contexts. A program that has opened the shim itself also has connections without it.
     */
    if (id == NULL || id->verbs == NULL || (is_hosted && id->qp == NULL))
        return;
    watch_forks(library);
    lock();
    if (context_of(library, id->verbs) != NULL && id->qp != NULL)
        qp_of(id->qp);
    unlock();
}

/* The queue pair that a call of librdmacm has made, if it has. */
static void created_qp(unsigned library, struct rdma_cm_id *id)
{
    take_of_id(library, id);
    live_change(LIVE_QP, id->qp != NULL);
}

static int stand_in_rdma_destroy_id(unsigned library, struct rdma_cm_id *id)
{
    forget_id(id);
    int result = INSIDE(REAL(library, rdma_destroy_id)(id));

    live_change(LIVE_ID, -(result == 0));
    return result;
}

static int stand_in_rdma_create_ep(unsigned library, struct rdma_cm_id **id, struct rdma_addrinfo *info,
                                   struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
    int error = may_open() ? call_fault(PLACE_CALL_RDMA_CREATE_ID, NULL, (uint64_t)live[LIVE_ID]) : EINVAL;

    if (error != 0)
        return minus_with(error);
    int result = INSIDE(REAL(library, rdma_create_ep)(id, info, pd, attributes));
    if (result == 0) {
        note_id(library, *id, true);
        created_qp(library, *id);
    }
    live_change(LIVE_ID, result == 0);
    return result;
}

static void stand_in_rdma_destroy_ep(unsigned library, struct rdma_cm_id *id)
{
    int has_one = id->qp != NULL;

    forget_of_id(id);
    forget_id(id);
    inside++;
    REAL(library, rdma_destroy_ep)(id);
    inside--;
    live_change(LIVE_QP, -has_one);
    live_change(LIVE_ID, -1);
}

static void connection_parameters(struct rdma_cm_id *id, const struct rdma_conn_param *parameters)
{
    lock();
    identifier_uses(id, parameters);
    unlock();
}

/* Counted for its queue pair. */
static int fault_with(enum fault_call call, struct rdma_cm_id *id)
{
    lock();
    int error = call_fault_locked(call, identifier_qp(id), 0);
    unlock();
    return error;
}

/* Calls that have nothing to them but their faults. The identifier may have a context afterwards. */
#define PLAIN(name, call, identifier, parameters, ...)         \
    static int stand_in_##name parameters                      \
    {                                                          \
        int error = fault_with(call, identifier);              \
                                                               \
        if (error != 0)                                        \
            return minus_with(error);                          \
        int result = INSIDE(REAL(library, name)(__VA_ARGS__)); \
        if (result == 0)                                       \
            take_of_id(library, identifier);                   \
        return result;                                         \
    }
PLAIN(rdma_bind_addr, PLACE_CALL_RDMA_BIND_ADDR, id,
      (unsigned library, struct rdma_cm_id *id, struct sockaddr *address), id, address)
PLAIN(rdma_resolve_addr, PLACE_CALL_RDMA_RESOLVE_ADDR, id,
      (unsigned library, struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int timeout_ms), id, from,
      to, timeout_ms)
PLAIN(rdma_resolve_route, PLACE_CALL_RDMA_RESOLVE_ROUTE, id, (unsigned library, struct rdma_cm_id *id, int timeout_ms),
      id, timeout_ms)
PLAIN(rdma_listen, PLACE_CALL_RDMA_LISTEN, id, (unsigned library, struct rdma_cm_id *id, int backlog), id, backlog)
PLAIN(rdma_establish, PLACE_CALL_RDMA_ESTABLISH, id, (unsigned library, struct rdma_cm_id *id), id)
PLAIN(rdma_reject, PLACE_CALL_RDMA_REJECT, id,
      (unsigned library, struct rdma_cm_id *id, const void *data, uint8_t size), id, data, size)

static int stand_in_rdma_get_request(unsigned library, struct rdma_cm_id *listener, struct rdma_cm_id **id)
{
    int error = fault_with(PLACE_CALL_RDMA_GET_REQUEST, listener);

    if (error != 0)
        return minus_with(error);
    int result = INSIDE(REAL(library, rdma_get_request)(listener, id));
    if (result == 0) {
        note_id(library, *id, true);
        created_qp(library, *id);
        live_change(LIVE_ID, 1);
    }
    return result;
}

static int stand_in_rdma_connect(unsigned library, struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
    connection_parameters(id, parameters);
    int error = fault_with(PLACE_CALL_RDMA_CONNECT, id), result;

    if (error != 0)
        return minus_with(error);
    if (connection_fails(library, id, &result))
        return result;
    result = INSIDE(REAL(library, rdma_connect)(id, parameters));
    if (result == 0)
        take_of_id(library, id);
    return result;
}

static int stand_in_rdma_accept(unsigned library, struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
    connection_parameters(id, parameters);
    int error = fault_with(PLACE_CALL_RDMA_ACCEPT, id);

    if (error != 0)
        return minus_with(error);
    connection_accepted(id);
    int result = INSIDE(REAL(library, rdma_accept)(id, parameters));
    if (result == 0)
        take_of_id(library, id);
    return result;
}

/* The real call makes the queue pair by ibv_create_qp(), or softverbs in its own way. */
static int create_qp_fault(void)
{
    int error = call_fault(PLACE_CALL_RDMA_CREATE_QP, NULL, (uint64_t)live[LIVE_QP]);

    return error != 0 ? error : call_fault(PLACE_CALL_CREATE_QP, NULL, (uint64_t)live[LIVE_QP]);
}

static int stand_in_rdma_create_qp(unsigned library, struct rdma_cm_id *id, struct ibv_pd *pd,
                                   struct ibv_qp_init_attr *attributes)
{
    int error = create_qp_fault();

    if (error != 0)
        return minus_with(error);
    take_of_id(library, id);
    int result = INSIDE(REAL(library, rdma_create_qp)(id, pd, attributes));
    if (result == 0)
        created_qp(library, id);
    return result;
}

static int stand_in_rdma_create_qp_ex(unsigned library, struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attributes)
{
    int error = create_qp_fault();

    if (error != 0)
        return minus_with(error);
    take_of_id(library, id);
    int result = INSIDE(REAL(library, rdma_create_qp_ex)(id, attributes));
    if (result == 0)
        created_qp(library, id);
    return result;
}

static void stand_in_rdma_destroy_qp(unsigned library, struct rdma_cm_id *id)
{
    int has_one = id->qp != NULL;

    forget_of_id(id);
    inside++;
    REAL(library, rdma_destroy_qp)(id);
    inside--;
    live_change(LIVE_QP, -has_one);
}

static int stand_in_rdma_disconnect(unsigned library, struct rdma_cm_id *id)
{
    int error = fault_with(PLACE_CALL_RDMA_DISCONNECT, id);

    if (error != 0)
        return minus_with(error);
    int result = INSIDE(REAL(library, rdma_disconnect)(id));
    lock();
    struct qp *qp = identifier_qp(id);
    if (result == 0 && qp != NULL && id->qp != NULL)
        qp_in_error_state(qp);
    unlock();
    return result;
}

static int stand_in_rdma_get_cm_event(unsigned library, struct rdma_event_channel *channel,
                                      struct rdma_cm_event **event)
{
    int error = call_fault(PLACE_CALL_RDMA_GET_CM_EVENT, NULL, 0);

    if (error != 0)
        return minus_with(error);
    struct rdma_cm_event *given = NULL;
    while (given == NULL) {
        if (INSIDE(REAL(library, rdma_get_cm_event)(channel, event)) != 0)
            return -1;
        given = connection_event(library, *event);
    }
    *event = given;
    if (given->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        note_id(library, given->id, false);
        live_change(LIVE_ID, 1);
    }
    take_of_id(library, given->id);
    if (given->event == RDMA_CM_EVENT_ESTABLISHED)
        connection_begins(given->id);
    return 0;
}

static int stand_in_rdma_ack_cm_event(unsigned library, struct rdma_cm_event *event)
{
    return connection_acknowledged(event) ? 0 : REAL(library, rdma_ack_cm_event)(event);
}

STAND_INS(manager_stand_ins, RDMA_NAMES)
