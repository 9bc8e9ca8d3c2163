/* Completion channels and completion queues. */
#include "soft.h"
#include "driving.h"
#include "face.h"
#include "stream.h"

#include <errno.h>
#include <stdlib.h>

#define POLL_BATCH 32

/* ---- Channels ---- */

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    bool refused = soft_inherited(context) || SOFT_FAULT(context, PLACE_CALL_CREATE_COMP_CHANNEL, 0) != 0;
    struct soft_channel *channel =
        refused ? NULL : event_source_new(EVENTS_OF_COMP_CHANNEL, offsetof(struct soft_channel, events), true);

    if (channel == NULL)
        return NULL;
    soft_live[PLACE_CALL_CREATE_COMP_CHANNEL]++;
    channel->ibv.context = context;
    channel->ibv.fd = channel->events.fd;
    return &channel->ibv;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
    struct soft_channel *channel = (struct soft_channel *)ibv;

    if (soft_inherited(ibv->context)) {
        event_source_close(EVENTS_OF_COMP_CHANNEL, &channel->events, NULL, NULL);
        return 0;
    }
    pthread_mutex_lock(&channel->events.lock);
    bool used = ibv->refcnt > 0;
    pthread_mutex_unlock(&channel->events.lock);
    if (used)
        return errno = EBUSY;
    event_source_close(EVENTS_OF_COMP_CHANNEL, &channel->events, NULL, NULL);
    soft_live[PLACE_CALL_CREATE_COMP_CHANNEL]--;
    return 0;
}

