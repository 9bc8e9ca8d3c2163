/* The connection manager of the provider without a device. Steps succeed. Their events come at once, except those that
   the test suppresses. The test can also push any event for any identifier. As in librdmacm, destroying an identifier
   waits until its events are acknowledged, and drops events that nobody has taken. */

#include "fake_verbs.h"

#include <netinet/in.h>

struct manager {
    struct rdma_event_channel ibv;
    int alive;
    int write_end;
    int users;
};

struct identifier {
    struct rdma_cm_id ibv;
    int alive;
    int unacknowledged;
    int connected;
    int connecting;
    struct identifier *asked; /* the listener of a request that nobody has taken */
    struct identifier *next;
};

struct event {
    struct rdma_cm_event ibv;
    struct identifier *counts_for;
    unsigned char data[56];
};

/* The test sets these. */
struct fake_connecting {
    int32_t iwarp;
    int32_t silent;   /* bits, by enum rdma_cm_event_type, of the events that do not come by themselves */
    int32_t rejected; /* the test reads this: number of calls of rdma_reject() */
    int32_t blocks;   /* rdma_connect() waits until this is 0 */
    int32_t blocked;  /* the test reads this: number of calls of rdma_connect() that wait */
    int32_t calls;    /* the test reads this: number of calls of rdma_connect() */
    int32_t failure;  /* the errno of rdma_connect(), which has no answer then */
} fake_connecting;

static struct ibv_context context_of_manager;
static struct ibv_device another_device = {
    .node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "fake1"};
static struct ibv_context context_of_another = {.device = &another_device};
static struct identifier *identifiers;
static uint16_t last_port = 40000;

static struct identifier *with_key(uint64_t key)
{
    struct identifier *id;

    for (id = identifiers; id && (!id->alive || (uintptr_t)id->ibv.context != key); id = id->next)
        ;
    return id;
}

/* Call with the lock held. */
static void push(struct identifier *id, enum rdma_cm_event_type type, int status, struct identifier *listener)
{
    struct event *made = calloc(1, sizeof *made);

    made->ibv.id = &id->ibv;
    made->ibv.listen_id = listener ? &listener->ibv : NULL;
    made->ibv.event = type;
    made->ibv.status = status;
    made->ibv.param.conn.responder_resources = made->ibv.param.conn.initiator_depth = 4;
    made->ibv.param.conn.private_data = made->data;
    made->ibv.param.conn.private_data_len = sizeof made->data;
    if (id->ibv.ps == RDMA_PS_UDP) {
        made->ibv.param.ud =
            (struct rdma_ud_param){.private_data = made->data,
                                   .private_data_len = 8,
                                   .qp_num = 77,
                                   .qkey = 0x01234567,
                                   .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = {.raw = {0xff}}}}};
    }
    made->counts_for = listener ? listener : id;
    fake_push(((struct manager *)made->counts_for->ibv.channel)->write_end, made);
}

static void answer(struct identifier *id, enum rdma_cm_event_type type)
{
    if (!(fake_connecting.silent >> type & 1))
        push(id, type, 0, NULL);
}

static struct identifier *new_identifier(struct rdma_event_channel *channel, void *context)
{
    struct identifier *made = calloc(1, sizeof *made);

    made->ibv.channel = channel;
    made->ibv.context = context;
    made->alive = 1;
    made->next = identifiers;
    identifiers = made;
    ((struct manager *)channel)->users++;
    fake_counts.identifiers++;
    return made;
}

/* ---- functions for the test ---- */

/* Push an event for the identifier with this context. Returns 0 if there is none. */
int fake_connection_event(uint64_t key, int type, int status)
{
    struct identifier *id;

    pthread_mutex_lock(&fake_lock);
    id = with_key(key);
    if (id)
        push(id, (enum rdma_cm_event_type)type, status, NULL);
    pthread_mutex_unlock(&fake_lock);
    return id != NULL;
}

/* The files of the device that the library keeps open. */
void fake_manager_files(int *files)
{
    files[0] = context_of_manager.cmd_fd;
    files[1] = context_of_manager.async_fd;
}

