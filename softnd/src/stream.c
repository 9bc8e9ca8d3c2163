#include "stream.h"
#include "addresses.h"
#include "connector.h"
#include "listener.h"
#include "queue_pair.h"
#include "trace.h"

#include <mswsock.h>
#include <stdlib.h>
#include <string.h>

#define IN_BUFFER_SIZE (512u * 1024)
#define OUT_BUFFER_SIZE (1100u * 1024) /* a 1 MiB Write with its headers */
#define GOODBYE_MS 2000
#define ROUNDS 16
#define FRAME_MS 10000
#define CONNECT_MS 21000
#define PROBE_MS 60
/* After a send has failed, for what the peer said before. */
#define HEAR_OUT_MS 2000

static SRWLOCK streams_lock = SRWLOCK_INIT;
static struct stream *streams;

static void receive_done(struct io *io, DWORD error, DWORD bytes);
static void send_done(struct io *io, DWORD error, DWORD bytes);
static void connect_done(struct io *io, DWORD error, DWORD bytes);
static void resume_done(struct io *io, DWORD error, DWORD bytes);
static void process(struct stream *stream);
static void lost(struct stream *stream, DWORD error);

struct stream *stream_create(struct adapter *adapter, SOCKET socket)
{
    struct stream *stream = calloc(1, sizeof *stream);
    BOOL on = TRUE;

    if (stream == NULL || !transport_attach((HANDLE)socket, &stream->resume_io.worker) ||
        !SetFileCompletionNotificationModes((HANDLE)socket,
                                            FILE_SKIP_COMPLETION_PORT_ON_SUCCESS | FILE_SKIP_SET_EVENT_ON_HANDLE)) {
        closesocket(socket);
        free(stream);
        return NULL;
    }
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, (const char *)&on, sizeof on);
    setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, (const char *)&on, sizeof on);
    InitializeSRWLock(&stream->lock);
    stream->references = 2; /* the caller's, and the open socket's */
    stream->adapter = adapter;
    object_hold(&adapter->object);
    stream->socket = socket;
    stream->left_over = INVALID_SOCKET;
    stream->receive_io.done = receive_done;
    stream->send_io.done = send_done;
    stream->connect_io.done = connect_done;
    stream->resume_io.done = resume_done;
    stream->connect_io.worker = stream->resume_io.worker;
    stream->in.data = stream->in.small;
    stream->in.size = STREAM_SMALL_BUFFER;
    for (int i = 0; i < 2; i++) {
        stream->out[i].data = stream->out[i].small;
        stream->out[i].size = STREAM_SMALL_BUFFER;
    }
    transport_hold();
    AcquireSRWLockExclusive(&streams_lock);
    stream->next = streams;
    stream->link = &streams;
    if (streams != NULL)
        streams->link = &stream->next;
    streams = stream;
    ReleaseSRWLockExclusive(&streams_lock);
    return stream;
}

void stream_hold(struct stream *stream)
{
    InterlockedIncrement(&stream->references);
}

static void buffer_free(struct stream_buffer *buffer)
{
    if (buffer->data != buffer->small)
        free(buffer->data);
}

void stream_drop(struct stream *stream)
{
    if (InterlockedDecrement(&stream->references) > 0)
        return;
    buffer_free(&stream->in);
    buffer_free(&stream->out[0]);
    buffer_free(&stream->out[1]);
    if (stream->queue_pair != NULL)
        object_drop(&stream->queue_pair->object);
    if (stream->connector != NULL)
        object_drop(connector_object(stream->connector));
    if (stream->listener != NULL)
        object_drop(listener_object(stream->listener));
    object_drop(&stream->adapter->object);
    free(stream);
    transport_unhold();
}

void stream_lock(struct stream *stream)
{
    AcquireSRWLockExclusive(&stream->lock);
}

