/* A connector: one side of an attempt to connect, and of the connection that comes of it.
 *
 * Streams report what the peer does, programs call through their face. Both go through one table of states and events
 * (connector.c). What came of it reaches the owner as news: one at a time, in order and without locks. After
 * connector_closed() no news begin; connector_closed() waits for those that are being told on another thread.
 *
 * A face embeds a connector in its own structure, and its class of objects calls connector_closed().
 */
#ifndef ENGINE_CONNECTOR_H
#define ENGINE_CONNECTOR_H

#include "stream.h"

enum connector_state {
    CONNECTOR_IDLE = 1,
    CONNECTOR_RESERVED, /* for a listener's request that has not come yet */
    CONNECTOR_CONNECTING,
    CONNECTOR_OFFERED,   /* active: the peer accepted; the program completes or rejects */
    CONNECTOR_REQUESTED, /* passive: the program accepts or rejects */
    CONNECTOR_ACCEPTING, /* passive: the peer's first message is due */
    CONNECTOR_ESTABLISHED,
    CONNECTOR_PEER_GONE,     /* ended by the peer or an error; the program has not disconnected */
    CONNECTOR_DISCONNECTING, /* the outcome of what was sent is not known yet */
    CONNECTOR_DISCONNECTED,
    CONNECTOR_FAILED,
    CONNECTOR_CLOSED,
    CONNECTOR_STATES
};

enum connector_event {
    CALL_RESERVE,
    CALL_UNRESERVE,
    CALL_ADOPT, /* a listener hands over a request */
    CALL_CONNECT,
    CALL_COMPLETE,
    CALL_ACCEPT,
    CALL_REJECT,
    CALL_CANCEL,
    CALL_DISCONNECT,
    CALL_CLOSE,
    PEER_OFFERS,
    PEER_REFUSES,
    PEER_CONTINUES, /* passive: its first message has arrived */
    ATTEMPT_FAILS,
    ATTEMPT_ENDS, /* because of this side: its queue pair or its adapter is gone */
    CONNECTION_LOST,
    CONNECTION_ENDS,
    CONNECTION_ENDS_FOR_GOOD, /* with an owner that does not disconnect afterwards */
    CONNECTOR_EVENTS
};

enum connector_news {
    NEWS_NONE,
    NEWS_OFFERED,
    NEWS_REFUSED,       /* by the peer's program; there may be private data */
    NEWS_FAILED,        /* active: ND_CONNECTION_INVALID if a TCP server there speaks no iWARP */
    NEWS_OFFER_LOST,    /* active: before the program completed */
    NEWS_ACCEPT_FAILED, /* passive */
    NEWS_ESTABLISHED,   /* passive */
    NEWS_ENDED,         /* by the peer or an error */
    NEWS_DISCONNECTED   /* by this side */
};

struct connector;

struct connector_owner {
    void (*tell)(void *owner, struct connector *connector, enum connector_news news, nd_status status);
    /* A socket for an attempt to reach the peer. `last` is the local address of the attempt that this one repeats;
     * NULL: it is the first. NO_SOCKET, and *status says why. Called under the connector's lock. */
    socket_handle (*make_socket)(struct connector *connector, const struct sockaddr_storage *peer,
                                 const struct sockaddr_storage *last, nd_status *status);
    bool disconnects; /* also after NEWS_ENDED, and then NEWS_DISCONNECTED is due */
};

/* Valid from CONNECTOR_OFFERED or from the request on. */
struct connector_offer {
    uint32_t inbound, outbound; /* the peer's limits from this side's view: what this side may be asked, may ask */
    bool has_private_data;
    bool abandoned; /* passive: the peer has given up its request meanwhile */
    uint8_t private_data[MPA_MAX_PRIVATE_DATA];
    uint32_t private_size;
    struct sockaddr_storage local, peer; /* the local one while connecting, too */
};

struct connector {
    struct object object;
    struct lock lock; /* of everything below; outside of a stream's */
    struct condition idle;
    enum connector_state state;
    struct stream *stream;
    struct queue_pair *qp; /* held while connecting and connected */
    struct connector_offer offer;
    unsigned insists; /* how often it still tries again */
    const struct connector_owner *methods;
    void *owner;
    bool telling;
    uint64_t teller; /* the thread */
    struct {
        enum connector_news news;
        nd_status status;
    } untold[4]; /* a program gets no further before it is told */
    unsigned untold_count;
};

struct connection_arguments {
    bool insists; /* active: if nobody listens, tries again for a moment */
    uint32_t inbound, outbound;
    const void *private_data;
    uint32_t private_size;
};

/* The face's last word on a call that is otherwise valid. Called under the connector's lock. Another status than
 * ND_SUCCESS becomes the call's, and nothing has happened. */
struct permit {
    nd_status (*ask)(struct permit *permit, struct connector *connector);
};

/* `connector` is zeroed memory. False if the workers cannot be started. */
bool connector_start(struct connector *connector, const struct object_class *class, struct adapter *adapter,
                     const struct connector_owner *methods, void *owner);
/* For the class: ends whatever there is. */
void connector_closed(struct object *object);
/* Ends whatever there is and drops the face's reference. NULL: does nothing. */
static inline void connector_close(struct connector *connector)
{
    if (connector != NULL)
        object_close(&connector->object);
}
void connector_set_owner(struct connector *connector, const struct connector_owner *methods, void *owner);

/* Makes the step of a call that needs nothing else. False: the call is not valid in this state. */
bool connector_step(struct connector *connector, enum connector_event call);
bool connector_allows(struct connector *connector, enum connector_event call);
enum connector_state connector_state(struct connector *connector);

/* In the following calls `permit` may be NULL. ND_CONNECTION_INVALID: not in this state.
 *
 * Active. The queue pair may have requests already. */
nd_status connector_connect(struct connector *connector, struct queue_pair *qp, const struct sockaddr_storage *peer,
                            const struct connection_arguments *arguments, struct permit *permit);
/* After NEWS_OFFERED. The connection is up afterwards. ND_IO_TIMEOUT: it is lost. */
nd_status connector_complete(struct connector *connector, struct permit *permit);
/* Passive, after a request. */
nd_status connector_accept(struct connector *connector, struct queue_pair *qp,
                           const struct connection_arguments *arguments, struct permit *permit);
/* Passive after a request, or active after NEWS_OFFERED. */
nd_status connector_reject(struct connector *connector, const void *private_data, uint32_t private_size);
/* Ends an established connection. News follow, perhaps during the call. */
nd_status connector_disconnect(struct connector *connector, struct permit *permit);
/* Takes over the request of a stream that no other thread uses. False: not in this state. */
bool connector_adopt(struct connector *connector, struct stream *stream);
struct connector_offer connector_offer(struct connector *connector);

/* For streams: EVENT_... of stream.h have happened. */
void connector_event(struct connector *connector, struct stream *stream, unsigned events, nd_status status);

#endif
