/* Posting requests and taking completions. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

/* ---- Wrong bytes ---- */

void bounce_free(struct bounce *bounce)
{
    if (bounce != NULL && bounce->mr != NULL)
        REAL(bounce->library, ibv_dereg_mr)(bounce->mr);
    free(bounce);
}

static bool carries_data(enum fault_operation operation)
{
    return operation == PLACE_SEND || operation == PLACE_SEND_INVALIDATE || operation == PLACE_WRITE;
}

struct bounce *message_bounce(struct qp *qp, enum fault_operation operation, const struct ibv_sge *sges, size_t count,
                              bool is_inline)
{
    uint64_t size = 0, random;

    for (size_t i = 0; i < count; i++)
        size += sges[i].length;
    if (!carries_data(operation) || size == 0 || size > UINT32_MAX)
        return NULL;
    if (message_fault(qp, operation, size, (const void *)(uintptr_t)sges[0].addr, sges[0].length, &random) == NULL)
        return NULL;
    struct bounce *bounce = malloc(sizeof *bounce + size);
    if (bounce == NULL)
        return NULL;
    *bounce = (struct bounce){.library = qp->context->library, .size = (uint32_t)size};
    for (size_t i = 0, used = 0; i < count; used += sges[i++].length)
        memcpy(bounce->bytes + used, (const void *)(uintptr_t)sges[i].addr, sges[i].length);
    bounce->bytes[random % size] ^= (char)(1 + (random >> 32) % 255);
    if (!is_inline) {
        bounce->mr = REAL(bounce->library, ibv_reg_mr)(qp->ibv->pd, bounce->bytes, size, 0);
        if (bounce->mr == NULL) {
            free(bounce);
            return NULL;
        }
    }
    return bounce;
}

/* ---- Records ---- */

#define TAG       0x6E64ull /* the upper bits of a record's number */
#define MAX_CHUNK 4096u
#define CHUNK     1024u

static struct record *chunks[MAX_CHUNK];
static uint32_t chunk_count;
static struct record *unused;

struct record *record_new(void)
{
    if (unused == NULL && chunk_count < MAX_CHUNK) {
        struct record *chunk = calloc(CHUNK, sizeof *chunk);
        if (chunk == NULL)
            return NULL;
        for (uint32_t i = 0; i < CHUNK; i++) {
            chunk[i].id = TAG << 48 | (chunk_count * CHUNK + i);
            chunk[i].next = unused;
            unused = &chunk[i];
        }
        chunks[chunk_count++] = chunk;
    }
    struct record *record = unused;
    if (record == NULL)
        return NULL;
    unused = record->next;
    *record = (struct record){.id = record->id, .in_use = true};
    return record;
}

struct record *record_find(uint64_t id)
{
    uint32_t index = (uint32_t)id;

    if (id >> 48 != TAG || index / CHUNK >= chunk_count)
        return NULL;
    struct record *record = &chunks[index / CHUNK][index % CHUNK];
    return record->in_use && record->id == id ? record : NULL;
}

/* Its number never comes back soon: 16 bits count the uses. */
void record_free(struct record *record)
{
    uint64_t use = (record->id >> 32 & 0xFFFF) + 1;

    free(record->completion);
    bounce_free(record->bounce);
    *record = (struct record){.id = TAG << 48 | (use & 0xFFFF) << 32 | (uint32_t)record->id, .next = unused};
    unused = record;
}

static void each_record(void (*act)(struct record *, const void *), const void *what)
{
    for (uint32_t i = 0; i < chunk_count; i++)
        for (uint32_t j = 0; j < CHUNK; j++)
            if (chunks[i][j].in_use)
                act(&chunks[i][j], what);
}

static void free_if_of_cq(struct record *record, const void *what)
{
    if (record->cq == what && record->qp == NULL)
        record_free(record);
}

void records_of_cq_free(const struct cq *cq)
{
    each_record(free_if_of_cq, cq);
}

