/* The structures behind those that Python sees (ndpy_abi.h), and what is hot of rings.c.

   Each direction of a queue pair is a ring of slots. The provider gets the address of a request's slot as the
   request's context, and returns it with the completion. Requests of one direction complete in order. So a
   completion retires every slot up to its own, including the silent (unsignaled) ones before it. A ring has one
   writer of `posted`: the thread that holds the queue pair's lock. It has one writer of `retired`: the thread that
   holds the completion queue's lock. The two threads share only these counters. */

#ifndef NDPY_RINGS_H
#define NDPY_RINGS_H

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "hot.h"
#include "operations.h"

#define NDPY_POLL_BATCH 64

struct ndpy_ring;
struct ndpy_list;

struct ndpy_slot {
    struct ndpy_ring *ring; /* NULL in a shared receive queue */
    union {
        struct ndpy_slot *next; /* in a ring */
        struct ndpy_list *list; /* of a list */
    };
    uint64_t context;
    uint64_t nbytes;
    uint32_t sequence; /* number of the request in its ring; in a shared queue or a list, the slot's index */
    uint32_t index;    /* of all slots of the ring, which stays the same */
    uint16_t operation;
    uint16_t flags;
    uint32_t remote_token; /* of an initiator's request, for struct ndpy_failed_request */
    uint64_t remote_address;
};

/* Some of a ring's slots. */
struct ndpy_slots {
    struct ndpy_slots *next;
    struct ndpy_slot slots[];
};

/* One posting of a list. base: the number of its first request in the ring. count: fewer than the list has if the
   provider refused the rest. */
struct ndpy_posting {
    struct ndpy_list *list;
    uint32_t base;
    atomic_uint count;
};

/* The postings of a ring, oldest first, in an array of mask + 1, which is a power of 2 and at least the depth. The
   first list makes it. Whoever posts moves `end`, and whoever polls moves `first`. */
struct ndpy_postings {
    struct ndpy_posting *items;
    uint32_t mask;
    atomic_uint first;
    atomic_uint end;
};

/* The slots form a circle in the order of posting. It grows when all of it is taken, up to the depth. */
struct ndpy_ring {
    struct ndpy_postings postings;
    struct ndpy_slots *memory;
    struct ndpy_slot *newest; /* that of the last request, or NULL while there are no slots */
    struct ndpy_slot *former; /* that of the last but one */
    uint32_t allocated;
    atomic_uint posted;
    atomic_uint retired;
    atomic_uint failed;                       /* whether a request has failed; all later ones fail too */
    struct ndpy_failed_request first_failure; /* which one, once `failed` is set; its length is 0 if it was flushed */
    uint32_t latest_failure;                  /* the number of the latest one */
    uint32_t depth;
    uint32_t silent_run;
    uint32_t number;
    unsigned char *headers; /* of received datagrams, HEADER_SIZE for each slot; NULL for other receives */
    uint64_t header_token;
};

#define HEADER_SIZE 40u

struct ndpy_queue_pair {
    void *native;
    struct ndpy_ring initiator;
    struct ndpy_ring receive;
    uint32_t max_initiator_sge;
    uint32_t max_receive_sge;
    uint32_t max_read_sge;
    uint32_t inline_size;
    uint64_t max_length;
    int works_around_siw;
    int refuses_reads;
    uint32_t offered; /* the operations that it takes, each as the bit of its number */
    uint32_t plain;   /* those of them that check_special() need not see */
    atomic_int connection;
    struct ndpy_list *lists; /* those in use, and those for the next ones */
    uint64_t elements[];     /* a request's elements in the provider's layout, during a post */
};

/* Requests that are posted together. elements and requests: in the provider's layout. The number of a slot is its place
   in the list. Its memory stays until the queue pair is freed, because the provider names its slots. */
struct ndpy_list {
    struct ndpy_list *next;
    struct ndpy_ring *ring;
    void *elements;
    void *requests;
    uint32_t element_capacity;
    uint32_t capacity;
    uint32_t count;
    char is_used;
    char is_special; /* see check_posting() */
    char has_reads;
    char posts_singly; /* some request needs another call */
    char was_refused;  /* the provider may name its slots until the end */
    struct ndpy_slot slots[];
};

struct ndpy_shared_queue {
    void *native;
    void *elements;
    uint32_t depth;
    uint32_t max_sge;
    uint32_t name; /* see ndpy_shared_queue_name() */
    uint64_t max_length;
    struct ndpy_slot slots[];
};

