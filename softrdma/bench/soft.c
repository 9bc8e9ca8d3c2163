/* Compares softverbs with plain TCP over loopback, in one run: two processes, one after the other through each loop.
 *
 *   soft [--device NAME] [--gid INDEX] [--json] [--only LOOP]
 *   soft [--device NAME] [--gid INDEX] --delays
 *
 * --delays: how long a socket's event waits for the library beside one that waits for a plain epoll_wait(), while the
 * program does what the row says. One process writes 8 bytes, or sends 8 bytes over TCP to a thread in epoll_wait(),
 * which returns them, in turns. It sleeps until the write has completed or the bytes are back. Each figure is a whole
 * round trip.
 *
 * Each figure is the median of several rounds, and the rounds of both take turns, so that a busy machine slows both.
 * With another device, such as rxe0, the same loops show that device. One file, because it is built by itself.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS       7
#define SMALL        64u
#define LARGE        (1u << 20)
#define PING_PONGS   2000
#define LARGE_WRITES 200
#define MESSAGES     64000
#define BATCH        64
#define SLOTS        8
#define CREDITS      16
#define DEPTH        2048

static void fail(const char *what)
{
    fprintf(stderr, "soft: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void require(bool condition, const char *what)
{
    if (!condition)
        fail(what);
}

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* ---- TCP ---- */

struct tcp {
    int handle, epoll;
    char *memory;
};

static void tcp_wait(struct tcp *tcp)
{
    struct epoll_event event;

    require(epoll_wait(tcp->epoll, &event, 1, -1) == 1, "epoll_wait");
}

static void tcp_receive(struct tcp *tcp, size_t size)
{
    for (size_t have = 0; have < size;) {
        ssize_t count = recv(tcp->handle, tcp->memory + have, size - have, MSG_DONTWAIT);
        if (count > 0)
            have += (size_t)count;
        else if (count < 0 && errno == EAGAIN)
            tcp_wait(tcp);
        else
            fail("recv");
    }
}

static void tcp_send(struct tcp *tcp, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t count = send(tcp->handle, tcp->memory + done, size - done, 0);
        require(count > 0, "send");
        done += (size_t)count;
    }
}

static void tcp_start(struct tcp *tcp, int handle)
{
    int on = 1;
    struct epoll_event event = {.events = EPOLLIN};

    setsockopt(handle, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    tcp->handle = handle;
    tcp->epoll = epoll_create1(0);
    require(epoll_ctl(tcp->epoll, EPOLL_CTL_ADD, handle, &event) == 0, "epoll_ctl");
    tcp->memory = aligned_alloc(4096, LARGE);
    memset(tcp->memory, 1, LARGE);
}

static double tcp_ping_pong(struct tcp *tcp, bool active)
{
    double begin = now();

    for (int i = 0; i < PING_PONGS; i++) {
        if (active)
            tcp_send(tcp, SMALL);
        tcp_receive(tcp, SMALL);
        if (!active)
            tcp_send(tcp, SMALL);
    }
    return now() - begin;
}

/* The receiver answers at the end with one byte. */
static double tcp_stream(struct tcp *tcp, bool active, size_t size, int count)
{
    double begin = now();

    for (int i = 0; i < count; i++) {
        if (active)
            tcp_send(tcp, size);
        else
            tcp_receive(tcp, size);
    }
    if (active)
        tcp_receive(tcp, 1);
    else
        tcp_send(tcp, 1);
    return now() - begin;
}

/* ---- verbs ---- */

struct address {
    uint32_t number, rkey;
    uint64_t memory;
    union ibv_gid gid;
};

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *send_cq, *receive_cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    char *memory;
    struct address peer;
    int received; /* receive completions that were taken and not used yet */
};

