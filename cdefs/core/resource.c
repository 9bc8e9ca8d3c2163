/* What closing an object touches beside the object: its lock, its adapter, and the adapter's list of dropped objects.
 * The classes of ndpy/resource.py and ndpy/adapter.py extend these types.
 */

#include "core.h"

PyTypeObject *rlock_type, *orphans_type, *adapter_type;

/* ---- RLock ---- */

RLock *rlock_new(void)
{
    RLock *lock = PyObject_New(RLock, rlock_type);

    if (!lock) return NULL;
    lock->owner = 0;
    lock->count = lock->waiting = 0;
    lock->bell = NULL;
    lock->rung = 0;
    return lock;
}

static PyObject *rlock_make(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    return (PyObject *)rlock_new();
}

static void rlock_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    if (((RLock *)self)->bell) PyThread_free_lock(((RLock *)self)->bell);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Nobody has the bell but a thread that was woken, which takes it at once. */
static int make_bell(RLock *lock)
{
    if (lock->bell) return 0;
    lock->bell = PyThread_allocate_lock();
    if (!lock->bell) {
        PyErr_NoMemory();
        return -1;
    }
    PyThread_acquire_lock(lock->bell, NOWAIT_LOCK);
    return 0;
}

/* A waiting thread that gives up leaves a bell that was rung for it. The next thread that waits looks once too often. */
int rlock_wait(RLock *lock, PY_TIMEOUT_T microseconds)
{
    PyLockStatus status;
    int failed = 0;

    if (make_bell(lock) < 0) return -1;
    lock->waiting++;
    do {
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(lock->bell, microseconds, 1);
        Py_END_ALLOW_THREADS
        if (status == PY_LOCK_ACQUIRED) lock->rung = 0;
        if (status == PY_LOCK_INTR) failed = Py_MakePendingCalls();
    } while (lock->count && status != PY_LOCK_FAILURE && !failed);
    lock->waiting--;
    if (failed) return -1;
    if (lock->count) return 0;
    lock->owner = PyThread_get_thread_ident();
    lock->count = 1;
    return 1;
}

static PyObject *rlock_acquire(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"blocking", "timeout", NULL};
    RLock *lock = (RLock *)self;
    int blocking = 1, got;
    double timeout = -1;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|pd:acquire", names, &blocking, &timeout)) return NULL;
    if (!lock->count || lock->owner == PyThread_get_thread_ident())
        got = rlock_enter(lock) == 0;
    else
        got = blocking ? rlock_wait(lock, timeout < 0 ? -1 : (PY_TIMEOUT_T)(timeout * 1e6)) : 0;
    return got < 0 ? NULL : PyBool_FromLong(got);
}

static PyObject *rlock_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    RLock *lock = (RLock *)self;

    if (!lock->count || lock->owner != PyThread_get_thread_ident()) {
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
    {"acquire", (PyCFunction)(void (*)(void))rlock_acquire, METH_VARARGS | METH_KEYWORDS, "As that of threading.RLock."},
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

/* ---- Orphans ---- */

static int orphans_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Orphans *)self)->dropped);
    return 0;
}

static int orphans_clear(PyObject *self)
{
    Py_CLEAR(((Orphans *)self)->dropped);
    return 0;
}

static void orphans_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    orphans_clear(self);
    free_object(self);
}

static PyMemberDef orphans_members[] = {
    {"_dropped", T_OBJECT, offsetof(Orphans, dropped), 0, NULL},
    {"_is_closing", T_BOOL, offsetof(Orphans, is_closing), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot orphans_slots[] = {
    {Py_tp_doc, "What tells whether an object was dropped without close()."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, orphans_traverse},
    {Py_tp_clear, orphans_clear},
    {Py_tp_dealloc, orphans_dealloc},
    {Py_tp_members, orphans_members},
    {0, NULL},
};

static PyType_Spec orphans_spec = {"ndpy._core.Orphans", sizeof(Orphans), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, orphans_slots};

/* ---- the module ---- */

int add_resources(PyObject *module)
{
    rlock_type = add_type(module, &rlock_spec);
    orphans_type = add_type(module, &orphans_spec);
    return rlock_type && orphans_type ? 0 : -1;
}
