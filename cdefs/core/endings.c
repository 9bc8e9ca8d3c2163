/* What completions end. A request that succeeded, or several with silent ones before it, is only forgotten. Every other
   completion goes to _collect_one() in Python. */

#include "completion_queue.h"

void note_failure(struct failure *failure)
{
    if (failure->type)
        PyErr_Clear();
    else
        PyErr_Fetch(&failure->type, &failure->value, &failure->traceback);
}

int raise_noted(struct failure *failure)
{
    if (!failure->type)
        return 0;
    PyErr_Restore(failure->type, failure->value, failure->traceback);
    return -1;
}

int raise_poll_error(CompletionQueue *self, int got)
{
    raise_made(PyObject_CallMethod((PyObject *)self, "_poll_error", "i", -got));
    return -1;
}

PyObject *open_details(const struct ndpy_completion *entry, struct ndpy_completion *opened, struct failure *failure)
{
    struct ndpy_details *details = (struct ndpy_details *)(uintptr_t)entry->context;
    PyObject *bytes;

    *opened = *entry;
    bytes = PyBytes_FromStringAndSize((const char *)details, sizeof *details);
    if (!bytes)
        note_failure(failure);
    opened->context = details->context;
    opened->flags &= ~(uint32_t)NDPY_DETAILED;
    free(details);
    return bytes;
}

PyObject *collect_one(CompletionQueue *self, const struct ndpy_completion *entry, PyObject **failed,
                      struct failure *failure)
{
    PyObject *tuple, *completion = NULL;

    if (!*failed)
        *failed = PyList_New(0);
    tuple = *failed ? entry_to_tuple(entry) : NULL;
    if (tuple)
        completion = PyObject_CallMethod((PyObject *)self, "_collect_one", "OO", tuple, *failed);
    Py_XDECREF(tuple);
    if (!completion) {
        note_failure(failure);
        if (!(entry->flags & (NDPY_INTERNAL | NDPY_FROM_SHARED_QUEUE))) {
            Posted *posted = posted_of(self, entry->queue_pair);

            completion = posted ? completion_new(entry, (PyObject *)posted) : NULL;
            if (PyErr_Occurred())
                note_failure(failure);
        }
    } else if (completion == Py_None) {
        Py_CLEAR(completion);
    }
    return completion;
}

/* How many requests these completions end, or 0 if they are not all successes of one queue pair and of one operation.
   Without branches, because this is most of the work. */
static uint32_t count_ended(const struct ndpy_completion *entries, uint32_t count)
{
    uint32_t number = entries->queue_pair, operation = entries->operation, retired = 0, differences = 0;

    for (uint32_t place = 0; place < count; place++) {
        const struct ndpy_completion *entry = &entries[place];

        differences |= entry->status | (entry->flags & ~(uint32_t)NDPY_IMMEDIATE) | (entry->queue_pair ^ number) |
                       (entry->operation ^ operation);
        retired += entry->retired;
    }
    return differences ? 0 : retired;
}

Posted *retire_several(CompletionQueue *self, const struct ndpy_completion *entries, uint32_t count, uint32_t alike)
{
    uint32_t retired = alike == count ? count : count_ended(entries, count);
    Posted *posted = retired ? posted_of(self, entries->queue_pair) : NULL;
    struct run run = {0};

    if (!posted || posted->watched)
        return NULL;
    run.records = records_of(posted, entries->operation);
    if (!count_requests(&run, retired))
        return NULL;
    end_run(&run);
    return posted;
}
