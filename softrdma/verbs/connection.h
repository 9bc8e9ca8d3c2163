/* Connections and listening sockets, for the connection manager and for queue pairs that programs connect by hand.
 *
 * A connector is one side of an attempt and of the connection that comes of it. Its owner gets events, one at a time
 * and without locks. After connector_close() no event begins; connector_close() waits for one that runs on another
 * thread.
 */
#ifndef SOFTVERBS_CONNECTION_H
#define SOFTVERBS_CONNECTION_H

#include "soft.h"
#include "stream.h"

enum connector_event_type {
    CONNECTOR_OFFERED, /* active: the peer accepted; connector_complete() or connector_reject() follows */
    CONNECTOR_REFUSED, /* active: the peer's program rejected; there may be private data */
    CONNECTOR_FAILED,  /* the attempt failed with `status`: ND_CONNECTION_INVALID if a TCP server there speaks no iWARP
                        */
    CONNECTOR_ESTABLISHED, /* passive: the peer's first message arrived */
    CONNECTOR_ENDED        /* an established connection is over */
};

struct connector_owner {
    void (*event)(void *owner, struct connector *connector, enum connector_event_type type, nd_status status);
};

struct connector;
struct listener;

/* Valid from CONNECTOR_OFFERED or from the request on. */
struct connector_offer {
    uint32_t inbound, outbound; /* the peer's limits from this side's view: what this side may be asked, may ask */
    const uint8_t *private_data;
    uint32_t private_size;
    struct sockaddr_storage local, peer;
};

struct connection_arguments {
    bool insists; /* active: if nobody listens, tries again for a moment */
    uint32_t inbound, outbound;
    const void *private_data;
    uint32_t private_size;
};

nd_status connector_create(struct adapter *adapter, const struct connector_owner *methods, void *owner,
                           struct connector **out);
/* Ends whatever there is and drops the caller's reference. */
void connector_close(struct connector *connector);
/* Another owner for a connector that a listener has made. */
void connector_set_owner(struct connector *connector, const struct connector_owner *methods, void *owner);

/* Active. `handle` is a socket bound with socket_bound(), taken over also on failure, or NO_SOCKET. The queue pair may
 * have requests already. */
nd_status connector_connect(struct connector *connector, struct queue_pair *qp, socket_handle handle,
                            const struct sockaddr_storage *peer, const struct connection_arguments *arguments);
/* After CONNECTOR_OFFERED. The connection is up afterwards. */
nd_status connector_complete(struct connector *connector);
/* Passive, after a request. */
nd_status connector_accept(struct connector *connector, struct queue_pair *qp,
                           const struct connection_arguments *arguments);
/* Passive after a request, or active after CONNECTOR_OFFERED. */
nd_status connector_reject(struct connector *connector, const void *private_data, uint32_t private_size);
/* Ends an established connection. CONNECTOR_ENDED follows, perhaps during the call. ND_CONNECTION_INVALID: there is
 * none. */
nd_status connector_disconnect(struct connector *connector);
void connector_offer(struct connector *connector, struct connector_offer *out);
bool connector_is_established(struct connector *connector);
/* The type of service of its connection, whatever state that is in. False: the system refuses it. */
bool connector_set_service_type(struct connector *connector, uint8_t value);
/* The local address while connecting and after. */
struct sockaddr_storage connector_local(struct connector *connector);

/* A request has arrived. The callee gets the connector; it may close it at once, which rejects the request. */
typedef void listener_arrived(void *owner, struct connector *connector);

/* Takes over a socket that is bound with socket_bound(..., true, ...), also on failure. */
nd_status listener_create(struct adapter *adapter, socket_handle handle, listener_arrived *arrived, void *owner,
                          struct listener **out);
/* Nobody connects from here on, and the address is free. listener_close() follows. */
void listener_stop(struct listener *listener);
/* No request arrives afterwards. Requests that were handed out stay. */
void listener_close(struct listener *listener);

#endif
