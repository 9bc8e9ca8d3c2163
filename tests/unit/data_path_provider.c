/* The provider that data_path_provider.py gives to the data path: a queue pair, a shared receive queue and a completion
   queue. They note each request and return what the test sets. This file knows only the structures of verbs.h. */

#include <errno.h>
#include <infiniband/verbs.h>
#include <string.h>

#define MOST 256

/* The last posted request, and the number of posted requests. */
struct sent {
    uint64_t id;
    uint64_t address;
    uint64_t remote_address;
    uint64_t bind_address;
    uint64_t bind_length;
    uint64_t window;
    uint64_t region;
    uint64_t operands[2];
    uint32_t opcode;
    uint32_t flags;
    uint32_t elements;
    uint32_t length;
    uint32_t key;
    uint32_t remote_key;
    uint32_t invalidated_key;
    uint32_t bind_key;
    uint32_t bind_access;
    uint32_t posted;
} sent;

/* The requests of the last call, which may have posted a list. */
struct sent calls[MOST];
int32_t in_call;

/* Refuses the request of a call with this number. */
int32_t refused_place = -1;

/* Posts return post_result and set errno to post_errno. refuses_empty applies to receives without elements. */
int32_t post_result;
int32_t post_errno;
int32_t refuses_empty;
int32_t poll_error;
/* The number of calls to poll. */
int32_t polled;

static struct ibv_wc results[MOST];
static unsigned first, count;

static int answer(void)
{
    errno = post_errno;
    return post_result;
}

static void note_elements(const struct ibv_sge *elements, int number)
{
    sent.elements = (uint32_t)number;
    sent.address = number ? elements[0].addr : 0;
    sent.length = number ? elements[0].length : 0;
    sent.key = number ? elements[0].lkey : 0;
    sent.posted++;
}

static void note_send(const struct ibv_send_wr *wr)
{
    uint32_t posted = sent.posted;

    memset(&sent, 0, sizeof sent);
    sent.posted = posted;
    sent.id = wr->wr_id;
    sent.opcode = wr->opcode;
    sent.flags = wr->send_flags;
    sent.invalidated_key = wr->invalidate_rkey;
    if (wr->opcode == IBV_WR_BIND_MW) {
        sent.window = (uintptr_t)wr->bind_mw.mw;
        sent.region = (uintptr_t)wr->bind_mw.bind_info.mr;
        sent.bind_key = wr->bind_mw.rkey;
        sent.bind_address = wr->bind_mw.bind_info.addr;
        sent.bind_length = wr->bind_mw.bind_info.length;
        sent.bind_access = wr->bind_mw.bind_info.mw_access_flags;
    } else if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        sent.remote_address = wr->wr.atomic.remote_addr;
        sent.remote_key = wr->wr.atomic.rkey;
        sent.operands[0] = wr->wr.atomic.compare_add;
        sent.operands[1] = wr->wr.atomic.swap;
    } else {
        sent.remote_address = wr->wr.rdma.remote_addr;
        sent.remote_key = wr->wr.rdma.rkey;
    }
    note_elements(wr->sg_list, wr->num_sge);
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    for (in_call = 0; wr; wr = wr->next) {
        *bad = wr;
        if (in_call == refused_place)
            return ENOTCONN;
        note_send(wr);
        calls[in_call++ % MOST] = sent;
        if (post_result)
            return answer();
    }
    return 0;
}

static int post_receive(struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    for (in_call = 0; wr; wr = wr->next) {
        *bad = wr;
        if (in_call == refused_place)
            return ENOTCONN;
        if (refuses_empty && !wr->num_sge)
            return EINVAL;
        sent.id = wr->wr_id;
        note_elements(wr->sg_list, wr->num_sge);
        calls[in_call++ % MOST] = sent;
        if (post_result)
            return answer();
    }
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return post_receive(wr, bad);
}

static int post_srq_recv(struct ibv_srq *queue, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return post_receive(wr, bad);
}

static int poll_cq(struct ibv_cq *cq, int number, struct ibv_wc *out)
{
    int done = 0;

    polled++;
    if (poll_error)
        return -poll_error;
    for (; done < number && count; count--)
        out[done++] = results[first++ % MOST];
    return done;
}

static struct ibv_context context = {
    .ops = {.post_send = post_send, .post_recv = post_recv, .post_srq_recv = post_srq_recv, .poll_cq = poll_cq}};
struct ibv_qp queue_pair = {.context = &context};
struct ibv_srq shared_queue = {.context = &context};
struct ibv_cq completion_queue = {.context = &context};

/* Store the next result that a poll finds. */
void complete(uint64_t id, uint32_t opcode, uint32_t status, uint32_t bytes, uint32_t flags, uint32_t key)
{
    results[(first + count++) % MOST] = (struct ibv_wc){.wr_id = id,
                                                        .opcode = opcode,
                                                        .status = status,
                                                        .byte_len = bytes,
                                                        .wc_flags = flags,
                                                        .invalidated_rkey = key,
                                                        .qp_num = 77,
                                                        .vendor_err = 88};
}
