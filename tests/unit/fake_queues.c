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
    union {
        struct ibv_cq ibv;
        struct ibv_cq_ex extended; /* begins alike */
    };
    int alive;
    int is_polled; /* between start_poll() and end_poll() */
    int armed;     /* 1: for any completion, 2: for solicited ones */
    int users;
    int unacknowledged;
    unsigned first, count;
    struct ibv_wc entries[MOST];
    uint64_t numbers[MOST]; /* of the completions of all queues */
};

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

/* The test sets these. If it is not 0, the next such call fails with this errno. */
struct fake_failures {
    int32_t poll;
    int32_t arm;
    int32_t destroy_cq;
    int32_t destroy_qp;
    int32_t modify_qp;
    int32_t create_qp;
    int32_t complete; /* ibv_wr_complete() */
} fake_failures;

static struct queue_pair *queue_pairs[4096];
static uint32_t queue_pair_count;
static uint32_t last_window_key = 0x1000;
static uint64_t last_completion;

struct fake_extended fake_extended;

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

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int depth, void *own, struct ibv_comp_channel *channel,
                             int vector)
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

/* ---- extended completion queues ---- */

/* Whether an entry may be read, and which it is. */
static unsigned present(struct ibv_cq_ex *native, const char *call)
{
    struct queue *queue = (struct queue *)native;

    fake_check(call, queue->alive && queue->is_polled);
    return queue->first % MOST;
}

/* Show the oldest entry. Called with fake_lock. */
static int show(struct queue *queue)
{
    const struct ibv_wc *entry = &queue->entries[queue->first % MOST];

    if (!queue->count)
        return ENOENT;
    queue->extended.wr_id = entry->wr_id;
    queue->extended.status = entry->status;
    return 0;
}

static int start_poll(struct ibv_cq_ex *native, struct ibv_poll_cq_attr *attributes)
{
    struct queue *queue = (struct queue *)native;
    int result;

    fake_point("ibv_poll_cq", 0);
    pthread_mutex_lock(&fake_lock);
    fake_check("ibv_start_poll", queue->alive && !queue->is_polled && !attributes->comp_mask);
    result = failure(&fake_failures.poll) ? EINVAL : show(queue);
    queue->is_polled = !result;
    pthread_mutex_unlock(&fake_lock);
    fake_point("ibv_poll_cq", 1);
    return result;
}

static int next_poll(struct ibv_cq_ex *native)
{
    struct queue *queue = (struct queue *)native;
    int result = ENOENT;

    present(native, "ibv_next_poll");
    pthread_mutex_lock(&fake_lock);
    fake_extended.next_polls++;
    /* end_poll() lets the last one go. */
    if (queue->count > 1) {
        queue->first++;
        queue->count--;
        result = show(queue);
    }
    pthread_mutex_unlock(&fake_lock);
    return result;
}

static void end_poll(struct ibv_cq_ex *native)
{
    struct queue *queue = (struct queue *)native;

    present(native, "ibv_end_poll");
    pthread_mutex_lock(&fake_lock);
    queue->is_polled = 0;
    queue->first++;
    queue->count--;
    pthread_mutex_unlock(&fake_lock);
}

