/* Listener: a listening socket, its backlog of requests, and the GetConnectionRequest calls that take them. */
#ifndef SOFTND_LISTENER_H
#define SOFTND_LISTENER_H

#include "com.h"
#include "face.h"
#include "stream.h"

struct nd_connector;
struct listener;

HRESULT STDMETHODCALLTYPE listener_create(IND2Adapter *self, REFIID iid, HANDLE file, void **out);
HRESULT listener_new(struct adapter *adapter, const struct object_view *as, HANDLE file, void **out);

/* GetConnectionRequest. A NULL connector is one that does not belong to this adapter. */
HRESULT listener_wait(struct listener *listener, struct nd_connector *connector, OVERLAPPED *overlapped);

/* Shared by both versions. */
HRESULT STDMETHODCALLTYPE listener_bind(IND2Listener *self, const struct sockaddr *address, ULONG size);
HRESULT STDMETHODCALLTYPE listener_listen(IND2Listener *self, ULONG backlog);
HRESULT STDMETHODCALLTYPE listener_local_address(IND2Listener *self, struct sockaddr *address, ULONG *size);

#endif
