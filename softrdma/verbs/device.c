/* The device, its contexts, and what programs ask about it. */
#include "soft.h"
#include "cm/cm.h"
#include "face.h"
#include "forking.h"
#include "greeting.h"
#include "guarded.h"
#include "numbers.h"
#include "stream.h"
#include "trace.h"
#include "transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

const char face_prefix[] = "SOFTVERBS_";
/* As long as the kernel's connection manager waits on RoCE. */
const uint32_t face_patience_ms = 60000;
const bool face_gathers = true;

#define FIRMWARE           "softverbs"
#define FULL_MEMBER        0xFFFF
#define PORT_STATE_LINK_UP 5
#define WIDTH_4X           2
#define SPEED_EDR          32

/* Libraries of cards (libmlx5, libefa) look for their own pointer behind any device. */
static struct {
    struct ibv_device device;
    uint64_t none[32];
} only = {
    .device =
        {
            .node_type = IBV_NODE_RNIC,
            .transport_type = IBV_TRANSPORT_IWARP,
            .name = SOFT_NAME,
            .dev_name = SOFT_NAME,
        },
};

/* All contexts of the process share one adapter, which lives as long as one of them. */
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct soft_context *contexts;
static struct adapter *adapter;
static unsigned adapter_users;
static pthread_mutex_t shared_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ibv_context *shared;

/* ---- The adapter ---- */

static void adapter_destroy(struct object *object)
{
    struct adapter *gone = CONTAINER_OF(object, struct adapter, object);

    adapter_end(gone);
    free(gone);
}

static const struct object_class adapter_class = {
    .kind = KIND_ADAPTER,
    .closed = adapter_closed,
    .destroy = adapter_destroy,
};

/* Under contexts_lock. NULL with errno: it cannot be used. */
static struct adapter *adapter_use(void)
{
    if (adapter == NULL) {
        struct adapter *made = calloc(1, sizeof *made);
        if (made == NULL)
            return NULL;
        int before = errno;
        nd_status status = adapter_start(made, &adapter_class, NULL);
        if (status != ND_SUCCESS) {
            free(made);
            if (status != ND_INSUFFICIENT_RESOURCES || (errno != EMFILE && errno != ENFILE))
                errno = soft_errno(status);
            return NULL;
        }
        errno = before;
        adapter = made;
    } else {
        nd_status status = faults_follow(adapter);
        if (status != ND_SUCCESS)
            return soft_null(soft_errno(status));
    }
    adapter_users++;
    return adapter;
}

static void adapter_unuse(void)
{
    struct adapter *last = NULL;

    pthread_mutex_lock(&contexts_lock);
    if (--adapter_users == 0) {
        last = adapter;
        adapter = NULL;
    }
    pthread_mutex_unlock(&contexts_lock);
    if (last != NULL)
        object_close(&last->object);
}

void face_free(struct object *object)
{
    UNUSED(object); /* the faces are freed by the calls that destroy them */
}

void face_stopping(void) {}

void soft_async_to_all(enum ibv_event_type type)
{
    pthread_mutex_lock(&contexts_lock);
    for (struct soft_context *context = contexts; context != NULL; context = context->next)
        soft_async(context, type, NULL);
    pthread_mutex_unlock(&contexts_lock);
}

void face_adapter_removed(struct adapter *removed)
{
    UNUSED(removed);
    soft_async_to_all(IBV_EVENT_DEVICE_FATAL);
    cm_device_removed();
}

/* ---- The list and contexts ---- */

EXPORT struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = calloc(2, sizeof *list);

    if (list != NULL)
        list[0] = &only.device;
    if (count != NULL)
        *count = list != NULL ? 1 : 0;
    return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

