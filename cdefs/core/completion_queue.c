/* The base of CompletionQueue in ndpy/objects/completion_queue.py: its fields and methods, and what sleeping needs. */

#include "completion_queue.h"

#include <errno.h>
#include <math.h>

/* ---- sleeping ---- */

/* A provider sleeps no longer at once. A longer sleep goes on. */
#define LONGEST_SLEEP_S 86400

/* Puts a waiter that no thread has into _waiters. Returns a reference, or NULL with an error. Called with the lock. */
static PyObject *take_waiter(CompletionQueue *self)
{
    Py_ssize_t last = PyList_Size(self->idle_waiters) - 1;
    PyObject *waiter;

    if (last < 0)
        waiter = PyObject_CallMethod((PyObject *)self, "_native_new_waiter", NULL);
    else
        waiter = Py_XNewRef(PyList_GetItem(self->idle_waiters, last));
    if (last >= 0 && waiter && PyList_SetSlice(self->idle_waiters, last, last + 1, NULL) < 0)
        Py_CLEAR(waiter);
    if (waiter && PyList_Append(self->waiters, waiter) < 0)
        Py_CLEAR(waiter);
    return waiter;
}

/* Asks for a notification. Returns 1 if there are completions already, 0 with a waiter, or -1 with an error. Called
   with the lock. */
static int begin_sleep(CompletionQueue *self, PyObject **waiter)
{
    int stored;

    /* Nothing wakes the waiter of a failed queue. The next poll takes what is left, or raises. */
    if (!is_usable(self->failure))
        return 1;
    stored = self->provider->arm(self->native);
    if (stored < -4096)
        raise_made(PyObject_CallMethod((PyObject *)self, "_arm_error", "i", -4096 - stored));
    else if (stored < 0)
        raise_poll_error(self, stored);
    else if (stored || self->kept)
        return 1;
    else
        *waiter = take_waiter(self);
    return *waiter ? 0 : -1;
}

/* Sleeps until the deadline, a time of monotonic_now(). Returns enum ndpy_woken, 0 at the deadline, or -1 with an
   error. Called without the lock, and with the waiter in _waiters: so close() does not free what this uses. */
static int sleep_on(CompletionQueue *self, int waiter, double deadline)
{
    const struct ndpy_provider *provider = self->provider;
    struct ndpy_completion_queue *native = self->native;

    for (;;) {
        double now = isinf(deadline) ? 0 : monotonic_now(), left_ms = (deadline - now) * 1e3;
        int woken, milliseconds;

        if (now < 0)
            return -1;
        if (left_ms > LONGEST_SLEEP_S * 1e3)
            milliseconds = LONGEST_SLEEP_S * 1000;
        else
            milliseconds = left_ms > 0 ? (int)left_ms + 1 : 0;
        Py_BEGIN_ALLOW_THREADS woken = provider->sleep(native, waiter, milliseconds);
        Py_END_ALLOW_THREADS if (woken == -EINTR)
        {
            if (PyErr_CheckSignals() < 0)
                return -1;
        }
        else if (woken < 0)
        {
            return raise_poll_error(self, woken);
        }
        else if (woken || !milliseconds)
        {
            return woken;
        }
    }
}

/* An arming has one event, so there is seldom another one, and that one ends the next sleep at once. Returns whether
   nobody else has to hear of it. Otherwise nothing has changed. Called with the lock. */
static int take_event_alone(CompletionQueue *self)
{
    if (!self->native || PyList_Size(self->waiters) != 1 || PyDict_Size(self->armed) ||
        (self->pollers && self->pollers != Py_None))
        return 0;
    self->provider->take_event(self->native);
    return 1;
}

/* Takes a lock whatever happens: who has begun has to end. */
static void enter_to_end(Lock *lock, struct failure *failure)
{
    while (lock_enter(lock) < 0)
        note_failure(failure);
}

