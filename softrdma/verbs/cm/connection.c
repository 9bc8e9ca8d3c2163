/* Connections of identifiers: both sides' calls, and the events of their connectors. */
#include "cm.h"
#include "address.h"
#include "face.h"
#include "trace.h"
#include "watch.h"

#include <stdlib.h>
#include <string.h>

/* Reasons of InfiniBand's connection manager, which REJECTED reports. */
#define REJECT_NO_LISTENER     8
#define REJECT_OTHER_TRANSPORT 9
#define REJECT_CONSUMER        28
/* How long a queue pair's number stays unusable after a connection, as far as programs see. */
#define TIMEWAIT_MS   1000
#define MAX_BACKLOG   1024
#define DEFAULT_LIMIT UINT8_MAX

int cm_connection_errno(nd_status status)
{
    return status == ND_CONNECTION_INVALID ? ECONNRESET : soft_errno(status);
}

struct connector *cm_connector_hold(struct cm_id *id)
{
    pthread_mutex_lock(&id->lock);
    struct connector *connector = id->connector;
    if (connector != NULL)
        object_hold(&connector->object);
    pthread_mutex_unlock(&id->lock);
    return connector;
}

void cm_connector_drop(struct connector *connector)
{
    object_drop(&connector->object);
}

/* ---- The queue pair ---- */

/* The queue pair of the connection: that of the identifier, or the one that the program names. */
static struct soft_qp *find_qp(const struct cm_id *id, const struct rdma_conn_param *parameters)
{
    if (id->rdma.qp != NULL)
        return (struct soft_qp *)id->rdma.qp;
    return parameters != NULL ? soft_qp_numbered(parameters->qp_num) : NULL;
}

static struct queue_pair *hold_engine_qp(struct soft_qp *qp)
{
    pthread_mutex_lock(&qp->lock);
    struct queue_pair *result = qp->qp;
    object_hold(&result->object);
    pthread_mutex_unlock(&qp->lock);
    return result;
}

static void own_qp_failed(const struct cm_id *id)
{
    if (id->rdma.qp != NULL)
        soft_qp_fail((struct soft_qp *)id->rdma.qp);
}

/* How often the peer's Sends are tried again without a Receive is up to this side. */
static void set_patience(struct queue_pair *qp, const struct rdma_conn_param *parameters)
{
    qp->lets_wait = parameters == NULL || parameters->rnr_retry_count >= SOFT_RNR_RETRY_ENDLESS;
}

/* The lock keeps rdma_destroy_qp() waiting. */
static void tell_qp_of_the_end(struct cm_id *id)
{
    pthread_mutex_lock(&id->lock);
    struct soft_qp *qp = id->qp_number != 0 ? soft_qp_hold(id->qp_number) : NULL;
    if (qp != NULL) {
        soft_qp_ended(qp);
        soft_qp_drop(qp);
    }
    pthread_mutex_unlock(&id->lock);
}

/* ---- Events of the connector, on any thread ---- */

