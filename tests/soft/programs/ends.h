/* What the programs of this folder share: a device, connected queue pairs in one process, completions with a deadline,
   and what the process holds.

   A program ends with 0 if all went as it should, and otherwise with 1 and a line that says what did not. */

#ifndef ENDS_H
#define ENDS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UNUSED_HERE __attribute__((unused))
#define RIGHTS      (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)
#define DEADLINE_MS 20000

/* ---- Failing ---- */

UNUSED_HERE static void fail(const char *file, int line, const char *format, ...)
{
    int error = errno;
    char text[400];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dprintf(1, "FAILED %s:%d: %s (errno: %s)\n", file, line, text, strerror(error));
    _exit(1);
}

#define FAIL(...) fail(__FILE__, __LINE__, __VA_ARGS__)
#define EXPECT(condition)           \
    do {                            \
        if (!(condition))           \
            FAIL("%s", #condition); \
    } while (0)

UNUSED_HERE static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

UNUSED_HERE static void sleep_ms(long ms)
{
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};

    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

/* ---- What the process holds ---- */

struct held {
    int descriptors, threads;
    size_t heap;         /* bytes that malloc has given out */
    size_t resident_kib; /* of the process */
};

UNUSED_HERE static int count_entries(const char *folder)
{
    DIR *opened = opendir(folder);
    int count = 0;

    EXPECT(opened != NULL);
    for (struct dirent *entry; (entry = readdir(opened)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(opened);
    return count;
}

UNUSED_HERE static struct held holds(void)
{
    struct held now = {0};
    struct mallinfo2 heap = mallinfo2();
    unsigned long pages = 0;

    now.heap = heap.uordblks + heap.hblkhd;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file != NULL && fscanf(file, "%*u %lu", &pages) == 1)
        now.resident_kib = pages * (size_t)sysconf(_SC_PAGESIZE) / 1024;
    if (file != NULL)
        fclose(file);
    now.descriptors = count_entries("/proc/self/fd") - 1;
    now.threads = count_entries("/proc/self/task");
    return now;
}

/* Connections close in the background. Waits until the process holds no more than before, apart from this much heap. */
UNUSED_HERE static void expect_held(struct held before, size_t slack, int ms, const char *after)
{
    uint64_t end = now_ms() + (uint64_t)ms;
    struct held now;

    for (;;) {
        now = holds();
        if (now.descriptors <= before.descriptors && now.threads <= before.threads && now.heap <= before.heap + slack)
            return;
        if (now_ms() > end)
            break;
        sleep_ms(20);
    }
    FAIL("after %s: descriptors %d -> %d, threads %d -> %d, heap %zu -> %zu", after, before.descriptors,
         now.descriptors, before.threads, now.threads, before.heap, now.heap);
}

/* ---- The device ---- */

UNUSED_HERE static struct ibv_context *try_device(void)
{
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    struct ibv_context *context = list != NULL && count == 1 ? ibv_open_device(list[0]) : NULL;
    int error = errno;

    if (list != NULL)
        ibv_free_device_list(list);
    errno = error;
    return context;
}

UNUSED_HERE static struct ibv_context *open_device(void)
{
    struct ibv_context *context = try_device();

    EXPECT(context != NULL);
    return context;
}

UNUSED_HERE static struct ibv_mr *buffer(struct ibv_pd *pd, size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    EXPECT(memory != MAP_FAILED);
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, size, RIGHTS);
    EXPECT(mr != NULL);
    return mr;
}

UNUSED_HERE static void free_buffer(struct ibv_mr *mr)
{
    void *memory = mr->addr;
    size_t size = mr->length;

    EXPECT(ibv_dereg_mr(mr) == 0);
    munmap(memory, size);
}

/* ---- Requests ---- */

UNUSED_HERE static int post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, struct ibv_mr *local, uint64_t offset,
                            size_t size, const struct ibv_mr *remote, uint64_t id)
{
    struct ibv_sge element = {.length = (uint32_t)size};
    struct ibv_send_wr wr = {.wr_id = id, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;

    if (local != NULL) {
        element.addr = (uintptr_t)local->addr + offset;
        element.lkey = local->lkey;
        wr.sg_list = &element;
        wr.num_sge = size > 0;
    }
    if (remote != NULL) {
        wr.wr.rdma.remote_addr = (uintptr_t)remote->addr + offset;
        wr.wr.rdma.rkey = remote->rkey;
    }
    return ibv_post_send(qp, &wr, &bad);
}

UNUSED_HERE static int receive(struct ibv_qp *qp, struct ibv_mr *local, uint64_t offset, size_t size, uint64_t id)
{
    struct ibv_sge element = {.length = (uint32_t)size};
    struct ibv_recv_wr wr = {.wr_id = id}, *bad;

    if (local != NULL) {
        element.addr = (uintptr_t)local->addr + offset;
        element.lkey = local->lkey;
        wr.sg_list = &element;
        wr.num_sge = 1;
    }
    return ibv_post_recv(qp, &wr, &bad);
}

/* The next completion. False if none comes in this time. */
UNUSED_HERE static bool completion(struct ibv_cq *cq, struct ibv_wc *wc, int ms)
{
    uint64_t end = now_ms() + (uint64_t)ms;
    long pause_us = 20;

    for (;;) {
        int count = ibv_poll_cq(cq, 1, wc);
        EXPECT(count >= 0);
        if (count == 1)
            return true;
        if (now_ms() >= end)
            return false;
        usleep((useconds_t)pause_us);
        pause_us = pause_us < 1000 ? pause_us * 2 : 1000;
    }
}

UNUSED_HERE static void expect_success(struct ibv_cq *cq, int count)
{
    struct ibv_wc wc;

    for (int i = 0; i < count; i++) {
        if (!completion(cq, &wc, DEADLINE_MS))
            FAIL("completion %d of %d does not come", i + 1, count);
        if (wc.status != IBV_WC_SUCCESS)
            FAIL("completion %d of %d: %s, opcode %d", i + 1, count, ibv_wc_status_str(wc.status), wc.opcode);
    }
}

/* ---- One end of a connection ---- */

struct end {
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct rdma_cm_id *id;
};

UNUSED_HERE static struct ibv_qp_init_attr qp_attributes(struct ibv_cq *cq, uint32_t depth)
{
    return (struct ibv_qp_init_attr){
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
}

/* ---- Connecting by hand ---- */

UNUSED_HERE static int move_to_init(struct ibv_qp *qp)
{
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = RIGHTS};

    return ibv_modify_qp(qp, &state, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

/* The peer has the GID with this index too: it is on this machine. */
UNUSED_HERE static int move_to_rts(struct ibv_qp *qp, uint32_t peer, int gid_index)
{
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = peer};

    state.max_dest_rd_atomic = 16;
    state.min_rnr_timer = 12;
    state.ah_attr.is_global = 1;
    state.ah_attr.port_num = 1;
    state.ah_attr.grh.sgid_index = (uint8_t)gid_index;
    state.ah_attr.grh.hop_limit = 1;
    if (ibv_query_gid(qp->context, 1, gid_index, &state.ah_attr.grh.dgid) != 0)
        return errno;
    int error = ibv_modify_qp(qp, &state,
                              IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0)
        return error;
    memset(&state, 0, sizeof state);
    state.qp_state = IBV_QPS_RTS;
    state.timeout = 14;
    state.retry_cnt = state.rnr_retry = 7;
    state.max_rd_atomic = 16;
    return ibv_modify_qp(qp, &state,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC);
}

/* The two ends have one completion queue each, without a channel. */
UNUSED_HERE static void make_by_hand(struct ibv_pd *pd, struct end *ends, uint32_t depth)
{
    for (int i = 0; i < 2; i++) {
        EXPECT((ends[i].cq = ibv_create_cq(pd->context, (int)depth * 2, NULL, NULL, 0)) != NULL);
        struct ibv_qp_init_attr attributes = qp_attributes(ends[i].cq, depth);
        EXPECT((ends[i].qp = ibv_create_qp(pd, &attributes)) != NULL);
        EXPECT(move_to_init(ends[i].qp) == 0);
    }
    for (int i = 0; i < 2; i++)
        EXPECT(move_to_rts(ends[i].qp, ends[!i].qp->qp_num, 0) == 0);
}

UNUSED_HERE static void close_by_hand(struct end *ends)
{
    for (int i = 0; i < 2; i++) {
        EXPECT(ibv_destroy_qp(ends[i].qp) == 0);
        EXPECT(ibv_destroy_cq(ends[i].cq) == 0);
    }
}

/* ---- Connecting by the connection manager ---- */

struct manager {
    struct rdma_event_channel *events;
    struct rdma_cm_id *listener;
    struct sockaddr_in address;
};

/* The next event of the channel, which the caller acknowledges. NULL: none comes in this time. */
UNUSED_HERE static struct rdma_cm_event *next_event(struct rdma_event_channel *events, int ms)
{
    struct pollfd state = {.fd = events->fd, .events = POLLIN};
    struct rdma_cm_event *event;
    int ready;

    do
        ready = poll(&state, 1, ms);
    while (ready < 0 && errno == EINTR);
    if (ready != 1)
        return NULL;
    EXPECT(rdma_get_cm_event(events, &event) == 0);
    return event;
}

/* The next event, which has to be this one. Returns its identifier. */
UNUSED_HERE static struct rdma_cm_id *expect_event(struct rdma_event_channel *events, enum rdma_cm_event_type type)
{
    struct rdma_cm_event *event;

    for (;;) {
        event = next_event(events, DEADLINE_MS);
        if (event == NULL)
            FAIL("%s does not come", rdma_event_str(type));
        if (event->event != RDMA_CM_EVENT_TIMEWAIT_EXIT || type == RDMA_CM_EVENT_TIMEWAIT_EXIT)
            break;
        rdma_ack_cm_event(event);
    }
    if (event->event != type)
        FAIL("%s comes instead of %s, status %d", rdma_event_str(event->event), rdma_event_str(type), event->status);
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    return id;
}

UNUSED_HERE static void open_manager(struct manager *manager)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    EXPECT((manager->events = rdma_create_event_channel()) != NULL);
    EXPECT(rdma_create_id(manager->events, &manager->listener, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_bind_addr(manager->listener, (struct sockaddr *)&any) == 0);
    EXPECT(rdma_listen(manager->listener, 1024) == 0);
    manager->address = any;
    manager->address.sin_port = rdma_get_src_port(manager->listener);
}

UNUSED_HERE static void close_manager(struct manager *manager)
{
    EXPECT(rdma_destroy_id(manager->listener) == 0);
    rdma_destroy_event_channel(manager->events);
}

UNUSED_HERE static void give_queue_pair(struct end *end, uint32_t depth)
{
    EXPECT((end->cq = ibv_create_cq(end->id->verbs, (int)depth * 2, NULL, NULL, 0)) != NULL);
    struct ibv_qp_init_attr attributes = qp_attributes(end->cq, depth);
    EXPECT(rdma_create_qp(end->id, NULL, &attributes) == 0);
    end->qp = end->id->qp;
}

/* An identifier that is ready to connect. */
UNUSED_HERE static struct rdma_cm_id *resolved(struct manager *manager)
{
    struct rdma_cm_id *id;

    EXPECT(rdma_create_id(manager->events, &id, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_resolve_addr(id, NULL, (struct sockaddr *)&manager->address, DEADLINE_MS) == 0);
    expect_event(manager->events, RDMA_CM_EVENT_ADDR_RESOLVED);
    EXPECT(rdma_resolve_route(id, DEADLINE_MS) == 0);
    expect_event(manager->events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    return id;
}

/* ends[0] connects to ends[1]. Nothing else may happen on the manager's channel meanwhile. */
UNUSED_HERE static void connect_ends(struct manager *manager, struct end *ends, uint32_t depth)
{
    struct rdma_conn_param parameters = {
        .responder_resources = 16, .initiator_depth = 16, .retry_count = 7, .rnr_retry_count = 7};

    ends[0].id = resolved(manager);
    give_queue_pair(&ends[0], depth);
    EXPECT(rdma_connect(ends[0].id, &parameters) == 0);
    ends[1].id = expect_event(manager->events, RDMA_CM_EVENT_CONNECT_REQUEST);
    give_queue_pair(&ends[1], depth);
    EXPECT(rdma_accept(ends[1].id, &parameters) == 0);
    expect_event(manager->events, RDMA_CM_EVENT_ESTABLISHED);
    expect_event(manager->events, RDMA_CM_EVENT_ESTABLISHED);
}

UNUSED_HERE static void close_end(struct end *end)
{
    rdma_destroy_qp(end->id);
    EXPECT(ibv_destroy_cq(end->cq) == 0);
    EXPECT(rdma_destroy_id(end->id) == 0);
    end->id = NULL;
}

#endif
