/* The queue pairs, completion queues and shared receive queues that identifiers have, and the attributes with which a
 * program moves a queue pair of its own. */
#include "cm.h"

#include <rdma/rdma_verbs.h>
#include <stdlib.h>
#include <string.h>

#define HOP_LIMIT 64
#define RETRIES   7 /* of both kinds, so those of a receiver that is not ready have no end */

/* ---- Completion queues that nobody named ---- */

static void destroy_queue(struct ibv_cq **cq, struct ibv_comp_channel **channel)
{
    if (*cq != NULL)
        ibv_destroy_cq(*cq);
    if (*channel != NULL)
        ibv_destroy_comp_channel(*channel);
    *cq = NULL;
    *channel = NULL;
}

static void destroy_queues(struct rdma_cm_id *id)
{
    destroy_queue(&id->send_cq, &id->send_cq_channel);
    destroy_queue(&id->recv_cq, &id->recv_cq_channel);
}

static bool create_queue(struct rdma_cm_id *id, uint32_t depth, struct ibv_cq **cq, struct ibv_comp_channel **channel)
{
    if (depth == 0)
        return true;
    *channel = ibv_create_comp_channel(id->verbs);
    if (*channel != NULL)
        *cq = ibv_create_cq(id->verbs, (int)depth, id, *channel, 0);
    return *cq != NULL;
}

/* The identifier's queues serve what needs one and has none. */
static bool create_queues(struct rdma_cm_id *id, uint32_t send_depth, uint32_t receive_depth)
{
    if (create_queue(id, receive_depth, &id->recv_cq, &id->recv_cq_channel) &&
        create_queue(id, send_depth, &id->send_cq, &id->send_cq_channel))
        return true;
    int error = errno;
    destroy_queues(id);
    errno = error;
    return false;
}

/* ---- Shared receive queues ---- */

static bool usable(const struct rdma_cm_id *id)
{
    return id != NULL && !cm_foreign(((const struct cm_id *)id)->generation) && id->verbs != NULL;
}

EXPORT int rdma_create_srq_ex(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attributes)
{
    if (!usable(id) || attributes == NULL || (attributes->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) == 0)
        return cm_fail(EINVAL);
    if ((attributes->comp_mask & IBV_SRQ_INIT_ATTR_PD) == 0 || attributes->pd == NULL) {
        attributes->pd = id->pd;
        attributes->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
    }
    struct ibv_srq *srq = ibv_create_srq_ex(id->verbs, attributes);
    if (srq == NULL)
        return -1;
    if (id->pd == NULL)
        id->pd = attributes->pd;
    id->srq = srq;
    return 0;
}

EXPORT int rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *domain, struct ibv_srq_init_attr *attributes)
{
    if (attributes == NULL)
        return cm_fail(EINVAL);
    struct ibv_srq_init_attr_ex extended = {
        .srq_context = attributes->srq_context,
        .attr = attributes->attr,
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
        .srq_type = IBV_SRQT_BASIC,
        .pd = domain,
    };
    int result = rdma_create_srq_ex(id, &extended);
    attributes->attr = extended.attr;
    return result;
}

EXPORT void rdma_destroy_srq(struct rdma_cm_id *id)
{
    if (id == NULL || id->srq == NULL)
        return;
    ibv_destroy_srq(id->srq);
    id->srq = NULL;
    if (id->qp == NULL)
        destroy_queues(id);
}

/* ---- Queue pairs ---- */

static bool differs(const struct ibv_cq *own, const struct ibv_cq *named)
{
    return own != NULL && named != NULL && own != named;
}

EXPORT int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attributes)
{
    if (!usable(id) || attributes == NULL || id->qp != NULL)
        return cm_fail(EINVAL);
    if (CM_FAULT(NULL, PLACE_CALL_RDMA_CREATE_QP) != 0)
        return -1;
    if ((attributes->comp_mask & IBV_QP_INIT_ATTR_PD) == 0 || attributes->pd == NULL) {
        attributes->comp_mask |= IBV_QP_INIT_ATTR_PD;
        attributes->pd = id->pd;
    }
    if (attributes->pd->context != id->verbs || differs(id->recv_cq, attributes->recv_cq) ||
        differs(id->send_cq, attributes->send_cq))
        return cm_fail(EINVAL);

    bool has_send = attributes->send_cq != NULL || id->send_cq != NULL;
    bool has_receive = attributes->recv_cq != NULL || id->recv_cq != NULL;
    bool made = !has_send || !has_receive;
    if (!create_queues(id, has_send ? 0 : attributes->cap.max_send_wr, has_receive ? 0 : attributes->cap.max_recv_wr))
        return -1;
    if (attributes->send_cq == NULL)
        attributes->send_cq = id->send_cq;
    if (attributes->recv_cq == NULL)
        attributes->recv_cq = id->recv_cq;
    if (attributes->srq == NULL)
        attributes->srq = id->srq;
    /* A queue pair that only receives, or only sends, still needs both. */
    if (attributes->send_cq == NULL)
        attributes->send_cq = attributes->recv_cq;
    if (attributes->recv_cq == NULL)
        attributes->recv_cq = attributes->send_cq;
    struct ibv_qp *qp = ibv_create_qp_ex(id->verbs, attributes);
    if (qp == NULL) {
        int error = errno;
        if (made)
            destroy_queues(id);
        return cm_fail(error);
    }
    const struct ibv_qp_attr initial = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    };
    soft_qp_move((struct soft_qp *)qp, &initial, IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    id->pd = qp->pd;
    id->qp = qp;
    return 0;
}

