/* each_call DEVICE ADDRESS: makes every call of verbs and of librdmacm that can have a fault, those that make objects
 * twice. Both ends of its connections are in this process.
 *
 *   NAME COUNT ERRNO       this call failed, the first of its name or a later one
 *   slow NAME COUNT        it took SLOW_MS or longer
 *   done                   nothing failed that this program needs
 */
#include "ends.h"

#define SLOW_MS 150
#define SIZE    64

#define NAMES 64

static uint64_t began;
static const char *last, *counted[NAMES];
static unsigned counts[NAMES];

static unsigned count_of(const char *name)
{
    unsigned i = 0;

    while (counted[i] != NULL && strcmp(counted[i], name) != 0)
        i++;
    EXPECT(i + 1 < NAMES);
    counted[i] = name;
    return ++counts[i];
}

static void begin(const char *name)
{
    last = name;
    began = now_ms();
    errno = 0;
}

/* Whether the call has succeeded. `error` is what it returned, or -1 and errno. */
static bool end(int error)
{
    uint64_t took = now_ms() - began;
    unsigned count = count_of(last);

    if (took >= SLOW_MS)
        printf("slow %s %u\n", last, count);
    if (error != 0)
        printf("%s %u %d\n", last, count, error > 0 ? error : errno);
    return error == 0;
}

/* The test is about the first call that fails. */
static void need(bool is_good)
{
    if (is_good)
        return;
    fflush(stdout);
    _exit(0);
}

#define MAY(name, call)        (begin(#name), end(call))
#define TRY(name, call)        need(MAY(name, call))
#define MAKE(name, what, call) (begin(#name), (what) = (call), need(end((what) != NULL ? 0 : -1)))

static struct rdma_event_channel *channel;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_comp_channel *events;
static char memory[SIZE];

static void expect(enum rdma_cm_event_type type)
{
    struct rdma_cm_event *event;

    TRY(rdma_get_cm_event, rdma_get_cm_event(channel, &event));
    EXPECT(event->event == type);
    rdma_ack_cm_event(event);
}

static struct ibv_qp_init_attr wanted(void)
{
    return (struct ibv_qp_init_attr){
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
}

static struct rdma_cm_id *reached(struct sockaddr_in *server)
{
    struct rdma_cm_id *id;

    TRY(rdma_create_id, rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
    TRY(rdma_resolve_addr, rdma_resolve_addr(id, NULL, (struct sockaddr *)server, 5000));
    expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    TRY(rdma_resolve_route, rdma_resolve_route(id, 5000));
    expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
    return id;
}

static struct ibv_context *opened(const char *name)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = NULL;

