/* Batches: requests that one call posts.
 *
 * A program fills a batch once, and posts it to any queue pair any number of times. Its columns are the memory in which
 * the batch has its numbers, so a program can change them all at once, also while the batch is posted. A post makes a
 * PostedList of the batch, which does not change any more. The next post to the same queue pair uses it again if the
 * batch is as it was.
 */

#include <string.h>

#include "core.h"
#include "batch.h"

PyTypeObject *posted_list_type, *list_pool_type, *batch_type;
static PyObject *range_error;

/* ---- lists for a queue pair ---- */

static void pool_dealloc(PyObject *self)
{
    Py_CLEAR(((ListPool *)self)->batches);
    free_object(self);
}

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "The lists of one queue pair."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, pool_dealloc},
    {0, NULL},
};

static PyType_Spec pool_spec = {"ndpy._core.ListPool", sizeof(ListPool), 0, Py_TPFLAGS_DEFAULT, pool_slots};

static int list_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((PostedList *)self)->records);
    return 0;
}

static int list_clear(PyObject *self)
{
    Py_CLEAR(((PostedList *)self)->records);
    return 0;
}

static void list_dealloc(PyObject *self)
{
    PostedList *list = (PostedList *)self;
    ListPool *pool = (ListPool *)list->pool;

    PyObject_GC_UnTrack(self);
    if (pool) {
        mutex_lock(&pool->mutex);
        if (pool->native && list->native)
            pool->provider->list_free(list->native);
        mutex_unlock(&pool->mutex);
    }
    Py_CLEAR(list->pool);
    PyMem_Free(list->numbers);
    list_clear(self);
    free_object(self);
}

static PyType_Slot list_slots[] = {
    {Py_tp_doc, "The requests of a batch as one queue pair posts them."},
    {Py_tp_traverse, list_traverse},
    {Py_tp_clear, list_clear},
    {Py_tp_dealloc, list_dealloc},
    {0, NULL},
};

static PyType_Spec list_spec = {"ndpy._core.PostedList", sizeof(PostedList), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                list_slots};

/* Notes a batch that is to have a list, until the batch goes. Returns 0, or -1 with an error. Called with the queue
 * pair's lock. */
static int pool_note(ListPool *pool, Batch *batch)
{
    PyObject *forget, *reference;
    int result;

    if (!pool->batches)
        pool->batches = PySet_New(NULL);
    forget = pool->batches ? PyObject_GetAttrString(pool->batches, "discard") : NULL;
    reference = forget ? PyWeakref_NewRef((PyObject *)batch, forget) : NULL;
    result = reference ? PySet_Add(pool->batches, reference) : -1;
    Py_XDECREF(reference);
    Py_XDECREF(forget);
    return result;
}

/* Called in a section of the batch. */
static void forget_pool(Batch *batch, ListPool *pool)
{
    if (batch->last && batch->last->pool == (PyObject *)pool)
        Py_CLEAR(batch->last);
    /* It has no list if the post failed, or if it was changed since. */
    if (batch->lists && PyDict_DelItem(batch->lists, (PyObject *)pool) < 0)
        PyErr_Clear();
}

void pool_close(ListPool *pool)
{
    PyObject *batches, *type, *value, *traceback;

    mutex_lock(&pool->mutex);
    pool->native = NULL;
    mutex_unlock(&pool->mutex);
    batches = pool->batches;
    pool->batches = NULL;
    if (!batches)
        return;
    PyErr_Fetch(&type, &value, &traceback);
    while (PySet_Size(batches) > 0) {
        PyObject *reference = PySet_Pop(batches), *batch = reference ? PyObject_CallObject(reference, NULL) : NULL;

        if (batch && batch != Py_None) {
            BEGIN_SECTION(batch)
            forget_pool((Batch *)batch, pool);
            END_SECTION()
        }
        Py_XDECREF(batch);
        Py_XDECREF(reference);
        PyErr_Clear();
    }
    Py_DECREF(batches);
    PyErr_Restore(type, value, traceback);
}

/* ---- columns ---- */

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

/* ---- filling ---- */

/* The requests have changed. */
static void forget_lists(Batch *batch)
{
    batch->changes++;
    Py_CLEAR(batch->last);
    if (PyDict_Size(batch->lists))
        PyDict_Clear(batch->lists);
}

/* Reads an element: a slice of a region, or a region. Returns its region, borrowed, or NULL with an error. */
static Region *read_element(PyObject *object, struct ndpy_element *out)
{
    struct piece piece;

    if (!read_piece(object, &piece)) {
        PyErr_Format(PyExc_TypeError, "an element of a batch is a region or a slice of one, not %R",
                     (PyObject *)Py_TYPE(object));
        return NULL;
    }
    if (piece.length > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "an element has at most 4294967295 bytes, not %llu", piece.length);
        return NULL;
    }
    *out = (struct ndpy_element){piece.address, piece.token, (uint32_t)piece.length};
    return piece.region;
}

