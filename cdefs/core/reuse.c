/* What a call leaves for the next one. See reuse.h. */

#include <string.h>

#include "completion_queue.h"

/* ---- spare objects ---- */

PyObject *make_reusable(struct spares *spares, PyTypeObject *type)
{
    PyObject *object;

    /* This one is tracked already, and its fields are 0. */
    if (!REUSES || !spares->count)
        return PyType_GenericAlloc(type, 0);
    object = spares->objects[--spares->count];
    PyObject_GC_UnTrack(object);
    ((Reusable *)object)->was_visited = 0;
    PyObject_GC_Track(object);
    return object;
}

/* ---- slices ---- */

Py_ssize_t start_offset, stop_offset, step_offset;

struct last_slice last_slice;

void find_limits(void)
{
    const PyMemberDef *member = PyType_GetSlot(&PySlice_Type, Py_tp_members);

    for (; member && member->name; member++) {
        if (member->type != T_OBJECT)
            continue;
        if (!strcmp(member->name, "start"))
            start_offset = member->offset;
        if (!strcmp(member->name, "stop"))
            stop_offset = member->offset;
        if (!strcmp(member->name, "step"))
            step_offset = member->offset;
    }
    if (!start_offset || !stop_offset)
        step_offset = 0;
}

void remember_limits(PyObject *slice, Py_ssize_t start, Py_ssize_t stop)
{
    PyObject *former[] = {last_slice.start, last_slice.stop}, *limits[2];

    if (!REUSES || !step_offset)
        return;
    limits[0] = limit_of(slice, start_offset);
    limits[1] = limit_of(slice, stop_offset);
    if (limit_of(slice, step_offset) != Py_None || !PyLong_CheckExact(limits[0]) || !PyLong_CheckExact(limits[1]))
        return;
    last_slice.start = Py_NewRef(limits[0]);
    last_slice.stop = Py_NewRef(limits[1]);
    last_slice.offset = (unsigned long long)start;
    last_slice.end = (unsigned long long)stop;
    Py_XDECREF(former[0]);
    Py_XDECREF(former[1]);
}

/* ---- identities ---- */

enum { IDENTITIES = 256 };

static struct {
    PyObject *object;
    PyObject *number;
} identities[IDENTITIES];

PyObject *identity(PyObject *object)
{
    size_t place = ((uintptr_t)object >> 4) % IDENTITIES;
    PyObject *number, *former;

    if (!REUSES)
        return PyLong_FromVoidPtr(object);
    if (identities[place].object == object)
        return Py_NewRef(identities[place].number);
    number = PyLong_FromVoidPtr(object);
    if (!number)
        return NULL;
    former = identities[place].number;
    identities[place].object = object;
    identities[place].number = Py_NewRef(number);
    Py_XDECREF(former);
    return number;
}

/* ---- lists of completions ---- */

/* A list that nobody else has any more. */
HOT int is_ours(PyObject *list, Py_ssize_t length)
{
    return REUSES && list && Py_REFCNT(list) == 1 && Py_SIZE(list) == length;
}

PyObject *list_without(CompletionQueue *self)
{
    if (!REUSES)
        return PyList_New(0);
    if (!is_ours(self->empty, 0)) {
        PyObject *former = self->empty;

        self->empty = PyList_New(0);
        Py_XDECREF(former);
    }
    return Py_XNewRef(self->empty);
}

/* Makes the completions of a list into those of these entries. Returns 0, or -1 with an error. */
HOT int renew_list(PyObject *list, const struct ndpy_completion *entries, Py_ssize_t count, PyObject *posted)
{
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *completion = PyList_GetItem(list, place);

        if (completion && Py_TYPE(completion) == completion_type && Py_REFCNT(completion) == 1) {
            if (completion_renew((Completion *)completion, &entries[place], posted) < 0)
                return -1;
        } else {
            completion = completion_new(&entries[place], posted);
            if (!completion || PyList_SetItem(list, place, completion) < 0)
                return -1;
        }
    }
    return 0;
}

/* Makes a new list, for this poll and the next ones. Returns NULL with an error. */
APART PyObject *make_list(CompletionQueue *self, const struct ndpy_completion *entries, Py_ssize_t count,
                          PyObject *posted)
{
    PyObject *list;

    /* Freed first, because the new completions are made in their memory. */
    Py_CLEAR(self->filled[1]);
    list = PyList_New(count);
    for (Py_ssize_t place = 0; list && place < count; place++) {
        PyObject *completion = completion_new(&entries[place], posted);

        if (completion)
            PyList_SetItem(list, place, completion);
        else
            Py_CLEAR(list);
    }
    if (REUSES && list) {
        PyObject *former = self->filled[1];

        self->filled[1] = self->filled[0];
        self->filled[0] = Py_NewRef(list);
        Py_XDECREF(former);
    }
    return list;
}

PyObject *list_with(CompletionQueue *self, const struct ndpy_completion *entries, Py_ssize_t count, PyObject *posted)
{
    PyObject *list = self->filled[0];

    if (!is_ours(list, count)) {
        list = self->filled[1];
        if (!is_ours(list, count))
            return make_list(self, entries, count, posted);
        /* `found = queue.poll()` lets a list go only when the next one is there. So two of them take turns. */
        self->filled[1] = self->filled[0];
        self->filled[0] = list;
    }
    Py_INCREF(list);
    if (renew_list(list, entries, count, posted) == 0)
        return list;
    Py_DECREF(list);
    return NULL;
}
