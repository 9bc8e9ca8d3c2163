/* The arguments of the methods that post operations, and the table of operations for Python. */

#include <string.h>

#include "calls.h"

#define CALL(name, operation, with_immediate, arguments, ...) \
    {#name, arguments, NDPY_##operation, NDPY_##with_immediate, 0, 0, 0, {0}, {NULL}},
struct call calls[CALLS] = {NDPY_CALLS(CALL)};
#undef CALL

#define ROW(operation, number, words, completed, opcode, traits, flags, types, ...) \
    [number] = {flags, traits, NDPY_##completed, types},
const struct operation operations[] = {NDPY_OPERATIONS(ROW)};
#undef ROW

PyTypeObject *usual_remote_type;
struct options known_options[KNOWN_OPTIONS];

static const char *const argument_names[ARGUMENTS] = {"sges",    "remote", "destination", "immediate",
                                                      "context", "flags",  "compare",     "swap",
                                                      "add",     "value",  "kind",        "whole_region"};
static PyObject *context_name, *flags_name, *flush_kind;

/* FlushKind.GLOBAL. */
enum { FLUSH_GLOBALLY = 1 };

/* ---- single arguments ---- */

static int read_immediate(PyObject *object, uint32_t *out)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(object);

    if (value <= UINT32_MAX) {
        *out = (uint32_t)value;
        return 0;
    }
    if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "immediate is 0 to 4294967295, not %R", object);
    } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "immediate is an integer or None, not %R", (PyObject *)Py_TYPE(object));
    }
    return -1;
}

/* Reads a Destination or an XrcDestination. queue: the queue pair, which says which of them it takes, or NULL. */
static int read_destination(PyObject *object, PyObject *queue, struct ndpy_remote *out)
{
    unsigned long long operands[2];
    PyObject *checked = queue ? PyObject_CallMethod(queue, "_check_destination", "O", object) : Py_NewRef(Py_None);
    PyObject *words = checked ? PyObject_GetAttrString(object, "_words") : NULL;
    int read = words && PyArg_ParseTuple(words, "KK", &operands[0], &operands[1]);

    Py_XDECREF(words);
    Py_XDECREF(checked);
    if (read) {
        out->operands[0] = operands[0];
        out->operands[1] = operands[1];
        return 0;
    }
    if (checked && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "a destination is a Destination, not %R", (PyObject *)Py_TYPE(object));
    }
    return -1;
}

static int read_operand(PyObject *object, const char *name, uint64_t *out)
{
    PyObject *error;

    *out = PyLong_AsUnsignedLongLong(object);
    if (*out != UINT64_MAX || !PyErr_Occurred())
        return 0;
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        *out = (uint64_t)PyLong_AsLongLong(object);
        if (*out != UINT64_MAX || !PyErr_Occurred())
            return 0;
    }
    error = PyErr_ExceptionMatches(PyExc_TypeError) ? PyExc_TypeError : PyExc_ValueError;
    PyErr_Clear();
    PyErr_Format(error, "%s is an integer of 64 bits, signed or unsigned, not %R", name, object);
    return -1;
}

static int read_flush_kind(PyObject *object, uint64_t *out)
{
    int is_one = PyObject_IsInstance(object, flush_kind);

    if (is_one > 0)
        return read_operand(object, "kind", out);
    if (!is_one)
        PyErr_Format(PyExc_TypeError, "kind is a FlushKind, not %R", object);
    return -1;
}

static int read_argument(const struct call *call, int kind, PyObject *object, PyObject *queue, struct given *out)
{
    uint64_t *operands = out->remote.operands;
    int is_true;

    switch (kind) {
    case SGES:
        out->sges = object;
        return 0;
    case REMOTE:
        out->remote_object = object;
        return read_remote(object, &out->remote);
    case DESTINATION:
        out->destination = object;
        return read_destination(object, queue, &out->remote);
    case IMMEDIATE:
        if (object == Py_None && call->operation != call->with_immediate)
            return 0;
        out->operation = call->with_immediate;
        return read_immediate(object, &out->remote.immediate);
    case CONTEXT:
        out->context = object;
        return 0;
    case FLAGS:
        out->flags = object;
        return 0;
    case KIND:
        return read_flush_kind(object, &operands[0]);
    case WHOLE_REGION:
        is_true = PyObject_IsTrue(object);
        operands[1] = is_true > 0;
        return is_true < 0 ? -1 : 0;
    default:
        return read_operand(object, argument_names[kind], &operands[kind == SWAP]);
    }
}

/* ---- all of them ---- */