void stream_unlock(struct stream *stream)
{
    unsigned events = stream->after.events;
    HRESULT status = stream->after.status;
    bool receive_cq = stream->after.receive_cq, initiator_cq = stream->after.initiator_cq, srq = stream->after.srq;
    struct queue_pair *queue_pair = receive_cq || initiator_cq || srq ? stream->queue_pair : NULL;
    struct connector *connector = events != 0 && events != EVENT_REQUESTED ? stream->connector : NULL;
    struct listener *listener = events == EVENT_REQUESTED ? stream->listener : NULL;

    memset(&stream->after, 0, sizeof stream->after);
    if (queue_pair != NULL)
        object_hold(&queue_pair->object);
    if (connector != NULL)
        object_hold(connector_object(connector));
    if (listener != NULL)
        object_hold(listener_object(listener));
    stream_hold(stream);
    ReleaseSRWLockExclusive(&stream->lock);

    if (receive_cq)
        cq_notify(queue_pair->receive_cq);
    if (initiator_cq)
        cq_notify(queue_pair->initiator_cq);
    if (srq)
        srq_notify(queue_pair->srq);
    if (queue_pair != NULL)
        object_drop(&queue_pair->object);
    if (connector != NULL) {
        connector_event(connector, stream, events, status);
        object_drop(connector_object(connector));
    }
    if (listener != NULL) {
        listener_request(listener, stream);
        object_drop(listener_object(listener));
    }
    stream_drop(stream);
}

static void close_socket(struct stream *stream)
{
    if (stream->socket == INVALID_SOCKET)
        return;
    TRACE("stream %p: closed in phase %d", (void *)stream, stream->phase);
    /* Under Wine a send to a peer that does not read goes on when its socket is closed. */
    CancelIoEx((HANDLE)stream->socket, NULL);
    if (stream->starting > 0)
        stream->left_over = stream->socket;
    else
        closesocket(stream->socket);
    stream->socket = INVALID_SOCKET;
    stream->phase = STREAM_CLOSED;
    stream_clear_timer(stream);
    AcquireSRWLockExclusive(&streams_lock);
    *stream->link = stream->next;
    if (stream->next != NULL)
        stream->next->link = stream->link;
    ReleaseSRWLockExclusive(&streams_lock);
    stream_drop(stream);
}

void stream_cut(struct stream *stream)
{
    struct linger linger = {1, 0};

    if (stream->socket == INVALID_SOCKET)
        return;
    /* What TCP has with the end of the stream behind it may still go out. */
    if (!stream->fin_sent)
        setsockopt(stream->socket, SOL_SOCKET, SO_LINGER, (const char *)&linger, sizeof linger);
    close_socket(stream);
}

static void timer_ran_out(struct timer *timer)
{
    struct stream *stream = CONTAINER_OF(timer, struct stream, timer);

    stream_lock(stream);
    if (!timer->set) {
        switch (stream->phase) {
        case STREAM_ESTABLISHED:
            if (stream->send_error != 0) {
                lost(stream, stream->send_error);
            } else if (stream->unheard) {
                TRACE("stream %p: the peer is silent after the start-up", (void *)stream);
                stream->unheard = false;
                qp_nudge(stream->queue_pair, stream);
                stream_pump(stream);
            } else {
                bool leaving = qp_timeout(stream->queue_pair, stream);
                process(stream);
                if (leaving && stream->phase == STREAM_ESTABLISHED) {
                    qp_end(stream->queue_pair, stream, ND_CANCELED);
                    stream_end(stream);
                    stream_cut(stream);
                }
            }
            break;
        case STREAM_PROBING:
            qp_nudge(stream->queue_pair, stream);
            stream_pump(stream);
            if (stream->phase == STREAM_PROBING) {
                qp_end(stream->queue_pair, stream, ND_CANCELED);
                stream_goodbye(stream);
            }
            break;
        case STREAM_CLOSING:
            stream_cut(stream);
            break;
        default:
            handshake_timeout(stream);
        }
    }
    stream_unlock(stream);
    stream_drop(stream);
}

