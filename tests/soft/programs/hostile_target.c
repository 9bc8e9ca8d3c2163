/* A listener for the hostile peers. tests/softnd/programs/hostile_target.h says what it does.
 *
 *   hostile_target ADDRESS SECRET SECONDS own|shared
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
size_t __sanitizer_get_current_allocated_bytes(void); /* gcc has no header for it */
#endif

#define REQUESTS 1024 /* connections that wait for a slot */

#define REMOTE (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)

struct native {
    struct rdma_cm_id *id; /* NULL: free */
    struct ibv_mw *writable, *readable;
    struct ibv_mr *open, *hidden, *messages;
};

#include "../../softnd/programs/hostile_target.h"

static struct rdma_event_channel *events;
static struct rdma_cm_id *listener;
static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_comp_channel *arrivals;
static struct ibv_cq *cq;
static struct ibv_srq *shared; /* if with_shared */
static struct rdma_cm_id *requests[REQUESTS];
static unsigned first_request, request_count;

static void check(const char *what, bool done)
{
    if (done)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    abort();
}

/* AddressSanitizer keeps freed memory for a while, so it is asked for what is in use. */
static unsigned long long memory_used(void)
{
#ifdef __SANITIZE_ADDRESS__
    return __sanitizer_get_current_allocated_bytes();
#else
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    check("statm", file != NULL && fscanf(file, "%*u %llu", &pages) == 1);
    fclose(file);
    return pages * (unsigned long long)sysconf(_SC_PAGESIZE);
#endif
}

static unsigned long long next_handle(void)
{
    int next = dup(0);

    close(next);
    return (unsigned long long)next;
}

/* ---- Requests ---- */

static bool post_receive(struct slot *slot, unsigned char *buffer)
{
    struct ibv_sge sge = {(uintptr_t)buffer, RECEIVE_SIZE, slot->native.messages->lkey};
    struct ibv_recv_wr wr = {.wr_id = (uintptr_t)buffer, .sg_list = &sge, .num_sge = 1}, *bad;

    return (with_shared ? ibv_post_srq_recv(shared, &wr, &bad) : ibv_post_recv(slot->native.id->qp, &wr, &bad)) == 0;
}

static void post_send(struct slot *slot, unsigned char *buffer, uint32_t size)
{
    struct ibv_sge sge = {(uintptr_t)buffer, size, slot->native.messages->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

    (void)!ibv_post_send(slot->native.id->qp, &wr, &bad);
}

/* False: the peer is gone. */
static bool bind_window(struct slot *slot, struct ibv_mw *mw, unsigned at, unsigned access)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW}, *bad;

    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    wr.bind_mw.bind_info.mr = slot->native.hidden;
    wr.bind_mw.bind_info.addr = (uintptr_t)slot->memory + at;
    wr.bind_mw.bind_info.length = WINDOW_SIZE;
    wr.bind_mw.bind_info.mw_access_flags = access;
    if (ibv_post_send(slot->native.id->qp, &wr, &bad) != 0)
        return false;
    mw->rkey = wr.bind_mw.rkey;
    return true;
}

static void offer(struct slot *slot)
{
    slot->native.writable = ibv_alloc_mw(domain, IBV_MW_TYPE_2);
    slot->native.readable = ibv_alloc_mw(domain, IBV_MW_TYPE_2);
    check("ibv_alloc_mw", slot->native.writable != NULL && slot->native.readable != NULL);
    if (!bind_window(slot, slot->native.writable, WRITABLE_AT, IBV_ACCESS_REMOTE_WRITE))
        return;
    slot->writable_bound = true;
    if (!bind_window(slot, slot->native.readable, READABLE_AT, IBV_ACCESS_REMOTE_READ))
        return;
    grant(slot, htonl(slot->native.open->rkey), htonl(slot->native.writable->rkey), htonl(slot->native.readable->rkey));
}

static void invalidate(struct slot *slot)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_LOCAL_INV}, *bad;

    wr.invalidate_rkey = slot->native.writable->rkey;
    (void)!ibv_post_send(slot->native.id->qp, &wr, &bad);
}

