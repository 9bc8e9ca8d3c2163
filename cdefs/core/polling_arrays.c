/* The polls of a completion queue that fill a CompletionArray. */

#include "completion_queue.h"
#include "completion_array.h"

HOT void set_entry(CompletionArray *array, uint32_t place, const struct ndpy_completion *entry, PyObject *posted)
{
    if (&array->entries[place] != entry)
        array->entries[place] = *entry;
    array_own(array, posted, place + 1);
}

/* Puts details into an array, unless they are NULL. Steals the reference. Returns 0, or -1 with an error. */
static int set_details(CompletionArray *array, uint32_t place, PyObject *details)
{
    if (!details)
        return 0;
    if (!array->details)
        array->details = PyMem_Calloc((size_t)array->capacity, sizeof *array->details);
    if (!array->details) {
        Py_DECREF(details);
        PyErr_NoMemory();
        return -1;
    }
    array->details[place] = details;
    return 0;
}

/* Puts kept completions into an array. Returns 0, or -1 with an error. */
static int take_kept_into(CompletionQueue *self, CompletionArray *array)
{
    PyObject *taken = take_kept(self, array->capacity);

    if (!taken)
        return -1;
    for (Py_ssize_t place = 0; place < PyList_Size(taken); place++) {
        const Completion *completion = (Completion *)PyList_GetItem(taken, place);

        set_entry(array, (uint32_t)place, &completion->entry, completion->posted);
        if (set_details(array, (uint32_t)place, Py_XNewRef(completion->details)) < 0)
            PyErr_Clear();
    }
    array->count = (uint32_t)PyList_Size(taken);
    Py_DECREF(taken);
    return 0;
}

/* Keeps an array's completions for the next poll, because the present exception ends this one. */
static void keep_array(CompletionQueue *self, CompletionArray *array)
{
    struct failure failure = {NULL, NULL, NULL};
    PyObject *completions;

    note_failure(&failure);
    completions = PyList_New(0);
    for (uint32_t place = 0; completions && place < array->count; place++) {
        PyObject *completion = completion_new(&array->entries[place], array_owner(array, place));

        if (completion && array->details)
            ((Completion *)completion)->details = Py_XNewRef(array->details[place]);
        if (completion)
            PyList_Append(completions, completion);
        Py_XDECREF(completion);
    }
    array_clear(array);
    PyErr_Restore(failure.type, failure.value, failure.traceback);
    if (completions)
        keep(self, completions);
}

/* Sorts out `got` completions that follow those of an array, one by one. Returns 0, or -1 with an error. */
static int collect_each(CompletionQueue *self, CompletionArray *array, uint32_t got, PyObject **failed)
{
    struct failure failure = {NULL, NULL, NULL};
    struct run run = {0};
    uint32_t first = array->count, kept = first;

    for (uint32_t place = first; place < first + got; place++) {
        const struct ndpy_completion *entry = &array->entries[place];
        struct ndpy_completion opened;
        PyObject *details = NULL;
        uint32_t former = kept;

        if (entry->flags & NDPY_DETAILED) {
            details = open_details(entry, &opened, &failure);
            entry = &opened;
        }
        if (!join_run(self, &run, entry)) {
            Completion *completion = (Completion *)collect_one(self, entry, failed, &failure);

            if (completion)
                set_entry(array, kept++, &completion->entry, completion->posted);
            Py_XDECREF((PyObject *)completion);
        } else if (!(entry->flags & NDPY_INTERNAL)) {
            set_entry(array, kept++, entry, (PyObject *)run.posted);
        }
        if (kept == former)
            Py_XDECREF(details);
        else if (set_details(array, former, details) < 0)
            note_failure(&failure);
    }
    end_run(&run);
    array->count = kept;
    self->taken += kept - first;
    return raise_noted(&failure);
}

/* The same, as quickly as they allow. alike: see ndpy_poll(). */
static int collect_array(CompletionQueue *self, CompletionArray *array, int got, uint32_t alike, PyObject **failed)
{
    const struct ndpy_completion *entries = array->entries + array->count;
    Posted *posted = retire(self, entries, got, alike);

    if (got < 0)
        return raise_poll_error(self, got);
    if (!posted)
        return collect_each(self, array, (uint32_t)got, failed);
    array->count += (uint32_t)got;
    array_own(array, (PyObject *)posted, array->count);
    self->taken += got;
    return 0;
}

