/* Threads that make connections, use them, and destroy everything at some moment, with requests under way.
 *
 *   churn THREADS ROUNDS SEED manager|number
 *
 * Each thread connects two queue pairs of its own to each other, by the connection manager or by their numbers. Nothing
 * is shared between the threads but the device. A round destroys its objects in an order that verbs allow, mostly while
 * the library's own threads still use them. The program says nothing if all is well. It is for a library that a
 * sanitizer watches.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEPTH   16
#define BLOCK   256
#define MEMORY  (DEPTH * BLOCK)
#define LARGE   (256 * 1024)
#define LIMIT_S 1500

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, strerror(errno)); \
            abort();                                                                     \
        }                                                                                \
    } while (0)

struct end {
    struct rdma_cm_id *id; /* NULL without the connection manager */
    struct ibv_pd *pd;
    struct ibv_qp *qp;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    struct ibv_mr *mr;
    unsigned char memory[MEMORY + LARGE];
};

struct side {
    pthread_t thread;
    unsigned seed;
    int rounds;
    bool by_number;
    bool connects; /* both ends have named their peers */
    struct rdma_event_channel *events;
    struct end client, server;
};

static bool maybe(struct side *side, unsigned percent)
{
    return (unsigned)rand_r(&side->seed) % 100 < percent;
}

static struct rdma_cm_id *next_event(struct side *side, enum rdma_cm_event_type type)
{
    struct rdma_cm_event *event;

    CHECK(rdma_get_cm_event(side->events, &event) == 0);
    if (event->event != type) {
        fprintf(stderr, "%s instead of %s\n", rdma_event_str(event->event), rdma_event_str(type));
        abort();
    }
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    return id;
}

static void post_receive(struct end *end, uint64_t slot)
{
    struct ibv_sge sge = {(uintptr_t)end->memory + slot * BLOCK, BLOCK, end->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1}, *bad;

    CHECK((end->srq != NULL ? ibv_post_srq_recv(end->srq, &wr, &bad) : ibv_post_recv(end->qp, &wr, &bad)) == 0);
}