/* A client asks the listener with this context for a connection. elsewhere: over another device. */
int fake_connection_request(uint64_t key, int elsewhere)
{
    struct identifier *listener, *id;

    pthread_mutex_lock(&fake_lock);
    listener = with_key(key);
    if (listener) {
        id = new_identifier(listener->ibv.channel, NULL);
        id->ibv.verbs = elsewhere ? &context_of_another : &context_of_manager;
        id->ibv.route.addr = listener->ibv.route.addr;
        id->ibv.ps = listener->ibv.ps;
        if (id->ibv.route.addr.src_addr.sa_family == AF_INET6) {
            /* No scope crosses the network. */
            id->ibv.route.addr.src_sin6.sin6_scope_id = 0;
            id->ibv.route.addr.dst_sin6 = id->ibv.route.addr.src_sin6;
        } else {
            ((struct sockaddr_in *)&id->ibv.route.addr.dst_addr)->sin_family = AF_INET;
        }
        id->asked = listener;
        push(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0, listener);
    }
    pthread_mutex_unlock(&fake_lock);
    return listener != NULL;
}

/* ---- channels and events ---- */

struct rdma_event_channel *rdma_create_event_channel(void)
{
    struct manager *made = calloc(1, sizeof *made);

    context_of_manager.device = &fake_device;
    if (!context_of_manager.async_fd) {
        /* When a device is removed, ndpy replaces the files behind these descriptors. */
        context_of_manager.async_fd = dup(STDIN_FILENO);
        context_of_manager.cmd_fd = dup(STDIN_FILENO);
    }
    made->alive = 1;
    fake_pipe(&made->ibv.fd, &made->write_end);
    fake_counts.event_channels++;
    return &made->ibv;
}

void rdma_destroy_event_channel(struct rdma_event_channel *ibv)
{
    struct manager *channel = (struct manager *)ibv;

    fake_point("rdma_destroy_event_channel", 0);
    if (fake_check("rdma_destroy_event_channel", channel->alive)) {
        if (channel->users)
            fake_fault("rdma_destroy_event_channel", "an identifier uses it");
        channel->alive = 0;
        close(ibv->fd);
        close(channel->write_end);
        fake_counts.event_channels--;
    }
    fake_point("rdma_destroy_event_channel", 1);
}

int rdma_get_cm_event(struct rdma_event_channel *ibv, struct rdma_cm_event **out)
{
    struct event *event;

    fake_begin("rdma_get_cm_event");
    do
        event = fake_pull(ibv->fd);
    while (event && !event->counts_for->alive);
    if (event) {
        event->counts_for->unacknowledged++;
        ((struct identifier *)event->ibv.id)->asked = NULL;
        *out = &event->ibv;
    }
    return fake_end("rdma_get_cm_event", event ? 0 : -1);
}

int rdma_ack_cm_event(struct rdma_cm_event *ibv)
{
    fake_begin("rdma_ack_cm_event");
    ((struct event *)ibv)->counts_for->unacknowledged--;
    fake_changed();
    return fake_end("rdma_ack_cm_event", 0);
}

/* ---- identifiers ---- */

int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **out, void *context,
                   enum rdma_port_space space)
{
    fake_begin("rdma_create_id");
    *out = &new_identifier(channel, context)->ibv;
    (*out)->ps = space;
    return fake_end("rdma_create_id", 0);
}

/* Call with the lock held. */
static void free_identifier(struct identifier *id)
{
    id->alive = 0;
    ((struct manager *)id->ibv.channel)->users--;
    fake_counts.identifiers--;
}

int rdma_destroy_id(struct rdma_cm_id *ibv)
{
    struct identifier *id = (struct identifier *)ibv;

    fake_begin("rdma_destroy_id");
    if (id->connecting)
        fake_fault("rdma_destroy_id", "rdma_connect() still uses the identifier");
    if (fake_check("rdma_destroy_id", id->alive)) {
        free_identifier(id);
        /* Requests that nobody has taken go with their listener. */
        for (struct identifier *request = identifiers; request; request = request->next)
            if (request->alive && request->asked == id)
                free_identifier(request);
        fake_wait_for("rdma_destroy_id", &id->unacknowledged);
    }
    return fake_end("rdma_destroy_id", 0);
}

/* Begin one step of an identifier. Returns with the lock held. */
static struct identifier *begin(const char *call, struct rdma_cm_id *ibv)
{
    struct identifier *id = (struct identifier *)ibv;

    fake_begin(call);
    fake_check(call, id->alive);
    return id;
}

static int end(const char *call, int error)
{
    if (error)
        errno = error;
    return fake_end(call, error ? -1 : 0);
}

