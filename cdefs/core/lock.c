/* Locks that C and Python code share. Whether one is held is a field that the interpreter's lock guards, or an atomic
   one (see lock.h), so C takes and leaves a free one in a few instructions. Threads that find it held stand in line at
   its gate, and each sleeps on a lock of the system. Whoever leaves hands the lock over to the first one: it stays
   held, and has another owner. So a thread that takes the lock again and again, as one that polls does, has it at most
   once more after another one has come. */

#include <stdlib.h>

#include "core.h"

/* The system's locks wait no longer than some number that differs by system. */
#define LONGEST_S 3600

PyTypeObject *lock_type, *rlock_type;

/* time.monotonic(). */
static PyObject *monotonic;

double monotonic_now(void)
{
    PyObject *time = PyObject_CallObject(monotonic, NULL);
    double seconds = time ? PyFloat_AsDouble(time) : -1;

    Py_XDECREF(time);
    return seconds;
}

/* ---- gates ---- */

enum { INTERRUPTED = 1 };

static void waiter_free(struct waiter *waiter)
{
    if (waiter->signal)
        PyThread_free_lock(waiter->signal);
    free(waiter);
}

/* Puts this thread in line. After this the thread looks once more whether the lock is free: whoever has left it before
   handed over to nobody. gate_exit() follows, unless the interpreter ends and with it the thread. Returns NULL with an
   error. */
static struct waiter *gate_enter(struct gate *gate, uintptr_t thread)
{
    struct waiter *waiter = calloc(1, sizeof *waiter);

    if (waiter)
        waiter->signal = PyThread_allocate_lock();
    if (!waiter || !waiter->signal) {
        if (waiter)
            waiter_free(waiter);
        PyErr_NoMemory();
        return NULL;
    }
    waiter->thread = thread;
    PyThread_acquire_lock(waiter->signal, NOWAIT_LOCK);
    mutex_lock(&gate->mutex);
    *(gate->first ? &gate->last->next : &gate->first) = waiter;
    gate->last = waiter;
    gate->waiters++;
    mutex_unlock(&gate->mutex);
    return waiter;
}

/* Takes the first one out of the line, and returns it, or NULL. Called with the mutex. */
static struct waiter *gate_first(struct gate *gate)
{
    struct waiter *waiter = gate->first;

    if (!waiter)
        return NULL;
    gate->first = waiter->next;
    gate->waiters--;
    return waiter;
}

/* Wakes a thread that has the lock now. Called with the mutex, without which the waiter might be gone. */
static void gate_grant(struct waiter *waiter)
{
    waiter->granted = 1;
    PyThread_release_lock(waiter->signal);
}

/* Takes this thread out of the line. Returns whether it was given the lock. */
static int gate_exit(struct gate *gate, struct waiter *waiter)
{
    struct waiter *before = NULL;
    int granted;

    mutex_lock(&gate->mutex);
    granted = waiter->granted;
    if (!granted) {
        for (struct waiter *other = gate->first; other != waiter; other = other->next)
            before = other;
        *(before ? &before->next : &gate->first) = waiter->next;
        if (gate->last == waiter)
            gate->last = before;
        gate->waiters--;
    }
    mutex_unlock(&gate->mutex);
    /* Some systems free no lock that is held. */
    PyThread_acquire_lock(waiter->signal, NOWAIT_LOCK);
    PyThread_release_lock(waiter->signal);
    waiter_free(waiter);
    return granted;
}

/* Sleeps until the lock is given to this thread, or at most so many seconds. Less than 0: for ever. *seconds is then
   what is left of them. Returns 0, INTERRUPTED by a signal whose handler has not run, or -1 with an error. */
