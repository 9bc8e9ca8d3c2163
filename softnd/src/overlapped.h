/* Overlapped files and the requests that complete on them (section C).
 *
 * The consumer's handle is the reading end of a private pipe. Accepting a request only marks its OVERLAPPED pending
 * and resets its event; nothing is issued. To complete it, a one-byte read is started with the consumer's OVERLAPPED
 * and then satisfied by a byte written to the other end (success) or cancelled (failure). The system then does what
 * it does for any request: event, low bit, packet with the consumer's key.
 *
 * The NetworkDirect status is kept in the OVERLAPPED's Offset, which no pipe looks at, so that it is found through
 * the structure from any object (C.4.8).
 */
#ifndef SOFTND_OVERLAPPED_H
#define SOFTND_OVERLAPPED_H

#include "object.h"
#include "transport.h"

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
    void *subject; /* the kind's own */
};

/* The part of an object that accepts overlapped requests. */
struct source {
    struct source *next, **link; /* the adapter's sources, under its lock */
    struct adapter *adapter;
    struct object *object;
    struct overlapped_file *file;
    SRWLOCK lock;
    CONDITION_VARIABLE finished;
    struct request *first, **last;
    LONG finishing;
    struct timer timer;
    void (*abandoned)(struct source *source, struct request *request); /* cancelled, before it completes */
    /* Just before it completes, after any delay: may change the status. */
    HRESULT (*completing)(struct source *source, struct request *request, HRESULT status);
};

HRESULT overlapped_file_create(HANDLE *handle);
void overlapped_files_close(void);

/* ND_INVALID_HANDLE when the handle is not one of ours. */
HRESULT source_start(struct source *source, struct adapter *adapter, struct object *object, HANDLE handle);
/* Ends all requests with ND_CANCELED; none is touched afterwards (C.5.7). */
void source_close(struct source *source);
/* Frees what the source holds; from the object's destroy. */
void source_free(struct source *source);

/* Accepts a request: ND_PENDING, or a status for a structure that cannot be written or a lack of memory. */
HRESULT request_accept(struct source *source, enum request_kind kind, OVERLAPPED *overlapped, void *subject);
/* Completes the oldest request of this kind; false when there is none. `subject` may be NULL. */
bool request_complete(struct source *source, enum request_kind kind, HRESULT status);
/* Takes the oldest one out of the list; it is then completed by request_finish. */
struct request *request_take(struct source *source, enum request_kind kind);
void request_finish(struct source *source, struct request *request, HRESULT status);
/* All requests of this kind that were accepted so far. */
void request_complete_all(struct source *source, enum request_kind kind, HRESULT status);
bool request_pending(struct source *source, enum request_kind kind);

HRESULT STDMETHODCALLTYPE source_cancel(struct source *source);
/* Completes everything that runs on the adapter with ND_DEVICE_REMOVED. */
void sources_remove_adapter(struct adapter *adapter);
HRESULT overlapped_result(OVERLAPPED *overlapped, BOOL wait);

#endif
