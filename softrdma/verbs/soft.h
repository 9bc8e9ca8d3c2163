/* The verbs face: what a program's structures are inside.
 *
 * libsoftverbs.so exports the calls of libibverbs and librdmacm over one device, soft0. A structure that a program
 * sees, such as struct ibv_qp, is the first member of the structure here, which is also the `face` of the engine's
 * object.
 */
#ifndef SOFTVERBS_SOFT_H
#define SOFTVERBS_SOFT_H

#include "adapter.h"
#include "completion_queue.h"
#include "driving.h"
#include "memory.h"
#include "queue_pair.h"
#include "shared_receive_queue.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>

#define EXPORT __attribute__((visibility("default")))

#define SOFT_NAME              "soft0"
#define SOFT_VENDOR_ID         0x736Eu
#define SOFT_PART_ID           0x0003u
#define SOFT_MAX_GIDS          64
#define SOFT_MAX_QP_WR         16384u
#define SOFT_MAX_SRQ_WR        16384u
#define SOFT_RNR_RETRY_ENDLESS 7

/* ---- Events that a program waits for on a descriptor ---- */

/* A list of events and a descriptor that is readable while the list is not empty. If it drives, a program's thread that
 * waits for an event works for all meanwhile, and the descriptor of one that does not block may be readable for no
 * reason. */
struct event {
    struct event *next;
};

struct event_queue {
    pthread_mutex_t lock;
    _Atomic int fd;    /* a program may make it nonblocking and poll it; -1: closed */
    _Atomic int count; /* an eventfd; -1: closed */
    bool drives;
    _Atomic bool nonblocking;    /* as it was when it was last asked */
    _Atomic uint32_t generation; /* of the process that has it */
    struct loop loop;
    struct event *first, **last;
    struct event_queue *next_closed;
};

enum event_source { EVENTS_OF_CONTEXT, EVENTS_OF_COMP_CHANNEL, EVENTS_OF_CM_CHANNEL, EVENT_SOURCES };

/* A new object of zeroes, whose queue is its last member, at `offset`. NULL with errno. */
void *event_source_new(enum event_source kind, size_t offset, bool drives);
typedef bool event_call(const struct event *event, const void *what);
/* Hands each event to free(), after `last` unless that is NULL, and takes back the object that has the queue. In a
 * forked child: only closes the parent's descriptors. */
void event_source_close(enum event_source kind, struct event_queue *queue, event_call *last, const void *what);
/* In a forked child. */
void event_sources_forget(void);
static inline bool event_queue_open(const struct event_queue *queue)
{
    return queue->count >= 0;
}

/* False: the queue is closed, and the caller keeps the event. */
bool event_put(struct event_queue *queue, struct event *event);
/* Takes the oldest event. Waits for one, unless the descriptor does not block. NULL with errno otherwise. */
struct event *event_take(struct event_queue *queue);
/* Takes out each event for which `matches` is true and hands it to free(). */
void event_remove(struct event_queue *queue, event_call *matches, const void *what);

/* ---- Objects ---- */

struct soft_context {
    struct verbs_context verbs; /* its last member is the struct ibv_context that programs have */
    struct adapter *adapter;    /* one for all contexts of the process */
    struct soft_context *next;  /* list of device.c */
    uint32_t generation;        /* of the process that opened it */
    struct event_queue events;  /* asynchronous events: struct soft_async_event */
};

struct soft_async_event {
    struct event event; /* first */
    struct ibv_async_event ibv;
};

struct soft_pd {
    struct ibv_pd ibv;
    _Atomic int32_t users; /* regions, windows, queue pairs, shared receive queues */
};

struct soft_mr {
    struct ibv_mr ibv;
    struct region *region;
    void *part;                   /* of a dma-buf: where it is mapped here */
    struct device_memory *device; /* what the region has */
};

struct soft_mw {
    struct ibv_mw ibv;
    struct window *window;
};

struct soft_channel {
    struct ibv_comp_channel ibv;
    struct event_queue events; /* struct soft_cq.arrival */
};

struct soft_cq_event {
    struct event event; /* first */
    struct soft_cq *cq;
};

struct soft_cq {
    struct ibv_cq ibv;
    struct completion_queue *cq;
    _Atomic int32_t users;               /* queue pairs */
    _Atomic uint32_t events_given;       /* to be acknowledged */
    _Atomic uint32_t async_given;        /* asynchronous events, to be acknowledged too */
    struct soft_cq_event *_Atomic spare; /* for the next notification */
    _Atomic bool failed;
};

struct soft_srq {
    struct ibv_srq ibv;
    struct shared_queue *srq;
    _Atomic int32_t users;
    _Atomic bool limit_armed;
    _Atomic uint32_t async_given; /* events, to be acknowledged */
};

struct pairing;

