/* Calls of verbs and of the connection manager whose small print programs rely on.

   small_calls windows|depth|domains|tails|gids|rights|timeout|service|events */

#include "ends.h"

#include <netinet/in.h>
#include <stdatomic.h>
#include <stdbool.h>

static struct ibv_context *context;
static struct ibv_pd *pd;

/* ---- Windows ---- */

static enum ibv_wc_status bind_status(struct end *end, struct ibv_mr *mr, unsigned access)
{
    struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_wc wc;

    EXPECT(window != NULL);
    wr.bind_mw.mw = window;
    wr.bind_mw.rkey = ibv_inc_rkey(window->rkey);
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){mr, (uintptr_t)mr->addr, mr->length, access};
    EXPECT(ibv_post_send(end->qp, &wr, &bad) == 0);
    EXPECT(completion(end->cq, &wc, DEADLINE_MS));
    if (wc.status == IBV_WC_SUCCESS) {
        struct ibv_send_wr invalidate = {.opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED};
        invalidate.invalidate_rkey = wr.bind_mw.rkey;
        EXPECT(ibv_post_send(end->qp, &invalidate, &bad) == 0);
        expect_success(end->cq, 1);
    }
    EXPECT(ibv_dealloc_mw(window) == 0);
    return wc.status;
}

/* Any right of a region, as real devices take it. Only the peer's rights matter. */
static void windows(void)
{
    static char memory[64];
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    struct ibv_mr *constant = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_MW_BIND);
    const unsigned taken[] = {IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
                              IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
                              IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND};
    struct end ends[2];

    EXPECT(mr != NULL && constant != NULL);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        make_by_hand(pd, ends, 4);
        if (bind_status(&ends[0], mr, taken[i]) != IBV_WC_SUCCESS)
            FAIL("a window with the rights 0x%x is refused", taken[i]);
        close_by_hand(ends);
    }
    make_by_hand(pd, ends, 4);
    EXPECT(bind_status(&ends[0], constant, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ) == IBV_WC_SUCCESS);
    EXPECT(bind_status(&ends[0], constant, IBV_ACCESS_REMOTE_ATOMIC) == IBV_WC_MW_BIND_ERR);
    close_by_hand(ends);
    EXPECT(ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(constant) == 0);
}

/* ---- Completion queues ---- */

static void depth(void)
{
    struct ibv_device_attr device;
    struct ibv_cq *cq;

    EXPECT(ibv_query_device(context, &device) == 0);
    EXPECT(device.max_cqe >= 262144);
    EXPECT((cq = ibv_create_cq(context, device.max_cqe, NULL, NULL, 0)) != NULL && cq->cqe >= device.max_cqe);
    EXPECT(ibv_resize_cq(cq, 4) == 0 && ibv_resize_cq(cq, device.max_cqe) == 0);
    EXPECT(ibv_resize_cq(cq, device.max_cqe + 1) == EINVAL);
    EXPECT(ibv_destroy_cq(cq) == 0);
    EXPECT(ibv_create_cq(context, device.max_cqe + 1, NULL, NULL, 0) == NULL && errno == EINVAL);
}

/* ---- Shared receive queues ---- */

static enum ibv_wc_status received_into(struct end *ends, struct ibv_srq *srq, struct ibv_mr *mr)
{
    struct ibv_sge element = {(uintptr_t)mr->addr, 4, mr->lkey};
    struct ibv_recv_wr *bad, wr = {.sg_list = &element, .num_sge = 1};
    struct ibv_wc wc;

    EXPECT(ibv_post_srq_recv(srq, &wr, &bad) == 0);
    EXPECT(post(ends[0].qp, IBV_WR_SEND, NULL, 0, 0, NULL, 1) == 0);
    EXPECT(completion(ends[1].cq, &wc, DEADLINE_MS));
    return wc.status;
}

