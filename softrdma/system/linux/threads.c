/* Locks, conditions, threads and time.
 *
 * The locks are futexes: they need no start or end, work alike with all C libraries, and prefer writers, which
 * pthread_rwlock does not by default. */
#include "forking.h"
#include "system.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WRITER   0x80000000u /* a thread has the lock exclusively */
#define SLEEPERS 0x40000000u /* threads sleep; who frees the lock wakes them all */
#define SPINS    60

static void futex_wait(_Atomic uint32_t *word, uint32_t value, const uint64_t *ms)
{
    struct {
        long seconds, nanoseconds;
    } timeout;

    if (ms != NULL) {
        timeout.seconds = *ms / 1000 > INT_MAX ? INT_MAX : (long)(*ms / 1000);
        timeout.nanoseconds = (long)(*ms % 1000) * 1000000;
    }
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, ms != NULL ? &timeout : NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

void lock_start(struct lock *lock)
{
    atomic_store_explicit(&lock->state, 0, memory_order_relaxed);
    atomic_store_explicit(&lock->writers, 0, memory_order_relaxed);
}

/* Waits a little, or sleeps. Never sleeps on a free lock, because nobody might wake this thread then. */
static void wait_for(struct lock *lock, uint32_t state, unsigned *spins)
{
    if (++*spins < SPINS || (state & ~SLEEPERS) == 0) {
        relax();
        if (*spins > SPINS)
            sched_yield();
        return;
    }
    if ((state & SLEEPERS) == 0 && !atomic_compare_exchange_strong_explicit(&lock->state, &state, state | SLEEPERS,
                                                                            memory_order_relaxed, memory_order_relaxed))
        return;
    futex_wait(&lock->state, state | SLEEPERS, NULL);
}

static bool try_acquire(struct lock *lock, uint32_t *state)
{
    return (*state & ~SLEEPERS) == 0 &&
           atomic_compare_exchange_weak_explicit(&lock->state, state, *state | WRITER, memory_order_acquire,
                                                 memory_order_relaxed);
}

void lock_acquire(struct lock *lock)
{
    uint32_t state = 0;
    unsigned spins = 0;

    if (try_acquire(lock, &state))
        return;
    atomic_fetch_add_explicit(&lock->writers, 1, memory_order_relaxed);
    for (;;) {
        state = atomic_load_explicit(&lock->state, memory_order_relaxed);
        if (try_acquire(lock, &state))
            break;
        wait_for(lock, state, &spins);
    }
    atomic_fetch_sub_explicit(&lock->writers, 1, memory_order_relaxed);
}

void lock_release(struct lock *lock)
{
    if ((atomic_exchange_explicit(&lock->state, 0, memory_order_release) & SLEEPERS) != 0)
        futex_wake_all(&lock->state);
}

void lock_share(struct lock *lock)
{
    unsigned spins = 0;

    for (;;) {
        uint32_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
        bool yield = atomic_load_explicit(&lock->writers, memory_order_relaxed) > 0;
        if ((state & WRITER) == 0 && !yield) {
            if (atomic_compare_exchange_weak_explicit(&lock->state, &state, state + 1, memory_order_acquire,
                                                      memory_order_relaxed))
                return;
            continue;
        }
        wait_for(lock, state, &spins);
    }
}

void lock_unshare(struct lock *lock)
{
    uint32_t before = atomic_fetch_sub_explicit(&lock->state, 1, memory_order_release);

    if (before != (SLEEPERS | 1))
        return;
    atomic_fetch_and_explicit(&lock->state, ~SLEEPERS, memory_order_relaxed);
    futex_wake_all(&lock->state);
}

void condition_start(struct condition *condition)
{
    atomic_store_explicit(&condition->wakes, 0, memory_order_relaxed);
    atomic_store_explicit(&condition->waiters, 0, memory_order_relaxed);
}

/* Who wakes has had the lock after this thread released it, so it sees this thread in `waiters`. */
static void wait_on(struct condition *condition, struct lock *lock, const uint64_t *ms)
{
    atomic_fetch_add(&condition->waiters, 1);
    uint32_t wakes = atomic_load(&condition->wakes);
    lock_release(lock);
    futex_wait(&condition->wakes, wakes, ms);
    atomic_fetch_sub(&condition->waiters, 1);
    lock_acquire(lock);
}

void condition_wait(struct condition *condition, struct lock *lock)
{
    wait_on(condition, lock, NULL);
}

void condition_wait_ms(struct condition *condition, struct lock *lock, uint64_t ms)
{
    wait_on(condition, lock, &ms);
}

void condition_wake_all(struct condition *condition)
{
    atomic_fetch_add(&condition->wakes, 1);
    if (atomic_load(&condition->waiters) > 0)
        futex_wake_all(&condition->wakes);
}

uint64_t thread_id(void)
{
    static _Thread_local uint64_t id;
    static _Thread_local uint32_t generation;

    if (id == 0 || generation != atomic_load_explicit(&system_generation, memory_order_relaxed)) {
        id = (uint64_t)syscall(SYS_gettid);
        generation = atomic_load_explicit(&system_generation, memory_order_relaxed);
    }
    return id;
}

void thread_yield(void)
{
    sched_yield();
}

uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}
