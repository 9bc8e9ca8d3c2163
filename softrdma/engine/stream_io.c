/* Sending and receiving on a stream's socket. */
#include "stream_internal.h"
#include "queue_pair.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

#define ROUNDS 16
/* How long input is still handled after a send failed. */
#define DRAIN_MS 2000

/* ---- Sending ---- */

uint8_t *stream_room(struct stream *stream, size_t size)
{
    struct stream_buffer *buffer = &stream->out[stream->filling];

    if (buffer->data == buffer->small && size > buffer->size - buffer->end && buffer->end == 0) {
        uint8_t *large = pages_take(OUT_BUFFER_SIZE);
        if (large == NULL) {
            stream_starve(stream);
            return NULL;
        }
        buffer->data = large;
        buffer->size = OUT_BUFFER_SIZE;
        stream_needs_upkeep();
    }
    return size <= buffer->size - buffer->end ? buffer->data + buffer->end : NULL;
}

void stream_filled(struct stream *stream, size_t size)
{
    stream->out[stream->filling].end += size;
    stream->filled_bytes += size;
}

bool stream_was_sent(const struct stream *stream, uint64_t position)
{
    return position <= stream->filled_bytes - stream->out[stream->filling].end;
}

void stream_take(struct stream *stream, size_t size)
{
    stream->in.begin += size;
    stream->taken_bytes += size;
}

/* TCP takes no more bytes, usually because the peer is gone. Its last messages may not be handled yet. So the
 * connection counts as lost only when receiving ends, or after DRAIN_MS: receiving stands still while no Receive is
 * posted. Until then `sending` stays set and nothing more is sent. */
static void send_failed(struct stream *stream, nd_status error)
{
    bool can_receive = stream->receiving || stream->in.end < stream->in.size;

    if (error == ND_INSUFFICIENT_RESOURCES) {
        stream->send_again = true;
        stream_starve(stream);
        return;
    }
    if (stream->phase != STREAM_ESTABLISHED || stream->peer_closed || !can_receive) {
        stream->sending = false;
        stream_connection_lost(stream, error);
        return;
    }
    TRACE("stream %p: sending failed with error 0x%08x", (void *)stream, (unsigned)error);
    stream_set_timer(stream, DRAIN_MS);
    stream->send_error = error;
    stream->fin_sent = true;
    socket_end_sending(&stream->socket); /* makes a peer that still exists end the connection */
}

/* `sending` stays set, so nothing more is sent. */
static void stay_silent(struct stream *stream)
{
    stream->sending = stream->unsaid = true;
    stream_needs_upkeep();
}

/* So many bytes went well. */
static void end_by_fault(struct stream *stream)
{
    TRACE("stream %p: %s after %llu bytes", (void *)stream, fault_kind_name(stream->fault->kind),
          (unsigned long long)stream->sent_bytes);
    if (stream->fault->kind == FAULT_MUTE) {
        stay_silent(stream);
        return;
    }
    /* So that the outcome is the same each time. */
    if (stream->phase == STREAM_ESTABLISHED && qp_lose_rest(stream->queue_pair, stream)) {
        stay_silent(stream);
        if (qp_unanswered(stream->queue_pair))
            stream_connection_lost(stream, ND_CONNECTION_ABORTED);
        return;
    }
    stream->sending = false;
    /* No other attempt is made, as for a peer that closes the connection because it knows no enhanced MPA. */
    if (stream->phase == STREAM_AWAIT_REPLY) {
        stream_tell(stream, EVENT_FAILED, ND_CONNECTION_ABORTED);
        stream_abort(stream);
        return;
    }
    stream_connection_lost(stream, ND_CONNECTION_ABORTED);
}

/* The queue pair leaves when so many bytes were sent. */
static void leave_by_fault(struct stream *stream)
{
    const struct fault *fault = stream->fault;

    if (fault == NULL || fault->kind != FAULT_DISCONNECT || stream->phase != STREAM_ESTABLISHED ||
        stream->sent_bytes < fault->bytes)
        return;
    stream->fault = NULL;
    qp_leave(stream->queue_pair);
}

