/* Completion queue: a ring of results, and notifications by sequence number (section G).
 *
 * Every entry gets the next sequence number. Entries up to `triggered` have satisfied a notification. They satisfy no
 * other one, whether they were fetched or not (G.2.5).
 */
#ifndef ENGINE_COMPLETION_QUEUE_H
#define ENGINE_COMPLETION_QUEUE_H

#include "object.h"

struct queue_pair;

/* A queue pair that completes here. It is in the queue's list, under the queue's lock. */
struct cq_user {
    struct cq_user *next, **link;
    struct queue_pair *queue_pair;
    bool knows_failure; /* the queue pair knows that the queue failed */
};

struct cq_entry {
    ND2_RESULT result;
    bool solicited;
    bool silent;          /* satisfies no notification */
    int terminate;        /* the peer refused the request with this error of the wire; 0: it did not */
    uint32_t invalidated; /* a Receive: the token that the message has invalidated; 0: none */
};

struct completion_queue {
    struct object object;
    struct lock lock;
    struct cq_entry *ring;
    uint32_t capacity; /* a power of two above the depth */
    uint32_t depth;
    uint64_t taken, added; /* sequence numbers: entries taken+1 to added are in the ring */
    uint64_t triggered;
    uint64_t last_any, last_solicited; /* newest entry that satisfies this type of notification; errors satisfy both */
    bool any_armed, solicited_armed;
    bool due;                  /* a notification was satisfied, and the face is not told yet */
    _Atomic nd_status failure; /* ND_BUFFER_OVERFLOW after an overrun; changed under the lock */
    bool silent;               /* the face is told nothing more */
    uint32_t notifying;        /* calls of face_notified() that run */
    struct condition quiet;
    struct cq_user *users;
};

nd_status cq_create(struct adapter *adapter, uint32_t depth, void *face, struct completion_queue **out);

/* Adds all entries in one step. False if the queue overran, now or earlier: then entries are lost and the queue pair
 * must end. cq_put may be called under a queue pair's lock. If it sets *notify, cq_notify has to follow, without locks.
 */
bool cq_put(struct completion_queue *cq, const struct cq_entry *entries, uint32_t count, bool *notify);
void cq_notify(struct completion_queue *cq);
/* It fails as after an overrun. Without locks. */
void cq_fail(struct completion_queue *cq);
/* It has overrun, so its queue pairs end. */
static inline bool cq_failed(const struct completion_queue *cq)
{
    return cq->failure != ND_SUCCESS;
}

/* For the face. ND_CQ_NOTIFY_ERRORS arms nothing: a queue that failed always notifies. A face that is to be told of a
 * notification that was satisfied before calls cq_notify() first: its entries may be fetched already (G.2.9). */
void cq_arm(struct completion_queue *cq, uint32_t type);
void cq_disarm(struct completion_queue *cq);
/* After this call face_notified() neither runs nor begins for this queue. Not within it. */
void cq_silence(struct completion_queue *cq);
/* Takes up to `count` entries, the oldest first. */
uint32_t cq_take(struct completion_queue *cq, struct cq_entry *entries, uint32_t count);
/* ND_BUFFER_OVERFLOW: more entries wait than the new depth can hold. */
nd_status cq_resize(struct completion_queue *cq, uint32_t depth);
/* The entries of this queue pair are forgotten. */
void cq_forget(struct completion_queue *cq, const void *queue_pair_context);

void cq_enlist(struct completion_queue *cq, struct cq_user *user, struct queue_pair *queue_pair);
void cq_unlist(struct completion_queue *cq, struct cq_user *user);

#endif
