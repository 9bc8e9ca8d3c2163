/* A hit in the registration cache, without a Python frame.
 *
 * A hit takes no lock of the cache. It holds the interpreter's lock, or uses_mutex, while it reads Entry.cached and
 * counts the use. Code that closes an entry clears `cached` before it reads `uses`. So one of the two sees the other.
 */

#include "lease.h"

enum { LOCAL_WRITE = 1 };

PyTypeObject *entry_base_type, *known_base_type, *cache_base_type;
PyTypeObject *usual_known_type, *usual_cache_type;
MUTEX(uses_mutex)

/* ---- Entry ---- */

static PyObject *entry_take(PyObject *self, PyObject *Py_UNUSED(none))
{
    mutex_lock(&uses_mutex);
    ((Entry *)self)->uses++;
    mutex_unlock(&uses_mutex);
    Py_RETURN_NONE;
}

static PyObject *entry_give_back(PyObject *self, PyObject *Py_UNUSED(none))
{
    mutex_lock(&uses_mutex);
    ((Entry *)self)->uses--;
    mutex_unlock(&uses_mutex);
    Py_RETURN_NONE;
}

/* offset: of a long long. */
static PyObject *entry_number(PyObject *self, void *offset)
{
    long long number;

    mutex_lock(&uses_mutex);
    number = *(long long *)((char *)self + (uintptr_t)offset);
    mutex_unlock(&uses_mutex);
    return PyLong_FromLongLong(number);
}

static int entry_set_used(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    long long used = value ? PyLong_AsLongLong(value) : 0;

    if (!value)
        PyErr_SetString(PyExc_AttributeError, "used cannot be deleted");
    if (PyErr_Occurred())
        return -1;
    mutex_lock(&uses_mutex);
    ((Entry *)self)->used = used;
    mutex_unlock(&uses_mutex);
    return 0;
}

