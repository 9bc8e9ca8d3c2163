/* Input: Writes and Sends into memory, Read Requests, answers to our own Reads, receipts and Terminates.
 *
 * Segments are handled one by one, as soon as they are complete, and only as far as the queue pair can. A Send that
 * finds no Receive stays in the buffer with everything behind it. The receiver's state changes only when a segment was
 * handled.
 */
#include "queue_pair.h"
#include "trace.h"

#include <string.h>

/* How long a Send may wait for a Receive (F.3.5), unless waits_without_limit(). */
#define NO_RECEIVE_MS 3000
/* So often this end tells the peer meanwhile that it waits, and looks whether the peer has gone: nobody wants the Send
 * any more then. */
#define NOT_READY_MS 500

enum outcome { HANDLED, WAITS, STOPPED };

/* Under the queue pair's lock. */
static void take_no_more(struct queue_pair *qp, struct stream *stream, enum queue_pair_ending ending)
{
    qp_change_ending(qp, ending);
    if (qp->srq != NULL)
        srq_forget(qp->srq, qp, &stream->after.srq_wake);
}

void responder_stop(struct queue_pair *qp, struct stream *stream, int error, const struct wire_segment *offender)
{
    if (qp->ending >= QP_TERMINATES)
        return;
    TRACE("stream %p: terminating with 0x%x", (void *)stream, error);
    take_no_more(qp, stream, QP_TERMINATES);
    size_t size =
        wire_put_terminate(qp->terminate, error, offender != NULL && offender->header != NULL ? offender : NULL);
    qp->terminate_size = wire_finish(qp->terminate, size, stream->crc);
    stream->peer_silent = false;
    stream_set_timer(stream, FINISH_MS);
}

/* Whether a Send of the peer waits for a Receive as long as that takes: with a shared receive queue (G.6.7), or because
 * the peer's program wants it. */
static bool waits_without_limit(const struct queue_pair *qp)
{
    return qp->srq != NULL || qp->peer_patience == PATIENCE_ENDLESS ||
           (qp->peer_patience == PATIENCE_OF_PEER && qp->lets_wait);
}

/* The entry of the message that has arrived completely, as a fault has it. */
static void change_entry(struct queue_pair *qp, const struct fault *fault)
{
    uint32_t last = qp->entry_count - 1;

    qp->entries[last].silent = fault->kind == FAULT_SILENT;
    if (fault->kind == FAULT_DELAY || fault->kind == FAULT_HOLD)
        qp->entries_due_ms[last] = fault->ms == FAULT_FOREVER ? FAULT_FOREVER : now_ms() + fault->ms;
}

static void add_entry(struct queue_pair *qp, nd_status status, uint32_t bytes, bool solicited)
{
    qp->entries_due_ms[qp->entry_count] = 0;
    qp->entries[qp->entry_count++] = (struct cq_entry){.result = {.Status = status,
                                                                  .BytesTransferred = bytes,
                                                                  .QueuePairContext = qp->context,
                                                                  .RequestContext = qp->receive.context,
                                                                  .RequestType = Nd2RequestTypeReceive},
                                                       .solicited = solicited};
    qp->has_receive = false;
}

static enum outcome stop(struct queue_pair *qp, struct stream *stream, int error, const struct wire_segment *segment)
{
    responder_stop(qp, stream, error, segment);
    return STOPPED;
}

static bool is_receipt(const struct wire_segment *segment)
{
    return segment->opcode == RDMAP_WRITE && segment->size == 0 &&
           (segment->stag == RECEIPT_TOKEN || segment->stag == FINAL_RECEIPT_TOKEN);
}

static enum outcome take_receipt(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    if (!initiator_receipt(qp, stream, segment->offset))
        return stop(qp, stream, DDP_BOUNDS, segment);
    if (!qp->gets_receipts)
        qp->owes_receipt = true; /* tells the peer that it gets receipts too */
    qp->sends_receipts = qp->gets_receipts = true;
    qp->got_final_receipt |= segment->stag == FINAL_RECEIPT_TOKEN;
    return HANDLED;
}

