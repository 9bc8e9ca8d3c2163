/* Two connected RC queue pairs of one device, in one process, without librdmacm. Used by programs that show how a
   driver behaves.

   The exit status of a program says what it saw. 0: it saw what the InfiniBand specification asks for. 1: it saw
   something else, and printed a line about it. 2: it could not try. Every wait ends. */

#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { AS_SPECIFIED = 0, DEFECT = 1, NOT_TRIED = 2, PAGE = 4096, WAIT_MS = 20000 };

struct end {
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
};

static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_port_attr port;
static struct end near, far;

static void give_up(const char *what)
{
    printf("not tried: %s: %s\n", what, strerror(errno));
    exit(NOT_TRIED);
}

static inline void check(int ok, const char *what)
{
    if (!ok)
        give_up(what);
}

static int tell(int verdict, const char *what)
{
    printf("%s: %s\n", verdict == AS_SPECIFIED ? "as specified" : "otherwise", what);
    return verdict;
}

static void make_end(struct end *end)
{
    struct ibv_qp_init_attr wanted = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1};
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_INIT, .port_num = 1};

    end->channel = ibv_create_comp_channel(context);
    check(end->channel != NULL, "ibv_create_comp_channel");
    end->cq = ibv_create_cq(context, 64, NULL, end->channel, 0);
    check(end->cq != NULL, "ibv_create_cq");
    wanted.send_cq = wanted.recv_cq = end->cq;
    wanted.cap.max_send_wr = wanted.cap.max_recv_wr = 16;
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    end->qp = ibv_create_qp(domain, &wanted);
    check(end->qp != NULL, "ibv_create_qp");
    state.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    check(!ibv_modify_qp(end->qp, &state, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
          "INIT");
}

static void connect_end(struct end *end, uint32_t number, const union ibv_gid *gid, int gid_index)
{
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu, .dest_qp_num = number};

    state.max_dest_rd_atomic = 1;
    state.min_rnr_timer = 12;
    state.ah_attr.is_global = 1;
    state.ah_attr.port_num = 1;
    state.ah_attr.grh.dgid = *gid;
    state.ah_attr.grh.sgid_index = (uint8_t)gid_index;
    state.ah_attr.grh.hop_limit = 1;
    check(!ibv_modify_qp(end->qp, &state,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "RTR");
    memset(&state, 0, sizeof state);
    state.qp_state = IBV_QPS_RTS;
    state.timeout = 14;
    state.retry_cnt = state.rnr_retry = 7;
    state.max_rd_atomic = 1;
    check(!ibv_modify_qp(end->qp, &state,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC),
          "RTS");
}

static void make_ends(void)
{
    union ibv_gid gid, none;
    int gid_index = -1;

    memset(&none, 0, sizeof none);
    for (int i = 0; i < port.gid_tbl_len; i++)
        if (!ibv_query_gid(context, 1, i, &gid) && memcmp(&gid, &none, sizeof gid))
            gid_index = i;
    check(gid_index >= 0 && !ibv_query_gid(context, 1, gid_index, &gid), "ibv_query_gid");
    make_end(&near);
    make_end(&far);
    connect_end(&near, far.qp->qp_num, &gid, gid_index);
    connect_end(&far, near.qp->qp_num, &gid, gid_index);
}

/* Open the device with this name. Use its last GID that is an IPv4 or IPv6 address, or else its only GID. */
static void open_two_ends(const char *name)
{
    struct ibv_device **list = ibv_get_device_list(NULL);

    setvbuf(stdout, NULL, _IOLBF, 0);
    check(list != NULL, "ibv_get_device_list");
    for (int i = 0; list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name))
            context = ibv_open_device(list[i]);
    check(context != NULL, name);
    domain = ibv_alloc_pd(context);
    check(domain != NULL, "ibv_alloc_pd");
    check(!ibv_query_port(context, 1, &port), "ibv_query_port");
    make_ends();
}

static inline struct ibv_mr *pages(unsigned count, int access)
{
    void *memory = NULL;
    struct ibv_mr *region;

    check(!posix_memalign(&memory, PAGE, count * PAGE), "posix_memalign");
    memset(memory, 0, count * PAGE);
    region = ibv_reg_mr(domain, memory, count * PAGE, access);
    check(region != NULL, "ibv_reg_mr");
    return region;
}

static inline void receive(struct end *end)
{
    struct ibv_recv_wr wr = {.wr_id = 1}, *bad;

    check(!ibv_post_recv(end->qp, &wr, &bad), "ibv_post_recv");
}

/* Post a send, or a write to or a read of the memory at `remote` with `rkey`. */
static inline void post(struct end *end, enum ibv_wr_opcode opcode, unsigned flags, struct ibv_sge *local,
                        uint64_t remote, uint32_t rkey)
{
    struct ibv_send_wr wr = {.wr_id = 2, .opcode = opcode, .send_flags = flags}, *bad;

    wr.sg_list = local;
    wr.num_sge = local ? 1 : 0;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    check(!ibv_post_send(end->qp, &wr, &bad), "ibv_post_send");
}

static inline void end_natively(struct end *end)
{
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_ERR};

    check(!ibv_modify_qp(end->qp, &state, IBV_QP_STATE), "ERR");
}

/* The next completion. Its status is -1 if none came. */
static inline struct ibv_wc completion(struct end *end, int wait_ms)
{
    struct ibv_wc wc;
    int got;

    while (!(got = ibv_poll_cq(end->cq, 1, &wc)) && wait_ms--)
        usleep(1000);
    if (got != 1)
        wc.status = (enum ibv_wc_status) - 1;
    return wc;
}

static inline int is_notified(struct end *end, int wait_ms)
{
    struct pollfd ready = {.fd = end->channel->fd, .events = POLLIN};
    struct ibv_cq *cq;
    void *user;

    if (poll(&ready, 1, wait_ms) != 1)
        return 0;
    check(!ibv_get_cq_event(end->channel, &cq, &user), "ibv_get_cq_event");
    ibv_ack_cq_events(cq, 1);
    return 1;
}
