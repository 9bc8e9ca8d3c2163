/* NetworkDirect version 1 over the objects of version 2: other methods and other arguments for the same things.
 *
 * Completion queues, queue pairs (endpoints), connectors and listeners are the engine's objects with a view of their
 * own; a window is version 2's as it is. A registration is a region that the consumer does not see; its handle is its
 * local token, so that a handle is looked up and never followed. What a request's context is in version 2, the
 * ND_RESULT is here: it goes through the queues unseen and is written by GetResults.
 */
#ifndef SOFTND_V1_H
#define SOFTND_V1_H

#include "../../nd1.h"
#include "../adapter.h"
#include "../completion_queue.h"
#include "../connector.h"
#include "../guarded_copy.h"
#include "../queue_pair.h"

struct nd1_adapter {
    struct adapter adapter; /* first: what the other objects know of it */
    struct source source;
    HANDLE file; /* on which everything completes; the adapter's own */
    struct sockaddr_storage address; /* that it was opened with */
    volatile LONG64 connects;        /* for SOFTND_CONNECT_TIMEOUTS */
};

extern const struct object_view nd1_completion_queue_view;
extern const struct object_view nd1_endpoint_view;
extern const struct object_view nd1_connector_view;
extern const struct object_view nd1_listen_view;

/* The class object that DllGetClassObject gives; `out` may be written. */
HRESULT nd1_class_factory(REFIID iid, void **out);
/* Whether LockServer keeps the DLL. */
bool nd1_locked(void);
HRESULT nd1_adapter_open(const struct sockaddr_storage *address, INDAdapter **out);
/* The endpoint behind a consumer's pointer when this connector made it, else NULL. */
struct queue_pair *nd1_endpoint_from(INDEndpoint *pointer, const struct object *maker);

/* GetOverlappedResult of every object. */
HRESULT nd1_overlapped_result(OVERLAPPED *overlapped, SIZE_T *bytes, BOOL wait);

/* Version 2's number for a size; what is too large for one is too large for everything. */
static inline ULONG nd1_size(SIZE_T size)
{
    return size > UINT32_MAX ? UINT32_MAX : (ULONG)size;
}

/* The local token that a handle is; 0 for what can be none. */
static inline uint32_t nd1_token(ND_MR_HANDLE memory)
{
    return (uintptr_t)memory > UINT32_MAX ? 0 : (uint32_t)(uintptr_t)memory;
}

/* Sets an out pointer to NULL; false when it cannot be written. */
static inline bool nd1_clear(void *out)
{
    void *none = NULL;
    return guarded_copy(out, &none, sizeof none);
}

#endif
