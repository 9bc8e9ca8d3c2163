/* The structures behind those that Python sees (ndpy_abi.h). */

#include <stdatomic.h>

#include "hot.h"

#define NDPY_POLL_BATCH 32

/* A result of native_post(): the request counts as posted, but the provider will not complete it. ndpy_cancel_rest
   ends it. */
#define NATIVE_NEVER_COMPLETES (-100)

struct ndpy_ring;

struct ndpy_slot {
    struct ndpy_ring *ring;      /* NULL in a shared receive queue */
    struct ndpy_slot *next;      /* in a ring */
    uint64_t context;
    uint64_t nbytes;
    uint32_t sequence;           /* number of the request in its ring; in a shared queue or a list, the slot's index */
    uint32_t index;              /* of all slots of the ring, which stays the same */
    uint16_t operation;
    uint16_t flags;
};

/* Some of a ring's slots. */
struct ndpy_slots {
    struct ndpy_slots *next;
    struct ndpy_slot slots[];
};

/* One posting of a list. base: the number of its first request in the ring. count: fewer than the list has if the provider
   refused the rest. */
struct ndpy_posting {
    struct ndpy_list *list;
    uint32_t base;
    atomic_uint count;
};

/* The postings of a ring, oldest first, in an array of depth + 1 that the first one makes. Whoever posts moves `end`, and whoever
   polls moves `first`. */
struct ndpy_postings {
    struct ndpy_posting *items;
    atomic_uint first;
    atomic_uint end;
};

/* The slots form a circle in the order of posting. It grows when all of it is taken, up to the depth. */
struct ndpy_ring {
    struct ndpy_postings postings;
    struct ndpy_slots *memory;
    struct ndpy_slot *newest;   /* that of the last request, or NULL while there are no slots */
    struct ndpy_slot *former;   /* that of the last but one */
    uint32_t allocated;
    atomic_uint posted;
    atomic_uint retired;
    atomic_uint failed;         /* whether a request has failed; all later ones fail too */
    uint32_t depth;
    uint32_t silent_run;
    uint32_t number;
};

struct ndpy_queue_pair {
    void *native;
    struct ndpy_ring *initiator;
    struct ndpy_ring *receive;
    void *elements;             /* a request's elements in the provider's layout, during a post */
    uint32_t number;
    uint32_t max_initiator_sge;
    uint32_t max_receive_sge;
    uint32_t inline_size;
    uint64_t max_length;
    int fences_all;
    int refuses_reads;
    atomic_int connection;
    struct ndpy_list *lists;    /* those in use, and those for the next ones */
};

/* Requests that are posted together. elements and requests: in the provider's layout. The number of a slot is its place in the
   list. Its memory stays until the queue pair is freed, because the provider names its slots. */
struct ndpy_list {
    struct ndpy_list *next;
    struct ndpy_ring *ring;
    void *elements;
    void *requests;
    uint32_t element_capacity;
    uint32_t capacity;
    uint32_t count;
    char is_used;
    char has_reads;
    char was_refused;           /* the provider may name its slots until the end */
    struct ndpy_slot slots[];
};

HOT struct ndpy_list *list_of(const struct ndpy_slot *slot)
{
    return (struct ndpy_list *)((char *)(slot - slot->sequence) - offsetof(struct ndpy_list, slots));
}

struct ndpy_shared_queue {
    void *native;
    void *elements;
    uint32_t depth;
    uint32_t max_sge;
    uint64_t max_length;
    struct ndpy_slot slots[];
};

struct ndpy_completion_queue {
    void *native;
    struct ndpy_completion *stored;     /* completions taken from the provider, or made here, before a poll */
    uint32_t stored_capacity;
    uint32_t stored_head;
    uint32_t stored_count;
    uint32_t undelivered;       /* how many of these are for the program */
};

/* The largest element of a provider. */
#define NATIVE_ELEMENT_SIZE 24

_Static_assert(sizeof(struct ndpy_completion) == 48, "the Python side unpacks 48 bytes");
_Static_assert(sizeof(uintptr_t) <= sizeof(uint64_t), "a slot's address fits a request's context");
