/* The lists of batches. A post makes a list of the batch for the queue pair, which does not change any more. The next
 * post to the same queue pair uses it again if the batch is as it was.
 */

#include "batch.h"

PyTypeObject *batch_list_type, *list_pool_type;

/* ---- lists for a queue pair ---- */

PyObject *pool_new(const struct ndpy_provider *provider, struct ndpy_queue_pair *native)
{
    ListPool *pool = (ListPool *)PyType_GenericAlloc(list_pool_type, 0);

    if (!pool)
        return NULL;
    pool->provider = provider;
    pool->native = native;
    return (PyObject *)pool;
}

static void pool_dealloc(PyObject *self)
{
    Py_CLEAR(((ListPool *)self)->batches);
    free_object(self);
}

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "The lists of one queue pair."},
    {Py_tp_dealloc, pool_dealloc},
    {0, NULL},
};

static PyType_Spec pool_spec = {"ndpy._core.ListPool", sizeof(ListPool), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, pool_slots};

static int list_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((BatchList *)self)->records);
    return 0;
}

static int list_clear(PyObject *self)
{
    Py_CLEAR(((BatchList *)self)->records);
    return 0;
}

static void list_dealloc(PyObject *self)
{
    BatchList *list = (BatchList *)self;
    ListPool *pool = (ListPool *)list->pool;

    PyObject_GC_UnTrack(self);
    if (pool) {
        mutex_lock(&pool->mutex);
        if (pool->native && list->native)
            pool->provider->list_free(list->native);
        mutex_unlock(&pool->mutex);
    }
    Py_CLEAR(list->pool);
    PyMem_Free(list->numbers);
    list_clear(self);
    free_object(self);
}

static PyType_Slot list_slots[] = {
    {Py_tp_doc, "The requests of a batch as one queue pair posts them."},
    {Py_tp_traverse, list_traverse},
    {Py_tp_clear, list_clear},
    {Py_tp_dealloc, list_dealloc},
    {0, NULL},
};

static PyType_Spec list_spec = {"ndpy._core.BatchList", sizeof(BatchList), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                list_slots};

/* Notes a batch that is to have a list, until the batch goes. Returns 0, or -1 with an error. Called with the queue
 * pair's lock. */
static int pool_note(ListPool *pool, Batch *batch)
{
    PyObject *forget, *reference;
    int result;

    if (!pool->batches)
        pool->batches = PySet_New(NULL);
    forget = pool->batches ? PyObject_GetAttrString(pool->batches, "discard") : NULL;
    reference = forget ? PyWeakref_NewRef((PyObject *)batch, forget) : NULL;
    result = reference ? PySet_Add(pool->batches, reference) : -1;
    Py_XDECREF(reference);
    Py_XDECREF(forget);
    return result;
}

/* Called in a section of the batch. */
static void forget_pool(Batch *batch, ListPool *pool)
{
    if (batch->last && batch->last->pool == (PyObject *)pool)
        Py_CLEAR(batch->last);
    /* It has no list if the post failed, or if it was changed since. */
    if (batch->lists && PyDict_DelItem(batch->lists, (PyObject *)pool) < 0)
        PyErr_Clear();
}

void pool_close(ListPool *pool)
{
    PyObject *batches, *type, *value, *traceback;

    mutex_lock(&pool->mutex);
    pool->native = NULL;
    mutex_unlock(&pool->mutex);
    batches = pool->batches;
    pool->batches = NULL;
    if (!batches)
        return;
    PyErr_Fetch(&type, &value, &traceback);
    while (PySet_Size(batches) > 0) {
        PyObject *reference = PySet_Pop(batches), *batch = reference ? PyObject_CallObject(reference, NULL) : NULL;

        if (batch && batch != Py_None) {
            BEGIN_SECTION(batch)
            forget_pool((Batch *)batch, pool);
            END_SECTION()
        }
        Py_XDECREF(batch);
        Py_XDECREF(reference);
        PyErr_Clear();
    }
    Py_DECREF(batches);
    PyErr_Restore(type, value, traceback);
}

/* ---- making them ---- */

/* Which flags a request gets. */
static uint32_t flags_of(const Batch *batch, uint32_t place)
{
    const struct ndpy_list_request *request = &batch->requests[place];

    if (batch->signals_all || request->operation == NDPY_RECEIVE || place == batch->count - 1)
        return request->flags;
    return request->flags | NDPY_SILENT_SUCCESS;
}

