/* Registering plain memory with one native call, and the other end of that. Plain memory is a writable buffer, with
 * rights that every adapter supports. The provider's calls must block. Everything else is left to
 * ndpy/objects/adapter.py and ndpy/objects/memory.py, whose classes extend these types. They also explain each failure.
 * A region's life is that of any object: see resource.c.
 *
 * The provider's calls run without the interpreter's lock. Meanwhile begin_making() keeps the adapter open, and the
 * region's lock keeps other threads from closing the region. All steps between a call and the change of the circle hold
 * the interpreter's lock and run no Python code. So neither another thread nor Ctrl-C comes in between.
 */

#include "core.h"

PyTypeObject *region_type;

static PyObject *local_write;

/* ---- registering ---- */

/* Returns a region that is not registered yet. Returns NULL without an error if Python has to look at the memory. */
static Region *prepare(Adapter *adapter, PyObject *buffer, PyObject *access, long right)
{
    PyObject *view = PyMemoryView_FromObject(buffer);
    Region *region;
    void *address = NULL;
    Py_ssize_t length = 0;

    if (!view) {
        /* Python says what is wrong with it. */
        if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_BufferError) ||
            PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Clear();
        return NULL;
    }
    if (!plain_memory(view, &address, &length) || !length || (unsigned long long)length > adapter->longest) {
        Py_DECREF(view);
        return NULL;
    }
    region = (Region *)resource_new((PyTypeObject *)adapter->region_class, NULL, NULL);
    if (!region) {
        Py_DECREF(view);
        return NULL;
    }
    region->adapter = Py_NewRef((PyObject *)adapter);
    region->owner = view;
    region->buffer = Py_NewRef(buffer);
    region->access = Py_NewRef(access);
    region->address = (uintptr_t)address;
    region->length = (unsigned long long)length;
    region->writable = (right & (NDPY_LOCAL_WRITE | NDPY_READ_SINK)) != 0;
    return region;
}

/* Returns whether the memory is registered now. Nothing was allocated since the adapter was checked, so no finalizer
   can have closed it. */
static int register_now(Adapter *adapter, Region *region, uint32_t rights)
{
    const struct ndpy_registrar *registrar = adapter->registrar;
    void *domain = adapter->domain;
    struct ndpy_memory made = {NULL, 0, 0};
    int failed;

    if (!registrar || !begin_making(adapter))
        return 0;
    Py_BEGIN_ALLOW_THREADS failed =
        registrar->register_memory(domain, (void *)(uintptr_t)region->address, (size_t)region->length, rights, &made);
    Py_END_ALLOW_THREADS if (!failed)
    {
        region->handle = (uintptr_t)made.native;
        region->local_token = made.local_token;
        region->remote_token = made.remote_token;
        resource_open((Resource *)region);
    }
    end_making(adapter);
    return !failed;
}

/* Returns NULL without an error if Python has to register. */
static PyObject *register_plainly(Adapter *adapter, PyObject *buffer, PyObject *access)
{
    Region *region;
    long right;

    if (!adapter->registrar || Py_TYPE(access) != Py_TYPE(local_write))
        return NULL;
    right = PyLong_AsLong(access);
    if (right == -1 && PyErr_Occurred())
        PyErr_Clear();
    if (right < 0 || right >= PLAIN_RIGHTS)
        return NULL;
    region = prepare(adapter, buffer, access, right);
    if (!region)
        return NULL;
    if (register_now(adapter, region, adapter->rights[right]))
        return (PyObject *)region;
    Py_DECREF(region);
    return NULL;
}

enum { BUFFER, ACCESS, TIMEOUT, ARGUMENTS };

static PyObject *argument_names[ARGUMENTS];

const char register_doc[] =
    "register($self, buffer, access=1, *, timeout_s=None)\n--\n\n"
    "Pin a buffer, and let the adapter use it with these rights.\n\n"
    "The region keeps the buffer in place until it is closed.\n\n"
    "Parameters:\n"
    "    buffer: any contiguous buffer or array of 1 to info.max_registration_size bytes, at any address: an object "
    "with\n"
    "        the buffer protocol, __dlpack__, __array_interface__ or __cuda_array_interface__. Or the (address, "
    "length) "
    "of\n"
    "        memory that the caller keeps. An array in memory of a CUDA device is registered when its stream has "
    "ended.\n"
    "    access: see Access; LOCAL_WRITE (1) unless given. If info.capabilities lacks REGION_ACCESS (NetworkDirect "
    "version\n"
    "        1), the adapter enforces no rights. Then ndpy itself refuses to receive or read into a region without\n"
    "        LOCAL_WRITE. Remote rights have no effect then: peers get rights from windows, and every region can have\n"
    "        windows.\n"
    "    timeout_s: how long to wait. None waits for ever. A registration that takes longer is cancelled.\n"
    "Raises:\n"
    "    InvalidBufferError: the buffer is empty, is not C-contiguous, or holds Python objects.\n"
    "    AccessViolationError: a right needs to write, but the buffer is read-only. Or the memory is not mapped.\n"
    "    LimitExceededError: the buffer is too long.\n"
    "    InsufficientResourcesError: the memory cannot be pinned. The message gives the reason and the remedy.\n"
    "    TimeoutError: the deadline passed.\n"
    "    UnsupportedError: a device has the memory, and the adapter or the system gives no way to it.\n"
    "    ProviderError: the device's driver refused. `native` is the number of its error.\n"
    "Source: IND2MemoryRegion::Register (contract D.2); INDAdapter::RegisterMemory (contract I.2); ibv_reg_mr(3).";

