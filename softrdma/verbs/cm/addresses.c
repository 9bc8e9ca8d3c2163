/* Binding, and the resolution of addresses and routes. TCP finds its way by itself, so there is nothing to ask a peer.
 * The calls know the outcome at once, and its event follows. */
#include "cm.h"
#include "driving.h"
#include "address.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What a RoCE adapter would report. Programs print it. */
#define PATH_HOPS      64
#define PATH_EXACTLY   2
#define PATH_LIFE_TIME 18
#define DEFAULT_PKEY   0xFFFF
/* An address is looked for with any port. */
#define PORT_DISCARD 9

/* 0: not an address of IPv4 or IPv6. */
static size_t size_of(const struct sockaddr *address)
{
    if (address == NULL || (address->sa_family != AF_INET && address->sa_family != AF_INET6))
        return 0;
    return (size_t)address_size(address);
}

static struct sockaddr_storage copied(const struct sockaddr *address)
{
    struct sockaddr_storage copy = {0};

    memcpy(&copy, address, size_of(address));
    return copy;
}

static const struct sockaddr *plain(const struct sockaddr_storage *address)
{
    return (const struct sockaddr *)address;
}

/* The unions of struct rdma_addr have room for a struct sockaddr_storage. */
void cm_set_addresses(struct cm_id *id, const struct sockaddr_storage *local, const struct sockaddr_storage *peer)
{
    struct rdma_addr *out = &id->rdma.route.addr;

    if (local != NULL) {
        out->src_storage = *local;
        soft_gid_of(plain(local), &out->addr.ibaddr.sgid);
        out->addr.ibaddr.pkey = htons(DEFAULT_PKEY);
    }
    if (peer != NULL) {
        out->dst_storage = *peer;
        soft_gid_of(plain(peer), &out->addr.ibaddr.dgid);
    }
}

int cm_set_path(struct cm_id *id)
{
    struct rdma_route *route = &id->rdma.route;
    struct ibv_sa_path_rec *path = calloc(1, sizeof *path);

    if (path == NULL)
        return ENOMEM;
    path->sgid = route->addr.addr.ibaddr.sgid;
    path->dgid = route->addr.addr.ibaddr.dgid;
    path->hop_limit = PATH_HOPS;
    path->reversible = 1;
    path->numb_path = 1;
    path->pkey = htons(DEFAULT_PKEY);
    path->mtu_selector = path->rate_selector = path->packet_life_time_selector = PATH_EXACTLY;
    path->mtu = IBV_MTU_4096;
    path->rate = IBV_RATE_100_GBPS;
    path->packet_life_time = PATH_LIFE_TIME;
    free(route->path_rec);
    route->path_rec = path;
    route->num_paths = 1;
    return 0;
}

/* ---- Binding ---- */

static int bind_idle(struct cm_id *id, const struct sockaddr *address)
{
    struct sockaddr_storage wanted = copied(address);
    bool wildcard = address_is_wildcard(address);

    if (!cm_is_connected_type(id))
        return EPROTONOSUPPORT;
    if (address_is_link_local_v6(address) && ((const struct sockaddr_in6 *)address)->sin6_scope_id == 0)
        return EINVAL;
    if (!wildcard && !soft_serves(address))
        return ENODEV;
    int error = cm_reserve(id, &wanted);
    if (error == 0 && !wildcard)
        error = cm_use_device(id);
    if (error != 0)
        return error;
    cm_set_addresses(id, &id->bound, NULL);
    cm_set_state(id, CM_BOUND);
    return 0;
}

EXPORT int rdma_bind_addr(struct rdma_cm_id *rdma, struct sockaddr *address)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || cm_foreign(id->generation) || size_of(address) == 0 || cm_state_of(id) != CM_IDLE)
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_BIND_ADDR) != 0)
        return -1;
    return cm_result(bind_idle(id, address));
}

/* ---- Resolving ---- */

/* The address of this machine from which the destination is reached. `from` is a bound address, or a wildcard. */
static int find_source(const struct sockaddr *destination, const struct sockaddr_storage *from,
                       struct sockaddr_storage *out)
{
    struct sockaddr_storage to = copied(destination), source = *from;
    bool named = !address_is_wildcard(plain(from));
    socklen_t size = sizeof *out;
    int error = 0;

