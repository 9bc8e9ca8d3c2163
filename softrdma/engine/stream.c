#include "stream_internal.h"
#include "address.h"
#include "connector.h"
#include "face.h"
#include "queue_pair.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

#define CLOSE_MS   2000
#define FRAME_MS   10000
#define CONNECT_MS 21000
#define PROBE_MS   60

static struct lock streams_lock = LOCK_INIT;
static struct stream *streams, **last_stream = &streams;
static size_t open_streams;

static void connect_done(struct io *io, nd_status error, size_t bytes);

/* Under the list's lock. */
static void list(struct stream *stream)
{
    stream->next = NULL;
    stream->link = last_stream;
    *last_stream = stream;
    last_stream = &stream->next;
    open_streams++;
}

static void unlist(struct stream *stream)
{
    *stream->link = stream->next;
    if (stream->next != NULL)
        stream->next->link = stream->link;
    else
        last_stream = stream->link;
    open_streams--;
}

struct stream *stream_create(struct adapter *adapter, socket_handle handle, bool accepted)
{
    struct stream *stream = calloc(1, sizeof *stream);

    if (stream == NULL) {
        socket_discard(handle);
        return NULL;
    }
    if (!socket_start(&stream->socket, handle, accepted)) {
        free(stream);
        return NULL;
    }
    lock_start(&stream->lock);
    stream->references = 2; /* the caller's and the open socket's */
    stream->adapter = adapter;
    stream->mute = adapter->port_down;
    object_hold(&adapter->object);
    stream->open = true;
    stream->receive_io.done = stream_receive_done;
    stream->send_io.done = stream_send_done;
    stream->connect_io.done = connect_done;
    stream->resume_io.done = stream_resume_done;
    stream->resume_io.worker = stream->socket.worker;
    stream->in.data = stream->in.small;
    stream->in.size = STREAM_SMALL_BUFFER;
    for (int i = 0; i < 2; i++) {
        stream->out[i].data = stream->out[i].small;
        stream->out[i].size = STREAM_SMALL_BUFFER;
    }
    transport_hold();
    lock_acquire(&streams_lock);
    list(stream);
    lock_release(&streams_lock);
    return stream;
}

void stream_hold(struct stream *stream)
{
    stream->references++;
}

static void buffer_free(struct stream_buffer *buffer)
{
    if (buffer->data != buffer->small)
        pages_give(buffer->data, buffer->size);
}

void stream_drop(struct stream *stream)
{
    if (--stream->references > 0)
        return;
    buffer_free(&stream->in);
    buffer_free(&stream->out[0]);
    buffer_free(&stream->out[1]);
    if (stream->queue_pair != NULL)
        object_drop(&stream->queue_pair->object);
    if (stream->connector != NULL)
        object_drop(&stream->connector->object);
    if (stream->listener != NULL)
        object_drop(listener_object(stream->listener));
    object_drop(&stream->adapter->object);
    free(stream);
    transport_unhold();
}

void stream_lock(struct stream *stream)
{
    lock_acquire(&stream->lock);
}

void stream_unlock(struct stream *stream)
{
    unsigned events = stream->after.events;
    nd_status status = stream->after.status;
    bool receive_cq = stream->after.receive_cq, initiator_cq = stream->after.initiator_cq, srq = stream->after.srq;
    bool wake = stream->after.srq_wake;
    struct queue_pair *queue_pair = receive_cq || initiator_cq || srq || wake ? stream->queue_pair : NULL;
    struct connector *connector = events != 0 && events != EVENT_REQUESTED ? stream->connector : NULL;
    struct listener *listener = events == EVENT_REQUESTED ? stream->listener : NULL;

    memset(&stream->after, 0, sizeof stream->after);
    if (queue_pair != NULL)
        object_hold(&queue_pair->object);
    if (connector != NULL)
        object_hold(&connector->object);
    if (listener != NULL)
        object_hold(listener_object(listener));
    stream_hold(stream);
    lock_release(&stream->lock);

    if (receive_cq)
        cq_notify(queue_pair->receive_cq);
    if (initiator_cq)
        cq_notify(queue_pair->initiator_cq);
    if (srq)
        srq_notify(queue_pair->srq);
    if (wake)
        srq_wake(queue_pair->srq);
    if (queue_pair != NULL)
        object_drop(&queue_pair->object);
    if (connector != NULL) {
        connector_event(connector, stream, events, status);
        object_drop(&connector->object);
    }
    if (listener != NULL) {
        listener_request(listener, stream);
        object_drop(listener_object(listener));
    }
    stream_drop(stream);
}

