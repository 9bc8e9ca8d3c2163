#include "core.h"

void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    release(self);
    Py_DECREF(type);
}

void free_tracked(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    free_object(self);
}

PyObject *get_flag(PyObject *self, void *offset)
{
    return PyBool_FromLong(*(SHARED char *)((char *)self + (uintptr_t)offset));
}

int set_flag(PyObject *self, PyObject *value, void *offset)
{
    if (!value || !PyBool_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "this attribute is a bool");
        return -1;
    }
    *(SHARED char *)((char *)self + (uintptr_t)offset) = value == Py_True;
    return 0;
}

/* ---- what cannot be copied ---- */

static PyTypeObject *uncopied_type;

/* copy.copy(), copy.deepcopy() and pickle all ask for this. */
static PyObject *refuse_copy(PyObject *self, PyObject *Py_UNUSED(protocol))
{
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(self), "__name__");

    if (!name)
        return NULL;
    PyErr_Format(PyExc_TypeError,
                 "%U objects can be neither copied nor pickled, because they stand for something that this process has "
                 "opened. Threads may share "
                 "one. Another process opens the adapter itself; values such as RemoteMemory, Endpoint and AdapterInfo "
                 "can be sent to it",
                 name);
    Py_DECREF(name);
    return NULL;
}

static PyMethodDef uncopied_methods[] = {
    {"__reduce_ex__", refuse_copy, METH_O, "Raises TypeError."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot uncopied_slots[] = {
    {Py_tp_doc, "An object that can be neither copied nor pickled, because it owns something, or refers to something "
                "that has an owner."},
    {Py_tp_methods, uncopied_methods},
    {0, NULL},
};

static PyType_Spec uncopied_spec = {"ndpy._core.Uncopied", sizeof(PyObject), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, uncopied_slots};

static int add_uncopied(PyObject *module)
{
    uncopied_type = add_value_type(module, &uncopied_spec);
    return uncopied_type ? 0 : -1;
}

/* ---- types ---- */

PyTypeObject *add_type_on(PyObject *module, PyType_Spec *spec, PyTypeObject *base)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, (PyObject *)base);

    if (type && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    return add_type_on(module, spec, uncopied_type);
}

PyTypeObject *add_resource_type(PyObject *module, PyType_Spec *spec)
{
    return add_type_on(module, spec, resource_type);
}

PyTypeObject *add_value_type(PyObject *module, PyType_Spec *spec)
{
    return add_type_on(module, spec, NULL);
}

PyObject *interned(const char *name)
{
    return PyUnicode_InternFromString(name);
}

PyObject *imported(const char *module, const char *name)
{
    PyObject *found = PyImport_ImportModule(module), *object = found ? PyObject_GetAttrString(found, name) : NULL;

    Py_XDECREF(found);
    return object;
}

PyObject *bytes_new(size_t size)
{
    return PyObject_CallFunction((PyObject *)&PyByteArray_Type, "n", (Py_ssize_t)size);
}

PyObject *view_as(PyObject *bytes, const char *format)
{
    PyObject *view = PyMemoryView_FromObject(bytes);
    PyObject *numbers = view ? PyObject_CallMethod(view, "cast", "s", format) : NULL;

    Py_XDECREF(view);
    return numbers;
}

static int find_name(PyObject *name, PyObject *const *names, int count)
{
    int which;

    /* The names in a call are interned too, normally. */
    for (which = 0; which < count; which++) {
        if (name == names[which])
            return which;
    }
    for (which = 0; which < count && PyUnicode_Compare(name, names[which]) != 0; which++) {}
    return which;
}

int sort_arguments(const char *function, PyObject *const *arguments, Py_ssize_t given, PyObject *keywords,
                   PyObject *const *names, int positional, int count, PyObject **out)
{
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0, number;
    int which;

    if (given > positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments by position, not %zd%s", function, positional,
                     given, count > positional ? "; give the others by name" : "");
        return -1;
    }
    for (number = 0; number < given; number++)
        out[number] = arguments[number];
    for (number = 0; number < named; number++) {
        PyObject *name = PyTuple_GetItem(keywords, number);

        which = find_name(name, names, count);
        if (which == count || out[which]) {
            PyErr_Format(PyExc_TypeError, "%s() got an argument %R that it %s", function, name,
                         which == count ? "does not take" : "has already");
            return -1;
        }
        out[which] = arguments[given + number];
    }
    return 0;
}