/* Adds a region or a destination to those that every post looks at. */
static void note_use(Batch *batch, PyObject *used)
{
    /* Often a request refers to what the last one referred to: a region, or a region and a destination. */
    for (uint32_t back = 1; back <= 2 && back <= batch->used_count; back++)
        if (batch->used[batch->used_count - back] == used)
            return;
    batch->used[batch->used_count++] = Py_NewRef(used);
}

/* Adds a request. sges: a list. Returns 0, or -1 with an error. Called in a section of the batch. */
static int add_request(Batch *batch, struct ndpy_list_request *request, PyObject *record, PyObject *sges,
                       PyObject *remote_object, PyObject *destination)
{
    Py_ssize_t count = PyList_Size(sges);
    unsigned long long length = 0;
    uint32_t at = batch->element_count, is_writable = 1;
    struct ndpy_element first;

    if (count && !read_element(PyList_GetItem(sges, 0), &first))
        return -1;
    if (batch->count == batch->capacity) {
        PyErr_Format(PyExc_ValueError, "the batch is full: it was made for %zd requests", batch->capacity);
        return -1;
    }
    if (count > batch->max_sge) {
        PyErr_Format(PyExc_ValueError, "a request of this batch has at most %zd elements (max_sge), not %zd",
                     batch->max_sge, count);
        return -1;
    }
    if (batch->count && (batch->requests[0].operation == NDPY_RECEIVE) != (request->operation == NDPY_RECEIVE)) {
        PyErr_SetString(PyExc_ValueError,
                        "receives and other requests go to different queues, so they need two batches");
        return -1;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        Region *region = read_element(PyList_GetItem(sges, place), &batch->elements[at + place]);

        if (!region)
            return -1;
        batch->element_regions[at + place] = (PyObject *)region;
        length += batch->elements[at + place].length;
        is_writable &= (uint32_t)region->writable;
    }
    if (remote_object && request->operation != NDPY_SEND_AND_INVALIDATE && length > request->remote.length) {
        PyErr_Format(range_error, "%llu bytes do not fit the %llu bytes of remote memory; slice one of the two", length,
                     (unsigned long long)request->remote.length);
        return -1;
    }
    if ((request->operation == NDPY_RECEIVE || request->operation == NDPY_COMPARE_AND_SWAP ||
         request->operation == NDPY_FETCH_AND_ADD) &&
        !is_writable)
        request->flags |= NDPY_UNWRITABLE;
    for (Py_ssize_t place = 0; place < count; place++) {
        note_use(batch, batch->element_regions[at + place]);
        batch->numbers[ADDRESSES][at + place] = batch->elements[at + place].address;
        batch->numbers[LENGTHS][at + place] = batch->elements[at + place].length;
    }
    if (destination && PyObject_TypeCheck(destination, destination_type)) {
        note_use(batch, destination);
        batch->has_destinations = 1;
    }
    request->first = at;
    request->count = (uint32_t)count;
    batch->numbers[CONTEXTS][batch->count] = request->context;
    batch->numbers[REMOTE_ADDRESSES][batch->count] = request->remote.address;
    batch->requests[batch->count] = *request;
    batch->records[batch->count] = Py_NewRef(record);
    batch->remotes[batch->count] = Py_XNewRef(remote_object);
    batch->destinations[batch->count] = Py_XNewRef(destination);
    batch->element_count += (uint32_t)count;
    batch->count++;
    forget_lists(batch);
    return 0;
}

static int read_number(PyObject *object, const char *name, unsigned long long largest, unsigned long long *out)
{
    *out = 0;
    if (!object)
        return 0;
    *out = PyLong_AsUnsignedLongLong(object);
    if (*out == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%s is an integer, not %R", name, object);
        }
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
    } else if (*out <= largest) {
        return 0;
    }
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s is 0 to %llu, not %R", name, largest, object);
    return -1;
}

