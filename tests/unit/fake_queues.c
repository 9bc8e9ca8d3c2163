/* Completion channels, completion queues and queue pairs of the provider without a device. The test says when a posted
   request ends. Nothing else completes, except that a queue pair in the error state flushes its requests. As in the
   real libraries, destroying a queue or a queue pair waits until its events are acknowledged, and drops those that
   nobody has taken. */

#include "fake_verbs.h"

#define MOST 256

struct channel {
    struct ibv_comp_channel ibv;
    int alive;
    int write_end;
    int users;
};

struct queue {
    struct ibv_cq ibv;
    int alive;
    int armed;              /* 1: for any completion, 2: for solicited ones */
    int users;
    int unacknowledged;
    unsigned first, count;
    struct ibv_wc entries[MOST];
};

struct window {
    struct ibv_mw ibv;
    int alive;
    uint32_t key;           /* the key that the device knows */
};

struct posted {
    uint64_t id;
    int silent;
    struct window *window;  /* for a bind */
    uint32_t key;           /* the device looks for the window by this key */
    uint32_t new_key;
};

struct queue_pair {
    struct ibv_qp ibv;
    int alive;
    int unacknowledged;
    struct {
        unsigned first, count;
        struct posted requests[MOST];
    } sides[2];             /* 0: initiator, 1: receive */
};

/* The test sets these. If it is not 0, the next such call fails with this errno. */
struct fake_failures {
    int32_t poll;
    int32_t arm;
    int32_t destroy_cq;
    int32_t destroy_qp;
    int32_t modify_qp;
    int32_t create_qp;
} fake_failures;

static struct queue_pair *queue_pairs[4096];
static uint32_t queue_pair_count;
static uint32_t last_window_key = 0x1000;

static int failure(int32_t *number)
{
    int error = *number;

    *number = 0;
    return error;
}

/* ---- channels ---- */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct channel *made = calloc(1, sizeof *made);

    fake_point("ibv_create_comp_channel", 0);
    made->ibv.context = context;
    made->alive = 1;
    fake_pipe(&made->ibv.fd, &made->write_end);
    pthread_mutex_lock(&fake_lock);
    fake_counts.channels++;
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_create_comp_channel", 1);
    return &made->ibv;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
    struct channel *channel = (struct channel *)ibv;
    int error = 0;

    fake_point("ibv_destroy_comp_channel", 0);
    pthread_mutex_lock(&fake_lock);
    if (!fake_check("ibv_destroy_comp_channel", channel->alive)) {
        error = EINVAL;
    } else if (channel->users) {
        fake_fault("ibv_destroy_comp_channel", "a completion queue uses it");
        error = EBUSY;
    } else {
        channel->alive = 0;
        close(ibv->fd);
        close(channel->write_end);
        fake_counts.channels--;
    }
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_destroy_comp_channel", 1);
    return error;
}

int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **context)
{
    struct channel *channel = (struct channel *)ibv;
    struct queue *queue = NULL;

    fake_point("ibv_get_cq_event", 0);
    pthread_mutex_lock(&fake_lock);
    if (fake_check("ibv_get_cq_event", channel->alive))
        queue = fake_pull(ibv->fd);
    if (queue) {
        queue->unacknowledged++;
        *cq = &queue->ibv;
        *context = queue->ibv.cq_context;
    }
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_get_cq_event", 1);
    return queue ? 0 : -1;
}

void ibv_ack_cq_events(struct ibv_cq *ibv, unsigned count)
{
    struct queue *queue = (struct queue *)ibv;

    fake_point("ibv_ack_cq_events", 0);
    pthread_mutex_lock(&fake_lock);
    fake_check("ibv_ack_cq_events", queue->alive);
    queue->unacknowledged -= (int)count;
    fake_changed();
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_ack_cq_events", 1);
}

/* ---- completion queues ---- */

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int depth, void *own, struct ibv_comp_channel *channel, int vector)
{
    struct queue *made = calloc(1, sizeof *made);

    (void)vector;
    fake_point("ibv_create_cq", 0);
    made->ibv.context = context;
    made->ibv.channel = channel;
    made->ibv.cq_context = own;
    made->ibv.cqe = depth;
    made->alive = 1;
    pthread_mutex_lock(&fake_lock);
    if (channel)
        ((struct channel *)channel)->users++;
    fake_counts.queues++;
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_create_cq", 1);
    return &made->ibv;
}

