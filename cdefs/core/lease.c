/* A lease: registered memory of a cache for the time of its use. */

#include "lease.h"

static PyTypeObject *lease_type;
static struct spares spare_leases;

Lease *lease_new(Cache *cache, KnownBuffer *range, PyObject *view)
{
    PyObject *object = take_spare(&spare_leases);
    Lease *lease;

    if (!object)
        object = make_reusable(&spare_leases, lease_type);
    if (!object)
        return NULL;
    lease = (Lease *)object;
    lease->cache = Py_NewRef((PyObject *)cache);
    lease->range = (PyObject *)range;
    lease->view = view;
    return lease;
}

void undo_lease(Lease *lease)
{
    lease->range = lease->view = NULL;
    Py_DECREF((PyObject *)lease);
}

static int is_used(const Lease *lease)
{
    PyObject *view = lease->view;

    return view && view != Py_None;
}

/* Takes out what keeps the memory in place. Returns NULL if the lease was released already. */
HOT PyObject *take_view(Lease *lease)
{
    PyObject *view = NULL;

    BEGIN_SECTION((PyObject *)lease)
    if (is_used(lease)) {
        view = lease->view;
        lease->view = NULL;
    }
    END_SECTION()
    return view;
}

static PyObject *lease_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    Lease *lease = (Lease *)self;
    PyObject *view, *found, *result = NULL;
    int stays_cached;
    Entry *entry;

    if (!is_used(lease))
        Py_RETURN_NONE;
    if (lease->range && is_of(lease->range, known_base_type, &usual_known_type))
        found = Py_XNewRef(((KnownBuffer *)lease->range)->entry);
    else
        found = PyObject_GetAttrString(lease->range ? lease->range : Py_None, "entry");
    if (PyErr_Occurred())
        return NULL;
    if (!found || !PyObject_TypeCheck(found, entry_base_type) || !lease->cache ||
        !is_of(lease->cache, cache_base_type, &usual_cache_type)) {
        PyErr_SetString(PyExc_TypeError, "the lease does not belong to a cache");
        Py_XDECREF(found);
        return NULL;
    }
    entry = (Entry *)found;
    view = take_view(lease);
    if (!view) {
        Py_DECREF(found);
        Py_RETURN_NONE;
    }
    mutex_lock(&uses_mutex);
    entry->uses--;
    stays_cached = entry->cached && !((Cache *)lease->cache)->over_bounds;
    mutex_unlock(&uses_mutex);
    if (stays_cached)
        result = Py_NewRef(Py_None);
    else
        result = PyObject_CallMethod(lease->cache, "_on_released", "O", found);
    Py_DECREF(found);
    /* Release the memory last: its region may have been deregistered just now. */
    Py_DECREF(view);
    return result;
}

/* Returns the entry of a lease that was not released, or NULL with an error. */
static PyObject *lease_entry_in_use(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (is_used((Lease *)self))
        return PyObject_GetAttrString(((Lease *)self)->range, "entry");
    PyErr_Format(closed_error, "%R was released", self);
    return NULL;
}

static PyObject *lease_enter(PyObject *self, PyObject *Py_UNUSED(none))
{
    return is_used((Lease *)self) ? Py_NewRef(self) : lease_entry_in_use(self, NULL);
}

static PyObject *lease_exit(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    /* The garbage collector may be closing the generator or coroutine of the block. */
    if (count && arguments[0] == PyExc_GeneratorExit && ((Lease *)self)->cache)
        return PyObject_CallMethod(((Lease *)self)->cache, "_release_later", "O", self);
    return lease_release(self, NULL);
}

static PyObject *part_of_range(PyObject *self, const char *name)
{
    PyObject *range = ((Lease *)self)->range;

    return PyObject_GetAttrString(range ? range : Py_None, name);
}

static PyObject *lease_address(PyObject *self, void *Py_UNUSED(none))
{
    return part_of_range(self, "start");
}

static PyObject *lease_length(PyObject *self, void *Py_UNUSED(none))
{
    return part_of_range(self, "length");
}

static PyObject *lease_region(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *entry = lease_entry_in_use(self, NULL), *region;

    if (!entry)
        return NULL;
    region = PyObject_GetAttrString(entry, "region");
    Py_DECREF(entry);
    return region;
}

/* Reads address or length. Returns 0, or -1 with an error. */
static int read_range(PyObject *self, const char *name, unsigned long long *out)
{
    PyObject *number = part_of_range(self, name);

    *out = number ? PyLong_AsUnsignedLongLong(number) : 0;
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static Py_ssize_t lease_size(PyObject *self)
{
    unsigned long long length;

    return read_range(self, "length", &length) < 0 ? -1 : (Py_ssize_t)length;
}

static PyObject *lease_slice(PyObject *self, PyObject *key)
{
    PyObject *region = lease_region(self, NULL), *element = NULL;
    unsigned long long address, whole, offset = 0, length = 0;

    if (!region)
        return NULL;
    if (!PyObject_TypeCheck(region, region_type)) {
        PyErr_SetString(PyExc_TypeError, "the lease has no region");
    } else if (read_range(self, "start", &address) == 0 && read_range(self, "length", &whole) == 0 &&
               find_bounds(key, whole, "the lease", &offset, &length) == 0) {
        element = element_new(region, address + offset, length, ((Region *)region)->local_token);
        if (element) {
            BEGIN_SECTION(self)
            ((Element *)element)->export = Py_XNewRef(((Lease *)self)->view);
            END_SECTION()
            /* The collector may have run code that released the lease. */
            if (!((Element *)element)->export) {
                Py_CLEAR(element);
                lease_entry_in_use(self, NULL);
            }
        }
    }
    Py_DECREF(region);
    return element;
}

static PyObject *lease_repr(PyObject *self)
{
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(self), "__name__"), *text = NULL;
    unsigned long long address, length;

    if (name && read_range(self, "start", &address) == 0 && read_range(self, "length", &length) == 0)
        text = PyUnicode_FromFormat("<%U of %llu bytes at %p>", name, length, (void *)(uintptr_t)address);
    Py_XDECREF(name);
    return text;
}