void stream_tell(struct stream *stream, unsigned events, nd_status status)
{
    stream->after.events |= events;
    stream->after.status = status;
}

struct object *stream_leave_listener(struct stream *stream)
{
    struct listener *listener = stream->listener;

    stream->listener = NULL;
    return listener != NULL ? listener_object(listener) : NULL;
}

static void close_socket(struct stream *stream, bool reset)
{
    if (!stream->open)
        return;
    TRACE("stream %p: closed in phase %d", (void *)stream, stream->phase);
    socket_cancel(&stream->socket, reset);
    if (stream->receive_calls > 0)
        stream->close_after_calls = true;
    else
        socket_close(&stream->socket);
    stream->open = false;
    stream->phase = STREAM_CLOSED;
    guest_leave(stream);
    stream_gathers_no_more(stream);
    stream_clear_timer(stream);
    lock_acquire(&streams_lock);
    unlist(stream);
    lock_release(&streams_lock);
    stream_drop(stream);
}

void stream_close_socket(struct stream *stream)
{
    close_socket(stream, false);
}

void stream_abort(struct stream *stream)
{
    /* After a FIN, TCP may still deliver the bytes that it holds, to a peer that takes them. */
    bool delivers = stream->fin_sent && (stream->queue_pair == NULL || !stream->queue_pair->peer_not_ready);

    close_socket(stream, !delivers);
}

static void timer_ran_out(struct timer *timer)
{
    struct stream *stream = CONTAINER_OF(timer, struct stream, timer);

    stream_lock(stream);
    if (!timer->set) {
        switch (stream->phase) {
        case STREAM_NEW:
            stream_connect(stream);
            break;
        case STREAM_ESTABLISHED:
            if (stream->send_error != 0) {
                stream_connection_lost(stream, stream->send_error);
            } else if (stream->peer_silent) {
                TRACE("stream %p: the peer is silent after the start-up", (void *)stream);
                stream->peer_silent = false;
                qp_send_empty_write(stream->queue_pair, stream);
                stream_pump(stream);
            } else {
                bool finishing = qp_timeout(stream->queue_pair, stream);
                stream_process(stream);
                if (finishing && stream->phase == STREAM_ESTABLISHED) {
                    qp_end(stream->queue_pair, stream, ND_CANCELED);
                    stream_end(stream);
                    stream_abort(stream);
                }
            }
            break;
        case STREAM_PROBING:
            qp_send_empty_write(stream->queue_pair, stream);
            stream_pump(stream);
            if (stream->phase == STREAM_PROBING) {
                qp_end(stream->queue_pair, stream, ND_CANCELED);
                stream_close(stream);
            }
            break;
        case STREAM_CLOSING:
            stream_abort(stream);
            break;
        default:
            handshake_timeout(stream);
        }
    }
    stream_unlock(stream);
    stream_drop(stream);
}

/* After a failed send, the timer is reserved for the end of the connection. */
static bool timer_is_for_failed_send(const struct stream *stream)
{
    return stream->phase == STREAM_ESTABLISHED && stream->send_error != 0;
}

void stream_set_timer(struct stream *stream, uint32_t delay_ms)
{
    if (timer_is_for_failed_send(stream))
        return;
    if (stream->timer.set)
        stream_clear_timer(stream);
    stream_hold(stream);
    timer_set(&stream->timer, delay_ms, timer_ran_out);
}

void stream_clear_timer(struct stream *stream)
{
    if (!timer_is_for_failed_send(stream) && timer_cancel(&stream->timer))
        stream_drop(stream);
}

