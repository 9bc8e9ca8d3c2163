/* The columns of a batch: the memory in which it has its numbers, and which the program can change at once. */

#include <string.h>

#include "batch.h"

static const char *const column_names[COLUMNS] = {"contexts", "remote_addresses", "addresses", "lengths"};

static Py_ssize_t column_length(const Batch *batch, int which)
{
    return which == CONTEXTS || which == REMOTE_ADDRESSES ? batch->count : batch->element_count;
}

/* The first numbers of a column's view. */
static PyObject *view_part(PyObject *view, Py_ssize_t length)
{
    return PySequence_GetSlice(view, 0, length);
}

static PyObject *batch_get_column(PyObject *self, void *closure)
{
    Batch *batch = (Batch *)self;
    int which = (int)(intptr_t)closure;

    batch->is_exposed = 1;
    return view_part(batch->views[which], column_length(batch, which));
}

/* What a buffer's items are: integers of 64 bits in this machine's byte order or in the other one, or anything else. */
enum items { OTHER_ITEMS, NUMBERS, SWAPPED_NUMBERS };

/* format: as the module struct writes it. */
static enum items read_format(const char *format)
{
    static const uint16_t one = 1;
    const char *others = *(const char *)&one ? ">!" : "<";
    int is_swapped = *format && strchr(others, *format);

    if (*format && strchr("@=<>!", *format))
        format++;
    if (!*format || !strchr("qQlLnN", *format) || format[1])
        return OTHER_ITEMS;
    return is_swapped ? SWAPPED_NUMBERS : NUMBERS;
}

/* Returns -1 with an error. */
static int items_of(PyObject *view)
{
    PyObject *format = PyObject_GetAttrString(view, "format"), *size = PyObject_GetAttrString(view, "itemsize");
    PyObject *text = format ? PyUnicode_AsUTF8String(format) : NULL;
    int result = -1;

    if (text && size && PyLong_AsLong(size) == sizeof(uint64_t))
        result = (int)read_format(PyBytes_AsString(text));
    else if (!PyErr_Occurred())
        result = OTHER_ITEMS;
    Py_XDECREF(format);
    Py_XDECREF(size);
    Py_XDECREF(text);
    return result;
}

/* The bytes of a buffer of numbers in this machine's byte order. Returns NULL with an error. */
static PyObject *bytes_of(PyObject *view, int items)
{
    PyObject *bytes = PyObject_CallMethod(view, "tobytes", NULL), *swapped;
    char *byte, *end;

    if (!bytes || items == NUMBERS)
        return bytes;
    swapped = PyByteArray_FromObject(bytes);
    Py_DECREF(bytes);
    if (!swapped)
        return NULL;
    byte = PyByteArray_AsString(swapped);
    for (end = byte + PyByteArray_Size(swapped); byte < end; byte += sizeof(uint64_t)) {
        for (size_t place = 0; place < sizeof(uint64_t) / 2; place++) {
            char first = byte[place];

            byte[place] = byte[sizeof(uint64_t) - 1 - place];
            byte[sizeof(uint64_t) - 1 - place] = first;
        }
    }
    return swapped;
}

/* Copies a buffer of 64-bit integers. Returns 1 if it is one, 0 if it is not, -1 with an error, -2 if it has another
 * length. */
static int copy_buffer(PyObject *target, PyObject *value)
{
    PyObject *view = PyMemoryView_FromObject(value), *from = NULL, *to = NULL;
    int result, items;

    if (!view) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    items = items_of(view);
    result = items < 0 ? -1 : items != OTHER_ITEMS;
    if (result == 1) {
        from = bytes_of(view, items);
        to = PyObject_CallMethod(target, "cast", "s", "B");
        if (!from || !to) {
            result = -1;
        } else if (PySequence_Size(from) != PySequence_Size(to)) {
            result = -2;
        } else if (PySequence_SetSlice(to, 0, PySequence_Size(to), from) < 0) {
            result = -1;
        }
    }
    Py_XDECREF(view);
    Py_XDECREF(from);
    Py_XDECREF(to);
    return result;
}

static int wrong_length(const char *name, Py_ssize_t length)
{
    PyErr_Format(PyExc_ValueError, "%s takes %zd numbers, one for each", name, length);
    return -1;
}

static int batch_set_column(PyObject *self, PyObject *value, void *closure)
{
    Batch *batch = (Batch *)self;
    int which = (int)(intptr_t)closure, copied;
    Py_ssize_t length = column_length(batch, which);
    PyObject *target, *numbers;

    if (!value) {
        PyErr_Format(PyExc_AttributeError, "%s cannot be deleted", column_names[which]);
        return -1;
    }
    target = view_part(batch->views[which], length);
    if (!target)
        return -1;
    batch->is_exposed = 1;
    copied = copy_buffer(target, value);
    if (copied == -2)
        copied = wrong_length(column_names[which], length);
    if (copied == 0) {
        numbers = PySequence_Fast(value, "a column takes a buffer of 64-bit integers or a sequence of integers");
        copied = !numbers ? -1 : PySequence_Size(numbers) == length ? 1 : wrong_length(column_names[which], length);
        for (Py_ssize_t place = 0; copied > 0 && place < length; place++) {
            PyObject *number = PySequence_GetItem(numbers, place), *key = PyLong_FromSsize_t(place);

            if (!number || !key || PyObject_SetItem(target, key, number) < 0)
                copied = -1;
            Py_XDECREF(number);
            Py_XDECREF(key);
        }
        Py_XDECREF(numbers);
    }
    Py_DECREF(target);
    return copied < 0 ? -1 : 0;
}

