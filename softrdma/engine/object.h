/* What all objects of the engine share: their kind, the count of references, and the face's part.
 *
 * The engine allocates an object and frees it with its last reference. A face has its own structure for each object, in
 * `face`, and holds one reference from the object's creation until its consumer lets go of it (object_close).
 *
 * Locks, outermost first. A thread takes them only in this order. It holds none across a call that may block:
 *   listener, connector, stream, queue pair, shared receive queue, token table, completion queue,
 *   those of the face, those of a socket, timers.
 */
#ifndef ENGINE_OBJECT_H
#define ENGINE_OBJECT_H

#include "compat.h"
#include "system.h"

#include <stdatomic.h>

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
    KIND_REGISTRATION, /* is counted, and is no object */
    KIND_COUNT
};

struct object;
struct adapter;

struct object_class {
    enum object_kind kind;
    void (*closed)(struct object *);  /* the consumer let go of it */
    void (*destroy)(struct object *); /* no reference is left: frees the object */
};

struct object {
    const struct object_class *class;
    _Atomic int32_t references;
    struct adapter *adapter; /* a reference holds it; NULL in an adapter, and in objects above it */
    void *face;              /* the face's part of it, freed by face_free(); may be NULL */
};

/* The object gets one reference, the face's, and counts as live. False if the workers cannot be started. */
bool object_start(struct object *object, const struct object_class *class, struct adapter *adapter, void *face);
void object_hold(struct object *object);
void object_drop(struct object *object);
/* The consumer lets go: ends what the object does and drops the face's reference. */
void object_close(struct object *object);

int32_t object_live_count(void);
int32_t object_live(enum object_kind kind);
void registration_made(void);
void registration_ended(void);
/* In a forked child: counts from 0 on. */
void objects_forget(void);
/* Writes how many objects of each kind were created and never closed to the file that the face's ..._STATISTICS names.
 */
void object_write_statistics(void);

#endif