/* Once a send has failed, the timer is that of the end. */
static bool timer_is_of_the_end(const struct stream *stream)
{
    return stream->phase == STREAM_ESTABLISHED && stream->send_error != 0;
}

void stream_set_timer(struct stream *stream, uint32_t delay_ms)
{
    if (timer_is_of_the_end(stream))
        return;
    if (stream->timer.set)
        stream_clear_timer(stream);
    stream_hold(stream);
    timer_set(&stream->timer, delay_ms, timer_ran_out);
}

void stream_clear_timer(struct stream *stream)
{
    if (!timer_is_of_the_end(stream) && timer_cancel(&stream->timer))
        stream_drop(stream);
}

/* For the start-up, whose times a switch can shorten. */
static void limit_start_up(struct stream *stream, uint32_t usual_ms)
{
    uint32_t start_up_ms = stream->adapter->switches.start_up_ms;

    stream_set_timer(stream, start_up_ms > 0 ? start_up_ms : usual_ms);
}

void stream_await_frame(struct stream *stream)
{
    if (!stream->timer.set)
        limit_start_up(stream, FRAME_MS);
}

/* ---- Sending ---- */

uint8_t *stream_room(struct stream *stream, size_t size)
{
    struct stream_buffer *buffer = &stream->out[stream->filling];

    if (buffer->data == buffer->small && size > buffer->size - buffer->end && buffer->end == 0) {
        uint8_t *large = malloc(OUT_BUFFER_SIZE);
        if (large == NULL)
            return NULL;
        buffer->data = large;
        buffer->size = OUT_BUFFER_SIZE;
    }
    return size <= buffer->size - buffer->end ? buffer->data + buffer->end : NULL;
}

void stream_filled(struct stream *stream, size_t size)
{
    stream->out[stream->filling].end += size;
    stream->filled_bytes += size;
}

bool stream_went_out(const struct stream *stream, uint64_t position)
{
    return position <= stream->filled_bytes - stream->out[stream->filling].end;
}

void stream_take(struct stream *stream, size_t size)
{
    stream->in.begin += size;
    stream->taken_bytes += size;
}

/* TCP takes nothing more, mostly because the peer is gone. What it said before may not have been looked at yet, so the
 * connection is lost when receiving comes to its end, or after a while: receiving stands still where no receive is posted.
 * Until then `sending` stays, and nothing more is sent. */
static void send_failed(struct stream *stream, DWORD error)
{
    bool hears = stream->receiving || stream->in.end < stream->in.size;

    if (stream->phase != STREAM_ESTABLISHED || stream->peer_closed || !hears) {
        stream->sending = false;
        lost(stream, error);
        return;
    }
    TRACE("stream %p: error %lu of sending", (void *)stream, error);
    stream_set_timer(stream, HEAR_OUT_MS);
    stream->send_error = error;
    stream->fin_sent = true;
    shutdown(stream->socket, SD_SEND); /* a peer that is not gone ends the connection */
}

/* Starts or continues sending the buffer that is not being filled. True when all of it went at once. */
static bool send_some(struct stream *stream)
{
    struct stream_buffer *buffer = &stream->out[stream->filling ^ 1];
    uint64_t cut = stream->adapter->switches.cut_after_bytes;

    while (buffer->begin < buffer->end) {
        size_t size = buffer->end - buffer->begin;
        if (cut != SWITCH_OFF && stream->sent_bytes + size > cut)
            size = stream->sent_bytes < cut ? (size_t)(cut - stream->sent_bytes) : 0;
        if (size == 0) {
            TRACE("stream %p: cut by switch", (void *)stream);
            stream->sending = false;
            lost(stream, ERROR_CONNECTION_ABORTED);
            return false;
        }
        WSABUF part = {(ULONG)size, (char *)buffer->data + buffer->begin};
        DWORD sent = 0;
        memset(&stream->send_io.overlapped, 0, sizeof stream->send_io.overlapped);
        stream->sending = true;
        stream_hold(stream);
        if (WSASend(stream->socket, &part, 1, &sent, 0, &stream->send_io.overlapped, NULL) != 0) {
            int error = WSAGetLastError();
            if (error == WSA_IO_PENDING)
                return false;
            send_failed(stream, (DWORD)error);
            stream_drop(stream);
            return false;
        }
        stream_drop(stream);
        buffer->begin += sent;
        stream->sent_bytes += sent;
    }
    buffer->begin = buffer->end = buffer->word = 0;
    stream->sending = false;
    return true;
}

