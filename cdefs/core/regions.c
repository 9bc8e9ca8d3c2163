/* Regions, and registering plain memory with one native call. Plain memory is a writable buffer, with rights that every
 * adapter supports. The provider's calls must block. Everything else is left to ndpy/objects/adapter.py and ndpy/objects/memory.py,
 * whose classes extend these types. They also explain each failure.
 *
 * An adapter has its open regions in a circle of links, which are no references. A region leaves the circle when it is
 * closed, or when it is freed.
 *
 * The provider's calls run without the interpreter's lock. Meanwhile the count `registering` keeps the adapter open,
 * and the region's lock keeps other threads from closing the region. All steps between a call and the change of the
 * circle hold the interpreter's lock and run no Python code. So neither another thread nor Ctrl-C comes in between.
 * Without the interpreter's lock, circle_mutex guards the circles and the counts, and an adapter has a region in its
 * circle before the count goes down.
 */

#include "core.h"

PyTypeObject *region_type;

static PyTypeObject *closed_type;
MUTEX(circle_mutex)
static PyObject *local_write, *serial_numbers, *closed_error;

/* Returns 0, or -1 with an error. ndpy/objects/memory.py calls set_up_regions(). */
static int require_set_up(void)
{
    if (local_write)
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "ndpy.objects.memory has not been imported");
    return -1;
}

/* Gives the caller's reference to a field that is set once, or seldom. */
static void set(PyObject **field, PyObject *reference)
{
    PyObject *former = *field;

    *field = reference;
    Py_XDECREF(former);
}

/* Gives the caller's reference to a field of an object. */
static void replace(PyObject *object, PyObject * SHARED * field, PyObject *reference)
{
    PyObject *former;

    (void)object;
    BEGIN_SECTION(object)
    former = *field;
    *field = reference;
    END_SECTION()
    Py_XDECREF(former);
}

/* ---- the circle of open regions ---- */

static void take_out(struct link *link)
{
    if (!link->next)
        return;
    link->next->previous = link->previous;
    link->previous->next = link->next;
    link->next = link->previous = NULL;
}

static void link_out(struct link *link)
{
    mutex_lock(&circle_mutex);
    take_out(link);
    mutex_unlock(&circle_mutex);
}

static void link_in(struct link *first, struct link *link)
{
    mutex_lock(&circle_mutex);
    take_out(link);
    link->next = first;
    link->previous = first->previous;
    first->previous->next = link;
    first->previous = link;
    mutex_unlock(&circle_mutex);
}

/* Makes a region that is not open. Returns NULL with an error. */
static Region *allocate(PyTypeObject *type)
{
    Region *region = (Region *)PyType_GenericAlloc(type, 0);

    if (!region)
        return NULL;
    region->released = 1;
#ifdef Py_GIL_DISABLED
    region->weak = PyWeakref_NewRef((PyObject *)region, NULL);
    /* Objects of the type itself have no weak references. They are for tests. */
    if (!region->weak)
        PyErr_Clear();
#endif
    return region;
}

/* Returns a new reference to a region in a circle, or NULL without an error if it is being freed. Called with
 * circle_mutex. */
static PyObject *find(Region *region)
{
#ifdef Py_GIL_DISABLED
    PyObject *found = NULL;

    if (region->weak && PyWeakref_GetRef(region->weak, &found) < 0)
        PyErr_Clear();
    return found;
#else
    /* Without references, it tells its weak references that it is being freed. */
    return Py_REFCNT((PyObject *)region) > 0 ? Py_NewRef((PyObject *)region) : NULL;
#endif
}

/* ---- what a closed region raises ---- */

/* address, length: of the region. It does not refer to the region, whose buffer would stay until the garbage collector
   runs. */
typedef struct {
    PyObject_HEAD unsigned long long address;
    unsigned long long length;
} Closed;

