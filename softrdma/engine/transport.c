#include "transport.h"
#include "face.h"
#include "object.h"
#include "stream.h"
#include "trace.h"

/* After the last release: how long connections may close by themselves, then how long aborted operations may take to
 * end. */
#define CLOSE_MS 700
#define ABORT_MS 300

enum state { STOPPED, RUNNING, STOPPING };

static struct lock lifecycle_lock = LOCK_INIT;
static struct condition lifecycle_changed = CONDITION_INIT;
static enum state state;
static int32_t users;
static unsigned worker_count;
static _Atomic unsigned next_worker;

static struct lock hold_lock = LOCK_INIT;
static struct condition hold_changed = CONDITION_INIT;
static int32_t holds;

static struct lock timer_lock = LOCK_INIT;
static struct timer *timers;

uint64_t timers_run(void)
{
    for (;;) {
        uint64_t now = now_ms();
        lock_acquire(&timer_lock);
        struct timer *first = timers;
        if (first == NULL || first->due_ms > now) {
            uint64_t wait = first == NULL ? TIMERS_NONE : first->due_ms - now;
            lock_release(&timer_lock);
            return wait;
        }
        timers = first->next;
        first->set = false;
        timer_fired *fired = first->fired;
        lock_release(&timer_lock);
        fired(first);
    }
}

void timer_set(struct timer *timer, uint32_t delay_ms, timer_fired *fired)
{
    lock_acquire(&timer_lock);
    timer->due_ms = now_ms() + delay_ms;
    timer->fired = fired;
    timer->set = true;
    struct timer **at = &timers;
    while (*at != NULL && (*at)->due_ms <= timer->due_ms)
        at = &(*at)->next;
    timer->next = *at;
    *at = timer;
    bool first = timers == timer;
    lock_release(&timer_lock);
    /* The first worker sleeps until the timer that was first when it began to wait. */
    if (first)
        workers_wake();
}

bool timer_cancel(struct timer *timer)
{
    lock_acquire(&timer_lock);
    bool was_set = timer->set;
    if (was_set) {
        struct timer **at = &timers;
        while (*at != timer)
            at = &(*at)->next;
        *at = timer->next;
        timer->set = false;
    }
    lock_release(&timer_lock);
    return was_set;
}

unsigned transport_next_worker(void)
{
    return ++next_worker % worker_count;
}

void transport_hold(void)
{
    lock_acquire(&hold_lock);
    holds++;
    lock_release(&hold_lock);
}

void transport_unhold(void)
{
    lock_acquire(&hold_lock);
    bool last = --holds == 0;
    lock_release(&hold_lock);
    if (last)
        condition_wake_all(&hold_changed);
}

/* Returns how many are left. */
static int32_t wait_for_holds(uint64_t deadline_ms)
{
    lock_acquire(&hold_lock);
    while (holds > 0) {
        uint64_t now = now_ms();
        if (now >= deadline_ms)
            break;
        condition_wait_ms(&hold_changed, &hold_lock, deadline_ms - now);
    }
    int32_t left = holds;
    lock_release(&hold_lock);
    return left;
}

bool transport_acquire(void)
{
    bool running = true;

    lock_acquire(&lifecycle_lock);
    while (state == STOPPING)
        condition_wait(&lifecycle_changed, &lifecycle_lock);
    if (state == STOPPED) {
        worker_count = workers_start();
        running = worker_count > 0;
        state = running ? RUNNING : STOPPED;
    }
    if (running)
        users++;
    lock_release(&lifecycle_lock);
    return running;
}

void transport_release(void)
{
    lock_acquire(&lifecycle_lock);
    bool last = --users == 0;
    if (last)
        state = STOPPING;
    lock_release(&lifecycle_lock);
    if (!last)
        return;

    /* Connections get time to close by themselves. Then the rest is aborted. */
    face_stopping();
    int32_t left = wait_for_holds(now_ms() + CLOSE_MS);
    if (left > 0) {
        TRACE("transport: aborting %d connections", (int)left);
        streams_abort();
        left = wait_for_holds(now_ms() + ABORT_MS);
        if (left > 0)
            TRACE("transport: %d operations did not end", (int)left);
    }
    workers_stop();

    lock_acquire(&lifecycle_lock);
    state = STOPPED;
    lock_release(&lifecycle_lock);
    condition_wake_all(&lifecycle_changed);
}

bool transport_stopped(void)
{
    lock_acquire(&lifecycle_lock);
    bool stopped = state == STOPPED;
    lock_release(&lifecycle_lock);
    return stopped;
}

void transport_forget(void)
{
    lock_start(&lifecycle_lock);
    condition_start(&lifecycle_changed);
    lock_start(&hold_lock);
    condition_start(&hold_changed);
    lock_start(&timer_lock);
    state = STOPPED;
    users = holds = 0;
    timers = NULL;
    streams_forget();
    upkeep_forget();
    objects_forget();
}