int ibv_resize_cq(struct ibv_cq *ibv, int depth)
{
    struct queue *queue = (struct queue *)ibv;

    fake_point("ibv_resize_cq", 0);
    fake_check("ibv_resize_cq", queue->alive);
    ibv->cqe = depth;
    fake_point("ibv_resize_cq", 1);
    return 0;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
    struct queue *queue = (struct queue *)ibv;
    struct channel *channel = (struct channel *)ibv->channel;
    int error;

    fake_point("ibv_destroy_cq", 0);
    pthread_mutex_lock(&fake_lock);
    error = failure(&fake_failures.destroy_cq);
    if (!fake_check("ibv_destroy_cq", queue->alive)) {
        error = EINVAL;
    } else if (queue->users) {
        fake_fault("ibv_destroy_cq", "a queue pair uses it");
        error = EBUSY;
    } else if (!error) {
        queue->alive = 0;
        fake_counts.queues--;
        if (channel) {
            while (fake_pull(channel->ibv.fd))
                ;
            channel->users--;
        }
        fake_wait_for("ibv_destroy_cq", &queue->unacknowledged);
    }
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_destroy_cq", 1);
    return error;
}

static int poll_cq(struct ibv_cq *ibv, int count, struct ibv_wc *out)
{
    struct queue *queue = (struct queue *)ibv;
    int done = 0;

    fake_point("ibv_poll_cq", 0);
    pthread_mutex_lock(&fake_lock);
    if (!fake_check("ibv_poll_cq", queue->alive) || failure(&fake_failures.poll))
        done = -1;
    for (; done >= 0 && done < count && queue->count; queue->count--)
        out[done++] = queue->entries[queue->first++ % MOST];
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_poll_cq", 1);
    return done;
}

static int req_notify_cq(struct ibv_cq *ibv, int solicited)
{
    struct queue *queue = (struct queue *)ibv;
    int error;

    fake_point("ibv_req_notify_cq", 0);
    pthread_mutex_lock(&fake_lock);
    fake_check("ibv_req_notify_cq", queue->alive);
    error = failure(&fake_failures.arm);
    if (!error) {
        if (queue->armed != 1)
            queue->armed = solicited ? 2 : 1;
        fake_counts.armed++;
    }
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_req_notify_cq", 1);
    return error;
}

static void event(struct queue *queue)
{
    queue->armed = 0;
    if (queue->ibv.channel)
        fake_push(((struct channel *)queue->ibv.channel)->write_end, queue);
}

static void add(struct queue *queue, struct queue_pair *from, uint64_t id, enum ibv_wc_status status, uint32_t bytes)
{
    struct ibv_wc *entry;

    if (!fake_check("completion", queue->alive) || queue->count == MOST)
        return;
    entry = &queue->entries[(queue->first + queue->count++) % MOST];
    *entry = (struct ibv_wc){.wr_id = id, .status = status, .byte_len = bytes, .qp_num = from->ibv.qp_num};
    if (queue->armed == 1 || (queue->armed && status != IBV_WC_SUCCESS))
        event(queue);
}

/* The queue raises no event until it is armed again. */
void fake_disarm(struct ibv_cq *ibv)
{
    pthread_mutex_lock(&fake_lock);
    ((struct queue *)ibv)->armed = 0;
    pthread_mutex_unlock(&fake_lock);
}

/* Raise an event for a completion that was taken before. */
void fake_spurious_event(struct ibv_cq *ibv)
{
    pthread_mutex_lock(&fake_lock);
    if (((struct queue *)ibv)->alive)
        event((struct queue *)ibv);
    pthread_mutex_unlock(&fake_lock);
}

/* ---- queue pairs ---- */

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *request)
{
    struct queue_pair *made;

    fake_point("ibv_create_qp", 0);
    if (fake_failures.create_qp) {
        errno = failure(&fake_failures.create_qp);
        return NULL;
    }
    made = calloc(1, sizeof *made);
    made->ibv.context = domain->context;
    made->ibv.pd = domain;
    made->ibv.qp_context = request->qp_context;
    made->ibv.send_cq = request->send_cq;
    made->ibv.recv_cq = request->recv_cq;
    made->ibv.state = IBV_QPS_RESET;
    made->alive = 1;
    pthread_mutex_lock(&fake_lock);
    fake_check("ibv_create_qp", ((struct queue *)request->send_cq)->alive && ((struct queue *)request->recv_cq)->alive);
    made->ibv.qp_num = ++queue_pair_count;
    queue_pairs[made->ibv.qp_num % 4096] = made;
    ((struct queue *)request->send_cq)->users++;
    ((struct queue *)request->recv_cq)->users++;
    fake_counts.queue_pairs++;
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_create_qp", 1);
    return &made->ibv;
}

