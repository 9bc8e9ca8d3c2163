/* The loops of `make bench` in C, on plain verbs: what the hardware and the kernel cost, with nothing around them.

   loops DEVICE [LOOP]: prints one line of JSON for each loop, or for that one. loops_ndpy.py and the others run the
   same loops with the same sizes and the same names. timing.py measures there; measure() here does the same.

   Two RC queue pairs of this process are connected to each other. On rxe, ibv_post_send returns after the kernel has
   carried the write out and stored its completion, so the first poll takes it. Polls that find nothing are counted. */

#include <infiniband/verbs.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

#define BATCH    64
#define RECEIVES 2048
#define LENGTH   8
#define PAGE     4096
#define CONTEXT  7
#define PORT     1
/* The GID of the IPv4 address. Index 0 is the link-local one. */
#define GID_INDEX 1

/* As in timing.py. */
#define SAMPLE_NS 20000000
#define SAMPLES   9

static struct ibv_pd *pd;
static struct ibv_cq *cq, *receive_cq;
static struct ibv_qp *client, *server;
static struct ibv_mr *local, *remote;
static struct ibv_sge local_element, remote_element;
static struct ibv_send_wr kept, silent, writes[BATCH], sends[BATCH];
static struct ibv_recv_wr receives[BATCH];
static struct ibv_wc completions[BATCH];
static _Alignas(PAGE) char memory[3][PAGE];
static long empty_polls;
static uint64_t sum;

static void require(int condition, const char *what)
{
    if (!condition) {
        perror(what);
        exit(1);
    }
}

