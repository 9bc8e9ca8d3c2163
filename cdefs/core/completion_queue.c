/* Taking completions: the base of ndpy/completion_queue.py. A completion of a request that succeeded, or of several with
 * silent ones before it, is handled here. Every other completion goes to _collect_one() in Python.
 *
 * A poll holds the interpreter's lock and the queue's lock during the provider's call.
 */

#include "core.h"
#include "completion_array.h"

/* RESULT_SIZE: the largest of a provider's results that polls can leave untouched. */
enum { BATCH = 64, SLACK = 64, RESULT_SIZE = 64 };

/* native: a struct ndpy_completion_queue. posted: a dict of PostedRequests by the number of
   their queue pair. last: the PostedRequests of the last completion, and their number. kept: NULL, or a list of
   completions that a poll took before an exception ended it; the next poll returns them. empty, filled: the lists without and
   with up to BATCH completions that polls returned last, or NULL. The next poll returns them again, with the same objects in
   them, if nobody else has them. taken: how many completions were taken since creation, including those that are kept. */
typedef struct {
    GUARDED_HEAD
    PyObject *posted;
    PyObject *last;
    PyObject *kept;
    PyObject *empty;
    PyObject *filled;
    uint32_t last_number;
    unsigned int depth;
    const struct ndpy_provider *provider;
    long long taken;
    PyObject *waiters;
    PyObject *idle_waiters;
    PyObject *armed;
    PyObject *pollers;
    PyObject *left;
    char overrun;
} CompletionQueue;

/* What a provider's call has returned. untouched: see struct ndpy_untouched; its results are in `native`, and the others in
   `entries`. */
struct look {
    int got;
    struct ndpy_untouched untouched;
    uint64_t native[BATCH * RESULT_SIZE / sizeof(uint64_t)];
    struct ndpy_completion entries[BATCH];
};

static PyObject *argument_names[2];

/* Returns a borrowed reference, or NULL without an error. */
HOT Posted *posted_of(CompletionQueue *self, uint32_t number)
{
    PyObject *key, *found;

    if (self->last && self->last_number == number) return (Posted *)self->last;
    key = PyLong_FromUnsignedLong(number);
    if (!key) {
        PyErr_Clear();
        return NULL;
    }
    found = dict_get(self->posted, key);
    Py_DECREF(key);
    if (!found || !PyObject_TypeCheck(found, posted_type)) {
        Py_XDECREF(found);
        PyErr_Clear();
        return NULL;
    }
    Py_XDECREF(self->last);
    self->last = found;
    self->last_number = number;
    return (Posted *)found;
}

/* Whether a completion queue stores completions of its closed queue pair. */
HOT int has_stored(const Posted *posted)
{
    return posted->stored && PyDict_Size(posted->stored);
}

/* Whether nobody has to be told that a request with this record has ended. */
HOT int is_plain(PyObject *record)
{
    return Py_TYPE(record) == posted_list_type || Py_TYPE(record) == element_type || record == Py_None ||
        PyList_CheckExact(record);
}

/* ---- completions of requests that are only forgotten ---- */

/* Completions of one direction of one queue pair, one after the other. Their records go at the end of the run, all at once. next:
   the first record that none of these requests has; left: how many requests of the record before have not ended. */
struct run {
    Posted *posted;
    Records *records;
    uint32_t number;
    uint32_t retired;
    uint32_t left;
    int receives;
    size_t next;
};

/* Forgets the requests of a run. */
HOT void end_run(struct run *run)
{
    Records *records = run->records;

    while (run->retired) {
        struct record *oldest;
        PyObject *ended;

        mutex_lock(&records->mutex);
        oldest = record_oldest(records);
        if (run->retired < oldest->left) {
            oldest->left -= run->retired;
            mutex_unlock(&records->mutex);
            break;
        }
        run->retired -= oldest->left;
        ended = records_take(records);
        mutex_unlock(&records->mutex);
        Py_DECREF(ended);
    }
    Py_XDECREF((PyObject *)run->posted);
    *run = (struct run){0};
}

/* See count_requests(). Called with the records' mutex. */
HOT int count_with_mutex(struct run *run, uint32_t retired)
{
    size_t next = run->next;
    uint32_t left = run->left, remaining = retired;

    while (remaining > left) {
        const struct record *record;

        remaining -= left;
        if (next == run->records->count) return 0;
        record = record_at(run->records, next++);
        if (!is_plain(record->object)) return 0;
        left = record->left;
    }
    run->left = left - remaining;
    run->next = next;
    run->retired += retired;
    return 1;
}

/* Counts the requests that a completion ends. Returns 0 if one of them has to be told: then nothing has changed. */
HOT int count_requests(struct run *run, uint32_t retired)
{
    int counted;

    mutex_lock(&run->records->mutex);
    counted = count_with_mutex(run, retired);
    mutex_unlock(&run->records->mutex);
    return counted;
}

/* Makes a completion part of a run, or of the next one. Returns 0 if it needs more than that: then the run has ended. */
HOT int join_run(CompletionQueue *self, struct run *run, const struct ndpy_completion *entry)
{
    int receives = entry->operation == NDPY_RECEIVE;

    if (entry->status == NDPY_SUCCESS && !(entry->flags & ~(uint32_t)(NDPY_INTERNAL | NDPY_IMMEDIATE))) {
        if (!run->posted || run->number != entry->queue_pair || run->receives != receives) {
            Posted *posted;

            end_run(run);
            posted = posted_of(self, entry->queue_pair);
            if (!posted || has_stored(posted)) return 0;
            run->posted = (Posted *)Py_NewRef((PyObject *)posted);
            run->records = (Records *)(receives ? posted->receive : posted->initiator);
            run->number = entry->queue_pair;
            run->receives = receives;
        }
        if (count_requests(run, entry->retired)) return 1;
    }
    end_run(run);
    return 0;
}