static void orphan_if_of_qp(struct record *record, const void *what)
{
    if (record->qp == what)
        record->qp = NULL;
}

void records_of_qp_orphan(const struct qp *qp)
{
    each_record(orphan_if_of_qp, qp);
}

/* ---- Lists ---- */

void queue_add(struct queue *queue, struct record *record)
{
    record->next = NULL;
    *queue->last = record;
    queue->last = &record->next;
}

/* What the adapter has still completes, or never. */
void queue_free(struct queue *queue)
{
    while (queue->first != NULL) {
        struct record *record = queue->first;
        queue->first = record->next;
        record->qp = NULL;
        bounce_free(record->bounce);
        record->bounce = NULL;
        if (record->absent || record->done)
            record_free(record);
    }
    queue->last = &queue->first;
}

static void give(struct cq *cq, struct completion *completion, bool silent)
{
    bool failed = completion->wc.status != IBV_WC_SUCCESS;

    if (cq->failed) {
        free(completion);
        return;
    }
    completion->next = NULL;
    *cq->last = completion;
    cq->last = &completion->next;
    cq->quiet |= silent;
    cq->news |= !silent;
    if (silent || cq->armed == NOT_ARMED || (cq->armed == ARMED_SOLICITED && !failed))
        return;
    cq->armed = NOT_ARMED;
    if (cq->channel != NULL)
        channel_raise(cq->channel, cq);
}

static struct completion *make_completion(const struct record *record, enum ibv_wc_status status)
{
    struct completion *completion = calloc(1, sizeof *completion);

    if (completion == NULL)
        return NULL;
    completion->wc.wr_id = record->wr_id;
    completion->wc.status = status;
    completion->wc.qp_num = record->qp != NULL ? record->qp->ibv->qp_num : 0;
    completion->wc.opcode = record->wc_opcode;
    return completion;
}

/* The adapter flushes what it has. What never reached it is flushed here. */
void qp_fail(struct qp *qp)
{
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};

    qp->failing = true;
    if (qp->failed)
        return;
    qp->failed = true;
    REAL(qp->context->library, ibv_modify_qp)(qp->ibv, &attributes, IBV_QP_STATE);
}

void queue_deliver(struct qp *qp, struct queue *queue)
{
    uint64_t now = now_ns();

    for (struct record *record = queue->first; record != NULL; record = queue->first) {
        if (record->absent && !record->done) {
            enum ibv_wc_status status = qp->failed ? IBV_WC_WR_FLUSH_ERR : record->status;
            if (status == IBV_WC_SUCCESS)
                status = IBV_WC_WR_FLUSH_ERR;
            record->completion = make_completion(record, status);
            record->done = record->completion != NULL;
            qp_fail(qp);
        }
        if (!record->done)
            return;
        /* A connection that has ended brings back what was held. */
        if (record->due_ns > now && !qp->failed)
            return;
        enum ibv_wc_status *status = &record->completion->wc.status;
        if (*status == IBV_WC_SUCCESS && (queue->failed || (record->due_ns > now && record->held)))
            *status = IBV_WC_WR_FLUSH_ERR;
        queue->failed |= *status != IBV_WC_SUCCESS;
        queue->first = record->next;
        if (queue->first == NULL)
            queue->last = &queue->first;
        struct completion *completion = record->completion;
        record->completion = NULL;
        if (record->cq != NULL && (record->visible || completion->wc.status != IBV_WC_SUCCESS))
            give(record->cq, completion, record->silent);
        else
            free(completion);
        record_free(record);
    }
}

/* ---- Completions of the adapter ---- */

