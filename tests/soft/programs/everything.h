/* A bit of everything, where any call may fail for want of memory or descriptors: a context, all kinds of objects, a
   connection made by hand and one by the connection manager, requests of every kind. What was made is closed again.

   Whatever fails has to say so: a call by its errno, a connection by an event, a request by a completion. */

#ifndef EVERYTHING_H
#define EVERYTHING_H

#include "ends.h"

#define HANG_MS    10000
#define LARGE_SIZE (200u * 1024)

struct everything {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    struct ibv_mr *mr;
    struct ibv_mw *mw;
    struct ibv_qp *pair[2], *shared;
    struct rdma_event_channel *events;
    struct rdma_cm_id *listener, *near, *far;
    int failures;   /* calls, events and completions */
    int waiting;    /* requests that must complete */
    char first[80]; /* what failed first */
};

/* A listener takes a connection when it has a descriptor. So a program without any waits, if nobody closes one. */
static int answer_ms = HANG_MS;

static char everything_memory[LARGE_SIZE] __attribute__((aligned(4096)));

static bool note(struct everything *all, bool ok, const char *what)
{
    int error = errno;

    if (ok)
        return true;
    if (all->failures++ == 0)
        snprintf(all->first, sizeof all->first, "%s: %s", what, strerror(error));
    if (error != ENOMEM && error != EMFILE && error != ENFILE && error != EAGAIN && error != ENODEV)
        FAIL("%s fails with %s", what, strerror(error));
    return false;
}

/* The call has to set errno. */
#define TRY(all, call) (errno = 0, note((all), (call), #call))
/* The call returns its error. */
#define TRY_ERROR(all, call) (errno = (call), note((all), errno == 0, #call))

static void failed(struct everything *all, const char *what, int status)
{
    if (all->failures++ == 0)
        snprintf(all->first, sizeof all->first, "%s: status %d", what, status);
}

/* The next event of the connection manager, by its type. The identifier of a request becomes all->far. */
static enum rdma_cm_event_type event_of(struct everything *all, const char *after)
{
    struct rdma_cm_event *event = next_event(all->events, answer_ms);

    if (event == NULL && answer_ms < HANG_MS) {
        failed(all, "no answer", 0);
        return RDMA_CM_EVENT_CONNECT_ERROR;
    }
    if (event == NULL)
        FAIL("no event after %s; failed first: %s", after, all->first);
    enum rdma_cm_event_type type = event->event;
    if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
        all->far = event->id;
    if (event->status != 0)
        failed(all, rdma_event_str(type), event->status);
    rdma_ack_cm_event(event);
    return type;
}

static bool request(struct everything *all, struct ibv_qp *qp, enum ibv_wr_opcode opcode, size_t size)
{
    bool posted = TRY_ERROR(all, post(qp, opcode, all->mr, 0, size, all->mr, opcode));

    all->waiting += posted;
    return posted;
}

static void bind_window(struct everything *all, struct ibv_qp *qp)
{
    struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;

    wr.bind_mw.mw = all->mw;
    wr.bind_mw.rkey = ibv_inc_rkey(all->mw->rkey);
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){all->mr, (uintptr_t)all->mr->addr, 4096, IBV_ACCESS_REMOTE_WRITE};
    all->waiting += TRY_ERROR(all, ibv_post_send(qp, &wr, &bad));
}

/* Waits for the completions of all requests. Those of receives may be among them. */
static void complete(struct everything *all, const char *after)
{
    struct ibv_wc wc;

    while (all->waiting > 0) {
        if (!completion(all->cq, &wc, HANG_MS))
            FAIL("%d requests %s do not complete; failed first: %s", all->waiting, after, all->first);
        if (wc.status != IBV_WC_SUCCESS)
            failed(all, ibv_wc_status_str(wc.status), (int)wc.status);
        all->waiting -= wc.wr_id < 100;
    }
}

