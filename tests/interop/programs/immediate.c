/* A peer on plain verbs. It sends messages and writes with immediate data, which ndpy does not send.

       immediate DEVICE PORT GID_INDEX MTU

   MTU is the path MTU's code. The program prints "endpoint QPN PSN". Then it reads "QPN PSN LID GID ADDRESS RKEY" of
   the other end. GID has 32 hexadecimal digits. ADDRESS and RKEY name memory that the program may write to. Then it
   prints "connected". Each further line is one request: "send LENGTH", "send_immediate LENGTH VALUE" or
   "write_immediate LENGTH VALUE". When the request has ended, the program prints "ended STATUS". */

#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 4096, PSN = 0x1234 };

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static struct ibv_context *open_device(const char *name)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = NULL;

    for (struct ibv_device **device = list; device && *device; device++)
        if (!strcmp(ibv_get_device_name(*device), name))
            context = ibv_open_device(*device);
    if (list)
        ibv_free_device_list(list);
    return context;
}

static void connect_to(struct ibv_qp *qp, int port, int gid_index, int mtu, uint32_t number, uint32_t psn, uint16_t lid,
                       const char *gid)
{
    struct ibv_qp_attr to_receive = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)mtu,
        .dest_qp_num = number,
        .rq_psn = psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .dlid = lid, .port_num = (uint8_t)port},
    };
    struct ibv_qp_attr to_send = {
        .qp_state = IBV_QPS_RTS,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .sq_psn = PSN,
        .max_rd_atomic = 1,
    };

    to_receive.ah_attr.grh.sgid_index = (uint8_t)gid_index;
    to_receive.ah_attr.grh.hop_limit = 64;
    for (int i = 0; i < 16; i++) {
        unsigned int byte;

        if (sscanf(gid + 2 * i, "%2x", &byte) != 1)
            fail("GID");
        to_receive.ah_attr.grh.dgid.raw[i] = (uint8_t)byte;
    }
    if (ibv_modify_qp(qp, &to_receive,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        fail("ready to receive");
    if (ibv_modify_qp(qp, &to_send,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                          IBV_QP_MAX_QP_RD_ATOMIC))
        fail("ready to send");
}

int main(int argc, char **argv)
{
    static char memory[SIZE];
    struct ibv_qp_init_attr wanted = {
        .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp_attr initial = {.qp_state = IBV_QPS_INIT};
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_mr *region;
    struct ibv_qp *qp;
    unsigned int number, psn, lid, rkey;
    unsigned long long address;
    char gid[33], line[200];

    if (argc != 5)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    context = open_device(argv[1]);
    domain = context ? ibv_alloc_pd(context) : NULL;
    region = domain ? ibv_reg_mr(domain, memory, SIZE, 0) : NULL;
    wanted.send_cq = wanted.recv_cq = region ? ibv_create_cq(context, 8, NULL, NULL, 0) : NULL;
    qp = wanted.send_cq ? ibv_create_qp(domain, &wanted) : NULL;
    if (!qp)
        fail(argv[1]);
    initial.port_num = (uint8_t)atoi(argv[2]);
    if (ibv_modify_qp(qp, &initial, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("init");
    for (int i = 0; i < SIZE; i++)
        memory[i] = (char)('a' + i % 26);
    printf("endpoint %u %u\n", qp->qp_num, PSN);
    if (!fgets(line, sizeof line, stdin) ||
        sscanf(line, "%u %u %u %32s %llu %u", &number, &psn, &lid, gid, &address, &rkey) != 6)
        return 2;
    connect_to(qp, atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), number, psn, (uint16_t)lid, gid);
    printf("connected\n");
    while (fgets(line, sizeof line, stdin)) {
        struct ibv_sge element = {.addr = (uintptr_t)memory, .lkey = region->lkey};
        struct ibv_send_wr wr = {.sg_list = &element, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED}, *bad;
        struct ibv_wc wc;
        unsigned int value = 0;
        char what[32];
        int got;

        if (sscanf(line, "%31s %u %u", what, &element.length, &value) < 2 || element.length > SIZE)
            return 2;
        wr.imm_data = htonl(value);
        if (!strcmp(what, "send")) {
            wr.opcode = IBV_WR_SEND;
        } else if (!strcmp(what, "send_immediate")) {
            wr.opcode = IBV_WR_SEND_WITH_IMM;
        } else {
            wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.wr.rdma.remote_addr = address;
            wr.wr.rdma.rkey = rkey;
        }
        if (ibv_post_send(qp, &wr, &bad))
            fail(what);
        do
            got = ibv_poll_cq(wanted.send_cq, 1, &wc);
        while (!got);
        if (got < 0)
            fail("poll");
        printf("ended %d\n", wc.status);
    }
    ibv_destroy_qp(qp);
    ibv_destroy_cq(wanted.send_cq);
    ibv_dereg_mr(region);
    ibv_dealloc_pd(domain);
    ibv_close_device(context);
    return 0;
}
