/* Queue pair: the consumer's requests, their execution in order, and the peer's requests.
 *
 * queue_pair.c has the interface and the completions, initiator.c has the output, responder.c has the input.
 *
 * Operations are numbered in the order of posting. Those in [completed, started) were executed or are on the wire;
 * those in [started, posted) wait.
 *
 * A Send or Write completes when the peer has taken it. Two softnd ends tell each other by receipts. A receipt is a
 * Write of no bytes. Its offset says how many bytes of the connection were taken. The receipt is on its way before the
 * program can see what was taken. So it precedes everything that the program does in response: a Disconnect, a Read
 * that ends with a Terminate, the end of its process.
 *
 * Other peers get a zero-length Read behind Sends and Writes. iWARP handles messages in order, so the answer to a
 * Read, of any length, proves that the peer took what came before.
 *
 * An end that disconnects or sends a Terminate takes nothing more. It waits for the outcome of what it sent, FINISH_MS
 * at most. Receipts, answers, a Terminate or the end of the connection tell the outcome. A Flush ends this wait.
 */
#ifndef ENGINE_QUEUE_PAIR_H
#define ENGINE_QUEUE_PAIR_H

#include "wire/wire.h"
#include "adapter.h"
#include "completion_queue.h"
#include "shared_receive_queue.h"
#include "stream.h"

#define READ_SLOTS (MAX_READ_LIMIT + 2)
#define ANSWERS    128u
/* Receipts have tokens that belong to no memory. A softnd end identifies itself by a Read of no bytes whose sink
 * offset is SOFTND_READ_OFFSET. */
#define RECEIPT_TOKEN       htonl(0xFFFFFF00u)
#define FINAL_RECEIPT_TOKEN htonl(0xFFFFFF01u)
#define SOFTND_READ_OFFSET  0x736F66746E640001u /* "softnd", 1 */
/* A Write of no bytes with this token says by its offset how long the Sends behind it wait for a Receive. Peers that do
 * not know it ignore it. */
#define PATIENCE_TOKEN htonl(0xFFFFFF02u)
enum patience {
    PATIENCE_LIMITED, /* as long as the receiver lets them (F.3.5) */
    PATIENCE_ENDLESS,
    PATIENCE_OF_PEER /* as the receiver's program has said when it connected */
};
/* A Write of no bytes with this token says that a Send of the peer's has waited for a Receive for a while. Without it,
 * an end that finishes would not know that its last messages, and the FIN behind them, are not taken. If the end's
 * process is gone, its kernel answers with a reset. */
#define NOT_READY_TOKEN htonl(0xFFFFFF03u)
#define PUBLISH_BATCH   32u
#define RECEIPT_SIZE    (WIRE_TAGGED_SIZE + 4u)
/* How long an end that finishes waits for the outcome of what it sent, or for the peer to take a Terminate. */
#define FINISH_MS 2000u
/* The type of an entry in the receive queue: a peer's Send with Invalidate ended a window, and the face wanted an entry
 * of its own for that. */
#define REQUEST_PEER_INVALIDATED ((ND2_REQUEST_TYPE)(Nd2RequestTypeWrite + 1))

struct queue_pair_limits {
    uint32_t receive_depth, initiator_depth, receive_sge, initiator_sge, inline_size;
};

enum queue_pair_state {
    QP_IDLE,
    QP_CONNECTING,
    QP_CONNECTED,
    QP_FLUSHED,   /* connected, and Flush was called: later requests are canceled too */
    QP_LINGERING, /* it has ended, and nobody has noticed; requests and receives are queued until qp_fail() */
    QP_ENDED
};
/* How its connection ends. But for QP_GOES_ON, it takes no more messages and starts no more operations. */
enum queue_pair_ending {
    QP_GOES_ON,
    QP_PEER_LEFT,  /* the peer has closed the connection */
    QP_FINISHES,   /* its program disconnects */
    QP_TERMINATES, /* by a Terminate, to be sent */
    QP_TERMINATED  /* by the peer's Terminate */
};
enum operation_state { OPERATION_QUEUED, OPERATION_SENT, OPERATION_DONE, OPERATION_FAILED };

