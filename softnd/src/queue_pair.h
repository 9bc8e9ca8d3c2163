/* Queue pair: the consumer's requests, their execution in order, and what the peer asks for.
 *
 * queue_pair.c has the interface and the completions, initiator.c what goes out, responder.c what comes in.
 *
 * Operations are numbered in posting order: [completed, started) are executed or on the wire, [started, posted) wait.
 *
 * A Send or Write is complete when the peer has taken it. Two ends of this provider tell each other how far they took
 * what came, in words: a word is a Write of no bytes whose offset counts the bytes of the connection that were taken. It
 * is on its way before the program can see what was taken, and so before all that the program does about it: a
 * Disconnect, a Read that ends with a Terminate, the end of its process.
 *
 * With any other peer a zero-length Read follows: iWARP handles everything in order, so its answer proves that the peer
 * took what came before. Any other Read's answer proves the same.
 *
 * Who leaves, by a Disconnect or with a Terminate, takes nothing more and hears what became of what it sent, from the
 * peer's words, answers, Terminate or end, for LEAVE_MS at most.
 */
#ifndef SOFTND_QUEUE_PAIR_H
#define SOFTND_QUEUE_PAIR_H

#include "../wire/wire.h"
#include "adapter.h"
#include "completion_queue.h"
#include "shared_receive_queue.h"
#include "stream.h"

#define READ_SLOTS (MAX_READ_LIMIT + 2)
#define ANSWERS 128u
/* The tokens of words, of the last one too, which belong to no memory; and the sink's offset in a Read of no bytes by which
 * this provider makes itself known. */
#define WORD_TOKEN htonl(0xFFFFFF00u)
#define LAST_WORD_TOKEN htonl(0xFFFFFF01u)
#define GREETING 0x736F66746E640001u /* "softnd", 1 */
#define PUBLISH_BATCH 32u
/* How long who leaves waits for the peer: for its verdict on what was sent, or until it takes a Terminate. */
#define LEAVE_MS 2000u
/* What a peer's Send with Invalidate puts into the receive queue for a window with a result of its own (version 1). */
#define REQUEST_PEER_INVALIDATED ((ND2_REQUEST_TYPE)(Nd2RequestTypeWrite + 1))

struct queue_pair_limits {
    ULONG receive_depth, initiator_depth, receive_sge, initiator_sge, inline_size;
};

enum queue_pair_state { QP_IDLE, QP_CONNECTING, QP_CONNECTED, QP_ENDED };
enum operation_state { OPERATION_QUEUED, OPERATION_SENT, OPERATION_DONE, OPERATION_FAILED };

struct operation {
    void *context;
    ND2_REQUEST_TYPE type;
    ULONG flags;
    bool invalidates; /* a Send that invalidates remote_token (version 1) */
    enum operation_state state;
    HRESULT status;
    uint64_t length, remote_address;
    uint32_t remote_token, msn;
    uint64_t sent_mark; /* of the stream's filled bytes, at its end */
    ULONG sge_count;
    ND2_SGE sge[MAX_SGE];
    struct bind bind;
    uint8_t inline_data[MAX_INLINE_DATA];
};

/* A Read Request under way. */
struct read_slot {
    struct wire_read read;
    uint64_t operation;
    uint64_t covers; /* its answer proves all operations before this number */
    uint64_t received;
    uint32_t msn;
    bool acknowledgement, discarded;
};

/* A Read Response to give. */
struct answer {
    struct wire_read_request request;
    uint32_t done;
};

struct queue_pair {
    struct object object;
    SRWLOCK lock;
    struct completion_queue *receive_cq, *initiator_cq;
    struct cq_user receive_user, initiator_user;
    struct shared_queue *srq;
    void *context;
    struct queue_pair_limits limits;
    enum queue_pair_state state;
    bool flushed; /* by Flush while connected: later requests are cancelled too */
    bool broken;  /* a completion queue overran */
    DWORD batch_thread; /* version 1: what it posts waits until it submits the batch; 0: none */
    struct stream *stream;

