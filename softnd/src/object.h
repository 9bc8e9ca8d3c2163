/* What all COM objects share: two reference counts, their interfaces, and the count of live objects.
 *
 * An object's class says what it is and how it ends. Its view is what the consumer sees of it. The two versions of
 * NetworkDirect are two views of the same classes. Shared methods take the version 2 interface as argument and use
 * only the object.
 *
 * The consumer sees only the COM count, so its last Release returns 0 even while the provider still uses the object
 * (H.4.10). The memory is freed with the last internal reference. All COM references together hold one internal
 * reference.
 *
 * Locks, outermost first. A thread takes them only in this order. It holds none across a call that may block:
 *   listener, connector, stream, queue pair, shared receive queue, token table, completion queue,
 *   a source's request list, an overlapped file, timers.
 * A request completes towards the consumer's OVERLAPPED under the overlapped file's lock and no other.
 */
#ifndef SOFTND_OBJECT_H
#define SOFTND_OBJECT_H

#include "../version2.h"
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
    void (*closed)(struct object *);   /* the consumer released its last reference */
    void (*destroy)(struct object *);  /* no reference is left: frees the object */
};

struct object_view {
    const void *methods;
    const GUID *iid;
    const GUID *base; /* a second interface that it answers to; NULL: only IUnknown */
};

struct object {
    const void *methods; /* first member: the consumer's interface pointer is the object's address */
    const struct object_class *class;
    const struct object_view *view;
    volatile LONG com_references;
    volatile LONG references;
    struct adapter *adapter; /* an internal reference holds it; NULL in a provider */
};

/* The object gets one COM reference and counts as live. False if the workers cannot be started. */
bool object_start(struct object *object, const struct object_class *class, const struct object_view *view,
                  struct adapter *adapter);
void object_hold(struct object *object);
void object_drop(struct object *object);

HRESULT STDMETHODCALLTYPE object_query_interface(struct object *object, REFIID iid, void **out);
ULONG STDMETHODCALLTYPE object_add_ref(struct object *object);
ULONG STDMETHODCALLTYPE object_release(struct object *object);

/* The object behind a consumer's pointer if it has this view and belongs to this adapter (NULL: to any), otherwise
 * NULL. The pointer may have any value. */
struct object *object_from(const void *pointer, const struct object_view *view,
                           const struct adapter *adapter);

/* Answers ND_SUCCESS or E_NOINTERFACE and sets *out to NULL. Answers E_POINTER if `out` cannot be written. */
HRESULT object_check_iid(const struct object_view *view, REFIID iid, void **out);

LONG object_live_count(void);
void object_write_statistics(void);

#define OBJECT_METHODS(type)                                                       \
    (HRESULT(STDMETHODCALLTYPE *)(type *, REFIID, void **))(void *)object_query_interface, \
        (ULONG(STDMETHODCALLTYPE *)(type *))(void *)object_add_ref,                \
        (ULONG(STDMETHODCALLTYPE *)(type *))(void *)object_release

#endif