struct operation {
    void *context;
    ND2_REQUEST_TYPE type;
    uint32_t flags;
    bool invalidates;  /* a Send that invalidates remote_token; an Invalidate of the window that remote_token names */
    bool refuses_late; /* a Bind whose arguments are wrong completes with the error in its turn */
    nd_status refusal; /* why it does */
    enum operation_state state;
    nd_status status;
    int terminate; /* the peer's error, if it refused the operation */
    /* Of a scenario of faults. */
    bool asked;      /* it was asked about this one */
    bool unanswered; /* it failed because the connection is lost */
    bool silent;     /* its completion wakes nobody */
    const struct fault *fault, *message_fault;
    uint64_t due_ms; /* it does not begin, or complete, before this time; 0: not known yet */
    uint64_t length, remote_address;
    uint32_t remote_token, msn;
    uint64_t sent_mark; /* the stream's filled_bytes behind this operation */
    struct bind bind;
    uint32_t sge_count;
    /* From here on, only what is used is initialized and copied. */
    ND2_SGE sge[MAX_SGE];
    uint8_t inline_data[MAX_INLINE_DATA];
};

/* A Read Request under way. */
struct read_slot {
    struct wire_read read;
    uint64_t operation;
    uint64_t covers; /* the answer proves all operations before this number */
    uint64_t received;
    uint32_t msn;
    bool acknowledgement, discarded;
};

/* A Read Response that is due. */
struct answer {
    struct wire_read_request request;
    uint32_t done;
};

struct queue_pair {
    struct object object;
    const void *domain;
    struct lock lock;
    struct completion_queue *receive_cq, *initiator_cq;
    struct cq_user receive_user, initiator_user;
    struct shared_queue *srq;
    void *context;
    struct queue_pair_limits limits;
    enum queue_pair_state state; /* changed by become() in queue_pair.c */
    _Atomic bool early;          /* requests may be posted before it is connected */
    /* Connected without a connection manager: an end of the peer is noticed only by requests that wait for it, and not
     * at once. */
    bool unaware;
    _Atomic int patience;   /* of its Sends: an enum patience */
    _Atomic bool lets_wait; /* its program lets Sends of PATIENCE_OF_PEER wait without limit */
    int told_patience;      /* what the peer knows */
    uint64_t peer_patience; /* what the peer has said, an enum patience or a value of a later version */
    _Atomic bool refuses_reads, refuses_writes; /* those of the peer, whatever the memory grants */
    uint64_t batch_thread;                      /* this thread's requests wait until it submits its batch; 0: none */
    struct stream *stream;

    struct operation *operations;
    uint64_t posted, started, completed;
    uint64_t acknowledged, covered, unacknowledged; /* operation numbers, see initiator.c */
    uint64_t offset;                                /* in the operation that is being sent */
    uint64_t unacknowledged_bytes;
    bool initiator_stopped, answer_turn;
    uint32_t send_msn, read_msn;
    uint32_t outbound_limit;
    bool acknowledgements;
    bool sends_receipts, owes_receipt;     /* the peer understands receipts; bytes were taken since the last one */
    bool gets_receipts, got_final_receipt; /* the peer sends receipts; its final one has arrived */
    struct read_slot reads[READ_SLOTS];
    uint64_t reads_first, reads_end;

    struct answer answers[ANSWERS];
    uint64_t answers_first, answers_end;
    bool input_waits; /* until there is room in `answers` */

    struct receive_ring receives;
    struct wire_receiver receiver;
    uint32_t announced_token; /* of a Write that is longer than a segment; 0: none */
    uint64_t announced_end;
    struct receive receive; /* of the message that is arriving */
    bool has_receive, stalled;
    uint64_t stalled_ms;                        /* when that began */
    bool tells_not_ready;                       /* the peer is to be told of it */
    bool peer_not_ready;                        /* the peer has told so, and has taken nothing since */
    struct cq_entry entries[PUBLISH_BATCH + 1]; /* Receive completions, kept until the answers are on their way */
    uint32_t entry_count;
    uint64_t entries_due_ms[PUBLISH_BATCH + 1]; /* those are late that have a time; only with a scenario */

    /* Written under the locks of the stream and the queue pair; read under either. */
    enum queue_pair_ending ending; /* changed by qp_change_ending() */
    bool output_ended;             /* the final receipt and the Terminate are in the output */
    bool expired;                  /* waits for nothing more and ignores input */
    uint8_t terminate[WIRE_MAX_TERMINATE_SIZE + WIRE_MAX_TRAILER_SIZE];
    size_t terminate_size;