void soft_answer(void *out, size_t size, const void *answer, size_t answer_size)
{
    size_t known = size < answer_size ? size : answer_size;

    memcpy(out, answer, known);
    memset((char *)out + known, 0, size - known);
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out, size_t size)
{
    struct ibv_port_attr attributes = {
        .state = adapter_gone(adapter_of(context)) || adapter_of(context)->port_down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .max_msg_sz = MAX_TRANSFER_LENGTH,
        .pkey_tbl_len = 1,
        .active_width = WIDTH_4X,
        .active_speed = SPEED_EDR,
        .phys_state = PORT_STATE_LINK_UP,
        .link_layer = IBV_LINK_LAYER_ETHERNET,
        .max_vl_num = 1,
    };
    struct sockaddr_storage addresses[SOFT_MAX_GIDS];

    if (soft_inherited(context))
        return EIO;
    if (SOFT_FAULT(context, PLACE_CALL_QUERY_PORT, 0) != 0)
        return errno;
    if (port != 1)
        return errno = EINVAL;
    int gids = soft_addresses(addresses, SOFT_MAX_GIDS);
    if (gids < 0)
        return errno;
    attributes.gid_tbl_len = gids;
    soft_answer(out, size, &attributes, sizeof attributes);
    return 0;
}

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                           struct ibv_device_attr_ex *out, size_t size)
{
    struct ibv_device_attr_ex attributes = {.phys_port_cnt_ex = 1};

    UNUSED(input);
    int error = ibv_query_device(context, &attributes.orig_attr);
    if (error != 0)
        return error;
    soft_answer(out, size, &attributes, sizeof attributes);
    return 0;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *asked)
{
    if (asked != &only.device)
        return soft_null(ENODEV);
    struct soft_context *context = event_source_new(EVENTS_OF_CONTEXT, offsetof(struct soft_context, events), false);
    if (context == NULL)
        return NULL;
    pthread_mutex_lock(&contexts_lock);
    context->adapter = adapter_use();
    if (context->adapter != NULL) {
        context->next = contexts;
        contexts = context;
    }
    pthread_mutex_unlock(&contexts_lock);
    if (context->adapter == NULL) {
        int error = errno;
        event_source_close(EVENTS_OF_CONTEXT, &context->events, NULL, NULL);
        return soft_null(error);
    }
    if (SOFT_FAULT(&context->verbs.context, PLACE_CALL_OPEN_DEVICE, 0) != 0) {
        int error = errno;
        context->generation = system_generation;
        ibv_close_device(&context->verbs.context);
        return soft_null(error);
    }
    struct verbs_context *verbs = &context->verbs;
    verbs->sz = sizeof *verbs;
    verbs->query_port = query_port;
    verbs->query_device_ex = query_device_ex;
    verbs->create_qp_ex = soft_create_qp_ex;
    verbs->create_srq_ex = soft_create_srq_ex;
    struct ibv_context *ibv = &verbs->context;
    ibv->device = &only.device;
    ibv->abi_compat = __VERBS_ABI_IS_EXTENDED;
    ibv->cmd_fd = -1;
    ibv->async_fd = context->events.fd;
    ibv->num_comp_vectors = 1;
    pthread_mutex_init(&ibv->mutex, NULL);
    ibv->ops.alloc_mw = soft_alloc_mw;
    ibv->ops.dealloc_mw = soft_dealloc_mw;
    ibv->ops.bind_mw = soft_bind_mw;
    ibv->ops.poll_cq = soft_poll_cq;
    ibv->ops.req_notify_cq = soft_req_notify_cq;
    ibv->ops.post_send = soft_post_send;
    ibv->ops.post_recv = soft_post_recv;
    ibv->ops.post_srq_recv = soft_post_srq_recv;
    context->generation = system_generation;
    return ibv;
}

/* ---- Forked children ---- */

bool soft_inherited(const struct ibv_context *context)
{
    const struct soft_context *mine = CONTAINER_OF(context, const struct soft_context, verbs.context);

    if (mine->generation == system_generation)
        return false;
    errno = EIO;
    return true;
}

