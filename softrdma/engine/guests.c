/* Guests: connections whose peer has sent no request yet, or whose request was refused and that still close.
 *
 * Anybody who reaches a listener's port can open such connections, so their number is limited for the whole process.
 * One more than MAX_GUESTS ends the oldest. An honest peer sends its request as soon as TCP has connected, so it is
 * never the oldest for long. A request that has arrived is no guest: the listener's backlog limits those.
 */
#include "stream_internal.h"
#include "trace.h"

#define MAX_GUESTS 128u

static struct lock guests_lock = LOCK_INIT;      /* within all others */
static struct guest guests = {&guests, &guests}; /* a ring, the oldest first */
static unsigned count;

bool guest_enter(struct stream *stream)
{
    struct guest *guest = &stream->guest;

    lock_acquire(&guests_lock);
    if (guest->after == NULL) {
        guest->before = guests.before;
        guest->after = &guests;
        guest->before->after = guest->after->before = guest;
        count++;
    }
    bool crowded = count > MAX_GUESTS;
    lock_release(&guests_lock);
    return crowded;
}

void guest_leave(struct stream *stream)
{
    struct guest *guest = &stream->guest;

    lock_acquire(&guests_lock);
    if (guest->after != NULL) {
        guest->before->after = guest->after;
        guest->after->before = guest->before;
        guest->before = guest->after = NULL;
        count--;
    }
    lock_release(&guests_lock);
}

/* The oldest guest, held. NULL: there are no more than `most`. */
static struct stream *oldest(unsigned most)
{
    struct stream *stream = NULL;

    lock_acquire(&guests_lock);
    if (count > most) {
        stream = CONTAINER_OF(guests.after, struct stream, guest);
        stream_hold(stream); /* a guest's socket is open, and has a reference */
    }
    lock_release(&guests_lock);
    return stream;
}

static void expel(struct stream *stream)
{
    stream_lock(stream);
    if (stream->phase == STREAM_AWAIT_REQUEST || stream->phase == STREAM_CLOSING) {
        TRACE("stream %p: makes room for a newer connection", (void *)stream);
        stream_abort(stream);
    }
    stream_unlock(stream);
    stream_drop(stream);
}

void guests_limit(void)
{
    for (struct stream *stream; (stream = oldest(MAX_GUESTS)) != NULL;)
        expel(stream);
}

bool guests_expel(void)
{
    struct stream *stream = oldest(0);

    if (stream != NULL)
        expel(stream);
    return stream != NULL;
}

void guests_forget(void)
{
    lock_start(&guests_lock);
    guests.before = guests.after = &guests;
    count = 0;
}
