/* The part of a queue pair and of a completion queue that says whether a call may go on. */

#include "core.h"

static void update(Guarded *self)
{
    self->is_ready = is_usable(self->defunct) && self->lock && self->native;
}

void guarded_attach(Guarded *self, void *native)
{
    self->native = native;
    update(self);
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
    if (guarded_lock(self) < 0) return -1;
    if (self->is_ready) return 0;
    lock_leave(self->lock);
    if (is_usable(self->defunct))
        PyErr_SetString(PyExc_RuntimeError, "the native object does not exist yet");
    else
        raise_defunct(self->defunct);
    return -1;
}

/* ---- fields ---- */

PyObject *guarded_get_defunct(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *defunct = ((Guarded *)self)->defunct;

    return Py_NewRef(defunct ? defunct : Py_None);
}

int guarded_set_defunct(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    PyObject *former = ((Guarded *)self)->defunct;

    ((Guarded *)self)->defunct = Py_XNewRef(value);
    update((Guarded *)self);
    Py_XDECREF(former);
    return 0;
}

PyObject *guarded_get_lock(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *lock = (PyObject *)((Guarded *)self)->lock;

    if (!lock) PyErr_SetString(PyExc_AttributeError, "_lock");
    return Py_XNewRef(lock);
}

int guarded_set_lock(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    PyObject *former = (PyObject *)((Guarded *)self)->lock;

    if (!value || Py_TYPE(value) != lock_type) {
        PyErr_SetString(PyExc_TypeError, "the lock is not an ndpy._core.Lock");
        return -1;
    }
    ((Guarded *)self)->lock = (Lock *)Py_NewRef(value);
    update((Guarded *)self);
    Py_XDECREF(former);
    return 0;
}
