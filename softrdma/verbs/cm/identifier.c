/* Identifiers: their life, their device, and the ports that they have. */
#include "cm.h"
#include "address.h"
#include "forking.h"

#include <stdlib.h>
#include <string.h>

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct cm_id *identifiers;
/* The default protection domain exists while an identifier uses it. */
static pthread_mutex_t domain_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct ibv_pd *domain;
static uint32_t domain_users;
static _Atomic uint32_t generation; /* of the process to which all of this belongs */

/* A forked child begins anew. A thread of its parent may have had a lock during the fork. */
static void begin_anew(void)
{
    if (!cm_foreign(generation))
        return;
    pthread_mutex_init(&list_mutex, NULL);
    pthread_mutex_init(&domain_mutex, NULL);
    identifiers = NULL;
    domain = NULL;
    domain_users = 0;
    generation = system_generation;
}

static void list_lock(void)
{
    begin_anew();
    pthread_mutex_lock(&list_mutex);
}

static void list_unlock(void)
{
    pthread_mutex_unlock(&list_mutex);
}

/* ---- The device ---- */

int cm_use_device(struct cm_id *id)
{
    struct ibv_context *context = soft_shared_context();

    if (context == NULL)
        return errno;
    if (adapter_gone(adapter_of(context)))
        return ENODEV;
    if (id->has_domain)
        return 0;
    begin_anew();
    pthread_mutex_lock(&domain_mutex);
    if (domain == NULL)
        domain = SOFT_OWN(ibv_alloc_pd(context));
    struct ibv_pd *result = domain;
    if (result != NULL)
        domain_users++;
    pthread_mutex_unlock(&domain_mutex);
    if (result == NULL)
        return ENOMEM;
    id->has_domain = true;
    pthread_mutex_lock(&id->lock);
    id->rdma.verbs = context;
    id->rdma.pd = result;
    id->rdma.port_num = 1;
    pthread_mutex_unlock(&id->lock);
    return 0;
}

static void unuse_device(struct cm_id *id)
{
    if (!id->has_domain)
        return;
    pthread_mutex_lock(&domain_mutex);
    /* A program that still has objects in the domain keeps it. */
    if (--domain_users == 0 && SOFT_OWN(ibv_dealloc_pd(domain)) == 0)
        domain = NULL;
    pthread_mutex_unlock(&domain_mutex);
}

EXPORT struct ibv_context **rdma_get_devices(int *count)
{
    struct ibv_context *context = soft_shared_context();
    struct ibv_context **list = calloc(2, sizeof *list);

    if (list != NULL && context != NULL && !adapter_gone(adapter_of(context)))
        list[0] = context;
    if (count != NULL)
        *count = list != NULL && list[0] != NULL ? 1 : 0;
    return list;
}

EXPORT void rdma_free_devices(struct ibv_context **list)
{
    free(list);
}

void cm_device_removed(void)
{
    list_lock();
    for (struct cm_id *id = identifiers; id != NULL; id = id->next)
        if (id->rdma.verbs != NULL)
            cm_report(id, RDMA_CM_EVENT_DEVICE_REMOVAL, 0);
    list_unlock();
}

/* ---- Ports ---- */

static bool same_port(const struct cm_id *a, const struct cm_id *b)
{
    const struct sockaddr *x = (const struct sockaddr *)&a->bound, *y = (const struct sockaddr *)&b->bound;

    if (address_port(x) != address_port(y))
        return false;
    if (x->sa_family == y->sa_family)
        return address_is_wildcard(x) || address_is_wildcard(y) || address_same(x, y);
    /* An IPv6 wildcard is one for IPv4 too. */
    const struct cm_id *larger = x->sa_family == AF_INET6 ? a : b;
    return address_is_wildcard((const struct sockaddr *)&larger->bound) && !larger->family_only;
}

/* Under the list's lock. */
static bool port_taken(const struct cm_id *id)
{
    for (const struct cm_id *other = identifiers; other != NULL; other = other->next)
        if (other != id && other->is_bound && !(other->reuse_address && id->reuse_address) && same_port(id, other))
            return true;
    return false;
}

static bool wants_both_families(const struct cm_id *id)
{
    return id->bound.ss_family == AF_INET6 && !id->family_only &&
           address_is_wildcard((const struct sockaddr *)&id->bound);
}

static void discard_sockets(struct cm_id *id)
{
    for (int i = 0; i < 2; i++) {
        if (id->sockets[i] != NO_SOCKET)
            socket_discard(id->sockets[i]);
        id->sockets[i] = NO_SOCKET;
    }
}

/* Whether the identifier will listen is not known yet. Sockets for a port that the program names are made as those of a
 * listener, so they ignore connections that have ended. Those for any port are not: Linux could then give one port to
 * two of them. */