static PyObject *closed_call(PyObject *self, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    const Closed *closed = (Closed *)self;

    if (require_set_up() < 0)
        return NULL;
    return PyObject_CallFunction(closed_error, "KK", closed->address, closed->length);
}

static void closed_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot closed_slots[] = {
    {Py_tp_doc, "Makes the exception for a use of a closed region."},
    {Py_tp_call, closed_call},
    {Py_tp_dealloc, closed_dealloc},
    {0, NULL},
};

static PyType_Spec closed_spec = {"ndpy._core.Closed", sizeof(Closed), 0, Py_TPFLAGS_DEFAULT, closed_slots};

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
    region = allocate((PyTypeObject *)adapter->region_class);
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

/* Returns a new reference. */
static PyObject *defunct_of(Adapter *adapter)
{
    PyObject *defunct;

    BEGIN_SECTION((PyObject *)adapter)
    defunct = Py_NewRef(adapter->defunct);
    END_SECTION()
    return defunct;
}

static void join(Region *region)
{
    Adapter *adapter = (Adapter *)region->adapter;

    region->released = 0;
    link_in(&adapter->regions, &region->link);
    /* A removal marks the adapter before its regions. */
    if (!is_usable(adapter->defunct))
        replace((PyObject *)region, &region->defunct, defunct_of(adapter));
}

/* Returns whether the memory is registered now. Nothing was allocated since the adapter was checked, so no finalizer
   can have closed it. */
