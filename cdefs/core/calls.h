/* The methods that post operations, of QueuePair and of Batch, and their arguments. NDPY_CALLS() in ../operations.h has
   them. */

#ifndef NDPY_CALLS_H
#define NDPY_CALLS_H

#include "core.h"

/* The arguments that they have. */
enum argument {
    SGES,
    REMOTE,
    DESTINATION,
    IMMEDIATE,
    CONTEXT,
    FLAGS,
    COMPARE,
    SWAP,
    ADD,
    VALUE,
    KIND,
    WHOLE_REGION,
    ARGUMENTS
};

#define CALL(name, ...) CALL_##name,
enum call_number { NDPY_CALLS(CALL) CALLS };
#undef CALL

enum { MOST_ARGUMENTS = 6 };

/* required: how many come first that a caller has to give. positional: how many may be given by position. kinds: of
   enum argument. names: interned. */
struct call {
    const char *name;
    const char *arguments;
    uint32_t operation;
    uint32_t with_immediate;
    int required;
    int positional;
    int count;
    int kinds[MOST_ARGUMENTS];
    PyObject *names[MOST_ARGUMENTS];
};

extern struct call calls[CALLS];
extern const struct operation operations[];

/* What a caller has given. All objects are borrowed, and NULL if they are absent. sges is absent too if the operation
   has no elements. remote: the memory that remote_object stands for, immediate data and operands. */
struct given {
    uint32_t operation;
    struct ndpy_remote remote;
    PyObject *sges;
    PyObject *remote_object;
    PyObject *destination;
    PyObject *context;
    PyObject *flags;
};

/* Reads all arguments but context and flags. queue: the queue pair, or NULL for a batch. Returns 0, or -1 with an
 * error.
 */
int read_call(const struct call *call, PyObject *queue, PyObject *const *arguments, Py_ssize_t count,
              PyObject *keywords, struct given *out);

/* Whether the adapter would write to memory, and to memory without the right to that: a region has it or not. */
HOT uint32_t flags_of_memory(uint32_t operation, int is_writable)
{
    return is_writable ? 0 : operations[operation].flags & NDPY_UNWRITABLE;
}

/* Whether these are more bytes than the peer's memory has that an operation names. */
HOT int exceeds_remote(uint32_t operation, unsigned long long length, const struct ndpy_remote *remote)
{
    return operations[operation].traits & NAMES_REMOTE && length > remote->length;
}

/* The class of ndpy/objects/memory.py, once an object of it was seen. */
extern PyTypeObject *usual_remote_type;

/* Reads a RemoteMemory. Returns 0, or -1 with an error. */
HOT int read_remote(PyObject *object, struct ndpy_remote *out)
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

/* ---- the quick way ---- */

/* Where the named arguments of a call are, counted from the first named one; -1: absent. A call passes the same tuple
   of names each time. */
struct options {
    PyObject *names;
    int context;
    int flags;
    int leading; /* how many names there are, if they are context and flags in this order; else 0 */
};

/* The latest ones, the last one first. The interpreter's lock guards them. */
enum { KNOWN_OPTIONS = 4 };
extern struct options known_options[KNOWN_OPTIONS];

/* Makes the options of these names the first ones. Returns NULL if there are other names than context and flags. */
const struct options *find_other_options(PyObject *names);

/* Finds the objects of a call that has its required arguments by position, and only context and flags by name. Returns
   0 for any other one: read_call() reads it. The numbers are constants in each caller. */
HOT int read_quickly(PyObject *const *arguments, Py_ssize_t count, PyObject *keywords, int required, int has_flags,
                     PyObject **context, PyObject **flags)
{
    const struct options *options;

    *context = *flags = NULL;
    if (count != required)
        return 0;
    if (!keywords)
        return 1;
    if (!REUSES)
        return 0;
    options = known_options[0].names == keywords ? &known_options[0] : find_other_options(keywords);
    if (!options || (!has_flags && options->flags >= 0))
        return 0;
    if (options->leading) {
        *context = arguments[required];
        if (has_flags && options->leading == 2)
            *flags = arguments[required + 1];
        return 1;
    }
    if (options->context >= 0)
        *context = arguments[required + options->context];
    if (has_flags && options->flags >= 0)
        *flags = arguments[required + options->flags];
    return 1;
}

#endif
