/* Threads that wait for sockets with epoll and run callbacks.
 *
 * Sockets are watched for edges, so an event needs no system call that takes it back. A worker that does not sleep is not
 * woken: it looks at its list before it sleeps. The eventfd that wakes it is not in its epoll, where a thread that drives
 * would take the event. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "driving.h"
#include "guarded.h"
#include "internal.h"
#include "transport.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
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

#define MIN_WORKERS 2
#define MAX_WORKERS 4
#define EVENTS 64
#define MIN_STACK (1u << 20) /* musl gives 128 KiB */
/* How long the workers leave the sockets to a program that has just driven. */
#define DRIVE_MS 2

struct worker {
    struct lock lock;
    struct io *first, *last; /* posted */
    bool sleeping, poked, stopping;
    bool deep; /* asleep for as long as somebody drives */
    bool naps; /* asleep because somebody has driven */
    _Atomic int32_t sockets;
    struct channel *channels; /* free ones */
    struct channel *inherited;
    int epoll, event;
    pthread_t thread;
};

static struct worker workers[MAX_WORKERS];
static unsigned worker_count;

/* One thread at a time drives. `waits`: it is in workers_drive_until. `drives` counts the times that somebody began or
 * ended to drive; `driven_ms` is the time of the last one. */
static _Atomic bool driver, waits;
static _Atomic uint32_t drives;
static _Atomic uint64_t driven_ms;
static _Atomic uint64_t driver_thread;

/* Channels whose sockets hold bytes. A worker that naps, which is for DRIVE_MS at most, sends them afterwards. */
static struct lock holding_lock = LOCK_INIT;
static struct channel *_Atomic holding;
static _Atomic int32_t napping;

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

/* Handles what has come to the sockets, at most EVENTS of them, and what was posted. */
static void handle(struct worker *worker)
{
    struct epoll_event events[EVENTS];
    int count = epoll_wait(worker->epoll, events, EVENTS, 0);

    lock_acquire(&worker->lock);
    struct io *io = worker->first;
    worker->first = NULL;
    lock_release(&worker->lock);
    if (count > 0 || io != NULL)
        guarded_copy_refresh();
    for (int i = 0; i < count; i++)
        channel_ready(events[i].data.ptr, events[i].events);
    while (io != NULL) {
        struct io *next = io->next;
        io->done(io, io->error, 0);
        io = next;
    }
}

/* Waits until the worker is woken, or until a socket is ready, if `sockets`. */
static void wait_for_work(struct worker *worker, bool sockets, int timeout)
{
    struct pollfd states[2] = {{.fd = worker->event, .events = POLLIN}, {.fd = worker->epoll, .events = POLLIN}};
    uint64_t count;

    if (poll(states, sockets ? 2 : 1, timeout) > 0 && states[0].revents != 0)
        while (read(worker->event, &count, sizeof count) < 0 && errno == EINTR)
            ;
}

static void push_all(void)
{
    if (holding == NULL)
        return;
    lock_acquire(&holding_lock);
    struct channel *channel = holding;
    holding = NULL;
    lock_release(&holding_lock);
    while (channel != NULL) {
        struct channel *next = channel->next_holding;
        channel_push(channel);
        channel = next;
    }
}

/* Sleeps while somebody drives: until something is posted, or for DRIVE_MS, or without limit while the same thread waits.
 * False: nobody drives. */
static bool leave_to_driver(struct worker *worker, int timeout, uint32_t *seen)
{
    bool waiting = waits;
    uint32_t now = drives;

    if (worker->sockets == 0 || (!waiting && now_ms() >= driven_ms + DRIVE_MS)) {
        push_all();
        return false;
    }
    lock_acquire(&worker->lock);
    bool busy = worker->first != NULL || worker->poked || worker->stopping;
    worker->poked = false;
    worker->sleeping = !busy;
    worker->deep = !busy && waiting && now == *seen;
    worker->naps = !busy && !worker->deep;
    int nap = busy ? 0 : worker->deep ? timeout : timeout >= 0 && timeout < DRIVE_MS ? timeout : DRIVE_MS;
    lock_release(&worker->lock);
    *seen = now;
    /* The thread that waits may have stopped before it could see that this worker sleeps. */
    if (nap != 0 && worker->deep && !(waits && drives == now))
        nap = DRIVE_MS;
    /* workers_go_on() may have come before it could see that this worker naps. */
    if (nap != 0 && !worker->deep && driven_ms == 0)
        nap = 0;

    bool short_nap = nap > 0 && nap <= DRIVE_MS;
    napping += short_nap;
    if (nap != 0)
        wait_for_work(worker, false, nap);
    napping -= short_nap;
    lock_acquire(&worker->lock);
    worker->sleeping = worker->deep = worker->naps = false;
    struct io *io = worker->first;
    worker->first = NULL;
    lock_release(&worker->lock);
    while (io != NULL) {
        struct io *next = io->next;
        io->done(io, io->error, 0);
        io = next;
    }
    return true;
}

