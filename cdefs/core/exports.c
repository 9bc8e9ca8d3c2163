/* Exports of buffers: what a memoryview does, without being one. And Owned, which frees what other libraries have made.

   Without the interpreter's lock, bytearray and memoryview of CPython 3.13 count their exports without any other lock.
   So a buffer is asked for, and let go of, in a section of the object. */

#include "core.h"

#include <string.h>

PyTypeObject *export_type;

static struct spares spare_exports;

/* Slots and flags of the buffer protocol, which the limited API names since 3.11. */
enum { SLOT_RELEASE_BUFFER = 2, WRITABLE = 1, FORMAT = 4, SHAPE = 8, STRIDES = 0x18, C_CONTIGUOUS = 0x38 };

typedef int (*get_buffer)(PyObject *object, struct buffer *buffer, int flags);
typedef void (*release_buffer)(PyObject *object, struct buffer *buffer);

Export *export_new(PyObject *object)
{
    get_buffer get = (get_buffer)PyType_GetSlot(Py_TYPE(object), SLOT_GET_BUFFER);
    PyObject *export;
    int failed;

    if (!get) {
        PyErr_Format(PyExc_TypeError, "%R is not a buffer", (PyObject *)Py_TYPE(object));
        return NULL;
    }
    export = take_spare(&spare_exports);
    if (!export)
        export = make_reusable(&spare_exports, export_type);
    if (!export)
        return NULL;
    BEGIN_SECTION(object)
    failed = get(object, &((Export *)export)->buffer, C_CONTIGUOUS);
    END_SECTION()
    if (!failed)
        return (Export *)export;
    ((Export *)export)->buffer.object = NULL;
    Py_DECREF(export);
    return NULL;
}

static void let_go(struct buffer *buffer)
{
    PyObject *object = buffer->object;
    release_buffer release;

    if (!object)
        return;
    release = (release_buffer)PyType_GetSlot(Py_TYPE(object), SLOT_RELEASE_BUFFER);
    BEGIN_SECTION(object)
    if (release)
        release(object, buffer);
    END_SECTION()
    buffer->object = NULL;
    Py_DECREF(object);
}

int plain_memory(PyObject *view, void **address, Py_ssize_t *length)
{
    get_buffer get = (get_buffer)PyType_GetSlot(Py_TYPE(view), SLOT_GET_BUFFER);
    release_buffer release = (release_buffer)PyType_GetSlot(Py_TYPE(view), SLOT_RELEASE_BUFFER);
    struct buffer buffer = {0};
    int is_plain;

    if (get(view, &buffer, C_CONTIGUOUS | WRITABLE | FORMAT) < 0) {
        PyErr_Clear();
        return 0;
    }
    is_plain = !buffer.format || !strchr(buffer.format, 'O');
    *address = buffer.address;
    *length = buffer.length;
    release(view, &buffer);
    Py_DECREF(buffer.object);
    return is_plain;
}

int export_bytes(PyObject *object, struct buffer *buffer, int flags, void *address, Py_ssize_t length, int is_readonly)
{
    buffer->object = NULL;
    if (is_readonly && flags & WRITABLE) {
        PyErr_SetString(PyExc_BufferError, "it is read-only");
        return -1;
    }
    *buffer = (struct buffer){.address = address,
                              .object = Py_NewRef(object),
                              .length = length,
                              .item_size = 1,
                              .is_readonly = is_readonly,
                              .dimensions = 1};
    if (flags & FORMAT)
        buffer->format = "B";
    if (flags & SHAPE)
        buffer->shape = &buffer->length;
    if ((flags & STRIDES) == STRIDES)
        buffer->strides = &buffer->item_size;
    return 0;
}

static PyObject *export_create(PyTypeObject *Py_UNUSED(type), PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *object;

    if (!PyArg_ParseTuple(arguments, "O:Export", &object))
        return NULL;
    return (PyObject *)export_new(object);
}

static int export_traverse(PyObject *self, visitproc visit, void *arg)
{
    PyObject *object = ((Export *)self)->buffer.object;

    ((Reusable *)self)->was_visited = 1;
    Py_VISIT(Py_TYPE(self));
    /* CPython's collector clears a memoryview of a cycle although it has exports, and the program crashes when the last
       of these is let go of (memory_clear() and _memory_release() in Objects/memoryobject.c). One that is not visited
       is no garbage for it. */
    if (object && !PyMemoryView_Check(object))
        Py_VISIT(object);
    return 0;
}

