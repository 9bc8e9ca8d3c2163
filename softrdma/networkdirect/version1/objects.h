/* NetworkDirect version 1 on top of version 2's objects, with version 1's methods and arguments.
 *
 * Completion queues, queue pairs (endpoints), connectors and listeners are version 2's objects with another view. A
 * window is version 2's window unchanged. A registration is a region that the consumer does not see. Its handle is its
 * local token, so a handle is looked up and never followed. Version 1's ND_RESULT takes the place of version 2's
 * request context: it passes through the queues, and GetResults writes it.
 */
#ifndef SOFTND_VERSION1_OBJECTS_H
#define SOFTND_VERSION1_OBJECTS_H

#include "../nd_connector.h"
#include "../nd_objects.h"

struct version1_adapter {
    struct nd_adapter base;          /* first, because the other objects use it */
    HANDLE file;                     /* the adapter's file, on which all requests complete */
    struct sockaddr_storage address; /* the address it was opened with */
};

extern const struct object_view version1_completion_queue_view;
extern const struct object_view version1_endpoint_view;
extern const struct object_view version1_connector_view;
extern const struct object_view version1_listen_view;

/* The class object that DllGetClassObject gives. `out` is known to be writable. */
HRESULT version1_class_factory(REFIID iid, void **out);
/* Whether LockServer keeps the DLL loaded. */
bool version1_locked(void);
HRESULT version1_adapter_open(const struct sockaddr_storage *address, INDAdapter **out);
/* The endpoint behind a consumer's pointer if this connector created it, otherwise NULL. */
struct queue_pair *version1_endpoint_from(INDEndpoint *pointer, const struct object *owning_connector);

/* GetOverlappedResult of every object. */
HRESULT STDMETHODCALLTYPE version1_result(struct com *com, OVERLAPPED *overlapped, SIZE_T *bytes, BOOL wait);
/* As COM_OVERLAPPED_METHODS. */
#define VERSION1_OVERLAPPED_METHODS(type, cancel)                            \
    COM_METHODS(type), (HRESULT(STDMETHODCALLTYPE *)(type *))(void *)cancel, \
        (HRESULT(STDMETHODCALLTYPE *)(type *, OVERLAPPED *, SIZE_T *, BOOL))(void *)version1_result
/* A method of version 2's interface that takes the same arguments. */
#define VERSION2_METHOD(method) (void *)method

/* A size as version 2 takes it. A size above UINT32_MAX becomes UINT32_MAX, which every check refuses. */
static inline ULONG version1_size(SIZE_T size)
{
    return size > UINT32_MAX ? UINT32_MAX : (ULONG)size;
}

/* The local token in a handle; 0 for a value that cannot be a handle. */
static inline uint32_t version1_token(ND_MR_HANDLE memory)
{
    return (uintptr_t)memory > UINT32_MAX ? 0 : (uint32_t)(uintptr_t)memory;
}

/* Sets an out pointer to NULL. False if it cannot be written. */
static inline bool version1_clear(void *out)
{
    void *none = NULL;
    return guarded_copy(out, &none, sizeof none);
}

#endif
