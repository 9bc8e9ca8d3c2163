/* Requests that are posted one by one, of which the later ones wait for others. The program looks for no completion, so
   only answers to those before send them. */

#include "ends.h"

#define DEPTH  64
#define POSTED 40

static void writes_arrive(struct ibv_pd *pd)
{
    struct end ends[2];
    struct ibv_mr *from = buffer(pd, POSTED), *to = buffer(pd, POSTED);
    volatile uint8_t *last = (uint8_t *)to->addr + POSTED - 1;
    uint64_t end = now_ms() + DEADLINE_MS;

    make_by_hand(pd, ends, DEPTH);
    memset(from->addr, 1, POSTED);
    for (int i = 0; i < POSTED; i++)
        EXPECT(post(ends[0].qp, IBV_WR_RDMA_WRITE, from, (uint64_t)i, 1, to, (uint64_t)i) == 0);
    while (*last == 0) {
        if (now_ms() > end)
            FAIL("the last write does not arrive");
        sleep_ms(1);
    }
    expect_success(ends[0].cq, POSTED);
    close_by_hand(ends);
    free_buffer(from);
    free_buffer(to);
}

/* Nothing is answered before the receives are there. */
static void messages_without_a_receive_arrive_later(struct ibv_pd *pd)
{
    struct end ends[2];

    make_by_hand(pd, ends, DEPTH);
    for (int i = 0; i < POSTED; i++)
        EXPECT(post(ends[0].qp, IBV_WR_SEND, NULL, 0, 0, NULL, (uint64_t)i) == 0);
    sleep_ms(50);
    for (int i = 0; i < POSTED; i++)
        EXPECT(receive(ends[1].qp, NULL, 0, 0, (uint64_t)i) == 0);
    expect_success(ends[1].cq, POSTED);
    expect_success(ends[0].cq, POSTED);
    close_by_hand(ends);
}

int main(void)
{
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);

    writes_arrive(pd);
    messages_without_a_receive_arrive_later(pd);
    printf("ok\n");
    return 0;
}
