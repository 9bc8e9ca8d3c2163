/* The locks of lock.c: their structures, and each access to what says who holds and who waits.

   The functions rely on the interpreter's lock: whoever calls one has it from the first access to the last. So taking or leaving a free
   lock is a few plain instructions. Nothing outside of this file looks at `held`, `owner`, `count`, `waiters` and `is_signaled`, so a
   build for an interpreter without that lock has its atomics here. core.h includes this file. */

#ifndef NDPY_LOCK_H
#define NDPY_LOCK_H

/* Where threads wait for a lock. signal: the system's lock on which `waiters` threads sleep; made when the first one does.
   is_signaled: it was released for one of them, which has not run yet. */
struct gate {
    PyThread_type_lock signal;
    int waiters;
    char is_signaled;
};

/* A lock that nobody takes twice. Any thread may leave it. */
typedef struct {
    PyObject_HEAD
    struct gate gate;
    char held;
} Lock;

/* The lock of one object that several threads may close. owner: the thread that has taken it `count` times. */
typedef struct {
    PyObject_HEAD
    struct gate gate;
    unsigned long owner;
    unsigned int count;
} RLock;

extern PyTypeObject *lock_type, *rlock_type;

/* ---- lock.c ---- */

/* Sleeps until the lock may be free, or at most so many seconds. Less than 0: for ever. *seconds is then what is left of them. Returns 1;
   0 if *seconds was 0; or -1 with an error: out of memory, or a signal handler raised. */
int gate_wait(struct gate *gate, double *seconds);
/* Wakes one of the threads that wait. */
void gate_wake(struct gate *gate);
void gate_free(struct gate *gate);

/* A lock that nobody holds. Returns NULL with an error. */
Lock *lock_new(void);
/* Takes a lock that the caller then gives back with lock_leave(). Returns 0, or -1 with the error of gate_wait(). */
int lock_wait(Lock *lock);

/* A lock that nobody holds. Returns NULL with an error. */
RLock *rlock_new(void);
/* Takes the lock. seconds: how long to wait; less than 0 for ever. Returns 1 with the lock, 0 at the deadline, or -1 with the error of
   gate_wait(). */
int rlock_acquire(RLock *lock, double seconds);

/* time.monotonic(), or -1 with an error: out of memory. */
double monotonic_now(void);

/* ---- gates ---- */

/* Makes what the waiters sleep on, if this is the first one. Returns 0, or -1 with an error. */
static inline int gate_prepare(struct gate *gate)
{
    if (gate->signal) return 0;
    gate->signal = PyThread_allocate_lock();
    if (!gate->signal) {
        PyErr_NoMemory();
        return -1;
    }
    PyThread_acquire_lock(gate->signal, NOWAIT_LOCK);
    return 0;
}

static inline void gate_begin_sleep(struct gate *gate)
{
    gate->waiters++;
}

static inline void gate_end_sleep(struct gate *gate, int was_woken)
{
    gate->waiters--;
    if (was_woken) gate->is_signaled = 0;
}

/* Whether to release the signal. The caller then does. */
static inline int gate_begin_wake(struct gate *gate)
{
    if (gate->is_signaled) return 0;
    gate->is_signaled = 1;
    return 1;
}

/* Whether there is a signal, and nobody released it. */
static inline int gate_is_silent(const struct gate *gate)
{
    return gate->signal && !gate->is_signaled;
}

/* ---- locks ---- */

/* Takes the lock if nobody holds it. Returns whether. */
HOT int lock_take(Lock *lock)
{
    if (lock->held) return 0;
    lock->held = 1;
    return 1;
}

static inline int lock_is_held(const Lock *lock)
{
    return lock->held;
}

/* See lock_wait(). */
HOT int lock_enter(Lock *lock)
{
    return lock_take(lock) ? 0 : lock_wait(lock);
}

HOT void lock_leave(Lock *lock)
{
    lock->held = 0;
    if (lock->gate.waiters) gate_wake(&lock->gate);
}

/* How many threads wait for a Lock: for a thread that has not got the interpreter's lock, and looks again and again. */
static inline const volatile int *lock_waiters(const Lock *lock)
{
    return &lock->gate.waiters;
}

/* ---- locks that their owner may take again ---- */

static inline int rlock_is_own(const RLock *lock)
{
    return lock->count && lock->owner == PyThread_get_thread_ident();
}

/* Takes the lock if no other thread holds it. Returns whether. */
static inline int rlock_take(RLock *lock)
{
    unsigned long thread = PyThread_get_thread_ident();

    if (lock->count && lock->owner != thread) return 0;
    lock->owner = thread;
    lock->count++;
    return 1;
}

/* Takes the lock, which the caller then gives back with rlock_leave(). Returns 0, or -1 with the error of gate_wait(). */
static inline int rlock_enter(RLock *lock)
{
    return rlock_take(lock) || rlock_acquire(lock, -1) == 1 ? 0 : -1;
}

static inline void rlock_leave(RLock *lock)
{
    if (!--lock->count && lock->gate.waiters) gate_wake(&lock->gate);
}

#endif
