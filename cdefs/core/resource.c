/* The life of every object that has close(), from its making to its end. The classes of ndpy/objects/resource.py extend
 * this type.
 *
 * - NEW, from its making on: not in the circle of its adapter. close() does nothing.
 * - OPEN, from _opened() on, because the provider's object exists: in the circle. close() releases it.
 * - CLOSING, of an adapter only, while it is being closed: it makes no objects any more.
 * - CLOSED, from close() or _mark_closed() on: not in the circle. close() does nothing.
 * - INHERITED, in a forked child, where an open object is the parent's: in the circle. close() does nothing.
 *
 * Whose it is: `adapter`. An adapter has its open objects in a circle of links, which are no references. The device of
 * a protection domain has the domain in its circle. An adapter that has an open object, or makes one, cannot be closed.
 *
 * What keeps its memory: `owner`, until the object is closed. close() takes the memory away last. At the end of the
 * interpreter, _on_exit() of ndpy/objects/resource.py keeps what an open object owns to the end of the process. So does
 * _on_dropped() there, for what is dropped later.
 *
 * An object that is dropped while it is open is finalized first, also in a cycle of garbage. Its adapter then has it as
 * an orphan, and closes it. If that fails, nobody closes it, and its memory stays.
 *
 * Who closes an object has its lock, `lifetime`. Between the release and the new state no Python code runs but the one
 * that words an error. If Ctrl-C comes there, the object is closed all the same.
 *
 * Without the interpreter's lock, circle_mutex guards the circles and the counts, and an adapter has an object in its
 * circle before the count of those that are being made goes down.
 */

#include "core.h"

PyTypeObject *resource_type, *orphans_type;
PyObject *closed_error;
MUTEX(circle_mutex)
static unsigned long long serials;
static PyObject *name_defunct, *name_closed_maker;

static int is_open(const Resource *self)
{
    return self->life == OPEN || self->life == CLOSING;
}

void replace(PyObject *object, PyObject * SHARED * field, PyObject *reference)
{
    PyObject *former;

    (void)object;
    BEGIN_SECTION(object)
    former = *field;
    *field = reference;
    END_SECTION()
    Py_XDECREF(former);
}

/* ---- the circle of open objects ---- */

static void take_out(struct link *link)
{
    if (!link->next)
        return;
    link->next->previous = link->previous;
    link->previous->next = link->next;
    link->next = link->previous = NULL;
}

void link_out(struct link *link)
{
    mutex_lock(&circle_mutex);
    take_out(link);
    mutex_unlock(&circle_mutex);
}

static void link_in(struct link *before, struct link *link)
{
    link->next = before;
    link->previous = before->previous;
    before->previous->next = link;
    before->previous = link;
}

PyObject *find_resource(struct link *link)
{
    Resource *resource = (Resource *)((char *)link - offsetof(Resource, link));
#ifdef Py_GIL_DISABLED
    PyObject *found = NULL;

    if (resource->weak && PyWeakref_GetRef(resource->weak, &found) < 0)
        PyErr_Clear();
    return found;
#else
    /* Without references, it tells its weak references that it is being freed. */
    return Py_REFCNT((PyObject *)resource) > 0 ? Py_NewRef((PyObject *)resource) : NULL;
#endif
}

static unsigned long long next_serial(void)
{
    unsigned long long serial;

    mutex_lock(&circle_mutex);
    serial = ++serials;
    mutex_unlock(&circle_mutex);
    return serial;
}

/* ---- opening ---- */

PyObject *resource_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    Resource *self = (Resource *)PyType_GenericAlloc(type, 0);

    if (!self)
        return NULL;
    self->serial = next_serial();
#ifdef Py_GIL_DISABLED
    self->weak = PyWeakref_NewRef((PyObject *)self, NULL);
    /* Objects of the core's own types have no weak references. They are for tests. */
    if (!self->weak)
        PyErr_Clear();
#endif
    return (PyObject *)self;
}

