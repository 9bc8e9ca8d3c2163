#include "queue_pair.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

void operation_release(struct operation *operation)
{
    if (operation->bind.region != NULL)
        object_drop(&operation->bind.region->object);
    if (operation->bind.window != NULL)
        object_drop(&operation->bind.window->object);
    operation->bind.region = NULL;
    operation->bind.window = NULL;
}

/* ---- Its state, and how its connection ends ---- */

#define TO(value) (1u << (value))
static const unsigned state_changes[] = {
    [QP_IDLE] = TO(QP_CONNECTING) | TO(QP_ENDED),
    [QP_CONNECTING] = TO(QP_IDLE) | TO(QP_CONNECTED) | TO(QP_ENDED),
    [QP_CONNECTED] = TO(QP_FLUSHED) | TO(QP_LINGERING) | TO(QP_ENDED),
    [QP_FLUSHED] = TO(QP_ENDED),
    [QP_LINGERING] = TO(QP_ENDED),
    [QP_ENDED] = 0,
};
static const unsigned ending_changes[] = {
    [QP_GOES_ON] = TO(QP_PEER_LEFT) | TO(QP_FINISHES) | TO(QP_TERMINATES) | TO(QP_TERMINATED),
    [QP_PEER_LEFT] = TO(QP_TERMINATES) | TO(QP_TERMINATED),
    [QP_FINISHES] = TO(QP_TERMINATES) | TO(QP_TERMINATED),
    [QP_TERMINATES] = TO(QP_TERMINATED),
    [QP_TERMINATED] = 0,
};

/* No change at all is none of the table's, and no fault. In the fuzzers any other change ends the program. */
static bool allowed(const unsigned *changes, unsigned from, unsigned to)
{
    bool allows = (changes[from] & TO(to)) != 0;

#ifdef ENGINE_GUARDED
    if (!allows && from != to)
        abort();
#endif
    return allows;
}

/* Under the lock. */
static bool become(struct queue_pair *qp, enum queue_pair_state state)
{
    bool changes = allowed(state_changes, qp->state, state);

    if (changes)
        qp->state = state;
    return changes;
}

bool qp_change_ending(struct queue_pair *qp, enum queue_pair_ending ending)
{
    bool changes = allowed(ending_changes, qp->ending, ending);

    if (changes)
        qp->ending = ending;
    return changes;
}

/* ---- The connection's beginning and end ---- */

bool qp_attach(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    bool free = qp->state == QP_IDLE && become(qp, QP_CONNECTING);
    if (free) {
        qp->stream = stream;
        stream_hold(stream);
        object_hold(&qp->object);
        stream->queue_pair = qp;
    }
    lock_release(&qp->lock);
    return free;
}

void qp_detach(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    /* QP_ENDED: it was closed while it was connecting. */
    bool attached = qp->stream == stream && (qp->state == QP_CONNECTING || qp->state == QP_ENDED);
    if (attached) {
        if (qp->state == QP_CONNECTING)
            become(qp, QP_IDLE);
        qp->stream = NULL;
    }
    lock_release(&qp->lock);
    if (attached)
        stream_drop(stream);
}

void qp_established(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    become(qp, QP_CONNECTED);
    qp->outbound_limit = smaller(stream->own_outbound, stream->peer_inbound);
    qp->acknowledgements = stream->peer_to_peer || qp->outbound_limit > 0;
    lock_release(&qp->lock);
    socket_resets(&stream->socket);
}

bool qp_has_requests(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    bool has = qp->completed < qp->posted;
    lock_release(&qp->lock);
    return has;
}

static struct cq_entry canceled(const struct queue_pair *qp, void *context, ND2_REQUEST_TYPE type, nd_status status)
{
    return (struct cq_entry){
        .result = {.Status = status, .QueuePairContext = qp->context, .RequestContext = context, .RequestType = type}};
}