/* Ends a call of Python code whose value nobody needs. */
static void note_result(PyObject *result, struct failure *failure)
{
    if (!result)
        note_failure(failure);
    Py_XDECREF(result);
}

/* Tells of the event that has ended a sleep, and makes the waiter idle. Called without the lock. */
static void end_sleep(CompletionQueue *self, Lock *lock, PyObject *waiter, int is_notified, struct failure *failure)
{
    Py_ssize_t place;

    enter_to_end(lock, failure);
    if (is_notified && !take_event_alone(self)) {
        lock_leave(lock);
        note_result(PyObject_CallMethod((PyObject *)self, "_on_event", "O", waiter), failure);
        enter_to_end(lock, failure);
    }
    place = PyList_Size(self->waiters);
    while (place && PyList_GetItem(self->waiters, place - 1) != waiter)
        place--;
    if (PyList_Append(self->idle_waiters, waiter) < 0 ||
        (place && PyList_SetSlice(self->waiters, place - 1, place, NULL) < 0))
        note_failure(failure);
    if (self->left && self->left != Py_None)
        note_result(PyObject_CallMethod(self->left, "notify_all", NULL), failure);
    lock_leave(lock);
}

/* Called without the lock. */
static PyObject *queue_native_sleep(PyObject *object, PyObject *until)
{
    CompletionQueue *self = (CompletionQueue *)object;
    double deadline = until == Py_None ? INFINITY : PyFloat_AsDouble(until);
    struct failure failure = {NULL, NULL, NULL};
    PyObject *waiter = NULL;
    int is_ready, woken;
    Lock *lock;

    if (PyErr_Occurred() || enter(self) < 0)
        return NULL;
    lock = (Lock *)Py_NewRef((PyObject *)self->lock);
    is_ready = begin_sleep(self, &waiter);
    lock_leave(lock);
    if (!is_ready) {
        woken = sleep_on(self, (int)PyLong_AsLong(waiter), deadline);
        if (woken < 0)
            note_failure(&failure);
        end_sleep(self, lock, waiter, woken > 0 && woken & NDPY_NOTIFIED, &failure);
        is_ready = raise_noted(&failure) < 0 ? -1 : woken != 0;
    }
    Py_XDECREF(waiter);
    Py_DECREF((PyObject *)lock);
    return is_ready < 0 ? NULL : PyBool_FromLong(is_ready);
}

/* Called without the lock. */
static PyObject *queue_renew(PyObject *object, PyObject *Py_UNUSED(none))
{
    CompletionQueue *self = (CompletionQueue *)object;
    int error;

    if (enter(self) < 0)
        return NULL;
    error = is_usable(self->failure) ? self->provider->renew(self->native) : 0;
    lock_leave(self->lock);
    if (!error)
        Py_RETURN_NONE;
    raise_made(PyObject_CallMethod(object, "_arm_error", "i", error));
    return NULL;
}

static PyObject *queue_attach(PyObject *self, PyObject *arguments)
{
    unsigned long long provider, native;

    if (!PyArg_ParseTuple(arguments, "KK", &provider, &native))
        return NULL;
    ((CompletionQueue *)self)->provider = (const struct ndpy_provider *)(uintptr_t)provider;
    guarded_attach((Guarded *)self, (void *)(uintptr_t)native);
    Py_RETURN_NONE;
}

static PyObject *queue_detach(PyObject *self, PyObject *Py_UNUSED(none))
{
    guarded_attach((Guarded *)self, NULL);
    Py_RETURN_NONE;
}

/* Visits what completions refer to, if nobody else has them. Completions are unknown to the garbage collector. Where a
   bind is outstanding, its record refers to the queue pair, and so to the queue with these completions. */
static int visit_completions(PyObject *list, visitproc visit, void *arg)
{
    if (!list || Py_REFCNT(list) != 1)
        return 0;
    for (Py_ssize_t place = 0; place < PyList_Size(list); place++) {
        PyObject *completion = PyList_GetItem(list, place);

        if (Py_TYPE(completion) == completion_type && Py_REFCNT(completion) == 1)
            Py_VISIT(((Completion *)completion)->posted);
    }
    return 0;
}