static void post_receive(struct end *end)
{
    struct ibv_sge sge = {(uintptr_t)end->memory + LARGE, SMALL, end->mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;

    require(ibv_post_recv(end->qp, &wr, &bad) == 0, "ibv_post_recv");
}

static void post_send(struct end *end, enum ibv_wr_opcode opcode, uint32_t size, unsigned flags)
{
    struct ibv_sge sge = {(uintptr_t)end->memory, size, end->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags}, *bad;

    wr.wr.rdma.remote_addr = end->peer.memory;
    wr.wr.rdma.rkey = end->peer.rkey;
    require(ibv_post_send(end->qp, &wr, &bad) == 0, "ibv_post_send");
}

static int poll_some(struct ibv_cq *cq, int most)
{
    struct ibv_wc wc[BATCH];
    int count = ibv_poll_cq(cq, most < BATCH ? most : BATCH, wc);

    for (int i = 0; i < count; i++)
        if (wc[i].status != IBV_WC_SUCCESS) {
            fprintf(stderr, "soft: a request completed with status %d\n", wc[i].status);
            exit(1);
        }
    return count;
}

static void poll_all(struct ibv_cq *cq, int count)
{
    while (count > 0)
        count -= poll_some(cq, count);
}

static void wait_for_message(struct end *end)
{
    struct ibv_cq *cq;
    void *context;

    while (poll_some(end->receive_cq, 1) == 0) {
        require(ibv_req_notify_cq(end->receive_cq, 0) == 0, "ibv_req_notify_cq");
        if (poll_some(end->receive_cq, 1) == 1)
            return;
        require(ibv_get_cq_event(end->channel, &cq, &context) == 0, "ibv_get_cq_event");
        ibv_ack_cq_events(cq, 1);
    }
}

static double ping_pong(struct end *end, bool active, bool events)
{
    double begin = now();

    for (int i = 0; i < PING_PONGS; i++) {
        post_receive(end);
        if (active)
            post_send(end, IBV_WR_SEND, SMALL, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
        if (events)
            wait_for_message(end);
        else
            poll_all(end->receive_cq, 1);
        if (!active)
            post_send(end, IBV_WR_SEND, SMALL, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
        poll_all(end->send_cq, 1);
    }
    return now() - begin;
}

/* Each end writes into the other's memory and looks at its own until the answer is there. It polls its queue only for
 * the completion of its write. */
static double ping_pong_in_memory(struct end *end, bool active)
{
    volatile char *landing = end->memory + SMALL - 1;
    char *source = end->memory + LARGE;
    struct ibv_sge sge = {(uintptr_t)source, SMALL, end->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_WRITE,
                             .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
                             .wr.rdma = {end->peer.memory, end->peer.rkey}},
                       *bad;

    while (poll_some(end->send_cq, BATCH) > 0)
        ;
    double begin = now();

    for (int i = 0; i < PING_PONGS; i++) {
        char mark = (char)(1 + (i & 63));
        source[SMALL - 1] = mark;
        if (active)
            require(ibv_post_send(end->qp, &wr, &bad) == 0, "ibv_post_send");
        while (*landing != mark)
            ;
        if (!active)
            require(ibv_post_send(end->qp, &wr, &bad) == 0, "ibv_post_send");
        poll_all(end->send_cq, 1);
    }
    *landing = 0;
    return now() - begin;
}

/* A message at the end tells the other end, which waits for it. */
static double writes(struct end *end, bool active)
{
    double begin = now();

    if (active) {
        int posted = 0, done = 0;
        while (done < LARGE_WRITES) {
            while (posted < LARGE_WRITES && posted - done < SLOTS) {
                post_send(end, IBV_WR_RDMA_WRITE, LARGE, IBV_SEND_SIGNALED);
                posted++;
            }
            done += poll_some(end->send_cq, BATCH);
        }
        post_send(end, IBV_WR_SEND, SMALL, IBV_SEND_SIGNALED);
        poll_all(end->send_cq, 1);
    } else {
        post_receive(end);
        wait_for_message(end);
    }
    return now() - begin;
}

static void post_batch(struct end *end)
{
    struct ibv_sge sge = {(uintptr_t)end->memory, SMALL, end->mr->lkey};
    struct ibv_send_wr wr[BATCH], *bad;

    for (int i = 0; i < BATCH; i++)
        wr[i] = (struct ibv_send_wr){.sg_list = &sge,
                                     .num_sge = 1,
                                     .opcode = IBV_WR_SEND,
                                     .next = i + 1 < BATCH ? &wr[i + 1] : NULL,
                                     .send_flags = IBV_SEND_INLINE | (i + 1 < BATCH ? 0 : IBV_SEND_SIGNALED)};
    require(ibv_post_send(end->qp, wr, &bad) == 0, "ibv_post_send");
}

static void post_receives(struct end *end)
{
    struct ibv_sge sge = {(uintptr_t)end->memory + LARGE, SMALL, end->mr->lkey};
    struct ibv_recv_wr wr[BATCH], *bad;

    for (int i = 0; i < BATCH; i++)
        wr[i] = (struct ibv_recv_wr){.sg_list = &sge, .num_sge = 1, .next = i + 1 < BATCH ? &wr[i + 1] : NULL};
    require(ibv_post_recv(end->qp, wr, &bad) == 0, "ibv_post_recv");
}

/* Each end always has CREDITS batches of receives. The receiver returns a credit with a message for each batch that it
 * took. */
static double messages(struct end *end, bool active)
{
    int batches = MESSAGES / BATCH;
    double begin = now();

    if (active) {
        int sent = 0, done = 0, credits = CREDITS;
        while (done < batches) {
            if (sent < batches && credits > 0) {
                post_batch(end);
                credits--;
                sent++;
                poll_some(end->send_cq, BATCH);
                continue;
            }
            int back = poll_some(end->receive_cq, BATCH);
            for (int i = 0; i < back; i++)
                post_receive(end);
            done += back;
            credits += back;
            poll_some(end->send_cq, BATCH);
        }
    } else {
        int left = 0;
        for (int i = 0; i < batches; i++) {
            left += BATCH;
            while (left > 0)
                left -= poll_some(end->receive_cq, BATCH);
            post_receives(end);
            post_send(end, IBV_WR_SEND, 1, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
            poll_some(end->send_cq, BATCH);
        }
    }
    return now() - begin;
}

static void exchange(int handle, const void *mine, void *theirs, size_t size)
{
    require(send(handle, mine, size, 0) == (ssize_t)size, "send");
    require(recv(handle, theirs, size, MSG_WAITALL) == (ssize_t)size, "recv");
}

static void move(struct ibv_qp *qp, enum ibv_qp_state state, const struct address *peer, int gid)
{
    struct ibv_qp_attr attributes = {.qp_state = state};
    int mask = IBV_QP_STATE;

    if (state == IBV_QPS_INIT) {
        attributes.port_num = 1;
        attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    } else if (state == IBV_QPS_RTR) {
        attributes.path_mtu = IBV_MTU_1024;
        attributes.dest_qp_num = peer->number;
        attributes.max_dest_rd_atomic = 1;
        attributes.min_rnr_timer = 12;
        attributes.ah_attr.is_global = 1;
        attributes.ah_attr.port_num = 1;
        attributes.ah_attr.grh.dgid = peer->gid;
        attributes.ah_attr.grh.sgid_index = (uint8_t)gid;
        attributes.ah_attr.grh.hop_limit = 64;
        mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                IBV_QP_MIN_RNR_TIMER;
    } else {
        attributes.timeout = 14;
        attributes.retry_cnt = 7;
        attributes.rnr_retry = 7;
        attributes.max_rd_atomic = 1;
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    }
    errno = ibv_modify_qp(qp, &attributes, mask);
    require(errno == 0, "ibv_modify_qp");
}

static void start(struct end *end, int side, const char *name, int gid)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count), *device = NULL;

    for (int i = 0; i < count; i++)
        if (strcmp(ibv_get_device_name(list[i]), name) == 0)
            device = list[i];
    if (device == NULL) {
        fprintf(stderr, "soft: no device %s\n", name);
        exit(1);
    }
    require((end->context = ibv_open_device(device)) != NULL, "ibv_open_device");
    require((end->pd = ibv_alloc_pd(end->context)) != NULL, "ibv_alloc_pd");
    require((end->channel = ibv_create_comp_channel(end->context)) != NULL, "ibv_create_comp_channel");
    end->send_cq = ibv_create_cq(end->context, DEPTH, NULL, end->channel, 0);
    end->receive_cq = ibv_create_cq(end->context, DEPTH, NULL, end->channel, 0);
    end->memory = aligned_alloc(4096, 2 * LARGE);
    memset(end->memory, 2, 2 * LARGE);
    end->mr = ibv_reg_mr(end->pd, end->memory, 2 * LARGE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    require(end->send_cq != NULL && end->receive_cq != NULL && end->mr != NULL, "ibv_create_cq");
    struct ibv_qp_init_attr attributes = {
        .send_cq = end->send_cq,
        .recv_cq = end->receive_cq,
        .cap = {.max_send_wr = DEPTH,
                .max_recv_wr = DEPTH,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = SMALL},
        .qp_type = IBV_QPT_RC,
    };
    require((end->qp = ibv_create_qp(end->pd, &attributes)) != NULL, "ibv_create_qp");
    struct address mine = {end->qp->qp_num, end->mr->rkey, (uintptr_t)end->memory, {{0}}};
    require(ibv_query_gid(end->context, 1, gid, &mine.gid) == 0, "ibv_query_gid");
    exchange(side, &mine, &end->peer, sizeof mine);
    move(end->qp, IBV_QPS_INIT, NULL, gid);
    for (int i = 0; i < CREDITS; i++)
        post_receives(end);
    move(end->qp, IBV_QPS_RTR, &end->peer, gid);
    move(end->qp, IBV_QPS_RTS, &end->peer, gid);
    ibv_free_device_list(list);
}

/* ---- Delays ---- */

#define SAMPLES 2000
#define GAP_US  300

enum habit { IN_EVENTS, ASLEEP, SPINS_ON_QUEUE, POLLED_ONCE, POLLS_NOW_AND_THEN, ANSWERED, HABITS };

static const char *const habits[HABITS] = {
    "sleeps in ibv_get_cq_event()",   "sleeps in poll(2)",
    "polls its queue all the time",   "polled 1,000 times, then looks at memory",
    "polls, then computes for 20 us", "polls 20 times, then computes for 200 us",
};

static int compare(const void *a, const void *b);

static void *echo(void *argument)
{
    struct tcp *tcp = argument;
    char bytes[8];

    for (;;) {
        tcp_wait(tcp);
        ssize_t count = recv(tcp->handle, bytes, sizeof bytes, MSG_DONTWAIT);
        if (count == 0)
            return NULL;
        require(count < 0 || send(tcp->handle, bytes, (size_t)count, 0) == count, "send");
    }
}

static void compute(double seconds, const volatile char *stop)
{
    for (double end = now() + seconds; now() < end && *stop == 0;)
        ;
}

/* Until the other end writes here. */
static void follow(struct end *end, enum habit habit, volatile char *stop)
{
    struct pollfd state = {.fd = end->channel->fd, .events = POLLIN};
    struct ibv_cq *cq;
    void *context;
    int times = habit == POLLED_ONCE ? 1000 : habit == ANSWERED ? 20 : 1;

    require(ibv_req_notify_cq(end->receive_cq, 0) == 0, "ibv_req_notify_cq");
    if (habit == IN_EVENTS)
        require(ibv_get_cq_event(end->channel, &cq, &context) == 0, "ibv_get_cq_event");
    else if (habit == ASLEEP)
        require(poll(&state, 1, -1) == 1 && ibv_get_cq_event(end->channel, &cq, &context) == 0, "poll");
    else
        while (*stop == 0) {
            for (int i = 0; i < times; i++)
                poll_some(end->send_cq, 1);
            compute(habit == POLLED_ONCE      ? 1e9
                    : habit == ANSWERED       ? 200e-6
                    : habit == SPINS_ON_QUEUE ? 0
                                              : 20e-6,
                    stop);
        }
    if (habit == IN_EVENTS || habit == ASLEEP)
        ibv_ack_cq_events(cq, 1);
    poll_all(end->receive_cq, 1);
    post_receive(end);
    *stop = 0;
}

static void sleep_for_write(struct end *end)
{
    struct ibv_cq *cq;
    void *context;

    post_send(end, IBV_WR_RDMA_WRITE, 8, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
    while (poll_some(end->send_cq, 1) == 0) {
        require(ibv_req_notify_cq(end->send_cq, 0) == 0, "ibv_req_notify_cq");
        if (poll_some(end->send_cq, 1) == 1)
            return;
        require(ibv_get_cq_event(end->channel, &cq, &context) == 0, "ibv_get_cq_event");
        ibv_ack_cq_events(cq, 1);
    }
}

static void sample(struct end *end, struct tcp *tcp, double (*times)[SAMPLES])
{
    struct timespec gap = {.tv_nsec = GAP_US * 1000};

    for (int i = 0; i < SAMPLES; i++)
        for (int way = 0; way < 2; way++) {
            clock_nanosleep(CLOCK_MONOTONIC, 0, &gap, NULL);
            double begin = now();
            if (way == 0) {
                tcp_send(tcp, 8);
                tcp_receive(tcp, 8);
            } else {
                sleep_for_write(end);
            }
            times[way][i] = now() - begin;
        }
}

static void delays(struct tcp *tcp, struct end *end, int side, bool active)
{
    static const double parts[] = {0.5, 0.9, 0.99, 0.999};
    static double times[2][SAMPLES];
    volatile char *stop = end->memory + LARGE - 1;
    pthread_t thread;
    char byte = 0;

    *stop = 0;
    if (!active)
        require(pthread_create(&thread, NULL, echo, tcp) == 0, "pthread_create");
    if (active)
        printf("%-44s %33s   %33s\n%-44s", "us at", "a write, while the peer", "an echo by epoll_wait()", "");
    for (int i = 0; active && i < 2; i++)
        printf(" %7s  %7s  %7s  %7s%s", "50 %", "90 %", "99 %", "99.9 %", i == 0 ? " " : "\n");
    for (enum habit habit = 0; habit < HABITS; habit++) {
        exchange(side, &byte, &byte, 1);
        if (!active) {
            follow(end, habit, stop);
            continue;
        }
        sample(end, tcp, times);
        /* A write of the last byte, then a message: whatever the other end waits for. */
        struct ibv_sge sge = {(uintptr_t)end->memory, 1, end->mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge,
                                 .num_sge = 1,
                                 .opcode = IBV_WR_RDMA_WRITE,
                                 .wr.rdma = {end->peer.memory + LARGE - 1, end->peer.rkey}},
                           *bad;
        require(ibv_post_send(end->qp, &wr, &bad) == 0, "ibv_post_send");
        post_send(end, IBV_WR_SEND, SMALL, IBV_SEND_SIGNALED);
        poll_all(end->send_cq, 1);
        printf("%-44s", habits[habit]);
        for (int way = 1; way >= 0; way--) {
            qsort(times[way], SAMPLES, sizeof(double), compare);
            for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
                printf(" %7.1f ", times[way][(int)(parts[i] * SAMPLES)] * 1e6);
            printf(way == 1 ? "  " : "\n");
        }
    }
}

/* ---- All of it ---- */

enum loop { TCP_PING, PING_EVENTS, PING_POLLED, PING_MEMORY, TCP_STREAM, WRITES, TCP_MESSAGES, BATCHES, LOOPS };

static const char *const names[LOOPS] = {
    "TCP ping-pong of 64 bytes with events",
    "ping-pong with events",
    "ping-pong, polled",
    "ping-pong of writes, in memory",
    "TCP stream of 1 MiB pieces",
    "1 MiB writes",
    "TCP messages of 64 bytes, one by one",
    "messages of 64 bytes in batches of 64",
};

static double run(enum loop loop, struct tcp *tcp, struct end *end, bool active)
{
    switch (loop) {
    case TCP_PING:
        return tcp_ping_pong(tcp, active) / PING_PONGS;
    case PING_EVENTS:
        return ping_pong(end, active, true) / PING_PONGS;
    case PING_POLLED:
        return ping_pong(end, active, false) / PING_PONGS;
    case PING_MEMORY:
        return ping_pong_in_memory(end, active) / PING_PONGS;
    case TCP_STREAM:
        return tcp_stream(tcp, active, LARGE, LARGE_WRITES) / LARGE_WRITES;
    case WRITES:
        return writes(end, active) / LARGE_WRITES;
    case TCP_MESSAGES:
        return tcp_stream(tcp, active, SMALL, MESSAGES) / MESSAGES;
    default:
        return messages(end, active) / MESSAGES;
    }
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int count, char **arguments)
{
    const char *device = "soft0";
    int gid = 0, side[2];
    bool json = false, only_delays = false;
    unsigned only = 0; /* a bit for each loop; 0: all */

    for (int i = 1; i < count; i++) {
        if (strcmp(arguments[i], "--device") == 0 && i + 1 < count)
            device = arguments[++i];
        else if (strcmp(arguments[i], "--gid") == 0 && i + 1 < count)
            gid = atoi(arguments[++i]);
        else if (strcmp(arguments[i], "--json") == 0)
            json = true;
        else if (strcmp(arguments[i], "--delays") == 0)
            only_delays = true;
        else if (strcmp(arguments[i], "--only") == 0 && i + 1 < count)
            only |= 1u << atoi(arguments[++i]);
    }
    /* A TCP connection over loopback, by which the two also agree. */
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listening = socket(AF_INET, SOCK_STREAM, 0);
    require(bind(listening, (struct sockaddr *)&address, sizeof address) == 0 && listen(listening, 2) == 0 &&
                getsockname(listening, (struct sockaddr *)&address, &length) == 0,
            "listen");
    pid_t child = fork();
    require(child >= 0, "fork");
    bool active = child > 0;
    struct tcp tcp = {0};
    for (int i = 0; i < 2; i++) {
        if (active) {
            side[i] = socket(AF_INET, SOCK_STREAM, 0);
            require(connect(side[i], (struct sockaddr *)&address, sizeof address) == 0, "connect");
        } else {
            side[i] = accept(listening, NULL, NULL);
            require(side[i] >= 0, "accept");
        }
    }
    if (!active)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(300);
    tcp_start(&tcp, side[0]);
    struct end end = {0};
    start(&end, side[1], device, gid);
    if (only_delays) {
        delays(&tcp, &end, side[1], active);
        return 0;
    }
    double times[LOOPS][ROUNDS];
    char byte = 0;
    for (int round = -1; round < ROUNDS; round++)
        for (int loop = 0; loop < LOOPS; loop++) {
            if (only != 0 && (only >> loop & 1) == 0)
                continue;
            exchange(side[1], &byte, &byte, 1);
            double time = run(loop, &tcp, &end, active);
            if (round >= 0)
                times[loop][round] = time;
        }
    exchange(side[1], &byte, &byte, 1);
    if (!active)
        _exit(0);
    int status;
    waitpid(child, &status, 0);
    double median[LOOPS];
    for (int loop = 0; loop < LOOPS; loop++) {
        qsort(times[loop], ROUNDS, sizeof(double), compare);
        median[loop] = times[loop][ROUNDS / 2];
    }
    struct {
        const char *name;
        double ratio, bar;
        bool at_most;
    } ratios[] = {
        {"write bandwidth of 1 MiB, of TCP's", median[TCP_STREAM] / median[WRITES], 0.8, false},
        {"ping-pong with events, of TCP's time", median[PING_EVENTS] / median[TCP_PING], 1.5, true},
        {"ping-pong polled, of TCP's time", median[PING_POLLED] / median[TCP_PING], 1.0, true},
        {"message rate in batches, of TCP's one by one", median[TCP_MESSAGES] / median[BATCHES], 5.0, false},
    };
    if (json)
        printf("{\"device\": \"%s\", \"microseconds\": {", device);
    for (int loop = 0; loop < LOOPS; loop++)
        printf(json ? "%s\"%s\": %.4f" : "%s%-40s %10.2f us\n", json && loop > 0 ? ", " : "", names[loop],
               median[loop] * 1e6);
    if (json)
        printf("}, \"ratios\": {");
    for (size_t i = 0; i < sizeof ratios / sizeof ratios[0]; i++) {
        bool met = ratios[i].at_most ? ratios[i].ratio <= ratios[i].bar : ratios[i].ratio >= ratios[i].bar;
        if (json)
            printf("%s\"%s\": %.3f", i > 0 ? ", " : "", ratios[i].name, ratios[i].ratio);
        else
            printf("%-46s %6.2f  %s %.1f: %s\n", ratios[i].name, ratios[i].ratio,
                   ratios[i].at_most ? "at most" : "at least", ratios[i].bar, met ? "met" : "missed");
    }
    if (json)
        printf("}}\n");
    return 0;
}
