/* The COM side of the objects: what the consumer holds.
 *
 * The consumer's interface pointer is the address of a struct com. For an object that the engine allocates, it is the
 * beginning of `face` and is freed with the object. Adapters, connectors, listeners, providers and class factories
 * embed both a struct com, at their beginning, and a struct object, whose `face` is NULL.
 *
 * A view is what the consumer sees of an object. The two versions of NetworkDirect are two views of the same objects.
 * Shared methods take the version 2 interface as argument and use only the object.
 *
 * The consumer sees only the COM count, so its last Release returns 0 even while the engine still uses the object
 * (H.4.10). All COM references together hold one reference of the object.
 */
#ifndef SOFTND_COM_H
#define SOFTND_COM_H

#include "compat.h"
#include "object.h"
#include "overlapped.h"
#include "version2.h"

struct object_view {
    const void *methods;
    const GUID *iid;
    const GUID *base; /* a second interface that it answers to; NULL: only IUnknown */
};

struct com {
    const void *methods; /* first member */
    const struct object_view *view;
    volatile LONG references;
    struct object *object;
    struct source source; /* not opened if the object accepts no overlapped requests */
};

/* One COM reference. `com` is zeroed memory. */
void com_start(struct com *com, const struct object_view *view);
/* The object exists now. Its source begins to accept requests, if it was opened. */
void com_attach(struct com *com, struct object *object);
/* The face of an object of the engine: `size` zeroed bytes that begin with a struct com, which was started. NULL if
 * memory is short. */
void *com_new(size_t size, const struct object_view *view);
/* Opens its source. `face` is what com_new gave, perhaps NULL. */
HRESULT com_open(void *face, HANDLE file);
/* The end of a creation: hands out the face with its object, or frees it if the status is none of success. */
HRESULT com_finish(void *face, HRESULT status, struct object *object, void **out);
/* Frees a face that got no object. */
void com_discard(void *face);

HRESULT STDMETHODCALLTYPE com_query_interface(struct com *com, REFIID iid, void **out);
ULONG STDMETHODCALLTYPE com_add_ref(struct com *com);
ULONG STDMETHODCALLTYPE com_release(struct com *com);
/* CancelOverlappedRequests and GetOverlappedResult of objects that do nothing else there. */
HRESULT STDMETHODCALLTYPE com_cancel(struct com *com);
HRESULT STDMETHODCALLTYPE com_result(struct com *com, OVERLAPPED *overlapped, BOOL wait);

/* What is behind a consumer's pointer if it has this view and belongs to this adapter (NULL: to any), otherwise NULL.
 * The pointer may have any value. */
struct com *com_from(const void *pointer, const struct object_view *view, const struct adapter *adapter);

/* Answers ND_SUCCESS or E_NOINTERFACE and sets *out to NULL. Answers E_POINTER if `out` cannot be written. */
HRESULT com_check_iid(const struct object_view *view, REFIID iid, void **out);

#define COM_METHODS(type)                                                                \
    (HRESULT(STDMETHODCALLTYPE *)(type *, REFIID, void **))(void *) com_query_interface, \
        (ULONG(STDMETHODCALLTYPE *)(type *))(void *)com_add_ref,                         \
        (ULONG(STDMETHODCALLTYPE *)(type *))(void *)com_release
/* The same for those that accept overlapped requests. */
#define COM_OVERLAPPED_METHODS(type, cancel)                                 \
    COM_METHODS(type), (HRESULT(STDMETHODCALLTYPE *)(type *))(void *)cancel, \
        (HRESULT(STDMETHODCALLTYPE *)(type *, OVERLAPPED *, BOOL))(void *)com_result

#endif
