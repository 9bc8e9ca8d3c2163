/* How long a call waits: every one reads it here. */

#include <math.h>

#include "core.h"

/* More than this is for ever: some thirty years, which the clocks and waits of all systems can still count. */
#define LONGEST_S 1e9

/* A number that no double can hold. Returns 0, or -1 with an error. */
static int read_huge(PyObject *value, double *seconds)
{
    PyObject *zero = PyLong_FromLong(0);
    int is_positive = zero ? PyObject_RichCompareBool(value, zero, Py_GT) : -1;

    Py_XDECREF(zero);
    if (is_positive < 0)
        return -1;
    *seconds = is_positive ? INFINITY : 0;
    return 0;
}

int read_seconds(PyObject *value, const char *name, double *seconds)
{
    double read = PyBool_Check(value) ? -1 : PyFloat_AsDouble(value);

    if (PyBool_Check(value) || (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError))) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s is a number of seconds, not %R", name, value);
        return -1;
    }
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
        return read_huge(value, seconds);
    }
    if (isnan(read)) {
        PyErr_Format(PyExc_ValueError, "%s is a number of seconds, not nan", name);
        return -1;
    }
    *seconds = read > LONGEST_S ? INFINITY : read > 0 ? read : 0;
    return 0;
}

PyDoc_STRVAR(seconds_doc,
             "seconds($module, value, name, /)\n--\n\n"
             "Read how long something lasts.\n\n"
             "Parameters:\n"
             "    value: any real number. A negative one is 0. One that is greater than 10**9 is infinite.\n"
             "    name: of the parameter, for the error.\n"
             "Raises:\n"
             "    TypeError: it is not a number, or it is a bool.\n"
             "    ValueError: it is nan.");

static PyObject *seconds_of(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *value;
    const char *name;
    double seconds;

    if (!PyArg_ParseTuple(arguments, "Os:seconds", &value, &name) || read_seconds(value, name, &seconds) < 0)
        return NULL;
    return PyFloat_FromDouble(seconds);
}

PyDoc_STRVAR(timeout_doc, "timeout($module, value, name='timeout_s', /)\n--\n\n"
                          "Read how long a call may wait, as seconds() does. None stands for ever, and so does an "
                          "infinite time: then this returns None.");

static PyObject *timeout_of(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *value;
    const char *name = "timeout_s";
    double seconds = INFINITY;

    if (!PyArg_ParseTuple(arguments, "O|s:timeout", &value, &name))
        return NULL;
    if (value != Py_None && read_seconds(value, name, &seconds) < 0)
        return NULL;
    if (isinf(seconds))
        Py_RETURN_NONE;
    return PyFloat_FromDouble(seconds);
}

static PyMethodDef functions[] = {
    {"seconds", seconds_of, METH_VARARGS, seconds_doc},
    {"timeout", timeout_of, METH_VARARGS, timeout_doc},
    {NULL, NULL, 0, NULL},
};

int add_timeouts(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