/* Sets the timer for a step of the start-up. A setting can shorten its time. */
static void limit_start_up(struct stream *stream, uint32_t usual_ms)
{
    uint32_t start_up_ms = stream->adapter->settings.start_up_ms;

    stream_set_timer(stream, start_up_ms > 0 ? start_up_ms : usual_ms);
}

void stream_await_frame(struct stream *stream)
{
    limit_start_up(stream, FRAME_MS);
}

void stream_await_program(struct stream *stream)
{
    if (face_patience_ms > 0)
        limit_start_up(stream, face_patience_ms);
}

/* ---- The end ---- */

static void established_connection_lost(struct stream *stream, nd_status error)
{
    struct queue_pair *qp = stream->queue_pair;
    bool all_taken = stream->in.begin == stream->in.end;

    stream->after.events |= EVENT_ENDED;
    qp_publish(qp, stream);
    enum final_receipt final_receipt = qp_drain_input(qp, stream);
    if (final_receipt == FINAL_RECEIPT_UNSUPPORTED && error == 0 && all_taken && qp_has_requests(qp)) {
        stream->phase = STREAM_PROBING;
        qp_cancel_receives(qp, stream);
        stream_set_timer(stream, PROBE_MS);
        qp_send_empty_write(qp, stream);
        stream_pump(stream);
        return;
    }
    /* A Terminate that is still due is sent now. */
    if (final_receipt == FINAL_RECEIPT_NOT_NEEDED && error == 0)
        stream_pump(stream);
    if (stream->phase != STREAM_ESTABLISHED)
        return;
    bool died = final_receipt == FINAL_RECEIPT_MISSING || (final_receipt == FINAL_RECEIPT_UNSUPPORTED && error != 0);
    qp_end(qp, stream, died ? ND_IO_TIMEOUT : ND_CANCELED);
    if (error != 0)
        stream_abort(stream);
    else
        stream_close(stream);
}

void stream_connection_lost(struct stream *stream, nd_status error)
{
    if (error == 0)
        error = stream->send_error;
    TRACE("stream %p: lost in phase %d, error 0x%08x", (void *)stream, stream->phase, (unsigned)error);
    stream->peer_closed = true;
    switch (stream->phase) {
    case STREAM_CLOSED:
        return;
    case STREAM_ESTABLISHED:
        established_connection_lost(stream, error);
        return;
    case STREAM_PROBING:
        qp_end(stream->queue_pair, stream, ND_IO_TIMEOUT);
        stream_abort(stream);
        return;
    case STREAM_CLOSING:
        if (error != 0)
            stream_abort(stream);
        else
            stream_pump(stream);
        return;
    default:
        handshake_lost(stream, error == ND_SUCCESS ? ND_CONNECTION_ABORTED : error);
    }
}

void stream_disconnect(struct stream *stream)
{
    bool may_wait = stream->phase == STREAM_ESTABLISHED && stream->may_send;

    if (may_wait && qp_finish(stream->queue_pair, stream)) {
        stream_process(stream);
    } else if (!may_wait) {
        if (stream->phase == STREAM_ESTABLISHED || stream->phase == STREAM_PROBING)
            qp_end(stream->queue_pair, stream, ND_CANCELED);
        stream_end(stream);
    }
}

void stream_close(struct stream *stream)
{
    if (stream->phase == STREAM_CLOSED || stream->phase == STREAM_CLOSING)
        return;
    if (stream->phase == STREAM_REQUESTED)
        guest_enter(stream);
    stream->phase = STREAM_CLOSING;
    stream->in.begin = stream->in.end = 0;
    stream_set_timer(stream, CLOSE_MS);
    stream_pump(stream);
}

/* The start-up or the queue pair failed. The program is told once. */
void stream_end(struct stream *stream)
{
    stream->after.events |= EVENT_ENDED;
    stream_close(stream);
}

static void connect_done(struct io *io, nd_status error, size_t bytes)
{
    struct stream *stream = CONTAINER_OF(io, struct stream, connect_io);

    UNUSED(bytes);
    stream_lock(stream);
    if (stream->phase == STREAM_CONNECTING) {
        if (error != 0) {
            stream_connection_lost(stream, error);
        } else {
            stream_clear_timer(stream);
            socket_connected(&stream->socket, &stream->local);
            handshake_request_sent(stream);
        }
    }
    stream_unlock(stream);
    stream_receive_all(stream);
    stream_drop(stream);
}

