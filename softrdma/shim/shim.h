/* What the shim knows of a program's objects.
 *
 * One lock protects everything here. Calls that may wait for other threads of the program are made without it. A
 * program's own structures stay where the libraries made them. Only functions and descriptors in them are replaced.
 *
 * Requests. Each request that reaches the adapter has the number of a record as its wr_id, and is signaled. Its
 * completion leads back to the record, so the shim knows which requests of a queue have ended, also those that the
 * program did not want to hear of. Completions go through the list of the record's queue, where those that come late
 * hold up those behind them, into the list of the completion queue, from which the program takes them.
 *
 * Events. The program's descriptors are eventfds of the shim. Only the shim's thread (thread.c) reads those of the
 * libraries.
 */
#ifndef SHIM_SHIM_H
#define SHIM_SHIM_H

#include "calls.h"
#include "scenario.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT              __attribute__((visibility("default")))
#define COUNT_OF(array)     (sizeof(array) / sizeof *(array))
#define NEVER               UINT64_MAX
#define REQUEST_KINDS_LATER (~FAULT_BIT(FAULT_LATE_RECEIVE))

/* ---- Objects ---- */

enum object_kind { OBJECT_CONTEXT, OBJECT_CHANNEL, OBJECT_CQ, OBJECT_QP, OBJECT_ID };

/* Found by the address of the program's structure. */
struct object {
    struct object *next;
    enum object_kind kind;
    const void *key;
};

struct context {
    struct object object; /* first */
    struct ibv_context *ibv;
    unsigned library;
    struct ibv_context_ops ops; /* those of the library */
    struct ibv_cq_ex *(*create_cq_ex)(struct ibv_context *, struct ibv_cq_init_attr_ex *);
    struct ibv_qp *(*create_qp_ex)(struct ibv_context *, struct ibv_qp_init_attr_ex *);
    struct ibv_srq *(*create_srq_ex)(struct ibv_context *, struct ibv_srq_init_attr_ex *);
    struct ibv_wq *(*create_wq)(struct ibv_context *, struct ibv_wq_init_attr *);
    struct ibv_qp *(*open_qp)(struct ibv_context *, struct ibv_qp_open_attr *);
    struct ibv_mr *(*reg_dm_mr)(struct ibv_pd *, struct ibv_dm *, uint64_t, size_t, unsigned);
    struct ibv_mr *(*alloc_null_mr)(struct ibv_pd *);
    int (*query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *, size_t);
    int real_fd;                /* of asynchronous events */
    int fd;                     /* the program's, -1: none */
    struct async_event *events; /* oldest first */
    bool port_down, gone;
};

struct async_event {
    struct async_event *next;
    struct ibv_async_event ibv;
    bool made; /* by the shim */
};

struct channel {
    struct object object; /* first */
    struct ibv_comp_channel *ibv;
    struct context *context;
    int real_fd, fd;
    struct channel_event *first, **last;
};

struct channel_event {
    struct channel_event *next;
    struct cq *cq;
};

/* What is known of a completion. The last members are those of an extended queue. */
struct completion {
    struct completion *next;
    struct ibv_wc wc;
    uint64_t timestamp, wallclock_ns;
    struct ibv_wc_tm_info tag;
    uint32_t flow_tag;
    uint16_t vlan;
};

enum arming { NOT_ARMED, ARMED, ARMED_SOLICITED };

struct cq {
    struct object object; /* first */
    struct ibv_cq *ibv;
    struct context *context;
    struct channel *channel;          /* NULL: none */
    struct completion *first, **last; /* what the program can take */
    enum arming armed;                /* by the program */
    bool news, quiet;                 /* since then there was a completion; one without an event */
    uint32_t events_given;            /* and not acknowledged */
    bool failed;
    uint32_t slots;             /* of its queue pairs' queues */
    struct ibv_cq_ex *extended; /* NULL: a plain queue */
    struct ibv_cq_ex real;      /* its functions */
    struct completion *current; /* between start_poll() and end_poll() */
};

/* The requests of a queue pair's send queue, or its receives that have completed, oldest first. */
struct queue {
    struct record *first, **last;
    bool failed; /* one has failed, so those behind it are flushed */
};

struct qp {
    struct object object; /* first */
    struct ibv_qp *ibv;
    struct context *context;
    struct cq *send_cq, *recv_cq;
    uint32_t number; /* by order of creation in the process, from 1; 0: older than the scenario */
    bool all_signaled;
    bool failing; /* a request has failed or will, so later ones do not reach the adapter */
    bool failed;  /* the real queue pair was moved to the error state */
    bool ends;    /* the connection, when more bytes than that were sent */
    bool ending;  /* after the call that posts */
    uint64_t sent, ends_after;
    struct queue sends, receives;
    uint32_t async_given;
    struct ibv_qp_ex *extended; /* NULL: none */
    struct ibv_qp_ex real;      /* its functions */
    struct batch *batch;        /* between wr_start() and wr_complete() */
    struct late_receive *late;  /* receives that the adapter does not have yet */
    struct kept *kept;          /* datagrams that it does not have yet, oldest first; see datagrams.c */
    uint64_t kept_until_ns;
};