    /* For a scenario of faults; see faults.h. */
    uint32_t number;                      /* by order of creation */
    uint64_t lost_at_ms;                  /* its connection is lost at this time, or before; 0: it is not */
    _Atomic bool leaves;                  /* it disconnects when `later` runs out */
    struct timer later;                   /* holds a reference while set */
    bool arrival_asked;                   /* for the message that is arriving */
    uint64_t receive_due_ms;              /* it finds no Receive before this time */
    uint8_t beginning[FAULT_MAX_CONTENT]; /* of that message */
    uint32_t beginning_size;

    struct queue_pair *next_waiting; /* list of the shared receive queue, under its lock, as are these two */
    bool waiting, woken;

    struct object *owner; /* held; may be NULL */
};

/* `owner` is held until the queue pair is freed; it may be NULL, as may srq. */
nd_status qp_create(struct adapter *adapter, const void *domain, struct completion_queue *receive_cq,
                    struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
                    const struct queue_pair_limits *limits, struct object *owner, void *face, struct queue_pair **out);

/* Posting: operation_begin, then fill in what the type needs, then post. Inline data may already be in the operation.
 */
void operation_begin(struct operation *operation, void *context, ND2_REQUEST_TYPE type, uint32_t flags);
nd_status qp_post_data(struct queue_pair *queue_pair, struct operation *operation, const ND2_SGE *sge,
                       uint32_t sge_count);
nd_status qp_post_bind(struct queue_pair *queue_pair, struct operation *operation, struct region *region,
                       struct window *window, uint64_t address, uint64_t size);
nd_status qp_post_invalidate(struct queue_pair *queue_pair, struct operation *operation, struct window *window);
nd_status qp_receive(struct queue_pair *queue_pair, void *context, const ND2_SGE *sge, uint32_t sge_count);
nd_status qp_flush(struct queue_pair *queue_pair);
/* Between these two calls, requests of this thread do not start by themselves. */
void qp_start_batch(struct queue_pair *queue_pair);
void qp_submit_batch(struct queue_pair *queue_pair);

#define FENCE_AND_SILENT (ND_OP_FLAG_SILENT_SUCCESS | ND_OP_FLAG_READ_FENCE)
#define BIND_FLAGS       (FENCE_AND_SILENT | ND_OP_FLAG_ALLOW_READ | ND_OP_FLAG_ALLOW_WRITE)

/* Reserves the queue pair for a connection; false if it is or was in use. The stream then holds it. Call it without
 * locks. */
bool qp_attach(struct queue_pair *queue_pair, struct stream *stream);
/* The attempt failed: the queue pair is free again. Call it without locks. */
void qp_detach(struct queue_pair *queue_pair, struct stream *stream);
/* There is no connection and will be none: cancels everything; the oldest operation gets `first`. Call it without
 * locks. */
void qp_fail(struct queue_pair *queue_pair, nd_status first);
/* Ends the connection as a Disconnect does, but waits for no outcome: all requests are given back during the call. What
 * the peer is owed is sent in the background. Without a connection it is qp_fail(). Call it without locks. */
void qp_finish_now(struct queue_pair *queue_pair);
enum queue_pair_state qp_state(struct queue_pair *queue_pair);
void qp_resume(struct queue_pair *queue_pair);
/* It goes on at this time of now_ms(), or earlier. Under its lock. FAULT_FOREVER: never. */
void qp_go_on_at(struct queue_pair *queue_pair, uint64_t due_ms);
/* Its connection ends soon as by a Disconnect. Without its lock. */
void qp_leave(struct queue_pair *queue_pair);
/* Has its stream send what it can, or end: a completion queue may have overrun. Call it without locks. */
void qp_pump(struct queue_pair *queue_pair);
/* Under the queue pair's lock, and the stream's. False: this ending does not follow the one that has begun. */
bool qp_change_ending(struct queue_pair *queue_pair, enum queue_pair_ending ending);