/* Waits for at most `wait_ms`, then handles what came. False: the worker shall end. */
static bool pass(struct worker *worker, uint64_t wait_ms, uint32_t *seen)
{
    int timeout = wait_ms == TIMERS_NONE ? -1 : wait_ms > INT_MAX ? INT_MAX : (int)wait_ms;

    lock_acquire(&worker->lock);
    if (worker->stopping && worker->first == NULL) {
        lock_release(&worker->lock);
        return false;
    }
    lock_release(&worker->lock);
    if (leave_to_driver(worker, timeout, seen))
        return true;

    lock_acquire(&worker->lock);
    bool busy = worker->first != NULL || worker->poked || worker->stopping;
    worker->poked = false;
    worker->sleeping = !busy && timeout != 0;
    lock_release(&worker->lock);
    if (!busy && timeout != 0)
        wait_for_work(worker, true, timeout);
    lock_acquire(&worker->lock);
    worker->sleeping = false;
    lock_release(&worker->lock);
    handle(worker);
    return true;
}

/* ---- Driving ---- */

bool driving_here(void)
{
    return driver && driver_thread == thread_id();
}

void driving_hold(struct channel *channel)
{
    lock_acquire(&holding_lock);
    channel->next_holding = holding;
    holding = channel;
    lock_release(&holding_lock);
    if (napping == 0)
        poke(&workers[0], false);
}

static bool begin_to_drive(void)
{
    if (worker_count == 0 || atomic_exchange_explicit(&driver, true, memory_order_acquire))
        return false;
    driver_thread = thread_id();
    return true;
}

static void end_driving(void)
{
    atomic_store_explicit(&driven_ms, now_ms(), memory_order_relaxed);
    drives++;
    atomic_store_explicit(&driver, false, memory_order_release);
}

static void drive(void)
{
    for (unsigned i = 0; i < worker_count; i++)
        if (workers[i].sockets > 0)
            handle(&workers[i]);
}

void workers_drive(void)
{
    int cancel = cancel_off();

    if (begin_to_drive()) {
        push_all();
        drive();
        end_driving();
    }
    cancel_as(cancel);
}

void workers_go_on(void)
{
    atomic_store_explicit(&driven_ms, 0, memory_order_seq_cst);
    for (unsigned i = 0; i < worker_count; i++) {
        lock_acquire(&workers[i].lock);
        bool naps = workers[i].naps && rouse(&workers[i]);
        lock_release(&workers[i].lock);
        if (naps)
            wake(&workers[i]);
    }
}

/* The workers go on with what this thread leaves. Also if it is canceled. */
static void stop_waiting(void *driving)
{
    if (!*(const bool *)driving)
        return;
    waits = false;
    end_driving();
    for (unsigned i = 0; i < worker_count; i++) {
        lock_acquire(&workers[i].lock);
        bool deep = workers[i].deep && rouse(&workers[i]);
        lock_release(&workers[i].lock);
        if (deep)
            wake(&workers[i]);
    }
}

bool workers_drive_until(int descriptor)
{
    struct pollfd states[1 + MAX_WORKERS] = {{.fd = descriptor, .events = POLLIN}};
    unsigned count = 1;
    int cancel = cancel_off(), ready, error;
    bool driving = begin_to_drive();

    if (driving) {
        for (unsigned i = 0; i < worker_count; i++)
            /* Also those without sockets: they may get one meanwhile. */
            states[count++] = (struct pollfd){.fd = workers[i].epoll, .events = POLLIN};
        push_all();
        drives++;
        waits = true;
    }
    pthread_cleanup_push(stop_waiting, &driving);
    cancel_as(cancel);
    ready = poll(states, count, -1);
    error = errno;
    cancel_off();
    if (ready > 0 && states[0].revents == 0)
        for (unsigned i = 1; i < count; i++)
            if (states[i].revents != 0)
                handle(&workers[i - 1]);
    pthread_cleanup_pop(true);
    cancel_as(cancel);
    errno = error;
    return ready >= 0;
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    bool keeps_time = worker == &workers[0];
    char name[16];
    uint32_t seen = 0;

    snprintf(name, sizeof name, "softrdma-%u", (unsigned)(worker - workers));
    prctl(PR_SET_NAME, name, 0, 0, 0);
    while (pass(worker, keeps_time ? timers_run() : TIMERS_NONE, &seen))
        ;
    return NULL;
}

static void close_worker(struct worker *worker)
{
    handles_lock();
    handles_close(worker->event);
    handles_close(worker->epoll);
    handles_unlock();
    worker->event = worker->epoll = NO_SOCKET;
}

static bool open_worker(struct worker *worker)
{
    handles_lock();
    worker->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (!handles_add(worker->epoll))
        worker->epoll = NO_SOCKET;
    worker->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!handles_add(worker->event))
        worker->event = NO_SOCKET;
    handles_unlock();
    if (worker->epoll < 0 || worker->event < 0) {
        close_worker(worker);
        return false;
    }
    worker->sleeping = worker->stopping = worker->poked = false;
    return true;
}

/* The program's signals are for its own threads. Those that an instruction causes stay: blocked, they would end the
 * process without asking a handler. */
static bool start_thread(struct worker *worker)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t blocked, before;
    pthread_attr_t attributes;
    size_t stack = 0;

    pthread_attr_init(&attributes);
    if (pthread_attr_getstacksize(&attributes, &stack) == 0 && stack < MIN_STACK)
        pthread_attr_setstacksize(&attributes, MIN_STACK);
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        sigdelset(&blocked, own[i]);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
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
        workers[i].epoll = workers[i].event = NO_SOCKET;
    }
    worker_count = 0;
    driver = waits = false;
    driver_thread = 0;
    lock_start(&holding_lock);
    holding = NULL;
    napping = 0;
}
