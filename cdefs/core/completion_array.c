/* Arrays that completions are polled into, so that nothing is allocated for them. A poll fills an array in a section of
 * it. */

#include "core.h"
#include "completion_array.h"

PyTypeObject *completion_array_type;

/* Forgets the completions. */
void array_clear(CompletionArray *array)
{
    uint32_t count = array->owned;

    for (uint32_t place = 0; array->details && place < array->count; place++)
        Py_CLEAR(array->details[place]);
    array->count = array->owned = 0;
    while (count--)
        Py_CLEAR(array->owners[count].posted);
}

PyObject *array_owner(const CompletionArray *array, uint32_t place)
{
    uint32_t first = 0, last = array->owned - 1;

    while (first < last) {
        uint32_t middle = first + (last - first) / 2;

        if (place < array->owners[middle].end)
            last = middle;
        else
            first = middle + 1;
    }
    return array->owners[first].posted;
}

static PyObject *array_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"capacity", NULL};
    PyObject *bytes, *view;
    CompletionArray *array;
    Py_ssize_t capacity;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n:CompletionArray", names, &capacity))
        return NULL;
    if (capacity < 1 || capacity > LARGEST_ARRAY) {
        PyErr_Format(PyExc_ValueError, "an array holds 1 to %d completions, not %zd", LARGEST_ARRAY, capacity);
        return NULL;
    }
    array = (CompletionArray *)PyType_GenericAlloc(type, 0);
    if (!array)
        return NULL;
    array->capacity = capacity;
    array->owners = PyMem_Calloc((size_t)capacity, sizeof *array->owners);
    bytes = PyObject_CallFunction((PyObject *)&PyByteArray_Type, "n",
                                  capacity * (Py_ssize_t)sizeof(struct ndpy_completion));
    view = bytes ? PyMemoryView_FromObject(bytes) : NULL;
    /* The views keep the program from changing the size. */
    array->views[0] = view ? PyObject_CallMethod(view, "cast", "s", "Q") : NULL;
    array->views[1] = view ? PyObject_CallMethod(view, "cast", "s", "I") : NULL;
    if (array->views[1])
        array->entries = (struct ndpy_completion *)PyByteArray_AsString(bytes);
    Py_XDECREF(bytes);
    Py_XDECREF(view);
    if (array->views[0] && array->views[1] && array->owners)
        return (PyObject *)array;
    if (!PyErr_Occurred())
        PyErr_NoMemory();
    Py_DECREF(array);
    return NULL;
}

static int array_traverse(PyObject *self, visitproc visit, void *arg)
{
    CompletionArray *array = (CompletionArray *)self;

    Py_VISIT(Py_TYPE(self));
    for (uint32_t place = 0; place < array->owned; place++)
        Py_VISIT(array->owners[place].posted);
    return 0;
}

static int array_tp_clear(PyObject *self)
{
    array_clear((CompletionArray *)self);
    return 0;
}

static void array_dealloc(PyObject *self)
{
    CompletionArray *array = (CompletionArray *)self;

    PyObject_GC_UnTrack(self);
    array_clear(array);
    Py_CLEAR(array->views[0]);
    Py_CLEAR(array->views[1]);
    PyMem_Free(array->owners);
    PyMem_Free(array->details);
    free_object(self);
}

static Py_ssize_t array_length(PyObject *self)
{
    return ((CompletionArray *)self)->count;
}

/* Called in a section of the array. */
static PyObject *get_item(CompletionArray *array, Py_ssize_t place)
{
    PyObject *completion;

    if (place < 0 || place >= (Py_ssize_t)array->count) {
        PyErr_Format(PyExc_IndexError, "the array has %u completions", array->count);
        return NULL;
    }
    completion = completion_new(&array->entries[place], array_owner(array, (uint32_t)place));
    if (completion && array->details)
        ((Completion *)completion)->details = Py_XNewRef(array->details[place]);
    return completion;
}

