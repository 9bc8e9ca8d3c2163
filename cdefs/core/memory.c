/* Elements of regions, and the memory of peers: what slicing and posting touch. */

#include "core.h"

PyTypeObject *element_type, *remote_type;
PyObject *range_error;
static struct spares spare_elements;

/* ---- slices ---- */

/* A limit of a slice as the program wrote it: an omitted one is empty. */
static PyObject *written(PyObject *key, const char *name)
{
    PyObject *limit = PyObject_GetAttrString(key, name), *text = NULL;

    if (limit)
        text = limit == Py_None ? PyUnicode_FromString("") : PyObject_Str(limit);
    Py_XDECREF(limit);
    return text;
}

static int outside(PyObject *key, const char *what, unsigned long long length, int is_negative)
{
    PyObject *start = written(key, "start"), *stop = start ? written(key, "stop") : NULL;

    if (stop)
        PyErr_Format(range_error, "[%U:%U] is outside %s of %llu bytes%s", start, stop, what, length,
                     is_negative ? "; the limits of a slice count from the beginning, not from the end" : "");
    Py_XDECREF(start);
    Py_XDECREF(stop);
    return -1;
}

int find_bounds(PyObject *key, unsigned long long whole, const char *what, unsigned long long *offset,
                unsigned long long *length)
{
    Py_ssize_t start, stop, step;
    unsigned long long end;

    if (!PySlice_Check(key)) {
        PyErr_Format(PyExc_TypeError, "%s is sliced by bytes, as in [0:8], not indexed by %R", what, key);
        return -1;
    }
    if (PySlice_Unpack(key, &start, &stop, &step) < 0)
        return -1;
    if (step != 1) {
        PyErr_Format(range_error, "%s is contiguous; a step of %zd is not possible", what, step);
        return -1;
    }
    end = (unsigned long long)stop;
    /* The largest number stands for an omitted end, and for every larger number. */
    if (stop == PY_SSIZE_T_MAX) {
        PyObject *given = PyObject_GetAttrString(key, "stop");

        if (!given)
            return -1;
        Py_DECREF(given);
        if (given == Py_None)
            end = whole;
    }
    if (start < 0 || stop < 0 || (unsigned long long)start > end || end > whole)
        return outside(key, what, whole, start < 0 || stop < 0);
    *offset = (unsigned long long)start;
    *length = end - (unsigned long long)start;
    remember_limits(key, start, stop);
    return 0;
}

static PyObject *core_slice_bounds(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *key;
    const char *what;
    unsigned long long whole, offset = 0, length = 0;

    if (!PyArg_ParseTuple(arguments, "OKs", &key, &whole, &what))
        return NULL;
    if (find_bounds(key, whole, what, &offset, &length) < 0)
        return NULL;
    return Py_BuildValue("KK", offset, length);
}

/* Reads an address, a length or a token. */
static int read_number(PyObject *number, const char *what, unsigned long long *out)
{
    *out = PyLong_AsUnsignedLongLong(number);
    if (*out != (unsigned long long)-1 || !PyErr_Occurred())
        return 0;
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s is 0 to 2**64-1, not %R", what, number);
    } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s is an integer, not %R", what, number);
    }
    return -1;
}

/* ---- elements ---- */

HOT PyObject *element_fill(PyObject *object, PyObject *region, unsigned long long address, unsigned long long length,
                           unsigned long long token)
{
    Element *element = (Element *)object;

    element->region = Py_NewRef(region);
    element->address = address;
    element->length = length;
    element->token = token;
    return object;
}

PyObject *element_new(PyObject *region, unsigned long long address, unsigned long long length, unsigned long long token)
{
    PyObject *element = make_reusable(&spare_elements, element_type);

    return element ? element_fill(element, region, address, length, token) : NULL;
}

static PyObject *element_create(PyTypeObject *Py_UNUSED(type), PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"region", "address", "length", "token", NULL};
    PyObject *region, *address, *length, *token;
    unsigned long long numbers[3];

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOO:Sge", names, &region, &address, &length, &token))
        return NULL;
    if (read_number(address, "an address", &numbers[0]) < 0 || read_number(length, "a length", &numbers[1]) < 0 ||
        read_number(token, "a token", &numbers[2]) < 0)
        return NULL;
    if (!PyObject_TypeCheck(region, region_type)) {
        PyErr_Format(PyExc_TypeError, "an Sge is a piece of a MemoryRegion, not of %R", region);
        return NULL;
    }
    return element_new(region, numbers[0], numbers[1], numbers[2]);
}

static int element_traverse(PyObject *self, visitproc visit, void *arg)
{
    Element *element = (Element *)self;

    element->head.was_visited = 1;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(element->region);
    Py_VISIT(element->export);
    return 0;
}

static int element_clear(PyObject *self)
{
    Element *element = (Element *)self;

    Py_CLEAR(element->region);
    Py_CLEAR(element->export);
    return 0;
}

static void element_dealloc(PyObject *self)
{
    Element *element = (Element *)self;
    PyObject *region = element->region, *export = element->export;

    element->region = element->export = NULL;
    if (!keep_spare(&spare_elements, self))
        free_tracked(self);
    Py_XDECREF(region);
    Py_XDECREF(export);
}