static int no_poll(struct ibv_cq *cq, int count, struct ibv_wc *wc)
{
    UNUSED(cq);
    UNUSED(count);
    UNUSED(wc);
    errno = EIO;
    return -1;
}

static int no_arming(struct ibv_cq *cq, int solicited_only)
{
    UNUSED(cq);
    UNUSED(solicited_only);
    return errno = EIO;
}

static int no_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    UNUSED(qp);
    *bad = wr;
    return errno = EIO;
}

static int no_receive(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    UNUSED(qp);
    *bad = wr;
    return errno = EIO;
}

static int no_shared_receive(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    UNUSED(srq);
    *bad = wr;
    return errno = EIO;
}

/* The parent's threads may have had any lock during the fork, so nothing of the parent's is touched from here on. */
static void begin_anew(void)
{
    for (struct soft_context *context = contexts; context != NULL; context = context->next) {
        struct ibv_context_ops *ops = &context->verbs.context.ops;
        ops->poll_cq = no_poll;
        ops->req_notify_cq = no_arming;
        ops->post_send = no_send;
        ops->post_recv = no_receive;
        ops->post_srq_recv = no_shared_receive;
    }
    system_keep(contexts);
    contexts = NULL;
    adapter = NULL;
    adapter_users = 0;
    shared = NULL;
    pthread_mutex_init(&contexts_lock, NULL);
    pthread_mutex_init(&shared_lock, NULL);
    transport_forget();
    numbers_forget();
    waiting_forget();
    event_sources_forget();
}

EXPORT int ibv_close_device(struct ibv_context *ibv)
{
    struct soft_context *context = soft_context(ibv);

    if (soft_inherited(ibv)) {
        event_source_close(EVENTS_OF_CONTEXT, &context->events, NULL, NULL);
        return 0;
    }
    pthread_mutex_lock(&contexts_lock);
    struct soft_context **at = &contexts;
    while (*at != NULL && *at != context)
        at = &(*at)->next;
    if (*at != NULL)
        *at = context->next;
    pthread_mutex_unlock(&contexts_lock);
    pthread_mutex_destroy(&ibv->mutex);
    event_source_close(EVENTS_OF_CONTEXT, &context->events, NULL, NULL);
    adapter_unuse();
    return 0;
}

struct ibv_context *soft_shared_context(void)
{
    pthread_mutex_lock(&shared_lock);
    if (shared == NULL)
        shared = SOFT_OWN(ibv_open_device(&only.device));
    struct ibv_context *result = shared;
    nd_status status = result != NULL ? faults_follow(adapter_of(result)) : ND_SUCCESS;
    if (status != ND_SUCCESS)
        result = soft_null(soft_errno(status));
    pthread_mutex_unlock(&shared_lock);
    return result;
}

/* ---- Queries ---- */

EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *out)
{
    if (SOFT_FAULT(context, PLACE_CALL_QUERY_DEVICE, 0) != 0)
        return errno;
    memset(out, 0, sizeof *out);
    memcpy(out->fw_ver, FIRMWARE, sizeof FIRMWARE);
    out->node_guid = out->sys_image_guid = ibv_get_device_guid(&only.device);
    out->max_mr_size = MAX_REGISTRATION_SIZE;
    out->page_size_cap = 4096;
    out->vendor_id = SOFT_VENDOR_ID;
    out->vendor_part_id = SOFT_PART_ID;
    out->max_qp = 65536;
    out->max_qp_wr = SOFT_MAX_QP_WR;
    out->device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_RC_RNR_NAK_GEN |
                            IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_MGT_EXTENSIONS |
                            IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    out->max_sge = MAX_SGE;
    out->max_sge_rd = MAX_SGE;
    out->max_cq = 65536;
    out->max_cqe = MAX_CQ_DEPTH;
    out->max_mr = 1 << 22;
    out->max_pd = 65536;
    out->max_qp_rd_atom = MAX_READ_LIMIT;
    out->max_res_rd_atom = (int)MAX_READ_LIMIT * 65536;
    out->max_qp_init_rd_atom = MAX_READ_LIMIT;
    out->atomic_cap = IBV_ATOMIC_NONE;
    out->max_mw = 1 << 22;
    out->max_srq = 65536;
    out->max_srq_wr = SOFT_MAX_SRQ_WR;
    out->max_srq_sge = MAX_SGE;
    out->max_pkeys = 1;
    out->phys_port_cnt = 1;
    return 0;
}

