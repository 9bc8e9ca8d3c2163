/* Queue pairs: creation, states, posting. */
#include "pairing.h"
#include "greeting.h"
#include "guarded.h"
#include "numbers.h"
#include "soft.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- Creation ---- */

static int check(const struct ibv_qp_init_attr_ex *attributes)
{
    const struct ibv_qp_cap *cap = &attributes->cap;

    if (attributes->qp_type != IBV_QPT_RC)
        return EOPNOTSUPP;
    if (attributes->send_cq == NULL || attributes->recv_cq == NULL || cap->max_send_wr > SOFT_MAX_QP_WR ||
        cap->max_recv_wr > SOFT_MAX_QP_WR || cap->max_send_sge > MAX_SGE || cap->max_recv_sge > MAX_SGE ||
        cap->max_inline_data > MAX_INLINE_DATA)
        return EINVAL;
    return 0;
}

/* A new queue pair of the engine, for a new one of verbs or one that goes back to RESET. */
static int make(struct soft_qp *qp)
{
    const struct ibv_qp_init_attr_ex *initial = &qp->initial;
    struct soft_srq *srq = (struct soft_srq *)initial->srq;
    const struct queue_pair_limits limits = {
        .receive_depth = srq != NULL ? 0 : initial->cap.max_recv_wr,
        .initiator_depth = initial->cap.max_send_wr,
        .receive_sge = initial->cap.max_recv_sge,
        .initiator_sge = initial->cap.max_send_sge,
        .inline_size = MAX_INLINE_DATA,
    };
    return soft_errno(qp_create(adapter_of(qp->ibv.context), qp->ibv.pd, ((struct soft_cq *)initial->recv_cq)->cq,
                                ((struct soft_cq *)initial->send_cq)->cq, srq != NULL ? srq->srq : NULL,
                                (void *)(uintptr_t)qp->ibv.qp_num, &limits, NULL, qp, &qp->qp));
}

struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attributes)
{
    struct soft_qp *qp = NULL;
    int error = soft_inherited(context)             ? EIO
                : adapter_gone(adapter_of(context)) ? ENODEV
                                                    : SOFT_FAULT(context, PLACE_CALL_CREATE_QP, 0);

    if (error == 0 && ((attributes->comp_mask & IBV_QP_INIT_ATTR_PD) == 0 ||
                       (attributes->comp_mask & ~(uint32_t)IBV_QP_INIT_ATTR_PD) != 0))
        error = EOPNOTSUPP;
    if (error == 0)
        error = check(attributes);
    if (error == 0 && (qp = calloc(1, sizeof *qp)) == NULL)
        error = ENOMEM;
    if (error == 0) {
        pthread_mutex_init(&qp->lock, NULL);
        qp->references = 1;
        qp->ibv.context = context;
        qp->ibv.pd = attributes->pd;
        qp->initial = *attributes;
        error = number_take(qp, &qp->ibv.qp_num);
    }
    if (error == 0 && (error = make(qp)) != 0)
        number_give_back(qp);
    if (error != 0) {
        free(qp);
        return soft_null(error);
    }
    qp->qp->number = faults_number_queue_pair(adapter_of(context)->faults);
    attributes->cap.max_send_sge = qp->qp->limits.initiator_sge;
    if (attributes->srq == NULL)
        attributes->cap.max_recv_sge = qp->qp->limits.receive_sge;
    attributes->cap.max_inline_data = MAX_INLINE_DATA;
    qp->initial.cap = attributes->cap;
    qp->all_signaled = attributes->sq_sig_all != 0;
    qp->ibv.qp_context = attributes->qp_context;
    qp->ibv.send_cq = attributes->send_cq;
    qp->ibv.recv_cq = attributes->recv_cq;
    qp->ibv.srq = attributes->srq;
    qp->ibv.qp_type = IBV_QPT_RC;
    qp->ibv.state = qp->attributes.qp_state = IBV_QPS_RESET;
    pthread_mutex_init(&qp->ibv.mutex, NULL);
    pthread_cond_init(&qp->ibv.cond, NULL);
    ((struct soft_pd *)attributes->pd)->users++;
    ((struct soft_cq *)attributes->send_cq)->users++;
    ((struct soft_cq *)attributes->recv_cq)->users++;
    if (attributes->srq != NULL)
        ((struct soft_srq *)attributes->srq)->users++;
    return &qp->ibv;
}

