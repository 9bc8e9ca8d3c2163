/* The polls of a completion queue that return a list of Completions.

   A poll holds the interpreter's lock and the queue's lock during the provider's call. */

#include "completion_queue.h"

/* What a provider's poll() has returned: `got` entries, or minus an errno. */
struct taken {
    int got;
    uint32_t alike;
    struct ndpy_completion entries[BATCH];
};

/* Adds objects to a list, which is made if there is none. Steals their references. Returns 0, or -1 with an error. */
static int extend(PyObject **list, PyObject **objects, Py_ssize_t count)
{
    int result = 0;

    if (!*list) {
        *list = PyList_New(count);
        if (*list) {
            for (Py_ssize_t place = 0; place < count; place++)
                PyList_SetItem(*list, place, objects[place]);
            return 0;
        }
        while (count--)
            Py_DECREF(objects[count]);
        return -1;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        if (PyList_Append(*list, objects[place]) < 0)
            result = -1;
        Py_DECREF(objects[place]);
    }
    return result;
}

/* Makes what the program gets for some completions. Returns how many objects that are. */
static Py_ssize_t collect_entries(CompletionQueue *self, const struct ndpy_completion *entries, int got,
                                  PyObject **found, PyObject **failed, struct failure *failure)
{
    struct run run = {0};
    Py_ssize_t count = 0;

    if (got == 1) {
        Posted *posted = retire_one(self, entries);

        if (posted) {
            found[0] = completion_new(entries, (PyObject *)posted);
            if (found[0])
                return 1;
            note_failure(failure);
            return 0;
        }
    }
    for (int number = 0; number < got; number++) {
        const struct ndpy_completion *entry = &entries[number];
        struct ndpy_completion opened;
        PyObject *details = NULL;

        if (entry->flags & NDPY_DETAILED) {
            details = open_details(entry, &opened, failure);
            entry = &opened;
        }
        if (!join_run(self, &run, entry)) {
            found[count] = collect_one(self, entry, failed, failure);
        } else if (entry->flags & NDPY_INTERNAL) {
            continue;
        } else {
            found[count] = completion_new(entry, (PyObject *)run.posted);
            if (!found[count])
                note_failure(failure);
        }
        if (found[count])
            ((Completion *)found[count++])->details = details;
        else
            Py_XDECREF(details);
    }
    end_run(&run);
    return count;
}

HOT uint32_t room_for(size_t wanted)
{
    return wanted < BATCH ? (uint32_t)wanted : BATCH;
}

/* Takes up to `room` completions from the provider. Called with the lock. */
HOT void take(CompletionQueue *self, struct taken *taken, uint32_t room)
{
    taken->got = self->provider->poll(self->native, taken->entries, room, &taken->alike);
}

/* Adds what the program gets for them to a list, which is made if there is none. Returns how many objects that are, or
   -1 with an error. */
static Py_ssize_t collect(CompletionQueue *self, struct taken *taken, PyObject **completions, PyObject **failed)
{
    struct failure failure = {NULL, NULL, NULL};
    PyObject *found[BATCH];
    Py_ssize_t count;

    if (taken->got < 0)
        return raise_poll_error(self, taken->got);
    count = collect_entries(self, taken->entries, taken->got, found, failed, &failure);
    self->taken += count;
    if (extend(completions, found, count) < 0)
        note_failure(&failure);
    return raise_noted(&failure) < 0 ? -1 : count;
}

/* Goes on after a take() of up to `room` of `wanted` completions. Returns 0, or -1 with an error. */
static int collect_all(CompletionQueue *self, struct taken *taken, size_t wanted, uint32_t room, PyObject **completions,
                       PyObject **failed)
{
    for (;;) {
        Py_ssize_t count = collect(self, taken, completions, failed);

        if (count < 0)
            return -1;
        wanted -= (size_t)count;
        if ((uint32_t)taken->got < room || !wanted)
            return 0;
        room = room_for(wanted);
        take(self, taken, room);
    }
}