struct ndpy_completion_queue {
    void *native;
    struct ndpy_completion *stored; /* completions taken from the provider, or made here, before a poll */
    uint32_t stored_capacity;
    uint32_t stored_head;
    uint32_t stored_count;
    uint32_t undelivered; /* how many of these are for the program */
    uint32_t details;     /* which of enum ndpy_detail its completions bring, if it is_extended */
    int is_extended;      /* verbs: it was created and is polled by the extended calls */
    int polls_singly;     /* then: ibv_next_poll(3) cannot be used */
};

/* The largest element of a provider. */
#define NATIVE_ELEMENT_SIZE 24

_Static_assert(sizeof(struct ndpy_completion) == 48, "the Python side unpacks 48 bytes");
_Static_assert(sizeof(uintptr_t) <= sizeof(uint64_t), "a slot's address fits a request's context");

/* ---- rings.c ---- */

/* Adds slots behind the newest one. Returns 0, or -1 if memory is short. */
static int ring_grow(struct ndpy_ring *ring);
/* Looks for the posting of a list's request that has ended. See find_posted(). */
static int search_posted(struct ndpy_ring *ring, const struct ndpy_slot *slot, uint32_t *sequence);
/* Makes room for more stored completions. Returns 0 or an errno. */
static int reserve_stored(struct ndpy_completion_queue *cq, uint32_t more);
/* As ndpy_cancel_rest(). native_status: the provider's number for a canceled request. */
static int cancel_rest(struct ndpy_queue_pair *qp, int receive, struct ndpy_completion_queue *cq,
                       uint32_t native_status);

/* ---- places in a ring ---- */

static inline uint32_t ring_in_flight(struct ndpy_ring *ring)
{
    return atomic_load(&ring->posted) - atomic_load(&ring->retired);
}

/* Finds the slot of the next request. Returns 0, a refusal, or the number for being short of memory. */
HOT int ring_next(struct ndpy_ring *ring, struct ndpy_slot **slot, int no_memory)
{
    uint32_t posted = atomic_load_explicit(&ring->posted, memory_order_relaxed);
    uint32_t in_flight = posted - atomic_load_explicit(&ring->retired, memory_order_acquire);

    if (in_flight >= ring->allocated) {
        if (in_flight >= ring->depth)
            return NDPY_QUEUE_FULL;
        if (ring->allocated < ring->depth && ring_grow(ring))
            return no_memory;
    }
    *slot = ring->newest->next;
    (*slot)->sequence = posted;
    return 0;
}

/* Call this before the provider sees the request: its completion may be polled before the post returns. */
HOT void ring_commit(struct ndpy_ring *ring, struct ndpy_slot *slot)
{
    ring->former = ring->newest;
    ring->newest = slot;
    atomic_store_explicit(&ring->posted, slot->sequence + 1, memory_order_release);
}

/* Takes the last request back. */
HOT void ring_withdraw(struct ndpy_ring *ring)
{
    ring->newest = ring->former;
    atomic_fetch_sub_explicit(&ring->posted, 1, memory_order_release);
}

/* ---- postings of lists ---- */

HOT struct ndpy_posting *posting_at(struct ndpy_ring *ring, uint32_t place)
{
    return &ring->postings.items[place & ring->postings.mask];
}

/* Finds the number in the ring of a list's request that has ended, if it is of the oldest posting. Returns 0 otherwise.
   Once the last request of that posting was found, the posting is over. Call this with the completion queue's lock. */
HOT int find_in_oldest(struct ndpy_ring *ring, const struct ndpy_slot *slot, uint32_t *sequence)
{
    uint32_t first = atomic_load_explicit(&ring->postings.first, memory_order_relaxed);
    const struct ndpy_posting *posting = posting_at(ring, first);
    uint32_t left;

    if (first == atomic_load_explicit(&ring->postings.end, memory_order_acquire) || posting->list != slot->list)
        return 0;
    left = atomic_load_explicit(&posting->count, memory_order_relaxed) - slot->sequence;
    *sequence = posting->base + slot->sequence;
    if ((int32_t)left <= 0 || (int32_t)(*sequence - atomic_load_explicit(&ring->retired, memory_order_relaxed)) < 0)
        return 0;
    if (left == 1)
        atomic_store_explicit(&ring->postings.first, first + 1, memory_order_release);
    return 1;
}

/* The same for the oldest posting in which the request has not ended yet. */
HOT int find_posted(struct ndpy_ring *ring, const struct ndpy_slot *slot, uint32_t *sequence)
{
    return find_in_oldest(ring, slot, sequence) || search_posted(ring, slot, sequence);
}

/* ---- stored completions ---- */

static inline void store(struct ndpy_completion_queue *cq, const struct ndpy_completion *completion)
{
    cq->stored[cq->stored_head + cq->stored_count++] = *completion;
    if (!(completion->flags & NDPY_INTERNAL))
        cq->undelivered++;
}

#endif