/* The exported call is that of programs that were built before the structure grew. Newer ones come through the context.
 */
#undef ibv_query_port
EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *out)
{
    return query_port(context, port, (struct ibv_port_attr *)out, offsetof(struct ibv_port_attr, port_cap_flags2));
}

EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    struct sockaddr_storage addresses[SOFT_MAX_GIDS];
    int count = soft_addresses(addresses, SOFT_MAX_GIDS);

    if (SOFT_FAULT(context, PLACE_CALL_QUERY_GID, 0) != 0 || count < 0)
        return -1;
    if (port != 1 || index < 0 || index >= count)
        return cm_fail(EINVAL);
    soft_gid_of((struct sockaddr *)&addresses[index], gid);
    return 0;
}

/* ---- Asynchronous events ---- */

/* What counts the events about an object: those that were put into a queue, and those that the program has
 * acknowledged. */
struct counts {
    struct ibv_context *context; /* NULL: the event is about a port or the device, and nobody counts it */
    pthread_mutex_t *lock;
    pthread_cond_t *changed;
    _Atomic uint32_t *given;
    uint32_t *acknowledged;
};

static struct counts counts_of(const struct ibv_async_event *event)
{
    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR: {
        struct soft_cq *cq = (struct soft_cq *)event->element.cq;
        return (struct counts){cq->ibv.context, &cq->ibv.mutex, &cq->ibv.cond, &cq->async_given,
                               &cq->ibv.async_events_completed};
    }
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED: {
        struct soft_srq *srq = (struct soft_srq *)event->element.srq;
        return (struct counts){srq->ibv.context, &srq->ibv.mutex, &srq->ibv.cond, &srq->async_given,
                               &srq->ibv.events_completed};
    }
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_LAST_WQE_REACHED: {
        struct soft_qp *qp = (struct soft_qp *)event->element.qp;
        return (struct counts){qp->ibv.context, &qp->ibv.mutex, &qp->ibv.cond, &qp->async_given,
                               &qp->ibv.events_completed};
    }
    default:
        return (struct counts){0};
    }
}

void soft_async(struct soft_context *context, enum ibv_event_type type, void *element)
{
    struct soft_async_event *event = soft_events_are_lost ? NULL : calloc(1, sizeof *event);

    if (event == NULL)
        return;
    event->ibv.event_type = type;
    if (element != NULL)
        event->ibv.element.qp = element; /* the members are pointers of one size */
    else
        event->ibv.element.port_num = 1;
    struct counts counts = counts_of(&event->ibv);
    if (counts.context != NULL)
        (*counts.given)++;
    if (!event_put(&context->events, &event->event))
        free(event);
}

/* Called once for an event that is then removed, so nobody has to acknowledge it. */
static bool is_about(const struct event *event, const void *element)
{
    const struct ibv_async_event *ibv = &((const struct soft_async_event *)event)->ibv;

    if (ibv->element.qp != element)
        return false;
    (*counts_of(ibv).given)--;
    return true;
}

void soft_async_forget(struct soft_context *context, enum ibv_event_type type, void *element)
{
    struct counts counts = counts_of(&(struct ibv_async_event){.event_type = type, .element.qp = element});

    event_remove(&context->events, is_about, element);
    pthread_mutex_lock(counts.lock);
    while (*counts.acknowledged != *counts.given)
        pthread_cond_wait(counts.changed, counts.lock);
    pthread_mutex_unlock(counts.lock);
}

