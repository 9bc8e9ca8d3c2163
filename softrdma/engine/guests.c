/* Guests: connections whose peer has sent no request yet, or whose request was refused and that still close.
 *
 * Anybody who reaches a listener's port can open such connections, so their number is limited for the whole process.
 * One more than MAX_GUESTS ends the oldest, but only one that has had GRACE_MS: hundreds of honest peers may connect at
 * once, and a busy machine does not let all of them send their request before the next ones come. One more than
 * MOST_GUESTS ends the oldest at once. Without a free descriptor, the oldest that has had GRACE_MS ends for each
 * connection that waits. A request that has arrived is no guest: the listener's backlog limits those.
 */
#include "stream_internal.h"
#include "trace.h"

#define MAX_GUESTS  128u
#define MOST_GUESTS 1024u
#define GRACE_MS    1000

static struct lock guests_lock = LOCK_INIT;                         /* within all others */
static struct guest guests = {.before = &guests, .after = &guests}; /* a ring, the oldest first */
static unsigned count;

bool guest_enter(struct stream *stream)
{
    struct guest *guest = &stream->guest;
    uint64_t now = now_ms();

    lock_acquire(&guests_lock);
    if (guest->after == NULL) {
        guest->before = guests.before;
        guest->after = &guests;
        guest->before->after = guest->after->before = guest;
        guest->since_ms = now;
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

/* The oldest guest, held. NULL: there are no more than `most`, or it came after `until`. */
static struct stream *oldest(unsigned most, uint64_t until_ms)
{
    struct stream *stream = NULL;

    lock_acquire(&guests_lock);
    if (count > most && guests.after->since_ms <= until_ms) {
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

bool guests_limit(void)
{
    uint64_t now = now_ms();
    struct stream *stream;

    while ((stream = oldest(MOST_GUESTS, now)) != NULL ||
           (now > GRACE_MS && (stream = oldest(MAX_GUESTS, now - GRACE_MS)) != NULL))
        expel(stream);
    lock_acquire(&guests_lock);
    bool crowded = count > MAX_GUESTS;
    lock_release(&guests_lock);
    return crowded;
}

bool guests_expel(void)
{
    uint64_t now = now_ms();
    struct stream *stream = now > GRACE_MS ? oldest(0, now - GRACE_MS) : NULL;

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
