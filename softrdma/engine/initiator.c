/* Output: operations in order, answers to the peer's Reads, receipts or acknowledgement Reads, and the Terminate.
 *
 * Messages are not interleaved: whole answers and whole operations take turns. Each segment is copied from the
 * consumer's memory into the stream's buffer. The copy checks the token and survives a missing page.
 *
 * A Write of several segments is announced by a zero-length Write to its end. Other iWARP peers see a Write of
 * nothing. softnd can check the whole range before the first byte is placed (E.3.5). Therefore a zero-length Write of
 * the program is sent without its token.
 *
 * Operation numbers:
 *   acknowledged    the peer is proven to have taken everything before this one
 *   covered         Reads under way will prove everything before this one
 *   unacknowledged  the end of the last Send or Write on the wire
 *
 * A peer without receipts is asked by Reads of no bytes, within its read limit. No Send or Write begins until such a
 * Read is free to follow it, because the peer may leave as soon as it took the message.
 */
#include "queue_pair.h"
#include "trace.h"

#include <string.h>

#define ACKNOWLEDGE_OPERATIONS 16u
#define ACKNOWLEDGE_BYTES      (256u * 1024)
/* Room that is always left for a Terminate, an acknowledgement and a receipt. */
#define RESERVE    192u
#define SINK_TOKEN 0xFFFFFF00u /* beyond every token of the table, so no Write can use it */

/* Beyond every token of the table, and none of those of queue_pair.h. */
#define WRONG_TOKEN 0xFFFFFF10u

/* The MTU of soft0's port, and the pause between pieces of a message that is split. */
#define MTU      4096u
#define PAUSE_MS 1u

enum progress { NOTHING, NO_ROOM, PROGRESS };

static void put_trailer(struct stream *stream, uint8_t *frame, size_t size)
{
    stream_filled(stream, wire_finish(frame, size, stream->crc));
}

/* Writes a receipt. A receipt that is not sent yet is updated instead, so a buffer holds at most one and always has
 * room for it. */
static bool put_receipt(struct stream *stream, uint32_t token)
{
    struct stream_buffer *buffer = &stream->out[stream->filling];
    bool fresh = buffer->receipt == 0;
    uint8_t *frame = fresh ? stream_room(stream, RECEIPT_SIZE) : buffer->data + buffer->receipt - 1;

    if (frame == NULL)
        return false;
    if (fresh)
        buffer->receipt = buffer->end + 1;
    size_t size = wire_put_tagged(frame, RDMAP_WRITE, token, stream->taken_bytes, true, 0);
    size = wire_finish(frame, size, stream->crc);
    if (fresh)
        stream_filled(stream, size);
    return true;
}

static bool put_not_ready(struct stream *stream)
{
    uint8_t *frame = stream_room(stream, RECEIPT_SIZE + RESERVE);

    if (frame != NULL)
        put_trailer(stream, frame, wire_put_tagged(frame, RDMAP_WRITE, NOT_READY_TOKEN, 0, true, 0));
    return frame != NULL;
}

void initiator_final_receipt(struct queue_pair *qp, struct stream *stream)
{
    if (qp->sends_receipts && !qp->output_ended)
        put_receipt(stream, FINAL_RECEIPT_TOKEN);
}

bool initiator_receipt(struct queue_pair *qp, struct stream *stream, uint64_t position)
{
    if (!stream_was_sent(stream, position))
        return false;
    qp->peer_not_ready = false;
    if (qp->acknowledged < qp->completed)
        qp->acknowledged = qp->completed;
    while (qp->acknowledged < qp->started && qp_operation(qp, qp->acknowledged)->sent_mark <= position)
        qp->acknowledged++;
    initiator_complete(qp, stream);
    return true;
}

static size_t reads_under_way(const struct queue_pair *qp)
{
    return (size_t)(qp->reads_end - qp->reads_first);
}

static bool read_slot_free(const struct queue_pair *qp)
{
    size_t limit = qp->outbound_limit > 1 ? qp->outbound_limit : 1;
    return reads_under_way(qp) < limit;
}

