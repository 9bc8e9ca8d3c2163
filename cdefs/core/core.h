/* The extension module ndpy._core: what its files share. It uses the limited API only, so one build serves every
   CPython from 3.10 on. Free-threaded CPython has no limited API before 3.15, so a build for it serves that version
   alone. */

#ifndef NDPY_CORE_H
#define NDPY_CORE_H

#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

#include "../hot.h"
#include "../operations.h"

#include "../ndpy_abi.h"
#include "lock.h"
#include "reuse.h"

/* ---- module.c ---- */

/* Frees the object itself, and gives back the reference to its type. */
void free_object(PyObject *self);
/* The same for an object that the garbage collector tracks. */
void free_tracked(PyObject *self);
/* Creates a type, whose objects can be neither copied nor pickled, and adds it to the module. Returns NULL with an
 * error. */
PyTypeObject *add_type(PyObject *module, PyType_Spec *spec);
/* The same, derived from `base`. */
PyTypeObject *add_type_on(PyObject *module, PyType_Spec *spec, PyTypeObject *base);
/* The same for a type of values, whose objects can be. */
PyTypeObject *add_value_type(PyObject *module, PyType_Spec *spec);

/* Arguments of a method that Python calls with METH_FASTCALL | METH_KEYWORDS. names: `count` interned names. The first
   `positional` ones may also be given by position. An argument that the caller omits stays NULL. Returns 0, or -1 with
   an error. */
int sort_arguments(const char *function, PyObject *const *arguments, Py_ssize_t given, PyObject *keywords,
                   PyObject *const *names, int positional, int count, PyObject **out);
PyObject *interned(const char *name);
/* What a module has under a name. Returns NULL with an error. */
PyObject *imported(const char *module, const char *name);
/* A bytearray of zeros, and a memoryview of one as numbers of this format. Return NULL with an error. */
PyObject *bytes_new(size_t size);
PyObject *view_as(PyObject *bytes, const char *format);

/* Whether an object is of a type or of a subtype. usual: a type that was one, or NULL; its reference is never given
 * back. */
HOT int is_of(PyObject *object, PyTypeObject *type, PyTypeObject **usual)
{
    if (Py_TYPE(object) == *usual)
        return 1;
    if (!PyObject_TypeCheck(object, type))
        return 0;
    if (REUSES && !*usual)
        *usual = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(object));
    return 1;
}

/* As PyDict_GetItemWithError(), but returns a new reference, which another thread cannot take away meanwhile. */
HOT PyObject *dict_get(PyObject *dict, PyObject *key)
{
#ifdef Py_GIL_DISABLED
    PyObject *found = NULL;

    PyDict_GetItemRef(dict, key, &found);
    return found;
#else
    return Py_XNewRef(PyDict_GetItemWithError(dict, key));
#endif
}

/* Whether an object can be used. defunct: its field of that name, which another thread may change. */
HOT int is_usable(PyObject *defunct)
{
    return !defunct || defunct == Py_None;
}
/* Raises what a field `defunct` makes. Returns NULL. */
PyObject *raise_defunct(PyObject *object, PyObject *SHARED const *defunct);
/* Raises an exception object, and gives back the reference to it. NULL: an exception is raised already. */
void raise_made(PyObject *error);

/* The row of a property that is a SHARED char of the object and a bool of Python. */
#define FLAG(name, type, field, doc) {name, get_flag, set_flag, doc, (void *)offsetof(type, field)}

/* offset: of the char. */
PyObject *get_flag(PyObject *self, void *offset);
int set_flag(PyObject *self, PyObject *value, void *offset);

/* ---- memory.c ---- */

/* A scatter/gather element of a region. export: what a lease keeps the buffer in place by, or NULL. */
typedef struct {
    Reusable head;
    PyObject *region;
    PyObject *export;
    unsigned long long address;
    unsigned long long length;
    unsigned long long token;
} Element;

/* Memory of a peer. sliced_from: the whole memory that this is a piece of, or NULL if it is no slice. */
typedef struct Remote {
    PyObject_HEAD struct Remote *sliced_from;
    unsigned long long address;
    unsigned long long length;
    unsigned long long token;
} Remote;