static void report_failure(struct cm_id *id, bool active, nd_status status)
{
    switch (status) {
    case ND_CONNECTION_REFUSED:
        cm_report(id, RDMA_CM_EVENT_REJECTED, active ? REJECT_NO_LISTENER : REJECT_CONSUMER);
        break;
    case ND_CONNECTION_INVALID:
        cm_report(id, RDMA_CM_EVENT_REJECTED, REJECT_OTHER_TRANSPORT);
        break;
    case ND_TIMEOUT:
    case ND_IO_TIMEOUT:
        cm_report(id, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
        break;
    case ND_NETWORK_UNREACHABLE:
    case ND_HOST_UNREACHABLE:
        cm_report(id, RDMA_CM_EVENT_UNREACHABLE, -soft_errno(status));
        break;
    default:
        cm_report(id, RDMA_CM_EVENT_CONNECT_ERROR, -cm_connection_errno(status));
    }
}

/* CONNECT_RESPONSE, or REJECTED by the peer's program. */
static void report_reply(struct cm_id *id, struct connector *connector, enum rdma_cm_event_type type, int status)
{
    struct cm_event *event = cm_event_new(id, type, status);
    struct connector_offer offer = connector_offer(connector);

    pthread_mutex_lock(&id->lock);
    id->inbound = offer.inbound;
    id->outbound = offer.outbound;
    if (offer.local.ss_family != 0)
        id->rdma.route.addr.src_storage = offer.local;
    pthread_mutex_unlock(&id->lock);
    if (event == NULL)
        return;
    cm_event_set_parameters(event, &offer);
    cm_event_put(event);
}

static void timewait_over(struct timer *timer)
{
    struct cm_id *id = CONTAINER_OF(timer, struct cm_id, timer);

    cm_report(id, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
    cm_id_drop(id);
}

static void report_end(struct cm_id *id)
{
    tell_qp_of_the_end(id);
    cm_report(id, RDMA_CM_EVENT_DISCONNECTED, 0);
    pthread_mutex_lock(&id->lock);
    if (!id->destroyed) {
        cm_id_hold(id);
        timer_set(&id->timer, TIMEWAIT_MS, timewait_over);
    }
    pthread_mutex_unlock(&id->lock);
}

static void take_news(void *owner, struct connector *connector, enum connector_news news, nd_status status)
{
    static const enum cm_state states[] = {
        [NEWS_OFFERED] = CM_OFFERED,   [NEWS_REFUSED] = CM_FAILED,       [NEWS_FAILED] = CM_FAILED,
        [NEWS_OFFER_LOST] = CM_FAILED, [NEWS_ACCEPT_FAILED] = CM_FAILED, [NEWS_ESTABLISHED] = CM_ESTABLISHED,
        [NEWS_ENDED] = CM_ENDED,       [NEWS_DISCONNECTED] = CM_ENDED,
    };
    struct cm_id *id = owner;

    TRACE("identifier %p: news %d of its connector, status 0x%08x", owner, (int)news, (unsigned)status);
    cm_set_state(id, states[news]);
    /* The removal is told by an event of its own. */
    if (adapter_gone(adapter_of(id->rdma.verbs))) {
        if (news == NEWS_ENDED || news == NEWS_DISCONNECTED)
            tell_qp_of_the_end(id);
        return;
    }
    switch (news) {
    case NEWS_OFFERED:
        report_reply(id, connector, RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
        break;
    case NEWS_REFUSED:
        report_reply(id, connector, RDMA_CM_EVENT_REJECTED, REJECT_CONSUMER);
        break;
    case NEWS_FAILED:
    case NEWS_OFFER_LOST:
    case NEWS_ACCEPT_FAILED:
        report_failure(id, news != NEWS_ACCEPT_FAILED, status);
        break;
    case NEWS_ESTABLISHED:
        cm_report(id, RDMA_CM_EVENT_ESTABLISHED, 0);
        break;
    case NEWS_ENDED:
    case NEWS_DISCONNECTED:
        report_end(id);
        break;
    case NEWS_NONE:
        break;
    }
}

const struct connector_owner cm_connector_owner = {.tell = take_news, .make_socket = soft_make_socket};

/* ---- Parameters ---- */

struct request {
    struct connection_arguments arguments;
    uint8_t private_data[CM_MAX_PRIVATE_DATA];
};

static uint32_t limit_of(uint8_t asked, uint32_t otherwise)
{
    return asked == DEFAULT_LIMIT ? otherwise : asked;
}

/* The defaults are the device's limits when connecting, and what the peer asks for when accepting. */
static int take_parameters(struct cm_id *id, const struct rdma_conn_param *in, uint32_t inbound, uint32_t outbound,
                           struct request *out)
{
    struct connection_arguments *arguments = &out->arguments;
    size_t size = in != NULL && in->private_data != NULL ? in->private_data_len : 0;

    if (id->connect_size + size > CM_MAX_PRIVATE_DATA)
        return EINVAL;
    if (id->connect_size > 0)
        memcpy(out->private_data, id->connect_data, id->connect_size);
    if (size > 0)
        memcpy(out->private_data + id->connect_size, in->private_data, size);
    arguments->private_data = out->private_data;
    arguments->private_size = (uint32_t)(id->connect_size + size);
    arguments->inbound = limit_of(in != NULL ? in->responder_resources : DEFAULT_LIMIT, inbound);
    arguments->outbound = limit_of(in != NULL ? in->initiator_depth : DEFAULT_LIMIT, outbound);
    return arguments->inbound > MAX_READ_LIMIT || arguments->outbound > MAX_READ_LIMIT ? EINVAL : 0;
}

/* ---- The active side ---- */

/* The connection is being made. Its first event may have come already. */
static int begin(struct cm_id *id, struct soft_qp *qp, const struct rdma_conn_param *parameters,
                 const struct request *request)
{
    struct sockaddr_storage peer = id->rdma.route.addr.dst_storage;
    socket_handle handle = cm_take_socket(id, 0), beside = cm_take_socket(id, 1);
    struct queue_pair *engine_qp = hold_engine_qp(qp);
    struct connector *connector;

    if (beside != NO_SOCKET)
        socket_discard(beside);
    nd_status status = soft_connector_create(engine_qp->object.adapter, &cm_connector_owner, id, handle, &connector);
    if (status != ND_SUCCESS) {
        object_drop(&engine_qp->object);
        return cm_connection_errno(status);
    }
    pthread_mutex_lock(&id->lock);
    id->connector = connector;
    id->qp_number = qp->ibv.qp_num;
    uint8_t service_type = id->service_type;
    pthread_mutex_unlock(&id->lock);
    soft_connector_set_service_type(connector, service_type);
    struct connection_arguments arguments = request->arguments;
    arguments.insists = true;
    set_patience(engine_qp, parameters);
    status = connector_connect(connector, engine_qp, &peer, &arguments, NULL);
    object_drop(&engine_qp->object);
    if (status != ND_SUCCESS) {
        pthread_mutex_lock(&id->lock);
        id->connector = NULL;
        id->qp_number = 0;
        pthread_mutex_unlock(&id->lock);
        connector_close(connector);
        return cm_connection_errno(status);
    }
    struct sockaddr_storage local = connector_offer(connector).local;
    pthread_mutex_lock(&id->lock);
    if (id->state == CM_CONNECTING && local.ss_family == peer.ss_family)
        address_set_port(&id->rdma.route.addr.src_addr, address_port((struct sockaddr *)&local));
    pthread_mutex_unlock(&id->lock);
    return 0;
}

EXPORT int rdma_connect(struct rdma_cm_id *rdma, struct rdma_conn_param *parameters)
{
    struct cm_id *id = cm_id(rdma);
    struct request request;

    if (id == NULL || cm_foreign(id->generation))
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_CONNECT) != 0)
        return -1;
    struct soft_qp *qp = find_qp(id, parameters);
    int error = qp == NULL ? EINVAL : take_parameters(id, parameters, MAX_READ_LIMIT, MAX_READ_LIMIT, &request);
    if (error == 0 && !cm_advance(id, CM_ROUTE_RESOLVED, CM_CONNECTING))
        error = EINVAL;
    if (error != 0)
        return cm_fail(error);
    error = begin(id, qp, parameters, &request);
    if (error != 0) {
        cm_set_state(id, CM_ROUTE_RESOLVED);
        return cm_fail(error);
    }
    free(id->connect_data);
    id->connect_data = NULL;
    id->connect_size = 0;
    return cm_wait(id);
}

int cm_complete_connection(struct cm_id *id)
{
    struct connector *connector = cm_connector_hold(id);
    int error = connector != NULL && cm_advance(id, CM_OFFERED, CM_ESTABLISHED) ? 0 : EINVAL;

    if (error == 0) {
        cm_make_qp_ready(id);
        nd_status status = connector_complete(connector, NULL);
        /* It may have come and gone within the call. Then the program hears of both. */
        if (status != ND_SUCCESS && cm_advance(id, CM_ESTABLISHED, CM_FAILED))
            error = status == ND_DEVICE_REMOVED ? ENODEV : ECONNRESET;
    }
    if (connector != NULL)
        cm_connector_drop(connector);
    if (error != 0) {
        pthread_mutex_lock(&id->lock);
        id->attempt_reported = true;
        pthread_mutex_unlock(&id->lock);
        own_qp_failed(id);
    }
    return error;
}

EXPORT int rdma_establish(struct rdma_cm_id *rdma)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || cm_foreign(id->generation) || id->rdma.qp != NULL)
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_ESTABLISH) != 0)
        return -1;
    return cm_result(cm_complete_connection(id));
}

