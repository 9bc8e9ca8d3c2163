/* What only verbs has: lists of requests that one call posts, and sleeping on a completion channel. */

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>

_Static_assert(sizeof(struct ibv_sge) <= NATIVE_ELEMENT_SIZE, "an element fits");

/* A list that no posting uses any more, or a new one. NULL if memory is short. */
static struct ndpy_list *list_find(struct ndpy_queue_pair *qp, uint32_t count, uint32_t elements)
{
    struct ndpy_list *list = qp->lists;

    while (list && (list->is_used || list->capacity < count || list->element_capacity < elements))
        list = list->next;
    if (list) {
        list->is_used = 1;
        return list;
    }
    list = calloc(1, sizeof *list + (size_t)count * sizeof list->slots[0]);
    if (!list)
        return NULL;
    list->capacity = count;
    list->element_capacity = elements;
    list->elements = calloc((size_t)elements + 1, sizeof(struct ibv_sge));
    list->requests = calloc(count, sizeof(struct ibv_send_wr));
    if (!list->elements || !list->requests) {
        free(list->elements);
        free(list->requests);
        free(list);
        return NULL;
    }
    list->is_used = 1;
    list->next = qp->lists;
    qp->lists = list;
    return list;
}

static void verbs_list_free(struct ndpy_list *list)
{
    list->is_used = list->was_refused;
}

static void make_send(struct ibv_send_wr *wr, const struct ndpy_queue_pair *qp, struct ndpy_slot *slot,
                      const struct ndpy_list_request *request, struct ibv_sge *elements, int signaled)
{
    struct native_request native = {.wr = {.wr_id = (uintptr_t)slot, .next = wr + 1}};

    native_data_request(&native, request->operation, elements, request->count, &request->remote);
    native.wr.send_flags = native_flags(slot, signaled);
    if (qp->works_around_siw)
        work_around_siw(&native.wr, slot);
    *wr = native.wr;
}

static void make_receive(struct ibv_recv_wr *wr, struct ndpy_slot *slot, const struct ndpy_list_request *request,
                         struct ibv_sge *elements)
{
    *wr = (struct ibv_recv_wr){
        .wr_id = (uintptr_t)slot, .next = wr + 1, .sg_list = elements, .num_sge = (int)request->count};
}

/* Makes the ring's room for postings, once. Returns 0 or an errno. */
static int make_postings(struct ndpy_ring *ring)
{
    uint32_t capacity = 1;

    if (ring->postings.items)
        return 0;
    while (capacity < ring->depth)
        capacity *= 2;
    ring->postings.items = calloc(capacity, sizeof *ring->postings.items);
    ring->postings.mask = capacity - 1;
    return ring->postings.items ? 0 : ENOMEM;
}

static int verbs_list_new(struct ndpy_queue_pair *qp, const struct ndpy_list_request *requests, uint32_t count,
                          const struct ndpy_element *elements, struct ndpy_list **out, uint32_t *bad)
{
    int receives = requests[0].operation == NDPY_RECEIVE;
    struct ndpy_ring *ring = receives ? &qp->receive : &qp->initiator;
    const struct ndpy_list_request *last = &requests[count - 1];
    struct ndpy_list *list = make_postings(ring) ? NULL : list_find(qp, count, last->first + last->count);
    uint32_t silent_run = 0;

    if (!list)
        return ENOMEM;
    list->ring = ring;
    list->count = count;
    list->has_reads = 0;
    list->posts_singly = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct ndpy_list_request *request = &requests[i];
        struct ndpy_slot *slot = &list->slots[i];
        struct ibv_sge *native = (struct ibv_sge *)list->elements + request->first;
        const struct operation *operation = &operations[request->operation];
        int refused, signaled;

        slot->nbytes = total_length(elements + request->first, request->count);
        refused = check_request(qp, request->operation, request->flags, elements + request->first, request->count,
                                &request->remote, slot->nbytes);
        if (refused) {
            *bad = i;
            list->is_used = 0;
            return refused;
        }
        slot->ring = ring;
        slot->list = list;
        slot->context = request->context;
        slot->sequence = i;
        slot->operation = operation->completes_as;
        slot->flags = (uint16_t)(request->flags | NDPY_LISTED);
        slot->remote_token = request->remote.token;
        slot->remote_address = request->remote.address;
        native_elements(native, elements + request->first, request->count);
        if (receives) {
            make_receive((struct ibv_recv_wr *)list->requests + i, slot, request, native);
            continue;
        }
        /* A request that is signaled for nobody ends the silent ones before it. */
        signaled = !(request->flags & NDPY_SILENT_SUCCESS) || i == count - 1 || 2 * (silent_run + 1) >= ring->depth;
        silent_run = signaled ? 0 : silent_run + 1;
        list->has_reads |= (operation->traits & COUNTS_AS_READ) != 0;
        list->posts_singly |= (operation->traits & HAS_OTHER_CALL) != 0;
        make_send((struct ibv_send_wr *)list->requests + i, qp, slot, request, native, signaled);
    }
    if (receives)
        ((struct ibv_recv_wr *)list->requests)[count - 1].next = NULL;
    else
        ((struct ibv_send_wr *)list->requests)[count - 1].next = NULL;
    list->is_special = list->has_reads || list->posts_singly || ring->headers;
    *out = list;
    return 0;
}