static void equip(struct side *side, struct end *end, struct ibv_context *context)
{
    struct ibv_qp_init_attr attributes = {
        .qp_type = IBV_QPT_RC, .cap = {DEPTH, DEPTH, 1, 1, 0}, .sq_sig_all = maybe(side, 50)};

    end->pd = end->id != NULL ? end->id->pd : ibv_alloc_pd(context);
    CHECK(end->pd != NULL);
    end->channel = ibv_create_comp_channel(context);
    CHECK(end->channel != NULL);
    end->cq = ibv_create_cq(context, 4 * DEPTH, NULL, end->channel, 0);
    CHECK(end->cq != NULL && ibv_req_notify_cq(end->cq, 0) == 0);
    end->mr = ibv_reg_mr(end->pd, end->memory, sizeof end->memory,
                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
    CHECK(end->mr != NULL);
    if (maybe(side, 50)) {
        struct ibv_srq_init_attr limits = {.attr = {DEPTH, 1, 0}};
        struct ibv_srq_attr change = {.srq_limit = DEPTH / 2};
        end->srq = ibv_create_srq(end->pd, &limits);
        CHECK(end->srq != NULL && ibv_modify_srq(end->srq, &change, IBV_SRQ_LIMIT) == 0);
    }
    attributes.send_cq = attributes.recv_cq = end->cq;
    attributes.srq = end->srq;
    if (end->id != NULL) {
        CHECK(rdma_create_qp(end->id, end->pd, &attributes) == 0);
        end->qp = end->id->qp;
    } else {
        struct ibv_qp_attr initial = {.qp_state = IBV_QPS_INIT,
                                      .port_num = 1,
                                      .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE};
        end->qp = ibv_create_qp(end->pd, &attributes);
        CHECK(end->qp != NULL);
        CHECK(ibv_modify_qp(end->qp, &initial, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS) ==
              0);
    }
    for (uint64_t i = 0; i < DEPTH; i++)
        post_receive(end, i);
}

static struct rdma_cm_id *connect_by_manager(struct side *side)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct rdma_conn_param parameters = {.responder_resources = 4, .initiator_depth = 4};
    struct rdma_cm_id *listener;

    CHECK(rdma_create_id(side->events, &listener, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_bind_addr(listener, (struct sockaddr *)&address) == 0 && rdma_listen(listener, 4) == 0);
    address.sin_port = rdma_get_src_port(listener);
    CHECK(rdma_create_id(side->events, &side->client.id, NULL, RDMA_PS_TCP) == 0);
    CHECK(rdma_resolve_addr(side->client.id, NULL, (struct sockaddr *)&address, 1000) == 0);
    next_event(side, RDMA_CM_EVENT_ADDR_RESOLVED);
    CHECK(rdma_resolve_route(side->client.id, 1000) == 0);
    next_event(side, RDMA_CM_EVENT_ROUTE_RESOLVED);
    equip(side, &side->client, side->client.id->verbs);
    CHECK(rdma_connect(side->client.id, &parameters) == 0);
    side->server.id = next_event(side, RDMA_CM_EVENT_CONNECT_REQUEST);
    equip(side, &side->server, side->server.id->verbs);
    CHECK(rdma_accept(side->server.id, &parameters) == 0);
    next_event(side, RDMA_CM_EVENT_ESTABLISHED);
    next_event(side, RDMA_CM_EVENT_ESTABLISHED);
    return listener;
}

static void name_peer(struct end *end, const struct end *peer)
{
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_RTR,
                                     .path_mtu = IBV_MTU_1024,
                                     .dest_qp_num = peer->qp->qp_num,
                                     .max_dest_rd_atomic = 4,
                                     .ah_attr = {.is_global = 1, .port_num = 1}};

    CHECK(ibv_query_gid(end->qp->context, 1, 0, &attributes.ah_attr.grh.dgid) == 0);
    CHECK(ibv_modify_qp(end->qp, &attributes,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = 1;
    attributes.max_rd_atomic = 4;
    CHECK(ibv_modify_qp(end->qp, &attributes,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                            IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

/* In some rounds one end never names its peer. */
static void connect_by_number(struct side *side, struct ibv_context *context)
{
    bool first = maybe(side, 50), one = maybe(side, 95), other = maybe(side, 95);

    side->connects = one && other;
    equip(side, &side->client, context);
    equip(side, &side->server, context);
    if (one)
        name_peer(first ? &side->client : &side->server, first ? &side->server : &side->client);
    if (other)
        name_peer(first ? &side->server : &side->client, first ? &side->client : &side->server);
}

static bool post(struct side *side, struct end *from, struct end *to)
{
    static const enum ibv_wr_opcode operations[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
    struct ibv_sge sge = {(uintptr_t)from->memory, BLOCK, from->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = operations[rand_r(&side->seed) % 3]}, *bad;

    wr.send_flags = maybe(side, 70) ? IBV_SEND_SIGNALED : 0;
    wr.wr.rdma.remote_addr = (uintptr_t)to->memory + MEMORY;
    wr.wr.rdma.rkey = to->mr->rkey;
    if (wr.opcode != IBV_WR_SEND) {
        sge.addr += MEMORY;
        sge.length = maybe(side, 30) ? LARGE : BLOCK;
    }
    return ibv_post_send(from->qp, &wr, &bad) == 0;
}

static void poll_some(struct end *end)
{
    struct ibv_wc done[8];
    int count = ibv_poll_cq(end->cq, 8, done);

    CHECK(count >= 0);
    for (int i = 0; i < count; i++)
        if (done[i].status == IBV_WC_SUCCESS && done[i].opcode == IBV_WC_RECV)
            post_receive(end, done[i].wr_id);
}

/* Sleeps for an event, which is there or comes with the next completion. */
static void wait_once(struct end *end)
{
    struct ibv_cq *cq;
    void *context;

    CHECK(ibv_get_cq_event(end->channel, &cq, &context) == 0 && cq == end->cq);
    ibv_ack_cq_events(cq, 1);
    CHECK(ibv_req_notify_cq(cq, 0) == 0);
}

static void work(struct side *side)
{
    struct end *ends[] = {&side->client, &side->server};

    for (int left = rand_r(&side->seed) % 40; left > 0; left--) {
        unsigned which = maybe(side, 50);
        post(side, ends[which], ends[!which]);
        if (maybe(side, 60))
            poll_some(ends[which]);
        if (maybe(side, 30))
            poll_some(ends[!which]);
    }
    if (side->connects && maybe(side, 20)) {
        struct ibv_sge sge = {(uintptr_t)side->client.memory, 0, side->client.mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
        if (ibv_post_send(side->client.qp, &wr, &bad) == 0)
            wait_once(&side->client);
    }
}

static void destroy(struct side *side, struct end *end)
{
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
    struct ibv_qp_init_attr initial;

    if (maybe(side, 30))
        CHECK(ibv_query_qp(end->qp, &attributes, IBV_QP_STATE, &initial) == 0);
    if (maybe(side, 20)) {
        attributes.qp_state = IBV_QPS_ERR;
        CHECK(ibv_modify_qp(end->qp, &attributes, IBV_QP_STATE) == 0);
    }
    bool early = maybe(side, 50);
    if (early)
        CHECK(ibv_dereg_mr(end->mr) == 0);
    if (end->id != NULL)
        rdma_destroy_qp(end->id);
    else
        CHECK(ibv_destroy_qp(end->qp) == 0);
    if (!early)
        CHECK(ibv_dereg_mr(end->mr) == 0);
    if (end->srq != NULL)
        CHECK(ibv_destroy_srq(end->srq) == 0);
    bool queue_first = maybe(side, 50);
    if (queue_first)
        CHECK(ibv_destroy_cq(end->cq) == 0 && ibv_destroy_comp_channel(end->channel) == 0);
    CHECK(end->id != NULL ? rdma_destroy_id(end->id) == 0 : ibv_dealloc_pd(end->pd) == 0);
    if (!queue_first)
        CHECK(ibv_destroy_cq(end->cq) == 0 && ibv_destroy_comp_channel(end->channel) == 0);
    memset(end, 0, sizeof *end);
}

static void *run(void *argument)
{
    struct side *side = argument;

    for (int i = 0; i < side->rounds; i++) {
        struct ibv_context *context = NULL;
        struct rdma_cm_id *listener = NULL;
        if (side->by_number) {
            struct ibv_device **list = ibv_get_device_list(NULL);
            context = ibv_open_device(list[0]);
            ibv_free_device_list(list);
            CHECK(context != NULL);
            connect_by_number(side, context);
        } else {
            side->events = rdma_create_event_channel();
            CHECK(side->events != NULL);
            listener = connect_by_manager(side);
            side->connects = true;
        }
        work(side);
        if (!side->by_number && maybe(side, 30))
            rdma_disconnect(maybe(side, 50) ? side->client.id : side->server.id);
        bool first = maybe(side, 50);
        destroy(side, first ? &side->client : &side->server);
        destroy(side, first ? &side->server : &side->client);
        if (side->by_number) {
            CHECK(ibv_close_device(context) == 0);
            continue;
        }
        CHECK(rdma_destroy_id(listener) == 0);
        rdma_destroy_event_channel(side->events);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 5) {
        fprintf(stderr, "churn THREADS ROUNDS SEED manager|number\n");
        return 2;
    }
    int threads = atoi(arguments[1]);
    struct side *sides = calloc((size_t)threads, sizeof *sides);
    CHECK(sides != NULL);
    alarm(LIMIT_S);
    for (int i = 0; i < threads; i++) {
        sides[i].rounds = atoi(arguments[2]);
        sides[i].by_number = strcmp(arguments[4], "number") == 0;
        sides[i].seed = (unsigned)atoi(arguments[3]) * 1000u + (unsigned)i;
        CHECK(pthread_create(&sides[i].thread, NULL, run, &sides[i]) == 0);
    }
    for (int i = 0; i < threads; i++)
        pthread_join(sides[i].thread, NULL);
    free(sides);
    return 0;
}
