/* What taking completions needs of a completion queue and of the requests that they end. */

#ifndef NDPY_COMPLETION_QUEUE_H
#define NDPY_COMPLETION_QUEUE_H

#include "core.h"

enum { BATCH = 64, SLACK = 64 };

/* native: a struct ndpy_completion_queue. posted: a dict of PostedRequests by the number of their queue pair. last: the
   PostedRequests of the last completion, and their number. kept: NULL, or a list of completions that a poll took before
   an exception ended it; the next poll returns them. empty: the list without completions that a poll returned last, or
   NULL. filled: the last two with up to BATCH completions, the latest first. The next poll returns one of them again,
   with the same objects in it, if nobody else has it. taken: how many completions were taken since creation, including
   those that are kept. failure: None, or a function that makes the exception for a queue that gets no more completions.
   Polls raise it when nothing is left. */
typedef struct {
    GUARDED_HEAD
    PyObject *SHARED failure;
    PyObject *posted;
    PyObject *last;
    PyObject *kept;
    PyObject *empty;
    PyObject *filled[2];
    uint32_t last_number;
    unsigned int depth;
    const struct ndpy_provider *provider;
    long long taken;
    PyObject *waiters;
    PyObject *idle_waiters;
    PyObject *armed;
    PyObject *pollers;
    PyObject *left;
} CompletionQueue;