static void put_read(struct queue_pair *qp, struct stream *stream, uint8_t *frame, const struct operation *operation)
{
    struct read_slot *slot = &qp->reads[qp->reads_end % READ_SLOTS];
    uint32_t msn = ++qp->read_msn;
    struct wire_read_request request = {.sink_stag = htonl(SINK_TOKEN | (msn & 255)),
                                        .sink_offset = SOFTND_READ_OFFSET};

    *slot = (struct read_slot){.operation = qp->started, .covers = qp->started, .msn = msn, .acknowledgement = true};
    if (operation != NULL) {
        request.sink_offset = 0;
        request.source_stag = operation->remote_token;
        request.source_offset = operation->remote_address;
        request.size = (uint32_t)operation->length;
        slot->acknowledgement = false;
    }
    slot->read = (struct wire_read){.sink_stag = request.sink_stag, .left = request.size};
    qp->reads_end++;
    qp->covered = qp->started;
    qp->unacknowledged_bytes = 0;
    put_trailer(stream, frame, wire_put_read_request(frame, msn, &request));
}

void qp_send_rtr(struct queue_pair *qp, struct stream *stream)
{
    uint8_t *frame = stream_room(stream, RESERVE);

    lock_acquire(&qp->lock);
    if (frame != NULL)
        put_read(qp, stream, frame, NULL);
    lock_release(&qp->lock);
}

void qp_send_empty_write(struct queue_pair *qp, struct stream *stream)
{
    uint8_t *frame = stream_room(stream, RESERVE);

    lock_acquire(&qp->lock);
    /* Not within a message of several segments: siw accepts no other message there. */
    if (frame != NULL && (qp->offset == 0 || qp->ending != QP_GOES_ON))
        put_trailer(stream, frame, wire_put_tagged(frame, RDMAP_WRITE, 0, 0, true, 0));
    lock_release(&qp->lock);
}

/* Copies a range of an operation's data out of the consumer's memory. */
static bool gather(struct queue_pair *qp, const struct operation *operation, uint64_t offset, uint8_t *out, size_t size)
{
    if ((operation->flags & ND_OP_FLAG_INLINE) != 0) {
        memcpy(out, operation->inline_data + offset, size);
        return true;
    }
    return elements_gather(qp->object.adapter, operation->sge, operation->sge_count, offset, out, size, qp->domain);
}

static bool elements_allow(struct queue_pair *qp, const struct operation *operation, enum access access)
{
    if ((operation->flags & ND_OP_FLAG_INLINE) != 0)
        return true;
    return elements_check(qp->object.adapter, operation->sge, operation->sge_count, access, qp->domain);
}

static void fail(struct queue_pair *qp, struct operation *operation, nd_status status)
{
    operation->state = OPERATION_FAILED;
    operation->status = status;
    qp->initiator_stopped = true;
    qp->offset = 0;
}

static bool has_message_fault(const struct operation *operation, enum fault_kind kind)
{
    return operation->message_fault != NULL && operation->message_fault->kind == kind;
}

static enum progress fill_read(struct queue_pair *qp, struct stream *stream, struct operation *operation)
{
    if (qp->outbound_limit == 0) {
        fail(qp, operation, ND_INVALID_DEVICE_REQUEST);
        return PROGRESS;
    }
    if (!elements_allow(qp, operation, ACCESS_READ_SINK)) {
        fail(qp, operation, ND_ACCESS_VIOLATION);
        return PROGRESS;
    }
    if (!read_slot_free(qp))
        return NOTHING;
    uint8_t *frame = stream_room(stream, WIRE_READ_REQUEST_SIZE + RESERVE);
    if (frame == NULL)
        return NO_ROOM;
    put_read(qp, stream, frame, operation);
    operation->state = OPERATION_SENT;
    operation->msn = qp->read_msn;
    operation->sent_mark = stream->filled_bytes;
    qp->started++;
    return PROGRESS;
}

/* Fills one segment of a Send or Write. */
static enum progress fill_data(struct queue_pair *qp, struct stream *stream, struct operation *operation)
{
    uint64_t left = operation->length - qp->offset;
    uint32_t payload = left > WIRE_MAX_PAYLOAD ? WIRE_MAX_PAYLOAD : (uint32_t)left;
    bool is_split = has_message_fault(operation, FAULT_SPLIT);
    if (is_split && payload > MTU)
        payload = MTU;
    bool last = payload == left;
    size_t header;

