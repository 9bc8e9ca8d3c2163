/* A hit in the registration cache, and the end of a lease, without a Python frame.
 *
 * A hit takes no lock of the cache. It holds the interpreter's lock while it reads Entry.cached and counts the use.
 * Code that closes an entry clears `cached` before it reads `uses`. So one of the two sees the other.
 */

#include "core.h"

/* A registered region. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t uses; /* how many leases and exposures it has */
    long long used;  /* the number of its last use */
    char cached;     /* whether a look-up may still find it */
} Entry;

/* A buffer that was looked up before, and its entry. */
typedef struct {
    PyObject_HEAD
    PyObject *entry;
    PyObject *export;  /* a function whose result keeps the buffer in place. None if the buffer stays in place by itself */
    PyObject *subject; /* the argument of export; None for the buffer */
    PyObject *pointer; /* the export must equal this; None if the buffer's memory cannot be replaced */
    Py_ssize_t size;   /* the length that the export must have; -1 for any */
    long rights;       /* a lease may ask for these rights only */
} KnownBuffer;

/* The part of a cache that a hit needs. */
typedef struct {
    PyObject_HEAD
    /* A dict of KnownBuffer. A key is the buffer's identity, (address, length), or ((address, length), True) if raw. */
    PyObject *known_buffers;
    PyObject *lease_type; /* a subclass of Lease */
    PyObject *defunct;    /* None while the cache is open */
    long long uses;
    long long hits;
    char over_bounds; /* whether more is registered than the bounds allow */
} Cache;

/* A lease or an exposure. range: a KnownBuffer, or an object with an entry. view: the export, NULL or None after
   release. */
typedef struct {
    PyObject_HEAD
    PyObject *cache;
    PyObject *range;
    PyObject *view;
} Lease;

enum { LOCAL_WRITE = 1 };

static PyTypeObject *entry_base_type, *known_base_type, *cache_base_type, *lease_base_type;

/* ---- Entry ---- */

static PyObject *entry_take(PyObject *self, PyObject *Py_UNUSED(none))
{
    ((Entry *)self)->uses++;
    Py_RETURN_NONE;
}

static PyObject *entry_give_back(PyObject *self, PyObject *Py_UNUSED(none))
{
    ((Entry *)self)->uses--;
    Py_RETURN_NONE;
}