    int handle = socket(destination->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (handle < 0)
        return errno;
    address_set_port((struct sockaddr *)&to, PORT_DISCARD);
    address_set_port((struct sockaddr *)&source, 0);
    *out = source;
    if ((named && bind(handle, plain(&source), (socklen_t)size_of(plain(&source))) != 0) ||
        connect(handle, plain(&to), (socklen_t)size_of(destination)) != 0 ||
        (!named && getsockname(handle, (struct sockaddr *)out, &size) != 0))
        error = errno;
    close(handle);
    return error;
}

static struct sockaddr_storage loopback(int family)
{
    struct sockaddr_storage address = {.ss_family = (sa_family_t)family};

    if (family == AF_INET)
        ((struct sockaddr_in *)&address)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else
        ((struct sockaddr_in6 *)&address)->sin6_addr = in6addr_loopback;
    return address;
}

/* The event's status in *status. */
static int resolve(struct cm_id *id, const struct sockaddr *source, const struct sockaddr *destination, int *status)
{
    struct sockaddr_storage from = {.ss_family = destination->sa_family}, to = copied(destination), local;
    enum cm_state state = cm_state_of(id);

    if (!cm_is_connected_type(id))
        return EPROTONOSUPPORT;
    if (state != CM_IDLE && state != CM_BOUND)
        return EINVAL;
    /* This is how programs say that the address is the machine's own. */
    if (address_is_wildcard(destination)) {
        to = loopback(destination->sa_family);
        address_set_port((struct sockaddr *)&to, address_port(destination));
    }
    /* Without a wish of the program, the socket is bound when it connects. So a port can serve many connections. */
    bool names_source = source != NULL && (!address_is_wildcard(source) || address_port(source) != 0);
    if (state == CM_IDLE && names_source) {
        if (source->sa_family != destination->sa_family)
            return EINVAL;
        int error = bind_idle(id, source);
        if (error != 0)
            return error;
    }
    if (id->is_bound)
        from = id->bound;
    if (from.ss_family != destination->sa_family)
        return EINVAL;
    int error = find_source(plain(&to), &from, &local);
    if (error != 0)
        return error;
    address_set_port((struct sockaddr *)&local, address_port(plain(&from)));
    *status = soft_serves(plain(&local)) ? -cm_use_device(id) : -ENODEV;
    cm_set_addresses(id, &local, &to);
    return 0;
}

EXPORT int rdma_resolve_addr(struct rdma_cm_id *rdma, struct sockaddr *source, struct sockaddr *destination,
                             int timeout_ms)
{
    struct cm_id *id = cm_id(rdma);
    int status = 0;

    UNUSED(timeout_ms);
    /* The peer may wait to hear that its last message was taken before it listens. */
    workers_drive();
    if (id == NULL || cm_foreign(id->generation) || size_of(destination) == 0 ||
        (source != NULL && size_of(source) == 0))
        return cm_fail(EINVAL);
    if (CM_FAULT(id, PLACE_CALL_RDMA_RESOLVE_ADDR) != 0)
        return -1;
    int error = resolve(id, source, destination, &status);
    if (error != 0)
        return cm_fail(error);
    if (status == 0)
        cm_set_state(id, CM_ADDRESS_RESOLVED);
    cm_report(id, status == 0 ? RDMA_CM_EVENT_ADDR_RESOLVED : RDMA_CM_EVENT_ADDR_ERROR, status);
    return cm_wait(id);
}

int cm_resolve_route(struct cm_id *id)
{
    int error = cm_state_of(id) == CM_ADDRESS_RESOLVED ? cm_set_path(id) : EINVAL;

    if (error == 0) {
        cm_set_state(id, CM_ROUTE_RESOLVED);
        cm_report(id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    }
    return error;
}

EXPORT int rdma_resolve_route(struct rdma_cm_id *rdma, int timeout_ms)
{
    struct cm_id *id = cm_id(rdma);

    UNUSED(timeout_ms);
    if (CM_FAULT(id, PLACE_CALL_RDMA_RESOLVE_ROUTE) != 0)
        return -1;
    int error = id == NULL || cm_foreign(id->generation) ? EINVAL : cm_resolve_route(id);
    return error == 0 ? cm_wait(id) : cm_fail(error);
}