    if (qp->offset == 0 && !elements_allow(qp, operation, ACCESS_LOCAL_READ)) {
        fail(qp, operation, ND_ACCESS_VIOLATION);
        return PROGRESS;
    }
    uint8_t *frame = stream_room(stream, 2 * WIRE_UNTAGGED_SIZE + payload + RESERVE);
    if (frame == NULL)
        return NO_ROOM;
    if (operation->type == Nd2RequestTypeWrite) {
        if (!last && qp->offset == 0) {
            header = wire_put_tagged(frame, RDMAP_WRITE, operation->remote_token,
                                     operation->remote_address + operation->length, true, 0);
            put_trailer(stream, frame, header);
            frame = stream_room(stream, WIRE_UNTAGGED_SIZE + payload + RESERVE / 2);
        }
        uint32_t token = operation->length == 0 ? 0 : operation->remote_token;
        uint64_t address = operation->length == 0 ? 0 : operation->remote_address + qp->offset;
        header = wire_put_tagged(frame, RDMAP_WRITE, token, address, last, payload);
    } else {
        bool solicit = (operation->flags & ND_OP_FLAG_SEND_AND_SOLICIT_EVENT) != 0;
        if (qp->offset == 0)
            operation->msn = ++qp->send_msn;
        enum wire_opcode opcode = operation->invalidates ? RDMAP_SEND_INVALIDATE : RDMAP_SEND;
        if (solicit)
            opcode = operation->invalidates ? RDMAP_SEND_SOLICITED_INVALIDATE : RDMAP_SEND_SOLICITED;
        header =
            wire_put_send(frame, opcode, operation->remote_token, operation->msn, (uint32_t)qp->offset, last, payload);
    }
    if (!gather(qp, operation, qp->offset, frame + header, payload)) {
        fail(qp, operation, ND_ACCESS_VIOLATION);
        return PROGRESS;
    }
    if (qp->offset == 0 && has_message_fault(operation, FAULT_CORRUPT))
        faults_corrupt(qp, operation->message_fault, frame + header, payload);
    put_trailer(stream, frame, header + payload);
    if (is_split)
        operation->due_ms = last ? 0 : now_ms() + PAUSE_MS;
    qp->offset += payload;
    qp->unacknowledged_bytes += payload;
    if (last) {
        operation->state = OPERATION_SENT;
        operation->sent_mark = stream->filled_bytes;
        qp->offset = 0;
        qp->started++;
        qp->unacknowledged = qp->started;
    }
    return PROGRESS;
}

static bool tell_patience(struct queue_pair *qp, struct stream *stream)
{
    int patience = qp->patience;

    if (patience == qp->told_patience)
        return true;
    uint8_t *frame = stream_room(stream, RECEIPT_SIZE + RESERVE);
    if (frame == NULL)
        return false;
    put_trailer(stream, frame, wire_put_tagged(frame, RDMAP_WRITE, PATIENCE_TOKEN, (uint64_t)patience, true, 0));
    qp->told_patience = patience;
    return true;
}

static bool invalidate_by_token(struct queue_pair *qp, uint32_t token)
{
    void *context;
    return window_invalidate_token(qp->object.adapter, token, qp, &context);
}

static bool reads_of_program_under_way(const struct queue_pair *qp)
{
    for (uint64_t i = qp->reads_first; i < qp->reads_end; i++)
        if (!qp->reads[i % READ_SLOTS].acknowledgement)
            return true;
    return false;
}

/* The scenario is asked once about each operation, when its turn comes. */
static void ask_about(struct queue_pair *qp, struct stream *stream, struct operation *operation)
{
    uint8_t content[FAULT_MAX_CONTENT];
    uint64_t length = operation->type == Nd2RequestTypeRead ? 0 : operation->length;
    size_t size = length < sizeof content ? (size_t)length : sizeof content;

    if (size > 0 && !gather(qp, operation, 0, content, size))
        size = 0;
    operation->asked = true;
    operation->fault = faults_at_request(qp, stream, operation, content, size);
    if (operation->type <= Nd2RequestTypeSend || operation->type >= Nd2RequestTypeRead)
        operation->message_fault = faults_at_message(qp, stream, operation, content, size);
    if (has_message_fault(operation, FAULT_DELAY))
        operation->due_ms = now_ms() + operation->message_fault->ms;
    operation->silent = operation->fault != NULL && operation->fault->kind == FAULT_SILENT;
}

