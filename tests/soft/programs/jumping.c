/* A handler leaves a call that waits by siglongjmp(): a time limit of the old kind. The library goes on, whatever the
   thread does afterwards. */

#include "ends.h"

#include <setjmp.h>
#include <stdatomic.h>
#include <sys/time.h>

#define MESSAGES 2000
#define DEPTH    64

static sigjmp_buf out;
static volatile sig_atomic_t waits, jumps;

static void on_alarm(int number)
{
    (void)number;
    if (!waits)
        return;
    waits = 0;
    jumps = jumps + 1;
    siglongjmp(out, 1);
}

static void limit(long first_us, long every_us)
{
    struct itimerval times = {{every_us / 1000000, every_us % 1000000}, {first_us / 1000000, first_us % 1000000}};

    EXPECT(setitimer(ITIMER_REAL, &times, NULL) == 0);
}

static struct manager manager;
static struct ibv_context *context;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp[2]; /* those of qp[1] complete in other_cq */
static struct ibv_cq *other_cq;

/* False: the alarm came first. */
static bool wait_for_completion(void)
{
    struct ibv_cq *which;
    void *ignored;

    if (sigsetjmp(out, 1) != 0)
        return false;
    waits = 1;
    int result = ibv_get_cq_event(channel, &which, &ignored);
    waits = 0;
    if (result == 0)
        ibv_ack_cq_events(which, 1);
    return result == 0;
}

static bool wait_for_event(void)
{
    struct rdma_cm_event *event;

    if (sigsetjmp(out, 1) != 0)
        return false;
    waits = 1;
    int result = rdma_get_cm_event(manager.events, &event);
    waits = 0;
    return result == 0;
}

static bool wait_for_asynchronous(void)
{
    struct ibv_async_event event;

    if (sigsetjmp(out, 1) != 0)
        return false;
    waits = 1;
    int result = ibv_get_async_event(context, &event);
    waits = 0;
    return result == 0;
}

/* This thread does not call the library until the connection manager has reported a request. */
static void expect_life(const char *after)
{
    static const char greeting[20] = "MPA ID Req Frame\0\1\0\0";
    int handle = socket(AF_INET, SOCK_STREAM, 0);
    struct pollfd state = {.fd = manager.events->fd, .events = POLLIN};

    EXPECT(connect(handle, (struct sockaddr *)&manager.address, sizeof manager.address) == 0);
    EXPECT(send(handle, greeting, sizeof greeting, 0) == (ssize_t)sizeof greeting);
    if (poll(&state, 1, DEADLINE_MS) != 1)
        FAIL("a jump out of %s: no request is reported any more", after);
    struct rdma_cm_id *id = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST);
    EXPECT(rdma_reject(id, NULL, 0) == 0);
    EXPECT(rdma_destroy_id(id) == 0);
    close(handle);
    printf("left %s, and requests are reported\n", after);
}

static int poll_all(void)
{
    struct ibv_wc wc;
    int taken = 0;

    for (; ibv_poll_cq(cq, 1, &wc) == 1; taken++) {
        EXPECT(wc.status == IBV_WC_SUCCESS);
        EXPECT(receive(qp[0], NULL, 0, 0, 0) == 0);
    }
    return taken;
}

/* At most DEPTH / 2 messages are on their way. */
static atomic_int sent, seen;

static void *send_all(void *gaps)
{
    for (int i = 0; i < MESSAGES; i++) {
        uint64_t end = now_ms() + DEADLINE_MS;
        while (i - seen >= DEPTH / 2 && now_ms() < end)
            usleep(50);
        if (i - seen >= DEPTH / 2)
            FAIL("%d of %d messages were taken", seen, sent);
        EXPECT(post(qp[1], IBV_WR_SEND, NULL, 0, 0, NULL, 0) == 0);
        expect_success(other_cq, 1);
        sent++;
        if (gaps != NULL && i % 8 == 0)
            usleep(300);
    }
    return NULL;
}

/* Takes all messages, and leaves the call whenever the alarm finds it waiting. Returns how often. */
static int take_all(bool gaps)
{
    pthread_t thread;
    sigset_t alarm;

    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, NULL);
    seen = sent = jumps = 0;
    EXPECT(pthread_create(&thread, NULL, send_all, gaps ? &seen : NULL) == 0);
    pthread_sigmask(SIG_UNBLOCK, &alarm, NULL);
    for (uint64_t end = now_ms() + 3 * DEADLINE_MS; seen < MESSAGES;) {
        EXPECT(now_ms() < end);
        seen += poll_all();
        EXPECT(ibv_req_notify_cq(cq, 0) == 0);
        seen += poll_all();
        if (seen < MESSAGES)
            wait_for_completion();
    }
    pthread_join(thread, NULL);
    return jumps;
}

int main(void)
{
    struct sigaction action = {.sa_handler = on_alarm};

    setvbuf(stdout, NULL, _IOLBF, 0);
    EXPECT(sigaction(SIGALRM, &action, NULL) == 0);
    open_manager(&manager);
    EXPECT((context = manager.listener->verbs) != NULL);
    struct ibv_pd *pd = ibv_alloc_pd(context);
    EXPECT((channel = ibv_create_comp_channel(context)) != NULL);
    EXPECT((cq = ibv_create_cq(context, 2 * DEPTH, NULL, channel, 0)) != NULL);
    EXPECT((other_cq = ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0)) != NULL);
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr attributes = qp_attributes(i == 0 ? cq : other_cq, DEPTH);
        EXPECT((qp[i] = ibv_create_qp(pd, &attributes)) != NULL && move_to_init(qp[i]) == 0);
    }
    for (int i = 0; i < DEPTH; i++)
        EXPECT(receive(qp[0], NULL, 0, 0, 0) == 0);
    for (int i = 0; i < 2; i++)
        EXPECT(move_to_rts(qp[i], qp[!i]->qp_num, 0) == 0);

    limit(100000, 0);
    EXPECT(!wait_for_completion() && jumps == 1);
    expect_life("ibv_get_cq_event");
    limit(100000, 0);
    EXPECT(!wait_for_event());
    expect_life("rdma_get_cm_event");
    limit(100000, 0);
    EXPECT(!wait_for_asynchronous());
    expect_life("ibv_get_async_event");

    /* A thread that has often done the work of the library's threads. */
    take_all(false);
    EXPECT(ibv_req_notify_cq(cq, 0) == 0);
    limit(100000, 0);
    while (wait_for_completion())
        ;
    expect_life("ibv_get_cq_event after many messages");

    limit(200, 200);
    int left = take_all(true);
    limit(0, 0);
    printf("%d messages, and left ibv_get_cq_event %s times meanwhile\n", MESSAGES, left > 0 ? "many" : "no");
    expect_life("ibv_get_cq_event in the middle of messages");
    printf("ok\n");
    return 0;
}