static PyObject *array_item(PyObject *self, Py_ssize_t place)
{
    PyObject *completion;

    BEGIN_SECTION(self)
    completion = get_item((CompletionArray *)self, place);
    END_SECTION()
    return completion;
}

/* The place of the first request that failed, or -1. Called in a section of the array. */
static int first_failure(CompletionArray *array)
{
    for (uint32_t place = 0; place < array->count; place++)
        if (array->entries[place].status != NDPY_SUCCESS)
            return (int)place;
    return -1;
}

static PyObject *array_all_ok(PyObject *self, void *Py_UNUSED(none))
{
    int place;

    BEGIN_SECTION(self)
    place = first_failure((CompletionArray *)self);
    END_SECTION()
    return PyBool_FromLong(place < 0);
}

static PyObject *array_raise(PyObject *self, PyObject *Py_UNUSED(none))
{
    PyObject *failed = NULL, *result;
    int place;

    BEGIN_SECTION(self)
    place = first_failure((CompletionArray *)self);
    if (place >= 0)
        failed = get_item((CompletionArray *)self, place);
    END_SECTION()
    if (place < 0)
        Py_RETURN_NONE;
    result = failed ? PyObject_CallMethod(failed, "raise_for_status", NULL) : NULL;
    Py_XDECREF(failed);
    return result;
}

/* See column(). Called in a section of the array. */
static PyObject *get_column(CompletionArray *array, size_t offset, size_t size)
{
    Py_ssize_t step = (Py_ssize_t)(sizeof(struct ndpy_completion) / size), first = (Py_ssize_t)(offset / size);
    PyObject *numbers[3] = {PyLong_FromSsize_t(first), PyLong_FromSsize_t(array->count * step),
                            PyLong_FromSsize_t(step)};
    PyObject *slice = NULL, *result = NULL;

    if (numbers[0] && numbers[1] && numbers[2])
        slice = PySlice_New(numbers[0], numbers[1], numbers[2]);
    if (slice)
        result = PyObject_GetItem(array->views[size == sizeof(uint32_t)], slice);
    Py_XDECREF(slice);
    for (int which = 0; which < 3; which++)
        Py_XDECREF(numbers[which]);
    return result;
}

/* A column: the part of each entry at this offset. */
static PyObject *column(PyObject *array, size_t offset, size_t size)
{
    PyObject *result;

    BEGIN_SECTION(array)
    result = get_column((CompletionArray *)array, offset, size);
    END_SECTION()
    return result;
}

#define COLUMN(field)                                                                                                  \
    static PyObject *get_##field(PyObject *self, void *Py_UNUSED(none))                                                \
    {                                                                                                                  \
        return column(self, offsetof(struct ndpy_completion, field), sizeof(((struct ndpy_completion *)NULL)->field)); \
    }

COLUMN(context)
COLUMN(nbytes)
COLUMN(operation)
COLUMN(status)
COLUMN(native_status)
COLUMN(vendor_status)

/* A column of a detail, copied: 0 where it is missing. Called in a section of the array. */
static PyObject *details_column(CompletionArray *array, uint32_t kind, size_t offset, size_t size)
{
    uint32_t count = array->count;
    PyObject *bytes = PyObject_CallFunction((PyObject *)&PyByteArray_Type, "n", count * (Py_ssize_t)size), *view,
             *result;
    char *out = bytes ? PyByteArray_AsString(bytes) : NULL;

    /* A poll may have filled the array again meanwhile. */
    for (uint32_t place = 0; out && array->details && place < count && place < array->count; place++) {
        const struct ndpy_details *details = details_with(array->details[place], kind);

        if (details)
            memcpy(out + place * size, (const char *)details + offset, size);
    }
    view = bytes ? PyMemoryView_FromObject(bytes) : NULL;
    result = view ? PyObject_CallMethod(view, "cast", "s", size == sizeof(uint64_t) ? "Q" : "I") : NULL;
    Py_XDECREF(view);
    Py_XDECREF(bytes);
    return result;
}