static void take_completions(void)
{
    struct ibv_wc done[32];
    int count;

    while ((count = ibv_poll_cq(cq, 32, done)) > 0)
        for (int i = 0; i < count; i++) {
            struct slot *slot = NULL;
            for (unsigned at = 0; at < SLOTS; at++)
                if (slots[at].native.id != NULL && slots[at].native.id->qp->qp_num == done[i].qp_num)
                    slot = &slots[at];
            /* The opcode of a request that has failed says nothing. All sends are silent, and have the number 0. */
            if (done[i].wr_id != 0)
                take_receive(slot, (unsigned char *)(uintptr_t)done[i].wr_id, done[i].status == IBV_WC_SUCCESS,
                             done[i].byte_len);
        }
    check("ibv_poll_cq", count == 0);
}

/* ---- Connections ---- */

static void begin(struct slot *slot, struct rdma_cm_id *id);

static void close_connection(struct slot *slot)
{
    struct rdma_cm_id *id = slot->native.id;

    /* Whatever is in the queue goes with the queue pair. */
    take_completions();
    slot->native.id = NULL;
    rdma_destroy_qp(id);
    if (slot->native.writable != NULL)
        check("ibv_dealloc_mw",
              ibv_dealloc_mw(slot->native.writable) == 0 && ibv_dealloc_mw(slot->native.readable) == 0);
    slot->native.writable = slot->native.readable = NULL;
    check("rdma_destroy_id", rdma_destroy_id(id) == 0);
    check_memory(slot);
    while (!quitting && slot->native.id == NULL && request_count > 0) {
        struct rdma_cm_id *next = requests[first_request++ % REQUESTS];
        request_count--;
        begin(slot, next);
    }
}

static void begin(struct slot *slot, struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attributes = {
        .send_cq = cq, .recv_cq = cq, .srq = shared, .cap = {32, RECEIVES, 1, 1, 0}, .qp_type = IBV_QPT_RC};
    struct rdma_conn_param parameters = {.responder_resources = 4, .initiator_depth = 4};

    slot->native.id = id;
    slot->writable_bound = false;
    id->context = slot;
    check("rdma_create_qp", rdma_create_qp(id, domain, &attributes) == 0);
    check("ibv_post_recv", with_shared || post_receives(slot));
    if (rdma_accept(id, &parameters) != 0) {
        refused++;
        slot->native.id = NULL;
        rdma_destroy_qp(id);
        check("rdma_destroy_id", rdma_destroy_id(id) == 0);
    }
}

static void requested(struct rdma_cm_id *id)
{
    for (unsigned i = 0; i < SLOTS; i++)
        if (slots[i].native.id == NULL) {
            begin(&slots[i], id);
            return;
        }
    check("too many requests", request_count < REQUESTS);
    requests[(first_request + request_count++) % REQUESTS] = id;
}

static void take_event(void)
{
    struct rdma_cm_event *event;

    if (rdma_get_cm_event(events, &event) != 0) {
        check("rdma_get_cm_event", errno == EAGAIN);
        return;
    }
    enum rdma_cm_event_type type = event->event;
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    struct slot *slot = id->context;
    switch (type) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        id->context = NULL;
        requested(id);
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
        connections++;
        offer(slot);
        break;
    case RDMA_CM_EVENT_DISCONNECTED:
        close_connection(slot);
        break;
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
        break;
    default:
        refused++;
        if (slot != NULL)
            close_connection(slot);
    }
}

static void take_arrival(void)
{
    struct ibv_cq *which;
    void *its_context;

    if (ibv_get_cq_event(arrivals, &which, &its_context) != 0)
        return;
    ibv_ack_cq_events(which, 1);
    check("ibv_req_notify_cq", ibv_req_notify_cq(cq, 0) == 0);
    take_completions();
}

/* ---- Beginning and end ---- */

static struct ibv_mr *register_memory(unsigned char *memory, size_t size, int access)
{
    struct ibv_mr *mr = ibv_reg_mr(domain, memory, size, access);

    check("ibv_reg_mr", mr != NULL);
    return mr;
}