/* Starts or continues to send the buffer that is not being filled. True if all of it was sent at once. */
static bool send_buffer(struct stream *stream)
{
    struct stream_buffer *buffer = &stream->out[stream->filling ^ 1];
    const struct fault *fault = stream->fault;

    if (stream->mute) {
        stay_silent(stream);
        return false;
    }

    leave_by_fault(stream);
    if (fault != NULL && fault->kind == FAULT_DISCONNECT)
        fault = NULL;
    while (buffer->begin < buffer->end) {
        size_t size = buffer->end - buffer->begin;
        if (fault != NULL && stream->sent_bytes + size > fault->bytes)
            size = stream->sent_bytes < fault->bytes ? (size_t)(fault->bytes - stream->sent_bytes) : 0;
        if (size == 0) {
            end_by_fault(stream);
            return false;
        }
        size_t sent = 0;
        nd_status error;
        stream->sending = true;
        stream_hold(stream);
        /* The program often answers the message that the receipt is for. */
        bool receipt_alone = buffer->receipt == 1 && buffer->begin == 0 && size == RECEIPT_SIZE;
        enum io_result result = socket_send(&stream->socket, &stream->send_io, buffer->data + buffer->begin, size,
                                            receipt_alone, &sent, &error);
        if (result == IO_PENDING)
            return false;
        if (result == IO_FAILED)
            send_failed(stream, error);
        stream_drop(stream);
        if (result == IO_FAILED)
            return false;
        buffer->begin += sent;
        stream->sent_bytes += sent;
    }
    buffer->begin = buffer->end = buffer->receipt = 0;
    stream->sending = false;
    leave_by_fault(stream);
    return true;
}

/* Closes the stream if the queue pair has finished; then returns true. */
static bool end_if_finished(struct stream *stream, bool idle)
{
    nd_status first;

    if (stream->phase == STREAM_ESTABLISHED && stream->adapter->faults != NULL && qp_unanswered(stream->queue_pair)) {
        stream_connection_lost(stream, ND_IO_TIMEOUT);
        return true;
    }
    if (stream->phase == STREAM_ESTABLISHED && qp_waits_in_vain(stream->queue_pair)) {
        qp_end(stream->queue_pair, stream, ND_CANCELED);
        stream->after.events |= EVENT_ENDED;
        stream_abort(stream);
        return true;
    }
    if (stream->phase != STREAM_ESTABLISHED || !qp_finished(stream->queue_pair, idle, &first))
        return false;
    qp_end(stream->queue_pair, stream, first);
    stream_end(stream);
    return true;
}

static void pump(struct stream *stream, bool may_gather)
{
    if (!may_gather)
        stream_gathers_no_more(stream);
    for (;;) {
        if (stream->phase == STREAM_ESTABLISHED && stream->may_send)
            qp_fill(stream->queue_pair, stream);
        if (!stream->open)
            return;
        bool idle = !stream->sending && stream->out[stream->filling].end == 0;
        if (end_if_finished(stream, idle) || stream->sending)
            return;
        if (idle)
            break;
        if (may_gather && stream_gathers(stream))
            return;
        stream->filling ^= 1;
        if (!send_buffer(stream))
            return;
        if (stream->phase == STREAM_ESTABLISHED)
            qp_sent(stream->queue_pair, stream);
    }
    bool output_ended = stream->phase == STREAM_ESTABLISHED && stream->queue_pair->output_ended;
    if (stream->phase != STREAM_CLOSING && !output_ended)
        return;
    if (!stream->fin_sent) {
        stream->fin_sent = true;
        socket_end_sending(&stream->socket);
    }
    if (stream->phase == STREAM_CLOSING && stream->peer_closed)
        stream_close_socket(stream);
}

void stream_pump(struct stream *stream)
{
    pump(stream, false);
}

void stream_pump_gathering(struct stream *stream)
{
    pump(stream, true);
}

/* The rest of a buffer that was sent in part. */
static void go_on_sending(struct stream *stream)
{
    if (!send_buffer(stream))
        return;
    if (stream->phase == STREAM_ESTABLISHED)
        qp_sent(stream->queue_pair, stream);
    stream_pump(stream);
}