void raise_made(PyObject *error)
{
    if (!error)
        return;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
}

PyObject *raise_defunct(PyObject *object, PyObject *SHARED const *defunct)
{
    PyObject *maker, *error;

    (void)object;
    BEGIN_SECTION(object)
    maker = Py_NewRef(*defunct);
    END_SECTION()
    error = PyObject_CallObject(maker, NULL);
    Py_DECREF(maker);
    raise_made(error);
    return NULL;
}

/* ---- the module ---- */

/* The module's variables belong to the main interpreter. Some versions of CPython give another interpreter a copy of
   the module's dictionary without a call of PyInit__core(). Some call it again, in the main interpreter, for each other
   one that imports the module. So the types are made once, and who imports the module asks whether this is the main
   interpreter. */

static int runs_in_main(void)
{
    return PyInterpreterState_GetID(PyInterpreterState_Get()) == 0;
}

static PyObject *is_main_interpreter(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(runs_in_main());
}

/* ---- methods of a class's own ---- */

/* Gives a class a method that its base has, unless something in between replaces it. Returns 0, or -1 with an error. */
static int own_method(PyObject *type, PyObject *base, PyMethodDef *method)
{
    PyObject *inherited = PyObject_GetAttrString(base, method->ml_name);
    PyObject *found = inherited ? PyObject_GetAttrString(type, method->ml_name) : NULL, *own;
    int result = found ? 0 : -1;

    if (found && found == inherited) {
        own = PyDescr_NewMethod((PyTypeObject *)type, method);
        result = own ? PyObject_SetAttrString(type, method->ml_name, own) : -1;
        Py_XDECREF(own);
    }
    Py_XDECREF(inherited);
    Py_XDECREF(found);
    return result;
}

PyDoc_STRVAR(with_own_methods_doc,
             "with_own_methods($module, type, /)\n--\n\n"
             "Give a class methods of its own in place of those in C that it inherits from this module. Returns it.\n\n"
             "CPython calls a method in C the quick way only if it is of the object's very class. So this is for the "
             "classes\n"
             "whose objects programs have.");

static PyObject *with_own_methods(PyObject *Py_UNUSED(module), PyObject *type)
{
    PyObject *order = PyObject_GetAttrString(type, "__mro__");
    Py_ssize_t place = order ? PyTuple_Size(order) : 0;
    int result = place > 0 ? 0 : -1;

    while (result == 0 && --place > 0) {
        PyObject *base = PyTuple_GetItem(order, place);
        PyMethodDef *method = PyType_GetSlot((PyTypeObject *)base, Py_tp_methods);

        for (; result == 0 && method && method->ml_name; method++)
            if (method->ml_flags == (METH_FASTCALL | METH_KEYWORDS))
                result = own_method(type, base, method);
    }
    Py_XDECREF(order);
    return result < 0 ? NULL : Py_NewRef(type);
}

static PyMethodDef module_functions[] = {
    {"with_own_methods", with_own_methods, METH_O, with_own_methods_doc},
    {"is_main_interpreter", is_main_interpreter, METH_NOARGS,
     "is_main_interpreter($module, /)\n--\n\nWhether the caller is not a sub-interpreter."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "ndpy._core",
                                        "The parts of ndpy that are called most often.",
                                        -1,
                                        module_functions,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};

static int (*const parts[])(PyObject *module) = {
    add_uncopied,
    add_locks,
    add_timeouts,
    add_resources,
    add_adapters,
    add_memory,
    add_references,
    add_records,
    add_calls,
    add_batches,
    add_completion_arrays,
    add_completions,
    add_work_queues,
    add_completion_queues,
    add_exports,
    add_arrays,
    add_leases,
    add_regions,
};

static PyObject *first_module;

/* Fills the module. Returns 0, or -1 with an error. */
static int fill(PyObject *module)
{
    /* Some parts import this one. If the package is not loaded, because another interpreter is the first to ask for it,
       the import calls PyInit__core() too. */
    PyObject *errors = PyImport_ImportModule("ndpy.errors");

    if (!errors)
        return -1;
    Py_DECREF(errors);
    if (first_module)
        return PyDict_Update(PyModule_GetDict(module), PyModule_GetDict(first_module));
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        if (parts[part](module) < 0)
            return -1;
    }
    first_module = Py_NewRef(module);
    return 0;
}

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);

    if (!module || !runs_in_main())
        return module;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    if (fill(module) < 0)
        Py_CLEAR(module);
    return module;
}