struct soft_qp {
    struct ibv_qp ibv;
    _Atomic int32_t references;   /* the program's, and those of soft_qp_hold() */
    _Atomic uint32_t async_given; /* events, to be acknowledged */
    pthread_mutex_t lock;         /* of everything below; taken outside of the engine's locks */
    bool destroyed;
    struct queue_pair *qp;
    struct pairing *pairing; /* what connects it, if ibv_modify_qp() does; under numbers_lock */
    bool all_signaled;
    _Atomic int state; /* attributes.qp_state, for those who post without the lock */
    struct ibv_qp_attr attributes;
    struct ibv_qp_init_attr_ex initial;
};

static inline struct soft_context *soft_context(struct ibv_context *context)
{
    return CONTAINER_OF(context, struct soft_context, verbs.context);
}

static inline struct adapter *adapter_of(struct ibv_context *context)
{
    return soft_context(context)->adapter;
}

/* Whether a forked child has the context from its parent. Then nothing of it may be used: sets errno to EIO. What
 * closes an object succeeds without doing anything. The calls of requests and completions are others in such a context.
 */
bool soft_inherited(const struct ibv_context *context);

/* What a call returns that fails to give an object. */
static inline void *soft_null(int error)
{
    errno = error;
    return NULL;
}

/* faults.c: what a scenario has at a call: an errno, which is also set, or 0, after the time that a slow call takes.
 * The queue pair is given by its number in scenarios; 0: the call has none. */
extern _Atomic int32_t soft_live[FAULT_CALLS]; /* objects of the program that the engine does not count, by the call */
int soft_fault(const struct adapter *adapter, enum fault_call call, uint32_t queue_pair, const void *caller);
#define SOFT_FAULT(context, call, queue_pair) \
    (adapter_of(context)->faults == NULL      \
         ? 0                                  \
         : soft_fault(adapter_of(context), call, queue_pair, __builtin_return_address(0)))

/* Calls of this thread that the connection manager makes itself. They are no places of a scenario. */
extern _Thread_local unsigned soft_own_calls;
#define SOFT_OWN(call)                    \
    ({                                    \
        soft_own_calls++;                 \
        __typeof__(call) result = (call); \
        soft_own_calls--;                 \
        result;                           \
    })

/* An errno for a status of the engine. */
int soft_errno(nd_status status);
/* Gives the context an asynchronous event. `element` is the queue pair, queue or port that it is about. */
void soft_async(struct soft_context *context, enum ibv_event_type type, void *element);
/* By a fault: the queue of asynchronous events is full. */
extern _Atomic bool soft_events_are_lost;
/* Each context gets this event of its port. */
void soft_async_to_all(enum ibv_event_type type);
/* The element is about to go: its events that nobody has taken go too, and those that somebody took have to be
 * acknowledged first (man ibv_get_async_event). `type` is one of such an element. */
void soft_async_forget(struct soft_context *context, enum ibv_event_type type, void *element);

/* device.c: answers a query with a structure that may be longer, or shorter, in the program's headers. */
void soft_answer(void *out, size_t size, const void *answer, size_t answer_size);
/* device.c: the context that the connection manager shares with all of its identifiers, opened at first use. */
struct ibv_context *soft_shared_context(void);

/* addresses.c: the machine's addresses, those of IPv4 first, then loopback, then link-local ones with their scope.
 * Returns their number, or -1 and sets errno if there is no memory or no descriptor to ask the system. */
int soft_addresses(struct sockaddr_storage *out, int max);
bool soft_serves(const struct sockaddr *address);
void soft_gid_of(const struct sockaddr *address, union ibv_gid *gid);
/* The address of a peer's GID, as it is reached from an own address. False if the GID is not one of an address, or not
 * one that is reached from there. The port is 0. */
bool soft_address_of(const union ibv_gid *gid, const struct sockaddr_storage *own, struct sockaddr_storage *out);

/* completion.c */
int soft_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);
/* queue_pair.c */
int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct ibv_qp_init_attr_ex soft_extended(struct ibv_pd *pd, const struct ibv_qp_init_attr *attributes);
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attributes);
/* The queue pair with this number in this process. NULL: none. A program must not destroy it during the call. */
struct soft_qp *soft_qp_numbered(uint32_t number);
/* The same, but the memory stays until soft_qp_drop(). */
struct soft_qp *soft_qp_hold(uint32_t number);
void soft_qp_drop(struct soft_qp *qp);
/* Elements of a request in the engine's form. Returns their number. `out` has room for as many. */
uint32_t soft_sges(ND2_SGE *out, const struct ibv_sge *sge, int count);
/* The connection manager moves its queue pair to INIT, ready to receive or ready to send, with what both peers agreed
 * on. */
void soft_qp_move(struct soft_qp *qp, const struct ibv_qp_attr *attributes, int mask);
/* It moves the queue pair to the error state. */
void soft_qp_fail(struct soft_qp *qp);
/* The connection of this queue pair has ended. */
void soft_qp_ended(struct soft_qp *qp);
/* So has it, and all its requests come back during the call. Without locks; `qp` is held. */
void soft_qp_finish(struct soft_qp *qp);
/* memory.c */
struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int soft_dealloc_mw(struct ibv_mw *mw);
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
/* shared_receive_queue.c */
int soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attributes);

#endif
