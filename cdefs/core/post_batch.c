/* Posting batches. A batch has a list for each queue pair that it was posted to, and one record stands for all of its
 * requests. */

#include "batch.h"
#include "posting.h"

/* Finds a region or a destination of a batch that its requests may not refer to here. Borrowed, or NULL. Called in a
   section of the batch. */
HOT PyObject *find_unusable(const WorkQueues *self, const Batch *batch)
{
    PyObject *const *used = batch->used, *const *end = used + batch->used_count;
    const PyObject *adapter = self->adapter;

    for (; used < end; used++)
        if (!may_refer_to(adapter, (Usable *)*used))
            return *used;
    return NULL;
}

/* Corrects the newest record, because only so many requests of its list were posted. Called with the records' mutex, by
   somebody who has the list too. */
APART void correct_record(WorkQueues *self, BatchList *list, uint32_t posted)
{
    struct records *records = records_of(self->posted, list->operation);
    struct record *newest = record_at(records, records->count - 1);

    newest->requests = newest->left = posted;
    if (posted)
        return;
    records->count--;
    Py_DECREF((PyObject *)list);
}

/* See core_post_list(). Called with the records' mutex. */
HOT int core_post_list_with_mutex(WorkQueues *self, BatchList *list, uint32_t *posted)
{
    int refused;

    /* Recorded first: another thread may take completions as soon as the provider has the requests. */
    if (records_push(records_of(self->posted, list->operation), (PyObject *)list, list->count) < 0)
        return RAISED;
    refused = self->provider->post_list(self->native, list->native, posted);
    if (refused)
        correct_record(self, list, *posted);
    return refused;
}

/* Posts a list, with its record. Returns 0 when it is posted, or a refusal with the number of requests that were
 * posted, or RAISED. */
HOT int core_post_list(WorkQueues *self, BatchList *list, uint32_t *posted)
{
    int refused;

    mutex_lock(&records_of(self->posted, list->operation)->mutex);
    refused = core_post_list_with_mutex(self, list, posted);
    mutex_unlock(&records_of(self->posted, list->operation)->mutex);
    return refused;
}

static PyObject *post_singly(WorkQueues *self, Batch *batch, uint32_t posted)
{
    return PyObject_CallMethod((PyObject *)self, "_post_singly", "OI", (PyObject *)batch, posted);
}

/* What follows a post of a batch, without the lock. bad: the number of the refused request. */
static PyObject *conclude_batch(WorkQueues *self, Batch *batch, int refused, uint32_t bad, uint32_t posted)
{
    uint32_t operation;

    if (refused == NDPY_POST_SINGLY)
        return post_singly(self, batch, posted);
    if (refused == RAISED)
        return NULL;
    if (refused) {
        raise_made(
            PyObject_CallMethod((PyObject *)self, "_refuse_batch", "OiII", (PyObject *)batch, refused, bad, posted));
        return NULL;
    }
    if (!self->ended)
        Py_RETURN_NONE;
    BEGIN_SECTION((PyObject *)batch)
    operation = batch->requests[0].operation;
    END_SECTION()
    return PyObject_CallMethod((PyObject *)self, "_cancel_late_request", "I", operation);
}

/* Raises if a batch is empty. Returns 0, or -1 with the error. Called in a section of the batch. */
static int check_batch(const Batch *batch)
{
    if (batch->count)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the batch is empty; add requests with its methods send(), write() and so on");
    return -1;
}

/* Posts the list of a batch as core_post_list(), unless its requests may not refer to something any more. Returns this,
   borrowed, or NULL. Called in a section of the batch: the collector may have closed something while the list was made.
 */
static PyObject *check_and_post_list(WorkQueues *self, const Batch *batch, BatchList *list, int *refused,
                                     uint32_t *posted)
{
    PyObject *unusable;

    if (batch->has_destinations)
        mutex_lock(&destinations_mutex);
    unusable = find_unusable(self, batch);
    if (!unusable)
        *refused = core_post_list(self, list, posted);
    if (batch->has_destinations)
        mutex_unlock(&destinations_mutex);
    return unusable;
}

/* The list of a batch for this queue pair, as batch_list(), but a new reference. Called with the lock. */
static BatchList *batch_list_for(WorkQueues *self, Batch *batch, int *refused, uint32_t *bad)
{
    if (!self->lists)
        self->lists = pool_new(self->provider, self->native);
    return self->lists ? (BatchList *)Py_XNewRef((PyObject *)batch_list(batch, (ListPool *)self->lists, refused, bad))
                       : NULL;
}

/* Posts a batch that has no list for this queue pair, may have changed, or refers to something that it may not refer
   to. Called with the lock, which it gives back. */
static PyObject *post_checked(WorkQueues *self, Batch *batch)
{
    PyObject *unusable;
    uint32_t posted = 0, bad = 0;
    BatchList *list = NULL;
    int refused = 0, is_good;

    BEGIN_SECTION((PyObject *)batch)
    unusable = Py_XNewRef(find_unusable(self, batch));
    is_good = !unusable && check_batch(batch) == 0;
    if (is_good && self->provider->list_new) {
        list = batch_list_for(self, batch, &refused, &bad);
        if (list)
            unusable = Py_XNewRef(check_and_post_list(self, batch, list, &refused, &posted));
    }
    END_SECTION()
    if (unusable) {
        int checked;

        lock_leave(self->lock);
        Py_XDECREF((PyObject *)list);
        checked = refuse_reference((PyObject *)self, unusable);
        Py_DECREF(unusable);
        return checked < 0 || enter(self) < 0 ? NULL : post_checked(self, batch);
    }
    if (!is_good) {
        lock_leave(self->lock);
        return NULL;
    }
    if (!self->provider->list_new) {
        lock_leave(self->lock);
        return post_singly(self, batch, 0);
    }
    if (list) {
        bad = posted;
        Py_DECREF((PyObject *)list);
    } else if (!refused) {
        refused = RAISED;
    }
    lock_leave(self->lock);
    return conclude_batch(self, batch, refused, bad, posted);
}

PyObject *queues_post(PyObject *object, PyObject *argument)
{
    WorkQueues *self = (WorkQueues *)object;
    Batch *batch = (Batch *)argument;
    BatchList *list;
    uint32_t posted;
    int refused;

    if (Py_TYPE(argument) != batch_type) {
        PyErr_Format(PyExc_TypeError, "post() takes a Batch, not %R", (PyObject *)Py_TYPE(argument));
        return NULL;
    }
    if (enter(self) < 0)
        return NULL;
    list = REUSES ? batch->last : NULL;
    if (!list || list->pool != self->lists || batch->is_exposed || find_unusable(self, batch))
        return post_checked(self, batch);
    refused = core_post_list(self, list, &posted);
    lock_leave(self->lock);
    if (refused || self->ended)
        return conclude_batch(self, batch, refused, posted, posted);
    Py_RETURN_NONE;
}