/* ---- the other completions ---- */

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

/* Takes the details out of a completion. Returns their bytes, or NULL if memory is short, which is noted. */
static PyObject *open_details(
    const struct ndpy_completion *entry, struct ndpy_completion *opened, struct failure *failure)
{
    struct ndpy_details *details = (struct ndpy_details *)(uintptr_t)entry->context;
    PyObject *bytes;

    *opened = *entry;
    bytes = PyBytes_FromStringAndSize((const char *)details, sizeof *details);
    if (!bytes) note_failure(failure);
    opened->context = details->context;
    opened->flags &= ~(uint32_t)NDPY_DETAILED;
    free(details);
    return bytes;
}

/* Returns what the program gets for one completion without its details, or NULL. failed: a list, made when needed. If Python code
   raises, such as because of Ctrl-C, the program still gets the completion, as the provider reported it. */
static PyObject *collect_one(
    CompletionQueue *self, const struct ndpy_completion *entry, PyObject **failed, struct failure *failure)
{
    PyObject *tuple, *completion = NULL;

    if (!*failed) *failed = PyList_New(0);
    tuple = *failed ? entry_to_tuple(entry) : NULL;
    if (tuple) completion = PyObject_CallMethod((PyObject *)self, "_collect_one", "OO", tuple, *failed);
    Py_XDECREF(tuple);
    if (!completion) {
        note_failure(failure);
        if (!(entry->flags & (NDPY_INTERNAL | NDPY_FROM_SHARED_QUEUE))) {
            Posted *posted = posted_of(self, entry->queue_pair);

            completion = posted ? completion_new(entry, (PyObject *)posted) : NULL;
            if (PyErr_Occurred()) note_failure(failure);
        }
    } else if (completion == Py_None) {
        Py_CLEAR(completion);
    }
    return completion;
}

/* Adds objects to a list, which is made if there is none. Steals their references. Returns 0, or -1 with an error. */
static int extend(PyObject **list, PyObject **objects, Py_ssize_t count)
{
    int result = 0;

    if (!*list) {
        *list = PyList_New(count);
        if (*list) {
            for (Py_ssize_t place = 0; place < count; place++) PyList_SetItem(*list, place, objects[place]);
            return 0;
        }
        while (count--) Py_DECREF(objects[count]);
        return -1;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        if (PyList_Append(*list, objects[place]) < 0) result = -1;
        Py_DECREF(objects[place]);
    }
    return result;
}

/* Forgets the receives that untouched completions end. Returns their PostedRequests, borrowed. If there is a list, its object is in
   *list, and the caller owns it. NULL if that is more than to forget them: then nothing has changed. */
static Posted *retire_untouched(CompletionQueue *self, const struct ndpy_untouched *untouched, PyObject **list)
{
    Posted *posted = posted_of(self, untouched->queue_pair);
    Records *records = posted ? (Records *)posted->receive : NULL;
    struct record *oldest;

    if (!records || has_stored(posted)) return NULL;
    if (!untouched->list) {
        struct run run = {.records = records};

        if (!count_requests(&run, untouched->count)) return NULL;
        end_run(&run);
        return posted;
    }
    mutex_lock(&records->mutex);
    oldest = records->count ? record_oldest(records) : NULL;
    if (!oldest || Py_TYPE(oldest->object) != posted_list_type || oldest->left < untouched->count ||
        ((PostedList *)oldest->object)->native != untouched->list) {
        posted = NULL;
    } else {
        *list = Py_NewRef(oldest->object);
        oldest->left -= untouched->count;
        /* The caller has the list. */
        if (!oldest->left) Py_DECREF(records_take(records));
    }
    mutex_unlock(&records->mutex);
    return posted;
}

/* Makes the Completions of untouched ones. Returns how many, or -1 if they need more than that. */
static int make_untouched(CompletionQueue *self, const void *results, const struct ndpy_untouched *untouched,
    struct ndpy_completion *entries, PyObject **found, struct failure *failure)
{
    PyObject *list = NULL;
    Posted *posted = retire_untouched(self, untouched, &list);
    int count = 0;

    self->provider->read_results(results, untouched, entries);
    if (!posted) return -1;
    Py_INCREF((PyObject *)posted);
    for (uint32_t place = 0; place < untouched->count; place++) {
        found[count] = completion_new(&entries[place], (PyObject *)posted);
        if (found[count])
            count++;
        else
            note_failure(failure);
    }
    Py_DECREF((PyObject *)posted);
    Py_XDECREF(list);
    return count;
}

/* The records of the work queue that a completion is of. */
HOT Records *records_of(const Posted *posted, const struct ndpy_completion *entry)
{
    return (Records *)(entry->operation == NDPY_RECEIVE ? posted->receive : posted->initiator);
}

/* Finds the record of the only request that a completion ends, if this one only has to be forgotten. posted: of its queue pair.
   Returns NULL otherwise. Called with the records' mutex. */
HOT struct record *find_record(const Posted *posted, const struct ndpy_completion *entry)
{
    const Records *records = records_of(posted, entry);

    if (entry->status | entry->flags || entry->retired != 1 || !records->count ||
        !is_plain(record_oldest(records)->object))
        return NULL;
    return record_oldest(records);
}

