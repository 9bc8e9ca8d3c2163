/* The verbs part of the data path (see ../data_path.h). */

#include <arpa/inet.h>

#include "../data_path.h"

_Static_assert(sizeof(struct ibv_sge) <= NATIVE_ELEMENT_SIZE, "an element fits");

#define LARGEST_TOKEN UINT32_MAX

struct native_request {
    struct ibv_send_wr wr;
};

struct native_result {
    struct ibv_wc wc;
};

/* The errno of a refused request. Some providers return it, some its negative, some return -1 and set errno. */
static int post_error(int result)
{
    if (result != -1)
        return result > 0 ? result : -result;
    return errno ? errno : EIO;
}

#define ROW(operation, number, words, completed, opcode, ...) [number] = opcode,
static const uint8_t native_opcodes[] = {NDPY_OPERATIONS(ROW)};
#undef ROW

HOT void *native_elements(void *out, const struct ndpy_element *elements, uint32_t count)
{
    struct ibv_sge *sge = out;

    for (uint32_t i = 0; i < count; i++)
        sge[i] = (struct ibv_sge){elements[i].address, elements[i].length, (uint32_t)elements[i].token};
    return sge;
}

enum { SPECIAL_TRAITS = TO_DESTINATION | HAS_IMMEDIATE | HAS_OPERANDS };

/* Adds what only requests with one of SPECIAL_TRAITS have. */
APART void special_request(struct ibv_send_wr *wr, uint32_t operation, const struct ndpy_remote *remote)
{
    uint32_t traits = operations[operation].traits;

    if (traits & HAS_IMMEDIATE)
        wr->imm_data = htonl(remote->immediate);
    if (traits & HAS_OPERANDS) {
        wr->wr.atomic.remote_addr = remote->address;
        wr->wr.atomic.compare_add = remote->operands[0];
        wr->wr.atomic.swap = remote->operands[1];
        wr->wr.atomic.rkey = remote->token;
    }
    if (traits & HAS_OTHER_CALL) {
        /* For extended_post(): the length, and whether it is the whole region. */
        wr->wr.atomic.swap = remote->length;
        wr->imm_data = (uint32_t)remote->operands[1];
    }
    if (traits & TO_DESTINATION && !remote->operands[0]) {
        wr->qp_type.xrc.remote_srqn = (uint32_t)remote->operands[1];
    } else if (traits & TO_DESTINATION) {
        wr->wr.ud.ah = (struct ibv_ah *)(uintptr_t)remote->operands[0];
        wr->wr.ud.remote_qpn = (uint32_t)remote->operands[1];
        wr->wr.ud.remote_qkey = (uint32_t)(remote->operands[1] >> 32);
    }
}

HOT void native_data_request(void *request, uint32_t operation, void *elements, uint32_t count,
                             const struct ndpy_remote *remote)
{
    struct native_request *out = request;

    out->wr.opcode = native_opcodes[operation];
    out->wr.sg_list = elements;
    out->wr.num_sge = (int)count;
    out->wr.wr.rdma.remote_addr = remote->address;
    out->wr.wr.rdma.rkey = remote->token;
    out->wr.invalidate_rkey = remote->token;
    if (operations[operation].traits & SPECIAL_TRAITS)
        special_request(&out->wr, operation, remote);
}

/* See Quirk.SIW_OVERTAKES_READS and Quirk.SIW_STUMBLES_OVER_EMPTY_ELEMENTS. */
APART void work_around_siw(struct ibv_send_wr *wr, const struct ndpy_slot *slot)
{
    int count = 0;

    if (slot->operation == NDPY_READ)
        wr->send_flags &= ~(unsigned int)IBV_SEND_FENCE;
    else
        wr->send_flags |= IBV_SEND_FENCE;
    /* siw looks at the only element of a read, even if it is none. */
    if (wr->num_sge < 2)
        return;
    for (int i = 0; i < wr->num_sge; i++)
        if (wr->sg_list[i].length)
            wr->sg_list[count++] = wr->sg_list[i];
    wr->num_sge = count;
}

HOT unsigned int native_flags(const struct ndpy_slot *slot, int signaled)
{
    unsigned int flags = signaled ? IBV_SEND_SIGNALED : 0;

    if (!(slot->flags & (NDPY_READ_FENCE | NDPY_SOLICITED | NDPY_INLINE)))
        return flags;
    if (slot->flags & NDPY_READ_FENCE)
        flags |= IBV_SEND_FENCE;
    if (slot->flags & NDPY_SOLICITED)
        flags |= IBV_SEND_SOLICITED;
    if (slot->flags & NDPY_INLINE)
        flags |= IBV_SEND_INLINE;
    return flags;
}

