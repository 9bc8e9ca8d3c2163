/* Once a second, as long as any stream needs it:
 *
 * - A stream that has rested gives back its large buffers.
 * - If requests wait and nothing comes, TCP asks the peer's host for a sign of life. If none comes for SILENT_MS, the
 *   connection is lost. A peer whose process is stopped or busy is not silent, because its kernel answers. Streams ask
 * by turns, because Linux lets the questions of thousands fall together, and drops those that its queues do not hold.
 * - Guests that have had their time make room, while there are too many (guests.c).
 *
 * If a stream lacks memory, HURRY_MS later: it tries again, and streams that have rested so long give back their
 * buffers. An established connection never ends for want of memory.
 *
 * A stream that needs upkeep says so when it takes a large buffer, when a request is posted, and when it waits for a
 * frame. While no stream needs any, no timer runs. Upkeep itself needs no memory. */
#include "stream_internal.h"
#include "queue_pair.h"
#include "trace.h"

#define PERIOD_MS 1000
#define HURRY_MS  20
#define SILENT_MS 10000
/* Questions without an answer that make a host silent. */
#define UNANSWERED 3
/* How many streams ask at a time. The queue of a loopback holds 1,000 packets (net.core.netdev_max_backlog). */
#ifndef ASK_AT_ONCE
#define ASK_AT_ONCE 256
#endif

_Atomic bool upkeep_runs;

static struct lock timer_lock = LOCK_INIT; /* of what is below; inside of a stream's lock */
static struct timer timer;
static bool hurries;     /* the timer was set for a stream that lacks memory */
static uint64_t last_ms; /* of the last round */

/* A call for each open stream. Rounds may overlap. */
struct round {
    uint32_t passed_ms; /* since the round before */
    unsigned asking;    /* streams that ask from now on */
    unsigned free;      /* places for others. One that gets free goes to a stream behind, so that all get their turn */
    bool needs_more;    /* a stream needs more upkeep */
};
static _Atomic unsigned asking; /* after the round before */

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

static void ask(struct stream *stream, bool on)
{
    socket_probe(&stream->socket, on);
    stream->asked_ms = on;
}

static void look_after_peer(struct stream *stream, bool waits, struct round *round)
{
    uint32_t silent_ms = 0;
    bool asks = stream->asked_ms > 0;
    unsigned unanswered = asks ? socket_unanswered(&stream->socket, &silent_ms) : 0;

    stream->waited_ms = waits ? stream->waited_ms + round->passed_ms : 0;
    if (asks)
        stream->asked_ms += round->passed_ms;
    if (asks && (!waits || silent_ms < stream->asked_ms)) {
        ask(stream, false);
        round->free++;
    } else if ((stream->mute || stream->unsaid) && stream->waited_ms > SILENT_MS) {
        TRACE("stream %p: mute, so nothing is answered", (void *)stream);
        stream_connection_lost(stream, ND_IO_TIMEOUT);
    } else if (asks && unanswered >= UNANSWERED && silent_ms >= SILENT_MS && stream->waited_ms > SILENT_MS) {
        TRACE("stream %p: the peer's host is silent", (void *)stream);
        stream_connection_lost(stream, ND_IO_TIMEOUT);
        round->free++;
    } else if (asks) {
        round->asking++;
    } else if (waits && round->free > 0) {
        ask(stream, true);
        round->asking++;
        round->free--;
    }
}

static void tend(struct stream *stream, void *what)
{
    struct round *round = what;

    if (!stream->open)
        return;
    bool starved = stream->starves;
    if (starved) {
        stream->starves = false;
        stream_resume_input(stream);
    }
    uint64_t traffic = stream->sent_bytes + stream->taken_bytes + (stream->in.end - stream->in.begin);
    bool rests = traffic == stream->traffic;
    bool waits = waits_for_peer(stream);
    stream->traffic = traffic;
    bool shrunk = rests && stream_shrink(stream);
    look_after_peer(stream, waits && rests, round);
    round->needs_more |= !shrunk || starved || waits;
}

static bool tend_all(uint32_t passed_ms)
{
    struct round round = {.passed_ms = passed_ms};

    round.free = asking < ASK_AT_ONCE ? ASK_AT_ONCE - asking : 0;
    streams_each(tend, &round);
    asking = round.asking;
    return guests_limit() || round.needs_more;
}

static void upkeep(struct timer *ignored);

/* A timer that is set already may be set for an earlier time. */
static void run_in(uint32_t ms, bool hurry)
{
    lock_acquire(&timer_lock);
    bool earlier = !timer.set || (hurry && !hurries);
    if (earlier) {
        timer_cancel(&timer);
        hurries = hurry;
        timer_set(&timer, ms, upkeep);
    }
    lock_release(&timer_lock);
}

static void upkeep(struct timer *ignored)
{
    UNUSED(ignored);
    lock_acquire(&timer_lock);
    uint64_t now = now_ms();
    uint32_t passed_ms = now - last_ms < PERIOD_MS ? (uint32_t)(now - last_ms) : PERIOD_MS;
    last_ms = now;
    lock_release(&timer_lock);
    bool needed = tend_all(passed_ms);
    if (!needed) {
        /* A stream whose need begins from here on sees this, or is seen by the next line: both have the stream's or the
         * queue pair's lock. */
        upkeep_runs = false;
        needed = tend_all(0) && !atomic_exchange(&upkeep_runs, true);
    }
    if (needed)
        run_in(PERIOD_MS, false);
}

void upkeep_begin(void)
{
    if (!atomic_exchange(&upkeep_runs, true))
        run_in(PERIOD_MS, false);
}

void upkeep_hurry(void)
{
    run_in(HURRY_MS, true);
}

void upkeep_forget(void)
{
    upkeep_runs = false;
    timer.set = false;
    lock_start(&timer_lock);
}
