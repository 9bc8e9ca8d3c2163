/* Posting: the base of ndpy/objects/work_queues.py. One element of a region is posted here from end to end. Everything
 * else, such as several elements, bytes sent inline, and refusals, goes by way of Python.
 *
 * A post holds the interpreter's lock and the queue pair's lock during the provider's call. So no other thread can
 * close the region, or end the queue pair, in the middle.
 */

#include "core.h"
#include "batch.h"

enum { STACK_ELEMENTS = 16 };

/* native: a struct ndpy_queue_pair. ended: the connection is over, and what is posted is
   cancelled. sinks_must_be_writable: the provider itself would write to every region. */
typedef struct {
    GUARDED_HEAD
    PyObject *srq;
    PyObject *initiator; /* Records */
    PyObject *receive;   /* Records */
    PyObject *lists;     /* ListPool */
    const struct ndpy_provider *provider;
    SHARED char ended;
    SHARED char sinks_must_be_writable;
} WorkQueues;

/* The arguments of a post, decoded. */
struct post {
    uint32_t operation;
    uint32_t flags;
    uint64_t context;
    struct ndpy_remote remote;
};

enum { SGES, REMOTE, CONTEXT, FLAGS, IMMEDIATE, ARGUMENTS };

PyObject *names_with_remote[ARGUMENTS], *names_without_remote[ARGUMENTS - 1], *names_of_swap[6], *names_of_add[5];
PyObject *names_of_atomic_write[4], *names_of_flush_memory[5];
PyObject *names_to_destination[5], *names_of_write_to[6];

/* ---- arguments ---- */

/* Raises what is wrong with a context and flags that are no numbers, or numbers too large. */
static int refuse_numbers(PyObject *self, PyObject *context, PyObject *flags)
{
    PyObject *type, *value, *traceback, *zero = PyLong_FromLong(0), *error = NULL;

    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (zero)
        error =
            PyObject_CallMethod(self, "_bad_argument", "OOO", value, context ? context : zero, flags ? flags : zero);
    Py_XDECREF(zero);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    raise_made(error);
    return -1;
}

HOT int read_numbers(PyObject *self, PyObject *context, PyObject *flags, struct post *post)
{
    unsigned long long number = 0;

    post->context = context ? PyLong_AsUnsignedLongLong(context) : 0;
    if (post->context == UINT64_MAX && PyErr_Occurred())
        return refuse_numbers(self, context, flags);
    if (flags)
        number = PyLong_AsUnsignedLongLong(flags);
    if (number > UINT32_MAX) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_OverflowError, "flags have 32 bits");
        return refuse_numbers(self, context, flags);
    }
    post->flags = (uint32_t)number;
    return 0;
}

/* The class of ndpy/objects/memory.py, once an object of it was seen. */
static PyTypeObject *usual_remote_type;

HOT int decode_remote(PyObject *object, struct ndpy_remote *out)
{
    const Remote *remote = (Remote *)object, *window;

    if (!is_of(object, remote_type, &usual_remote_type)) {
        PyErr_Format(PyExc_TypeError, "the peer's memory is a RemoteMemory, not %R", (PyObject *)Py_TYPE(object));
        return -1;
    }
    if (remote->token > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "a remote token is 0 to 2**32-1, not %llu", remote->token);
        return -1;
    }
    window = remote->sliced_from ? remote->sliced_from : remote;
    out->address = remote->address;
    out->length = remote->length;
    out->window_address = window->address;
    out->window_length = window->length;
    out->token = (uint32_t)remote->token;
    return 0;
}

int read_immediate(PyObject *object, uint32_t *out)
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

int read_destination(PyObject *object, struct ndpy_remote *out)
{
    unsigned long long operands[2];
    PyObject *words = PyObject_GetAttrString(object, "_words");
    int read = words && PyArg_ParseTuple(words, "KK", &operands[0], &operands[1]);

    Py_XDECREF(words);
    if (read) {
        out->operands[0] = operands[0];
        out->operands[1] = operands[1];
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "a destination is a Destination, not %R", (PyObject *)Py_TYPE(object));
    }
    return -1;
}

int read_operand(PyObject *object, const char *name, uint64_t *out)
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

int read_remote(PyObject *object, struct ndpy_remote *out)
{
    return decode_remote(object, out);
}

/* ---- posting ---- */

/* See post_elements(). Called with the records' mutex. */
HOT int post_with_mutex(WorkQueues *self, Records *records, uint32_t operation, const struct post *post,
                        const struct ndpy_element *elements, uint32_t count, PyObject *record)
{
    int refused;

    /* Recorded first: another thread may take the completion as soon as the provider has the request. */
    if (records_push_element(records, record) < 0)
        return RAISED;
    refused = self->provider->post(self->native, operation, post->flags, post->context, elements, count, &post->remote);
    /* The caller has it too. */
    if (refused)
        Py_DECREF(records_withdraw(records));
    return refused;
}

/* Posts elements, with their record: the element itself, or a list of several. Returns 0 when it is posted, a refusal,
 * or RAISED. */
HOT int post_elements(WorkQueues *self, uint32_t operation, const struct post *post,
                      const struct ndpy_element *elements, uint32_t count, PyObject *record)
{
    Records *records = (Records *)(operation == NDPY_RECEIVE ? self->receive : self->initiator);
    int refused;

    mutex_lock(&records->mutex);
    refused = post_with_mutex(self, records, operation, post, elements, count, record);
    mutex_unlock(&records->mutex);
    return refused;
}

