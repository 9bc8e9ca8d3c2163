/* What requests refer to: regions, pieces of them, and destinations. */

#include "core.h"

PyTypeObject *destination_type;
MUTEX(destinations_mutex)

/* ---- memory ---- */

int read_piece(PyObject *object, struct piece *out)
{
    if (Py_TYPE(object) == element_type) {
        const Element *element = (Element *)object;

        *out = (struct piece){(Region *)element->region, element->address, element->length, element->token};
        return 1;
    }
    if (PyObject_TypeCheck(object, region_type)) {
        Region *region = (Region *)object;

        *out = (struct piece){region, region->address, region->length, region->local_token};
        return 1;
    }
    return 0;
}

int read_pieces(const PyObject *adapter, unsigned long long largest_token, PyObject *list, struct ndpy_element *out,
                uint32_t count, PyObject **unusable)
{
    for (uint32_t place = 0; place < count; place++) {
        PyObject *object = PyList_GetItem(list, place);
        struct piece piece = {NULL, 0, 0, 0};

        if (!read_piece(object, &piece) &&
            !PyArg_ParseTuple(object, "KKK", &piece.address, &piece.length, &piece.token))
            return RAISED;
        if (piece.region && !may_refer_to(adapter, (Usable *)piece.region)) {
            *unusable = (PyObject *)piece.region;
            return UNUSABLE;
        }
        if (piece.length > UINT32_MAX)
            return NDPY_TOO_LONG;
        if (piece.token > largest_token)
            return NDPY_BAD_TOKEN;
        out[place] = (struct ndpy_element){piece.address, piece.token, (uint32_t)piece.length};
    }
    return 0;
}

int refuse_reference(PyObject *queue, PyObject *object)
{
    const char *what = PyObject_TypeCheck(object, region_type) ? "the region" : "the destination";
    PyObject *checked;

    Py_INCREF(object);
    checked = PyObject_CallMethod(queue, "_require_same_adapter", "Os", object, what);
    Py_DECREF(object);
    Py_XDECREF(checked);
    return checked ? 0 : -1;
}

/* ---- destinations ---- */

static PyObject *destination_words(PyObject *self, void *Py_UNUSED(none))
{
    const Destination *destination = (Destination *)self;

    if (!is_usable(destination->defunct))
        return raise_defunct(self, &((Destination *)self)->defunct);
    return Py_BuildValue("KK", destination->operands[0], destination->operands[1]);
}

static int destination_set_words(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    unsigned long long operands[2];

    if (!value || !PyArg_ParseTuple(value, "KK", &operands[0], &operands[1])) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_AttributeError, "_words cannot be deleted");
        return -1;
    }
    ((Destination *)self)->operands[0] = operands[0];
    ((Destination *)self)->operands[1] = operands[1];
    return 0;
}

static int set_defunct(PyObject *self, PyObject *value, void *Py_UNUSED(none))
{
    PyObject *former;

    BEGIN_SECTION(self)
    mutex_lock(&destinations_mutex);
    former = ((Usable *)self)->defunct;
    ((Usable *)self)->defunct = Py_XNewRef(value);
    mutex_unlock(&destinations_mutex);
    END_SECTION()
    Py_XDECREF(former);
    return 0;
}

static PyGetSetDef destination_properties[] = {
    {"_defunct", get_defunct, set_defunct, NULL, NULL},
    {"_words", destination_words, destination_set_words, "The operands of a request. See struct ndpy_remote.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot destination_slots[] = {
    {Py_tp_doc, "The part of a destination that requests refer to."},
    {Py_tp_traverse, resource_traverse},
    {Py_tp_clear, resource_clear},
    {Py_tp_dealloc, resource_dealloc},
    {Py_tp_getset, destination_properties},
    {0, NULL},
};

static PyType_Spec destination_spec = {"ndpy._core.Destination", sizeof(Destination), 0,
                                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                                       destination_slots};

/* ---- the module ---- */

int add_references(PyObject *module)
{
    destination_type = add_resource_type(module, &destination_spec);
    return destination_type ? 0 : -1;
}