static void receive_ended(struct cq *cq, struct qp *qp, struct record *record)
{
    struct ibv_wc *wc = &record->completion->wc;
    const struct fault *fault = wc->status == IBV_WC_SUCCESS ? request_fault(qp, PLACE_RECEIVE, REQUEST_KINDS_LATER,
                                                                             !record->of_srq, wc->byte_len, NULL, 0)
                                                             : NULL;

    record->qp = qp;
    record->cq = cq;
    if (fault != NULL) {
        record->silent = fault->kind == FAULT_SILENT;
        if (fault->kind == FAULT_DELAY || fault->kind == FAULT_HOLD) {
            record->held = fault->kind == FAULT_HOLD;
            record->due_ns = fault->ms == FAULT_FOREVER ? NEVER : now_ns() + fault->ms * 1000000;
            thread_wake();
        }
        if (fault->kind == FAULT_STATUS) {
            wc->status = (enum ibv_wc_status)fault->status;
            wc->byte_len = 0;
        }
    }
    queue_add(&qp->receives, record);
    queue_deliver(qp, &qp->receives);
    if (fault != NULL && fault->kind == FAULT_STATUS) {
        qp_fail(qp);
        queue_deliver(qp, &qp->sends);
    }
}

static void completion_came(struct cq *cq, struct completion *completion)
{
    struct record *record = record_find(completion->wc.wr_id);

    if (record == NULL) {
        give(cq, completion, false);
        return;
    }
    completion->wc.wr_id = record->wr_id;
    record->done = true;
    record->cq = cq;
    struct qp *qp = record->qp;
    if (record->operation == PLACE_RECEIVE && qp == NULL)
        qp = qp_numbered(cq->context, completion->wc.qp_num);
    if (qp == NULL) {
        if (record->visible || completion->wc.status != IBV_WC_SUCCESS)
            give(cq, completion, false);
        else
            free(completion);
        record_free(record);
        return;
    }
    record->completion = completion;
    if (record->operation == PLACE_RECEIVE) {
        receive_ended(cq, qp, record);
        return;
    }
    if (completion->wc.status != IBV_WC_SUCCESS)
        qp->failing = qp->failed = true;
    else if (record->delay_ms != 0) {
        record->due_ns = record->delay_ms == FAULT_FOREVER ? NEVER : now_ns() + record->delay_ms * 1000000;
        thread_wake();
    }
    queue_deliver(qp, &qp->sends);
}

void cq_drain(struct cq *cq)
{
    struct ibv_wc wcs[16];

    for (;;) {
        if (cq->extended != NULL) {
            struct completion *completion = calloc(1, sizeof *completion);
            if (completion == NULL)
                return;
            if (extended_cq_poll(cq, completion) != 0) {
                free(completion);
                return;
            }
            completion_came(cq, completion);
            continue;
        }
        int count = cq->context->ops.poll_cq(cq->ibv, COUNT_OF(wcs), wcs);
        for (int i = 0; i < count; i++) {
            struct completion *completion = calloc(1, sizeof *completion);
            if (completion == NULL)
                return;
            completion->wc = wcs[i];
            completion_came(cq, completion);
        }
        if (count < (int)COUNT_OF(wcs))
            return;
    }
}

void cq_on_event(struct cq *cq)
{
    /* The library's queue is not armed any more. What the program does not want to hear of must not end its wait. */
    enum arming wanted = cq->armed;
    cq_drain(cq);
    if (cq->armed == NOT_ARMED)
        return;
    if (cq->armed == ARMED_SOLICITED && cq->news) {
        cq->armed = NOT_ARMED;
        channel_raise(cq->channel, cq);
        return;
    }
    cq->context->ops.req_notify_cq(cq->ibv, wanted == ARMED_SOLICITED);
    cq_drain(cq);
}

/* ---- Operations of a context ---- */

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
            struct ibv_send_wr *refused;
            struct ibv_sge wrong;
            record->bounce = message_bounce(qp, record->operation, wr->sg_list, (size_t)wr->num_sge,
                                            (wr->send_flags & IBV_SEND_INLINE) != 0);
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
            error = context->ops.post_send(ibv, &copy, &refused);
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

