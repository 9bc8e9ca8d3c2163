/* See watch.h. A watch has a channel of its own, whose incoming direction nobody else uses.
 *
 * The worker and a thread that drives may both get an edge. The second one leaves it to the first. */
#include "watch.h"
#include "forking.h"
#include "internal.h"
#include "transport.h"

#include <stdatomic.h>

bool watch_start(struct watch *watch, int handle, watch_ready *ready)
{
    watch->handle = handle;
    watch->worker = transport_next_worker();
    watch->ready = ready;
    struct channel *channel = worker_take_channel(watch->worker);
    watch->channel = channel;
    if (channel == NULL)
        return false;
    lock_acquire(&channel->in.lock);
    channel->generation = atomic_load(&system_generation);
    channel->watch = watch;
    lock_release(&channel->in.lock);
    if (worker_watch(watch->worker, handle, channel, false))
        return true;
    watch_stop(watch);
    return false;
}

void watch_stop(struct watch *watch)
{
    struct channel *channel = watch->channel;

    watch->channel = NULL;
    if (channel == NULL || !channel_usable(channel))
        return;
    worker_unwatch(watch->worker, watch->handle, false);
    lock_acquire(&channel->in.lock);
    channel->watch = NULL;
    bool runs_here = channel->runner == thread_id();
    channel->given_up = runs_here;
    while (!runs_here && channel->runner != 0)
        condition_wait(&channel->idle, &channel->in.lock);
    lock_release(&channel->in.lock);
    if (!runs_here)
        worker_give_channel(watch->worker, channel);
}

bool watch_run(struct channel *channel)
{
    lock_acquire(&channel->in.lock);
    struct watch *watch = channel->watch;
    bool mine = watch != NULL && channel->runner == 0;
    channel->again = watch != NULL;
    if (mine)
        channel->runner = thread_id();
    unsigned worker = mine ? watch->worker : 0;
    while (mine && channel->again && channel->watch != NULL) {
        channel->again = false;
        lock_release(&channel->in.lock);
        watch->ready(watch);
        lock_acquire(&channel->in.lock);
    }
    bool given_up = mine && channel->given_up;
    if (mine) {
        channel->runner = 0;
        channel->given_up = false;
    }
    lock_release(&channel->in.lock);
    if (mine)
        condition_wake_all(&channel->idle);
    if (given_up)
        worker_give_channel(worker, channel);
    return watch != NULL;
}
