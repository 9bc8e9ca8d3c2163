/* What posting needs of a batch. */

#ifndef NDPY_BATCH_H
#define NDPY_BATCH_H

enum { LARGEST_CAPACITY = 1 << 20 };

enum column { CONTEXTS, REMOTE_ADDRESSES, ADDRESSES, LENGTHS, COLUMNS };

/* requests, records, remotes: one for each request. elements, element_regions: one for each element. used: the regions
   and destinations of all requests, without some of the repetitions. numbers: the memory of the columns, which the
   views show. is_exposed: the program may have changed it. changes: how often requests were added or forgotten. lists:
   a dict of PostedList by ListPool. last: the one that was posted last. references: the weak ones to the batch. */
typedef struct {
    PyObject_HEAD Py_ssize_t capacity;
    Py_ssize_t max_sge;
    uint32_t count;
    uint32_t element_count;
    uint32_t used_count;
    uint32_t changes;
    char signals_all;
    char has_destinations;
    SHARED char is_exposed;
    struct ndpy_list_request *requests;
    PyObject **records;
    PyObject **remotes;
    PyObject **destinations;
    struct ndpy_element *elements;
    PyObject **element_regions;
    PyObject **used;
    uint64_t *numbers[COLUMNS];
    PyObject *views[COLUMNS];
    PyObject *lists;
    PostedList *last;
    PyObject *references;
} Batch;

/* The list of a batch for a queue pair, borrowed. NULL with an error, or with a refusal of the request *bad. Call this
   with the queue pair's lock, in a section of the batch. */
PostedList *batch_list(Batch *batch, ListPool *pool, int *refused, uint32_t *bad);

#endif
