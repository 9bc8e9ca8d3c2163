/* Posting and polling over verbs.

   Each direction of a queue pair is a ring of slots; a work request's id is the address of its slot. Requests of one
   direction complete in order, so a completion retires every slot up to its own, the silent (unsignaled) ones before
   it included. A ring has one writer of `posted` (the thread that holds the queue pair's lock) and one writer of
   `retired` (the thread that holds the completion queue's lock); the two meet only in these counters.

   A run of silent requests would never retire, so every half ring one of them is signaled; its completion is hidden.

   Completions that have to be taken from the provider before anybody asks for them (closing a queue pair, arming)
   are kept in the completion queue's own memory, where ndpy_poll looks first. */

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define NDPY_POLL_BATCH 32
#define NDPY_MAX_SGE_ON_STACK 64

struct ndpy_ring;

struct ndpy_slot {
    struct ndpy_ring *ring;      /* NULL: a slot of a shared receive queue */
    uint64_t context;
    uint64_t nbytes;
    uint32_t sequence;           /* of the ring; the index of a shared queue's slot */
    uint16_t operation;
    uint16_t flags;
};

struct ndpy_ring {
    atomic_uint posted;
    atomic_uint retired;
    uint32_t depth;
    uint32_t silent_run;
    uint32_t number;
    struct ndpy_slot slots[];
};

struct ndpy_queue_pair {
    struct ibv_qp *native;
    struct ndpy_ring *initiator;
    struct ndpy_ring *receive;
    uint32_t number;
    uint32_t max_initiator_sge;
    uint32_t max_receive_sge;
    uint32_t inline_size;
    uint64_t max_length;
    int fences_all;
    int refuses_reads;
    atomic_int connection;
};

struct ndpy_shared_queue {
    struct ibv_srq *native;
    uint32_t depth;
    uint32_t max_sge;
    uint64_t max_length;
    struct ndpy_slot slots[];
};

struct ndpy_completion_queue {
    struct ibv_cq *native;
    struct ndpy_completion *kept;
    uint32_t kept_capacity;
    uint32_t kept_head;
    uint32_t kept_count;
    uint32_t kept_visible;
};

_Static_assert(sizeof(struct ndpy_element) == sizeof(struct ibv_sge), "an element is an ibv_sge");
_Static_assert(offsetof(struct ndpy_element, length) == offsetof(struct ibv_sge, length), "element length");
_Static_assert(offsetof(struct ndpy_element, token) == offsetof(struct ibv_sge, lkey), "element token");
_Static_assert(sizeof(struct ndpy_completion) == 48, "the Python side unpacks 48 bytes");
_Static_assert(sizeof(uintptr_t) <= sizeof(uint64_t), "a slot's address fits a work request id");

/* ---- creation ---- */

static struct ndpy_ring *ring_new(uint32_t depth, uint32_t number)
{
    struct ndpy_ring *ring = calloc(1, sizeof *ring + (size_t)depth * sizeof ring->slots[0]);

    if (!ring)
        return NULL;
    ring->depth = depth;
    ring->number = number;
    for (uint32_t i = 0; i < depth; i++)
        ring->slots[i].ring = ring;
    return ring;
}

struct ndpy_queue_pair *ndpy_queue_pair_new(struct ibv_qp *native, uint32_t number, uint32_t initiator_depth,
    uint32_t receive_depth, uint32_t max_initiator_sge, uint32_t max_receive_sge, uint32_t inline_size,
    uint64_t max_length)
{
    struct ndpy_queue_pair *qp = calloc(1, sizeof *qp);

    if (!qp)
        return NULL;
    qp->native = native;
    qp->number = number;
    qp->max_initiator_sge = max_initiator_sge;
    qp->max_receive_sge = max_receive_sge;
    qp->inline_size = inline_size;
    qp->max_length = max_length;
    qp->initiator = ring_new(initiator_depth, number);
    qp->receive = ring_new(receive_depth, number);
    if (!qp->initiator || !qp->receive) {
        ndpy_queue_pair_free(qp);
        return NULL;
    }
    return qp;
}

void ndpy_queue_pair_free(struct ndpy_queue_pair *qp)
{
    if (!qp)
        return;
    free(qp->initiator);
    free(qp->receive);
    free(qp);
}

void ndpy_queue_pair_set_connection(struct ndpy_queue_pair *qp, int connection)
{
    atomic_store(&qp->connection, connection);
}

void ndpy_queue_pair_refuse_reads(struct ndpy_queue_pair *qp)
{
    qp->refuses_reads = 1;
}

