/* Receives posted ahead: the ring that queue pairs and shared receive queues use, and the shared receive queue. */
#ifndef SOFTND_SHARED_RECEIVE_QUEUE_H
#define SOFTND_SHARED_RECEIVE_QUEUE_H

#include "adapter.h"
#include "object.h"
#include "overlapped.h"

struct receive {
    void *context;
    ULONG sge_count;
    ND2_SGE sge[MAX_SGE];
};

struct receive_ring {
    struct receive *entries;
    ULONG depth, first, count;
};

struct queue_pair;

struct shared_queue {
    struct object object;
    struct source source;
    SRWLOCK lock;
    struct receive_ring ring;
    ULONG max_sge, threshold;
    struct queue_pair *waiting, **last_waiting; /* queue pairs whose peer's Send found no entry */
};

bool ring_start(struct receive_ring *ring, ULONG depth);
/* Checks the arguments and adds an entry: ND_SUCCESS, ND_NO_MORE_ENTRIES, ND_DATA_OVERRUN or ND_BUFFER_OVERFLOW. */
HRESULT ring_add(struct receive_ring *ring, void *context, const ND2_SGE *sge, ULONG sge_count, ULONG max_sge);
bool ring_take(struct receive_ring *ring, struct receive *out);

/* Copies the consumer's elements and checks their number and the sum of their lengths against the limits. */
HRESULT sge_take(ND2_SGE *out, const ND2_SGE *sge, ULONG sge_count, ULONG max_sge, uint64_t *total);

HRESULT srq_create(struct adapter *adapter, REFIID iid, HANDLE file, ULONG depth, ULONG max_sge, ULONG threshold,
                   KAFFINITY affinity, void **out);
struct shared_queue *srq_from(IUnknown *pointer, const struct adapter *adapter);
/* Takes the oldest entry. False if there is none; the queue pair is then woken at the next Receive. */
bool srq_take(struct shared_queue *srq, struct queue_pair *queue_pair, struct receive *out);
/* After srq_take: completes Notify if the number of entries fell below the threshold. Call it without locks. */
void srq_notify(struct shared_queue *srq);
void srq_forget(struct shared_queue *srq, struct queue_pair *queue_pair);

#endif