HOT int is_full(struct ndpy_ring *ring, uint32_t posted, uint32_t more)
{
    return posted - atomic_load_explicit(&ring->retired, memory_order_acquire) + more > ring->depth;
}

/* Whether the list may be posted, if it or the connection is not as usual. Returns 0, or a refusal. */
APART int check_posting(const struct ndpy_queue_pair *qp, const struct ndpy_list *list, int connection)
{
    struct ndpy_ring *ring = list->ring;

    if (ring->headers || list->posts_singly)
        return NDPY_POST_SINGLY;
    if (ring == &qp->initiator) {
        if (connection == NDPY_NEVER_CONNECTED)
            return NDPY_NOT_CONNECTED;
        if (list->has_reads && qp->refuses_reads)
            return NDPY_NO_READS;
    }
    if (connection != NDPY_ENDED_UNPOSTED)
        return 0;
    return is_full(ring, atomic_load(&ring->posted), list->count) ? NDPY_QUEUE_FULL : NDPY_POST_SINGLY;
}

/* Gives the requests to the provider. Returns 0, or its number with the request that it refused. */
HOT int give_list(struct ndpy_queue_pair *qp, struct ndpy_list *list, void **refused)
{
    if (list->ring == &qp->receive)
        return ibv_post_recv(qp->native, list->requests, (struct ibv_recv_wr **)refused);
    return ibv_post_send(qp->native, list->requests, (struct ibv_send_wr **)refused);
}

/* What follows if the provider refused a request of the newest posting. Returns a refusal or the provider's number. */
APART int end_refused(struct ndpy_queue_pair *qp, struct ndpy_list *list, int error, const char *refused,
                      uint32_t *posted)
{
    struct ndpy_ring *ring = list->ring;
    struct ndpy_posting *posting = posting_at(ring, atomic_load(&ring->postings.end) - 1);
    size_t size = ring == &qp->receive ? sizeof(struct ibv_recv_wr) : sizeof(struct ibv_send_wr);
    uint32_t taken = refused ? (uint32_t)((size_t)(refused - (const char *)list->requests) / size) : 0;

    error = post_error(error);
    list->was_refused = 1;
    atomic_store_explicit(&posting->count, taken, memory_order_relaxed);
    atomic_store_explicit(&ring->posted, posting->base + taken, memory_order_release);
    ring->silent_run += taken;
    *posted = taken;
    /* Posted one by one, the rest ends as requests do after the end of a connection (see native_post()). */
    return error == ENOTCONN && qp->works_around_siw ? NDPY_POST_SINGLY : error;
}

static int verbs_post_list(struct ndpy_queue_pair *qp, struct ndpy_list *list, uint32_t *posted)
{
    struct ndpy_ring *ring = list->ring;
    int connection = atomic_load_explicit(&qp->connection, memory_order_acquire), error;
    uint32_t first = atomic_load_explicit(&ring->posted, memory_order_relaxed);
    uint32_t place = atomic_load_explicit(&ring->postings.end, memory_order_relaxed);
    struct ndpy_posting *posting = posting_at(ring, place);
    void *refused = NULL;

    *posted = 0;
    if (connection != NDPY_CONNECTED || list->is_special) {
        error = check_posting(qp, list, connection);
        if (error)
            return error;
    }
    if (is_full(ring, first, list->count))
        return NDPY_QUEUE_FULL;
    if (place - atomic_load_explicit(&ring->postings.first, memory_order_acquire) > ring->postings.mask)
        return NDPY_POST_SINGLY;
    posting->list = list;
    posting->base = first;
    atomic_store_explicit(&posting->count, list->count, memory_order_relaxed);
    /* Before the provider sees them: completions may be polled before the call returns. */
    atomic_store_explicit(&ring->postings.end, place + 1, memory_order_release);
    atomic_store_explicit(&ring->posted, first + list->count, memory_order_release);
    error = give_list(qp, list, &refused);
    if (error)
        return end_refused(qp, list, error, refused, posted);
    ring->silent_run = 0;
    return 0;
}

/* ---- sleeping ---- */

static int arm(struct ndpy_completion_queue *cq)
{
    int error = ibv_req_notify_cq(cq->native, 0), added;

    if (error)
        return -4096 - (error > 0 ? error : -error);
    added = ndpy_drain(cq);
    return added < 0 ? added : (int)cq->undelivered;
}

static int sleep_on_channel(struct ndpy_completion_queue *cq, int waiter, int milliseconds)
{
    struct pollfd ready[] = {
        {.fd = ((struct ibv_cq *)cq->native)->channel->fd, .events = POLLIN},
        {.fd = waiter, .events = POLLIN},
    };
    eventfd_t count;

    if (poll(ready, 2, milliseconds) < 0)
        return -errno;
    if (ready[1].revents)
        eventfd_read(waiter, &count);
    return (ready[0].revents ? NDPY_NOTIFIED : 0) | (ready[1].revents ? NDPY_WOKEN : 0);
}

static void take_event(struct ndpy_completion_queue *cq)
{
    struct ibv_cq *notified;
    void *context;

    if (!ibv_get_cq_event(((struct ibv_cq *)cq->native)->channel, &notified, &context))
        ibv_ack_cq_events(notified, 1);
}

static int renew(struct ndpy_completion_queue *cq)
{
    int error;

    take_event(cq);
    error = ibv_req_notify_cq(cq->native, 0);
    return error < 0 ? -error : error;
}
