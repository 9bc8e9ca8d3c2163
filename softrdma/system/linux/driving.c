/* See driving.h.
 *
 * `inside` counts the threads that keep the gates shut. Its upper half is the number of times that worker 0 has not
 * believed them any more. A thread that comes back after that is not counted, and has to show anew that it drives.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "driving.h"
#include "workers.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* How often worker 0 looks whether those who shut the gates are still there, and sends what sockets hold. */
#define NAP_MS 2
/* A thread that looks again within SPIN_NS, SPINS times, stays for LINGER_NS at each look. One that has done it more
 * often, up to MOST_SPINS, goes on after the system has let others run in between. */
#define SPIN_NS    5000
#define SPINS      16
#define MOST_SPINS 256
/* It lets others run after so many turns. */
#define TURNS     4
#define LINGER_NS 20000
/* Others that had its processor for longer do more than answer it. */
#define AWAY_NS 200000
/* A thread that has slept and driven so many times shuts the gates when it sleeps. */
#define SLEEPS 4
/* A thread that sleeps longer is not the only one any more that waits for sockets. */
#define SLEEPER_MS 1000
/* Linux lets a file wake through 10 to 1,000 ways, depending on how many epolls are between (path_limits in
 * fs/eventpoll.c). Each of these descriptors is a way for each socket, whatever epolls the program puts it into. */
#define MOST_LOOPS 4
/* A program that a loop has woken so many times for nothing is left to the workers. */
#define MOST_VAIN 8

#define COUNT     0xffffu
#define DISBELIEF 0x10000u

/* One thread at a time drives, and one sleeps until there is something to drive. */
static _Atomic bool driver;
static _Atomic uint64_t driver_thread;
static _Atomic uint64_t sleeper, sleeper_since;

static struct lock gates_lock = LOCK_INIT;
static _Atomic uint32_t inside;
/* The gates have been shut since worker 0 looked. */
static _Atomic uint32_t shuts;
/* Worker 0 looks every NAP_MS. */
static _Atomic bool attended;
/* The program had one thread when worker 0 looked. */
static _Atomic bool alone;

/* Channels whose sockets hold bytes. */
static struct lock holding_lock = LOCK_INIT;
static struct channel *_Atomic holding;

static _Atomic int loops;

/* What this thread has shown. */
static _Thread_local struct {
    uint64_t looked; /* when it last looked in vain; 0: it has found something since, or asked for an event */
    uint64_t away;   /* how long others had its processor when it last let them, ns */
    uint32_t spins, sleeps;
    bool sleeps_soon; /* it has asked for an event, and not looked in vain since */
    bool in_loop;     /* it is in loop_drive() */
    int drives_for;   /* it handles what comes until this descriptor is readable */
} self = {.drives_for = NO_SOCKET};

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void signals_off(sigset_t *before)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t blocked;

    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        sigdelset(&blocked, own[i]);
    pthread_sigmask(SIG_BLOCK, &blocked, before);
}

bool driving_for(int descriptor)
{
    return self.drives_for == descriptor;
}

/* ---- Bytes that wait for others ---- */

bool driving_loop_here(void)
{
    return self.in_loop;
}

bool driving_may_hold(void)
{
    return attended && (worker_here() || (driver && driver_thread == thread_id()));
}

void driving_hold(struct channel *channel)
{
    lock_acquire(&holding_lock);
    channel->next_holding = holding;
    holding = channel;
    lock_release(&holding_lock);
    if (!attended)
        workers_wake();
}

void driving_push(void)
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

/* ---- The gates ---- */

/* Called after each change of `inside`, so that the last one leaves them as they should be. */
static void set_gates(void)
{
    lock_acquire(&gates_lock);
    bool shut = (inside & COUNT) > 0;
    for (unsigned i = 0; i < worker_count; i++)
        /* Nobody drives for a worker without sockets. */
        if (workers[i].shut != shut && (!shut || workers[i].sockets > 0) && worker_open_gate(&workers[i], !shut))
            workers[i].shut = shut;
    lock_release(&gates_lock);
}

static uint32_t go_inside(void)
{
    uint32_t ticket = atomic_fetch_add(&inside, 1);

    shuts++;
    /* After `inside`: worker 0 ends to attend before it clears that. */
    if (!attended && !atomic_exchange(&attended, true))
        workers_wake();
    set_gates();
    return ticket;
}

/* False: worker 0 has opened the gates meanwhile. */
static bool go_outside(uint32_t ticket)
{
    uint32_t now = inside;

    do
        if (now / DISBELIEF != ticket / DISBELIEF)
            return false;
    while (!atomic_compare_exchange_weak(&inside, &now, now - 1));
    set_gates();
    return true;
}

/* The threads of the process but for the workers. More than 1 if that is not known. */
static unsigned program_threads(void)
{
    struct stat tasks;

    /* The folder has a link for each thread's folder, and two of its own. */
    return stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink > 2 + worker_count
               ? (unsigned)tasks.st_nlink - 2 - worker_count
               : UINT_MAX;
}

