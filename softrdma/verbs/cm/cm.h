/* The connection manager: what rdma_cm identifiers, channels and events are inside.
 *
 * Programs see RoCE's sequence of events and its statuses, although the wire is iWARP. MPA's peer-to-peer set-up has
 * the same three steps: a request, a reply, and a first message that completes the connection. So a client whose queue
 * pair is its own gets CONNECT_RESPONSE and calls rdma_establish(). The server's ESTABLISHED means that the client did.
 *
 * Everything happens in the process. A worker that learns something about a connection queues an event; the program's
 * thread that takes the event does what belongs to it, such as making the identifier of a request, or completing a
 * connection whose queue pair librdmacm manages.
 *
 * Locks, outermost first: the list of identifiers, an identifier, an event queue. No lock is held during calls of
 * connectors and listeners.
 */
#ifndef SOFTVERBS_CM_H
#define SOFTVERBS_CM_H

#include "listener.h"
#include "soft_connector.h"
#include "transport.h"

#include <errno.h>
#include <rdma/rdma_cma.h>

/* What both siw and the field for its size in struct rdma_conn_param can carry. */
#define CM_MAX_PRIVATE_DATA 252u
#define CM_ACK_TIMEOUT      18
#define CM_MAX_ACK_TIMEOUT  31

enum cm_state {
    CM_IDLE,
    CM_BOUND,
    CM_LISTENING,
    CM_ADDRESS_RESOLVED,
    CM_ROUTE_RESOLVED,
    /* From here on the identifier has, or had, a connector. */
    CM_CONNECTING,
    CM_OFFERED,   /* active: the peer accepted */
    CM_REQUESTED, /* passive: the program decides */
    CM_ACCEPTING,
    CM_ESTABLISHED,
    CM_ENDED,
    CM_FAILED /* the attempt failed or was rejected */
};

struct cm_channel {
    struct rdma_event_channel rdma; /* first */
    uint32_t generation;            /* of the process that made it */
    struct event_queue events;      /* struct cm_ticket */
};

struct cm_id {
    struct rdma_cm_id rdma;     /* first */
    struct cm_id *next, **link; /* list of identifier.c, under its lock */
    uint32_t generation;
    _Atomic int32_t references; /* the program's and the timer's */

    /* Under the lock of the list. */
    struct sockaddr_storage bound;
    bool is_bound;
    socket_handle sockets[2]; /* bound, not used yet; the second one is for IPv4 beside an IPv6 wildcard */

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t acknowledged;
    enum cm_state state;
    bool sync;      /* it has a channel of its own, and calls wait for their events */
    bool destroyed; /* it gets no more events */
    bool reuse_address, family_only;
    bool has_domain;
    bool attempt_reported; /* CONNECT_ERROR was reported in place of a later DISCONNECTED */
    uint32_t queued;       /* its events in the channel's list */
    uint32_t given, done;  /* its events that the program took, and acknowledged */
    struct listener *listeners[2];
    uint32_t backlog, waiting_requests;
    struct connector *connector;
    uint32_t qp_number;         /* of the connection's queue pair */
    uint32_t inbound, outbound; /* read limits: the peer's until accepted, then what both agreed on */
    uint8_t service_type;       /* of the connections that it begins or lets in */
    uint8_t ack_timeout;        /* TCP has its own; programs are told this one */
    struct timer timer;         /* until TIMEWAIT_EXIT; holds a reference while set */

    /* For the event that memory is not left for. Programs wait for events without a limit. */
    struct cm_event *_Atomic spare_event;
    struct cm_ticket *_Atomic spare_ticket;

    struct ibv_qp_init_attr *qp_attributes; /* rdma_create_ep(): for the queue pairs of requests */
    void *connect_data;                     /* rdma_create_ep(): precedes the private data */
    size_t connect_size;
};

struct cm_event {
    struct rdma_cm_event rdma; /* first */
    struct cm_event *next;
    struct cm_id *owner;         /* whose destruction waits for its acknowledgement */
    struct connector *connector; /* of a request that nobody has taken */
    uint8_t private_data[256];
};

