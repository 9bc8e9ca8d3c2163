/* The extension module ndpy._core: what its files share. It uses the limited API only, so one build serves every
   CPython from 3.10 on. */

#ifndef NDPY_CORE_H
#define NDPY_CORE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

/* Frees the object itself, and gives back the reference to its type. */
void free_object(PyObject *self);

/* Creates a type and adds it to the module. Returns NULL with an error. */
PyTypeObject *add_type(PyObject *module, PyType_Spec *spec);

/* Each adds the types and functions of its file. Return 0, or -1 with an error. */
int add_memory(PyObject *module);
int add_leases(PyObject *module);

#endif