/* Adds a request. words: immediate data and operands. destination: NULL, or that of a datagram. */
static PyObject *add_to(PyObject *self, uint32_t operation, PyObject *sges, PyObject *remote, PyObject *context,
                        PyObject *flags, const struct ndpy_remote *words, PyObject *destination)
{
    struct ndpy_list_request request = {.operation = operation, .remote = *words};
    unsigned long long numbers[2];
    PyObject *list, *record;
    int added;

    if (remote && read_remote(remote, &request.remote) < 0)
        return NULL;
    if (read_number(context, "context", UINT64_MAX, &numbers[0]) < 0 ||
        read_number(flags, "flags", NDPY_UNWRITABLE - 1, &numbers[1]) < 0)
        return NULL;
    request.context = numbers[0];
    request.flags = (uint32_t)numbers[1];
    if (Py_TYPE(sges) == element_type || PyObject_TypeCheck(sges, region_type)) {
        list = PyList_New(1);
        if (list)
            PyList_SetItem(list, 0, Py_NewRef(sges));
        record = sges;
    } else {
        record = list = PySequence_List(sges);
    }
    if (!list)
        return NULL;
    BEGIN_SECTION(self)
    added = add_request((Batch *)self, &request, record, list, remote, destination);
    END_SECTION()
    Py_DECREF(list);
    if (added < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *add(PyObject *self, uint32_t operation, PyObject *sges, PyObject *remote, PyObject *context,
                     PyObject *flags, const struct ndpy_remote *words)
{
    return add_to(self, operation, sges, remote, context, flags, words, NULL);
}

static const struct ndpy_remote no_words;

/* Reads a FlushKind. Returns 0, or -1 with an error. */
static int read_flush_kind(PyObject *object, uint64_t *out)
{
    PyObject *value = PyObject_GetAttrString(object, "value");
    int result = value ? read_operand(value, "kind", out) : -1;

    Py_XDECREF(value);
    if (result < 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "kind is a FlushKind, not %R", object);
    }
    return result;
}

/* Raises if a required argument is absent. */
static int require(const char *function, PyObject *const *given, PyObject *const *names, int required)
{
    for (int which = 0; which < required; which++) {
        if (given[which])
            continue;
        PyErr_Format(PyExc_TypeError, "%s() needs the argument '%U'", function, names[which]);
        return -1;
    }
    return 0;
}

static PyObject *batch_write(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[5] = {NULL};
    int has_immediate;

    if (sort_arguments("write", arguments, count, keywords, names_with_remote, 2, 5, given) < 0 ||
        require("write", given, names_with_remote, 2) < 0)
        return NULL;
    has_immediate = given[4] && given[4] != Py_None;
    if (has_immediate && read_immediate(given[4], &words.immediate) < 0)
        return NULL;
    return add(self, has_immediate ? NDPY_WRITE_WITH_IMMEDIATE : NDPY_WRITE, given[0], given[1], given[2], given[3],
               &words);
}

static PyObject *batch_read(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[4] = {NULL};

    if (sort_arguments("read", arguments, count, keywords, names_with_remote, 2, 4, given) < 0 ||
        require("read", given, names_with_remote, 2) < 0)
        return NULL;
    return add(self, NDPY_READ, given[0], given[1], given[2], given[3], &no_words);
}

static PyObject *batch_send_and_invalidate(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                                           PyObject *keywords)
{
    PyObject *given[4] = {NULL};

    if (sort_arguments("send_and_invalidate", arguments, count, keywords, names_with_remote, 2, 4, given) < 0 ||
        require("send_and_invalidate", given, names_with_remote, 2) < 0)
        return NULL;
    return add(self, NDPY_SEND_AND_INVALIDATE, given[0], given[1], given[2], given[3], &no_words);
}

static PyObject *batch_compare_and_swap(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                                        PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[6] = {NULL};

    if (sort_arguments("compare_and_swap", arguments, count, keywords, names_of_swap, 4, 6, given) < 0 ||
        require("compare_and_swap", given, names_of_swap, 4) < 0 ||
        read_operand(given[2], "compare", &words.operands[0]) < 0 ||
        read_operand(given[3], "swap", &words.operands[1]) < 0)
        return NULL;
    return add(self, NDPY_COMPARE_AND_SWAP, given[0], given[1], given[4], given[5], &words);
}

static PyObject *batch_fetch_and_add(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[5] = {NULL};

    if (sort_arguments("fetch_and_add", arguments, count, keywords, names_of_add, 3, 5, given) < 0 ||
        require("fetch_and_add", given, names_of_add, 3) < 0 || read_operand(given[2], "add", &words.operands[0]) < 0)
        return NULL;
    return add(self, NDPY_FETCH_AND_ADD, given[0], given[1], given[3], given[4], &words);
}

/* Adds a request without elements. */
static PyObject *add_without_elements(PyObject *self, uint32_t operation, PyObject *remote, PyObject *context,
                                      PyObject *flags, const struct ndpy_remote *words)
{
    PyObject *nothing = PyTuple_New(0),
             *result = nothing ? add(self, operation, nothing, remote, context, flags, words) : NULL;

    Py_XDECREF(nothing);
    return result;
}

static PyObject *batch_atomic_write(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[4] = {NULL};

    if (sort_arguments("atomic_write", arguments, count, keywords, names_of_atomic_write, 2, 4, given) < 0 ||
        require("atomic_write", given, names_of_atomic_write, 2) < 0 ||
        read_operand(given[1], "value", &words.operands[0]) < 0)
        return NULL;
    return add_without_elements(self, NDPY_ATOMIC_WRITE, given[0], given[2], given[3], &words);
}

static PyObject *batch_flush_memory(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {.operands = {1}};
    PyObject *given[5] = {NULL};
    int whole;

    if (sort_arguments("flush_memory", arguments, count, keywords, names_of_flush_memory, 2, 5, given) < 0 ||
        require("flush_memory", given, names_of_flush_memory, 1) < 0)
        return NULL;
    whole = given[2] ? PyObject_IsTrue(given[2]) : 0;
    if (whole < 0 || (given[1] && read_flush_kind(given[1], &words.operands[0]) < 0))
        return NULL;
    words.operands[1] = (uint64_t)whole;
    return add_without_elements(self, NDPY_FLUSH_MEMORY, given[0], given[3], given[4], &words);
}

static PyObject *batch_send(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[4] = {NULL};
    int has_immediate;

    if (sort_arguments("send", arguments, count, keywords, names_without_remote, 1, 4, given) < 0 ||
        require("send", given, names_without_remote, 1) < 0)
        return NULL;
    has_immediate = given[3] && given[3] != Py_None;
    if (has_immediate && read_immediate(given[3], &words.immediate) < 0)
        return NULL;
    return add(self, has_immediate ? NDPY_SEND_WITH_IMMEDIATE : NDPY_SEND, given[0], NULL, given[1], given[2], &words);
}

static PyObject *batch_send_to(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[5] = {NULL};
    int has_immediate;

    if (sort_arguments("send_to", arguments, count, keywords, names_to_destination, 2, 5, given) < 0 ||
        require("send_to", given, names_to_destination, 2) < 0 || read_destination(given[1], &words) < 0)
        return NULL;
    has_immediate = given[4] && given[4] != Py_None;
    if (has_immediate && read_immediate(given[4], &words.immediate) < 0)
        return NULL;
    return add_to(self, has_immediate ? NDPY_SEND_TO_WITH_IMMEDIATE : NDPY_SEND_TO, given[0], NULL, given[2], given[3],
                  &words, given[1]);
}

static PyObject *batch_write_to(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[6] = {NULL};

    if (sort_arguments("write_to", arguments, count, keywords, names_of_write_to, 4, 6, given) < 0 ||
        require("write_to", given, names_of_write_to, 4) < 0 || read_destination(given[2], &words) < 0 ||
        read_immediate(given[3], &words.immediate) < 0)
        return NULL;
    return add_to(self, NDPY_WRITE_TO_WITH_IMMEDIATE, given[0], given[1], given[4], given[5], &words, given[2]);
}

static PyObject *batch_receive(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[2] = {NULL};

    if (sort_arguments("receive", arguments, count, keywords, names_without_remote, 1, 2, given) < 0 ||
        require("receive", given, names_without_remote, 1) < 0)
        return NULL;
    return add(self, NDPY_RECEIVE, given[0], NULL, given[1], NULL, &no_words);
}

static void drop_requests(Batch *batch)
{
    uint32_t count = batch->count, used = batch->used_count;

    batch->count = batch->element_count = batch->used_count = 0;
    batch->has_destinations = 0;
    forget_lists(batch);
    while (used--)
        Py_CLEAR(batch->used[used]);
    while (count--) {
        Py_CLEAR(batch->records[count]);
        Py_CLEAR(batch->remotes[count]);
        Py_CLEAR(batch->destinations[count]);
    }
}

static PyObject *batch_clear_requests(PyObject *self, PyObject *Py_UNUSED(none))
{
    BEGIN_SECTION(self)
    drop_requests((Batch *)self);
    END_SECTION()
    Py_RETURN_NONE;
}

/* ---- posting ---- */

/* How many bytes the columns have, and a copy of these or a comparison with one. */
static size_t column_size(const Batch *batch, int which)
{
    return (size_t)column_length(batch, which) * sizeof(uint64_t);
}

static uint64_t *copy_numbers(const Batch *batch)
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

static int has_same_numbers(const Batch *batch, const PostedList *list)
{
    const char *copy = (const char *)list->numbers;

    for (int which = 0; which < COLUMNS; copy += column_size(batch, which++))
        if (memcmp(copy, batch->numbers[which], column_size(batch, which)) != 0)
            return 0;
    return 1;
}

/* Checks a copy of the columns, which do not change meanwhile, and reads it into the requests. Returns 0, or -1 with an
 * error. */
static int read_numbers(Batch *batch, const uint64_t *copy)
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
static int read_columns(Batch *batch)
{
    uint64_t *copy = copy_numbers(batch);
    int result = copy ? read_numbers(batch, copy) : -1;

    PyMem_Free(copy);
    return result;
}

/* Which flags a request gets. */
static uint32_t flags_of(const Batch *batch, uint32_t place)
{
    const struct ndpy_list_request *request = &batch->requests[place];

    if (batch->signals_all || request->operation == NDPY_RECEIVE || place == batch->count - 1)
        return request->flags;
    return request->flags | NDPY_SILENT_SUCCESS;
}

/* What each posted request uses. NULL with an error. */
static PyObject *keep_alive(Batch *batch)
{
    PyObject *records = PyTuple_New((Py_ssize_t)batch->count);

    for (uint32_t place = 0; records && place < (uint32_t)PyTuple_Size(records); place++) {
        /* The collector may run code that changes the batch. make_list() finds out. */
        int is_there = place < batch->count;
        PyObject *record = is_there ? Py_NewRef(batch->records[place]) : NULL;
        PyObject *destination = is_there ? Py_XNewRef(batch->destinations[place]) : NULL;
        PyObject *kept = destination ? PyTuple_Pack(2, record, destination) : Py_NewRef(record ? record : Py_None);

        Py_XDECREF(record);
        Py_XDECREF(destination);
        if (kept)
            PyTuple_SetItem(records, (Py_ssize_t)place, kept);
        else
            Py_CLEAR(records);
    }
    return records;
}

/* Copies the requests as they are posted. Returns their numbers, or NULL with an error. changes: those of the batch
   when the caller began. */
static uint64_t *read_requests(Batch *batch, uint32_t changes, struct ndpy_list_request *requests)
{
    uint64_t *numbers;

    if (!batch->count || batch->changes != changes) {
        /* By another thread before the lock was taken, or by Python code that the collector has run. */
        PyErr_SetString(PyExc_RuntimeError, "the batch was changed while it was posted");
        return NULL;
    }
    numbers = copy_numbers(batch);
    if (numbers && batch->is_exposed && read_numbers(batch, numbers) < 0) {
        PyMem_Free(numbers);
        return NULL;
    }
    for (uint32_t place = 0; numbers && place < batch->count; place++) {
        requests[place] = batch->requests[place];
        requests[place].flags = flags_of(batch, place);
    }
    return numbers;
}

/* Finds a request with a token that is too large. Returns its number, or batch->count. */
static uint32_t find_bad_token(const Batch *batch, unsigned long long largest)
{
    uint32_t place = 0, at = 0;

    for (; place < batch->count; place++)
        for (; at < batch->requests[place].first + batch->requests[place].count; at++)
            if (batch->elements[at].token > largest)
                return place;
    return place;
}

/* Makes a list. On a refusal *refused has it, with the number of the request in *bad. */
static PostedList *make_list(Batch *batch, ListPool *pool, int *refused, uint32_t *bad)
{
    uint32_t count = batch->count, changes = batch->changes;
    struct ndpy_list_request *requests = PyMem_Malloc(count * sizeof *requests);
    PyObject *records = keep_alive(batch);
    PostedList *list = requests && records ? PyObject_GC_New(PostedList, posted_list_type) : NULL;

    if (!list) {
        PyMem_Free(requests);
        Py_XDECREF(records);
        return (PostedList *)PyErr_NoMemory();
    }
    list->pool = Py_NewRef((PyObject *)pool);
    list->records = records;
    list->native = NULL;
    list->count = count;
    list->numbers = read_requests(batch, changes, requests);
    if (list->numbers) {
        list->operation = requests[0].operation;
        *bad = find_bad_token(batch, pool->provider->largest_token);
        if (*bad < count)
            *refused = NDPY_BAD_TOKEN;
    }
    if (list->numbers && !*refused) {
        mutex_lock(&pool->mutex);
        *refused = pool->provider->list_new(pool->native, requests, count, batch->elements, &list->native, bad);
        mutex_unlock(&pool->mutex);
    }
    PyObject_GC_Track((PyObject *)list);
    PyMem_Free(requests);
    if (list->native)
        return list;
    Py_DECREF(list);
    return NULL;
}

PostedList *batch_list(Batch *batch, ListPool *pool, int *refused, uint32_t *bad)
{
    PostedList *list = batch->last;

    *refused = 0;
    if (!list || list->pool != (PyObject *)pool)
        list = (PostedList *)PyDict_GetItemWithError(batch->lists, (PyObject *)pool);
    if (!list && (PyErr_Occurred() || pool_note(pool, batch) < 0))
        return NULL;
    if (!list || (batch->is_exposed && !has_same_numbers(batch, list))) {
        list = make_list(batch, pool, refused, bad);
        if (!list)
            return NULL;
        if (PyDict_SetItem(batch->lists, (PyObject *)pool, (PyObject *)list) < 0) {
            Py_DECREF(list);
            return NULL;
        }
        Py_DECREF(list);
    }
    if (batch->last != list) {
        PyObject *former = (PyObject *)batch->last;

        batch->last = (PostedList *)Py_NewRef((PyObject *)list);
        Py_XDECREF(former);
    }
    return list;
}

/* The element at a place: the one that the program gave, unless a column has changed it. */
static PyObject *present_element(const Batch *batch, PyObject *given, uint32_t at)
{
    const struct ndpy_element *element = &batch->elements[at];

    if (Py_TYPE(given) == element_type) {
        const Element *former = (Element *)given;

        if (former->address == element->address && former->length == element->length)
            return Py_NewRef(given);
    }
    return PyObject_CallFunction((PyObject *)element_type, "OKKK", batch->element_regions[at],
                                 (unsigned long long)element->address, (unsigned long long)element->length,
                                 (unsigned long long)element->token);
}

static PyObject *present_elements(const Batch *batch, uint32_t place)
{
    const struct ndpy_list_request *request = &batch->requests[place];
    PyObject *record = batch->records[place], *list;

    if (!PyList_CheckExact(record))
        return present_element(batch, record, request->first);
    list = PyList_New(request->count);
    for (uint32_t at = 0; list && at < request->count; at++) {
        PyObject *element = present_element(batch, PyList_GetItem(record, at), request->first + at);

        if (!element)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, at, element);
    }
    return list;
}