static PyGetSetDef entry_properties[] = {
    {"uses", entry_number, NULL, NULL, (void *)offsetof(Entry, uses)},
    FLAG("cached", Entry, cached, NULL),
    {"used", entry_number, entry_set_used, NULL, (void *)offsetof(Entry, used)},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef entry_methods[] = {
    {"take", entry_take, METH_NOARGS, "Add one use."},
    {"give_back", entry_give_back, METH_NOARGS, "Remove one use."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot entry_slots[] = {
    {Py_tp_doc, "A registered region."},
    {Py_tp_getset, entry_properties},
    {Py_tp_methods, entry_methods},
    {Py_tp_dealloc, free_object},
    {0, NULL},
};

static PyType_Spec entry_spec = {"ndpy._core.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                                 entry_slots};

/* ---- KnownBuffer ---- */

static int known_init(PyObject *self, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    KnownBuffer *known = (KnownBuffer *)self;
    PyObject *entry, *changed, *watch;
    unsigned long long start, length;
    long rights;
    int is_exported;

    if (known->entry) {
        PyErr_SetString(PyExc_TypeError, "a known buffer is initialized once");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O!lKKpOO", entry_base_type, &entry, &rights, &start, &length, &is_exported,
                          &changed, &watch))
        return -1;
    known->entry = Py_NewRef(entry);
    known->changed = Py_NewRef(changed);
    known->watch = Py_NewRef(watch);
    known->start = start;
    known->length = length;
    known->rights = rights;
    known->is_exported = (char)is_exported;
    return 0;
}

static int known_traverse(PyObject *self, visitproc visit, void *arg)
{
    KnownBuffer *known = (KnownBuffer *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(known->entry);
    Py_VISIT(known->changed);
    Py_VISIT(known->watch);
    return 0;
}

static int known_clear(PyObject *self)
{
    KnownBuffer *known = (KnownBuffer *)self;

    Py_CLEAR(known->entry);
    Py_CLEAR(known->changed);
    Py_CLEAR(known->watch);
    return 0;
}

static void known_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    known_clear(self);
    free_object(self);
}

static PyMemberDef known_members[] = {
    {"entry", T_OBJECT_EX, offsetof(KnownBuffer, entry), READONLY, NULL},
    {"start", T_ULONGLONG, offsetof(KnownBuffer, start), READONLY, NULL},
    {"length", T_ULONGLONG, offsetof(KnownBuffer, length), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot known_slots[] = {
    {Py_tp_doc,
     "KnownBuffer(entry, rights, start, length, is_exported, changed, watch): a buffer whose entry was found before."},
    {Py_tp_init, known_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, known_traverse},
    {Py_tp_clear, known_clear},
    {Py_tp_dealloc, known_dealloc},
    {Py_tp_members, known_members},
    {0, NULL},
};

static PyType_Spec known_spec = {"ndpy._core.KnownBuffer", sizeof(KnownBuffer), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, known_slots};

/* ---- Cache ---- */

static PyObject *core_identity(PyObject *Py_UNUSED(module), PyObject *object)
{
    return identity(object);
}

/* Returns a new reference. Returns NULL without an error for an unknown buffer. */
static KnownBuffer *look_up(PyObject *all, PyObject *buffer, int raw)
{
    PyObject *key, *found;

    if (!PyTuple_CheckExact(buffer)) {
        key = identity(buffer);
    } else if (raw) {
        key = PyTuple_Pack(2, buffer, Py_True);
    } else {
        key = Py_NewRef(buffer);
    }
    if (!key)
        return NULL;
    found = dict_get(all, key);
    if (found && (!is_of(found, known_base_type, &usual_known_type) || !((KnownBuffer *)found)->entry))
        Py_CLEAR(found);
    Py_DECREF(key);
    return (KnownBuffer *)found;
}

/* Returns what keeps the memory in place. Returns NULL if it is not the same memory as before, or with an error. */
static PyObject *hold(const KnownBuffer *known, PyObject *buffer)
{
    PyObject *changed;
    Export *export;
    int is_changed;

    if (known->is_exported) {
        export = export_new(buffer);
        if (!export)
            return NULL;
        if ((uintptr_t)export->buffer.address == known->start && (uint64_t)export->buffer.length == known->length)
            return (PyObject *)export;
        Py_DECREF((PyObject *)export);
        return NULL;
    }
    if (known->changed == Py_None)
        return Py_NewRef(buffer);
    changed = PyObject_CallFunctionObjArgs(known->changed, known->watch, NULL);
    if (!changed)
        return NULL;
    is_changed = PyObject_IsTrue(changed);
    Py_DECREF(changed);
    return is_changed ? NULL : Py_NewRef(buffer);
}

/* Counts a hit. Returns 0 if the entry is not cached any more. */
HOT int count_use(Cache *cache, Entry *entry)
{
    int is_cached;

    mutex_lock(&uses_mutex);
    is_cached = entry->cached;
    if (is_cached) {
        entry->uses++;
        entry->used = ++cache->uses;
        cache->hits++;
    }
    mutex_unlock(&uses_mutex);
    return is_cached;
}

/* Returns the lease of a hit. Returns NULL without an error for a miss. */
static PyObject *find(Cache *cache, PyObject *buffer, long access, int raw)
{
    KnownBuffer *known = cache->known_buffers ? look_up(cache->known_buffers, buffer, raw) : NULL;
    PyObject *view = NULL;
    Lease *lease = NULL;
    Entry *entry;

    if (!known)
        return NULL;
    if (!(access & ~known->rights) && is_usable(cache->defunct))
        view = hold(known, buffer);
    entry = (Entry *)known->entry;
    if (view)
        lease = lease_new(cache, known, view);
    /* Making the two may have run code that changed the cache: the buffer's, and what the collector runs. */
    if (lease && !count_use(cache, entry)) {
        undo_lease(lease);
        lease = NULL;
    }
    if (!lease) {
        Py_XDECREF(view);
        Py_DECREF((PyObject *)known);
        return NULL;
    }
    return (PyObject *)lease;
}

enum { BUFFER, ACCESS, QUEUE_PAIR, RAW, ARGUMENTS };

static PyObject *argument_names[ARGUMENTS];

static PyObject *cache_local(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[ARGUMENTS] = {NULL}, *queue_pair, *right, *lease;
    long access = LOCAL_WRITE;
    int raw = 0;

    if (count == 1 && !keywords)
        given[BUFFER] = arguments[0];
    else if (sort_arguments("local", arguments, count, keywords, argument_names, QUEUE_PAIR, ARGUMENTS, given) < 0)
        return NULL;
    if (!given[BUFFER]) {
        PyErr_SetString(PyExc_TypeError, "local() needs a buffer");
        return NULL;
    }
    queue_pair = given[QUEUE_PAIR] ? given[QUEUE_PAIR] : Py_None;
    if (given[RAW])
        raw = PyObject_IsTrue(given[RAW]);
    if (raw < 0)
        return NULL;
    if (given[ACCESS])
        access = PyLong_AsLong(given[ACCESS]);
    /* If an argument has a wrong type or size, here or below, call _local(). It can say what is wrong. */
    if (access == -1 && PyErr_Occurred()) {
        PyErr_Clear();
    } else if (queue_pair == Py_None) {
        lease = find((Cache *)self, given[BUFFER], access, raw);
        if (lease)
            return lease;
        if (PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError))
                return NULL;
            PyErr_Clear();
        }
    }
    right = given[ACCESS] ? Py_NewRef(given[ACCESS]) : PyLong_FromLong(access);
    if (!right)
        return NULL;
    lease = PyObject_CallMethod(self, "_local", "OOOO", given[BUFFER], right, queue_pair, raw ? Py_True : Py_False);
    Py_DECREF(right);
    return lease;
}

PyDoc_STRVAR(
    local_doc,
    "local($self, buffer, access=1, *, queue_pair=None, raw=False)\n--\n\n"
    "Lease registered memory for send, receive, read and write of this side.\n\n"
    "A hit calls no provider. The buffer can be neither freed nor resized until the lease is released.\n\n"
    "Parameters:\n"
    "    buffer: as for Adapter.register(), 1 to info.max_registration_size bytes.\n"
    "    access: NONE, LOCAL_WRITE (1) or READ_SINK.\n"
    "    queue_pair: the connection that the memory is for. When it ends or is closed, regions that were used for it "
    "alone\n"
    "        are deregistered.\n"
    "    raw: True if the caller calls invalidate() before the memory is freed, moved or resized. See the class.\n"
    "Returns: a Lease.\n"
    "Raises:\n"
    "    InvalidFlagsError: other rights.\n"
    "    UnsupportedError: no Python object owns the memory.\n"
    "    Otherwise what Adapter.register() raises.\n"
    "Source: contract K.1.");

static PyObject *cache_next_use(PyObject *self, PyObject *Py_UNUSED(none))
{
    long long number;

    mutex_lock(&uses_mutex);
    number = ++((Cache *)self)->uses;
    mutex_unlock(&uses_mutex);
    return PyLong_FromLongLong(number);
}

static int cache_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Cache *)self)->known_buffers);
    return resource_traverse(self, visit, arg);
}