/* True when the queue pair's end is reached and its stream says goodbye. */
static bool end_if_finished(struct stream *stream, bool idle)
{
    HRESULT first;

    if (stream->phase != STREAM_ESTABLISHED || !qp_finished(stream->queue_pair, idle, &first))
        return false;
    qp_end(stream->queue_pair, stream, first);
    stream_end(stream);
    return true;
}

void stream_pump(struct stream *stream)
{
    for (;;) {
        if (stream->phase == STREAM_ESTABLISHED && stream->may_send)
            qp_fill(stream->queue_pair, stream);
        if (stream->socket == INVALID_SOCKET)
            return;
        bool idle = !stream->sending && stream->out[stream->filling].end == 0;
        if (end_if_finished(stream, idle) || stream->sending)
            return;
        if (idle)
            break;
        stream->filling ^= 1;
        if (!send_some(stream))
            return;
        if (stream->phase == STREAM_ESTABLISHED)
            qp_sent(stream->queue_pair, stream);
    }
    bool said_all = stream->phase == STREAM_ESTABLISHED && stream->queue_pair->said_all;
    if (stream->phase != STREAM_CLOSING && !said_all)
        return;
    if (!stream->fin_sent) {
        stream->fin_sent = true;
        shutdown(stream->socket, SD_SEND);
    }
    if (stream->phase == STREAM_CLOSING && stream->peer_closed)
        close_socket(stream);
}

static void send_done(struct io *io, DWORD error, DWORD bytes)
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
        if (send_some(stream)) {
            if (stream->phase == STREAM_ESTABLISHED)
                qp_sent(stream->queue_pair, stream);
            stream_pump(stream);
        }
    }
    stream_unlock(stream);
    stream_drop(stream);
}

/* ---- Receiving ---- */

static bool make_room(struct stream *stream)
{
    struct stream_buffer *in = &stream->in;

    if (in->begin == in->end)
        in->begin = in->end = 0;
    if (stream->phase >= STREAM_ACCEPTING && in->data == in->small) {
        uint8_t *large = malloc(IN_BUFFER_SIZE);
        if (large == NULL)
            return in->end < in->size;
        memcpy(large, in->data + in->begin, in->end - in->begin);
        in->data = large;
        in->size = IN_BUFFER_SIZE;
        in->end -= in->begin;
        in->begin = 0;
    }
    if (in->begin > 0 && in->size - in->end < in->size / 2) {
        memmove(in->data, in->data + in->begin, in->end - in->begin);
        in->end -= in->begin;
        in->begin = 0;
    }
    return in->end < in->size;
}

static void take_in(struct stream *stream, DWORD bytes)
{
    stream->in.end += bytes;
    stream->unheard = false;
    process(stream);
}

/* Starts to receive, and handles what is there at once: true then. The system call is made without the lock, so that a
 * program that just learned of a completion can post at once; close_socket leaves the socket to this function. */
