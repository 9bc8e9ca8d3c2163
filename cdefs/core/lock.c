/* A lock that C and Python code share. Whether it is held is a flag that the interpreter's lock guards, so C takes and leaves a
   free one in a few instructions. Threads that find it held sleep on a lock of the system. Whoever leaves wakes one of them, and
   that one looks again: a third thread may have been quicker. */

#include "core.h"

/* The system's locks wait no longer than some number that differs by system. */
#define LONGEST_S 3600

PyTypeObject *lock_type;

/* time.monotonic(). */
static PyObject *monotonic;

void lock_wake(Lock *lock)
{
    if (lock->is_signaled) return;
    lock->is_signaled = 1;
    PyThread_release_lock(lock->signal);
}

double monotonic_now(void)
{
    PyObject *time = PyObject_CallObject(monotonic, NULL);
    double seconds = time ? PyFloat_AsDouble(time) : -1;

    Py_XDECREF(time);
    return seconds;
}

/* Sleeps until the lock may be free, or until the deadline. Returns 0, or -1 if a signal handler raised. */
static int sleep_on(Lock *lock, PY_TIMEOUT_T microseconds)
{
    PyLockStatus status;

    lock->waiters++;
    Py_BEGIN_ALLOW_THREADS
    status = PyThread_acquire_lock_timed(lock->signal, microseconds, 1);
    Py_END_ALLOW_THREADS
    lock->waiters--;
    if (status == PY_LOCK_ACQUIRED) lock->is_signaled = 0;
    return status == PY_LOCK_INTR ? Py_MakePendingCalls() : 0;
}

/* Takes the lock. seconds: how long to wait; less than 0 for ever. Returns 1 with the lock, 0 at the deadline, -1 with an
   error. */
static int acquire(Lock *lock, double seconds)
{
    int is_limited = seconds >= 0;
    double deadline = 0, left = seconds;

    if (is_limited && left > 0 && lock->held) {
        deadline = monotonic_now();
        if (deadline < 0) return -1;
        deadline += seconds;
    }
    while (lock->held) {
        double sleep_s = left < LONGEST_S ? left : LONGEST_S;

        if (is_limited && left <= 0) return 0;
        if (sleep_on(lock, is_limited ? (PY_TIMEOUT_T)(sleep_s * 1e6) + 1 : -1) < 0) return -1;
        if (is_limited && lock->held) {
            double time = monotonic_now();

            if (time < 0) return -1;
            left = deadline - time;
        }
    }
    lock->held = 1;
    return 1;
}

int lock_wait(PyObject *lock)
{
    if (!lock || Py_TYPE(lock) != lock_type) {
        PyErr_SetString(PyExc_TypeError, "the lock is not an ndpy._core.Lock");
        return -1;
    }
    return acquire((Lock *)lock, -1) == 1 ? 0 : -1;
}

static PyObject *lock_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    Lock *lock = (Lock *)PyType_GenericAlloc(type, 0);

    if (!lock) return NULL;
    lock->signal = PyThread_allocate_lock();
    if (!lock->signal) {
        Py_DECREF(lock);
        return PyErr_NoMemory();
    }
    PyThread_acquire_lock(lock->signal, NOWAIT_LOCK);
    return (PyObject *)lock;
}

static void lock_dealloc(PyObject *self)
{
    Lock *lock = (Lock *)self;

    if (lock->signal) {
        if (!lock->is_signaled) PyThread_release_lock(lock->signal);
        PyThread_free_lock(lock->signal);
    }
    free_object(self);
}

static PyObject *lock_acquire(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1, got;
    double timeout = -1;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|pd:acquire", names, &blocking, &timeout)) return NULL;
    got = acquire((Lock *)self, !blocking ? 0 : timeout);
    return got < 0 ? NULL : PyBool_FromLong(got);
}

static PyObject *lock_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (!((Lock *)self)->held) {
        PyErr_SetString(PyExc_RuntimeError, "release of a lock that nobody holds");
        return NULL;
    }
    lock_leave(self);
    Py_RETURN_NONE;
}

static PyObject *lock_locked(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(((Lock *)self)->held);
}

static PyObject *lock_begin(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (lock_enter(self) < 0) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *lock_end(PyObject *self, PyObject *const *Py_UNUSED(arguments), Py_ssize_t Py_UNUSED(count))
{
    return lock_release(self, NULL);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))lock_acquire, METH_VARARGS | METH_KEYWORDS, "As that of threading.Lock."},
    {"release", lock_release, METH_NOARGS, "As that of threading.Lock."},
    {"locked", lock_locked, METH_NOARGS, "As that of threading.Lock."},
    {"__enter__", lock_begin, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lock_end, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lock_slots[] = {
    {Py_tp_doc, "A lock as threading.Lock, which C code can take too."},
    {Py_tp_new, lock_new},
    {Py_tp_dealloc, lock_dealloc},
    {Py_tp_methods, lock_methods},
    {0, NULL},
};

static PyType_Spec lock_spec = {"ndpy._core.Lock", sizeof(Lock), 0, Py_TPFLAGS_DEFAULT, lock_slots};

int add_locks(PyObject *module)
{
    PyObject *time = PyImport_ImportModule("time");

    if (!time) return -1;
    monotonic = PyObject_GetAttrString(time, "monotonic");
    Py_DECREF(time);
    lock_type = monotonic ? add_type(module, &lock_spec) : NULL;
    return lock_type ? 0 : -1;
}
