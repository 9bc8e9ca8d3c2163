/* Batches: requests that one call posts.
 *
 * A program fills a batch once, and posts it to any queue pair any number of times. Its columns are the memory in which
 * the batch has its numbers, so a program can change them all at once, also while the batch is posted.
 */

#include "batch.h"
#include "calls.h"

PyTypeObject *batch_type;

/* ---- filling ---- */

/* The requests have changed. */
static void batch_forget_lists(Batch *batch)
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

/* Appends a request, whose elements stand behind those of the others already. */
static void append_request(Batch *batch, struct ndpy_list_request *request, uint32_t count, PyObject *record,
                           PyObject *remote_object, PyObject *destination)
{
    uint32_t first = batch->element_count;

    for (uint32_t at = first; at < first + count; at++) {
        note_use(batch, batch->element_regions[at]);
        batch->numbers[ADDRESSES][at] = batch->elements[at].address;
        batch->numbers[LENGTHS][at] = batch->elements[at].length;
    }
    if (destination && PyObject_TypeCheck(destination, destination_type)) {
        note_use(batch, destination);
        batch->has_destinations = 1;
    }
    request->first = first;
    request->count = count;
    batch->numbers[CONTEXTS][batch->count] = request->context;
    batch->numbers[REMOTE_ADDRESSES][batch->count] = request->remote.address;
    batch->requests[batch->count] = *request;
    batch->records[batch->count] = Py_NewRef(record);
    batch->remotes[batch->count] = Py_XNewRef(remote_object);
    batch->destinations[batch->count] = Py_XNewRef(destination);
    batch->element_count += count;
    batch->count++;
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
        if (request->flags & NDPY_INLINE && region->elsewhere) {
            PyErr_SetString(PyExc_ValueError,
                            "the provider copies what is sent inline, and the memory of this region is "
                            "not at the addresses of its elements; send it without Flags.INLINE");
            return -1;
        }
    }
    if (exceeds_remote(request->operation, length, &request->remote)) {
        PyErr_Format(range_error, "%llu bytes do not fit the %llu bytes of remote memory; slice one of the two", length,
                     (unsigned long long)request->remote.length);
        return -1;
    }
    request->flags |= flags_of_memory(request->operation, (int)is_writable);
    append_request(batch, request, (uint32_t)count, record, remote_object, destination);
    batch_forget_lists(batch);
    return 0;
}

static int batch_read_number(PyObject *object, const char *name, unsigned long long largest, unsigned long long *out)
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

static PyObject *batch_add(PyObject *self, const struct call *call, PyObject *const *arguments, Py_ssize_t count,
                           PyObject *keywords)
{
    struct ndpy_list_request request = {0};
    unsigned long long context, flags;
    PyObject *list, *record;
    struct given given;
    int added;

    if (read_call(call, NULL, arguments, count, keywords, &given) < 0 ||
        batch_read_number(given.context, "context", UINT64_MAX, &context) < 0 ||
        batch_read_number(given.flags, "flags", NDPY_UNWRITABLE - 1, &flags) < 0)
        return NULL;
    request.operation = given.operation;
    request.remote = given.remote;
    request.context = context;
    request.flags = (uint32_t)flags;
    record = given.sges;
    if (!record) {
        record = list = PyList_New(0);
    } else if (Py_TYPE(record) == element_type || PyObject_TypeCheck(record, region_type)) {
        list = PyList_New(1);
        if (list)
            PyList_SetItem(list, 0, Py_NewRef(record));
    } else {
        record = list = PySequence_List(record);
    }
    if (!list)
        return NULL;
    BEGIN_SECTION(self)
    added = add_request((Batch *)self, &request, record, list, given.remote_object, given.destination);
    END_SECTION()
    Py_DECREF(list);
    if (added < 0)
        return NULL;
    Py_RETURN_NONE;
}