static int make_sockets(struct cm_id *id)
{
    bool any = address_port((struct sockaddr *)&id->bound) == 0;
    struct sockaddr_storage made;
    nd_status status;

    id->sockets[0] = socket_bound(&id->bound, !any, &status);
    if (id->sockets[0] == NO_SOCKET)
        return soft_errno(status);
    if (!socket_address(id->sockets[0], &made))
        return ENOMEM;
    address_set_port((struct sockaddr *)&id->bound, address_port((struct sockaddr *)&made));
    if (!wants_both_families(id))
        return 0;
    struct sockaddr_storage beside = {.ss_family = AF_INET};
    address_set_port((struct sockaddr *)&beside, address_port((struct sockaddr *)&made));
    id->sockets[1] = socket_bound(&beside, !any, &status);
    return id->sockets[1] == NO_SOCKET ? soft_errno(status) : 0;
}

int cm_reserve(struct cm_id *id, const struct sockaddr_storage *address)
{
    bool any = address_port((const struct sockaddr *)address) == 0;
    int error = EADDRINUSE;

    list_lock();
    for (int attempt = 0; attempt < (any ? 16 : 1) && error == EADDRINUSE; attempt++) {
        id->bound = *address;
        if (!any && port_taken(id))
            break;
        error = make_sockets(id);
        if (error != 0)
            discard_sockets(id);
    }
    id->is_bound = error == 0;
    list_unlock();
    return error;
}

socket_handle cm_take_socket(struct cm_id *id, int which)
{
    list_lock();
    socket_handle handle = id->sockets[which];
    id->sockets[which] = NO_SOCKET;
    list_unlock();
    return handle;
}

/* ---- States ---- */

enum cm_state cm_state_of(struct cm_id *id)
{
    pthread_mutex_lock(&id->lock);
    enum cm_state state = id->state;
    pthread_mutex_unlock(&id->lock);
    return state;
}

void cm_set_state(struct cm_id *id, enum cm_state state)
{
    pthread_mutex_lock(&id->lock);
    id->state = state;
    pthread_mutex_unlock(&id->lock);
}

bool cm_advance(struct cm_id *id, enum cm_state from, enum cm_state to)
{
    pthread_mutex_lock(&id->lock);
    bool valid = id->state == from;
    if (valid)
        id->state = to;
    pthread_mutex_unlock(&id->lock);
    return valid;
}

/* ---- Life ---- */

bool cm_is_connected_type(const struct cm_id *id)
{
    return id->rdma.ps == RDMA_PS_TCP || id->rdma.ps == RDMA_PS_IB;
}

void cm_id_hold(struct cm_id *id)
{
    id->references++;
}

static void free_own(struct cm_id *id)
{
    free(id->spare_event);
    free(id->spare_ticket);
    free(id);
}

void cm_id_drop(struct cm_id *id)
{
    if (--id->references > 0)
        return;
    pthread_cond_destroy(&id->acknowledged);
    pthread_mutex_destroy(&id->lock);
    free_own(id);
}

struct cm_id *cm_id_new(struct rdma_event_channel *channel, void *context, enum rdma_port_space space,
                        enum ibv_qp_type qp_type)
{
    if (channel != NULL && cm_foreign(((struct cm_channel *)channel)->generation))
        return soft_null(EIO);
    struct cm_id *id = calloc(1, sizeof *id);
    if (id == NULL)
        return soft_null(ENOMEM);
    id->spare_event = calloc(1, sizeof(struct cm_event));
    id->spare_ticket = calloc(1, sizeof(struct cm_ticket));
    id->sync = channel == NULL;
    if (id->spare_event != NULL && id->spare_ticket != NULL)
        id->rdma.channel = id->sync ? SOFT_OWN(rdma_create_event_channel()) : channel;
    if (id->rdma.channel == NULL) {
        int error = errno;
        free_own(id);
        return soft_null(error);
    }
    soft_live[PLACE_CALL_RDMA_CREATE_ID]++;
    id->rdma.context = context;
    id->rdma.ps = space;
    id->rdma.qp_type = qp_type;
    id->references = 1;
    id->ack_timeout = CM_ACK_TIMEOUT;
    id->sockets[0] = id->sockets[1] = NO_SOCKET;
    pthread_mutex_init(&id->lock, NULL);
    pthread_cond_init(&id->acknowledged, NULL);

    list_lock();
    id->generation = generation;
    id->next = identifiers;
    id->link = &identifiers;
    if (identifiers != NULL)
        identifiers->link = &id->next;
    identifiers = id;
    list_unlock();
    return id;
}

EXPORT int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *context,
                          enum rdma_port_space space)
{
    bool datagrams = space == RDMA_PS_UDP || space == RDMA_PS_IPOIB;

    if (out == NULL || (!datagrams && space != RDMA_PS_TCP && space != RDMA_PS_IB))
        return cm_fail(EINVAL);
    if (CM_FAULT(NULL, PLACE_CALL_RDMA_CREATE_ID) != 0)
        return -1;
    struct cm_id *id = cm_id_new(channel, context, space, datagrams ? IBV_QPT_UD : IBV_QPT_RC);
    if (id == NULL)
        return -1;
    *out = &id->rdma;
    return 0;
}

