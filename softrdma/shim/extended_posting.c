/* Posting one request at a time: what programs call by struct ibv_qp_ex. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

/* A batch is kept until wr_complete(): the data of a request come after the call that begins it, and the faults of a
 * scenario may depend on them. */
struct request {
    struct request *next, *next_said;
    struct record *record;
    const struct fault *fault; /* of a datagram; NULL: none */
    enum ibv_wr_opcode opcode;
    bool tso;
    uint64_t wr_id;
    unsigned flags;
    uint32_t rkey;
    uint64_t remote_address, compare, swap;
    uint32_t imm_or_key;
    struct ibv_mw *mw;
    struct ibv_mw_bind_info bind;
    struct ibv_ah *ah;
    uint32_t remote_qpn, remote_qkey, remote_srqn;
    bool has_ud, has_xrc, is_inline, has_data;
    void *header;
    uint16_t header_size, mss;
    struct ibv_sge *sges;
    size_t sge_count;
    char *bytes;
    size_t size;
};

struct batch {
    struct request *first, **last, *newest;
    int error;
};

static struct qp *qp_of_extended(struct ibv_qp_ex *ex)
{
    return (struct qp *)object_find(OBJECT_QP, &ex->qp_base);
}

static void batch_free(struct batch *batch)
{
    while (batch != NULL && batch->first != NULL) {
        struct request *request = batch->first;
        batch->first = request->next;
        free(request->sges);
        free(request->bytes);
        free(request->header);
        free(request);
    }
    free(batch);
}

static void wr_start(struct ibv_qp_ex *ex)
{
    lock();
    struct qp *qp = qp_of_extended(ex);
    if (qp != NULL) {
        batch_free(qp->batch);
        qp->batch = calloc(1, sizeof *qp->batch);
        if (qp->batch != NULL)
            qp->batch->last = &qp->batch->first;
    }
    unlock();
}

static void wr_abort(struct ibv_qp_ex *ex)
{
    lock();
    struct qp *qp = qp_of_extended(ex);
    if (qp != NULL) {
        batch_free(qp->batch);
        qp->batch = NULL;
    }
    unlock();
}

/* A new request of the batch, in memory that nobody else sees before wr_complete(). */
static struct request *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode)
{
    struct request *request = calloc(1, sizeof *request);

    lock();
    struct qp *qp = qp_of_extended(ex);
    struct batch *batch = qp != NULL ? qp->batch : NULL;
    if (batch != NULL && request == NULL)
        batch->error = ENOMEM;
    if (batch != NULL && request != NULL) {
        *batch->last = request;
        batch->last = &request->next;
        batch->newest = request;
    }
    unlock();
    if (request == NULL || batch == NULL) {
        static _Thread_local struct request nobodys;
        free(request);
        request = &nobodys;
    }
    request->opcode = opcode;
    request->wr_id = ex->wr_id;
    request->flags = ex->wr_flags;
    return request;
}

static struct request *newest(struct ibv_qp_ex *ex, struct batch **out)
{
    struct qp *qp = qp_of_extended(ex);

    *out = qp != NULL ? qp->batch : NULL;
    return *out != NULL ? (*out)->newest : NULL;
}

static void wr_rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t address, uint32_t imm)
{
    struct request *request = begin(ex, opcode);

    request->rkey = rkey;
    request->remote_address = address;
    request->imm_or_key = imm;
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t compare, uint64_t swap)
{
    struct request *request = begin(ex, IBV_WR_ATOMIC_CMP_AND_SWP);

    request->rkey = rkey;
    request->remote_address = address;
    request->compare = compare;
    request->swap = swap;
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, uint64_t add)
{
    struct request *request = begin(ex, IBV_WR_ATOMIC_FETCH_AND_ADD);

    request->rkey = rkey;
    request->remote_address = address;
    request->compare = add;
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
    struct request *request = begin(ex, IBV_WR_BIND_MW);

    request->mw = mw;
    request->rkey = rkey;
    request->bind = *info;
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
    begin(ex, IBV_WR_LOCAL_INV)->imm_or_key = rkey;
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address)
{
    wr_rdma(ex, IBV_WR_RDMA_READ, rkey, address, 0);
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address)
{
    wr_rdma(ex, IBV_WR_RDMA_WRITE, rkey, address, 0);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, __be32 imm)
{
    wr_rdma(ex, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, address, imm);
}