/* The PostedRequests of a queue pair, borrowed, or NULL without an error. */
HOT Posted *posted_of(CompletionQueue *self, uint32_t number)
{
    PyObject *key, *found;

    if (self->last && self->last_number == number)
        return (Posted *)self->last;
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

/* Whether nobody has to be told that a request with this record has ended. */
HOT int is_plain(PyObject *record)
{
    return Py_TYPE(record) == batch_list_type || Py_TYPE(record) == element_type || record == Py_None ||
           PyList_CheckExact(record);
}

/* ---- completions of requests that are only forgotten ---- */

/* Completions of one direction of one queue pair, one after the other. Their records go at the end of the run, all at
   once. next: the first record that none of these requests has; left: how many requests of the record before have not
   ended. */
struct run {
    Posted *posted;
    struct records *records;
    uint32_t number;
    uint32_t retired;
    uint32_t left;
    int receives;
    size_t next;
};

/* Forgets the requests of a run. */
HOT void end_run(struct run *run)
{
    struct records *records = run->records;

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
        if (next == run->records->count)
            return 0;
        record = record_at(run->records, next++);
        if (!is_plain(record->object))
            return 0;
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

/* Makes a completion part of a run, or of the next one. Returns 0 if it needs more than that: then the run has ended.
 */
HOT int join_run(CompletionQueue *self, struct run *run, const struct ndpy_completion *entry)
{
    int receives = entry->operation == NDPY_RECEIVE;

    if (entry->status == NDPY_SUCCESS && !(entry->flags & ~(uint32_t)(NDPY_INTERNAL | NDPY_IMMEDIATE))) {
        if (!run->posted || run->number != entry->queue_pair || run->receives != receives) {
            Posted *posted;

            end_run(run);
            posted = posted_of(self, entry->queue_pair);
            if (!posted || posted->watched)
                return 0;
            run->posted = (Posted *)Py_NewRef((PyObject *)posted);
            run->records = records_of(posted, entry->operation);
            run->number = entry->queue_pair;
            run->receives = receives;
        }
        if (count_requests(run, entry->retired))
            return 1;
    }
    end_run(run);
    return 0;
}

/* ---- single requests ---- */

/* Finds the record of the only request that a completion ends, if this one only has to be forgotten. records: of its
   queue. Returns NULL otherwise. Called with the records' mutex. */
HOT struct record *find_record(const struct records *records, const struct ndpy_completion *entry)
{
    if (entry->status | entry->flags || entry->retired != 1 || !records->count ||
        !is_plain(record_oldest(records)->object))
        return NULL;
    return record_oldest(records);
}

/* Ends a request that has this record. Returns the object, which the caller owns, if it was the last one with the
   record. Called with the records' mutex. */
HOT PyObject *end_request(struct records *records, struct record *record)
{
    return --record->left ? NULL : records_take(records);
}

/* Ends a single request that only has to be forgotten. Returns its PostedRequests, borrowed, or NULL: then nothing has
 * changed. */
HOT Posted *retire_one(CompletionQueue *self, const struct ndpy_completion *entry)
{
    Posted *posted = posted_of(self, entry->queue_pair);
    struct records *records;
    struct record *record;
    PyObject *ended;

    if (!posted || posted->watched)
        return NULL;
    records = records_of(posted, entry->operation);
    mutex_lock(&records->mutex);
    record = find_record(records, entry);
    ended = record ? end_request(records, record) : NULL;
    mutex_unlock(&records->mutex);
    if (!record)
        return NULL;
    Py_XDECREF(ended);
    return posted;
}

/* ---- the lock, and failures ---- */

/* Takes the lock of a queue that can be used. Returns 0, or -1 with an error. */
HOT int enter(CompletionQueue *self)
{
    return guarded_enter((Guarded *)self);
}

/* Raises why the queue gets no more completions. Returns NULL. Called without the lock. */
HOT PyObject *raise_failure(CompletionQueue *self)
{
    return raise_defunct((PyObject *)self, &self->failure);
}

/* Tells the queue pairs of failed requests. Gives back the list, which may be NULL. Returns 0, or -1 with an error. */
HOT int tell_of_failures(CompletionQueue *self, PyObject *failed)
{
    int result = 0;

    if (failed && PyList_Size(failed)) {
        PyObject *told = PyObject_CallMethod((PyObject *)self, "_tell_of_news", "O", failed);

        result = told ? 0 : -1;
        Py_XDECREF(told);
    }
    Py_XDECREF(failed);
    return result;
}

/* ---- endings.c ---- */

/* An exception, kept while other code runs. */
struct failure {
    PyObject *type, *value, *traceback;
};

/* Notes the present exception. Only the first one counts. */
void note_failure(struct failure *failure);
/* Raises what was noted. Returns 0 if that is nothing, or -1 with it. */
int raise_noted(struct failure *failure);
/* Raises what the provider's poll() has returned, minus an errno. Returns -1. */
int raise_poll_error(CompletionQueue *self, int got);
/* Takes the details out of a completion. Returns their bytes, or NULL if memory is short, which is noted. */
PyObject *open_details(const struct ndpy_completion *entry, struct ndpy_completion *opened, struct failure *failure);
/* Returns what the program gets for one completion without its details, or NULL. failed: a list, made when needed. If
   Python code raises, such as because of Ctrl-C, the program still gets the completion, as the provider reported it. */
PyObject *collect_one(CompletionQueue *self, const struct ndpy_completion *entry, PyObject **failed,
                      struct failure *failure);
/* Ends several requests that only have to be forgotten. alike: see ndpy_poll(). Returns as retire_one(). */
Posted *retire_several(CompletionQueue *self, const struct ndpy_completion *entries, uint32_t count, uint32_t alike);
/* The same for what the provider's poll() has returned. */
HOT Posted *retire(CompletionQueue *self, const struct ndpy_completion *entries, int got, uint32_t alike)
{
    if (got == 1)
        return retire_one(self, entries);
    return got <= 0 ? NULL : retire_several(self, entries, (uint32_t)got, alike);
}

/* ---- polling.c ---- */

/* No signal handler runs during a longer spin. */
#define LONGEST_SPIN_S 0.01

/* Takes up to `wanted` of the kept completions. Returns a list, or NULL with an error. */
PyObject *take_kept(CompletionQueue *self, Py_ssize_t wanted);
/* Keeps completions for the next poll, because the present exception ends this one. Steals the list. Called without the
 * lock. */
void keep(CompletionQueue *self, PyObject *completions);
/* Polls with the interpreter's lock free, until there are completions, the time is over, or another thread wants the
   queue. Returns their number, or minus an errno. Called with the lock. */
int spin(CompletionQueue *self, struct ndpy_completion *entries, uint32_t room, double seconds);
PyObject *queue_poll(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords);
PyObject *queue_collect_internal(PyObject *object, PyObject *none);
/* Prepares queue_poll(). Returns 0, or -1 with an error. */
int prepare_polling(void);

/* ---- reuse.c ---- */

/* Returns a list without completions, or NULL with an error. */
PyObject *list_without(CompletionQueue *self);
/* Returns a list with these completions of one queue pair, or NULL with an error. Called without the lock, because what
   the former ones let go may poll again. */
PyObject *list_with(CompletionQueue *self, const struct ndpy_completion *entries, Py_ssize_t count, PyObject *posted);

/* ---- polling_arrays.c ---- */

PyObject *queue_poll_into(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords);
/* The same for queue_poll_into(). */
int prepare_polling_arrays(void);

#endif