struct ibv_qp_init_attr_ex soft_extended(struct ibv_pd *pd, const struct ibv_qp_init_attr *attributes)
{
    return (struct ibv_qp_init_attr_ex){
        .qp_context = attributes->qp_context,
        .send_cq = attributes->send_cq,
        .recv_cq = attributes->recv_cq,
        .srq = attributes->srq,
        .cap = attributes->cap,
        .qp_type = attributes->qp_type,
        .sq_sig_all = attributes->sq_sig_all,
        .comp_mask = IBV_QP_INIT_ATTR_PD,
        .pd = pd,
    };
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
    struct ibv_qp_init_attr_ex extended = soft_extended(pd, attributes);
    struct ibv_qp *qp = soft_create_qp_ex(pd->context, &extended);

    attributes->cap = extended.cap;
    return qp;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct soft_qp *qp = (struct soft_qp *)ibv;
    void *context = (void *)(uintptr_t)ibv->qp_num;

    if (soft_inherited(ibv->context))
        return 0;
    pairing_close(qp);
    number_give_back(qp);
    waiting_drop_for(ibv->qp_num);
    pthread_mutex_lock(&qp->lock);
    qp->destroyed = true;
    pthread_mutex_unlock(&qp->lock);
    object_close(&qp->qp->object);
    cq_forget(((struct soft_cq *)ibv->send_cq)->cq, context);
    cq_forget(((struct soft_cq *)ibv->recv_cq)->cq, context);
    soft_async_forget(soft_context(ibv->context), IBV_EVENT_QP_LAST_WQE_REACHED, ibv);
    ((struct soft_pd *)ibv->pd)->users--;
    ((struct soft_cq *)ibv->send_cq)->users--;
    ((struct soft_cq *)ibv->recv_cq)->users--;
    if (ibv->srq != NULL)
        ((struct soft_srq *)ibv->srq)->users--;
    pthread_mutex_destroy(&ibv->mutex);
    pthread_cond_destroy(&ibv->cond);
    soft_qp_drop(qp);
    return 0;
}

void soft_qp_drop(struct soft_qp *qp)
{
    if (--qp->references > 0)
        return;
    pthread_mutex_destroy(&qp->lock);
    free(qp);
}

/* ---- States ---- */

static void set_state(struct soft_qp *qp, enum ibv_qp_state state)
{
    qp->attributes.qp_state = qp->attributes.cur_qp_state = state;
    qp->state = state;
    qp->ibv.state = state;
    qp->qp->early = state == IBV_QPS_RTS;
}

/* The connection is over, or there is none: whatever was posted is flushed, and what is posted later too. */
static void flush(struct soft_qp *qp, enum ibv_qp_state from)
{
    qp_finish_now(qp->qp);
    if (qp->ibv.srq != NULL && from != IBV_QPS_ERR)
        soft_async(soft_context(qp->ibv.context), IBV_EVENT_QP_LAST_WQE_REACHED, &qp->ibv);
}

/* Back to RESET: requests and completions are forgotten. */
static int reset(struct soft_qp *qp)
{
    struct queue_pair *old = qp->qp;
    void *context = (void *)(uintptr_t)qp->ibv.qp_num;

    int error = make(qp);
    if (error != 0) {
        qp->qp = old;
        return error;
    }
    qp->qp->number = old->number;
    object_close(&old->object);
    cq_forget(((struct soft_cq *)qp->ibv.send_cq)->cq, context);
    cq_forget(((struct soft_cq *)qp->ibv.recv_cq)->cq, context);
    memset(&qp->attributes, 0, sizeof qp->attributes);
    set_state(qp, IBV_QPS_RESET);
    return 0;
}

