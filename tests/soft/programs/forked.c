/* A process with connections forks. Whatever the child does, the parent's connections live on.

   forked [FORKS]: how often it forks while other threads post, poll, connect and close */

#include "everything.h"

#include <spawn.h>
#include <stdatomic.h>

extern char **environ;

static struct manager manager;
static struct end pair[2], hand[2];
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr, *managed_mr;
static struct ibv_mw *mw;

static void use_pair(struct end *ends, struct ibv_mr *memory)
{
    for (int i = 0; i < 2; i++) {
        EXPECT(receive(ends[!i].qp, memory, 0, 64, 1) == 0);
        EXPECT(post(ends[i].qp, IBV_WR_SEND, memory, 0, 64, NULL, 2) == 0);
        EXPECT(post(ends[i].qp, IBV_WR_RDMA_WRITE, memory, 0, memory->length, memory, 3) == 0);
        EXPECT(post(ends[i].qp, IBV_WR_RDMA_READ, memory, 0, memory->length, memory, 4) == 0);
        expect_success(ends[i].cq, 3);
        expect_success(ends[!i].cq, 1);
    }
}

static void use_all(void)
{
    use_pair(pair, managed_mr);
    use_pair(hand, mr);
}

/* The child ends within some seconds, with this status. */
static void expect_exit(pid_t child, int expected, const char *what)
{
    uint64_t end = now_ms() + 30000;
    int status;

    EXPECT(child > 0);
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (now_ms() > end) {
            kill(child, SIGKILL);
            FAIL("%s: the child hangs", what);
        }
        usleep(2000);
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != expected)
        FAIL("%s: the child ends with 0x%x", what, status);
}

/* ---- What children do ---- */

static void leave_at_once(void)
{
    _exit(0);
}

static void leave(void)
{
    exit(0);
}

static void run_program(void)
{
    execlp("true", "true", NULL);
    _exit(9);
}

static void begin_anew(void)
{
    char first[80];

    for (int i = 0; i < 2; i++)
        if (do_everything(first) != 0)
            FAIL("in a child: %s", first);
    exit(0);
}

/* An error, and nothing on the parent's connections. */
static void use_inherited(void)
{
    struct ibv_wc wc;
    struct ibv_async_event async;
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
    struct ibv_qp_init_attr initial = qp_attributes(cq, 4);
    struct ibv_port_attr port;
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;
    struct ibv_cq *which;
    void *user;

    for (int i = 0; i < 2; i++) {
        struct end *ends = i == 0 ? pair : hand;
        EXPECT(post(ends[0].qp, IBV_WR_SEND, mr, 0, 64, NULL, 2) != 0);
        EXPECT(receive(ends[0].qp, mr, 0, 64, 1) != 0);
        EXPECT(ibv_poll_cq(ends[0].cq, 1, &wc) <= 0);
        EXPECT(ibv_modify_qp(ends[0].qp, &attributes, IBV_QP_STATE) != 0);
        EXPECT(ibv_query_qp(ends[0].qp, &attributes, IBV_QP_STATE, &initial) != 0);
    }
    initial = qp_attributes(cq, 4);
    EXPECT(ibv_req_notify_cq(cq, 0) != 0);
    EXPECT(ibv_get_cq_event(channel, &which, &user) != 0);
    EXPECT(ibv_get_async_event(context, &async) != 0);
    EXPECT(ibv_alloc_pd(context) == NULL && errno == EIO);
    EXPECT(ibv_create_qp(pd, &initial) == NULL && errno == EIO);
    EXPECT(ibv_create_cq(context, 4, NULL, NULL, 0) == NULL && errno == EIO);
    EXPECT(ibv_create_comp_channel(context) == NULL && errno == EIO);
    EXPECT(ibv_reg_mr(pd, mr->addr, 64, RIGHTS) == NULL && errno == EIO);
    EXPECT(ibv_alloc_mw(pd, IBV_MW_TYPE_2) == NULL && errno == EIO);
    EXPECT(ibv_resize_cq(cq, 100) != 0);
    EXPECT(ibv_query_port(context, 1, &port) != 0);
    EXPECT(rdma_get_cm_event(manager.events, &event) != 0);
    EXPECT(rdma_disconnect(pair[0].id) != 0);
    EXPECT(rdma_create_id(manager.events, &id, NULL, RDMA_PS_TCP) != 0);
    _exit(0);
}

