/* The extension module ndpy._lease: what a hit of the registration cache and the end of a lease do, without a Python frame.
 *
 * Nothing here lets go of the interpreter's lock between looking at Entry.cached and counting the use, and whoever closes an
 * entry clears cached before it looks at uses. So a hit takes no lock of the cache, and one of the two sees the other.
 */

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

/* A region that can be found. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t uses; /* leases and exposures of it */
    long long used;  /* the number of its last use */
    char cached;     /* others may still find it */
} Entry;

/* A buffer whose entry was found before. */
typedef struct {
    PyObject_HEAD
    PyObject *entry;
    PyObject *export;  /* makes what keeps the buffer as it is; None if that is the buffer */
    PyObject *subject; /* of what: None for the buffer itself */
    PyObject *pointer; /* what an export has to be equal to; None if the buffer's memory cannot be replaced */
    Py_ssize_t size;   /* the length that an export has to have; -1 for any */
    long rights;       /* all that may be asked for */
} KnownBuffer;

/* The part of a cache that a hit needs. */
typedef struct {
    PyObject_HEAD
    PyObject *known;      /* a dict of KnownBuffer: by the buffer's identity, by (address, length), or by (that, True) if raw */
    PyObject *lease_type; /* a kind of LeaseBase */
    PyObject *defunct;    /* None while the cache is open */
    long long uses;
    long long hits;
    char over; /* more is registered than the bounds say */
} LeaseFinder;

/* A lease or an exposure. view: the export; NULL or None once it was released. */
typedef struct {
    PyObject_HEAD
    PyObject *cache;
    PyObject *span;
    PyObject *view;
} LeaseBase;

enum { LOCAL_WRITE = 1 };