int driving_limit(void)
{
    return attended ? NAP_MS : -1;
}

void driving_attend(void)
{
    static uint64_t next;
    static uint32_t seen;

    if (!attended) {
        next = 0;
        driving_push();
        return;
    }
    uint64_t now = now_ms();
    if (next != 0 && now < next)
        return;
    driving_push();
    alone = program_threads() == 1;
    if (next == 0 || shuts != seen) {
        next = now + NAP_MS;
        seen = shuts;
        return;
    }
    attended = false;
    next = 0;
    uint32_t before = inside;
    while (!atomic_compare_exchange_weak(&inside, &before, (before & ~COUNT) + DISBELIEF))
        ;
    set_gates();
    /* What was held since. */
    driving_push();
}

/* ---- Driving ---- */

static bool begin_to_drive(void)
{
    if (worker_count == 0 || atomic_exchange_explicit(&driver, true, memory_order_acquire))
        return false;
    driver_thread = thread_id();
    return true;
}

static void end_driving(void)
{
    atomic_store_explicit(&driver, false, memory_order_release);
}

/* Returns how much was handled. */
static int drive(bool push)
{
    int handled = 0;

    if (!begin_to_drive())
        return 0;
    if (push)
        driving_push();
    for (unsigned i = 0; i < worker_count; i++)
        if (workers[i].sockets > 0)
            handled += worker_handle(&workers[i]);
    end_driving();
    return handled;
}

void workers_drive(void)
{
    int cancel = cancel_off();

    drive(true);
    cancel_as(cancel);
}

static void count_look(bool again)
{
    self.spins = !again ? self.spins / 2 : self.spins < MOST_SPINS ? self.spins + 1 : MOST_SPINS;
}

void workers_found(void)
{
    if (self.looked != 0)
        count_look(now_ns() - self.looked < SPIN_NS);
    self.looked = 0;
    self.sleeps_soon = false;
}

void workers_sleep_soon(void)
{
    self.looked = 0;
    self.sleeps_soon = true;
}

/* Lets others run, and notes how long they did. */
static void let_others_run(void)
{
    uint64_t begin = now_ns();

    thread_yield();
    self.away = now_ns() - begin;
}

void workers_spin(bool (*found)(void *what), void *what)
{
    int cancel = cancel_off();
    uint64_t begin = now_ns();
    bool again = self.looked == 0 || begin - self.looked < SPIN_NS;
    bool stays = again && self.spins >= SPINS && !self.sleeps_soon;
    /* It lets others run with shut gates. Not if other threads of the program may wait for what it would handle: it may
     * not get its processor back soon. */
    bool lets = stays && alone;
    /* What it looks for comes from those who had its processor. */
    bool shares = lets && self.away >= SPIN_NS && self.away < AWAY_NS;
    uint32_t ticket = stays ? go_inside() : 0;
    unsigned turns = 0;
    bool handled, done;

    for (;;) {
        handled = drive(!self.sleeps_soon) > 0;
        done = found(what);
        if (!stays || handled || done)
            break;
        if (++turns % (shares ? 1 : TURNS) != 0)
            continue;
        /* It looks again after others have run: an open gate would wake a worker for what has come. */
        if (now_ns() - begin >= LINGER_NS)
            break;
        if (lets)
            let_others_run();
    }
    if (stays)
        go_outside(ticket);
    /* A program that sleeps looks in vain once, after it has taken what there is. That does not count. */
    if (!handled && !done && self.looked != 0 && !self.sleeps_soon)
        count_look(again);
    if (!done && !lets && !self.sleeps_soon)
        let_others_run();
    self.looked = handled || done || self.sleeps_soon ? 0 : now_ns();
    self.sleeps_soon = false;
    cancel_as(cancel);
}

/* Whether this thread is to be woken for sockets. One is enough. */
static bool begin_to_sleep(uint64_t thread)
{
    uint64_t other = 0, now = now_ms();

    if (!atomic_compare_exchange_strong(&sleeper, &other, thread) && other != thread &&
        now < sleeper_since + SLEEPER_MS)
        return false;
    sleeper = thread;
    sleeper_since = now;
    return true;
}

static void end_sleep(uint64_t thread)
{
    atomic_compare_exchange_strong(&sleeper, &thread, 0);
}