static void notified(struct everything *all)
{
    struct pollfd state = {.fd = all->channel->fd, .events = POLLIN};
    struct ibv_cq *cq;
    void *context;

    if (poll(&state, 1, HANG_MS) != 1)
        FAIL("no completion event; failed first: %s", all->first);
    EXPECT(ibv_get_cq_event(all->channel, &cq, &context) == 0);
    ibv_ack_cq_events(cq, 1);
}

static bool make_objects(struct everything *all)
{
    struct ibv_srq_init_attr srq = {.attr = {.max_wr = 8, .max_sge = 1}};

    if (!TRY(all, (all->context = try_device()) != NULL) || !TRY(all, (all->pd = ibv_alloc_pd(all->context)) != NULL) ||
        !TRY(all, (all->mr = ibv_reg_mr(all->pd, everything_memory, LARGE_SIZE, RIGHTS | IBV_ACCESS_MW_BIND)) != NULL))
        return false;
    TRY(all, (all->mw = ibv_alloc_mw(all->pd, IBV_MW_TYPE_2)) != NULL);
    TRY(all, (all->srq = ibv_create_srq(all->pd, &srq)) != NULL);
    return TRY(all, (all->channel = ibv_create_comp_channel(all->context)) != NULL) &&
           TRY(all, (all->cq = ibv_create_cq(all->context, 64, NULL, all->channel, 0)) != NULL) &&
           TRY_ERROR(all, ibv_resize_cq(all->cq, 128));
}

static void shared_queue(struct everything *all)
{
    struct ibv_qp_init_attr attributes = qp_attributes(all->cq, 8);
    struct ibv_recv_wr wr = {.wr_id = 200}, *bad;

    if (all->srq == NULL)
        return;
    attributes.srq = all->srq;
    TRY(all, (all->shared = ibv_create_qp(all->pd, &attributes)) != NULL);
    TRY_ERROR(all, ibv_post_srq_recv(all->srq, &wr, &bad));
}

static void by_hand(struct everything *all)
{
    bool ready = true;

    for (int i = 0; i < 2 && ready; i++) {
        struct ibv_qp_init_attr attributes = qp_attributes(all->cq, 16);
        ready = TRY(all, (all->pair[i] = ibv_create_qp(all->pd, &attributes)) != NULL) &&
                TRY_ERROR(all, move_to_init(all->pair[i]));
    }
    for (int i = 0; i < 2 && ready; i++)
        ready = TRY_ERROR(all, move_to_rts(all->pair[i], all->pair[!i]->qp_num, 0));
    if (!ready)
        return;
    bool notifies = TRY_ERROR(all, ibv_req_notify_cq(all->cq, 0));
    TRY_ERROR(all, receive(all->pair[1], all->mr, 0, 4096, 100));
    request(all, all->pair[0], IBV_WR_SEND, 4096);
    if (all->waiting > 0 && notifies)
        notified(all);
    request(all, all->pair[0], IBV_WR_RDMA_WRITE, LARGE_SIZE);
    request(all, all->pair[1], IBV_WR_RDMA_READ, LARGE_SIZE);
    if (all->mw != NULL)
        bind_window(all, all->pair[1]);
    complete(all, "of a pair connected by hand");
}

static bool made_queue_pair(struct everything *all, struct rdma_cm_id *id)
{
    struct ibv_cq *cq = all->cq;
    struct ibv_qp_init_attr attributes = qp_attributes(cq, 8);

    /* The connection manager has a context of its own. Its queues are those of the identifier. */
    attributes.send_cq = attributes.recv_cq = NULL;
    attributes.sq_sig_all = 1;
    return TRY(all, rdma_create_qp(id, NULL, &attributes) == 0);
}

static bool is_up(struct everything *all, struct rdma_conn_param *parameters)
{
    int established = 0;
    bool accepted = false;

    /* The request comes, or the attempt fails. */
    for (;;) {
        switch (event_of(all, "rdma_connect")) {
        case RDMA_CM_EVENT_CONNECT_REQUEST:
            if (!made_queue_pair(all, all->far)) {
                TRY(all, rdma_reject(all->far, NULL, 0) == 0);
                break;
            }
            accepted = TRY(all, rdma_accept(all->far, parameters) == 0);
            break;
        case RDMA_CM_EVENT_ESTABLISHED:
            if (++established == 2)
                return true;
            break;
        case RDMA_CM_EVENT_TIMEWAIT_EXIT:
            break;
        default:
            return false;
        }
        if (all->far != NULL && !accepted && all->far->qp != NULL)
            return false;
    }
}