void stream_connect(struct stream *stream)
{
    nd_status error;

    stream->phase = STREAM_CONNECTING;
    limit_start_up(stream, CONNECT_MS);
    stream_hold(stream);
    switch (socket_connect(&stream->socket, &stream->connect_io, &stream->peer, &error)) {
    case IO_DONE:
        stream->connect_io.worker = stream->socket.worker;
        worker_post(&stream->connect_io);
        break;
    case IO_PENDING:
        break;
    case IO_FAILED:
        stream_connection_lost(stream, error);
        stream_drop(stream);
        break;
    }
    if (stream->open && address_port((struct sockaddr *)&stream->local) == 0) /* it has got one just now */
        socket_connected(&stream->socket, &stream->local);
}

void stream_accepted(struct stream *stream)
{
    stream_lock(stream);
    stream->phase = STREAM_AWAIT_REQUEST;
    stream_await_frame(stream);
    bool crowded = guest_enter(stream);
    stream_unlock(stream);
    stream_receive_all(stream);
    if (crowded && guests_limit())
        stream_needs_upkeep();
}

/* The streams take turns: the one whose turn it is, held. */
static struct stream *next_stream(void)
{
    lock_acquire(&streams_lock);
    struct stream *stream = streams;
    if (stream != NULL) {
        unlist(stream);
        list(stream);
        stream_hold(stream);
    }
    lock_release(&streams_lock);
    return stream;
}

void streams_each(void (*act)(struct stream *stream, void *what), void *what)
{
    lock_acquire(&streams_lock);
    size_t left = open_streams;
    lock_release(&streams_lock);
    for (struct stream *stream; left > 0 && (stream = next_stream()) != NULL; left--) {
        stream_lock(stream);
        act(stream, what);
        stream_unlock(stream);
        stream_drop(stream);
    }
}

void streams_abort(void)
{
    for (;;) {
        lock_acquire(&streams_lock);
        struct stream *stream = streams;
        if (stream != NULL)
            stream_hold(stream);
        lock_release(&streams_lock);
        if (stream == NULL)
            return;
        stream_lock(stream);
        stream_abort(stream);
        stream_unlock(stream);
        stream_drop(stream);
    }
}

static void tell(struct stream *stream, void *nothing)
{
    UNUSED(nothing);
    stream_pump(stream);
}

void streams_tell_all(void)
{
    streams_each(tell, NULL);
}

void streams_forget(void)
{
    lock_start(&streams_lock);
    streams = NULL;
    last_stream = &streams;
    open_streams = 0;
    guests_forget();
    gathering_forget();
}

struct muting {
    struct adapter *adapter;
    bool mute;
};

static void mute_or_not(struct stream *stream, void *what)
{
    const struct muting *muting = what;

    if (stream->adapter != muting->adapter || stream->mute == muting->mute)
        return;
    stream->mute = muting->mute;
    stream->send_again |= !stream->mute && stream->unsaid;
    stream->unsaid &= stream->mute;
    if (!stream->mute)
        stream_resume_input(stream);
}

void streams_mute(struct adapter *adapter, bool mute)
{
    streams_each(mute_or_not, &(struct muting){adapter, mute});
}

/* The adapter is gone, so its connections end too. */
void streams_remove_adapter(struct adapter *adapter)
{
    struct stream *held[64];
    unsigned count;

    do {
        count = 0;
        lock_acquire(&streams_lock);
        for (struct stream *stream = streams; stream != NULL && count < COUNT_OF(held); stream = stream->next) {
            if (stream->adapter != adapter)
                continue;
            stream_hold(stream);
            held[count++] = stream;
        }
        lock_release(&streams_lock);
        for (unsigned i = 0; i < count; i++) {
            stream_lock(held[i]);
            stream_connection_lost(held[i], ND_DEVICE_REMOVED);
            stream_abort(held[i]);
            stream_unlock(held[i]);
            stream_drop(held[i]);
        }
    } while (count > 0);
}