/* The remote memory at a place: the one that the program gave, unless a column has changed its address. */
static PyObject *present_remote(const Batch *batch, uint32_t place)
{
    const struct ndpy_remote *remote = &batch->requests[place].remote;
    PyObject *given = batch->remotes[place], *limits[2], *slice = NULL, *piece = NULL;
    const Remote *whole = (Remote *)given;
    unsigned long long offset = remote->address - remote->window_address;

    if (!given || whole->address == remote->address)
        return Py_NewRef(given ? given : Py_None);
    if (whole->sliced_from)
        whole = whole->sliced_from;
    limits[0] = PyLong_FromUnsignedLongLong(offset);
    limits[1] = PyLong_FromUnsignedLongLong(offset + remote->length);
    if (limits[0] && limits[1])
        slice = PySlice_New(limits[0], limits[1], NULL);
    if (slice)
        piece = PyObject_GetItem((PyObject *)whole, slice);
    Py_XDECREF(limits[0]);
    Py_XDECREF(limits[1]);
    Py_XDECREF(slice);
    return piece;
}

/* The requests from number `place` on. Called in a section of the batch. */
static PyObject *list_calls(Batch *batch, size_t place)
{
    PyObject *calls;

    if (batch->is_exposed && read_columns(batch) < 0)
        return NULL;
    calls = PyList_New(0);
    for (; calls && place < batch->count; place++) {
        const struct ndpy_list_request *request = &batch->requests[place];
        PyObject *record = Py_NewRef(batch->records[place]), *sges = present_elements(batch, (uint32_t)place);
        PyObject *remote = sges ? present_remote(batch, (uint32_t)place) : NULL;
        PyObject *call =
            !remote
                ? NULL
                : Py_BuildValue("IOOKI(IKK)O", request->operation, sges, remote, (unsigned long long)request->context,
                                flags_of(batch, (uint32_t)place) & ~(uint32_t)NDPY_UNWRITABLE,
                                request->remote.immediate, (unsigned long long)request->remote.operands[0],
                                (unsigned long long)request->remote.operands[1],
                                batch->destinations[place] ? batch->destinations[place] : Py_None);

        Py_DECREF(record);
        Py_XDECREF(sges);
        Py_XDECREF(remote);
        if (!call || PyList_Append(calls, call) < 0)
            Py_CLEAR(calls);
        Py_XDECREF(call);
    }
    return calls;
}

