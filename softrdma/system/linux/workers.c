/* Threads that wait for sockets with epoll and run callbacks.
 *
 * Sockets are watched for edges, so an event needs no system call that takes it back. A worker that does not sleep is
 * not woken: it looks at its list before it sleeps. The eventfd that wakes it is not in the epoll of its sockets, where
 * a thread that drives would take the event. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "driving.h"
#include "guarded.h"
#include "internal.h"
#include "transport.h"
#include "workers.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#define EVENTS    64
#define MIN_STACK (1u << 20) /* musl gives 128 KiB */

struct worker workers[MAX_WORKERS];
_Atomic unsigned worker_count;

static _Thread_local bool here;

bool worker_here(void)
{
    return here;
}

/* Locked. True: the worker must be woken, after the lock is released. */
static bool rouse(struct worker *worker)
{
    bool sleeping = worker->sleeping;

    worker->sleeping = false;
    return sleeping;
}

static void wake(struct worker *worker)
{
    uint64_t one = 1;
    int cancel = cancel_off();

    while (write(worker->event, &one, sizeof one) < 0 && errno == EINTR)
        ;
    cancel_as(cancel);
}

void worker_post_error(struct io *io, nd_status error)
{
    struct worker *worker = &workers[io->worker];

    io->error = error;
    io->next = NULL;
    lock_acquire(&worker->lock);
    if (worker->first == NULL)
        worker->first = io;
    else
        worker->last->next = io;
    worker->last = io;
    bool sleeping = rouse(worker);
    lock_release(&worker->lock);
    if (sleeping)
        wake(worker);
}

void worker_post(struct io *io)
{
    worker_post_error(io, ND_SUCCESS);
}

static void poke(struct worker *worker, bool stop)
{
    lock_acquire(&worker->lock);
    worker->poked = true;
    worker->stopping = worker->stopping || stop;
    bool sleeping = rouse(worker);
    lock_release(&worker->lock);
    if (sleeping)
        wake(worker);
}

void workers_wake(void)
{
    poke(&workers[0], false);
}

struct channel *worker_take_channel(unsigned number)
{
    struct worker *worker = &workers[number];

    lock_acquire(&worker->lock);
    struct channel *channel = worker->channels;
    if (channel != NULL)
        worker->channels = channel->next;
    lock_release(&worker->lock);
    return channel != NULL ? channel : calloc(1, sizeof *channel);
}

void worker_give_channel(unsigned number, struct channel *channel)
{
    struct worker *worker = &workers[number];

    lock_acquire(&worker->lock);
    channel->next = worker->channels;
    worker->channels = channel;
    lock_release(&worker->lock);
}

bool worker_watch(unsigned number, int handle, struct channel *channel, bool drivable)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLPRI | EPOLLET, .data.ptr = channel};

    bool added = epoll_ctl(workers[number].epoll, EPOLL_CTL_ADD, handle, &event) == 0;
    workers[number].sockets += added && drivable;
    return added;
}

void worker_unwatch(unsigned number, int handle, bool drivable)
{
    struct epoll_event unused = {0};

    if (epoll_ctl(workers[number].epoll, EPOLL_CTL_DEL, handle, &unused) == 0)
        workers[number].sockets -= drivable;
}

bool worker_open_gate(struct worker *worker, bool open)
{
    struct epoll_event event = {.events = open ? EPOLLIN : 0, .data.ptr = worker};

    return epoll_ctl(worker->gate, EPOLL_CTL_MOD, worker->epoll, &event) == 0;
}

int worker_handle(struct worker *worker)
{
    struct epoll_event events[EVENTS];
    int count = epoll_wait(worker->epoll, events, EVENTS, 0), handled = count > 0 ? count : 0;

    lock_acquire(&worker->lock);
    struct io *io = worker->first;
    worker->first = NULL;
    lock_release(&worker->lock);
    if (count > 0 || io != NULL)
        guarded_copy_refresh();
    for (int i = 0; i < count; i++)
        channel_ready(events[i].data.ptr, events[i].events);
    for (; io != NULL; handled++) {
        struct io *next = io->next;
        io->done(io, io->error, 0);
        io = next;
    }
    return handled;
}

/* Waits until the worker is woken, or until a socket is ready if the gate is open. */
static void wait_for_work(struct worker *worker, int timeout)
{
    struct epoll_event ready[2];
    uint64_t count;

    int found = epoll_wait(worker->gate, ready, 2, timeout);

    for (int i = 0; i < found; i++)
        if (ready[i].data.ptr == NULL)
            while (read(worker->event, &count, sizeof count) < 0 && errno == EINTR)
                ;
}