/* Ends a request that has this record. Returns the object, which the caller owns, if it was the last one with the record. Called with
   the records' mutex. */
HOT PyObject *end_request(const Posted *posted, const struct ndpy_completion *entry, struct record *record)
{
    if (--record->left) return NULL;
    return records_take(records_of(posted, entry));
}

/* Ends a single request that only has to be forgotten. Returns its PostedRequests, borrowed, or NULL: then nothing has changed. */
HOT Posted *retire_one(CompletionQueue *self, const struct ndpy_completion *entry)
{
    Posted *posted = posted_of(self, entry->queue_pair);
    struct record *record;
    PyObject *ended;

    if (!posted || has_stored(posted)) return NULL;
    mutex_lock(&records_of(posted, entry)->mutex);
    record = find_record(posted, entry);
    ended = record ? end_request(posted, entry, record) : NULL;
    mutex_unlock(&records_of(posted, entry)->mutex);
    if (!record) return NULL;
    Py_XDECREF(ended);
    return posted;
}

/* The same for several requests, if they are of one queue pair and of one operation. */
static Posted *retire_alike(CompletionQueue *self, const struct ndpy_completion *entries, uint32_t count)
{
    uint32_t number = entries->queue_pair, operation = entries->operation, retired = 0, differences = 0;
    struct run run = {0};
    Posted *posted;

    /* Without branches, because this is most of the work. */
    for (uint32_t place = 0; place < count; place++) {
        const struct ndpy_completion *entry = &entries[place];

        differences |= entry->status | (entry->flags & ~(uint32_t)NDPY_IMMEDIATE) | (entry->queue_pair ^ number) |
            (entry->operation ^ operation);
        retired += entry->retired;
    }
    posted = differences ? NULL : posted_of(self, number);
    if (!posted || has_stored(posted)) return NULL;
    run.records = (Records *)(operation == NDPY_RECEIVE ? posted->receive : posted->initiator);
    if (!count_requests(&run, retired)) return NULL;
    end_run(&run);
    return posted;
}