/* In whose circle it is when it is open, or NULL. */
static Adapter *parent_of(const Resource *self)
{
    PyObject *adapter = self->adapter;

    if (!adapter || !PyObject_TypeCheck(adapter, adapter_type))
        return NULL;
    return (Adapter *)(adapter == (PyObject *)self ? ((Adapter *)adapter)->device : adapter);
}

/* Some types have a setter of their own. Runs no Python code. */
static void set_defunct(Resource *self, PyObject *value)
{
    if (PyObject_TypeCheck((PyObject *)self, region_type))
        replace((PyObject *)self, &self->defunct, Py_NewRef(value));
    else if (PyObject_SetAttr((PyObject *)self, name_defunct, value) < 0)
        PyErr_WriteUnraisable((PyObject *)self);
}

/* It cannot be used if its adapter has been removed: a removal marks the adapter before its objects. */
static void follow_parent(Resource *self)
{
    Adapter *parent = parent_of(self);
    PyObject *defunct;

    if (!parent || is_usable(parent->defunct))
        return;
    defunct = get_defunct((PyObject *)parent, NULL);
    set_defunct(self, defunct);
    Py_DECREF(defunct);
}

void resource_open(Resource *self)
{
    Adapter *parent = parent_of(self);

    mutex_lock(&circle_mutex);
    self->life = OPEN;
    take_out(&self->link);
    /* Regions last: nobody looks for these by their numbers. */
    if (parent)
        link_in(PyObject_TypeCheck((PyObject *)self, region_type) ? &parent->children : parent->children.next,
                &self->link);
    mutex_unlock(&circle_mutex);
    follow_parent(self);
}

static PyObject *resource_opened(PyObject *self, PyObject *Py_UNUSED(none))
{
    Resource *resource = (Resource *)self;

    if (!resource->adapter || !PyObject_TypeCheck(resource->adapter, adapter_type)) {
        PyErr_SetString(PyExc_TypeError, "the object has no adapter");
        return NULL;
    }
    resource_open(resource);
    Py_RETURN_NONE;
}

static PyObject *resource_mark_still_open(PyObject *self, PyObject *Py_UNUSED(none))
{
    set_defunct((Resource *)self, Py_None);
    follow_parent((Resource *)self);
    Py_RETURN_NONE;
}

/* ---- closing ---- */

/* Returns 0, or -1 with an error. */
static int call(PyObject *self, const char *method)
{
    PyObject *nothing = PyObject_CallMethod(self, method, NULL);

    Py_XDECREF(nothing);
    return nothing ? 0 : -1;
}

static PyObject *closed_region(PyObject *range, PyObject *Py_UNUSED(none))
{
    PyObject *make = imported("ndpy.objects.memory", "_closed");
    PyObject *error = make ? PyObject_CallObject(make, range) : NULL;

    Py_XDECREF(make);
    return error;
}

static PyMethodDef closed_region_method = {"closed_region", closed_region, METH_NOARGS, NULL};

/* What _closed_maker() is for others, without the text. It does not refer to the region, whose buffer would stay. */
static PyObject *region_closed_maker(const Region *region)
{
    PyObject *range = Py_BuildValue("(KK)", region->address, region->length);
    PyObject *maker = range ? PyCFunction_NewEx(&closed_region_method, range, NULL) : NULL;

    Py_XDECREF(range);
    return maker;
}

/* The provider's object has gone. closed: makes the error for its use, or NULL. Returns 0, or -1 with an error. */
static int mark_closed(Resource *self, PyObject *closed)
{
    PyObject *type, *value, *traceback;
    Adapter *parent = parent_of(self);
    int failed = 0;

    if (!closed)
        closed = PyObject_CallMethodObjArgs((PyObject *)self, name_closed_maker, NULL);
    PyErr_Fetch(&type, &value, &traceback);
    if (!closed) {
        failed = -1;
        closed = PyObject_GetAttrString((PyObject *)self, "_closed_error");
        PyErr_Clear();
    }
    set_defunct(self, closed ? closed : Py_True);
    Py_XDECREF(closed);
    self->life = CLOSED;
    link_out(&self->link);
    /* A thread that posts looks at `defunct` before it uses the owner's memory. */
    replace((PyObject *)self, &self->owner, NULL);
    PyErr_Restore(type, value, traceback);
    /* An orphan may have waited for this object. */
    if (!failed && parent && parent->orphans && PyObject_TypeCheck(parent->orphans, orphans_type) &&
        ((Orphans *)parent->orphans)->may_have_some)
        failed = call((PyObject *)parent, "_wake");
    return failed;
}

