/* The operations of a context: what programs call inline to post, poll and arm. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

static int poll_cq(unsigned library, struct ibv_cq *ibv, int count, struct ibv_wc *out)
{
    int given = 0;

    lock();
    struct context *context = context_of(library, ibv->context);
    struct cq *cq = context != NULL ? cq_of(ibv) : NULL;
    if (cq == NULL) {
        unlock();
        return -1;
    }
    int error = call_fault_locked(PLACE_CALL_POLL_CQ, NULL, 0);
    if (error != 0) {
        unlock();
        errno = error;
        return -1;
    }
    cq_drain(cq);
    while (given < count && cq->first != NULL) {
        struct completion *completion = cq->first;
        cq->first = completion->next;
        if (cq->first == NULL)
            cq->last = &cq->first;
        out[given++] = completion->wc;
        free(completion);
    }
    unlock();
    return given;
}

static int req_notify_cq(unsigned library, struct ibv_cq *ibv, int solicited_only)
{
    int error = call_fault(PLACE_CALL_REQ_NOTIFY_CQ, NULL, 0);

    if (error != 0)
        return errno = error;
    lock();
    struct context *context = context_of(library, ibv->context);
    struct cq *cq = context != NULL ? cq_of(ibv) : NULL;
    error = ENOMEM;
    if (cq != NULL) {
        cq_drain(cq);
        error = context->ops.req_notify_cq(ibv, solicited_only);
        if (error == 0) {
            cq->armed = solicited_only != 0 && cq->armed != ARMED ? ARMED_SOLICITED : ARMED;
            cq->news = cq->quiet = false;
        }
    }
    unlock();
    return error;
}

enum fault_operation operation_of(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return PLACE_WRITE;
    case IBV_WR_RDMA_READ:
        return PLACE_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return PLACE_COMPARE_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return PLACE_FETCH_ADD;
    case IBV_WR_LOCAL_INV:
        return PLACE_INVALIDATE;
    case IBV_WR_BIND_MW:
        return PLACE_BIND_WINDOW;
    case IBV_WR_SEND_WITH_INV:
        return PLACE_SEND_INVALIDATE;
    default:
        return PLACE_SEND;
    }
}

static const enum ibv_wc_opcode wc_opcodes[FAULT_OPERATIONS] = {
    [PLACE_SEND] = IBV_WC_SEND,           [PLACE_SEND_INVALIDATE] = IBV_WC_SEND,   [PLACE_WRITE] = IBV_WC_RDMA_WRITE,
    [PLACE_READ] = IBV_WC_RDMA_READ,      [PLACE_COMPARE_SWAP] = IBV_WC_COMP_SWAP, [PLACE_FETCH_ADD] = IBV_WC_FETCH_ADD,
    [PLACE_BIND_WINDOW] = IBV_WC_BIND_MW, [PLACE_INVALIDATE] = IBV_WC_LOCAL_INV,   [PLACE_RECEIVE] = IBV_WC_RECV,
};

struct record *send_record(struct qp *qp, uint64_t wr_id, bool signaled, enum fault_operation operation, uint64_t size,
                           const void *content, size_t content_size)
{
    adapter_at_request(qp);
    struct record *record = adapter_gone() ? NULL : record_new();
    if (record == NULL)
        return NULL;
    record->wr_id = wr_id;
    record->qp = qp;
    record->cq = qp->send_cq;
    record->operation = operation;
    record->wc_opcode = wc_opcodes[operation];
    record->visible = signaled || qp->all_signaled;
    qp->sent += size;
    if (qp->ends && qp->sent > qp->ends_after && !qp->failing)
        qp->failing = qp->ending = true;
    record->absent = qp->failing;
    if (qp->failing)
        return record;
    const struct fault *fault = request_fault(qp, operation, REQUEST_KINDS_LATER, false, size, content, content_size);
    if (fault == NULL)
        return record;
    record->silent = fault->kind == FAULT_SILENT;
    if (fault->kind == FAULT_DELAY || fault->kind == FAULT_HOLD)
        record->delay_ms = fault->ms;
    record->held = fault->kind == FAULT_HOLD;
    if (fault->kind == FAULT_STATUS) {
        record->status = (enum ibv_wc_status)fault->status;
        record->absent = qp->failing = true;
    }
    return record;
}

void after_posting(struct qp *qp)
{
    if (qp->ending) {
        qp->ending = false;
        connection_end(qp);
        qp->failed = true;
    }
    queue_deliver(qp, &qp->sends);
}

static int post_send(unsigned library, struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    int error;

    lock();
    struct context *context = context_of(library, ibv->context);
    struct qp *qp = context != NULL ? qp_of(ibv) : NULL;
    error = qp == NULL ? ENOMEM : call_fault_locked(PLACE_CALL_POST_SEND, qp, 0);
    for (; error == 0 && wr != NULL; wr = wr->next) {
        struct ibv_send_wr copy = *wr;
        uint64_t size = 0;
        bool may_read = wr->num_sge > 0 && (wr->opcode == IBV_WR_SEND || wr->opcode == IBV_WR_SEND_WITH_IMM ||
                                            wr->opcode == IBV_WR_SEND_WITH_INV || wr->opcode == IBV_WR_RDMA_WRITE ||
                                            wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
        for (int i = 0; i < wr->num_sge; i++)
            size += wr->sg_list[i].length;
        struct record *record = send_record(
            qp, wr->wr_id, (wr->send_flags & IBV_SEND_SIGNALED) != 0, operation_of(wr->opcode), size,
            may_read ? (const void *)(uintptr_t)wr->sg_list[0].addr : NULL, may_read ? wr->sg_list[0].length : 0);
        if (record == NULL) {
            error = adapter_gone() ? EIO : ENOMEM;
            break;
        }
        if (!record->absent) {
            struct ibv_sge wrong;
            const struct fault *fault = NULL;
            record->bounce =
                message_bounce(qp, record->operation, wr->sg_list, (size_t)wr->num_sge,
                               (wr->send_flags & IBV_SEND_INLINE) != 0, ibv->qp_type == IBV_QPT_UD ? &fault : NULL);
            if (record->bounce != NULL) {
                wrong = (struct ibv_sge){
                    .addr = (uintptr_t)record->bounce->bytes,
                    .length = record->bounce->size,
                    .lkey = record->bounce->mr != NULL ? record->bounce->mr->lkey : 0,
                };
                copy.sg_list = &wrong;
                copy.num_sge = 1;
            }
            copy.next = NULL;
            copy.wr_id = record->id;
            copy.send_flags |= IBV_SEND_SIGNALED;
            error = send_post(qp, &copy, record, fault);
            if (error != 0) {
                record_free(record);
                break;
            }
        }
        queue_add(&qp->sends, record);
    }
    if (error != 0)
        *bad = wr;
    if (qp != NULL)
        after_posting(qp);
    unlock();
    return error != 0 ? (errno = error) : 0;
}

static struct record *receive_record(struct qp *qp, uint64_t wr_id)
{
    struct record *record = record_new();

    if (record == NULL)
        return NULL;
    record->wr_id = wr_id;
    record->qp = qp;
    record->cq = qp != NULL ? qp->recv_cq : NULL;
    record->of_srq = qp == NULL;
    record->operation = PLACE_RECEIVE;
    record->wc_opcode = IBV_WC_RECV;
    record->visible = true;
    return record;
}

static int keep_late(struct qp *qp, const struct ibv_recv_wr *wr, struct record *record, uint64_t ms)
{
    size_t size = (size_t)wr->num_sge * sizeof *wr->sg_list;
    struct late_receive **at = &qp->late, *late = malloc(sizeof *late + size);

    if (late == NULL)
        return ENOMEM;
    while (*at != NULL)
        at = &(*at)->next;
    late->next = NULL;
    late->record = record;
    late->due_ns = now_ns() + ms * 1000000;
    late->wr = *wr;
    late->wr.next = NULL;
    late->wr.wr_id = record->id;
    late->wr.sg_list = late->sges;
    if (size > 0)
        memcpy(late->sges, wr->sg_list, size);
    *at = late;
    thread_wake();
    return 0;
}

/* To a queue pair, or to a shared receive queue. */
struct receiver {
    struct context *context;
    struct qp *qp; /* NULL: to the shared one */
    struct ibv_srq *srq;
};

