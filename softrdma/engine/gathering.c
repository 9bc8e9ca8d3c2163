/* Messages that wait for others, so that one call of the system sends all of them.
 *
 * While the peer has yet to answer WINDOW requests of a connection, those that the program posts one by one gather in
 * the stream's buffer. They are sent
 *
 * - when there are GATHER_BYTES,
 * - when anything arrives from the peer, as an answer to the requests under way will,
 * - when the program finds no completion, or asks for a notification: streams_push(),
 * - with whatever else is sent.
 *
 * So a message waits at most for the answer to one that was sent, and one of few does not wait.
 */
#include "stream_internal.h"
#include "face.h"
#include "queue_pair.h"

#define WINDOW       8u
#define GATHER_BYTES 8192u

static struct lock list_lock = LOCK_INIT; /* within all others */
static struct stream *first;
static _Atomic bool any; /* there is a first one */

bool stream_gathers(struct stream *stream)
{
    if (!face_gathers || stream->phase != STREAM_ESTABLISHED || stream->out[stream->filling].end >= GATHER_BYTES ||
        !qp_awaits(stream->queue_pair, stream, WINDOW)) {
        stream_gathers_no_more(stream);
        return false;
    }
    if (stream->gathers)
        return true;
    stream->gathers = true;
    lock_acquire(&list_lock);
    stream->gathering_before = NULL;
    stream->gathering_after = first;
    if (first != NULL)
        first->gathering_before = stream;
    first = stream;
    any = true;
    lock_release(&list_lock);
    return true;
}

void stream_gathers_no_more(struct stream *stream)
{
    if (!stream->gathers)
        return;
    stream->gathers = false;
    lock_acquire(&list_lock);
    if (stream->gathering_before != NULL)
        stream->gathering_before->gathering_after = stream->gathering_after;
    else
        first = stream->gathering_after;
    if (stream->gathering_after != NULL)
        stream->gathering_after->gathering_before = stream->gathering_before;
    any = first != NULL;
    lock_release(&list_lock);
}

void streams_push(void)
{
    while (any) {
        lock_acquire(&list_lock);
        struct stream *stream = first;
        if (stream != NULL)
            stream_hold(stream); /* its socket is open, and has a reference */
        lock_release(&list_lock);
        if (stream == NULL)
            return;
        stream_lock(stream);
        stream_pump(stream); /* takes it off the list */
        stream_unlock(stream);
        stream_drop(stream);
    }
}

void gathering_forget(void)
{
    lock_start(&list_lock);
    first = NULL;
    any = false;
}
