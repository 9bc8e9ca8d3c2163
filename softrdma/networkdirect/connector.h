/* Connector: one side of a connection attempt, and of the connection (section H). */
#ifndef SOFTND_CONNECTOR_H
#define SOFTND_CONNECTOR_H

#include "com.h"
#include "face.h"
#include "stream.h"

struct connector;
struct queue_pair;

HRESULT connector_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out);
HRESULT connector_new(struct adapter *adapter, const struct object_view *as, HANDLE file, struct connector **out);
struct connector *connector_from(IUnknown *pointer, const struct adapter *adapter);

/* The arguments of Connect and Accept. */
struct connection {
    struct queue_pair *queue_pair; /* NULL: not a queue pair that this connector can use */
    ULONG inbound, outbound;       /* read limits */
    const void *private_data;
    ULONG private_size;
};

/* `local_port` applies to a connector without a bound address; 0 means any port. */
HRESULT connector_begin(struct connector *connector, const struct connection *connection,
                        const struct sockaddr *destination, ULONG size, USHORT local_port, OVERLAPPED *overlapped);
/* A Connect that does nothing and ends with ND_TIMEOUT. */
HRESULT connector_time_out(struct connector *connector, OVERLAPPED *overlapped);
HRESULT connector_answer(struct connector *connector, const struct connection *connection, OVERLAPPED *overlapped);

/* Shared by both versions. */
HRESULT STDMETHODCALLTYPE connector_complete(IND2Connector *self, OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE connector_reject(IND2Connector *self, const void *private_data, ULONG private_size);
HRESULT STDMETHODCALLTYPE connector_read_limits(IND2Connector *self, ULONG *inbound, ULONG *outbound);
HRESULT STDMETHODCALLTYPE connector_private_data(IND2Connector *self, void *out, ULONG *size);
HRESULT STDMETHODCALLTYPE connector_local_address(IND2Connector *self, struct sockaddr *out, ULONG *size);
HRESULT STDMETHODCALLTYPE connector_peer_address(IND2Connector *self, struct sockaddr *out, ULONG *size);
HRESULT STDMETHODCALLTYPE connector_notify_disconnect(IND2Connector *self, OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE connector_disconnect(IND2Connector *self, OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE connector_cancel(IND2Connector *self);

/* For the listener. connector_reserve reserves an idle connector for a request. connector_unreserve gives it back.
 * connector_adopt hands the request over, and returns false if the connector is no longer reserved. */
bool connector_reserve(struct connector *connector);
void connector_unreserve(struct connector *connector);
bool connector_adopt(struct connector *connector, struct stream *stream);

#endif
