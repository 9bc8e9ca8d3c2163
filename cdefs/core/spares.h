/* Objects that were freed, for the next ones of their type. Each type has its own struct spares.

   A spare object has one reference. The garbage collector goes on tracking it, because tracking it again would cost
   more than all the rest of its making. The collector visits all objects of a generation before it sorts or moves them.
   An object that was visited is tracked anew when it is used again. So it leaves the collector's lists of garbage and
   of old objects, as a new object must. Only gc.freeze() moves objects that it has not visited.

   So tp_dealloc must not run code of others while the object is tracked and has no references.

   The interpreter's lock guards all of this. Free-threaded Python has spares of its own for each thread, so there are
   none here. */

#ifndef NDPY_SPARES_H
#define NDPY_SPARES_H

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
    if (!HAS_GIL || !spares->count || ((Reusable *)spares->objects[spares->count - 1])->was_visited)
        return NULL;
    return spares->objects[--spares->count];
}

/* Returns a spare object, or a new one whose fields are 0. NULL with an error. */
PyObject *make_reusable(struct spares *spares, PyTypeObject *type);

/* Keeps an object without references, whose fields are 0 again. Returns 0 if there are enough of them. */
HOT int keep_spare(struct spares *spares, PyObject *object)
{
    if (!HAS_GIL || spares->count == SPARES)
        return 0;
    Py_SET_REFCNT(object, 1);
    spares->objects[spares->count++] = object;
    return 1;
}

#endif
