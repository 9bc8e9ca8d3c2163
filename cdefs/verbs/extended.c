/* What is created by verbs' extended calls.

   Extended completion queues, by ibv_create_cq_ex(3), are polled entry by entry. Their completions bring details. A
   plain queue has nothing to do with this file, and its polls cost no more because of it.

   Queue pairs for operations that ibv_post_send(3) does not have are created by ibv_create_qp_ex(3). All other requests
   are posted to them as to any queue pair. */

#include <fcntl.h>
#include <time.h>

struct ibv_cq *ndpy_create_extended_queue(struct ibv_context *context, uint32_t depth, void *own,
                                          struct ibv_comp_channel *channel, uint32_t details, int single_threaded)
{
    struct ibv_cq_init_attr_ex request = {
        .cqe = depth,
        .cq_context = own,
        .channel = channel,
        .wc_flags = IBV_WC_STANDARD_FLAGS,
    };
    struct ibv_cq_ex *made;

    if (details & NDPY_TIMESTAMP)
        request.wc_flags |= IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
    if (details & NDPY_WALL_CLOCK)
        request.wc_flags |= IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    if (details & NDPY_FLOW_TAG)
        request.wc_flags |= IBV_WC_EX_WITH_FLOW_TAG;
    if (single_threaded) {
        request.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
        request.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    }
    made = ibv_create_cq_ex(context, &request);
    return made ? ibv_cq_ex_to_cq(made) : NULL;
}

struct ndpy_completion_queue *ndpy_extended_queue_new(struct ibv_cq *native, uint32_t details, int polls_singly)
{
    struct ndpy_completion_queue *cq = ndpy_completion_queue_new(native);

    if (cq) {
        cq->is_extended = 1;
        cq->details = details;
        cq->polls_singly = polls_singly;
    }
    return cq;
}

static void read_receive(struct ibv_cq_ex *native, struct ibv_wc *wc)
{
    wc->byte_len = ibv_wc_read_byte_len(native);
    wc->src_qp = ibv_wc_read_src_qp(native);
    wc->slid = (uint16_t)ibv_wc_read_slid(native);
    wc->sl = ibv_wc_read_sl(native);
    wc->dlid_path_bits = ibv_wc_read_dlid_path_bits(native);
    /* Immediate data or an invalidated token. See native_received(). */
    if (wc->wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV | IBV_WC_IP_CSUM_OK))
        wc->imm_data = ibv_wc_read_imm_data(native);
}

/* Reads the provider's present entry. One that failed has little that may be read. */
static void read_entry(struct ibv_cq_ex *native, struct ibv_wc *wc)
{
    *wc = (struct ibv_wc){.wr_id = native->wr_id, .status = native->status, .qp_num = ibv_wc_read_qp_num(native)};
    if (wc->status != IBV_WC_SUCCESS) {
        wc->vendor_err = ibv_wc_read_vendor_err(native);
        return;
    }
    wc->opcode = ibv_wc_read_opcode(native);
    wc->wc_flags = ibv_wc_read_wc_flags(native);
    if (wc->opcode & IBV_WC_RECV)
        read_receive(native, wc);
}

/* Adds the details of the provider's present entry to its completion. They are missing if memory is short. */
static void add_details(struct ibv_cq_ex *native, uint32_t kinds, struct ndpy_completion *out)
{
    struct ndpy_details *details;

    if (!kinds || out->status != NDPY_SUCCESS || out->flags & NDPY_INTERNAL)
        return;
    if (out->flags & NDPY_DETAILED) {
        details = (struct ndpy_details *)(uintptr_t)out->context;
    } else {
        details = calloc(1, sizeof *details);
        if (!details)
            return;
        details->context = out->context;
        out->context = (uintptr_t)details;
        out->flags |= NDPY_DETAILED;
    }
    if (kinds & NDPY_TIMESTAMP)
        details->timestamp = ibv_wc_read_completion_ts(native);
    if (kinds & NDPY_WALL_CLOCK)
        details->wall_clock = ibv_wc_read_completion_wallclock_ns(native);
    if (kinds & NDPY_FLOW_TAG)
        details->flow_tag = ibv_wc_read_flow_tag(native);
    details->kinds |= (uint8_t)kinds;
}

/* Takes up to `count` completions from the provider. Returns how many, or minus an errno. */
static int take_extended(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count)
{
    struct ibv_cq_ex *native = cq->native;
    struct ibv_poll_cq_attr attributes = {0};
    uint32_t done = 0;

    do {
        int error = ibv_start_poll(native, &attributes);

        if (error)
            return error == ENOENT || done ? (int)done : -EIO;
        do {
            struct native_result result;

            read_entry(native, &result.wc);
            translate(&verbs, &result, &out[done]);
            add_details(native, cq->details, &out[done]);
        } while (++done < count && !cq->polls_singly && !ibv_next_poll(native));
        ibv_end_poll(native);
    } while (cq->polls_singly && done < count);
    return (int)done;
}

static int poll_extended(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count, uint32_t *alike)
{
    uint32_t done = take_stored(cq, out, count);
    int got = done < count ? take_extended(cq, out + done, count - done) : 0;

    *alike = 0;
    if (got < 0)
        return done ? (int)done : got;
    return (int)done + got;
}

static int drain_extended(struct ndpy_completion_queue *cq)
{
    struct ndpy_completion taken[NDPY_POLL_BATCH];
    uint32_t before = cq->undelivered;
    int got;

    do {
        if (reserve_stored(cq, NDPY_POLL_BATCH))
            return -ENOMEM;
        got = take_extended(cq, taken, NDPY_POLL_BATCH);
        if (got < 0)
            return got;
        for (int i = 0; i < got; i++)
            store(cq, &taken[i]);
    } while (got == NDPY_POLL_BATCH);
    return (int)(cq->undelivered - before);
}