static PyObject *batch_calls(PyObject *self, PyObject *first)
{
    size_t place = PyLong_AsSize_t(first);
    PyObject *calls;

    if (PyErr_Occurred())
        return NULL;
    BEGIN_SECTION(self)
    calls = list_calls((Batch *)self, place);
    END_SECTION()
    return calls;
}

/* ---- the type ---- */

static int make_column(Batch *batch, int which, size_t length)
{
    PyObject *bytes =
        PyObject_CallFunction((PyObject *)&PyByteArray_Type, "n", (Py_ssize_t)(length * sizeof(uint64_t)));
    PyObject *view = bytes ? PyMemoryView_FromObject(bytes) : NULL;

    /* The view keeps the program from changing the size. */
    batch->views[which] = view ? PyObject_CallMethod(view, "cast", "s", "Q") : NULL;
    if (batch->views[which])
        batch->numbers[which] = (uint64_t *)PyByteArray_AsString(bytes);
    Py_XDECREF(bytes);
    Py_XDECREF(view);
    return batch->views[which] ? 0 : -1;
}

static PyObject *batch_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"capacity", "max_sge", "signal_all", NULL};
    Py_ssize_t capacity, max_sge = 1;
    int signals_all = 0;
    size_t elements;
    Batch *batch;

    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "n|$np:Batch", names, &capacity, &max_sge, &signals_all))
        return NULL;
    if (capacity < 1 || capacity > LARGEST_CAPACITY || max_sge < 0 || max_sge > LARGEST_CAPACITY ||
        capacity * (max_sge + 1) > LARGEST_CAPACITY) {
        PyErr_Format(PyExc_ValueError, "a batch holds 1 to %d requests and elements, not %zd requests of %zd elements",
                     LARGEST_CAPACITY, capacity, max_sge);
        return NULL;
    }
    batch = (Batch *)PyType_GenericAlloc(type, 0);
    if (!batch)
        return NULL;
    elements = (size_t)(capacity * max_sge);
    batch->max_sge = max_sge;
    batch->signals_all = (char)signals_all;
    batch->requests = PyMem_Calloc((size_t)capacity, sizeof *batch->requests);
    batch->records = PyMem_Calloc((size_t)capacity, sizeof *batch->records);
    batch->remotes = PyMem_Calloc((size_t)capacity, sizeof *batch->remotes);
    batch->destinations = PyMem_Calloc((size_t)capacity, sizeof *batch->destinations);
    batch->elements = PyMem_Calloc(elements, sizeof *batch->elements);
    batch->element_regions = PyMem_Calloc(elements, sizeof *batch->element_regions);
    batch->used = PyMem_Calloc(elements + (size_t)capacity, sizeof *batch->used);
    batch->lists = PyDict_New();
    if (!batch->requests || !batch->records || !batch->remotes || !batch->destinations || !batch->elements ||
        !batch->element_regions || !batch->used || !batch->lists) {
        Py_DECREF(batch);
        return PyErr_NoMemory();
    }
    for (int which = 0; which < COLUMNS; which++) {
        if (make_column(batch, which, which == ADDRESSES || which == LENGTHS ? elements : (size_t)capacity) < 0) {
            Py_DECREF(batch);
            return NULL;
        }
    }
    batch->capacity = capacity;
    return (PyObject *)batch;
}