/* What follows a post, without the lock. */
static PyObject *conclude(WorkQueues *self, const struct post *post, int refused, PyObject *elements)
{
    if (refused == RAISED)
        return NULL;
    if (refused) {
        raise_made(
            PyObject_CallMethod((PyObject *)self, "_refusal", "IiOI", post->operation, refused, elements, post->flags));
        return NULL;
    }
    if (self->ended)
        return PyObject_CallMethod((PyObject *)self, "_cancel_late_request", "I", post->operation);
    Py_RETURN_NONE;
}

/* Takes the lock of a queue pair that can be used. Returns 0, or -1 with an error. */
HOT int enter(WorkQueues *self)
{
    return guarded_enter((Guarded *)self);
}

static PyObject *post_again(WorkQueues *self, struct post *post, Element *sge);

/* Checks an element that has numbers of more than 32 bits. Every provider takes tokens of 32 bits. */
APART int check_large(const WorkQueues *self, const Element *sge)
{
    if (sge->length > UINT32_MAX)
        return NDPY_TOO_LONG;
    return sge->token > self->provider->largest_token ? NDPY_BAD_TOKEN : 0;
}

/* Whether requests of this queue pair may use a region. *owner: what keeps its memory in place, for a request that is
 * sent inline. */
HOT int may_use(const WorkQueues *self, Region *region, uint32_t flags, PyObject **owner)
{
    int may;

    BEGIN_SECTION((PyObject *)region)
    may = may_refer_to(self->adapter, (Usable *)region);
    /* Kept until the provider has copied what is sent inline. */
    *owner = may && flags & NDPY_INLINE ? Py_XNewRef(region->owner) : NULL;
    END_SECTION()
    return may;
}

/* Posts one element of a region. operation: that of `post`, which is a constant in each caller. */
HOT PyObject *post_one(WorkQueues *self, uint32_t operation, struct post *post, Element *sge)
{
    Region *region = (Region *)sge->region;
    struct ndpy_element element = {sge->address, sge->token, (uint32_t)sge->length};
    PyObject *elements, *owner, *result;
    int refused;

    if ((operation == NDPY_RECEIVE || operation == NDPY_COMPARE_AND_SWAP || operation == NDPY_FETCH_AND_ADD) &&
        !region->writable)
        post->flags |= NDPY_UNWRITABLE;
    if (enter(self) < 0)
        return NULL;
    if (!may_use(self, region, post->flags, &owner)) {
        lock_leave(self->lock);
        return refuse_reference((PyObject *)self, sge->region) < 0 ? NULL : post_again(self, post, sge);
    }
    refused = (sge->length | sge->token) > UINT32_MAX ? check_large(self, sge) : 0;
    if (!refused)
        refused = post_elements(self, operation, post, &element, 1, (PyObject *)sge);
    lock_leave(self->lock);
    Py_XDECREF(owner);
    if (!refused && !self->ended)
        Py_RETURN_NONE;
    elements = PyList_New(1);
    if (!elements)
        return NULL;
    PyList_SetItem(elements, 0, Py_NewRef((PyObject *)sge));
    result = conclude(self, post, refused, elements);
    Py_DECREF(elements);
    return result;
}

static PyObject *post_again(WorkQueues *self, struct post *post, Element *sge)
{
    return post_one(self, post->operation, post, sge);
}

/* Whether the provider would write to memory of a region without that right. */
HOT int may_not_be_filled(const WorkQueues *self, uint32_t operation, const Element *sge)
{
    return self->sinks_must_be_writable && (operation == NDPY_RECEIVE || operation == NDPY_READ) &&
           !((Region *)sge->region)->writable;
}

/* Posts what the arguments of a method say. */
HOT PyObject *post(WorkQueues *self, uint32_t operation, PyObject *sges, PyObject *remote, PyObject *context,
                   PyObject *flags)
{
    Element *sge = (Element *)sges;
    struct post post;

    post.operation = operation;
    if (read_numbers((PyObject *)self, context, flags, &post) < 0)
        return NULL;
    if (!remote)
        post.remote = (struct ndpy_remote){0};
    else if (decode_remote(remote, &post.remote) < 0)
        return NULL;
    if (Py_TYPE(sges) != element_type || may_not_be_filled(self, operation, sge))
        return PyObject_CallMethod((PyObject *)self, "_post_many", "IOKIO", operation, sges,
                                   (unsigned long long)post.context, post.flags, remote ? remote : Py_None);
    if (remote && sge->length > post.remote.length) {
        raise_made(PyObject_CallMethod((PyObject *)self, "_exceeds_remote", "KO", sge->length, remote));
        return NULL;
    }
    return post_one(self, operation, &post, sge);
}

/* Posts an operation beyond NDPY_WRITE. words: immediate data and operands. */
static PyObject *post_special(WorkQueues *self, uint32_t operation, PyObject *sges, PyObject *remote, PyObject *context,
                              PyObject *flags, const struct ndpy_remote *words)
{
    struct post post = {.operation = operation, .remote = *words};

    if (read_numbers((PyObject *)self, context, flags, &post) < 0)
        return NULL;
    if (remote && decode_remote(remote, &post.remote) < 0)
        return NULL;
    if (Py_TYPE(sges) != element_type)
        return PyObject_CallMethod((PyObject *)self, "_post_many", "IOKIO(IKK)", operation, sges,
                                   (unsigned long long)post.context, post.flags, remote ? remote : Py_None,
                                   words->immediate, (unsigned long long)words->operands[0],
                                   (unsigned long long)words->operands[1]);
    if (remote && operation != NDPY_SEND_AND_INVALIDATE && ((Element *)sges)->length > post.remote.length) {
        raise_made(PyObject_CallMethod((PyObject *)self, "_exceeds_remote", "KO", ((Element *)sges)->length, remote));
        return NULL;
    }
    return post_again(self, &post, (Element *)sges);
}

