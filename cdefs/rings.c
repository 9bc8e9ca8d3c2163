/* The rings of posted requests, and the completions that a queue stores: what is not hot of rings.h. All providers
   share this file. */

#include "rings.h"

/* What check_special() has nothing to say about. */
#define PLAIN_OPERATIONS (1u << NDPY_RECEIVE | 1u << NDPY_SEND | 1u << NDPY_READ | 1u << NDPY_WRITE)

/* ---- creation ---- */

static void ring_clear(struct ndpy_ring *ring)
{
    while (ring->memory) {
        struct ndpy_slots *slots = ring->memory;

        ring->memory = slots->next;
        free(slots);
    }
    free(ring->postings.items);
}

struct ndpy_queue_pair *ndpy_queue_pair_new(void *native, uint32_t number, uint32_t initiator_depth,
                                            uint32_t receive_depth, uint32_t max_initiator_sge,
                                            uint32_t max_receive_sge, uint32_t inline_size, uint64_t max_length)
{
    uint32_t elements = max_receive_sge + 1 > max_initiator_sge ? max_receive_sge + 1 : max_initiator_sge;
    struct ndpy_queue_pair *qp = calloc(1, sizeof *qp + (size_t)elements * NATIVE_ELEMENT_SIZE);

    if (!qp)
        return NULL;
    qp->native = native;
    qp->max_initiator_sge = max_initiator_sge;
    qp->max_receive_sge = max_receive_sge;
    qp->max_read_sge = max_initiator_sge;
    qp->inline_size = inline_size;
    qp->max_length = max_length;
    ndpy_queue_pair_offer(qp, (2u << NDPY_WRITE) - 1);
    qp->initiator.depth = initiator_depth;
    qp->receive.depth = receive_depth;
    qp->initiator.number = qp->receive.number = number;
    return qp;
}

void ndpy_queue_pair_free(struct ndpy_queue_pair *qp)
{
    if (!qp)
        return;
    while (qp->lists) {
        struct ndpy_list *list = qp->lists;

        qp->lists = list->next;
        free(list->elements);
        free(list->requests);
        free(list);
    }
    ring_clear(&qp->initiator);
    ring_clear(&qp->receive);
    free(qp);
}

void ndpy_queue_pair_set_connection(struct ndpy_queue_pair *qp, int connection)
{
    atomic_store(&qp->connection, connection);
}

void ndpy_queue_pair_offer(struct ndpy_queue_pair *qp, uint32_t operations)
{
    qp->offered = operations;
    qp->plain = operations & PLAIN_OPERATIONS & ~(qp->refuses_reads ? 1u << NDPY_READ : 0);
}

void ndpy_queue_pair_take_headers(struct ndpy_queue_pair *qp, void *headers, uint64_t token)
{
    qp->receive.headers = headers;
    qp->receive.header_token = token;
}

void ndpy_queue_pair_restart(struct ndpy_queue_pair *qp)
{
    struct ndpy_ring *rings[2] = {&qp->initiator, &qp->receive};

    for (int i = 0; i < 2; i++) {
        atomic_store(&rings[i]->failed, 0);
        rings[i]->first_failure = (struct ndpy_failed_request){0};
        rings[i]->silent_run = 0;
    }
    qp->refuses_reads = 0;
    ndpy_queue_pair_offer(qp, qp->offered);
    atomic_store(&qp->connection, NDPY_NEVER_CONNECTED);
}

void ndpy_queue_pair_limit_reads(struct ndpy_queue_pair *qp, uint32_t max_read_sge)
{
    qp->max_read_sge = max_read_sge;
}

void ndpy_queue_pair_refuse_reads(struct ndpy_queue_pair *qp)
{
    qp->refuses_reads = 1;
    ndpy_queue_pair_offer(qp, qp->offered);
}

int ndpy_first_failure(struct ndpy_queue_pair *qp, struct ndpy_failed_request *out)
{
    struct ndpy_ring *ring = &qp->initiator;
    int failed = (int)atomic_load(&ring->failed);

    if (failed)
        *out = ring->first_failure;
    return failed;
}

uint32_t ndpy_queue_pair_in_flight(struct ndpy_queue_pair *qp, int receive)
{
    return ring_in_flight(receive ? &qp->receive : &qp->initiator);
}

uint32_t ndpy_queue_pair_posted(struct ndpy_queue_pair *qp)
{
    return atomic_load(&qp->initiator.posted);
}

