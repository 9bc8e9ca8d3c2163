/* The functions that stand in for those of libibverbs. */
#include "shim.h"
#include "stand_ins.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static void take_context(unsigned library, struct ibv_context *ibv)
{
    watch_forks(library);
    lock();
    context_of(library, ibv);
    unlock();
}

/* ---- Devices ---- */

static struct ibv_context *stand_in_ibv_open_device(unsigned library, struct ibv_device *device)
{
    int error = may_open() ? call_fault(PLACE_CALL_OPEN_DEVICE, NULL, 0) : EINVAL;

    if (error != 0)
        return null_with(error);
    struct ibv_context *ibv = REAL(library, ibv_open_device)(device);
    if (ibv != NULL)
        take_context(library, ibv);
    return ibv;
}

static struct ibv_context *stand_in_ibv_import_device(unsigned library, int fd)
{
    int error = may_open() ? call_fault(PLACE_CALL_OPEN_DEVICE, NULL, 0) : EINVAL;

    if (error != 0)
        return null_with(error);
    struct ibv_context *ibv = REAL(library, ibv_import_device)(fd);
    if (ibv != NULL)
        take_context(library, ibv);
    return ibv;
}

static int stand_in_ibv_close_device(unsigned library, struct ibv_context *ibv)
{
    lock();
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv);
    if (context != NULL)
        context_forget(context);
    unlock();
    return REAL(library, ibv_close_device)(ibv);
}

static int stand_in_ibv_query_device(unsigned library, struct ibv_context *ibv, struct ibv_device_attr *out)
{
    int error = call_fault(PLACE_CALL_QUERY_DEVICE, NULL, 0);

    return error != 0 ? (errno = error) : REAL(library, ibv_query_device)(ibv, out);
}

static int stand_in_ibv_query_port(unsigned library, struct ibv_context *ibv, uint8_t port,
                                   struct _compat_ibv_port_attr *out)
{
    int error = call_fault(PLACE_CALL_QUERY_PORT, NULL, 0);

    return error != 0 ? (errno = error) : REAL(library, ibv_query_port)(ibv, port, out);
}

static int stand_in_ibv_query_gid(unsigned library, struct ibv_context *ibv, uint8_t port, int index,
                                  union ibv_gid *out)
{
    int error = call_fault(PLACE_CALL_QUERY_GID, NULL, 0);

    return error != 0 ? minus_with(error) : REAL(library, ibv_query_gid)(ibv, port, index, out);
}

/* ---- Events ---- */

static int stand_in_ibv_get_async_event(unsigned library, struct ibv_context *ibv, struct ibv_async_event *out)
{
    int error = call_fault(PLACE_CALL_GET_ASYNC_EVENT, NULL, 0);

    if (error != 0)
        return minus_with(error);
    lock();
    struct context *context = context_of(library, ibv);
    int fd = context != NULL ? context->fd : -1;
    unlock();
    if (fd < 0)
        return REAL(library, ibv_get_async_event)(ibv, out);
    for (;;) {
        uint64_t one;
        if (read(fd, &one, sizeof one) < 0)
            return -1;
        lock();
        context = (struct context *)object_find(OBJECT_CONTEXT, ibv);
        struct async_event *event = context != NULL ? context->events : NULL;
        if (event != NULL) {
            context->events = event->next;
            *out = event->ibv;
            if (event->made && event->ibv.event_type == IBV_EVENT_QP_FATAL) {
                struct qp *qp = (struct qp *)object_find(OBJECT_QP, event->ibv.element.qp);
                if (qp != NULL)
                    qp->async_given++;
            }
        }
        unlock();
        free(event);
        if (event != NULL)
            return 0;
    }
}

static bool acknowledges_own(const struct ibv_async_event *event)
{
    bool own = false;

    lock();
    struct qp *qp = (struct qp *)object_find(OBJECT_QP, event->element.qp);
    if (qp != NULL && event->event_type == IBV_EVENT_QP_FATAL && qp->async_given > 0) {
        qp->async_given--;
        own = true;
    }
    struct cq *cq = (struct cq *)object_find(OBJECT_CQ, event->element.cq);
    if (cq != NULL && event->event_type == IBV_EVENT_CQ_ERR && cq->failed)
        own = true;
    unlock();
    return own;
}