PyObject *take_kept(CompletionQueue *self, Py_ssize_t wanted)
{
    PyObject *taken = PyList_GetSlice(self->kept, 0, wanted);

    if (!taken)
        return NULL;
    if (PyList_Size(taken) == PyList_Size(self->kept)) {
        Py_CLEAR(self->kept);
    } else if (PyList_SetSlice(self->kept, 0, wanted, NULL) < 0) {
        Py_DECREF(taken);
        return NULL;
    }
    return taken;
}

void keep(CompletionQueue *self, PyObject *completions)
{
    struct failure failure = {NULL, NULL, NULL};

    note_failure(&failure);
    /* Another Ctrl-C must not lose them. */
    while (lock_enter(self->lock) < 0)
        PyErr_Clear();
    if (!self->kept) {
        if (PyList_Size(completions))
            self->kept = Py_NewRef(completions);
    } else if (PyList_SetSlice(self->kept, PyList_Size(self->kept), PyList_Size(self->kept), completions) < 0) {
        PyErr_Clear();
    }
    lock_leave(self->lock);
    Py_DECREF(completions);
    PyErr_Restore(failure.type, failure.value, failure.traceback);
}

/* ---- looking again and again ---- */

int spin(CompletionQueue *self, struct ndpy_completion *entries, uint32_t room, double seconds)
{
    const volatile int *waiters = lock_waiters(self->lock);
    const struct ndpy_provider *provider = self->provider;
    struct ndpy_completion_queue *native = self->native;
    int got;

    Py_BEGIN_ALLOW_THREADS got = provider->spin(native, entries, room, waiters, (uint64_t)(seconds * 1e9));
    Py_END_ALLOW_THREADS return got;
}

/* Spins for the completions of a poll that found none. Returns 0, or -1 with an error. Called with the lock. */
static int collect_spinning(CompletionQueue *self, size_t wanted, double seconds, PyObject **completions,
                            PyObject **failed)
{
    struct ndpy_completion entries[BATCH];
    struct failure failure = {NULL, NULL, NULL};
    PyObject *found[BATCH];
    Py_ssize_t count = 0;

    while (seconds > 0 && !count && is_usable(self->failure) && !*lock_waiters(self->lock)) {
        double slice = seconds < LONGEST_SPIN_S ? seconds : LONGEST_SPIN_S, began = monotonic_now();
        int got = began < 0 ? 0 : spin(self, entries, room_for(wanted), slice);

        if (began < 0)
            return -1;
        if (got < 0)
            return raise_poll_error(self, got);
        count = collect_entries(self, entries, got, found, failed, &failure);
        self->taken += count;
        seconds -= monotonic_now() - began;
        if (!failure.type && PyErr_CheckSignals() < 0)
            note_failure(&failure);
        if (failure.type)
            break;
    }
    if (count) {
        Py_CLEAR(*completions);
        if (extend(completions, found, count) < 0)
            note_failure(&failure);
    }
    return raise_noted(&failure);
}

/* Goes on after the first take() of a poll, with the completions that it has already. Returns a list, or NULL with an
   error. Called with the lock, which it gives back. */
static PyObject *poll_on(CompletionQueue *self, struct taken *taken, size_t wanted, uint32_t room, double spin_s,
                         PyObject *completions)
{
    PyObject *failed = NULL;
    int result = collect_all(self, taken, wanted, room, &completions, &failed);

    if (spin_s > 0 && result == 0 && wanted && PyList_Size(completions) == 0)
        result = collect_spinning(self, wanted, spin_s, &completions, &failed);
    lock_leave(self->lock);
    if (result == 0)
        result = tell_of_failures(self, failed);
    else
        Py_XDECREF(failed);
    if (result == 0 && wanted && PyList_Size(completions) == 0 && !is_usable(self->failure)) {
        Py_DECREF(completions);
        return raise_failure(self);
    }
    if (result == 0)
        return completions;
    if (completions)
        keep(self, completions);
    return NULL;
}

