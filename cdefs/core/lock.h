/* The locks of lock.c, and what a build for free-threaded Python needs. core.h includes this file.

   Elsewhere the core relies on the interpreter's lock: a function has it from its first access to the last. So taking
   or leaving a free Lock is a few plain instructions, and what a call leaves behind serves the next one. In a build for
   free-threaded Python the functions run at once. There

   - an access to a SHARED field is atomic,
   - a MUTEX guards what several threads change together. Nothing that may run Python code is called with one,
   - BEGIN_SECTION and END_SECTION enclose a use of one object. Two threads are never in sections of the same object. As
   with the interpreter's lock, a thread leaves its sections for the time in which it waits,
   - HAS_GIL is 0, and no call uses what another one has left behind.

   Without free threading all of this is nothing. */

#ifndef NDPY_LOCK_H
#define NDPY_LOCK_H

#ifdef Py_GIL_DISABLED
#include <stdatomic.h>
enum { HAS_GIL = 0 };
#define SHARED                _Atomic
#define MUTEX(name)           PyMutex name;
#define mutex_lock(mutex)     PyMutex_Lock(mutex)
#define mutex_unlock(mutex)   PyMutex_Unlock(mutex)
#define BEGIN_SECTION(object) Py_BEGIN_CRITICAL_SECTION(object);
#define END_SECTION()         Py_END_CRITICAL_SECTION();
#else
enum { HAS_GIL = 1 };
#define SHARED
#define MUTEX(name)
#define mutex_lock(mutex)     ((void)0)
#define mutex_unlock(mutex)   ((void)0)
#define BEGIN_SECTION(object) {
#define END_SECTION()         }
#endif

/* A thread that waits for a lock. signal: what it sleeps on. thread: what the lock names it by. granted: the lock is
 * its own. */
struct waiter {
    struct waiter *next;
    PyThread_type_lock signal;
    uintptr_t thread;
    SHARED char granted;
};

/* The threads that wait for a lock, in the order in which they came. waiters: how many. mutex: guards the line. */
struct gate {
    MUTEX(mutex)
    struct waiter *first, *last;
    SHARED int waiters;
};

/* Any thread may leave it. owner: this_thread() of whoever has taken it, as long as it is held. is_recursive: it is an
   RLock, which its owner may take again, and nobody else leaves. again: how often the owner has taken it besides the
   first time. */
typedef struct {
    PyObject_HEAD struct gate gate;
    SHARED uintptr_t owner;
    SHARED char held;
    char is_recursive;
    unsigned int again;
} Lock;

extern PyTypeObject *lock_type, *rlock_type;

/* ---- lock.c ---- */

/* Takes a lock that the caller then gives back. Returns 0, or -1 with an error: out of memory, a signal handler raised,
   or this thread has it already. */
int lock_wait(Lock *lock);
/* Gives a lock that this thread has to the first one in line. If nobody waits any more, the lock is free. */
void lock_hand_over(Lock *lock);

/* An RLock that nobody holds. Returns NULL with an error. */
Lock *rlock_new(void);

/* time.monotonic(), or -1 with an error: out of memory. */
double monotonic_now(void);

/* ---- locks ---- */

#if defined(__has_builtin) && !defined(_WIN32)
#if __has_builtin(__builtin_thread_pointer)
#define HAS_THREAD_POINTER
#endif
#endif

/* A number that no other thread has while this one lives. Where the compiler knows the thread's pointer, this is one
 * instruction. */
HOT uintptr_t this_thread(void)
{
#ifdef HAS_THREAD_POINTER
    return (uintptr_t)__builtin_thread_pointer();
#else
    return (uintptr_t)PyThread_get_thread_ident();
#endif
}

/* Takes the lock if nobody holds it. Returns whether. */
HOT int lock_take(Lock *lock)
{
#ifdef Py_GIL_DISABLED
    char free = 0;

    if (!atomic_compare_exchange_strong(&lock->held, &free, 1))
        return 0;
#else
    if (lock->held)
        return 0;
    lock->held = 1;
#endif
    lock->owner = this_thread();
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

/* Whether this thread has taken the lock, and nobody has left it since. */
static inline int lock_is_own(const Lock *lock)
{
    return lock->held && lock->owner == this_thread();
}

/* Gives the lock back. If threads wait, the first of them has it then, and nobody else can take it before. */
HOT void lock_leave(Lock *lock)
{
    if (lock->gate.waiters) {
        lock_hand_over(lock);
        return;
    }
#ifdef Py_GIL_DISABLED
    lock->owner = 0; /* for the time between the two changes of lock_take() */
    lock->held = 0;
    /* One may have come in between and found it held. Or another thread has taken it: then that one hands over. */
    if (lock->gate.waiters && lock_take(lock))
        lock_hand_over(lock);
#else
    lock->held = 0;
#endif
}

/* How many threads wait for a Lock: for a thread that has not got the interpreter's lock, and looks again and again. */
static inline const volatile int *lock_waiters(const Lock *lock)
{
    return (const volatile int *)&lock->gate.waiters;
}

/* The same for an RLock, which lock_enter() takes. */
static inline void rlock_leave(Lock *lock)
{
    if (lock->again)
        lock->again--;
    else
        lock_leave(lock);
}

#endif