/* What each posted request uses. NULL with an error. */
static PyObject *keep_alive(Batch *batch)
{
    PyObject *records = PyTuple_New((Py_ssize_t)batch->count);

    for (uint32_t place = 0; records && place < (uint32_t)PyTuple_Size(records); place++) {
        /* The collector may run code that changes the batch. make_list() finds out. */
        int is_there = place < batch->count;
        PyObject *record = is_there ? Py_NewRef(batch->records[place]) : NULL;
        PyObject *destination = is_there ? Py_XNewRef(batch->destinations[place]) : NULL;
        PyObject *kept = destination ? PyTuple_Pack(2, record, destination) : Py_NewRef(record ? record : Py_None);

        Py_XDECREF(record);
        Py_XDECREF(destination);
        if (kept)
            PyTuple_SetItem(records, (Py_ssize_t)place, kept);
        else
            Py_CLEAR(records);
    }
    return records;
}

/* Copies the requests as they are posted. Returns their numbers, or NULL with an error. changes: those of the batch
   when the caller began. */
static uint64_t *read_requests(Batch *batch, uint32_t changes, struct ndpy_list_request *requests)
{
    uint64_t *numbers;

    if (!batch->count || batch->changes != changes) {
        /* By another thread before the lock was taken, or by Python code that the collector has run. */
        PyErr_SetString(PyExc_RuntimeError, "the batch was changed while it was posted");
        return NULL;
    }
    numbers = batch_copy_numbers(batch);
    if (numbers && batch->is_exposed && batch_read_numbers(batch, numbers) < 0) {
        PyMem_Free(numbers);
        return NULL;
    }
    for (uint32_t place = 0; numbers && place < batch->count; place++) {
        requests[place] = batch->requests[place];
        requests[place].flags = flags_of(batch, place);
    }
    return numbers;
}

/* Finds a request with a token that is too large. Returns its number, or batch->count. */
static uint32_t find_bad_token(const Batch *batch, unsigned long long largest)
{
    uint32_t place = 0, at = 0;

    for (; place < batch->count; place++)
        for (; at < batch->requests[place].first + batch->requests[place].count; at++)
            if (batch->elements[at].token > largest)
                return place;
    return place;
}

/* Makes a list. On a refusal *refused has it, with the number of the request in *bad. */
static BatchList *make_list(Batch *batch, ListPool *pool, int *refused, uint32_t *bad)
{
    uint32_t count = batch->count, changes = batch->changes;
    struct ndpy_list_request *requests = PyMem_Malloc(count * sizeof *requests);
    PyObject *records = keep_alive(batch);
    BatchList *list = requests && records ? PyObject_GC_New(BatchList, batch_list_type) : NULL;

    if (!list) {
        PyMem_Free(requests);
        Py_XDECREF(records);
        return (BatchList *)PyErr_NoMemory();
    }
    list->pool = Py_NewRef((PyObject *)pool);
    list->records = records;
    list->native = NULL;
    list->count = count;
    list->numbers = read_requests(batch, changes, requests);
    if (list->numbers) {
        list->operation = requests[0].operation;
        *bad = find_bad_token(batch, pool->provider->largest_token);
        if (*bad < count)
            *refused = NDPY_BAD_TOKEN;
    }
    if (list->numbers && !*refused) {
        mutex_lock(&pool->mutex);
        *refused = pool->provider->list_new(pool->native, requests, count, batch->elements, &list->native, bad);
        mutex_unlock(&pool->mutex);
    }
    PyObject_GC_Track((PyObject *)list);
    PyMem_Free(requests);
    if (list->native)
        return list;
    Py_DECREF(list);
    return NULL;
}

BatchList *batch_list(Batch *batch, ListPool *pool, int *refused, uint32_t *bad)
{
    BatchList *list = batch->last;

    *refused = 0;
    if (!list || list->pool != (PyObject *)pool)
        list = (BatchList *)PyDict_GetItemWithError(batch->lists, (PyObject *)pool);
    if (!list && (PyErr_Occurred() || pool_note(pool, batch) < 0))
        return NULL;
    if (!list || (batch->is_exposed && !batch_has_same_numbers(batch, list))) {
        list = make_list(batch, pool, refused, bad);
        if (!list)
            return NULL;
        if (PyDict_SetItem(batch->lists, (PyObject *)pool, (PyObject *)list) < 0) {
            Py_DECREF(list);
            return NULL;
        }
        Py_DECREF(list);
    }
    if (batch->last != list) {
        PyObject *former = (PyObject *)batch->last;

        batch->last = (BatchList *)Py_NewRef((PyObject *)list);
        Py_XDECREF(former);
    }
    return list;
}