void ndpy_queue_pair_fence_all(struct ndpy_queue_pair *qp)
{
    qp->fences_all = 1;
}

static uint32_t ring_in_flight(struct ndpy_ring *ring)
{
    return atomic_load(&ring->posted) - atomic_load(&ring->retired);
}

uint32_t ndpy_queue_pair_in_flight(struct ndpy_queue_pair *qp, int receive)
{
    return ring_in_flight(receive ? qp->receive : qp->initiator);
}

struct ndpy_shared_queue *ndpy_shared_queue_new(struct ibv_srq *native, uint32_t depth, uint32_t max_sge,
    uint64_t max_length)
{
    struct ndpy_shared_queue *queue = calloc(1, sizeof *queue + (size_t)depth * sizeof queue->slots[0]);

    if (!queue)
        return NULL;
    queue->native = native;
    queue->depth = depth;
    queue->max_sge = max_sge;
    queue->max_length = max_length;
    for (uint32_t i = 0; i < depth; i++)
        queue->slots[i].sequence = i;
    return queue;
}

void ndpy_shared_queue_free(struct ndpy_shared_queue *queue)
{
    free(queue);
}

struct ndpy_completion_queue *ndpy_completion_queue_new(struct ibv_cq *native)
{
    struct ndpy_completion_queue *cq = calloc(1, sizeof *cq);

    if (cq)
        cq->native = native;
    return cq;
}

void ndpy_completion_queue_free(struct ndpy_completion_queue *cq)
{
    if (!cq)
        return;
    free(cq->kept);
    free(cq);
}

/* ---- posting ---- */

static struct ndpy_slot *ring_next(struct ndpy_ring *ring)
{
    uint32_t posted = atomic_load_explicit(&ring->posted, memory_order_relaxed);
    struct ndpy_slot *slot;

    if (posted - atomic_load_explicit(&ring->retired, memory_order_acquire) >= ring->depth)
        return NULL;
    slot = &ring->slots[posted % ring->depth];
    slot->sequence = posted;
    return slot;
}

/* Counted before the provider sees the request: its completion may be polled before the post returns. */
static void ring_commit(struct ndpy_ring *ring)
{
    atomic_fetch_add_explicit(&ring->posted, 1, memory_order_release);
}

static void ring_withdraw(struct ndpy_ring *ring)
{
    atomic_fetch_sub_explicit(&ring->posted, 1, memory_order_release);
}

static const uint8_t allowed_flags[] = {
    [NDPY_RECEIVE] = 0,
    [NDPY_SEND] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE | NDPY_SOLICITED | NDPY_INLINE,
    [NDPY_BIND] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE,
    [NDPY_INVALIDATE] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE,
    [NDPY_READ] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE,
    [NDPY_WRITE] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE | NDPY_INLINE,
};

/* What a provider's refusal of a request means: some return the errno, some its negative, some -1 and set errno. */
static int post_error(int result)
{
    if (result != -1)
        return result > 0 ? result : -result;
    return errno ? errno : EIO;
}

static int post_initiator(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    uint64_t nbytes, struct ibv_send_wr *wr)
{
    struct ndpy_ring *ring = qp->initiator;
    struct ibv_send_wr *bad;
    struct ndpy_slot *slot;
    int error;

    if (flags & ~(uint32_t)allowed_flags[operation])
        return NDPY_BAD_FLAGS;
    if (atomic_load_explicit(&qp->connection, memory_order_acquire) == NDPY_NEVER_CONNECTED)
        return NDPY_NOT_CONNECTED;
    if (operation == NDPY_READ && qp->refuses_reads)
        return NDPY_NO_READS;
    slot = ring_next(ring);
    if (!slot)
        return NDPY_QUEUE_FULL;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = (uint16_t)operation;
    slot->flags = (uint16_t)flags;

    wr->wr_id = (uintptr_t)slot;
    wr->next = NULL;
    wr->send_flags = 0;
    if (qp->fences_all ? operation != NDPY_READ : flags & NDPY_READ_FENCE)
        wr->send_flags |= IBV_SEND_FENCE;
    if (flags & NDPY_SOLICITED)
        wr->send_flags |= IBV_SEND_SOLICITED;
    if (flags & NDPY_INLINE)
        wr->send_flags |= IBV_SEND_INLINE;
    if (!(flags & NDPY_SILENT_SUCCESS) || 2 * (ring->silent_run + 1) >= ring->depth)
        wr->send_flags |= IBV_SEND_SIGNALED;

    ring_commit(ring);
    if (atomic_load_explicit(&qp->connection, memory_order_relaxed) == NDPY_ENDED_UNPOSTED) {
        slot->flags = 0;
        return 0;
    }
    error = ibv_post_send(qp->native, wr, &bad);
    if (error) {
        error = post_error(error);
        /* siw knows of the connection's end before the connection manager has told it. */
        if (error == ENOTCONN && qp->fences_all) {
            slot->flags = 0;
            return 0;
        }
        ring_withdraw(ring);
        return error;
    }
    ring->silent_run = wr->send_flags & IBV_SEND_SIGNALED ? 0 : ring->silent_run + 1;
    return 0;
}