static PyObject *post_with_immediate(WorkQueues *self, uint32_t operation, PyObject *const *given)
{
    struct ndpy_remote words = {0};

    if (read_immediate(given[IMMEDIATE], &words.immediate) < 0)
        return NULL;
    return post_special(self, operation, given[SGES], given[REMOTE], given[CONTEXT], given[FLAGS], &words);
}

/* Where the named arguments of a call are, counted from the first named one; -1: absent. A call passes the same tuple
   of names each time. */
struct options {
    PyObject *names;
    int context;
    int flags;
    int immediate;
    int needed;  /* how many of the three a method has to have: 0 to 3 */
    int leading; /* how many names there are, if they are the first ones of the three, in their order; else 0 */
};

enum { KNOWN_OPTIONS = 4 };

/* The latest ones, the last one first. The interpreter's lock guards them. */
static struct options known_options[KNOWN_OPTIONS];

/* Returns 0 if there are other names, or if the names are not the interned ones. sort_arguments() then finds out. */
static int read_options(PyObject *names, struct options *out)
{
    Py_ssize_t count = PyTuple_Size(names);

    *out = (struct options){names, -1, -1, -1, 0, 0};
    for (int which = 0; which < count; which++) {
        PyObject *name = PyTuple_GetItem(names, which);
        int *where = name == names_with_remote[CONTEXT]     ? &out->context
                     : name == names_with_remote[FLAGS]     ? &out->flags
                     : name == names_with_remote[IMMEDIATE] ? &out->immediate
                                                            : NULL;

        if (!where || *where >= 0)
            return 0;
        *where = which;
    }
    out->needed = out->immediate >= 0 ? 3 : out->flags >= 0 ? 2 : out->context >= 0;
    if (out->needed == count && out->context == 0 && (count < 2 || out->flags == 1))
        out->leading = (int)count;
    return 1;
}

/* Makes the options of these names the first ones. Returns NULL if read_options() cannot read them. */
APART const struct options *find_other_options(PyObject *names)
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

HOT const struct options *find_options(PyObject *names)
{
    if (!HAS_GIL)
        return NULL;
    return known_options[0].names == names ? &known_options[0] : find_other_options(names);
}

/* Does sort_arguments(). The first `positional` arguments are required. Of context, flags and immediate, as many follow
   them as `count` has room for. */
HOT int sort(const char *function, PyObject *const *arguments, Py_ssize_t given, PyObject *keywords,
             PyObject *const *names, int positional, int count, PyObject **out)
{
    if (given == positional) {
        const struct options *options = keywords ? find_options(keywords) : NULL;

        for (int which = 0; which < positional; which++)
            out[which] = arguments[which];
        for (int which = positional; which < count; which++)
            out[which] = NULL;
        if (!keywords)
            return 0;
        if (options && options->needed <= count - positional) {
            if (options->leading == 1 || options->leading == 2) {
                out[positional] = arguments[positional];
                if (count > positional + 1 && options->leading == 2)
                    out[positional + 1] = arguments[positional + 1];
                return 0;
            }
            if (options->context >= 0)
                out[positional] = arguments[positional + options->context];
            if (count > positional + 1 && options->flags >= 0)
                out[positional + 1] = arguments[positional + options->flags];
            if (count > positional + 2 && options->immediate >= 0)
                out[positional + 2] = arguments[positional + options->immediate];
            return 0;
        }
    }
    for (int which = 0; which < count; which++)
        out[which] = NULL;
    if (sort_arguments(function, arguments, given, keywords, names, positional, count, out) < 0)
        return -1;
    for (int which = 0; which < positional; which++) {
        if (out[which])
            continue;
        PyErr_Format(PyExc_TypeError, "%s() needs the argument '%U'", function, names[which]);
        return -1;
    }
    return 0;
}

HOT int is_given(PyObject *object)
{
    return object && object != Py_None;
}

static PyObject *queues_send(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[ARGUMENTS];

    if (sort("send", arguments, count, keywords, names_without_remote, 1, ARGUMENTS - 1, given + 1) < 0)
        return NULL;
    given[SGES] = given[1];
    given[REMOTE] = NULL;
    if (is_given(given[IMMEDIATE]))
        return post_with_immediate((WorkQueues *)self, NDPY_SEND_WITH_IMMEDIATE, given);
    return post((WorkQueues *)self, NDPY_SEND, given[SGES], NULL, given[CONTEXT], given[FLAGS]);
}

static PyObject *queues_receive(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    WorkQueues *queues = (WorkQueues *)self;
    PyObject *given[2];

    if (sort("receive", arguments, count, keywords, names_without_remote, 1, 2, given) < 0)
        return NULL;
    if (queues->srq && queues->srq != Py_None) {
        raise_made(PyObject_CallMethod(self, "_no_own_receives", NULL));
        return NULL;
    }
    return post(queues, NDPY_RECEIVE, given[0], NULL, given[1], NULL);
}

