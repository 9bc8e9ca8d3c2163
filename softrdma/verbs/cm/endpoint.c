/* Endpoints: identifiers whose calls wait for their events, and the look-up of names. */
#include "cm.h"

#include <netdb.h>
#include <rdma/rdma_verbs.h>
#include <stdlib.h>
#include <string.h>

/* What librdmacm waits for a resolution. */
#define RESOLVE_MS 2000

/* ---- Endpoints ---- */

static int begin_passive(struct cm_id *id, const struct rdma_addrinfo *from, struct ibv_pd *domain,
                         const struct ibv_qp_init_attr *attributes)
{
    if (SOFT_OWN(rdma_bind_addr(&id->rdma, from->ai_src_addr)) != 0)
        return -1;
    if (domain != NULL)
        id->rdma.pd = domain;
    if (attributes == NULL)
        return 0;
    id->qp_attributes = malloc(sizeof *id->qp_attributes);
    if (id->qp_attributes == NULL)
        return cm_fail(ENOMEM);
    *id->qp_attributes = *attributes;
    id->qp_attributes->qp_type = id->rdma.qp_type;
    return 0;
}

static int begin_active(struct cm_id *id, const struct rdma_addrinfo *from, struct ibv_pd *domain,
                        struct ibv_qp_init_attr *attributes)
{
    if (SOFT_OWN(rdma_resolve_addr(&id->rdma, from->ai_src_addr, from->ai_dst_addr, RESOLVE_MS)) != 0 ||
        SOFT_OWN(rdma_resolve_route(&id->rdma, RESOLVE_MS)) != 0)
        return -1;
    if (attributes != NULL) {
        attributes->qp_type = id->rdma.qp_type;
        if (SOFT_OWN(rdma_create_qp(&id->rdma, domain, attributes)) != 0)
            return -1;
    }
    if (from->ai_connect_len > 0) {
        id->connect_data = malloc(from->ai_connect_len);
        if (id->connect_data == NULL)
            return cm_fail(ENOMEM);
        memcpy(id->connect_data, from->ai_connect, from->ai_connect_len);
        id->connect_size = from->ai_connect_len;
    }
    return 0;
}

EXPORT int rdma_create_ep(struct rdma_cm_id **out, struct rdma_addrinfo *from, struct ibv_pd *domain,
                          struct ibv_qp_init_attr *attributes)
{
    if (out == NULL || from == NULL)
        return cm_fail(EINVAL);
    struct rdma_cm_id *made;
    if (rdma_create_id(NULL, &made, NULL, (enum rdma_port_space)from->ai_port_space) != 0)
        return -1;
    made->qp_type = (enum ibv_qp_type)from->ai_qp_type;
    bool passive = (from->ai_flags & RAI_PASSIVE) != 0;
    if ((passive ? begin_passive(cm_id(made), from, domain, attributes)
                 : begin_active(cm_id(made), from, domain, attributes)) != 0) {
        int error = errno;
        rdma_destroy_ep(made);
        return cm_fail(error);
    }
    *out = made;
    return 0;
}

EXPORT void rdma_destroy_ep(struct rdma_cm_id *id)
{
    if (id == NULL)
        return;
    rdma_destroy_qp(id);
    rdma_destroy_srq(id);
    rdma_destroy_id(id);
}

EXPORT int rdma_get_request(struct rdma_cm_id *rdma, struct rdma_cm_id **out)
{
    struct cm_id *listener = cm_id(rdma);
    struct rdma_cm_event *event;
    int error = 0;

    if (listener == NULL || out == NULL || !listener->sync)
        return cm_fail(EINVAL);
    if (CM_FAULT(listener, PLACE_CALL_RDMA_GET_REQUEST) != 0)
        return -1;
    if (rdma->event != NULL)
        rdma_ack_cm_event(rdma->event);
    rdma->event = NULL;
    if (SOFT_OWN(rdma_get_cm_event(rdma->channel, &event)) != 0)
        return -1;
    if (event->status != 0)
        error = event->status < 0 ? -event->status : event->status;
    else if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
        error = EINVAL;
    if (error != 0) {
        rdma->event = event;
        return cm_fail(error);
    }
    if (listener->qp_attributes != NULL) {
        struct ibv_qp_init_attr attributes = *listener->qp_attributes;
        if (SOFT_OWN(rdma_create_qp(event->id, rdma->pd, &attributes)) != 0) {
            error = errno;
            rdma_destroy_id(event->id);
            rdma->event = event;
            return cm_fail(error);
        }
    }
    *out = event->id;
    (*out)->event = event;
    return 0;
}

/* ---- Names ---- */

static struct addrinfo hints_for(const struct rdma_addrinfo *in)
{
    struct addrinfo out = {.ai_family = in->ai_family};