static int64_t now_ns(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* ---- set-up ---- */

static struct ibv_qp *create_queue_pair(struct ibv_cq *receives_to, int send_depth, int receive_depth)
{
    struct ibv_qp_init_attr attributes = {
        .send_cq = cq,
        .recv_cq = receives_to,
        .cap = {.max_send_wr = send_depth, .max_recv_wr = receive_depth, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    struct ibv_qp *queue_pair = ibv_create_qp(pd, &attributes);

    require(queue_pair != NULL, "ibv_create_qp");
    return queue_pair;
}

static void connect_to(struct ibv_qp *queue_pair, const struct ibv_qp *peer, const union ibv_gid *gid, enum ibv_mtu mtu)
{
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT,
                               .port_num = PORT,
                               .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE};
    struct ibv_qp_attr receive = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu,
        .dest_qp_num = peer->qp_num,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = PORT, .grh = {.dgid = *gid, .sgid_index = GID_INDEX, .hop_limit = 64}},
    };
    struct ibv_qp_attr send = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};

    require(!ibv_modify_qp(queue_pair, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            "to INIT");
    require(!ibv_modify_qp(queue_pair, &receive,
                           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
            "to RTR");
    require(!ibv_modify_qp(queue_pair, &send,
                           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                               IBV_QP_MAX_QP_RD_ATOMIC),
            "to RTS");
}

static void set_up(struct ibv_context *context)
{
    struct ibv_port_attr port;
    union ibv_gid gid;

    require((pd = ibv_alloc_pd(context)) != NULL, "ibv_alloc_pd");
    require((cq = ibv_create_cq(context, 2 * BATCH, NULL, NULL, 0)) != NULL, "ibv_create_cq");
    require((receive_cq = ibv_create_cq(context, RECEIVES, NULL, NULL, 0)) != NULL, "ibv_create_cq");
    require((local = ibv_reg_mr(pd, memory[0], PAGE, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");
    require((remote = ibv_reg_mr(pd, memory[1], PAGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)) != NULL,
            "ibv_reg_mr");
    require(!ibv_query_port(context, PORT, &port), "ibv_query_port");
    require(!ibv_query_gid(context, PORT, GID_INDEX, &gid), "ibv_query_gid");
    client = create_queue_pair(cq, 2 * BATCH, 1);
    server = create_queue_pair(receive_cq, 1, RECEIVES);
    connect_to(client, server, &gid, port.active_mtu);
    connect_to(server, client, &gid, port.active_mtu);

    local_element = (struct ibv_sge){(uintptr_t)memory[0], LENGTH, local->lkey};
    remote_element = (struct ibv_sge){(uintptr_t)memory[1], LENGTH, remote->lkey};
    kept = (struct ibv_send_wr){.wr_id = CONTEXT,
                                .sg_list = &local_element,
                                .num_sge = 1,
                                .opcode = IBV_WR_RDMA_WRITE,
                                .send_flags = IBV_SEND_SIGNALED,
                                .wr.rdma = {(uintptr_t)memory[1], remote->rkey}};
    silent = kept;
    silent.send_flags = 0;
    for (int i = 0; i < BATCH; i++) {
        int last = i == BATCH - 1;
        writes[i] = last ? kept : silent;
        writes[i].next = last ? NULL : &writes[i + 1];
        sends[i] = writes[i];
        sends[i].opcode = IBV_WR_SEND;
        sends[i].next = last ? NULL : &sends[i + 1];
        receives[i] = (struct ibv_recv_wr){
            .wr_id = CONTEXT, .next = last ? NULL : &receives[i + 1], .sg_list = &remote_element, .num_sge = 1};
    }
}

/* ---- the loops: each returns the nanoseconds of its rounds ---- */

static void post(struct ibv_send_wr *request)
{
    struct ibv_send_wr *refused;

    require(!ibv_post_send(client, request, &refused), "ibv_post_send");
}

static void take_one(void)
{
    struct ibv_wc completion;
    int count;

    while (!(count = ibv_poll_cq(cq, 1, &completion)))
        empty_polls++;
    require(count == 1 && completion.status == IBV_WC_SUCCESS, "a completion");
}

static int64_t write_afresh(long rounds)
{
    int64_t begin = now_ns();

    for (long i = 0; i < rounds; i++) {
        struct ibv_sge element = {(uintptr_t)memory[0], LENGTH, local->lkey};
        struct ibv_send_wr request = {.wr_id = CONTEXT,
                                      .sg_list = &element,
                                      .num_sge = 1,
                                      .opcode = IBV_WR_RDMA_WRITE,
                                      .send_flags = IBV_SEND_SIGNALED,
                                      .wr.rdma = {(uintptr_t)memory[1], remote->rkey}};
        post(&request);
        take_one();
    }
    return now_ns() - begin;
}

static int64_t write_kept(long rounds)
{
    int64_t begin = now_ns();

    for (long i = 0; i < rounds; i++) {
        post(&kept);
        take_one();
    }
    return now_ns() - begin;
}

static int64_t write_64_calls(long rounds)
{
    int64_t begin = now_ns();

    for (long i = 0; i < rounds; i++) {
        for (int j = 0; j < BATCH - 1; j++)
            post(&silent);
        post(&kept);
        take_one();
    }
    return now_ns() - begin;
}

static int64_t write_64_list(long rounds)
{
    int64_t begin = now_ns();

    for (long i = 0; i < rounds; i++) {
        post(writes);
        take_one();
    }
    return now_ns() - begin;
}

static int64_t poll_empty(long rounds)
{
    struct ibv_wc completion;
    int64_t begin = now_ns();

    for (long i = 0; i < rounds; i++)
        require(!ibv_poll_cq(cq, 1, &completion), "an empty queue");
    return now_ns() - begin;
}

static int64_t register_4k(long rounds)
{
    int64_t begin = now_ns();

    for (long i = 0; i < rounds; i++) {
        struct ibv_mr *region = ibv_reg_mr(pd, memory[2], PAGE, IBV_ACCESS_LOCAL_WRITE);
        require(region && !ibv_dereg_mr(region), "a registration");
    }
    return now_ns() - begin;
}

/* Posts receives, has a message arrive for each, and takes the completions. Only one of the steps is timed. */
enum step { POST, POLL, LOOK };

static int64_t receive_cycle(long rounds, enum step timed)
{
    struct ibv_recv_wr *refused;
    int64_t posting = 0, polling = 0, begin;

    for (long i = 0; i < rounds; i++) {
        begin = now_ns();
        for (int j = 0; j < RECEIVES / BATCH; j++)
            require(!ibv_post_recv(server, receives, &refused), "ibv_post_recv");
        posting += now_ns() - begin;
        for (int j = 0; j < RECEIVES / BATCH; j++) {
            post(sends);
            take_one();
        }
        begin = now_ns();
        for (int j = 0; j < RECEIVES / BATCH; j++) {
            require(ibv_poll_cq(receive_cq, BATCH, completions) == BATCH, "64 completions");
            if (timed == LOOK)
                for (int k = 0; k < BATCH; k++) {
                    require(completions[k].status == IBV_WC_SUCCESS, "a receive");
                    sum += completions[k].wr_id;
                }
        }
        polling += now_ns() - begin;
        require(completions[BATCH - 1].status == IBV_WC_SUCCESS, "a receive");
    }
    return timed == POST ? posting : polling;
}

static int64_t receive_64_list(long rounds)
{
    return receive_cycle(rounds, POST);
}

static int64_t poll_64(long rounds)
{
    return receive_cycle(rounds, POLL);
}

static int64_t poll_64_looked_at(long rounds)
{
    return receive_cycle(rounds, LOOK);
}

static const struct loop {
    const char *name;
    int64_t (*run)(long rounds);
    /* In one round. A loop that waits does so for one completion. */
    int operations, waits;
} loops[] = {
    {"write_afresh", write_afresh, 1, 1},
    {"write_kept", write_kept, 1, 1},
    {"write_batch", write_kept, 1, 1},
    {"write_module_afresh", write_afresh, 1, 1},
    {"write_module", write_kept, 1, 1},
    {"write_64_calls", write_64_calls, BATCH, 1},
    {"write_64_list", write_64_list, BATCH, 1},
    {"poll_empty", poll_empty, 1, 0},
    {"register_4k", register_4k, 1, 0},
    {"receive_64_list", receive_64_list, RECEIVES, 0},
    {"poll_64", poll_64, RECEIVES, 0},
    {"poll_64_array", poll_64, RECEIVES, 0},
    {"poll_64_looked_at", poll_64_looked_at, RECEIVES, 0},
};

/* ---- measuring ---- */

static const char *who = "C";

static int order(const void *left, const void *right)
{
    double difference = *(const double *)left - *(const double *)right;

    return (difference > 0) - (difference < 0);
}

static void measure(const struct loop *loop)
{
    double samples[SAMPLES];
    long rounds = 0;
    int64_t taken;

    /* The warm-up finds how many rounds take SAMPLE_NS. */
    do {
        int64_t begin = now_ns();
        rounds = rounds ? 2 * rounds : 1;
        loop->run(rounds);
        taken = now_ns() - begin;
    } while (taken < SAMPLE_NS);
    empty_polls = 0;
    for (int i = 0; i < SAMPLES; i++)
        samples[i] = (double)loop->run(rounds) / rounds / loop->operations / 1000;
    qsort(samples, SAMPLES, sizeof *samples, order);
    printf("{\"who\": \"%s\", \"loop\": \"%s\", \"us\": %.6f, \"spread\": %.6f, \"rounds\": %ld, \"samples\": %d", who,
           loop->name, samples[SAMPLES / 2], (samples[3 * SAMPLES / 4] - samples[SAMPLES / 4]) / samples[SAMPLES / 2],
           rounds, SAMPLES);
    if (loop->waits)
        printf(", \"polls\": %.4f", 1 + (double)empty_polls / SAMPLES / rounds);
    puts("}");
    fflush(stdout);
}

int main(int count, char **arguments)
{
    struct ibv_context *context = NULL;
    struct utsname system;
    struct ibv_device **devices;
    int found;

    require(count == 2 || count == 3, "usage: loops DEVICE [LOOP]");
    /* bench.py preloads only the shim. */
    if (getenv("LD_PRELOAD") != NULL)
        who = "shim";
    require((devices = ibv_get_device_list(&found)) != NULL, "ibv_get_device_list");
    for (int i = 0; i < found; i++)
        if (!strcmp(ibv_get_device_name(devices[i]), arguments[1]))
            context = ibv_open_device(devices[i]);
    require(context != NULL, arguments[1]);
    set_up(context);
    uname(&system);
    printf("{\"who\": \"%s\", \"kernel\": \"%s\"}\n", who, system.release);
    for (size_t i = 0; i < sizeof loops / sizeof *loops; i++)
        if (count == 2 || !strcmp(arguments[2], loops[i].name))
            measure(&loops[i]);
    return 0;
}
