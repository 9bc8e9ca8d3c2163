/* Completion queue: a ring of results, and notifications by sequence number (section G).
 *
 * Every entry gets the next sequence number. Entries up to `triggered` have satisfied a notification. They satisfy no
 * other one, whether they were fetched or not (G.2.5).
 */
#ifndef SOFTND_COMPLETION_QUEUE_H
#define SOFTND_COMPLETION_QUEUE_H

#include "object.h"
#include "overlapped.h"

struct queue_pair;

/* A queue pair that completes here. It is in the queue's list, under the queue's lock. */
struct cq_user {
    struct cq_user *next, **link;
    struct queue_pair *queue_pair;
    bool knows_failure; /* the queue pair knows that the queue failed */
};

struct completion_queue {
    struct object object;
    struct source source;
    SRWLOCK lock;
    struct cq_entry *ring;
    ULONG capacity; /* a power of two above the depth */
    ULONG depth;
    uint64_t taken, added; /* sequence numbers: entries taken+1 to added are in the ring */
    uint64_t triggered;
    uint64_t last_any, last_solicited; /* newest entry that satisfies this type of notification; errors satisfy both */
    bool any_armed, solicited_armed;
    HRESULT failure; /* ND_BUFFER_OVERFLOW after an overrun, or ND_DEVICE_REMOVED */
    struct cq_user *users;
    USHORT group;
    KAFFINITY affinity;
};

struct cq_entry {
    ND2_RESULT result;
    bool solicited;
};

HRESULT cq_create(struct adapter *adapter, REFIID iid, HANDLE file, ULONG depth, USHORT group, KAFFINITY affinity,
                  void **out);
HRESULT cq_new(struct adapter *adapter, const struct object_view *as, HANDLE file, ULONG depth, KAFFINITY affinity,
               struct completion_queue **out);
struct completion_queue *cq_from(IUnknown *pointer, const struct adapter *adapter);

/* Adds all entries in one step, then notifies. False if the queue overran, now or earlier: then entries are lost and
 * the queue pair must end. */
bool cq_add(struct completion_queue *cq, const struct cq_entry *entries, ULONG count);
/* The two halves of cq_add, for callers that hold locks. cq_put may be called under a queue pair's lock, cq_notify
 * only afterwards, without locks. */
bool cq_put(struct completion_queue *cq, const struct cq_entry *entries, ULONG count, bool *notify);
void cq_notify(struct completion_queue *cq);

/* Shared by both versions. */
HRESULT STDMETHODCALLTYPE cq_notify_request(IND2CompletionQueue *self, ULONG type, OVERLAPPED *overlapped);
ULONG STDMETHODCALLTYPE cq_results(IND2CompletionQueue *self, ND2_RESULT *results, ULONG count);
HRESULT STDMETHODCALLTYPE cq_resize(IND2CompletionQueue *self, ULONG depth);
HRESULT STDMETHODCALLTYPE cq_cancel(IND2CompletionQueue *self);
void cq_enlist(struct completion_queue *cq, struct cq_user *user, struct queue_pair *queue_pair);
void cq_unlist(struct completion_queue *cq, struct cq_user *user);

HRESULT notify_affinity(const struct adapter *adapter, USHORT group, KAFFINITY affinity, USHORT *out_group,
                        KAFFINITY *out_affinity);

#endif
