/* completions DEVICE GID_INDEX|ADDRESS COUNT [OPTION ...]: prints what becomes of COUNT requests of one queue pair, and
 * of the receives of its peer in the same process. With an IPv4 address, the connection manager connects the two. That
 * is for iWARP, where the kernel moves the queue pairs.
 *
 *   events     waits for events instead of polling
 *   solicited  the same, for solicited ones
 *   silent=N   only each Nth request wants a completion
 *   write      RDMA writes instead of sends
 *   srq        the receiver has a shared receive queue
 *   extended   extended completion queues
 *   builder    posts by ibv_wr_send() and the like
 *   list       posts all requests with one call
 *   room=N     completion queues have room for N. Otherwise there is enough for all.
 *   first=MS   so long it waits for the first completion, otherwise 20 s; for those behind it 1 s
 *
 * A line is "a|b WR_ID STATUS [ms]": a posts, b receives. The last one is "events N": how often it was woken.
 */
#include "need.h"

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SIZE     64
#define PAUSE_MS 1000

static struct {
    bool events, solicited, write, srq, extended, builder, list;
    int silent, first_ms, room;
} options = {.silent = 1, .first_ms = 20000};

static struct end {
    char name;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel;
    struct rdma_cm_id *id; /* NULL: not connected by the connection manager */
} a = {.name = 'a'}, b = {.name = 'b'};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_srq *srq;
static struct rdma_event_channel *connections;
static char memory[2 * SIZE];
static unsigned woken;

static void make(struct end *end, int count)
{
    if (options.events)
        end->channel = need(ibv_create_comp_channel(context), "ibv_create_comp_channel");
    if (options.extended) {
        struct ibv_cq_init_attr_ex attributes = {
            .cqe = options.room,
            .channel = end->channel,
            .wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM,
        };
        end->cq = ibv_cq_ex_to_cq(need(ibv_create_cq_ex(context, &attributes), "ibv_create_cq_ex"));
    } else
        end->cq = need(ibv_create_cq(context, options.room, NULL, end->channel, 0), "ibv_create_cq");
    struct ibv_qp_cap cap = {
        .max_send_wr = count,
        .max_recv_wr = count,
        .max_send_sge = 1,
        .max_recv_sge = 1,
        .max_inline_data = SIZE,
    };
    if (options.builder) {
        struct ibv_qp_init_attr_ex attributes = {
            .send_cq = end->cq,
            .recv_cq = end->cq,
            .cap = cap,
            .qp_type = IBV_QPT_RC,
            .pd = pd,
            .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            .send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE,
        };
        end->qp = need(ibv_create_qp_ex(context, &attributes), "ibv_create_qp_ex");
    } else {
        struct ibv_qp_init_attr attributes = {
            .send_cq = end->cq,
            .recv_cq = end->cq,
            .srq = end == &b ? srq : NULL,
            .cap = cap,
            .qp_type = IBV_QPT_RC,
        };
        end->qp = need(ibv_create_qp(pd, &attributes), "ibv_create_qp");
    }
}

static void move(struct end *end, struct ibv_qp_attr *attributes, int mask)
{
    int error = ibv_modify_qp(end->qp, attributes, mask);
    if (error != 0)
        fail("ibv_modify_qp", error);
}

