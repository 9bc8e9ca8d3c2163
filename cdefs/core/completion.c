/* The result of one request, as the program gets it. */

#include "core.h"

enum { STATUSES = 16 };

PyTypeObject *completion_type;

/* What ndpy/objects/completion.py gives to set_up_completions(). */
static PyObject *operations, *statuses, *raise_status, *describe, *read_source;

/* The members of Status, borrowed from `statuses`. The last ones repeat UNKNOWN. None before set_up(). */
static PyObject *status_members[STATUSES];

PyObject *completion_new(const struct ndpy_completion *entry, PyObject *posted)
{
    PyObject *context = PyLong_FromUnsignedLongLong(entry->context);
    Completion *completion;

    if (!context)
        return NULL;
    completion = PyObject_New(Completion, completion_type);
    if (!completion) {
        Py_DECREF(context);
        return NULL;
    }
    completion->context = context;
    completion->details = NULL;
    completion->status = Py_NewRef(status_members[entry->status & (STATUSES - 1)]);
    completion->posted = Py_NewRef(posted);
    completion->entry = *entry;
    return (PyObject *)completion;
}

int completion_change(Completion *completion, const struct ndpy_completion *entry, PyObject *posted)
{
    PyObject *former[] = {completion->context, completion->status, completion->posted, completion->details};
    PyObject *context = PyLong_FromUnsignedLongLong(entry->context);

    if (!context)
        return -1;
    completion->context = context;
    completion->status = Py_NewRef(status_members[entry->status & (STATUSES - 1)]);
    completion->posted = Py_NewRef(posted);
    completion->details = NULL;
    completion->entry = *entry;
    for (int which = 0; which < 4; which++)
        Py_XDECREF(former[which]);
    return 0;
}

static void completion_dealloc(PyObject *self)
{
    Completion *completion = (Completion *)self;

    Py_DECREF(completion->context);
    Py_DECREF(completion->status);
    Py_DECREF(completion->posted);
    Py_XDECREF(completion->details);
    free_object(self);
}

PyObject *entry_to_tuple(const struct ndpy_completion *entry)
{
    return Py_BuildValue("KKIIIIIIII", (unsigned long long)entry->context, (unsigned long long)entry->nbytes,
                         entry->operation, entry->status, entry->native_status, entry->vendor_status, entry->queue_pair,
                         entry->retired, entry->slot, entry->flags);
}

const struct ndpy_details *details_with(PyObject *bytes, uint32_t kind)
{
    const struct ndpy_details *details = bytes ? (const struct ndpy_details *)PyBytes_AsString(bytes) : NULL;

    return details && details->kinds & kind ? details : NULL;
}

static PyObject *completion_create(PyTypeObject *Py_UNUSED(type), PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    struct ndpy_completion entry;
    PyObject *posted;
    unsigned long long context, nbytes;

    if (!PyArg_ParseTuple(arguments, "(KKIIIIIIII)O!", &context, &nbytes, &entry.operation, &entry.status,
                          &entry.native_status, &entry.vendor_status, &entry.queue_pair, &entry.retired, &entry.slot,
                          &entry.flags, posted_type, &posted))
        return NULL;
    entry.context = context;
    entry.nbytes = nbytes;
    return completion_new(&entry, posted);
}

/* ---- fields ---- */

static const struct ndpy_completion *entry_of(PyObject *self)
{
    return &((Completion *)self)->entry;
}

static PyObject *get_vendor_status(PyObject *self, void *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLong(entry_of(self)->status == NDPY_SUCCESS ? 0 : entry_of(self)->vendor_status);
}

static PyObject *get_immediate(PyObject *self, void *Py_UNUSED(none))
{
    if (!(entry_of(self)->flags & NDPY_IMMEDIATE))
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(entry_of(self)->vendor_status);
}

static PyObject *get_source(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *details = ((Completion *)self)->details;

    return details_with(details, NDPY_SOURCE) ? PyObject_CallFunctionObjArgs(read_source, details, NULL)
                                              : Py_NewRef(Py_None);
}

static PyObject *get_timestamp(PyObject *self, void *Py_UNUSED(none))
{
    const struct ndpy_details *details = details_with(((Completion *)self)->details, NDPY_TIMESTAMP);

    return details ? PyLong_FromUnsignedLongLong(details->timestamp) : Py_NewRef(Py_None);
}

static PyObject *get_wall_clock(PyObject *self, void *Py_UNUSED(none))
{
    const struct ndpy_details *details = details_with(((Completion *)self)->details, NDPY_WALL_CLOCK);

    return details ? PyLong_FromUnsignedLongLong(details->wall_clock) : Py_NewRef(Py_None);
}

static PyObject *get_flow_tag(PyObject *self, void *Py_UNUSED(none))
{
    const struct ndpy_details *details = details_with(((Completion *)self)->details, NDPY_FLOW_TAG);

    return details ? PyLong_FromUnsignedLong(details->flow_tag) : Py_NewRef(Py_None);
}

static PyObject *member_of(PyObject *members, uint32_t number)
{
    PyObject *member = members ? PyTuple_GetItem(members, (Py_ssize_t)number) : NULL;

    return Py_XNewRef(member);
}