extern PyTypeObject *element_type, *remote_type;
/* ndpy.errors.ElementRangeError. */
extern PyObject *range_error;

/* Makes an element. Returns NULL with an error. */
PyObject *element_new(PyObject *region, unsigned long long address, unsigned long long length,
                      unsigned long long token);
/* Finds the offset and the length of a slice of `whole` bytes, which `what` names. Unlike Python's slices, it must be
   inside: missing bytes cannot be sent. Returns 0, or -1 with an error. */
int find_bounds(PyObject *key, unsigned long long whole, const char *what, unsigned long long *offset,
                unsigned long long *length);
/* The element of region[key]. */
PyObject *region_slice(PyObject *self, PyObject *key);

/* ---- exports.c ---- */

/* A Py_buffer. The limited API has had it since 3.11, with the same fields as before. */
struct buffer {
    void *address;
    PyObject *object;
    Py_ssize_t length;
    Py_ssize_t item_size;
    int is_readonly;
    int dimensions;
    char *format;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    Py_ssize_t *suboffsets;
    void *internal;
};

/* The slot of a type that exports buffers, which the limited API names since 3.11. */
enum { SLOT_GET_BUFFER = 1 };

/* Keeps the memory of a buffer in place. */
typedef struct {
    Reusable head;
    struct buffer buffer;
} Export;

extern PyTypeObject *export_type;

/* Exports a buffer whose bytes lie one after the other, in the order of its elements. Returns NULL with an error. */
Export *export_new(PyObject *object);
/* Returns 1 with the memory of a memoryview. 0 if it is not writable, or if plain_view() of ndpy/objects/memory.py has
 * to judge it. */
int plain_memory(PyObject *view, void **address, Py_ssize_t *length);

/* What the slot of an object with such bytes does. Returns 0, or -1 with an error. */
int export_bytes(PyObject *object, struct buffer *buffer, int flags, void *address, Py_ssize_t length, int is_readonly);

/* ---- resource.c ---- */

/* A place in a circle of open objects. Both are NULL outside of a circle. */
struct link {
    struct link *next;
    struct link *previous;
};

/* The states of an object's life. See resource.c. */
enum life { NEW, OPEN, CLOSING, CLOSED, INHERITED };

/* How an object begins that requests refer to. adapter: whose it is. defunct: None while it can be used. */
#define USABLE_HEAD                  \
    PyObject_HEAD PyObject *adapter; \
    PyObject *SHARED defunct;

#ifdef Py_GIL_DISABLED
#define WEAK PyObject *weak;
#else
#define WEAK
#endif

/* How an object begins that has close(). owner: keeps memory in place that the adapter may use while it is open. life:
   one of enum life. link: its place in the adapter's circle. lifetime: the lock of close(), made when it is needed.
   weak: a weak reference to it, by which other threads find it in the circle, where it stays while it is freed. */
#define RESOURCE_HEAD          \
    USABLE_HEAD                \
    PyObject *SHARED owner;    \
    SHARED char life;          \
    struct link link;          \
    Lock *lifetime;            \
    unsigned long long serial; \
    WEAK

typedef struct {
    USABLE_HEAD
} Usable;

typedef struct {
    RESOURCE_HEAD
} Resource;

/* may_have_some: whether an object may wait that was dropped without close(). */
typedef struct {
    PyObject_HEAD SHARED char may_have_some;
} Orphans;

extern PyTypeObject *resource_type, *orphans_type;
/* ndpy.errors.ClosedError. */
extern PyObject *closed_error;
/* Guards the circles of open objects, and the counts of those that are being made. */
#ifdef Py_GIL_DISABLED
extern PyMutex circle_mutex;
#endif

/* Makes an object that is not open. Returns NULL with an error. */
PyObject *resource_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords);
/* What a type that extends the one of resources calls in functions of its own. */
int resource_traverse(PyObject *self, visitproc visit, void *arg);
int resource_clear(PyObject *self);
void resource_dealloc(PyObject *self);
/* The getter of _defunct. A type may have a setter of its own. */
PyObject *get_defunct(PyObject *self, void *none);
/* As add_type(), for such a type. */
PyTypeObject *add_resource_type(PyObject *module, PyType_Spec *spec);