/* A flush adds the entries of both queues before it notifies anybody (F.7.3). */
static void flush_initiator(struct queue_pair *qp, nd_status first, bool *notify)
{
    bool behind_held = false, behind_failed = false;

    /* If the connection is lost, the oldest operation says so, also if it was sent. */
    for (uint64_t i = qp->completed; i < qp->posted; i++)
        if (qp_operation(qp, i)->state == OPERATION_FAILED && !qp_operation(qp, i)->unanswered)
            first = ND_CANCELED;
    for (; qp->completed < qp->posted; qp->completed++) {
        struct operation *operation = qp_operation(qp, qp->completed);
        bool fails = operation->state == OPERATION_FAILED && !(operation->unanswered && behind_failed);
        nd_status status = fails ? operation->status : first;
        bool taken = operation->state == OPERATION_SENT && operation->type != Nd2RequestTypeRead &&
                     qp->completed < qp->acknowledged;
        behind_held |= is_held(operation);
        bool done = (operation->state == OPERATION_DONE || taken) && !behind_held;
        struct cq_entry entry = canceled(qp, operation->context, operation->type, done ? ND_SUCCESS : status);
        entry.terminate = operation->state == OPERATION_FAILED ? operation->terminate : 0;
        operation_release(operation);
        behind_failed |= !done;
        if (!done)
            first = ND_CANCELED;
        else if ((operation->flags & ND_OP_FLAG_SILENT_SUCCESS) != 0)
            continue;
        cq_put(qp->initiator_cq, &entry, 1, notify);
    }
    /* The peer is not asked in the middle of a message. */
    if (qp->offset > 0 && qp->unacknowledged > qp->covered)
        qp->unacknowledged = qp->covered;
    qp->started = qp->posted;
    qp->offset = 0;
    for (uint64_t i = qp->reads_first; i < qp->reads_end; i++)
        qp->reads[i % READ_SLOTS].discarded = true;
}

static void flush_receives(struct queue_pair *qp, bool *notify)
{
    if (qp->has_receive) {
        struct cq_entry entry = canceled(qp, qp->receive.context, Nd2RequestTypeReceive, ND_CANCELED);
        cq_put(qp->receive_cq, &entry, 1, notify);
        qp->has_receive = false;
    }
    while (ring_take(&qp->receives, &qp->receive)) {
        struct cq_entry entry = canceled(qp, qp->receive.context, Nd2RequestTypeReceive, ND_CANCELED);
        cq_put(qp->receive_cq, &entry, 1, notify);
    }
}

/* How many of the entries are not late. `all`: what is late is given at once, what would never come is canceled, and
 * what is behind it. */
static uint32_t publishable(struct queue_pair *qp, bool all)
{
    bool behind_held = false;

    for (uint32_t i = 0; i < qp->entry_count; i++) {
        uint64_t due_ms = qp->entries_due_ms[i];
        if (!all && due_ms > now_ms()) {
            qp_go_on_at(qp, due_ms);
            return i;
        }
        behind_held |= due_ms == FAULT_FOREVER;
        if (behind_held) {
            qp->entries[i].result.Status = ND_CANCELED;
            qp->entries[i].result.BytesTransferred = 0;
        }
    }
    return qp->entry_count;
}

static void publish(struct queue_pair *qp, struct stream *stream, bool all)
{
    uint32_t count = qp->object.adapter->faults == NULL ? qp->entry_count : publishable(qp, all);

    if (count > 0)
        cq_put(qp->receive_cq, qp->entries, count, &stream->after.receive_cq);
    qp->entry_count -= count;
    if (qp->entry_count > 0) {
        memmove(qp->entries, qp->entries + count, qp->entry_count * sizeof qp->entries[0]);
        memmove(qp->entries_due_ms, qp->entries_due_ms + count, qp->entry_count * sizeof qp->entries_due_ms[0]);
    }
}

void qp_publish(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    /* A refusal becomes visible only after the peer was told of it (F.5.5). */
    if (qp->ending != QP_TERMINATES || qp->output_ended)
        publish(qp, stream, false);
    lock_release(&qp->lock);
}

void qp_cancel_receives(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    flush_receives(qp, &stream->after.receive_cq);
    lock_release(&qp->lock);
}

/* Whether its program may learn that it takes no more messages. Under the lock. */
static bool finishes_openly(const struct queue_pair *qp)
{
    return qp->ending != QP_GOES_ON && !(qp->unaware && qp->ending == QP_PEER_LEFT);
}

