/* What posted requests use, for as long as the adapter works on them. */

#include "core.h"

PyTypeObject *posted_type;
static PyTypeObject *records_type;

enum { FIRST_CAPACITY = 8 };

/* ---- Records ---- */

int records_grow(struct records *records)
{
    size_t capacity = records->capacity ? 2 * records->capacity : FIRST_CAPACITY;
    struct record *items = PyMem_Malloc(capacity * sizeof *items);

    if (!items) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t place = 0; place < records->count; place++)
        items[place] = *record_at(records, place);
    PyMem_Free(records->items);
    records->items = items;
    records->first = 0;
    records->capacity = capacity;
    return 0;
}

/* Those of `posted`, as Python sees them. Made whenever it asks. */
typedef struct {
    PyObject_HEAD PyObject *posted;
    struct records *records;
} Records;

static PyObject *records_append(PyObject *self, PyObject *record)
{
    struct records *records = ((Records *)self)->records;
    int failed;

    mutex_lock(&records->mutex);
    failed = records_push(records, record, 1);
    mutex_unlock(&records->mutex);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* Raises that there is none, unless an error was raised already. */
static PyObject *none_left(void)
{
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_IndexError, "no request is posted");
    return NULL;
}

static PyObject *records_pop(PyObject *self, PyObject *Py_UNUSED(none))
{
    struct records *records = ((Records *)self)->records;
    PyObject *object;

    mutex_lock(&records->mutex);
    object = records->count ? records_withdraw(records) : NULL;
    mutex_unlock(&records->mutex);
    return object ? object : none_left();
}

/* Takes the oldest request out. Returns its record, or NULL. *ended: the record that has ended with it, which the
 * caller gives back. */
static PyObject *take_oldest(struct records *records, PyObject **ended)
{
    struct record *oldest = records->count ? record_at(records, 0) : NULL;

    if (!oldest)
        return NULL;
    if (Py_TYPE(oldest->object) == batch_list_type) {
        const BatchList *list = (BatchList *)oldest->object;
        PyObject *record = PyTuple_GetItem(list->records, (Py_ssize_t)(oldest->requests - oldest->left));

        if (!record)
            return NULL;
        Py_INCREF(record);
        if (--oldest->left == 0)
            *ended = records_take(records);
        return record;
    }
    if (oldest->left > 1) {
        oldest->left--;
        return Py_NewRef(oldest->object);
    }
    return records_take(records);
}

static PyObject *records_popleft(PyObject *self, PyObject *Py_UNUSED(none))
{
    struct records *records = ((Records *)self)->records;
    PyObject *object, *ended = NULL;

    mutex_lock(&records->mutex);
    object = take_oldest(records, &ended);
    mutex_unlock(&records->mutex);
    Py_XDECREF(ended);
    return object ? object : none_left();
}

static Py_ssize_t records_length(PyObject *self)
{
    struct records *records = ((Records *)self)->records;
    size_t length = 0;

    mutex_lock(&records->mutex);
    for (size_t place = 0; place < records->count; place++)
        length += record_at(records, place)->left;
    mutex_unlock(&records->mutex);
    return (Py_ssize_t)length;
}

static void records_dealloc(PyObject *self)
{
    Py_DECREF(((Records *)self)->posted);
    free_object(self);
}

static PyMethodDef records_methods[] = {
    {"append", records_append, METH_O, "append($self, record, /)\n--\n\nAdd the record of the newest request."},
    {"pop", records_pop, METH_NOARGS, "Take out the record of the newest request."},
    {"popleft", records_popleft, METH_NOARGS, "Take out the record of the oldest request."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot records_slots[] = {
    {Py_tp_doc, "What the requests of one work queue use, oldest first."},
    {Py_sq_length, records_length},
    {Py_tp_dealloc, records_dealloc},
    {Py_tp_methods, records_methods},
    {0, NULL},
};

static PyType_Spec records_spec = {"ndpy._core.Records", sizeof(Records), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, records_slots};

/* ---- PostedRequests ---- */

static int posted_init(PyObject *self, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    Posted *posted = (Posted *)self;
    PyObject *queue_pair;

    if (posted->queue_pair) {
        PyErr_SetString(PyExc_TypeError, "it is initialized once");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O", &queue_pair))
        return -1;
    posted->queue_pair = PyWeakref_NewRef(queue_pair, NULL);
    return posted->queue_pair ? 0 : -1;
}

static int records_traverse(const struct records *records, visitproc visit, void *arg)
{
    for (size_t place = 0; place < records->count; place++)
        Py_VISIT(record_at(records, place)->object);
    return 0;
}

static void records_clear(struct records *records)
{
    while (records->count)
        Py_DECREF(records_take(records));
}

static int posted_traverse(PyObject *self, visitproc visit, void *arg)
{
    Posted *posted = (Posted *)self;
    int stopped;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(posted->queue_pair);
    Py_VISIT(posted->stored);
    stopped = records_traverse(&posted->initiator, visit, arg);
    return stopped ? stopped : records_traverse(&posted->receive, visit, arg);
}

static int posted_clear(PyObject *self)
{
    Posted *posted = (Posted *)self;

    Py_CLEAR(posted->queue_pair);
    Py_CLEAR(posted->stored);
    records_clear(&posted->initiator);
    records_clear(&posted->receive);
    return 0;
}

static void posted_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    posted_clear(self);
    PyMem_Free(((Posted *)self)->initiator.items);
    PyMem_Free(((Posted *)self)->receive.items);
    free_object(self);
}

static PyMemberDef posted_members[] = {
    {"queue_pair", T_OBJECT_EX, offsetof(Posted, queue_pair), READONLY, NULL},
    {"stored_shared", T_INT, offsetof(Posted, stored_shared), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* offset: of the struct records. */
static PyObject *posted_get_records(PyObject *self, void *offset)
{
    Records *made = PyObject_New(Records, records_type);

    if (!made)
        return NULL;
    made->posted = Py_NewRef(self);
    made->records = (struct records *)((char *)self + (size_t)offset);
    return (PyObject *)made;
}

static PyObject *posted_get_stored(PyObject *self, void *Py_UNUSED(none))
{
    Posted *posted = (Posted *)self;
    PyObject *stored;

    BEGIN_SECTION(self)
    if (!posted->stored)
        posted->stored = PyDict_New();
    stored = Py_XNewRef(posted->stored);
    END_SECTION()
    return stored;
}

static PyGetSetDef posted_properties[] = {
    FLAG("failed", Posted, failed, NULL),
    FLAG("watched", Posted, watched, NULL),
    {"initiator", posted_get_records, NULL, NULL, (void *)offsetof(Posted, initiator)},
    {"receive", posted_get_records, NULL, NULL, (void *)offsetof(Posted, receive)},
    {"stored", posted_get_stored, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot posted_slots[] = {
    {Py_tp_doc, "The requests of one queue pair that the adapter still works on."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, posted_init},
    {Py_tp_traverse, posted_traverse},
    {Py_tp_clear, posted_clear},
    {Py_tp_dealloc, posted_dealloc},
    {Py_tp_members, posted_members},
    {Py_tp_getset, posted_properties},
    {0, NULL},
};

static PyType_Spec posted_spec = {"ndpy._core.PostedRequests", sizeof(Posted), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, posted_slots};

int add_records(PyObject *module)
{
    records_type = add_type(module, &records_spec);
    posted_type = add_type(module, &posted_spec);
    return records_type && posted_type ? 0 : -1;
}
