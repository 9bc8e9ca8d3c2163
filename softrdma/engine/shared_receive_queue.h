/* Receives posted ahead: the ring that queue pairs and shared receive queues use, and the shared receive queue. */
#ifndef ENGINE_SHARED_RECEIVE_QUEUE_H
#define ENGINE_SHARED_RECEIVE_QUEUE_H

#include "adapter.h"
#include "object.h"

struct receive {
    void *context;
    uint32_t sge_count;
    ND2_SGE sge[MAX_SGE];
};

struct receive_ring {
    struct receive *entries;
    uint32_t depth, first, count;
};

struct queue_pair;

struct shared_queue {
    struct object object;
    const void *domain; /* of the memory of its entries, whatever that of a queue pair is */
    struct lock lock;
    struct receive_ring ring;
    uint32_t max_sge, threshold;
    bool silent;        /* the face is told nothing more */
    uint32_t notifying; /* calls of face_below_threshold() that run */
    struct condition quiet;
    /* Queue pairs whose peer's Send found no entry. While any of them waits, each entry has woken one. */
    struct queue_pair *waiting, **last_waiting;
    uint32_t woken; /* queue pairs that were woken and have not looked yet */
};

bool ring_start(struct receive_ring *ring, uint32_t depth);
/* Checks the arguments and adds an entry: ND_SUCCESS, ND_NO_MORE_ENTRIES, ND_DATA_OVERRUN or ND_BUFFER_OVERFLOW. */
nd_status ring_add(struct receive_ring *ring, void *context, const ND2_SGE *sge, uint32_t sge_count, uint32_t max_sge);
bool ring_take(struct receive_ring *ring, struct receive *out);

/* Copies the consumer's elements and checks their number and the sum of their lengths against the limits. */
nd_status sge_take(ND2_SGE *out, const ND2_SGE *sge, uint32_t sge_count, uint32_t max_sge, uint64_t *total);

nd_status srq_create(struct adapter *adapter, const void *domain, uint32_t depth, uint32_t max_sge, uint32_t threshold,
                     void *face, struct shared_queue **out);
nd_status srq_receive(struct shared_queue *srq, void *context, const ND2_SGE *sge, uint32_t sge_count);
/* A depth or threshold of 0 leaves it as it is. ND_BUFFER_OVERFLOW: more entries wait than the new depth can hold. */
nd_status srq_modify(struct shared_queue *srq, uint32_t depth, uint32_t threshold);
/* Takes the oldest entry. False if there is none; the queue pair then waits, behind those that wait already. */
bool srq_take(struct shared_queue *srq, struct queue_pair *queue_pair, struct receive *out);
/* After srq_take: tells the face if the number of entries fell below the threshold. Call it without locks. */
void srq_notify(struct shared_queue *srq);
/* After this call face_below_threshold() neither runs nor begins for this queue. Not within it. */
void srq_silence(struct shared_queue *srq);
/* The queue pair takes no more messages, so it no longer waits. It may have been woken for an entry, which is another's
 * now: if *wake is set, srq_wake() has to follow, without locks. */
void srq_forget(struct shared_queue *srq, struct queue_pair *queue_pair, bool *wake);
/* Wakes a queue pair for each entry that has woken none. */
void srq_wake(struct shared_queue *srq);

#endif