/* The provider's object exists now. Runs no Python code. */
void resource_open(Resource *self);
void link_out(struct link *link);
/* Gives the caller's reference to a field of an object. */
void replace(PyObject *object, PyObject * SHARED * field, PyObject *reference);
/* Returns a new reference to an object in a circle, or NULL without an error if it is being freed. Called with
 * circle_mutex. */
PyObject *find_resource(struct link *link);

/* ---- adapters.c ---- */

enum { PLAIN_RIGHTS = 16 };

/* children: the first link of a circle of the open objects that were made from it. making: how many are being made.
   device: NULL, or of a protection domain the adapter that it was made from. registrar: how regions.c registers; NULL
   if it cannot. rights: the provider's, for every ndpy.Access below PLAIN_RIGHTS. */
typedef struct {
    RESOURCE_HEAD
    PyObject *device;
    PyObject *orphans;
    PyObject *region_class;
    const struct ndpy_registrar *registrar;
    void *domain;
    unsigned long long longest;
    uint32_t rights[PLAIN_RIGHTS];
    struct link children;
    Py_ssize_t making;
} Adapter;

extern PyTypeObject *adapter_type;

/* Counts an object that is being made, which keeps the adapter open. Returns whether the adapter makes any. */
int begin_making(Adapter *adapter);
void end_making(Adapter *adapter);

/* ---- guarded.c ---- */

/* How an object begins whose native object a lock guards. native: the provider's, from attach() to detach(). is_ready:
   the object can be used, and has a lock and a native object. */
#define GUARDED_HEAD     \
    RESOURCE_HEAD        \
    Lock *SHARED lock;   \
    void *SHARED native; \
    SHARED char is_ready;

typedef struct {
    GUARDED_HEAD
} Guarded;

int guarded_set_defunct(PyObject *self, PyObject *value, void *none);
PyObject *guarded_get_lock(PyObject *self, void *none);
int guarded_set_lock(PyObject *self, PyObject *value, void *none);

#define GUARDED_PROPERTIES                                                             \
    {"_defunct", get_defunct, guarded_set_defunct, NULL, NULL},                        \
    {                                                                                  \
        "_lock", guarded_get_lock, guarded_set_lock, "Guards the native object.", NULL \
    }

/* native: NULL to detach. */
void guarded_attach(Guarded *self, void *native);
/* Takes the lock, whether or not the object can be used. Returns 0, or -1 with an error. */
int guarded_lock(Guarded *self);
/* See guarded_enter(). */
int guarded_wait(Guarded *self);

/* Takes the lock of an object that is ready. Returns 0, or -1 with an error. */
HOT int guarded_enter(Guarded *self)
{
    return HAS_GIL && self->is_ready && lock_take(self->lock) ? 0 : guarded_wait(self);
}

/* ---- references.c ---- */

/* Whether requests of an adapter's queues may refer to an object. Every way of posting asks this, with the lock of the
 * queue. */
HOT int may_refer_to(const PyObject *adapter, const Usable *used)
{
    return is_usable(used->defunct) && used->adapter == adapter;
}

/* Where datagrams go. operands: those of struct ndpy_remote. */
typedef struct {
    RESOURCE_HEAD
    unsigned long long operands[2];
} Destination;

extern PyTypeObject *destination_type;
/* Guards `defunct` of all destinations. Whoever posts to one has it from the check to the provider's answer, so the
   handle is there: its close() marks the destination first. */
#ifdef Py_GIL_DISABLED
extern PyMutex destinations_mutex;
#endif

/* Beside the numbers of enum ndpy_refusal and of the providers: an exception was raised, or the request refers to
   something that it may not refer to. */
enum { RAISED = -1000, UNUSABLE = -1001 };

/* ---- regions.c ---- */