EXPORT int ibv_get_async_event(struct ibv_context *ibv, struct ibv_async_event *out)
{
    struct event_queue *events = &soft_context(ibv)->events;

    if (event_queue_open(events) && SOFT_FAULT(ibv, PLACE_CALL_GET_ASYNC_EVENT, 0) != 0)
        return -1;
    struct event *event = event_take(events);
    if (event == NULL)
        return -1;
    *out = ((struct soft_async_event *)event)->ibv;
    free(event);
    return 0;
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
    struct counts counts = counts_of(event);

    if (counts.context == NULL || soft_inherited(counts.context))
        return;
    pthread_mutex_lock(counts.lock);
    (*counts.acknowledged)++;
    pthread_cond_broadcast(counts.changed);
    pthread_mutex_unlock(counts.lock);
}

/* ---- Load and unload ---- */

__attribute__((constructor)) static void load(void)
{
    trace_open();
    guarded_copy_start();
    system_on_fork(begin_anew);
}

/* The process ends, and the workers still run. A message that the program has seen succeeds at its sender, as with a
 * card, which acknowledges it by itself. When the system closes the sockets, what was not sent is lost. */
__attribute__((destructor)) static void unload(void)
{
    streams_tell_all();
    driving_push();
    object_write_statistics();
}

int soft_errno(nd_status status)
{
    static const struct {
        nd_status status;
        int error;
    } errors[] = {
        {ND_SUCCESS, 0},
        {ND_NO_MEMORY, ENOMEM},
        {ND_INSUFFICIENT_RESOURCES, ENOMEM},
        {ND_NO_MORE_ENTRIES, ENOMEM},
        {ND_TOO_MANY_OPENED_FILES, EMFILE},
        {ND_ACCESS_VIOLATION, EFAULT},
        {ND_ACCESS_DENIED, EACCES},
        {ND_DEVICE_REMOVED, ENODEV},
        {ND_DEVICE_BUSY, EBUSY},
        {ND_SHARING_VIOLATION, EADDRINUSE},
        {ND_ADDRESS_ALREADY_EXISTS, EADDRINUSE},
        {ND_INVALID_ADDRESS, EADDRNOTAVAIL},
        {ND_TOO_MANY_ADDRESSES, EAGAIN},
        {ND_CONNECTION_REFUSED, ECONNREFUSED},
        {ND_CONNECTION_ABORTED, ECONNRESET},
        {ND_CONNECTION_INVALID, ENOTCONN},
        {ND_CONNECTION_ACTIVE, EISCONN},
        {ND_NETWORK_UNREACHABLE, ENETUNREACH},
        {ND_HOST_UNREACHABLE, EHOSTUNREACH},
        {ND_IO_TIMEOUT, ETIMEDOUT},
    };

    for (size_t i = 0; i < COUNT_OF(errors); i++)
        if (errors[i].status == status)
            return errors[i].error;
    return EINVAL;
}

/* ---- Small queries ---- */

EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

/* The kernel does not know the device. */
EXPORT int ibv_get_device_index(struct ibv_device *device)
{
    UNUSED(device);
    return -1;
}

/* The second half of the first GID. It holds the machine's address if that is one of IPv4. */
EXPORT __be64 ibv_get_device_guid(struct ibv_device *device)
{
    struct sockaddr_storage address;
    union ibv_gid gid;

    UNUSED(device);
    if (soft_addresses(&address, 1) < 1)
        return 0;
    soft_gid_of((struct sockaddr *)&address, &gid);
    return gid.global.interface_id;
}

EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
    UNUSED(context);
    if (port != 1 || index != 0)
        return cm_fail(EINVAL);
    *pkey = htons(FULL_MEMBER);
    return 0;
}

EXPORT int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
    UNUSED(context);
    return port == 1 && pkey == htons(FULL_MEMBER) ? 0 : -1;
}
