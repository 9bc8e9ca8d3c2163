/* A listener for the hostile peers. Everybody may connect. It reports what was done to its memory.
 *
 *   hostile_target ADDRESS SECRET SECONDS own|shared
 *
 * It is to softverbs what tests/softnd/programs/hostile_target.c is to softnd. That file says what is granted, what the
 * messages mean, and what is printed.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
size_t __sanitizer_get_current_allocated_bytes(void); /* gcc has no header for it */
#endif

#define SLOTS        6
#define RECEIVES     16
#define RECEIVE_SIZE 64
#define SENDS        8
#define SEND_SIZE    64
#define REQUESTS     1024 /* connections that wait for a slot */

#define SECRET_SIZE   8
#define SLOT_SIZE     0x10000u
#define OPEN_AT       0x1000u /* the region for everybody */
#define OPEN_SIZE     0x1000u
#define HIDDEN_AT     0x3000u /* the region behind the windows */
#define HIDDEN_SIZE   0x2000u
#define WRITABLE_AT   (HIDDEN_AT + 0x400)
#define READABLE_AT   (HIDDEN_AT + 0x1000)
#define WINDOW_SIZE   0x200u
#define RECEIVE_AT    0x8000u /* at multiples of 2 * RECEIVE_SIZE */
#define RECEIVE_STEP  (2u * RECEIVE_SIZE)
#define SEND_AT       0xC000u
#define READABLE_FILL 'r'

#define REMOTE (IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)

struct slot {
    unsigned number;
    struct rdma_cm_id *id; /* NULL: free */
    struct ibv_mw *writable, *readable;
    bool writable_bound;
    struct ibv_mr *open, *hidden, *messages;
    unsigned sends;
    unsigned char *memory;
};

static struct slot slots[SLOTS];
static struct rdma_event_channel *events;
static struct rdma_cm_id *listener;
static struct ibv_context *context;
static struct ibv_pd *domain;
static struct ibv_comp_channel *arrivals;
static struct ibv_cq *cq;
static struct ibv_srq *shared; /* NULL: not used */
static struct rdma_cm_id *requests[REQUESTS];
static unsigned first_request, request_count;
static char secret[SECRET_SIZE + 1];
static unsigned long long connections, refused, violations, messages, failures;
static bool quitting;

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

static void report(const char *event)
{
    int next = dup(0); /* the lowest free number */

    close(next);
    printf("{\"event\": \"%s\", \"connections\": %llu, \"refused\": %llu, \"violations\": %llu, \"messages\": %llu, "
           "\"failures\": %llu, \"next_handle\": %d, \"resident\": %llu}\n",
           event, connections, refused, violations, messages, failures, next, memory_used());
    fflush(stdout);
}

/* The bytes that may have changed: the open region, the window to write, the receive buffers. */
static bool may_change(unsigned at)
{
    if (at >= OPEN_AT && at < OPEN_AT + OPEN_SIZE)
        return true;
    if (at >= WRITABLE_AT && at < WRITABLE_AT + WINDOW_SIZE)
        return true;
    if (at >= RECEIVE_AT && at < RECEIVE_AT + RECEIVES * RECEIVE_STEP)
        return (at - RECEIVE_AT) % RECEIVE_STEP < RECEIVE_SIZE;
    return at >= SEND_AT && at < SEND_AT + SENDS * SEND_SIZE;
}

static unsigned char expected_at(unsigned at)
{
    if (at >= READABLE_AT && at < READABLE_AT + WINDOW_SIZE)
        return READABLE_FILL;
    return (unsigned char)secret[at % SECRET_SIZE];
}

static void fill(struct slot *slot)
{
    for (unsigned at = 0; at < SLOT_SIZE; at++)
        slot->memory[at] = may_change(at) ? 0 : expected_at(at);
}

static void check_memory(struct slot *slot)
{
    unsigned bad = 0, first = 0;

    for (unsigned at = 0; at < SLOT_SIZE; at++)
        if (slot->memory[at] != expected_at(at) && !may_change(at) && !bad++)
            first = at;
    if (bad == 0)
        return;
    violations++;
    printf("{\"event\": \"violation\", \"slot\": %u, \"first\": %u, \"bytes\": %u}\n", slot->number, first, bad);
    fflush(stdout);
    fill(slot);
}

