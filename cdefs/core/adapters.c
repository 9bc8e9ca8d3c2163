/* What making and closing its objects touch of an adapter. ndpy/objects/adapter.py extends this type. */

#include "core.h"

PyTypeObject *adapter_type;

/* ---- making objects ---- */

int begin_making(Adapter *adapter)
{
    int may;

    mutex_lock(&circle_mutex);
    /* close() sets CLOSING before it looks at the count. So one of the two sees the other. */
    may = adapter->life != CLOSING && is_usable(adapter->defunct);
    if (may)
        adapter->making++;
    mutex_unlock(&circle_mutex);
    return may;
}

void end_making(Adapter *adapter)
{
    mutex_lock(&circle_mutex);
    adapter->making--;
    mutex_unlock(&circle_mutex);
}

PyDoc_STRVAR(make_doc,
             "_make($self, kind, /, *arguments)\n--\n\n"
             "Call kind(self, *arguments). The adapter stays open meanwhile. Raises ClosedError after close() "
             "began.");

static PyObject *adapter_make(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *given, *made = NULL;

    if (!count) {
        PyErr_SetString(PyExc_TypeError, "_make() needs what to call");
        return NULL;
    }
    if (!begin_making((Adapter *)self)) {
        PyObject *name;

        if (!is_usable(((Adapter *)self)->defunct))
            return raise_defunct(self, &((Adapter *)self)->defunct);
        name = PyObject_CallMethod(self, "_describe", NULL);
        if (name)
            PyErr_Format(closed_error, "%U is being closed", name);
        Py_XDECREF(name);
        return NULL;
    }
    given = PyTuple_New(count);
    if (given) {
        PyTuple_SetItem(given, 0, Py_NewRef(self));
        for (Py_ssize_t place = 1; place < count; place++)
            PyTuple_SetItem(given, place, Py_NewRef(arguments[place]));
        made = PyObject_CallObject(arguments[0], given);
        Py_DECREF(given);
    }
    end_making((Adapter *)self);
    return made;
}

/* ---- the type ---- */

static PyObject *adapter_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    Adapter *adapter = (Adapter *)resource_new(type, NULL, NULL);

    if (adapter)
        adapter->children.next = adapter->children.previous = &adapter->children;
    return (PyObject *)adapter;
}

static int adapter_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Adapter *)self)->device);
    Py_VISIT(((Adapter *)self)->orphans);
    Py_VISIT(((Adapter *)self)->region_class);
    return resource_traverse(self, visit, arg);
}

static int adapter_clear(PyObject *self)
{
    Py_CLEAR(((Adapter *)self)->device);
    Py_CLEAR(((Adapter *)self)->orphans);
    return resource_clear(self);
}

static void adapter_dealloc(PyObject *self)
{
    Adapter *adapter = (Adapter *)self;

    PyObject_GC_UnTrack(self);
    adapter_clear(self);
    Py_CLEAR(adapter->region_class);
    while (adapter->children.next != &adapter->children)
        link_out(adapter->children.next);
    resource_dealloc(self);
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
    PyObject *rights, *region_class, *former;

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
    former = adapter->region_class;
    adapter->region_class = Py_NewRef(region_class);
    Py_XDECREF(former);
    adapter->domain = (void *)(uintptr_t)domain;
    adapter->longest = longest;
    adapter->registrar = (const struct ndpy_registrar *)(uintptr_t)registrar;
    Py_RETURN_NONE;
}

/* ---- its objects ---- */

static PyObject *adapter_is_used(PyObject *self, void *Py_UNUSED(closure))
{
    const Adapter *adapter = (Adapter *)self;
    int is_used;

    mutex_lock(&circle_mutex);
    is_used = adapter->making || adapter->children.next != &adapter->children;
    mutex_unlock(&circle_mutex);
    return PyBool_FromLong(is_used);
}

static PyObject *adapter_own_children(PyObject *self, PyObject *Py_UNUSED(none))
{
    struct link *first = &((Adapter *)self)->children;
    PyObject *list = PyList_New(0), *unlisted = NULL;

    if (!list)
        return NULL;
    mutex_lock(&circle_mutex);
    for (struct link *link = first->next; link != first && !unlisted; link = link->next) {
        PyObject *child = find_resource(link);

        if (!child)
            continue;
        if (PyList_Append(list, child) < 0)
            unlisted = child;
        else
            Py_DECREF(child);
    }
    mutex_unlock(&circle_mutex);
    if (!unlisted)
        return list;
    Py_DECREF(unlisted);
    Py_DECREF(list);
    return NULL;
}

static PyObject *adapter_own_child(PyObject *self, PyObject *number)
{
    struct link *first = &((Adapter *)self)->children;
    unsigned long long serial = PyLong_AsUnsignedLongLong(number);
    PyObject *found = NULL;

    if (serial == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    mutex_lock(&circle_mutex);
    for (struct link *link = first->next; link != first && !found; link = link->next) {
        if (((Resource *)((char *)link - offsetof(Resource, link)))->serial == serial)
            found = find_resource(link);
    }
    mutex_unlock(&circle_mutex);
    return found ? found : Py_NewRef(Py_None);
}

static PyObject *adapter_closing(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((Adapter *)self)->life == CLOSING);
}

static int adapter_set_closing(PyObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    ((Adapter *)self)->life = value == Py_True ? CLOSING : OPEN;
    return 0;
}

static PyObject *adapter_device(PyObject *self, void *Py_UNUSED(closure))
{
    PyObject *device = ((Adapter *)self)->device;

    return Py_NewRef(device ? device : self);
}

static int adapter_set_device(PyObject *self, PyObject *device, void *Py_UNUSED(closure))
{
    if (!device || !PyObject_TypeCheck(device, adapter_type)) {
        PyErr_SetString(PyExc_TypeError, "a device is an adapter");
        return -1;
    }
    Py_XDECREF(((Adapter *)self)->device);
    ((Adapter *)self)->device = Py_NewRef(device);
    return 0;
}

static PyMemberDef adapter_members[] = {
    {"_orphans", T_OBJECT, offsetof(Adapter, orphans), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef adapter_properties[] = {
    {"_closing", adapter_closing, adapter_set_closing, "Set by close(). From then on no object can be made.", NULL},
    {"_device", adapter_device, adapter_set_device,
     "The adapter itself. For a protection domain: the adapter that it was made from.", NULL},
    {"_is_used", adapter_is_used, NULL, "Whether objects of it are open, or are being made.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef adapter_methods[] = {
    {"register", (PyCFunction)(void (*)(void))adapter_register, METH_FASTCALL | METH_KEYWORDS, register_doc},
    {"_attach_registrar", adapter_attach_registrar, METH_VARARGS, attach_registrar_doc},
    {"_make", (PyCFunction)(void (*)(void))adapter_make, METH_FASTCALL, make_doc},
    {"_own_children", adapter_own_children, METH_NOARGS,
     "_own_children($self, /)\n--\n\nThe open objects that were made from this adapter. Other threads do not change "
     "this "
     "list."},
    {"_own_child", adapter_own_child, METH_O, "_own_child($self, serial, /)\n--\n\nThe one with this number, or None."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot adapter_slots[] = {
    {Py_tp_doc, "What making and closing its objects touch of an adapter."},
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

int add_adapters(PyObject *module)
{
    adapter_type = add_resource_type(module, &adapter_spec);
    return adapter_type ? 0 : -1;
}