int ndpy_post_marker(struct ndpy_queue_pair *qp)
{
    struct ibv_send_wr wr, *bad;
    struct ndpy_slot *slot;

    if (!ring_in_flight(qp->initiator) || !qp->initiator->silent_run)
        return 0;
    slot = ring_next(qp->initiator);
    if (!slot)
        return 0;
    slot->context = 0;
    slot->nbytes = 0;
    slot->operation = NDPY_SEND;
    slot->flags = NDPY_MARKER;
    memset(&wr, 0, sizeof wr);
    wr.wr_id = (uintptr_t)slot;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    ring_commit(qp->initiator);
    if (ibv_post_send(qp->native, &wr, &bad)) {
        ring_withdraw(qp->initiator);
        return 0;
    }
    qp->initiator->silent_run = 0;
    return 1;
}

/* siw takes no receive without elements; one of no bytes is the same to it. */
static struct ibv_sge empty_element;

static int post_receive(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, const struct ndpy_element *elements,
    uint32_t count, uint64_t nbytes)
{
    struct ibv_recv_wr wr, *bad;
    struct ndpy_slot *slot;
    int error;

    if (count > qp->max_receive_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    if (nbytes > qp->max_length)
        return NDPY_TOO_LONG;
    slot = ring_next(qp->receive);
    if (!slot)
        return NDPY_QUEUE_FULL;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = NDPY_RECEIVE;
    slot->flags = (uint16_t)flags;
    wr.wr_id = (uintptr_t)slot;
    wr.next = NULL;
    wr.sg_list = (struct ibv_sge *)elements;
    wr.num_sge = (int)count;
    ring_commit(qp->receive);
    if (atomic_load_explicit(&qp->connection, memory_order_relaxed) == NDPY_ENDED_UNPOSTED)
        return 0;
    error = ibv_post_recv(qp->native, &wr, &bad);
    if (error && !count) {
        wr.sg_list = &empty_element;
        wr.num_sge = 1;
        error = ibv_post_recv(qp->native, &wr, &bad);
    }
    if (error) {
        ring_withdraw(qp->receive);
        return post_error(error);
    }
    return 0;
}

static enum ibv_wr_opcode native_opcode(uint32_t operation)
{
    switch (operation) {
    case NDPY_READ:
        return IBV_WR_RDMA_READ;
    case NDPY_WRITE:
        return IBV_WR_RDMA_WRITE;
    default:
        return IBV_WR_SEND;
    }
}

int ndpy_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    const struct ndpy_element *elements, uint32_t count, uint64_t remote_address, uint32_t remote_token)
{
    struct ibv_send_wr wr;
    uint64_t nbytes = 0;

    for (uint32_t i = 0; i < count; i++)
        nbytes += elements[i].length;
    if (operation == NDPY_RECEIVE)
        return post_receive(qp, flags, context, elements, count, nbytes);
    if (flags & allowed_flags[operation] & NDPY_INLINE) {
        if (nbytes > qp->inline_size)
            return NDPY_INLINE_TOO_LONG;
    } else if (nbytes > qp->max_length) {
        return NDPY_TOO_LONG;
    }
    if (count > qp->max_initiator_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    wr.opcode = native_opcode(operation);
    wr.sg_list = (struct ibv_sge *)elements;
    wr.num_sge = (int)count;
    wr.wr.rdma.remote_addr = remote_address;
    wr.wr.rdma.rkey = remote_token;
    return post_initiator(qp, operation, flags, context, nbytes, &wr);
}

int ndpy_post_one(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context, uint64_t address,
    uint32_t length, uint32_t token, uint64_t remote_address, uint32_t remote_token)
{
    struct ndpy_element element = {address, length, token};

    return ndpy_post(qp, operation, flags, context, &element, 1, remote_address, remote_token);
}

int ndpy_post_bind(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, struct ibv_mw *window,
    struct ibv_mr *region, uint64_t address, uint64_t length, uint32_t access, uint32_t token)
{
    struct ibv_send_wr wr;

    memset(&wr, 0, sizeof wr);
    wr.opcode = IBV_WR_BIND_MW;
    wr.bind_mw.mw = window;
    wr.bind_mw.rkey = token;
    wr.bind_mw.bind_info.mr = region;
    wr.bind_mw.bind_info.addr = address;
    wr.bind_mw.bind_info.length = length;
    wr.bind_mw.bind_info.mw_access_flags = access;
    return post_initiator(qp, NDPY_BIND, flags, context, length, &wr);
}

int ndpy_post_invalidate(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, uint32_t token)
{
    struct ibv_send_wr wr;

    memset(&wr, 0, sizeof wr);
    wr.opcode = IBV_WR_LOCAL_INV;
    wr.invalidate_rkey = token;
    return post_initiator(qp, NDPY_INVALIDATE, flags, context, 0, &wr);
}

int ndpy_post_shared(struct ndpy_shared_queue *queue, uint32_t slot_index, uint64_t context,
    const struct ndpy_element *elements, uint32_t count)
{
    struct ndpy_slot *slot = &queue->slots[slot_index];
    struct ibv_recv_wr wr, *bad;
    uint64_t nbytes = 0;
    int error;

    if (count > queue->max_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    for (uint32_t i = 0; i < count; i++)
        nbytes += elements[i].length;
    if (nbytes > queue->max_length)
        return NDPY_TOO_LONG;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = NDPY_RECEIVE;
    wr.wr_id = (uintptr_t)slot;
    wr.next = NULL;
    wr.sg_list = (struct ibv_sge *)elements;
    wr.num_sge = (int)count;
    error = ibv_post_srq_recv(queue->native, &wr, &bad);
    if (error && !count) {
        wr.sg_list = &empty_element;
        wr.num_sge = 1;
        error = ibv_post_srq_recv(queue->native, &wr, &bad);
    }
    return error ? post_error(error) : 0;
}

/* ---- polling ---- */

static uint32_t translate_status(enum ibv_wc_status status, uint32_t operation, uint32_t flags)
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
        /* The responder's word for a Send longer than its receive. */
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
        /* The software adapters' word for a receive shorter than its message, and for an unknown local token. */
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

static void translate(const struct ibv_wc *wc, struct ndpy_completion *out)
{
    struct ndpy_slot *slot = (struct ndpy_slot *)(uintptr_t)wc->wr_id;
    struct ndpy_ring *ring = slot->ring;

    out->context = slot->context;
    out->operation = slot->operation;
    out->status = translate_status(wc->status, slot->operation, slot->flags);
    out->native_status = wc->status;
    out->vendor_status = wc->status == IBV_WC_SUCCESS ? 0 : wc->vendor_err;
    out->flags = 0;
    out->slot = slot->sequence;
    if (wc->status != IBV_WC_SUCCESS)
        out->nbytes = 0;
    else
        out->nbytes = slot->operation == NDPY_RECEIVE ? wc->byte_len : slot->nbytes;
    if (ring) {
        int32_t newly = (int32_t)(slot->sequence + 1 - atomic_load_explicit(&ring->retired, memory_order_relaxed));

        out->queue_pair = ring->number;
        if ((int32_t)(slot->sequence + 1 - atomic_load_explicit(&ring->posted, memory_order_acquire)) > 0) {
            /* libsiw keeps a request that the kernel refused, and the kernel flushes it in the end. */
            out->flags = NDPY_HIDDEN;
            out->retired = 0;
            return;
        }
        /* A provider that breaks the order: this one was retired by a later request's completion. */
        out->retired = newly > 0 ? (uint32_t)newly : 0;
        if (slot->flags & NDPY_MARKER || (slot->flags & NDPY_SILENT_SUCCESS && wc->status == IBV_WC_SUCCESS))
            out->flags = NDPY_HIDDEN;
        if (newly > 0)
            atomic_store_explicit(&ring->retired, slot->sequence + 1, memory_order_release);
    } else {
        out->queue_pair = wc->qp_num;
        out->retired = 0;
        out->flags = NDPY_FROM_SHARED_QUEUE;
    }
}

static int keep_room(struct ndpy_completion_queue *cq, uint32_t more)
{
    struct ndpy_completion *grown;
    uint32_t capacity;

    if (cq->kept_head) {
        memmove(cq->kept, cq->kept + cq->kept_head, cq->kept_count * sizeof *cq->kept);
        cq->kept_head = 0;
    }
    if (cq->kept_count + more <= cq->kept_capacity)
        return 0;
    capacity = 2 * (cq->kept_count + more);
    grown = realloc(cq->kept, capacity * sizeof *grown);
    if (!grown)
        return ENOMEM;
    cq->kept = grown;
    cq->kept_capacity = capacity;
    return 0;
}

static void keep(struct ndpy_completion_queue *cq, const struct ndpy_completion *completion)
{
    cq->kept[cq->kept_head + cq->kept_count++] = *completion;
    if (!(completion->flags & NDPY_HIDDEN))
        cq->kept_visible++;
}

int ndpy_poll(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count)
{
    struct ibv_wc wc[NDPY_POLL_BATCH];
    uint32_t done = 0;

    while (cq->kept_count && done < count) {
        out[done] = cq->kept[cq->kept_head++];
        cq->kept_count--;
        if (!(out[done++].flags & NDPY_HIDDEN))
            cq->kept_visible--;
    }
    if (!cq->kept_count)
        cq->kept_head = 0;
    while (done < count) {
        uint32_t wanted = count - done < NDPY_POLL_BATCH ? count - done : NDPY_POLL_BATCH;
        int got = ibv_poll_cq(cq->native, (int)wanted, wc);

        if (got < 0)
            return done ? (int)done : -EIO;
        for (int i = 0; i < got; i++)
            translate(&wc[i], &out[done++]);
        if ((uint32_t)got < wanted)
            break;
    }
    return (int)done;
}

int ndpy_drain(struct ndpy_completion_queue *cq)
{
    struct ibv_wc wc[NDPY_POLL_BATCH];
    uint32_t before = cq->kept_visible;
    int got;

    do {
        struct ndpy_completion completion;

        if (keep_room(cq, NDPY_POLL_BATCH))
            return -ENOMEM;
        got = ibv_poll_cq(cq->native, NDPY_POLL_BATCH, wc);
        if (got < 0)
            return -EIO;
        for (int i = 0; i < got; i++) {
            translate(&wc[i], &completion);
            keep(cq, &completion);
        }
    } while (got == NDPY_POLL_BATCH);
    return (int)(cq->kept_visible - before);
}

uint32_t ndpy_kept(struct ndpy_completion_queue *cq)
{
    return cq->kept_visible;
}

uint32_t ndpy_kept_of(struct ndpy_completion_queue *cq, uint32_t number)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < cq->kept_count; i++) {
        const struct ndpy_completion *completion = &cq->kept[cq->kept_head + i];

        if (completion->queue_pair == number && !(completion->flags & NDPY_FROM_SHARED_QUEUE))
            count++;
    }
    return count;
}