#define FROM(state) (1u << (state))
static bool may_follow(enum ibv_qp_state from, enum ibv_qp_state to)
{
    static const unsigned allowed[] = {
        [IBV_QPS_RESET] = ~0u,
        [IBV_QPS_INIT] = FROM(IBV_QPS_RESET) | FROM(IBV_QPS_INIT),
        [IBV_QPS_RTR] = FROM(IBV_QPS_INIT),
        [IBV_QPS_RTS] = FROM(IBV_QPS_RTR) | FROM(IBV_QPS_RTS),
        [IBV_QPS_ERR] = ~0u,
    };
    return (size_t)to < COUNT_OF(allowed) && (allowed[to] & FROM(from)) != 0;
}

static void take_attributes(struct soft_qp *qp, const struct ibv_qp_attr *from, int mask)
{
    struct ibv_qp_attr *to = &qp->attributes;

    if ((mask & IBV_QP_ACCESS_FLAGS) != 0) {
        to->qp_access_flags = from->qp_access_flags;
        qp->qp->refuses_reads = (from->qp_access_flags & IBV_ACCESS_REMOTE_READ) == 0;
        qp->qp->refuses_writes = (from->qp_access_flags & IBV_ACCESS_REMOTE_WRITE) == 0;
    }
    if ((mask & IBV_QP_RNR_RETRY) != 0)
        qp->qp->patience = from->rnr_retry == SOFT_RNR_RETRY_ENDLESS ? PATIENCE_ENDLESS : PATIENCE_LIMITED;
#define TAKE(bit, member)    \
    if ((mask & (bit)) != 0) \
    to->member = from->member
    TAKE(IBV_QP_PKEY_INDEX, pkey_index);
    TAKE(IBV_QP_PORT, port_num);
    TAKE(IBV_QP_QKEY, qkey);
    TAKE(IBV_QP_AV, ah_attr);
    TAKE(IBV_QP_PATH_MTU, path_mtu);
    TAKE(IBV_QP_TIMEOUT, timeout);
    TAKE(IBV_QP_RETRY_CNT, retry_cnt);
    TAKE(IBV_QP_RNR_RETRY, rnr_retry);
    TAKE(IBV_QP_RQ_PSN, rq_psn);
    TAKE(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
    TAKE(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
    TAKE(IBV_QP_SQ_PSN, sq_psn);
    TAKE(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
    TAKE(IBV_QP_DEST_QPN, dest_qp_num);
#undef TAKE
}

EXPORT int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attributes, int mask)
{
    struct soft_qp *qp = (struct soft_qp *)ibv;
    int error = 0;

    if (soft_inherited(ibv->context))
        return EIO;
    if (SOFT_FAULT(ibv->context, PLACE_CALL_MODIFY_QP, qp->qp->number) != 0)
        return errno;
    if (adapter_gone(adapter_of(ibv->context)) && ((mask & IBV_QP_STATE) == 0 || attributes->qp_state != IBV_QPS_ERR))
        return errno = ENODEV;
    /* Before the lock is taken, because an event of the connection may be waiting for it. */
    if ((mask & IBV_QP_STATE) != 0 && attributes->qp_state == IBV_QPS_RESET)
        pairing_close(qp);
    pthread_mutex_lock(&qp->lock);
    enum ibv_qp_state from = qp->attributes.qp_state;
    enum ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? attributes->qp_state : from;
    int needed = from == IBV_QPS_RESET && to == IBV_QPS_INIT ? IBV_QP_PORT | IBV_QP_ACCESS_FLAGS : 0;
    bool paired = (mask & IBV_QP_AV) != 0 && pairing_names_a_peer(attributes);
    if (((mask & IBV_QP_CUR_STATE) != 0 && attributes->cur_qp_state != from) || !may_follow(from, to) ||
        (to == IBV_QPS_RTR && (mask & IBV_QP_AV) != 0 && pairing_names_nobody(attributes)) ||
        (mask & needed) != needed || ((mask & IBV_QP_PORT) != 0 && attributes->port_num != 1) ||
        ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0 && attributes->max_rd_atomic > MAX_READ_LIMIT) ||
        ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0 && attributes->max_dest_rd_atomic > MAX_READ_LIMIT))
        error = EINVAL;
    else if (to == IBV_QPS_RESET && from != IBV_QPS_RESET)
        error = reset(qp);
    if (error == 0 && to != IBV_QPS_RESET && to != IBV_QPS_ERR)
        take_attributes(qp, attributes, mask);
    if (error == 0 && from == IBV_QPS_INIT && to == IBV_QPS_RTR && paired)
        error = pairing_check(qp);
    if (error == 0)
        set_state(qp, to);
    pthread_mutex_unlock(&qp->lock);
    if (error != 0)
        return errno = error;
    /* Also from ERR: a connection that its connection manager ends may wait for its outcome. */
    if ((mask & IBV_QP_STATE) != 0 && to == IBV_QPS_ERR) {
        pairing_stop(qp);
        flush(qp, from);
    }
    if (from == IBV_QPS_INIT && to == IBV_QPS_RTR && paired)
        pairing_connect(qp);
    if ((mask & (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT)) != 0)
        pairing_set_patience(qp);
    if (to == IBV_QPS_RTS)
        pairing_ready(qp);
    return 0;
}

