/* The structures behind those that Python sees (ndpy_abi.h). */

#include <stdatomic.h>

#define NDPY_POLL_BATCH 32

/* A result of native_post(): the request counts as posted, but the provider will not complete it. ndpy_cancel_rest
   ends it. */
#define NATIVE_NEVER_COMPLETES (-100)

struct ndpy_ring;

struct ndpy_slot {
    struct ndpy_ring *ring;      /* NULL in a shared receive queue */
    uint64_t context;
    uint64_t nbytes;
    uint32_t sequence;           /* number of the request in its ring; in a shared queue, the slot's index */
    uint16_t operation;
    uint16_t flags;
};

struct ndpy_ring {
    atomic_uint posted;
    atomic_uint retired;
    atomic_uint failed;         /* whether a request has failed; all later ones fail too */
    uint32_t depth;
    uint32_t silent_run;
    uint32_t number;
    struct ndpy_slot slots[];
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
};

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