static int batch_traverse(PyObject *self, visitproc visit, void *arg)
{
    Batch *batch = (Batch *)self;

    Py_VISIT(Py_TYPE(self));
    for (uint32_t place = 0; place < batch->count; place++) {
        Py_VISIT(batch->records[place]);
        Py_VISIT(batch->remotes[place]);
        Py_VISIT(batch->destinations[place]);
    }
    for (uint32_t place = 0; place < batch->used_count; place++)
        Py_VISIT(batch->used[place]);
    Py_VISIT(batch->lists);
    Py_VISIT((PyObject *)batch->last);
    return 0;
}

static int batch_clear(PyObject *self)
{
    Batch *batch = (Batch *)self;

    if (batch->lists)
        drop_requests(batch);
    Py_CLEAR(batch->lists);
    return 0;
}

static void batch_dealloc(PyObject *self)
{
    Batch *batch = (Batch *)self;

    PyObject_GC_UnTrack(self);
    if (batch->references)
        PyObject_ClearWeakRefs(self);
    batch_clear(self);
    for (int which = 0; which < COLUMNS; which++)
        Py_CLEAR(batch->views[which]);
    PyMem_Free(batch->requests);
    PyMem_Free(batch->records);
    PyMem_Free(batch->remotes);
    PyMem_Free(batch->destinations);
    PyMem_Free(batch->elements);
    PyMem_Free(batch->element_regions);
    PyMem_Free(batch->used);
    free_object(self);
}