static void wr_send(struct ibv_qp_ex *ex)
{
    begin(ex, IBV_WR_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
    begin(ex, IBV_WR_SEND_WITH_IMM)->imm_or_key = imm;
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey)
{
    begin(ex, IBV_WR_SEND_WITH_INV)->imm_or_key = rkey;
}

static void wr_send_tso(struct ibv_qp_ex *ex, void *header, uint16_t size, uint16_t mss)
{
    struct request *request = begin(ex, IBV_WR_TSO);

    request->header = header != NULL ? malloc(size) : NULL;
    if (request->header != NULL)
        memcpy(request->header, header, request->header_size = size);
    request->mss = mss;
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
    struct batch *batch;

    lock();
    struct request *request = newest(ex, &batch);
    if (request != NULL) {
        request->has_ud = true;
        request->ah = ah;
        request->remote_qpn = qpn;
        request->remote_qkey = qkey;
    }
    unlock();
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *ex, uint32_t srqn)
{
    struct batch *batch;

    lock();
    struct request *request = newest(ex, &batch);
    if (request != NULL) {
        request->has_xrc = true;
        request->remote_srqn = srqn;
    }
    unlock();
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
    struct batch *batch;

    lock();
    struct request *request = newest(ex, &batch);
    if (request != NULL) {
        free(request->sges);
        request->sges = malloc((count + 1) * sizeof *list);
        request->has_data = true;
        request->size = 0;
        request->sge_count = request->sges != NULL ? count : 0;
        if (request->sges == NULL)
            batch->error = ENOMEM;
        for (size_t i = 0; i < request->sge_count; i++) {
            request->sges[i] = list[i];
            request->size += list[i].length;
        }
    }
    unlock();
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t address, uint32_t length)
{
    const struct ibv_sge sge = {.addr = address, .length = length, .lkey = lkey};

    wr_set_sge_list(ex, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_data_buf *list)
{
    struct batch *batch;
    size_t size = 0;

    for (size_t i = 0; i < count; i++)
        size += list[i].length;
    lock();
    struct request *request = newest(ex, &batch);
    if (request != NULL) {
        free(request->bytes);
        request->bytes = malloc(size + 1);
        request->is_inline = request->has_data = true;
        request->size = 0;
        if (request->bytes == NULL)
            batch->error = ENOMEM;
        for (size_t i = 0; i < count && request->bytes != NULL; i++) {
            memcpy(request->bytes + request->size, list[i].addr, list[i].length);
            request->size += list[i].length;
        }
    }
    unlock();
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *address, size_t length)
{
    const struct ibv_data_buf buffer = {.addr = address, .length = length};

    wr_set_inline_data_list(ex, 1, &buffer);
}

/* Says one request to the library as the program did. */
static void repeat(struct qp *qp, const struct request *request, uint64_t id)
{
    struct ibv_qp_ex *ex = qp->extended;
    const struct ibv_qp_ex *real = &qp->real;

    ex->wr_id = id;
    ex->wr_flags = request->flags | IBV_SEND_SIGNALED;
    switch (request->opcode) {
    case IBV_WR_RDMA_WRITE:
        real->wr_rdma_write(ex, request->rkey, request->remote_address);
        break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        real->wr_rdma_write_imm(ex, request->rkey, request->remote_address, request->imm_or_key);
        break;
    case IBV_WR_RDMA_READ:
        real->wr_rdma_read(ex, request->rkey, request->remote_address);
        break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        real->wr_atomic_cmp_swp(ex, request->rkey, request->remote_address, request->compare, request->swap);
        break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        real->wr_atomic_fetch_add(ex, request->rkey, request->remote_address, request->compare);
        break;
    case IBV_WR_LOCAL_INV:
        real->wr_local_inv(ex, request->imm_or_key);
        break;
    case IBV_WR_BIND_MW:
        real->wr_bind_mw(ex, request->mw, request->rkey, &request->bind);
        break;
    case IBV_WR_SEND_WITH_IMM:
        real->wr_send_imm(ex, request->imm_or_key);
        break;
    case IBV_WR_SEND_WITH_INV:
        real->wr_send_inv(ex, request->imm_or_key);
        break;
    case IBV_WR_TSO:
        real->wr_send_tso(ex, request->header, request->header_size, request->mss);
        break;
    default:
        real->wr_send(ex);
    }
    if (request->has_ud)
        real->wr_set_ud_addr(ex, request->ah, request->remote_qpn, request->remote_qkey);
    if (request->has_xrc)
        real->wr_set_xrc_srqn(ex, request->remote_srqn);
    if (request->is_inline)
        real->wr_set_inline_data(ex, request->bytes, request->size);
    else if (request->has_data)
        real->wr_set_sge_list(ex, request->sge_count, request->sges);
}

static const void *content_of(const struct request *request, size_t *size)
{
    bool sends = request->opcode == IBV_WR_SEND || request->opcode == IBV_WR_SEND_WITH_IMM ||
                 request->opcode == IBV_WR_SEND_WITH_INV || request->opcode == IBV_WR_RDMA_WRITE ||
                 request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;

    *size = request->is_inline ? request->size : request->sge_count > 0 ? request->sges[0].length : 0;
    if (!sends || *size == 0)
        return NULL;
    return request->is_inline ? request->bytes : (const void *)(uintptr_t)request->sges[0].addr;
}

/* The same as a request of ibv_post_send(3). Of datagrams only. */
static struct ibv_send_wr wr_of(const struct request *request, struct ibv_sge *inline_sge)
{
    *inline_sge = (struct ibv_sge){.addr = (uintptr_t)request->bytes, .length = (uint32_t)request->size};
    struct ibv_send_wr wr = {
        .wr_id = request->record->id,
        .sg_list = request->is_inline ? inline_sge : request->sges,
        .num_sge = request->is_inline ? 1 : (int)request->sge_count,
        .opcode = request->opcode,
        .send_flags = request->flags | IBV_SEND_SIGNALED | (request->is_inline ? IBV_SEND_INLINE : 0),
        .imm_data = request->imm_or_key,
        .wr.ud = {.ah = request->ah, .remote_qpn = request->remote_qpn, .remote_qkey = request->remote_qkey},
    };
    if (request->opcode == IBV_WR_TSO) {
        wr.tso.hdr = request->header;
        wr.tso.hdr_sz = request->header_size;
        wr.tso.mss = request->mss;
    }
    return wr;
}

static bool reorders(const struct request *request)
{
    return request->fault != NULL && request->fault->kind == FAULT_REORDER;
}

/* Requests as the adapter gets them. */
struct order {
    struct request *first, **last;
};

static void order_add(struct order *order, struct request *request)
{
    request->next_said = NULL;
    *order->last = request;
    order->last = &request->next_said;
}

/* Makes a record of each request of the batch. Those that the adapter is to have are said, and those that wait for one
 * that overtakes them are late. */
static int prepare(struct qp *qp, struct batch *batch, struct order *said, struct order *late)
{
    for (struct request *request = batch->first; request != NULL; request = request->next) {
        size_t content_size;
        const void *content = content_of(request, &content_size);
        struct record *record = send_record(qp, request->wr_id, (request->flags & IBV_SEND_SIGNALED) != 0,
                                            operation_of(request->opcode), request->size, content, content_size);
        if (record == NULL)
            return adapter_gone() ? EIO : ENOMEM;
        request->record = record;
        if (record->absent)
            continue;
        struct ibv_sge bytes = {.addr = (uintptr_t)request->bytes, .length = (uint32_t)request->size};
        record->bounce = message_bounce(qp, record->operation, request->is_inline ? &bytes : request->sges,
                                        request->is_inline ? 1 : request->sge_count, request->is_inline,
                                        qp->ibv->qp_type == IBV_QPT_UD ? &request->fault : NULL);
        if (record->bounce != NULL && request->is_inline)
            memcpy(request->bytes, record->bounce->bytes, request->size);
        else if (record->bounce != NULL) {
            request->sges[0] = (struct ibv_sge){
                .addr = (uintptr_t)record->bounce->bytes,
                .length = record->bounce->size,
                .lkey = record->bounce->mr->lkey,
            };
            request->sge_count = 1;
        }
        order_add(reorders(request) ? late : said, request);
        if (!reorders(request) && late->first != NULL) {
            *said->last = late->first;
            said->last = late->last;
            *late = (struct order){NULL, &late->first};
        }
    }
    return 0;
}

static int say(struct qp *qp, const struct order *order)
{
    uint64_t wr_id = qp->extended->wr_id;
    unsigned flags = qp->extended->wr_flags;

    if (order->first == NULL)
        return 0;
    qp->real.wr_start(qp->extended);
    for (const struct request *request = order->first; request != NULL; request = request->next_said)
        repeat(qp, request, request->record->id);
    int error = qp->real.wr_complete(qp->extended);
    qp->extended->wr_id = wr_id;
    qp->extended->wr_flags = flags;
    return error;
}

static void keep_all(struct qp *qp, const struct order *order)
{
    for (const struct request *request = order->first; request != NULL; request = request->next_said) {
        struct ibv_sge sge;
        struct ibv_send_wr wr = wr_of(request, &sge);
        /* A datagram may be lost. */
        if (datagram_keep(qp, &wr, request->record, reorders(request)) != 0)
            record_succeed(request->record);
    }
}

static void add_all(struct qp *qp, const struct batch *batch)
{
    for (const struct request *request = batch->first; request != NULL; request = request->next) {
        if (request->fault != NULL && request->fault->kind == FAULT_DUPLICATE) {
            struct ibv_sge sge;
            struct ibv_send_wr wr = wr_of(request, &sge);
            datagram_repeat(qp, &wr, request->record);
        }
        queue_add(&qp->sends, request->record);
    }
}

/* All or nothing, as the library's own. What comes twice comes again behind the others, because the batch as the
 * program has made it must have room without that. */
static int complete(struct qp *qp, struct batch *batch)
{
    struct order said = {NULL, &said.first}, late = {NULL, &late.first};
    bool failing = qp->failing;
    int error = batch->error != 0 ? batch->error : call_fault_locked(PLACE_CALL_POST_SEND, qp, 0);

    if (error == 0)
        error = prepare(qp, batch, &said, &late);
    if (error == 0) {
        error = say(qp, &said);
        if (datagrams_can_wait(qp, error)) {
            keep_all(qp, &said);
            error = 0;
        }
    }
    if (error == 0) {
        add_all(qp, batch);
        if (said.first != NULL)
            datagrams_post(qp);
        keep_all(qp, &late);
    } else {
        qp->failing = failing;
        for (struct request *request = batch->first; request != NULL; request = request->next)
            if (request->record != NULL)
                record_free(request->record);
    }
    after_posting(qp);
    return error;
}

static int wr_complete(struct ibv_qp_ex *ex)
{
    caller = __builtin_return_address(0);
    lock();
    struct qp *qp = qp_of_extended(ex);
    struct batch *batch = qp != NULL ? qp->batch : NULL;
    int error = batch != NULL ? complete(qp, batch) : ENOMEM;
    if (qp != NULL)
        qp->batch = NULL;
    batch_free(batch);
    unlock();
    return error;
}

#define POSTERS(DO)             \
    DO(wr_atomic_cmp_swp)       \
    DO(wr_atomic_fetch_add)     \
    DO(wr_bind_mw)              \
    DO(wr_local_inv)            \
    DO(wr_rdma_read)            \
    DO(wr_rdma_write)           \
    DO(wr_rdma_write_imm)       \
    DO(wr_send)                 \
    DO(wr_send_imm)             \
    DO(wr_send_inv)             \
    DO(wr_send_tso)             \
    DO(wr_set_ud_addr)          \
    DO(wr_set_xrc_srqn)         \
    DO(wr_set_inline_data)      \
    DO(wr_set_inline_data_list) \
    DO(wr_set_sge)              \
    DO(wr_set_sge_list)         \
    DO(wr_start)                \
    DO(wr_complete)             \
    DO(wr_abort)

void extended_qp_take(struct qp *qp, struct ibv_qp_ex *ex)
{
    if (ex == NULL || qp->extended != NULL)
        return;
    qp->extended = ex;
    qp->real = *ex;
#define TAKE(name)        \
    if (ex->name != NULL) \
        ex->name = name;
    POSTERS(TAKE)
#undef TAKE
}

void extended_qp_give(struct qp *qp)
{
    struct ibv_qp_ex *ex = qp->extended;

    batch_free(qp->batch);
    qp->batch = NULL;
    if (ex == NULL)
        return;
#define GIVE(name) ex->name = qp->real.name;
    POSTERS(GIVE)
#undef GIVE
    qp->extended = NULL;
}
