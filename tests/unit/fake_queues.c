/* Queue pairs and windows of the provider without a device, and events of the device. The test says when a posted
   request ends. Nothing else completes, except that a queue pair in the error state flushes its requests. Destroying a
   queue pair waits until its events are acknowledged. */

#include "fake_verbs.h"

#define MOST 256

struct window {
    struct ibv_mw ibv;
    int alive;
    uint32_t key; /* the key that the device knows */
};

struct posted {
    uint64_t id;
    int silent;
    struct window *window; /* for a bind */
    uint32_t key;          /* the device looks for the window by this key */
    uint32_t new_key;
};

struct queue_pair {
    union {
        struct ibv_qp ibv;
        struct {
            struct ibv_qp_ex extended; /* begins alike */
            /* Newer libraries have it. */
            void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t token, uint64_t address, size_t length, uint8_t kinds,
                             uint8_t level);
        };
    };
    uint64_t operations; /* those of IBV_QP_EX_WITH_… that it was created with */
    int is_posting;      /* between wr_start() and wr_complete() */
    struct posted prepared;
    int alive;
    int unacknowledged;
    struct {
        unsigned first, count;
        struct posted requests[MOST];
    } sides[2];                    /* 0: initiator, 1: receive */
    struct fake_message *messages; /* those of the initiator's requests, of a sender of XRC */
};

struct fake_failures fake_failures;

static struct queue_pair *queue_pairs[4096];
static uint32_t queue_pair_count;
static uint32_t last_window_key = 0x1000;

/* ---- queue pairs ---- */

static void add_queue_pair(struct queue_pair *made)
{
    pthread_mutex_lock(&fake_lock);
    made->ibv.state = IBV_QPS_RESET;
    made->alive = 1;
    made->ibv.qp_num = ++queue_pair_count;
    queue_pairs[made->ibv.qp_num % 4096] = made;
    fake_use_queue(made->ibv.send_cq, 1);
    fake_use_queue(made->ibv.recv_cq, 1);
    fake_counts.queue_pairs++;
    pthread_mutex_unlock(&fake_lock);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *request)
{
    struct queue_pair *made;

    fake_point("ibv_create_qp", 0);
    if (fake_failures.create_qp) {
        errno = fake_failure(&fake_failures.create_qp);
        return NULL;
    }
    if (fake_is_unconnected() && request->qp_type != IBV_QPT_UD) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    made = calloc(1, sizeof *made);
    made->ibv.context = domain->context;
    made->ibv.pd = domain;
    made->ibv.qp_context = request->qp_context;
    made->ibv.send_cq = request->send_cq;
    made->ibv.recv_cq = request->recv_cq;
    made->ibv.qp_type = request->qp_type;
    fake_check("ibv_create_qp", fake_is_queue(request->send_cq));
    if (request->qp_type == IBV_QPT_XRC_SEND)
        made->messages = calloc(MOST, sizeof *made->messages);
    if (made->messages)
        fake_check("ibv_create_qp", !request->recv_cq && !request->srq && !request->cap.max_recv_wr);
    else
        fake_check("ibv_create_qp", fake_is_queue(request->recv_cq));
    add_queue_pair(made);
    fake_point("ibv_create_qp", 1);
    return &made->ibv;
}

struct ibv_qp *fake_create_receiver(struct ibv_context *context, void *own)
{
    struct queue_pair *made = calloc(1, sizeof *made);

    made->ibv.context = context;
    made->ibv.qp_context = own;
    made->ibv.qp_type = IBV_QPT_XRC_RECV;
    add_queue_pair(made);
    return &made->ibv;
}

static void add(struct queue_pair *from, int receive, uint64_t id, enum ibv_wc_status status, uint32_t bytes)
{
    struct ibv_wc completion = {
        .wr_id = id,
        .status = status,
        .opcode = receive ? IBV_WC_RECV : IBV_WC_SEND,
        .byte_len = bytes,
        .qp_num = from->ibv.qp_num,
    };

    fake_add_completion(receive ? from->ibv.recv_cq : from->ibv.send_cq, &completion);
}