PyObject *adapter_register(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[ARGUMENTS] = {NULL}, *region = NULL;

    if (sort_arguments("register", arguments, count, keywords, argument_names, TIMEOUT, ARGUMENTS, given) < 0)
        return NULL;
    if (!given[BUFFER]) {
        PyErr_SetString(PyExc_TypeError, "register() needs a buffer");
        return NULL;
    }
    if (!given[ACCESS])
        given[ACCESS] = local_write;
    if (!given[TIMEOUT])
        given[TIMEOUT] = Py_None;
    if (given[TIMEOUT] == Py_None)
        region = register_plainly((Adapter *)self, given[BUFFER], given[ACCESS]);
    if (region || PyErr_Occurred())
        return region;
    return PyObject_CallMethod(self, "_register_in_python", "OOO", given[BUFFER], given[ACCESS], given[TIMEOUT]);
}

/* ---- deregistering ---- */

int region_deregister(Region *region)
{
    const struct ndpy_registrar *registrar = NULL;
    unsigned long long handle = region->handle;
    int failed;

    if (region->adapter && PyObject_TypeCheck(region->adapter, adapter_type))
        registrar = ((Adapter *)region->adapter)->registrar;
    if (!registrar || !handle || (region->bindings && PySet_Size(region->bindings)))
        return 0;
    region->handle = 0;
    Py_BEGIN_ALLOW_THREADS failed = registrar->deregister_memory((void *)(uintptr_t)handle);
    Py_END_ALLOW_THREADS if (failed) region->handle = handle;
    return !failed;
}

/* ---- regions ---- */

static int region_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Region *)self)->buffer);
    Py_VISIT(((Region *)self)->bindings);
    return resource_traverse(self, visit, arg);
}

static int region_clear(PyObject *self)
{
    Py_CLEAR(((Region *)self)->buffer);
    Py_CLEAR(((Region *)self)->bindings);
    return resource_clear(self);
}

static void region_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    region_clear(self);
    Py_CLEAR(((Region *)self)->access);
    resource_dealloc(self);
}

static PyObject *region_bindings(PyObject *self, void *Py_UNUSED(closure))
{
    Region *region = (Region *)self;

    PyObject *bindings;

    BEGIN_SECTION(self)
    if (!region->bindings)
        region->bindings = PySet_New(NULL);
    bindings = Py_XNewRef(region->bindings);
    END_SECTION()
    return bindings;
}

static PyMemberDef region_members[] = {
    {"_handle", T_ULONGLONG, offsetof(Region, handle), 0, "The address of the provider's object, or 0."},
    {"_is_elsewhere", T_BOOL, offsetof(Region, elsewhere), 0,
     "Whether the addresses of its elements are not those of its memory in this process."},
    {"buffer", T_OBJECT, offsetof(Region, buffer), 0, NULL},
    {"address", T_ULONGLONG, offsetof(Region, address), 0, NULL},
    {"length", T_ULONGLONG, offsetof(Region, length), 0, NULL},
    {"access", T_OBJECT, offsetof(Region, access), 0, NULL},
    {"local_token", T_ULONGLONG, offsetof(Region, local_token), 0, NULL},
    {"remote_token", T_ULONGLONG, offsetof(Region, remote_token), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef region_properties[] = {
    FLAG("_writable", Region, writable, NULL),
    {"_bindings", region_bindings, NULL, "The bindings of windows to this region.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot region_slots[] = {
    {Py_tp_doc, "The part of a region that slicing, posting, registering and closing need."},
    {Py_mp_subscript, region_slice},
    {Py_tp_traverse, region_traverse},
    {Py_tp_clear, region_clear},
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_members, region_members},
    {Py_tp_getset, region_properties},
    {0, NULL},
};

static PyType_Spec region_spec = {"ndpy._core.MemoryRegion", sizeof(Region), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, region_slots};

/* ---- the module ---- */

int add_regions(PyObject *module)
{
    static const char *const names[ARGUMENTS] = {"buffer", "access", "timeout_s"};
    PyObject *access;

    for (int which = 0; which < ARGUMENTS; which++) {
        argument_names[which] = interned(names[which]);
        if (!argument_names[which])
            return -1;
    }
    access = imported("ndpy.vocabulary.flags", "Access");
    local_write = access ? PyObject_GetAttrString(access, "LOCAL_WRITE") : NULL;
    Py_XDECREF(access);
    region_type = add_resource_type(module, &region_spec);
    return local_write && region_type ? 0 : -1;
}
