/* What a hit in the registration cache and a lease have in common. */

#ifndef NDPY_LEASE_H
#define NDPY_LEASE_H

#include "core.h"

/* A registered region. */
typedef struct {
    PyObject_HEAD long long uses; /* how many leases and exposures it has */
    long long used;               /* the number of its last use */
    SHARED char cached;           /* whether a look-up may still find it */
} Entry;

/* A buffer that was looked up before, and its entry. */
typedef struct {
    PyObject_HEAD PyObject *entry;
    PyObject *changed; /* a function that tells whether the watched memory has changed, or None */
    PyObject *watch;   /* its argument */
    unsigned long long start;
    unsigned long long length;
    long rights;      /* a lease may ask for these rights only */
    char is_exported; /* whether a lease needs an export of the buffer, whose memory must be the same as before */
} KnownBuffer;

/* The part of a cache that a hit needs. */
typedef struct {
    RESOURCE_HEAD
    /* A dict of KnownBuffer. A key is the buffer's identity, (address, length), or ((address, length), True) if raw. */
    PyObject *known_buffers;
    long long uses;
    long long hits;
    SHARED char over_bounds; /* whether more is registered than the bounds allow */
} Cache;

/* A lease or an exposure. range: a KnownBuffer, or an object with an entry. view: what keeps the memory in place; NULL
   or None after release. was_finalized: an object is finalized once. */
typedef struct {
    Reusable head;
    PyObject *cache;
    PyObject *range;
    PyObject *SHARED view;
    char was_finalized;
} Lease;

extern PyTypeObject *entry_base_type, *known_base_type, *cache_base_type;
/* The classes of ndpy/cache, once an object of them was seen. */
extern PyTypeObject *usual_known_type, *usual_cache_type;
/* Guards `uses` and `used` of all entries, and the counts of all caches. */
#ifdef Py_GIL_DISABLED
extern PyMutex uses_mutex;
#endif

/* Makes a lease. Steals the references to `range` and `view`. Returns NULL with an error, and steals none. */
Lease *lease_new(Cache *cache, KnownBuffer *range, PyObject *view);
/* Takes back a lease that nobody has seen. Its references to the range and the view are the caller's again. */
void undo_lease(Lease *lease);
int add_lease_type(PyObject *module);

#endif
