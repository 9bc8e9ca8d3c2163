/* Posting and polling, for every provider.

   A provider has a constant struct native_steps of functions of its own, and calls the functions here with it. These
   become part of their callers. So the compiler knows the constant there, and calls the provider's functions directly
   or makes them part of the caller too.

   Silent requests alone would never retire (see rings.h). So every half ring of them has one that is signaled. Its
   completion is internal.

   Closing a queue pair takes completions from the provider before anybody polls for them. So does arming a
   completion queue. They are stored in the completion queue's own memory, where ndpy_poll looks first. */

#ifndef NDPY_DATA_PATH_H
#define NDPY_DATA_PATH_H

#include "rings.h"

/* A result of struct native_steps's post(): the request counts as posted, but the provider will not complete it.
   ndpy_cancel_rest ends it. */
#define NATIVE_NEVER_COMPLETES (-100)

/* What a provider does in a way of its own. `request`, `elements` and `result` are structures of its own.

   elements: puts a request's elements into the provider's layout, and returns them.
   data_request: puts a request other than a bind or an invalidation into the provider's words.
   post, receive, receive_shared: give a request to the provider. Each returns 0, one of enum ndpy_refusal, or the
   provider's own number. receive_shared is NULL if there are no shared receive queues. no_memory: the provider's number
   for being short of memory. extended: what posts the operations of HAS_OTHER_CALL instead. NULL if the provider has
   none of them.

   poll: takes up to `count` results of result_size each. Returns how many, or a negative number.
   slot: what the request of a result was posted with.
   queue_pair: the number of the queue pair of a result from a shared receive queue.
   status: 0 for success.
   are_plain: whether all of these results are successes that brought nothing but data. NULL if every success is one.
   received: adds what a message brought with it.
   datagram: adds what a datagram brought with it. NULL if there are none.
   translate_all, translate_other: translate_all() and translate_rest() as functions that do not become part of their
   callers. */
struct native_steps {
    void *(*elements)(void *out, const struct ndpy_element *elements, uint32_t count);
    void (*data_request)(void *request, uint32_t operation, void *elements, uint32_t count,
                         const struct ndpy_remote *remote);
    int (*post)(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *request, int signaled);
    int (*receive)(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *elements, uint32_t count);
    int (*receive_shared)(struct ndpy_shared_queue *queue, struct ndpy_slot *slot, void *elements, uint32_t count);
    int no_memory;
    const struct native_steps *extended;
    uint32_t result_size;
    int (*poll)(struct ndpy_completion_queue *cq, void *results, uint32_t count);
    struct ndpy_slot *(*slot)(const void *result);
    uint32_t (*queue_pair)(const void *result);
    uint32_t (*status)(const void *result);
    uint32_t (*vendor_status)(const void *result);
    uint64_t (*bytes)(const void *result);
    int (*are_plain)(const void *results, int count);
    void (*received)(const void *result, struct ndpy_completion *out);
    void (*datagram)(const void *result, const struct ndpy_slot *slot, struct ndpy_completion *out);
    uint32_t (*translate_status)(uint32_t status, uint32_t operation, uint32_t flags);
    uint32_t (*translate_all)(const void *results, int got, struct ndpy_completion *out);
    void (*translate_other)(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out);
};