/* End the oldest request of one side. */
static int end_one(struct queue_pair *qp, int receive, enum ibv_wc_status status, uint32_t bytes)
{
    struct posted request;

    if (!qp->sides[receive].count)
        return 0;
    qp->sides[receive].count--;
    request = qp->sides[receive].requests[qp->sides[receive].first++ % MOST];
    if (request.window && status == IBV_WC_SUCCESS) {
        /* A device finds a window by its key. */
        if (request.key == request.window->key)
            request.window->key = request.new_key;
        else
            status = IBV_WC_MW_BIND_ERR;
    }
    if (!request.silent || status != IBV_WC_SUCCESS)
        add(qp, receive, request.id, status, bytes);
    return 1;
}

static void flush(struct queue_pair *qp)
{
    for (int side = 0; side < 2; side++)
        while (end_one(qp, side, IBV_WC_WR_FLUSH_ERR, 0))
            ;
}

int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attributes, int mask)
{
    struct queue_pair *qp = (struct queue_pair *)ibv;
    int error = 0;

    fake_begin("ibv_modify_qp");
    if (!fake_check("ibv_modify_qp", qp->alive)) {
        error = EINVAL;
    } else if (fake_failures.modify_qp) {
        error = fake_failure(&fake_failures.modify_qp);
    } else if (!fake_takes(ibv, attributes, mask)) {
        error = EINVAL;
    } else if (mask & IBV_QP_STATE) {
        ibv->state = attributes->qp_state;
        if (ibv->state == IBV_QPS_ERR)
            flush(qp);
        if (ibv->state == IBV_QPS_RESET)
            qp->sides[0].count = qp->sides[1].count = 0;
    }
    return fake_end("ibv_modify_qp", error);
}

/* It knows the state only. */
int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *initial)
{
    fake_check("ibv_query_qp", ((struct queue_pair *)ibv)->alive);
    attributes->qp_state = ibv->state;
    return 0;
}

static int post(struct queue_pair *qp, int receive, struct posted request, const struct fake_message *message)
{
    unsigned place = 0;
    int error = 0;

    pthread_mutex_lock(&fake_lock);
    if (!fake_check("post", qp->alive))
        error = EINVAL;
    else if (qp->sides[receive].count == MOST)
        error = ENOMEM;
    else
        place = (qp->sides[receive].first + qp->sides[receive].count++) % MOST;
    if (!error)
        qp->sides[receive].requests[place] = request;
    if (!error && message)
        qp->messages[place] = *message;
    if (!error && qp->ibv.state == IBV_QPS_ERR)
        flush(qp);
    pthread_mutex_unlock(&fake_lock);
    return error;
}

static int post_one(struct ibv_qp *qp, const struct ibv_send_wr *wr)
{
    struct posted request = {.id = wr->wr_id, .silent = !(wr->send_flags & IBV_SEND_SIGNALED)};

    if (wr->opcode == IBV_WR_BIND_MW) {
        request.window = (struct window *)wr->bind_mw.mw;
        request.key = wr->bind_mw.mw->rkey;
        request.new_key = wr->bind_mw.rkey;
    }
    if (qp->qp_type == IBV_QPT_XRC_SEND) {
        struct fake_message message = fake_message(wr);

        return post((struct queue_pair *)qp, 0, request, &message);
    }
    return post((struct queue_pair *)qp, 0, request, NULL);
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    int error = 0;

    fake_point("ibv_post_send", 0);
    for (; wr && !error; wr = error ? wr : wr->next) {
        error = post_one(qp, wr);
        *bad = wr;
    }
    fake_point("ibv_post_send", 1);
    return error;
}

/* For windows of type 1. A device that knows the window by its former key takes the new one. */
static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    struct posted request = {.id = bind->wr_id, .silent = !(bind->send_flags & IBV_SEND_SIGNALED)};
    int error;

    fake_point("ibv_bind_mw", 0);
    fake_extended.bound_length = (int32_t)bind->bind_info.length;
    fake_extended.bound_access = (int32_t)bind->bind_info.mw_access_flags;
    request.window = (struct window *)mw;
    request.key = mw->rkey;
    request.new_key = ibv_inc_rkey(mw->rkey);
    error = post((struct queue_pair *)qp, 0, request, NULL);
    if (!error)
        mw->rkey = request.new_key;
    fake_point("ibv_bind_mw", 1);
    return error;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    int error;

    fake_point("ibv_post_recv", 0);
    for (error = 0; wr && !error; wr = error ? wr : wr->next) {
        error = post((struct queue_pair *)qp, 1, (struct posted){.id = wr->wr_id}, NULL);
        *bad = wr;
    }
    fake_point("ibv_post_recv", 1);
    return error;
}