/* owner: an export of the buffer. writable: whether the adapter may write to it. elsewhere: whether the addresses of
   its elements are not those of its memory in this process. handle: the provider's object. bindings: a set, or NULL for
   none. */
typedef struct {
    RESOURCE_HEAD
    unsigned long long address;
    unsigned long long length;
    unsigned long long local_token;
    SHARED char writable;
    char elsewhere;
    PyObject *buffer;
    PyObject *access;
    PyObject *bindings;
    unsigned long long handle;
    unsigned long long remote_token;
} Region;

extern PyTypeObject *region_type;

/* The method register() of adapters. */
PyObject *adapter_register(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *keywords);
extern const char register_doc[];
/* Closes a region without Python, with its lock. Returns whether: Python has to do it otherwise. */
int region_deregister(Region *region);

/* A piece of memory that a request uses, as the program gave it. region: borrowed. */
struct piece {
    Region *region;
    unsigned long long address;
    unsigned long long length;
    unsigned long long token;
};

/* Reads an element or a region. Returns 0 if it is neither. */
int read_piece(PyObject *object, struct piece *out);
/* Reads the elements of a request: elements, regions, and tuples (address, length, token) of memory that is sent
   inline. Returns 0, a refusal, RAISED, or UNUSABLE with the region in *unusable, borrowed. */
int read_pieces(const PyObject *adapter, unsigned long long largest_token, PyObject *list, struct ndpy_element *out,
                uint32_t count, PyObject **unusable);
/* Raises why a queue's requests may not refer to an object. Returns -1. Returns 0 if they may by now, because a close()
   in another thread has failed. Called without the lock. */
int refuse_reference(PyObject *queue, PyObject *object);

/* ---- records.c ---- */

/* What some requests use: any object for one, an element for several in a row, or a BatchList. left: how many of them
   have not ended. */
struct record {
    PyObject *object;
    uint32_t requests;
    uint32_t left;
};

/* What the requests of one work queue use, oldest first. count: of the items. The capacity is a power of 2. mutex:
   guards all of it. Whoever posts has it from the record to the provider's answer, so whoever polls never sees the
   record of a refused request. */
struct records {
    MUTEX(mutex)
    struct record *items;
    size_t first;
    size_t count;
    size_t capacity;
};

/* The requests of a queue pair that the adapter still works on. watched: its completions all go to _collect_one() in
 * Python. */
typedef struct {
    PyObject_HEAD PyObject *queue_pair; /* a weak reference */
    struct records initiator;
    struct records receive;
    PyObject *SHARED stored; /* NULL, or a dict; see ndpy/objects/completion.py */
    int stored_shared;
    SHARED char failed;
    SHARED char watched;
} Posted;

extern PyTypeObject *posted_type;

/* The records of the work queue that an operation goes to. */
HOT struct records *records_of(Posted *posted, uint32_t operation)
{
    return operation == NDPY_RECEIVE ? &posted->receive : &posted->initiator;
}

int records_grow(struct records *records);

HOT struct record *record_at(const struct records *records, size_t place)
{
    return &records->items[(records->first + place) & (records->capacity - 1)];
}

/* Call this only if there is one. */
HOT struct record *record_oldest(const struct records *records)
{
    return &records->items[records->first];
}

/* Adds a record of some requests as the newest one. Returns 0, or -1 with an error. */
HOT int records_push(struct records *records, PyObject *object, uint32_t requests)
{
    if (records->count == records->capacity && records_grow(records) < 0)
        return -1;
    *record_at(records, records->count++) = (struct record){Py_NewRef(object), requests, requests};
    return 0;
}

/* Adds a request of one element as the newest one. Returns 0, or -1 with an error. */
HOT int records_push_element(struct records *records, PyObject *element)
{
    struct record *newest = records->count ? record_at(records, records->count - 1) : NULL;

    if (!newest || newest->object != element)
        return records_push(records, element, 1);
    newest->requests++;
    newest->left++;
    return 0;
}

