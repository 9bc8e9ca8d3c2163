/* Whom memory does not serve: a queue pair of another protection domain, another queue pair, a key of the other kind.
   ndpy refuses most of this before it posts, so no test through ndpy asks the library. Each case has connections of its
   own, since a refusal ends the connection. It names what is refused, and nothing may have been written. */

#include "ends.h"

#define SIZE 64

static struct ibv_context *context;
static struct ibv_pd *domains[2];
static struct ibv_mr *memory[2]; /* of each domain */
static const char *name;

static void begin(const char *what)
{
    name = what;
    for (int i = 0; i < 2; i++)
        memset(memory[i]->addr, 'u', SIZE);
}

static void expect_untouched(const struct ibv_mr *mr)
{
    for (size_t i = 0; i < SIZE; i++)
        if (((const char *)mr->addr)[i] != 'u')
            FAIL("%s: byte %zu was written", name, i);
}

static struct ibv_mr *bindable(struct ibv_pd *pd)
{
    static char pages[2][SIZE];
    static int used;
    struct ibv_mr *mr = ibv_reg_mr(pd, pages[used++], SIZE, RIGHTS | IBV_ACCESS_MW_BIND);

    EXPECT(mr != NULL);
    return mr;
}

static void make_pair(struct end *ends, struct ibv_pd *first, struct ibv_pd *second)
{
    for (int i = 0; i < 2; i++) {
        EXPECT((ends[i].cq = ibv_create_cq(context, 16, NULL, NULL, 0)) != NULL);
        struct ibv_qp_init_attr attributes = qp_attributes(ends[i].cq, 8);
        EXPECT((ends[i].qp = ibv_create_qp(i == 0 ? first : second, &attributes)) != NULL);
        EXPECT(move_to_init(ends[i].qp) == 0);
    }
    for (int i = 0; i < 2; i++)
        EXPECT(move_to_rts(ends[i].qp, ends[!i].qp->qp_num, 0) == 0);
}

static void expect_status(struct end *end, enum ibv_wc_status status)
{
    struct ibv_wc wc;

    if (!completion(end->cq, &wc, DEADLINE_MS))
        FAIL("%s: no completion", name);
    if (wc.status != status)
        FAIL("%s: %s, not %s", name, ibv_wc_status_str(wc.status), ibv_wc_status_str(status));
    printf("%s: %s\n", name, ibv_wc_status_str(status));
}

/* A request of the first end, whose keys may be any. */
static int ask(struct end *end, enum ibv_wr_opcode opcode, uint32_t lkey, struct ibv_mr *local, uint32_t rkey,
               struct ibv_mr *remote)
{
    struct ibv_sge element = {.addr = (uintptr_t)local->addr, .length = SIZE, .lkey = lkey};
    struct ibv_send_wr wr = {.opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .sg_list = &element, .num_sge = 1},
                       *bad;

    if (opcode == IBV_WR_SEND_WITH_INV) {
        wr.invalidate_rkey = rkey;
    } else if (remote != NULL) {
        wr.wr.rdma.remote_addr = (uintptr_t)remote->addr;
        wr.wr.rdma.rkey = rkey;
    }
    return ibv_post_send(end->qp, &wr, &bad);
}

static void refuse(const char *what, enum ibv_wr_opcode opcode, uint32_t lkey, struct ibv_mr *local, uint32_t rkey,
                   struct ibv_mr *remote, enum ibv_wc_status status)
{
    struct end ends[2];

    begin(what);
    make_pair(ends, domains[0], domains[0]);
    EXPECT(ask(&ends[0], opcode, lkey, local, rkey, remote) == 0);
    expect_status(&ends[0], status);
    expect_untouched(opcode == IBV_WR_RDMA_READ ? local : remote != NULL ? remote : local);
    close_by_hand(ends);
}