static int queue_traverse(PyObject *object, visitproc visit, void *arg)
{
    CompletionQueue *self = (CompletionQueue *)object;
    int stopped = visit_completions(self->kept, visit, arg);

    for (int which = 0; which < 2 && !stopped; which++)
        stopped = visit_completions(self->filled[which], visit, arg);
    if (stopped)
        return stopped;
    Py_VISIT((PyObject *)self->lock);
    Py_VISIT(self->failure);
    Py_VISIT(self->posted);
    Py_VISIT(self->last);
    Py_VISIT(self->kept);
    Py_VISIT(self->empty);
    Py_VISIT(self->filled[0]);
    Py_VISIT(self->filled[1]);
    Py_VISIT(self->waiters);
    Py_VISIT(self->idle_waiters);
    Py_VISIT(self->armed);
    Py_VISIT(self->pollers);
    Py_VISIT(self->left);
    return resource_traverse(object, visit, arg);
}

static int queue_clear(PyObject *object)
{
    CompletionQueue *self = (CompletionQueue *)object;

    Py_CLEAR(self->lock);
    Py_CLEAR(self->failure);
    Py_CLEAR(self->posted);
    Py_CLEAR(self->last);
    Py_CLEAR(self->kept);
    Py_CLEAR(self->empty);
    Py_CLEAR(self->filled[0]);
    Py_CLEAR(self->filled[1]);
    Py_CLEAR(self->waiters);
    Py_CLEAR(self->idle_waiters);
    Py_CLEAR(self->armed);
    Py_CLEAR(self->pollers);
    Py_CLEAR(self->left);
    return resource_clear(object);
}

static void queue_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    queue_clear(self);
    resource_dealloc(self);
}

static PyObject *queue_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    CompletionQueue *self = (CompletionQueue *)resource_new(type, NULL, NULL);

    if (self)
        self->posted = PyDict_New();
    if (self && !self->posted)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMemberDef queue_members[] = {
    {"_failure", T_OBJECT, offsetof(CompletionQueue, failure), 0,
     "None, or a function that makes the exception for a queue that gets no more completions."},
    {"_posted_requests", T_OBJECT_EX, offsetof(CompletionQueue, posted), READONLY,
     "By the serial number of the queue pair, until its last completion is taken."},
    {"depth", T_UINT, offsetof(CompletionQueue, depth), 0, NULL},
    {"_waiters", T_OBJECT_EX, offsetof(CompletionQueue, waiters), 0, "A list of the objects on which threads sleep."},
    {"_idle_waiters", T_OBJECT_EX, offsetof(CompletionQueue, idle_waiters), 0,
     "Those that are free for the next threads."},
    {"_armed", T_OBJECT_EX, offsetof(CompletionQueue, armed), 0,
     "A dict of the Pendings of arm() that have not ended, the oldest first."},
    {"_pollers", T_OBJECT, offsetof(CompletionQueue, pollers), 0, "None before the first one."},
    {"_left", T_OBJECT, offsetof(CompletionQueue, left), 0, "close() waits on it until no thread waits for the queue."},
    {NULL, 0, 0, 0, NULL},
};

static Py_ssize_t kept_count(const CompletionQueue *self)
{
    return self->kept ? PyList_Size(self->kept) : 0;
}

static PyObject *queue_taken(PyObject *self, void *Py_UNUSED(none))
{
    return PyLong_FromLongLong(((CompletionQueue *)self)->taken - kept_count((CompletionQueue *)self));
}

static PyObject *queue_kept(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *kept = ((CompletionQueue *)self)->kept;

    return kept ? PyList_GetSlice(kept, 0, PyList_Size(kept)) : PyList_New(0);
}

