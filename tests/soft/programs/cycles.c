/* Objects, contexts and connections are made and closed again and again. Nothing may grow.

   cycles COUNT [KIND] */

#include "ends.h"

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_comp_channel *channel;
static struct ibv_mr *mr;
static struct manager manager;

static void a_context(void)
{
    struct ibv_context *own = open_device();

    EXPECT(ibv_close_device(own) == 0);
}

/* The last context of the process takes the workers with it. */
static void the_only_context(void)
{
    struct end ends[2];
    struct ibv_context *own = open_device();
    struct ibv_pd *domain = ibv_alloc_pd(own);

    make_by_hand(domain, ends, 2);
    EXPECT(post(ends[0].qp, IBV_WR_SEND, NULL, 0, 0, NULL, 1) == 0);
    EXPECT(receive(ends[1].qp, NULL, 0, 0, 2) == 0);
    expect_success(ends[0].cq, 1);
    close_by_hand(ends);
    EXPECT(ibv_dealloc_pd(domain) == 0 && ibv_close_device(own) == 0);
}

static void a_domain(void)
{
    struct ibv_pd *made = ibv_alloc_pd(context);

    EXPECT(made != NULL && ibv_dealloc_pd(made) == 0);
}

static void a_region(void)
{
    static char memory[8192];
    struct ibv_mr *made = ibv_reg_mr(pd, memory, sizeof memory, RIGHTS);

    EXPECT(made != NULL && ibv_dereg_mr(made) == 0);
}

static void a_window(void)
{
    struct ibv_mw *made = ibv_alloc_mw(pd, IBV_MW_TYPE_2);

    EXPECT(made != NULL && ibv_dealloc_mw(made) == 0);
}

static void a_queue(void)
{
    struct ibv_comp_channel *own = ibv_create_comp_channel(context);
    struct ibv_cq *made = ibv_create_cq(context, 100, NULL, own, 0);

    EXPECT(made != NULL && ibv_req_notify_cq(made, 0) == 0 && ibv_resize_cq(made, 1000) == 0);
    EXPECT(ibv_destroy_cq(made) == 0 && ibv_destroy_comp_channel(own) == 0);
}

static void a_shared_queue(void)
{
    struct ibv_srq_init_attr attributes = {.attr = {.max_wr = 100, .max_sge = 2}};
    struct ibv_srq *made = ibv_create_srq(pd, &attributes);

    EXPECT(made != NULL && ibv_destroy_srq(made) == 0);
}

static void a_queue_pair(void)
{
    struct ibv_qp_init_attr attributes = qp_attributes(cq, 64);
    struct ibv_qp *made = ibv_create_qp(pd, &attributes);

    EXPECT(made != NULL && move_to_init(made) == 0 && receive(made, mr, 0, 64, 1) == 0);
    EXPECT(ibv_destroy_qp(made) == 0);
}

/* To RESET and back, which makes a new queue pair of the engine. */
static void a_reset(void)
{
    static struct ibv_qp *kept;
    struct ibv_qp_init_attr attributes = qp_attributes(cq, 64);
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_RESET};

    if (kept == NULL)
        kept = ibv_create_qp(pd, &attributes);
    EXPECT(kept != NULL && move_to_init(kept) == 0 && ibv_modify_qp(kept, &state, IBV_QP_STATE) == 0);
}

static void by_hand(void)
{
    struct end ends[2];

    make_by_hand(pd, ends, 4);
    EXPECT(receive(ends[1].qp, mr, 0, 64, 2) == 0);
    EXPECT(post(ends[0].qp, IBV_WR_SEND, mr, 0, 64, NULL, 1) == 0);
    EXPECT(post(ends[0].qp, IBV_WR_RDMA_WRITE, mr, 0, 4096, mr, 1) == 0);
    expect_success(ends[0].cq, 2);
    expect_success(ends[1].cq, 1);
    close_by_hand(ends);
}

/* Closed while it is still being made, and while requests wait. */
static void by_hand_and_away(void)
{
    struct end ends[2];

    make_by_hand(pd, ends, 4);
    EXPECT(post(ends[0].qp, IBV_WR_RDMA_WRITE, mr, 0, 4096, mr, 1) == 0);
    close_by_hand(ends);
}