static void refuse_a_receive_of_another_domain(void)
{
    struct end ends[2];

    begin("receive into another domain's memory");
    make_pair(ends, domains[0], domains[0]);
    EXPECT(receive(ends[1].qp, memory[1], 0, SIZE, 1) == 0);
    EXPECT(ask(&ends[0], IBV_WR_SEND, memory[0]->lkey, memory[0], 0, NULL) == 0);
    expect_status(&ends[1], IBV_WC_LOC_PROT_ERR);
    expect_untouched(memory[1]);
    close_by_hand(ends);
}

static void refuse_without_the_queue_pairs_right(const char *what, enum ibv_wr_opcode opcode, int rights)
{
    struct ibv_qp_attr attributes = {.qp_access_flags = (unsigned)rights};
    struct end ends[2];

    begin(what);
    make_pair(ends, domains[0], domains[0]);
    EXPECT(ibv_modify_qp(ends[1].qp, &attributes, IBV_QP_ACCESS_FLAGS) == 0);
    EXPECT(ask(&ends[0], opcode, memory[0]->lkey, memory[0], memory[0]->rkey, memory[0]) == 0);
    expect_status(&ends[0], IBV_WC_REM_ACCESS_ERR);
    expect_untouched(memory[0]);
    close_by_hand(ends);
}

/* ---- Windows ---- */

static int bind_window(struct end *end, struct ibv_mw *window, struct ibv_mr *mr, uint32_t *rkey)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;

    *rkey = ibv_inc_rkey(window->rkey);
    wr.bind_mw.mw = window;
    wr.bind_mw.rkey = *rkey;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = mr,
        .addr = (uintptr_t)mr->addr,
        .length = SIZE,
        .mw_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
    };
    return ibv_post_send(end->qp, &wr, &bad);
}

/* Refused at once, or by a completion. */
static void refuse_a_bind(const char *what, int of_window, int of_region)
{
    struct end ends[2];
    struct ibv_wc wc;
    uint32_t rkey;

    begin(what);
    make_pair(ends, domains[0], domains[0]);
    struct ibv_mw *window = ibv_alloc_mw(domains[of_window], IBV_MW_TYPE_2);
    EXPECT(window != NULL);
    int error = bind_window(&ends[1], window, memory[of_region], &rkey);
    if (error == 0 && (!completion(ends[1].cq, &wc, DEADLINE_MS) || wc.status == IBV_WC_SUCCESS))
        FAIL("%s: it was bound", name);
    printf("%s: %s\n", name, error != 0 ? strerror(error) : ibv_wc_status_str(wc.status));
    EXPECT(ibv_dealloc_mw(window) == 0);
    close_by_hand(ends);
}

/* Two connections, and a window that the second end of the first one has bound. */
struct bound {
    struct end ends[2], others[2];
    struct ibv_mw *window;
    uint32_t rkey;
};

static void make_bound(struct bound *bound, const char *what)
{
    begin(what);
    make_pair(bound->ends, domains[0], domains[0]);
    make_pair(bound->others, domains[0], domains[0]);
    EXPECT((bound->window = ibv_alloc_mw(domains[0], IBV_MW_TYPE_2)) != NULL);
    EXPECT(bind_window(&bound->ends[1], bound->window, memory[0], &bound->rkey) == 0);
    expect_success(bound->ends[1].cq, 1);
}

/* The window still serves its own connection, and nothing was written before. */
static void close_bound(struct bound *bound)
{
    struct ibv_mr *source = buffer(domains[0], SIZE);

    expect_untouched(memory[0]);
    EXPECT(ask(&bound->ends[0], IBV_WR_RDMA_WRITE, source->lkey, source, bound->rkey, memory[0]) == 0);
    expect_success(bound->ends[0].cq, 1);
    free_buffer(source);
    EXPECT(ibv_dealloc_mw(bound->window) == 0);
    close_by_hand(bound->ends);
    close_by_hand(bound->others);
}