static void managed(struct everything *all)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct rdma_conn_param parameters = {.responder_resources = 2, .initiator_depth = 2};
    struct ibv_wc wc;

    if (!TRY(all, (all->events = rdma_create_event_channel()) != NULL) ||
        !TRY(all, rdma_create_id(all->events, &all->listener, NULL, RDMA_PS_TCP) == 0) ||
        !TRY(all, rdma_bind_addr(all->listener, (struct sockaddr *)&address) == 0) ||
        !TRY(all, rdma_listen(all->listener, 4) == 0))
        return;
    address.sin_port = rdma_get_src_port(all->listener);
    if (!TRY(all, rdma_create_id(all->events, &all->near, NULL, RDMA_PS_TCP) == 0) ||
        !TRY(all, rdma_resolve_addr(all->near, NULL, (struct sockaddr *)&address, 1000) == 0) ||
        event_of(all, "rdma_resolve_addr") != RDMA_CM_EVENT_ADDR_RESOLVED ||
        !TRY(all, rdma_resolve_route(all->near, 1000) == 0) ||
        event_of(all, "rdma_resolve_route") != RDMA_CM_EVENT_ROUTE_RESOLVED || !made_queue_pair(all, all->near) ||
        !TRY(all, rdma_connect(all->near, &parameters) == 0) || !is_up(all, &parameters))
        return;
    if (TRY_ERROR(all, post(all->near->qp, IBV_WR_RDMA_WRITE, NULL, 0, 0, NULL, 1)) &&
        !completion(all->near->send_cq, &wc, HANG_MS))
        FAIL("a write does not complete; failed first: %s", all->first);
    if (TRY(all, rdma_disconnect(all->near) == 0))
        for (int ended = 0; ended < 2; ended++)
            event_of(all, "rdma_disconnect");
}

static void close_everything(struct everything *all)
{
    struct rdma_cm_id *ids[] = {all->near, all->far, all->listener};

    for (int i = 0; i < 3; i++)
        if (ids[i] != NULL) {
            if (ids[i]->qp != NULL)
                rdma_destroy_qp(ids[i]);
            EXPECT(rdma_destroy_id(ids[i]) == 0);
        }
    if (all->events != NULL) {
        /* A request may have come that nobody has taken. */
        struct rdma_cm_event *event;
        while ((event = next_event(all->events, 0)) != NULL)
            rdma_ack_cm_event(event);
        rdma_destroy_event_channel(all->events);
    }
    EXPECT(all->shared == NULL || ibv_destroy_qp(all->shared) == 0);
    for (int i = 0; i < 2; i++)
        EXPECT(all->pair[i] == NULL || ibv_destroy_qp(all->pair[i]) == 0);
    EXPECT(all->cq == NULL || ibv_destroy_cq(all->cq) == 0);
    EXPECT(all->channel == NULL || ibv_destroy_comp_channel(all->channel) == 0);
    EXPECT(all->srq == NULL || ibv_destroy_srq(all->srq) == 0);
    EXPECT(all->mw == NULL || ibv_dealloc_mw(all->mw) == 0);
    EXPECT(all->mr == NULL || ibv_dereg_mr(all->mr) == 0);
    EXPECT(all->pd == NULL || ibv_dealloc_pd(all->pd) == 0);
    EXPECT(all->context == NULL || ibv_close_device(all->context) == 0);
}

/* Returns how much failed. `first` gets what failed first; it may be NULL. */
static int do_everything(char first[80])
{
    struct everything all = {0};

    if (make_objects(&all)) {
        shared_queue(&all);
        by_hand(&all);
    }
    managed(&all);
    close_everything(&all);
    if (first != NULL)
        memcpy(first, all.first, sizeof all.first);
    return all.failures;
}

#endif