/* ---- The passive side ---- */

static void request_arrived(void *owner, struct connector *connector)
{
    struct cm_id *id = owner;
    struct cm_event *event = cm_event_new(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0);

    pthread_mutex_lock(&id->lock);
    bool take = event != NULL && !id->destroyed && id->waiting_requests < id->backlog;
    id->waiting_requests += take;
    pthread_mutex_unlock(&id->lock);
    if (take) {
        event->connector = connector;
        cm_event_put(event);
    } else {
        free(event);
        connector_close(connector);
    }
}

static int listen_on(struct cm_id *id, int which)
{
    struct ibv_context *context = soft_shared_context();
    socket_handle handle = cm_take_socket(id, which);
    struct listener *listener;
    int on = 1;

    if (handle == NO_SOCKET)
        return which == 0 ? EINVAL : 0;
    if (context == NULL || adapter_gone(adapter_of(context))) {
        socket_discard(handle);
        return ENODEV;
    }
    /* For a socket that was bound to any port: the next listener on this port need not wait for TCP's timeouts. */
    setsockopt(handle, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    socket_set_service_type(handle, id->service_type);
    nd_status status = listener_create(adapter_of(context), handle, request_arrived, id, &listener);
    if (status != ND_SUCCESS)
        return soft_errno(status);
    pthread_mutex_lock(&id->lock);
    id->listeners[which] = listener;
    pthread_mutex_unlock(&id->lock);
    return 0;
}

EXPORT int rdma_listen(struct rdma_cm_id *rdma, int backlog)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || cm_foreign(id->generation))
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_LISTEN) != 0)
        return -1;
    if (!cm_is_connected_type(id))
        return cm_fail(EPROTONOSUPPORT);
    struct sockaddr_in any = {.sin_family = AF_INET};
    if (cm_state_of(id) == CM_IDLE && SOFT_OWN(rdma_bind_addr(rdma, (struct sockaddr *)&any)) != 0)
        return -1;
    if (!cm_advance(id, CM_BOUND, CM_LISTENING))
        return cm_fail(EINVAL);
    id->backlog = backlog > 0 && backlog < MAX_BACKLOG ? (uint32_t)backlog : MAX_BACKLOG;
    int error = listen_on(id, 0);
    if (error == 0)
        error = listen_on(id, 1);
    if (error != 0) {
        cm_listeners_close(id);
        cm_set_state(id, CM_BOUND);
    }
    return cm_result(error);
}

