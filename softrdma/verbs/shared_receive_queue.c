/* Shared receive queues. */
#include "soft.h"
#include "face.h"
#include "guarded.h"

#include <errno.h>
#include <stdlib.h>

uint32_t soft_sges(ND2_SGE *out, const struct ibv_sge *sge, int count)
{
    for (int i = 0; i < count; i++)
        out[i] = (ND2_SGE){(void *)(uintptr_t)sge[i].addr, sge[i].length, htonl(sge[i].lkey)};
    return (uint32_t)count;
}

EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *ibv, struct ibv_srq_init_attr *attributes)
{
    struct soft_pd *pd = (struct soft_pd *)ibv;
    struct adapter *adapter = adapter_of(ibv->context);
    struct ibv_srq_attr *limits = &attributes->attr;
    int error = SOFT_FAULT(ibv->context, PLACE_CALL_CREATE_SRQ, 0);

    if (soft_inherited(ibv->context))
        error = EIO;
    else if (adapter_gone(adapter))
        error = ENODEV;
    else if (error == 0 && (limits->max_wr == 0 || limits->max_wr > SOFT_MAX_SRQ_WR || limits->max_sge > MAX_SGE))
        error = EINVAL;
    struct soft_srq *srq = error == 0 ? calloc(1, sizeof *srq) : NULL;
    if (error == 0 && srq == NULL)
        error = ENOMEM;
    if (error == 0)
        error = soft_errno(srq_create(adapter, pd, limits->max_wr, limits->max_sge, 0, srq, &srq->srq));
    if (error != 0) {
        free(srq);
        return soft_null(error);
    }
    limits->max_sge = srq->srq->max_sge;
    srq->ibv.context = ibv->context;
    srq->ibv.srq_context = attributes->srq_context;
    srq->ibv.pd = ibv;
    pthread_mutex_init(&srq->ibv.mutex, NULL);
    pthread_cond_init(&srq->ibv.cond, NULL);
    pd->users++;
    return &srq->ibv;
}

struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attributes)
{
    UNUSED(context);
    if ((attributes->comp_mask & IBV_SRQ_INIT_ATTR_PD) == 0 ||
        ((attributes->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) != 0 && attributes->srq_type != IBV_SRQT_BASIC))
        return soft_null(EOPNOTSUPP);
    struct ibv_srq_init_attr basic = {.srq_context = attributes->srq_context, .attr = attributes->attr};
    struct ibv_srq *srq = ibv_create_srq(attributes->pd, &basic);
    attributes->attr = basic.attr;
    return srq;
}

/* The threshold of the engine counts entries that are left; below the limit, the event comes once. */
void face_below_threshold(struct shared_queue *engine)
{
    struct soft_srq *srq = engine->object.face;

    if (atomic_exchange(&srq->limit_armed, false))
        soft_async(soft_context(srq->ibv.context), IBV_EVENT_SRQ_LIMIT_REACHED, &srq->ibv);
}

EXPORT int ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attributes, int mask)
{
    struct soft_srq *srq = (struct soft_srq *)ibv;
    uint32_t depth = (mask & IBV_SRQ_MAX_WR) != 0 ? attributes->max_wr : 0;
    uint32_t limit = (mask & IBV_SRQ_LIMIT) != 0 ? attributes->srq_limit : 0;

    if (soft_inherited(ibv->context))
        return EIO;
    if ((mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT)) != 0 || ((mask & IBV_SRQ_MAX_WR) != 0 && depth == 0) ||
        depth > SOFT_MAX_SRQ_WR || limit > (depth != 0 ? depth : srq->srq->ring.depth))
        return EINVAL;
    if ((mask & IBV_SRQ_LIMIT) != 0)
        srq->limit_armed = limit > 0;
    nd_status status = srq_modify(srq->srq, depth, limit);
    return status == ND_BUFFER_OVERFLOW ? EINVAL : soft_errno(status);
}

EXPORT int ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *out)
{
    struct soft_srq *srq = (struct soft_srq *)ibv;

    lock_share(&srq->srq->lock);
    *out = (struct ibv_srq_attr){
        .max_wr = srq->srq->ring.depth,
        .max_sge = srq->srq->max_sge,
        .srq_limit = srq->limit_armed ? srq->srq->threshold : 0,
    };
    lock_unshare(&srq->srq->lock);
    return 0;
}

EXPORT int ibv_destroy_srq(struct ibv_srq *ibv)
{
    struct soft_srq *srq = (struct soft_srq *)ibv;

    if (soft_inherited(ibv->context))
        return 0;
    if (srq->users > 0)
        return errno = EBUSY;
    ((struct soft_pd *)ibv->pd)->users--;
    srq_silence(srq->srq);
    soft_async_forget(soft_context(ibv->context), IBV_EVENT_SRQ_LIMIT_REACHED, ibv);
    object_close(&srq->srq->object);
    pthread_mutex_destroy(&ibv->mutex);
    pthread_cond_destroy(&ibv->cond);
    free(srq);
    return 0;
}

int soft_post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct soft_srq *srq = (struct soft_srq *)ibv;
    ND2_SGE sge[MAX_SGE];

    if (SOFT_FAULT(ibv->context, PLACE_CALL_POST_SRQ_RECV, 0) != 0) {
        *bad = wr;
        return errno;
    }
    for (; wr != NULL; wr = wr->next) {
        int error = EINVAL;
        if (wr->num_sge >= 0 && wr->num_sge <= (int)srq->srq->max_sge)
            error = soft_errno(
                srq_receive(srq->srq, (void *)(uintptr_t)wr->wr_id, sge, soft_sges(sge, wr->sg_list, wr->num_sge)));
        if (error != 0) {
            *bad = wr;
            return error;
        }
    }
    return 0;
}