static PyTypeObject *entry_type, *known_type, *finder_type, *use_type;

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    release(self);
    Py_DECREF(type);
}

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
    {"take", entry_take, METH_NOARGS, "One use more."},
    {"give_back", entry_give_back, METH_NOARGS, "One use less."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot entry_slots[] = {
    {Py_tp_doc, "A registered region that can be found."},
    {Py_tp_members, entry_members},
    {Py_tp_methods, entry_methods},
    {Py_tp_dealloc, free_object},
    {0, NULL},
};

static PyType_Spec entry_spec = {
    "ndpy._lease.Entry", sizeof(Entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, entry_slots};

/* ---- KnownBuffer ---- */

static int known_init(PyObject *self, PyObject *arguments, PyObject *Py_UNUSED(keywords))
{
    KnownBuffer *known = (KnownBuffer *)self;
    PyObject *entry, *export, *subject, *pointer;
    Py_ssize_t size;
    long rights;

    if (known->entry) {
        PyErr_SetString(PyExc_TypeError, "it is known already");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O!lOOOn", entry_type, &entry, &rights, &export, &subject, &pointer, &size)) return -1;
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

static PyType_Spec known_spec = {"ndpy._lease.KnownBuffer", sizeof(KnownBuffer), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, known_slots};

/* ---- LeaseFinder ---- */

/* A new reference; NULL without an error for what is not known. */
static KnownBuffer *look_up(PyObject *all, PyObject *buffer, int raw)
{
    PyObject *key, *found;

    if (!PyTuple_CheckExact(buffer)) {
        key = PyLong_FromVoidPtr(buffer);
    } else if (raw) {
        key = PyTuple_Pack(2, buffer, Py_True);
    } else {
        key = Py_NewRef(buffer);
    }
    if (!key) return NULL;
    found = PyDict_GetItemWithError(all, key);
    if (found && (!PyObject_TypeCheck(found, known_type) || !((KnownBuffer *)found)->entry)) found = NULL;
    Py_XINCREF(found);
    Py_DECREF(key);
    return (KnownBuffer *)found;
}

/* 1 if the memory is what it was, 0 if not, -1 with an error. */
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

/* A new lease, not yet in use. NULL without an error for what is no hit. */
static LeaseBase *prepare(const LeaseFinder *finder, const KnownBuffer *known, PyObject *buffer, long access)
{
    PyObject *view, *subject = known->subject == Py_None ? buffer : known->subject;
    LeaseBase *use = NULL;

    if (access & ~known->rights || (finder->defunct && finder->defunct != Py_None)) return NULL;
    if (!finder->lease_type || !PyType_Check(finder->lease_type) ||
        !PyType_IsSubtype((PyTypeObject *)finder->lease_type, use_type))
        return NULL;
    view = known->export == Py_None ? Py_NewRef(subject) : PyObject_CallFunctionObjArgs(known->export, subject, NULL);
    if (!view) return NULL;
    if (still_there(known, view) == 1) use = (LeaseBase *)PyType_GenericAlloc((PyTypeObject *)finder->lease_type, 0);
    if (use)
        use->span = view;
    else
        Py_DECREF(view);
    return use;
}

/* The lease of a hit. NULL without an error for what is none. */
static PyObject *find(LeaseFinder *finder, PyObject *buffer, long access, int raw)
{
    KnownBuffer *known = finder->known ? look_up(finder->known, buffer, raw) : NULL;
    Entry *entry;
    LeaseBase *use;

    if (!known) return NULL;
    use = prepare(finder, known, buffer, access);
    entry = (Entry *)known->entry;
    if (!use || !entry->cached) {
        Py_XDECREF(use);
        Py_DECREF(known);
        return NULL;
    }
    entry->uses++;
    entry->used = ++finder->uses;
    finder->hits++;
    use->view = use->span;
    use->span = (PyObject *)known;
    use->cache = Py_NewRef((PyObject *)finder);
    return (PyObject *)use;
}

enum { BUFFER, ACCESS, QUEUE_PAIR, RAW, ARGUMENTS };

/* The arguments of local(), borrowed; NULL for what was not given. */
static int take_arguments(PyObject *const *arguments, Py_ssize_t count, PyObject *keywords, PyObject **given)
{
    static const char *const names[] = {"buffer", "access", "queue_pair", "raw"};
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0, number;
    int which;

    if (count > QUEUE_PAIR) {
        PyErr_SetString(PyExc_TypeError, "local() takes a buffer and its access; queue_pair and raw are given by name");
        return -1;
    }
    for (number = 0; number < count; number++) given[number] = arguments[number];
    for (number = 0; number < named; number++) {
        PyObject *name = PyTuple_GetItem(keywords, number);
        for (which = 0; which < ARGUMENTS && PyUnicode_CompareWithASCIIString(name, names[which]); which++) {}
        if (which == ARGUMENTS || given[which]) {
            PyErr_Format(PyExc_TypeError, "local() got an argument %R that it %s", name,
                which == ARGUMENTS ? "does not take" : "has already");
            return -1;
        }
        given[which] = arguments[count + number];
    }
    if (!given[BUFFER]) {
        PyErr_SetString(PyExc_TypeError, "local() needs a buffer");
        return -1;
    }
    return 0;
}

static PyObject *finder_local(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[ARGUMENTS] = {NULL}, *queue_pair, *right, *lease;
    long access = LOCAL_WRITE;
    int raw = 0;

    if (take_arguments(arguments, count, keywords, given) < 0) return NULL;
    queue_pair = given[QUEUE_PAIR] ? given[QUEUE_PAIR] : Py_None;
    if (given[RAW]) raw = PyObject_IsTrue(given[RAW]);
    if (raw < 0) return NULL;
    if (given[ACCESS]) access = PyLong_AsLong(given[ACCESS]);
    /* What is of a wrong type or too large, here or below, is refused by _local(), which can say why. */
    if (access == -1 && PyErr_Occurred()) {
        PyErr_Clear();
    } else if (queue_pair == Py_None) {
        lease = find((LeaseFinder *)self, given[BUFFER], access, raw);
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
    "Registered memory for send, receive, read and write of this side, as a Lease.\n\n"
    "buffer: as for Adapter.register(), 1 to info.max_registration_size bytes. access: NONE, LOCAL_WRITE (1), READ_SINK.\n"
    "queue_pair: the connection that it is for; what no other use shares is deregistered when that ends or is closed.\n"
    "raw: the caller calls invalidate() before the memory changes or goes; see the class.\n"
    "A hit calls no provider. The lease keeps the buffer as it is until it is released.\n\n"
    "Raises what Adapter.register() raises, InvalidFlagsError for other rights, UnsupportedError for memory without an\n"
    "owner. Source: contract K.1.");

static PyObject *finder_next_use(PyObject *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(++((LeaseFinder *)self)->uses);
}

static int finder_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((LeaseFinder *)self)->known);
    Py_VISIT(((LeaseFinder *)self)->lease_type);
    Py_VISIT(((LeaseFinder *)self)->defunct);
    return 0;
}

static int finder_clear(PyObject *self)
{
    Py_CLEAR(((LeaseFinder *)self)->known);
    Py_CLEAR(((LeaseFinder *)self)->lease_type);
    Py_CLEAR(((LeaseFinder *)self)->defunct);
    return 0;
}

static void finder_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    finder_clear(self);
    free_object(self);
}

static PyMemberDef finder_members[] = {
    {"_known", T_OBJECT_EX, offsetof(LeaseFinder, known), 0, NULL},
    {"_lease_type", T_OBJECT_EX, offsetof(LeaseFinder, lease_type), 0, NULL},
    {"_defunct", T_OBJECT, offsetof(LeaseFinder, defunct), 0, NULL},
    {"_over", T_BOOL, offsetof(LeaseFinder, over), 0, NULL},
    {"_hits", T_LONGLONG, offsetof(LeaseFinder, hits), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef finder_methods[] = {
    {"local", (PyCFunction)(void (*)(void))finder_local, METH_FASTCALL | METH_KEYWORDS, local_doc},
    {"_next_use", finder_next_use, METH_NOARGS, "The number of a use that is no hit."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot finder_slots[] = {
    {Py_tp_doc, "The part of a cache that a hit needs. _local() is called for the rest."},
    {Py_tp_traverse, finder_traverse},
    {Py_tp_clear, finder_clear},
    {Py_tp_dealloc, finder_dealloc},
    {Py_tp_members, finder_members},
    {Py_tp_methods, finder_methods},
    {0, NULL},
};

static PyType_Spec finder_spec = {"ndpy._lease.LeaseFinder", sizeof(LeaseFinder), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, finder_slots};

/* ---- LeaseBase ---- */

static int is_used(const LeaseBase *use)
{
    return use->view && use->view != Py_None;
}

static PyObject *use_release(PyObject *self, PyObject *Py_UNUSED(none))
{
    LeaseBase *use = (LeaseBase *)self;
    PyObject *view, *found, *result = NULL;
    Entry *entry;

    if (!is_used(use)) Py_RETURN_NONE;
    if (PyObject_TypeCheck(use->span, known_type))
        found = Py_NewRef(((KnownBuffer *)use->span)->entry);
    else
        found = PyObject_GetAttrString(use->span, "entry");
    if (!found) return NULL;
    if (!PyObject_TypeCheck(found, entry_type) || !PyObject_TypeCheck(use->cache, finder_type)) {
        PyErr_SetString(PyExc_TypeError, "a lease of something else");
        Py_DECREF(found);
        return NULL;
    }
    entry = (Entry *)found;
    view = use->view;
    use->view = NULL;
    entry->uses--;
    if (entry->cached && !((LeaseFinder *)use->cache)->over)
        result = Py_NewRef(Py_None);
    else
        result = PyObject_CallMethod(use->cache, "_on_released", "O", found);
    Py_DECREF(found);
    /* Only now may the memory go: its region may have ended with this use. */
    Py_DECREF(view);
    return result;
}

static PyObject *use_enter(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (!is_used((LeaseBase *)self)) {
        PyObject *nothing = PyObject_CallMethod(self, "_used", NULL);
        if (!nothing) return NULL;
        Py_DECREF(nothing);
    }
    return Py_NewRef(self);
}

static PyObject *use_exit(PyObject *self, PyObject *const *Py_UNUSED(arguments), Py_ssize_t Py_UNUSED(count))
{
    return use_release(self, NULL);
}

static void use_finalize(PyObject *self)
{
    PyObject *type, *value, *traceback, *nothing;

    if (!is_used((LeaseBase *)self)) return;
    PyErr_Fetch(&type, &value, &traceback);
    nothing = PyObject_CallMethod(self, "_dropped", NULL);
    if (nothing)
        Py_DECREF(nothing);
    else
        PyErr_WriteUnraisable(self);
    PyErr_Restore(type, value, traceback);
}

static int use_traverse(PyObject *self, visitproc visit, void *arg)
{
    LeaseBase *use = (LeaseBase *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(use->cache);
    Py_VISIT(use->span);
    Py_VISIT(use->view);
    return 0;
}

static int use_clear(PyObject *self)
{
    LeaseBase *use = (LeaseBase *)self;

    Py_CLEAR(use->cache);
    Py_CLEAR(use->span);
    Py_CLEAR(use->view);
    return 0;
}

static void use_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    use_clear(self);
    free_object(self);
}

static PyMemberDef use_members[] = {
    {"_cache", T_OBJECT, offsetof(LeaseBase, cache), 0, NULL},
    {"_span", T_OBJECT, offsetof(LeaseBase, span), 0, NULL},
    {"_view", T_OBJECT, offsetof(LeaseBase, view), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef use_methods[] = {
    {"release", use_release, METH_NOARGS, "End the use; the memory stays registered, in the cache. Harmless when repeated."},
    {"__enter__", use_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))use_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot use_slots[] = {
    {Py_tp_doc, "What a lease and an exposure are."},
    {Py_tp_finalize, use_finalize},
    {Py_tp_traverse, use_traverse},
    {Py_tp_clear, use_clear},
    {Py_tp_dealloc, use_dealloc},
    {Py_tp_members, use_members},
    {Py_tp_methods, use_methods},
    {0, NULL},
};

static PyType_Spec use_spec = {"ndpy._lease.LeaseBase", sizeof(LeaseBase), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, use_slots};

/* ---- the module ---- */

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);

    if (type && PyModule_AddType(module, (PyTypeObject *)type) < 0) Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int fill(PyObject *module)
{
    entry_type = add_type(module, &entry_spec);
    known_type = add_type(module, &known_spec);
    finder_type = add_type(module, &finder_spec);
    use_type = add_type(module, &use_spec);
    return entry_type && known_type && finder_type && use_type ? 0 : -1;
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "ndpy._lease", "Hits of the registration cache.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__lease(void)
{
    PyObject *module = PyModule_Create(&definition);

    if (module && fill(module) < 0) Py_CLEAR(module);
    return module;
}
