/* Extended completion queues: what programs call by struct ibv_cq_ex. */
#include "shim.h"

#include <stdlib.h>

static struct cq *cq_of_extended(struct ibv_cq_ex *ex)
{
    return (struct cq *)object_find(OBJECT_CQ, ex);
}

static void show(struct cq *cq)
{
    cq->extended->status = cq->current->wc.status;
    cq->extended->wr_id = cq->current->wc.wr_id;
}

static int take_next(struct cq *cq)
{
    struct completion *next = cq->first;

    free(cq->current);
    cq->current = next;
    if (next == NULL)
        return ENOENT;
    cq->first = next->next;
    if (cq->first == NULL)
        cq->last = &cq->first;
    show(cq);
    return 0;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attributes)
{
    (void)attributes;
    caller = __builtin_return_address(0);
    lock();
    struct cq *cq = cq_of_extended(ex);
    int error = cq == NULL ? EINVAL : call_fault_locked(PLACE_CALL_POLL_CQ, NULL, 0);
    if (error == 0) {
        cq_drain(cq);
        error = take_next(cq);
    }
    unlock();
    return error;
}

static int next_poll(struct ibv_cq_ex *ex)
{
    lock();
    struct cq *cq = cq_of_extended(ex);
    int error = EINVAL;
    if (cq != NULL) {
        if (cq->first == NULL)
            cq_drain(cq);
        error = take_next(cq);
    }
    unlock();
    return error;
}

static void end_poll(struct ibv_cq_ex *ex)
{
    lock();
    struct cq *cq = cq_of_extended(ex);
    if (cq != NULL) {
        free(cq->current);
        cq->current = NULL;
    }
    unlock();
}

/* The program reads only between start_poll() and end_poll(), when nobody else changes `current`. */
static struct completion current_of(struct ibv_cq_ex *ex)
{
    struct completion none = {.next = NULL};

    lock();
    struct cq *cq = cq_of_extended(ex);
    if (cq != NULL && cq->current != NULL)
        none = *cq->current;
    unlock();
    return none;
}

#define READERS(DO)                                     \
    DO(enum ibv_wc_opcode, read_opcode, wc.opcode)      \
    DO(uint32_t, read_vendor_err, wc.vendor_err)        \
    DO(uint32_t, read_byte_len, wc.byte_len)            \
    DO(__be32, read_imm_data, wc.imm_data)              \
    DO(uint32_t, read_qp_num, wc.qp_num)                \
    DO(uint32_t, read_src_qp, wc.src_qp)                \
    DO(unsigned, read_wc_flags, wc.wc_flags)            \
    DO(uint32_t, read_slid, wc.slid)                    \
    DO(uint8_t, read_sl, wc.sl)                         \
    DO(uint8_t, read_dlid_path_bits, wc.dlid_path_bits) \
    DO(uint64_t, read_completion_ts, timestamp)         \
    DO(uint16_t, read_cvlan, vlan)                      \
    DO(uint32_t, read_flow_tag, flow_tag)               \
    DO(uint64_t, read_completion_wallclock_ns, wallclock_ns)

#define READER(type, name, member)          \
    static type name(struct ibv_cq_ex *ex)  \
    {                                       \
        return (type)current_of(ex).member; \
    }
READERS(READER)

static void read_tm_info(struct ibv_cq_ex *ex, struct ibv_wc_tm_info *out)
{
    *out = current_of(ex).tag;
}

void extended_cq_take(struct cq *cq)
{
    struct ibv_cq_ex *ex = (struct ibv_cq_ex *)cq->ibv;

    cq->extended = ex;
    cq->real = *ex;
    ex->start_poll = start_poll;
    ex->next_poll = next_poll;
    ex->end_poll = end_poll;
#define TAKE(type, name, member) \
    if (ex->name != NULL)        \
        ex->name = name;
    READERS(TAKE)
#undef TAKE
    if (ex->read_tm_info != NULL)
        ex->read_tm_info = read_tm_info;
}

void extended_cq_give(struct cq *cq)
{
    struct ibv_cq_ex *ex = cq->extended;

    if (ex == NULL)
        return;
    ex->start_poll = cq->real.start_poll;
    ex->next_poll = cq->real.next_poll;
    ex->end_poll = cq->real.end_poll;
#define GIVE(type, name, member) ex->name = cq->real.name;
    READERS(GIVE)
#undef GIVE
    ex->read_tm_info = cq->real.read_tm_info;
    cq->extended = NULL;
}

int extended_cq_poll(struct cq *cq, struct completion *out)
{
    struct ibv_cq_ex *ex = cq->extended;
    struct ibv_poll_cq_attr attributes = {0};
    uint64_t wr_id = ex->wr_id;
    enum ibv_wc_status status = ex->status;
    int error = cq->real.start_poll(ex, &attributes);

    if (error == 0) {
        out->wc.wr_id = ex->wr_id;
        out->wc.status = ex->status;
#define READ(type, name, member) \
    if (cq->real.name != NULL)   \
        out->member = (__typeof__(out->member))cq->real.name(ex);
        /* Of a failed request only these are defined. */
        if (ex->status != IBV_WC_SUCCESS) {
            READ(, read_vendor_err, wc.vendor_err)
            READ(, read_qp_num, wc.qp_num)
        } else {
            READERS(READ)
            if (cq->real.read_tm_info != NULL && (out->wc.opcode == IBV_WC_TM_RECV))
                cq->real.read_tm_info(ex, &out->tag);
        }
#undef READ
        cq->real.end_poll(ex);
    }
    ex->wr_id = wr_id;
    ex->status = status;
    return error;
}