/* ---- what the program has changed ---- */

/* How many bytes the columns have, and a copy of these or a comparison with one. */
static size_t column_size(const Batch *batch, int which)
{
    return (size_t)column_length(batch, which) * sizeof(uint64_t);
}

uint64_t *batch_copy_numbers(const Batch *batch)
{
    size_t size = 0, at = 0;
    char *copy;

    for (int which = 0; which < COLUMNS; which++)
        size += column_size(batch, which);
    copy = PyMem_Malloc(size + 1);
    for (int which = 0; copy && which < COLUMNS; at += column_size(batch, which++))
        memcpy(copy + at, batch->numbers[which], column_size(batch, which));
    if (!copy)
        PyErr_NoMemory();
    return (uint64_t *)copy;
}

int batch_has_same_numbers(const Batch *batch, const BatchList *list)
{
    const char *copy = (const char *)list->numbers;

    for (int which = 0; which < COLUMNS; copy += column_size(batch, which++))
        if (memcmp(copy, batch->numbers[which], column_size(batch, which)) != 0)
            return 0;
    return 1;
}

/* Checks a copy of the columns, which do not change meanwhile, and reads it into the requests. Returns 0, or -1 with an
 * error. */
int batch_read_numbers(Batch *batch, const uint64_t *copy)
{
    const uint64_t *numbers[COLUMNS];

    for (int which = 0; which < COLUMNS; copy += column_length(batch, which++))
        numbers[which] = copy;
    for (uint32_t place = 0; place < batch->count; place++) {
        struct ndpy_list_request *request = &batch->requests[place];
        struct ndpy_remote *remote = &request->remote;
        unsigned long long total = 0, offset;

        for (uint32_t at = request->first; at < request->first + request->count; at++) {
            const Region *region = (Region *)batch->element_regions[at];
            unsigned long long address = numbers[ADDRESSES][at], length = numbers[LENGTHS][at];

            offset = address - region->address;
            if (address < region->address || offset > region->length || length > region->length - offset ||
                length > UINT32_MAX) {
                PyErr_Format(
                    range_error, "request %u of the batch: %llu bytes at %p are outside the region of %llu bytes at %p",
                    place, length, (void *)(uintptr_t)address, region->length, (void *)(uintptr_t)region->address);
                return -1;
            }
            batch->elements[at].address = address;
            batch->elements[at].length = (uint32_t)length;
            total += length;
        }
        request->context = numbers[CONTEXTS][place];
        if (!batch->remotes[place])
            continue;
        remote->address = numbers[REMOTE_ADDRESSES][place];
        offset = remote->address - remote->window_address;
        if (remote->address < remote->window_address || offset > remote->window_length ||
            total > remote->window_length - offset) {
            PyErr_Format(range_error,
                         "request %u of the batch: %llu bytes at %p are outside the remote memory of %llu bytes at %p",
                         place, total, (void *)(uintptr_t)remote->address, (unsigned long long)remote->window_length,
                         (void *)(uintptr_t)remote->window_address);
            return -1;
        }
        remote->length = remote->window_length - offset;
    }
    return 0;
}

/* Reads the columns into the requests. Returns 0, or -1 with an error. */
int batch_read_columns(Batch *batch)
{
    uint64_t *copy = batch_copy_numbers(batch);
    int result = copy ? batch_read_numbers(batch, copy) : -1;

    PyMem_Free(copy);
    return result;
}

/* ---- the properties ---- */

int batch_make_column(Batch *batch, int which, size_t length)
{
    PyObject *bytes = bytes_new(length * sizeof(uint64_t));

    /* The view keeps the program from changing the size. */
    batch->views[which] = bytes ? view_as(bytes, "Q") : NULL;
    if (batch->views[which])
        batch->numbers[which] = (uint64_t *)PyByteArray_AsString(bytes);
    Py_XDECREF(bytes);
    return batch->views[which] ? 0 : -1;
}

PyGetSetDef batch_columns[] = {
    {"contexts", batch_get_column, batch_set_column, "The context of each request.", (void *)CONTEXTS},
    {"remote_addresses", batch_get_column, batch_set_column,
     "Where the remote memory of each request begins. It must stay inside the memory that the request's RemoteMemory "
     "is a\n"
     "slice of.",
     (void *)REMOTE_ADDRESSES},
    {"addresses", batch_get_column, batch_set_column,
     "Where each element begins. It must stay inside the element's region.", (void *)ADDRESSES},
    {"lengths", batch_get_column, batch_set_column, "The length of each element in bytes.", (void *)LENGTHS},
    {NULL, NULL, NULL, NULL, NULL},
};