static void connect_to_shared(struct end *ends, struct ibv_srq *srq)
{
    for (int i = 0; i < 2; i++) {
        EXPECT((ends[i].cq = ibv_create_cq(context, 8, NULL, NULL, 0)) != NULL);
        struct ibv_qp_init_attr attributes = qp_attributes(ends[i].cq, 4);
        attributes.srq = i == 1 ? srq : NULL;
        EXPECT((ends[i].qp = ibv_create_qp(pd, &attributes)) != NULL);
        EXPECT(move_to_init(ends[i].qp) == 0);
    }
    for (int i = 0; i < 2; i++)
        EXPECT(move_to_rts(ends[i].qp, ends[!i].qp->qp_num, 0) == 0);
}

/* The queue's domain counts for its receives, and no other. */
static void domains(void)
{
    struct ibv_pd *others = ibv_alloc_pd(context);
    struct ibv_srq_init_attr attributes = {.attr = {.max_wr = 4, .max_sge = 1}};
    struct ibv_srq *srq = ibv_create_srq(others, &attributes);
    struct ibv_mr *of_queue = buffer(others, 4096), *of_pair = buffer(pd, 4096);
    struct end ends[2];

    EXPECT(srq != NULL);
    connect_to_shared(ends, srq);
    EXPECT(received_into(ends, srq, of_queue) == IBV_WC_SUCCESS);
    EXPECT(received_into(ends, srq, of_pair) == IBV_WC_LOC_PROT_ERR);
    close_by_hand(ends);
    free_buffer(of_queue);
    free_buffer(of_pair);
    EXPECT(ibv_destroy_srq(srq) == 0 && ibv_dealloc_pd(others) == 0);
}

/* ---- Structures of newer headers ---- */

static void expect_zeros(const void *structure, size_t known, size_t size, const char *what)
{
    for (size_t i = known; i < size; i++)
        if (((const unsigned char *)structure)[i] != 0)
            FAIL("byte %zu of %s is not written", i, what);
}

/* Each is 64 bytes longer than this library's. A shorter one gets no byte more than it has. */
static void tails(void)
{
    struct verbs_context *verbs = verbs_get_ctx(context);
    struct {
        struct ibv_port_attr known;
        char more[64];
    } port;
    struct {
        struct ibv_device_attr_ex known;
        char more[64];
    } device;
    struct {
        struct ibv_gid_entry known;
        char more[64];
    } gid;
    const size_t half = offsetof(struct ibv_device_attr_ex, odp_caps);

    memset(&port, 0xAA, sizeof port);
    EXPECT(verbs->query_port(context, 1, &port.known, sizeof port) == 0);
    expect_zeros(&port, sizeof port.known, sizeof port, "a port's attributes");
    memset(&device, 0xAA, sizeof device);
    EXPECT(verbs->query_device_ex(context, NULL, &device.known, sizeof device) == 0);
    expect_zeros(&device, sizeof device.known, sizeof device, "a device's attributes");
    memset(&gid, 0xAA, sizeof gid);
    EXPECT(_ibv_query_gid_ex(context, 1, 0, &gid.known, 0, sizeof gid) == 0);
    expect_zeros(&gid, sizeof gid.known, sizeof gid, "a GID's entry");
    memset(&device, 0xAA, sizeof device);
    EXPECT(verbs->query_device_ex(context, NULL, &device.known, half) == 0);
    EXPECT(((unsigned char *)&device)[half] == 0xAA);
}

/* ---- Tables ---- */

static void gids(void)
{
    struct ibv_gid_entry entries[128];
    ssize_t count = ibv_query_gid_table(context, entries, 128, 0);

    EXPECT(count > 0);
    EXPECT(ibv_query_gid_table(context, entries, (size_t)count, 0) == count);
    memset(entries, 0xAA, sizeof entries);
    EXPECT(ibv_query_gid_table(context, entries, (size_t)count - 1, 0) == -EINVAL);
    EXPECT(ibv_query_gid_table(context, entries, 0, 0) == -EINVAL);
    EXPECT(entries[0].gid_index == 0xAAAAAAAA);
}

/* ---- Rights ---- */

static bool registers(int access)
{
    static char memory[64];
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, access);

    EXPECT(mr != NULL || errno == EINVAL);
    if (mr != NULL)
        EXPECT(ibv_dereg_mr(mr) == 0);
    return mr != NULL;
}

