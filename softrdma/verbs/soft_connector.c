#include "soft_connector.h"
#include "address.h"
#include "watch.h"

#include <stdlib.h>

struct soft_connector {
    struct connector connector; /* first */
    socket_handle handle;       /* bound, not used yet; this and the next under the connector's lock */
    uint8_t service_type;       /* 0: what the socket has */
};

/* An attempt that is repeated goes out from the same port if that is free. */
socket_handle soft_make_socket(struct connector *connector, const struct sockaddr_storage *peer,
                               const struct sockaddr_storage *last, nd_status *status)
{
    struct sockaddr_storage own = {.ss_family = peer->ss_family};
    struct soft_connector *soft = (struct soft_connector *)connector;
    socket_handle handle = soft->handle;

    soft->handle = NO_SOCKET;
    if (last != NULL) {
        own = *last;
        handle = socket_bound(&own, false, status);
        address_set_port((struct sockaddr *)&own, 0);
    }
    if (handle == NO_SOCKET)
        handle = socket_for_connecting(&own, status);
    if (handle != NO_SOCKET && soft->service_type != 0)
        socket_set_service_type(handle, soft->service_type);
    return handle;
}

bool soft_connector_set_service_type(struct connector *connector, uint8_t value)
{
    bool set = true;

    lock_acquire(&connector->lock);
    ((struct soft_connector *)connector)->service_type = value;
    struct stream *stream = connector->stream;
    if (stream != NULL)
        stream_hold(stream);
    lock_release(&connector->lock);
    if (stream == NULL)
        return set;
    stream_lock(stream);
    if (stream->open)
        set = socket_set_service_type(stream->socket.handle, value);
    stream_unlock(stream);
    stream_drop(stream);
    return set;
}

static void destroy(struct object *object)
{
    struct soft_connector *soft = CONTAINER_OF(object, struct soft_connector, connector.object);

    if (soft->handle != NO_SOCKET)
        socket_discard(soft->handle);
    free(soft);
}

static const struct object_class connector_class = {
    .kind = KIND_CONNECTOR,
    .closed = connector_closed,
    .destroy = destroy,
};

nd_status soft_connector_create(struct adapter *adapter, const struct connector_owner *methods, void *owner,
                                socket_handle handle, struct connector **out)
{
    struct soft_connector *soft = calloc(1, sizeof *soft);

    if (soft == NULL) {
        if (handle != NO_SOCKET)
            socket_discard(handle);
        return ND_NO_MEMORY;
    }
    soft->handle = handle;
    if (!connector_start(&soft->connector, &connector_class, adapter, methods, owner)) {
        destroy(&soft->connector.object);
        return ND_INSUFFICIENT_RESOURCES;
    }
    *out = &soft->connector;
    return ND_SUCCESS;
}