static PyObject *queues_read(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[IMMEDIATE];

    if (sort("read", arguments, count, keywords, names_with_remote, 2, IMMEDIATE, given) < 0)
        return NULL;
    return post((WorkQueues *)self, NDPY_READ, given[SGES], given[REMOTE], given[CONTEXT], given[FLAGS]);
}

static PyObject *queues_write(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *given[ARGUMENTS];

    if (sort("write", arguments, count, keywords, names_with_remote, 2, ARGUMENTS, given) < 0)
        return NULL;
    if (is_given(given[IMMEDIATE]))
        return post_with_immediate((WorkQueues *)self, NDPY_WRITE_WITH_IMMEDIATE, given);
    return post((WorkQueues *)self, NDPY_WRITE, given[SGES], given[REMOTE], given[CONTEXT], given[FLAGS]);
}

static PyObject *queues_compare_and_swap(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                                         PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[6];

    if (sort("compare_and_swap", arguments, count, keywords, names_of_swap, 4, 6, given) < 0 ||
        read_operand(given[2], "compare", &words.operands[0]) < 0 ||
        read_operand(given[3], "swap", &words.operands[1]) < 0)
        return NULL;
    return post_special((WorkQueues *)self, NDPY_COMPARE_AND_SWAP, given[SGES], given[REMOTE], given[4], given[5],
                        &words);
}

static PyObject *queues_fetch_and_add(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    struct ndpy_remote words = {0};
    PyObject *given[5];

    if (sort("fetch_and_add", arguments, count, keywords, names_of_add, 3, 5, given) < 0 ||
        read_operand(given[2], "add", &words.operands[0]) < 0)
        return NULL;
    return post_special((WorkQueues *)self, NDPY_FETCH_AND_ADD, given[SGES], given[REMOTE], given[3], given[4], &words);
}

/* ---- batches ---- */

/* Finds a region or a destination of a batch that its requests may not refer to here. Borrowed, or NULL. Called in a
   section of the batch. */
HOT PyObject *find_unusable(const WorkQueues *self, const Batch *batch)
{
    PyObject *const *used = batch->used, *const *end = used + batch->used_count;
    const PyObject *adapter = self->adapter;

    for (; used < end; used++)
        if (!may_refer_to(adapter, (Usable *)*used))
            return *used;
    return NULL;
}

static Records *records_of(WorkQueues *self, const PostedList *list)
{
    return (Records *)(list->operation == NDPY_RECEIVE ? self->receive : self->initiator);
}

/* Corrects the newest record, because only so many requests of its list were posted. Called with the records' mutex, by
   somebody who has the list too. */
APART void correct_record(WorkQueues *self, PostedList *list, uint32_t posted)
{
    Records *records = records_of(self, list);
    struct record *newest = record_at(records, records->count - 1);

    newest->requests = newest->left = posted;
    if (posted)
        return;
    records->count--;
    Py_DECREF((PyObject *)list);
}

/* See post_list(). Called with the records' mutex. */
HOT int post_list_with_mutex(WorkQueues *self, PostedList *list, uint32_t *posted)
{
    int refused;

    /* Recorded first: another thread may take completions as soon as the provider has the requests. */
    if (records_push(records_of(self, list), (PyObject *)list, list->count) < 0)
        return RAISED;
    refused = self->provider->post_list(self->native, list->native, posted);
    if (refused)
        correct_record(self, list, *posted);
    return refused;
}

/* Posts a list, with its record. Returns 0 when it is posted, or a refusal with the number of requests that were
 * posted, or RAISED. */
HOT int post_list(WorkQueues *self, PostedList *list, uint32_t *posted)
{
    int refused;

    mutex_lock(&records_of(self, list)->mutex);
    refused = post_list_with_mutex(self, list, posted);
    mutex_unlock(&records_of(self, list)->mutex);
    return refused;
}

static PyObject *post_singly(WorkQueues *self, Batch *batch, uint32_t posted)
{
    return PyObject_CallMethod((PyObject *)self, "_post_singly", "OI", (PyObject *)batch, posted);
}

/* What follows a post of a batch, without the lock. bad: the number of the refused request. */
static PyObject *conclude_batch(WorkQueues *self, Batch *batch, int refused, uint32_t bad, uint32_t posted)
{
    uint32_t operation;

    if (refused == NDPY_POST_SINGLY)
        return post_singly(self, batch, posted);
    if (refused == RAISED)
        return NULL;
    if (refused) {
        raise_made(
            PyObject_CallMethod((PyObject *)self, "_refuse_batch", "OiII", (PyObject *)batch, refused, bad, posted));
        return NULL;
    }
    if (!self->ended)
        Py_RETURN_NONE;
    BEGIN_SECTION((PyObject *)batch)
    operation = batch->requests[0].operation;
    END_SECTION()
    return PyObject_CallMethod((PyObject *)self, "_cancel_late_request", "I", operation);
}

/* Raises if a batch is empty, or has receives that the queue pair does not take. Returns 0, or -1 with the error.
   Called in a section of the batch. */
static int check_batch(WorkQueues *self, const Batch *batch)
{
    if (!batch->count) {
        PyErr_SetString(PyExc_ValueError,
                        "the batch is empty; add requests with its methods send(), write() and so on");
        return -1;
    }
    if (batch->requests[0].operation == NDPY_RECEIVE && self->srq && self->srq != Py_None) {
        raise_made(PyObject_CallMethod((PyObject *)self, "_no_own_receives", NULL));
        return -1;
    }
    return 0;
}