void stream_send_done(struct io *io, nd_status error, size_t bytes)
{
    struct stream *stream = CONTAINER_OF(io, struct stream, send_io);
    struct stream_buffer *buffer = &stream->out[stream->filling ^ 1];

    stream_lock(stream);
    if (stream->phase == STREAM_CLOSED) {
        stream->sending = false;
    } else if (error != 0) {
        send_failed(stream, error);
    } else {
        buffer->begin += bytes;
        stream->sent_bytes += bytes;
        go_on_sending(stream);
    }
    stream_unlock(stream);
    stream_drop(stream);
}

/* ---- Buffers ---- */

void stream_starve(struct stream *stream)
{
    if (stream->starves)
        return;
    TRACE("stream %p: waits for memory", (void *)stream);
    stream->starves = true;
    stream_needs_upkeep();
    upkeep_hurry();
}

static void use_small(struct stream_buffer *buffer)
{
    pages_give(buffer->data, buffer->size);
    buffer->data = buffer->small;
    buffer->size = STREAM_SMALL_BUFFER;
    buffer->begin = buffer->end = 0;
}

bool stream_shrink(struct stream *stream)
{
    struct stream_buffer *in = &stream->in;
    bool done = true;

    for (int i = 0; i < 2; i++) {
        struct stream_buffer *out = &stream->out[i];
        if (out->data != out->small && out->begin == out->end)
            use_small(out);
        done = done && out->data == out->small;
    }
    if (in->data == in->small)
        return done;
    /* While a thread is in socket_receive, the buffer is its own. */
    if (in->begin < in->end || !stream->receiving || stream->receive_calls > 0 || stream->in_leaves)
        return false;
    enum move move = socket_receive_elsewhere(&stream->socket, &stream->receive_io, in->small, STREAM_SMALL_BUFFER);
    stream->in_leaves = move == MOVE_ENDS;
    if (move != MOVE_DONE)
        return false;
    use_small(in);
    stream->in_filled = false;
    return done;
}

/* ---- Receiving ---- */

/* How large the buffer has to be for the next receive. Short messages that come one by one need no large one. */
static size_t size_needed(const struct stream *stream)
{
    const struct stream_buffer *in = &stream->in;

    if (in->data == in->small)
        return stream->phase >= STREAM_ACCEPTING && (in->end > 0 || stream->in_filled) ? IN_BUFFER_FIRST : in->size;
    return stream->in_filled ? IN_BUFFER_SIZE : in->size;
}

static bool make_room(struct stream *stream)
{
    struct stream_buffer *in = &stream->in;

    if (in->begin == in->end)
        in->begin = in->end = 0;
    size_t size = size_needed(stream);
    uint8_t *larger = size > in->size ? pages_take(size) : NULL;
    if (larger != NULL) {
        memcpy(larger, in->data + in->begin, in->end - in->begin);
        if (in->data != in->small)
            pages_give(in->data, in->size);
        in->data = larger;
        in->size = size;
        in->end -= in->begin;
        in->begin = 0;
        stream_needs_upkeep();
    } else if (size > in->size && in->data == in->small) {
        stream_starve(stream);
        return in->end < in->size;
    }
    if (in->begin > 0 && in->size - in->end < in->size / 2) {
        memmove(in->data, in->data + in->begin, in->end - in->begin);
        in->end -= in->begin;
        in->begin = 0;
    }
    return in->end < in->size;
}

/* A receive has failed, or the peer sends no more. */
static void input_ended(struct stream *stream, nd_status error)
{
    if (error == ND_INSUFFICIENT_RESOURCES)
        stream_starve(stream);
    else
        stream_connection_lost(stream, error);
}

static void input_arrived(struct stream *stream, size_t bytes)
{
    stream->in.end += bytes;
    stream->in_filled = stream->in.end == stream->in.size;
    stream->peer_silent = false;
    stream_process(stream);
}

/* Starts to receive, and handles data that are there at once; then returns true. The socket is read without the lock,
 * so that a program that has just learned of a completion can post immediately. If the stream is closed during the
 * call, this function closes the socket. */
