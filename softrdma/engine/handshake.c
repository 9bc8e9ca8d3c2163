/* MPA start-up: request and reply frames. Revision 2 has read limits and a first message; revision 1 is the fallback.
 *
 * The active side asks for the peer-to-peer model. Its first message is a zero-length Read. That Read completes the
 * passive side's Accept. Further Reads of this kind serve as acknowledgements. siw ends a connection when a Read
 * arrives although none was agreed, so the request asks for at least one Read, whatever limit the program has.
 *
 * A peer that closes instead of answering may know only revision 1. It is then asked again with revision 1.
 */
#include "address.h"
#include "face.h"
#include "queue_pair.h"
#include "stream_internal.h"
#include "trace.h"

#include <string.h>

#define SILENT_PEER_MS 250

static bool send_frame(struct stream *stream, const struct mpa_frame *frame)
{
    uint8_t *out = stream_room(stream, MPA_MAX_FRAME);

    if (out == NULL)
        return false;
    size_t size = mpa_encode(out, frame);
    if (size == 0)
        return false;
    stream_filled(stream, size);
    stream_pump(stream);
    return stream->phase != STREAM_CLOSED;
}

void handshake_request_sent(struct stream *stream)
{
    struct mpa_frame frame = {
        .revision = stream->revision,
        .crc = stream->adapter->settings.require_crc,
        .enhanced = stream->revision == 2,
        .peer_to_peer = true,
        .rtr_read = true,
        .ird = (uint16_t)stream->own_inbound,
        .ord = (uint16_t)(stream->own_outbound > 0 ? stream->own_outbound : 1),
        .private_size = (uint16_t)stream->own_private_size,
        .private_data = stream->own_private,
    };

    TRACE("stream %p: connected from port %u", (void *)stream, address_port((struct sockaddr *)&stream->local));
    stream->phase = STREAM_AWAIT_REPLY;
    stream_await_program(stream);
    stream_needs_upkeep();
    send_frame(stream, &frame);
}

static void take_private_data(struct stream *stream, const struct mpa_frame *frame)
{
    stream->private_size = frame->private_size;
    memcpy(stream->private_data, frame->private_data, frame->private_size);
}

static void take_limits(struct stream *stream, const struct mpa_frame *frame)
{
    stream->peer_inbound = stream->peer_outbound = MAX_READ_LIMIT;
    if (!frame->enhanced)
        return;
    if (frame->ird != MPA_MAX_READ_LIMIT)
        stream->peer_inbound = smaller(frame->ird, MAX_READ_LIMIT);
    if (frame->ord != MPA_MAX_READ_LIMIT)
        stream->peer_outbound = smaller(frame->ord, MAX_READ_LIMIT);
}

void handshake_reply(struct stream *stream)
{
    struct mpa_frame frame;
    size_t used = 0;

    int result = mpa_decode(stream->in.data + stream->in.begin, stream->in.end - stream->in.begin, true, &frame, &used);
    if (result == WIRE_MORE) {
        /* The peer's program may take its time to decide (H.1.2), but a reply that has begun must arrive completely. */
        if (stream->in.end > stream->in.begin && !stream->reply_begun) {
            stream->reply_begun = true;
            stream_await_frame(stream);
        }
        return;
    }
    stream_clear_timer(stream);
    /* A peer that was asked for CRCs and replies without them will not send any. */
    bool no_crc = result == WIRE_OK && !frame.reject && !frame.crc && stream->adapter->settings.require_crc;
    if (result != WIRE_OK || (frame.markers && !frame.reject) || no_crc) {
        TRACE("stream %p: not an MPA reply", (void *)stream);
        handshake_lost(stream, ND_CONNECTION_ABORTED);
        return;
    }
    stream_take(stream, used);
    take_private_data(stream, &frame);
    take_limits(stream, &frame);
    if (frame.reject) {
        stream_tell(stream, EVENT_REFUSED, ND_CONNECTION_REFUSED);
        /* With a reset, because the port of a bound connector would have to wait a minute for its next attempt
         * otherwise. */
        stream_abort(stream);
        return;
    }
    stream->crc = frame.crc || stream->adapter->settings.require_crc;
    stream->peer_to_peer = frame.enhanced && frame.peer_to_peer && frame.rtr_read;
    stream->may_send = true;
    stream->phase = STREAM_OFFERED;
    stream_tell(stream, EVENT_OFFERED, ND_SUCCESS);
}

void handshake_request(struct stream *stream)
{
    struct mpa_frame frame;
    size_t used = 0;

    int result =
        mpa_decode(stream->in.data + stream->in.begin, stream->in.end - stream->in.begin, false, &frame, &used);
    if (result == WIRE_MORE)
        return;
    if (result != WIRE_OK) {
        TRACE("stream %p: not an MPA request", (void *)stream);
        stream_close(stream);
        return;
    }
    stream_take(stream, used);
    stream_clear_timer(stream);
    stream->revision = frame.revision;
    take_private_data(stream, &frame);
    take_limits(stream, &frame);
    stream->crc = frame.crc || stream->adapter->settings.require_crc;
    /* Without a first message, Accept cannot know that the peer continued (H.1.1). */
    stream->peer_to_peer = frame.enhanced && frame.peer_to_peer && frame.rtr_read;
    if (frame.markers) {
        stream_reply(stream, true, NULL, 0);
        return;
    }
    TRACE("stream %p: request of revision %u, %u bytes of private data", (void *)stream, frame.revision,
          stream->private_size);
    stream->phase = STREAM_REQUESTED;
    guest_leave(stream);
    stream_tell(stream, EVENT_REQUESTED, ND_SUCCESS);
}