/* Posts the list of a batch as post_list(), unless its requests may not refer to something any more. Returns this,
   borrowed, or NULL. Called in a section of the batch: the collector may have closed something while the list was made.
 */
static PyObject *check_and_post_list(WorkQueues *self, const Batch *batch, PostedList *list, int *refused,
                                     uint32_t *posted)
{
    PyObject *unusable;

    if (batch->has_destinations)
        mutex_lock(&destinations_mutex);
    unusable = find_unusable(self, batch);
    if (!unusable)
        *refused = post_list(self, list, posted);
    if (batch->has_destinations)
        mutex_unlock(&destinations_mutex);
    return unusable;
}

/* Posts a batch that has no list for this queue pair, may have changed, or refers to something that it may not refer
   to. Called with the lock, which it gives back. */
static PyObject *post_checked(WorkQueues *self, Batch *batch)
{
    PyObject *unusable;
    uint32_t posted = 0, bad = 0;
    PostedList *list = NULL;
    int refused = 0, is_good;

    BEGIN_SECTION((PyObject *)batch)
    unusable = Py_XNewRef(find_unusable(self, batch));
    is_good = !unusable && check_batch(self, batch) == 0;
    if (is_good && self->provider->list_new) {
        list = (PostedList *)Py_XNewRef((PyObject *)batch_list(batch, (ListPool *)self->lists, &refused, &bad));
        if (list)
            unusable = Py_XNewRef(check_and_post_list(self, batch, list, &refused, &posted));
    }
    END_SECTION()
    if (unusable) {
        int checked;

        lock_leave(self->lock);
        Py_XDECREF((PyObject *)list);
        checked = refuse_reference((PyObject *)self, unusable);
        Py_DECREF(unusable);
        return checked < 0 || enter(self) < 0 ? NULL : post_checked(self, batch);
    }
    if (!is_good) {
        lock_leave(self->lock);
        return NULL;
    }
    if (!self->provider->list_new) {
        lock_leave(self->lock);
        return post_singly(self, batch, 0);
    }
    if (list) {
        bad = posted;
        Py_DECREF((PyObject *)list);
    } else if (!refused) {
        refused = RAISED;
    }
    lock_leave(self->lock);
    return conclude_batch(self, batch, refused, bad, posted);
}

static PyObject *queues_post(PyObject *object, PyObject *argument)
{
    WorkQueues *self = (WorkQueues *)object;
    Batch *batch = (Batch *)argument;
    PostedList *list;
    uint32_t posted;
    int refused;

    if (Py_TYPE(argument) != batch_type) {
        PyErr_Format(PyExc_TypeError, "post() takes a Batch, not %R", (PyObject *)Py_TYPE(argument));
        return NULL;
    }
    if (enter(self) < 0)
        return NULL;
    list = HAS_GIL ? batch->last : NULL;
    if (!list || list->pool != self->lists || batch->is_exposed || find_unusable(self, batch))
        return post_checked(self, batch);
    refused = post_list(self, list, &posted);
    lock_leave(self->lock);
    if (refused || self->ended)
        return conclude_batch(self, batch, refused, posted, posted);
    Py_RETURN_NONE;
}

/* Posts a request to a destination, as post_elements(). Returns UNUSABLE if it may not refer to it. */
static int post_to(WorkQueues *self, const struct post *post, const struct ndpy_element *elements, uint32_t count,
                   PyObject *record, PyObject *destination)
{
    int refused = UNUSABLE;

    mutex_lock(&destinations_mutex);
    if (may_refer_to(self->adapter, (Usable *)destination))
        refused = post_elements(self, post->operation, post, elements, count, record);
    mutex_unlock(&destinations_mutex);
    return refused;
}

/* Checks what a request refers to, and posts it. Returns as post_elements(), or UNUSABLE with the object in *unusable.
   Called with the lock. destination: NULL, or that of the request. */
static int check_and_post(WorkQueues *self, const struct post *post, PyObject *pieces, struct ndpy_element *elements,
                          uint32_t count, PyObject *record, PyObject *destination, PyObject **unusable)
{
    int refused = read_pieces(self->adapter, self->provider->largest_token, pieces, elements, count, unusable);

    if (refused)
        return refused;
    if (!destination)
        return post_elements(self, post->operation, post, elements, count, record);
    *unusable = destination;
    return post_to(self, post, elements, count, record, destination);
}