/* ---- requests that are posted one by one ---- */

/* The element at a place: the one that the program gave, unless a column has changed it. */
static PyObject *present_element(const Batch *batch, PyObject *given, uint32_t at)
{
    const struct ndpy_element *element = &batch->elements[at];

    if (Py_TYPE(given) == element_type) {
        const Element *former = (Element *)given;

        if (former->address == element->address && former->length == element->length)
            return Py_NewRef(given);
    }
    return PyObject_CallFunction((PyObject *)element_type, "OKKK", batch->element_regions[at],
                                 (unsigned long long)element->address, (unsigned long long)element->length,
                                 (unsigned long long)element->token);
}

static PyObject *present_elements(const Batch *batch, uint32_t place)
{
    const struct ndpy_list_request *request = &batch->requests[place];
    PyObject *record = batch->records[place], *list;

    if (!PyList_CheckExact(record))
        return present_element(batch, record, request->first);
    list = PyList_New(request->count);
    for (uint32_t at = 0; list && at < request->count; at++) {
        PyObject *element = present_element(batch, PyList_GetItem(record, at), request->first + at);

        if (!element)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, at, element);
    }
    return list;
}

/* The remote memory at a place: the one that the program gave, unless a column has changed its address. */
static PyObject *present_remote(const Batch *batch, uint32_t place)
{
    const struct ndpy_remote *remote = &batch->requests[place].remote;
    PyObject *given = batch->remotes[place], *limits[2], *slice = NULL, *piece = NULL;
    const Remote *whole = (Remote *)given;
    unsigned long long offset = remote->address - remote->window_address;

    if (!given || whole->address == remote->address)
        return Py_NewRef(given ? given : Py_None);
    if (whole->sliced_from)
        whole = whole->sliced_from;
    limits[0] = PyLong_FromUnsignedLongLong(offset);
    limits[1] = PyLong_FromUnsignedLongLong(offset + remote->length);
    if (limits[0] && limits[1])
        slice = PySlice_New(limits[0], limits[1], NULL);
    if (slice)
        piece = PyObject_GetItem((PyObject *)whole, slice);
    Py_XDECREF(limits[0]);
    Py_XDECREF(limits[1]);
    Py_XDECREF(slice);
    return piece;
}

/* The requests from number `place` on. Called in a section of the batch. */
static PyObject *list_calls(Batch *batch, size_t place)
{
    PyObject *calls;

    if (batch->is_exposed && batch_read_columns(batch) < 0)
        return NULL;
    calls = PyList_New(0);
    for (; calls && place < batch->count; place++) {
        const struct ndpy_list_request *request = &batch->requests[place];
        PyObject *record = Py_NewRef(batch->records[place]), *sges = present_elements(batch, (uint32_t)place);
        PyObject *remote = sges ? present_remote(batch, (uint32_t)place) : NULL;
        PyObject *call =
            !remote
                ? NULL
                : Py_BuildValue("IOOKI(IKK)O", request->operation, sges, remote, (unsigned long long)request->context,
                                flags_of(batch, (uint32_t)place) & ~(uint32_t)NDPY_UNWRITABLE,
                                request->remote.immediate, (unsigned long long)request->remote.operands[0],
                                (unsigned long long)request->remote.operands[1],
                                batch->destinations[place] ? batch->destinations[place] : Py_None);

        Py_DECREF(record);
        Py_XDECREF(sges);
        Py_XDECREF(remote);
        if (!call || PyList_Append(calls, call) < 0)
            Py_CLEAR(calls);
        Py_XDECREF(call);
    }
    return calls;
}

PyObject *batch_calls(PyObject *self, PyObject *first)
{
    size_t place = PyLong_AsSize_t(first);
    PyObject *calls;

    if (PyErr_Occurred())
        return NULL;
    BEGIN_SECTION(self)
    calls = list_calls((Batch *)self, place);
    END_SECTION()
    return calls;
}

int add_batch_lists(PyObject *module)
{
    list_pool_type = add_type(module, &pool_spec);
    batch_list_type = add_type(module, &list_spec);
    return list_pool_type && batch_list_type ? 0 : -1;
}
