/* Taking completions: the base of ndpy/completion_queue.py. A completion of a request that succeeded, or of several with
 * silent ones before it, is handled here. Every other completion goes to _collect_one() in Python.
 *
 * A poll holds the interpreter's lock and the queue's lock during the provider's call.
 */

#include "core.h"

enum { BATCH = 64, SLACK = 64 };

/* native: struct ndpy_completion_queue, from attach() to detach(). posted: a dict of PostedRequests by the number of
   their queue pair. last: the PostedRequests of the last completion, and their number. kept: NULL, or a list of
   completions that a poll took before an exception ended it; the next poll returns them. taken: how many completions
   were taken since creation. */
typedef struct {
    PyObject_HEAD
    PyObject *defunct;
    PyObject *lock;
    PyObject *posted;
    PyObject *last;
    PyObject *kept;
    uint32_t last_number;
    unsigned int depth;
    struct ndpy_completion_queue *native;
    const struct ndpy_provider *provider;
    long long taken;
} CompletionQueue;

typedef int take_function(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count);

static PyObject *argument_names[1];

/* Returns a borrowed reference, or NULL without an error. */
static Posted *posted_of(CompletionQueue *self, uint32_t number)
{
    PyObject *key, *found;

    if (self->last && self->last_number == number) return (Posted *)self->last;
    key = PyLong_FromUnsignedLong(number);
    if (!key) {
        PyErr_Clear();
        return NULL;
    }
    found = PyDict_GetItemWithError(self->posted, key);
    Py_DECREF(key);
    if (!found || !PyObject_TypeCheck(found, posted_type)) {
        PyErr_Clear();
        return NULL;
    }
    Py_XDECREF(self->last);
    self->last = Py_NewRef(found);
    self->last_number = number;
    return (Posted *)found;
}

/* Whether nobody has to be told that a request with this record has ended. */
static int is_plain(PyObject *record)
{
    return record == Py_None || Py_TYPE(record) == element_type || PyList_CheckExact(record);
}

/* Forgets the requests that a completion ends. Returns 0 if that is more than to forget them: then nothing has changed. */
static int retire(const struct ndpy_completion *entry, Posted *posted)
{
    Records *records = (Records *)(entry->operation == NDPY_RECEIVE ? posted->receive : posted->initiator);

    if (entry->retired > records->count) return 0;
    for (size_t place = 0; place < entry->retired; place++) {
        if (!is_plain(records->items[(records->first + place) & (records->capacity - 1)])) return 0;
    }
    for (size_t left = entry->retired; left; left--) Py_DECREF(records_take(records));
    return 1;
}

/* Returns what the program gets, None if that is nothing, or NULL with an error. failed: a list, made when needed. */
static PyObject *collect_one(CompletionQueue *self, const struct ndpy_completion *entry, PyObject **failed)
{
    PyObject *tuple, *completion;

    if (entry->status == NDPY_SUCCESS && !(entry->flags & ~(uint32_t)(NDPY_INTERNAL | NDPY_IMMEDIATE))) {
        Posted *posted = posted_of(self, entry->queue_pair);

        if (posted && PyDict_Size(posted->stored) == 0 && retire(entry, posted)) {
            if (entry->flags & NDPY_INTERNAL) Py_RETURN_NONE;
            return completion_new(entry, (PyObject *)posted);
        }
    }
    if (!*failed) *failed = PyList_New(0);
    tuple = *failed ? entry_to_tuple(entry) : NULL;
    if (!tuple) return NULL;
    completion = PyObject_CallMethod((PyObject *)self, "_collect_one", "OO", tuple, *failed);
    Py_DECREF(tuple);
    return completion;
}

/* An exception, kept while other code runs. */
struct failure {
    PyObject *type, *value, *traceback;
};

/* Notes the present exception. Only the first one counts. */
static void note_failure(struct failure *failure)
{
    if (failure->type)
        PyErr_Clear();
    else
        PyErr_Fetch(&failure->type, &failure->value, &failure->traceback);
}

/* Adds what the program gets for one completion. If that raises, such as because of Ctrl-C, the program still gets the
   completion, as the provider reported it. */
