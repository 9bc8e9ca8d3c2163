/* Posting and polling. All providers share this file.

   A provider's own data_path.c includes rings.c, defines the names below, and then includes this file:
     native_elements()                              a request's elements in the provider's layout
     struct native_request, native_data_request()   a request in the provider's words
     LARGEST_TOKEN                                  of an element
     NATIVE_HAS_LISTS                               only verbs has it; see struct ndpy_provider
     native_post(), native_receive(), native_receive_shared()
     struct native_result, native_poll(), native_slot(), native_queue_pair(), status_of(), native_vendor_status(),
     native_bytes(), native_received(), translate_status()
     native_time_ns()                               a clock that goes on steadily

   Each direction of a queue pair is a ring of slots. The provider gets the address of a request's slot as the
   request's context, and returns it with the completion. Requests of one direction complete in order. So a
   completion retires every slot up to its own, including the silent (unsignaled) ones before it. A ring has one
   writer of `posted`: the thread that holds the queue pair's lock. It has one writer of `retired`: the thread that
   holds the completion queue's lock. The two threads share only these counters.

   Silent requests alone would never retire. So every half ring of them has one that is signaled. Its completion is
   internal.

   Closing a queue pair takes completions from the provider before anybody polls for them. So does arming a
   completion queue. They are stored in the completion queue's own memory, where ndpy_poll looks first. */

/* ---- posting ---- */

HOT int post_initiator(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
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
    error = ring_next(ring, &slot);
    if (error)
        return error;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = (uint16_t)operation;
    slot->flags = (uint16_t)flags;
    signaled = !(flags & NDPY_SILENT_SUCCESS) || flags & NDPY_MARKER || 2 * (ring->silent_run + 1) >= ring->depth;

    ring_commit(ring, slot);
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
    static const struct ndpy_remote nowhere;
    struct native_request request;
    struct ndpy_slot *slot;

    if (!ring_in_flight(qp->initiator) || !qp->initiator->silent_run)
        return 0;
    if (ring_next(qp->initiator, &slot))
        return 0;
    slot->context = 0;
    slot->nbytes = 0;
    slot->operation = NDPY_SEND;
    slot->flags = NDPY_MARKER;
    native_data_request(&request, NDPY_SEND, NULL, 0, &nowhere);
    ring_commit(qp->initiator, slot);
    if (native_post(qp, slot, &request, 1)) {
        ring_withdraw(qp->initiator);
        return 0;
    }
    qp->initiator->silent_run = 0;
    return 1;
}