/* ---- Requests ---- */

static bool post_receive(struct slot *slot, unsigned number)
{
    unsigned char *place = slot->memory + RECEIVE_AT + number * RECEIVE_STEP;
    struct ibv_sge sge = {(uintptr_t)place, RECEIVE_SIZE, slot->messages->lkey};
    struct ibv_recv_wr wr = {.wr_id = (uintptr_t)place, .sg_list = &sge, .num_sge = 1}, *bad;

    if (shared != NULL)
        return ibv_post_srq_recv(shared, &wr, &bad) == 0;
    return ibv_post_recv(slot->id->qp, &wr, &bad) == 0;
}

/* Returns a receive that has ended, in whatever way, to the shared queue. */
static void post_again(uintptr_t buffer)
{
    for (unsigned i = 0; i < SLOTS; i++) {
        uintptr_t at = buffer - (uintptr_t)slots[i].memory;
        if (at < SLOT_SIZE)
            check("ibv_post_srq_recv", post_receive(&slots[i], (unsigned)(at - RECEIVE_AT) / RECEIVE_STEP));
    }
}

/* Drops a message if there is no room for it: peers that do not take their messages have no claim to more. */
static void send_message(struct slot *slot, const void *data, uint32_t size)
{
    unsigned char *place = slot->memory + SEND_AT + slot->sends++ % SENDS * SEND_SIZE;
    struct ibv_sge sge = {(uintptr_t)place, size, slot->messages->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

    memcpy(place, data, size);
    (void)!ibv_post_send(slot->id->qp, &wr, &bad);
}

/* False: the peer is gone. */
static bool bind_window(struct slot *slot, struct ibv_mw *mw, unsigned at, unsigned access)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW}, *bad;

    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    wr.bind_mw.bind_info.mr = slot->hidden;
    wr.bind_mw.bind_info.addr = (uintptr_t)slot->memory + at;
    wr.bind_mw.bind_info.length = WINDOW_SIZE;
    wr.bind_mw.bind_info.mw_access_flags = access;
    if (ibv_post_send(slot->id->qp, &wr, &bad) != 0)
        return false;
    mw->rkey = wr.bind_mw.rkey;
    return true;
}

static void offer(struct slot *slot)
{
    struct {
        uint64_t open, writable, readable;
        uint32_t open_token, writable_token, readable_token;
    } grant;
    uintptr_t memory = (uintptr_t)slot->memory;

    slot->writable = ibv_alloc_mw(domain, IBV_MW_TYPE_2);
    slot->readable = ibv_alloc_mw(domain, IBV_MW_TYPE_2);
    check("ibv_alloc_mw", slot->writable != NULL && slot->readable != NULL);
    if (!bind_window(slot, slot->writable, WRITABLE_AT, IBV_ACCESS_REMOTE_WRITE))
        return;
    slot->writable_bound = true;
    if (!bind_window(slot, slot->readable, READABLE_AT, IBV_ACCESS_REMOTE_READ))
        return;
    grant.open = memory + OPEN_AT;
    grant.writable = memory + WRITABLE_AT;
    grant.readable = memory + READABLE_AT;
    grant.open_token = htonl(slot->open->rkey);
    grant.writable_token = htonl(slot->writable->rkey);
    grant.readable_token = htonl(slot->readable->rkey);
    send_message(slot, &grant, sizeof grant - 4);
}

static void invalidate(struct slot *slot)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_LOCAL_INV}, *bad;

    wr.invalidate_rkey = slot->writable->rkey;
    (void)!ibv_post_send(slot->id->qp, &wr, &bad);
}

static bool is_command(const char *message, uint32_t size, const char *word)
{
    size_t length = strlen(word);

    return size == length + SECRET_SIZE && memcmp(message, word, length) == 0 &&
           memcmp(message + length, secret, SECRET_SIZE) == 0;
}

static void received(struct slot *slot, const char *message, uint32_t size)
{
    messages++;
    if (size > RECEIVE_SIZE) {
        failures++;
        return;
    }
    if (size == 10 && memcmp(message, "invalidate", 10) == 0 && slot->writable_bound) {
        slot->writable_bound = false;
        invalidate(slot);
        send_message(slot, "invalidated", 11);
    } else if (size >= 4 && memcmp(message, "echo", 4) == 0) {
        send_message(slot, message, size);
    } else if (is_command(message, size, "report ")) {
        report("report");
    } else if (is_command(message, size, "quit ")) {
        quitting = true;
    }
}