#define CALL(name, ...)                                                                                             \
    static PyObject *batch_##name(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords) \
    {                                                                                                               \
        return batch_add(self, &calls[CALL_##name], arguments, count, keywords);                                    \
    }
NDPY_CALLS(CALL)
#undef CALL

/* Adds a transfer of a pair (the peer's memory, an element of the same length). Returns 1, or 0 for anything that is no
   such pair, or -1 with an error. Called in a section of the batch. */
static int add_pair(Batch *batch, PyObject *pair, const struct ndpy_list_request *like, unsigned long long longest)
{
    struct ndpy_list_request request = *like;
    uint32_t at = batch->element_count;
    PyObject *remote, *object;
    const Element *element;
    int is_writable;

    if (!PyTuple_CheckExact(pair) || PyTuple_Size(pair) != 2)
        return 0;
    remote = PyTuple_GetItem(pair, 0);
    object = PyTuple_GetItem(pair, 1);
    if (Py_TYPE(object) != element_type || !is_of(remote, remote_type, &usual_remote_type))
        return 0;
    element = (Element *)object;
    is_writable = ((Region *)element->region)->writable;
    if (!element->length || element->length > longest || element->length != ((Remote *)remote)->length ||
        (request.operation == NDPY_READ && !is_writable))
        return 0;
    if (read_remote(remote, &request.remote) < 0)
        return -1;
    batch->elements[at] = (struct ndpy_element){element->address, element->token, (uint32_t)element->length};
    batch->element_regions[at] = element->region;
    append_request(batch, &request, 1, object, remote, NULL);
    return 1;
}

static PyObject *batch_fill(PyObject *self, PyObject *arguments)
{
    struct ndpy_list_request like = {0};
    Batch *batch = (Batch *)self;
    unsigned long long longest, context, last_context;
    PyObject *pairs;
    Py_ssize_t place;
    int added = 1;

    if (!PyArg_ParseTuple(arguments, "IO!nKKK:_fill", &like.operation, &PyList_Type, &pairs, &place, &longest, &context,
                          &last_context))
        return NULL;
    if (like.operation != NDPY_READ && like.operation != NDPY_WRITE) {
        PyErr_SetString(PyExc_ValueError, "_fill() adds reads and writes only");
        return NULL;
    }
    if (place < 0) {
        PyErr_Format(PyExc_IndexError, "_fill() begins at a place of the list, not at %zd", place);
        return NULL;
    }
    like.context = context;
    if (longest > UINT32_MAX)
        longest = UINT32_MAX;
    BEGIN_SECTION(self)
    if (batch->count || !batch->max_sge)
        added = 0;
    while (added > 0 && batch->count < batch->capacity && place < PyList_Size(pairs)) {
        added = add_pair(batch, PyList_GetItem(pairs, place), &like, longest);
        place += added > 0;
    }
    if (batch->count) {
        batch->requests[batch->count - 1].context = batch->numbers[CONTEXTS][batch->count - 1] = last_context;
        batch_forget_lists(batch);
    }
    END_SECTION()
    return added < 0 ? NULL : PyLong_FromSsize_t(place);
}

static void drop_requests(Batch *batch)
{
    uint32_t count = batch->count, used = batch->used_count;

    batch->count = batch->element_count = batch->used_count = 0;
    batch->has_destinations = 0;
    batch_forget_lists(batch);
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

/* ---- the type ---- */

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
        if (batch_make_column(batch, which, which == ADDRESSES || which == LENGTHS ? elements : (size_t)capacity) < 0) {
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

#define CALL(name, operation, with_immediate, arguments, doc)                         \
    {#name, (PyCFunction)(void (*)(void))batch_##name, METH_FASTCALL | METH_KEYWORDS, \
     #name "($self, " arguments ")\n--\n\n" doc},

static PyMethodDef batch_methods[] = {
    NDPY_CALLS(CALL){"clear", batch_clear_requests, METH_NOARGS, "clear($self)\n--\n\nForget all requests."},
    {"_fill", batch_fill, METH_VARARGS,
     "_fill($self, operation, pairs, place, longest, context, last_context, /)\n--\n\n"
     "Fill an empty batch with reads or writes of (remote, element) from this place of the list on. Stop at the first\n"
     "pair that is not an element with all bytes of `remote`, at most `longest` and writable for a read.\n\n"
     "Parameters:\n"
     "    context, last_context: of all requests but the last one, and of this.\n"
     "Returns: the place behind the last one that was added."},
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
    batch_type = add_type(module, &batch_spec);
    return batch_type ? add_batch_lists(module) : -1;
}