static bool receive_some(struct stream *stream)
{
    DWORD bytes = 0, flags = 0;

    stream_lock(stream);
    if (stream->receiving || stream->peer_closed || stream->socket == INVALID_SOCKET || !make_room(stream)) {
        stream_unlock(stream);
        return false;
    }
    SOCKET socket = stream->socket;
    WSABUF part = {(ULONG)(stream->in.size - stream->in.end), (char *)stream->in.data + stream->in.end};
    memset(&stream->receive_io.overlapped, 0, sizeof stream->receive_io.overlapped);
    stream->receiving = true;
    stream->starting++;
    stream_hold(stream);
    stream_unlock(stream);

    bool now = WSARecv(socket, &part, 1, &bytes, &flags, &stream->receive_io.overlapped, NULL) == 0;
    int error = now ? 0 : WSAGetLastError();

    stream_lock(stream);
    if (error != WSA_IO_PENDING) {
        stream->receiving = false;
        stream_drop(stream);
        if (error == 0 && bytes > 0 && stream->phase != STREAM_CLOSED) {
            take_in(stream, bytes);
        } else if (stream->phase != STREAM_CLOSED) {
            lost(stream, (DWORD)error);
        }
    }
    /* With WSA_IO_PENDING the operation's end may already have run elsewhere, and another may be started. */
    if (--stream->starting == 0 && stream->left_over != INVALID_SOCKET) {
        closesocket(stream->left_over);
        stream->left_over = INVALID_SOCKET;
    }
    stream_unlock(stream);
    return error == 0 && bytes > 0;
}

/* Receives until nothing is there; what came is made known to the consumer each time around. After some rounds the
 * worker's other streams get their turn. */
static void receive_all(struct stream *stream)
{
    for (int i = 0; i < ROUNDS; i++)
        if (!receive_some(stream))
            return;
    stream_resume(stream);
}

static void receive_done(struct io *io, DWORD error, DWORD bytes)
{
    struct stream *stream = CONTAINER_OF(io, struct stream, receive_io);

    stream_lock(stream);
    stream->receiving = false;
    if (stream->phase != STREAM_CLOSED && (error != 0 || bytes == 0)) {
        lost(stream, error);
    } else if (stream->phase != STREAM_CLOSED) {
        take_in(stream, bytes);
    }
    stream_unlock(stream);
    receive_all(stream);
    stream_drop(stream);
}

static void process(struct stream *stream)
{
    if (stream->phase == STREAM_AWAIT_REQUEST)
        handshake_request(stream);
    else if (stream->phase == STREAM_AWAIT_REPLY)
        handshake_reply(stream);
    bool more = stream->phase == STREAM_ACCEPTING || stream->phase == STREAM_ESTABLISHED;
    while (more) {
        more = qp_input(stream->queue_pair, stream);
        stream_pump(stream);
        /* Only now, when the answers are on their way, the program may see what happened (F.5.4). */
        qp_publish(stream->queue_pair, stream);
        more = more && stream->phase == STREAM_ESTABLISHED;
    }
    if (stream->phase >= STREAM_PROBING)
        stream->in.begin = stream->in.end = 0;
}

static void resume_done(struct io *io, DWORD error, DWORD bytes)
{
    struct stream *stream = CONTAINER_OF(io, struct stream, resume_io);

    UNUSED(error);
    UNUSED(bytes);
    stream_lock(stream);
    stream->resume_posted = false;
    if (stream->phase != STREAM_CLOSED)
        process(stream);
    stream_unlock(stream);
    receive_all(stream);
    stream_drop(stream);
}

void stream_resume_input(struct stream *stream)
{
    if (stream->resume_posted || stream->phase == STREAM_CLOSED)
        return;
    stream->resume_posted = true;
    stream_hold(stream);
    transport_post(&stream->resume_io);
}

void stream_resume(struct stream *stream)
{
    stream_lock(stream);
    stream_resume_input(stream);
    stream_unlock(stream);
}

/* ---- The end ---- */