HOT int post_receive(struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context,
    const struct ndpy_element *elements, uint32_t count, uint64_t nbytes)
{
    struct ndpy_slot *slot;
    int error;

    if (count > qp->max_receive_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    if (nbytes > qp->max_length)
        return NDPY_TOO_LONG;
    error = ring_next(qp->receive, &slot);
    if (error)
        return error;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = NDPY_RECEIVE;
    slot->flags = (uint16_t)flags;
    ring_commit(qp->receive, slot);
    if (atomic_load_explicit(&qp->connection, memory_order_relaxed) == NDPY_ENDED_UNPOSTED)
        return 0;
    error = native_receive(qp, slot, native_elements(qp->elements, elements, count), count);
    if (error)
        ring_withdraw(qp->receive);
    return error;
}

HOT int post_elements(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote)
{
    struct native_request request;
    uint64_t nbytes = 0;

    for (uint32_t i = 0; i < count; i++)
        nbytes += elements[i].length;
    if (operation == NDPY_RECEIVE)
        return post_receive(qp, flags, context, elements, count, nbytes);
    if (flags & NDPY_INLINE && allowed_flags[operation] & NDPY_INLINE) {
        if (nbytes > qp->inline_size)
            return NDPY_INLINE_TOO_LONG;
    } else if (nbytes > qp->max_length) {
        return NDPY_TOO_LONG;
    }
    if (count > qp->max_initiator_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    native_data_request(&request, operation, native_elements(qp->elements, elements, count), count, remote);
    if (operation == NDPY_SEND_AND_INVALIDATE)
        operation = NDPY_SEND;
    return post_initiator(qp, operation, flags, context, nbytes, &request);
}

int ndpy_post(struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint64_t context,
    const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote)
{
    /* Compiled twice, because most requests have one element. */
    if (count == 1)
        return post_elements(qp, operation, flags, context, elements, 1, remote);
    return post_elements(qp, operation, flags, context, elements, count, remote);
}

#ifndef NATIVE_HAS_NO_SHARED_QUEUES
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
    return native_receive_shared(queue, slot, native_elements(queue->elements, elements, count), count);
}
#endif

/* ---- polling ---- */

/* Translates the completion of one request of a queue pair that succeeded, and that the program gets. Returns 0 for any other
   one. 0 is every provider's number for success. */
HOT int translate_success(
    const struct native_result *result, const struct ndpy_slot *slot, struct ndpy_completion *out)
{
    struct ndpy_ring *ring = slot->ring;
    uint32_t sequence = slot->sequence, retired, newly;

    if (status_of(result) || slot->flags & (NDPY_SILENT_SUCCESS | NDPY_MARKER) || !ring)
        return 0;
    if (slot->flags & NDPY_LISTED && !find_posted(ring, slot, &sequence))
        return 0;
    retired = atomic_load_explicit(&ring->retired, memory_order_relaxed);
    newly = sequence + 1 - retired;
    if (newly - 1 >= atomic_load_explicit(&ring->posted, memory_order_acquire) - retired)
        return 0;
    *out = (struct ndpy_completion){
        .context = slot->context,
        .nbytes = slot->nbytes,
        .operation = slot->operation,
        .queue_pair = ring->number,
        .retired = newly,
        .slot = sequence,
    };
    if (slot->operation == NDPY_RECEIVE) {
        out->nbytes = native_bytes(result);
        native_received(result, out);
    }
    atomic_store_explicit(&ring->retired, sequence + 1, memory_order_release);
    return 1;
}

APART void translate_other(const struct native_result *result, struct ndpy_slot *slot, struct ndpy_completion *out)
{
    struct ndpy_ring *ring = slot->ring;
    uint32_t sequence = slot->sequence;
    int is_posted = !(slot->flags & NDPY_LISTED) || find_posted(ring, slot, &sequence);

    out->context = slot->context;
    out->operation = slot->operation;
    out->native_status = status_of(result);
    out->status = translate_status(out->native_status, slot->operation, slot->flags);
    out->vendor_status = out->status == NDPY_SUCCESS ? 0 : native_vendor_status(result);
    out->flags = 0;
    out->slot = sequence;
    if (out->status != NDPY_SUCCESS)
        out->nbytes = 0;
    else
        out->nbytes = slot->operation == NDPY_RECEIVE ? native_bytes(result) : slot->nbytes;
    if (ring) {
        int32_t newly = (int32_t)(sequence + 1 - atomic_load_explicit(&ring->retired, memory_order_relaxed));

        out->queue_pair = ring->number;
        if (!is_posted || (int32_t)(sequence + 1 - atomic_load_explicit(&ring->posted, memory_order_acquire)) > 0) {
            /* libsiw keeps a request that the kernel refused, and the kernel flushes it in the end. */
            out->flags = NDPY_INTERNAL;
            out->retired = 0;
            return;
        }
        /* If a provider breaks the order, a later request's completion has already retired this slot. */
        out->retired = newly > 0 ? (uint32_t)newly : 0;
        if (slot->flags & NDPY_SILENT_SUCCESS ? out->status == NDPY_SUCCESS : slot->flags & NDPY_MARKER)
            out->flags = NDPY_INTERNAL;
        if (out->status != NDPY_SUCCESS)
            atomic_store_explicit(&ring->failed, 1, memory_order_relaxed);
        if (newly > 0)
            atomic_store_explicit(&ring->retired, sequence + 1, memory_order_release);
    } else {
        out->queue_pair = native_queue_pair(result);
        out->retired = 0;
        out->flags = NDPY_FROM_SHARED_QUEUE;
        if (slot->operation == NDPY_INVALIDATE)
            out->flags |= NDPY_INTERNAL | NDPY_INVALIDATED;
    }
    if (slot->operation == NDPY_RECEIVE && out->status == NDPY_SUCCESS)
        native_received(result, out);
}

HOT void translate(const struct native_result *result, struct ndpy_completion *out)
{
    struct ndpy_slot *slot = native_slot(result);

    if (!translate_success(result, slot, out))
        translate_other(result, slot, out);
}

int ndpy_poll(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count)
{
    struct native_result results[NDPY_POLL_BATCH];
    uint32_t done = 0;

    while (cq->stored_count && done < count) {
        out[done] = cq->stored[cq->stored_head++];
        cq->stored_count--;
        if (!(out[done++].flags & NDPY_INTERNAL))
            cq->undelivered--;
    }
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

static int poll_again(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, const volatile int *stop,
    uint64_t nanoseconds)
{
    uint64_t begin = native_time_ns();
    int got;

    do
        got = ndpy_poll(cq, out, count);
    while (!got && !*stop && native_time_ns() - begin < nanoseconds);
    return got;
}

int ndpy_drain(struct ndpy_completion_queue *cq)
{
    struct native_result results[NDPY_POLL_BATCH];
    uint32_t before = cq->undelivered;
    int got;

    do {
        struct ndpy_completion completion;

        if (reserve_stored(cq, NDPY_POLL_BATCH))
            return -ENOMEM;
        got = native_poll(cq, results, NDPY_POLL_BATCH);
        if (got < 0)
            return -EIO;
        for (int i = 0; i < got; i++) {
            translate(&results[i], &completion);
            store(cq, &completion);
        }
    } while (got == NDPY_POLL_BATCH);
    return (int)(cq->undelivered - before);
}

#ifdef NATIVE_HAS_LISTS
#include "verbs/lists.c"
#endif

const struct ndpy_provider *ndpy_provider_table(void)
{
    static const struct ndpy_provider provider = {
        .post = ndpy_post,
        .poll = ndpy_poll,
        .poll_internal = ndpy_poll_internal,
        .spin = poll_again,
        .largest_token = LARGEST_TOKEN,
#ifdef NATIVE_HAS_LISTS
        .list_new = list_new,
        .list_free = list_free,
        .post_list = post_list,
        .poll_array = poll_array,
        .read_results = read_results,
        .result_size = sizeof(struct native_result),
        .arm = arm,
        .take_events = take_events,
#endif
    };

    return &provider;
}