static void add_one(CompletionQueue *self, const struct ndpy_completion *entry, PyObject *completions, PyObject **failed,
    struct failure *failure)
{
    PyObject *completion = collect_one(self, entry, failed);

    if (!completion) {
        Posted *posted;

        note_failure(failure);
        if (entry->flags & (NDPY_INTERNAL | NDPY_FROM_SHARED_QUEUE)) return;
        posted = posted_of(self, entry->queue_pair);
        completion = posted ? completion_new(entry, (PyObject *)posted) : NULL;
    }
    if (completion && completion != Py_None) {
        if (PyList_Append(completions, completion) == 0) self->taken++;
    }
    Py_XDECREF(completion);
    if (PyErr_Occurred()) note_failure(failure);
}

/* Takes up to `wanted` completions, and adds what the program gets to a list. Returns 0, or -1 with an error. Called
   with the lock. */
static int collect(CompletionQueue *self, take_function *take, size_t wanted, PyObject *completions, PyObject **failed)
{
    struct ndpy_completion entries[BATCH];
    struct failure failure = {NULL, NULL, NULL};
    int got;

    do {
        uint32_t room = wanted < BATCH ? (uint32_t)wanted : BATCH;

        got = room ? take(self->native, entries, room) : 0;
        if (got < 0) {
            raise_made(PyObject_CallMethod((PyObject *)self, "_poll_error", "i", -got));
            return -1;
        }
        for (int number = 0; number < got; number++) add_one(self, &entries[number], completions, failed, &failure);
        wanted -= (size_t)got;
        if ((uint32_t)got < room || failure.type) break;
    } while (wanted && got);
    if (!failure.type) return 0;
    PyErr_Restore(failure.type, failure.value, failure.traceback);
    return -1;
}

/* Takes up to `wanted` of the kept completions. Returns a list, or NULL with an error. */
static PyObject *take_kept(CompletionQueue *self, Py_ssize_t wanted)
{
    PyObject *taken = PyList_GetSlice(self->kept, 0, wanted);

    if (!taken) return NULL;
    if (PyList_Size(taken) == PyList_Size(self->kept)) {
        Py_CLEAR(self->kept);
    } else if (PyList_SetSlice(self->kept, 0, wanted, NULL) < 0) {
        Py_DECREF(taken);
        return NULL;
    }
    return taken;
}

/* Keeps completions for the next poll, because the present exception ends this one. Steals the list. */
static void keep(CompletionQueue *self, PyObject *completions)
{
    struct failure failure = {NULL, NULL, NULL};

    note_failure(&failure);
    if (!self->kept) {
        if (PyList_Size(completions)) self->kept = Py_NewRef(completions);
    } else if (PyList_SetSlice(self->kept, PyList_Size(self->kept), PyList_Size(self->kept), completions) < 0) {
        PyErr_Clear();
    }
    Py_DECREF(completions);
    PyErr_Restore(failure.type, failure.value, failure.traceback);
}

static PyObject *queue_poll(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    CompletionQueue *self = (CompletionQueue *)object;
    PyObject *given[1] = {NULL}, *completions, *failed = NULL;
    Py_ssize_t wanted = 64;
    int result;

    if ((count || keywords) && sort_arguments("poll", arguments, count, keywords, argument_names, 1, 1, given) < 0)
        return NULL;
    if (given[0]) {
        wanted = PyLong_AsSsize_t(given[0]);
        if (wanted == -1 && PyErr_Occurred()) return NULL;
    }
    if (lock_enter(self->lock) < 0) return NULL;
    if (!is_usable(self->defunct) || !self->native) {
        lock_leave(self->lock);
        if (!is_usable(self->defunct)) return raise_defunct(self->defunct);
        PyErr_SetString(PyExc_RuntimeError, "the completion queue does not exist yet");
        return NULL;
    }
    if (wanted < 0) wanted = 0;
    if (wanted > (Py_ssize_t)self->depth + SLACK) wanted = (Py_ssize_t)self->depth + SLACK;
    completions = self->kept ? take_kept(self, wanted) : PyList_New(0);
    result = !completions ? -1
                          : collect(self, self->provider->poll, (size_t)(wanted - PyList_Size(completions)), completions,
                                &failed);
    lock_leave(self->lock);
    if (result == 0 && failed && PyList_Size(failed)) {
        PyObject *told = PyObject_CallMethod(object, "_tell_of_failures", "O", failed);

        if (!told) result = -1;
        Py_XDECREF(told);
    }
    Py_XDECREF(failed);
    if (result == 0) return completions;
    if (completions) keep(self, completions);
    return NULL;
}