#define ROW(operation, number, words, completed, opcode, traits, flags, types, ...) \
    [number] = {flags, traits, NDPY_##completed, types},
static const struct operation operations[] = {NDPY_OPERATIONS(ROW)};
#undef ROW

/* What an atomic operation reads and writes. */
#define ATOMIC_SIZE 8u

/* ---- what a queue pair takes ---- */

HOT int offers(const struct ndpy_queue_pair *qp, uint32_t operation)
{
    return qp->offered >> operation & 1;
}

HOT uint64_t total_length(const struct ndpy_element *elements, uint32_t count)
{
    uint64_t length = 0;

    for (uint32_t i = 0; i < count; i++)
        length += elements[i].length;
    return length;
}

/* What is to be checked of an operation that is not `plain` here. Returns 0, or a refusal. */
APART int check_special(const struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags,
                        const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote)
{
    uint32_t traits = operations[operation].traits;

    if (!offers(qp, operation))
        return NDPY_UNSUPPORTED;
    if (traits & TO_DESTINATION) {
        int is_datagram = remote->operands[0] != 0;

        /* The provider would take the one for the other. */
        if (is_datagram != (qp->receive.headers != NULL))
            return NDPY_UNSUPPORTED;
        /* A datagram overtakes reads. */
        if (is_datagram && flags & NDPY_READ_FENCE)
            return NDPY_BAD_FLAGS;
    }
    if (traits & IS_ATOMIC && (count != 1 || elements->length != ATOMIC_SIZE))
        return NDPY_NOT_ATOMIC;
    if (traits & IS_ALIGNED && remote->address % ATOMIC_SIZE)
        return NDPY_UNALIGNED;
    if (traits & IS_ATOMIC && flags & NDPY_UNWRITABLE)
        return NDPY_NOT_WRITABLE;
    if (traits & COUNTS_AS_READ && qp->refuses_reads)
        return NDPY_NO_READS;
    return 0;
}

/* Whether the flags, the elements and the bytes of a request are not too many. Returns 0, or a refusal. */
HOT int check_limits(const struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags, uint32_t count,
                     uint64_t nbytes)
{
    if (flags & ~(uint32_t)operations[operation].flags)
        return NDPY_BAD_FLAGS;
    if (flags & NDPY_INLINE) {
        if (nbytes > qp->inline_size)
            return NDPY_INLINE_TOO_LONG;
    } else if (nbytes > qp->max_length) {
        return NDPY_TOO_LONG;
    }
    if (count > (operation == NDPY_RECEIVE ? qp->max_receive_sge : qp->max_initiator_sge))
        return NDPY_TOO_MANY_ELEMENTS;
    /* Every adapter reads into one element. */
    if (count > 1 && operation == NDPY_READ && count > qp->max_read_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    return 0;
}

/* Whether a queue pair takes a request. Every way of posting asks this. Returns 0, or a refusal. */
HOT int check_request(const struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags,
                      const struct ndpy_element *elements, uint32_t count, const struct ndpy_remote *remote,
                      uint64_t nbytes)
{
    int refused = qp->plain >> operation & 1 ? 0 : check_special(qp, operation, flags, elements, count, remote);

    return refused ? refused : check_limits(qp, operation, flags, count, nbytes);
}

/* ---- posting ---- */

/* Posts a checked request. completed: the operation of the completion. remote: NULL if there is none. */
HOT int post_initiator(const struct native_steps *steps, struct ndpy_queue_pair *qp, uint32_t completed, uint32_t flags,
                       uint64_t context, uint64_t nbytes, const struct ndpy_remote *remote, void *request)
{
    struct ndpy_ring *ring = &qp->initiator;
    struct ndpy_slot *slot = NULL;
    int signaled, error;

    if (atomic_load_explicit(&qp->connection, memory_order_acquire) == NDPY_NEVER_CONNECTED)
        return NDPY_NOT_CONNECTED;
    error = ring_next(ring, &slot, steps->no_memory);
    if (error)
        return error;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = (uint16_t)completed;
    slot->flags = (uint16_t)flags;
    if (remote) {
        slot->remote_token = remote->token;
        slot->remote_address = remote->address;
    }
    signaled = !(flags & NDPY_SILENT_SUCCESS) || flags & NDPY_MARKER || 2 * (ring->silent_run + 1) >= ring->depth;

    ring_commit(ring, slot);
    if (atomic_load_explicit(&qp->connection, memory_order_relaxed) == NDPY_ENDED_UNPOSTED)
        error = NATIVE_NEVER_COMPLETES;
    else
        error = steps->post(qp, slot, request, signaled);
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

/* Posts a bind or an invalidation. */
HOT int post_window_request(const struct native_steps *steps, struct ndpy_queue_pair *qp, uint32_t operation,
                            uint32_t flags, uint64_t context, uint64_t nbytes, void *request)
{
    if (!offers(qp, operation))
        return NDPY_UNSUPPORTED;
    if (flags & ~(uint32_t)operations[operation].flags)
        return NDPY_BAD_FLAGS;
    return post_initiator(steps, qp, operation, flags, context, nbytes, NULL, request);
}

/* ndpy_post_marker(). request: room for one, as in post_request(). */
HOT int post_marker(const struct native_steps *steps, struct ndpy_queue_pair *qp, void *request)
{
    static const struct ndpy_remote nowhere;
    struct ndpy_slot *slot;

    if (!ring_in_flight(&qp->initiator) || !qp->initiator.silent_run)
        return 0;
    if (ring_next(&qp->initiator, &slot, steps->no_memory))
        return 0;
    slot->context = 0;
    slot->nbytes = 0;
    slot->operation = NDPY_SEND;
    slot->flags = NDPY_MARKER;
    steps->data_request(request, NDPY_SEND, NULL, 0, &nowhere);
    ring_commit(&qp->initiator, slot);
    if (steps->post(qp, slot, request, 1)) {
        ring_withdraw(&qp->initiator);
        return 0;
    }
    qp->initiator.silent_run = 0;
    return 1;
}

enum { MOST_DATAGRAM_ELEMENTS = 31 };

/* Gives a receive of a datagram to the provider, with the memory for its header before its elements. */
APART int receive_datagram(const struct native_steps *steps, struct ndpy_queue_pair *qp, struct ndpy_slot *slot,
                           const struct ndpy_element *elements, uint32_t count)
{
    struct ndpy_element all[1 + MOST_DATAGRAM_ELEMENTS];

    if (count > MOST_DATAGRAM_ELEMENTS)
        return NDPY_TOO_MANY_ELEMENTS;
    all[0] = (struct ndpy_element){(uintptr_t)qp->receive.headers + (uint64_t)HEADER_SIZE * slot->index,
                                   qp->receive.header_token, HEADER_SIZE};
    memcpy(all + 1, elements, count * sizeof *elements);
    return steps->receive(qp, slot, steps->elements(qp->elements, all, count + 1), count + 1);
}

HOT int post_receive(const struct native_steps *steps, struct ndpy_queue_pair *qp, uint32_t flags, uint64_t context,
                     const struct ndpy_element *elements, uint32_t count, uint64_t nbytes)
{
    struct ndpy_slot *slot;
    int error = check_request(qp, NDPY_RECEIVE, flags, elements, count, NULL, nbytes);

    if (!error)
        error = ring_next(&qp->receive, &slot, steps->no_memory);
    if (error)
        return error;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = NDPY_RECEIVE;
    slot->flags = (uint16_t)flags;
    ring_commit(&qp->receive, slot);
    if (atomic_load_explicit(&qp->connection, memory_order_relaxed) == NDPY_ENDED_UNPOSTED)
        return 0;
    if (qp->receive.headers) {
        slot->flags |= NDPY_HEADED;
        error = receive_datagram(steps, qp, slot, elements, count);
    } else {
        error = steps->receive(qp, slot, steps->elements(qp->elements, elements, count), count);
    }
    if (error)
        ring_withdraw(&qp->receive);
    return error;
}

/* Posts an operation that is not `plain` here. */
APART int post_special(const struct native_steps *steps, struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags,
                       uint64_t context, const struct ndpy_element *elements, uint32_t count,
                       const struct ndpy_remote *remote, uint64_t nbytes, void *request)
{
    int refused = check_request(qp, operation, flags, elements, count, remote, nbytes);

    if (refused)
        return refused;
    if (operations[operation].traits & HAS_OTHER_CALL)
        steps = steps->extended;
    steps->data_request(request, operation, steps->elements(qp->elements, elements, count), count, remote);
    return post_initiator(steps, qp, operations[operation].completes_as, flags, context, nbytes, remote, request);
}

HOT int rings_post_elements(const struct native_steps *steps, struct ndpy_queue_pair *qp, uint32_t operation,
                            uint32_t flags, uint64_t context, const struct ndpy_element *elements, uint32_t count,
                            const struct ndpy_remote *remote, void *request)
{
    uint64_t nbytes = total_length(elements, count);
    int refused;

    if (operation == NDPY_RECEIVE)
        return post_receive(steps, qp, flags, context, elements, count, nbytes);
    if (!(qp->plain >> operation & 1))
        return post_special(steps, qp, operation, flags, context, elements, count, remote, nbytes, request);
    refused = check_limits(qp, operation, flags, count, nbytes);
    if (refused)
        return refused;
    steps->data_request(request, operation, steps->elements(qp->elements, elements, count), count, remote);
    return post_initiator(steps, qp, operation, flags, context, nbytes, remote, request);
}

/* ndpy_post(). request: room for one. Compiled twice, because most requests have one element. */
HOT int post_request(const struct native_steps *steps, struct ndpy_queue_pair *qp, uint32_t operation, uint32_t flags,
                     uint64_t context, const struct ndpy_element *elements, uint32_t count,
                     const struct ndpy_remote *remote, void *request)
{
    if (count == 1)
        return rings_post_elements(steps, qp, operation, flags, context, elements, 1, remote, request);
    return rings_post_elements(steps, qp, operation, flags, context, elements, count, remote, request);
}

/* ndpy_post_shared(). */
HOT int post_shared(const struct native_steps *steps, struct ndpy_shared_queue *queue, uint32_t slot_index,
                    uint64_t context, const struct ndpy_element *elements, uint32_t count)
{
    struct ndpy_slot *slot = &queue->slots[slot_index];
    uint64_t nbytes = total_length(elements, count);

    if (count > queue->max_sge)
        return NDPY_TOO_MANY_ELEMENTS;
    if (nbytes > queue->max_length)
        return NDPY_TOO_LONG;
    slot->context = context;
    slot->nbytes = nbytes;
    slot->operation = NDPY_RECEIVE;
    return steps->receive_shared(queue, slot, steps->elements(queue->elements, elements, count), count);
}

/* ---- polling ---- */

/* Translates the completion of one request of a queue pair that succeeded, and that the program gets. Returns 0 for any
   other one. 0 is every provider's number for success. */
HOT int translate_success(const struct native_steps *steps, const void *result, const struct ndpy_slot *slot,
                          struct ndpy_completion *out)
{
    struct ndpy_ring *ring = slot->ring;
    uint32_t sequence = slot->sequence, retired;

    if (steps->status(result) || slot->flags & (NDPY_SILENT_SUCCESS | NDPY_MARKER | NDPY_HEADED) || !ring)
        return 0;
    retired = atomic_load_explicit(&ring->retired, memory_order_relaxed);
    if (slot->flags & NDPY_LISTED) {
        if (!find_in_oldest(ring, slot, &sequence))
            return 0;
    } else if (sequence - retired >= atomic_load_explicit(&ring->posted, memory_order_acquire) - retired) {
        return 0;
    }
    *out = (struct ndpy_completion){
        .context = slot->context,
        .nbytes = slot->nbytes,
        .operation = slot->operation,
        .queue_pair = ring->number,
        .retired = sequence + 1 - retired,
    };
    if (slot->operation == NDPY_RECEIVE) {
        out->nbytes = steps->bytes(result);
        steps->received(result, out);
    }
    atomic_store_explicit(&ring->retired, sequence + 1, memory_order_release);
    return 1;
}

HOT const struct ndpy_shared_queue *shared_queue_of(const struct ndpy_slot *slot)
{
    const char *first = (const char *)(slot - slot->sequence);

    return (const void *)(first - offsetof(struct ndpy_shared_queue, slots));
}

/* Notes that a request of a ring has failed. Call this with the completion queue's lock. */
APART void note_failure(struct ndpy_ring *ring, const struct ndpy_slot *slot, uint32_t sequence)
{
    ring->latest_failure = sequence;
    if (atomic_load_explicit(&ring->failed, memory_order_relaxed))
        return;
    ring->first_failure = (struct ndpy_failed_request){slot->context, slot->remote_address, slot->nbytes,
                                                       slot->remote_token, slot->operation};
    atomic_store_explicit(&ring->failed, 1, memory_order_release);
}

/* Whether the request's latest completion is repeated. */
HOT int has_failed_already(const struct ndpy_ring *ring, uint32_t sequence, int32_t newly)
{
    return newly <= 0 && ring->latest_failure == sequence && atomic_load_explicit(&ring->failed, memory_order_relaxed);
}

/* Translates any other completion. */
HOT void translate_rest(const struct native_steps *steps, const void *result, struct ndpy_slot *slot,
                        struct ndpy_completion *out)
{
    struct ndpy_ring *ring = slot->ring;
    uint32_t sequence = slot->sequence;
    int is_posted = !(slot->flags & NDPY_LISTED) || find_posted(ring, slot, &sequence);
    int32_t newly = 0;

    out->context = slot->context;
    out->operation = slot->operation;
    out->native_status = steps->status(result);
    out->status = steps->translate_status(out->native_status, slot->operation, slot->flags);
    out->vendor_status = out->status == NDPY_SUCCESS ? 0 : steps->vendor_status(result);
    out->flags = 0;
    out->slot = ring ? 0 : sequence;
    if (out->status != NDPY_SUCCESS)
        out->nbytes = 0;
    else
        out->nbytes = slot->operation == NDPY_RECEIVE ? steps->bytes(result) : slot->nbytes;
    if (ring) {
        newly = (int32_t)(sequence + 1 - atomic_load_explicit(&ring->retired, memory_order_relaxed));
        out->queue_pair = ring->number;
        if (!is_posted || (int32_t)(sequence + 1 - atomic_load_explicit(&ring->posted, memory_order_acquire)) > 0 ||
            has_failed_already(ring, sequence, newly)) {
            /* libsiw keeps a request that the kernel refused, and the kernel flushes it in the end. See also
               Quirk.SIW_FLUSHES_A_QUEUED_READ_TWICE. */
            out->flags = NDPY_INTERNAL;
            out->retired = 0;
            return;
        }
        /* If a provider breaks the order, a later request's completion has already retired this slot. */
        out->retired = newly > 0 ? (uint32_t)newly : 0;
        if (slot->flags & NDPY_SILENT_SUCCESS ? out->status == NDPY_SUCCESS : slot->flags & NDPY_MARKER)
            out->flags = NDPY_INTERNAL;
        if (out->status != NDPY_SUCCESS)
            note_failure(ring, slot, sequence);
    } else {
        out->queue_pair = steps->queue_pair(result);
        out->retired = 0;
        out->flags = NDPY_FROM_SHARED_QUEUE;
        if (slot->operation == NDPY_INVALIDATE)
            out->flags |= NDPY_INTERNAL | NDPY_INVALIDATED;
        else
            out->retired = shared_queue_of(slot)->name;
    }
    if (slot->operation == NDPY_RECEIVE && out->status == NDPY_SUCCESS) {
        steps->received(result, out);
        if (slot->flags & NDPY_HEADED && steps->datagram)
            steps->datagram(result, slot, out);
    }
    /* From here on another thread may post with the slot, and the next datagram's header may come to its memory. */
    if (newly > 0)
        atomic_store_explicit(&ring->retired, sequence + 1, memory_order_release);
}

HOT const void *result_at(const struct native_steps *steps, const void *results, int place)
{
    return (const char *)results + (size_t)place * steps->result_size;
}

/* The completion of a plain receive, which is most of the work of a poll. model: of the same queue pair. */
HOT void translate_receive(const struct native_steps *steps, const void *result, uint64_t context,
                           const struct ndpy_completion *model, struct ndpy_completion *out)
{
    out->context = context;
    out->nbytes = steps->bytes(result);
    memcpy(&out->operation, &model->operation, sizeof *out - offsetof(struct ndpy_completion, operation));
}

/* Translates plain results that end the receives of a list from number `sequence` of the ring on, if the list is the
   oldest posting. Returns how many. The receives of a queue pair complete in order. So if the first and the last result
   end receives that are as far apart as the results, the others end those between them. */
HOT int translate_listed(const struct native_steps *steps, const void *results, int count, const struct ndpy_slot *slot,
                         const struct ndpy_completion *model, uint32_t sequence, struct ndpy_completion *out)
{
    struct ndpy_ring *ring = slot->ring;
    uint32_t first = atomic_load_explicit(&ring->postings.first, memory_order_relaxed);
    const struct ndpy_posting *posting = posting_at(ring, first);
    int left;

    if (first == atomic_load_explicit(&ring->postings.end, memory_order_acquire) || posting->list != slot->list ||
        posting->base + slot->sequence != sequence)
        return 0;
    left = (int)(atomic_load_explicit(&posting->count, memory_order_relaxed) - slot->sequence);
    if (left < count)
        count = left;
    if (steps->slot(result_at(steps, results, count - 1)) != slot + count - 1)
        return 0;
#pragma GCC unroll 4
    for (int done = 0; done < count; done++)
        translate_receive(steps, result_at(steps, results, done), slot[done].context, model, &out[done]);
    if (count == left)
        atomic_store_explicit(&ring->postings.first, first + 1, memory_order_release);
    return count;
}

/* The same for receives that were posted one by one. */
HOT int translate_unlisted(const struct native_steps *steps, const void *results, int count,
                           const struct ndpy_slot *slot, const struct ndpy_completion *model, uint32_t sequence,
                           struct ndpy_completion *out)
{
    uint32_t posted = atomic_load_explicit(&slot->ring->posted, memory_order_acquire) - sequence;
    int done = 0;

    if (posted < (uint32_t)count)
        count = (int)posted;
    for (; done < count && steps->slot(result_at(steps, results, done)) == slot && slot->sequence == sequence;
         done++, sequence++, slot = slot->next)
        translate_receive(steps, result_at(steps, results, done), slot->context, model, &out[done]);
    return done;
}

/* Translates plain results, if they end the oldest receives of a queue pair, one after the other. Returns how many. */
HOT int translate_receives(const struct native_steps *steps, const void *results, int count,
                           struct ndpy_completion *out)
{
    const struct ndpy_slot *slot = steps->slot(results);
    struct ndpy_ring *ring = slot->ring;
    struct ndpy_completion model = {.operation = NDPY_RECEIVE, .retired = 1};
    uint32_t sequence;
    int done;

    if (!ring || slot->operation != NDPY_RECEIVE || ring->headers)
        return 0;
    model.queue_pair = ring->number;
    sequence = atomic_load_explicit(&ring->retired, memory_order_relaxed);
    if (slot->flags & NDPY_LISTED)
        done = translate_listed(steps, results, count, slot, &model, sequence, out);
    else
        done = translate_unlisted(steps, results, count, slot, &model, sequence, out);
    /* From here on another thread may post with the slots. */
    atomic_store_explicit(&ring->retired, sequence + (uint32_t)done, memory_order_release);
    return done;
}

HOT int are_all_plain(const struct native_steps *steps, const void *results, int count)
{
    uint32_t statuses = 0;

    if (steps->are_plain)
        return steps->are_plain(results, count);
    for (int i = 0; i < count; i++)
        statuses |= steps->status(result_at(steps, results, i));
    return !statuses;
}

HOT void translate(const struct native_steps *steps, const void *result, struct ndpy_completion *out)
{
    struct ndpy_slot *slot = steps->slot(result);

    if (!translate_success(steps, result, slot, out))
        steps->translate_other(result, slot, out);
}

/* Translates `got` results. Returns how many are alike. See ndpy_poll(). */
HOT uint32_t translate_all(const struct native_steps *steps, const void *results, int got, struct ndpy_completion *out)
{
    int are_plain = are_all_plain(steps, results, got), done = 0, alike = 0;

    while (done < got) {
        const void *next = result_at(steps, results, done);
        int more = are_plain ? translate_receives(steps, next, got - done, &out[done]) : 0;

        if (!done)
            alike = more;
        if (!more) {
            translate(steps, next, &out[done]);
            more = 1;
        }
        done += more;
    }
    return (uint32_t)alike;
}

/* Takes stored completions. Returns how many. */
HOT uint32_t take_stored(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count)
{
    uint32_t done = 0;

    while (cq->stored_count && done < count) {
        out[done] = cq->stored[cq->stored_head++];
        cq->stored_count--;
        if (!(out[done++].flags & NDPY_INTERNAL))
            cq->undelivered--;
    }
    return done;
}

/* Takes any number of completions, those that are stored first. */
APART int poll_any(const struct native_steps *steps, struct ndpy_completion_queue *cq, struct ndpy_completion *out,
                   uint32_t count, void *results)
{
    uint32_t done = take_stored(cq, out, count);

    while (done < count) {
        uint32_t wanted = count - done < NDPY_POLL_BATCH ? count - done : NDPY_POLL_BATCH;
        int got = steps->poll(cq, results, wanted);

        if (got < 0)
            return done ? (int)done : -EIO;
        steps->translate_all(results, got, &out[done]);
        done += (uint32_t)got;
        if ((uint32_t)got < wanted)
            break;
    }
    return (int)done;
}

/* ndpy_poll(). results: room for NDPY_POLL_BATCH of them. */
HOT int poll_results(const struct native_steps *steps, struct ndpy_completion_queue *cq, struct ndpy_completion *out,
                     uint32_t count, uint32_t *alike, void *results)
{
    int got;

    *alike = 0;
    if (cq->stored_count || count - 1 >= NDPY_POLL_BATCH)
        return poll_any(steps, cq, out, count, results);
    got = steps->poll(cq, results, count);
    if (got == 1)
        translate(steps, results, out);
    else if (got > 1)
        *alike = steps->translate_all(results, got, out);
    return got < 0 ? -EIO : got;
}

/* struct ndpy_provider's spin(). poll_once: its poll(). time_ns: a clock that goes on steadily. */
HOT int native_spin(int (*poll_once)(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count,
                                     uint32_t *alike),
                    uint64_t (*time_ns)(void), struct ndpy_completion_queue *cq, struct ndpy_completion *out,
                    uint32_t count, const volatile int *stop, uint64_t nanoseconds)
{
    uint64_t begin = time_ns();
    uint32_t alike;
    int got;

    do
        got = poll_once(cq, out, count, &alike);
    while (!got && !*stop && time_ns() - begin < nanoseconds);
    return got;
}

/* ndpy_drain(). results: as in poll_results(). */
HOT int drain_results(const struct native_steps *steps, struct ndpy_completion_queue *cq, void *results)
{
    uint32_t before = cq->undelivered;
    int got;

    do {
        struct ndpy_completion completion;

        if (reserve_stored(cq, NDPY_POLL_BATCH))
            return -ENOMEM;
        got = steps->poll(cq, results, NDPY_POLL_BATCH);
        if (got < 0)
            return -EIO;
        for (int i = 0; i < got; i++) {
            translate(steps, result_at(steps, results, i), &completion);
            store(cq, &completion);
        }
    } while (got == NDPY_POLL_BATCH);
    return (int)(cq->undelivered - before);
}

#endif
