/* What programs call by struct verbs_context, to make extended queues and other things. */
#include "shim.h"

/* The library's own, of a context. NULL: the program called without having opened it. */
static struct context copy_of(struct ibv_context *ibv)
{
    struct context none = {.ibv = NULL};

    lock();
    struct context *context = (struct context *)object_find(OBJECT_CONTEXT, ibv);
    if (context != NULL)
        none = *context;
    unlock();
    return none;
}

#define ENTER(of)                         \
    caller = __builtin_return_address(0); \
    struct context context = copy_of(of); \
    if (context.ibv == NULL) {            \
        errno = EINVAL;                   \
        return NULL;                      \
    }

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *ibv, struct ibv_cq_init_attr_ex *attributes)
{
    ENTER(ibv)
    int error = call_fault(PLACE_CALL_CREATE_CQ, NULL, (uint64_t)live[LIVE_CQ]);
    if (error != 0) {
        errno = error;
        return NULL;
    }
    struct ibv_cq_init_attr_ex wanted = *attributes;
    struct ibv_comp_channel copy;
    wanted.channel = creation_begin(ibv, attributes->channel, &copy);
    struct ibv_cq_ex *ex = context.create_cq_ex(ibv, &wanted);
    creation_end(ibv, attributes->channel, &copy, (struct ibv_cq *)ex);
    if (ex != NULL) {
        live_change(LIVE_CQ, 1);
        lock();
        struct cq *cq = cq_of((struct ibv_cq *)ex);
        if (cq != NULL)
            extended_cq_take(cq);
        unlock();
    }
    return ex;
}

static struct ibv_qp *create_qp_ex(struct ibv_context *ibv, struct ibv_qp_init_attr_ex *attributes)
{
    ENTER(ibv)
    int error = call_fault(PLACE_CALL_CREATE_QP, NULL, (uint64_t)live[LIVE_QP]);
    if (error != 0) {
        errno = error;
        return NULL;
    }
    creation_begin(ibv, NULL, NULL);
    struct ibv_qp *made = context.create_qp_ex(ibv, attributes);
    creation_end(ibv, NULL, NULL, NULL);
    if (made != NULL) {
        live_change(LIVE_QP, 1);
        lock();
        struct qp *qp = qp_made(made, attributes->sq_sig_all);
        if (qp != NULL && (attributes->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0)
            extended_qp_take(qp, REAL(context.library, ibv_qp_to_qp_ex)(made));
        unlock();
    }
    return made;
}

static struct ibv_srq *create_srq_ex(struct ibv_context *ibv, struct ibv_srq_init_attr_ex *attributes)
{
    ENTER(ibv)
    int error = call_fault(PLACE_CALL_CREATE_SRQ, NULL, (uint64_t)live[LIVE_SRQ]);
    if (error != 0) {
        errno = error;
        return NULL;
    }
    creation_begin(ibv, NULL, NULL);
    struct ibv_srq *srq = context.create_srq_ex(ibv, attributes);
    creation_end(ibv, NULL, NULL, NULL);
    live_change(LIVE_SRQ, srq != NULL);
    return srq;
}

static struct ibv_wq *create_wq(struct ibv_context *ibv, struct ibv_wq_init_attr *attributes)
{
    ENTER(ibv)
    creation_begin(ibv, NULL, NULL);
    struct ibv_wq *wq = context.create_wq(ibv, attributes);
    creation_end(ibv, NULL, NULL, NULL);
    return wq;
}

static struct ibv_qp *open_qp(struct ibv_context *ibv, struct ibv_qp_open_attr *attributes)
{
    ENTER(ibv)
    creation_begin(ibv, NULL, NULL);
    struct ibv_qp *qp = context.open_qp(ibv, attributes);
    creation_end(ibv, NULL, NULL, NULL);
    return qp;
}

static struct ibv_mr *reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned access)
{
    ENTER(pd->context)
    int error = call_fault(PLACE_CALL_REG_MR, NULL, (uint64_t)live[LIVE_MR]);
    if (error != 0) {
        errno = error;
        return NULL;
    }
    struct ibv_mr *mr = context.reg_dm_mr(pd, dm, offset, length, access);
    live_change(LIVE_MR, mr != NULL);
    return mr;
}

static struct ibv_mr *alloc_null_mr(struct ibv_pd *pd)
{
    ENTER(pd->context)
    int error = call_fault(PLACE_CALL_REG_MR, NULL, (uint64_t)live[LIVE_MR]);
    if (error != 0) {
        errno = error;
        return NULL;
    }
    struct ibv_mr *mr = context.alloc_null_mr(pd);
    live_change(LIVE_MR, mr != NULL);
    return mr;
}

static int query_port(struct ibv_context *ibv, uint8_t port, struct ibv_port_attr *out, size_t size)
{
    caller = __builtin_return_address(0);
    struct context context = copy_of(ibv);
    int error = context.ibv == NULL ? EINVAL : call_fault(PLACE_CALL_QUERY_PORT, NULL, 0);

    if (error == 0)
        error = context.query_port(ibv, port, out, size);
    else
        errno = error;
    if (error == 0 && (context.port_down || context.gone))
        out->state = IBV_PORT_DOWN;
    return error;
}

const struct verbs_context extended_stand_ins = {
    .create_cq_ex = create_cq_ex,
    .create_qp_ex = create_qp_ex,
    .create_srq_ex = create_srq_ex,
    .create_wq = create_wq,
    .open_qp = open_qp,
    .reg_dm_mr = reg_dm_mr,
    .alloc_null_mr = alloc_null_mr,
    .query_port = query_port,
};