HOT int native_post(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *request, int signaled)
{
    struct ibv_send_wr *wr = &((struct native_request *)request)->wr, *bad;
    int error;

    wr->wr_id = (uintptr_t)slot;
    wr->next = NULL;
    wr->send_flags = native_flags(slot, signaled);
    if (qp->works_around_siw)
        work_around_siw(wr, slot);
    error = ibv_post_send(qp->native, wr, &bad);
    if (!error)
        return 0;
    error = post_error(error);
    /* siw knows of the connection's end before the connection manager has told ndpy. */
    return error == ENOTCONN && qp->works_around_siw ? NATIVE_NEVER_COMPLETES : error;
}

/* siw refuses a receive without elements, but takes one element of no bytes. */
static struct ibv_sge empty_element;

HOT int native_receive(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *elements, uint32_t count)
{
    struct ibv_recv_wr wr = {.wr_id = (uintptr_t)slot, .sg_list = elements, .num_sge = (int)count}, *bad;
    int error = ibv_post_recv(qp->native, &wr, &bad);

    if (error && !count) {
        wr.sg_list = &empty_element;
        wr.num_sge = 1;
        error = ibv_post_recv(qp->native, &wr, &bad);
    }
    return error ? post_error(error) : 0;
}

static int native_receive_shared(struct ndpy_shared_queue *queue, struct ndpy_slot *slot, void *elements,
                                 uint32_t count)
{
    struct ibv_recv_wr wr = {.wr_id = (uintptr_t)slot, .sg_list = elements, .num_sge = (int)count}, *bad;
    int error = ibv_post_srq_recv(queue->native, &wr, &bad);

    if (error && !count) {
        wr.sg_list = &empty_element;
        wr.num_sge = 1;
        error = ibv_post_srq_recv(queue->native, &wr, &bad);
    }
    return error ? post_error(error) : 0;
}

_Static_assert(sizeof(struct native_result) == sizeof(struct ibv_wc), "an array of results is one of ibv_wc");

static int native_poll(struct ndpy_completion_queue *cq, void *results, uint32_t count)
{
    return ibv_poll_cq(cq->native, (int)count, results);
}

static struct ndpy_slot *native_slot(const void *result)
{
    return (struct ndpy_slot *)(uintptr_t)((const struct native_result *)result)->wc.wr_id;
}

static uint32_t native_queue_pair(const void *result)
{
    return ((const struct native_result *)result)->wc.qp_num;
}

static uint32_t status_of(const void *result)
{
    return ((const struct native_result *)result)->wc.status;
}

static uint32_t native_vendor_status(const void *result)
{
    return ((const struct native_result *)result)->wc.vendor_err;
}

static uint64_t native_bytes(const void *result)
{
    return ((const struct native_result *)result)->wc.byte_len;
}

/* rxe gives every result of a receive the flag IBV_WC_GRH. */
static int are_plain(const void *results, int count)
{
    const struct native_result *found = results;
    uint32_t statuses = 0, flags = 0;

#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        statuses |= (uint32_t)found[i].wc.status;
        flags |= found[i].wc.wc_flags;
    }
    return !statuses && !(flags & ~(uint32_t)IBV_WC_GRH);
}

/* Pass on immediate data or an invalidated token. They share a field, because no message has both. */
HOT void native_received(const void *result, struct ndpy_completion *out)
{
    const struct ibv_wc *wc = &((const struct native_result *)result)->wc;

    if (wc->wc_flags & IBV_WC_WITH_IMM) {
        out->flags |= wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM ? NDPY_IMMEDIATE | NDPY_WRITTEN : NDPY_IMMEDIATE;
        out->vendor_status = ntohl(wc->imm_data);
    } else if (wc->wc_flags & (IBV_WC_WITH_INV | IBV_WC_IP_CSUM_OK) && wc->invalidated_rkey) {
        /* rxe passes on the kernel's number for IBV_WC_WITH_INV. In libibverbs this number is a flag of datagrams. */
        out->flags |= NDPY_INVALIDATED;
        out->vendor_status = wc->invalidated_rkey;
    }
}