static int post_recv(unsigned library, struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    int error;

    lock();
    struct context *context = context_of(library, ibv->context);
    struct qp *qp = context != NULL ? qp_of(ibv) : NULL;
    error = qp == NULL ? ENOMEM : call_fault_locked(PLACE_CALL_POST_RECV, qp, 0);
    for (; error == 0 && wr != NULL; wr = wr->next) {
        adapter_at_request(qp);
        if (adapter_gone()) {
            error = EIO;
            break;
        }
        struct ibv_recv_wr copy = *wr, *refused;
        struct record *record = receive_record(qp, wr->wr_id);
        if (record == NULL) {
            error = ENOMEM;
            break;
        }
        uint64_t size = 0;
        for (int i = 0; i < wr->num_sge; i++)
            size += wr->sg_list[i].length;
        const struct fault *fault =
            request_fault(qp, PLACE_RECEIVE, FAULT_BIT(FAULT_LATE_RECEIVE), true, size, NULL, 0);
        /* Receives keep their order. */
        if (fault != NULL || qp->late != NULL)
            error = keep_late(qp, wr, record, fault != NULL ? fault->ms : 0);
        else {
            copy.next = NULL;
            copy.wr_id = record->id;
            error = context->ops.post_recv(ibv, &copy, &refused);
        }
        if (error != 0) {
            record_free(record);
            break;
        }
    }
    if (error != 0)
        *bad = wr;
    unlock();
    return error != 0 ? (errno = error) : 0;
}

static int post_srq_recv(unsigned library, struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    int error;

    lock();
    struct context *context = context_of(library, ibv->context);
    error = context == NULL ? ENOMEM : call_fault_locked(PLACE_CALL_POST_SRQ_RECV, NULL, 0);
    for (; error == 0 && wr != NULL; wr = wr->next) {
        struct ibv_recv_wr copy = *wr, *refused;
        adapter_at_request(NULL);
        if (adapter_gone()) {
            error = EIO;
            break;
        }
        struct record *record = receive_record(NULL, wr->wr_id);
        if (record == NULL) {
            error = ENOMEM;
            break;
        }
        copy.next = NULL;
        copy.wr_id = record->id;
        error = context->ops.post_srq_recv(ibv, &copy, &refused);
        if (error != 0) {
            record_free(record);
            break;
        }
    }
    if (error != 0)
        *bad = wr;
    unlock();
    return error != 0 ? (errno = error) : 0;
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
    live[LIVE_MW] += mw != NULL;
    return mw;
}

static int dealloc_mw(unsigned library, struct ibv_mw *mw)
{
    lock();
    struct context *context = context_of(library, mw->context);
    __typeof__(context->ops.dealloc_mw) real = context != NULL ? context->ops.dealloc_mw : NULL;
    unlock();
    int error = real != NULL ? real(mw) : ENOMEM;
    live[LIVE_MW] -= error == 0;
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

/* ---- Time ---- */

static void on_time(struct object *object, void *what)
{
    struct qp *qp = (struct qp *)object;
    uint64_t now = now_ns(), *next = what;

    while (qp->late != NULL && (qp->late->due_ns <= now || qp->failed)) {
        struct late_receive *late = qp->late;
        struct ibv_recv_wr *refused;
        qp->late = late->next;
        if (qp->context->ops.post_recv(qp->ibv, &late->wr, &refused) != 0)
            record_free(late->record);
        free(late);
    }
    if (qp->late != NULL && qp->late->due_ns < *next)
        *next = qp->late->due_ns;
    struct queue *queues[] = {&qp->sends, &qp->receives};
    for (unsigned i = 0; i < COUNT_OF(queues); i++) {
        queue_deliver(qp, queues[i]);
        const struct record *first = queues[i]->first;
        if (first != NULL && first->done && first->due_ns < *next)
            *next = first->due_ns;
    }
}

uint64_t requests_on_time(void)
{
    uint64_t next = NEVER;

    each_object(OBJECT_QP, on_time, &next);
    return next;
}
