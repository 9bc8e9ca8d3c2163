/* What all COM objects share: two reference counts, the interfaces they answer to, and the count of live objects.
 *
 * An object's class says what it is and how it ends, its view what the consumer sees of it: the two versions of
 * NetworkDirect are two views of the same classes. What is shared takes the version 2 interface for an argument and
 * looks only at the object.
 *
 * The consumer sees only the COM count, so that its last Release returns 0 whatever the provider still does with the
 * object (H.4.10). The object's memory goes with the last internal reference; the COM references together hold one.
 *
 * Locks, outermost first. A thread takes them only in this order, and holds none across a call that may block:
 *   listener, connector, stream, queue pair, shared receive queue, token table, completion queue,
 *   a source's request list, an overlapped file, timers.
 * Requests are never completed towards the consumer's OVERLAPPED under any lock but the overlapped file's.
 */
#ifndef SOFTND_OBJECT_H
#define SOFTND_OBJECT_H

#include "../nd2.h"
#include "compat.h"

#include <stdbool.h>
#include <stdint.h>

enum object_kind {
    KIND_CLASS_FACTORY,
    KIND_PROVIDER,
    KIND_ADAPTER,
    KIND_REGION,
    KIND_WINDOW,
    KIND_COMPLETION_QUEUE,
    KIND_SHARED_QUEUE,
    KIND_QUEUE_PAIR,
    KIND_CONNECTOR,
    KIND_LISTENER,
    KIND_COUNT
};

struct object;
struct adapter;

struct object_class {
    enum object_kind kind;
    void (*closed)(struct object *);   /* the consumer's last reference went */
    void (*destroy)(struct object *);  /* nobody refers to it: frees it */
};

struct object_view {
    const void *methods;
    const GUID *iid;
    const GUID *base; /* answered to as well; NULL: IUnknown only */
};

struct object {
    const void *methods; /* first: the consumer's interface pointer is the object's address */
    const struct object_class *class;
    const struct object_view *view;
    volatile LONG com_references;
    volatile LONG references;
    struct adapter *adapter; /* held by an internal reference; NULL in a provider */
};

/* With one COM reference. Counts the object as live; false when the workers cannot be started. */
bool object_start(struct object *object, const struct object_class *class, const struct object_view *view,
                  struct adapter *adapter);
void object_hold(struct object *object);
void object_drop(struct object *object);

HRESULT STDMETHODCALLTYPE object_query_interface(struct object *object, REFIID iid, void **out);
ULONG STDMETHODCALLTYPE object_add_ref(struct object *object);
ULONG STDMETHODCALLTYPE object_release(struct object *object);

/* The object behind a consumer's pointer when it has this view and is of this adapter (any when NULL), else NULL.
 * The pointer may be anything. */
struct object *object_from(const void *pointer, const struct object_view *view,
                           const struct adapter *adapter);

/* Answers ND_SUCCESS or E_NOINTERFACE, and E_POINTER when `out` cannot be written. Sets *out to NULL. */
HRESULT object_check_iid(const struct object_view *view, REFIID iid, void **out);

LONG object_live_count(void);
void object_write_statistics(void);

#define OBJECT_METHODS(type)                                                       \
    (HRESULT(STDMETHODCALLTYPE *)(type *, REFIID, void **))(void *)object_query_interface, \
        (ULONG(STDMETHODCALLTYPE *)(type *))(void *)object_add_ref,                \
        (ULONG(STDMETHODCALLTYPE *)(type *))(void *)object_release

#endif
