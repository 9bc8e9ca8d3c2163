/* What the engine asks of its face, the interface that programs see: NetworkDirect or verbs. Each face implements all
 * of this. Unless a line says otherwise, the engine calls these functions without locks.
 */
#ifndef ENGINE_FACE_H
#define ENGINE_FACE_H

#include "vocabulary.h"

#include <stdbool.h>

struct adapter;
struct completion_queue;
struct fault;
struct listener;
struct object;
struct queue_pair;
struct shared_queue;
struct stream;
struct window;

/* What errors on stderr begin with. */
extern const char face_name[];
/* What the names of this face's environment variables begin with, "SOFTND_" for example. */
extern const char face_prefix[];
/* How long the peer's program may take to answer a request, and to send the first message after its offer was accepted.
 * 0: any time. */
extern const uint32_t face_patience_ms;

/* Whether requests that are posted one by one may wait for others, because the face calls streams_push() whenever the
 * program looks for something in vain. */
extern const bool face_gathers;

/* The last reference to an object is gone. Frees object->face. The engine frees the object afterwards. */
void face_free(struct object *object);

/* The queue has new entries that it was armed for, or it failed. It is no longer armed. */
void face_notified(struct completion_queue *cq, nd_status status);
/* The shared receive queue has fewer entries than its threshold. Called again for each entry that is taken. */
void face_below_threshold(struct shared_queue *srq);
/* The peer has invalidated the window. Returns the context of an entry for the receive queue, which precedes the
 * Receive; NULL: no entry. Called under the token table's lock. */
void *face_window_invalidated(struct window *window);
/* Whether the scenario is this library's to execute. */
bool face_executes_faults(void);
/* Whether the face can do this fault: of a call, of the adapter. The engine does the others. */
bool face_can(const struct fault *fault);
/* A fault of the adapter happens. `queue_pair` is the one that posts a request; NULL: none. */
void face_fault(struct adapter *adapter, const struct fault *fault, struct queue_pair *queue_pair);
/* The adapter has just been removed by a fault: ends whatever waits on it. */
void face_adapter_removed(struct adapter *adapter);
/* The last object is gone; the face lets go of what keeps the transport in use. */
void face_stopping(void);

/* A listener is the face's side of a listening socket. It holds an object. */
struct object *listener_object(struct listener *listener);
/* A peer has sent its MPA request. */
void listener_request(struct listener *listener, struct stream *stream);

#endif