/* The peer gets a token that it never gave, and so refuses the operation. False: it has none that the peer looks at. */
static bool names_wrong_memory(struct operation *operation)
{
    bool has_token = operation->type == Nd2RequestTypeSend ? operation->invalidates : operation->length > 0;

    if (has_token)
        operation->remote_token = htonl(WRONG_TOKEN);
    return has_token;
}

/* NOTHING: its turn has not come. NO_ROOM: it goes on as any other. */
static enum progress begin_with_faults(struct queue_pair *qp, struct stream *stream, struct operation *operation)
{
    if (!operation->asked)
        ask_about(qp, stream, operation);
    if (qp->leaves && qp->offset == 0)
        return NOTHING;
    if (operation->due_ms > now_ms()) {
        qp_go_on_at(qp, operation->due_ms);
        return NOTHING;
    }
    operation->due_ms = 0;
    const struct fault *fault = operation->fault;
    if (qp->offset > 0 || fault == NULL || fault->kind != FAULT_STATUS ||
        (fault->status == STATUS_REM_ACCESS_ERR && names_wrong_memory(operation)))
        return NO_ROOM;
    struct failure failure = fault_failure(fault, operation->type);
    fail(qp, operation, failure.status);
    operation->terminate = failure.terminate;
    operation->unanswered = fault->status == STATUS_RETRY_EXC_ERR;
    return PROGRESS;
}

static enum progress fill_operation(struct queue_pair *qp, struct stream *stream)
{
    if (qp->started == qp->posted || qp->initiator_stopped)
        return NOTHING;
    struct operation *operation = qp_operation(qp, qp->started);
    if ((operation->flags & ND_OP_FLAG_READ_FENCE) != 0 && reads_of_program_under_way(qp))
        return NOTHING;
    if (qp->object.adapter->faults != NULL) {
        enum progress begun = begin_with_faults(qp, stream, operation);
        if (begun != NO_ROOM)
            return begun;
    }
    switch (operation->type) {
    case Nd2RequestTypeRead:
        return fill_read(qp, stream, operation);
    case Nd2RequestTypeBind:
    case Nd2RequestTypeInvalidate: {
        bool done = operation->refusal != ND_SUCCESS        ? false
                    : operation->type == Nd2RequestTypeBind ? window_bind(&operation->bind, qp)
                    : operation->bind.window != NULL        ? window_invalidate(operation->bind.window, qp)
                                                            : invalidate_by_token(qp, operation->remote_token);
        if (!done) {
            fail(qp, operation, ND_INVALID_DEVICE_REQUEST);
            return PROGRESS;
        }
        operation->state = OPERATION_DONE;
        operation->sent_mark = stream->filled_bytes;
        qp->started++;
        return PROGRESS;
    }
    default:
        if (qp->offset == 0 && qp->acknowledgements && !qp->gets_receipts && !read_slot_free(qp))
            return NOTHING;
        if (operation->type == Nd2RequestTypeSend && qp->offset == 0 && !tell_patience(qp, stream))
            return NO_ROOM;
        return fill_data(qp, stream, operation);
    }
}

/* Fills one segment of the oldest answer. */
static enum progress fill_answer(struct queue_pair *qp, struct stream *stream)
{
    if (qp->answers_first == qp->answers_end)
        return NOTHING;
    struct answer *answer = &qp->answers[qp->answers_first % ANSWERS];
    const struct wire_read_request *request = &answer->request;
    uint32_t left = request->size - answer->done;
    uint32_t payload = left > WIRE_MAX_PAYLOAD ? WIRE_MAX_PAYLOAD : left;
    uint8_t *frame = stream_room(stream, WIRE_TAGGED_SIZE + payload + RESERVE);
    if (frame == NULL)
        return NO_ROOM;
    size_t header = wire_put_tagged(frame, RDMAP_READ_RESPONSE, request->sink_stag, request->sink_offset + answer->done,
                                    payload == left, payload);
    if (payload > 0 && !memory_read(qp->object.adapter, request->source_stag, request->source_offset + answer->done,
                                    frame + header, payload, ACCESS_REMOTE_READ, qp)) {
        /* The access right was withdrawn meanwhile. */
        qp->answers_first = qp->answers_end;
        responder_stop(qp, stream, RDMAP_INVALID_STAG, NULL);
        return NOTHING;
    }
    put_trailer(stream, frame, header + payload);
    answer->done += payload;
    if (payload == left) {
        qp->answers_first++;
        if (qp->input_waits) {
            qp->input_waits = false;
            stream_resume_input(stream);
        }
    }
    return PROGRESS;
}