bool stream_reply(struct stream *stream, bool reject, const void *private_data, uint32_t private_size)
{
    struct mpa_frame frame = {
        .revision = stream->revision,
        .reply = true,
        .reject = reject,
        .crc = stream->crc,
        .enhanced = stream->revision == 2,
        .peer_to_peer = stream->peer_to_peer,
        .rtr_read = stream->peer_to_peer,
        .ird = (uint16_t)stream->own_inbound,
        .ord = (uint16_t)stream->own_outbound,
        .private_size = (uint16_t)private_size,
        .private_data = private_data,
    };

    if (stream->phase == STREAM_CLOSED || stream->abandoned)
        return false;
    if (!send_frame(stream, &frame))
        return false;
    if (reject) {
        stream_close(stream);
        return true;
    }
    if (stream->peer_to_peer) {
        stream->phase = STREAM_ACCEPTING;
        stream_await_program(stream);
        stream_needs_upkeep();
        return true;
    }
    /* This peer sends nothing until its program does, so there is nothing to wait for. Nothing may be sent before its
     * first message. */
    stream->phase = STREAM_ESTABLISHED;
    qp_established(stream->queue_pair, stream);
    stream_tell(stream, EVENT_ESTABLISHED, ND_SUCCESS);
    return true;
}

bool stream_complete(struct stream *stream)
{
    if (stream->phase != STREAM_OFFERED)
        return false;
    stream->phase = STREAM_ESTABLISHED;
    qp_established(stream->queue_pair, stream);
    if (stream->peer_to_peer) {
        qp_send_rtr(stream->queue_pair, stream);
        stream->peer_silent = true;
        stream_set_timer(stream, SILENT_PEER_MS);
    }
    stream_pump(stream);
    stream_resume_input(stream);
    return stream->phase != STREAM_CLOSED;
}

/* Ends an attempt. If the active program rejects what the peer accepted, a Terminate tells the peer. Its Accept then
 * ends with ND_CONNECTION_REFUSED, which it would not do after a loss (M.16). */
void stream_withdraw(struct stream *stream)
{
    if (stream->phase == STREAM_OFFERED) {
        uint8_t *out = stream_room(stream, WIRE_MAX_TERMINATE_SIZE + WIRE_MAX_TRAILER_SIZE);
        if (out != NULL) {
            size_t size = wire_put_terminate(out, RDMAP_LOCAL_CATASTROPHIC, NULL);
            stream_filled(stream, wire_finish(out, size, stream->crc));
        }
        stream_close(stream);
    } else if (stream->phase == STREAM_REQUESTED) {
        stream_reply(stream, true, NULL, 0);
        stream_close(stream);
    } else if (stream->phase < STREAM_ESTABLISHED) {
        stream_abort(stream);
    } else {
        stream_close(stream);
    }
}

void stream_refuse(struct stream *stream)
{
    stream_lock(stream);
    struct object *listener = stream_leave_listener(stream);
    stream_withdraw(stream);
    stream_unlock(stream);
    if (listener != NULL)
        object_drop(listener);
}

void handshake_timeout(struct stream *stream)
{
    enum stream_phase phase = stream->phase;
    bool limited = face_patience_ms > 0;

    /* A timer that has just run out may find the next phase. */
    if (phase == STREAM_CONNECTING || phase == STREAM_AWAIT_REQUEST ||
        (phase == STREAM_AWAIT_REPLY && (limited || stream->reply_begun))) {
        handshake_lost(stream, ND_IO_TIMEOUT);
    } else if (phase == STREAM_ACCEPTING && limited) {
        stream_tell(stream, EVENT_FAILED, ND_IO_TIMEOUT);
        stream_abort(stream);
    }
}

void handshake_lost(struct stream *stream, nd_status status)
{
    enum stream_phase phase = stream->phase;

    switch (phase) {
    case STREAM_CONNECTING:
        stream_tell(stream, EVENT_FAILED, status);
        break;
    case STREAM_AWAIT_REPLY:
        TRACE("stream %p: lost before a reply to a request with %u bytes of private data", (void *)stream,
              stream->own_private_size);
        if (status == ND_CONNECTION_ABORTED && stream->revision == 2 && stream->in.end == 0)
            stream_tell(stream, EVENT_FALLBACK, status);
        else
            stream_tell(stream, EVENT_FAILED, status == ND_CONNECTION_ABORTED ? ND_CONNECTION_REFUSED : status);
        break;
    case STREAM_ACCEPTING:
        stream_tell(stream, EVENT_FAILED, status == ND_DEVICE_REMOVED ? status : ND_CONNECTION_ABORTED);
        break;
    case STREAM_REQUESTED:
        stream->abandoned = true;
        break;
    default:
        break;
    }
    stream_abort(stream);
}
