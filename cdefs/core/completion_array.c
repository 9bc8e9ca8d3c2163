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
    PyObject *bytes;
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
    bytes = bytes_new((size_t)capacity * sizeof *array->entries);
    /* The views keep the program from changing the size. */
    array->views[0] = bytes ? view_as(bytes, "Q") : NULL;
    array->views[1] = bytes ? view_as(bytes, "I") : NULL;
    if (array->views[1])
        array->entries = (struct ndpy_completion *)PyByteArray_AsString(bytes);
    Py_XDECREF(bytes);
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

/* A column: the part of each completion at this offset. detail: the part of its details of this kind, or 0. */
struct column {
    size_t offset;
    size_t size;
    uint32_t detail;
};

/* What the entries have, shown. Called in a section of the array. */
static PyObject *show_column(CompletionArray *array, const struct column *column)
{
    Py_ssize_t step = (Py_ssize_t)(sizeof(struct ndpy_completion) / column->size);
    PyObject *numbers[3] = {PyLong_FromSize_t(column->offset / column->size), PyLong_FromSsize_t(array->count * step),
                            PyLong_FromSsize_t(step)};
    PyObject *slice = NULL, *result = NULL;

    if (numbers[0] && numbers[1] && numbers[2])
        slice = PySlice_New(numbers[0], numbers[1], numbers[2]);
    if (slice)
        result = PyObject_GetItem(array->views[column->size == sizeof(uint32_t)], slice);
    Py_XDECREF(slice);
    for (int which = 0; which < 3; which++)
        Py_XDECREF(numbers[which]);
    return result;
}

/* What the details have, copied: 0 where it is missing. Called in a section of the array. */
static PyObject *copy_column(CompletionArray *array, const struct column *column)
{
    uint32_t count = array->count;
    PyObject *bytes = bytes_new(count * column->size), *result = NULL;
    char *out = bytes ? PyByteArray_AsString(bytes) : NULL;

    /* A poll may have filled the array again meanwhile. */
    for (uint32_t place = 0; out && array->details && place < count && place < array->count; place++) {
        const struct ndpy_details *details = details_with(array->details[place], column->detail);

        if (details)
            memcpy(out + place * column->size, (const char *)details + column->offset, column->size);
    }
    if (bytes)
        result = view_as(bytes, column->size == sizeof(uint64_t) ? "Q" : "I");
    Py_XDECREF(bytes);
    return result;
}

static PyObject *array_column(PyObject *self, void *column)
{
    PyObject *result;

    BEGIN_SECTION(self)
    if (((const struct column *)column)->detail)
        result = copy_column((CompletionArray *)self, column);
    else
        result = show_column((CompletionArray *)self, column);
    END_SECTION()
    return result;
}

static PyMemberDef array_members[] = {
    {"capacity", T_PYSSIZET, offsetof(CompletionArray, capacity), READONLY, "How many completions it can hold."},
    {NULL, 0, 0, 0, NULL},
};

#define PART(type, field) offsetof(type, field), sizeof(((type *)NULL)->field)
#define COLUMN(name, field, doc) \
    {name, array_column, NULL, doc, (void *)&(const struct column){PART(struct ndpy_completion, field), 0}}
#define DETAILS_COLUMN(name, field, kind, doc)                        \
    {                                                                 \
        name, array_column, NULL, doc, (void *)&(const struct column) \
        {                                                             \
            PART(struct ndpy_details, field), kind                    \
        }                                                             \
    }

static PyGetSetDef array_columns[] = {
    {"all_ok", array_all_ok, NULL, "Whether all requests succeeded.", NULL},
    COLUMN("contexts", context, "The context of each request, 64 bits."),
    COLUMN("nbytes", nbytes, "How many bytes each successful request moved, 64 bits."),
    COLUMN("operations", operation, "The Operation of each request, 32 bits."),
    COLUMN("statuses", status, "The Status of each request, 32 bits."),
    COLUMN("immediates", vendor_status,
           "The immediate data of each receive, 32 bits. It means nothing for a completion that has none."),
    COLUMN("native_statuses", native_status, "The provider's own number for each status, 32 bits."),
    DETAILS_COLUMN("timestamps", timestamp, NDPY_TIMESTAMP,
                   "The timestamp of each completion, 64 bits. 0 for one that has none. Copied."),
    DETAILS_COLUMN("wall_clocks_ns", wall_clock, NDPY_WALL_CLOCK,
                   "The wall_clock_ns of each completion, 64 bits. 0 for one that has none. Copied."),
    DETAILS_COLUMN("flow_tags", flow_tag, NDPY_FLOW_TAG,
                   "The flow_tag of each completion, 32 bits. 0 for one that has none. Copied."),
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