void qp_end(struct queue_pair *qp, struct stream *stream, nd_status first)
{
    lock_acquire(&qp->lock);
    publish(qp, stream, true);
    bool was_attached = qp->stream == stream;
    if (was_attached) {
        initiator_final_receipt(qp, stream);
        qp->stream = NULL;
        bool lingers = qp->unaware && !finishes_openly(qp) && qp->state == QP_CONNECTED;
        become(qp, lingers ? QP_LINGERING : QP_ENDED);
        if (!lingers) {
            flush_initiator(qp, first, &stream->after.initiator_cq);
            flush_receives(qp, &stream->after.receive_cq);
        }
    }
    lock_release(&qp->lock);
    if (was_attached)
        stream_drop(stream);
    if (qp->srq != NULL)
        srq_forget(qp->srq, qp, &stream->after.srq_wake);
}

static void notify_queues(struct queue_pair *qp, bool initiator, bool receive)
{
    if (initiator)
        cq_notify(qp->initiator_cq);
    if (receive)
        cq_notify(qp->receive_cq);
}

void qp_fail(struct queue_pair *qp, nd_status first)
{
    bool initiator = false, receive = false;

    lock_acquire(&qp->lock);
    if (qp->stream == NULL) {
        become(qp, QP_ENDED);
        flush_initiator(qp, first, &initiator);
        flush_receives(qp, &receive);
    }
    lock_release(&qp->lock);
    notify_queues(qp, initiator, receive);
}

static struct stream *stream_of(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    struct stream *stream = qp->stream;
    if (stream != NULL)
        stream_hold(stream);
    lock_release(&qp->lock);
    return stream;
}

/* Gives back all requests that were posted. What is in the stream's buffers is a copy, and is sent all the same. The
 * stream is locked, unless it is NULL. */
static void give_back(struct queue_pair *qp, struct stream *stream, bool *initiator, bool *receive)
{
    lock_acquire(&qp->lock);
    if (qp->state == QP_CONNECTED)
        become(qp, QP_FLUSHED);
    /* A failed request ends the connection, also if it would have come to be the oldest only later (F.6.1). */
    if (stream != NULL && qp->initiator_stopped && qp->ending == QP_GOES_ON)
        responder_stop(qp, stream, RDMAP_LOCAL_CATASTROPHIC, NULL);
    flush_initiator(qp, ND_CANCELED, initiator);
    lock_release(&qp->lock);
    /* The peer is told of a refusal first (F.5.5). A Disconnect under way has nothing left to wait for. */
    if (stream != NULL)
        stream_pump(stream);
    lock_acquire(&qp->lock);
    if (stream != NULL)
        publish(qp, stream, true);
    flush_receives(qp, receive);
    lock_release(&qp->lock);
}

/* The stream is locked. */
static void give_up_attempt(struct stream *stream)
{
    if (stream->phase == STREAM_CLOSED)
        return;
    stream_tell(stream, EVENT_FAILED, ND_CANCELED);
    stream_withdraw(stream);
}

void qp_finish_now(struct queue_pair *qp)
{
    struct stream *stream = stream_of(qp);

    if (stream != NULL) {
        stream_lock(stream);
        if (stream->phase >= STREAM_ESTABLISHED) {
            stream_disconnect(stream);
            give_back(qp, stream, &stream->after.initiator_cq, &stream->after.receive_cq);
        } else {
            give_up_attempt(stream);
        }
        stream_unlock(stream);
        stream_drop(stream);
    }
    qp_fail(qp, ND_CANCELED);
}

enum queue_pair_state qp_state(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    enum queue_pair_state state = qp->state;
    lock_release(&qp->lock);
    return state;
}

/* Drops the stream. */
static void pump(struct stream *stream, void (*pump_locked)(struct stream *stream))
{
    stream_lock(stream);
    pump_locked(stream);
    stream_unlock(stream);
    stream_drop(stream);
}

void qp_resume(struct queue_pair *qp)
{
    struct stream *stream = stream_of(qp);

    if (stream == NULL)
        return;
    stream_resume(stream);
    stream_drop(stream);
}