bool workers_drive_until(int descriptor, const sigset_t *signals)
{
    struct pollfd states[1 + MAX_WORKERS] = {{.fd = descriptor, .events = POLLIN}};
    unsigned count = 1, workers_ready = 0;
    uint64_t thread = thread_id();
    uint32_t ticket = 0;
    bool sleeps = begin_to_sleep(thread), shuts_gates = sleeps && self.sleeps == SLEEPS;
    int cancel;

    for (unsigned i = 0; sleeps && i < worker_count; i++)
        /* Also those without sockets: they may get one meanwhile. */
        states[count++] = (struct pollfd){.fd = workers[i].epoll, .events = POLLIN};
    driving_push();
    if (shuts_gates)
        ticket = go_inside();
    int ready = ppoll(states, count, NULL, signals), error = errno;
    cancel = cancel_off();
    if (sleeps)
        end_sleep(thread);
    for (unsigned i = 1; i < count; i++)
        workers_ready += ready > 0 && states[i].revents != 0;
    if (workers_ready > 0 && begin_to_drive()) {
        self.drives_for = descriptor;
        for (unsigned i = 1; i < count; i++)
            if (states[i].revents != 0)
                worker_handle(&workers[i - 1]);
        self.drives_for = NO_SOCKET;
        end_driving();
        self.sleeps = self.sleeps < SLEEPS ? self.sleeps + 1 : SLEEPS;
    } else if (workers_ready > 0) {
        thread_yield(); /* to the thread that drives */
    }
    if (shuts_gates && !go_outside(ticket))
        self.sleeps = 0;
    cancel_as(cancel);
    errno = error;
    return ready >= 0;
}

/* ---- Loops of the program ---- */

static bool add(int epoll, int descriptor)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = descriptor};

    return epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) == 0;
}

int loop_open(struct loop *loop, int event)
{
    *loop = (struct loop){.epoll = NO_SOCKET, .event = event};
    lock_start(&loop->lock);
    if (atomic_fetch_add(&loops, 1) < MOST_LOOPS)
        loop->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (loop->epoll >= 0 && add(loop->epoll, event))
        return loop->epoll;
    if (loop->epoll >= 0)
        close(loop->epoll);
    loop->epoll = NO_SOCKET;
    loops--;
    return event;
}

/* Locked. The program has to show anew that it comes soon. */
static void disbelieve(struct loop *loop)
{
    struct epoll_event unused = {0};

    for (unsigned i = 0; loop->joined && i < worker_count; i++)
        epoll_ctl(loop->epoll, EPOLL_CTL_DEL, workers[i].epoll, &unused);
    loop->joined = false;
    loop->comes = loop->vain = 0;
}

/* Locked. The workers' epolls are members of the loop's while the program is believed. */
static bool join(struct loop *loop)
{
    bool all = true;

    for (unsigned i = 0; !loop->joined && i < worker_count; i++)
        all = add(loop->epoll, workers[i].epoll) && all;
    loop->joined = true;
    if (!all)
        disbelieve(loop);
    return all;
}

/* Locked. */
static bool open_gates(struct loop *loop)
{
    bool shut = loop->shuts;

    loop->shuts = false;
    return !shut || go_outside(loop->ticket);
}

/* Locked. Whether the program has come soon after it went to sleep. */
static bool is_soon(const struct loop *loop)
{
    return now_ns() - loop->since < NAP_MS * 1000000u;
}

void loop_sleeps(struct loop *loop)
{
    if (!loop->nonblocking)
        return;
    lock_acquire(&loop->lock);
    loop->since = now_ns();
    if (!loop->shuts && loop->comes == SLEEPS && loop->epoll >= 0 && join(loop)) {
        loop->shuts = true;
        loop->ticket = go_inside();
    }
    lock_release(&loop->lock);
}

void loop_wakes(struct loop *loop)
{
    if (loop->since == 0)
        return;
    lock_acquire(&loop->lock);
    bool soon = is_soon(loop);
    loop->since = 0;
    loop->vain = 0;
    if (!open_gates(loop) || !soon)
        disbelieve(loop);
    else if (loop->comes < SLEEPS)
        loop->comes++;
    lock_release(&loop->lock);
}

void loop_drive(struct loop *loop)
{
    int cancel = cancel_off();

    loop->nonblocking = true;
    if (loop->since != 0) {
        lock_acquire(&loop->lock);
        if (!is_soon(loop) || ++loop->vain == MOST_VAIN) {
            open_gates(loop);
            disbelieve(loop);
        }
        loop->since = now_ns();
        shuts += loop->shuts;
        lock_release(&loop->lock);
    }
    self.in_loop = loop->joined;
    self.drives_for = loop->event;
    drive(!self.in_loop);
    self.in_loop = false;
    self.drives_for = NO_SOCKET;
    cancel_as(cancel);
}

void loop_blocks(struct loop *loop)
{
    if (!loop->nonblocking)
        return;
    lock_acquire(&loop->lock);
    open_gates(loop);
    disbelieve(loop);
    loop->nonblocking = false;
    loop->since = 0;
    lock_release(&loop->lock);
}

void loop_close(struct loop *loop)
{
    loop_blocks(loop);
    if (loop->epoll < 0)
        return;
    close(loop->epoll);
    loops--;
}

void driving_forget(void)
{
    driver = attended = alone = false;
    loops = 0;
    driver_thread = sleeper = 0;
    inside = 0;
    lock_start(&gates_lock);
    lock_start(&holding_lock);
    holding = NULL;
}