void cm_listeners_close(struct cm_id *id)
{
    struct listener *listeners[2];

    pthread_mutex_lock(&id->lock);
    for (int i = 0; i < 2; i++) {
        listeners[i] = id->listeners[i];
        id->listeners[i] = NULL;
    }
    pthread_mutex_unlock(&id->lock);
    for (int i = 0; i < 2; i++)
        if (listeners[i] != NULL)
            listener_close(listeners[i]);
}

EXPORT int rdma_accept(struct rdma_cm_id *rdma, struct rdma_conn_param *parameters)
{
    struct cm_id *id = cm_id(rdma);
    struct request request;

    if (id == NULL || cm_foreign(id->generation))
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_ACCEPT) != 0)
        return -1;
    struct soft_qp *qp = find_qp(id, parameters);
    int error = qp == NULL ? EINVAL : take_parameters(id, parameters, id->inbound, id->outbound, &request);
    if (error == 0 && !cm_advance(id, CM_REQUESTED, CM_ACCEPTING))
        error = EINVAL;
    struct connector *connector = error == 0 ? cm_connector_hold(id) : NULL;
    if (connector == NULL)
        return cm_fail(error != 0 ? error : EINVAL);

    struct connection_arguments *arguments = &request.arguments;
    pthread_mutex_lock(&id->lock);
    id->inbound = arguments->inbound < id->inbound ? arguments->inbound : id->inbound;
    id->outbound = arguments->outbound < id->outbound ? arguments->outbound : id->outbound;
    id->qp_number = qp->ibv.qp_num;
    pthread_mutex_unlock(&id->lock);
    cm_make_qp_ready(id);
    struct queue_pair *engine_qp = hold_engine_qp(qp);
    set_patience(engine_qp, parameters);
    nd_status status = connector_accept(connector, engine_qp, arguments, NULL);
    object_drop(&engine_qp->object);
    if (status != ND_SUCCESS) {
        connector_reject(connector, NULL, 0);
        cm_set_state(id, CM_FAILED);
        own_qp_failed(id);
    }
    cm_connector_drop(connector);
    return status == ND_SUCCESS ? cm_wait(id) : cm_fail(cm_connection_errno(status));
}

