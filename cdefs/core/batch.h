/* What the files about batches share. batch.c: the class Batch, and how it is filled. batch_columns.c: the numbers that
   the program can change. batch_lists.c: the lists that are made of a batch, one for each queue pair. post_batch.c
   posts these. A list's requests in the provider's own layout are a struct ndpy_list (../rings.h), and one post of a
   list is a struct ndpy_posting there. */

#ifndef NDPY_BATCH_H
#define NDPY_BATCH_H

#include "core.h"

enum { LARGEST_CAPACITY = 1 << 20 };

enum column { CONTEXTS, REMOTE_ADDRESSES, ADDRESSES, LENGTHS, COLUMNS };

/* requests, records, remotes: one for each request. elements, element_regions: one for each element. used: the regions
   and destinations of all requests, without some of the repetitions. numbers: the memory of the columns, which the
   views show. is_exposed: the program may have changed it. changes: how often requests were added or forgotten. lists:
   a dict of BatchList by ListPool. last: the one that was posted last. references: the weak ones to the batch. */
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
    BatchList *last;
    PyObject *references;
} Batch;

/* The list of a batch for a queue pair, borrowed. NULL with an error, or with a refusal of the request *bad. Call this
   with the queue pair's lock, in a section of the batch. */
BatchList *batch_list(Batch *batch, ListPool *pool, int *refused, uint32_t *bad);
/* The requests from this number on, for _post_singly(). The method _calls(). */
PyObject *batch_calls(PyObject *self, PyObject *first);
int add_batch_lists(PyObject *module);

/* ---- batch_columns.c ---- */

extern PyGetSetDef batch_columns[];

/* Returns 0, or -1 with an error. */
int batch_make_column(Batch *batch, int which, size_t length);
/* A copy of all columns, one after the other. NULL with an error. */
uint64_t *batch_copy_numbers(const Batch *batch);
int batch_has_same_numbers(const Batch *batch, const BatchList *list);
/* Checks a copy of the columns, which do not change meanwhile, and reads it into the requests. Returns 0, or -1 with an
   error. */
int batch_read_numbers(Batch *batch, const uint64_t *copy);
/* Reads the columns into the requests. Returns 0, or -1 with an error. */
int batch_read_columns(Batch *batch);

#endif