static bool receive_once(struct stream *stream)
{
    size_t bytes = 0;
    nd_status error = ND_SUCCESS;

    stream_lock(stream);
    if (stream->receiving || stream->peer_closed || !stream->open || !make_room(stream)) {
        stream_unlock(stream);
        return false;
    }
    uint8_t *data = stream->in.data + stream->in.end;
    size_t size = stream->in.size - stream->in.end;
    stream->receiving = true;
    stream->receive_calls++;
    stream_hold(stream);
    stream_unlock(stream);

    enum io_result result = socket_receive(&stream->socket, &stream->receive_io, data, size, &bytes, &error);

    stream_lock(stream);
    if (result != IO_PENDING) {
        stream->receiving = false;
        stream_drop(stream);
        if (result == IO_DONE && bytes > 0 && stream->phase != STREAM_CLOSED) {
            input_arrived(stream, bytes);
        } else if (stream->phase != STREAM_CLOSED) {
            input_ended(stream, result == IO_DONE ? ND_SUCCESS : error);
        }
    }
    /* After IO_PENDING, the operation may already have ended on another thread, and the next one may run. */
    if (--stream->receive_calls == 0 && stream->close_after_calls) {
        socket_close(&stream->socket);
        stream->close_after_calls = false;
    }
    stream_unlock(stream);
    return result == IO_DONE && bytes > 0;
}

/* Receives until no data are left. The consumer is notified after each round. After ROUNDS rounds, the other streams
 * of this worker get their turn. */
void stream_receive_all(struct stream *stream)
{
    for (int i = 0; i < ROUNDS; i++)
        if (!receive_once(stream))
            return;
    stream_resume(stream);
}

void stream_receive_done(struct io *io, nd_status error, size_t bytes)
{
    struct stream *stream = CONTAINER_OF(io, struct stream, receive_io);

    stream_lock(stream);
    bool left = stream->in_leaves && error != 0;
    stream->receiving = stream->in_leaves = false;
    if (left && stream->phase != STREAM_CLOSED) {
        /* If the connection is lost, the next receive says so. */
        use_small(&stream->in);
        stream->in_filled = false;
    } else if (stream->phase != STREAM_CLOSED && (error != 0 || bytes == 0)) {
        input_ended(stream, error);
    } else if (stream->phase != STREAM_CLOSED) {
        input_arrived(stream, bytes);
    }
    stream_unlock(stream);
    stream_receive_all(stream);
    stream_drop(stream);
}

void stream_process(struct stream *stream)
{
    if (stream->mute)
        return;
    if (stream->phase == STREAM_AWAIT_REQUEST)
        handshake_request(stream);
    else if (stream->phase == STREAM_AWAIT_REPLY)
        handshake_reply(stream);
    bool more = stream->phase == STREAM_ACCEPTING || stream->phase == STREAM_ESTABLISHED;
    while (more) {
        more = qp_input(stream->queue_pair, stream);
        stream_pump(stream);
        /* The program may see what happened only now, when the answers are on their way (F.5.4). */
        qp_publish(stream->queue_pair, stream);
        more = more && stream->phase == STREAM_ESTABLISHED;
    }
    if (stream->phase >= STREAM_PROBING)
        stream->in.begin = stream->in.end = 0;
}

void stream_resume_done(struct io *io, nd_status error, size_t bytes)
{
    struct stream *stream = CONTAINER_OF(io, struct stream, resume_io);

    UNUSED(error);
    UNUSED(bytes);
    stream_lock(stream);
    stream->resume_posted = false;
    if (stream->phase != STREAM_CLOSED && stream->send_again) {
        stream->send_again = false;
        go_on_sending(stream);
    }
    if (stream->phase != STREAM_CLOSED)
        stream_process(stream);
    stream_unlock(stream);
    stream_receive_all(stream);
    stream_drop(stream);
}

void stream_resume_input(struct stream *stream)
{
    if (stream->resume_posted || stream->phase == STREAM_CLOSED)
        return;
    stream->resume_posted = true;
    stream_hold(stream);
    worker_post(&stream->resume_io);
}

void stream_resume(struct stream *stream)
{
    stream_lock(stream);
    stream_resume_input(stream);
    stream_unlock(stream);
}