/* Asks for an acknowledgement: at once if nothing else can be sent now, otherwise after some operations or bytes. */
static void fill_acknowledgement(struct queue_pair *qp, struct stream *stream, bool at_once)
{
    if (!qp->acknowledgements || qp->gets_receipts || qp->unacknowledged <= qp->covered || !read_slot_free(qp) ||
        qp->offset > 0)
        return;
    if (!at_once && qp->unacknowledged_bytes < ACKNOWLEDGE_BYTES &&
        qp->unacknowledged - qp->covered < ACKNOWLEDGE_OPERATIONS)
        return;
    uint8_t *frame = stream_room(stream, WIRE_READ_REQUEST_SIZE + RESERVE / 2);
    if (frame != NULL)
        put_read(qp, stream, frame, NULL);
}

static bool in_answer(const struct queue_pair *qp)
{
    return qp->answers_first < qp->answers_end && qp->answers[qp->answers_first % ANSWERS].done > 0;
}

/* Whether the outcome of everything sent is known, or will never be. */
static bool outcome_known(struct queue_pair *qp)
{
    const struct operation *oldest = qp_operation(qp, qp->completed);
    if (qp->expired || qp->completed == qp->started || oldest->state == OPERATION_FAILED || is_held(oldest))
        return true;
    /* No acknowledgement can be requested in the middle of a message. */
    return !qp->gets_receipts && qp->acknowledgements && reads_under_way(qp) == 0 &&
           (qp->offset > 0 || qp->unacknowledged <= qp->covered);
}

/* Whether the peer has yet to take messages of requests that were given back. */
static bool sent_more_than_taken(const struct queue_pair *qp)
{
    return qp->state == QP_FLUSHED && qp->acknowledgements && !qp->expired && qp->acknowledged < qp->unacknowledged;
}

/* Ends the output of this end. A peer without receipts must have answered first. */
static void end_output(struct queue_pair *qp, struct stream *stream)
{
    if (!qp->gets_receipts && (!outcome_known(qp) || sent_more_than_taken(qp)))
        return;
    if (qp->ending == QP_TERMINATES) {
        uint8_t *frame = stream_room(stream, qp->terminate_size + RECEIPT_SIZE);
        if (frame == NULL)
            return;
        initiator_final_receipt(qp, stream);
        frame = stream_room(stream, qp->terminate_size);
        memcpy(frame, qp->terminate, qp->terminate_size);
        stream_filled(stream, qp->terminate_size);
    } else {
        initiator_final_receipt(qp, stream);
    }
    qp->output_ended = true;
}

void qp_fill(struct queue_pair *qp, struct stream *stream)
{
    enum progress progress;

    lock_acquire(&qp->lock);
    if (qp->owes_receipt && qp->sends_receipts && !qp->output_ended)
        qp->owes_receipt = !put_receipt(stream, RECEIPT_TOKEN);
    /* siw accepts no other message within one of several segments. */
    if (qp->tells_not_ready && qp->ending == QP_GOES_ON && (qp->sends_receipts || qp->offset == 0))
        qp->tells_not_ready = qp->stalled && !put_not_ready(stream);
    do {
        progress = NOTHING;
        if (qp->output_ended)
            break;
        if (qp->ending != QP_GOES_ON || (qp->offset == 0 && (qp->answer_turn || in_answer(qp)))) {
            progress = fill_answer(qp, stream);
            qp->answer_turn = in_answer(qp);
        }
        if (progress != NOTHING)
            continue;
        if (qp->ending == QP_GOES_ON) {
            progress = fill_operation(qp, stream);
            qp->answer_turn = true;
        }
        fill_acknowledgement(qp, stream, progress != PROGRESS);
        if (progress == NOTHING && qp->offset == 0)
            progress = fill_answer(qp, stream);
    } while (progress == PROGRESS);
    initiator_complete(qp, stream);
    if (qp->ending != QP_GOES_ON && !qp->output_ended && qp->answers_first == qp->answers_end)
        end_output(qp, stream);
    lock_release(&qp->lock);
}

