/* Connector: one side of a connection attempt, and of the connection (section H). */
#ifndef SOFTND_CONNECTOR_H
#define SOFTND_CONNECTOR_H

#include "adapter.h"
#include "stream.h"

struct connector;

HRESULT connector_create(struct adapter *adapter, REFIID iid, HANDLE file, void **out);
struct connector *connector_from(IUnknown *pointer, const struct adapter *adapter);
struct object *connector_object(struct connector *connector);

/* For the listener: reserves an idle connector for a request, gives it up, and hands it one (false: not any more). */
bool connector_reserve(struct connector *connector);
void connector_unreserve(struct connector *connector);
bool connector_adopt(struct connector *connector, struct stream *stream);

/* What a stream has to tell; without locks. */
void connector_event(struct connector *connector, struct stream *stream, unsigned events, HRESULT status);

#endif
