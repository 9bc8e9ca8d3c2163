/* What the files of this folder share. */
#ifndef LINUX_INTERNAL_H
#define LINUX_INTERNAL_H

#include "system.h"

#include <pthread.h>

/* A thread that the program cancels must not end in one of the engine's calls, where it may have locks. So whatever
 * calls the C library's functions that are cancellation points does it between these two. */
static inline int cancel_off(void)
{
    int before;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void cancel_as(int before)
{
    int ignored;

    pthread_setcancelstate(before, &ignored);
}

/* ---- handles.c: the descriptors that a forked child must close ---- */

/* Forks wait while a thread has this lock. Descriptors are opened and closed under it. */
void handles_lock(void);
void handles_unlock(void);
/* Locked. Takes note of a descriptor. Negative ones are ignored. False: it was closed, for want of memory. */
bool handles_add(int handle);
/* Locked. */
void handles_close(int handle);
/* Watches for forks from now on. */
bool handles_watch_forks(void);

/* ---- workers.c, driving.c ---- */

/* The process was forked: there are no workers. */
void workers_forget(void);
/* Like worker_post, with an error. */
void worker_post_error(struct io *io, nd_status error);
/* A channel for a socket of this worker. Zeroed when new, otherwise as it was left. */
struct channel *worker_take_channel(unsigned worker);
void worker_give_channel(unsigned worker, struct channel *channel);
/* From now on, edges of the handle go to channel_ready on this worker, or on a thread that drives. Nobody drives for a
 * worker without handles that are `drivable`. */
bool worker_watch(unsigned worker, int handle, struct channel *channel, bool drivable);
void worker_unwatch(unsigned worker, int handle, bool drivable);

/* ---- sockets.c ---- */

/* A direction of a socket. At most one operation waits for it. */
struct direction {
    struct lock lock;
    int handle; /* NO_SOCKET: no operation may start */
    struct io *io;
    bool connects;
    bool empty;        /* the last receive took everything, and no edge came since */
    bool ended;        /* the peer's FIN or an error is there or was: `empty` says nothing */
    bool holds;        /* bytes were sent that wait for others */
    bool alone;        /* the last that a worker sent was something that others might have followed soon */
    uint8_t answers;   /* how often the program sent something after that, in a row */
    uint64_t holds_ms; /* since when */
    bool listed;       /* in the list of those that may hold bytes; see driving_hold() */
};

/* The part of a socket that the worker knows. Channels are reused, but only by sockets of the same worker, and freed
 * never. So an event that was fetched before its socket was closed still finds a channel. If that belongs to another
 * socket by now, the event only causes an attempt that finds nothing to do. */
struct channel {
    struct channel *next;
    struct channel *next_holding;
    uint32_t generation;
    struct direction in, out;
    /* Under the lock of `in`: */
    struct watch *watch;
    uint64_t runner; /* the thread that is in watch->ready(), or 0 */
    bool again;      /* there was another edge meanwhile */
    bool given_up;   /* the runner has stopped the watch and gives the channel back */
    struct condition idle;
};

/* Sends what the channel's socket holds. */
void channel_push(struct channel *channel);

/* Whether this thread is a worker. */
bool worker_here(void);
/* Whether bytes may wait for others: this thread is a worker or drives, and worker 0 will send them, if the program,
 * which looks again and again, does not send more before. */
bool driving_may_hold(void);
/* This thread is in loop_drive(). */
bool driving_loop_here(void);
/* The channel's socket holds bytes. Locked: its `out`. */
void driving_hold(struct channel *channel);

/* False after a fork, and for NULL. */
bool channel_usable(const struct channel *channel);

/* On the worker, without locks. `events` are those of epoll. */
void channel_ready(struct channel *channel, uint32_t events);

/* ---- guarded_copy.c ---- */

/* In a forked child: a thread that is gone may have had a lock. */
void guarded_copy_forget(void);

/* ---- watch.c ---- */

/* On the worker. False: the channel does not belong to a watch. */
bool watch_run(struct channel *channel);

#endif