static void join(struct end *end, struct end *peer, int gid_index, union ibv_gid *gid)
{
    struct ibv_qp_attr attributes = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE,
    };
    move(end, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    attributes = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer->qp->qp_num,
        .rq_psn = 7,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 1,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = *gid, .sgid_index = gid_index, .hop_limit = 1}},
    };
    move(end, &attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER);
    attributes = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .sq_psn = 7,
        .max_rd_atomic = 1,
    };
    move(end, &attributes,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static struct rdma_cm_id *expect(enum rdma_cm_event_type type)
{
    struct rdma_cm_event *event;

    if (rdma_get_cm_event(connections, &event) != 0)
        fail("rdma_get_cm_event", errno);
    if (event->event != type) {
        printf("%s failed: %s, status %d\n", rdma_event_str(type), rdma_event_str(event->event), event->status);
        exit(1);
    }
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    return id;
}

static void done(int result, const char *what)
{
    if (result != 0)
        fail(what, errno);
}

static void join_managed(const char *host)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct rdma_cm_id *listener;

    if (inet_pton(AF_INET, host, &address.sin_addr) != 1)
        fail(host, EINVAL);
    connections = need(rdma_create_event_channel(), "rdma_create_event_channel");
    done(rdma_create_id(connections, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
    done(rdma_bind_addr(listener, (struct sockaddr *)&address), "rdma_bind_addr");
    done(rdma_listen(listener, 1), "rdma_listen");
    address.sin_port = rdma_get_src_port(listener);
    done(rdma_create_id(connections, &a.id, NULL, RDMA_PS_TCP), "rdma_create_id");
    done(rdma_resolve_addr(a.id, NULL, (struct sockaddr *)&address, 2000), "rdma_resolve_addr");
    expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    done(rdma_resolve_route(a.id, 2000), "rdma_resolve_route");
    expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
    struct rdma_conn_param parameters = {.qp_num = a.qp->qp_num, .responder_resources = 1, .initiator_depth = 1};
    done(rdma_connect(a.id, &parameters), "rdma_connect");
    b.id = expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    parameters.qp_num = b.qp->qp_num;
    done(rdma_accept(b.id, &parameters), "rdma_accept");
    expect(RDMA_CM_EVENT_ESTABLISHED);
    expect(RDMA_CM_EVENT_ESTABLISHED);
    done(rdma_destroy_id(listener), "rdma_destroy_id");
}

static void arm(struct end *end)
{
    int error = ibv_req_notify_cq(end->cq, options.solicited);
    if (error != 0)
        fail("ibv_req_notify_cq", error);
}

static void print(const struct end *end, uint64_t wr_id, int status)
{
    printf("%c %llu %d\n", end->name, (unsigned long long)wr_id, status);
}

static int take(struct end *end)
{
    struct ibv_wc wc[4];
    struct ibv_poll_cq_attr attributes = {0};
    struct ibv_cq_ex *ex = (struct ibv_cq_ex *)end->cq;

    if (options.extended) {
        int taken = 0, error = ibv_start_poll(ex, &attributes);
        if (error == ENOENT)
            return 0;
        for (; error == 0; error = ibv_next_poll(ex)) {
            if (ibv_wc_read_qp_num(ex) != end->qp->qp_num)
                fail("ibv_wc_read_qp_num", EINVAL);
            print(end, ex->wr_id, ex->status);
            taken++;
        }
        ibv_end_poll(ex);
        return taken;
    }
    int count = ibv_poll_cq(end->cq, 4, wc);
    if (count < 0)
        fail("ibv_poll_cq", errno);
    for (int i = 0; i < count; i++) {
        if (wc[i].qp_num != end->qp->qp_num)
            fail("qp_num", EINVAL);
        print(end, wc[i].wr_id, wc[i].status);
    }
    return count;
}

/* Returns after so many, or when no more come. */
static void gather(int count, int first_ms, int pause_ms)
{
    double last = now_ms();
    int total = 0, wait_ms = first_ms;

    while (now_ms() - last < wait_ms && total < count) {
        int taken = take(&a);
        taken += take(&b);
        total += taken;
        if (taken > 0) {
            last = now_ms();
            wait_ms = pause_ms;
            continue;
        }
        struct pollfd fds[] = {{.fd = options.events ? a.channel->fd : -1, .events = POLLIN},
                               {.fd = options.events ? b.channel->fd : -1, .events = POLLIN}};
        if (!options.events) {
            usleep(100);
            continue;
        }
        if (poll(fds, 2, wait_ms) <= 0)
            return;
        for (int i = 0; i < 2; i++) {
            struct ibv_cq *cq;
            void *unused;
            if ((fds[i].revents & POLLIN) == 0)
                continue;
            if (ibv_get_cq_event(i == 0 ? a.channel : b.channel, &cq, &unused) != 0)
                fail("ibv_get_cq_event", errno);
            ibv_ack_cq_events(cq, 1);
            woken++;
            arm(i == 0 ? &a : &b);
        }
    }
}

static void post_receives(int count)
{
    struct ibv_sge sge = {.addr = (uintptr_t)memory + SIZE, .length = SIZE, .lkey = mr->lkey};

    for (int i = 0; i < count; i++) {
        struct ibv_recv_wr *bad, wr = {.wr_id = 1000 + i, .sg_list = &sge, .num_sge = 1};
        int error = srq != NULL ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(b.qp, &wr, &bad);
        if (error != 0)
            fail("ibv_post_recv", error);
    }
}

static unsigned flags_of(int i)
{
    return ((i + 1) % options.silent == 0 ? IBV_SEND_SIGNALED : 0) | IBV_SEND_SOLICITED;
}

/* Returns how many were posted. */
static int build(int count)
{
    struct ibv_qp_ex *ex = need(ibv_qp_to_qp_ex(a.qp), "ibv_qp_to_qp_ex");

    for (int i = 0; i < count; i++) {
        if (i == 0 || !options.list)
            ibv_wr_start(ex);
        ex->wr_id = i;
        ex->wr_flags = flags_of(i) | (i % 2 == 1 ? IBV_SEND_INLINE : 0);
        if (options.write)
            ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + SIZE);
        else
            ibv_wr_send(ex);
        if (i % 2 == 0)
            ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, SIZE);
        else
            ibv_wr_set_inline_data(ex, memory, SIZE);
        int error = i == count - 1 || !options.list ? ibv_wr_complete(ex) : 0;
        if (error != 0) {
            printf("post %d: %s\n", i, strerror(error));
            return options.list ? 0 : i;
        }
    }
    return count;
}

