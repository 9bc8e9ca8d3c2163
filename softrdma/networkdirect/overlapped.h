/* Overlapped files and the requests that complete on them (section C).
 *
 * The consumer's handle is the reading end of a private pipe. Accepting a request marks its OVERLAPPED as pending and
 * resets its event; no I/O is issued. To complete the request, a read of one byte is started with the consumer's
 * OVERLAPPED. A byte written to the other end completes the read (success), or the read is canceled (failure). The
 * system then does what it does for any request: it sets the event and the low bit, and queues a packet with the
 * consumer's key.
 *
 * The NetworkDirect status is kept in the OVERLAPPED's Offset, which pipes ignore. So any object can find it through
 * the structure (C.4.8).
 *
 * Locks, outermost first: a source's request list, an overlapped file. A request completes towards the consumer's
 * OVERLAPPED under the overlapped file's lock and no other.
 */
#ifndef SOFTND_OVERLAPPED_H
#define SOFTND_OVERLAPPED_H

#include "object.h"
#include "transport.h"
#include "version2.h"

struct nd_adapter;
struct overlapped_file;
struct source;

enum request_kind {
    REQUEST_REGION,
    REQUEST_NOTIFY,
    REQUEST_CONNECT,
    REQUEST_COMPLETE_CONNECT,
    REQUEST_ACCEPT,
    REQUEST_NOTIFY_DISCONNECT,
    REQUEST_DISCONNECT,
    REQUEST_CONNECTION,
    REQUEST_ANY
};

struct request {
    struct request *next;
    OVERLAPPED *overlapped;
    enum request_kind kind;
    bool decided; /* has its status and waits for its delay to pass */
    HRESULT status;
    uint64_t due_ms;
    void *subject; /* belongs to the kind of request */
};

/* The member of an object that accepts overlapped requests. */
struct source {
    struct source *next, **link; /* list of the adapter's sources, under its lock */
    bool removed;                /* its requests were completed because the adapter is gone; under the same lock */
    struct nd_adapter *adapter;
    struct object *object;
    struct overlapped_file *file;
    SRWLOCK lock;
    CONDITION_VARIABLE finished;
    struct request *first, **last;
    LONG finishing;
    struct timer timer;
    /* called for a canceled request, before it completes */
    void (*abandoned)(struct source *source, struct request *request);
    /* Called just before a request completes, after any delay. May change the status. */
    HRESULT (*completing)(struct source *source, struct request *request, HRESULT status);
};

HRESULT overlapped_file_create(HANDLE *handle);

/* `source` is zeroed memory. ND_INVALID_HANDLE if the handle is not an overlapped file of softnd. */
HRESULT source_open(struct source *source, HANDLE handle);
/* After source_open: the object, which is there now, may accept requests. */
void source_start(struct source *source, struct adapter *adapter, struct object *object);
/* Ends all requests with ND_CANCELED. None is touched afterwards (C.5.7). */
void source_close(struct source *source);
/* Frees what the source holds. Called by the object's destroy. */
void source_free(struct source *source);

/* Accepts a request with ND_PENDING. Any other status means that the structure cannot be written or memory is short. */
HRESULT request_accept(struct source *source, enum request_kind kind, OVERLAPPED *overlapped, void *subject);
/* For a request that only an event completes, without locks: it ends even if the adapter is removed during the call. */
HRESULT request_accept_to_wait(struct source *source, enum request_kind kind, OVERLAPPED *overlapped, void *subject);
/* Completes the oldest request of this kind. False if there is none. `subject` may be NULL. */
bool request_complete(struct source *source, enum request_kind kind, HRESULT status);
/* Takes the oldest request out of the list. request_finish then completes it. */
struct request *request_take(struct source *source, enum request_kind kind);
void request_finish(struct source *source, struct request *request, HRESULT status);
/* Completes all requests of this kind that were accepted so far. */
void request_complete_all(struct source *source, enum request_kind kind, HRESULT status);
bool request_pending(struct source *source, enum request_kind kind);

HRESULT STDMETHODCALLTYPE source_cancel(struct source *source);
HRESULT overlapped_result(OVERLAPPED *overlapped, BOOL wait);

/* faults.c: how much later a request completes, or is canceled, by a fault. */
uint32_t nd_request_delay_ms(const struct adapter *adapter, const struct request *request);
uint32_t nd_cancel_delay_ms(const struct adapter *adapter);

#endif