void face_notified(struct completion_queue *engine, nd_status status)
{
    struct soft_cq *cq = engine->object.face;

    /* One event of the adapter, and none of its channel, as rxe_cq_post() of Linux: IBTA 1.4, 11.6.3, has it among the
     * asynchronous errors. */
    if (status != ND_SUCCESS) {
        if (!atomic_exchange(&cq->failed, true))
            soft_async(soft_context(cq->ibv.context), IBV_EVENT_CQ_ERR, &cq->ibv);
        return;
    }
    if (cq->ibv.channel == NULL)
        return;
    struct soft_cq_event *event = atomic_exchange(&cq->spare, NULL);
    if (event == NULL)
        event = calloc(1, sizeof *event);
    if (event == NULL)
        return;
    event->cq = cq;
    cq->events_given++;
    if (!event_put(&((struct soft_channel *)cq->ibv.channel)->events, &event->event))
        free(event);
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **out, void **context)
{
    struct event_queue *events = &((struct soft_channel *)ibv)->events;

    if (event_queue_open(events) && SOFT_FAULT(ibv->context, PLACE_CALL_GET_CQ_EVENT, 0) != 0)
        return -1;
    struct soft_cq_event *event = (struct soft_cq_event *)event_take(events);

    if (event == NULL)
        return -1;
    *out = &event->cq->ibv;
    *context = event->cq->ibv.cq_context;
    free(event);
    return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count)
{
    if (soft_inherited(cq->context))
        return;
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += count;
    pthread_cond_broadcast(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

/* ---- Queues ---- */

static struct soft_cq *create(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                              int vector, int error)
{
    struct adapter *adapter = adapter_of(context);

    if (soft_inherited(context))
        error = EIO;
    else if (adapter_gone(adapter))
        error = ENODEV;
    else if (error == 0 &&
             (cqe < 1 || (uint32_t)cqe > MAX_CQ_DEPTH || vector < 0 || vector >= context->num_comp_vectors))
        error = EINVAL;
    struct soft_cq *cq = error == 0 ? calloc(1, sizeof *cq) : NULL;
    if (error == 0 && cq == NULL)
        error = ENOMEM;
    if (error == 0)
        error = soft_errno(cq_create(adapter, (uint32_t)cqe, cq, &cq->cq));
    if (error != 0) {
        free(cq);
        return soft_null(error);
    }
    cq->ibv.context = context;
    cq->ibv.channel = channel;
    cq->ibv.cq_context = cq_context;
    cq->ibv.cqe = cqe;
    pthread_mutex_init(&cq->ibv.mutex, NULL);
    pthread_cond_init(&cq->ibv.cond, NULL);
    if (channel != NULL) {
        pthread_mutex_lock(&((struct soft_channel *)channel)->events.lock);
        channel->refcnt++;
        pthread_mutex_unlock(&((struct soft_channel *)channel)->events.lock);
    }
    return cq;
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                    struct ibv_comp_channel *channel, int vector)
{
    struct soft_cq *cq =
        create(context, cqe, cq_context, channel, vector, SOFT_FAULT(context, PLACE_CALL_CREATE_CQ, 0));
    return cq != NULL ? &cq->ibv : NULL;
}

EXPORT int ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
    if (soft_inherited(ibv->context))
        return EIO;
    if (SOFT_FAULT(ibv->context, PLACE_CALL_RESIZE_CQ, 0) != 0)
        return errno;
    if (cqe < 1 || (uint32_t)cqe > MAX_CQ_DEPTH)
        return EINVAL;
    nd_status status = cq_resize(((struct soft_cq *)ibv)->cq, (uint32_t)cqe);
    if (status == ND_SUCCESS)
        ibv->cqe = cqe;
    return status == ND_BUFFER_OVERFLOW ? EINVAL : soft_errno(status);
}

/* Called once for an event that is then removed, so nobody has to acknowledge it. */
static bool is_of(const struct event *event, const void *what)
{
    struct soft_cq *cq = ((const struct soft_cq_event *)event)->cq;

    if (cq != what)
        return false;
    cq->events_given--;
    return true;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *ibv)
{
    struct soft_cq *cq = (struct soft_cq *)ibv;
    struct soft_channel *channel = (struct soft_channel *)ibv->channel;

    if (soft_inherited(ibv->context))
        return 0;
    if (cq->users > 0)
        return errno = EBUSY;
    cq_silence(cq->cq);
    free(cq->spare);
    if (channel != NULL) {
        event_remove(&channel->events, is_of, cq);
        /* Each event that was given out has to be acknowledged. */
        pthread_mutex_lock(&ibv->mutex);
        while (ibv->comp_events_completed != cq->events_given)
            pthread_cond_wait(&ibv->cond, &ibv->mutex);
        pthread_mutex_unlock(&ibv->mutex);
        pthread_mutex_lock(&channel->events.lock);
        ibv->channel->refcnt--;
        pthread_mutex_unlock(&channel->events.lock);
    }
    soft_async_forget(soft_context(ibv->context), IBV_EVENT_CQ_ERR, ibv);
    object_close(&cq->cq->object);
    pthread_mutex_destroy(&ibv->mutex);
    pthread_cond_destroy(&ibv->cond);
    free(cq);
    return 0;
}

int soft_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
    struct soft_cq *cq = (struct soft_cq *)ibv;

    if (SOFT_FAULT(ibv->context, PLACE_CALL_REQ_NOTIFY_CQ, 0) != 0)
        return errno;
    cq_notify(cq->cq);
    /* A notification must not fail for want of memory: nobody would learn of it. */
    if (ibv->channel != NULL && cq->spare == NULL) {
        struct soft_cq_event *event = calloc(1, sizeof *event);
        if (event == NULL)
            return ENOMEM;
        free(atomic_exchange(&cq->spare, event));
    }
    streams_push();
    if (ibv->channel != NULL) {
        workers_sleep_soon();
        loop_sleeps(&((struct soft_channel *)ibv->channel)->events.loop);
    }
    cq_arm(cq->cq, solicited_only ? ND_CQ_NOTIFY_SOLICITED : ND_CQ_NOTIFY_ANY);
    return 0;
}

/* ---- Completions ---- */