struct record {
    struct record *next;
    uint64_t id;    /* the wr_id that the adapter has */
    uint64_t wr_id; /* the program's */
    struct qp *qp;  /* NULL: gone, or of a shared receive queue */
    struct cq *cq;  /* NULL: not known yet */
    enum fault_operation operation;
    bool visible; /* the program wants to hear of its success */
    bool absent;  /* it never reached the adapter */
    bool extra;   /* the program has not posted it: a datagram that comes twice */
    bool of_srq, in_use;
    enum ibv_wc_opcode wc_opcode;
    bool done, silent, held;
    uint64_t due_ns; /* not before */
    uint64_t delay_ms;
    enum ibv_wc_status status; /* that it will have. IBV_WC_SUCCESS: what the adapter says */
    struct completion *completion;
    struct bounce *bounce; /* wrong bytes that are sent in place of the program's; NULL: none */
};

struct bounce {
    struct ibv_mr *mr; /* NULL: the bytes are sent inline */
    unsigned library;
    uint32_t size;
    char bytes[];
};

struct late_receive {
    struct late_receive *next;
    struct record *record;
    uint64_t due_ns;
    struct ibv_recv_wr wr;
    struct ibv_sge sges[];
};

/* executor.c */
extern bool is_hosted; /* the program has opened the shim itself, and begins and ends scenarios */
/* Both read the scenario of the environment at the first call. */
bool may_open(void);                     /* unless it has an error */
struct scenario *scenario_now(void);     /* NULL: none */
extern _Thread_local const void *caller; /* of the function of verbs that runs */
extern _Thread_local unsigned inside;    /* calls of librdmacm's functions, which call others of verbs themselves */
/* Counts the call. Returns the errno with which it is to fail, or 0. Waits if it is slow. */
int call_fault(enum fault_call call, const struct qp *qp, uint64_t live);
/* The same with the lock, which it gives up while it waits. */
int call_fault_locked(enum fault_call call, const struct qp *qp, uint64_t live);
const struct fault *request_fault(struct qp *qp, enum fault_operation operation, unsigned kinds, bool again,
                                  uint64_t size, const void *content, size_t content_size);
const struct fault *message_fault(const struct qp *qp, enum fault_operation operation, unsigned kinds, uint64_t size,
                                  const void *content, size_t content_size, uint64_t *random);
bool has_faults_at(enum fault_at at);
bool has_faults_of(enum fault_kind kind);
uint64_t now_ns(void);

/* objects.c. With the lock. */
extern pthread_mutex_t shim_lock;
void lock(void);
void unlock(void);
/* Without the lock, after a library has opened a device. What was registered last is called first before a fork, and
 * softverbs takes a lock there that its calls take with the shim's. */
void watch_forks(unsigned library);
struct object *object_find(enum object_kind kind, const void *key);
void *object_new(enum object_kind kind, const void *key, size_t size);
void object_free(struct object *object);
/* Takes it in, if it is new. NULL without memory, or if the shim has nothing to do with it. */
struct context *context_of(unsigned library, struct ibv_context *ibv);
struct channel *channel_of(struct ibv_comp_channel *ibv);
struct cq *cq_of(struct ibv_cq *ibv);
struct qp *qp_of(struct ibv_qp *ibv);
/* The same, right after it was made with this attribute. */
struct qp *qp_made(struct ibv_qp *ibv, int sq_sig_all);
/* Before and after a call that creates. It has the lock meanwhile. rdma-core tells the kernel the descriptors of the
 * context and of the channel, so these have to be the library's: the context's for this time, the channel's in a copy,
 * which is the result. `copy` is room for it, and NULL if there is no channel to the object. */
struct ibv_comp_channel *creation_begin(struct ibv_context *ibv, struct ibv_comp_channel *channel,
                                        struct ibv_comp_channel *copy);
void creation_end(struct ibv_context *ibv, struct ibv_comp_channel *channel, struct ibv_comp_channel *copy,
                  struct ibv_cq *cq);
/* Before the library destroys it: puts back what was replaced. */
void context_forget(struct context *context);
void channel_forget(struct channel *channel);
void cq_forget(struct cq *cq);
void qp_forget(struct qp *qp);
/* Those to come count from 1. Those that are there have no number. */
void qps_renumber(void);
struct qp *qp_numbered(const struct context *context, uint32_t qp_num);
void each_object(enum object_kind kind, void (*act)(struct object *, void *), void *what);
enum live {
    LIVE_PD,
    LIVE_MR,
    LIVE_MW,
    LIVE_CHANNEL,
    LIVE_CQ,
    LIVE_SRQ,
    LIVE_QP,
    LIVE_AH,
    LIVE_ID,
    LIVE_EVENT_CHANNEL,
    LIVE_KINDS
};
extern _Atomic int64_t live[LIVE_KINDS]; /* of the program */
void live_change(enum live kind, int change);

