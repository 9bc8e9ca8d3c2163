/* The part of a queue pair and of a completion queue that says whether a call may go on. */

#include "core.h"

/* Called in a section of the object. */
static void update(Guarded *self)
{
    self->is_ready = is_usable(self->defunct) && self->lock && self->native;
}

void guarded_attach(Guarded *self, void *native)
{
    BEGIN_SECTION((PyObject *)self)
    self->native = native;
    update(self);
    END_SECTION()
}

int guarded_lock(Guarded *self)
{
    Lock *lock = self->lock;
    int got;

    if (!lock) {
        PyErr_SetString(PyExc_RuntimeError, "the object has no lock yet");
        return -1;
    }
    Py_INCREF((PyObject *)lock);
    got = lock_enter(lock);
    Py_DECREF((PyObject *)lock);
    return got;
}

int guarded_wait(Guarded *self)
{
    if (guarded_lock(self) < 0)
        return -1;
    if (self->is_ready)
        return 0;
    lock_leave(self->lock);
    if (is_usable(self->defunct))
        PyErr_SetString(PyExc_RuntimeError, "the native object does not exist yet");
    else
        raise_defunct((PyObject *)self, &self->defunct);
    return -1;
}

/* ---- fields ---- */

int guarded_set_defunct(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    PyObject *former;

    BEGIN_SECTION(self)
    former = ((Guarded *)self)->defunct;
    ((Guarded *)self)->defunct = Py_XNewRef(value);
    update((Guarded *)self);
    END_SECTION()
    Py_XDECREF(former);
    return 0;
}

PyObject *guarded_get_lock(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *lock;

    BEGIN_SECTION(self)
    lock = Py_XNewRef((PyObject *)((Guarded *)self)->lock);
    END_SECTION()
    if (!lock)
        PyErr_SetString(PyExc_AttributeError, "_lock");
    return lock;
}

int guarded_set_lock(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    PyObject *former;

    if (!value || Py_TYPE(value) != lock_type) {
        PyErr_SetString(PyExc_TypeError, "the lock is not an ndpy._core.Lock");
        return -1;
    }
    BEGIN_SECTION(self)
    former = (PyObject *)((Guarded *)self)->lock;
    ((Guarded *)self)->lock = (Lock *)Py_NewRef(value);
    update((Guarded *)self);
    END_SECTION()
    Py_XDECREF(former);
    return 0;
}
