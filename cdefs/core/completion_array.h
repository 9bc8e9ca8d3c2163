/* What polling needs of an array of completions. */

#ifndef NDPY_COMPLETION_ARRAY_H
#define NDPY_COMPLETION_ARRAY_H

enum { LARGEST_ARRAY = 1 << 20 };

/* Completions in a row that have the same PostedRequests. end: the place behind them. */
struct owner {
    PyObject *posted;
    uint32_t end;
};

/* entries: the completions. owners: the PostedRequests of all of them, `owned` runs of them. views: of the entries, as
   integers of 64 and of 32 bits. is_busy: a poll_into() is under way. details: for each completion the bytes of a
   struct ndpy_details or NULL, once there were some. */
typedef struct {
    PyObject_HEAD Py_ssize_t capacity;
    uint32_t count;
    uint32_t owned;
    char is_busy;
    struct ndpy_completion *entries;
    struct owner *owners;
    PyObject *views[2];
    PyObject **details;
} CompletionArray;

extern PyTypeObject *completion_array_type;

void array_clear(CompletionArray *array);

/* Gives the completions from the last owned one to the one before `end` an owner. */
HOT void array_own(CompletionArray *array, PyObject *posted, uint32_t end)
{
    if (!array->owned || array->owners[array->owned - 1].posted != posted)
        array->owners[array->owned++].posted = Py_NewRef(posted);
    array->owners[array->owned - 1].end = end;
}

/* The owner of a completion, borrowed. */
PyObject *array_owner(const CompletionArray *array, uint32_t place);

#endif
