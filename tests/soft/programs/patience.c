/* Messages that find no receive: rnr_retry 7 waits as long as it takes, another number for three seconds.

   The number is the sender's, by ibv_modify_qp(). For queue pairs of the connection manager it is the receiver's
   rnr_retry_count. All connections wait at the same time. */

#include "ends.h"

/* What another number waits at least and at most, with time to be told of it. */
#define LEAST_MS 2500
#define MOST_MS  20000

struct message {
    const char *name;
    struct end from, to;
    bool waits;
    uint64_t sent_ms;
};

static void set_retries(struct ibv_qp *qp, uint8_t count)
{
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_RTS, .rnr_retry = count};

    EXPECT(ibv_modify_qp(qp, &state, IBV_QP_STATE | IBV_QP_RNR_RETRY) == 0);
}

static struct message by_hand(struct ibv_pd *pd, const char *name, uint8_t retries, bool waits)
{
    struct end ends[2];

    make_by_hand(pd, ends, 4);
    set_retries(ends[0].qp, retries);
    return (struct message){.name = name, .from = ends[0], .to = ends[1], .waits = waits};
}

/* The first end connects. `retries` are those of the end that receives. */
static struct message by_manager(struct manager *manager, const char *name, bool first_sends, int retries)
{
    struct rdma_conn_param parameters[2] = {{.rnr_retry_count = 7}, {.rnr_retry_count = 7}};
    struct end ends[2];

    if (retries >= 0)
        parameters[first_sends].rnr_retry_count = (uint8_t)retries;
    ends[0].id = resolved(manager);
    give_queue_pair(&ends[0], 4);
    EXPECT(rdma_connect(ends[0].id, retries < 0 && !first_sends ? NULL : &parameters[0]) == 0);
    ends[1].id = expect_event(manager->events, RDMA_CM_EVENT_CONNECT_REQUEST);
    give_queue_pair(&ends[1], 4);
    EXPECT(rdma_accept(ends[1].id, retries < 0 && first_sends ? NULL : &parameters[1]) == 0);
    expect_event(manager->events, RDMA_CM_EVENT_ESTABLISHED);
    expect_event(manager->events, RDMA_CM_EVENT_ESTABLISHED);
    return (struct message){
        .name = name, .from = ends[!first_sends], .to = ends[first_sends], .waits = retries < 0 || retries == 7};
}

/* An identifier that is destroyed leaves its queue pair, and the program has the requests back. */
static void what_waits_comes_back_with_the_identifier(void)
{
    struct manager manager;
    struct end ends[2];
    struct ibv_wc wc;

    open_manager(&manager);
    connect_ends(&manager, ends, 4);
    EXPECT(post(ends[0].qp, IBV_WR_SEND, NULL, 0, 0, NULL, 1) == 0);
    EXPECT(receive(ends[0].qp, NULL, 0, 0, 2) == 0);
    EXPECT(rdma_destroy_id(ends[0].id) == 0);
    for (int i = 0; i < 2; i++)
        EXPECT(ibv_poll_cq(ends[0].cq, 1, &wc) == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
}

int main(void)
{
    struct manager manager;
    struct ibv_wc wc;

    open_manager(&manager);
    struct ibv_pd *pd = manager.listener->pd;
    struct message messages[] = {
        by_manager(&manager, "connecting end, accepted with 7", true, 7),
        by_manager(&manager, "connecting end, accepted without parameters", true, -1),
        by_manager(&manager, "connecting end, accepted with 0", true, 0),
        by_manager(&manager, "accepting end, connected with 7", false, 7),
        by_manager(&manager, "accepting end, connected without parameters", false, -1),
        by_manager(&manager, "accepting end, connected with 6", false, 6),
        by_hand(pd, "by hand, 7", 7, true),
        by_hand(pd, "by hand, 6", 6, false),
    };
    const size_t count = sizeof messages / sizeof *messages;
    uint64_t last_ms = 0;

    for (size_t i = 0; i < count; i++) {
        EXPECT(post(messages[i].from.qp, IBV_WR_SEND, NULL, 0, 0, NULL, i) == 0);
        messages[i].sent_ms = last_ms = now_ms();
    }
    for (size_t i = 0; i < count; i++) {
        if (messages[i].waits)
            continue;
        if (!completion(messages[i].from.cq, &wc, MOST_MS))
            FAIL("%s: still waits", messages[i].name);
        if (wc.status != IBV_WC_RNR_RETRY_EXC_ERR || now_ms() - messages[i].sent_ms < LEAST_MS)
            FAIL("%s: %s after %d ms", messages[i].name, ibv_wc_status_str(wc.status),
                 (int)(now_ms() - messages[i].sent_ms));
    }
    for (size_t i = 0; i < count; i++) {
        if (!messages[i].waits)
            continue;
        EXPECT(now_ms() >= last_ms + LEAST_MS);
        if (completion(messages[i].from.cq, &wc, 100))
            FAIL("%s: ends, %s", messages[i].name, ibv_wc_status_str(wc.status));
        EXPECT(receive(messages[i].to.qp, NULL, 0, 0, i) == 0);
        expect_success(messages[i].to.cq, 1);
        expect_success(messages[i].from.cq, 1);
    }
    what_waits_comes_back_with_the_identifier();
    printf("ok\n");
    return 0;
}