bool qp_awaits(struct queue_pair *qp, struct stream *stream, uint32_t count)
{
    lock_acquire(&qp->lock);
    bool awaits = qp->gets_receipts && qp->ending == QP_GOES_ON && qp->started - qp->completed >= count &&
                  qp_operation(qp, qp->completed)->state == OPERATION_SENT &&
                  stream_was_sent(stream, qp_operation(qp, qp->completed + count - 1)->sent_mark);
    lock_release(&qp->lock);
    return awaits;
}

void qp_sent(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    if (!qp->acknowledgements)
        initiator_complete(qp, stream);
    lock_release(&qp->lock);
}

/* Whether its completion is late. */
static bool is_late(struct queue_pair *qp, struct operation *operation)
{
    const struct fault *fault = operation->fault;

    if (fault == NULL || (fault->kind != FAULT_DELAY && fault->kind != FAULT_HOLD))
        return false;
    if (operation->due_ms == 0)
        operation->due_ms = fault->ms == FAULT_FOREVER ? FAULT_FOREVER : now_ms() + fault->ms;
    if (operation->due_ms <= now_ms())
        return false;
    qp_go_on_at(qp, operation->due_ms);
    return true;
}

static bool is_complete(const struct queue_pair *qp, const struct stream *stream, const struct operation *operation)
{
    if (operation->state != OPERATION_SENT || operation->type == Nd2RequestTypeRead)
        return operation->state == OPERATION_DONE;
    if (qp->acknowledgements)
        return qp->completed < qp->acknowledged;
    return stream->sent_bytes >= operation->sent_mark;
}

void initiator_complete(struct queue_pair *qp, struct stream *stream)
{
    struct cq_entry entries[16];
    uint32_t count = 0;

    while (qp->completed < qp->posted) {
        struct operation *operation = qp_operation(qp, qp->completed);
        if (operation->state == OPERATION_FAILED) {
            /* The failed operation is the oldest now: the peer is told, then the connection ends (F.6.1). */
            if (qp->ending == QP_GOES_ON && !operation->unanswered)
                responder_stop(qp, stream, RDMAP_LOCAL_CATASTROPHIC, NULL);
            break;
        }
        if (!is_complete(qp, stream, operation) || (qp->object.adapter->faults != NULL && is_late(qp, operation)))
            break;
        qp->completed++;
        operation_release(operation);
        if ((operation->flags & ND_OP_FLAG_SILENT_SUCCESS) != 0)
            continue;
        entries[count++] = (struct cq_entry){.result = {.Status = ND_SUCCESS,
                                                        .BytesTransferred = (uint32_t)operation->length,
                                                        .QueuePairContext = qp->context,
                                                        .RequestContext = operation->context,
                                                        .RequestType = operation->type},
                                             .silent = operation->silent};
        if (count == COUNT_OF(entries)) {
            cq_put(qp->initiator_cq, entries, count, &stream->after.initiator_cq);
            count = 0;
        }
    }
    if (count > 0)
        cq_put(qp->initiator_cq, entries, count, &stream->after.initiator_cq);
}

bool qp_lose_rest(struct queue_pair *qp, struct stream *stream)
{
    lock_acquire(&qp->lock);
    uint64_t first = qp->completed;
    while (first < qp->posted && first < qp->started && qp_operation(qp, first)->sent_mark <= stream->sent_bytes)
        first++;
    bool sends = first < qp->posted;
    if (sends) {
        struct operation *operation = qp_operation(qp, first);
        fail(qp, operation, ND_IO_TIMEOUT);
        operation->unanswered = true;
        /* Not every peer tells. */
        qp->lost_at_ms = now_ms() + FINISH_MS;
        qp_go_on_at(qp, qp->lost_at_ms);
    }
    lock_release(&qp->lock);
    return sends;
}

bool qp_waits_in_vain(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    bool in_vain = qp->ending == QP_FINISHES && qp->peer_not_ready;
    lock_release(&qp->lock);
    return in_vain;
}