static void free_memory(struct cm_id *id)
{
    free(id->rdma.route.path_rec);
    free(id->qp_attributes);
    free(id->connect_data);
    if (id->sync)
        cm_own_channel_end(id->rdma.channel);
}

EXPORT int rdma_destroy_id(struct rdma_cm_id *rdma)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL)
        return cm_fail(EINVAL);
    if (cm_foreign(id->generation)) {
        free_memory(id);
        free_own(id);
        return 0;
    }
    list_lock();
    *id->link = id->next;
    if (id->next != NULL)
        id->next->link = id->link;
    id->is_bound = false;
    discard_sockets(id);
    list_unlock();

    pthread_mutex_lock(&id->lock);
    id->destroyed = true;
    pthread_mutex_unlock(&id->lock);
    cm_listeners_close(id);
    cm_connection_close(id);
    if (timer_cancel(&id->timer))
        cm_id_drop(id);
    if (id->rdma.event != NULL)
        rdma_ack_cm_event(id->rdma.event);
    cm_events_forget(id);
    unuse_device(id);
    free_memory(id);
    cm_id_drop(id);
    soft_live[PLACE_CALL_RDMA_CREATE_ID]--;
    return 0;
}

/* ---- Options and small calls ---- */

/* A listener's connections get it with their first packet, so it is too late once it listens. */
static int set_service_type(struct cm_id *id, uint8_t value)
{
    pthread_mutex_lock(&id->lock);
    bool valid = id->state != CM_LISTENING;
    if (valid)
        id->service_type = value;
    pthread_mutex_unlock(&id->lock);
    struct connector *connector = valid ? cm_connector_hold(id) : NULL;
    if (connector != NULL) {
        valid = soft_connector_set_service_type(connector, value);
        cm_connector_drop(connector);
    }
    return valid ? 0 : EINVAL;
}

static int set_own_option(struct cm_id *id, int name, const void *value, size_t size)
{
    int number = 0;

    switch (name) {
    case RDMA_OPTION_ID_TOS:
        if (!cm_is_connected_type(id))
            return ENOSYS;
        return size == sizeof(uint8_t) ? set_service_type(id, *(const uint8_t *)value) : EINVAL;
    case RDMA_OPTION_ID_ACK_TIMEOUT:
        if (size != sizeof(uint8_t) || *(const uint8_t *)value > CM_MAX_ACK_TIMEOUT || !cm_is_connected_type(id))
            return EINVAL;
        pthread_mutex_lock(&id->lock);
        id->ack_timeout = *(const uint8_t *)value;
        pthread_mutex_unlock(&id->lock);
        return 0;
    case RDMA_OPTION_ID_REUSEADDR:
    case RDMA_OPTION_ID_AFONLY:
        if (size != sizeof number)
            return EINVAL;
        memcpy(&number, value, sizeof number);
        break;
    default:
        return ENOSYS;
    }
    enum cm_state state = cm_state_of(id);
    list_lock();
    int error = 0;
    if (name == RDMA_OPTION_ID_REUSEADDR) {
        if (state == CM_IDLE || (number != 0 && state != CM_LISTENING))
            id->reuse_address = number != 0;
        else
            error = EINVAL;
    } else if (state == CM_IDLE || state == CM_BOUND) {
        id->family_only = number != 0;
        if (id->family_only && id->sockets[1] != NO_SOCKET) {
            socket_discard(id->sockets[1]);
            id->sockets[1] = NO_SOCKET;
        }
    } else {
        error = EINVAL;
    }
    list_unlock();
    return error;
}

EXPORT int rdma_set_option(struct rdma_cm_id *rdma, int level, int name, void *value, size_t size)
{
    struct cm_id *id = cm_id(rdma);

    if (id == NULL || value == NULL || cm_foreign(id->generation))
        return cm_fail(EINVAL);
    if (level == RDMA_OPTION_ID)
        return cm_result(set_own_option(id, name, value, size));
    if (level != RDMA_OPTION_IB || name != RDMA_OPTION_IB_PATH)
        return cm_fail(ENOSYS);
    /* The paths tell nothing about TCP's way. They resolve the route nevertheless. */
    if (size == 0 || size % sizeof(struct ibv_path_data) != 0)
        return cm_fail(EINVAL);
    return cm_result(cm_resolve_route(id));
}

static __be16 port_of(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET || address->sa_family == AF_INET6)
        return htons(address_port(address));
    return 0;
}

EXPORT __be16 rdma_get_src_port(struct rdma_cm_id *id)
{
    return port_of(&id->route.addr.src_addr);
}

EXPORT __be16 rdma_get_dst_port(struct rdma_cm_id *id)
{
    return port_of(&id->route.addr.dst_addr);
}

/* The device has no enhancements of its connections to agree on. */
EXPORT int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
    if (id == NULL || id->qp != NULL || ece == NULL || ece->vendor_id == 0 || ece->comp_mask != 0)
        return cm_fail(EINVAL);
    return 0;
}

EXPORT int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
    if (id == NULL || id->qp != NULL || ece == NULL)
        return cm_fail(EINVAL);
    memset(ece, 0, sizeof *ece);
    return 0;
}