static void lost_established(struct stream *stream, DWORD error)
{
    struct queue_pair *qp = stream->queue_pair;
    bool all_taken = stream->in.begin == stream->in.end;

    stream->after.events |= EVENT_ENDED;
    qp_publish(qp, stream);
    enum farewell farewell = qp_hear_out(qp, stream);
    if (farewell == FAREWELL_NONE && error == 0 && all_taken && qp_has_requests(qp)) {
        stream->phase = STREAM_PROBING;
        qp_cancel_receives(qp, stream);
        stream_set_timer(stream, PROBE_MS);
        qp_nudge(qp, stream);
        stream_pump(stream);
        return;
    }
    /* Where a Terminate still is to be sent, it goes now. */
    if (farewell == FAREWELL_EXPECTED && error == 0)
        stream_pump(stream);
    if (stream->phase != STREAM_ESTABLISHED)
        return;
    bool died = farewell == FAREWELL_MISSING || (farewell == FAREWELL_NONE && error != 0);
    qp_end(qp, stream, died ? ND_IO_TIMEOUT : ND_CANCELED);
    if (error != 0)
        stream_cut(stream);
    else
        stream_goodbye(stream);
}

static void lost(struct stream *stream, DWORD error)
{
    if (error == 0)
        error = stream->send_error;
    TRACE("stream %p: lost in phase %d, error %lu", (void *)stream, stream->phase, error);
    stream->peer_closed = true;
    switch (stream->phase) {
    case STREAM_CLOSED:
        return;
    case STREAM_ESTABLISHED:
        lost_established(stream, error);
        return;
    case STREAM_PROBING:
        qp_end(stream->queue_pair, stream, ND_IO_TIMEOUT);
        stream_cut(stream);
        return;
    case STREAM_CLOSING:
        if (error != 0)
            stream_cut(stream);
        else
            stream_pump(stream);
        return;
    default:
        handshake_lost(stream, handshake_status(error));
    }
}

void stream_leave(struct stream *stream)
{
    bool may_wait = stream->phase == STREAM_ESTABLISHED && stream->may_send;

    if (may_wait && qp_leave(stream->queue_pair, stream)) {
        process(stream);
    } else if (!may_wait) {
        if (stream->phase == STREAM_ESTABLISHED || stream->phase == STREAM_PROBING)
            qp_end(stream->queue_pair, stream, ND_CANCELED);
        stream_end(stream);
    }
}

void stream_goodbye(struct stream *stream)
{
    if (stream->phase == STREAM_CLOSED || stream->phase == STREAM_CLOSING)
        return;
    stream->phase = STREAM_CLOSING;
    stream->in.begin = stream->in.end = 0;
    stream_set_timer(stream, GOODBYE_MS);
    stream_pump(stream);
}

/* Error of the start-up or of the queue pair: the program hears of it once. */
void stream_end(struct stream *stream)
{
    stream->after.events |= EVENT_ENDED;
    stream_goodbye(stream);
}

static void connect_done(struct io *io, DWORD error, DWORD bytes)
{
    struct stream *stream = CONTAINER_OF(io, struct stream, connect_io);

    UNUSED(bytes);
    stream_lock(stream);
    if (stream->phase == STREAM_CONNECTING) {
        if (error != 0) {
            lost(stream, error);
        } else {
            int length = sizeof stream->local;
            stream_clear_timer(stream);
            setsockopt(stream->socket, SOL_SOCKET, SO_UPDATE_CONNECT_CONTEXT, NULL, 0);
            getsockname(stream->socket, (struct sockaddr *)&stream->local, &length);
            handshake_request_sent(stream);
        }
    }
    stream_unlock(stream);
    receive_all(stream);
    stream_drop(stream);
}