static struct queue *queue_of(struct queue_pair *qp, int receive)
{
    return (struct queue *)(receive ? qp->ibv.recv_cq : qp->ibv.send_cq);
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
        add(queue_of(qp, receive), qp, request.id, status, bytes);
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

    fake_point("ibv_modify_qp", 0);
    pthread_mutex_lock(&fake_lock);
    if (!fake_check("ibv_modify_qp", qp->alive)) {
        error = EINVAL;
    } else if (fake_failures.modify_qp) {
        error = failure(&fake_failures.modify_qp);
    } else if (mask & IBV_QP_STATE) {
        ibv->state = attributes->qp_state;
        if (ibv->state == IBV_QPS_ERR)
            flush(qp);
        if (ibv->state == IBV_QPS_RESET)
            qp->sides[0].count = qp->sides[1].count = 0;
    }
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_modify_qp", 1);
    return error;
}

static int post(struct queue_pair *qp, int receive, struct posted request)
{
    int error = 0;

    pthread_mutex_lock(&fake_lock);
    if (!fake_check("post", qp->alive))
        error = EINVAL;
    else if (qp->sides[receive].count == MOST)
        error = ENOMEM;
    else
        qp->sides[receive].requests[(qp->sides[receive].first + qp->sides[receive].count++) % MOST] = request;
    if (!error && qp->ibv.state == IBV_QPS_ERR)
        flush(qp);
    pthread_mutex_unlock(&fake_lock);
    return error;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct posted request = {.id = wr->wr_id, .silent = !(wr->send_flags & IBV_SEND_SIGNALED)};
    int error;

    fake_point("ibv_post_send", 0);
    if (wr->opcode == IBV_WR_BIND_MW) {
        request.window = (struct window *)wr->bind_mw.mw;
        request.key = wr->bind_mw.mw->rkey;
        request.new_key = wr->bind_mw.rkey;
    }
    error = post((struct queue_pair *)qp, 0, request);
    *bad = wr;
    fake_point("ibv_post_send", 1);
    return error;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    int error;

    fake_point("ibv_post_recv", 0);
    error = post((struct queue_pair *)qp, 1, (struct posted){.id = wr->wr_id});
    *bad = wr;
    fake_point("ibv_post_recv", 1);
    return error;
}

int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct queue_pair *qp = (struct queue_pair *)ibv;
    int error;

    fake_point("ibv_destroy_qp", 0);
    pthread_mutex_lock(&fake_lock);
    error = failure(&fake_failures.destroy_qp);
    if (!fake_check("ibv_destroy_qp", qp->alive)) {
        error = EINVAL;
    } else if (!error) {
        qp->alive = 0;
        queue_of(qp, 0)->users--;
        queue_of(qp, 1)->users--;
        fake_counts.queue_pairs--;
        fake_wait_for("ibv_destroy_qp", &qp->unacknowledged);
    }
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_destroy_qp", 1);
    return error;
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

    fake_point("ibv_get_async_event", 0);
    pthread_mutex_lock(&fake_lock);
    do
        pulled = fake_pull(context->async_fd);
    while (pulled && pulled->qp && !pulled->qp->alive);
    if (pulled) {
        *event = pulled->event;
        if (pulled->qp)
            pulled->qp->unacknowledged++;
    }
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_get_async_event", 1);
    return pulled ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    fake_point("ibv_ack_async_event", 0);
    pthread_mutex_lock(&fake_lock);
    if (event->event_type >= IBV_EVENT_QP_FATAL && event->event_type <= IBV_EVENT_PATH_MIG_ERR)
        ((struct queue_pair *)event->element.qp)->unacknowledged--;
    fake_changed();
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_ack_async_event", 1);
}

void fake_fill_operations(struct ibv_context_ops *operations)
{
    operations->poll_cq = poll_cq;
    operations->req_notify_cq = req_notify_cq;
    operations->post_send = post_send;
    operations->post_recv = post_recv;
    operations->alloc_mw = alloc_mw;
    operations->dealloc_mw = dealloc_mw;
}