static void goes_on(struct timer *timer)
{
    struct queue_pair *qp = CONTAINER_OF(timer, struct queue_pair, later);
    struct stream *stream = qp->leaves ? stream_of(qp) : NULL;

    if (stream != NULL) {
        stream_lock(stream);
        stream_disconnect(stream);
        stream_unlock(stream);
        stream_drop(stream);
    }
    qp_resume(qp);
    object_drop(&qp->object);
}

void qp_go_on_at(struct queue_pair *qp, uint64_t due_ms)
{
    uint64_t now = now_ms();

    if (due_ms == FAULT_FOREVER || (qp->later.set && qp->later.due_ms <= due_ms))
        return;
    if (!timer_cancel(&qp->later))
        object_hold(&qp->object);
    timer_set(&qp->later, due_ms > now ? (uint32_t)(due_ms - now) : 0, goes_on);
}

void qp_leave(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    qp->leaves = true;
    qp_go_on_at(qp, now_ms());
    lock_release(&qp->lock);
}

void qp_pump(struct queue_pair *qp)
{
    struct stream *stream = stream_of(qp);

    if (stream != NULL)
        pump(stream, stream_pump);
}

/* ---- Posting ---- */

/* Whether an initiator request can be posted. ND_CANCELED: it is accepted and completes at once. Under the lock. */
static nd_status may_post(struct queue_pair *qp)
{
    if (qp->state < QP_CONNECTED && !qp->early)
        return ND_CONNECTION_INVALID;
    if (qp->posted - qp->completed == qp->limits.initiator_depth)
        return ND_NO_MORE_ENTRIES;
    return qp->state == QP_ENDED || qp->state == QP_FLUSHED ? ND_CANCELED : ND_SUCCESS;
}

static bool may_be_posted(nd_status status)
{
    return status == ND_SUCCESS || status == ND_CANCELED;
}

/* Queues a filled-in operation, unless the status of may_post() or of its arguments refuses it. Releases the lock. */
static nd_status post(struct queue_pair *qp, const struct operation *operation, nd_status status, nd_status arguments)
{
    struct stream *stream = NULL;
    bool notify = false;

    if (may_be_posted(status) && arguments != ND_SUCCESS)
        status = arguments;
    if (status == ND_SUCCESS) {
        struct operation *slot = qp_operation(qp, qp->posted);
        memcpy(slot, operation, offsetof(struct operation, sge) + operation->sge_count * sizeof(ND2_SGE));
        if ((operation->flags & ND_OP_FLAG_INLINE) != 0)
            memcpy(slot->inline_data, operation->inline_data, (size_t)operation->length);
        if (slot->bind.region != NULL)
            object_hold(&slot->bind.region->object);
        if (slot->bind.window != NULL)
            object_hold(&slot->bind.window->object);
        qp->posted++;
        if (qp->stream != NULL)
            stream_needs_upkeep();
        bool held_back = qp->batch_thread != 0 && qp->batch_thread == thread_id();
        stream = held_back ? NULL : qp->stream;
        if (stream != NULL)
            stream_hold(stream);
    } else if (status == ND_CANCELED) {
        struct cq_entry entry = canceled(qp, operation->context, operation->type, ND_CANCELED);
        cq_put(qp->initiator_cq, &entry, 1, &notify);
        status = ND_SUCCESS;
    }
    lock_release(&qp->lock);
    if (notify)
        cq_notify(qp->initiator_cq);
    if (stream != NULL)
        pump(stream, stream_pump_gathering);
    return status;
}

void qp_start_batch(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    qp->batch_thread = thread_id();
    lock_release(&qp->lock);
}

void qp_submit_batch(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    if (qp->batch_thread == thread_id())
        qp->batch_thread = 0;
    lock_release(&qp->lock);
    qp_pump(qp);
}