/* What peers may change, the owner must be able to change. */
static void rights(void)
{
    static char memory[64];
    struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, 0);

    EXPECT(!registers(IBV_ACCESS_REMOTE_ATOMIC) && !registers(IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_READ));
    EXPECT(!registers(IBV_ACCESS_REMOTE_WRITE));
    EXPECT(registers(IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_LOCAL_WRITE) && registers(IBV_ACCESS_REMOTE_READ));
    EXPECT(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_ATOMIC) ==
           IBV_REREG_MR_ERR_INPUT);
    EXPECT(ibv_dereg_mr(mr) == 0);
}

/* ---- Options of identifiers ---- */

static int told_timeout(struct rdma_cm_id *id)
{
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_RTS};
    int mask;

    EXPECT(rdma_init_qp_attr(id, &attributes, &mask) == 0 && (mask & IBV_QP_TIMEOUT) != 0);
    return attributes.timeout;
}

/* RDMA_OPTION_ID_ACK_TIMEOUT is told by the attributes, and the queue pair of the identifier has it. */
static void timeout(void)
{
    struct rdma_conn_param parameters = {.rnr_retry_count = 7};
    struct ibv_qp_init_attr initial;
    struct ibv_qp_attr attributes;
    struct manager manager;
    struct end ends[2];
    uint8_t value = 32;

    open_manager(&manager);
    ends[0].id = resolved(&manager);
    EXPECT(rdma_set_option(ends[0].id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &value, 1) != 0 && errno == EINVAL);
    value = 21;
    EXPECT(rdma_set_option(ends[0].id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &value, 2) != 0 && errno == EINVAL);
    EXPECT(rdma_set_option(ends[0].id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &value, 1) == 0);
    give_queue_pair(&ends[0], 4);
    EXPECT(rdma_connect(ends[0].id, &parameters) == 0);
    ends[1].id = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST);
    give_queue_pair(&ends[1], 4);
    EXPECT(rdma_accept(ends[1].id, &parameters) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    EXPECT(told_timeout(ends[0].id) == 21 && told_timeout(ends[1].id) == 18);
    EXPECT(ibv_query_qp(ends[0].qp, &attributes, IBV_QP_TIMEOUT, &initial) == 0 && attributes.timeout == 21);
    for (int i = 0; i < 2; i++)
        close_end(&ends[i]);
    close_manager(&manager);
}

static in_port_t port_of(const struct sockaddr_storage *address)
{
    return address->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)address)->sin6_port
                                          : ((const struct sockaddr_in *)address)->sin_port;
}

/* The service type of the TCP socket of a connection, which this process has. */
static int service_type(struct rdma_cm_id *id)
{
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_storage own, peer;
        socklen_t own_size = sizeof own, peer_size = sizeof peer;
        int value = 0;
        socklen_t size = sizeof value;
        if (getsockname(fd, (struct sockaddr *)&own, &own_size) != 0 ||
            getpeername(fd, (struct sockaddr *)&peer, &peer_size) != 0 || port_of(&own) != rdma_get_src_port(id) ||
            port_of(&peer) != rdma_get_dst_port(id))
            continue;
        bool large = own.ss_family == AF_INET6;
        EXPECT(getsockopt(fd, large ? IPPROTO_IPV6 : IPPROTO_IP, large ? IPV6_TCLASS : IP_TOS, &value, &size) == 0);
        return value;
    }
    FAIL("this process has no socket of the connection");
    return -1;
}

static int set_service_type(struct rdma_cm_id *id, uint8_t value)
{
    return rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &value, sizeof value);
}