static int post(int count)
{
    int posted = count;
    struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = SIZE, .lkey = mr->lkey};
    struct ibv_send_wr *requests = calloc(count, sizeof *requests), *bad;

    for (int i = 0; i < count; i++) {
        requests[i] = (struct ibv_send_wr){
            .wr_id = i,
            .sg_list = &sge,
            .num_sge = 1,
            .opcode = options.write ? IBV_WR_RDMA_WRITE : IBV_WR_SEND,
            .send_flags = flags_of(i),
            .wr.rdma = {.remote_addr = (uintptr_t)memory + SIZE, .rkey = mr->rkey},
            .next = options.list && i < count - 1 ? &requests[i + 1] : NULL,
        };
    }
    for (int i = 0; i < (options.list ? 1 : count); i++) {
        int error = ibv_post_send(a.qp, &requests[i], &bad);
        if (error != 0) {
            posted = (int)bad->wr_id;
            printf("post %d: %s\n", posted, strerror(error));
            break;
        }
    }
    free(requests);
    return posted;
}

static void end(struct end *end)
{
    int error = ibv_destroy_qp(end->qp);
    if (error != 0)
        fail("ibv_destroy_qp", error);
    error = ibv_destroy_cq(end->cq);
    if (error != 0)
        fail("ibv_destroy_cq", error);
    error = end->channel != NULL ? ibv_destroy_comp_channel(end->channel) : 0;
    if (error != 0)
        fail("ibv_destroy_comp_channel", error);
    if (end->id != NULL)
        done(rdma_destroy_id(end->id), "rdma_destroy_id");
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    bool managed = strchr(argv[2], '.') != NULL;
    int gid_index = managed ? 0 : atoi(argv[2]), count = atoi(argv[3]), devices_count;
    union ibv_gid gid;

    options.room = count + 1;
    for (char **option = argv + 4; *option != NULL; option++) {
        options.solicited |= strcmp(*option, "solicited") == 0;
        options.events |= strcmp(*option, "events") == 0 || options.solicited;
        options.write |= strcmp(*option, "write") == 0;
        options.srq |= strcmp(*option, "srq") == 0;
        options.extended |= strcmp(*option, "extended") == 0;
        options.builder |= strcmp(*option, "builder") == 0;
        options.list |= strcmp(*option, "list") == 0;
        sscanf(*option, "silent=%d", &options.silent);
        sscanf(*option, "room=%d", &options.room);
        sscanf(*option, "first=%d", &options.first_ms);
    }
    struct ibv_device **devices = need(ibv_get_device_list(&devices_count), "ibv_get_device_list"), *device = NULL;
    for (int i = 0; i < devices_count; i++)
        if (strcmp(ibv_get_device_name(devices[i]), argv[1]) == 0)
            device = devices[i];
    if (device == NULL)
        fail(argv[1], ENODEV);
    context = need(ibv_open_device(device), "ibv_open_device");
    ibv_free_device_list(devices);
    if (ibv_query_gid(context, 1, gid_index, &gid) != 0)
        fail("ibv_query_gid", errno);
    pd = need(ibv_alloc_pd(context), "ibv_alloc_pd");
    mr = need(ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE), "ibv_reg_mr");
    if (options.srq) {
        struct ibv_srq_init_attr attributes = {.attr = {.max_wr = count, .max_sge = 1}};
        srq = need(ibv_create_srq(pd, &attributes), "ibv_create_srq");
    }
    make(&a, count);
    make(&b, count);
    if (managed) {
        join_managed(argv[2]);
    } else {
        join(&a, &b, gid_index, &gid);
        join(&b, &a, gid_index, &gid);
    }
    if (options.events) {
        arm(&a);
        arm(&b);
    }
    if (!options.write)
        post_receives(count);
    int posted = options.builder ? build(count) : post(count);
    gather(posted / options.silent + (options.write ? 0 : posted), options.first_ms, PAUSE_MS);
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
    move(&a, &attributes, IBV_QP_STATE);
    move(&b, &attributes, IBV_QP_STATE);
    puts("ended");
    gather(1 << 30, 100, 100);
    printf("events %u\n", woken);
    end(&a);
    end(&b);
    if (connections != NULL)
        rdma_destroy_event_channel(connections);
    int error = srq != NULL ? ibv_destroy_srq(srq) : 0;
    if (error == 0)
        error = ibv_dereg_mr(mr);
    if (error == 0)
        error = ibv_dealloc_pd(pd);
    if (error == 0)
        error = ibv_close_device(context);
    if (error != 0)
        fail("the end", error);
    return 0;
}