static int export_clear(PyObject *self)
{
    let_go(&((Export *)self)->buffer);
    return 0;
}

static void export_dealloc(PyObject *self)
{
    if (!HAS_GIL) {
        PyObject_GC_UnTrack(self);
        let_go(&((Export *)self)->buffer);
        free_object(self);
        return;
    }
    /* The buffer's own code may run a garbage collection, which takes a tracked object without references for garbage.
     */
    Py_SET_REFCNT(self, 1);
    let_go(&((Export *)self)->buffer);
    if (Py_REFCNT(self) > 1) {
        /* The collector's functions have given it to somebody. */
        Py_DECREF(self);
        return;
    }
    Py_SET_REFCNT(self, 0);
    if (!keep_spare(&spare_exports, self))
        free_tracked(self);
}

static PyObject *export_address(PyObject *self, void *Py_UNUSED(none))
{
    return PyLong_FromVoidPtr(((Export *)self)->buffer.address);
}

static PyGetSetDef export_properties[] = {
    {"address", export_address, NULL, "The address of the first byte.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot export_slots[] = {
    {Py_tp_doc, "Export(buffer): keeps the memory of a buffer in place while it exists."},
    {Py_tp_new, export_create},
    {Py_tp_traverse, export_traverse},
    {Py_tp_clear, export_clear},
    {Py_tp_dealloc, export_dealloc},
    {Py_tp_getset, export_properties},
    {0, NULL},
};

static PyType_Spec export_spec = {"ndpy._core.Export", sizeof(Export), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                  export_slots};

/* ---- Owned ---- */

/* Calls free(*arguments) when nothing refers to it any more, and not before. The destructor that cffi.gc() adds is a
   finalizer: the collector calls it for garbage that a later finalizer still uses, as that of a region, whose adapter
   then deregisters it. So the collector does not see this object, and neither `free` nor the arguments may lead back to
   it. memory: what it exports as a buffer, or nothing. */
typedef struct {
    PyObject_HEAD PyObject *free;
    PyObject *arguments;
    struct buffer memory;
} Owned;

static PyObject *owned_create(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    PyObject *function, *given, *memory = NULL;
    get_buffer get = NULL;
    Owned *self;

    if (!PyArg_ParseTuple(arguments, "OO!|O:Owned", &function, &PyTuple_Type, &given, &memory))
        return NULL;
    if (memory && memory != Py_None && !(get = (get_buffer)PyType_GetSlot(Py_TYPE(memory), SLOT_GET_BUFFER)))
        return PyErr_Format(PyExc_TypeError, "%R is not a buffer", (PyObject *)Py_TYPE(memory));
    self = (Owned *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    if (get && get(memory, &self->memory, WRITABLE) < 0) {
        self->memory.object = NULL;
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->free = Py_NewRef(function);
    self->arguments = Py_NewRef(given);
    return (PyObject *)self;
}

static void owned_dealloc(PyObject *object)
{
    Owned *self = (Owned *)object;
    PyObject *type, *value, *traceback, *result;

    PyErr_Fetch(&type, &value, &traceback);
    let_go(&self->memory);
    if (self->free) {
        result = PyObject_Call(self->free, self->arguments, NULL);
        if (!result)
            PyErr_WriteUnraisable(self->free);
        Py_XDECREF(result);
    }
    Py_CLEAR(self->free);
    Py_CLEAR(self->arguments);
    PyErr_Restore(type, value, traceback);
    free_object(object);
}

static int owned_export(PyObject *object, struct buffer *buffer, int flags)
{
    Owned *self = (Owned *)object;

    if (self->memory.object)
        return export_bytes(object, buffer, flags, self->memory.address, self->memory.length, 0);
    buffer->object = NULL;
    PyErr_SetString(PyExc_BufferError, "it has no memory");
    return -1;
}

static PyType_Slot owned_slots[] = {
    {Py_tp_doc, "Owned(free, arguments, memory=None): calls free(*arguments) when nothing refers to it any longer. "
                "Exports the memory."},
    {Py_tp_new, owned_create},
    {Py_tp_dealloc, owned_dealloc},
    {SLOT_GET_BUFFER, owned_export},
    {0, NULL},
};

static PyType_Spec owned_spec = {"ndpy._core.Owned", sizeof(Owned), 0, Py_TPFLAGS_DEFAULT, owned_slots};

/* ---- the module ---- */

int add_exports(PyObject *module)
{
    export_type = add_type(module, &export_spec);
    return export_type && add_type(module, &owned_spec) ? 0 : -1;
}
