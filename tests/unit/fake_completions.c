/* Completion channels and completion queues of the provider without a device. As in the real libraries, destroying a
   queue waits until its events are acknowledged, and drops those that nobody has taken. */

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

struct fake_extended fake_extended;

static uint64_t last_completion;

static int poll_fails(void)
{
    return fake_failures.poll > 0 && fake_failures.poll-- > 0;
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
    fake_end("ibv_create_comp_channel", 0);
    return &made->ibv;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
    struct channel *channel = (struct channel *)ibv;
    int error = 0;

    fake_begin("ibv_destroy_comp_channel");
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
    return fake_end("ibv_destroy_comp_channel", error);
}

int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **context)
{
    struct channel *channel = (struct channel *)ibv;
    struct queue *queue = NULL;

    fake_begin("ibv_get_cq_event");
    if (fake_check("ibv_get_cq_event", channel->alive))
        queue = fake_pull(ibv->fd);
    if (queue) {
        queue->unacknowledged++;
        *cq = &queue->ibv;
        *context = queue->ibv.cq_context;
    }
    return fake_end("ibv_get_cq_event", queue ? 0 : -1);
}

void ibv_ack_cq_events(struct ibv_cq *ibv, unsigned count)
{
    struct queue *queue = (struct queue *)ibv;

    fake_begin("ibv_ack_cq_events");
    fake_check("ibv_ack_cq_events", queue->alive);
    queue->unacknowledged -= (int)count;
    fake_changed();
    fake_end("ibv_ack_cq_events", 0);
}

/* ---- completion queues ---- */

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int depth, void *own, struct ibv_comp_channel *channel,
                             int vector)
{
    struct queue *made = calloc(1, sizeof *made);

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
    fake_end("ibv_create_cq", 0);
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

    fake_begin("ibv_poll_cq");
    fake_check("ibv_start_poll", queue->alive && !queue->is_polled && !attributes->comp_mask);
    result = poll_fails() ? EINVAL : show(queue);
    queue->is_polled = !result;
    return fake_end("ibv_poll_cq", result);
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

    fake_begin("ibv_destroy_cq");
    error = fake_failure(&fake_failures.destroy_cq);
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
    return fake_end("ibv_destroy_cq", error);
}

static int poll_cq(struct ibv_cq *ibv, int count, struct ibv_wc *out)
{
    struct queue *queue = (struct queue *)ibv;
    int done = 0;

    fake_begin("ibv_poll_cq");
    if (!fake_check("ibv_poll_cq", queue->alive) || poll_fails())
        done = -1;
    for (; done >= 0 && done < count && queue->count; queue->count--)
        out[done++] = queue->entries[queue->first++ % MOST];
    return fake_end("ibv_poll_cq", done);
}

static int req_notify_cq(struct ibv_cq *ibv, int solicited)
{
    struct queue *queue = (struct queue *)ibv;
    int error;

    fake_begin("ibv_req_notify_cq");
    fake_check("ibv_req_notify_cq", queue->alive);
    error = fake_failure(&fake_failures.arm);
    if (!error) {
        if (queue->armed != 1)
            queue->armed = solicited ? 2 : 1;
        fake_counts.armed++;
    }
    return fake_end("ibv_req_notify_cq", error);
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

int fake_is_queue(struct ibv_cq *cq)
{
    return ((struct queue *)cq)->alive;
}

void fake_fill_completion_operations(struct verbs_context *verbs)
{
    verbs->context.ops.poll_cq = poll_cq;
    verbs->context.ops.req_notify_cq = req_notify_cq;
    verbs->create_cq_ex = create_cq_ex;
    verbs->query_rt_values = query_rt_values;
}