    struct operation *operations;
    uint64_t posted, started, completed;
    uint64_t acknowledged, covered, unacknowledged; /* operation numbers, see initiator.c */
    uint64_t offset;                                /* of the operation being sent */
    uint64_t unacknowledged_bytes;
    bool initiator_stopped, answer_turn;
    uint32_t send_msn, read_msn;
    ULONG outbound_limit;
    bool acknowledgements;
    bool tells, owes_word; /* this end tells the peer how far it took; something was taken since it last did */
    bool told, peer_leaves; /* the peer tells; its last word has come */
    struct read_slot reads[READ_SLOTS];
    uint64_t reads_first, reads_end;

    struct answer answers[ANSWERS];
    uint64_t answers_first, answers_end;
    bool input_waits; /* for room in answers */

    struct receive_ring receives;
    struct wire_receiver receiver;
    uint32_t announced_token; /* of a Write that is longer than a segment; 0: none */
    uint64_t announced_end;
    struct receive receive; /* of the message that is coming in */
    bool has_receive, stalled;
    struct cq_entry entries[PUBLISH_BATCH + 1]; /* Receive completions, until the answers are on their way */
    ULONG entry_count;

    /* These change under the stream's lock as well, and may be read under either. */
    bool leaving;    /* nothing more is taken or begun */
    bool ending;     /* with a Terminate: it is to be sent, or one was received */
    bool said_all;   /* the last word and the Terminate are out */
    bool expired;    /* nothing more is waited for or heard */
    bool terminated; /* a Terminate was received */
    uint8_t terminate[WIRE_MAX_TERMINATE_SIZE + WIRE_MAX_TRAILER_SIZE];
    size_t terminate_size;

    struct queue_pair *next_waiting; /* the shared queue's, under its lock */
    bool waiting;

    struct object *maker; /* version 1: the connector, held */
    ULONG inbound_read_limit, outbound_read_limit;
};

HRESULT qp_create(struct adapter *adapter, REFIID iid, struct completion_queue *receive_cq,
                  struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
                  const struct queue_pair_limits *limits, void **out);
HRESULT qp_new(struct adapter *adapter, const struct object_view *as, struct completion_queue *receive_cq,
               struct completion_queue *initiator_cq, struct shared_queue *srq, void *context,
               const struct queue_pair_limits *limits, struct queue_pair **out);
struct queue_pair *qp_from(IUnknown *pointer);

/* Posting, shared by both versions. An operation is begun, filled with what its type needs, and posted; inline data may
 * be in it already. */
void operation_begin(struct operation *operation, void *context, ND2_REQUEST_TYPE type, ULONG flags);
HRESULT qp_post_data(struct queue_pair *queue_pair, struct operation *operation, const ND2_SGE *sge, ULONG sge_count);
HRESULT qp_post_bind(struct queue_pair *queue_pair, struct operation *operation, struct region *region,
                     struct window *window, const void *buffer, SIZE_T size);
HRESULT STDMETHODCALLTYPE qp_invalidate(IND2QueuePair *self, void *context, IUnknown *window_pointer, ULONG flags);
HRESULT STDMETHODCALLTYPE qp_receive(IND2QueuePair *self, void *context, const ND2_SGE *sge, ULONG sge_count);
HRESULT STDMETHODCALLTYPE qp_flush(IND2QueuePair *self);
/* Between these two, what this thread posts does not start by itself. */
void qp_start_batch(struct queue_pair *queue_pair);
void qp_submit_batch(struct queue_pair *queue_pair);

#define FENCE_AND_SILENT (ND_OP_FLAG_SILENT_SUCCESS | ND_OP_FLAG_READ_FENCE)
#define BIND_FLAGS (FENCE_AND_SILENT | ND_OP_FLAG_ALLOW_READ | ND_OP_FLAG_ALLOW_WRITE)

