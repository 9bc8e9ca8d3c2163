/* Connector: one side of a connection attempt, and of the connection (section H). */
#ifndef SOFTND_ND_CONNECTOR_H
#define SOFTND_ND_CONNECTOR_H

#include "nd_adapter.h"
#include "connector.h"

struct nd_connector {
    struct com com;
    struct connector connector;            /* its lock protects what follows, too */
    struct sockaddr_storage bound_address; /* set by Bind */
    bool bound;
    USHORT local_port;    /* used without Bind; 0 means any port */
    socket_handle socket; /* bound, not used yet */
    HRESULT disconnect_result;
    bool version1;
};

HRESULT STDMETHODCALLTYPE nd_connector_create(IND2Adapter *self, REFIID iid, HANDLE file, void **out);
HRESULT nd_connector_new(struct adapter *adapter, const struct object_view *as, HANDLE file, void **out);
struct nd_connector *nd_connector_from(IUnknown *pointer, const struct adapter *adapter);

/* The arguments of Connect and Accept. */
struct connection {
    struct queue_pair *queue_pair; /* NULL: not a queue pair that this connector can use */
    ULONG inbound, outbound;       /* read limits */
    const void *private_data;
    ULONG private_size;
};

/* `local_port` applies to a connector without a bound address; 0 means any port. */
HRESULT nd_connector_begin(struct nd_connector *connector, const struct connection *connection,
                           const struct sockaddr *destination, ULONG size, USHORT local_port, OVERLAPPED *overlapped);
HRESULT nd_connector_answer(struct nd_connector *connector, const struct connection *connection,
                            OVERLAPPED *overlapped);

/* Shared by both versions. */
HRESULT STDMETHODCALLTYPE nd_connector_complete(IND2Connector *self, OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE nd_connector_reject(IND2Connector *self, const void *private_data, ULONG private_size);
HRESULT STDMETHODCALLTYPE nd_connector_read_limits(IND2Connector *self, ULONG *inbound, ULONG *outbound);
HRESULT STDMETHODCALLTYPE nd_connector_private_data(IND2Connector *self, void *out, ULONG *size);
HRESULT STDMETHODCALLTYPE nd_connector_local_address(IND2Connector *self, struct sockaddr *out, ULONG *size);
HRESULT STDMETHODCALLTYPE nd_connector_peer_address(IND2Connector *self, struct sockaddr *out, ULONG *size);
HRESULT STDMETHODCALLTYPE nd_connector_notify_disconnect(IND2Connector *self, OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE nd_connector_disconnect(IND2Connector *self, OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE nd_connector_cancel(IND2Connector *self);

/* For the listener. nd_connector_reserve reserves an idle connector for a request. nd_connector_unreserve gives it
 * back. nd_connector_adopt hands the request over, and returns false if the connector is no longer reserved. */
bool nd_connector_reserve(struct nd_connector *connector);
void nd_connector_unreserve(struct nd_connector *connector);
bool nd_connector_adopt(struct nd_connector *connector, struct stream *stream);

#endif