static PyObject *queue_collect_internal(PyObject *object, PyObject *Py_UNUSED(none))
{
    CompletionQueue *self = (CompletionQueue *)object;
    PyObject *nothing = PyList_New(0), *failed = PyList_New(0);

    if (nothing && failed && collect(self, self->provider->poll_internal, SIZE_MAX, nothing, &failed) < 0)
        Py_CLEAR(failed);
    Py_XDECREF(nothing);
    return failed;
}

static PyObject *queue_attach(PyObject *self, PyObject *arguments)
{
    unsigned long long provider, native;

    if (!PyArg_ParseTuple(arguments, "KK", &provider, &native)) return NULL;
    ((CompletionQueue *)self)->provider = (const struct ndpy_provider *)(uintptr_t)provider;
    ((CompletionQueue *)self)->native = (struct ndpy_completion_queue *)(uintptr_t)native;
    Py_RETURN_NONE;
}

static PyObject *queue_detach(PyObject *self, PyObject *Py_UNUSED(none))
{
    ((CompletionQueue *)self)->native = NULL;
    Py_RETURN_NONE;
}

static int queue_traverse(PyObject *object, visitproc visit, void *arg)
{
    CompletionQueue *self = (CompletionQueue *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->defunct);
    Py_VISIT(self->lock);
    Py_VISIT(self->posted);
    Py_VISIT(self->last);
    Py_VISIT(self->kept);
    return 0;
}

static int queue_clear(PyObject *object)
{
    CompletionQueue *self = (CompletionQueue *)object;

    Py_CLEAR(self->defunct);
    Py_CLEAR(self->lock);
    Py_CLEAR(self->posted);
    Py_CLEAR(self->last);
    Py_CLEAR(self->kept);
    return 0;
}

static void queue_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    queue_clear(self);
    free_object(self);
}

static PyObject *queue_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    CompletionQueue *self = (CompletionQueue *)PyType_GenericAlloc(type, 0);

    if (self) self->posted = PyDict_New();
    if (self && !self->posted) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyMemberDef queue_members[] = {
    {"_defunct", T_OBJECT, offsetof(CompletionQueue, defunct), 0, NULL},
    {"_lock", T_OBJECT_EX, offsetof(CompletionQueue, lock), 0, NULL},
    {"_posted_requests", T_OBJECT_EX, offsetof(CompletionQueue, posted), READONLY,
        "By the serial number of the queue pair, until its last completion is taken."},
    {"_taken", T_LONGLONG, offsetof(CompletionQueue, taken), READONLY, "How many completions were taken since creation."},
    {"depth", T_UINT, offsetof(CompletionQueue, depth), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(poll_doc,
    "poll($self, max_entries=64)\n--\n\n"
    "Take completions without waiting.\n\n"
    "Parameters:\n"
    "    max_entries: how many to take at most.\n"
    "Returns: the completions, oldest first. If there are fewer than max_entries, the queue was empty.\n"
    "Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).\n");

static PyMethodDef queue_methods[] = {
    {"poll", (PyCFunction)(void (*)(void))queue_poll, METH_FASTCALL | METH_KEYWORDS, poll_doc},
    {"_collect_internal", queue_collect_internal, METH_NOARGS,
        "Take the stored completions before the first one that is for the program. Called with the lock.\n\n"
        "Returns: the PostedRequests of those that failed."},
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
    {Py_tp_methods, queue_methods},
    {0, NULL},
};

static PyType_Spec queue_spec = {"ndpy._core.CompletionQueue", sizeof(CompletionQueue), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, queue_slots};

int add_completion_queues(PyObject *module)
{
    argument_names[0] = interned("max_entries");
    return argument_names[0] && add_type(module, &queue_spec) ? 0 : -1;
}