/* Takes the newest request out. Returns its record, which the caller owns. */
HOT PyObject *records_withdraw(struct records *records)
{
    struct record *newest = record_at(records, records->count - 1);

    if (newest->left > 1) {
        newest->requests--;
        newest->left--;
        return Py_NewRef(newest->object);
    }
    records->count--;
    return newest->object;
}

/* Takes the oldest record out, with all of its requests. The caller owns it. */
HOT PyObject *records_take(struct records *records)
{
    PyObject *object = record_oldest(records)->object;

    records->first = (records->first + 1) & (records->capacity - 1);
    records->count--;
    return object;
}

/* ---- batch.c ---- */

/* The requests of a batch as the provider gets them, for one queue pair. They are posted any number of times, and never
   change. pool: a ListPool. records: a tuple of what each request uses. */
typedef struct {
    PyObject_HEAD PyObject *pool;
    PyObject *records;
    uint64_t *numbers; /* those of the batch's columns, one after the other; the contexts come first */
    struct ndpy_list *native;
    uint32_t count;
    uint32_t operation; /* NDPY_RECEIVE, or an operation of the other queue */
} BatchList;

/* Whose lists they are. native: NULL once the queue pair has gone. mutex: guards which lists are in use, and `native`.
   batches: NULL, or a set of weak references to the batches that have one of the lists. */
typedef struct {
    PyObject_HEAD MUTEX(mutex) const struct ndpy_provider *provider;
    struct ndpy_queue_pair *native;
    PyObject *batches;
} ListPool;

extern PyTypeObject *batch_list_type, *list_pool_type, *batch_type;

/* Returns NULL with an error. */
PyObject *pool_new(const struct ndpy_provider *provider, struct ndpy_queue_pair *native);
/* The queue pair goes: its batches forget their lists for it. Those that are in use outlive it. Called with the queue
 * pair's lock. */
void pool_close(ListPool *pool);

/* ---- completion.c ---- */

/* context, status: fields that the interpreter reads without a call. details: the bytes of a struct ndpy_details, or
   NULL. */
typedef struct {
    PyObject_HEAD PyObject *context;
    PyObject *status;
    PyObject *posted;
    PyObject *details;
    struct ndpy_completion entry;
} Completion;

extern PyTypeObject *completion_type;

/* Makes a Completion. Returns NULL with an error. */
PyObject *completion_new(const struct ndpy_completion *entry, PyObject *posted);
/* Makes a Completion that nobody else has into another one. Returns 0, or -1 with an error. */
int completion_change(Completion *completion, const struct ndpy_completion *entry, PyObject *posted);
/* The same. Many completions have the objects of the one before. */
HOT int completion_renew(Completion *completion, const struct ndpy_completion *entry, PyObject *posted)
{
    if (completion->entry.context != entry->context || completion->entry.status != entry->status ||
        completion->posted != posted || completion->details)
        return completion_change(completion, entry, posted);
    completion->entry = *entry;
    return 0;
}
PyObject *entry_to_tuple(const struct ndpy_completion *entry);
/* The struct ndpy_details in these bytes, if it has this one of enum ndpy_detail. Otherwise NULL. */
const struct ndpy_details *details_with(PyObject *bytes, uint32_t kind);

/* ---- timeouts.c ---- */

/* Reads how many seconds something lasts: 0 or more, infinite for ever. name: of the parameter, for the error. Returns
   0, or -1 with an error: it is no number, or not a number. */
int read_seconds(PyObject *value, const char *name, double *seconds);

/* Each adds the types and functions of its file. Return 0, or -1 with an error. */
int add_memory(PyObject *module);
int add_references(PyObject *module);
int add_locks(PyObject *module);
int add_timeouts(PyObject *module);
int add_records(PyObject *module);
int add_calls(PyObject *module);
int add_batches(PyObject *module);
int add_completion_arrays(PyObject *module);

int add_completions(PyObject *module);
int add_work_queues(PyObject *module);
int add_completion_queues(PyObject *module);
int add_exports(PyObject *module);
int add_arrays(PyObject *module);
int add_leases(PyObject *module);
int add_resources(PyObject *module);
int add_adapters(PyObject *module);
int add_regions(PyObject *module);

#endif