/* Waits for at most `timeout`, then handles what came. False: the worker shall end. */
static bool pass(struct worker *worker, int timeout)
{
    lock_acquire(&worker->lock);
    bool ends = worker->stopping && worker->first == NULL;
    bool busy = worker->first != NULL || worker->poked || worker->stopping;
    worker->poked = false;
    worker->sleeping = !busy && timeout != 0;
    lock_release(&worker->lock);
    if (ends)
        return false;
    if (!busy && timeout != 0)
        wait_for_work(worker, timeout);
    lock_acquire(&worker->lock);
    worker->sleeping = false;
    lock_release(&worker->lock);
    worker_handle(worker);
    return true;
}

/* Worker 0. */
static int time_to_sleep(void)
{
    driving_attend();
    uint64_t timers = timers_run();
    int timeout = timers == TIMERS_NONE ? -1 : timers > INT_MAX ? INT_MAX : (int)timers;
    int limit = driving_limit();
    return timeout < 0 || (limit >= 0 && limit < timeout) ? limit : timeout;
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    bool keeps_time = worker == &workers[0];
    char name[16];

    snprintf(name, sizeof name, "softrdma-%u", (unsigned)(worker - workers));
    here = true;
    prctl(PR_SET_NAME, name, 0, 0, 0);
    while (pass(worker, keeps_time ? time_to_sleep() : -1))
        ;
    return NULL;
}

static void close_worker(struct worker *worker)
{
    handles_lock();
    handles_close(worker->event);
    handles_close(worker->gate);
    handles_close(worker->epoll);
    handles_unlock();
    worker->event = worker->gate = worker->epoll = NO_SOCKET;
}

static int noted(int handle)
{
    return handles_add(handle) ? handle : NO_SOCKET;
}

static bool open_worker(struct worker *worker)
{
    struct epoll_event sockets = {.events = EPOLLIN, .data.ptr = worker}, woken = {.events = EPOLLIN};

    handles_lock();
    worker->epoll = noted(epoll_create1(EPOLL_CLOEXEC));
    worker->gate = noted(epoll_create1(EPOLL_CLOEXEC));
    worker->event = noted(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    handles_unlock();
    if (worker->epoll < 0 || worker->gate < 0 || worker->event < 0 ||
        epoll_ctl(worker->gate, EPOLL_CTL_ADD, worker->epoll, &sockets) != 0 ||
        epoll_ctl(worker->gate, EPOLL_CTL_ADD, worker->event, &woken) != 0) {
        close_worker(worker);
        return false;
    }
    worker->shut = false;
    worker->sleeping = worker->stopping = worker->poked = false;
    return true;
}

/* The program's signals are for its own threads. */
static bool start_thread(struct worker *worker)
{
    sigset_t before;
    pthread_attr_t attributes;
    size_t stack = 0;

    pthread_attr_init(&attributes);
    if (pthread_attr_getstacksize(&attributes, &stack) == 0 && stack < MIN_STACK)
        pthread_attr_setstacksize(&attributes, MIN_STACK);
    signals_off(&before);
    int error = pthread_create(&worker->thread, &attributes, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error == 0;
}

static unsigned processors(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (unsigned)CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (unsigned)online : 1;
}

unsigned workers_start(void)
{
    unsigned wanted = processors(), count = 0;

    if (!handles_watch_forks())
        return 0;
    wanted = wanted < MIN_WORKERS ? MIN_WORKERS : wanted > MAX_WORKERS ? MAX_WORKERS : wanted;
    for (; count < wanted && open_worker(&workers[count]); count++)
        if (!start_thread(&workers[count])) {
            close_worker(&workers[count]);
            break;
        }
    worker_count = count;
    return count;
}

/* What a callback of the last worker posts to the first one stays in the list until workers are started again. */
void workers_stop(void)
{
    for (unsigned i = 0; i < worker_count; i++)
        poke(&workers[i], true);
    for (unsigned i = 0; i < worker_count; i++)
        pthread_join(workers[i].thread, NULL);
    for (unsigned i = 0; i < worker_count; i++)
        close_worker(&workers[i]);
    worker_count = 0;
}

/* The lists may be in the middle of a change. Free channels are kept, for leak checkers, but not used. */
void workers_forget(void)
{
    for (unsigned i = 0; i < MAX_WORKERS; i++) {
        struct channel *inherited = workers[i].channels;
        memset(&workers[i], 0, sizeof workers[i]);
        workers[i].inherited = inherited;
        workers[i].epoll = workers[i].gate = workers[i].event = NO_SOCKET;
    }
    worker_count = 0;
    driving_forget();
}