static void close_inherited(void)
{
    for (int i = 0; i < 2; i++) {
        rdma_destroy_qp(pair[i].id);
        EXPECT(ibv_destroy_cq(pair[i].cq) == 0);
        EXPECT(rdma_destroy_id(pair[i].id) == 0);
        EXPECT(ibv_destroy_qp(hand[i].qp) == 0 && ibv_destroy_cq(hand[i].cq) == 0);
    }
    EXPECT(rdma_destroy_id(manager.listener) == 0);
    rdma_destroy_event_channel(manager.events);
    EXPECT(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(managed_mr) == 0);
    EXPECT(ibv_destroy_srq(srq) == 0 && ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0);
    EXPECT(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    begin_anew();
}

/* A child of the child. */
static void fork_again(void)
{
    pid_t child = fork();

    if (child == 0)
        begin_anew();
    expect_exit(child, 0, "a child's child");
    EXPECT(do_everything(NULL) == 0);
    child = fork();
    if (child == 0)
        begin_anew();
    expect_exit(child, 0, "a child's child");
    _exit(0);
}

static void try_child(void (*does)(void), const char *what)
{
    pid_t child = fork();

    if (child == 0)
        does();
    use_all();
    expect_exit(child, 0, what);
    use_all();
    printf("child: %s\n", what);
}

/* The peer sees the end of the parent's connection, although a child has inherited it. */
static void try_end_of_connection(void)
{
    struct end ends[2];

    connect_ends(&manager, ends, 4);
    pid_t child = fork();
    if (child == 0) {
        pause();
        _exit(0);
    }
    uint64_t begin = now_ms();
    close_end(&ends[0]);
    expect_event(manager.events, RDMA_CM_EVENT_DISCONNECTED);
    EXPECT(now_ms() - begin < 1000);
    close_end(&ends[1]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    printf("a child does not keep a connection\n");
}

/* ---- A busy parent ---- */

static _Atomic bool stop;
static _Atomic long rounds;

static void *keep_using(void *ends)
{
    while (!stop) {
        use_pair(ends, ends == pair ? managed_mr : mr);
        rounds++;
    }
    return NULL;
}

static void *keep_connecting(void *unused)
{
    (void)unused;
    while (!stop) {
        struct end ends[2];
        make_by_hand(pd, ends, 4);
        use_pair(ends, mr);
        close_by_hand(ends);
        rounds++;
    }
    return NULL;
}

static void try_busy_parent(int forks)
{
    static void (*const does[])(void) = {leave_at_once, leave, run_program, begin_anew, begin_anew};
    pthread_t threads[4];

    EXPECT(pthread_create(&threads[0], NULL, keep_using, pair) == 0);
    EXPECT(pthread_create(&threads[1], NULL, keep_using, hand) == 0);
    EXPECT(pthread_create(&threads[2], NULL, keep_connecting, NULL) == 0);
    EXPECT(pthread_create(&threads[3], NULL, keep_connecting, NULL) == 0);
    for (int i = 0; i < forks; i++) {
        pid_t child = fork();
        if (child == 0)
            does[i % 5]();
        expect_exit(child, 0, "a child of a busy process");
        char *words[] = {"true", NULL};
        EXPECT(posix_spawnp(&child, "true", NULL, NULL, words, environ) == 0);
        expect_exit(child, 0, "a program that a busy process runs");
    }
    stop = true;
    for (int i = 0; i < 4; i++)
        EXPECT(pthread_join(threads[i], NULL) == 0);
    printf("%d forks beside %ld rounds\n", forks, (long)rounds);
}

int main(int count, char **words)
{
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 4, .max_sge = 1}};

    setvbuf(stdout, NULL, _IOLBF, 0);
    EXPECT(do_everything(NULL) == 0);
    struct held before = holds();
    open_manager(&manager);
    connect_ends(&manager, pair, 16);
    context = open_device();
    EXPECT((pd = ibv_alloc_pd(context)) != NULL);
    make_by_hand(pd, hand, 16);
    EXPECT((channel = ibv_create_comp_channel(context)) != NULL);
    EXPECT((cq = ibv_create_cq(context, 8, NULL, channel, 0)) != NULL && ibv_req_notify_cq(cq, 0) == 0);
    EXPECT((srq = ibv_create_srq(pd, &shared)) != NULL && (mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2)) != NULL);
    mr = buffer(pd, 256 * 1024);
    managed_mr = buffer(pair[0].qp->pd, 256 * 1024);
    use_all();

    try_child(leave_at_once, "leaves at once");
    try_child(leave, "calls exit()");
    try_child(run_program, "becomes another program");
    try_child(use_inherited, "uses what it has inherited");
    try_child(begin_anew, "opens the device itself");
    try_child(close_inherited, "closes what it has inherited, and begins anew");
    try_child(fork_again, "forks");
    try_end_of_connection();
    try_busy_parent(count > 1 ? atoi(words[1]) : 20);

    use_all();
    close_end(&pair[0]);
    free_buffer(managed_mr);
    close_end(&pair[1]);
    close_by_hand(hand);
    close_manager(&manager);
    free_buffer(mr);
    EXPECT(ibv_dealloc_mw(mw) == 0 && ibv_destroy_srq(srq) == 0 && ibv_destroy_cq(cq) == 0);
    EXPECT(ibv_destroy_comp_channel(channel) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    expect_held(before, 256 * 1024, 5000, "all forks");
    printf("ok\n");
    return 0;
}
