/* Threads that wait for events are interrupted by signals, and canceled. */

#include "ends.h"

static pthread_t waiter;
static volatile sig_atomic_t signals;

static void on_signal(int number)
{
    signals = signals + (number == SIGUSR1);
}

static void handle(int flags)
{
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = flags};

    EXPECT(sigaction(SIGUSR1, &action, NULL) == 0);
    signals = 0;
}

static struct manager manager;
static struct end pair[2];
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *by_hand[2];

/* The first event of either kind comes after two signals. */
static void *disturb(void *cause)
{
    for (int i = 0; i < 2; i++) {
        sleep_ms(150);
        pthread_kill(waiter, SIGUSR1);
    }
    sleep_ms(150);
    if (cause != NULL)
        ((void (*)(void))(uintptr_t)cause)();
    return NULL;
}

static void cause_completion(void)
{
    EXPECT(post(by_hand[1], IBV_WR_SEND, NULL, 0, 0, NULL, 1) == 0);
}

static void cause_event(void)
{
    EXPECT(rdma_resolve_route(pair[0].id, 1000) == 0);
}

static int wait_for_completion(void)
{
    struct ibv_cq *which;
    void *context;
    int result = ibv_get_cq_event(channel, &which, &context);
    int error = errno;

    if (result == 0)
        ibv_ack_cq_events(which, 1);
    errno = error;
    return result;
}

static int wait_for_event(void)
{
    struct rdma_cm_event *event;
    int result = rdma_get_cm_event(manager.events, &event);
    int error = errno;

    if (result == 0)
        rdma_ack_cm_event(event);
    errno = error;
    return result;
}

static void try_signals(int (*wait)(void), void (*cause)(void), const char *what)
{
    pthread_t thread;

    setvbuf(stdout, NULL, _IOLBF, 0);
    waiter = pthread_self();
    handle(0);
    EXPECT(pthread_create(&thread, NULL, disturb, NULL) == 0);
    for (int i = 0; i < 2; i++) {
        errno = 0;
        EXPECT(wait() != 0 && errno == EINTR);
        EXPECT(signals == i + 1);
    }
    pthread_join(thread, NULL);
    handle(SA_RESTART);
    EXPECT(pthread_create(&thread, NULL, disturb, (void *)(uintptr_t)cause) == 0);
    EXPECT(wait() == 0);
    EXPECT(signals == 2);
    pthread_join(thread, NULL);
    printf("%s: EINTR without SA_RESTART, goes on with it\n", what);
}

static void *wait_until_canceled(void *wait)
{
    ((int (*)(void))(uintptr_t)wait)();
    return NULL;
}

static void try_cancel(int (*wait)(void), const char *what)
{
    pthread_t thread;
    struct end ends[2];
    void *result;

    EXPECT(pthread_create(&thread, NULL, wait_until_canceled, (void *)(uintptr_t)wait) == 0);
    sleep_ms(200);
    pthread_cancel(thread);
    EXPECT(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    uint64_t begin = now_ms();
    connect_ends(&manager, ends, 4);
    close_end(&ends[0]);
    close_end(&ends[1]);
    printf("%s: canceled, then a connection takes %d ms\n", what, (int)(now_ms() - begin));
}

static void *use_until_canceled(void *ends)
{
    struct end *end = ends;
    struct ibv_mr *mr = buffer(end->qp->pd, 4096);
    struct ibv_wc wc;

    for (unsigned i = 0;; i++) {
        struct ibv_mr *other = buffer(end->qp->pd, 1 << 20);
        post(end->qp, IBV_WR_RDMA_WRITE, mr, 0, 4096, mr, i);
        while (ibv_poll_cq(end->cq, 1, &wc) == 1)
            EXPECT(wc.status == IBV_WC_SUCCESS);
        free_buffer(other);
        pthread_testcancel();
    }
    return NULL;
}

/* A call must not end in its middle, with a lock. */
static void try_cancel_in_calls(struct ibv_pd *pd)
{
    struct end ends[2];
    void *result;

    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        make_by_hand(pd, ends, 4);
        EXPECT(pthread_create(&thread, NULL, use_until_canceled, &ends[0]) == 0);
        usleep(3000 + (useconds_t)i * 777);
        pthread_cancel(thread);
        EXPECT(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
        close_by_hand(ends);
    }
    printf("canceled while it posts, polls and registers\n");
}

int main(void)
{
    open_manager(&manager);
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);
    EXPECT((channel = ibv_create_comp_channel(context)) != NULL);
    EXPECT((cq = ibv_create_cq(context, 16, NULL, channel, 0)) != NULL);
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_init_attr attributes = qp_attributes(cq, 4);
        EXPECT((by_hand[i] = ibv_create_qp(pd, &attributes)) != NULL && move_to_init(by_hand[i]) == 0);
    }
    for (int i = 0; i < 2; i++)
        EXPECT(move_to_rts(by_hand[i], by_hand[!i]->qp_num, 0) == 0);
    EXPECT(rdma_create_id(manager.events, &pair[0].id, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_resolve_addr(pair[0].id, NULL, (struct sockaddr *)&manager.address, 1000) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_ADDR_RESOLVED);

    EXPECT(receive(by_hand[0], NULL, 0, 0, 2) == 0);
    EXPECT(ibv_req_notify_cq(cq, 0) == 0);
    try_signals(wait_for_completion, cause_completion, "ibv_get_cq_event");
    try_signals(wait_for_event, cause_event, "rdma_get_cm_event");
    try_cancel(wait_for_completion, "ibv_get_cq_event");
    try_cancel(wait_for_event, "rdma_get_cm_event");
    struct ibv_pd *other = ibv_alloc_pd(context);
    try_cancel_in_calls(other);

    EXPECT(rdma_destroy_id(pair[0].id) == 0);
    for (int i = 0; i < 2; i++)
        EXPECT(ibv_destroy_qp(by_hand[i]) == 0);
    EXPECT(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0 && ibv_dealloc_pd(pd) == 0);
    /* Threads that were canceled have left regions in the other domain. */
    EXPECT(ibv_close_device(context) == 0);
    close_manager(&manager);
    printf("ok\n");
    return 0;
}