static void open_slot(struct slot *slot, unsigned number)
{
    slot->number = number;
    slot->memory = mmap(NULL, SLOT_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check("mmap", slot->memory != MAP_FAILED);
    fill(slot);
    slot->native.open = register_memory(slot->memory + OPEN_AT, OPEN_SIZE, IBV_ACCESS_LOCAL_WRITE | REMOTE);
    slot->native.hidden =
        register_memory(slot->memory + HIDDEN_AT, HIDDEN_SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    slot->native.messages = register_memory(slot->memory + RECEIVE_AT, SLOT_SIZE - RECEIVE_AT, IBV_ACCESS_LOCAL_WRITE);
}

static void close_slot(struct slot *slot)
{
    if (slot->native.id != NULL)
        close_connection(slot);
    check("ibv_dereg_mr", ibv_dereg_mr(slot->native.open) == 0 && ibv_dereg_mr(slot->native.hidden) == 0 &&
                              ibv_dereg_mr(slot->native.messages) == 0);
    check_memory(slot);
    munmap(slot->memory, SLOT_SIZE);
}

static void do_not_block(int handle)
{
    check("fcntl", fcntl(handle, F_SETFL, fcntl(handle, F_GETFL) | O_NONBLOCK) == 0);
}

static void begin_all(const char *address)
{
    struct sockaddr_storage any = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&any;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&any;

    if (inet_pton(AF_INET, address, &v4->sin_addr) == 1)
        v4->sin_family = AF_INET;
    else if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1)
        v6->sin6_family = AF_INET6;
    events = rdma_create_event_channel();
    check("rdma_create_event_channel", events != NULL);
    check("rdma_create_id", rdma_create_id(events, &listener, NULL, RDMA_PS_TCP) == 0);
    check("rdma_bind_addr", rdma_bind_addr(listener, (struct sockaddr *)&any) == 0);
    check("rdma_listen", rdma_listen(listener, REQUESTS) == 0);
    struct ibv_context **devices = rdma_get_devices(NULL);
    context = devices[0];
    rdma_free_devices(devices);
    domain = ibv_alloc_pd(context);
    arrivals = ibv_create_comp_channel(context);
    check("ibv_alloc_pd", domain != NULL && arrivals != NULL);
    cq = ibv_create_cq(context, 512, NULL, arrivals, 0);
    check("ibv_create_cq", cq != NULL && ibv_req_notify_cq(cq, 0) == 0);
    if (with_shared) {
        struct ibv_srq_init_attr limits = {.attr = {SLOTS * RECEIVES, 1, 0}};
        shared = ibv_create_srq(domain, &limits);
        check("ibv_create_srq", shared != NULL);
    }
    for (unsigned i = 0; i < SLOTS; i++)
        open_slot(&slots[i], i);
    for (unsigned i = 0; with_shared && i < SLOTS; i++)
        check("ibv_post_srq_recv", post_receives(&slots[i]));
    do_not_block(events->fd);
    do_not_block(arrivals->fd);
}

static void end_all(void)
{
    for (; request_count > 0; request_count--)
        rdma_destroy_id(requests[first_request++ % REQUESTS]);
    check("rdma_destroy_id", rdma_destroy_id(listener) == 0);
    for (unsigned i = 0; i < SLOTS; i++)
        close_slot(&slots[i]);
    if (with_shared)
        check("ibv_destroy_srq", ibv_destroy_srq(shared) == 0);
    check("ibv_destroy_cq", ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(arrivals) == 0);
    check("ibv_dealloc_pd", ibv_dealloc_pd(domain) == 0);
    rdma_destroy_event_channel(events);
}

int main(int count, char **arguments)
{
    if (count != 5 || strlen(arguments[2]) != SECRET_SIZE) {
        fprintf(stderr, "hostile_target ADDRESS SECRET SECONDS own|shared\n");
        return 2;
    }
    memcpy(secret, arguments[2], SECRET_SIZE);
    alarm((unsigned)atoi(arguments[3]));
    with_shared = strcmp(arguments[4], "shared") == 0;
    begin_all(arguments[1]);
    printf("{\"port\": %u, \"process\": %ld}\n", ntohs(rdma_get_src_port(listener)), (long)getpid());
    fflush(stdout);
    while (!quitting) {
        struct pollfd waits[] = {{.fd = events->fd, .events = POLLIN}, {.fd = arrivals->fd, .events = POLLIN}};
        check("poll", poll(waits, 2, -1) > 0);
        if (waits[1].revents != 0)
            take_arrival();
        if (waits[0].revents != 0)
            take_event();
    }
    end_all();
    report("end");
    return violations != 0 || failures != 0;
}