static int gate_sleep(struct waiter *waiter, double *seconds)
{
    double began = 0, now, sleep_s = *seconds < LONGEST_S ? *seconds : LONGEST_S;
    PY_TIMEOUT_T microseconds = *seconds < 0 ? -1 : (PY_TIMEOUT_T)(sleep_s * 1e6) + 1;
    PyLockStatus status;

    if (*seconds >= 0 && (began = monotonic_now()) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS status = PyThread_acquire_lock_timed(waiter->signal, microseconds, 1);
    Py_END_ALLOW_THREADS if (*seconds >= 0)
    {
        now = monotonic_now();
        if (now < 0)
            return -1;
        *seconds = *seconds > now - began ? *seconds - (now - began) : 0;
    }
    return status == PY_LOCK_INTR ? INTERRUPTED : 0;
}

/* ---- Lock ---- */

/* Takes an RLock once more, if this thread has it. Returns whether. */
static int take_again(Lock *lock)
{
    if (!lock->is_recursive || !lock_is_own(lock))
        return 0;
    lock->again++;
    return 1;
}

/* Takes the lock. seconds: how long to wait; less than 0 for ever. Returns 1 with the lock, 0 at the deadline, or -1
   with an error: out of memory, a signal handler raised, or a thread would wait for itself for ever. */
static int lock_acquire(Lock *lock, double seconds)
{
    while (!take_again(lock) && !lock_take(lock)) {
        struct waiter *waiter;
        int taken, outcome;

        if (seconds == 0)
            return 0;
        if (seconds < 0 && lock_is_own(lock)) {
            PyErr_SetString(PyExc_RuntimeError, "this call began within another call of the same object, in a "
                                                "finalizer or a signal handler; let the other one end first");
            return -1;
        }
        waiter = gate_enter(&lock->gate, this_thread());
        if (!waiter)
            return -1;
        taken = lock_take(lock);
        outcome = taken ? 0 : gate_sleep(waiter, &seconds);
        taken |= gate_exit(&lock->gate, waiter);
        if (taken && outcome >= 0)
            return 1;
        if (taken)
            lock_leave(lock);
        /* The handler of a signal may want the lock too, so it runs when this thread is not in line. */
        if (outcome < 0 || (outcome == INTERRUPTED && Py_MakePendingCalls() < 0))
            return -1;
    }
    return 1;
}

int lock_wait(Lock *lock)
{
    return lock_acquire(lock, -1) == 1 ? 0 : -1;
}

void lock_hand_over(Lock *lock)
{
    struct waiter *waiter;

    mutex_lock(&lock->gate.mutex);
    waiter = gate_first(&lock->gate);
    if (waiter) {
        lock->owner = waiter->thread;
        gate_grant(waiter);
    } else {
        lock->owner = 0;
        lock->held = 0;
    }
    mutex_unlock(&lock->gate.mutex);
}

/* How long acquire() waits, from its arguments. Returns 0, or -1 with an error. */
static int read_wait(PyObject *arguments, PyObject *keywords, double *seconds)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1;

    *seconds = -1;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|pd:acquire", names, &blocking, seconds))
        return -1;
    if (*seconds != *seconds) {
        PyErr_SetString(PyExc_ValueError, "timeout is a number of seconds, not nan");
        return -1;
    }
    if (!blocking)
        *seconds = 0;
    return 0;
}

static PyObject *lock_acquire_method(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    double seconds;
    int got = read_wait(arguments, keywords, &seconds) < 0 ? -1 : lock_acquire((Lock *)self, seconds);

    return got < 0 ? NULL : PyBool_FromLong(got);
}

static PyObject *lock_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    Lock *lock = (Lock *)self;

    if (lock->is_recursive ? !lock_is_own(lock) : !lock_is_held(lock)) {
        PyErr_Format(PyExc_RuntimeError, "release of a lock that %s",
                     lock->is_recursive ? "this thread does not hold" : "nobody holds");
        return NULL;
    }
    rlock_leave(lock);
    Py_RETURN_NONE;
}

static PyObject *lock_locked(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(lock_is_held((Lock *)self));
}

static PyObject *lock_begin(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (lock_enter((Lock *)self) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *lock_end(PyObject *self, PyObject *const *Py_UNUSED(arguments), Py_ssize_t Py_UNUSED(count))
{
    return lock_release(self, NULL);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))lock_acquire_method, METH_VARARGS | METH_KEYWORDS,
     "As that of threading.Lock."},
    {"release", lock_release, METH_NOARGS, "As that of threading.Lock."},
    {"locked", lock_locked, METH_NOARGS, "As that of threading.Lock."},
    {"__enter__", lock_begin, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lock_end, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef lock_members[] = {
    {"_waiters", T_INT, offsetof(Lock, gate.waiters), READONLY, "How many threads wait for it."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot lock_slots[] = {
    {Py_tp_doc, "A lock as threading.Lock, which C code can take too."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, free_object},
    {Py_tp_methods, lock_methods},
    {Py_tp_members, lock_members},
    {0, NULL},
};

static PyType_Spec lock_spec = {"ndpy._core.Lock", sizeof(Lock), 0, Py_TPFLAGS_DEFAULT, lock_slots};

/* ---- RLock ---- */

Lock *rlock_new(void)
{
    Lock *lock = (Lock *)PyType_GenericAlloc(rlock_type, 0);

    if (lock)
        lock->is_recursive = 1;
    return lock;
}

static PyObject *rlock_make(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(arguments),
                            PyObject *Py_UNUSED(keywords))
{
    return (PyObject *)rlock_new();
}

static PyType_Slot rlock_slots[] = {
    {Py_tp_doc, "A lock as threading.RLock, which C code can take too."},
    {Py_tp_new, rlock_make},
    {Py_tp_dealloc, free_object},
    {Py_tp_methods, lock_methods},
    {Py_tp_members, lock_members},
    {0, NULL},
};

static PyType_Spec rlock_spec = {"ndpy._core.RLock", sizeof(Lock), 0, Py_TPFLAGS_DEFAULT, rlock_slots};

/* ---- the module ---- */

int add_locks(PyObject *module)
{
    monotonic = imported("time", "monotonic");
    if (!monotonic)
        return -1;
    lock_type = add_type(module, &lock_spec);
    rlock_type = add_type(module, &rlock_spec);
    return lock_type && rlock_type ? 0 : -1;
}