static int register_now(Adapter *adapter, Region *region, uint32_t rights)
{
    const struct ndpy_registrar *registrar = adapter->registrar;
    void *domain = adapter->domain;
    struct ndpy_memory made = {NULL, 0, 0};
    int failed, may;

    mutex_lock(&circle_mutex);
    may = registrar && !adapter->closing && is_usable(adapter->defunct);
    if (may)
        adapter->registering++;
    mutex_unlock(&circle_mutex);
    if (!may)
        return 0;
    Py_BEGIN_ALLOW_THREADS failed =
        registrar->register_memory(domain, (void *)(uintptr_t)region->address, (size_t)region->length, rights, &made);
    Py_END_ALLOW_THREADS if (!failed)
    {
        region->handle = (uintptr_t)made.native;
        region->local_token = made.local_token;
        region->remote_token = made.remote_token;
        join(region);
    }
    mutex_lock(&circle_mutex);
    adapter->registering--;
    mutex_unlock(&circle_mutex);
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

PyDoc_STRVAR(
    register_doc,
    "register($self, buffer, access=1, *, timeout_s=None)\n--\n\n"
    "Pin a buffer, and let the adapter use it with these rights.\n\n"
    "The region keeps the buffer in place until it is closed.\n\n"
    "Parameters:\n"
    "    buffer: any object with the buffer protocol, 1 to info.max_registration_size bytes, at any address. Or the\n"
    "        (address, length) of memory that the caller keeps.\n"
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
    "Source: IND2MemoryRegion::Register (contract D.2); INDAdapter::RegisterMemory (contract I.2); ibv_reg_mr(3).");

static PyObject *adapter_register(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[ARGUMENTS] = {NULL}, *region = NULL;

    if (sort_arguments("register", arguments, count, keywords, argument_names, TIMEOUT, ARGUMENTS, given) < 0)
        return NULL;
    if (!given[BUFFER]) {
        PyErr_SetString(PyExc_TypeError, "register() needs a buffer");
        return NULL;
    }
    if (require_set_up() < 0)
        return NULL;
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

/* ---- closing ---- */

static int is_adapter(PyObject *object)
{
    return object && PyObject_TypeCheck(object, adapter_type);
}

static int has_orphans(PyObject *adapter)
{
    const Orphans *orphans = is_adapter(adapter) ? (Orphans *)((Adapter *)adapter)->orphans : NULL;

    if (!orphans || !PyObject_TypeCheck((PyObject *)orphans, orphans_type) || !orphans->dropped)
        return 0;
    return orphans->is_closing || PyObject_Size(orphans->dropped) != 0;
}

/* Returns a new reference to the lock. */
static RLock *lock_of(Region *region)
{
    RLock *lock;

    BEGIN_SECTION((PyObject *)region)
    if (!region->lifetime)
        region->lifetime = rlock_new();
    lock = (RLock *)Py_XNewRef(region->lifetime);
    END_SECTION()
    return lock;
}

static int is_bound(const Region *region)
{
    return region->bindings && PySet_Size(region->bindings) != 0;
}

static Closed *closed_new(const Region *region)
{
    Closed *closed = PyObject_New(Closed, closed_type);

    if (!closed)
        return NULL;
    closed->address = region->address;
    closed->length = region->length;
    return closed;
}

/* The provider's object has gone. Returns 0, or -1 with an error. */
static int mark_closed(Region *region, Closed *closed)
{
    PyObject *nothing;

    region->released = 1;
    link_out(&region->link);
    replace((PyObject *)region, &region->defunct, (PyObject *)closed);
    /* A thread that posts looks at `defunct` before it uses the owner's memory. */
    replace((PyObject *)region, &region->owner, NULL);
    if (!has_orphans(region->adapter))
        return 0;
    /* One of them may have waited for this region. */
    nothing = PyObject_CallMethod(region->adapter, "_wake", NULL);
    Py_XDECREF(nothing);
    return nothing ? 0 : -1;
}

/* Closes the region, with its lock. Returns 1 when it is closed, 0 if Python has to close it, -1 with an error. */
static int close_now(Region *region)
{
    const struct ndpy_registrar *registrar = NULL;
    unsigned long long handle;
    Closed *closed;
    int failed;

    if (region->released)
        return 1;
    if (is_adapter(region->adapter))
        registrar = ((Adapter *)region->adapter)->registrar;
    if (!registrar || !region->handle || is_bound(region))
        return 0;
    closed = closed_new(region);
    if (!closed)
        return -1;
    handle = region->handle;
    region->handle = 0;
    Py_BEGIN_ALLOW_THREADS failed = registrar->deregister_memory((void *)(uintptr_t)handle);
    Py_END_ALLOW_THREADS if (failed)
    {
        region->handle = handle;
        Py_DECREF(closed);
        return 0;
    }
    return mark_closed(region, closed) < 0 ? -1 : 1;
}

static PyObject *region_close(PyObject *self, PyObject *Py_UNUSED(none))
{
    Region *region = (Region *)self;
    RLock *lock;
    int done = -1;

    if (region->released)
        Py_RETURN_NONE;
    lock = lock_of(region);
    if (!lock)
        return NULL;
    if (rlock_enter(lock) == 0) {
        done = close_now(region);
        rlock_leave(lock);
    }
    Py_DECREF(lock);
    if (done < 0)
        return NULL;
    if (done)
        Py_RETURN_NONE;
    return PyObject_CallMethod(self, "_close_in_python", NULL);
}

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Release it. Harmless when repeated.\n\n"
                        "Raises:\n"
                        "    DeviceBusyError: a window is bound to the region. Nothing has changed.");

/* ---- regions ---- */

static PyObject *region_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    return (PyObject *)allocate(type);
}

/* A region that was dropped without close(). */
static void region_finalize(PyObject *self)
{
    PyObject *type, *value, *traceback, *nothing;

    if (((Region *)self)->released)
        return;
    PyErr_Fetch(&type, &value, &traceback);
    nothing = PyObject_CallMethod(self, "_on_dropped", NULL);
    if (!nothing) {
        /* Nobody will close it, so its memory must stay. */
        Py_XINCREF(((Region *)self)->owner);
        PyErr_WriteUnraisable(self);
    }
    Py_XDECREF(nothing);
    PyErr_Restore(type, value, traceback);
}