void soft_qp_move(struct soft_qp *qp, const struct ibv_qp_attr *attributes, int mask)
{
    pthread_mutex_lock(&qp->lock);
    take_attributes(qp, attributes, mask);
    /* The connection manager of the peer has its program's rnr_retry_count. */
    qp->qp->patience = PATIENCE_OF_PEER;
    set_state(qp, attributes->qp_state);
    pthread_mutex_unlock(&qp->lock);
}

void soft_qp_fail(struct soft_qp *qp)
{
    pthread_mutex_lock(&qp->lock);
    enum ibv_qp_state from = qp->attributes.qp_state;
    set_state(qp, IBV_QPS_ERR);
    pthread_mutex_unlock(&qp->lock);
    flush(qp, from);
}

void soft_qp_ended(struct soft_qp *qp)
{
    pthread_mutex_lock(&qp->lock);
    bool first = !qp->destroyed && qp->attributes.qp_state != IBV_QPS_ERR && qp->attributes.qp_state != IBV_QPS_RESET;
    if (first)
        set_state(qp, IBV_QPS_ERR);
    if (first && qp->ibv.srq != NULL)
        soft_async(soft_context(qp->ibv.context), IBV_EVENT_QP_LAST_WQE_REACHED, &qp->ibv);
    pthread_mutex_unlock(&qp->lock);
}

void soft_qp_finish(struct soft_qp *qp)
{
    soft_qp_ended(qp);
    pthread_mutex_lock(&qp->lock);
    /* Its program may have destroyed it, or used it for another connection. */
    struct queue_pair *ended = !qp->destroyed && qp->attributes.qp_state == IBV_QPS_ERR ? qp->qp : NULL;
    if (ended != NULL)
        object_hold(&ended->object);
    pthread_mutex_unlock(&qp->lock);
    if (ended == NULL)
        return;
    qp_finish_now(ended);
    object_drop(&ended->object);
}

