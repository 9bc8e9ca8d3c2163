/* A TCP connection that carries one iWARP stream: its socket, buffers, MPA start-up, and its end.
 *
 * A stream belongs to a listener until its request is handed out, then to a connector, and carries a queue pair's
 * traffic while established. Everything in it is under its lock. What has to happen towards the consumer is noted in
 * `after` and done by stream_unlock, when no lock is held.
 *
 * Receiving never stops while there is room: what cannot be handled yet (no Receive posted) stays in the buffer, and
 * the peer's end of the connection is seen all the same. Sending is one operation at a time from one of two buffers
 * while the other is filled.
 */
#ifndef SOFTND_STREAM_H
#define SOFTND_STREAM_H

#include "../wire/wire.h"
#include "adapter.h"
#include "transport.h"

enum stream_phase {
    STREAM_NEW,
    STREAM_CONNECTING,    /* active: TCP */
    STREAM_AWAIT_REPLY,   /* active: request sent */
    STREAM_OFFERED,       /* active: accepted by the peer */
    STREAM_AWAIT_REQUEST, /* passive */
    STREAM_REQUESTED,     /* passive: the program decides */
    STREAM_ACCEPTING,     /* passive: reply sent, the peer's first message is due */
    STREAM_ESTABLISHED,
    STREAM_PROBING, /* the peer closed while requests are under way: did it go or say goodbye? */
    STREAM_CLOSING, /* sends what is left, then waits for the peer's end */
    STREAM_CLOSED
};

enum {
    EVENT_OFFERED = 1,     /* to the connector: the peer accepted */
    EVENT_REFUSED = 2,     /* the peer rejected; its private data are here */
    EVENT_FAILED = 4,      /* the attempt failed with `status` */
    EVENT_ESTABLISHED = 8, /* the peer's first message came */
    EVENT_ENDED = 16,      /* an established connection ended from the other side or by an error */
    EVENT_FALLBACK = 32,   /* closed without an answer to revision 2: the peer may know revision 1 only */
    EVENT_REQUESTED = 64   /* to the listener */
};

#define STREAM_SMALL_BUFFER 1024u

struct stream_buffer {
    uint8_t *data;
    size_t size, begin, end;
    size_t word; /* where the word to the peer begins that lies in it, counted from 1; 0: none does */
    uint8_t small[STREAM_SMALL_BUFFER];
};

struct connector;
struct listener;
struct queue_pair;

struct stream {
    volatile LONG references;
    struct stream *next, **link; /* all streams, under their own lock */
    SRWLOCK lock;
    struct adapter *adapter;
    SOCKET socket;
    unsigned starting; /* calls that start to receive, without the lock */
    SOCKET left_over;  /* closed meanwhile: closed for good by the last of them */
    enum stream_phase phase;
    struct io receive_io, send_io, connect_io, resume_io;
    bool receiving, sending, fin_sent, peer_closed, resume_posted;
    DWORD send_error; /* 0: none so far */

    struct stream_buffer in;
    struct stream_buffer out[2];
    unsigned filling;
    uint64_t sent_bytes, filled_bytes;
    uint64_t taken_bytes; /* of what the peer sent, counted from its first byte */

    struct connector *connector;
    struct listener *listener;
    struct queue_pair *queue_pair;
    struct stream *next_request; /* in the listener's backlog */

    /* MPA */
    struct sockaddr_storage local, peer;
    uint8_t revision; /* of the request that was sent or taken */
    bool crc, peer_to_peer, abandoned;
    bool may_send; /* passive: only after the peer's first message */
    bool unheard;  /* active: nothing has come from the peer since the connection is established */
    ULONG own_inbound, own_outbound;   /* asked for by the program */
    ULONG peer_inbound, peer_outbound; /* the peer's ird and ord, capped */
    uint8_t private_data[MPA_MAX_PRIVATE_DATA];
    ULONG private_size;
    uint8_t own_private[MPA_MAX_PRIVATE_DATA]; /* kept for a second attempt with revision 1 */
    ULONG own_private_size;

    struct timer timer; /* holds a reference while set */

    struct {
        unsigned events;
        HRESULT status;
        bool receive_cq, initiator_cq, srq;
    } after;
};

/* Takes over the socket. One reference for the caller. */
struct stream *stream_create(struct adapter *adapter, SOCKET socket);
void stream_hold(struct stream *stream);
void stream_drop(struct stream *stream);
void stream_lock(struct stream *stream);
void stream_unlock(struct stream *stream);

/* A socket of this family bound to the address; INVALID_SOCKET with the Winsock error in *error. */
SOCKET stream_socket(const struct sockaddr_storage *address, bool listening, int *error);

/* Active: the outcome is EVENT_OFFERED, EVENT_REFUSED or EVENT_FAILED. Locked. */
void stream_connect(struct stream *stream);
/* Passive: begins to read the request. Locked. */
void stream_accepted(struct stream *stream);
/* The decisions of section H.5 and H.6. Locked; false when the connection is gone. */
bool stream_reply(struct stream *stream, bool reject, const void *private_data, ULONG private_size);
bool stream_complete(struct stream *stream);
void stream_withdraw(struct stream *stream);

/* An established connection ends from this side: EVENT_ENDED when it is known what became of all that was sent, which
 * may be at once. Locked. */
void stream_leave(struct stream *stream);
/* Sends what is left, says goodbye and closes in the background. Locked. */
void stream_goodbye(struct stream *stream);
/* Closes at once. Locked. */
void stream_cut(struct stream *stream);
/* Established: the queue pair ended by an error that was or will be told to the peer. Locked. */
void stream_end(struct stream *stream);

/* Room for `size` bytes of output, or NULL until something was sent. Locked. */
uint8_t *stream_room(struct stream *stream, size_t size);
void stream_filled(struct stream *stream, size_t size);
/* Whether the peer may have received its bytes up to this one. Locked. */
bool stream_went_out(const struct stream *stream, uint64_t position);
/* The first bytes of the input are done with, and taken. Locked. */
void stream_take(struct stream *stream, size_t size);
/* Sends what is filled, and lets the queue pair fill more. Locked. */
void stream_pump(struct stream *stream);
/* Handles buffered input again, on a worker; with and without the lock held. */
void stream_resume_input(struct stream *stream);
void stream_resume(struct stream *stream);
/* Locked. */
void stream_set_timer(struct stream *stream, uint32_t delay_ms);
void stream_clear_timer(struct stream *stream);
/* The rest of a start-up frame is due in the time for one, counted from the first call. */
void stream_await_frame(struct stream *stream);

void streams_abort(void);
void streams_remove_adapter(struct adapter *adapter);

/* handshake.c: each handles buffered input in its phase; locked. */
void handshake_request_sent(struct stream *stream);
void handshake_reply(struct stream *stream);
void handshake_request(struct stream *stream);
/* The timer of a phase of the start-up ran out. */
void handshake_timeout(struct stream *stream);
/* The connection went during the start-up; status for the program. */
void handshake_lost(struct stream *stream, HRESULT status);
/* handshake_status.c */
HRESULT handshake_status(DWORD error);

#endif