int read_call(const struct call *call, PyObject *queue, PyObject *const *arguments, Py_ssize_t count,
              PyObject *keywords, struct given *out)
{
    PyObject *given[MOST_ARGUMENTS] = {NULL};

    *out = (struct given){.operation = call->operation};
    if (call->operation == NDPY_FLUSH_MEMORY)
        out->remote.operands[0] = FLUSH_GLOBALLY;
    if (sort_arguments(call->name, arguments, count, keywords, call->names, call->positional, call->count, given) < 0)
        return -1;
    for (int which = 0; which < call->required; which++) {
        if (given[which])
            continue;
        PyErr_Format(PyExc_TypeError, "%s() needs the argument '%U'", call->name, call->names[which]);
        return -1;
    }
    for (int which = 0; which < call->count; which++)
        if (given[which] && read_argument(call, call->kinds[which], given[which], queue, out) < 0)
            return -1;
    return 0;
}

/* Returns 0 if there are other names, or if the names are not the interned ones. read_call() then finds out. */
static int read_options(PyObject *names, struct options *out)
{
    Py_ssize_t count = PyTuple_Size(names);

    *out = (struct options){names, -1, -1, 0};
    for (int which = 0; which < count; which++) {
        PyObject *name = PyTuple_GetItem(names, which);
        int *where = name == context_name ? &out->context : name == flags_name ? &out->flags : NULL;

        if (!where || *where >= 0)
            return 0;
        *where = which;
    }
    if (out->context == 0)
        out->leading = (int)count;
    return 1;
}

const struct options *find_other_options(PyObject *names)
{
    int number = 1;
    struct options found;
    PyObject *former = NULL;

    while (number < KNOWN_OPTIONS && known_options[number].names != names)
        number++;
    if (number < KNOWN_OPTIONS) {
        found = known_options[number];
    } else {
        if (!read_options(names, &found))
            return NULL;
        Py_INCREF(names);
        former = known_options[--number].names;
    }
    for (; number > 0; number--)
        known_options[number] = known_options[number - 1];
    known_options[0] = found;
    Py_XDECREF(former);
    return &known_options[0];
}

/* ---- the module ---- */

/* Reads call->arguments into the other fields. Returns 0, or -1 with an error. */
static int set_up_call(struct call *call)
{
    const char *at = call->arguments;
    int is_named = 0, is_optional = 0;

    while (*at) {
        size_t length = strcspn(at, ",="), whole = strcspn(at, ",");
        int kind = 0;

        if (*at == '*') {
            is_named = 1;
        } else {
            while (kind < ARGUMENTS &&
                   (strlen(argument_names[kind]) != length || strncmp(argument_names[kind], at, length) != 0))
                kind++;
            if (kind == ARGUMENTS || call->count == MOST_ARGUMENTS) {
                PyErr_Format(PyExc_SystemError, "%s(): %s", call->name, at);
                return -1;
            }
            is_optional |= whole != length;
            call->required += !is_optional;
            call->positional += !is_named;
            call->kinds[call->count] = kind;
            call->names[call->count] = interned(argument_names[kind]);
            if (!call->names[call->count++])
                return -1;
        }
        at += whole;
        at += strspn(at, ", ");
    }
    return 0;
}

static PyObject *core_operations(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
#define ROW(operation, number, words, completed, opcode, traits, flags, types, capability, rights) \
    {#operation, number, words, NDPY_##completed, traits, flags, types, capability, rights},
    static const struct {
        const char *name;
        int number;
        const char *words;
        int completes_as, traits, flags, types;
        const char *capability, *rights;
    } rows[] = {NDPY_OPERATIONS(ROW)};
#undef ROW
    const Py_ssize_t count = sizeof rows / sizeof rows[0];
    PyObject *all = PyTuple_New(count);

    for (Py_ssize_t at = 0; all && at < count; at++) {
        PyObject *row =
            Py_BuildValue("sisiiiiss", rows[at].name, rows[at].number, rows[at].words, rows[at].completes_as,
                          rows[at].traits, rows[at].flags, rows[at].types, rows[at].capability, rows[at].rights);

        if (!row)
            Py_CLEAR(all);
        else
            PyTuple_SetItem(all, at, row);
    }
    return all;
}

static PyMethodDef functions[] = {
    {"operations", core_operations, METH_NOARGS,
     "operations($module, /)\n--\n\n"
     "The rows of the table of operations (cdefs/operations.h): name, number, words, completes_as, traits, flags, "
     "types,\n"
     "capability."},
    {NULL, NULL, 0, NULL},
};

int add_calls(PyObject *module)
{
    flush_kind = imported("ndpy.vocabulary.flags", "FlushKind");
    context_name = interned("context");
    flags_name = interned("flags");
    if (!flush_kind || !context_name || !flags_name)
        return -1;
    for (int which = 0; which < CALLS; which++)
        if (set_up_call(&calls[which]) < 0)
            return -1;
    return PyModule_AddFunctions(module, functions);
}
