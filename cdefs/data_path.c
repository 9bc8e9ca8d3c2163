/* Posting and polling, once for all providers.

   A provider's own data_path.c includes this file after it has defined
     struct native_request, native_data_request()   a request in the provider's words
     native_post(), native_receive(), native_receive_shared()
     struct native_result, native_poll(), native_slot(), native_queue_pair(), native_status(), native_vendor_status(),
     native_bytes(), NATIVE_CANCELED, translate_status()

   Each direction of a queue pair is a ring of slots; the provider gets the address of a request's slot as its context and
   gives it back with the completion. Requests of one direction complete in order, so a completion retires every slot up to
   its own, the silent (unsignaled) ones before it included. A ring has one writer of `posted` (the thread that holds the
   queue pair's lock) and one writer of `retired` (the thread that holds the completion queue's lock); the two meet only in
   these counters.

   A run of silent requests would never retire, so every half ring one of them is signaled; its completion is hidden.

   Completions that have to be taken from the provider before anybody asks for them (closing a queue pair, arming)
   are kept in the completion queue's own memory, where ndpy_poll looks first. */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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

struct ndpy_queue_pair *ndpy_queue_pair_new(void *native, uint32_t number, uint32_t initiator_depth,
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

static uint32_t ring_in_flight(struct ndpy_ring *ring)
{
    return atomic_load(&ring->posted) - atomic_load(&ring->retired);
}

uint32_t ndpy_queue_pair_in_flight(struct ndpy_queue_pair *qp, int receive)
{
    return ring_in_flight(receive ? qp->receive : qp->initiator);
}

uint32_t ndpy_queue_pair_posted(struct ndpy_queue_pair *qp)
{
    return atomic_load(&qp->initiator->posted);
}

int ndpy_queue_pair_ended(struct ndpy_queue_pair *qp, uint32_t count)
{
    if ((int32_t)(count - atomic_load(&qp->initiator->retired)) > 0)
        return 0;
    return atomic_load(&qp->initiator->failed) ? -1 : 1;
}

struct ndpy_shared_queue *ndpy_shared_queue_new(void *native, uint32_t depth, uint32_t max_sge,
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

struct ndpy_completion_queue *ndpy_completion_queue_new(void *native)
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

static const uint16_t allowed_flags[] = {
    [NDPY_RECEIVE] = 0,
    [NDPY_SEND] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE | NDPY_SOLICITED | NDPY_INLINE,
    [NDPY_BIND] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE | NDPY_MARKER,
    [NDPY_INVALIDATE] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE | NDPY_MARKER,
    [NDPY_READ] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE,
    [NDPY_WRITE] = NDPY_SILENT_SUCCESS | NDPY_READ_FENCE | NDPY_INLINE,
};

static int post_initiator(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    uint64_t nbytes, struct native_request *request)
{
    struct ndpy_ring *ring = qp->initiator;
    struct ndpy_slot *slot;
    int signaled, error;

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
    signaled = !(flags & NDPY_SILENT_SUCCESS) || flags & NDPY_MARKER || 2 * (ring->silent_run + 1) >= ring->depth;

    ring_commit(ring);
    if (atomic_load_explicit(&qp->connection, memory_order_relaxed) == NDPY_ENDED_UNPOSTED)
        error = NATIVE_NEVER_COMPLETES;
    else
        error = native_post(qp, slot, request, signaled);
    if (error == NATIVE_NEVER_COMPLETES) {
        slot->flags &= NDPY_MARKER;
        return 0;
    }
    if (error) {
        ring_withdraw(ring);
        return error;
    }
    ring->silent_run = signaled ? 0 : ring->silent_run + 1;
    return 0;
}

int ndpy_post_marker(struct ndpy_queue_pair *qp)
{
    struct native_request request;
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
    native_data_request(&request, NDPY_SEND, NULL, 0, 0, 0);
    ring_commit(qp->initiator);
    if (native_post(qp, slot, &request, 1)) {
        ring_withdraw(qp->initiator);
        return 0;
    }
    qp->initiator->silent_run = 0;
    return 1;
}

static int post_receive(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context, const struct ndpy_element *elements,
    uint32_t count, uint64_t nbytes)
{
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
    ring_commit(qp->receive);
    if (atomic_load_explicit(&qp->connection, memory_order_relaxed) == NDPY_ENDED_UNPOSTED)
        return 0;
    error = native_receive(qp, slot, elements, count);
    if (error)
        ring_withdraw(qp->receive);
    return error;
}

int ndpy_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    const struct ndpy_element *elements, uint32_t count, uint64_t remote_address, uint32_t remote_token)
{
    struct native_request request;
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
    native_data_request(&request, operation, elements, count, remote_address, remote_token);
    return post_initiator(qp, operation, flags, context, nbytes, &request);
}

int ndpy_post_one(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context, uint64_t address,
    uint32_t length, uint32_t token, uint64_t remote_address, uint32_t remote_token)
{
    struct ndpy_element element = {address, length, token};

    return ndpy_post(qp, operation, flags, context, &element, 1, remote_address, remote_token);
}

int ndpy_post_shared(struct ndpy_shared_queue *queue, uint32_t slot_index, uint64_t context,
    const struct ndpy_element *elements, uint32_t count)
{
    struct ndpy_slot *slot = &queue->slots[slot_index];
    uint64_t nbytes = 0;

    if (count > queue->max_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    for (uint32_t i = 0; i < count; i++)
        nbytes += elements[i].length;
    if (nbytes > queue->max_length)
        return NDPY_TOO_LONG;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = NDPY_RECEIVE;
    return native_receive_shared(queue, slot, elements, count);
}

/* ---- polling ---- */

static void translate(const struct native_result *result, struct ndpy_completion *out)
{
    struct ndpy_slot *slot = native_slot(result);
    struct ndpy_ring *ring = slot->ring;

    out->context = slot->context;
    out->operation = slot->operation;
    out->native_status = native_status(result);
    out->status = translate_status(out->native_status, slot->operation, slot->flags);
    out->vendor_status = out->status == NDPY_SUCCESS ? 0 : native_vendor_status(result);
    out->flags = 0;
    out->slot = slot->sequence;
    if (out->status != NDPY_SUCCESS)
        out->nbytes = 0;
    else
        out->nbytes = slot->operation == NDPY_RECEIVE ? native_bytes(result) : slot->nbytes;
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
        if (slot->flags & NDPY_SILENT_SUCCESS ? out->status == NDPY_SUCCESS : slot->flags & NDPY_MARKER)
            out->flags = NDPY_HIDDEN;
        if (out->status != NDPY_SUCCESS)
            atomic_store_explicit(&ring->failed, 1, memory_order_relaxed);
        if (newly > 0)
            atomic_store_explicit(&ring->retired, slot->sequence + 1, memory_order_release);
    } else {
        out->queue_pair = native_queue_pair(result);
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
    struct native_result results[NDPY_POLL_BATCH];
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
        int got = native_poll(cq, results, wanted);

        if (got < 0)
            return done ? (int)done : -EIO;
        for (int i = 0; i < got; i++)
            translate(&results[i], &out[done++]);
        if ((uint32_t)got < wanted)
            break;
    }
    return (int)done;
}

int ndpy_drain(struct ndpy_completion_queue *cq)
{
    struct native_result results[NDPY_POLL_BATCH];
    uint32_t before = cq->kept_visible;
    int got;

    do {
        struct ndpy_completion completion;

        if (keep_room(cq, NDPY_POLL_BATCH))
            return -ENOMEM;
        got = native_poll(cq, results, NDPY_POLL_BATCH);
        if (got < 0)
            return -EIO;
        for (int i = 0; i < got; i++) {
            translate(&results[i], &completion);
            keep(cq, &completion);
        }
    } while (got == NDPY_POLL_BATCH);
    return (int)(cq->kept_visible - before);
}

int ndpy_poll_hidden(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count)
{
    uint32_t done = 0;

    while (cq->kept_count && done < count && cq->kept[cq->kept_head].flags & NDPY_HIDDEN) {
        out[done++] = cq->kept[cq->kept_head++];
        cq->kept_count--;
    }
    if (!cq->kept_count)
        cq->kept_head = 0;
    return (int)done;
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
            .native_status = NATIVE_CANCELED,
            .queue_pair = ring->number,
            .retired = 1,
            .slot = slot->sequence,
        };

        if (slot->flags & (NDPY_SILENT_SUCCESS | NDPY_MARKER)) {
            completion.status = NDPY_SUCCESS;
            completion.native_status = 0;
            completion.flags = NDPY_HIDDEN;
        }
        keep(cq, &completion);
    }
    if (left)
        atomic_store(&ring->failed, 1);
    atomic_store(&ring->retired, retired + left);
    return (int)left;
}
