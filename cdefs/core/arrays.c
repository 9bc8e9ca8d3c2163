/* Memory of arrays that have no buffer interface. ndpy/objects/arrays.py judges what they say of themselves; this file
   has what that needs of C: it takes a DLPack capsule, and lends memory as a buffer.

   Source: dlpack.h of DLPack 1.1, and "Python Specification for DLPack". */

#include "core.h"

#include <string.h>

/* ---- DLPack ---- */

struct device {
    int32_t type;
    int32_t id;
};

struct element_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct tensor {
    void *data;
    struct device device;
    int32_t dimensions;
    struct element_type type;
    const int64_t *shape;
    const int64_t *strides;
    uint64_t offset;
};

struct managed {
    struct tensor tensor;
    void *manager;
    void (*deleter)(struct managed *self);
};

struct managed_versioned {
    uint32_t major;
    uint32_t minor;
    void *manager;
    void (*deleter)(struct managed_versioned *self);
    uint64_t flags;
    struct tensor tensor;
};

enum { MAJOR = 1, MOST_DIMENSIONS = 64 };

/* A tensor that was taken out of its capsule. The collector does not see it: its deleter must not run before everybody
   who uses the memory has let go of it. */
typedef struct {
    PyObject_HEAD struct managed *managed;
    struct managed_versioned *versioned;
} Tensor;

static const char plain_name[] = "dltensor", versioned_name[] = "dltensor_versioned";

static PyTypeObject *tensor_type;

/* Takes the tensor. A capsule that was taken has another name, so nobody else takes it. Returns 0, or -1 with an
   error. */
static int take(Tensor *self, PyObject *capsule)
{
    int is_taken = 0;

    BEGIN_SECTION(capsule)
    if (PyCapsule_IsValid(capsule, versioned_name)) {
        self->versioned = PyCapsule_GetPointer(capsule, versioned_name);
        is_taken = !PyCapsule_SetName(capsule, "used_dltensor_versioned");
    } else if (PyCapsule_IsValid(capsule, plain_name)) {
        self->managed = PyCapsule_GetPointer(capsule, plain_name);
        is_taken = !PyCapsule_SetName(capsule, "used_dltensor");
    }
    END_SECTION()
    if (is_taken)
        return 0;
    self->versioned = NULL;
    self->managed = NULL;
    if (!PyErr_Occurred() && PyCapsule_CheckExact(capsule)) {
        const char *name = PyCapsule_GetName(capsule);

        PyErr_Format(PyExc_ValueError, "the capsule is \"%s\", not one of a tensor that nobody has taken",
                     name ? name : "");
    } else if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError, "%R is not a capsule", (PyObject *)Py_TYPE(capsule));
    }
    return -1;
}