static void native_datagram(const void *result, const struct ndpy_slot *slot, struct ndpy_completion *out)
{
    const struct ibv_wc *wc = &((const struct native_result *)result)->wc;
    struct ndpy_details *details = malloc(sizeof *details);

    out->nbytes -= HEADER_SIZE;
    if (!details)
        return;
    *details = (struct ndpy_details){
        .context = out->context,
        .source_number = wc->src_qp,
        .source_lid = wc->slid,
        .pkey_index = wc->pkey_index,
        .service_level = wc->sl,
        .path_bits = wc->dlid_path_bits,
        .has_header = (wc->wc_flags & IBV_WC_GRH) != 0,
        .kinds = NDPY_SOURCE,
    };
    memcpy(details->header, slot->ring->headers + (size_t)HEADER_SIZE * slot->index, HEADER_SIZE);
    out->context = (uintptr_t)details;
    out->flags |= NDPY_DETAILED;
}

HOT uint32_t translate_status(uint32_t status, uint32_t operation, uint32_t flags)
{
    if (flags & NDPY_UNWRITABLE && status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR)
        return NDPY_ACCESS_VIOLATION;
    switch (status) {
    case IBV_WC_SUCCESS:
        return NDPY_SUCCESS;
    case IBV_WC_WR_FLUSH_ERR:
        return NDPY_CANCELED;
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_REM_ACCESS_ERR:
        return NDPY_ACCESS_VIOLATION;
    case IBV_WC_LOC_LEN_ERR:
        return operation == NDPY_RECEIVE ? NDPY_BUFFER_OVERFLOW : NDPY_DATA_OVERRUN;
    case IBV_WC_REM_INV_REQ_ERR:
        /* The responder reports this for a send that is longer than its receive. */
        return operation == NDPY_SEND ? NDPY_DATA_OVERRUN : NDPY_REMOTE_ERROR;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
        return NDPY_IO_TIMEOUT;
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_INV_RD_REQ_ERR:
    case IBV_WC_REM_ABORT_ERR:
        return NDPY_REMOTE_ERROR;
    case IBV_WC_LOC_QP_OP_ERR:
        /* The software adapters report this for a receive shorter than its message, and for an unknown local token. */
        if (operation == NDPY_RECEIVE)
            return NDPY_BUFFER_OVERFLOW;
        return operation == NDPY_BIND || operation == NDPY_INVALIDATE ? NDPY_INVALID_REQUEST : NDPY_ACCESS_VIOLATION;
    case IBV_WC_MW_BIND_ERR:
        return NDPY_INVALID_REQUEST;
    case IBV_WC_LOC_EEC_OP_ERR:
    case IBV_WC_BAD_RESP_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_GENERAL_ERR:
        return NDPY_INTERNAL_ERROR;
    default:
        return NDPY_UNKNOWN;
    }
}

static uint32_t verbs_translate_all(const void *results, int got, struct ndpy_completion *out);
static void translate_other(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out);
/* extended.c: ndpy_drain() of an extended completion queue. */
static int drain_extended(struct ndpy_completion_queue *cq);

/* The functions at the end of struct ibv_qp_ex that the headers may lack. A library that lacks one makes no queue pair
 * for it. */
struct newer_functions {
    void (*atomic_write)(struct ibv_qp_ex *qp, uint32_t token, uint64_t address, const void *value);
    void (*flush)(struct ibv_qp_ex *qp, uint32_t token, uint64_t address, size_t length, uint8_t kinds, uint8_t level);
};

static const struct newer_functions *newer_functions_of(struct ibv_qp_ex *qp)
{
    return (const void *)((char *)qp + offsetof(struct ibv_qp_ex, wr_abort) + sizeof qp->wr_abort);
}

/* enum ibv_placement_type's and enum ibv_selectivity_level's numbers, which the headers may lack. */
enum { LEVEL_RANGE = 0, LEVEL_REGION = 1 };

/* The other calls, for the queue pairs of ndpy_create_queue_pair(). */
static int extended_post(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *request, int signaled)
{
    const struct ibv_send_wr *wr = &((struct native_request *)request)->wr;
    struct ibv_qp_ex *native = ibv_qp_to_qp_ex(qp->native);
    const struct newer_functions *newer = newer_functions_of(native);
    int error;

    ibv_wr_start(native);
    native->wr_id = (uintptr_t)slot;
    native->wr_flags = native_flags(slot, signaled);
    if (slot->operation == NDPY_ATOMIC_WRITE)
        newer->atomic_write(native, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, &wr->wr.atomic.compare_add);
    else
        newer->flush(native, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, wr->wr.atomic.swap,
                     (uint8_t)wr->wr.atomic.compare_add, wr->imm_data ? LEVEL_REGION : LEVEL_RANGE);
    error = ibv_wr_complete(native);
    return error ? post_error(error) : 0;
}

static const struct native_steps extended_verbs = {
    .elements = native_elements,
    .data_request = native_data_request,
    .post = extended_post,
    .no_memory = ENOMEM,
};