static int cache_clear(PyObject *self)
{
    Py_CLEAR(((Cache *)self)->known_buffers);
    return resource_clear(self);
}

static void cache_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    cache_clear(self);
    resource_dealloc(self);
}

static PyMemberDef cache_members[] = {
    {"_known_buffers", T_OBJECT_EX, offsetof(Cache, known_buffers), 0, NULL},
    {"_hits", T_LONGLONG, offsetof(Cache, hits), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef cache_properties[] = {
    FLAG("_over_bounds", Cache, over_bounds, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef cache_methods[] = {
    {"local", (PyCFunction)(void (*)(void))cache_local, METH_FASTCALL | METH_KEYWORDS, local_doc},
    {"_next_use", cache_next_use, METH_NOARGS, "Return the number of a use that is not a hit."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot cache_slots[] = {
    {Py_tp_doc, "The part of a cache that a hit needs. It calls _local() for a miss."},
    {Py_tp_traverse, cache_traverse},
    {Py_tp_clear, cache_clear},
    {Py_tp_dealloc, cache_dealloc},
    {Py_tp_members, cache_members},
    {Py_tp_getset, cache_properties},
    {Py_tp_methods, cache_methods},
    {0, NULL},
};

static PyType_Spec cache_spec = {"ndpy._core.LeaseFinder", sizeof(Cache), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, cache_slots};

/* ---- the module ---- */

static PyMethodDef functions[] = {
    {"identity", core_identity, METH_O, "Return id(object), as the same int as far as possible."},
    {NULL, NULL, 0, NULL},
};

int add_leases(PyObject *module)
{
    static const char *const names[ARGUMENTS] = {"buffer", "access", "queue_pair", "raw"};

    for (int which = 0; which < ARGUMENTS; which++) {
        argument_names[which] = interned(names[which]);
        if (!argument_names[which])
            return -1;
    }
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    entry_base_type = add_type(module, &entry_spec);
    known_base_type = add_type(module, &known_spec);
    cache_base_type = add_resource_type(module, &cache_spec);
    return entry_base_type && known_base_type && cache_base_type ? add_lease_type(module) : -1;
}