static Py_ssize_t batch_length(PyObject *self)
{
    Py_ssize_t count;

    BEGIN_SECTION(self)
    count = ((Batch *)self)->count;
    END_SECTION()
    return count;
}

static PyObject *batch_repr(PyObject *self)
{
    return PyUnicode_FromFormat("<Batch of %zd requests>", batch_length(self));
}

static PyMemberDef batch_members[] = {
    {"capacity", T_PYSSIZET, offsetof(Batch, capacity), READONLY, "How many requests it was made for."},
    {"max_sge", T_PYSSIZET, offsetof(Batch, max_sge), READONLY, "How many elements a request may have."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Batch, references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef batch_columns[] = {
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

PyDoc_STRVAR(
    batch_doc,
    "Batch(capacity, *, max_sge=1, signal_all=False)\n--\n\n"
    "Requests that QueuePair.post() posts together.\n\n"
    "A batch is filled once, and posted to any queue pair any number of times, also while it is posted. It has "
    "requests of\n"
    "one direction: either receives, or any mixture of the others. A post copies what the adapter needs, and\n"
    "keeps the regions alive until the requests end.\n\n"
    "The numbers of all requests can be changed at once. Each of the columns contexts, remote_addresses, addresses "
    "and\n"
    "lengths is a memoryview of 64-bit integers, in which NumPy arrays work too: numpy.asarray(batch.contexts). The "
    "columns\n"
    "addresses and lengths have an item for each element, the others one for each request. Assigning to a column "
    "copies a\n"
    "buffer of 64-bit integers in any byte order, or a sequence of integers. A post checks what has changed.\n\n"
    "Parameters:\n"
    "    capacity: how many requests it can hold.\n"
    "    max_sge: how many elements a request may have.\n"
    "    signal_all: False: all requests but the last one are SILENT_SUCCESS, so the program gets one completion, and "
    "those\n"
    "        of the requests that fail. True: each request has the flags that it was given. Receives always complete.\n"
    "Attributes:\n"
    "    capacity, max_sge: as given.\n");

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef batch_methods[] = {
    {"send", FAST(batch_send),
     "send($self, sges, *, context=0, flags=0, immediate=None)\n--\n\nAdd a send. See QueuePair.send()."},
    {"receive", FAST(batch_receive),
     "receive($self, sges, *, context=0)\n--\n\nAdd a receive. See QueuePair.receive()."},
    {"read", FAST(batch_read),
     "read($self, sges, remote, *, context=0, flags=0)\n--\n\nAdd an RDMA read. See QueuePair.read()."},
    {"write", FAST(batch_write),
     "write($self, sges, remote, *, context=0, flags=0, immediate=None)\n--\n\n"
     "Add an RDMA write. See QueuePair.write()."},
    {"send_to", FAST(batch_send_to),
     "send_to($self, sges, destination, *, context=0, flags=0, immediate=None)\n--\n\n"
     "Add a send to a destination. See DatagramQueuePair.send() and XrcSender.send_to()."},
    {"write_to", FAST(batch_write_to),
     "write_to($self, sges, remote, destination, immediate, *, context=0, flags=0)\n--\n\n"
     "Add a write with immediate data for a destination. See XrcSender.write_to()."},
    {"send_and_invalidate", FAST(batch_send_and_invalidate),
     "send_and_invalidate($self, sges, remote, *, context=0, flags=0)\n--\n\n"
     "Add a send that invalidates a window. See QueuePair.send_and_invalidate()."},
    {"compare_and_swap", FAST(batch_compare_and_swap),
     "compare_and_swap($self, sges, remote, compare, swap, *, context=0, flags=0)\n--\n\n"
     "Add an atomic operation. See QueuePair.compare_and_swap()."},
    {"atomic_write", FAST(batch_atomic_write),
     "atomic_write($self, remote, value, *, context=0, flags=0)\n--\n\n"
     "Add an atomic write. See QueuePair.atomic_write()."},
    {"flush_memory", FAST(batch_flush_memory),
     "flush_memory($self, remote, kind=ndpy.FlushKind.GLOBAL, *, whole_region=False, context=0, flags=0)\n--\n\n"
     "Add a request that flushes memory of the peer. See QueuePair.flush_memory()."},
    {"fetch_and_add", FAST(batch_fetch_and_add),
     "fetch_and_add($self, sges, remote, add, *, context=0, flags=0)\n--\n\n"
     "Add an atomic operation. See QueuePair.fetch_and_add()."},
    {"clear", batch_clear_requests, METH_NOARGS, "clear($self)\n--\n\nForget all requests."},
    {"_calls", batch_calls, METH_O,
     "_calls($self, first, /)\n--\n\n"
     "The requests from number `first` on, as (operation, sges, remote or None, context, flags, words, destination or\n"
     "None). words: the immediate data and both operands."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_doc, (void *)batch_doc},
    {Py_tp_new, batch_new},
    {Py_tp_repr, batch_repr},
    {Py_sq_length, batch_length},
    {Py_tp_traverse, batch_traverse},
    {Py_tp_clear, batch_clear},
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_members, batch_members},
    {Py_tp_getset, batch_columns},
    {Py_tp_methods, batch_methods},
    {0, NULL},
};

static PyType_Spec batch_spec = {"ndpy._core.Batch", sizeof(Batch), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                                 batch_slots};

int add_batches(PyObject *module)
{
    PyObject *errors = PyImport_ImportModule("ndpy.errors");

    if (!errors)
        return -1;
    range_error = PyObject_GetAttrString(errors, "ElementRangeError");
    Py_DECREF(errors);
    list_pool_type = add_type(module, &pool_spec);
    posted_list_type = add_type(module, &list_spec);
    batch_type = add_type(module, &batch_spec);
    return range_error && list_pool_type && posted_list_type && batch_type ? 0 : -1;
}
