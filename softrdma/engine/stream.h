/* A TCP connection that carries one iWARP stream: its socket, its buffers, its MPA start-up and its end.
 *
 * A stream belongs to a listener until its request is handed out, and to a connector from then on. Once established,
 * it carries the traffic of a queue pair. Its lock protects everything in it. Work that reaches the consumer is noted
 * in `after`; stream_unlock does that work after it released the lock.
 *
 * Receiving continues while there is room. Input that cannot be handled yet, because no Receive is posted, stays in
 * the buffer. So the end of the peer's bytes is always seen. There is one send operation at a time: it sends one
 * buffer while the other one is filled.
 *
 * Functions marked "Locked" need the stream's lock.
 */
#ifndef ENGINE_STREAM_H
#define ENGINE_STREAM_H

#include "adapter.h"
#include "transport.h"
#include "wire/wire.h"

enum stream_phase {
    STREAM_NEW,           /* connects when its timer runs out, if that is set */
    STREAM_CONNECTING,    /* active: TCP connects */
    STREAM_AWAIT_REPLY,   /* active: the request is sent */
    STREAM_OFFERED,       /* active: the peer accepted */
    STREAM_AWAIT_REQUEST, /* passive: TCP is connected */
    STREAM_REQUESTED,     /* passive: the program decides */
    STREAM_ACCEPTING,     /* passive: the reply is sent, the peer's first message is due */
    STREAM_ESTABLISHED,
    STREAM_PROBING, /* the peer sent its FIN while requests are under way: a reset will tell if it is gone */
    STREAM_CLOSING, /* sends what is left, then waits for the peer's FIN */
    STREAM_CLOSED
};

enum {
    EVENT_OFFERED = 1,     /* to the connector: the peer accepted */
    EVENT_REFUSED = 2,     /* the peer rejected; its private data have arrived */
    EVENT_FAILED = 4,      /* the attempt failed with `status` */
    EVENT_ESTABLISHED = 8, /* the peer's first message arrived */
    EVENT_ENDED = 16,      /* the peer or an error ended an established connection */
    EVENT_FALLBACK = 32,   /* the peer closed instead of answering revision 2; it may know only revision 1 */
    EVENT_REQUESTED = 64   /* to the listener */
};

#define STREAM_SMALL_BUFFER 1024u

/* See guests.c. Both NULL: it is none. */
struct guest {
    struct guest *before, *after;
    uint64_t since_ms;
};

struct stream_buffer {
    uint8_t *data;
    size_t size, begin, end;
    size_t receipt; /* where an unsent receipt begins in this buffer, counted from 1; 0: there is none */
    uint8_t small[STREAM_SMALL_BUFFER];
};

struct connector;
struct listener;
struct queue_pair;

struct stream {
    _Atomic int32_t references;
    struct stream *next, **link; /* list of all streams, under its own lock */
    struct guest guest;
    bool gathers; /* its output waits for more; see gathering.c */
    struct stream *gathering_before, *gathering_after;
    struct lock lock;
    struct adapter *adapter;
    struct socket socket;
    bool open;              /* the socket is there, and may be used */
    unsigned receive_calls; /* calls of socket_receive that run without the lock */
    bool close_after_calls; /* the socket is to be closed when the last of these calls returns */
    enum stream_phase phase;
    struct io receive_io, send_io, connect_io, resume_io;
    bool receiving, sending, fin_sent, peer_closed, resume_posted;
    nd_status send_error; /* ND_SUCCESS: no send has failed */

    struct stream_buffer in;
    struct stream_buffer out[2];
    unsigned filling;
    uint64_t sent_bytes, filled_bytes;
    uint64_t taken_bytes;      /* how many of the peer's bytes were handled, counted from its first byte */
    bool in_filled;            /* the last receive left no room */
    bool in_leaves;            /* the receive that is pending ends, so that the large buffer can be given back */
    bool starves;              /* lacked memory, for a buffer or in the system; upkeep lets it try again */
    const struct fault *fault; /* ends it after so many bytes; NULL: none */
    bool mute;                 /* by a fault: it neither sends nor handles input */
    bool unsaid;               /* it would have sent meanwhile */
    bool send_again;           /* the system lacked memory: a send is to be repeated */

    /* For upkeep.c */
    uint64_t traffic;   /* bytes when it was there last */
    uint32_t waited_ms; /* how long requests have waited while nothing came or went */
    uint32_t asked_ms;  /* for how long TCP has asked the peer's host for a sign of life; 0: it does not */

    struct connector *connector;
    struct listener *listener;
    struct queue_pair *queue_pair;
    struct stream *next_request; /* in the listener's backlog */

