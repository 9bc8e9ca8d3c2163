/* Events, and calls that Python cannot make by itself.

   A function that takes an event copies it and acknowledges it in one step. While an event is not acknowledged,
   destroying its object waits for ever. After the acknowledgement the object may be gone, so nothing touches it. */

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct ibv_mw *ndpy_alloc_window(struct ibv_pd *pd, int type)
{
    return ibv_alloc_mw(pd, (enum ibv_mw_type)type);
}

int ndpy_free_window(struct ibv_mw *window)
{
    return ibv_dealloc_mw(window);
}

int ndpy_arm(struct ibv_cq *cq, int solicited_only)
{
    return ibv_req_notify_cq(cq, solicited_only);
}

/* The library's function fills the first version of the structure, which is a prefix of today's. */
int ndpy_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out)
{
    memset(out, 0, sizeof *out);
    return ibv_query_port(context, port, (struct _compat_ibv_port_attr *)out);
}

int ndpy_register(struct ibv_pd *pd, void *address, size_t length, int access, struct ndpy_registration *out)
{
    out->region = (uintptr_t)ibv_reg_mr(pd, address, length, access);
    return out->region ? 0 : errno ? errno : EIO;
}

int ndpy_register_at(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access,
                     struct ndpy_registration *out)
{
    out->region = (uintptr_t)ibv_reg_mr_iova2(pd, address, length, iova, (unsigned int)access);
    return out->region ? 0 : errno ? errno : EIO;
}

int ndpy_register_dmabuf(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,
                         struct ndpy_registration *out)
{
    out->region = (uintptr_t)ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access);
    return out->region ? 0 : errno ? errno : EIO;
}

int ndpy_register_null(struct ibv_pd *pd, struct ndpy_registration *out)
{
    out->region = (uintptr_t)ibv_alloc_null_mr(pd);
    return out->region ? 0 : errno ? errno : EIO;
}

/* Each element of an advice has 32 bits for its length. */
#define LONGEST_ADVICE (1u << 30)

int ndpy_prefetch(struct ibv_mr *region, uint64_t address, uint64_t length, int write)
{
    while (length) {
        uint32_t part = length < LONGEST_ADVICE ? (uint32_t)length : LONGEST_ADVICE;
        struct ibv_sge sge = {address, part, region->lkey};
        int error =
            ibv_advise_mr(region->pd, write ? IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE : IBV_ADVISE_MR_ADVICE_PREFETCH,
                          IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1);

        if (error)
            return error > 0 ? error : errno;
        address += part;
        length -= part;
    }
    return 0;
}

static int register_memory(void *domain, void *address, size_t length, uint32_t rights, struct ndpy_memory *out)
{
    struct ibv_mr *region = ibv_reg_mr(domain, address, length, (int)rights);

    if (!region)
        return errno ? errno : EIO;
    out->native = region;
    out->local_token = region->lkey;
    out->remote_token = region->rkey;
    return 0;
}

static int deregister_memory(void *native)
{
    return ibv_dereg_mr(native);
}

const struct ndpy_registrar *ndpy_registrar(void)
{
    static const struct ndpy_registrar registrar = {
        .register_memory = register_memory,
        .deregister_memory = deregister_memory,
    };

    return &registrar;
}

/* As ibv_query_device_ex(), which is inline. It may call a function of the library, but nothing here links to the
 * library. */
static int query_extended(struct ibv_context *context, struct ibv_device_attr_ex *out)
{
    struct verbs_context *extended = verbs_get_ctx_op(context, query_device_ex);

    memset(out, 0, sizeof *out);
    return extended ? extended->query_device_ex(context, NULL, out, sizeof *out) : EOPNOTSUPP;
}

int ndpy_query_on_demand(struct ibv_context *context, uint64_t *general, uint32_t *connected)
{
    struct ibv_device_attr_ex attributes;
    int error = query_extended(context, &attributes);

    *general = error ? 0 : attributes.odp_caps.general_caps;
    *connected = error ? 0 : attributes.odp_caps.per_transport_caps.rc_odp_caps;
    return error;
}

uint64_t ndpy_device_memory_size(struct ibv_context *context)
{
    struct ibv_device_attr_ex attributes;

    return query_extended(context, &attributes) ? 0 : attributes.max_dm_size;
}

struct ibv_dm *ndpy_alloc_device_memory(struct ibv_context *context, uint64_t length, uint32_t log_alignment)
{
    struct ibv_alloc_dm_attr request = {.length = length, .log_align_req = log_alignment};

    return ibv_alloc_dm(context, &request);
}

int ndpy_free_device_memory(struct ibv_dm *memory)
{
    return ibv_free_dm(memory);
}

int ndpy_copy_to_device(struct ibv_dm *memory, uint64_t offset, const void *from, size_t length)
{
    return ibv_memcpy_to_dm(memory, offset, from, length);
}

int ndpy_copy_from_device(void *to, struct ibv_dm *memory, uint64_t offset, size_t length)
{
    return ibv_memcpy_from_dm(to, memory, offset, length);
}

int ndpy_register_device_memory(struct ibv_pd *pd, struct ibv_dm *memory, uint64_t offset, size_t length, int access,
                                struct ndpy_registration *out)
{
    out->region = (uintptr_t)ibv_reg_dm_mr(pd, memory, offset, length, (unsigned int)access | IBV_ACCESS_ZERO_BASED);
    return out->region ? 0 : errno ? errno : EIO;
}

