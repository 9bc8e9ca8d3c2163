/* Locks that C and Python code share. Whether one is held is a field that the interpreter's lock guards, or an atomic one (see lock.h),
   so C takes and leaves a free one in a few instructions. Threads that find it held wait at its gate: they sleep on a lock of the system. Whoever
   leaves wakes one of them, and that one looks again: a third thread may have been quicker. A waiting thread that gives up may
   leave a signal that was meant for it. The next one that waits then looks once too often. */

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

/* Sleeps until somebody wakes it, or for so long. Returns 0, or -1 with an error. */
static int sleep_at(struct gate *gate, PY_TIMEOUT_T microseconds)
{
    PyLockStatus status;

    Py_BEGIN_ALLOW_THREADS
    status = PyThread_acquire_lock_timed(gate->signal, microseconds, 1);
    Py_END_ALLOW_THREADS
    if (status == PY_LOCK_ACQUIRED) gate_take_signal(gate);
    return status == PY_LOCK_INTR ? Py_MakePendingCalls() : 0;
}

int gate_wait(struct gate *gate, double *seconds)
{
    double began, now, sleep_s = *seconds < LONGEST_S ? *seconds : LONGEST_S;

    if (*seconds < 0) return sleep_at(gate, -1) < 0 ? -1 : 1;
    began = monotonic_now();
    if (began < 0 || sleep_at(gate, (PY_TIMEOUT_T)(sleep_s * 1e6) + 1) < 0) return -1;
    now = monotonic_now();
    if (now < 0) return -1;
    *seconds = *seconds > now - began ? *seconds - (now - began) : 0;
    return 1;
}

void gate_wake(struct gate *gate)
{
    if (gate_begin_wake(gate)) PyThread_release_lock(gate->signal);
}

void gate_free(struct gate *gate)
{
    if (gate_is_silent(gate)) PyThread_release_lock(gate->signal);
    if (gate->signal) PyThread_free_lock(gate->signal);
}

/* ---- Lock ---- */

/* As rlock_acquire(). A thread that has the lock would wait for ever: that is an error. */
static int lock_acquire(Lock *lock, double seconds)
{
    int got = 1;

    while (got == 1 && !lock_take(lock)) {
        if (seconds == 0) return 0;
        if (seconds < 0 && lock_is_own(lock)) {
            PyErr_SetString(PyExc_RuntimeError,
                "this call began within another call of the same object, in a finalizer or a signal handler; let the other one end first");
            return -1;
        }
        if (gate_begin_wait(&lock->gate) < 0) return -1;
        if (lock_is_held(lock)) got = gate_wait(&lock->gate, &seconds);
        gate_end_wait(&lock->gate);
    }
    return got;
}

int lock_wait(Lock *lock)
{
    return lock_acquire(lock, -1) == 1 ? 0 : -1;
}

static void lock_dealloc(PyObject *self)
{
    gate_free(&((Lock *)self)->gate);
    free_object(self);
}

static PyObject *lock_acquire_method(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1, got;
    double timeout = -1;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|pd:acquire", names, &blocking, &timeout)) return NULL;
    got = lock_acquire((Lock *)self, blocking ? timeout : 0);
    return got < 0 ? NULL : PyBool_FromLong(got);
}

static PyObject *lock_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (!lock_is_held((Lock *)self)) {
        PyErr_SetString(PyExc_RuntimeError, "release of a lock that nobody holds");
        return NULL;
    }
    lock_leave((Lock *)self);
    Py_RETURN_NONE;
}

static PyObject *lock_locked(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(lock_is_held((Lock *)self));
}

static PyObject *lock_begin(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (lock_enter((Lock *)self) < 0) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *lock_end(PyObject *self, PyObject *const *Py_UNUSED(arguments), Py_ssize_t Py_UNUSED(count))
{
    return lock_release(self, NULL);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))lock_acquire_method, METH_VARARGS | METH_KEYWORDS, "As that of threading.Lock."},
    {"release", lock_release, METH_NOARGS, "As that of threading.Lock."},
    {"locked", lock_locked, METH_NOARGS, "As that of threading.Lock."},
    {"__enter__", lock_begin, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lock_end, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lock_slots[] = {
    {Py_tp_doc, "A lock as threading.Lock, which C code can take too."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, lock_dealloc},
    {Py_tp_methods, lock_methods},
    {0, NULL},
};

static PyType_Spec lock_spec = {"ndpy._core.Lock", sizeof(Lock), 0, Py_TPFLAGS_DEFAULT, lock_slots};

/* ---- RLock ---- */

RLock *rlock_new(void)
{
    RLock *lock = PyObject_New(RLock, rlock_type);

    if (!lock) return NULL;
    lock->gate.signal = NULL;
    lock->gate.waiters = 0;
    lock->gate.is_signaled = 0;
    lock->owner = 0;
    lock->count = 0;
    return lock;
}

static PyObject *rlock_make(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    return (PyObject *)rlock_new();
}

static void rlock_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    gate_free(&((RLock *)self)->gate);
    PyObject_Free(self);
    Py_DECREF(type);
}

int rlock_acquire(RLock *lock, double seconds)
{
    int got = 1;

    while (got == 1 && !rlock_take(lock)) {
        if (seconds == 0) return 0;
        if (gate_begin_wait(&lock->gate) < 0) return -1;
        if (rlock_is_foreign(lock)) got = gate_wait(&lock->gate, &seconds);
        gate_end_wait(&lock->gate);
    }
    return got;
}

static PyObject *rlock_acquire_method(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1, got;
    double timeout = -1;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|pd:acquire", names, &blocking, &timeout)) return NULL;
    got = rlock_acquire((RLock *)self, blocking ? timeout : 0);
    return got < 0 ? NULL : PyBool_FromLong(got);
}

static PyObject *rlock_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    RLock *lock = (RLock *)self;

    if (!rlock_is_own(lock)) {
        PyErr_SetString(PyExc_RuntimeError, "release of a lock that this thread does not hold");
        return NULL;
    }
    rlock_leave(lock);
    Py_RETURN_NONE;
}

static PyObject *rlock_begin(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (rlock_enter((RLock *)self) < 0) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *rlock_end(PyObject *self, PyObject *const *Py_UNUSED(arguments), Py_ssize_t Py_UNUSED(count))
{
    return rlock_release(self, NULL);
}

static PyMethodDef rlock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))rlock_acquire_method, METH_VARARGS | METH_KEYWORDS, "As that of threading.RLock."},
    {"release", rlock_release, METH_NOARGS, "As that of threading.RLock."},
    {"__enter__", rlock_begin, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))rlock_end, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot rlock_slots[] = {
    {Py_tp_doc, "A lock as threading.RLock, which C code can take too."},
    {Py_tp_new, rlock_make},
    {Py_tp_dealloc, rlock_dealloc},
    {Py_tp_methods, rlock_methods},
    {0, NULL},
};

static PyType_Spec rlock_spec = {"ndpy._core.RLock", sizeof(RLock), 0, Py_TPFLAGS_DEFAULT, rlock_slots};

/* ---- the module ---- */

int add_locks(PyObject *module)
{
    PyObject *time = PyImport_ImportModule("time");

    if (!time) return -1;
    monotonic = PyObject_GetAttrString(time, "monotonic");
    Py_DECREF(time);
    if (!monotonic) return -1;
    lock_type = add_type(module, &lock_spec);
    rlock_type = add_type(module, &rlock_spec);
    return lock_type && rlock_type ? 0 : -1;
}