/* ---- queue pairs for operations that ibv_post_send() does not have ---- */

#define WITH_FLUSH        0x800u
#define WITH_ATOMIC_WRITE 0x1000u

static void wr_start(struct ibv_qp_ex *native)
{
    struct queue_pair *qp = (struct queue_pair *)native;

    fake_point("ibv_post_send", 0);
    fake_check("ibv_wr_start", qp->alive && !qp->is_posting);
    qp->is_posting = 1;
}

static void prepare(struct ibv_qp_ex *native, const char *call, uint64_t operation, uint32_t token, uint64_t address)
{
    struct queue_pair *qp = (struct queue_pair *)native;

    fake_check(call, qp->alive && qp->is_posting && qp->operations & operation);
    qp->prepared = (struct posted){.id = native->wr_id, .silent = !(native->wr_flags & IBV_SEND_SIGNALED)};
    fake_extended.posted_address = address;
    fake_extended.posted_token = (int32_t)token;
    fake_extended.posted_flags = (int32_t)native->wr_flags;
}

static void wr_atomic_write(struct ibv_qp_ex *native, uint32_t token, uint64_t address, const void *value)
{
    prepare(native, "ibv_wr_atomic_write", WITH_ATOMIC_WRITE, token, address);
    memcpy(&fake_extended.posted_value, value, 8);
}

static void wr_flush(struct ibv_qp_ex *native, uint32_t token, uint64_t address, size_t length, uint8_t kinds,
                     uint8_t level)
{
    prepare(native, "ibv_wr_flush", WITH_FLUSH, token, address);
    fake_extended.posted_value = length;
    fake_extended.posted_kinds = kinds;
    fake_extended.posted_level = level;
}

static int wr_complete(struct ibv_qp_ex *native)
{
    struct queue_pair *qp = (struct queue_pair *)native;
    int error;

    fake_check("ibv_wr_complete", qp->alive && qp->is_posting);
    qp->is_posting = 0;
    error = fake_failure(&fake_failures.complete);
    if (!error)
        error = post(qp, 0, qp->prepared, NULL);
    fake_point("ibv_post_send", 1);
    return error;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
    return ((struct queue_pair *)qp)->operations ? (struct ibv_qp_ex *)qp : NULL;
}

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *request)
{
    struct ibv_qp_init_attr plain = {
        .qp_context = request->qp_context,
        .send_cq = request->send_cq,
        .recv_cq = request->recv_cq,
        .cap = request->cap,
        .qp_type = request->qp_type,
    };
    struct queue_pair *made;

    if (request->qp_type == IBV_QPT_XRC_RECV)
        return fake_create_in_domain(context, request);
    if (request->comp_mask != (IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) ||
        request->send_ops_flags & ~(uint64_t)(uint32_t)fake_extended.operations) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    made = (struct queue_pair *)ibv_create_qp(request->pd, &plain);
    if (!made)
        return NULL;
    request->cap = plain.cap;
    made->operations = fake_extended.created_for = request->send_ops_flags;
    made->extended.wr_start = wr_start;
    made->extended.wr_complete = wr_complete;
    made->extended.wr_atomic_write = wr_atomic_write;
    made->wr_flush = wr_flush;
    return &made->ibv;
}

void fake_fill_extended_operations(struct verbs_context *verbs)
{
    verbs->create_qp_ex = create_qp_ex;
    fake_fill_xrc_operations(verbs);
}

/* ---- the end of queue pairs ---- */

int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct queue_pair *qp = (struct queue_pair *)ibv;
    int error;

    fake_begin("ibv_destroy_qp");
    error = fake_failure(&fake_failures.destroy_qp);
    if (!fake_check("ibv_destroy_qp", qp->alive)) {
        error = EINVAL;
    } else if (!error) {
        qp->alive = 0;
        fake_use_queue(ibv->send_cq, -1);
        fake_use_queue(ibv->recv_cq, -1);
        fake_counts.queue_pairs--;
        if (ibv->qp_type == IBV_QPT_XRC_RECV)
            fake_leave_domain(ibv);
        fake_wait_for("ibv_destroy_qp", &qp->unacknowledged);
    }
    return fake_end("ibv_destroy_qp", error);
}