/* What is asked of a listener is for its connections, from their first packet on. */
static void service_between(struct sockaddr *address)
{
    struct rdma_conn_param parameters = {.rnr_retry_count = 7};
    struct rdma_event_channel *events = rdma_create_event_channel();
    struct rdma_cm_id *listener;
    struct end ends[2];

    EXPECT(events != NULL && rdma_create_id(events, &listener, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_bind_addr(listener, address) == 0);
    EXPECT(set_service_type(listener, 0x20) == 0);
    EXPECT(rdma_listen(listener, 4) == 0);
    EXPECT(set_service_type(listener, 0x40) != 0 && errno == EINVAL);
    EXPECT(rdma_create_id(events, &ends[0].id, NULL, RDMA_PS_TCP) == 0);
    EXPECT(set_service_type(ends[0].id, 0xb8) == 0);
    EXPECT(rdma_resolve_addr(ends[0].id, NULL, rdma_get_local_addr(listener), DEADLINE_MS) == 0);
    expect_event(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    EXPECT(rdma_resolve_route(ends[0].id, DEADLINE_MS) == 0);
    expect_event(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    give_queue_pair(&ends[0], 4);
    EXPECT(rdma_connect(ends[0].id, &parameters) == 0);
    ends[1].id = expect_event(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    give_queue_pair(&ends[1], 4);
    EXPECT(rdma_accept(ends[1].id, &parameters) == 0);
    expect_event(events, RDMA_CM_EVENT_ESTABLISHED);
    expect_event(events, RDMA_CM_EVENT_ESTABLISHED);
    EXPECT(service_type(ends[0].id) == 0xb8);
    EXPECT(service_type(ends[1].id) == 0x20);
    for (int i = 0; i < 2; i++) {
        EXPECT(set_service_type(ends[i].id, (uint8_t)(0x48 + 4 * i)) == 0);
        EXPECT(service_type(ends[i].id) == 0x48 + 4 * i);
    }
    for (int i = 0; i < 2; i++)
        close_end(&ends[i]);
    EXPECT(rdma_destroy_id(listener) == 0);
    rdma_destroy_event_channel(events);
}

/* RDMA_OPTION_ID_TOS is that of the TCP connection. */
static void service(void)
{
    struct sockaddr_in small = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 large = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
    struct rdma_event_channel *events = rdma_create_event_channel();
    struct rdma_cm_id *id;
    uint16_t value = 0;
    int probe = socket(AF_INET6, SOCK_STREAM, 0);

    EXPECT(events != NULL && rdma_create_id(events, &id, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &value, sizeof value) != 0 && errno == EINVAL);
    EXPECT(rdma_destroy_id(id) == 0 && rdma_create_id(events, &id, NULL, RDMA_PS_UDP) == 0);
    EXPECT(set_service_type(id, 0x20) != 0 && errno == ENOSYS);
    EXPECT(rdma_destroy_id(id) == 0);
    rdma_destroy_event_channel(events);
    service_between((struct sockaddr *)&small);
    if (bind(probe, (struct sockaddr *)&large, sizeof large) == 0)
        service_between((struct sockaddr *)&large);
    close(probe);
}

/* ---- Asynchronous events ---- */

static atomic_bool destroyed;

static void *destroy(void *argument)
{
    struct ibv_async_event *event = argument;

    if (event->event_type == IBV_EVENT_CQ_ERR)
        EXPECT(ibv_destroy_cq(event->element.cq) == 0);
    else if (event->event_type == IBV_EVENT_SRQ_LIMIT_REACHED)
        EXPECT(ibv_destroy_srq(event->element.srq) == 0);
    else
        EXPECT(ibv_destroy_qp(event->element.qp) == 0);
    destroyed = true;
    return NULL;
}

/* Who has taken an event may look at its element until it acknowledges the event: man ibv_get_async_event. */
static void expect_to_wait(const struct ibv_async_event *event)
{
    pthread_t thread;

    EXPECT(pthread_create(&thread, NULL, destroy, (void *)(uintptr_t)event) == 0);
    sleep_ms(200);
    if (destroyed)
        FAIL("what event %d is about was destroyed before the event was acknowledged", event->event_type);
    ibv_ack_async_event((struct ibv_async_event *)(uintptr_t)event);
    EXPECT(pthread_join(thread, NULL) == 0);
    destroyed = false;
}

/* An event that nobody has taken goes with what it is about. */
static void expect_to_go(void)
{
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_ERR};
    struct pollfd readable = {.fd = context->async_fd, .events = POLLIN};
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);

    EXPECT(srq != NULL && cq != NULL);
    struct ibv_qp_init_attr attributes = qp_attributes(cq, 4);
    attributes.srq = srq;
    struct ibv_qp *qp = ibv_create_qp(pd, &attributes);
    EXPECT(qp != NULL && move_to_init(qp) == 0 && ibv_modify_qp(qp, &state, IBV_QP_STATE) == 0);
    EXPECT(poll(&readable, 1, DEADLINE_MS) == 1);
    EXPECT(ibv_destroy_qp(qp) == 0 && poll(&readable, 1, 0) == 0);
    EXPECT(ibv_destroy_srq(srq) == 0 && ibv_destroy_cq(cq) == 0);
}

static void events(void)
{
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 8, .max_sge = 1}};
    struct ibv_srq_attr limit = {.srq_limit = 2};
    struct ibv_recv_wr *bad, none = {.wr_id = 1};
    struct ibv_async_event taken[3];
    struct end ends[2];
    struct ibv_srq *srq = ibv_create_srq(pd, &shared);
    struct ibv_cq *small = ibv_create_cq(context, 1, NULL, NULL, 0);

    EXPECT(srq != NULL && small != NULL);
    for (int i = 0; i < 2; i++) {
        EXPECT((ends[i].cq = ibv_create_cq(context, 16, NULL, NULL, 0)) != NULL);
        struct ibv_qp_init_attr attributes = qp_attributes(ends[i].cq, 8);
        attributes.send_cq = i == 0 ? small : ends[i].cq;
        attributes.srq = i == 1 ? srq : NULL;
        EXPECT((ends[i].qp = ibv_create_qp(pd, &attributes)) != NULL && move_to_init(ends[i].qp) == 0);
    }
    for (int i = 0; i < 2; i++)
        EXPECT(move_to_rts(ends[i].qp, ends[!i].qp->qp_num, 0) == 0);
    for (int i = 0; i < 8; i++)
        EXPECT(ibv_post_srq_recv(srq, &none, &bad) == 0);
    EXPECT(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT) == 0);
    /* Their completions do not fit. */
    for (int i = 0; i < 8; i++)
        EXPECT(post(ends[0].qp, IBV_WR_SEND, NULL, 0, 0, NULL, 1) == 0);
    sleep_ms(200);
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr state = {.qp_state = IBV_QPS_ERR};
        EXPECT(ibv_modify_qp(ends[i].qp, &state, IBV_QP_STATE) == 0);
    }
    const enum ibv_event_type expected[] = {IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_SRQ_LIMIT_REACHED,
                                            IBV_EVENT_CQ_ERR};
    for (int i = 0; i < 3; i++) {
        struct pollfd readable = {.fd = context->async_fd, .events = POLLIN};
        if (poll(&readable, 1, DEADLINE_MS) != 1)
            FAIL("only %d events; the last one is %d", i, i > 0 ? (int)taken[i - 1].event_type : -1);
        EXPECT(ibv_get_async_event(context, &taken[i]) == 0);
    }
    EXPECT(ibv_destroy_qp(ends[0].qp) == 0);
    for (size_t kind = 0; kind < 3; kind++) {
        int found = 0;
        for (int i = 0; i < 3; i++)
            if (taken[i].event_type == expected[kind]) {
                expect_to_wait(&taken[i]);
                found++;
            }
        if (found != 1)
            FAIL("%d events of type %d", found, expected[kind]);
    }
    for (int i = 0; i < 2; i++)
        EXPECT(ibv_destroy_cq(ends[i].cq) == 0);
    expect_to_go();
}

int main(int count, char **words)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"windows", windows}, {"depth", depth},     {"domains", domains}, {"tails", tails},  {"gids", gids},
                 {"rights", rights},   {"timeout", timeout}, {"service", service}, {"events", events}};

    EXPECT(count == 2);
    context = open_device();
    EXPECT((pd = ibv_alloc_pd(context)) != NULL);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(words[1], parts[i].name) == 0) {
            parts[i].run();
            EXPECT(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
            printf("ok\n");
            return 0;
        }
    FAIL("there is no part %s", words[1]);
}