static void stand_in_ibv_ack_async_event(unsigned library, struct ibv_async_event *event)
{
    if (!acknowledges_own(event))
        REAL(library, ibv_ack_async_event)(event);
}

static struct ibv_comp_channel *stand_in_ibv_create_comp_channel(unsigned library, struct ibv_context *ibv)
{
    int error = call_fault(PLACE_CALL_CREATE_COMP_CHANNEL, NULL, (uint64_t)live[LIVE_CHANNEL]);

    if (error != 0)
        return null_with(error);
    struct ibv_comp_channel *channel = REAL(library, ibv_create_comp_channel)(ibv);
    if (channel != NULL) {
        live_change(LIVE_CHANNEL, 1);
        lock();
        if (context_of(library, ibv) != NULL)
            channel_of(channel);
        unlock();
    }
    return channel;
}

static int stand_in_ibv_destroy_comp_channel(unsigned library, struct ibv_comp_channel *ibv)
{
    lock();
    struct channel *channel = (struct channel *)object_find(OBJECT_CHANNEL, ibv);
    if (channel != NULL && ibv->refcnt == 0)
        channel_forget(channel);
    unlock();
    int error = REAL(library, ibv_destroy_comp_channel)(ibv);
    live_change(LIVE_CHANNEL, -(error == 0));
    return error;
}

static int stand_in_ibv_get_cq_event(unsigned library, struct ibv_comp_channel *ibv, struct ibv_cq **out,
                                     void **cq_context)
{
    int error = call_fault(PLACE_CALL_GET_CQ_EVENT, NULL, 0);

    if (error != 0)
        return minus_with(error);
    lock();
    struct channel *channel = context_of(library, ibv->context) != NULL ? channel_of(ibv) : NULL;
    int fd = channel != NULL ? channel->fd : -1;
    unlock();
    if (fd < 0)
        return REAL(library, ibv_get_cq_event)(ibv, out, cq_context);
    for (;;) {
        uint64_t one;
        if (read(fd, &one, sizeof one) < 0)
            return -1;
        lock();
        channel = (struct channel *)object_find(OBJECT_CHANNEL, ibv);
        struct channel_event *event = channel != NULL ? channel->first : NULL;
        if (event != NULL) {
            channel->first = event->next;
            if (channel->first == NULL)
                channel->last = &channel->first;
            *out = event->cq->ibv;
            *cq_context = event->cq->ibv->cq_context;
        }
        unlock();
        free(event);
        if (event != NULL)
            return 0;
    }
}

/* The thread has acknowledged the library's own. */
static void stand_in_ibv_ack_cq_events(unsigned library, struct ibv_cq *ibv, unsigned count)
{
    lock();
    struct cq *cq = (struct cq *)object_find(OBJECT_CQ, ibv);
    bool known = cq != NULL && cq->channel != NULL;
    if (known)
        cq->events_given -= count < cq->events_given ? count : cq->events_given;
    unlock();
    if (!known)
        REAL(library, ibv_ack_cq_events)(ibv, count);
}

/* ---- Memory ---- */

static struct ibv_pd *stand_in_ibv_alloc_pd(unsigned library, struct ibv_context *ibv)
{
    take_context(library, ibv);
    int error = call_fault(PLACE_CALL_ALLOC_PD, NULL, (uint64_t)live[LIVE_PD]);

    struct ibv_pd *pd = error == 0 ? REAL(library, ibv_alloc_pd)(ibv) : null_with(error);
    live_change(LIVE_PD, pd != NULL);
    return pd;
}

static int stand_in_ibv_dealloc_pd(unsigned library, struct ibv_pd *pd)
{
    int error = REAL(library, ibv_dealloc_pd)(pd);

    live_change(LIVE_PD, -(error == 0));
    return error;
}

#define REGISTER(name, parameters, ...)                                                       \
    static struct ibv_mr *stand_in_##name parameters                                          \
    {                                                                                         \
        int error = call_fault(PLACE_CALL_REG_MR, NULL, (uint64_t)live[LIVE_MR]);             \
                                                                                              \
        struct ibv_mr *mr = error == 0 ? REAL(library, name)(__VA_ARGS__) : null_with(error); \
        live_change(LIVE_MR, mr != NULL);                                                     \
        return mr;                                                                            \
    }