static PyObject *get_operation(PyObject *self, void *Py_UNUSED(none))
{
    return member_of(operations, entry_of(self)->operation);
}

static PyObject *get_ok(PyObject *self, void *Py_UNUSED(none))
{
    return PyBool_FromLong(entry_of(self)->status == NDPY_SUCCESS);
}

static PyObject *get_queue_pair(PyObject *self, void *Py_UNUSED(none))
{
    return PyObject_CallObject(((Posted *)((Completion *)self)->posted)->queue_pair, NULL);
}

static PyObject *completion_raise(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (entry_of(self)->status == NDPY_SUCCESS)
        Py_RETURN_NONE;
    return PyObject_CallFunctionObjArgs(raise_status, self, NULL);
}

static PyObject *completion_repr(PyObject *self)
{
    return PyObject_CallFunctionObjArgs(describe, self, NULL);
}

static PyMemberDef completion_members[] = {
    {"context", T_OBJECT_EX, offsetof(Completion, context), READONLY, "The value that was given with the request."},
    {"status", T_OBJECT_EX, offsetof(Completion, status), READONLY, "A Status."},
    {"nbytes", T_ULONGLONG, offsetof(Completion, entry.nbytes), READONLY, "How many bytes a successful request moved."},
    {"native_status", T_UINT, offsetof(Completion, entry.native_status), READONLY,
     "The provider's own number for the status."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef completion_fields[] = {
    {"vendor_status", get_vendor_status, NULL, "What the adapter adds to an error, or 0.", NULL},
    {"immediate", get_immediate, NULL,
     "The 32 bits that the peer sent with its message or write, in host order. None if it sent none.", NULL},
    {"source", get_source, NULL, "A DatagramSource: where a received datagram came from. None for everything else.",
     NULL},
    {"timestamp", get_timestamp, NULL,
     "When the request ended, in ticks of the adapter's clock. None unless the queue brings "
     "CompletionDetails.TIMESTAMP.",
     NULL},
    {"wall_clock_ns", get_wall_clock, NULL,
     "When the request ended, in nanoseconds since 1970. None unless the queue brings CompletionDetails.WALL_CLOCK.",
     NULL},
    {"flow_tag", get_flow_tag, NULL,
     "The tag of the flow that brought the message. None unless the queue brings CompletionDetails.FLOW_TAG.", NULL},
    {"operation", get_operation, NULL, "An Operation.", NULL},
    {"ok", get_ok, NULL, "Whether the request succeeded.", NULL},
    {"queue_pair", get_queue_pair, NULL, "The queue pair of the request. None if the program has dropped it.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef completion_methods[] = {
    {"raise_for_status", completion_raise, METH_NOARGS,
     "raise_for_status($self)\n--\n\n"
     "Raise the exception that fits the status. Does nothing if the request succeeded."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    completion_doc,
    "The result of one request. Its fields are decoded when they are read.\n\n"
    "Fields:\n"
    "    context: the value that was given with the request.\n"
    "    operation: an Operation.\n"
    "    status: a Status.\n"
    "    nbytes: how many bytes a successful request moved. For RECEIVE_RDMA_WITH_IMMEDIATE: how many the peer wrote.\n"
    "    native_status: the provider's own number for the status.\n"
    "    vendor_status: what the adapter adds to an error, or 0.\n");

static PyType_Slot completion_slots[] = {
    {Py_tp_doc, (void *)completion_doc}, {Py_tp_new, completion_create},
    {Py_tp_repr, completion_repr},       {Py_tp_dealloc, completion_dealloc},
    {Py_tp_members, completion_members}, {Py_tp_getset, completion_fields},
    {Py_tp_methods, completion_methods}, {0, NULL},
};

static PyType_Spec completion_spec = {"ndpy._core.Completion", sizeof(Completion), 0, Py_TPFLAGS_DEFAULT,
                                      completion_slots};

/* ---- the module ---- */

static PyObject *set_up(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject **const settings[] = {&operations, &statuses, &raise_status, &describe, &read_source};
    PyObject *given[5];
    Py_ssize_t count;

    if (!PyArg_ParseTuple(arguments, "O!O!OOO", &PyTuple_Type, &given[0], &PyTuple_Type, &given[1], &given[2],
                          &given[3], &given[4]))
        return NULL;
    for (int which = 0; which < 5; which++) {
        PyObject *former = *settings[which];

        *settings[which] = Py_NewRef(given[which]);
        Py_XDECREF(former);
    }
    count = PyTuple_Size(statuses);
    for (Py_ssize_t which = 0; which < STATUSES; which++)
        status_members[which] = PyTuple_GetItem(statuses, which < count ? which : count - 1);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_up_completions", set_up, METH_VARARGS,
     "set_up_completions($module, operations, statuses, raise_for_status, describe, read_source, /)\n--\n\n"
     "Give the members of Operation and Status in the order of their numbers, two functions of a Completion, and one "
     "that\n"
     "makes a DatagramSource of the bytes of a struct ndpy_details."},
    {NULL, NULL, 0, NULL},
};

int add_completions(PyObject *module)
{
    completion_type = add_type(module, &completion_spec);
    for (int which = 0; which < STATUSES; which++)
        status_members[which] = Py_None;
    return completion_type ? PyModule_AddFunctions(module, functions) : -1;
}