static PyObject *resource_mark_closed(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (mark_closed((Resource *)self, NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Returns a new reference to the lock. */
static Lock *lock_of(Resource *self)
{
    Lock *lock;

    BEGIN_SECTION((PyObject *)self)
    if (!self->lifetime)
        self->lifetime = rlock_new();
    lock = (Lock *)Py_XNewRef((PyObject *)self->lifetime);
    END_SECTION()
    return lock;
}

/* Closes it, with its lock. Returns 0, or -1 with an error: then it is open. */
static int close_now(PyObject *self)
{
    PyObject *closed;

    if (!is_open((Resource *)self))
        return 0;
    if (PyObject_TypeCheck(self, region_type)) {
        closed = region_closed_maker((Region *)self);
        if (!closed)
            return -1;
        if (region_deregister((Region *)self))
            return mark_closed((Resource *)self, closed);
        Py_DECREF(closed);
    }
    if (call(self, "_refuse_if_used") < 0 || call(self, "_release") < 0)
        return -1;
    return mark_closed((Resource *)self, NULL);
}

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Release it. Harmless when repeated.\n\n"
                        "Raises:\n"
                        "    DeviceBusyError: other objects use it. Nothing has changed.");

static PyObject *resource_close(PyObject *self, PyObject *Py_UNUSED(none))
{
    Lock *lock;
    int failed = -1;

    if (!is_open((Resource *)self))
        Py_RETURN_NONE;
    lock = lock_of((Resource *)self);
    if (!lock)
        return NULL;
    if (lock_enter(lock) == 0) {
        failed = close_now(self);
        rlock_leave(lock);
    }
    Py_DECREF(lock);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- other ends ---- */

/* It was dropped without close(). */
static void resource_finalize(PyObject *self)
{
    PyObject *type, *value, *traceback;

    if (!is_open((Resource *)self))
        return;
    PyErr_Fetch(&type, &value, &traceback);
    if (call(self, "_on_dropped") < 0) {
        /* Nobody will close it, so its memory must stay. */
        Py_XINCREF(((Resource *)self)->owner);
        PyErr_WriteUnraisable(self);
    }
    PyErr_Restore(type, value, traceback);
}

/* A thread of the parent may have had the lock. */
static PyObject *resource_inherit(PyObject *self, PyObject *Py_UNUSED(none))
{
    Resource *resource = (Resource *)self;

    Py_CLEAR(resource->lifetime);
    if (is_open(resource))
        resource->life = INHERITED;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(keep_for_ever_doc, "keep_for_ever($module, object, /)\n--\n\n"
                                "Never free an object. For memory that is registered when the interpreter ends: the "
                                "adapter may use it until the process has gone.");

static PyObject *keep_for_ever(PyObject *Py_UNUSED(module), PyObject *object)
{
    Py_INCREF(object);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

int resource_traverse(PyObject *self, visitproc visit, void *arg)
{
    Resource *resource = (Resource *)self;

    Py_VISIT(Py_TYPE(self));
    Py_VISIT(resource->adapter);
    Py_VISIT(resource->defunct);
    Py_VISIT(resource->owner);
    return 0;
}

int resource_clear(PyObject *self)
{
    Resource *resource = (Resource *)self;

    /* The circle belongs to the adapter. */
    link_out(&resource->link);
    Py_CLEAR(resource->adapter);
    Py_CLEAR(resource->defunct);
    Py_CLEAR(resource->owner);
    return 0;
}

void resource_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    resource_clear(self);
    Py_CLEAR(((Resource *)self)->lifetime);
#ifdef Py_GIL_DISABLED
    Py_CLEAR(((Resource *)self)->weak);
#endif
    free_object(self);
}

PyObject *get_defunct(PyObject *self, void *Py_UNUSED(none))
{
    PyObject *defunct;

    BEGIN_SECTION(self)
    defunct = Py_XNewRef(((Resource *)self)->defunct);
    END_SECTION()
    return defunct ? defunct : Py_NewRef(Py_None);
}

static int resource_set_defunct(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    replace(self, &((Resource *)self)->defunct, Py_XNewRef(value));
    return 0;
}

static PyObject *resource_lifetime(PyObject *self, void *Py_UNUSED(none))
{
    return (PyObject *)lock_of((Resource *)self);
}

static PyObject *resource_closed(PyObject *self, void *Py_UNUSED(none))
{
    return PyBool_FromLong(!is_open((Resource *)self));
}

static PyMemberDef resource_members[] = {
    {"_adapter", T_OBJECT, offsetof(Resource, adapter), 0, NULL},
    {"_owner", T_OBJECT, offsetof(Resource, owner), 0,
     "What keeps memory in place that the adapter may use while this is open, or None."},
    {"_serial", T_ULONGLONG, offsetof(Resource, serial), 0, "Its place among locks that a thread takes together."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef resource_properties[] = {
    {"_defunct", get_defunct, resource_set_defunct, "None while it is usable. Then it makes the exception to raise.",
     NULL},
    {"_lifetime", resource_lifetime, NULL, "The lock of close().", NULL},
    {"closed", resource_closed, NULL, "Whether it has been released.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef resource_methods[] = {
    {"close", resource_close, METH_NOARGS, close_doc},
    {"_opened", resource_opened, METH_NOARGS,
     "The native resource exists now. The constructor calls this last. An open object goes to its present adapter."},
    {"_mark_still_open", resource_mark_still_open, METH_NOARGS,
     "A close has failed. The object is as usable as before, unless the adapter has been removed."},
    {"_mark_closed", resource_mark_closed, METH_NOARGS, "The native resource has gone."},
    {"_inherit", resource_inherit, METH_NOARGS,
     "In a forked child: it is the parent's if it was open, and nobody has its lock."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot resource_slots[] = {
    {Py_tp_doc, "The life of an object that has close()."},
    {Py_tp_new, resource_new},
    {Py_tp_finalize, resource_finalize},
    {Py_tp_traverse, resource_traverse},
    {Py_tp_clear, resource_clear},
    {Py_tp_dealloc, resource_dealloc},
    {Py_tp_members, resource_members},
    {Py_tp_getset, resource_properties},
    {Py_tp_methods, resource_methods},
    {0, NULL},
};

static PyType_Spec resource_spec = {"ndpy._core.Resource", sizeof(Resource), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, resource_slots};

/* ---- Orphans ---- */

static PyGetSetDef orphans_properties[] = {
    FLAG("may_have_some", Orphans, may_have_some,
         "Whether some are left, or a thread that is closing them may leave some."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot orphans_slots[] = {
    {Py_tp_doc, "What tells whether an object was dropped without close()."},
    {Py_tp_getset, orphans_properties},
    {Py_tp_dealloc, free_object},
    {0, NULL},
};

static PyType_Spec orphans_spec = {"ndpy._core.Orphans", sizeof(Orphans), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                                   orphans_slots};

/* ---- the module ---- */

static PyObject *core_next_serial(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLongLong(next_serial());
}

static PyMethodDef functions[] = {
    {"keep_for_ever", keep_for_ever, METH_O, keep_for_ever_doc},
    {"next_serial", core_next_serial, METH_NOARGS,
     "next_serial($module, /)\n--\n\nReturn a number that no other object has, in ascending order."},
    {NULL, NULL, 0, NULL},
};

int add_resources(PyObject *module)
{
    closed_error = imported("ndpy.errors", "ClosedError");
    name_defunct = interned("_defunct");
    name_closed_maker = interned("_closed_maker");
    if (!closed_error || !name_defunct || !name_closed_maker || PyModule_AddFunctions(module, functions) < 0)
        return -1;
    resource_type = add_type(module, &resource_spec);
    orphans_type = add_type(module, &orphans_spec);
    return resource_type && orphans_type ? 0 : -1;
}