static PyGetSetDef queue_properties[] = {
    GUARDED_PROPERTIES,
    {"_taken", queue_taken, NULL, "How many completions the program has got since creation.", NULL},
    {"_kept", queue_kept, NULL,
     "Completions that a poll took before an exception ended it. The next poll returns them.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    poll_doc,
    "poll($self, max_entries=64, *, spin_s=0.0)\n--\n\n"
    "Take completions without sleeping.\n\n"
    "Parameters:\n"
    "    max_entries: how many to take at most.\n"
    "    spin_s: how long to look again and again until there is one. Other threads run meanwhile. It ends early when "
    "another\n"
    "        thread needs the queue.\n"
    "Returns: the completions, oldest first. If there are fewer than max_entries, the queue was empty.\n"
    "Raises:\n"
    "    CompletionQueueOverrunError: more completions arrived than the queue holds, and all those that it kept were "
    "taken.\n"
    "    ClosedError, DeviceRemovedError: the queue was closed, or the adapter has gone.\n"
    "Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).\n");

PyDoc_STRVAR(poll_into_doc, "poll_into($self, array, *, at_least=1, spin_s=0.0)\n--\n\n"
                            "Take completions without sleeping, and allocate nothing for them.\n\n"
                            "Parameters:\n"
                            "    array: a CompletionArray. What it had before is forgotten.\n"
                            "    at_least, spin_s: look again and again, for spin_s seconds at most, until the array "
                            "has at_least. Other threads run\n"
                            "        meanwhile. It ends early when another thread needs the queue.\n"
                            "Raises:\n"
                            "    ValueError: at_least is more than the array holds.\n"
                            "    CompletionQueueOverrunError, ClosedError, DeviceRemovedError: as for poll().\n"
                            "Returns: how many completions the array has now, oldest first. If there are fewer than "
                            "array.capacity, the queue was\n"
                            "    empty.\n"
                            "Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).\n");

static PyMethodDef queue_methods[] = {
    {"poll", (PyCFunction)(void (*)(void))queue_poll, METH_FASTCALL | METH_KEYWORDS, poll_doc},
    {"poll_into", (PyCFunction)(void (*)(void))queue_poll_into, METH_FASTCALL | METH_KEYWORDS, poll_into_doc},
    {"_collect_internal", queue_collect_internal, METH_NOARGS,
     "Take the stored completions before the first one that is for the program. Called with the lock.\n\n"
     "Returns: the PostedRequests of those that failed."},
    {"_native_sleep", queue_native_sleep, METH_O,
     "_native_sleep($self, deadline, /)\n--\n\n"
     "The step of this name, on platforms with channels."},
    {"_renew", queue_renew, METH_NOARGS,
     "_renew($self)\n--\n\n"
     "Take one event of the completion channel, if there is one, and ask for the next one. For a queue of whose "
     "events\n"
     "nobody else has to hear, on platforms with channels.\n\n"
     "Raises: what wait() raises if the queue cannot be armed. Nothing if the queue has failed: the next poll raises."},
    {"_attach", queue_attach, METH_VARARGS,
     "_attach($self, provider, native, /)\n--\n\n"
     "Take completions from this struct ndpy_completion_queue from now on. The addresses are integers."},
    {"_detach", queue_detach, METH_NOARGS, "Forget the struct ndpy_completion_queue, which is freed next."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_doc, "The part of a completion queue that takes completions."},
    {Py_tp_new, queue_new},
    {Py_tp_traverse, queue_traverse},
    {Py_tp_clear, queue_clear},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_members, queue_members},
    {Py_tp_getset, queue_properties},
    {Py_tp_methods, queue_methods},
    {0, NULL},
};

static PyType_Spec queue_spec = {"ndpy._core.CompletionQueue", sizeof(CompletionQueue), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, queue_slots};

int add_completion_queues(PyObject *module)
{
    if (prepare_polling() < 0 || prepare_polling_arrays() < 0)
        return -1;
    return add_resource_type(module, &queue_spec) ? 0 : -1;
}