/* Takes completions into an empty array. Returns 0, or -1 with an error. Called with the lock. */
static int poll_array(CompletionQueue *self, CompletionArray *array, PyObject **failed)
{
    uint32_t alike;
    int got;

    if (self->kept)
        return take_kept_into(self, array);
    got = self->provider->poll(self->native, array->entries, (uint32_t)array->capacity, &alike);
    return collect_array(self, array, got, alike, failed);
}

/* Spins until an array has enough completions. Returns 0, or -1 with an error. Called with the lock. */
static int spin_into(CompletionQueue *self, CompletionArray *array, uint32_t enough, double seconds, PyObject **failed)
{
    while (seconds > 0 && array->count < enough && is_usable(self->failure) && !*lock_waiters(self->lock)) {
        double slice = seconds < LONGEST_SPIN_S ? seconds : LONGEST_SPIN_S, began = monotonic_now();
        int got =
            began < 0 ? 0 : spin(self, array->entries + array->count, (uint32_t)array->capacity - array->count, slice);

        if (began < 0 || collect_array(self, array, got, 0, failed) < 0 || PyErr_CheckSignals() < 0)
            return -1;
        seconds -= monotonic_now() - began;
    }
    return 0;
}

/* Ends a poll_into(). result: 0, or -1 with an error. Called with the lock, which it gives back. */
static PyObject *end_poll_into(CompletionQueue *self, CompletionArray *array, uint32_t enough, double spin_s,
                               int result, PyObject *failed)
{
    uint32_t taken;

    BEGIN_SECTION((PyObject *)array)
    if (spin_s > 0 && result == 0 && array->count < enough)
        result = spin_into(self, array, enough, spin_s, &failed);
    END_SECTION()
    lock_leave(self->lock);
    if (result == 0)
        result = tell_of_failures(self, failed);
    else
        Py_XDECREF(failed);
    BEGIN_SECTION((PyObject *)array)
    if (result < 0)
        keep_array(self, array);
    taken = array->count;
    array->is_busy = 0;
    END_SECTION()
    if (result < 0)
        return NULL;
    return taken || is_usable(self->failure) ? PyLong_FromUnsignedLong(taken) : raise_failure(self);
}

/* Called with the lock, which it gives back. */
static PyObject *poll_into(CompletionQueue *self, CompletionArray *array, uint32_t enough, double spin_s)
{
    PyObject *failed = NULL;
    int result = 0, is_busy;

    BEGIN_SECTION((PyObject *)array)
    is_busy = array->is_busy;
    if (!is_busy) {
        array->is_busy = 1;
        array_clear(array);
        result = poll_array(self, array, &failed);
    }
    END_SECTION()
    if (is_busy) {
        lock_leave(self->lock);
        PyErr_SetString(PyExc_RuntimeError, "another thread polls into this array");
        return NULL;
    }
    return end_poll_into(self, array, enough, spin_s, result, failed);
}

static PyObject *argument_names[3];

static PyObject *poll_into_with(CompletionQueue *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[3] = {NULL};
    CompletionArray *array;
    Py_ssize_t enough = 1;
    double spin_s = 0;

    if (sort_arguments("poll_into", arguments, count, keywords, argument_names, 1, 3, given) < 0)
        return NULL;
    array = (CompletionArray *)given[0];
    if (!array || Py_TYPE(given[0]) != completion_array_type) {
        PyErr_Format(PyExc_TypeError, "poll_into() takes a CompletionArray, not %R",
                     array ? (PyObject *)Py_TYPE(given[0]) : Py_None);
        return NULL;
    }
    if (given[1])
        enough = PyLong_AsSsize_t(given[1]);
    if (PyErr_Occurred() || (given[2] && read_seconds(given[2], "spin_s", &spin_s) < 0))
        return NULL;
    if (enough > array->capacity) {
        PyErr_Format(PyExc_ValueError, "the array holds %zd completions, and cannot get %zd", array->capacity, enough);
        return NULL;
    }
    if (enter(self) < 0)
        return NULL;
    return poll_into(self, array, enough < 0 ? 0 : (uint32_t)enough, spin_s);
}

PyObject *queue_poll_into(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    CompletionQueue *self = (CompletionQueue *)object;

    if (count != 1 || keywords || Py_TYPE(arguments[0]) != completion_array_type)
        return poll_into_with(self, arguments, count, keywords);
    if (enter(self) < 0)
        return NULL;
    return poll_into(self, (CompletionArray *)arguments[0], 1, 0);
}

int prepare_polling_arrays(void)
{
    argument_names[0] = interned("array");
    argument_names[1] = interned("at_least");
    argument_names[2] = interned("spin_s");
    return argument_names[0] && argument_names[1] && argument_names[2] ? 0 : -1;
}