/* Begins with the completions that were kept. Called with the lock, which it gives back. */
static PyObject *poll_kept(CompletionQueue *self, size_t wanted, double spin_s)
{
    struct taken taken = {.got = 0};
    PyObject *completions = self->kept ? take_kept(self, (Py_ssize_t)wanted) : NULL;
    uint32_t room;

    if (PyErr_Occurred()) {
        lock_leave(self->lock);
        return NULL;
    }
    if (completions)
        wanted -= (size_t)PyList_Size(completions);
    room = room_for(wanted);
    if (room)
        take(self, &taken, room);
    return poll_on(self, &taken, wanted, room, spin_s, completions);
}

/* Takes successes of one queue pair in the usual case. Called with the lock, which it gives back. */
APART PyObject *poll_found(CompletionQueue *self, struct taken *taken, size_t wanted, uint32_t room, double spin_s)
{
    int is_all = (uint32_t)taken->got < room || taken->got == (int)wanted;
    Posted *posted = is_all ? retire(self, taken->entries, taken->got, taken->alike) : NULL;
    PyObject *completions;

    if (!posted)
        return poll_on(self, taken, wanted, room, spin_s, NULL);
    Py_INCREF((PyObject *)posted);
    self->taken += taken->got;
    lock_leave(self->lock);
    if (taken->got == 1)
        completions = list_with(self, taken->entries, 1, (PyObject *)posted);
    else
        completions = list_with(self, taken->entries, taken->got, (PyObject *)posted);
    Py_DECREF((PyObject *)posted);
    return completions;
}

HOT PyObject *poll_now(CompletionQueue *self, size_t wanted, double spin_s)
{
    uint32_t room = room_for(wanted);
    struct taken taken;

    take(self, &taken, room);
    if (taken.got || spin_s > 0)
        return poll_found(self, &taken, wanted, room, spin_s);
    lock_leave(self->lock);
    return is_usable(self->failure) ? list_without(self) : raise_failure(self);
}

static PyObject *argument_names[2];

/* Reads the arguments of poll(). Returns 0, or -1 with an error. */
static int read_arguments(PyObject *const *arguments, Py_ssize_t count, PyObject *keywords, Py_ssize_t *wanted,
                          double *spin_s)
{
    PyObject *given[2] = {NULL};

    if (count == 1 && !keywords)
        given[0] = arguments[0];
    else if (sort_arguments("poll", arguments, count, keywords, argument_names, 1, 2, given) < 0)
        return -1;
    if (given[1] && read_seconds(given[1], "spin_s", spin_s) < 0)
        return -1;
    if (given[0])
        *wanted = PyLong_AsSsize_t(given[0]);
    return *wanted == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *poll_with(CompletionQueue *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    Py_ssize_t wanted = BATCH;
    double spin_s = 0;

    if (read_arguments(arguments, count, keywords, &wanted, &spin_s) < 0 || enter(self) < 0)
        return NULL;
    if (wanted > (Py_ssize_t)self->depth + SLACK)
        wanted = (Py_ssize_t)self->depth + SLACK;
    if (self->kept || wanted <= 0)
        return poll_kept(self, wanted < 0 ? 0 : (size_t)wanted, spin_s);
    return poll_now(self, (size_t)wanted, spin_s);
}

PyObject *queue_poll(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    CompletionQueue *self = (CompletionQueue *)object;

    if (count || keywords)
        return poll_with(self, arguments, count, keywords);
    if (enter(self) < 0)
        return NULL;
    return self->kept ? poll_kept(self, BATCH, 0) : poll_now(self, BATCH, 0);
}

PyObject *queue_collect_internal(PyObject *object, PyObject *Py_UNUSED(none))
{
    CompletionQueue *self = (CompletionQueue *)object;
    PyObject *nothing = NULL, *failed = PyList_New(0);
    struct taken taken = {.got = failed ? BATCH : 0};

    while (taken.got == BATCH) {
        taken.got = self->provider->poll_internal(self->native, taken.entries, BATCH);
        if (collect(self, &taken, &nothing, &failed) < 0)
            Py_CLEAR(failed);
        if (!failed)
            break;
    }
    Py_XDECREF(nothing);
    return failed;
}

int prepare_polling(void)
{
    argument_names[0] = interned("max_entries");
    argument_names[1] = interned("spin_s");
    return argument_names[0] && argument_names[1] ? 0 : -1;
}
