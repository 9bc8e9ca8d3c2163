/* Posting: what work_queues.c and post_batch.c share. */

#ifndef NDPY_POSTING_H
#define NDPY_POSTING_H

#include "calls.h"

/* native: a struct ndpy_queue_pair, or if there is no `posted` a struct ndpy_shared_queue. ended: the connection is
   over, and what is posted is cancelled. sinks_must_be_writable: the provider itself would write to every region. */
typedef struct {
    GUARDED_HEAD
    PyObject *srq;
    Posted *posted;
    PyObject *lists; /* ListPool, made for the first batch */
    const struct ndpy_provider *provider;
    SHARED char ended;
    SHARED char sinks_must_be_writable;
    unsigned int number; /* by which completions of a shared receive queue name it */
} WorkQueues;

/* Takes the lock of a queue pair that can be used. Returns 0, or -1 with an error. */
HOT int enter(WorkQueues *self)
{
    return guarded_enter((Guarded *)self);
}

/* The method post(). */
PyObject *queues_post(PyObject *self, PyObject *batch);

#endif