uint32_t ndpy_claim_kept(struct ndpy_completion_queue *cq, uint32_t native_number, uint32_t number)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < cq->kept_count; i++) {
        struct ndpy_completion *completion = &cq->kept[cq->kept_head + i];

        if (completion->queue_pair == native_number && completion->flags & NDPY_FROM_SHARED_QUEUE) {
            completion->queue_pair = number;
            count++;
        }
    }
    return count;
}

int ndpy_cancel_rest(struct ndpy_queue_pair *qp, int receive, struct ndpy_completion_queue *cq)
{
    struct ndpy_ring *ring = receive ? qp->receive : qp->initiator;
    uint32_t left = ring_in_flight(ring);
    uint32_t retired = atomic_load(&ring->retired);

    if (left && keep_room(cq, left))
        return -ENOMEM;
    for (uint32_t i = 0; i < left; i++) {
        const struct ndpy_slot *slot = &ring->slots[(retired + i) % ring->depth];
        struct ndpy_completion completion = {
            .context = slot->context,
            .operation = slot->operation,
            .status = NDPY_CANCELED,
            .native_status = IBV_WC_WR_FLUSH_ERR,
            .queue_pair = ring->number,
            .retired = 1,
            .slot = slot->sequence,
        };

        if (slot->flags & (NDPY_SILENT_SUCCESS | NDPY_MARKER)) {
            completion.status = NDPY_SUCCESS;
            completion.native_status = IBV_WC_SUCCESS;
            completion.flags = NDPY_HIDDEN;
        }
        keep(cq, &completion);
    }
    atomic_store(&ring->retired, retired + left);
    return (int)left;
}
