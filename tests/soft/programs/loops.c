/* A program waits for its channel with poll(), and takes events without waiting. The peer is another process, which
   answers each message and writes when it is asked to. */

#include "ends.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#define ROUNDS   200
#define WINDOWS  20
#define WRITES   300
#define CHANNELS 6
#define DEPTH    16
#define SIZE     64

struct address {
    uint32_t number, rkey;
    uint64_t memory;
};

struct side {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    struct ibv_mr remote;
};

/* The first byte of a message. */
enum order { ANSWER, WRITE_MANY, WRITE_ONE, LEAVE };

static void open_side(struct side *side, int handle)
{
    struct address mine = {0}, theirs;

    side->context = open_device();
    EXPECT((side->pd = ibv_alloc_pd(side->context)) != NULL);
    EXPECT((side->channel = ibv_create_comp_channel(side->context)) != NULL);
    EXPECT((side->cq = ibv_create_cq(side->context, 4 * DEPTH, NULL, side->channel, 0)) != NULL);
    side->mr = buffer(side->pd, 4096);
    struct ibv_qp_init_attr attributes = qp_attributes(side->cq, DEPTH);
    EXPECT((side->qp = ibv_create_qp(side->pd, &attributes)) != NULL && move_to_init(side->qp) == 0);
    EXPECT(receive(side->qp, side->mr, SIZE, SIZE, 1) == 0);
    mine = (struct address){side->qp->qp_num, side->mr->rkey, (uintptr_t)side->mr->addr};
    EXPECT(send(handle, &mine, sizeof mine, 0) == sizeof mine);
    EXPECT(recv(handle, &theirs, sizeof theirs, MSG_WAITALL) == sizeof theirs);
    side->remote.addr = (void *)(uintptr_t)theirs.memory;
    side->remote.rkey = theirs.rkey;
    EXPECT(move_to_rts(side->qp, theirs.number, 0) == 0);
}

static void close_side(struct side *side)
{
    EXPECT(ibv_destroy_qp(side->qp) == 0 && ibv_destroy_cq(side->cq) == 0);
    EXPECT(ibv_destroy_comp_channel(side->channel) == 0);
    free_buffer(side->mr);
    EXPECT(ibv_dealloc_pd(side->pd) == 0 && ibv_close_device(side->context) == 0);
}

static void say(struct side *side, enum order order)
{
    *(char *)side->mr->addr = (char)order;
    EXPECT(post(side->qp, IBV_WR_SEND, side->mr, 0, SIZE, NULL, 0) == 0);
}

/* Takes what the queue has. Whether a message was among it, for which a new receive is posted. */
static bool takes_message(struct side *side)
{
    struct ibv_wc wc;
    bool message = false;

    while (ibv_poll_cq(side->cq, 1, &wc) == 1) {
        EXPECT(wc.status == IBV_WC_SUCCESS);
        if (wc.opcode == IBV_WC_RECV) {
            message = true;
            EXPECT(receive(side->qp, side->mr, SIZE, SIZE, 1) == 0);
        }
    }
    return message;
}

/* ---- The peer ---- */

static void write_once(struct side *side)
{
    struct ibv_wc wc;

    EXPECT(post(side->qp, IBV_WR_RDMA_WRITE, side->mr, 2 * SIZE, SIZE, &side->remote, 0) == 0);
    do
        EXPECT(completion(side->cq, &wc, DEADLINE_MS) && wc.status == IBV_WC_SUCCESS);
    while (wc.opcode != IBV_WC_RDMA_WRITE);
}

static int be_peer(int handle)
{
    struct side side;
    struct ibv_cq *cq;
    void *context;

    open_side(&side, handle);
    memset((char *)side.mr->addr + 2 * SIZE, 1, SIZE);
    for (enum order order = ANSWER; order != LEAVE;) {
        EXPECT(ibv_req_notify_cq(side.cq, 0) == 0);
        while (!takes_message(&side)) {
            EXPECT(ibv_get_cq_event(side.channel, &cq, &context) == 0);
            ibv_ack_cq_events(cq, 1);
            EXPECT(ibv_req_notify_cq(side.cq, 0) == 0);
        }
        order = (enum order)((char *)side.mr->addr)[SIZE];
        sleep_ms(order == WRITE_ONE ? 1 : 0);
        for (int i = 0; i < (order == WRITE_MANY ? WRITES : order == WRITE_ONE); i++)
            write_once(&side);
        if (order != WRITE_ONE)
            say(&side, order);
    }
    /* The last answer has gone when the other side has ended. */
    char byte;
    EXPECT(recv(handle, &byte, 1, 0) == 0);
    close_side(&side);
    return 0;
}

/* ---- The loop ---- */

static int wakes; /* of the descriptor */
static struct pollfd descriptor = {.events = POLLIN};