static int region_traverse(PyObject *self, visitproc visit, void *arg)
{
    Region *region = (Region *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(region->adapter);
    Py_VISIT(region->defunct);
    Py_VISIT(region->owner);
    Py_VISIT(region->buffer);
    Py_VISIT(region->bindings);
    return 0;
}

static int region_clear(PyObject *self)
{
    Region *region = (Region *)self;

    /* The circle belongs to the adapter. */
    link_out(&region->link);
    Py_CLEAR(region->adapter);
    Py_CLEAR(region->defunct);
    Py_CLEAR(region->owner);
    Py_CLEAR(region->buffer);
    Py_CLEAR(region->bindings);
    return 0;
}

static void region_dealloc(PyObject *self)
{
    Region *region = (Region *)self;

    PyObject_GC_UnTrack(self);
    region_clear(self);
    Py_CLEAR(region->access);
    Py_CLEAR(region->lifetime);
#ifdef Py_GIL_DISABLED
    Py_CLEAR(region->weak);
#endif
    free_object(self);
}

static PyObject *region_serial(PyObject *self, void *Py_UNUSED(closure))
{
    Region *region = (Region *)self;
    unsigned long long serial;

    BEGIN_SECTION(self)
    if (!region->serial) {
        PyObject *number = require_set_up() < 0 ? NULL : PyIter_Next(serial_numbers);

        if (number)
            region->serial = PyLong_AsUnsignedLongLong(number);
        Py_XDECREF(number);
    }
    serial = region->serial;
    END_SECTION()
    return serial ? PyLong_FromUnsignedLongLong(serial) : NULL;
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

static PyObject *region_lifetime(PyObject *self, void *Py_UNUSED(closure))
{
    return (PyObject *)lock_of((Region *)self);
}

static int region_set_lifetime(PyObject *self, PyObject *lock, void *Py_UNUSED(closure))
{
    Region *region = (Region *)self;
    RLock *former;

    if (!lock || Py_TYPE(lock) != rlock_type) {
        PyErr_SetString(PyExc_TypeError, "the lock of a region is an ndpy._core.RLock");
        return -1;
    }
    BEGIN_SECTION(self)
    former = region->lifetime;
    region->lifetime = (RLock *)Py_NewRef(lock);
    END_SECTION()
    Py_XDECREF(former);
    return 0;
}

static PyObject *region_opened(PyObject *self, PyObject *Py_UNUSED(none))
{
    Region *region = (Region *)self;

    if (!is_adapter(region->adapter)) {
        PyErr_SetString(PyExc_TypeError, "the region has no adapter");
        return NULL;
    }
    join(region);
    Py_RETURN_NONE;
}

static PyObject *region_mark_closed(PyObject *self, PyObject *Py_UNUSED(none))
{
    Region *region = (Region *)self;
    Closed *closed = closed_new(region);

    if (!closed || mark_closed(region, closed) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMemberDef region_members[] = {
    {"_adapter", T_OBJECT, offsetof(Region, adapter), 0, NULL},
    {"_defunct", T_OBJECT, offsetof(Region, defunct), 0, NULL},
    {"_owner", T_OBJECT, offsetof(Region, owner), 0,
     "An export of the buffer, or None. It keeps the memory in place until the region is closed."},
    {"_handle", T_ULONGLONG, offsetof(Region, handle), 0, "The address of the provider's object, or 0."},
    {"buffer", T_OBJECT, offsetof(Region, buffer), 0, NULL},
    {"address", T_ULONGLONG, offsetof(Region, address), 0, NULL},
    {"length", T_ULONGLONG, offsetof(Region, length), 0, NULL},
    {"access", T_OBJECT, offsetof(Region, access), 0, NULL},
    {"local_token", T_ULONGLONG, offsetof(Region, local_token), 0, NULL},
    {"remote_token", T_ULONGLONG, offsetof(Region, remote_token), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef region_properties[] = {
    FLAG("_released", Region, released, NULL),
    FLAG("_writable", Region, writable, NULL),
    {"_serial", region_serial, NULL, "Its place among locks that a thread takes together.", NULL},
    {"_bindings", region_bindings, NULL, "The bindings of windows to this region.", NULL},
    {"_lifetime", region_lifetime, region_set_lifetime, "The lock of close().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef region_methods[] = {
    {"close", region_close, METH_NOARGS, close_doc},
    {"_opened", region_opened, METH_NOARGS, "The provider's object exists now."},
    {"_mark_closed", region_mark_closed, METH_NOARGS, "The provider's object has gone."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot region_slots[] = {
    {Py_tp_doc, "The part of a region that slicing, posting, registering and closing need."},
    {Py_tp_new, region_new},
    {Py_tp_finalize, region_finalize},
    {Py_mp_subscript, region_slice},
    {Py_tp_traverse, region_traverse},
    {Py_tp_clear, region_clear},
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_members, region_members},
    {Py_tp_getset, region_properties},
    {Py_tp_methods, region_methods},
    {0, NULL},
};

static PyType_Spec region_spec = {"ndpy._core.MemoryRegion", sizeof(Region), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, region_slots};

/* ---- adapters ---- */

static PyObject *adapter_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    Adapter *adapter = (Adapter *)PyType_GenericAlloc(type, 0);

    if (adapter)
        adapter->regions.next = adapter->regions.previous = &adapter->regions;
    return (PyObject *)adapter;
}

static int adapter_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Adapter *)self)->defunct);
    Py_VISIT(((Adapter *)self)->orphans);
    Py_VISIT(((Adapter *)self)->region_class);
    return 0;
}

static int adapter_clear(PyObject *self)
{
    Py_CLEAR(((Adapter *)self)->defunct);
    Py_CLEAR(((Adapter *)self)->orphans);
    return 0;
}

static void adapter_dealloc(PyObject *self)
{
    Adapter *adapter = (Adapter *)self;

    PyObject_GC_UnTrack(self);
    adapter_clear(self);
    Py_CLEAR(adapter->region_class);
    while (adapter->regions.next != &adapter->regions)
        link_out(adapter->regions.next);
    free_object(self);
}

PyDoc_STRVAR(attach_registrar_doc,
             "_attach_registrar($self, registrar, domain, rights, longest, region_class, /)\n--\n\n"
             "Let register() work without Python. registrar, domain: addresses; see struct ndpy_registrar. rights: the "
             "provider's rights for each\n"
             "plain Access, which is the index. longest: the most bytes that it registers.");

static PyObject *adapter_attach_registrar(PyObject *self, PyObject *arguments)
{
    Adapter *adapter = (Adapter *)self;
    unsigned long long registrar, domain, longest;
    PyObject *rights, *region_class;

    if (!PyArg_ParseTuple(arguments, "KKO!KO!", &registrar, &domain, &PyTuple_Type, &rights, &longest, &PyType_Type,
                          &region_class))
        return NULL;
    if (PyTuple_Size(rights) != PLAIN_RIGHTS || !PyType_IsSubtype((PyTypeObject *)region_class, region_type)) {
        PyErr_Format(PyExc_TypeError, "a registrar needs %d rights and a class of regions", PLAIN_RIGHTS);
        return NULL;
    }
    for (int right = 0; right < PLAIN_RIGHTS; right++) {
        unsigned long native = PyLong_AsUnsignedLong(PyTuple_GetItem(rights, right));

        if (native == (unsigned long)-1 && PyErr_Occurred())
            return NULL;
        adapter->rights[right] = (uint32_t)native;
    }
    set(&adapter->region_class, Py_NewRef(region_class));
    adapter->domain = (void *)(uintptr_t)domain;
    adapter->longest = longest;
    adapter->registrar = (const struct ndpy_registrar *)(uintptr_t)registrar;
    Py_RETURN_NONE;
}

static PyObject *adapter_has_regions(PyObject *self, void *Py_UNUSED(closure))
{
    const Adapter *adapter = (Adapter *)self;
    int has_regions;

    mutex_lock(&circle_mutex);
    has_regions = adapter->registering || adapter->regions.next != &adapter->regions;
    mutex_unlock(&circle_mutex);
    return PyBool_FromLong(has_regions);
}

PyDoc_STRVAR(open_regions_doc,
             "_open_regions($self, /)\n--\n\nThose that are open. Other threads do not change this list.");

static PyObject *adapter_open_regions(PyObject *self, PyObject *Py_UNUSED(none))
{
    const struct link *first = &((Adapter *)self)->regions;
    PyObject *list = PyList_New(0), *unlisted = NULL;

    if (!list)
        return NULL;
    mutex_lock(&circle_mutex);
    for (const struct link *link = first->next; link != first && !unlisted; link = link->next) {
        PyObject *region = find((Region *)((char *)(uintptr_t)link - offsetof(Region, link)));

        if (!region)
            continue;
        if (PyList_Append(list, region) < 0)
            unlisted = region;
        else
            Py_DECREF(region);
    }
    mutex_unlock(&circle_mutex);
    if (!unlisted)
        return list;
    Py_DECREF(unlisted);
    Py_DECREF(list);
    return NULL;
}

static PyMemberDef adapter_members[] = {
    {"_defunct", T_OBJECT, offsetof(Adapter, defunct), 0, NULL},
    {"_orphans", T_OBJECT, offsetof(Adapter, orphans), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef adapter_properties[] = {
    FLAG("_closing", Adapter, closing, NULL),
    {"_has_regions", adapter_has_regions, NULL, "Whether regions are open, or are being made by register().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef adapter_methods[] = {
    {"register", (PyCFunction)(void (*)(void))adapter_register, METH_FASTCALL | METH_KEYWORDS, register_doc},
    {"_attach_registrar", adapter_attach_registrar, METH_VARARGS, attach_registrar_doc},
    {"_open_regions", adapter_open_regions, METH_NOARGS, open_regions_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot adapter_slots[] = {
    {Py_tp_doc, "What registering touches of an adapter."},
    {Py_tp_new, adapter_new},
    {Py_tp_traverse, adapter_traverse},
    {Py_tp_clear, adapter_clear},
    {Py_tp_dealloc, adapter_dealloc},
    {Py_tp_members, adapter_members},
    {Py_tp_getset, adapter_properties},
    {Py_tp_methods, adapter_methods},
    {0, NULL},
};

static PyType_Spec adapter_spec = {"ndpy._core.Adapter", sizeof(Adapter), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, adapter_slots};

/* ---- the module ---- */

PyDoc_STRVAR(set_up_regions_doc, "set_up_regions($module, local_write, serial_numbers, closed_error, /)\n--\n\n"
                                 "Give Access.LOCAL_WRITE, the serial numbers of objects, and what makes the exception "
                                 "for a closed region from its\n"
                                 "address and length.");

static PyObject *set_up_regions(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *access, *numbers, *error;

    if (!PyArg_ParseTuple(arguments, "OOO", &access, &numbers, &error))
        return NULL;
    set(&local_write, Py_NewRef(access));
    set(&serial_numbers, Py_NewRef(numbers));
    set(&closed_error, Py_NewRef(error));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_up_regions", set_up_regions, METH_VARARGS, set_up_regions_doc},
    {NULL, NULL, 0, NULL},
};

int add_regions(PyObject *module)
{
    static const char *const names[ARGUMENTS] = {"buffer", "access", "timeout_s"};

    for (int which = 0; which < ARGUMENTS; which++) {
        argument_names[which] = interned(names[which]);
        if (!argument_names[which])
            return -1;
    }
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    region_type = add_type(module, &region_spec);
    adapter_type = add_type(module, &adapter_spec);
    closed_type = (PyTypeObject *)PyType_FromSpec(&closed_spec);
    return region_type && adapter_type && closed_type ? 0 : -1;
}