int ndpy_next_async_event(struct ibv_context *context, struct ndpy_async_event *out)
{
    struct ibv_async_event event;

    if (ibv_get_async_event(context, &event))
        return errno ? errno : EIO;
    memset(out, 0, sizeof *out);
    out->type = event.event_type;
    switch (event.event_type) {
    case IBV_EVENT_CQ_ERR:
        out->key = (uintptr_t)event.element.cq->cq_context;
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        out->key = (uintptr_t)event.element.qp->qp_context;
        break;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        out->key = (uintptr_t)event.element.srq->srq_context;
        break;
    default:
        out->port = (uint32_t)event.element.port_num;
        break;
    }
    of_context(context)->call_ibv_ack_async_event(&event);
    return 0;
}

int ndpy_take_cq_events(struct ibv_comp_channel *channel)
{
    struct ibv_cq *cq;
    void *context;
    int count = 0;

    while (!ibv_get_cq_event(channel, &cq, &context)) {
        ibv_ack_cq_events(cq, 1);
        count++;
    }
    return count;
}

static void copy_private_data(const void *data, uint8_t length, struct ndpy_cm_event *out)
{
    if (data) {
        out->private_data_length = length;
        memcpy(out->private_data, data, length);
    }
}

static void copy_connection_event(const struct rdma_cm_event *event, struct ndpy_cm_event *out)
{
    const struct rdma_conn_param *param = &event->param.conn;

    switch (event->event) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
    case RDMA_CM_EVENT_ESTABLISHED:
    case RDMA_CM_EVENT_REJECTED:
        out->qp_num = param->qp_num;
        out->responder_resources = param->responder_resources;
        out->initiator_depth = param->initiator_depth;
        out->srq = param->srq;
        copy_private_data(param->private_data, param->private_data_len, out);
        break;
    default:
        break;
    }
}

/* The private data of a MULTICAST_JOIN is a pointer of the library. */
static void copy_datagram_event(const struct rdma_cm_event *event, struct ndpy_cm_event *out)
{
    const struct rdma_ud_param *param = &event->param.ud;

    if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST || event->event == RDMA_CM_EVENT_ESTABLISHED)
        copy_private_data(param->private_data, param->private_data_len, out);
    if (event->event == RDMA_CM_EVENT_MULTICAST_JOIN || event->event == RDMA_CM_EVENT_ESTABLISHED) {
        out->qp_num = param->qp_num;
        out->qkey = param->qkey;
        out->path = param->ah_attr;
    }
}

/* The interface of a link-local address does not cross the network. That of the address listened at is it. */
static void complete_scope(struct sockaddr *address, const struct sockaddr *listener)
{
    struct sockaddr_in6 *incomplete = (struct sockaddr_in6 *)address;
    const struct sockaddr_in6 *known = (const struct sockaddr_in6 *)listener;

    if (address->sa_family == AF_INET6 && listener->sa_family == AF_INET6 && !incomplete->sin6_scope_id &&
        IN6_IS_ADDR_LINKLOCAL(&incomplete->sin6_addr) && IN6_IS_ADDR_LINKLOCAL(&known->sin6_addr))
        incomplete->sin6_scope_id = known->sin6_scope_id;
}

int ndpy_next_cm_event(struct rdma_event_channel *channel, uint64_t new_key, struct ndpy_cm_event *out)
{
    struct rdma_cm_event *event;

    if (rdma_get_cm_event(channel, &event))
        return errno ? errno : EIO;
    memset(out, 0, offsetof(struct ndpy_cm_event, private_data));
    out->type = event->event;
    out->status = event->status;
    out->id = event->id;
    if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        out->listener = (uintptr_t)event->listen_id->context;
        event->id->context = (void *)(uintptr_t)new_key;
        complete_scope(&event->id->route.addr.src_addr, &event->listen_id->route.addr.src_addr);
        complete_scope(&event->id->route.addr.dst_addr, &event->listen_id->route.addr.src_addr);
    }
    out->key = (uintptr_t)event->id->context;
    if (event->id->ps == RDMA_PS_UDP)
        copy_datagram_event(event, out);
    else
        copy_connection_event(event, out);
    of_event_channel(channel)->call_rdma_ack_cm_event(event);
    return 0;
}

const char *ndpy_cm_device(struct rdma_cm_id *id)
{
    return id->verbs ? ibv_get_device_name(id->verbs->device) : "";
}

int ndpy_cm_let_go(struct rdma_cm_id *id)
{
    int null, error = 0;

    /* softverbs has no files of the kernel. A device that only a scenario removes stays, and librdmacm will use it
       again. The kernel removes this folder first, before it waits for those who use the device. */
    if (!id->verbs || of_cm_id(id)->call_softverbs_addresses)
        return 0;
    if (is_faulty(of_cm_id(id)) && access(id->verbs->device->dev_path, F_OK) == 0)
        return 0;
    null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0)
        return errno;
    /* The library's structures stay valid. Only their descriptors change: they refer to /dev/null from now on. */
    if (dup3(null, id->verbs->cmd_fd, O_CLOEXEC) < 0 || dup3(null, id->verbs->async_fd, O_CLOEXEC) < 0)
        error = errno;
    close(null);
    return error;
}

int ndpy_cm_address(struct rdma_cm_id *id, int peer, unsigned char *out, int size)
{
    const struct sockaddr *address = peer ? &id->route.addr.dst_addr : &id->route.addr.src_addr;
    int length = 0;

    if (address->sa_family == AF_INET)
        length = sizeof(struct sockaddr_in);
    else if (address->sa_family == AF_INET6)
        length = sizeof(struct sockaddr_in6);
    if (length > size)
        return 0;
    memcpy(out, address, (size_t)length);
    return length;
}
