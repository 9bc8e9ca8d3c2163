/* Once a second, as long as any stream needs it:
 *
 * - A stream that has rested gives back its large buffers.
 * - If requests wait and nothing comes, TCP asks the peer's host for a sign of life. If none comes for SILENT_MS, the
 *   connection is lost. A peer whose process is stopped or busy is not silent, because its kernel answers.
 *
 * A stream that needs upkeep says so when it takes a large buffer, when a request is posted, and when it waits for a
 * frame. While no stream needs any, no timer runs. */
#include "stream_internal.h"
#include "queue_pair.h"
#include "trace.h"

#include <stdlib.h>

#define PERIOD_MS 1000
#define SILENT_MS 10000

_Atomic bool upkeep_runs;

static struct timer timer;

static bool waits_for_peer(const struct stream *stream)
{
    switch (stream->phase) {
    case STREAM_AWAIT_REPLY:
    case STREAM_ACCEPTING:
        return true;
    case STREAM_ESTABLISHED:
        return !stream->peer_closed && qp_has_requests(stream->queue_pair);
    default:
        return false;
    }
}

static void look_after_peer(struct stream *stream, bool waits)
{
    if (waits && stream->waited_ms == 0)
        socket_probe(&stream->socket, true);
    if (!waits && stream->waited_ms > 0)
        socket_probe(&stream->socket, false);
    stream->waited_ms = waits ? stream->waited_ms + PERIOD_MS : 0;
    if (stream->waited_ms > SILENT_MS && socket_peer_silent(&stream->socket, SILENT_MS)) {
        TRACE("stream %p: the peer's host is silent", (void *)stream);
        stream_connection_lost(stream, ND_IO_TIMEOUT);
    }
}

/* True if the stream needs more upkeep. */
static bool tend(struct stream *stream)
{
    if (!stream->open)
        return false;
    uint64_t traffic = stream->sent_bytes + stream->taken_bytes + (stream->in.end - stream->in.begin);
    bool rests = traffic == stream->traffic;
    bool waits = waits_for_peer(stream);
    stream->traffic = traffic;
    bool shrunk = rests && stream_shrink(stream);
    look_after_peer(stream, waits && rests);
    return !shrunk || waits || stream->waited_ms > 0;
}

static bool tend_all(void)
{
    size_t count = 0;
    struct stream **all = streams_hold(&count);
    bool needed = all == NULL;

    for (size_t i = 0; i < count; i++) {
        stream_lock(all[i]);
        needed |= tend(all[i]);
        stream_unlock(all[i]);
        stream_drop(all[i]);
    }
    free(all);
    return needed;
}

static void upkeep(struct timer *ignored)
{
    UNUSED(ignored);
    bool needed = tend_all();
    if (!needed) {
        /* A stream whose need begins from here on sees this, or is seen by the next line: both have the stream's or the
         * queue pair's lock. */
        upkeep_runs = false;
        needed = tend_all() && !atomic_exchange(&upkeep_runs, true);
    }
    if (needed)
        timer_set(&timer, PERIOD_MS, upkeep);
}

void upkeep_begin(void)
{
    if (!atomic_exchange(&upkeep_runs, true))
        timer_set(&timer, PERIOD_MS, upkeep);
}

void upkeep_forget(void)
{
    upkeep_runs = false;
    timer.set = false;
}
