/* A hit in the registration cache, and the end of a lease, without a Python frame.
 *
 * A hit takes no lock of the cache. It holds the interpreter's lock, or uses_mutex, while it reads Entry.cached and
 * counts the use. Code that closes an entry clears `cached` before it reads `uses`. So one of the two sees the other.
 */

#include "core.h"

/* A registered region. */
typedef struct {
    PyObject_HEAD Py_ssize_t uses; /* how many leases and exposures it has */
    long long used;                /* the number of its last use */
    SHARED char cached;            /* whether a look-up may still find it */
} Entry;

/* A buffer that was looked up before, and its entry. */
typedef struct {
    PyObject_HEAD PyObject *entry;
    PyObject *changed; /* a function that tells whether the watched memory has changed, or None */
    PyObject *watch;   /* its argument */
    unsigned long long start;
    unsigned long long length;
    long rights;      /* a lease may ask for these rights only */
    char is_exported; /* whether a lease needs an export of the buffer, whose memory must be the same as before */
} KnownBuffer;

/* The part of a cache that a hit needs. */
typedef struct {
    RESOURCE_HEAD
    /* A dict of KnownBuffer. A key is the buffer's identity, (address, length), or ((address, length), True) if raw. */
    PyObject *known_buffers;
    long long uses;
    long long hits;
    SHARED char over_bounds; /* whether more is registered than the bounds allow */
} Cache;

/* A lease or an exposure. range: a KnownBuffer, or an object with an entry. view: what keeps the memory in place; NULL
   or None after release. was_finalized: an object is finalized once. */
typedef struct {
    Reusable head;
    PyObject *cache;
    PyObject *range;
    PyObject *SHARED view;
    char was_finalized;
} Lease;

enum { LOCAL_WRITE = 1 };

static PyTypeObject *entry_base_type, *known_base_type, *cache_base_type, *lease_type;
/* The classes of ndpy/cache, once an object of them was seen. */
static PyTypeObject *usual_known_type, *usual_cache_type;
static struct spares spare_leases;
/* Guards `uses`, `cached` and `used` of all entries, and the counts of all caches. */
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

static PyObject *entry_uses(PyObject *self, void *Py_UNUSED(none))
{
    Py_ssize_t uses;

    mutex_lock(&uses_mutex);
    uses = ((Entry *)self)->uses;
    mutex_unlock(&uses_mutex);
    return PyLong_FromSsize_t(uses);
}

static PyObject *entry_cached(PyObject *self, void *Py_UNUSED(none))
{
    int cached;

    mutex_lock(&uses_mutex);
    cached = ((Entry *)self)->cached;
    mutex_unlock(&uses_mutex);
    return PyBool_FromLong(cached);
}

static int entry_set_cached(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    int cached = value ? PyObject_IsTrue(value) : -1;

    if (cached < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_AttributeError, "cached cannot be deleted");
        return -1;
    }
    mutex_lock(&uses_mutex);
    ((Entry *)self)->cached = (char)cached;
    mutex_unlock(&uses_mutex);
    return 0;
}

static PyObject *entry_used(PyObject *self, void *Py_UNUSED(none))
{
    long long used;

    mutex_lock(&uses_mutex);
    used = ((Entry *)self)->used;
    mutex_unlock(&uses_mutex);
    return PyLong_FromLongLong(used);
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
    {"uses", entry_uses, NULL, NULL, NULL},
    {"cached", entry_cached, entry_set_cached, NULL, NULL},
    {"used", entry_used, entry_set_used, NULL, NULL},
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

    if (!HAS_GIL)
        return PyLong_FromVoidPtr(object);
    if (identities[place].object == object)
        return Py_NewRef(identities[place].number);
    number = PyLong_FromVoidPtr(object);
    if (!number)
        return NULL;
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

/* Makes a lease. Steals the reference to `range`. Returns NULL with an error. */
static Lease *lease_new(Cache *cache, KnownBuffer *range, PyObject *view)
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

/* Takes back a lease that nobody has seen. Its references to the range and the view are the caller's again. */
static void undo_lease(Lease *lease)
{
    lease->range = lease->view = NULL;
    Py_DECREF((PyObject *)lease);
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

/* ---- Lease ---- */

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
    lease_type = add_type(module, &lease_spec);
    return entry_base_type && known_base_type && cache_base_type && lease_type ? 0 : -1;
}