    /* MPA */
    struct sockaddr_storage local, peer;
    uint8_t revision; /* MPA revision of the request */
    bool crc, peer_to_peer, abandoned;
    bool reply_begun;                     /* active: some of the peer's reply has arrived */
    bool may_send;                        /* passive: set by the peer's first message */
    bool peer_silent;                     /* active: the peer has sent nothing since the connection was established */
    uint32_t own_inbound, own_outbound;   /* what the program asked for */
    uint32_t peer_inbound, peer_outbound; /* the peer's IRD and ORD, capped */
    uint8_t private_data[MPA_MAX_PRIVATE_DATA];
    uint32_t private_size;
    uint8_t own_private[MPA_MAX_PRIVATE_DATA]; /* kept for a second attempt with revision 1 */
    uint32_t own_private_size;

    struct timer timer; /* holds a reference while set */

    struct {
        unsigned events;
        nd_status status;
        bool receive_cq, initiator_cq, srq, srq_wake;
    } after;
};

/* For read limits. */
static inline uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Takes over the socket, as socket_start() does. The caller gets one reference. */
struct stream *stream_create(struct adapter *adapter, socket_handle handle, bool accepted);
void stream_hold(struct stream *stream);
void stream_drop(struct stream *stream);
void stream_lock(struct stream *stream);
void stream_unlock(struct stream *stream);

/* Active: connects. The outcome is EVENT_OFFERED, EVENT_REFUSED or EVENT_FAILED. Locked. */
void stream_connect(struct stream *stream);
/* Passive: begins to read the request, and handles what is there. Without locks. */
void stream_accepted(struct stream *stream);
/* The program's decisions (sections H.5 and H.6). The first two return false if the connection is gone. Locked. */
bool stream_reply(struct stream *stream, bool reject, const void *private_data, uint32_t private_size);
bool stream_complete(struct stream *stream);
void stream_withdraw(struct stream *stream);
/* Nobody takes the request. Without locks. */
void stream_refuse(struct stream *stream);
/* From here on it is no listener's; its reference to that is returned, and may be NULL. Locked. */
struct object *stream_leave_listener(struct stream *stream);

/* Ends an established connection from this side. EVENT_ENDED follows when the outcome of everything sent is known,
 * perhaps during the call. Locked. */
void stream_disconnect(struct stream *stream);
/* Sends what is left, then closes in the background. Locked. */
void stream_close(struct stream *stream);
/* Closes at once. Locked. */
void stream_abort(struct stream *stream);
/* Ends an established connection after an error of the queue pair, which the peer knows or will know. Locked. */
void stream_end(struct stream *stream);

/* Its connector or listener will be told. Locked. */
void stream_tell(struct stream *stream, unsigned events, nd_status status);

/* Room for `size` bytes of output, or NULL until more was sent. Locked. */
uint8_t *stream_room(struct stream *stream, size_t size);
void stream_filled(struct stream *stream, size_t size);
/* Whether the peer may have received the bytes up to this position. Locked. */
bool stream_was_sent(const struct stream *stream, uint64_t position);
/* Removes handled bytes from the front of the input and counts them. Locked. */
void stream_take(struct stream *stream, size_t size);
/* Sends what is filled and lets the queue pair fill more. Locked. */
void stream_pump(struct stream *stream);
/* The same for a request that was posted by itself: it may wait for others. */
void stream_pump_gathering(struct stream *stream);
/* Sends what waits for others, on all streams. Without locks. */
void streams_push(void);
/* Both handle buffered input again, on a worker. stream_resume_input needs the lock, stream_resume takes it. */
void stream_resume_input(struct stream *stream);
void stream_resume(struct stream *stream);
/* Locked. */
void stream_set_timer(struct stream *stream, uint32_t delay_ms);
void stream_clear_timer(struct stream *stream);
/* Starts the time limit for a start-up frame, or for what the peer's program has to do next. Locked. */
void stream_await_frame(struct stream *stream);
void stream_await_program(struct stream *stream);

/* Ends the oldest connection that has asked for nothing for a while, so that its descriptor becomes free. False: there
 * is none. Without locks. */
bool guests_expel(void);

void streams_abort(void);
/* The process ends: tells the peers what was taken from them, and sends what can be sent at once. Without locks. */
void streams_tell_all(void);
/* In a forked child. */
void streams_forget(void);
void streams_remove_adapter(struct adapter *adapter);
/* Those of the adapter fall silent, or go on. Without locks. */
void streams_mute(struct adapter *adapter, bool mute);

/* handshake.c: these handle buffered input in their phase. Locked. */
void handshake_request_sent(struct stream *stream);
void handshake_reply(struct stream *stream);
void handshake_request(struct stream *stream);
/* A start-up phase ran out of time. */
void handshake_timeout(struct stream *stream);
/* The connection was lost during the start-up. The program gets `status`. */
void handshake_lost(struct stream *stream, nd_status status);

/* The stream cannot go on for want of memory. It waits, and tries again soon. Locked. */
void stream_starve(struct stream *stream);

/* upkeep.c. The call belongs under the lock that protects the reason. */
extern _Atomic bool upkeep_runs;
void upkeep_begin(void);
void upkeep_hurry(void);
void upkeep_forget(void);
static inline void stream_needs_upkeep(void)
{
    if (!atomic_load_explicit(&upkeep_runs, memory_order_relaxed))
        upkeep_begin();
}

#endif