static int give_receive(const struct receiver *to, struct ibv_recv_wr *wr)
{
    struct ibv_recv_wr *refused;

    return to->qp != NULL ? to->context->ops.post_recv(to->qp->ibv, wr, &refused)
                          : to->context->ops.post_srq_recv(to->srq, wr, &refused);
}

static int post_receive(const struct receiver *to, const struct ibv_recv_wr *wr)
{
    const struct fault *fault = NULL;
    struct ibv_recv_wr copy = *wr;
    uint64_t size = 0;
    int error;

    adapter_at_request(to->qp);
    if (adapter_gone())
        return EIO;
    struct record *record = receive_record(to->qp, wr->wr_id);
    if (record == NULL)
        return ENOMEM;
    for (int i = 0; i < wr->num_sge; i++)
        size += wr->sg_list[i].length;
    /* Whose receive it is in a shared queue turns out only when a message takes it. */
    if (to->qp != NULL)
        fault = request_fault(to->qp, PLACE_RECEIVE, FAULT_BIT(FAULT_LATE_RECEIVE), true, size, NULL, 0);
    /* Receives keep their order. */
    if (fault != NULL || (to->qp != NULL && to->qp->late != NULL)) {
        error = keep_late(to->qp, wr, record, fault != NULL ? fault->ms : 0);
    } else {
        copy.next = NULL;
        copy.wr_id = record->id;
        error = give_receive(to, &copy);
    }
    if (error != 0)
        record_free(record);
    return error;
}