static void copy_address(struct sockaddr *out, const struct sockaddr *address)
{
    memcpy(out, address, address->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
}

static void choose_port(struct identifier *id)
{
    struct sockaddr_in *own = (struct sockaddr_in *)&id->ibv.route.addr.src_addr;

    if (!own->sin_port)
        own->sin_port = htons(++last_port);
}

int rdma_bind_addr(struct rdma_cm_id *ibv, struct sockaddr *address)
{
    struct identifier *id = begin("rdma_bind_addr", ibv);

    copy_address(&ibv->route.addr.src_addr, address);
    ibv->verbs = &context_of_manager;
    choose_port(id);
    return end("rdma_bind_addr", 0);
}

int rdma_join_multicast(struct rdma_cm_id *ibv, struct sockaddr *address, void *context)
{
    struct identifier *id = begin("rdma_join_multicast", ibv);

    answer(id, RDMA_CM_EVENT_MULTICAST_JOIN);
    return end("rdma_join_multicast", 0);
}

int rdma_resolve_addr(struct rdma_cm_id *ibv, struct sockaddr *source, struct sockaddr *destination, int timeout_ms)
{
    struct identifier *id = begin("rdma_resolve_addr", ibv);

    if (source)
        copy_address(&ibv->route.addr.src_addr, source);
    copy_address(&ibv->route.addr.dst_addr, destination);
    ibv->verbs = &context_of_manager;
    choose_port(id);
    answer(id, RDMA_CM_EVENT_ADDR_RESOLVED);
    return end("rdma_resolve_addr", 0);
}

int rdma_resolve_route(struct rdma_cm_id *ibv, int timeout_ms)
{
    struct identifier *id = begin("rdma_resolve_route", ibv);

    answer(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
    return end("rdma_resolve_route", 0);
}

static void stop_waiting(void *argument)
{
    struct identifier *id = argument;

    pthread_mutex_lock(&fake_lock);
    id->connecting = 0;
    fake_connecting.blocked--;
    pthread_mutex_unlock(&fake_lock);
}

/* A driver that opens a TCP connection inside the call. Like its system call, usleep() can be cancelled. */
static void wait_for_host(struct identifier *id)
{
    pthread_mutex_lock(&fake_lock);
    id->connecting = 1;
    fake_connecting.blocked++;
    fake_connecting.calls++;
    pthread_mutex_unlock(&fake_lock);
    pthread_cleanup_push(stop_waiting, id);
    while (__atomic_load_n(&fake_connecting.blocks, __ATOMIC_SEQ_CST))
        usleep(1000);
    pthread_cleanup_pop(1);
}

int rdma_connect(struct rdma_cm_id *ibv, struct rdma_conn_param *parameters)
{
    struct identifier *id;

    wait_for_host((struct identifier *)ibv);
    id = begin("rdma_connect", ibv);
    if (fake_connecting.failure)
        return end("rdma_connect", fake_connecting.failure);
    id->connected = 1;
    answer(id, fake_connecting.iwarp || ibv->ps == RDMA_PS_UDP ? RDMA_CM_EVENT_ESTABLISHED
                                                               : RDMA_CM_EVENT_CONNECT_RESPONSE);
    return end("rdma_connect", 0);
}

int rdma_establish(struct rdma_cm_id *ibv)
{
    begin("rdma_establish", ibv);
    return end("rdma_establish", 0);
}

int rdma_listen(struct rdma_cm_id *ibv, int backlog)
{
    begin("rdma_listen", ibv);
    return end("rdma_listen", 0);
}

int rdma_accept(struct rdma_cm_id *ibv, struct rdma_conn_param *parameters)
{
    struct identifier *id = begin("rdma_accept", ibv);

    id->connected = 1;
    if (ibv->ps != RDMA_PS_UDP)
        answer(id, RDMA_CM_EVENT_ESTABLISHED);
    return end("rdma_accept", 0);
}

int rdma_reject(struct rdma_cm_id *ibv, const void *data, uint8_t length)
{
    begin("rdma_reject", ibv);
    if (length && !data)
        fake_fault("rdma_reject", "private data at NULL");
    fake_connecting.rejected++;
    return end("rdma_reject", 0);
}

int rdma_notify(struct rdma_cm_id *ibv, enum ibv_event_type type)
{
    begin("rdma_notify", ibv);
    return end("rdma_notify", 0);
}

int rdma_disconnect(struct rdma_cm_id *ibv)
{
    struct identifier *id = begin("rdma_disconnect", ibv);
    int was = id->connected;

    id->connected = 0;
    if (was)
        answer(id, RDMA_CM_EVENT_DISCONNECTED);
    return end("rdma_disconnect", was ? 0 : EINVAL);
}

int rdma_init_qp_attr(struct rdma_cm_id *ibv, struct ibv_qp_attr *attributes, int *mask)
{
    begin("rdma_init_qp_attr", ibv);
    *mask = IBV_QP_STATE;
    return end("rdma_init_qp_attr", 0);
}
