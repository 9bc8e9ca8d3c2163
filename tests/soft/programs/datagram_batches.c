/* datagram_batches DEVICE GID COUNT [together] [inline] [silent]: sends datagrams to itself by ibv_wr_send(), and
 * prints which were sent, as completions say, and which came. GID is an index of the table of port 1.
 *
 * The send queue has room for COUNT datagrams and no more. Each has SIZE bytes: each of them its number, from 1. Their
 * memory changes as soon as the program may do that. With `together` all are posted in one batch.
 */
#include "need.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SIZE     64
#define HEADER   40
#define KEY      0x1234
#define QUIET_MS 2000
#define MOST     100

static unsigned char letters[MOST][SIZE], arrived[2 * MOST][HEADER + SIZE];
static bool is_together, is_inline, is_silent;

static struct ibv_context *open_device(const char *name)
{
    struct ibv_device **list = need(ibv_get_device_list(NULL), "ibv_get_device_list"), **at = list;

    while (*at != NULL && strcmp(ibv_get_device_name(*at), name) != 0)
        at++;
    if (*at == NULL)
        fail(name, ENODEV);
    struct ibv_context *context = need(ibv_open_device(*at), "ibv_open_device");
    ibv_free_device_list(list);
    return context;
}

static struct ibv_qp *make(struct ibv_pd *pd, struct ibv_cq *cq, unsigned count)
{
    struct ibv_qp_init_attr_ex attributes = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap =
            {
                .max_send_wr = count,
                .max_recv_wr = 2 * count,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = SIZE,
            },
        .qp_type = IBV_QPT_UD,
        .pd = pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = IBV_QP_EX_WITH_SEND,
    };
    struct ibv_qp *qp = need(ibv_create_qp_ex(pd->context, &attributes), "ibv_create_qp_ex");
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = KEY}, rtr = {.qp_state = IBV_QPS_RTR},
                       rts = {.qp_state = IBV_QPS_RTS};
    int error = ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);

    if (error == 0)
        error = ibv_modify_qp(qp, &rtr, IBV_QP_STATE);
    if (error == 0)
        error = ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN);
    if (error != 0)
        fail("ibv_modify_qp", error);
    return qp;
}

static void receive(struct ibv_qp *qp, struct ibv_mr *mr, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        struct ibv_sge sge = {.addr = (uintptr_t)arrived[i], .length = sizeof arrived[i], .lkey = mr->lkey};
        struct ibv_recv_wr *bad, wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1};
        int error = ibv_post_recv(qp, &wr, &bad);
        if (error != 0)
            fail("ibv_post_recv", error);
    }
}

static void send(struct ibv_qp *qp, struct ibv_mr *mr, struct ibv_ah *ah, uint32_t to, unsigned count)
{
    struct ibv_qp_ex *ex = need(ibv_qp_to_qp_ex(qp), "ibv_qp_to_qp_ex");

    for (unsigned number = 1; number <= count; number++) {
        unsigned char *letter = letters[number - 1];
        memset(letter, (int)number, SIZE);
        if (number == 1 || !is_together)
            ibv_wr_start(ex);
        ex->wr_id = number;
        /* rxe wants to have the flag, too. */
        ex->wr_flags = (is_silent && number < count ? 0 : IBV_SEND_SIGNALED) | (is_inline ? IBV_SEND_INLINE : 0);
        ibv_wr_send(ex);
        ibv_wr_set_ud_addr(ex, ah, to, KEY);
        if (is_inline) {
            ibv_wr_set_inline_data(ex, letter, SIZE);
            memset(letter, 0, SIZE);
        } else {
            ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)letter, SIZE);
        }
        int error = number == count || !is_together ? ibv_wr_complete(ex) : 0;
        if (error != 0)
            fail("ibv_wr_complete", error);
    }
}

static unsigned take(struct ibv_cq *cq, uint64_t *id)
{
    struct ibv_wc wc;
    int count = ibv_poll_cq(cq, 1, &wc);

    if (count < 0)
        fail("ibv_poll_cq", errno);
    if (count > 0 && wc.status != IBV_WC_SUCCESS)
        fail(ibv_wc_status_str(wc.status), 0);
    *id = count > 0 ? wc.wr_id : 0;
    return (unsigned)count;
}

int main(int words, char **word)
{
    if (words < 4 || atoi(word[3]) > MOST)
        return 2;
    unsigned count = (unsigned)atoi(word[3]), sent = 0, came = 0;
    for (int i = 4; i < words; i++) {
        is_together |= strcmp(word[i], "together") == 0;
        is_inline |= strcmp(word[i], "inline") == 0;
        is_silent |= strcmp(word[i], "silent") == 0;
    }
    struct ibv_context *context = open_device(word[1]);
    struct ibv_pd *pd = need(ibv_alloc_pd(context), "ibv_alloc_pd");
    struct ibv_mr *outbox = need(ibv_reg_mr(pd, letters, sizeof letters, 0), "ibv_reg_mr");
    struct ibv_mr *inbox = need(ibv_reg_mr(pd, arrived, sizeof arrived, IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
    struct ibv_cq *sends = need(ibv_create_cq(context, (int)count, NULL, NULL, 0), "ibv_create_cq");
    struct ibv_cq *receives = need(ibv_create_cq(context, 2 * (int)count, NULL, NULL, 0), "ibv_create_cq");
    struct ibv_qp *source = make(pd, sends, count), *sink = make(pd, receives, count);
    struct ibv_ah_attr there = {.is_global = 1, .port_num = 1, .grh = {.sgid_index = (uint8_t)atoi(word[2])}};
    there.grh.hop_limit = 64;
    int error = ibv_query_gid(context, 1, there.grh.sgid_index, &there.grh.dgid);
    if (error != 0)
        fail("ibv_query_gid", errno);
    struct ibv_ah *ah = need(ibv_create_ah(pd, &there), "ibv_create_ah");

    uint64_t id, done[MOST], places[2 * MOST];
    receive(sink, inbox, 2 * count);
    send(source, outbox, ah, sink->qp_num, count);
    for (double end = now_ms() + QUIET_MS; now_ms() < end;) {
        if (sent < count && take(sends, &id) > 0) {
            memset(letters[is_silent ? 0 : id - 1], 0, is_silent ? id * SIZE : SIZE);
            done[sent++] = id;
        }
        if (came < 2 * count && take(receives, &id) > 0) {
            places[came++] = id;
            end = now_ms() + QUIET_MS;
        }
    }
    printf("sent");
    for (unsigned i = 0; i < sent; i++)
        printf(" %u", (unsigned)done[i]);
    printf("\ncame");
    for (unsigned i = 0; i < came; i++) {
        const unsigned char *letter = arrived[places[i]] + HEADER;
        printf(" %d", memcmp(letter, letter + 1, SIZE - 1) == 0 ? *letter : -1);
    }
    printf("\n");
    ibv_destroy_ah(ah);
    ibv_destroy_qp(source);
    ibv_destroy_qp(sink);
    ibv_destroy_cq(sends);
    ibv_destroy_cq(receives);
    ibv_dereg_mr(outbox);
    ibv_dereg_mr(inbox);
    ibv_dealloc_pd(pd);
    return ibv_close_device(context) != 0;
}