/* Makes what the program gets for some completions. Returns how many objects that are. */
static Py_ssize_t collect_entries(CompletionQueue *self, const struct ndpy_completion *entries, int got, PyObject **found,
    PyObject **failed, struct failure *failure)
{
    struct run run = {0};
    Py_ssize_t count = 0;

    if (got == 1) {
        Posted *posted = retire_one(self, entries);

        if (posted) {
            found[0] = completion_new(entries, (PyObject *)posted);
            if (found[0]) return 1;
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
            if (!found[count]) note_failure(failure);
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
HOT void look_for(CompletionQueue *self, struct look *look, uint32_t room)
{
    const struct ndpy_provider *provider = self->provider;

    if (provider->poll_array) {
        look->got = provider->poll_array(self->native, look->native, look->entries, room, &look->untouched);
    } else {
        look->got = provider->poll(self->native, look->entries, room);
        look->untouched.count = 0;
    }
}

/* Adds what the program gets for a look to a list, which is made if there is none. Returns 0, or -1 with an error. */
static int collect(CompletionQueue *self, struct look *look, PyObject **completions, PyObject **failed)
{
    struct failure failure = {NULL, NULL, NULL};
    PyObject *found[BATCH];
    Py_ssize_t count = -1;

    if (look->got < 0) {
        raise_made(PyObject_CallMethod((PyObject *)self, "_poll_error", "i", -look->got));
        return -1;
    }
    if (look->got > 1 && look->untouched.count)
        count = make_untouched(self, look->native, &look->untouched, look->entries, found, &failure);
    if (count < 0) count = collect_entries(self, look->entries, look->got, found, failed, &failure);
    self->taken += count;
    if (extend(completions, found, count) < 0) note_failure(&failure);
    if (!failure.type) return 0;
    PyErr_Restore(failure.type, failure.value, failure.traceback);
    return -1;
}

/* Goes on after a look that took up to `room` of `wanted` completions. Returns 0, or -1 with an error. */
static int collect_all(CompletionQueue *self, struct look *look, size_t wanted, uint32_t room, PyObject **completions,
    PyObject **failed)
{
    for (;;) {
        if (collect(self, look, completions, failed) < 0) return -1;
        wanted -= (uint32_t)look->got;
        if ((uint32_t)look->got < room || !wanted) return 0;
        room = room_for(wanted);
        look_for(self, look, room);
    }
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

/* Keeps completions for the next poll, because the present exception ends this one. Steals the list. Called without the lock. */
static void keep(CompletionQueue *self, PyObject *completions)
{
    struct failure failure = {NULL, NULL, NULL};

    note_failure(&failure);
    /* Another Ctrl-C must not lose them. */
    while (lock_enter(self->lock) < 0) PyErr_Clear();
    if (!self->kept) {
        if (PyList_Size(completions)) self->kept = Py_NewRef(completions);
    } else if (PyList_SetSlice(self->kept, PyList_Size(self->kept), PyList_Size(self->kept), completions) < 0) {
        PyErr_Clear();
    }
    lock_leave(self->lock);
    Py_DECREF(completions);
    PyErr_Restore(failure.type, failure.value, failure.traceback);
}

/* Takes the lock of a queue that can be used. Returns 0, or -1 with an error. */
HOT int enter(CompletionQueue *self)
{
    return guarded_enter((Guarded *)self);
}

/* Tells the queue pairs of failed requests. Gives back the list, which may be NULL. Returns 0, or -1 with an error. */
HOT int tell_of_failures(CompletionQueue *self, PyObject *failed)
{
    int result = 0;

    if (failed && PyList_Size(failed)) {
        PyObject *told = PyObject_CallMethod((PyObject *)self, "_tell_of_failures", "O", failed);

        result = told ? 0 : -1;
        Py_XDECREF(told);
    }
    Py_XDECREF(failed);
    return result;
}

/* ---- looking again and again ---- */

/* No signal handler runs meanwhile. */
#define LONGEST_SPIN_S 0.01

/* Polls with the interpreter's lock free, until there are completions, the time is over, or another thread wants the queue. Returns
   their number, or minus an errno. Called with the lock. */
static int spin(CompletionQueue *self, struct ndpy_completion *entries, uint32_t room, double seconds)
{
    const volatile int *waiters = lock_waiters(self->lock);
    const struct ndpy_provider *provider = self->provider;
    struct ndpy_completion_queue *native = self->native;
    int got;

    Py_BEGIN_ALLOW_THREADS
    got = provider->spin(native, entries, room, waiters, (uint64_t)(seconds * 1e9));
    Py_END_ALLOW_THREADS
    return got;
}

/* Spins for the completions of a poll that found none. Returns 0, or -1 with an error. Called with the lock. */
static int collect_spinning(CompletionQueue *self, size_t wanted, double seconds, PyObject **completions, PyObject **failed)
{
    struct ndpy_completion entries[BATCH];
    struct failure failure = {NULL, NULL, NULL};
    PyObject *found[BATCH];
    Py_ssize_t count = 0;

    while (seconds > 0 && !count && !*lock_waiters(self->lock)) {
        double slice = seconds < LONGEST_SPIN_S ? seconds : LONGEST_SPIN_S, began = monotonic_now();
        int got = began < 0 ? 0 : spin(self, entries, wanted < BATCH ? (uint32_t)wanted : BATCH, slice);

        if (began < 0) return -1;
        if (got < 0) {
            raise_made(PyObject_CallMethod((PyObject *)self, "_poll_error", "i", -got));
            return -1;
        }
        count = collect_entries(self, entries, got, found, failed, &failure);
        self->taken += count;
        seconds -= monotonic_now() - began;
        if (!failure.type && PyErr_CheckSignals() < 0) note_failure(&failure);
        if (failure.type) break;
    }
    if (count) {
        Py_CLEAR(*completions);
        if (extend(completions, found, count) < 0) note_failure(&failure);
    }
    if (!failure.type) return 0;
    PyErr_Restore(failure.type, failure.value, failure.traceback);
    return -1;
}

/* A list that nobody else has any more. */
HOT int is_ours(PyObject *list, Py_ssize_t length)
{
    return HAS_GIL && list && Py_REFCNT(list) == 1 && Py_SIZE(list) == length;
}

/* Returns a list without completions, or NULL with an error. */
HOT PyObject *list_without(CompletionQueue *self)
{
    if (!HAS_GIL) return PyList_New(0);
    if (!is_ours(self->empty, 0)) {
        PyObject *former = self->empty;

        self->empty = PyList_New(0);
        Py_XDECREF(former);
    }
    return Py_XNewRef(self->empty);
}

/* Makes the completions of a list into those of these entries. Returns 0, or -1 with an error. */
HOT int renew_list(PyObject *list, const struct ndpy_completion *entries, Py_ssize_t count, PyObject *posted)
{
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *completion = PyList_GetItem(list, place);

        if (completion && Py_TYPE(completion) == completion_type && Py_REFCNT(completion) == 1) {
            if (completion_renew((Completion *)completion, &entries[place], posted) < 0) return -1;
        } else {
            completion = completion_new(&entries[place], posted);
            if (!completion || PyList_SetItem(list, place, completion) < 0) return -1;
        }
    }
    return 0;
}

/* Makes a new list, for this poll and the next one. Returns NULL with an error. */
APART PyObject *make_list(CompletionQueue *self, const struct ndpy_completion *entries, Py_ssize_t count, PyObject *posted)
{
    PyObject *list;

    /* Freed first, because the new completions are made of those that were freed. */
    Py_CLEAR(self->filled);
    list = PyList_New(count);
    for (Py_ssize_t place = 0; list && place < count; place++) {
        PyObject *completion = completion_new(&entries[place], posted);

        if (completion)
            PyList_SetItem(list, place, completion);
        else
            Py_CLEAR(list);
    }
    if (HAS_GIL && list) {
        PyObject *former = self->filled;

        self->filled = Py_NewRef(list);
        Py_XDECREF(former);
    }
    return list;
}

/* Returns a list with these completions of one queue pair, or NULL with an error. Called without the lock, because what the former
   ones let go may poll again. */
HOT PyObject *list_with(CompletionQueue *self, const struct ndpy_completion *entries, Py_ssize_t count, PyObject *posted)
{
    PyObject *list = self->filled;

    if (!is_ours(list, count)) return make_list(self, entries, count, posted);
    Py_INCREF(list);
    if (renew_list(list, entries, count, posted) == 0) return list;
    Py_DECREF(list);
    return NULL;
}

/* Goes on after the first look of a poll, with the completions that it has already. Returns a list, or NULL with an error. Called
   with the lock, which it gives back. */
static PyObject *poll_on(
    CompletionQueue *self, struct look *look, size_t wanted, uint32_t room, double spin_s, PyObject *completions)
{
    PyObject *failed = NULL;
    int result = collect_all(self, look, wanted, room, &completions, &failed);

    if (spin_s > 0 && result == 0 && wanted && PyList_Size(completions) == 0)
        result = collect_spinning(self, wanted, spin_s, &completions, &failed);
    lock_leave(self->lock);
    if (result == 0)
        result = tell_of_failures(self, failed);
    else
        Py_XDECREF(failed);
    if (result == 0) return completions;
    if (completions) keep(self, completions);
    return NULL;
}

/* Begins with the completions that were kept. Called with the lock, which it gives back. */
static PyObject *poll_kept(CompletionQueue *self, size_t wanted, double spin_s)
{
    struct look look = {.got = 0};
    PyObject *completions = self->kept ? take_kept(self, (Py_ssize_t)wanted) : NULL;
    uint32_t room;

    if (PyErr_Occurred()) {
        lock_leave(self->lock);
        return NULL;
    }
    if (completions) wanted -= (size_t)PyList_Size(completions);
    room = room_for(wanted);
    if (room) look_for(self, &look, room);
    return poll_on(self, &look, wanted, room, spin_s, completions);
}

/* Ends the requests of a look, if these only have to be forgotten. Returns their PostedRequests, borrowed, or NULL: then nothing has
   changed. */
HOT Posted *retire(CompletionQueue *self, struct look *look)
{
    PyObject *list = NULL;
    Posted *posted;

    if (look->got == 1) return retire_one(self, look->entries);
    if (look->got <= 0) return NULL;
    if (!look->untouched.count) return retire_alike(self, look->entries, (uint32_t)look->got);
    posted = retire_untouched(self, &look->untouched, &list);
    if (!posted) return NULL;
    self->provider->read_results(look->native, &look->untouched, look->entries);
    Py_XDECREF(list);
    return posted;
}

/* Takes successes of one queue pair in the usual case. Called with the lock, which it gives back. */
APART PyObject *poll_found(CompletionQueue *self, struct look *look, size_t wanted, uint32_t room, double spin_s)
{
    int is_all = (uint32_t)look->got < room || look->got == (int)wanted;
    Posted *posted = is_all ? retire(self, look) : NULL;
    PyObject *completions;

    if (!posted) return poll_on(self, look, wanted, room, spin_s, NULL);
    Py_INCREF((PyObject *)posted);
    self->taken += look->got;
    lock_leave(self->lock);
    if (look->got == 1)
        completions = list_with(self, look->entries, 1, (PyObject *)posted);
    else
        completions = list_with(self, look->entries, look->got, (PyObject *)posted);
    Py_DECREF((PyObject *)posted);
    return completions;
}

HOT PyObject *poll_now(CompletionQueue *self, size_t wanted, double spin_s)
{
    uint32_t room = room_for(wanted);
    struct look look;

    look_for(self, &look, room);
    if (look.got || spin_s > 0) return poll_found(self, &look, wanted, room, spin_s);
    lock_leave(self->lock);
    return list_without(self);
}

static PyObject *poll_with(CompletionQueue *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[2] = {NULL};
    Py_ssize_t wanted = BATCH;
    double spin_s = 0;

    if (sort_arguments("poll", arguments, count, keywords, argument_names, 1, 2, given) < 0) return NULL;
    if (given[1]) spin_s = PyFloat_AsDouble(given[1]);
    if (given[0] && !PyErr_Occurred()) wanted = PyLong_AsSsize_t(given[0]);
    if (PyErr_Occurred()) return NULL;
    if (enter(self) < 0) return NULL;
    if (wanted > (Py_ssize_t)self->depth + SLACK) wanted = (Py_ssize_t)self->depth + SLACK;
    if (self->kept || wanted <= 0) return poll_kept(self, wanted < 0 ? 0 : (size_t)wanted, spin_s);
    return poll_now(self, (size_t)wanted, spin_s);
}

static PyObject *queue_poll(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    CompletionQueue *self = (CompletionQueue *)object;

    if (count || keywords) return poll_with(self, arguments, count, keywords);
    if (enter(self) < 0) return NULL;
    return self->kept ? poll_kept(self, BATCH, 0) : poll_now(self, BATCH, 0);
}

/* ---- arrays ---- */

HOT void set_entry(CompletionArray *array, uint32_t place, const struct ndpy_completion *entry, PyObject *posted)
{
    if (&array->entries[place] != entry) array->entries[place] = *entry;
    array_own(array, posted, place + 1);
}

/* Puts details into an array, unless they are NULL. Steals the reference. Returns 0, or -1 with an error. */
static int set_details(CompletionArray *array, uint32_t place, PyObject *details)
{
    if (!details) return 0;
    if (!array->details) array->details = PyMem_Calloc((size_t)array->capacity, sizeof *array->details);
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

    if (!taken) return -1;
    for (Py_ssize_t place = 0; place < PyList_Size(taken); place++) {
        const Completion *completion = (Completion *)PyList_GetItem(taken, place);

        set_entry(array, (uint32_t)place, &completion->entry, completion->posted);
        if (set_details(array, (uint32_t)place, Py_XNewRef(completion->details)) < 0) PyErr_Clear();
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

        if (completion && array->details) ((Completion *)completion)->details = Py_XNewRef(array->details[place]);
        if (completion) PyList_Append(completions, completion);
        Py_XDECREF(completion);
    }
    array_clear(array);
    PyErr_Restore(failure.type, failure.value, failure.traceback);
    if (completions) keep(self, completions);
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

            if (completion) set_entry(array, kept++, &completion->entry, completion->posted);
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
    if (!failure.type) return 0;
    PyErr_Restore(failure.type, failure.value, failure.traceback);
    return -1;
}

/* The same, as quickly as they allow. */
static int collect_array(CompletionQueue *self, CompletionArray *array, uint32_t got, PyObject **failed)
{
    Posted *posted = got ? retire_alike(self, array->entries + array->count, got) : NULL;

    if (!posted) return collect_each(self, array, got, failed);
    array->count += got;
    array_own(array, (PyObject *)posted, array->count);
    self->taken += got;
    return 0;
}

/* Sorts out what a look has taken into an empty array. Returns 0, or -1 with an error. */
static int collect_look(
    CompletionQueue *self, CompletionArray *array, int got, const struct ndpy_untouched *untouched, PyObject **failed)
{
    Posted *posted;

    if (got < 0) {
        raise_made(PyObject_CallMethod((PyObject *)self, "_poll_error", "i", -got));
        return -1;
    }
    if (got < 2 || !untouched->count) return collect_array(self, array, (uint32_t)got, failed);
    posted = retire_untouched(self, untouched, &array->list);
    if (!posted) {
        self->provider->read_results(array->results, untouched, array->entries);
        return collect_array(self, array, (uint32_t)got, failed);
    }
    array->untouched = *untouched;
    array->count = untouched->count;
    array_own(array, (PyObject *)posted, array->count);
    self->taken += array->count;
    if (array->is_exposed) array_read(array);
    return 0;
}

/* Takes completions into an empty array. Returns 0, or -1 with an error. Called with the lock. */
static int poll_array(CompletionQueue *self, CompletionArray *array, PyObject **failed)
{
    const struct ndpy_provider *provider = self->provider;
    struct ndpy_untouched untouched = {.count = 0};
    uint32_t room = (uint32_t)array->capacity;
    int got;

    if (self->kept) return take_kept_into(self, array);
    if (provider->poll_array) {
        if (array->provider != provider && array_prepare(array, provider) < 0) return -1;
        got = provider->poll_array(self->native, array->results, array->entries, room, &untouched);
    } else {
        got = provider->poll(self->native, array->entries, room);
    }
    return collect_look(self, array, got, &untouched, failed);
}

/* Spins until an array has enough completions. Returns 0, or -1 with an error. Called with the lock. */
static int spin_into(CompletionQueue *self, CompletionArray *array, uint32_t enough, double seconds, PyObject **failed)
{
    array_read(array);
    while (seconds > 0 && array->count < enough && !*lock_waiters(self->lock)) {
        double slice = seconds < LONGEST_SPIN_S ? seconds : LONGEST_SPIN_S, began = monotonic_now();
        int got = began < 0 ? 0 : spin(self, array->entries + array->count, (uint32_t)array->capacity - array->count, slice);

        if (began < 0) return -1;
        if (got < 0) {
            raise_made(PyObject_CallMethod((PyObject *)self, "_poll_error", "i", -got));
            return -1;
        }
        if (collect_array(self, array, (uint32_t)got, failed) < 0 || PyErr_CheckSignals() < 0) return -1;
        seconds -= monotonic_now() - began;
    }
    return 0;
}

/* Ends a poll_into(). result: 0, or -1 with an error. Called with the lock, which it gives back. */
static PyObject *end_poll_into(
    CompletionQueue *self, CompletionArray *array, uint32_t enough, double spin_s, int result, PyObject *failed)
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
    else if (HAS_GIL && array->count == 1 && !array->list && !array->details)
        array->single = array->owners[0].posted;
    taken = array->count;
    array->is_busy = 0;
    END_SECTION()
    return result == 0 ? PyLong_FromUnsignedLong(taken) : NULL;
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

/* Goes on after a look that took more than one success in the usual case. Called with the lock, which it gives back, and with the
   interpreter's lock. */
APART PyObject *poll_into_on(
    CompletionQueue *self, CompletionArray *array, int got, const struct ndpy_untouched *untouched)
{
    PyObject *failed = NULL;
    int result;

    array->is_busy = 1;
    array_clear(array);
    result = collect_look(self, array, got, untouched, &failed);
    return end_poll_into(self, array, 1, 0, result, failed);
}

/* The integer 1. */
static PyObject *one;

static PyObject *array_argument_names[3];

static PyObject *poll_into_with(CompletionQueue *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[3] = {NULL};
    CompletionArray *array;
    Py_ssize_t enough = 1;
    double spin_s = 0;

    if (sort_arguments("poll_into", arguments, count, keywords, array_argument_names, 1, 3, given) < 0) return NULL;
    array = (CompletionArray *)given[0];
    if (!array || Py_TYPE(given[0]) != completion_array_type) {
        PyErr_Format(PyExc_TypeError, "poll_into() takes a CompletionArray, not %R",
            array ? (PyObject *)Py_TYPE(given[0]) : Py_None);
        return NULL;
    }
    if (given[1]) enough = PyLong_AsSsize_t(given[1]);
    if (given[2] && !PyErr_Occurred()) spin_s = PyFloat_AsDouble(given[2]);
    if (PyErr_Occurred()) return NULL;
    if (enough > array->capacity) {
        PyErr_Format(PyExc_ValueError, "the array holds %zd completions, and cannot get %zd", array->capacity, enough);
        return NULL;
    }
    if (enter(self) < 0) return NULL;
    return poll_into(self, array, enough < 0 ? 0 : (uint32_t)enough, spin_s);
}

static PyObject *queue_poll_into(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    CompletionQueue *self = (CompletionQueue *)object;
    struct ndpy_untouched untouched;
    CompletionArray *array;
    struct record *record;
    PyObject *ended;
    Posted *posted;
    int got;

    if (count != 1 || keywords || Py_TYPE(arguments[0]) != completion_array_type)
        return poll_into_with(self, arguments, count, keywords);
    array = (CompletionArray *)arguments[0];
    if (enter(self) < 0) return NULL;
    if (!HAS_GIL || self->kept || array->is_busy || array->provider != self->provider) return poll_into(self, array, 1, 0);
    got = array->provider->poll_array(
        self->native, array->results, array->entries, (uint32_t)array->capacity, &untouched);
    /* The usual case makes no call, so that no registers are saved for it. */
    posted = (Posted *)self->last;
    record = got == 1 && posted && array->single == (PyObject *)posted && array->entries->queue_pair == self->last_number &&
            !posted->stored
        ? find_record(posted, array->entries)
        : NULL;
    if (!record) return poll_into_on(self, array, got, &untouched);
    ended = end_request(posted, array->entries, record);
    self->taken++;
    lock_leave(self->lock);
    Py_XDECREF(ended);
    return Py_NewRef(one);
}

static PyObject *queue_collect_internal(PyObject *object, PyObject *Py_UNUSED(none))
{
    CompletionQueue *self = (CompletionQueue *)object;
    PyObject *nothing = NULL, *failed = PyList_New(0);
    struct look look = {.got = failed ? BATCH : 0};

    while (look.got == BATCH) {
        look.got = self->provider->poll_internal(self->native, look.entries, BATCH);
        if (collect(self, &look, &nothing, &failed) < 0) Py_CLEAR(failed);
        if (!failed) break;
    }
    Py_XDECREF(nothing);
    return failed;
}

/* ---- sleeping ---- */

static int is_empty(PyObject *list)
{
    return list && PyList_Size(list) == 0;
}

/* Moves a waiter to another list. Returns 0, or -1 with an error: then nothing has changed. */
static int move_waiter(PyObject *waiter, PyObject *from, Py_ssize_t place, PyObject *to)
{
    if (PyList_Append(to, waiter) < 0) return -1;
    return PyList_SetSlice(from, place, place + 1, NULL);
}

/* The usual beginning of a sleep. Called without the lock. */
static PyObject *queue_begin_sleep(PyObject *object, PyObject *taken)
{
    CompletionQueue *self = (CompletionQueue *)object;
    PyObject *waiter, *result = NULL;
    Py_ssize_t place;
    int stored;

    if (enter(self) < 0) return NULL;
    if (!self->provider->arm || self->overrun || is_empty(self->idle_waiters)) {
        lock_leave(self->lock);
        Py_RETURN_NONE;
    }
    stored = self->provider->arm(self->native);
    place = PyList_Size(self->idle_waiters) - 1;
    waiter = Py_XNewRef(PyList_GetItem(self->idle_waiters, place));
    if (stored < -4096)
        raise_made(PyObject_CallMethod(object, "_arm_error", "i", -4096 - stored));
    else if (stored < 0)
        raise_made(PyObject_CallMethod(object, "_poll_error", "i", -stored));
    else if (stored || self->kept)
        result = Py_NewRef(Py_True);
    else if (waiter && PyList_Append(taken, waiter) == 0 &&
        move_waiter(waiter, self->idle_waiters, place, self->waiters) == 0)
        result = Py_NewRef(Py_False);
    lock_leave(self->lock);
    Py_XDECREF(waiter);
    return result;
}

/* The usual end of a sleep. Called without the lock. */
static PyObject *queue_end_sleep(PyObject *object, PyObject *waiter)
{
    CompletionQueue *self = (CompletionQueue *)object;
    int is_done = 0;

    if (guarded_lock((Guarded *)self) < 0) return NULL;
    if (self->provider->arm && (!self->left || self->left == Py_None)) {
        Py_ssize_t place = PyList_Size(self->waiters);

        /* Ctrl-C may have come before it was in the list. */
        while (place-- && PyList_GetItem(self->waiters, place) != waiter) continue;
        is_done = move_waiter(waiter, self->waiters, place < 0 ? PY_SSIZE_T_MAX - 1 : place, self->idle_waiters) < 0 ? -1 : 1;
    }
    lock_leave(self->lock);
    return is_done < 0 ? NULL : PyBool_FromLong(is_done);
}

/* Takes the events of a channel for which nobody else waits. Called without the lock. */
static PyObject *queue_take_events_alone(PyObject *object, PyObject *Py_UNUSED(none))
{
    CompletionQueue *self = (CompletionQueue *)object;
    int is_alone;

    if (guarded_lock((Guarded *)self) < 0) return NULL;
    is_alone = self->native && self->provider->take_events && PyList_Size(self->waiters) == 1 &&
        PyDict_Size(self->armed) == 0 && (!self->pollers || self->pollers == Py_None);
    if (is_alone) self->provider->take_events(self->native);
    lock_leave(self->lock);
    return PyBool_FromLong(is_alone);
}

static PyObject *queue_attach(PyObject *self, PyObject *arguments)
{
    unsigned long long provider, native;

    if (!PyArg_ParseTuple(arguments, "KK", &provider, &native)) return NULL;
    ((CompletionQueue *)self)->provider = (const struct ndpy_provider *)(uintptr_t)provider;
    if (((CompletionQueue *)self)->provider->result_size > RESULT_SIZE) {
        PyErr_SetString(PyExc_SystemError, "the provider's results are too long");
        return NULL;
    }
    guarded_attach((Guarded *)self, (void *)(uintptr_t)native);
    Py_RETURN_NONE;
}

static PyObject *queue_detach(PyObject *self, PyObject *Py_UNUSED(none))
{
    guarded_attach((Guarded *)self, NULL);
    Py_RETURN_NONE;
}

static int queue_traverse(PyObject *object, visitproc visit, void *arg)
{
    CompletionQueue *self = (CompletionQueue *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->defunct);
    Py_VISIT((PyObject *)self->lock);
    Py_VISIT(self->posted);
    Py_VISIT(self->last);
    Py_VISIT(self->kept);
    Py_VISIT(self->empty);
    Py_VISIT(self->filled);
    Py_VISIT(self->waiters);
    Py_VISIT(self->idle_waiters);
    Py_VISIT(self->armed);
    Py_VISIT(self->pollers);
    Py_VISIT(self->left);
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
    Py_CLEAR(self->empty);
    Py_CLEAR(self->filled);
    Py_CLEAR(self->waiters);
    Py_CLEAR(self->idle_waiters);
    Py_CLEAR(self->armed);
    Py_CLEAR(self->pollers);
    Py_CLEAR(self->left);
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
    {"_posted_requests", T_OBJECT_EX, offsetof(CompletionQueue, posted), READONLY,
        "By the serial number of the queue pair, until its last completion is taken."},
    {"depth", T_UINT, offsetof(CompletionQueue, depth), 0, NULL},
    {"_waiters", T_OBJECT_EX, offsetof(CompletionQueue, waiters), 0, "A list of what threads sleep on."},
    {"_idle_waiters", T_OBJECT_EX, offsetof(CompletionQueue, idle_waiters), 0, "Those that are free for the next threads."},
    {"_armed", T_OBJECT_EX, offsetof(CompletionQueue, armed), 0,
        "A dict of the Pendings of arm() that have not ended, the oldest first."},
    {"_pollers", T_OBJECT, offsetof(CompletionQueue, pollers), 0, "None before the first one."},
    {"_left", T_OBJECT, offsetof(CompletionQueue, left), 0, "close() waits on it until no thread waits for the queue."},
    {"_overrun", T_BOOL, offsetof(CompletionQueue, overrun), 0, NULL},
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
    {"_kept", queue_kept, NULL, "Completions that a poll took before an exception ended it. The next poll returns them.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(poll_doc,
    "poll($self, max_entries=64, *, spin_s=0.0)\n--\n\n"
    "Take completions without sleeping.\n\n"
    "Parameters:\n"
    "    max_entries: how many to take at most.\n"
    "    spin_s: how long to look again and again until there is one. Other threads run meanwhile. It ends early when another\n"
    "        thread needs the queue.\n"
    "Returns: the completions, oldest first. If there are fewer than max_entries, the queue was empty.\n"
    "Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).\n");

PyDoc_STRVAR(poll_into_doc,
    "poll_into($self, array, *, at_least=1, spin_s=0.0)\n--\n\n"
    "Take completions without sleeping, and allocate nothing for them.\n\n"
    "Parameters:\n"
    "    array: a CompletionArray. What it had before is forgotten.\n"
    "    at_least, spin_s: look again and again, for spin_s seconds at most, until the array has so many. Other threads run\n"
    "        meanwhile. It ends early when another thread needs the queue.\n"
    "Raises:\n"
    "    ValueError: at_least is more than the array holds.\n"
    "Returns: how many completions the array has now, oldest first. If there are fewer than array.capacity, the queue was\n"
    "    empty.\n"
    "Source: IND2CompletionQueue::GetResults; ibv_poll_cq(3).\n");

static PyMethodDef queue_methods[] = {
    {"poll", (PyCFunction)(void (*)(void))queue_poll, METH_FASTCALL | METH_KEYWORDS, poll_doc},
    {"poll_into", (PyCFunction)(void (*)(void))queue_poll_into, METH_FASTCALL | METH_KEYWORDS, poll_into_doc},
    {"_collect_internal", queue_collect_internal, METH_NOARGS,
        "Take the stored completions before the first one that is for the program. Called with the lock.\n\n"
        "Returns: the PostedRequests of those that failed."},
    {"_begin_sleep", queue_begin_sleep, METH_O,
        "_begin_sleep($self, taken, /)\n--\n\n"
        "Ask for a notification that wakes an idle waiter.\n\n"
        "Returns: False, and the waiter is in `taken` and in _waiters. True if there are completions already. None, and nothing\n"
        "    has changed, if this is more than that."},
    {"_end_sleep", queue_end_sleep, METH_O,
        "_end_sleep($self, waiter, /)\n--\n\n"
        "Make a waiter idle again. Returns False, and nothing has changed, if the end is more than that."},
    {"_take_events_alone", queue_take_events_alone, METH_NOARGS,
        "_take_events_alone($self)\n--\n\n"
        "Take the events of the completion channel. Returns False, and nothing has changed, if others have to hear of them."},
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
    argument_names[0] = interned("max_entries");
    argument_names[1] = interned("spin_s");
    array_argument_names[0] = interned("array");
    array_argument_names[1] = interned("at_least");
    array_argument_names[2] = argument_names[1];
    one = PyLong_FromLong(1);
    if (!array_argument_names[0] || !array_argument_names[1] || !one) return -1;
    return argument_names[0] && argument_names[1] && add_type(module, &queue_spec) ? 0 : -1;
}