static void refuse_a_window_of_another_queue_pair(void)
{
    struct bound bound;
    struct ibv_send_wr wr = {.opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED}, *bad;
    struct ibv_wc wc;

    make_bound(&bound, "write through another queue pair's window");
    EXPECT(ask(&bound.others[0], IBV_WR_RDMA_WRITE, memory[0]->lkey, memory[0], bound.rkey, memory[0]) == 0);
    expect_status(&bound.others[0], IBV_WC_REM_ACCESS_ERR);
    close_bound(&bound);

    make_bound(&bound, "send that invalidates another queue pair's window");
    EXPECT(receive(bound.others[1].qp, memory[0], 0, SIZE, 1) == 0);
    EXPECT(ask(&bound.others[0], IBV_WR_SEND_WITH_INV, memory[0]->lkey, memory[0], bound.rkey, NULL) == 0);
    if (!completion(bound.others[0].cq, &wc, DEADLINE_MS) || wc.status == IBV_WC_SUCCESS)
        FAIL("%s: it succeeded", name);
    close_bound(&bound);

    make_bound(&bound, "local invalidation of another queue pair's window");
    wr.invalidate_rkey = bound.rkey;
    int error = ibv_post_send(bound.others[1].qp, &wr, &bad);
    if (error == 0 && (!completion(bound.others[1].cq, &wc, DEADLINE_MS) || wc.status == IBV_WC_SUCCESS))
        FAIL("%s: it succeeded", name);
    close_bound(&bound);

    make_bound(&bound, "send from a window's key");
    EXPECT(ask(&bound.others[0], IBV_WR_SEND, bound.rkey, memory[0], 0, NULL) == 0);
    expect_status(&bound.others[0], IBV_WC_LOC_PROT_ERR);
    close_bound(&bound);
}

int main(void)
{
    context = open_device();
    for (int i = 0; i < 2; i++) {
        EXPECT((domains[i] = ibv_alloc_pd(context)) != NULL);
        memory[i] = bindable(domains[i]);
    }
    struct ibv_mr *own = memory[0], *foreign = memory[1];

    refuse("send from another domain's memory", IBV_WR_SEND, foreign->lkey, foreign, 0, NULL, IBV_WC_LOC_PROT_ERR);
    refuse("write from another domain's memory", IBV_WR_RDMA_WRITE, foreign->lkey, foreign, own->rkey, own,
           IBV_WC_LOC_PROT_ERR);
    refuse("read into another domain's memory", IBV_WR_RDMA_READ, foreign->lkey, foreign, own->rkey, own,
           IBV_WC_LOC_PROT_ERR);
    refuse("write to another domain's memory", IBV_WR_RDMA_WRITE, own->lkey, own, foreign->rkey, foreign,
           IBV_WC_REM_ACCESS_ERR);
    refuse("read of another domain's memory", IBV_WR_RDMA_READ, own->lkey, own, foreign->rkey, foreign,
           IBV_WC_REM_ACCESS_ERR);
    refuse("write with a local key", IBV_WR_RDMA_WRITE, own->lkey, own, own->lkey, own, IBV_WC_REM_ACCESS_ERR);
    refuse("read with a local key", IBV_WR_RDMA_READ, own->lkey, own, own->lkey, own, IBV_WC_REM_ACCESS_ERR);
    refuse("send from a remote key", IBV_WR_SEND, own->rkey, own, 0, NULL, IBV_WC_LOC_PROT_ERR);
    refuse_a_receive_of_another_domain();
    refuse_without_the_queue_pairs_right("write without the queue pair's right", IBV_WR_RDMA_WRITE,
                                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    refuse_without_the_queue_pairs_right("read without the queue pair's right", IBV_WR_RDMA_READ,
                                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    refuse_a_bind("another domain's window to this domain's memory", 1, 0);
    refuse_a_bind("this domain's window to another domain's memory", 0, 1);
    refuse_a_bind("another domain's window and memory", 1, 1);
    refuse_a_window_of_another_queue_pair();

    for (int i = 0; i < 2; i++) {
        EXPECT(ibv_dereg_mr(memory[i]) == 0);
        EXPECT(ibv_dealloc_pd(domains[i]) == 0);
    }
    EXPECT(ibv_close_device(context) == 0);
    return 0;
}
