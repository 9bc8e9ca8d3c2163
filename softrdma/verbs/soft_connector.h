/* The face's part of a connector (engine/connector.h): its sockets. */
#ifndef SOFTVERBS_SOFT_CONNECTOR_H
#define SOFTVERBS_SOFT_CONNECTOR_H

#include "connector.h"

/* `handle` is bound, and is for its first attempt; NO_SOCKET: it makes one. Taken over also on failure. */
nd_status soft_connector_create(struct adapter *adapter, const struct connector_owner *methods, void *owner,
                                socket_handle handle, struct connector **out);
/* The type of service of its connection, whatever state that is in. False: the system refuses it. */
bool soft_connector_set_service_type(struct connector *connector, uint8_t value);
/* For owners. */
socket_handle soft_make_socket(struct connector *connector, const struct sockaddr_storage *peer,
                               const struct sockaddr_storage *last, nd_status *status);

#endif
