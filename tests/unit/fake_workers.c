/* driving.c with workers that only count, and a clock that goes on when somebody looks at it. Worker 1 has sockets;
   what is "ready" is a number in an eventfd, its epoll. */
#include <sys/epoll.h>
#include <time.h>

static int look_at_clock(clockid_t clock, struct timespec *now);
static int control(int epoll, int operation, int descriptor, struct epoll_event *event);
#define clock_gettime look_at_clock
#define epoll_ctl     control
#include "../../softrdma/system/linux/driving.c"

#undef epoll_ctl

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define EXPECT(condition)                                         \
    do {                                                          \
        if (!(condition)) {                                       \
            printf("FAILED line %d: %s\n", __LINE__, #condition); \
            exit(1);                                              \
        }                                                         \
    } while (0)

struct worker workers[MAX_WORKERS];
_Atomic unsigned worker_count = 2;
_Atomic uint32_t system_generation;

static int handled_in_loop, pokes, shut_gates, opened_gates, handled, handled_shut, yields, yields_shut, pushed, looks;
static uint64_t ms;
static long ns = 1, others_need; /* the processor, at each yield */

static int look_at_clock(clockid_t clock, struct timespec *now)
{
    ns += 100;
    *now = (struct timespec){0, ns};
    return 0;
}

/* The kernel has no room for another watch (ENOSPC, ENOMEM). */
static bool no_room;

static int control(int epoll, int operation, int descriptor, struct epoll_event *event)
{
    return no_room && operation == EPOLL_CTL_ADD ? -1 : epoll_ctl(epoll, operation, descriptor, event);
}

void workers_wake(void)
{
    pokes++;
}
bool worker_here(void)
{
    return false;
}
void lock_start(struct lock *lock)
{
    memset(lock, 0, sizeof *lock);
}
void lock_acquire(struct lock *lock)
{
    lock->state++;
}
void lock_release(struct lock *lock)
{
    lock->state--;
}
uint64_t thread_id(void)
{
    return 7;
}
uint64_t now_ms(void)
{
    return ms;
}
void channel_push(struct channel *channel)
{
    pushed++;
}

void thread_yield(void)
{
    yields++;
    yields_shut += workers[1].shut;
    ns += others_need;
}

bool worker_open_gate(struct worker *worker, bool open)
{
    EXPECT(worker == &workers[1] && worker->shut == open);
    shut_gates += !open;
    opened_gates += open;
    return true;
}

int worker_handle(struct worker *worker)
{
    uint64_t count;

    EXPECT(worker == &workers[1]);
    looks++;
    if (read(worker->epoll, &count, sizeof count) < 0)
        return 0;
    handled++;
    handled_shut += worker->shut;
    handled_in_loop += driving_loop_here();
    return 1;
}

static void arrive(void)
{
    uint64_t one = 1;

    EXPECT(write(workers[1].epoll, &one, sizeof one) == sizeof one);
}

static bool never(void *what)
{
    return false;
}

/* Finds something at the 2nd look. */
static bool second(void *what)
{
    return ++*(int *)what == 2;
}

static bool arrives_at_second(void *what)
{
    if (++*(int *)what == 2)
        arrive();
    return false;
}

static void *stay(void *unused)
{
    for (;;)
        pause();
    return unused;
}

static sigset_t none;
static sigjmp_buf out;

static void jump(int number)
{
    siglongjmp(out, 1);
}

/* The loop goes to sleep, comes back after so long, and gets what it waited for. */
static void sleep_and_come(struct loop *loop, long after_ns)
{
    loop_sleeps(loop);
    ns += after_ns;
    loop_wakes(loop);
}

static bool is_readable(int descriptor)
{
    return poll(&(struct pollfd){.fd = descriptor, .events = POLLIN}, 1, 0) == 1;
}

static void try_loop(void)
{
    struct loop loop, others[MOST_LOOPS];
    int event = eventfd(0, EFD_NONBLOCK), descriptor = loop_open(&loop, event), begin = shut_gates;

    EXPECT(descriptor != event);
    /* A program that sleeps in the library is never believed. */
    for (int i = 0; i < 2 * SLEEPS; i++)
        sleep_and_come(&loop, 1000);
    EXPECT(shut_gates == begin && !loop.joined);
    /* Nor is one that comes late. */
    loop_drive(&loop);
    for (int i = 0; i < 2 * SLEEPS; i++)
        sleep_and_come(&loop, 2000000L * NAP_MS);
    EXPECT(shut_gates == begin && !loop.joined);
    for (int i = 0; i < SLEEPS; i++)
        sleep_and_come(&loop, 1000);
    EXPECT(shut_gates == begin && !loop.joined);
    /* If sockets could not wake it, the gates stay open, and it has to show anew that it comes. */
    no_room = true;
    loop_sleeps(&loop);
    EXPECT(!workers[1].shut && !loop.joined && loop.comes == 0);
    /* A descriptor that could not show events is not given to the program. */
    EXPECT(loop_open(&others[0], event) == event && loops == 1 && others[0].epoll == NO_SOCKET);
    no_room = false;
    loop_wakes(&loop);
    for (int i = 0; i < SLEEPS; i++)
        sleep_and_come(&loop, 1000);
    /* One that has come soon again and again shuts the gates while it sleeps, and a socket wakes it. */
    loop_sleeps(&loop);
    EXPECT(workers[1].shut && loop.joined && !is_readable(descriptor));
    arrive();
    EXPECT(is_readable(descriptor));
    handled = 0;
    loop_drive(&loop);
    EXPECT(handled == 1 && handled_shut > 0 && workers[1].shut && !is_readable(descriptor));
    /* What it says to the peer about a message may wait, as a worker's may. */
    EXPECT(handled_in_loop == 1 && !driving_loop_here());
    loop_wakes(&loop);
    EXPECT(!workers[1].shut);
    /* What it was woken for in vain before that does not count. */
    for (int i = 0; i < 2; i++) {
        loop_sleeps(&loop);
        for (int j = 1; j < MOST_VAIN; j++)
            loop_drive(&loop);
        EXPECT(workers[1].shut && loop.joined);
        loop_wakes(&loop);
    }
    /* Who comes late, and in vain, is not believed. */
    loop_sleeps(&loop);
    ns += 2000000L * NAP_MS;
    loop_drive(&loop);
    EXPECT(!workers[1].shut && !loop.joined);
    loop_wakes(&loop);
    for (int i = 0; i < SLEEPS; i++)
        sleep_and_come(&loop, 1000);
    /* If it does not come, worker 0 opens them, and it has to show anew that it comes. */
    loop_sleeps(&loop);
    EXPECT(workers[1].shut);
    for (int i = 0; i < 3; i++, ms += NAP_MS)
        driving_attend();
    EXPECT(!workers[1].shut);
    loop_wakes(&loop);
    EXPECT(!loop.joined && loop.comes == 0);
    /* The same after it was woken for nothing again and again. */
    for (int i = 0; i < SLEEPS; i++)
        sleep_and_come(&loop, 1000);
    loop_sleeps(&loop);
    for (int i = 1; i < MOST_VAIN; i++) {
        loop_drive(&loop);
        loop_sleeps(&loop); /* some ask for an event each time */
    }
    EXPECT(workers[1].shut && loop.joined);
    loop_drive(&loop);
    EXPECT(!workers[1].shut && !loop.joined);
    /* Once it sleeps in the library, its descriptor is readable for the event alone. */
    for (int i = 0; i < SLEEPS; i++)
        sleep_and_come(&loop, 1000);
    loop_sleeps(&loop);
    EXPECT(workers[1].shut && loop.joined);
    loop_blocks(&loop);
    EXPECT(!workers[1].shut && !loop.joined);
    arrive();
    EXPECT(!is_readable(descriptor));
    workers_drive();
    for (int i = 0; i < 2 * SLEEPS; i++)
        sleep_and_come(&loop, 1000);
    EXPECT(!workers[1].shut && !loop.joined);
    begin = shut_gates;
    loop_sleeps(&loop);
    EXPECT(shut_gates == begin);
    /* There are only so many of them. */
    for (int i = 0; i < MOST_LOOPS; i++)
        EXPECT((loop_open(&others[i], event) == event) == (i == MOST_LOOPS - 1));
    for (int i = 0; i < MOST_LOOPS; i++)
        loop_close(&others[i]);
    loop_close(&loop);
    EXPECT(loops == 0 && loop.lock.state == 0 && gates_lock.state == 0);
    close(event);
    for (int i = 0; i < 3; i++, ms += NAP_MS)
        driving_attend();
    EXPECT(driving_limit() == -1);
}

/* The thread sleeps, is woken for a socket, and handles it. */
static void sleep_and_drive(void)
{
    arrive();
    EXPECT(workers_drive_until(workers[0].event, &none) && handled == 1 && !workers[1].shut);
    handled = 0;
}

int main(void)
{
    struct itimerspec soon = {.it_value.tv_nsec = 1000000};
    timer_t timer;
    int count = 0;

    workers[0].epoll = eventfd(0, EFD_NONBLOCK);
    workers[0].event = eventfd(0, EFD_NONBLOCK); /* never readable */
    workers[1].epoll = eventfd(0, EFD_NONBLOCK);
    workers[1].sockets = 1;
    sigset_t before;
    signals_off(&before);
    for (unsigned i = 0; i < worker_count; i++) {
        pthread_t thread;
        EXPECT(pthread_create(&thread, NULL, stay, NULL) == 0);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    EXPECT(timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0);
    signal(SIGALRM, jump);

    /* Whoever looks once leaves the gates alone, and so does whoever is just beginning. */
    workers_drive();
    for (int i = 0; i <= SPINS; i++)
        workers_spin(never, NULL);
    EXPECT(shut_gates == 0 && pokes == 0 && driving_limit() == -1);
    /* Who looks again and again shuts them at each look, and never leaves them shut. */
    for (int i = 1; i <= 100; i++) {
        workers_spin(never, NULL);
        EXPECT(shut_gates == i && opened_gates == i && !workers[1].shut);
    }
    /* Worker 0 attends from then on, and is told once. */
    EXPECT(pokes == 1 && driving_limit() > 0);
    /* What comes meanwhile is handled by this thread with the gates shut. It returns at once. */
    looks = 0;
    workers_spin(arrives_at_second, &count);
    EXPECT(count == 3 && looks == 3 && handled == 1 && handled_shut == 1 && !workers[1].shut);
    count = 0;
    workers_spin(second, &count);
    EXPECT(count == 2 && !workers[1].shut);
    /* With other threads in the program, it yields with open gates. Alone, it keeps them shut. */
    EXPECT(yields > 100 && yields_shut == 0);
    driving_attend();
    EXPECT(alone);
    yields = looks = 0;
    workers_spin(never, NULL);
    EXPECT(yields > 5 && yields_shut == yields && looks > 20 && !workers[1].shut);
    /* On one processor with its peer, it looks once after each time that the peer ran. */
    others_need = LINGER_NS;
    workers_spin(never, NULL);
    yields = yields_shut = looks = 0;
    workers_spin(never, NULL);
    EXPECT(yields == 1 && yields_shut == 1 && looks == 2);
    /* Others that need longer get no more than they would. */
    others_need = AWAY_NS;
    workers_spin(never, NULL);
    looks = 0;
    workers_spin(never, NULL);
    EXPECT(looks == 2 * TURNS);
    others_need = 0;
    /* Until it has shown that it looks again and again, the gates are open while others run. */
    self.spins = 0;
    yields = yields_shut = 0;
    workers_spin(never, NULL);
    EXPECT(yields == 1 && yields_shut == 0);
    alone = false;
    /* Its looks count although it finds something at each second one, or a worker did for it. */
    workers_found();
    self.spins = 0;
    for (int i = 0; i < SPINS; i++) {
        workers_spin(never, NULL);
        workers_found();
    }
    EXPECT(self.spins == SPINS);
    /* Not if it has asked for an event since it looked. */
    for (int i = 0; i < SPINS; i++) {
        workers_spin(never, NULL);
        workers_sleep_soon();
        workers_found();
    }
    EXPECT(self.spins == SPINS);
    /* Who does something else in between begins anew. */
    for (int i = 0; i < 6; i++) {
        ns += 10 * SPIN_NS;
        workers_spin(never, NULL);
    }
    count = shut_gates;
    workers_spin(never, NULL);
    EXPECT(shut_gates == count);

    /* Who is going to sleep looks once more, and neither shuts them, nor yields, nor sends what waits. */
    while (self.spins < SPINS)
        workers_spin(never, NULL);
    workers_spin(never, NULL);
    EXPECT(shut_gates == count + 1);
    struct channel waiting = {0};
    driving_hold(&waiting);
    workers_sleep_soon();
    yields = 0;
    workers_spin(never, NULL);
    EXPECT(shut_gates == count + 1 && yields == 0 && pushed == 0);
    /* It has not to show anew that it spins. */
    workers_spin(never, NULL);
    EXPECT(shut_gates == count + 2 && yields > 0 && pushed == 1);
    pushed = 0;
    /* A program that takes what there is, and then looks in vain, does not spin. */
    workers_found();
    self.spins = 0;
    for (int i = 0; i < 2 * SPINS; i++) {
        workers_found();
        workers_spin(never, NULL);
        workers_sleep_soon();
        workers_spin(never, NULL);
    }
    EXPECT(self.spins == 0);

    /* Nobody has shut them for NAP_MS: worker 0 need not attend any more. */
    for (int i = 0; i < 3; i++, ms += NAP_MS)
        driving_attend();
    EXPECT(driving_limit() == -1);

    /* A thread that sleeps shuts them when it has shown that it drives. */
    handled = 0;
    count = shut_gates;
    for (int i = 0; i < SLEEPS; i++)
        sleep_and_drive();
    EXPECT(shut_gates == count);
    sleep_and_drive();
    EXPECT(shut_gates == count + 1 && driving_limit() > 0);
    /* If it jumps out of its sleep, worker 0 opens them. */
    EXPECT(timer_settime(timer, 0, &soon, NULL) == 0);
    if (sigsetjmp(out, 1) == 0) {
        workers_drive_until(workers[0].event, &none);
        EXPECT(!"the alarm came");
    }
    EXPECT(workers[1].shut);
    for (int i = 0; i < 3; i++, ms += NAP_MS)
        driving_attend();
    EXPECT(!workers[1].shut && driving_limit() == -1);
    /* It does not shut them at once when it comes back, and the gates still obey. */
    count = shut_gates;
    self.sleeps = 0;
    for (int i = 0; i < SLEEPS; i++)
        sleep_and_drive();
    EXPECT(shut_gates == count);
    sleep_and_drive();
    EXPECT(shut_gates == count + 1 && !workers[1].shut);
    /* One that worker 0 has not believed does not open what another one has shut since. */
    uint32_t old = go_inside();
    for (int i = 0; i < 3; i++, ms += NAP_MS)
        driving_attend();
    EXPECT(!workers[1].shut);
    uint32_t other = go_inside();
    EXPECT(!go_outside(old) && workers[1].shut);
    EXPECT(go_outside(other) && !workers[1].shut);
    /* Two are inside: the last one opens. */
    old = go_inside();
    other = go_inside();
    EXPECT(go_outside(old) && workers[1].shut && go_outside(other) && !workers[1].shut);

    /* Bytes that wait are sent at the next look, and by worker 0 if there is none. */
    struct channel channel = {0};
    EXPECT(begin_to_drive() && driving_may_hold());
    driving_hold(&channel);
    end_driving();
    workers_drive();
    EXPECT(pushed == 1 && !driving_may_hold());
    driving_hold(&channel);
    for (int i = 0; i < 3; i++, ms += NAP_MS)
        driving_attend();
    EXPECT(pushed == 2);
    /* Nobody attends any more: worker 0 is told. */
    pokes = 0;
    driving_hold(&channel);
    driving_attend();
    EXPECT(pokes == 1 && pushed == 3 && gates_lock.state == 0 && holding_lock.state == 0);
    handled_shut = 0;
    try_loop();
    printf("ok\n");
    return 0;
}