static PyMemberDef entry_members[] = {
    {"uses", T_PYSSIZET, offsetof(Entry, uses), READONLY, NULL},
    {"used", T_LONGLONG, offsetof(Entry, used), 0, NULL},
    {"cached", T_BOOL, offsetof(Entry, cached), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef entry_methods[] = {
    {"take", entry_take, METH_NOARGS, "Add one use."},
    {"give_back", entry_give_back, METH_NOARGS, "Remove one use."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot entry_slots[] = {
    {Py_tp_doc, "A registered region."},
    {Py_tp_members, entry_members},
    {Py_tp_methods, entry_methods},
    {Py_tp_dealloc, free_object},
    {0, NULL},
};

static PyType_Spec entry_spec = {
    "ndpy._core.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, entry_slots};

/* ---- KnownBuffer ---- */

static int known_init(PyObject *self, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    KnownBuffer *known = (KnownBuffer *)self;
    PyObject *entry, *export, *subject, *pointer;
    Py_ssize_t size;
    long rights;

    if (known->entry) {
        PyErr_SetString(PyExc_TypeError, "a known buffer is initialized once");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O!lOOOn", entry_base_type, &entry, &rights, &export, &subject, &pointer, &size)) return -1;
    known->entry = Py_NewRef(entry);
    known->export = Py_NewRef(export);
    known->subject = Py_NewRef(subject);
    known->pointer = Py_NewRef(pointer);
    known->size = size;
    known->rights = rights;
    return 0;
}

static int known_traverse(PyObject *self, visitproc visit, void *arg)
{
    KnownBuffer *known = (KnownBuffer *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(known->entry);
    Py_VISIT(known->export);
    Py_VISIT(known->subject);
    Py_VISIT(known->pointer);
    return 0;
}

static int known_clear(PyObject *self)
{
    KnownBuffer *known = (KnownBuffer *)self;

    Py_CLEAR(known->entry);
    Py_CLEAR(known->export);
    Py_CLEAR(known->subject);
    Py_CLEAR(known->pointer);
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
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot known_slots[] = {
    {Py_tp_doc, "KnownBuffer(entry, rights, export, subject, pointer, size): a buffer whose entry was found before."},
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

/* ---- the identities of buffers ---- */

enum { IDENTITIES = 256 };

/* The number that a buffer is known by, and what it is made from. A dict finds a number faster if it is the very object
   that is the key. The interpreter's lock guards these. */
static struct {
    PyObject *object;
    PyObject *number;
} identities[IDENTITIES];

/* Returns id(object), which is often the same int as the last time. */
static PyObject *identity(PyObject *object)
{
    size_t place = ((uintptr_t)object >> 4) % IDENTITIES;
    PyObject *number;

    if (identities[place].object == object) return Py_NewRef(identities[place].number);
    number = PyLong_FromVoidPtr(object);
    if (!number) return NULL;
    Py_XDECREF(identities[place].number);
    identities[place].object = object;
    identities[place].number = Py_NewRef(number);
    return number;
}

static PyObject *core_identity(PyObject *Py_UNUSED(module), PyObject *object)
{
    return identity(object);
}

/* ---- Cache ---- */

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
    if (!key) return NULL;
    found = PyDict_GetItemWithError(all, key);
    if (found && (!PyObject_TypeCheck(found, known_base_type) || !((KnownBuffer *)found)->entry)) found = NULL;
    Py_XINCREF(found);
    Py_DECREF(key);
    return (KnownBuffer *)found;
}

/* Makes what keeps the buffer in place. */
static PyObject *make_view(const KnownBuffer *known, PyObject *buffer)
{
    PyObject *subject = known->subject == Py_None ? buffer : known->subject;

    if (known->export == Py_None) return Py_NewRef(subject);
    if (known->export == (PyObject *)&PyMemoryView_Type) return PyMemoryView_FromObject(subject);
    return PyObject_CallFunctionObjArgs(known->export, subject, NULL);
}

/* Returns 1 if the buffer has the same memory as before, 0 if not, -1 with an error. */
static int still_there(const KnownBuffer *known, PyObject *view)
{
    int equal = 1;

    if (known->pointer != Py_None) equal = PyObject_RichCompareBool(view, known->pointer, Py_EQ);
    if (equal == 1 && known->size >= 0) {
        Py_ssize_t size = PyObject_Size(view);
        equal = size < 0 ? -1 : size == known->size;
    }
    return equal;
}

/* Returns a new lease, which does not count as a use yet. Returns NULL without an error for a miss. */
static Lease *prepare(const Cache *cache, const KnownBuffer *known, PyObject *buffer, long access)
{
    PyObject *view;
    Lease *lease = NULL;

    if (access & ~known->rights || (cache->defunct && cache->defunct != Py_None)) return NULL;
    if (!cache->lease_type || !PyType_Check(cache->lease_type) ||
        !PyType_IsSubtype((PyTypeObject *)cache->lease_type, lease_base_type))
        return NULL;
    view = make_view(known, buffer);
    if (!view) return NULL;
    if (still_there(known, view) == 1) lease = (Lease *)PyType_GenericAlloc((PyTypeObject *)cache->lease_type, 0);
    if (lease)
        lease->range = view;
    else
        Py_DECREF(view);
    return lease;
}

/* Returns the lease of a hit. Returns NULL without an error for a miss. */
static PyObject *find(Cache *cache, PyObject *buffer, long access, int raw)
{
    KnownBuffer *known = cache->known_buffers ? look_up(cache->known_buffers, buffer, raw) : NULL;
    Entry *entry;
    Lease *lease;

    if (!known) return NULL;
    lease = prepare(cache, known, buffer, access);
    entry = (Entry *)known->entry;
    if (!lease || !entry->cached) {
        Py_XDECREF(lease);
        Py_DECREF(known);
        return NULL;
    }
    entry->uses++;
    entry->used = ++cache->uses;
    cache->hits++;
    lease->view = lease->range;
    lease->range = (PyObject *)known;
    lease->cache = Py_NewRef((PyObject *)cache);
    return (PyObject *)lease;
}

enum { BUFFER, ACCESS, QUEUE_PAIR, RAW, ARGUMENTS };

static PyObject *argument_names[ARGUMENTS];

static PyObject *cache_local(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[ARGUMENTS] = {NULL}, *queue_pair, *right, *lease;
    long access = LOCAL_WRITE;
    int raw = 0;

    if (sort_arguments("local", arguments, count, keywords, argument_names, QUEUE_PAIR, ARGUMENTS, given) < 0) return NULL;
    if (!given[BUFFER]) {
        PyErr_SetString(PyExc_TypeError, "local() needs a buffer");
        return NULL;
    }
    queue_pair = given[QUEUE_PAIR] ? given[QUEUE_PAIR] : Py_None;
    if (given[RAW]) raw = PyObject_IsTrue(given[RAW]);
    if (raw < 0) return NULL;
    if (given[ACCESS]) access = PyLong_AsLong(given[ACCESS]);
    /* If an argument has a wrong type or size, here or below, call _local(). It can say what is wrong. */
    if (access == -1 && PyErr_Occurred()) {
        PyErr_Clear();
    } else if (queue_pair == Py_None) {
        lease = find((Cache *)self, given[BUFFER], access, raw);
        if (lease) return lease;
        if (PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
            PyErr_Clear();
        }
    }
    right = given[ACCESS] ? Py_NewRef(given[ACCESS]) : PyLong_FromLong(access);
    if (!right) return NULL;
    lease = PyObject_CallMethod(self, "_local", "OOOO", given[BUFFER], right, queue_pair, raw ? Py_True : Py_False);
    Py_DECREF(right);
    return lease;
}

PyDoc_STRVAR(local_doc,
    "local($self, buffer, access=1, *, queue_pair=None, raw=False)\n--\n\n"
    "Lease registered memory for send, receive, read and write of this side.\n\n"
    "A hit calls no provider. The buffer can be neither freed nor resized until the lease is released.\n\n"
    "Parameters:\n"
    "    buffer: as for Adapter.register(), 1 to info.max_registration_size bytes.\n"
    "    access: NONE, LOCAL_WRITE (1) or READ_SINK.\n"
    "    queue_pair: the connection that the memory is for. When it ends or is closed, regions that were used for it alone\n"
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
    return PyLong_FromLongLong(++((Cache *)self)->uses);
}

static int cache_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Cache *)self)->known_buffers);
    Py_VISIT(((Cache *)self)->lease_type);
    Py_VISIT(((Cache *)self)->defunct);
    return 0;
}

static int cache_clear(PyObject *self)
{
    Py_CLEAR(((Cache *)self)->known_buffers);
    Py_CLEAR(((Cache *)self)->lease_type);
    Py_CLEAR(((Cache *)self)->defunct);
    return 0;
}

static void cache_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    cache_clear(self);
    free_object(self);
}

static PyMemberDef cache_members[] = {
    {"_known_buffers", T_OBJECT_EX, offsetof(Cache, known_buffers), 0, NULL},
    {"_lease_type", T_OBJECT_EX, offsetof(Cache, lease_type), 0, NULL},
    {"_defunct", T_OBJECT, offsetof(Cache, defunct), 0, NULL},
    {"_over_bounds", T_BOOL, offsetof(Cache, over_bounds), 0, NULL},
    {"_hits", T_LONGLONG, offsetof(Cache, hits), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
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
    {Py_tp_methods, cache_methods},
    {0, NULL},
};

static PyType_Spec cache_spec = {"ndpy._core.LeaseFinder", sizeof(Cache), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, cache_slots};

/* ---- Lease ---- */

static int is_used(const Lease *lease)
{
    return lease->view && lease->view != Py_None;
}

static PyObject *lease_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    Lease *lease = (Lease *)self;
    PyObject *view, *found, *result = NULL;
    Entry *entry;

    if (!is_used(lease)) Py_RETURN_NONE;
    if (PyObject_TypeCheck(lease->range, known_base_type))
        found = Py_NewRef(((KnownBuffer *)lease->range)->entry);
    else
        found = PyObject_GetAttrString(lease->range, "entry");
    if (!found) return NULL;
    if (!PyObject_TypeCheck(found, entry_base_type) || !PyObject_TypeCheck(lease->cache, cache_base_type)) {
        PyErr_SetString(PyExc_TypeError, "the lease does not belong to a cache");
        Py_DECREF(found);
        return NULL;
    }
    entry = (Entry *)found;
    view = lease->view;
    lease->view = NULL;
    entry->uses--;
    if (entry->cached && !((Cache *)lease->cache)->over_bounds)
        result = Py_NewRef(Py_None);
    else
        result = PyObject_CallMethod(lease->cache, "_on_released", "O", found);
    Py_DECREF(found);
    /* Release the memory last: its region may have been deregistered just now. */
    Py_DECREF(view);
    return result;
}

static PyObject *lease_enter(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (!is_used((Lease *)self)) {
        PyObject *nothing = PyObject_CallMethod(self, "_entry_in_use", NULL);
        if (!nothing) return NULL;
        Py_DECREF(nothing);
    }
    return Py_NewRef(self);
}

static PyObject *lease_exit(PyObject *self, PyObject *const *Py_UNUSED(arguments), Py_ssize_t Py_UNUSED(count))
{
    return lease_release(self, NULL);
}

static void lease_finalize(PyObject *self)
{
    PyObject *type, *value, *traceback, *nothing;

    if (!is_used((Lease *)self)) return;
    PyErr_Fetch(&type, &value, &traceback);
    nothing = PyObject_CallMethod(self, "_on_dropped", NULL);
    if (nothing)
        Py_DECREF(nothing);
    else
        PyErr_WriteUnraisable(self);
    PyErr_Restore(type, value, traceback);
}

static int lease_traverse(PyObject *self, visitproc visit, void *arg)
{
    Lease *lease = (Lease *)self;

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

static void lease_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    lease_clear(self);
    free_object(self);
}

static PyMemberDef lease_members[] = {
    {"_cache", T_OBJECT, offsetof(Lease, cache), 0, NULL},
    {"_range", T_OBJECT, offsetof(Lease, range), 0, NULL},
    {"_view", T_OBJECT, offsetof(Lease, view), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef lease_methods[] = {
    {"release", lease_release, METH_NOARGS, "End the lease. The memory stays registered, in the cache. Harmless when repeated."},
    {"__enter__", lease_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lease_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lease_slots[] = {
    {Py_tp_doc, "The part of leases and exposures that a hit needs."},
    {Py_tp_finalize, lease_finalize},
    {Py_tp_traverse, lease_traverse},
    {Py_tp_clear, lease_clear},
    {Py_tp_dealloc, lease_dealloc},
    {Py_tp_members, lease_members},
    {Py_tp_methods, lease_methods},
    {0, NULL},
};

static PyType_Spec lease_spec = {"ndpy._core.LeaseBase", sizeof(Lease), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, lease_slots};

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
        if (!argument_names[which]) return -1;
    }
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    entry_base_type = add_type(module, &entry_spec);
    known_base_type = add_type(module, &known_spec);
    cache_base_type = add_type(module, &cache_spec);
    lease_base_type = add_type(module, &lease_spec);
    return entry_base_type && known_base_type && cache_base_type && lease_base_type ? 0 : -1;
}