REGISTER(ibv_reg_mr, (unsigned library, struct ibv_pd *pd, void *address, size_t length, int access), pd, address,
         length, access)
REGISTER(ibv_reg_mr_iova,
         (unsigned library, struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access), pd, address,
         length, iova, access)
REGISTER(ibv_reg_mr_iova2,
         (unsigned library, struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access), pd,
         address, length, iova, access)
REGISTER(ibv_reg_dmabuf_mr,
         (unsigned library, struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access), pd,
         offset, length, iova, fd, access)

static int stand_in_ibv_dereg_mr(unsigned library, struct ibv_mr *mr)
{
    int error = call_fault(PLACE_CALL_DEREG_MR, NULL, 0);

    if (error != 0)
        return errno = error;
    error = REAL(library, ibv_dereg_mr)(mr);
    live_change(LIVE_MR, -(error == 0));
    return error;
}

static struct ibv_ah *stand_in_ibv_create_ah(unsigned library, struct ibv_pd *pd, struct ibv_ah_attr *attributes)
{
    int error = call_fault(PLACE_CALL_CREATE_AH, NULL, (uint64_t)live[LIVE_AH]);

    struct ibv_ah *ah = error == 0 ? REAL(library, ibv_create_ah)(pd, attributes) : null_with(error);
    live_change(LIVE_AH, ah != NULL);
    return ah;
}

static int stand_in_ibv_destroy_ah(unsigned library, struct ibv_ah *ah)
{
    int error = REAL(library, ibv_destroy_ah)(ah);

    live_change(LIVE_AH, -(error == 0));
    return error;
}

/* ---- Queues ---- */

static struct ibv_cq *stand_in_ibv_create_cq(unsigned library, struct ibv_context *ibv, int cqe, void *cq_context,
                                             struct ibv_comp_channel *channel, int vector)
{
    take_context(library, ibv);
    int error = call_fault(PLACE_CALL_CREATE_CQ, NULL, (uint64_t)live[LIVE_CQ]);

    if (error != 0)
        return null_with(error);
    struct ibv_comp_channel copy, *real = creation_begin(ibv, channel, &copy);
    struct ibv_cq *cq = REAL(library, ibv_create_cq)(ibv, cqe, cq_context, real, vector);
    creation_end(ibv, channel, &copy, cq);
    if (cq != NULL) {
        live_change(LIVE_CQ, 1);
        lock();
        cq_of(cq);
        unlock();
    }
    return cq;
}

static int stand_in_ibv_resize_cq(unsigned library, struct ibv_cq *ibv, int cqe)
{
    int error = call_fault(PLACE_CALL_RESIZE_CQ, NULL, 0);

    if (error != 0)
        return errno = error;
    lock();
    struct cq *cq = (struct cq *)object_find(OBJECT_CQ, ibv);
    int more = cq != NULL ? (int)cq->slots : 0;
    unlock();
    return REAL(library, ibv_resize_cq)(ibv, cqe + more);
}

void cq_destroyed(struct ibv_cq *ibv)
{
    struct cq *cq = ibv != NULL ? (struct cq *)object_find(OBJECT_CQ, ibv) : NULL;

    if (cq != NULL)
        cq_forget(cq);
}

static void uses(struct object *object, void *what)
{
    const struct qp *qp = (struct qp *)object;
    const struct cq **cq = what;

    if (qp->send_cq == *cq || qp->recv_cq == *cq)
        *cq = NULL;
}

/* A queue that is in use stays, in any library. */
static int stand_in_ibv_destroy_cq(unsigned library, struct ibv_cq *ibv)
{
    lock();
    struct cq *cq = (struct cq *)object_find(OBJECT_CQ, ibv), *unused = cq;
    each_object(OBJECT_QP, uses, &unused);
    bool used = cq != NULL && unused == NULL;
    if (cq != NULL && !used)
        cq_forget(cq);
    unlock();
    if (used)
        return errno = EBUSY;
    int error = REAL(library, ibv_destroy_cq)(ibv);
    live_change(LIVE_CQ, -(error == 0));
    return error;
}