EXPORT int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *out, int mask, struct ibv_qp_init_attr *initial)
{
    struct soft_qp *qp = (struct soft_qp *)ibv;

    UNUSED(mask);
    if (soft_inherited(ibv->context))
        return EIO;
    if (SOFT_FAULT(ibv->context, PLACE_CALL_QUERY_QP, qp->qp->number) != 0)
        return errno;
    pthread_mutex_lock(&qp->lock);
    /* An end that nobody has told of yet. */
    if (qp_state(qp->qp) == QP_ENDED && qp->attributes.qp_state > IBV_QPS_INIT)
        set_state(qp, IBV_QPS_ERR);
    *out = qp->attributes;
    out->cap = qp->initial.cap;
    out->path_mtu = out->path_mtu != 0 ? out->path_mtu : IBV_MTU_4096;
    *initial = (struct ibv_qp_init_attr){
        .qp_context = ibv->qp_context,
        .send_cq = ibv->send_cq,
        .recv_cq = ibv->recv_cq,
        .srq = ibv->srq,
        .cap = qp->initial.cap,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = qp->all_signaled,
    };
    pthread_mutex_unlock(&qp->lock);
    return 0;
}

EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode operation, uint32_t flags)
{
    UNUSED(qp);
    UNUSED(operation);
    UNUSED(flags);
    return 0;
}

/* ---- Posting ---- */

/* For a request that is posted. */
static int error_of(nd_status status)
{
    return status == ND_DEVICE_REMOVED ? EIO : status == ND_CONNECTION_INVALID ? EINVAL : soft_errno(status);
}

/* A window takes these, and they change nothing: what its region allows its owner remains so, and the device has no
 * atomics. */
#define OTHER_ACCESS_OF_WINDOWS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND)

static nd_status post_bind(struct soft_qp *qp, struct operation *operation, const struct ibv_send_wr *wr)
{
    struct soft_mw *mw = (struct soft_mw *)wr->bind_mw.mw;
    const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;

    if (mw == NULL || info->mr == NULL || (wr->bind_mw.rkey ^ mw->ibv.rkey) >> 8 != 0 || info->length == 0 ||
        (info->mw_access_flags &
         ~(unsigned)(IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | OTHER_ACCESS_OF_WINDOWS)) != 0)
        return ND_INVALID_PARAMETER;
    if ((info->mw_access_flags & IBV_ACCESS_REMOTE_READ) != 0)
        operation->flags |= ND_OP_FLAG_ALLOW_READ;
    if ((info->mw_access_flags & IBV_ACCESS_REMOTE_WRITE) != 0)
        operation->flags |= ND_OP_FLAG_ALLOW_WRITE;
    /* As the right to write, which qp_post_bind() looks at. */
    if ((info->mw_access_flags & IBV_ACCESS_REMOTE_ATOMIC) != 0 &&
        (((struct soft_mr *)info->mr)->region->flags & ND_MR_FLAG_ALLOW_LOCAL_WRITE) == 0)
        operation->refusal = ND_ACCESS_VIOLATION;
    operation->bind.has_key = true;
    operation->bind.key = (uint8_t)wr->bind_mw.rkey;
    operation->refuses_late = true;
    return qp_post_bind(qp->qp, operation, ((struct soft_mr *)info->mr)->region, mw->window, info->addr, info->length);
}

static nd_status post_data(struct soft_qp *qp, struct operation *operation, const struct ibv_send_wr *wr)
{
    ND2_SGE sge[MAX_SGE];

    if (wr->num_sge < 0 || wr->num_sge > (int)qp->qp->limits.initiator_sge)
        return ND_DATA_OVERRUN;
    return qp_post_data(qp->qp, operation, sge, soft_sges(sge, wr->sg_list, wr->num_sge));
}