/* An entry of a channel's list. event_remove() frees it, never the event itself. */
struct cm_ticket {
    struct event event; /* first */
    struct cm_event *what;
};

static inline struct cm_id *cm_id(struct rdma_cm_id *id)
{
    return (struct cm_id *)id;
}

static inline int cm_fail(int error)
{
    errno = error;
    return -1;
}

/* A call that returns an errno, in librdmacm's form. */
static inline int cm_result(int error)
{
    return error == 0 ? 0 : cm_fail(error);
}

/* device.c calls this when the adapter is removed. */
void cm_device_removed(void);

/* events.c */
/* Ends a channel that the program has not made. */
void cm_own_channel_end(struct rdma_event_channel *channel);
/* NULL if memory is short. */
struct cm_event *cm_event_new(struct cm_id *owner, enum rdma_cm_event_type type, int status);
/* Queues the event, or frees it if the owner gets no more events. Not under the owner's lock. */
void cm_event_put(struct cm_event *event);
/* Both in one. */
void cm_report(struct cm_id *id, enum rdma_cm_event_type type, int status);
void cm_event_set_parameters(struct cm_event *event, const struct connector_offer *offer);
/* The identifier is being destroyed: frees its events in the list, then waits until the others are acknowledged. */
void cm_events_forget(struct cm_id *id);
/* An identifier with a channel of its own waits for its next event, and takes over the event's status. */
int cm_wait(struct cm_id *id);
/* True if the object is of a parent process. Nothing but its memory may be touched then. */
bool cm_foreign(uint32_t generation);

/* identifier.c */
/* channel NULL: the identifier gets a channel of its own. */
struct cm_id *cm_id_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space space,
                        enum ibv_qp_type qp_type);
void cm_id_hold(struct cm_id *id);
void cm_id_drop(struct cm_id *id);
/* Gives it the device, a protection domain and port 1. Returns an errno. */
int cm_use_device(struct cm_id *id);
bool cm_is_connected_type(const struct cm_id *id);
/* Makes sockets for the address, which no other identifier of the process may have. Returns an errno. */
int cm_reserve(struct cm_id *id, const struct sockaddr_storage *address);
/* One of these sockets; the caller has it from then on. NO_SOCKET: there is none. */
socket_handle cm_take_socket(struct cm_id *id, int which);

/* Each takes the lock. cm_advance: false if it is in another state than `from`. */
enum cm_state cm_state_of(struct cm_id *id);
void cm_set_state(struct cm_id *id, enum cm_state state);
bool cm_advance(struct cm_id *id, enum cm_state from, enum cm_state to);

/* addresses.c */
/* After the address: the route is resolved, and the program hears of it. Returns an errno. */
int cm_resolve_route(struct cm_id *id);
void cm_set_addresses(struct cm_id *id, const struct sockaddr_storage *local, const struct sockaddr_storage *peer);
int cm_set_path(struct cm_id *id);

/* queue_pair.c */
/* Moves the identifier's own queue pair, if it has one, so that it can receive and send. */
void cm_make_qp_ready(struct cm_id *id);

/* connection.c */
extern const struct connector_owner cm_connector_owner;
/* The peer accepted: completes the connection, and moves the queue pair if it is the identifier's. Returns an errno. */
int cm_complete_connection(struct cm_id *id);
/* Ends the connection without telling the program. */
void cm_connection_close(struct cm_id *id);
/* A call on the identifier's connector needs a reference, since another thread may destroy the
 * identifier. NULL: there is none. */
struct connector *cm_connector_hold(struct cm_id *id);
void cm_connector_drop(struct connector *connector);
void cm_listeners_close(struct cm_id *id);
/* An errno for a failed connection. */
int cm_connection_errno(nd_status status);

/* ../faults.c: what a scenario has at a call of the connection manager: an errno, which is also set, or 0. `id` may be
 * NULL. */
int cm_fault(const struct cm_id *id, enum fault_call call, const void *caller);
#define CM_FAULT(id, call) (cm_fault(id, call, __builtin_return_address(0)))

#endif