static void an_identifier(void)
{
    struct rdma_event_channel *events = rdma_create_event_channel();
    struct sockaddr_in any = {.sin_family = AF_INET};
    struct rdma_cm_id *id;

    EXPECT(events != NULL && rdma_create_id(events, &id, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_bind_addr(id, (struct sockaddr *)&any) == 0 && rdma_listen(id, 2) == 0);
    EXPECT(rdma_destroy_id(id) == 0);
    rdma_destroy_event_channel(events);
}

static void managed(void)
{
    struct end ends[2];

    connect_ends(&manager, ends, 4);
    EXPECT(post(ends[0].qp, IBV_WR_RDMA_WRITE, NULL, 0, 0, NULL, 1) == 0);
    expect_success(ends[0].cq, 1);
    EXPECT(rdma_disconnect(ends[0].id) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_DISCONNECTED);
    expect_event(manager.events, RDMA_CM_EVENT_DISCONNECTED);
    close_end(&ends[0]);
    close_end(&ends[1]);
}

/* Without a word to the peer's program, and with its events still in the channel. */
static void managed_and_away(void)
{
    struct end ends[2];

    connect_ends(&manager, ends, 4);
    close_end(&ends[0]);
    close_end(&ends[1]);
}

static void refused(void)
{
    struct rdma_conn_param parameters = {.responder_resources = 1, .initiator_depth = 1};
    struct end end = {.id = resolved(&manager)};

    give_queue_pair(&end, 4);
    EXPECT(rdma_connect(end.id, &parameters) == 0);
    struct rdma_cm_id *request = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST);
    EXPECT(rdma_reject(request, NULL, 0) == 0 && rdma_destroy_id(request) == 0);
    struct rdma_cm_event *event = next_event(manager.events, DEADLINE_MS);
    EXPECT(event != NULL && event->event == RDMA_CM_EVENT_REJECTED);
    rdma_ack_cm_event(event);
    close_end(&end);
}

static const struct {
    const char *name;
    void (*once)(void);
} kinds[] = {
    {"context", a_context},
    {"domain", a_domain},
    {"region", a_region},
    {"window", a_window},
    {"queue", a_queue},
    {"shared", a_shared_queue},
    {"pair", a_queue_pair},
    {"reset", a_reset},
    {"hand", by_hand},
    {"hand-away", by_hand_and_away},
    {"identifier", an_identifier},
    {"managed", managed},
    {"managed-away", managed_and_away},
    {"refused", refused},
};

static void repeat(const char *name, void (*once)(void), int count)
{
    int first = count / 10 > 200 ? 200 : count / 10 + 1;

    for (int i = 0; i < first; i++)
        once();
    sleep_ms(50);
    malloc_trim(0);
    struct held before = holds();
    uint64_t begin = now_ms();
    for (int i = first; i < count; i++)
        once();
    int ms = (int)(now_ms() - begin);
    /* Connections that end in the background, and what waits for TIMEWAIT_EXIT. Tables keep the size that the most
     * connections at once have needed, which a busy machine decides. A leak of an object in each of 10,000 cycles is
     * more than that. */
    expect_held(before, 256 * 1024, 5000, name);
    malloc_trim(0);
    struct held now = holds();
    printf("%s: %d in %d ms, heap %+ld\n", name, count, ms, (long)now.heap - (long)before.heap);
    if (now.resident_kib > before.resident_kib + 16384)
        FAIL("%s: resident memory %zu -> %zu KiB", name, before.resident_kib, now.resident_kib);
}

int main(int count, char **words)
{
    EXPECT(count >= 2);
    int times = atoi(words[1]);
    const char *only = count > 2 ? words[2] : NULL;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (only == NULL || strcmp(only, "alone") == 0) {
        /* Before the connection manager opens a context that stays. */
        repeat("alone", the_only_context, times / 10 + 10);
        expect_held((struct held){.descriptors = 100, .threads = 1, .heap = 1 << 20}, 0, 2000, "the last context");
    }
    open_manager(&manager);
    context = open_device();
    EXPECT((pd = ibv_alloc_pd(context)) != NULL && (channel = ibv_create_comp_channel(context)) != NULL);
    EXPECT((cq = ibv_create_cq(context, 256, NULL, channel, 0)) != NULL);
    mr = buffer(pd, 4096);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (only == NULL || strcmp(only, kinds[i].name) == 0)
            repeat(kinds[i].name, kinds[i].once, times);
    printf("ok\n");
    return 0;
}