static nd_status take_inline(struct operation *operation, const ND2_SGE *sge, uint32_t sge_count, uint32_t limit)
{
    ND2_SGE element;

    for (uint32_t i = 0; i < sge_count; i++) {
        if (sge == NULL || !guarded_copy(&element, &sge[i], sizeof element))
            return ND_ACCESS_VIOLATION;
        if (element.BufferLength > limit - operation->length)
            return ND_BUFFER_OVERFLOW;
        if (!guarded_copy(operation->inline_data + operation->length, element.Buffer, element.BufferLength))
            return ND_ACCESS_VIOLATION;
        operation->length += element.BufferLength;
    }
    return ND_SUCCESS;
}

nd_status qp_post_data(struct queue_pair *qp, struct operation *operation, const ND2_SGE *sge, uint32_t sge_count)
{
    if (!adapter_request(qp->object.adapter, qp))
        return ND_DEVICE_REMOVED;
    lock_acquire(&qp->lock);
    nd_status status = may_post(qp), arguments = ND_SUCCESS;
    if (may_be_posted(status) && (operation->flags & ND_OP_FLAG_INLINE) != 0) {
        arguments = take_inline(operation, sge, sge_count, qp->limits.inline_size);
    } else if (may_be_posted(status)) {
        arguments = sge_take(operation->sge, sge, sge_count, qp->limits.initiator_sge, &operation->length);
        operation->sge_count = sge_count;
    }
    return post(qp, operation, status, arguments);
}

void operation_begin(struct operation *operation, void *context, ND2_REQUEST_TYPE type, uint32_t flags)
{
    memset(operation, 0, offsetof(struct operation, sge));
    operation->context = context;
    operation->type = type;
    operation->flags = flags;
}

nd_status qp_post_bind(struct queue_pair *qp, struct operation *operation, struct region *region, struct window *window,
                       uint64_t address, uint64_t size)
{
    if (region->object.adapter != qp->object.adapter || window->object.adapter != qp->object.adapter)
        return ND_INVALID_PARAMETER_MIX;
    if (!adapter_request(qp->object.adapter, qp))
        return ND_DEVICE_REMOVED;
    lock_acquire(&qp->lock);
    nd_status status = may_post(qp), arguments = ND_SUCCESS;
    if (may_be_posted(status))
        arguments = window_prepare(window, region, address, size, operation->flags, &operation->bind);
    if (arguments != ND_SUCCESS && operation->refuses_late) {
        operation->refusal = arguments;
        arguments = ND_SUCCESS;
    }
    if (status == ND_SUCCESS && arguments == ND_SUCCESS)
        window_accept(&operation->bind);
    return post(qp, operation, status, arguments);
}

nd_status qp_post_invalidate(struct queue_pair *qp, struct operation *operation, struct window *window)
{
    if (window != NULL && window->object.adapter != qp->object.adapter)
        return ND_INVALID_PARAMETER_MIX;
    if (!adapter_request(qp->object.adapter, qp))
        return ND_DEVICE_REMOVED;
    operation->bind.window = window;
    lock_acquire(&qp->lock);
    return post(qp, operation, may_post(qp), ND_SUCCESS);
}

nd_status qp_receive(struct queue_pair *qp, void *context, const ND2_SGE *sge, uint32_t sge_count)
{
    bool notify = false, stalled = false;

    if (qp->srq != NULL)
        return ND_INVALID_DEVICE_REQUEST;
    if (!adapter_request(qp->object.adapter, qp))
        return ND_DEVICE_REMOVED;
    lock_acquire(&qp->lock);
    nd_status status = ring_add(&qp->receives, context, sge, sge_count, qp->limits.receive_sge);
    if (status == ND_SUCCESS) {
        if (qp->state == QP_ENDED || ((qp->state == QP_FLUSHED || finishes_openly(qp)) && qp->entry_count == 0))
            flush_receives(qp, &notify);
        stalled = qp->stalled;
    }
    lock_release(&qp->lock);
    if (notify)
        cq_notify(qp->receive_cq);
    if (stalled)
        qp_resume(qp);
    return status;
}

nd_status qp_flush(struct queue_pair *qp)
{
    bool initiator = false, receive = false;

    if (adapter_gone(qp->object.adapter))
        return ND_DEVICE_REMOVED;
    struct stream *stream = stream_of(qp);
    if (stream != NULL)
        stream_lock(stream);
    give_back(qp, stream, &initiator, &receive);
    if (stream != NULL) {
        stream_unlock(stream);
        stream_drop(stream);
    }
    notify_queues(qp, initiator, receive);
    return ND_SUCCESS;
}