EXPORT int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *domain, struct ibv_qp_init_attr *attributes)
{
    if (attributes == NULL)
        return cm_fail(EINVAL);
    struct ibv_qp_init_attr_ex extended = soft_extended(domain, attributes);
    int result = rdma_create_qp_ex(id, &extended);
    attributes->send_cq = extended.send_cq;
    attributes->recv_cq = extended.recv_cq;
    attributes->srq = extended.srq;
    attributes->cap = extended.cap;
    return result;
}

EXPORT void rdma_destroy_qp(struct rdma_cm_id *rdma)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || rdma->qp == NULL)
        return;
    if (!cm_foreign(id->generation)) {
        /* The end of the connection is none of this queue pair's from now on. */
        pthread_mutex_lock(&id->lock);
        id->qp_number = 0;
        pthread_mutex_unlock(&id->lock);
    }
    ibv_destroy_qp(rdma->qp);
    rdma->qp = NULL;
    destroy_queues(rdma);
}

/* ---- Attributes for a queue pair that the program moves ---- */

/* The GID of zeros stands for the peer of the identifier. */
static void ready_to_receive(const struct cm_id *id, struct ibv_qp_attr *out, int *mask)
{
    out->ah_attr.is_global = 1;
    out->ah_attr.grh.hop_limit = HOP_LIMIT;
    out->ah_attr.port_num = 1;
    out->path_mtu = IBV_MTU_4096;
    out->max_dest_rd_atomic = (uint8_t)id->inbound;
    *mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
            IBV_QP_MIN_RNR_TIMER;
}

static void ready_to_send(const struct cm_id *id, struct ibv_qp_attr *out, int *mask)
{
    out->timeout = id->ack_timeout;
    out->retry_cnt = out->rnr_retry = RETRIES;
    out->max_rd_atomic = (uint8_t)id->outbound;
    *mask =
        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
}

/* As the kernel has it: before an attempt any state gets INIT's attributes, without rights. */
static int fill(const struct cm_id *id, struct ibv_qp_attr *out, int *mask)
{
    bool attempted = id->state >= CM_CONNECTING;
    bool agreed = id->state >= CM_OFFERED && id->state <= CM_ESTABLISHED;

    if (id->state >= CM_ENDED)
        return EINVAL;
    if (out->qp_state == IBV_QPS_INIT || !attempted) {
        out->port_num = 1;
        if (attempted)
            out->qp_access_flags = IBV_ACCESS_REMOTE_WRITE | (id->inbound > 0 ? IBV_ACCESS_REMOTE_READ : 0);
        *mask = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
        return 0;
    }
    if (!agreed || (out->qp_state != IBV_QPS_RTR && out->qp_state != IBV_QPS_RTS))
        return EINVAL;
    if (out->qp_state == IBV_QPS_RTR)
        ready_to_receive(id, out, mask);
    else
        ready_to_send(id, out, mask);
    return 0;
}

void cm_make_qp_ready(struct cm_id *id)
{
    struct ibv_qp_attr to_receive = {.qp_state = IBV_QPS_RTR}, to_send = {.qp_state = IBV_QPS_RTS};
    int receive_mask, send_mask;

    if (id->rdma.qp == NULL)
        return;
    pthread_mutex_lock(&id->lock);
    ready_to_receive(id, &to_receive, &receive_mask);
    ready_to_send(id, &to_send, &send_mask);
    pthread_mutex_unlock(&id->lock);
    soft_qp_move((struct soft_qp *)id->rdma.qp, &to_receive, receive_mask);
    soft_qp_move((struct soft_qp *)id->rdma.qp, &to_send, send_mask);
}

EXPORT int rdma_init_qp_attr(struct rdma_cm_id *rdma, struct ibv_qp_attr *out, int *mask)
{
    struct cm_id *id = cm_id(rdma);

    if (!usable(rdma) || out == NULL || mask == NULL || out->qp_state > IBV_QPS_ERR)
        return cm_fail(EINVAL);
    struct ibv_qp_attr attributes = {.qp_state = out->qp_state};
    pthread_mutex_lock(&id->lock);
    int error = fill(id, &attributes, mask);
    pthread_mutex_unlock(&id->lock);
    if (error != 0)
        return cm_fail(error);
    *out = attributes;
    return 0;
}