static PyObject *queues_post_elements(PyObject *self, PyObject *arguments)
{
    WorkQueues *queues = (WorkQueues *)self;
    struct ndpy_element on_stack[STACK_ELEMENTS], *elements = on_stack;
    struct post post = {0};
    PyObject *record, *pieces, *context, *flags, *remote, *destination, *unusable = NULL, *result = NULL;
    unsigned long long operands[2] = {0};
    int refused = UNUSABLE;
    uint32_t count;

    if (!PyArg_ParseTuple(arguments, "IO!O!OOO(IKK)O", &post.operation, &PyList_Type, &record, &PyList_Type, &pieces,
                          &context, &flags, &remote, &post.remote.immediate, &operands[0], &operands[1],
                          &destination) ||
        read_numbers(self, context, flags, &post) < 0)
        return NULL;
    post.remote.operands[0] = operands[0];
    post.remote.operands[1] = operands[1];
    if (remote != Py_None && read_remote(remote, &post.remote) < 0)
        return NULL;
    if (!PyObject_TypeCheck(destination, destination_type))
        destination = NULL;
    count = (uint32_t)PyList_Size(pieces);
    if (count > STACK_ELEMENTS)
        elements = PyMem_Malloc(count * sizeof *elements);
    if (!elements)
        return PyErr_NoMemory();
    while (refused == UNUSABLE && enter(queues) == 0) {
        refused = check_and_post(queues, &post, pieces, elements, count, record, destination, &unusable);
        lock_leave(queues->lock);
        if (refused == UNUSABLE && refuse_reference(self, unusable) < 0)
            refused = RAISED;
    }
    if (refused != UNUSABLE)
        result = conclude(queues, &post, refused, record);
    if (elements != on_stack)
        PyMem_Free(elements);
    return result;
}

static void forget_lists(WorkQueues *queues)
{
    ListPool *pool = (ListPool *)queues->lists;

    queues->lists = NULL;
    if (pool)
        pool_close(pool);
    Py_XDECREF((PyObject *)pool);
}

static PyObject *queues_attach(PyObject *self, PyObject *arguments)
{
    WorkQueues *queues = (WorkQueues *)self;
    unsigned long long provider, native;
    PyObject *posted;
    ListPool *pool;

    if (!PyArg_ParseTuple(arguments, "KKO!", &provider, &native, posted_type, &posted))
        return NULL;
    queues->provider = (const struct ndpy_provider *)(uintptr_t)provider;
    Py_XDECREF(queues->initiator);
    Py_XDECREF(queues->receive);
    queues->initiator = Py_NewRef(((Posted *)posted)->initiator);
    queues->receive = Py_NewRef(((Posted *)posted)->receive);
    pool = (ListPool *)PyObject_CallObject((PyObject *)list_pool_type, NULL);
    if (!pool)
        return NULL;
    pool->provider = queues->provider;
    pool->native = (struct ndpy_queue_pair *)(uintptr_t)native;
    forget_lists(queues);
    queues->lists = (PyObject *)pool;
    guarded_attach((Guarded *)self, pool->native);
    Py_RETURN_NONE;
}

static PyObject *queues_detach(PyObject *self, PyObject *Py_UNUSED(none))
{
    guarded_attach((Guarded *)self, NULL);
    forget_lists((WorkQueues *)self);
    Py_RETURN_NONE;
}

static int queues_traverse(PyObject *self, visitproc visit, void *arg)
{
    WorkQueues *queues = (WorkQueues *)self;

    Py_VISIT((PyObject *)queues->lock);
    Py_VISIT(queues->srq);
    Py_VISIT(queues->initiator);
    Py_VISIT(queues->receive);
    return resource_traverse(self, visit, arg);
}

static int queues_clear(PyObject *self)
{
    WorkQueues *queues = (WorkQueues *)self;

    Py_CLEAR(queues->lock);
    Py_CLEAR(queues->srq);
    Py_CLEAR(queues->initiator);
    Py_CLEAR(queues->receive);
    forget_lists(queues);
    return resource_clear(self);
}

static void queues_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    queues_clear(self);
    resource_dealloc(self);
}