/* Connecting: false when it is or was in use. The stream then holds the queue pair. Without locks. */
bool qp_attach(struct queue_pair *queue_pair, struct stream *stream);
/* The attempt failed: the queue pair is as before. Without locks. */
void qp_detach(struct queue_pair *queue_pair, struct stream *stream);
void qp_resume(struct queue_pair *queue_pair);
/* A completion queue overran: the connection ends. Without locks. */
void qp_break(struct queue_pair *queue_pair);

/* All of these with the stream's lock held. */
void qp_established(struct queue_pair *queue_pair, struct stream *stream);
bool qp_has_requests(struct queue_pair *queue_pair);
/* Cancels everything; the oldest operation gets `first`. The queue pair is then ended. */
void qp_end(struct queue_pair *queue_pair, struct stream *stream, HRESULT first);
void qp_cancel_receives(struct queue_pair *queue_pair, struct stream *stream);
void qp_publish(struct queue_pair *queue_pair, struct stream *stream);

/* initiator.c */
void qp_fill(struct queue_pair *queue_pair, struct stream *stream);
void qp_sent(struct queue_pair *queue_pair, struct stream *stream);
/* A zero-length Read, the first message. */
void qp_greet(struct queue_pair *queue_pair, struct stream *stream);
/* A Write of no bytes, which no limit counts. For a peer that has not answered: Linux's siw overlooks what comes while it
 * accepts, until more comes. And for one that has closed its side: TCP tells by a reset whether it is gone altogether. */
void qp_nudge(struct queue_pair *queue_pair, struct stream *stream);
/* Time for qp_end: this end left, nothing is left to send, and it is known what became of all that was sent; or a Terminate
 * came in; or the queue pair broke. */
bool qp_finished(struct queue_pair *queue_pair, bool idle, HRESULT *first);
/* With the queue pair's lock as well: */
/* The peer's word: false when it claims more than it can have. */
bool initiator_told(struct queue_pair *queue_pair, struct stream *stream, uint64_t position);
void initiator_last_word(struct queue_pair *queue_pair, struct stream *stream);
void initiator_complete(struct queue_pair *queue_pair, struct stream *stream);
void initiator_answered(struct queue_pair *queue_pair, struct stream *stream, struct read_slot *slot);
void initiator_terminated(struct queue_pair *queue_pair, struct stream *stream, const struct wire_terminate *why);
bool initiator_place(struct queue_pair *queue_pair, const struct operation *operation, uint64_t offset,
                     const uint8_t *data, size_t size);

static inline struct operation *qp_operation(struct queue_pair *queue_pair, uint64_t number)
{
    return &queue_pair->operations[number % queue_pair->limits.initiator_depth];
}

/* Lets go of what a Bind or Invalidate refers to. */
void operation_release(struct operation *operation);

/* responder.c */
/* Handles what is complete in the stream's buffer; true when there may be more to handle after qp_publish. */
bool qp_input(struct queue_pair *queue_pair, struct stream *stream);
/* Takes nothing more. False when it left already. */
bool qp_leave(struct queue_pair *queue_pair, struct stream *stream);
/* The peer sends no more: hears what has come and is not handled. Whether the peer said that it leaves; NONE from a peer
 * that does not say so, EXPECTED when this end left. */
enum farewell { FAREWELL_NONE, FAREWELL_MISSING, FAREWELL_SAID, FAREWELL_EXPECTED };
enum farewell qp_hear_out(struct queue_pair *queue_pair, struct stream *stream);
/* The stream's timer ran out: true for an end that leaves. */
bool qp_timeout(struct queue_pair *queue_pair, struct stream *stream);
/* With the queue pair's lock as well: ends the connection with a Terminate once the answers due are given. */
void responder_stop(struct queue_pair *queue_pair, struct stream *stream, int error,
                    const struct wire_segment *offender);

#endif