static struct ibv_srq *stand_in_ibv_create_srq(unsigned library, struct ibv_pd *pd,
                                               struct ibv_srq_init_attr *attributes)
{
    take_context(library, pd->context);
    int error = call_fault(PLACE_CALL_CREATE_SRQ, NULL, (uint64_t)live[LIVE_SRQ]);

    if (error != 0)
        return null_with(error);
    creation_begin(pd->context, NULL, NULL);
    struct ibv_srq *srq = REAL(library, ibv_create_srq)(pd, attributes);
    creation_end(pd->context, NULL, NULL, NULL);
    live_change(LIVE_SRQ, srq != NULL);
    return srq;
}

static int stand_in_ibv_destroy_srq(unsigned library, struct ibv_srq *srq)
{
    int error = REAL(library, ibv_destroy_srq)(srq);

    live_change(LIVE_SRQ, -(error == 0));
    return error;
}

static struct ibv_qp *stand_in_ibv_create_qp(unsigned library, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
    take_context(library, pd->context);
    int error = call_fault(PLACE_CALL_CREATE_QP, NULL, (uint64_t)live[LIVE_QP]);

    if (error != 0)
        return null_with(error);
    creation_begin(pd->context, NULL, NULL);
    struct ibv_qp *qp = REAL(library, ibv_create_qp)(pd, attributes);
    creation_end(pd->context, NULL, NULL, NULL);
    if (qp != NULL) {
        live_change(LIVE_QP, 1);
        lock();
        qp_made(qp, attributes->sq_sig_all);
        unlock();
    }
    return qp;
}

static struct ibv_qp_ex *stand_in_ibv_qp_to_qp_ex(unsigned library, struct ibv_qp *qp)
{
    return REAL(library, ibv_qp_to_qp_ex)(qp);
}

void qp_in_error_state(struct qp *qp)
{
    qp->failing = qp->failed = true;
    queue_deliver(qp, &qp->sends);
    queue_deliver(qp, &qp->receives);
    thread_wake();
}

static int stand_in_ibv_modify_qp(unsigned library, struct ibv_qp *ibv, struct ibv_qp_attr *attributes, int mask)
{
    lock();
    context_of(library, ibv->context);
    struct qp *qp = qp_of(ibv);
    int error = call_fault_locked(PLACE_CALL_MODIFY_QP, qp, 0);
    unlock();
    if (error != 0)
        return errno = error;
    error = REAL(library, ibv_modify_qp)(ibv, attributes, mask);
    if (error != 0 || (mask & IBV_QP_STATE) == 0)
        return error;
    lock();
    qp = (struct qp *)object_find(OBJECT_QP, ibv);
    if (qp != NULL && attributes->qp_state == IBV_QPS_ERR)
        qp_in_error_state(qp);
    if (qp != NULL && attributes->qp_state == IBV_QPS_RESET) {
        datagrams_forget(qp);
        queue_free(&qp->sends);
        queue_free(&qp->receives);
        qp->failing = qp->failed = qp->ends = false;
        qp->sends.failed = qp->receives.failed = false;
    }
    unlock();
    return 0;
}

static int stand_in_ibv_query_qp(unsigned library, struct ibv_qp *ibv, struct ibv_qp_attr *attributes, int mask,
                                 struct ibv_qp_init_attr *initial)
{
    lock();
    int error = call_fault_locked(PLACE_CALL_QUERY_QP, (struct qp *)object_find(OBJECT_QP, ibv), 0);
    unlock();
    return error != 0 ? (errno = error) : REAL(library, ibv_query_qp)(ibv, attributes, mask, initial);
}

void qp_destroyed(struct ibv_qp *ibv)
{
    struct qp *qp = ibv != NULL ? (struct qp *)object_find(OBJECT_QP, ibv) : NULL;

    if (qp != NULL)
        qp_forget(qp);
}

static int stand_in_ibv_destroy_qp(unsigned library, struct ibv_qp *ibv)
{
    lock();
    qp_destroyed(ibv);
    unlock();
    int error = REAL(library, ibv_destroy_qp)(ibv);
    live_change(LIVE_QP, -(error == 0));
    return error;
}

STAND_INS(verbs_stand_ins, VERBS_NAMES)