/* With the lock, which it gives up at the end. */
static int post_receives(const struct receiver *to, enum fault_call call, struct ibv_recv_wr *wr,
                         struct ibv_recv_wr **bad)
{
    bool known = to->context != NULL && (to->qp != NULL || to->srq != NULL);
    int error = known ? call_fault_locked(call, to->qp, 0) : ENOMEM;

    for (; error == 0 && wr != NULL; wr = wr->next)
        if ((error = post_receive(to, wr)) != 0)
            break;
    if (error != 0)
        *bad = wr;
    unlock();
    return error != 0 ? (errno = error) : 0;
}

static int post_recv(unsigned library, struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    lock();
    struct receiver to = {.context = context_of(library, ibv->context)};
    if (to.context != NULL)
        to.qp = qp_of(ibv);
    return post_receives(&to, PLACE_CALL_POST_RECV, wr, bad);
}

static int post_srq_recv(unsigned library, struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    lock();
    const struct receiver to = {.context = context_of(library, ibv->context), .srq = ibv};
    return post_receives(&to, PLACE_CALL_POST_SRQ_RECV, wr, bad);
}

static struct ibv_mw *alloc_mw(unsigned library, struct ibv_pd *pd, enum ibv_mw_type type)
{
    int error = call_fault(PLACE_CALL_ALLOC_MW, NULL, (uint64_t)live[LIVE_MW]);

    if (error != 0) {
        errno = error;
        return NULL;
    }
    lock();
    struct context *context = context_of(library, pd->context);
    __typeof__(context->ops.alloc_mw) real = context != NULL ? context->ops.alloc_mw : NULL;
    unlock();
    struct ibv_mw *mw = real != NULL ? real(pd, type) : NULL;
    live_change(LIVE_MW, mw != NULL);
    return mw;
}

static int dealloc_mw(unsigned library, struct ibv_mw *mw)
{
    lock();
    struct context *context = context_of(library, mw->context);
    __typeof__(context->ops.dealloc_mw) real = context != NULL ? context->ops.dealloc_mw : NULL;
    unlock();
    int error = real != NULL ? real(mw) : ENOMEM;
    live_change(LIVE_MW, -(error == 0));
    return error;
}

/* Who compares a context's operations sees one set for each library. */
#define OPERATIONS_OF(library)                                                                                \
    static int poll_cq_##library(struct ibv_cq *cq, int count, struct ibv_wc *wc)                             \
    {                                                                                                         \
        caller = __builtin_return_address(0);                                                                 \
        return poll_cq(library, cq, count, wc);                                                               \
    }                                                                                                         \
    static int req_notify_cq_##library(struct ibv_cq *cq, int solicited_only)                                 \
    {                                                                                                         \
        caller = __builtin_return_address(0);                                                                 \
        return req_notify_cq(library, cq, solicited_only);                                                    \
    }                                                                                                         \
    static int post_send_##library(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)       \
    {                                                                                                         \
        caller = __builtin_return_address(0);                                                                 \
        return post_send(library, qp, wr, bad);                                                               \
    }                                                                                                         \
    static int post_recv_##library(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)       \
    {                                                                                                         \
        caller = __builtin_return_address(0);                                                                 \
        return post_recv(library, qp, wr, bad);                                                               \
    }                                                                                                         \
    static int post_srq_recv_##library(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) \
    {                                                                                                         \
        caller = __builtin_return_address(0);                                                                 \
        return post_srq_recv(library, srq, wr, bad);                                                          \
    }                                                                                                         \
    static struct ibv_mw *alloc_mw_##library(struct ibv_pd *pd, enum ibv_mw_type type)                        \
    {                                                                                                         \
        caller = __builtin_return_address(0);                                                                 \
        return alloc_mw(library, pd, type);                                                                   \
    }                                                                                                         \
    static int dealloc_mw_##library(struct ibv_mw *mw)                                                        \
    {                                                                                                         \
        caller = __builtin_return_address(0);                                                                 \
        return dealloc_mw(library, mw);                                                                       \
    }
OPERATIONS_OF(0)
OPERATIONS_OF(1)
OPERATIONS_OF(2)

#define TABLE_OF(library)                         \
    [library] = {                                 \
        .poll_cq = poll_cq_##library,             \
        .req_notify_cq = req_notify_cq_##library, \
        .post_send = post_send_##library,         \
        .post_recv = post_recv_##library,         \
        .post_srq_recv = post_srq_recv_##library, \
        .alloc_mw = alloc_mw_##library,           \
        .dealloc_mw = dealloc_mw_##library,       \
    }
const struct ibv_context_ops request_ops[MAX_LIBRARIES] = {TABLE_OF(0), TABLE_OF(1), TABLE_OF(2)};