static void qp_closed(struct object *object)
{
    struct queue_pair *qp = CONTAINER_OF(object, struct queue_pair, object);
    bool initiator = false, receive = false;

    if (timer_cancel(&qp->later))
        object_drop(&qp->object);
    lock_acquire(&qp->lock);
    if (qp->state == QP_IDLE || qp->state == QP_CONNECTING)
        become(qp, QP_ENDED);
    lock_release(&qp->lock);
    struct stream *stream = stream_of(qp);
    if (stream != NULL) {
        stream_lock(stream);
        if (stream->phase >= STREAM_ESTABLISHED) {
            /* The connector of a Disconnect under way must be told. */
            bool finishing = qp->ending != QP_GOES_ON;
            qp_end(qp, stream, ND_CANCELED);
            if (finishing)
                stream_end(stream);
            else
                stream_close(stream);
        } else {
            give_up_attempt(stream);
        }
        stream_unlock(stream);
        stream_drop(stream);
    }
    lock_acquire(&qp->lock);
    /* Requests that came before a connection get none. */
    if (qp->state == QP_LINGERING)
        become(qp, QP_ENDED);
    flush_initiator(qp, ND_CANCELED, &initiator);
    flush_receives(qp, &receive);
    lock_release(&qp->lock);
    notify_queues(qp, initiator, receive);
    windows_forget(object->adapter, qp);
    cq_unlist(qp->receive_cq, &qp->receive_user);
    cq_unlist(qp->initiator_cq, &qp->initiator_user);
}

static void qp_destroy(struct object *object)
{
    struct queue_pair *qp = CONTAINER_OF(object, struct queue_pair, object);

    object_drop(&qp->receive_cq->object);
    object_drop(&qp->initiator_cq->object);
    if (qp->srq != NULL)
        object_drop(&qp->srq->object);
    if (qp->owner != NULL)
        object_drop(qp->owner);
    free(qp->receives.entries);
    free(qp->operations);
    free(qp);
}

static const struct object_class class = {
    .kind = KIND_QUEUE_PAIR,
    .closed = qp_closed,
    .destroy = qp_destroy,
};

nd_status qp_create(struct adapter *adapter, const void *domain, struct completion_queue *receive_cq,
                    struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
                    const struct queue_pair_limits *limits, struct object *owner, void *face, struct queue_pair **out)
{
    nd_status status;
    struct queue_pair *qp = calloc(1, sizeof *qp);
    if (qp == NULL)
        return ND_NO_MEMORY;
    lock_start(&qp->lock);
    qp->domain = domain;
    qp->limits = *limits;
    qp->limits.receive_sge = granted_sge(adapter, limits->receive_sge);
    qp->limits.initiator_sge = granted_sge(adapter, limits->initiator_sge);
    qp->context = context;
    qp->receive_cq = receive_cq;
    qp->initiator_cq = initiator_cq;
    qp->srq = srq;
    qp->owner = owner;
    qp->operations = calloc(limits->initiator_depth == 0 ? 1 : limits->initiator_depth, sizeof *qp->operations);
    if (qp->operations == NULL || !ring_start(&qp->receives, limits->receive_depth)) {
        status = ND_NO_MEMORY;
        goto fail;
    }
    if (!object_start(&qp->object, &class, adapter, face)) {
        status = ND_INSUFFICIENT_RESOURCES;
        goto fail;
    }
    object_hold(&receive_cq->object);
    object_hold(&initiator_cq->object);
    if (srq != NULL)
        object_hold(&srq->object);
    if (owner != NULL)
        object_hold(owner);
    cq_enlist(receive_cq, &qp->receive_user, qp);
    cq_enlist(initiator_cq, &qp->initiator_user, qp);
    *out = qp;
    return ND_SUCCESS;

fail:
    free(qp->receives.entries);
    free(qp->operations);
    free(qp);
    return status;
}