/* One turn of an event loop. */
static void sleep_and_take(struct side *side)
{
    struct ibv_cq *cq;
    void *context;

    if (poll(&descriptor, 1, DEADLINE_MS) != 1)
        FAIL("no event within %d ms", DEADLINE_MS);
    wakes++;
    errno = 0;
    while (ibv_get_cq_event(side->channel, &cq, &context) == 0) {
        EXPECT(cq == side->cq);
        ibv_ack_cq_events(cq, 1);
        EXPECT(ibv_req_notify_cq(side->cq, 0) == 0);
    }
    EXPECT(errno == EAGAIN);
}

static void wait_for_message(struct side *side)
{
    while (!takes_message(side))
        sleep_and_take(side);
}

static void ask(struct side *side, enum order order)
{
    say(side, order);
    wait_for_message(side);
}

/* How often the library's threads have slept. */
static long slept(void)
{
    DIR *tasks = opendir("/proc/self/task");
    long sum = 0;

    EXPECT(tasks != NULL);
    for (struct dirent *entry; (entry = readdir(tasks)) != NULL;) {
        char path[300], line[200];
        bool ours = false;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *file = entry->d_name[0] != '.' ? fopen(path, "r") : NULL;
        while (file != NULL && fgets(line, sizeof line, file) != NULL) {
            ours = ours || strncmp(line, "Name:\tsoftrdma", 14) == 0;
            if (ours && strncmp(line, "voluntary_ctxt_switches:", 24) == 0)
                sum += strtol(line + 24, NULL, 10);
        }
        if (file != NULL)
            fclose(file);
    }
    closedir(tasks);
    return sum;
}

/* Each round has a message and a receipt for the loop. A worker that handled them would sleep after each. */
static void try_rounds(struct side *side)
{
    long fewest = -1;

    for (int i = 0; i < WINDOWS; i++) {
        long before = slept();
        for (int j = 0; j < ROUNDS; j++)
            ask(side, ANSWER);
        long now = slept() - before;
        fewest = fewest < 0 || now < fewest ? now : fewest;
    }
    printf("%d messages: the workers slept %ld times in the quietest window\n", ROUNDS, fewest);
    if (fewest > ROUNDS / 2)
        FAIL("workers handle what the loop is woken for: they slept %ld times in %d rounds", fewest, ROUNDS);
}

/* The loop has gone to sleep, as the library believes, and computes. */
static void try_absence(struct side *side)
{
    volatile char *landing = (char *)side->mr->addr + 2 * SIZE;

    for (int i = 0; i < 20; i++) {
        ask(side, ANSWER);
        *landing = 0;
        say(side, WRITE_ONE);
        uint64_t begin = now_ms();
        while (*landing == 0)
            if (now_ms() - begin > DEADLINE_MS)
                FAIL("a write does not land while the loop computes");
    }
    printf("writes land while the loop computes\n");
}

static void try_writes(struct side *side)
{
    int most = 0;

    for (int i = 0; i < WINDOWS / 2; i++) {
        /* So that the library believes the loop. */
        for (int j = 0; j < 10; j++)
            ask(side, ANSWER);
        wakes = 0;
        ask(side, WRITE_MANY);
        most = wakes > most ? wakes : most;
    }
    printf("%d writes: the loop was woken %d times at most\n", WRITES, most);
    if (most > WRITES / 10)
        FAIL("%d writes that are nothing to the loop woke it %d times", WRITES, most);
}

/* A program that sleeps in ibv_get_cq_event() after poll() must not be woken for nothing. */
static void try_blocking(struct side *side)
{
    struct ibv_cq *cq;
    void *context;
    int flags = fcntl(side->channel->fd, F_GETFL);

    ask(side, ANSWER);
    EXPECT(fcntl(side->channel->fd, F_SETFL, flags & ~O_NONBLOCK) == 0);
    for (int i = 0; i < ROUNDS; i++) {
        say(side, ANSWER);
        while (!takes_message(side)) {
            EXPECT(ibv_get_cq_event(side->channel, &cq, &context) == 0);
            ibv_ack_cq_events(cq, 1);
            EXPECT(ibv_req_notify_cq(side->cq, 0) == 0);
        }
    }
    EXPECT(ibv_req_notify_cq(side->cq, 0) == 0);
    say(side, WRITE_MANY);
    EXPECT(ibv_get_cq_event(side->channel, &cq, &context) == 0);
    ibv_ack_cq_events(cq, 1);
    while (poll(&descriptor, 1, 0) == 1) {
        EXPECT(ibv_get_cq_event(side->channel, &cq, &context) == 0);
        ibv_ack_cq_events(cq, 1);
    }
    /* Nothing is asked for from here on. */
    while (!takes_message(side))
        EXPECT(poll(&descriptor, 1, 1) == 0);
    EXPECT(ibv_req_notify_cq(side->cq, 0) == 0);
    EXPECT(fcntl(side->channel->fd, F_SETFL, flags) == 0);
    printf("a descriptor that blocks is readable for an event alone\n");
}

