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

PyObject *make_reusable(struct spares *spares, PyTypeObject *type)
{
    PyObject *object;

    /* This one is tracked already, and its fields are 0. */
    if (!HAS_GIL || !spares->count) return PyType_GenericAlloc(type, 0);
    object = spares->objects[--spares->count];
    PyObject_GC_UnTrack(object);
    ((Reusable *)object)->was_visited = 0;
    PyObject_GC_Track(object);
    return object;
}

PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);

    if (type && PyModule_AddType(module, (PyTypeObject *)type) < 0) Py_CLEAR(type);
    return (PyTypeObject *)type;
}

PyObject *interned(const char *name)
{
    return PyUnicode_InternFromString(name);
}

static int find_name(PyObject *name, PyObject *const *names, int count)
{
    int which;

    /* The names in a call are interned too, normally. */
    for (which = 0; which < count; which++) {
        if (name == names[which]) return which;
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
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments by position, not %zd%s", function, positional, given,
            count > positional ? "; give the others by name" : "");
        return -1;
    }
    for (number = 0; number < given; number++) out[number] = arguments[number];
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
    if (!error) return;
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

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ndpy._core",
    "The parts of ndpy that are called most often.", -1, NULL, NULL, NULL, NULL, NULL};

static int (*const parts[])(PyObject *module) = {
    add_locks,
    add_timeouts,
    add_memory,
    add_references,
    add_records,
    add_batches,
    add_completion_arrays,
    add_completions,
    add_work_queues,
    add_completion_queues,
    add_exports,
    add_leases,
    add_resources,
    add_regions,
};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);

#ifdef Py_GIL_DISABLED
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    for (size_t part = 0; module && part < sizeof parts / sizeof *parts; part++) {
        if (parts[part](module) < 0) Py_CLEAR(module);
    }
    return module;
}