static enum outcome take_write(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    struct adapter *adapter = qp->object.adapter;
    uint64_t whole = segment->size;

    if (segment->size == 0 && segment->stag == PATIENCE_TOKEN) {
        qp->peer_patience = segment->offset;
        return HANDLED;
    }
    if (segment->size == 0 && segment->stag == NOT_READY_TOKEN) {
        qp->peer_not_ready = true;
        return HANDLED;
    }
    if (segment->size == 0) {
        /* If it has a token, it announces the end of a long Write that follows; see initiator.c. */
        qp->announced_token = segment->stag;
        qp->announced_end = segment->offset;
        qp->owes_receipt |= segment->stag == 0;
        return HANDLED;
    }
    if (qp->announced_token == segment->stag && qp->announced_token != 0 && stream->peer_to_peer &&
        qp->announced_end > segment->offset && qp->announced_end - segment->offset > whole)
        whole = qp->announced_end - segment->offset;
    qp->announced_token = 0;
    if ((whole == segment->size ||
         memory_check(adapter, segment->stag, segment->offset, whole, ACCESS_REMOTE_WRITE, qp)) &&
        memory_write(adapter, segment->stag, segment->offset, segment->payload, segment->size, ACCESS_REMOTE_WRITE,
                     qp)) {
        qp->owes_receipt |= segment->last;
        return HANDLED;
    }
    char reason = memory_refusal(adapter, segment->stag, segment->offset, whole, qp);
    return stop(qp, stream, reason == 'T' ? DDP_INVALID_STAG : reason == 'B' ? DDP_BOUNDS : RDMAP_ACCESS, segment);
}

/* Whether a message that begins to arrive finds no Receive by a fault. */
static bool comes_too_early(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    if (!qp->arrival_asked) {
        qp->beginning_size = segment->size < sizeof qp->beginning ? (uint32_t)segment->size : sizeof qp->beginning;
        memcpy(qp->beginning, segment->payload, qp->beginning_size);
        const struct fault *fault = faults_at_arrival(qp, stream, segment->size, qp->beginning, qp->beginning_size);
        qp->arrival_asked = true;
        qp->receive_due_ms = fault != NULL ? now_ms() + fault->ms : 0;
    }
    bool early = qp->receive_due_ms > now_ms();
    if (early)
        qp_go_on_at(qp, qp->receive_due_ms);
    return early;
}

/* A Receive whose message has arrived fails, and the peer is told what it would be told then. */
static enum outcome fail_receive(struct queue_pair *qp, struct stream *stream, const struct fault *fault,
                                 const struct wire_segment *segment)
{
    add_entry(qp, fault_failure(fault, Nd2RequestTypeReceive).status, 0, false);
    return stop(qp, stream, fault->status == STATUS_LOC_LEN_ERR ? DDP_TOO_LONG : RDMAP_OPERATION, segment);
}