void stream_connect(struct stream *stream)
{
    static LPFN_CONNECTEX connect_ex;
    GUID id = WSAID_CONNECTEX;
    DWORD bytes;

    if (connect_ex == NULL && WSAIoctl(stream->socket, SIO_GET_EXTENSION_FUNCTION_POINTER, &id, sizeof id, &connect_ex,
                                       sizeof connect_ex, &bytes, NULL, NULL) != 0) {
        lost(stream, (DWORD)WSAGetLastError());
        return;
    }
    stream->phase = STREAM_CONNECTING;
    limit_start_up(stream, CONNECT_MS);
    stream_hold(stream);
    memset(&stream->connect_io.overlapped, 0, sizeof stream->connect_io.overlapped);
    if (connect_ex(stream->socket, (struct sockaddr *)&stream->peer, address_size((struct sockaddr *)&stream->peer),
                   NULL, 0, &bytes, &stream->connect_io.overlapped)) {
        transport_post(&stream->connect_io);
        return;
    }
    int error = WSAGetLastError();
    if (error == ERROR_IO_PENDING)
        return;
    lost(stream, (DWORD)error);
    stream_drop(stream);
}

static bool bind_in_range(SOCKET socket, struct sockaddr_storage address, int *error)
{
    const unsigned first = 49152, ports = 16384;
    LARGE_INTEGER clock;

    QueryPerformanceCounter(&clock);
    unsigned start = (unsigned)(clock.QuadPart * 2654435761u >> 8) ^ GetCurrentThreadId() * 40503u;
    for (unsigned i = 0; i < ports; i++) {
        address_set_port((struct sockaddr *)&address, (USHORT)(first + (start + i) % ports));
        if (bind(socket, (struct sockaddr *)&address, address_size((struct sockaddr *)&address)) == 0)
            return true;
        *error = WSAGetLastError();
        if (*error != WSAEADDRINUSE && *error != WSAEACCES)
            return false;
    }
    *error = WSAENOBUFS;
    return false;
}

SOCKET stream_socket(const struct sockaddr_storage *address, bool listening, int *error)
{
    BOOL on = TRUE;
    SOCKET result = WSASocketW(address->ss_family, SOCK_STREAM, IPPROTO_TCP, NULL, 0,
                               WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT);

    *error = result == INVALID_SOCKET ? WSAGetLastError() : 0;
    if (result == INVALID_SOCKET)
        return result;
    if (listening)
        setsockopt(result, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, (const char *)&on, sizeof on);
    if (address->ss_family == AF_INET6)
        setsockopt(result, IPPROTO_IPV6, IPV6_V6ONLY, (const char *)&on, sizeof on);
    bool bound;
    if (address_port((const struct sockaddr *)address) == 0) {
        bound = bind_in_range(result, *address, error);
    } else {
        bound = bind(result, (const struct sockaddr *)address, address_size((const struct sockaddr *)address)) == 0;
        *error = bound ? 0 : WSAGetLastError();
    }
    if (bound)
        return result;
    closesocket(result);
    return INVALID_SOCKET;
}

void stream_accepted(struct stream *stream)
{
    stream->phase = STREAM_AWAIT_REQUEST;
    stream_await_frame(stream);
    stream_resume_input(stream);
}

void streams_abort(void)
{
    for (;;) {
        AcquireSRWLockExclusive(&streams_lock);
        struct stream *stream = streams;
        if (stream != NULL)
            stream_hold(stream);
        ReleaseSRWLockExclusive(&streams_lock);
        if (stream == NULL)
            return;
        stream_lock(stream);
        stream_cut(stream);
        stream_unlock(stream);
        stream_drop(stream);
    }
}

/* The adapter is gone: its connections too. */
void streams_remove_adapter(struct adapter *adapter)
{
    struct stream *held[64];
    unsigned count;

    do {
        count = 0;
        AcquireSRWLockExclusive(&streams_lock);
        for (struct stream *stream = streams; stream != NULL && count < COUNT_OF(held); stream = stream->next) {
            if (stream->adapter != adapter)
                continue;
            stream_hold(stream);
            held[count++] = stream;
        }
        ReleaseSRWLockExclusive(&streams_lock);
        for (unsigned i = 0; i < count; i++) {
            stream_lock(held[i]);
            lost(held[i], ERROR_DEVICE_REMOVED);
            stream_cut(held[i]);
            stream_unlock(held[i]);
            stream_drop(held[i]);
        }
    } while (count > 0);
}
