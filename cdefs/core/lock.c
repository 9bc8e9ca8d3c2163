/* A lock that C and Python code share. C takes a free one in a few instructions. */

#include "core.h"

PyTypeObject *lock_type;

/* Returns 1 with the lock, 0 at the deadline, -1 if a signal handler raised. */
static int acquire(Lock *lock, PY_TIMEOUT_T microseconds)
{
    PyLockStatus status = PyThread_acquire_lock_timed(lock->native, 0, 0);

    while (status != PY_LOCK_ACQUIRED && microseconds) {
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(lock->native, microseconds, 1);
        Py_END_ALLOW_THREADS
        if (status != PY_LOCK_INTR) break;
        if (Py_MakePendingCalls() < 0) return -1;
    }
    if (status != PY_LOCK_ACQUIRED) return 0;
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
    lock->native = PyThread_allocate_lock();
    if (!lock->native) {
        Py_DECREF(lock);
        return PyErr_NoMemory();
    }
    return (PyObject *)lock;
}

static void lock_dealloc(PyObject *self)
{
    Lock *lock = (Lock *)self;

    if (lock->native) {
        if (lock->held) PyThread_release_lock(lock->native);
        PyThread_free_lock(lock->native);
    }
    free_object(self);
}

static PyObject *lock_acquire(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1, got;
    double timeout = -1;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|pd:acquire", names, &blocking, &timeout)) return NULL;
    got = acquire((Lock *)self, !blocking ? 0 : timeout < 0 ? -1 : (PY_TIMEOUT_T)(timeout * 1e6));
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
    if (lock_wait(self) < 0) return NULL;
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
    lock_type = add_type(module, &lock_spec);
    return lock_type ? 0 : -1;
}