EXPORT int rdma_reject(struct rdma_cm_id *rdma, const void *private_data, uint8_t size)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || cm_foreign(id->generation) || size > CM_MAX_PRIVATE_DATA)
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_REJECT) != 0)
        return -1;
    if (!cm_advance(id, CM_REQUESTED, CM_FAILED) && !cm_advance(id, CM_OFFERED, CM_FAILED))
        return cm_fail(EINVAL);
    struct connector *connector = cm_connector_hold(id);
    if (connector == NULL)
        return cm_fail(EINVAL);
    nd_status status = connector_reject(connector, private_data, private_data != NULL ? size : 0);
    cm_connector_drop(connector);
    return status == ND_SUCCESS ? 0 : cm_fail(cm_connection_errno(status));
}

EXPORT int rdma_reject_ece(struct rdma_cm_id *rdma, const void *private_data, uint8_t size)
{
    return rdma_reject(rdma, private_data, size);
}

/* The connector learns by itself of the peer's first message. */
EXPORT int rdma_notify(struct rdma_cm_id *rdma, enum ibv_event_type event)
{
    struct cm_id *id = cm_id(rdma);

    UNUSED(event);
    if (id == NULL || cm_foreign(id->generation))
        return cm_fail(EINVAL);
    pthread_mutex_lock(&id->lock);
    bool valid = id->connector != NULL;
    pthread_mutex_unlock(&id->lock);
    return valid ? 0 : cm_fail(EINVAL);
}

/* ---- The end ---- */

/* Like the kernel's, the call succeeds whenever there was an attempt. */
EXPORT int rdma_disconnect(struct rdma_cm_id *rdma)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || cm_foreign(id->generation) || id->rdma.verbs == NULL)
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_DISCONNECT) != 0)
        return -1;
    struct connector *connector = cm_connector_hold(id);
    if (connector == NULL)
        return cm_fail(EINVAL);
    nd_status status = connector_disconnect(connector, NULL);
    cm_connector_drop(connector);
    if (status == ND_CONNECTION_INVALID) {
        own_qp_failed(id);
        /* No event follows one that the program has seen. */
        pthread_mutex_lock(&id->lock);
        bool nothing_follows = id->queued == 0;
        pthread_mutex_unlock(&id->lock);
        if (nothing_follows)
            return 0;
    }
    return cm_wait(id);
}

void cm_connection_close(struct cm_id *id)
{
    pthread_mutex_lock(&id->lock);
    struct connector *connector = id->connector;
    bool connected = id->state == CM_ESTABLISHED || id->state == CM_ACCEPTING;
    struct soft_qp *qp = connected && id->qp_number != 0 ? soft_qp_hold(id->qp_number) : NULL;
    id->connector = NULL;
    pthread_mutex_unlock(&id->lock);
    connector_close(connector);
    if (qp == NULL)
        return;
    soft_qp_finish(qp);
    soft_qp_drop(qp);
}