static const struct native_steps verbs = {
    .elements = native_elements,
    .data_request = native_data_request,
    .post = native_post,
    .receive = native_receive,
    .receive_shared = native_receive_shared,
    .no_memory = ENOMEM,
    .extended = &extended_verbs,
    .result_size = sizeof(struct native_result),
    .poll = native_poll,
    .slot = native_slot,
    .queue_pair = native_queue_pair,
    .status = status_of,
    .vendor_status = native_vendor_status,
    .bytes = native_bytes,
    .are_plain = are_plain,
    .received = native_received,
    .datagram = native_datagram,
    .translate_status = translate_status,
    .translate_all = verbs_translate_all,
    .translate_other = translate_other,
};

/* ---- the functions of ndpy_abi.h and shim.h ---- */

APART uint32_t verbs_translate_all(const void *results, int got, struct ndpy_completion *out)
{
    return translate_all(&verbs, results, got, out);
}

APART void translate_other(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out)
{
    translate_rest(&verbs, result, slot, out);
}

int ndpy_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
              const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote)
{
    struct native_request request;

    return post_request(&verbs, qp, operation, flags, context, elements, count, remote, &request);
}

int ndpy_post_shared(struct ndpy_shared_queue *queue, uint32_t slot, uint64_t context,
                     const struct ndpy_element *elements, uint32_t count)
{
    return post_shared(&verbs, queue, slot, context, elements, count);
}

int ndpy_post_marker(struct ndpy_queue_pair *qp)
{
    struct native_request request;

    return post_marker(&verbs, qp, &request);
}

int ndpy_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, struct ibv_mw *window,
                   struct ibv_mr *region, uint64_t address, uint64_t length, uint32_t access, uint32_t token)
{
    struct native_request request;

    memset(&request, 0, sizeof request);
    request.wr.opcode = IBV_WR_BIND_MW;
    request.wr.bind_mw.mw = window;
    request.wr.bind_mw.rkey = token;
    request.wr.bind_mw.bind_info.mr = region;
    request.wr.bind_mw.bind_info.addr = address;
    request.wr.bind_mw.bind_info.length = length;
    request.wr.bind_mw.bind_info.mw_access_flags = access;
    return post_window_request(&verbs, qp, NDPY_BIND, flags, context, length, &request);
}

int ndpy_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, uint32_t token)
{
    struct native_request request;

    memset(&request, 0, sizeof request);
    request.wr.opcode = IBV_WR_LOCAL_INV;
    request.wr.invalidate_rkey = token;
    return post_window_request(&verbs, qp, NDPY_INVALIDATE, flags, context, 0, &request);
}

/* Posts a request of ibv_bind_mw(3). */
static int post_bind_of_type_1(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *request, int signaled)
{
    const struct native_request *bind = request;
    struct ibv_mw_bind native = {
        .wr_id = (uintptr_t)slot,
        .send_flags = native_flags(slot, signaled),
        .bind_info = bind->wr.bind_mw.bind_info,
    };
    int error = ibv_bind_mw(qp->native, bind->wr.bind_mw.mw, &native);

    return error ? post_error(error) : 0;
}

int ndpy_post_bind_of_type_1(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, struct ibv_mw *window,
                             struct ibv_mr *region, uint64_t address, uint64_t length, uint32_t access,
                             uint32_t operation)
{
    static const struct native_steps of_type_1 = {.post = post_bind_of_type_1, .no_memory = ENOMEM};
    struct native_request request;

    memset(&request, 0, sizeof request);
    request.wr.bind_mw.mw = window;
    request.wr.bind_mw.bind_info.mr = region;
    request.wr.bind_mw.bind_info.addr = address;
    request.wr.bind_mw.bind_info.length = length;
    request.wr.bind_mw.bind_info.mw_access_flags = access;
    return post_window_request(&of_type_1, qp, operation, flags, context, length, &request);
}

void ndpy_queue_pair_work_around_siw(struct ndpy_queue_pair *qp)
{
    qp->works_around_siw = 1;
}

int ndpy_poll(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, uint32_t *alike)
{
    struct native_result results[NDPY_POLL_BATCH];

    return poll_results(&verbs, cq, out, count, alike, results);
}

int ndpy_drain(struct ndpy_completion_queue *cq)
{
    struct native_result results[NDPY_POLL_BATCH];

    if (cq->is_extended)
        return drain_extended(cq);
    return drain_results(&verbs, cq, results);
}

int ndpy_cancel_rest(struct ndpy_queue_pair *qp, int receive, struct ndpy_completion_queue *cq)
{
    return cancel_rest(qp, receive, cq, IBV_WC_WR_FLUSH_ERR);
}