static PyObject *element_repr(PyObject *self)
{
    Element *element = (Element *)self;

    return PyUnicode_FromFormat("<Sge %llu bytes at %p>", element->length, (void *)(uintptr_t)element->address);
}

static PyMemberDef element_members[] = {
    {"region", T_OBJECT, offsetof(Element, region), READONLY, NULL},
    {"address", T_ULONGLONG, offsetof(Element, address), 0, NULL},
    {"length", T_ULONGLONG, offsetof(Element, length), 0, NULL},
    {"token", T_ULONGLONG, offsetof(Element, token), 0, NULL},
    {"_export", T_OBJECT, offsetof(Element, export), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(element_doc, "Sge(region, address, length, token)\n--\n\n"
                          "A scatter/gather element: a piece of a region, made by slicing the region.\n\n"
                          "Attributes:\n"
                          "    region: the region.\n"
                          "    address, length: where the piece is, and its length in bytes.\n"
                          "    token: the region's local token (verbs: lkey).\n");

static PyType_Slot element_slots[] = {
    {Py_tp_doc, (void *)element_doc}, {Py_tp_new, element_create},
    {Py_tp_repr, element_repr},       {Py_tp_traverse, element_traverse},
    {Py_tp_clear, element_clear},     {Py_tp_dealloc, element_dealloc},
    {Py_tp_members, element_members}, {0, NULL},
};

static PyType_Spec element_spec = {"ndpy._core.Sge", sizeof(Element), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                   element_slots};

/* ---- the memory of a peer ---- */

static int remote_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"address", "length", "token", NULL};
    Remote *remote = (Remote *)self;
    PyObject *address, *length, *token;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOO:RemoteMemory", names, &address, &length, &token))
        return -1;
    if (read_number(address, "an address", &remote->address) < 0 ||
        read_number(length, "a length", &remote->length) < 0 || read_number(token, "a token", &remote->token) < 0)
        return -1;
    return 0;
}

static PyObject *remote_slice(PyObject *self, PyObject *key)
{
    Remote *remote = (Remote *)self, *piece;
    unsigned long long offset = 0, length = 0;

    if (find_bounds(key, remote->length, "the remote memory", &offset, &length) < 0)
        return NULL;
    piece = (Remote *)PyType_GenericAlloc(Py_TYPE(self), 0);
    if (!piece)
        return NULL;
    /* Not the slice that it is a slice of: a program that goes on from slice to slice keeps none of them. */
    piece->sliced_from = (Remote *)Py_NewRef((PyObject *)(remote->sliced_from ? remote->sliced_from : remote));
    piece->address = remote->address + offset;
    piece->length = length;
    piece->token = remote->token;
    return (PyObject *)piece;
}

static void remote_dealloc(PyObject *self)
{
    Py_CLEAR(((Remote *)self)->sliced_from);
    free_object(self);
}

static PyMemberDef remote_members[] = {
    {"address", T_ULONGLONG, offsetof(Remote, address), 0, NULL},
    {"length", T_ULONGLONG, offsetof(Remote, length), 0, NULL},
    {"token", T_ULONGLONG, offsetof(Remote, token), 0, NULL},
    {"_sliced_from", T_OBJECT, offsetof(Remote, sliced_from), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot remote_slots[] = {
    {Py_tp_doc, "Memory of a peer."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, remote_init},
    {Py_mp_subscript, remote_slice},
    {Py_tp_dealloc, remote_dealloc},
    {Py_tp_members, remote_members},
    {0, NULL},
};

static PyType_Spec remote_spec = {"ndpy._core.RemoteMemory", sizeof(Remote), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, remote_slots};

/* ---- slices of regions ---- */

APART PyObject *slice_slowly(PyObject *self, PyObject *key)
{
    const Region *region = (Region *)self;
    unsigned long long offset = 0, length = 0;

    if (find_bounds(key, region->length, "the region", &offset, &length) < 0)
        return NULL;
    return element_new(self, region->address + offset, length, region->local_token);
}

PyObject *region_slice(PyObject *self, PyObject *key)
{
    const Region *region = (Region *)self;
    PyObject *element = is_last_slice(key, region->length) ? take_spare(&spare_elements) : NULL;

    if (!element)
        return slice_slowly(self, key);
    return element_fill(element, self, region->address + last_slice.offset, last_slice.end - last_slice.offset,
                        region->local_token);
}

/* ---- the module ---- */

PyDoc_STRVAR(slice_bounds_doc, "slice_bounds($module, key, length, what, /)\n--\n\n"
                               "The (offset, length) of a slice of `length` bytes. Raises ElementRangeError unless it "
                               "is inside; `what` names it.");

static PyMethodDef functions[] = {
    {"slice_bounds", core_slice_bounds, METH_VARARGS, slice_bounds_doc},
    {NULL, NULL, 0, NULL},
};

int add_memory(PyObject *module)
{
    range_error = imported("ndpy.errors", "ElementRangeError");
    find_limits();
    if (!range_error || PyModule_AddFunctions(module, functions) < 0)
        return -1;
    element_type = add_type(module, &element_spec);
    remote_type = add_value_type(module, &remote_spec);
    return element_type && remote_type ? 0 : -1;
}
