/* The state of a connector, which connector.c and connector_attempt.c share. */
#ifndef SOFTND_CONNECTOR_STATE_H
#define SOFTND_CONNECTOR_STATE_H

#include "com.h"
#include "connector.h"

enum connector_state {
    IDLE,
    CONNECTING,
    OFFERED,
    RESERVED,
    REQUESTED,
    ACCEPTING,
    ESTABLISHED,
    PEER_GONE,
    DISCONNECTING,
    DISCONNECTED,
    FAILED
};

struct connector {
    struct com com;
    struct object object;
    struct lock lock;
    enum connector_state state;
    struct stream *stream;
    struct queue_pair *queue_pair;         /* held while connecting and connected */
    struct sockaddr_storage bound_address; /* set by Bind */
    bool bound;
    USHORT local_port;    /* used without Bind; 0 means any port */
    socket_handle socket; /* bound, not used yet */
    struct sockaddr_storage local, peer;
    ULONG inbound, outbound; /* what GetReadLimits reports */
    bool has_private_data;
    uint8_t private_data[MPA_MAX_PRIVATE_DATA];
    ULONG private_size;
    HRESULT disconnect_result;
};

/* The references that a connector gives up. They are dropped after its lock was released. */
struct detached {
    struct stream *stream;
    struct queue_pair *queue_pair;
};

struct detached connector_detach(struct connector *connector);
enum teardown { KEEP_STREAM, WITHDRAW_STREAM, ABORT_STREAM };

void detached_tear_down(struct detached detached, enum teardown teardown);
/* Under both locks, or while no other thread knows the stream. */
void connector_attach(struct connector *connector, struct stream *stream);

/* connector_attempt.c */
HRESULT STDMETHODCALLTYPE connector_bind(IND2Connector *self, const struct sockaddr *address, ULONG size);
HRESULT STDMETHODCALLTYPE connector_connect(IND2Connector *self, IUnknown *queue_pair,
                                            const struct sockaddr *destination, ULONG size, ULONG inbound,
                                            ULONG outbound, const void *private_data, ULONG private_size,
                                            OVERLAPPED *overlapped);
HRESULT STDMETHODCALLTYPE connector_accept(IND2Connector *self, IUnknown *queue_pair, ULONG inbound, ULONG outbound,
                                           const void *private_data, ULONG private_size, OVERLAPPED *overlapped);
/* For a peer that closed without answering revision 2: tries again with revision 1. */
HRESULT connector_fall_back(struct connector *connector, struct stream *old, struct detached *detached);

#endif