static enum outcome take_send(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    struct adapter *adapter = qp->object.adapter;
    const void *domain = qp->srq != NULL ? qp->srq->domain : qp->domain;

    if (!qp->has_receive) {
        bool early = adapter->faults != NULL && comes_too_early(qp, stream, segment);
        bool taken = early             ? false
                     : qp->srq != NULL ? srq_take(qp->srq, qp, &qp->receive)
                                       : ring_take(&qp->receives, &qp->receive);
        if (!taken) {
            if (!qp->stalled) {
                qp->stalled_ms = now_ms();
                stream_set_timer(stream, NOT_READY_MS);
            }
            qp->stalled = true;
            return WAITS;
        }
        if (qp->stalled)
            stream_clear_timer(stream);
        stream->after.srq |= qp->srq != NULL;
        qp->stalled = false;
        qp->has_receive = true;
        /* Every element, even one that the message does not reach (D.5.2). */
        if (!elements_check(adapter, qp->receive.sge, qp->receive.sge_count, ACCESS_LOCAL_WRITE, domain)) {
            add_entry(qp, ND_ACCESS_VIOLATION, 0, false);
            return stop(qp, stream, RDMAP_OPERATION, segment);
        }
    }

    uint64_t room = 0;
    for (uint32_t i = 0; i < qp->receive.sge_count; i++)
        room += qp->receive.sge[i].BufferLength;
    uint64_t end = (uint64_t)segment->message_offset + segment->size;
    if (end > room) {
        add_entry(qp, ND_BUFFER_OVERFLOW, 0, false);
        return stop(qp, stream, DDP_TOO_LONG, segment);
    }
    if (!elements_scatter(adapter, qp->receive.sge, qp->receive.sge_count, segment->message_offset, segment->payload,
                          segment->size, ACCESS_LOCAL_WRITE, domain)) {
        add_entry(qp, ND_ACCESS_VIOLATION, 0, false);
        return stop(qp, stream, RDMAP_OPERATION, segment);
    }
    if (!segment->last)
        return HANDLED;
    const struct fault *fault = NULL;
    if (adapter->faults != NULL) {
        fault = faults_at_receive(qp, stream, end, qp->beginning, qp->beginning_size);
        qp->arrival_asked = false;
        if (fault != NULL && fault->kind == FAULT_STATUS)
            return fail_receive(qp, stream, fault, segment);
    }
    bool invalidates = segment->opcode == RDMAP_SEND_INVALIDATE || segment->opcode == RDMAP_SEND_SOLICITED_INVALIDATE;
    void *context = NULL;
    if (invalidates && !window_invalidate_token(adapter, segment->invalidate, qp, &context)) {
        add_entry(qp, ND_INVALID_DEVICE_REQUEST, 0, false);
        return stop(qp, stream, RDMAP_CANNOT_INVALIDATE, segment);
    }
    /* This entry precedes the Receive. A program that sees the Receive may release the window and its context. */
    if (context != NULL) {
        qp->entries_due_ms[qp->entry_count] = 0;
        qp->entries[qp->entry_count++] = (struct cq_entry){
            .result = {.Status = ND_SUCCESS, .RequestContext = context, .RequestType = REQUEST_PEER_INVALIDATED}};
    }
    add_entry(qp, ND_SUCCESS, (uint32_t)end,
              segment->opcode == RDMAP_SEND_SOLICITED || segment->opcode == RDMAP_SEND_SOLICITED_INVALIDATE);
    qp->entries[qp->entry_count - 1].invalidated = invalidates ? segment->invalidate : 0;
    if (fault != NULL)
        change_entry(qp, fault);
    qp->owes_receipt = true;
    return HANDLED;
}

static enum outcome take_read_request(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    const struct wire_read_request *request = &segment->request;
    struct adapter *adapter = qp->object.adapter;

    if (qp->answers_end - qp->answers_first == ANSWERS) {
        qp->input_waits = true;
        return WAITS;
    }
    if (request->size > 0 &&
        !memory_check(adapter, request->source_stag, request->source_offset, request->size, ACCESS_REMOTE_READ, qp)) {
        char reason = memory_refusal(adapter, request->source_stag, request->source_offset, request->size, qp);
        return stop(qp, stream,
                    reason == 'T'   ? RDMAP_INVALID_STAG
                    : reason == 'B' ? RDMAP_BOUNDS
                                    : RDMAP_ACCESS,
                    segment);
    }
    qp->answers[qp->answers_end++ % ANSWERS] = (struct answer){.request = *request};
    if (request->size == 0 && request->sink_offset == SOFTND_READ_OFFSET && !qp->sends_receipts)
        qp->sends_receipts = qp->owes_receipt = true;
    return HANDLED;
}