/* End the oldest posted request of one side of a queue pair. Returns 0 if there is none. */
int fake_complete(uint32_t number, int receive, int status, uint32_t bytes)
{
    struct queue_pair *qp = queue_pairs[number % 4096];
    int done;

    pthread_mutex_lock(&fake_lock);
    done = qp->alive && end_one(qp, receive, (enum ibv_wc_status)status, bytes);
    pthread_mutex_unlock(&fake_lock);
    return done;
}

/* Carries the oldest message of a sender to the receiver with this number. Returns 0 if there is none, or nothing
 * receives it. */
int fake_deliver(uint32_t sender, uint32_t receiver)
{
    struct queue_pair *qp = queue_pairs[sender % 4096];
    int done;

    pthread_mutex_lock(&fake_lock);
    done = qp->alive && qp->sides[0].count && queue_pairs[receiver % 4096]->alive &&
           fake_arrives(&queue_pairs[receiver % 4096]->ibv, &qp->messages[qp->sides[0].first % MOST]) &&
           end_one(qp, 0, IBV_WC_SUCCESS, 0);
    pthread_mutex_unlock(&fake_lock);
    return done;
}

/* ---- windows ---- */

static struct ibv_mw *alloc_mw(struct ibv_pd *domain, enum ibv_mw_type type)
{
    struct window *made = calloc(1, sizeof *made);

    made->ibv.context = domain->context;
    made->ibv.pd = domain;
    made->ibv.type = type;
    made->ibv.rkey = made->key = last_window_key += 0x100;
    made->alive = 1;
    fake_counts.windows++;
    return &made->ibv;
}

static int dealloc_mw(struct ibv_mw *ibv)
{
    struct window *window = (struct window *)ibv;

    if (!fake_check("ibv_dealloc_mw", window->alive))
        return EINVAL;
    window->alive = 0;
    fake_counts.windows--;
    return 0;
}

/* ---- events of the device ---- */

struct pushed {
    struct ibv_async_event event;
    struct queue_pair *qp;
};

/* number: the queue pair concerned, or 0 for an event of the device or its port. */
void fake_async_event(struct ibv_context *context, int type, uint32_t number)
{
    struct pushed *made = calloc(1, sizeof *made);

    made->event.event_type = (enum ibv_event_type)type;
    if (number) {
        made->qp = queue_pairs[number % 4096];
        made->event.element.qp = &made->qp->ibv;
    } else {
        made->event.element.port_num = 1;
    }
    fake_push(fake_async_end(context), made);
}

void fake_overrun_event(struct ibv_cq *cq)
{
    struct pushed *made = calloc(1, sizeof *made);

    made->event.event_type = IBV_EVENT_CQ_ERR;
    made->event.element.cq = cq;
    fake_push(fake_async_end(cq->context), made);
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    struct pushed *pulled;

    fake_begin("ibv_get_async_event");
    do
        pulled = fake_pull(context->async_fd);
    while (pulled && pulled->qp && !pulled->qp->alive);
    if (pulled) {
        *event = pulled->event;
        if (pulled->qp)
            pulled->qp->unacknowledged++;
    }
    return fake_end("ibv_get_async_event", pulled ? 0 : -1);
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    fake_begin("ibv_ack_async_event");
    if (event->event_type >= IBV_EVENT_QP_FATAL && event->event_type <= IBV_EVENT_PATH_MIG_ERR)
        ((struct queue_pair *)event->element.qp)->unacknowledged--;
    fake_changed();
    fake_end("ibv_ack_async_event", 0);
}

void fake_fill_operations(struct ibv_context_ops *operations)
{
    operations->post_send = post_send;
    operations->post_recv = post_recv;
    operations->bind_mw = bind_mw;
    operations->post_srq_recv = fake_post_srq_recv;
    operations->alloc_mw = alloc_mw;
    operations->dealloc_mw = dealloc_mw;
}
