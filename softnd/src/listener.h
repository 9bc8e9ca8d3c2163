/* Listener: a listening socket, its backlog of requests, and the GetConnectionRequest calls that take them. */
#ifndef SOFTND_LISTENER_H
#define SOFTND_LISTENER_H

#include "adapter.h"
#include "stream.h"

struct listener;

HRESULT listener_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out);
struct object *listener_object(struct listener *listener);
/* A connection has sent its MPA request; without locks. */
void listener_request(struct listener *listener, struct stream *stream);

#endif