static void take_completions(void)
{
    struct ibv_wc done[32];
    int count;

    while ((count = ibv_poll_cq(cq, 32, done)) > 0)
        for (int i = 0; i < count; i++) {
            struct slot *slot = NULL;
            for (unsigned at = 0; at < SLOTS; at++)
                if (slots[at].id != NULL && slots[at].id->qp->qp_num == done[i].qp_num)
                    slot = &slots[at];
            /* The opcode of a request that has failed says nothing. All sends are silent, and have the number 0. */
            if (done[i].wr_id == 0)
                continue;
            if (slot != NULL && done[i].status == IBV_WC_SUCCESS) {
                const char *message = (const char *)(uintptr_t)done[i].wr_id;
                received(slot, message, done[i].byte_len);
                if (shared == NULL)
                    post_receive(slot,
                                 (unsigned)((const unsigned char *)message - slot->memory - RECEIVE_AT) / RECEIVE_STEP);
            }
            if (shared != NULL)
                post_again((uintptr_t)done[i].wr_id);
        }
    check("ibv_poll_cq", count == 0);
}

/* ---- Connections ---- */

static void begin(struct slot *slot, struct rdma_cm_id *id);

static void close_connection(struct slot *slot)
{
    struct rdma_cm_id *id = slot->id;

    /* Whatever is in the queue goes with the queue pair. */
    take_completions();
    slot->id = NULL;
    rdma_destroy_qp(id);
    if (slot->writable != NULL)
        check("ibv_dealloc_mw", ibv_dealloc_mw(slot->writable) == 0 && ibv_dealloc_mw(slot->readable) == 0);
    slot->writable = slot->readable = NULL;
    check("rdma_destroy_id", rdma_destroy_id(id) == 0);
    check_memory(slot);
    while (!quitting && slot->id == NULL && request_count > 0) {
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

    slot->id = id;
    slot->writable_bound = false;
    id->context = slot;
    check("rdma_create_qp", rdma_create_qp(id, domain, &attributes) == 0);
    for (unsigned i = 0; shared == NULL && i < RECEIVES; i++)
        check("ibv_post_recv", post_receive(slot, i));
    if (rdma_accept(id, &parameters) != 0) {
        refused++;
        slot->id = NULL;
        rdma_destroy_qp(id);
        check("rdma_destroy_id", rdma_destroy_id(id) == 0);
    }
}

static void requested(struct rdma_cm_id *id)
{
    for (unsigned i = 0; i < SLOTS; i++)
        if (slots[i].id == NULL) {
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
    slot->open = register_memory(slot->memory + OPEN_AT, OPEN_SIZE, IBV_ACCESS_LOCAL_WRITE | REMOTE);
    slot->hidden = register_memory(slot->memory + HIDDEN_AT, HIDDEN_SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    slot->messages = register_memory(slot->memory + RECEIVE_AT, SLOT_SIZE - RECEIVE_AT, IBV_ACCESS_LOCAL_WRITE);
}

static void close_slot(struct slot *slot)
{
    if (slot->id != NULL)
        close_connection(slot);
    check("ibv_dereg_mr",
          ibv_dereg_mr(slot->open) == 0 && ibv_dereg_mr(slot->hidden) == 0 && ibv_dereg_mr(slot->messages) == 0);
    check_memory(slot);
    munmap(slot->memory, SLOT_SIZE);
}

static void do_not_block(int handle)
{
    check("fcntl", fcntl(handle, F_SETFL, fcntl(handle, F_GETFL) | O_NONBLOCK) == 0);
}

static void begin_all(const char *address, bool with_shared)
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
    for (unsigned i = 0; shared != NULL && i < SLOTS * RECEIVES; i++)
        check("ibv_post_srq_recv", post_receive(&slots[i / RECEIVES], i % RECEIVES));
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
    if (shared != NULL)
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
    begin_all(arguments[1], strcmp(arguments[4], "shared") == 0);
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
