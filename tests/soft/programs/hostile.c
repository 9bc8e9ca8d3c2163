/* hostile DEVICE [without-forks]: what programs should not do, and do: closes objects in odd orders, forks, opens
 * libraries late, with many threads that post and poll meanwhile. It ends with 0 if nothing crashed and nothing hung.
 *
 * A child of a process with AddressSanitizer may hang in malloc(): gcc 12's has no fork handlers, so its allocator's
 * lock stays with a thread of the parent.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dlvsym(), RTLD_NEXT */
#endif
#include "need.h"

#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS  25

static struct ibv_device *device;
static char memory[4096];

struct shared {
    struct ibv_context *context;
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel;
    uint32_t lkey;
    atomic_bool stop;
};

static void *post_and_poll(void *argument)
{
    struct shared *shared = argument;

    while (!shared->stop) {
        struct ibv_sge sge = {(uintptr_t)memory, 64, shared->lkey};
        struct ibv_recv_wr *bad, wr = {.wr_id = 7, .sg_list = &sge, .num_sge = 1};
        struct ibv_wc wc[8];
        if (ibv_post_recv(shared->qp, &wr, &bad) == 0 || errno != ENOMEM)
            ibv_req_notify_cq(shared->cq, 0);
        int count = ibv_poll_cq(shared->cq, 8, wc);
        for (int i = 0; i < count; i++)
            if (wc[i].wr_id != 7) {
                puts("a wr_id that nobody posted");
                exit(1);
            }
    }
    return NULL;
}

static void fork_and_use(struct shared *shared)
{
    pid_t child = fork();

    if (child == 0) {
        struct ibv_wc wc;
        ibv_poll_cq(shared->cq, 1, &wc);
        struct ibv_context *own = ibv_open_device(device);
        if (own != NULL)
            ibv_close_device(own);
        _exit(0);
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        puts("the child failed");
        exit(1);
    }
}

static void round_of(unsigned number, bool forks)
{
    struct shared shared = {.context = need(ibv_open_device(device), "ibv_open_device")};
    struct ibv_pd *pd = need(ibv_alloc_pd(shared.context), "ibv_alloc_pd");
    struct ibv_mr *mr = need(ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE), "ibv_reg_mr");
    pthread_t threads[THREADS];

    shared.lkey = mr->lkey;
    shared.channel = need(ibv_create_comp_channel(shared.context), "ibv_create_comp_channel");
    shared.cq = need(ibv_create_cq(shared.context, 200, NULL, shared.channel, 0), "ibv_create_cq");
    struct ibv_qp_init_attr attributes = {
        .send_cq = shared.cq,
        .recv_cq = shared.cq,
        .cap = {.max_send_wr = 10, .max_recv_wr = 100, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    shared.qp = need(ibv_create_qp(pd, &attributes), "ibv_create_qp");
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1}, error = {.qp_state = IBV_QPS_ERR};
    ibv_modify_qp(shared.qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, post_and_poll, &shared);
    /* What is in use stays. */
    if (ibv_destroy_cq(shared.cq) == 0 || ibv_destroy_comp_channel(shared.channel) == 0 || ibv_dealloc_pd(pd) == 0) {
        puts("something in use was destroyed");
        exit(1);
    }
    if (forks && number % 5 == 0)
        fork_and_use(&shared);
    ibv_modify_qp(shared.qp, &error, IBV_QP_STATE);
    usleep(1000);
    shared.stop = true;
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    if (number % 3 == 0)
        ibv_dereg_mr(mr);
    if (ibv_destroy_qp(shared.qp) != 0)
        puts("ibv_destroy_qp failed");
    if (number % 2 == 0 && number % 3 == 0)
        ibv_dealloc_pd(pd);
    struct ibv_wc wc;
    while (ibv_poll_cq(shared.cq, 1, &wc) > 0)
        ;
    if (ibv_destroy_cq(shared.cq) != 0 || ibv_destroy_comp_channel(shared.channel) != 0) {
        puts("the queue stays");
        exit(1);
    }
    if (number % 3 != 0)
        ibv_dereg_mr(mr);
    if (!(number % 2 == 0 && number % 3 == 0))
        ibv_dealloc_pd(pd);
    if (ibv_close_device(shared.context) != 0) {
        puts("ibv_close_device failed");
        exit(1);
    }
}

int main(int argc, char **argv)
{
    int count;

    if (argc < 2)
        return 2;
    struct ibv_device **devices = need(ibv_get_device_list(&count), "ibv_get_device_list");
    for (int i = 0; i < count; i++)
        if (strcmp(ibv_get_device_name(devices[i]), argv[1]) == 0)
            device = devices[i];
    need(device, argv[1]);
    for (unsigned i = 0; i < ROUNDS; i++)
        round_of(i, argc == 2);
    /* Found late, by a handle, everywhere, and behind the program. */
    void *library = dlopen("libibverbs.so.1", RTLD_NOW);
    struct ibv_pd *(*found[])(struct ibv_context *) = {
        (struct ibv_pd * (*)(struct ibv_context *)) need(dlsym(library, "ibv_alloc_pd"), "dlsym"),
        (struct ibv_pd * (*)(struct ibv_context *)) need(dlsym(RTLD_DEFAULT, "ibv_alloc_pd"), "dlsym"),
        (struct ibv_pd * (*)(struct ibv_context *)) need(dlsym(RTLD_NEXT, "ibv_alloc_pd"), "dlsym"),
        (struct ibv_pd * (*)(struct ibv_context *)) need(dlvsym(library, "ibv_alloc_pd", "IBVERBS_1.1"), "dlvsym"),
    };
    if (dlsym(library, "ibv_no_such_call") != NULL || dlsym(RTLD_DEFAULT, "rdma_no_such_call") != NULL)
        return 1;
    struct ibv_context *context = need(ibv_open_device(device), "ibv_open_device");
    for (unsigned i = 0; i < sizeof found / sizeof *found; i++) {
        struct ibv_pd *pd = found[i](context);
        printf("found %u: %s\n", i, pd != NULL ? "made" : strerror(errno));
        if (pd != NULL)
            ibv_dealloc_pd(pd);
    }
    ibv_close_device(context);
    ibv_free_device_list(devices);
    dlclose(library);
    puts("done");
    return 0;
}