int ndpy_queue_pair_ended(struct ndpy_queue_pair *qp, uint32_t count)
{
    if ((int32_t)(count - atomic_load(&qp->initiator.retired)) > 0)
        return 0;
    return atomic_load(&qp->initiator.failed) ? -1 : 1;
}

struct ndpy_shared_queue *ndpy_shared_queue_new(void *native, uint32_t depth, uint32_t max_sge, uint64_t max_length)
{
    struct ndpy_shared_queue *queue = calloc(1, sizeof *queue + (size_t)depth * sizeof queue->slots[0]);

    if (!queue)
        return NULL;
    queue->elements = calloc((size_t)max_sge + 1, NATIVE_ELEMENT_SIZE);
    if (!queue->elements) {
        free(queue);
        return NULL;
    }
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
    if (!queue)
        return;
    free(queue->elements);
    free(queue);
}

void ndpy_shared_queue_name(struct ndpy_shared_queue *queue, uint32_t name)
{
    queue->name = name;
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
    for (uint32_t i = 0; i < cq->stored_count; i++)
        if (cq->stored[cq->stored_head + i].flags & NDPY_DETAILED)
            free((void *)(uintptr_t)cq->stored[cq->stored_head + i].context);
    free(cq->stored);
    free(cq);
}

/* ---- places in a ring ---- */

#define FIRST_SLOTS 8

static int ring_grow(struct ndpy_ring *ring)
{
    uint32_t count = ring->allocated ? ring->allocated : FIRST_SLOTS;
    uint32_t retired = atomic_load_explicit(&ring->retired, memory_order_relaxed);
    struct ndpy_slots *slots;
    struct ndpy_slot *last;

    if (count > ring->depth - ring->allocated)
        count = ring->depth - ring->allocated;
    slots = calloc(1, sizeof *slots + (size_t)count * sizeof slots->slots[0]);
    if (!slots)
        return -1;
    slots->next = ring->memory;
    ring->memory = slots;
    for (uint32_t i = 0; i < count; i++) {
        slots->slots[i].ring = ring;
        slots->slots[i].next = &slots->slots[i + 1];
        slots->slots[i].index = ring->allocated++;
        /* That of a request that has ended. */
        slots->slots[i].sequence = retired - 1;
    }
    last = &slots->slots[count - 1];
    if (ring->newest) {
        last->next = ring->newest->next;
        ring->newest->next = slots->slots;
    } else {
        last->next = slots->slots;
        ring->newest = last;
    }
    return 0;
}

/* Finds the slot of a request that is in flight, beginning at *place, which goes on. The slots come in the order of
 * posting. */
static struct ndpy_slot *ring_find(struct ndpy_slot **place, uint32_t sequence)
{
    struct ndpy_slot *slot = *place;

    while (slot->sequence != sequence)
        slot = slot->next;
    *place = slot->next;
    return slot;
}

/* ---- postings of lists ---- */

static int search_posted(struct ndpy_ring *ring, const struct ndpy_slot *slot, uint32_t *sequence)
{
    const struct ndpy_list *list = slot->list;
    uint32_t retired = atomic_load_explicit(&ring->retired, memory_order_relaxed);
    uint32_t first = atomic_load_explicit(&ring->postings.first, memory_order_relaxed);
    uint32_t end = atomic_load_explicit(&ring->postings.end, memory_order_acquire);

    for (uint32_t place = first; place != end; place++) {
        struct ndpy_posting *posting = posting_at(ring, place);
        uint32_t count = atomic_load_explicit(&posting->count, memory_order_relaxed);

        *sequence = posting->base + slot->sequence;
        if ((int32_t)(posting->base + count - retired) <= 0) {
            if (place == first)
                atomic_store_explicit(&ring->postings.first, ++first, memory_order_release);
        } else if (posting->list == list && slot->sequence < count && (int32_t)(*sequence - retired) >= 0) {
            if (place == first && slot->sequence + 1 == count)
                atomic_store_explicit(&ring->postings.first, first + 1, memory_order_release);
            return 1;
        }
    }
    return 0;
}

/* The slot of a list's request by its number in the ring. NULL if the number is not that of a list's request. Call this
   with the completion queue's lock. */
static struct ndpy_slot *listed_slot(struct ndpy_ring *ring, uint32_t sequence)
{
    uint32_t end = atomic_load_explicit(&ring->postings.end, memory_order_acquire);