    if ((in->ai_flags & RAI_PASSIVE) != 0)
        out.ai_flags |= AI_PASSIVE;
    if ((in->ai_flags & RAI_NUMERICHOST) != 0)
        out.ai_flags |= AI_NUMERICHOST;
    if (in->ai_family != AF_INET && in->ai_family != AF_INET6)
        out.ai_family = AF_UNSPEC;
    if (in->ai_qp_type == IBV_QPT_UD)
        out.ai_socktype = SOCK_DGRAM;
    else if (in->ai_qp_type != 0)
        out.ai_socktype = SOCK_STREAM;
    if (in->ai_port_space == RDMA_PS_TCP)
        out.ai_protocol = IPPROTO_TCP;
    else if (in->ai_port_space == RDMA_PS_UDP || in->ai_port_space == RDMA_PS_IPOIB)
        out.ai_protocol = IPPROTO_UDP;
    else if (in->ai_port_space == RDMA_PS_IB && out.ai_socktype != 0)
        out.ai_protocol = out.ai_socktype == SOCK_DGRAM ? IPPROTO_UDP : IPPROTO_TCP;
    return out;
}

static int copy_address(const struct sockaddr *address, socklen_t size, struct sockaddr **out, socklen_t *out_size)
{
    *out = malloc(size);
    if (*out == NULL)
        return ENOMEM;
    memcpy(*out, address, size);
    *out_size = size;
    return 0;
}

static int take_found(const struct addrinfo *found, struct rdma_addrinfo *out)
{
    bool passive = (found->ai_flags & AI_PASSIVE) != 0;

    if (out->ai_qp_type == 0)
        out->ai_qp_type = found->ai_socktype == SOCK_DGRAM ? IBV_QPT_UD : IBV_QPT_RC;
    if (out->ai_port_space == 0)
        out->ai_port_space = found->ai_protocol == IPPROTO_UDP ? RDMA_PS_UDP : RDMA_PS_TCP;
    out->ai_family = found->ai_family;
    if (passive)
        out->ai_flags = RAI_PASSIVE;
    if (found->ai_canonname != NULL) {
        char **name = passive ? &out->ai_src_canonname : &out->ai_dst_canonname;
        *name = strdup(found->ai_canonname);
        if (*name == NULL)
            return ENOMEM;
    }
    return passive ? copy_address(found->ai_addr, found->ai_addrlen, &out->ai_src_addr, &out->ai_src_len)
                   : copy_address(found->ai_addr, found->ai_addrlen, &out->ai_dst_addr, &out->ai_dst_len);
}

/* Returns an errno, or a negative error of getaddrinfo(). */
static int look_up(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo *out)
{
    struct addrinfo wanted, *found;
    int error = 0;

    if (hints != NULL) {
        out->ai_qp_type = hints->ai_qp_type;
        out->ai_port_space = hints->ai_port_space;
        wanted = hints_for(hints);
    }
    if (node != NULL || service != NULL) {
        error = getaddrinfo(node, service, hints != NULL ? &wanted : NULL, &found);
        if (error != 0)
            return error;
        error = take_found(found, out);
        freeaddrinfo(found);
    } else {
        out->ai_flags = hints->ai_flags;
        out->ai_family = hints->ai_family;
        if (hints->ai_dst_len > 0)
            error = copy_address(hints->ai_dst_addr, hints->ai_dst_len, &out->ai_dst_addr, &out->ai_dst_len);
    }
    if (error == 0 && out->ai_src_len == 0 && hints != NULL && hints->ai_src_len > 0)
        error = copy_address(hints->ai_src_addr, hints->ai_src_len, &out->ai_src_addr, &out->ai_src_len);
    return error;
}

EXPORT int rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints,
                            struct rdma_addrinfo **out)
{
    if (out == NULL || (node == NULL && service == NULL && hints == NULL))
        return cm_fail(EINVAL);
    struct rdma_addrinfo *made = calloc(1, sizeof *made);
    if (made == NULL)
        return cm_fail(ENOMEM);
    int error = look_up(node, service, hints, made);
    if (error == 0) {
        *out = made;
        return 0;
    }
    rdma_freeaddrinfo(made);
    return error < 0 ? error : cm_fail(error);
}

EXPORT void rdma_freeaddrinfo(struct rdma_addrinfo *list)
{
    while (list != NULL) {
        struct rdma_addrinfo *next = list->ai_next;
        free(list->ai_connect);
        free(list->ai_route);
        free(list->ai_src_canonname);
        free(list->ai_dst_canonname);
        free(list->ai_src_addr);
        free(list->ai_dst_addr);
        free(list);
        list = next;
    }
}