static PyObject *tensor_create(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *capsule;
    Tensor *self;

    if (!PyArg_ParseTuple(arguments, "O:Tensor", &capsule))
        return NULL;
    self = (Tensor *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    if (take(self, capsule) < 0) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    /* A later major version may have another layout after the deleter. */
    if (self->versioned && self->versioned->major != MAJOR) {
        PyErr_Format(PyExc_ValueError, "it is of DLPack %u.%u, and only version %d is known", self->versioned->major,
                     self->versioned->minor, MAJOR);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void tensor_dealloc(PyObject *object)
{
    Tensor *self = (Tensor *)object;
    struct managed *managed = self->managed;
    struct managed_versioned *versioned = self->versioned;
    PyObject *type, *value, *traceback;

    self->managed = NULL;
    self->versioned = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    if (managed && managed->deleter)
        managed->deleter(managed);
    if (versioned && versioned->deleter)
        versioned->deleter(versioned);
    PyErr_Restore(type, value, traceback);
    free_object(object);
}

static PyObject *tuple_of(const int64_t *numbers, int32_t count)
{
    PyObject *tuple = PyTuple_New(count), *number;

    for (int32_t place = 0; tuple && place < count; place++) {
        number = PyLong_FromLongLong(numbers[place]);
        if (!number || PyTuple_SetItem(tuple, place, number) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *tensor_describe(PyObject *object, PyObject *Py_UNUSED(none))
{
    const Tensor *self = (Tensor *)object;
    const struct tensor *tensor = self->versioned ? &self->versioned->tensor : &self->managed->tensor;
    int32_t count = tensor->dimensions;
    PyObject *shape, *strides;

    if (count < 0 || count > MOST_DIMENSIONS || (count && !tensor->shape))
        return PyErr_Format(PyExc_ValueError, "it has %d dimensions%s", count,
                            count && !tensor->shape ? " and no shape" : "");
    shape = tuple_of(tensor->shape, count);
    strides = shape && tensor->strides ? tuple_of(tensor->strides, count) : Py_NewRef(Py_None);
    if (!shape || !strides) {
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return NULL;
    }
    return Py_BuildValue("(KKNN(iii)(ii)K)", (unsigned long long)(uintptr_t)tensor->data,
                         (unsigned long long)tensor->offset, shape, strides, (int)tensor->type.code,
                         (int)tensor->type.bits, (int)tensor->type.lanes, (int)tensor->device.type,
                         (int)tensor->device.id, self->versioned ? (unsigned long long)self->versioned->flags : 0ull);
}

static PyMethodDef tensor_methods[] = {
    {"describe", tensor_describe, METH_NOARGS,
     "describe($self, /)\n--\n\nReturn (data, offset, shape, strides or None, (code, bits, lanes), (device's type, its "
     "number), flags)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, "Tensor(capsule): takes a DLPack capsule, and calls its deleter when nothing refers to it any longer."},
    {Py_tp_new, tensor_create},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_methods, tensor_methods},
    {0, NULL},
};

static PyType_Spec tensor_spec = {"ndpy._core.Tensor", sizeof(Tensor), 0, Py_TPFLAGS_DEFAULT, tensor_slots};

/* ---- memory as a buffer ---- */

/* producer: the array. owner: what keeps its memory, such as a Tensor. There is no tp_clear: the memory stays as long
   as a view of it does. */
typedef struct {
    PyObject_HEAD PyObject *producer;
    PyObject *owner;
    PyObject *device;
    unsigned long long address;
    Py_ssize_t length;
    char is_readonly;
} ArrayMemory;

static PyObject *array_create(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *producer, *owner, *device;
    unsigned long long address;
    Py_ssize_t length;
    int is_readonly;
    ArrayMemory *self;

    if (!PyArg_ParseTuple(arguments, "OOKnpO:ArrayMemory", &producer, &owner, &address, &length, &is_readonly, &device))
        return NULL;
    self = (ArrayMemory *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->producer = Py_NewRef(producer);
    self->owner = Py_NewRef(owner);
    self->device = Py_NewRef(device);
    self->address = address;
    self->length = length;
    self->is_readonly = (char)is_readonly;
    return (PyObject *)self;
}

static int array_traverse(PyObject *object, visitproc visit, void *arg)
{
    ArrayMemory *self = (ArrayMemory *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->producer);
    Py_VISIT(self->owner);
    return 0;
}

static void array_dealloc(PyObject *object)
{
    ArrayMemory *self = (ArrayMemory *)object;

    PyObject_GC_UnTrack(object);
    /* The memory before the array. */
    Py_CLEAR(self->owner);
    Py_CLEAR(self->producer);
    Py_CLEAR(self->device);
    free_object(object);
}

static int array_export(PyObject *object, struct buffer *buffer, int flags)
{
    ArrayMemory *self = (ArrayMemory *)object;

    if (self->device == Py_None)
        return export_bytes(object, buffer, flags, (void *)(uintptr_t)self->address, self->length, self->is_readonly);
    buffer->object = NULL;
    PyErr_SetString(PyExc_BufferError, "a device has the memory");
    return -1;
}

static PyMemberDef array_members[] = {
    {"producer", T_OBJECT_EX, offsetof(ArrayMemory, producer), READONLY, NULL},
    {"device", T_OBJECT_EX, offsetof(ArrayMemory, device), READONLY, NULL},
    {"address", T_ULONGLONG, offsetof(ArrayMemory, address), READONLY, NULL},
    {"nbytes", T_PYSSIZET, offsetof(ArrayMemory, length), READONLY, NULL},
    {"readonly", T_BOOL, offsetof(ArrayMemory, is_readonly), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot array_slots[] = {
    {Py_tp_doc, "ArrayMemory(producer, owner, address, length, readonly, device): the bytes of an array, which exports "
                "them as a buffer if no device has them."},
    {Py_tp_new, array_create},
    {Py_tp_traverse, array_traverse},
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_members, array_members},
    {SLOT_GET_BUFFER, array_export},
    {0, NULL},
};

static PyType_Spec array_spec = {"ndpy._core.ArrayMemory", sizeof(ArrayMemory), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, array_slots};

/* ---- the module ---- */

int add_arrays(PyObject *module)
{
    tensor_type = add_type(module, &tensor_spec);
    return tensor_type && add_type(module, &array_spec) ? 0 : -1;
}