static enum outcome take_read_response(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    if (qp->reads_first == qp->reads_end)
        return stop(qp, stream, DDP_INVALID_STAG, segment);
    struct read_slot *slot = &qp->reads[qp->reads_first % READ_SLOTS];
    if (slot->read.left == 0) {
        /* An answer to a Read of no bytes. A busy siw of Linux sends bytes of another message with it; they are
         * dropped. */
        if (segment->stag != slot->read.sink_stag)
            return stop(qp, stream, DDP_INVALID_STAG, segment);
        if (segment->last)
            initiator_answered(qp, stream, slot);
        return HANDLED;
    }
    int error = wire_receive_response(&slot->read, segment);
    if (error != WIRE_OK)
        return stop(qp, stream, error, segment);
    if (!slot->acknowledgement && !slot->discarded) {
        struct operation *operation = qp_operation(qp, slot->operation);
        const struct fault *fault = slot->received == 0 ? operation->message_fault : NULL;
        if (fault != NULL && fault->kind == FAULT_CORRUPT)
            faults_corrupt(qp, fault, stream->in.data + (segment->payload - stream->in.data), segment->size);
        if (!elements_scatter(qp->object.adapter, operation->sge, operation->sge_count, slot->received,
                              segment->payload, segment->size, ACCESS_READ_SINK, qp->domain)) {
            operation->state = OPERATION_FAILED;
            operation->status = ND_ACCESS_VIOLATION;
            qp->initiator_stopped = true;
            slot->discarded = true;
            /* This answer proves everything before the operation, and the operation itself is next. */
            if (slot->covers > qp->acknowledged)
                qp->acknowledged = slot->covers;
            initiator_complete(qp, stream);
            return STOPPED;
        }
    }
    slot->received += segment->size;
    if (slot->read.left == 0)
        initiator_answered(qp, stream, slot);
    return HANDLED;
}

static enum outcome take(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    switch (segment->opcode) {
    case RDMAP_WRITE:
        return is_receipt(segment) ? take_receipt(qp, stream, segment) : take_write(qp, stream, segment);
    case RDMAP_READ_REQUEST:
        return take_read_request(qp, stream, segment);
    case RDMAP_READ_RESPONSE:
        return take_read_response(qp, stream, segment);
    case RDMAP_TERMINATE:
        take_no_more(qp, stream, QP_TERMINATED); /* no Terminate answers a Terminate */
        initiator_terminated(qp, stream, &segment->terminate);
        return STOPPED;
    default:
        return take_send(qp, stream, segment);
    }
}

/* Handles the first segment on the passive side. False if it ends the attempt. */
static bool take_first(struct queue_pair *qp, struct stream *stream, const struct wire_segment *segment)
{
    if (segment->opcode == RDMAP_TERMINATE) {
        stream_tell(stream, EVENT_FAILED, ND_CONNECTION_REFUSED);
        stream_close(stream);
        return false;
    }
    stream_clear_timer(stream);
    stream->phase = STREAM_ESTABLISHED;
    qp_established(qp, stream);
    stream->after.events |= EVENT_ESTABLISHED;
    return true;
}

static bool is_outcome(const struct wire_segment *segment)
{
    return is_receipt(segment) || segment->opcode == RDMAP_READ_RESPONSE || segment->opcode == RDMAP_TERMINATE ||
           (segment->opcode == RDMAP_WRITE && segment->size == 0 && segment->stag == NOT_READY_TOKEN);
}

/* Handles input after this end took its last message: only what tells of the outcome of its own. Sends, Writes and Read
 * Requests are skipped. */
static void drain_input(struct queue_pair *qp, struct stream *stream)
{
    while (qp->ending != QP_TERMINATED && !qp->expired) {
        struct wire_segment segment;
        size_t used = 0;

        int result = wire_parse(stream->in.data + stream->in.begin, stream->in.end - stream->in.begin, stream->crc,
                                &segment, &used);
        if (result == WIRE_MORE)
            return;
        lock_acquire(&qp->lock);
        if (result == WIRE_OK)
            result = wire_receive(&qp->receiver, &segment);
        /* After a segment that cannot be parsed, nothing else can be. */
        qp->expired = result != WIRE_OK || (is_outcome(&segment) && take(qp, stream, &segment) == STOPPED);
        lock_release(&qp->lock);
        stream->in.begin += used;
    }
    stream->in.begin = stream->in.end;
}

