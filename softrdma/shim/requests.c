/* What has become of each request: records, the order of completions, and when they are due. */
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
                              bool is_inline, const struct fault **datagram)
{
    uint64_t size = 0, random;
    unsigned kinds = datagram != NULL ? FAULT_BIT(FAULT_DUPLICATE) | FAULT_BIT(FAULT_REORDER) : 0;

    for (size_t i = 0; i < count; i++)
        size += sges[i].length;
    if (size > 0 && size <= UINT32_MAX)
        kinds |= FAULT_BIT(FAULT_CORRUPT);
    if (!carries_data(operation) || kinds == 0)
        return NULL;
    const struct fault *fault =
        message_fault(qp, operation, kinds, size, count > 0 ? (const void *)(uintptr_t)sges[0].addr : NULL,
                      count > 0 ? sges[0].length : 0, &random);
    if (fault == NULL)
        return NULL;
    if (fault->kind != FAULT_CORRUPT) {
        *datagram = fault;
        return NULL;
    }
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

void record_succeed(struct record *record)
{
    record->completion = make_completion(record, IBV_WC_SUCCESS);
    record->done = record->completion != NULL;
}

/* Whether the program is to have its completion. */
static bool is_wanted(const struct record *record, enum ibv_wc_status status)
{
    return !record->extra && (record->visible || status != IBV_WC_SUCCESS);
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
        if (record->cq != NULL && is_wanted(record, completion->wc.status))
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
        if (is_wanted(record, completion->wc.status))
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
    uint64_t kept_until_ns = datagrams_on_time(qp, now);
    if (kept_until_ns < *next)
        *next = kept_until_ns;
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
