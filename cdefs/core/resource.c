/* What closing an object touches beside the object and its lock: its adapter, and the adapter's list of dropped
 * objects. The classes of ndpy/objects/resource.py and ndpy/objects/adapter.py extend these types.
 */

#include "core.h"

PyTypeObject *orphans_type, *adapter_type;

/* ---- Orphans ---- */

static int orphans_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Orphans *)self)->dropped);
    return 0;
}

static int orphans_clear(PyObject *self)
{
    Py_CLEAR(((Orphans *)self)->dropped);
    return 0;
}

static void orphans_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    orphans_clear(self);
    free_object(self);
}

static PyMemberDef orphans_members[] = {
    {"_dropped", T_OBJECT, offsetof(Orphans, dropped), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef orphans_properties[] = {
    FLAG("_is_closing", Orphans, is_closing, NULL),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot orphans_slots[] = {
    {Py_tp_doc, "What tells whether an object was dropped without close()."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, orphans_traverse},
    {Py_tp_clear, orphans_clear},
    {Py_tp_dealloc, orphans_dealloc},
    {Py_tp_members, orphans_members},
    {Py_tp_getset, orphans_properties},
    {0, NULL},
};

static PyType_Spec orphans_spec = {"ndpy._core.Orphans", sizeof(Orphans), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, orphans_slots};

/* ---- the interpreter's end ---- */

PyDoc_STRVAR(keep_for_ever_doc, "keep_for_ever($module, object, /)\n--\n\n"
                                "Never free an object. For memory that is registered when the interpreter ends: the "
                                "adapter may use it until the process has gone.");

static PyObject *keep_for_ever(PyObject *Py_UNUSED(module), PyObject *object)
{
    Py_INCREF(object);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"keep_for_ever", keep_for_ever, METH_O, keep_for_ever_doc},
    {NULL, NULL, 0, NULL},
};

/* ---- the module ---- */

int add_resources(PyObject *module)
{
    if (PyModule_AddFunctions(module, functions) < 0)
        return -1;
    orphans_type = add_type(module, &orphans_spec);
    return orphans_type ? 0 : -1;
}
