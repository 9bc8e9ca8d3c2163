/* What a call leaves for the next one, so that this one need not make it again. All of it is here, but for the names of
   arguments in calls.h and the last list of a batch. Each of these is here because a bar of `make bench` needs it:

     spare objects          elements, exports and leases: slicing a region, and a hit of the cache
     the last slice         slicing a region
     identities             a hit of the cache
     lists of completions   a poll of an empty queue, and 64 completions that are looked at

   The rule: what is left behind is taken only by somebody who has the interpreter's lock, and only if nobody else has
   it. Then it is like a new one in everything that a program can see.

   Compiled with NDPY_PLAIN, or for free-threaded Python, nothing is left behind: REUSES is 0. `make stress` tests the
   plain build (tests/unit/test_plain_build.py). */

#ifndef NDPY_REUSE_H
#define NDPY_REUSE_H

#ifdef NDPY_PLAIN
enum { REUSES = 0 };
#else
enum { REUSES = HAS_GIL };
#endif

/* ---- spare objects ---- */

/* Objects that were freed, for the next ones of their type. Each type has its own struct spares.

   A spare object has one reference. The garbage collector goes on tracking it, because tracking it again would cost
   more than all the rest of its making. The collector visits all objects of a generation before it sorts or moves them.
   An object that was visited is tracked anew when it is used again. So it leaves the collector's lists of garbage and
   of old objects, as a new object must. Only gc.freeze() moves objects that it has not visited.

   So tp_dealloc must not run code of others while the object is tracked and has no references. */
enum { SPARES = 64 };

/* How such an object begins. tp_traverse sets was_visited. */
typedef struct {
    PyObject_HEAD char was_visited;
} Reusable;

struct spares {
    int count;
    PyObject *objects[SPARES];
};

/* Returns an object with one reference, or NULL: then call make_reusable(). */
HOT PyObject *take_spare(struct spares *spares)
{
    if (!REUSES || !spares->count || ((Reusable *)spares->objects[spares->count - 1])->was_visited)
        return NULL;
    return spares->objects[--spares->count];
}

/* Returns a spare object, or a new one whose fields are 0. NULL with an error. */
PyObject *make_reusable(struct spares *spares, PyTypeObject *type);

/* Keeps an object without references, whose fields are 0 again. Returns 0 if there are enough of them. */
HOT int keep_spare(struct spares *spares, PyObject *object)
{
    if (!REUSES || spares->count == SPARES)
        return 0;
    Py_SET_REFCNT(object, 1);
    spares->objects[spares->count++] = object;
    return 1;
}

/* ---- slices ---- */

/* The limits of the last slice that had both of them as ints and no step, and what they mean. A program that slices in
   a loop often gives the very same objects again. */
struct last_slice {
    PyObject *start;
    PyObject *stop;
    unsigned long long offset;
    unsigned long long end;
};

extern struct last_slice last_slice;
/* Where a slice object has its limits, by its type's own table of members. 0: not known. */
extern Py_ssize_t start_offset, stop_offset, step_offset;

void find_limits(void);
void remember_limits(PyObject *slice, Py_ssize_t start, Py_ssize_t stop);

HOT PyObject *limit_of(PyObject *slice, Py_ssize_t offset)
{
    return *(PyObject **)((char *)slice + offset);
}

/* Whether a slice has the limits of the last one, and is inside. */
HOT int is_last_slice(PyObject *key, unsigned long long whole)
{
    return REUSES && Py_TYPE(key) == &PySlice_Type && step_offset && limit_of(key, start_offset) == last_slice.start &&
           limit_of(key, stop_offset) == last_slice.stop && limit_of(key, step_offset) == Py_None &&
           last_slice.end <= whole;
}

/* ---- identities ---- */

/* Returns id(object), which is often the same int as the last time. A dict finds a number faster if it is the very
   object that is the key. */
PyObject *identity(PyObject *object);

#endif