static void lease_finalize(PyObject *self)
{
    Lease *lease = (Lease *)self;
    PyObject *type, *value, *traceback, *nothing;

    if (lease->was_finalized)
        return;
    lease->was_finalized = 1;
    if (!is_used(lease))
        return;
    PyErr_Fetch(&type, &value, &traceback);
    nothing = PyObject_CallMethod(lease->cache ? lease->cache : Py_None, "_on_lease_dropped", "O", self);
    if (nothing) {
        Py_DECREF(nothing);
    } else {
        /* Nobody will end this use, so its memory must stay. */
        Py_XINCREF(lease->view);
        PyErr_WriteUnraisable(self);
    }
    /* The cache ends this use. A finalizer that runs later in the same collection may still call release(). */
    Py_XDECREF(take_view(lease));
    PyErr_Restore(type, value, traceback);
}

static int lease_traverse(PyObject *self, visitproc visit, void *arg)
{
    Lease *lease = (Lease *)self;

    lease->head.was_visited = 1;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(lease->cache);
    Py_VISIT(lease->range);
    Py_VISIT(lease->view);
    return 0;
}

static int lease_clear(PyObject *self)
{
    Lease *lease = (Lease *)self;

    Py_CLEAR(lease->cache);
    Py_CLEAR(lease->range);
    Py_CLEAR(lease->view);
    return 0;
}

/* Finalizes an object without references. Returns whether somebody has it now. */
static int finalize_dropped(PyObject *self)
{
#ifdef Py_GIL_DISABLED
    return PyObject_CallFinalizerFromDealloc(self) < 0;
#else
    Py_SET_REFCNT(self, 1);
    lease_finalize(self);
    Py_SET_REFCNT(self, Py_REFCNT(self) - 1);
    return Py_REFCNT(self) != 0;
#endif
}

static void lease_dealloc(PyObject *self)
{
    Lease *lease = (Lease *)self;

    PyObject *parts[3];

    if (is_used(lease) && !lease->was_finalized && finalize_dropped(self))
        return;
    parts[0] = lease->cache;
    parts[1] = lease->range;
    parts[2] = lease->view;
    lease->cache = lease->range = lease->view = NULL;
    if (Py_TYPE(self) != lease_type || lease->was_finalized || !keep_spare(&spare_leases, self))
        free_tracked(self);
    for (int part = 0; part < 3; part++)
        Py_XDECREF(parts[part]);
}

static PyMemberDef lease_members[] = {
    {"_cache", T_OBJECT, offsetof(Lease, cache), 0, NULL},
    {"_range", T_OBJECT, offsetof(Lease, range), 0, NULL},
    {"_view", T_OBJECT, offsetof(Lease, view), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef lease_properties[] = {
    {"address", lease_address, NULL, "Where the requested bytes are.", NULL},
    {"length", lease_length, NULL, "How many bytes were requested.", NULL},
    {"region", lease_region, NULL, "A region that covers the requested bytes, and perhaps more.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef lease_methods[] = {
    {"release", lease_release, METH_NOARGS,
     "release($self)\n--\n\nEnd the lease. The memory stays registered, in the cache. Harmless when repeated."},
    {"_entry_in_use", lease_entry_in_use, METH_NOARGS, "Return the entry. Raises ClosedError after release()."},
    {"__enter__", lease_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lease_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    lease_doc,
    "Registered memory for the time of its use, made by RegistrationCache.local(). It is a context manager.\n\n"
    "lease[a:b] is an Sge of those bytes, and lease[:] of all bytes. The buffer can be neither freed nor resized "
    "until\n"
    "release() is called and the requests that were posted with lease[a:b] have completed. Call release() after they "
    "have\n"
    "completed, because it may deregister the region. Then requests that are still under way fail.\n\n"
    "Attributes:\n"
    "    region: a region that covers the requested bytes, and perhaps more.\n"
    "    address, length: of the requested bytes.\n");

static PyType_Slot lease_slots[] = {
    {Py_tp_doc, (void *)lease_doc},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_repr, lease_repr},
    {Py_mp_length, lease_size},
    {Py_mp_subscript, lease_slice},
    {Py_tp_finalize, lease_finalize},
    {Py_tp_traverse, lease_traverse},
    {Py_tp_clear, lease_clear},
    {Py_tp_dealloc, lease_dealloc},
    {Py_tp_members, lease_members},
    {Py_tp_getset, lease_properties},
    {Py_tp_methods, lease_methods},
    {0, NULL},
};

static PyType_Spec lease_spec = {"ndpy._core.Lease", sizeof(Lease), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, lease_slots};

int add_lease_type(PyObject *module)
{
    lease_type = add_type(module, &lease_spec);
    return lease_type ? 0 : -1;
}