bool qp_unanswered(struct queue_pair *qp)
{
    lock_acquire(&qp->lock);
    const struct operation *oldest = qp->completed < qp->posted ? qp_operation(qp, qp->completed) : NULL;
    bool unanswered = (oldest != NULL && oldest->state == OPERATION_FAILED && oldest->unanswered) ||
                      (qp->lost_at_ms != 0 && now_ms() >= qp->lost_at_ms);
    lock_release(&qp->lock);
    return unanswered;
}

bool qp_finished(struct queue_pair *qp, bool idle, nd_status *first)
{
    lock_acquire(&qp->lock);
    bool finished = qp->ending == QP_TERMINATED || cq_failed(qp->receive_cq) || cq_failed(qp->initiator_cq) ||
                    (qp->output_ended && idle && outcome_known(qp));
    *first = ND_CANCELED;
    if (qp->completed < qp->posted && qp_operation(qp, qp->completed)->state == OPERATION_FAILED)
        *first = qp_operation(qp, qp->completed)->status;
    lock_release(&qp->lock);
    return finished;
}

void initiator_answered(struct queue_pair *qp, struct stream *stream, struct read_slot *slot)
{
    if (!slot->acknowledgement && !slot->discarded)
        qp_operation(qp, slot->operation)->state = OPERATION_DONE;
    if (slot->covers > qp->acknowledged)
        qp->acknowledged = slot->covers;
    qp->reads_first++;
    initiator_complete(qp, stream);
}

static bool write_is_offender(const struct operation *operation, const struct wire_terminate *terminate)
{
    return operation->type == Nd2RequestTypeWrite && operation->remote_token == terminate->stag &&
           terminate->offset - operation->remote_address <= operation->length;
}

static nd_status status_of(const struct wire_terminate *terminate, const struct operation *operation)
{
    int layer = WIRE_ERROR_LAYER(terminate->error), kind = WIRE_ERROR_TYPE(terminate->error);

    if (terminate->error == DDP_TOO_LONG)
        return ND_DATA_OVERRUN;
    if (terminate->error == DDP_NO_BUFFER)
        return ND_IO_TIMEOUT;
    if (operation->type != Nd2RequestTypeSend && kind == 1 && layer <= 1)
        return ND_ACCESS_VIOLATION;
    if (operation->invalidates && kind == 1 && layer == 0)
        return ND_INVALID_DEVICE_REQUEST;
    return ND_REMOTE_ERROR;
}

/* Finds the operation that the peer's Terminate complains of. Everything before it was taken (F.6.5). */
void initiator_terminated(struct queue_pair *qp, struct stream *stream, const struct wire_terminate *terminate)
{
    uint64_t found = qp->posted;
    uint64_t sent = qp->started < qp->posted && qp->offset > 0 ? qp->started + 1 : qp->started;

    TRACE("stream %p: the peer terminates with 0x%x", (void *)stream, terminate->error);
    for (uint64_t i = qp->completed; i < sent && found == qp->posted && terminate->has_header; i++) {
        const struct operation *operation = qp_operation(qp, i);
        /* The peer cannot complain of this operation if the one before it was not sent completely. */
        if (i > qp->completed && !stream_was_sent(stream, qp_operation(qp, i - 1)->sent_mark))
            break;
        bool matches = terminate->tagged ? write_is_offender(operation, terminate)
                       : terminate->queue == QUEUE_SEND
                           ? operation->type == Nd2RequestTypeSend && operation->msn == terminate->msn
                           : operation->type == Nd2RequestTypeRead && operation->msn == terminate->msn;
        if (matches && operation->state != OPERATION_DONE)
            found = i;
    }
    if (found == qp->posted && terminate->error != RDMAP_LOCAL_CATASTROPHIC &&
        terminate->error != DDP_LOCAL_CATASTROPHIC)
        found = qp->completed;
    if (found == qp->posted)
        return;
    struct operation *operation = qp_operation(qp, found);
    operation->state = OPERATION_FAILED;
    operation->status = status_of(terminate, operation);
    operation->terminate = terminate->error;
    for (uint64_t i = qp->completed; i < found; i++) {
        struct operation *earlier = qp_operation(qp, i);
        bool taken = earlier->type != Nd2RequestTypeRead && earlier->state == OPERATION_SENT;
        if (taken)
            earlier->state = OPERATION_DONE;
    }
    initiator_complete(qp, stream);
}