    for (uint32_t place = atomic_load(&ring->postings.first); place != end; place++) {
        struct ndpy_posting *posting = posting_at(ring, place);

        if (sequence - posting->base < atomic_load(&posting->count))
            return &posting->list->slots[sequence - posting->base];
    }
    return NULL;
}

/* ---- stored completions ---- */

static int reserve_stored(struct ndpy_completion_queue *cq, uint32_t more)
{
    struct ndpy_completion *grown;
    uint32_t capacity;

    if (cq->stored_head) {
        memmove(cq->stored, cq->stored + cq->stored_head, cq->stored_count * sizeof *cq->stored);
        cq->stored_head = 0;
    }
    if (cq->stored_count + more <= cq->stored_capacity)
        return 0;
    capacity = 2 * (cq->stored_count + more);
    grown = realloc(cq->stored, capacity * sizeof *grown);
    if (!grown)
        return ENOMEM;
    cq->stored = grown;
    cq->stored_capacity = capacity;
    return 0;
}

int ndpy_poll_internal(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count)
{
    uint32_t done = 0;

    while (cq->stored_count && done < count && cq->stored[cq->stored_head].flags & NDPY_INTERNAL) {
        out[done++] = cq->stored[cq->stored_head++];
        cq->stored_count--;
    }
    return (int)done;
}

uint32_t ndpy_undelivered(struct ndpy_completion_queue *cq)
{
    return cq->undelivered;
}

uint32_t ndpy_undelivered_failure(struct ndpy_completion_queue *cq, uint32_t first)
{
    uint32_t place = 0;

    for (uint32_t i = 0; i < cq->stored_count; i++) {
        const struct ndpy_completion *completion = &cq->stored[cq->stored_head + i];

        if (completion->flags & NDPY_INTERNAL)
            continue;
        if (place++ >= first && completion->status != NDPY_SUCCESS)
            return place;
    }
    return 0;
}

uint32_t ndpy_stored_of(struct ndpy_completion_queue *cq, uint32_t number)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < cq->stored_count; i++) {
        const struct ndpy_completion *completion = &cq->stored[cq->stored_head + i];

        if (completion->queue_pair == number && !(completion->flags & NDPY_FROM_SHARED_QUEUE))
            count++;
    }
    return count;
}

uint32_t ndpy_renumber_stored(struct ndpy_completion_queue *cq, uint32_t native_number, uint32_t number)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < cq->stored_count; i++) {
        struct ndpy_completion *completion = &cq->stored[cq->stored_head + i];

        if (completion->queue_pair == native_number && completion->flags & NDPY_FROM_SHARED_QUEUE) {
            completion->queue_pair = number;
            count++;
        }
    }
    return count;
}

static int cancel_rest(struct ndpy_queue_pair *qp, int receive, struct ndpy_completion_queue *cq,
                       uint32_t native_status)
{
    struct ndpy_ring *ring = receive ? &qp->receive : &qp->initiator;
    uint32_t left = ring_in_flight(ring);
    uint32_t retired = atomic_load(&ring->retired);
    /* A silent request may have succeeded, but not behind one that failed. */
    int untold = atomic_load(&ring->failed) ? NDPY_MARKER : NDPY_SILENT_SUCCESS | NDPY_MARKER;
    struct ndpy_slot *place = ring->newest ? ring->newest->next : NULL;

    if (left && reserve_stored(cq, left))
        return -ENOMEM;
    for (uint32_t i = 0; i < left; i++) {
        const struct ndpy_slot *listed = listed_slot(ring, retired + i);
        const struct ndpy_slot *slot = listed ? listed : ring_find(&place, retired + i);
        struct ndpy_completion completion = {
            .context = slot->context,
            .operation = slot->operation,
            .status = NDPY_CANCELED,
            .native_status = native_status,
            .queue_pair = ring->number,
            .retired = 1,
        };

        if (slot->flags & untold) {
            completion.status = NDPY_SUCCESS;
            completion.native_status = 0;
            completion.flags = NDPY_INTERNAL;
        }
        store(cq, &completion);
    }
    if (left)
        atomic_store(&ring->failed, 1);
    atomic_store(&ring->retired, retired + left);
    atomic_store(&ring->postings.first, atomic_load(&ring->postings.end));
    return (int)left;
}
