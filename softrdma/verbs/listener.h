/* Listening sockets, for the connection manager and for queue pairs that are connected by number. */
#ifndef SOFTVERBS_LISTENER_H
#define SOFTVERBS_LISTENER_H

#include "connector.h"
#include "soft.h"

struct listener;

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