static const enum ibv_wc_opcode opcodes[] = {
    [Nd2RequestTypeReceive] = IBV_WC_RECV,   [Nd2RequestTypeSend] = IBV_WC_SEND,
    [Nd2RequestTypeBind] = IBV_WC_BIND_MW,   [Nd2RequestTypeInvalidate] = IBV_WC_LOCAL_INV,
    [Nd2RequestTypeRead] = IBV_WC_RDMA_READ, [Nd2RequestTypeWrite] = IBV_WC_RDMA_WRITE,
};

static enum ibv_wc_status status_of(const struct cq_entry *entry)
{
    ND2_REQUEST_TYPE type = entry->result.RequestType;

    switch (entry->result.Status) {
    case ND_SUCCESS:
        return IBV_WC_SUCCESS;
    case ND_CANCELED:
        return IBV_WC_WR_FLUSH_ERR;
    case ND_BUFFER_OVERFLOW:
        return IBV_WC_LOC_LEN_ERR;
    case ND_DATA_OVERRUN: /* the peer's receive was too short */
        return IBV_WC_REM_INV_REQ_ERR;
    case ND_IO_TIMEOUT:
        return entry->terminate == DDP_NO_BUFFER ? IBV_WC_RNR_RETRY_EXC_ERR : IBV_WC_RETRY_EXC_ERR;
    case ND_ACCESS_VIOLATION:
        if (type == Nd2RequestTypeBind)
            return IBV_WC_MW_BIND_ERR;
        return entry->terminate != 0 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR;
    case ND_INVALID_DEVICE_REQUEST:
        if (type == Nd2RequestTypeBind || type == Nd2RequestTypeInvalidate)
            return IBV_WC_MW_BIND_ERR;
        return entry->terminate != 0 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_QP_OP_ERR;
    case ND_INVALID_DEVICE_STATE: /* only by a fault */
        return IBV_WC_LOC_QP_OP_ERR;
    case ND_REMOTE_ERROR:
        return IBV_WC_REM_OP_ERR;
    default:
        return IBV_WC_GENERAL_ERR;
    }
}

struct taking {
    struct completion_queue *cq;
    struct cq_entry *entries;
    uint32_t wanted, taken;
};

static bool try_taking(void *what)
{
    struct taking *at = what;

    at->taken = cq_take(at->cq, at->entries, at->wanted);
    return at->taken > 0;
}

/* Returns how many entries there are after the sockets were looked at. */
static uint32_t take_what_comes(struct soft_cq *cq, struct cq_entry *entries, uint32_t wanted)
{
    struct taking at = {cq->cq, entries, wanted, 0};

    streams_push();
    workers_spin(try_taking, &at);
    return at.taken;
}

int soft_poll_cq(struct ibv_cq *ibv, int count, struct ibv_wc *wc)
{
    struct soft_cq *cq = (struct soft_cq *)ibv;
    struct cq_entry entries[POLL_BATCH];
    int given = 0;

    if (SOFT_FAULT(ibv->context, PLACE_CALL_POLL_CQ, 0) != 0)
        return -1;
    while (given < count) {
        uint32_t wanted = count - given < POLL_BATCH ? (uint32_t)(count - given) : POLL_BATCH;
        uint32_t taken = cq_take(cq->cq, entries, wanted);
        if (taken > 0)
            workers_found();
        else if (given == 0)
            taken = take_what_comes(cq, entries, wanted);
        for (uint32_t i = 0; i < taken; i++) {
            const ND2_RESULT *result = &entries[i].result;
            wc[given++] = (struct ibv_wc){
                .wr_id = (uintptr_t)result->RequestContext,
                .status = status_of(&entries[i]),
                .opcode = opcodes[result->RequestType],
                .vendor_err = (uint32_t)result->Status,
                .byte_len = result->BytesTransferred,
                .invalidated_rkey = ntohl(entries[i].invalidated),
                .qp_num = (uint32_t)(uintptr_t)result->QueuePairContext,
                .wc_flags = entries[i].invalidated != 0 ? IBV_WC_WITH_INV : 0,
            };
        }
        if (taken < wanted)
            break;
    }
    return given;
}