/* requests.c. With the lock. */
struct record *record_new(void);
struct record *record_find(uint64_t id);
void record_free(struct record *record);
void records_of_cq_free(const struct cq *cq);
void records_of_qp_orphan(const struct qp *qp);
void queue_add(struct queue *queue, struct record *record);
/* As if the adapter had said so. */
void record_succeed(struct record *record);
void queue_free(struct queue *queue);
/* Passes on what has ended and is due. */
void queue_deliver(struct qp *qp, struct queue *queue);
/* Takes from the library what is there. */
void cq_drain(struct cq *cq);
/* The library raised an event of this queue. */
void cq_on_event(struct cq *cq);
void qp_fail(struct qp *qp);
/* The data of a message that is to have a wrong byte, in other memory; NULL: the message is right. What is to happen to
 * it as a datagram goes to *datagram; NULL: it is none. */
struct bounce *message_bounce(struct qp *qp, enum fault_operation operation, const struct ibv_sge *sges, size_t count,
                              bool is_inline, const struct fault **datagram);
void bounce_free(struct bounce *bounce);
/* Posts late receives and passes on late completions. Returns when the next is due, or NEVER. */
uint64_t requests_on_time(void);

/* operations.c. With the lock. */
/* At the end of a call that posts requests. May give up the lock meanwhile. */
void after_posting(struct qp *qp);
enum fault_operation operation_of(enum ibv_wr_opcode opcode);
/* A request that the program posts. The record says whether it reaches the adapter (absent). NULL without memory. */
struct record *send_record(struct qp *qp, uint64_t wr_id, bool signaled, enum fault_operation operation, uint64_t size,
                           const void *content, size_t content_size);
extern const struct ibv_context_ops request_ops[MAX_LIBRARIES];

/* calls.c. With the lock, before the library destroys it. NULL and what the shim does not know: nothing is done. */
void cq_destroyed(struct ibv_cq *ibv);
void qp_destroyed(struct ibv_qp *ibv);
/* Whatever moved it there. */
void qp_in_error_state(struct qp *qp);

/* datagrams.c. With the lock. */
/* Posts the request of the record. A datagram with a fault is posted later, or twice. */
int send_post(struct qp *qp, struct ibv_send_wr *wr, struct record *record, const struct fault *fault);
/* Its parts, for requests that are posted together. */
bool datagrams_can_wait(const struct qp *qp, int error); /* after it was refused with this error */
int datagram_keep(struct qp *qp, const struct ibv_send_wr *wr, struct record *record, bool reorders);
/* The record of the program's own request is not in the queue yet, so it comes behind that of the second one. */
void datagram_repeat(struct qp *qp, const struct ibv_send_wr *wr, const struct record *first);
void datagrams_post(struct qp *qp); /* what is kept, as far as there is room */
/* Returns when it has to be called again, or NEVER. */
uint64_t datagrams_on_time(struct qp *qp, uint64_t now);
void datagrams_forget(struct qp *qp);

/* extended.c: what stands in for functions of struct verbs_context; extended_polling.c; extended_posting.c */
extern const struct verbs_context extended_stand_ins;
void extended_cq_take(struct cq *cq);
void extended_cq_give(struct cq *cq);
int extended_cq_poll(struct cq *cq, struct completion *out);
void extended_qp_take(struct qp *qp, struct ibv_qp_ex *ex);
void extended_qp_give(struct qp *qp);

/* thread.c. With the lock. */
/* Looks for events of an object with this descriptor of the library's. */
bool thread_watch(int fd);
void thread_unwatch(int fd);
void thread_wake(void);
void thread_forget(void); /* in a forked child */
void channel_raise(struct channel *channel, struct cq *cq);
void async_raise(struct context *context, enum ibv_event_type type, void *element);

/* adapter.c. With the lock. */
bool adapter_gone(void);
bool adapter_loses_events(void);
void adapter_renew(void); /* as before any fault */
/* A request is posted. The queue pair is NULL for a shared receive queue. */
void adapter_at_request(struct qp *qp);
/* Returns when the next fault is due, or NEVER. */
uint64_t adapter_on_time(uint64_t now);

/* connections.c */
void identifier_take(unsigned library, struct rdma_cm_id *id, bool waits); /* with the lock */
/* Before the library destroys it. With the lock, which it gives up while another thread uses the identifier. */
void identifier_forget(struct rdma_cm_id *id);
/* The queue pair that the program connects by it. With the lock. */
void identifier_uses(struct rdma_cm_id *id, const struct rdma_conn_param *parameters);
struct qp *identifier_qp(struct rdma_cm_id *id);
/* An attempt to connect. True: it fails, and *result is that of the call. */
bool connection_fails(unsigned library, struct rdma_cm_id *id, int *result);
void connection_accepted(struct rdma_cm_id *id);
/* The event that a program gets for one of the library; NULL: none. */
struct rdma_cm_event *connection_event(unsigned library, struct rdma_cm_event *event);
/* Whether the event was the shim's. */
bool connection_acknowledged(struct rdma_cm_event *event);
void connections_of_channel_end(unsigned library, struct rdma_event_channel *channel);
void connection_end(struct qp *qp);            /* with the lock */
void connection_begins(struct rdma_cm_id *id); /* it is established */
void connections_on_removal(void);             /* with the lock */
void connections_tell_removal(void);           /* with the lock */

#endif
