/* Who uses the process's workers, what must end before they do, and timers.
 *
 * Workers run while any object of an adapter exists. A callback never delays others for long and never waits for the
 * consumer.
 */
#ifndef ENGINE_TRANSPORT_H
#define ENGINE_TRANSPORT_H

#include "system.h"

struct timer;
typedef void timer_fired(struct timer *timer);

struct timer {
    struct timer *next;
    uint64_t due_ms;
    timer_fired *fired;
    _Atomic bool set;
};

/* The first user starts the workers. The last one waits until all operations have ended, then joins the workers. */
bool transport_acquire(void);
void transport_release(void);
bool transport_stopped(void);
/* In a forked child: begins as a new process does, with nothing of the parent's. The parent's objects must not be used.
 */
void transport_forget(void);

/* Counts what must end before the workers do: streams, for example. */
void transport_hold(void);
void transport_unhold(void);

/* The number of the worker that the next socket gets. */
unsigned transport_next_worker(void);

void timer_set(struct timer *timer, uint32_t delay_ms, timer_fired *fired);
/* True if the timer was set and will no longer fire. */
bool timer_cancel(struct timer *timer);
/* For worker 0: fires all due timers and returns the time until the next one, TIMERS_NONE if there is none. */
#define TIMERS_NONE UINT64_MAX
uint64_t timers_run(void);

#endif