/* A child has the descriptor, and its end changes nothing for the parent. */
static void try_fork(struct side *side)
{
    ask(side, ANSWER);
    pid_t child = fork();
    if (child == 0) {
        struct ibv_cq *cq;
        void *context;
        bool refused = ibv_get_cq_event(side->channel, &cq, &context) != 0 && errno == EIO;
        refused = refused && ibv_destroy_comp_channel(side->channel) == 0;
        _exit(refused ? 0 : 1);
    }
    int status;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    for (int i = 0; i < ROUNDS; i++)
        ask(side, ANSWER);
    printf("a child that closes it takes nothing from its parent\n");
}

/* More channels than may be woken by sockets, each in three epolls, one inside the other. */
static void try_many(struct side *side)
{
    struct ibv_comp_channel *channels[CHANNELS];
    struct held before = holds();

    for (int i = 0; i < CHANNELS; i++) {
        EXPECT((channels[i] = ibv_create_comp_channel(side->context)) != NULL);
        EXPECT(fcntl(channels[i]->fd, F_SETFL, O_NONBLOCK) == 0);
    }
    for (int i = 0; i < CHANNELS; i++) {
        struct ibv_cq *cq, *which;
        void *context;
        struct epoll_event event = {.events = EPOLLIN};
        int inner = channels[i]->fd, epolls[3];
        for (int level = 0; level < 3; level++) {
            EXPECT((epolls[level] = epoll_create1(EPOLL_CLOEXEC)) >= 0);
            EXPECT(epoll_ctl(epolls[level], EPOLL_CTL_ADD, inner, &event) == 0);
            inner = epolls[level];
        }
        EXPECT((cq = ibv_create_cq(side->context, 4 * DEPTH, NULL, channels[i], 0)) != NULL);
        struct ibv_qp *qp[2];
        for (int j = 0; j < 2; j++) {
            struct ibv_qp_init_attr attributes = qp_attributes(cq, DEPTH);
            EXPECT((qp[j] = ibv_create_qp(side->pd, &attributes)) != NULL && move_to_init(qp[j]) == 0);
        }
        for (int j = 0; j < 2; j++)
            EXPECT(move_to_rts(qp[j], qp[!j]->qp_num, 0) == 0);
        EXPECT(ibv_req_notify_cq(cq, 0) == 0);
        for (int j = 0; j < ROUNDS; j++) {
            struct ibv_wc wc;
            EXPECT(receive(qp[1], NULL, 0, 0, 1) == 0);
            EXPECT(post(qp[0], IBV_WR_SEND, NULL, 0, 0, NULL, 1) == 0);
            for (int left = 2; left > 0;) {
                if (ibv_poll_cq(cq, 1, &wc) == 1) {
                    EXPECT(wc.status == IBV_WC_SUCCESS);
                    left--;
                    continue;
                }
                EXPECT(epoll_wait(inner, &event, 1, DEADLINE_MS) == 1);
                while (ibv_get_cq_event(channels[i], &which, &context) == 0) {
                    ibv_ack_cq_events(which, 1);
                    EXPECT(ibv_req_notify_cq(which, 0) == 0);
                }
            }
        }
        EXPECT(ibv_destroy_qp(qp[0]) == 0 && ibv_destroy_qp(qp[1]) == 0 && ibv_destroy_cq(cq) == 0);
        for (int level = 0; level < 3; level++)
            close(epolls[level]);
    }
    for (int i = 0; i < CHANNELS; i++)
        EXPECT(ibv_destroy_comp_channel(channels[i]) == 0);
    expect_held(before, 1 << 20, DEADLINE_MS, "many channels");
    printf("%d channels in three epolls each\n", CHANNELS);
}

int main(void)
{
    struct side side;
    int pair[2], status;

    setvbuf(stdout, NULL, _IOLBF, 0);
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t peer = fork();
    EXPECT(peer >= 0);
    close(pair[peer == 0 ? 0 : 1]);
    if (peer == 0)
        return be_peer(pair[1]);
    open_side(&side, pair[0]);
    descriptor.fd = side.channel->fd;
    EXPECT(fcntl(descriptor.fd, F_SETFL, fcntl(descriptor.fd, F_GETFL) | O_NONBLOCK) == 0);
    EXPECT(ibv_req_notify_cq(side.cq, 0) == 0);

    try_rounds(&side);
    try_absence(&side);
    try_writes(&side);
    try_rounds(&side);
    try_blocking(&side);
    try_fork(&side);
    try_many(&side);
    try_rounds(&side);

    ask(&side, LEAVE);
    close(pair[0]);
    EXPECT(waitpid(peer, &status, 0) == peer && status == 0);
    close_side(&side);
    printf("ok\n");
    return 0;
}