#define READER(type, name, value)                                               \
    static type read_##name(struct ibv_cq_ex *native)                           \
    {                                                                           \
        unsigned place = present(native, "ibv_wc_read_" #name);                 \
        const struct ibv_wc *entry = &((struct queue *)native)->entries[place]; \
        uint64_t number = ((struct queue *)native)->numbers[place];             \
                                                                                \
        (void)entry, (void)number;                                              \
        return value;                                                           \
    }
/* Of a failed entry only these two may be read. */
READER(uint32_t, qp_num, entry->qp_num)
READER(uint32_t, vendor_err, entry->vendor_err)
#define READER_OF_SUCCESS(type, name, value) \
    READER(type, name, (fake_check("ibv_wc_read_" #name, !entry->status), value))
READER_OF_SUCCESS(enum ibv_wc_opcode, opcode, entry->opcode)
READER_OF_SUCCESS(unsigned, wc_flags, entry->wc_flags)
READER_OF_SUCCESS(uint32_t, byte_len, entry->byte_len)
READER_OF_SUCCESS(__be32, imm_data, entry->imm_data)
READER_OF_SUCCESS(uint32_t, src_qp, entry->src_qp)
READER_OF_SUCCESS(uint32_t, slid, entry->slid)
READER_OF_SUCCESS(uint8_t, sl, entry->sl)
READER_OF_SUCCESS(uint8_t, dlid_path_bits, entry->dlid_path_bits)
READER_OF_SUCCESS(uint64_t, completion_ts, 1000 * number)
READER_OF_SUCCESS(uint64_t, completion_wallclock_ns, 1700000000000000000 + number)
READER_OF_SUCCESS(uint32_t, flow_tag, 0x10000 + (uint32_t)number)

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *request)
{
    uint64_t more = request->wc_flags & ~(uint64_t)IBV_WC_STANDARD_FLAGS;
    struct ibv_cq_ex *made;

    if (!fake_extended.queues || more & ~(uint64_t)(uint32_t)fake_extended.wc_flags) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    made = (struct ibv_cq_ex *)ibv_create_cq(context, (int)request->cqe, request->cq_context, request->channel, 0);
    fake_extended.created_with = (int32_t)more;
    fake_extended.created_flags = request->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS ? (int32_t)request->flags : 0;
    made->start_poll = start_poll;
    made->next_poll = next_poll;
    made->end_poll = end_poll;
    made->read_qp_num = read_qp_num;
    made->read_vendor_err = read_vendor_err;
    made->read_opcode = read_opcode;
    made->read_wc_flags = read_wc_flags;
    made->read_byte_len = read_byte_len;
    made->read_imm_data = read_imm_data;
    made->read_src_qp = read_src_qp;
    made->read_slid = read_slid;
    made->read_sl = read_sl;
    made->read_dlid_path_bits = read_dlid_path_bits;
    /* Those that were not asked for stay NULL. */
    if (more & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP)
        made->read_completion_ts = read_completion_ts;
    if (more & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
        made->read_completion_wallclock_ns = read_completion_wallclock_ns;
    if (more & IBV_WC_EX_WITH_FLOW_TAG)
        made->read_flow_tag = read_flow_tag;
    return made;
}

static int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
    (void)context;
    if (!fake_extended.clock_khz)
        return EOPNOTSUPP;
    values->comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    values->raw_clock = (struct timespec){.tv_nsec = (long)fake_extended.ticks};
    return 0;
}

/* ---- completion queues ---- */

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

void fake_add_completion(struct ibv_cq *cq, const struct ibv_wc *completion)
{
    struct queue *queue = (struct queue *)cq;
    unsigned place;

    if (!fake_check("completion", queue->alive) || queue->count == MOST)
        return;
    place = (queue->first + queue->count++) % MOST;
    queue->entries[place] = *completion;
    queue->numbers[place] = ++last_completion;
    if (queue->armed == 1 || (queue->armed && completion->status != IBV_WC_SUCCESS))
        event(queue);
}

void fake_use_queue(struct ibv_cq *cq, int change)
{
    if (cq)
        ((struct queue *)cq)->users += change;
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
        errno = failure(&fake_failures.create_qp);
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
    fake_check("ibv_create_qp", ((struct queue *)request->send_cq)->alive);
    if (request->qp_type == IBV_QPT_XRC_SEND)
        made->messages = calloc(MOST, sizeof *made->messages);
    if (made->messages)
        fake_check("ibv_create_qp", !request->recv_cq && !request->srq && !request->cap.max_recv_wr);
    else
        fake_check("ibv_create_qp", ((struct queue *)request->recv_cq)->alive);
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

    fake_point("ibv_modify_qp", 0);
    pthread_mutex_lock(&fake_lock);
    if (!fake_check("ibv_modify_qp", qp->alive)) {
        error = EINVAL;
    } else if (fake_failures.modify_qp) {
        error = failure(&fake_failures.modify_qp);
    } else if (!fake_takes(ibv, attributes, mask)) {
        error = EINVAL;
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

/* It knows the state only. */
int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *initial)
{
    (void)mask, (void)initial;
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
    error = failure(&fake_failures.complete);
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
    verbs->create_cq_ex = create_cq_ex;
    verbs->query_rt_values = query_rt_values;
    fake_fill_xrc_operations(verbs);
}

/* ---- the end of queue pairs ---- */

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
        fake_use_queue(ibv->send_cq, -1);
        fake_use_queue(ibv->recv_cq, -1);
        fake_counts.queue_pairs--;
        if (ibv->qp_type == IBV_QPT_XRC_RECV)
            fake_leave_domain(ibv);
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
    operations->bind_mw = bind_mw;
    operations->post_srq_recv = fake_post_srq_recv;
    operations->alloc_mw = alloc_mw;
    operations->dealloc_mw = dealloc_mw;
}