#define DETAILS_COLUMN(field, kind)                                                                  \
    static PyObject *get_##field(PyObject *self, void *Py_UNUSED(none))                              \
    {                                                                                                \
        PyObject *result;                                                                            \
                                                                                                     \
        BEGIN_SECTION(self)                                                                          \
        result = details_column((CompletionArray *)self, kind, offsetof(struct ndpy_details, field), \
                                sizeof(((struct ndpy_details *)NULL)->field));                       \
        END_SECTION()                                                                                \
        return result;                                                                               \
    }

DETAILS_COLUMN(timestamp, NDPY_TIMESTAMP)
DETAILS_COLUMN(wall_clock, NDPY_WALL_CLOCK)
DETAILS_COLUMN(flow_tag, NDPY_FLOW_TAG)

static PyMemberDef array_members[] = {
    {"capacity", T_PYSSIZET, offsetof(CompletionArray, capacity), READONLY, "How many completions it can hold."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef array_columns[] = {
    {"all_ok", array_all_ok, NULL, "Whether all requests succeeded.", NULL},
    {"contexts", get_context, NULL, "The context of each request, 64 bits.", NULL},
    {"nbytes", get_nbytes, NULL, "How many bytes each successful request moved, 64 bits.", NULL},
    {"operations", get_operation, NULL, "The Operation of each request, 32 bits.", NULL},
    {"statuses", get_status, NULL, "The Status of each request, 32 bits.", NULL},
    {"immediates", get_vendor_status, NULL,
     "The immediate data of each receive, 32 bits. It means nothing for a completion that has none.", NULL},
    {"native_statuses", get_native_status, NULL, "The provider's own number for each status, 32 bits.", NULL},
    {"timestamps", get_timestamp, NULL, "The timestamp of each completion, 64 bits. 0 for one that has none. Copied.",
     NULL},
    {"wall_clocks_ns", get_wall_clock, NULL,
     "The wall_clock_ns of each completion, 64 bits. 0 for one that has none. Copied.", NULL},
    {"flow_tags", get_flow_tag, NULL, "The flow_tag of each completion, 32 bits. 0 for one that has none. Copied.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef array_methods[] = {
    {"raise_for_status", array_raise, METH_NOARGS,
     "raise_for_status($self)\n--\n\n"
     "Raise the exception that fits the status of the first request that failed. Does nothing if all succeeded."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(array_doc, "CompletionArray(capacity)\n--\n\n"
                        "The completions that CompletionQueue.poll_into() has taken last.\n\n"
                        "It is a sequence of Completions, which are made when they are asked for. The columns "
                        "contexts, nbytes, operations,\n"
                        "statuses, native_statuses and immediates are memoryviews with a number for each completion, "
                        "and NumPy arrays of them copy nothing:\n"
                        "numpy.asarray(array.statuses). The next poll_into() overwrites what a column shows. So take "
                        "the columns after each\n"
                        "poll_into(), which also fits their length to the number of completions. timestamps, "
                        "wall_clocks_ns and flow_tags are\n"
                        "columns too, which are copied when they are asked for.\n\n"
                        "Parameters:\n"
                        "    capacity: how many completions it can hold.\n"
                        "Attributes:\n"
                        "    capacity: as given.\n"
                        "    all_ok: whether all requests succeeded.\n");

static PyType_Slot array_slots[] = {
    {Py_tp_doc, (void *)array_doc},
    {Py_tp_new, array_new},
    {Py_sq_length, array_length},
    {Py_sq_item, array_item},
    {Py_tp_traverse, array_traverse},
    {Py_tp_clear, array_tp_clear},
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_members, array_members},
    {Py_tp_getset, array_columns},
    {Py_tp_methods, array_methods},
    {0, NULL},
};

static PyType_Spec array_spec = {"ndpy._core.CompletionArray", sizeof(CompletionArray), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, array_slots};

int add_completion_arrays(PyObject *module)
{
    completion_array_type = add_type(module, &array_spec);
    return completion_array_type ? 0 : -1;
}