static int spin_extended(struct ndpy_completion_queue *cq, struct ndpy_completion *out, uint32_t count,
                         const volatile int *stop, uint64_t nanoseconds)
{
    return native_spin(poll_extended, native_time_ns, cq, out, count, stop, nanoseconds);
}

const struct ndpy_provider *ndpy_extended_provider_table(void)
{
    static const struct ndpy_provider provider = {
        .poll = poll_extended,
        .poll_internal = ndpy_poll_internal,
        .spin = spin_extended,
        .largest_token = LARGEST_TOKEN,
        .arm = arm,
        .sleep = sleep_on_channel,
        .take_event = take_event,
        .renew = renew,
    };

    return &provider;
}

struct ibv_qp *ndpy_create_queue_pair(struct ibv_pd *pd, const struct ibv_qp_init_attr *plain, uint64_t operations)
{
    /* ibv_create_qp_ex() is inline. It may call a function of the library, but nothing here links to the library. */
    struct verbs_context *extended = verbs_get_ctx_op(pd->context, create_qp_ex);
    struct ibv_qp_init_attr_ex request = {
        .qp_context = plain->qp_context,
        .send_cq = plain->send_cq,
        .recv_cq = plain->recv_cq,
        .srq = plain->srq,
        .cap = plain->cap,
        .qp_type = plain->qp_type,
        .sq_sig_all = plain->sq_sig_all,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = pd,
        .send_ops_flags = operations,
    };

    if (!extended) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return extended->create_qp_ex(pd->context, &request);
}

/* ---- XRC ---- */

/* The functions that make something also return NULL, with errno. verbs_get_ctx_op() gives NULL if the library is too
 * old. */
static void *not_supported(void)
{
    errno = EOPNOTSUPP;
    return NULL;
}

struct ibv_xrcd *ndpy_open_xrc_domain(struct ibv_context *context, int fd)
{
    struct verbs_context *extended = verbs_get_ctx_op(context, open_xrcd);
    struct ibv_xrcd_init_attr request = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = O_CREAT};

    return extended ? extended->open_xrcd(context, &request) : not_supported();
}

int ndpy_close_xrc_domain(struct ibv_xrcd *domain)
{
    return ibv_close_xrcd(domain);
}

struct ibv_srq *ndpy_create_xrc_queue(struct ibv_pd *pd, struct ibv_xrcd *domain, struct ibv_cq *cq,
                                      const struct ibv_srq_init_attr *plain, uint32_t *number)
{
    struct verbs_context *extended = verbs_get_ctx_op(pd->context, create_srq_ex);
    struct ibv_srq_init_attr_ex request = {
        .srq_context = plain->srq_context,
        .attr = plain->attr,
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
        .srq_type = IBV_SRQT_XRC,
        .pd = pd,
        .xrcd = domain,
        .cq = cq,
    };
    struct ibv_srq *made = extended ? extended->create_srq_ex(pd->context, &request) : not_supported();
    int error = made ? ibv_get_srq_num(made, number) : 0;

    if (!error)
        return made;
    ibv_destroy_srq(made);
    errno = error > 0 ? error : -error;
    return NULL;
}

struct ibv_qp *ndpy_create_xrc_receiver(struct ibv_context *context, struct ibv_xrcd *domain, void *own)
{
    struct verbs_context *extended = verbs_get_ctx_op(context, create_qp_ex);
    struct ibv_qp_init_attr_ex request = {
        .qp_context = own, .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = domain};

    return extended ? extended->create_qp_ex(context, &request) : not_supported();
}

/* Bits of device_cap_flags_ex, and of IBV_QP_EX_WITH_…, which the headers may lack. */
#define CAN_FLUSH_GLOBALLY     (1ull << 38)
#define CAN_FLUSH_PERSISTENTLY (1ull << 39)
#define CAN_WRITE_ATOMICALLY   (1ull << 40)

uint32_t ndpy_newer_operations(struct ibv_context *context)
{
    struct ibv_device_attr_ex attributes;
    uint64_t flags = query_extended(context, &attributes) ? 0 : attributes.device_cap_flags_ex;

    return (flags & CAN_WRITE_ATOMICALLY ? NDPY_CAN_WRITE_ATOMICALLY : 0) |
           (flags & CAN_FLUSH_GLOBALLY ? NDPY_CAN_FLUSH_GLOBALLY : 0) |
           (flags & CAN_FLUSH_PERSISTENTLY ? NDPY_CAN_FLUSH_PERSISTENTLY : 0);
}

int ndpy_query_clock(struct ibv_context *context, struct ndpy_clock *out)
{
    struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
    struct ibv_device_attr_ex attributes;
    struct timespec before, after;
    int error = query_extended(context, &attributes);

    if (error)
        return error > 0 ? error : -error;
    clock_gettime(CLOCK_REALTIME, &before);
    error = ibv_query_rt_values_ex(context, &values);
    clock_gettime(CLOCK_REALTIME, &after);
    if (error)
        return error > 0 ? error : -error;
    if (!attributes.hca_core_clock || !(values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK))
        return EOPNOTSUPP;
    /* The drivers put all ticks into the field for nanoseconds. */
    out->ticks = (uint64_t)values.raw_clock.tv_sec * 1000000000 + (uint64_t)values.raw_clock.tv_nsec;
    out->mask = attributes.completion_timestamp_mask ? attributes.completion_timestamp_mask : UINT64_MAX;
    out->frequency_khz = attributes.hca_core_clock;
    out->before_ns = (uint64_t)before.tv_sec * 1000000000 + (uint64_t)before.tv_nsec;
    out->after_ns = (uint64_t)after.tv_sec * 1000000000 + (uint64_t)after.tv_nsec;
    return 0;
}