static PyMemberDef queues_members[] = {
    {"srq", T_OBJECT, offsetof(WorkQueues, srq), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef queues_properties[] = {
    FLAG("_ended", WorkQueues, ended, "The connection is over; what is posted is cancelled."),
    FLAG("_sinks_must_be_writable", WorkQueues, sinks_must_be_writable, NULL),
    GUARDED_PROPERTIES,
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    send_doc,
    "send($self, sges, *, context=0, flags=0, immediate=None)\n--\n\n"
    "Send a message to the peer's oldest posted receive, and return as soon as it is queued.\n\n"
    "Without INLINE the memory belongs to the adapter until the completion is taken. After the connection has ended "
    "the\n"
    "request completes CANCELED.\n\n"
    "Parameters:\n"
    "    sges: a region, a slice of one, or a sequence of them. At most limits.max_initiator_sge elements and\n"
    "        info.max_transfer_length bytes in total. With INLINE also buffers that are not registered, and at most\n"
    "        limits.inline_data_size bytes.\n"
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n"
    "    flags: SILENT_SUCCESS, READ_FENCE, SOLICITED and INLINE.\n"
    "    immediate: 0 to 2**32 - 1, which the peer gets as the `immediate` of its completion, beside the message. None "
    "for no\n"
    "        such number. It needs Capability.IMMEDIATE_DATA.\n"
    "Raises:\n"
    "    NotConnectedError: there was no connection yet.\n"
    "    QueueFullError: no initiator slot is free. Take completions, then try again.\n"
    "    LimitExceededError: there are too many elements or bytes.\n"
    "    InvalidFlagsError: a flag is not one of these.\n"
    "    ForeignObjectError: a region belongs to another adapter.\n"
    "    ClosedError: the queue pair or a region is closed.\n"
    "    UnsupportedError: the adapter has no immediate data.\n"
    "Source: IND2QueuePair::Send (contract F.3); ibv_post_send(3) with IBV_WR_SEND and IBV_WR_SEND_WITH_IMM.\n");

PyDoc_STRVAR(receive_doc,
             "receive($self, sges, *, context=0)\n--\n\n"
             "Post memory for one message of the peer. This is possible at any time, also before connecting.\n\n"
             "A message that is longer than the memory completes BUFFER_OVERFLOW and ends the connection.\n\n"
             "Parameters:\n"
             "    sges: a region, a slice of one, or a sequence of them; at most limits.max_receive_sge elements. The "
             "regions need\n"
             "        Access.LOCAL_WRITE.\n"
             "    context: 0 to 2**64 - 1; comes back in the Completion.\n"
             "Raises:\n"
             "    QueueFullError: no receive slot is free. Take completions, then try again.\n"
             "    UnsupportedError: the queue pair takes its receives from a shared receive queue.\n"
             "    LimitExceededError, ForeignObjectError, ClosedError: as for send().\n"
             "Source: IND2QueuePair::Receive; ibv_post_recv(3).\n");

PyDoc_STRVAR(
    read_doc,
    "read($self, sges, remote, *, context=0, flags=0)\n--\n\n"
    "Start an RDMA read of the first bytes of `remote` into `sges`, and return as soon as it is queued.\n\n"
    "The elements are filled in order, and decide how much is read.\n\n"
    "Parameters:\n"
    "    sges: a region, a slice of one, or a sequence of them; at most remote.length bytes in total. At most\n"
    "        limits.max_initiator_sge elements, and not more than info.max_read_sge. The regions need "
    "Access.LOCAL_WRITE, and\n"
    "        Access.READ_SINK where info.capabilities has READ_SINK_REQUIRED.\n"
    "    remote: memory of the peer that it has given the right to read.\n"
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n"
    "    flags: SILENT_SUCCESS and READ_FENCE.\n"
    "Raises:\n"
    "    ElementRangeError: there are more bytes than `remote` has.\n"
    "    NotConnectedError, QueueFullError and so on: as for send().\n"
    "Source: IND2QueuePair::Read; ibv_post_send(3) with IBV_WR_RDMA_READ.\n");

PyDoc_STRVAR(write_doc,
             "write($self, sges, remote, *, context=0, flags=0, immediate=None)\n--\n\n"
             "Start an RDMA write of `sges` into the first bytes of `remote`, and return as soon as it is queued.\n\n"
             "The peer takes no part in it and sees no completion, unless there is immediate data. Then the write ends "
             "the peer's\n"
             "oldest receive, whose memory stays as it is: its completion is a RECEIVE_RDMA_WITH_IMMEDIATE, and comes "
             "after the bytes.\n\n"
             "Parameters:\n"
             "    sges: as for send(); at most remote.length bytes in total.\n"
             "    remote: memory of the peer that it has given the right to write.\n"
             "    context: 0 to 2**64 - 1; comes back in the Completion.\n"
             "    flags: SILENT_SUCCESS, READ_FENCE, INLINE and, with immediate data, SOLICITED.\n"
             "    immediate: as for send().\n"
             "Raises:\n"
             "    ElementRangeError: there are more bytes than `remote` has.\n"
             "    NotConnectedError, QueueFullError and so on: as for send().\n"
             "Source: IND2QueuePair::Write; ibv_post_send(3) with IBV_WR_RDMA_WRITE and IBV_WR_RDMA_WRITE_WITH_IMM.\n");

PyDoc_STRVAR(
    compare_and_swap_doc,
    "compare_and_swap($self, sges, remote, compare, swap, *, context=0, flags=0)\n--\n\n"
    "Start an atomic operation: read 8 bytes of the peer's memory and, if they are `compare`, write `swap` there.\n\n"
    "`sges` gets the 8 bytes as they were before, also if they differ from `compare`. They are an integer in host "
    "order. Among\n"
    "the atomic operations of the peer's adapter no other one comes between. Neither do those of the peer's processors "
    "and\n"
    "of its other adapters, if the peer's adapter has Capability.GLOBAL_ATOMICS.\n\n"
    "Parameters:\n"
    "    sges: 8 bytes of a region with Access.LOCAL_WRITE.\n"
    "    remote: memory of a peer that was registered with Access.REMOTE_ATOMIC. The operation is on its first 8 "
    "bytes, whose\n"
    "        address is a multiple of 8.\n"
    "    compare, swap: integers of 64 bits, signed or unsigned.\n"
    "    context: 0 to 2**64 - 1; comes back in the Completion.\n"
    "    flags: SILENT_SUCCESS and READ_FENCE.\n"
    "Raises:\n"
    "    UnsupportedError: info.capabilities lacks ATOMICS.\n"
    "    ElementRangeError: `sges` are not 8 bytes, `remote` has less, or its address is not a multiple of 8.\n"
    "    AccessViolationError: the region of `sges` has no LOCAL_WRITE.\n"
    "    LimitExceededError: the connection's outbound read limit is 0. It counts atomic operations too.\n"
    "    NotConnectedError, QueueFullError and so on: as for send().\n"
    "Source: ibv_post_send(3) with IBV_WR_ATOMIC_CMP_AND_SWP.\n");

PyDoc_STRVAR(fetch_and_add_doc,
             "fetch_and_add($self, sges, remote, add, *, context=0, flags=0)\n--\n\n"
             "Start an atomic operation: add `add` to 8 bytes of the peer's memory. The sum wraps at 2**64.\n\n"
             "`sges` gets the 8 bytes as they were before.\n\n"
             "Parameters:\n"
             "    add: an integer of 64 bits, signed or unsigned.\n"
             "    sges, remote, context, flags: as for compare_and_swap().\n"
             "Raises: as for compare_and_swap().\n"
             "Source: ibv_post_send(3) with IBV_WR_ATOMIC_FETCH_AND_ADD.\n");

PyDoc_STRVAR(
    post_doc,
    "post($self, batch, /)\n--\n\n"
    "Post the requests of a batch, in one call of the provider where that has such a call, and return as soon as they "
    "are\n"
    "queued.\n\n"
    "All of them are posted, or none if the queue has too little room for them. If the provider refuses one of them, "
    "those\n"
    "before it are posted, and the error says how many. So it is too where the provider has no such call, if another "
    "thread\n"
    "posts single requests meanwhile and takes the last room.\n\n"
    "Parameters:\n"
    "    batch: a Batch with at least one request. It may be changed and posted again as soon as the call returns.\n"
    "Raises:\n"
    "    ElementRangeError: a number in a column is outside of the memory that the request was made for.\n"
    "    LimitExceededError: there are more requests than the queue has slots, or a request exceeds a limit.\n"
    "    QueueFullError, NotConnectedError, ForeignObjectError and so on: as for send().\n"
    "Source: ibv_post_send(3) and ibv_post_recv(3) with a list. Providers of NetworkDirect get each request by "
    "itself.\n");

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL | METH_KEYWORDS

static PyMethodDef queues_methods[] = {
    {"send", FAST(queues_send), send_doc},
    {"receive", FAST(queues_receive), receive_doc},
    {"read", FAST(queues_read), read_doc},
    {"write", FAST(queues_write), write_doc},
    {"compare_and_swap", FAST(queues_compare_and_swap), compare_and_swap_doc},
    {"fetch_and_add", FAST(queues_fetch_and_add), fetch_and_add_doc},
    {"post", queues_post, METH_O, post_doc},
    {"_post_elements", queues_post_elements, METH_VARARGS,
     "_post_elements($self, operation, record, elements, context, flags, remote, words, destination, /)\n--\n\n"
     "Post regions, elements, and memory that is sent inline: (address, length, 0). record: the list that keeps their "
     "memory\n"
     "alive. words: the immediate data and both operands. destination: None, or what else the request refers to."},
    {"_attach", queues_attach, METH_VARARGS,
     "_attach($self, provider, native, posted_requests, /)\n--\n\n"
     "Post to this struct ndpy_queue_pair from now on. The addresses are integers."},
    {"_detach", queues_detach, METH_NOARGS, "Forget the struct ndpy_queue_pair, which is freed next."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot queues_slots[] = {
    {Py_tp_doc, "The part of a queue pair that posts."},
    {Py_tp_traverse, queues_traverse},
    {Py_tp_clear, queues_clear},
    {Py_tp_dealloc, queues_dealloc},
    {Py_tp_members, queues_members},
    {Py_tp_getset, queues_properties},
    {Py_tp_methods, queues_methods},
    {0, NULL},
};

static PyType_Spec queues_spec = {"ndpy._core.WorkQueues", sizeof(WorkQueues), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, queues_slots};

int add_work_queues(PyObject *module)
{
    static const char *const names[] = {"sges", "remote", "context", "flags", "immediate"};
    static const char *const operands[] = {"compare", "swap", "add"};

    for (int which = 0; which < ARGUMENTS; which++) {
        names_with_remote[which] = interned(names[which]);
        if (!names_with_remote[which])
            return -1;
    }
    names_without_remote[0] = names_with_remote[SGES];
    for (int which = CONTEXT; which < ARGUMENTS; which++)
        names_without_remote[which - 1] = names_with_remote[which];
    for (int which = 0; which < 2; which++) {
        names_of_swap[which] = names_of_add[which] = names_with_remote[which];
        names_of_swap[which + 2] = interned(operands[which]);
        names_of_swap[which + 4] = names_of_add[which + 3] = names_with_remote[which + CONTEXT];
    }
    for (int which = 0; which < ARGUMENTS; which++)
        names_to_destination[which] = names_with_remote[which];
    names_to_destination[REMOTE] = interned("destination");
    if (!names_to_destination[REMOTE])
        return -1;
    names_of_write_to[0] = names_with_remote[SGES];
    names_of_write_to[1] = names_with_remote[REMOTE];
    names_of_write_to[2] = names_to_destination[REMOTE];
    names_of_write_to[3] = names_with_remote[IMMEDIATE];
    for (int which = CONTEXT; which < IMMEDIATE; which++)
        names_of_write_to[which + 2] = names_with_remote[which];
    names_of_add[2] = interned(operands[2]);
    if (!names_of_swap[2] || !names_of_swap[3] || !names_of_add[2])
        return -1;
    names_of_atomic_write[0] = names_of_flush_memory[0] = names_with_remote[REMOTE];
    names_of_atomic_write[1] = interned("value");
    names_of_flush_memory[1] = interned("kind");
    names_of_flush_memory[2] = interned("whole_region");
    for (int which = 0; which < 2; which++)
        names_of_atomic_write[which + 2] = names_of_flush_memory[which + 3] = names_with_remote[which + CONTEXT];
    if (!names_of_atomic_write[1] || !names_of_flush_memory[1] || !names_of_flush_memory[2])
        return -1;
    return add_resource_type(module, &queues_spec) ? 0 : -1;
}