/* The functions from here on need the stream's lock. */
void qp_established(struct queue_pair *queue_pair, struct stream *stream);
bool qp_has_requests(struct queue_pair *queue_pair);
/* Cancels everything; the oldest operation gets `first`. The queue pair has then ended. */
void qp_end(struct queue_pair *queue_pair, struct stream *stream, nd_status first);
void qp_cancel_receives(struct queue_pair *queue_pair, struct stream *stream);
void qp_publish(struct queue_pair *queue_pair, struct stream *stream);

/* initiator.c */
void qp_fill(struct queue_pair *queue_pair, struct stream *stream);
void qp_sent(struct queue_pair *queue_pair, struct stream *stream);
/* Whether the peer has yet to answer so many operations that were sent, and will answer. */
bool qp_awaits(struct queue_pair *queue_pair, struct stream *stream, uint32_t count);
/* Sends the zero-length Read that is the first message (RFC 6581: RTR). */
void qp_send_rtr(struct queue_pair *queue_pair, struct stream *stream);
/* Sends a Write of no bytes, which no limit counts. It is for two cases. Linux's siw overlooks a message that arrives
 * while its program accepts, until more data arrive. A peer that has sent its FIN may be gone: then TCP answers with a
 * reset. */
void qp_send_empty_write(struct queue_pair *queue_pair, struct stream *stream);
/* Nothing more is sent, by a fault. The first operation that has not been sent completely fails, once the peer has
 * taken those before it, or after FINISH_MS. False: there is none. */
bool qp_lose_rest(struct queue_pair *queue_pair, struct stream *stream);
/* Whether this end finishes while the peer has no Receive for what was sent, so that no outcome will come. */
bool qp_waits_in_vain(struct queue_pair *queue_pair);
/* Whether its oldest operation failed because the peer's host is silent. */
bool qp_unanswered(struct queue_pair *queue_pair);
/* Whether it is time for qp_end: after the peer's Terminate, if the queue pair broke, or if this end finishes, has sent
 * everything and knows the outcome of all of it. */
bool qp_finished(struct queue_pair *queue_pair, bool idle, nd_status *first);
/* The functions from here on need the queue pair's lock as well. */
/* Handles the peer's receipt. False if it claims more than was sent. */
bool initiator_receipt(struct queue_pair *queue_pair, struct stream *stream, uint64_t position);
void initiator_final_receipt(struct queue_pair *queue_pair, struct stream *stream);
void initiator_complete(struct queue_pair *queue_pair, struct stream *stream);
void initiator_answered(struct queue_pair *queue_pair, struct stream *stream, struct read_slot *slot);
void initiator_terminated(struct queue_pair *queue_pair, struct stream *stream, const struct wire_terminate *terminate);

static inline struct operation *qp_operation(struct queue_pair *queue_pair, uint64_t number)
{
    return &queue_pair->operations[number % queue_pair->limits.initiator_depth];
}

/* By a fault, it does not complete until the queue pair ends. */
static inline bool is_held(const struct operation *operation)
{
    return operation->fault != NULL && operation->fault->kind == FAULT_HOLD;
}

/* Drops the references of a Bind or Invalidate. */
void operation_release(struct operation *operation);

/* responder.c */
/* Handles complete segments in the stream's buffer. True if there may be more to handle after qp_publish. */
bool qp_input(struct queue_pair *queue_pair, struct stream *stream);
/* From now on nothing more is taken. False if that was so before. */
bool qp_finish(struct queue_pair *queue_pair, struct stream *stream);
/* The peer sends no more. Handles the outcomes among the input that is left, and tells what became of the final
 * receipt. UNSUPPORTED: the peer sends no receipts. NOT_NEEDED: this end finishes, or the peer sent a Terminate. */
enum final_receipt {
    FINAL_RECEIPT_UNSUPPORTED,
    FINAL_RECEIPT_MISSING,
    FINAL_RECEIPT_ARRIVED,
    FINAL_RECEIPT_NOT_NEEDED
};
enum final_receipt qp_drain_input(struct queue_pair *queue_pair, struct stream *stream);
/* The stream's timer ran out. True if this end finishes. */
bool qp_timeout(struct queue_pair *queue_pair, struct stream *stream);
/* Ends the connection with a Terminate, once the due answers were given. Needs the queue pair's lock as well. */
void responder_stop(struct queue_pair *queue_pair, struct stream *stream, int error,
                    const struct wire_segment *offender);

#endif