static nd_status post_one(struct soft_qp *qp, const struct ibv_send_wr *wr)
{
    struct operation operation;
    uint32_t flags = 0;

    if ((wr->send_flags & IBV_SEND_SIGNALED) == 0 && !qp->all_signaled)
        flags |= ND_OP_FLAG_SILENT_SUCCESS;
    if ((wr->send_flags & IBV_SEND_FENCE) != 0)
        flags |= ND_OP_FLAG_READ_FENCE;
    switch (wr->opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_INV:
        if ((wr->send_flags & IBV_SEND_SOLICITED) != 0)
            flags |= ND_OP_FLAG_SEND_AND_SOLICIT_EVENT;
        if ((wr->send_flags & IBV_SEND_INLINE) != 0)
            flags |= ND_OP_FLAG_INLINE;
        operation_begin(&operation, (void *)(uintptr_t)wr->wr_id, Nd2RequestTypeSend, flags);
        if (wr->opcode == IBV_WR_SEND_WITH_INV) {
            operation.invalidates = true;
            operation.remote_token = htonl(wr->invalidate_rkey);
        }
        return post_data(qp, &operation, wr);
    case IBV_WR_RDMA_WRITE:
        if ((wr->send_flags & IBV_SEND_INLINE) != 0)
            flags |= ND_OP_FLAG_INLINE;
        operation_begin(&operation, (void *)(uintptr_t)wr->wr_id, Nd2RequestTypeWrite, flags);
        operation.remote_address = wr->wr.rdma.remote_addr;
        operation.remote_token = htonl(wr->wr.rdma.rkey);
        return post_data(qp, &operation, wr);
    case IBV_WR_RDMA_READ:
        operation_begin(&operation, (void *)(uintptr_t)wr->wr_id, Nd2RequestTypeRead, flags);
        operation.remote_address = wr->wr.rdma.remote_addr;
        operation.remote_token = htonl(wr->wr.rdma.rkey);
        return post_data(qp, &operation, wr);
    case IBV_WR_LOCAL_INV:
        operation_begin(&operation, (void *)(uintptr_t)wr->wr_id, Nd2RequestTypeInvalidate, flags);
        operation.remote_token = htonl(wr->invalidate_rkey);
        return qp_post_invalidate(qp->qp, &operation, NULL);
    case IBV_WR_BIND_MW:
        operation_begin(&operation, (void *)(uintptr_t)wr->wr_id, Nd2RequestTypeBind, flags);
        return post_bind(qp, &operation, wr);
    default:
        return ND_NOT_SUPPORTED;
    }
}

int soft_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct soft_qp *qp = (struct soft_qp *)ibv;
    int state = qp->state;
    /* iWARP cannot only receive. Programs that know this leave a server in RTR, such as ib_send_bw. */
    bool may_send = state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_ERR;
    nd_status status = may_send ? ND_SUCCESS : ND_CONNECTION_INVALID;
    bool list = wr != NULL && wr->next != NULL;

    if (SOFT_FAULT(ibv->context, PLACE_CALL_POST_SEND, qp->qp->number) != 0) {
        *bad = wr;
        return errno;
    }
    guarded_copy_refresh();
    if (list)
        qp_start_batch(qp->qp);
    while (wr != NULL && status == ND_SUCCESS) {
        status = post_one(qp, wr);
        if (status == ND_SUCCESS)
            wr = wr->next;
    }
    if (list)
        qp_submit_batch(qp->qp);
    if (status != ND_SUCCESS)
        *bad = wr;
    return error_of(status);
}

int soft_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct soft_qp *qp = (struct soft_qp *)ibv;
    ND2_SGE sge[MAX_SGE];

    if (SOFT_FAULT(ibv->context, PLACE_CALL_POST_RECV, qp->qp->number) != 0) {
        *bad = wr;
        return errno;
    }
    for (; wr != NULL; wr = wr->next) {
        int error = EINVAL;
        if (qp->state != IBV_QPS_RESET && wr->num_sge >= 0 && wr->num_sge <= (int)qp->qp->limits.receive_sge)
            error = error_of(
                qp_receive(qp->qp, (void *)(uintptr_t)wr->wr_id, sge, soft_sges(sge, wr->sg_list, wr->num_sge)));
        if (error != 0) {
            *bad = wr;
            return error;
        }
    }
    return 0;
}
