/* Posting: the bases of ndpy/objects/work_queues.py and shared_receive_queue.py. One element of a region is posted here
 * from end to end. Everything else, such as several elements, bytes sent inline, and refusals, goes by way of Python.
 *
 * A post holds the interpreter's lock and the queue pair's lock during the provider's call. So no other thread can
 * close the region, or end the queue pair, in the middle.
 */

#include "posting.h"

enum { STACK_ELEMENTS = 16 };

/* The arguments of a post, decoded. */
struct post {
    uint32_t operation;
    uint32_t flags;
    uint64_t context;
    struct ndpy_remote remote;
};

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

/* ---- posting ---- */

/* See core_post_elements(). Called with the records' mutex. */
HOT int core_post_with_mutex(WorkQueues *self, struct records *records, uint32_t operation, const struct post *post,
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
HOT int core_post_elements(WorkQueues *self, uint32_t operation, const struct post *post,
                           const struct ndpy_element *elements, uint32_t count, PyObject *record)
{
    struct records *records = records_of(self->posted, operation);
    int refused;

    mutex_lock(&records->mutex);
    refused = core_post_with_mutex(self, records, operation, post, elements, count, record);
    mutex_unlock(&records->mutex);
    return refused;
}

/* core_post_elements() for a shared receive queue. Its receives end in any order, so it keeps their records by slot. */
static int core_post_shared(WorkQueues *self, const struct post *post, const struct ndpy_element *elements,
                            uint32_t count, PyObject *record)
{
    PyObject *slot = PyObject_CallMethod((PyObject *)self, "_take_slot", "O", record);
    int refused;

    if (!slot)
        return RAISED;
    refused = self->provider->post_shared(self->native, (uint32_t)PyLong_AsUnsignedLong(slot), post->context, elements,
                                          count);
    if (refused)
        Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_free_slot", "O", slot));
    Py_DECREF(slot);
    return PyErr_Occurred() ? RAISED : refused;
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

/* Posts one element of a region. operation: that of `post`. shared: whether it goes to a shared receive queue. Both are
 * constants in each caller. */
HOT PyObject *post_one(WorkQueues *self, uint32_t operation, int shared, struct post *post, Element *sge)
{
    Region *region = (Region *)sge->region;
    struct ndpy_element element = {sge->address, sge->token, (uint32_t)sge->length};
    PyObject *elements, *owner, *result;
    int refused;

    post->flags |= flags_of_memory(operation, region->writable);
    if (enter(self) < 0)
        return NULL;
    if (!may_use(self, region, post->flags, &owner)) {
        lock_leave(self->lock);
        return refuse_reference((PyObject *)self, sge->region) < 0 ? NULL : post_again(self, post, sge);
    }
    refused = (sge->length | sge->token) > UINT32_MAX ? check_large(self, sge) : 0;
    if (!refused && shared)
        refused = core_post_shared(self, post, &element, 1, (PyObject *)sge);
    else if (!refused)
        refused = core_post_elements(self, operation, post, &element, 1, (PyObject *)sge);
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
    if (!self->posted)
        return post_one(self, NDPY_RECEIVE, 1, post, sge);
    return post_one(self, post->operation, 0, post, sge);
}

/* Whether the provider would write to memory of a region without that right. */
HOT int may_not_be_filled(const WorkQueues *self, uint32_t operation, const Element *sge)
{
    return self->sinks_must_be_writable && operations[operation].traits & FILLS_LOCAL &&
           !((Region *)sge->region)->writable;
}

/* Whether the provider would read at addresses where nothing is, because it copies what is sent inline. */
HOT int may_not_be_read(uint32_t operation, uint32_t flags, const Element *sge)
{
    return operations[operation].flags & NDPY_INLINE && flags & NDPY_INLINE && ((Region *)sge->region)->elsewhere;
}

/* Posts what post_one() does not take. */
static PyObject *post_many(WorkQueues *self, const struct post *post, PyObject *sges, PyObject *remote,
                           PyObject *destination)
{
    PyObject *elements = sges ? Py_NewRef(sges) : PyList_New(0), *result;

    if (!elements)
        return NULL;
    result = PyObject_CallMethod((PyObject *)self, "_post_many", "IOKIO(IKK)O", post->operation, elements,
                                 (unsigned long long)post->context, post->flags, remote ? remote : Py_None,
                                 post->remote.immediate, (unsigned long long)post->remote.operands[0],
                                 (unsigned long long)post->remote.operands[1], destination ? destination : Py_None);
    Py_DECREF(elements);
    return result;
}

static PyObject *refuse_length(WorkQueues *self, const Element *sge, PyObject *remote)
{
    raise_made(PyObject_CallMethod((PyObject *)self, "_exceeds_remote", "KO", sge->length, remote));
    return NULL;
}

/* What a call with wrong arguments raises: that, unless the queue pair does not take the operation at all. */
APART PyObject *refuse_arguments(WorkQueues *self, uint32_t operation)
{
    PyObject *type, *value, *traceback, *offered;

    PyErr_Fetch(&type, &value, &traceback);
    offered = PyObject_CallMethod((PyObject *)self, "_require_offered", "I", operation);
    if (offered) {
        PyErr_Restore(type, value, traceback);
        Py_DECREF(offered);
        return NULL;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return NULL;
}

/* Posts one of the operations up to NDPY_WRITE, which is a constant in each caller, as `shared` is. remote: NULL for
 * none. */
HOT PyObject *post(WorkQueues *self, uint32_t operation, int shared, PyObject *sges, PyObject *remote,
                   PyObject *context, PyObject *flags)
{
    Element *sge = (Element *)sges;
    struct post post;

    post.operation = operation;
    if (read_numbers((PyObject *)self, context, flags, &post) < 0)
        return NULL;
    post.remote.immediate = 0;
    if (!remote)
        post.remote = (struct ndpy_remote){0};
    else if (read_remote(remote, &post.remote) < 0)
        return refuse_arguments(self, operation);
    if (Py_TYPE(sges) != element_type || may_not_be_filled(self, operation, sge) ||
        may_not_be_read(operation, post.flags, sge)) {
        post.remote.operands[0] = post.remote.operands[1] = 0;
        return post_many(self, &post, sges, remote, NULL);
    }
    if (remote && sge->length > post.remote.length)
        return refuse_length(self, sge, remote);
    return post_one(self, operation, shared, &post, sge);
}

/* Posts what any call asks for. */
static PyObject *post_call(PyObject *object, const struct call *call, PyObject *const *arguments, Py_ssize_t count,
                           PyObject *keywords)
{
    WorkQueues *self = (WorkQueues *)object;
    struct post post;
    struct given given;
    Element *sge;

    if (read_call(call, object, arguments, count, keywords, &given) < 0)
        return refuse_arguments(self, call->operation);
    post.operation = given.operation;
    post.remote = given.remote;
    if (read_numbers(object, given.context, given.flags, &post) < 0)
        return NULL;
    sge = (Element *)given.sges;
    if (!sge || Py_TYPE(given.sges) != element_type || given.destination ||
        may_not_be_filled(self, given.operation, sge))
        return post_many(self, &post, given.sges, given.remote_object, given.destination);
    if (exceeds_remote(given.operation, sge->length, &post.remote))
        return refuse_length(self, sge, given.remote_object);
    return post_again(self, &post, sge);
}

/* Posts a request to a destination, as core_post_elements(). Returns UNUSABLE if it may not refer to it. */
static int post_to(WorkQueues *self, const struct post *post, const struct ndpy_element *elements, uint32_t count,
                   PyObject *record, PyObject *destination)
{
    int refused = UNUSABLE;

    mutex_lock(&destinations_mutex);
    if (may_refer_to(self->adapter, (Usable *)destination))
        refused = core_post_elements(self, post->operation, post, elements, count, record);
    mutex_unlock(&destinations_mutex);
    return refused;
}

/* Checks what a request refers to, and posts it. Returns as core_post_elements(), or UNUSABLE with the object in
 *unusable. Called with the lock. destination: NULL, or that of the request. */
static int check_and_post(WorkQueues *self, const struct post *post, PyObject *pieces, struct ndpy_element *elements,
                          uint32_t count, PyObject *record, PyObject *destination, PyObject **unusable)
{
    int refused = read_pieces(self->adapter, self->provider->largest_token, pieces, elements, count, unusable);

    if (refused)
        return refused;
    if (!self->posted)
        return core_post_shared(self, post, elements, count, record);
    if (!destination)
        return core_post_elements(self, post->operation, post, elements, count, record);
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

/* ---- the methods of calls ---- */

/* The most frequent ones have a quick way. All but the arguments are constants. */
HOT PyObject *post_quickly(PyObject *self, enum call_number number, uint32_t operation, int has_remote, int has_flags,
                           int shared, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    PyObject *context, *flags;

    if (!read_quickly(arguments, count, keywords, 1 + has_remote, has_flags, &context, &flags))
        return post_call(self, &calls[number], arguments, count, keywords);
    return post((WorkQueues *)self, operation, shared, arguments[0], has_remote ? arguments[1] : NULL, context, flags);
}

#define CALL(name, ...)                                                                                              \
    static PyObject *queues_##name(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords) \
    {                                                                                                                \
        switch (CALL_##name) {                                                                                       \
        case CALL_send:                                                                                              \
            return post_quickly(self, CALL_send, NDPY_SEND, 0, 1, 0, arguments, count, keywords);                    \
        case CALL_receive:                                                                                           \
            return post_quickly(self, CALL_receive, NDPY_RECEIVE, 0, 0, 0, arguments, count, keywords);              \
        case CALL_read:                                                                                              \
            return post_quickly(self, CALL_read, NDPY_READ, 1, 1, 0, arguments, count, keywords);                    \
        case CALL_write:                                                                                             \
            return post_quickly(self, CALL_write, NDPY_WRITE, 1, 1, 0, arguments, count, keywords);                  \
        default:                                                                                                     \
            return post_call(self, &calls[CALL_##name], arguments, count, keywords);                                 \
        }                                                                                                            \
    }
NDPY_CALLS(CALL)
#undef CALL

/* Of a shared receive queue. */
static PyObject *shared_receive(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords)
{
    return post_quickly(self, CALL_receive, NDPY_RECEIVE, 0, 0, 1, arguments, count, keywords);
}

/* ---- the type ---- */

static void queues_forget_lists(WorkQueues *queues)
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
    PyObject *posted = NULL;

    if (!PyArg_ParseTuple(arguments, "KK|O!", &provider, &native, posted_type, &posted))
        return NULL;
    queues->provider = (const struct ndpy_provider *)(uintptr_t)provider;
    Py_XINCREF(posted);
    Py_XDECREF((PyObject *)queues->posted);
    queues->posted = (Posted *)posted;
    queues_forget_lists(queues);
    guarded_attach((Guarded *)self, (void *)(uintptr_t)native);
    Py_RETURN_NONE;
}

static PyObject *queues_detach(PyObject *self, PyObject *Py_UNUSED(none))
{
    guarded_attach((Guarded *)self, NULL);
    queues_forget_lists((WorkQueues *)self);
    Py_RETURN_NONE;
}

static int queues_traverse(PyObject *self, visitproc visit, void *arg)
{
    WorkQueues *queues = (WorkQueues *)self;

    Py_VISIT((PyObject *)queues->lock);
    Py_VISIT(queues->srq);
    Py_VISIT((PyObject *)queues->posted);
    return resource_traverse(self, visit, arg);
}

static int queues_clear(PyObject *self)
{
    WorkQueues *queues = (WorkQueues *)self;

    Py_CLEAR(queues->lock);
    Py_CLEAR(queues->srq);
    Py_CLEAR(queues->posted);
    queues_forget_lists(queues);
    return resource_clear(self);
}

static void queues_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    queues_clear(self);
    resource_dealloc(self);
}

static PyGetSetDef posting_properties[] = {
    FLAG("_sinks_must_be_writable", WorkQueues, sinks_must_be_writable, NULL),
    GUARDED_PROPERTIES,
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef posting_methods[] = {
    {"receive", (PyCFunction)(void (*)(void))shared_receive, METH_FASTCALL | METH_KEYWORDS,
     "receive($self, sges, *, context=0)\n--\n\n"
     "Post memory for one message to any of the queue pairs. See QueuePair.receive().\n\n"
     "Parameters:\n"
     "    sges: a region, a slice of one, or a sequence of them, up to max_sge.\n"
     "    context: 0 to 2**64 - 1; comes back in the Completion.\n"
     "Raises:\n"
     "    QueueFullError: `depth` receives are outstanding. Take completions, then try again.\n"
     "    LimitExceededError, ForeignObjectError, ClosedError: as for QueuePair.receive().\n"},
    {"_post_elements", queues_post_elements, METH_VARARGS,
     "_post_elements($self, operation, record, elements, context, flags, remote, words, destination, /)\n--\n\n"
     "Post regions, elements, and memory that is sent inline: (address, length, 0). record: the list that keeps their "
     "memory\n"
     "alive. words: the immediate data and both operands. destination: None, or what else the request refers to."},
    {"_attach", queues_attach, METH_VARARGS,
     "_attach($self, provider, native, posted_requests=<none>, /)\n--\n\n"
     "Post to this struct ndpy_queue_pair from now on, or without posted_requests to this struct ndpy_shared_queue. "
     "The\n"
     "addresses are integers."},
    {"_detach", queues_detach, METH_NOARGS, "Forget the struct, which is freed next."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot posting_slots[] = {
    {Py_tp_doc, "A queue to which requests are posted. receive() is that of a shared receive queue."},
    {Py_tp_traverse, queues_traverse},
    {Py_tp_clear, queues_clear},
    {Py_tp_dealloc, queues_dealloc},
    {Py_tp_getset, posting_properties},
    {Py_tp_methods, posting_methods},
    {0, NULL},
};

static PyType_Spec posting_spec = {"ndpy._core.PostingQueue", sizeof(WorkQueues), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, posting_slots};

static PyMemberDef queues_members[] = {
    {"srq", T_OBJECT, offsetof(WorkQueues, srq), 0, NULL},
    {"_posted_requests", T_OBJECT_EX, offsetof(WorkQueues, posted), READONLY, "Those of _attach()."},
    {"_number", T_UINT, offsetof(WorkQueues, number), 0,
     "The provider's completions of a shared receive queue carry this number."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef queues_properties[] = {
    FLAG("_ended", WorkQueues, ended, "The connection is over; what is posted is cancelled."),
    {NULL, NULL, NULL, NULL, NULL},
};

#define CALL(name, operation, with_immediate, arguments, ...)                          \
    {#name, (PyCFunction)(void (*)(void))queues_##name, METH_FASTCALL | METH_KEYWORDS, \
     #name "($self, " arguments ")\n--\n\n" DOC_##name},

static PyMethodDef queues_methods[] = {
    NDPY_CALLS(CALL){"post", queues_post, METH_O, DOC_post},
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
    PyTypeObject *posting = add_resource_type(module, &posting_spec);

    return posting && add_type_on(module, &queues_spec, posting) ? 0 : -1;
}