bool qp_finish(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    bool first = qp->ending == QP_GOES_ON;
    if (first)
        take_no_more(qp, stream, QP_FINISHES);
    qp->stalled = false;
    lock_release(&qp->lock);
    if (!first)
        return false;
    qp_cancel_receives(qp, stream);
    stream->peer_silent = false;
    stream_set_timer(stream, FINISH_MS);
    return true;
}

enum final_receipt qp_drain_input(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    bool was_ending = qp->ending != QP_GOES_ON;
    if (!was_ending)
        take_no_more(qp, stream, QP_PEER_LEFT);
    lock_release(&qp->lock);
    drain_input(qp, stream);
    lock_acquire(&qp->lock);
    qp->expired = true;
    lock_release(&qp->lock);
    if (was_ending || qp->ending == QP_TERMINATED)
        return FINAL_RECEIPT_NOT_NEEDED;
    if (!qp->gets_receipts)
        return FINAL_RECEIPT_UNSUPPORTED;
    return qp->got_final_receipt ? FINAL_RECEIPT_ARRIVED : FINAL_RECEIPT_MISSING;
}

bool qp_input(struct queue_pair *qp, struct stream *stream)
{
    enum outcome outcome = HANDLED;

    while (outcome == HANDLED && qp->entry_count < PUBLISH_BATCH && qp->ending == QP_GOES_ON) {
        const uint8_t *data = stream->in.data + stream->in.begin;
        struct wire_segment segment;
        size_t used = 0;

        int result = wire_parse(data, stream->in.end - stream->in.begin, stream->crc, &segment, &used);
        if (result == WIRE_MORE)
            return false;
        /* Before the queue pair's lock is taken, because this call takes it. */
        if (stream->phase == STREAM_ACCEPTING && result == WIRE_OK && !take_first(qp, stream, &segment))
            return false;
        if (stream->phase != STREAM_ESTABLISHED) {
            stream_tell(stream, EVENT_FAILED, ND_CONNECTION_ABORTED);
            stream_abort(stream);
            return false;
        }
        stream->may_send = true;

        lock_acquire(&qp->lock);
        struct wire_receiver receiver = qp->receiver;
        if (result == WIRE_OK)
            result = wire_receive(&receiver, &segment);
        if (result == WIRE_OK)
            outcome = take(qp, stream, &segment);
        else
            outcome = stop(qp, stream, result, &segment);
        if (outcome == HANDLED) {
            qp->receiver = receiver;
            stream_take(stream, used);
        }
        lock_release(&qp->lock);
    }
    if (qp->ending != QP_GOES_ON)
        drain_input(qp, stream);
    return outcome == HANDLED && qp->ending == QP_GOES_ON;
}

bool qp_timeout(struct queue_pair *qp, struct stream *stream)
{
    struct wire_segment segment;
    size_t used;

    lock_acquire(&qp->lock);
    bool finishing = qp->ending != QP_GOES_ON;
    qp->expired |= finishing;
    bool waits = !finishing && qp->stalled && (qp->receives.count == 0 || qp->receive_due_ms > now_ms());
    if (waits && (stream->peer_closed || socket_peer_ended(&stream->socket))) {
        take_no_more(qp, stream, QP_PEER_LEFT);
        stream_set_timer(stream, FINISH_MS);
        stream_resume_input(stream); /* the end may come behind more than the buffer holds */
    } else if (waits && (waits_without_limit(qp) || now_ms() - qp->stalled_ms < NO_RECEIVE_MS)) {
        qp->tells_not_ready = true;
        stream_set_timer(stream, NOT_READY_MS);
    } else if (waits && wire_parse(stream->in.data + stream->in.begin, stream->in.end - stream->in.begin, stream->crc,
                                   &segment, &used) == WIRE_OK) {
        responder_stop(qp, stream, DDP_NO_BUFFER, &segment);
    }
    lock_release(&qp->lock);
    return finishing;
}