    EXPECT(list != NULL);
    for (unsigned i = 0; list[i] != NULL; i++)
        if (strcmp(ibv_get_device_name(list[i]), name) == 0)
            MAKE(open_device, context, ibv_open_device(list[i]));
    EXPECT(context != NULL);
    return context;
}

static void ask(struct ibv_context *context)
{
    struct ibv_device_attr device;
    struct ibv_port_attr port;
    union ibv_gid gid;
    struct ibv_async_event event;

    TRY(query_device, ibv_query_device(context, &device));
    TRY(query_port, ibv_query_port(context, 1, &port));
    TRY(query_gid, ibv_query_gid(context, 1, 0, &gid));
    /* There is none. */
    fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
    MAY(get_async_event, ibv_get_async_event(context, &event));
}

static void make(struct ibv_context *context)
{
    struct ibv_srq_init_attr of_srq = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_READ};
    struct ibv_qp_init_attr initial;
    struct ibv_ah_attr of_ah = {.is_global = 1, .port_num = 1};
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = SIZE};
    struct ibv_recv_wr *refused, wr = {.sg_list = &sge, .num_sge = 1};
    struct ibv_srq *srq;
    struct ibv_qp *qp;

    for (unsigned i = 0; i < 2; i++) {
        initial = wanted();
        MAKE(alloc_pd, pd, ibv_alloc_pd(context));
        MAKE(reg_mr, mr, ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE));
        MAKE(create_comp_channel, events, ibv_create_comp_channel(context));
        MAKE(create_cq, cq, ibv_create_cq(context, 8, NULL, events, 0));
        MAKE(create_srq, srq, ibv_create_srq(pd, &of_srq));
        initial.send_cq = initial.recv_cq = cq;
        MAKE(create_qp, qp, ibv_create_qp(pd, &initial));
        /* Some adapters have none. */
        MAY(alloc_mw, ibv_alloc_mw(pd, IBV_MW_TYPE_2) != NULL ? 0 : -1);
        MAY(create_ah, ibv_create_ah(pd, &of_ah) != NULL ? 0 : -1);
    }
    sge.lkey = mr->lkey;
    TRY(modify_qp,
        ibv_modify_qp(qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    TRY(query_qp, ibv_query_qp(qp, &attributes, IBV_QP_STATE, &initial));
    MAY(resize_cq, ibv_resize_cq(cq, 16));
    TRY(post_recv, ibv_post_recv(qp, &wr, &refused));
    TRY(post_srq_recv, ibv_post_srq_recv(srq, &wr, &refused));
}

static void converse(struct rdma_cm_id *from, struct rdma_cm_id *to)
{
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = SIZE, .lkey = mr->lkey};
    struct ibv_send_wr *unsent, wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
    struct ibv_recv_wr *refused, receive = {.sg_list = &sge, .num_sge = 1};
    struct ibv_cq *ready;
    struct ibv_wc wc;
    void *context;
    int found;

    TRY(post_recv, ibv_post_recv(to->qp, &receive, &refused));
    TRY(req_notify_cq, ibv_req_notify_cq(cq, 0));
    TRY(post_send, ibv_post_send(from->qp, &wr, &unsent));
    TRY(get_cq_event, ibv_get_cq_event(events, &ready, &context));
    ibv_ack_cq_events(ready, 1);
    begin("poll_cq");
    found = ibv_poll_cq(cq, 1, &wc);
    need(end(found < 0 ? found : 0));
}

int main(int count, char **words)
{
    struct sockaddr_in server = {.sin_family = AF_INET};
    struct rdma_conn_param parameters = {.retry_count = 7, .rnr_retry_count = 7};
    struct ibv_qp_init_attr initial;
    struct rdma_event_channel *other;
    struct rdma_cm_id *listener, *client, *peer, *refused;

    if (count < 3 || inet_pton(AF_INET, words[2], &server.sin_addr) != 1)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    ask(opened(words[1]));
    MAKE(rdma_create_event_channel, channel, rdma_create_event_channel());
    MAKE(rdma_create_event_channel, other, rdma_create_event_channel());
    /* One without a channel waits in its calls, and rdma_get_request(3) needs that. */
    TRY(rdma_create_id, rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP));
    TRY(rdma_bind_addr, rdma_bind_addr(listener, (struct sockaddr *)&server));
    TRY(rdma_listen, rdma_listen(listener, 4));
    /* There is no connection yet. */
    MAY(rdma_establish, rdma_establish(listener));
    server.sin_port = rdma_get_src_port(listener);

    client = reached(&server);
    make(client->verbs);
    initial = wanted();
    TRY(rdma_create_qp, rdma_create_qp(client, pd, &initial));
    TRY(rdma_connect, rdma_connect(client, &parameters));
    TRY(rdma_get_request, rdma_get_request(listener, &peer));
    initial = wanted();
    TRY(rdma_create_qp, rdma_create_qp(peer, pd, &initial));
    /* The client takes its event while the server waits, so the server must not wait in its call. */
    EXPECT(rdma_migrate_id(peer, channel) == 0);
    TRY(rdma_accept, rdma_accept(peer, NULL));
    expect(RDMA_CM_EVENT_ESTABLISHED);
    expect(RDMA_CM_EVENT_ESTABLISHED);
    converse(client, peer);

    refused = reached(&server);
    initial = wanted();
    TRY(rdma_create_qp, rdma_create_qp(refused, pd, &initial));
    TRY(rdma_connect, rdma_connect(refused, &parameters));
    TRY(rdma_get_request, rdma_get_request(listener, &peer));
    TRY(rdma_reject, rdma_reject(peer, NULL, 0));
    expect(RDMA_CM_EVENT_REJECTED);

    TRY(rdma_disconnect, rdma_disconnect(client));
    TRY(dereg_mr, ibv_dereg_mr(ibv_reg_mr(pd, memory, SIZE, 0)));
    printf("done\n");
    fflush(stdout);
    /* The end of the process frees everything. */
    _exit(0);
}
