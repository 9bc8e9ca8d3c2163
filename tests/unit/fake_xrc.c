/* XRC of the provider without a device: domains, shared receive queues with numbers, and messages to these. A message
   moves when the test says so, and its bytes move with it. Attributes are checked as the kernel checks them
   (ib_modify_qp_is_ok()). */

#include "fake_verbs.h"

#define MOST 256

int32_t fake_xrc;

struct domain {
    struct ibv_xrcd ibv;
    int alive;
    int users;
    ino_t file;
};

struct shared_queue {
    struct ibv_srq ibv;
    struct domain *domain;
    struct ibv_cq *cq;
    int alive;
    uint32_t number;
    unsigned first, count, depth;
    struct {
        uint64_t id;
        struct ibv_sge element;
    } receives[MOST];
};

static struct shared_queue *queues[MOST];
static uint32_t last_queue;
static struct domain *domain_of[4096]; /* of each receiver */
static struct domain *domains[MOST];
static int domain_count;

/* ---- domains ---- */

static struct ibv_xrcd *open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *request)
{
    struct domain *made;
    struct stat status = {0};

    if (!fake_xrc) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    fake_check("ibv_open_xrcd", request->comp_mask == (IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS));
    fake_check("ibv_open_xrcd", request->oflags == O_CREAT);
    if (request->fd != -1 && fstat(request->fd, &status))
        return NULL;
    made = calloc(1, sizeof *made);
    made->ibv.context = context;
    made->alive = 1;
    made->file = status.st_ino;
    pthread_mutex_lock(&fake_lock);
    domains[domain_count++ % MOST] = made;
    fake_counts.xrc_domains++;
    pthread_mutex_unlock(&fake_lock);
    return &made->ibv;
}

static int close_xrcd(struct ibv_xrcd *ibv)
{
    struct domain *domain = (struct domain *)ibv;
    int error = 0;

    pthread_mutex_lock(&fake_lock);
    if (!fake_check("ibv_close_xrcd", domain->alive)) {
        error = EINVAL;
    } else if (domain->users) {
        fake_fault("ibv_close_xrcd", "something uses it");
        error = EBUSY;
    } else {
        domain->alive = 0;
        fake_counts.xrc_domains--;
    }
    pthread_mutex_unlock(&fake_lock);
    return error;
}

/* Whether these are the same domain. */
static int are_one(const struct domain *first, const struct domain *second)
{
    return first == second || (first->file && first->file == second->file);
}

/* ---- shared receive queues ---- */

static struct ibv_srq *create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *request)
{
    struct domain *domain = (struct domain *)request->xrcd;
    struct shared_queue *made = calloc(1, sizeof *made);

    fake_check("ibv_create_srq_ex", request->srq_type == IBV_SRQT_XRC && request->pd && domain->alive);
    fake_check("ibv_create_srq_ex", request->comp_mask == (IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
                                                           IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ));
    made->ibv.context = context;
    made->ibv.srq_context = request->srq_context;
    made->domain = domain;
    made->cq = request->cq;
    made->depth = request->attr.max_wr;
    made->alive = 1;
    pthread_mutex_lock(&fake_lock);
    made->number = 0x800000 + ++last_queue;
    queues[last_queue % MOST] = made;
    domain->users++;
    fake_use_queue(made->cq, 1);
    fake_counts.xrc_queues++;
    pthread_mutex_unlock(&fake_lock);
    return &made->ibv;
}

static int get_srq_num(struct ibv_srq *srq, uint32_t *number)
{
    *number = ((struct shared_queue *)srq)->number;
    return 0;
}

int ibv_destroy_srq(struct ibv_srq *ibv)
{
    struct shared_queue *queue = (struct shared_queue *)ibv;
    int error = 0;

    pthread_mutex_lock(&fake_lock);
    if (!fake_check("ibv_destroy_srq", queue->alive)) {
        error = EINVAL;
    } else {
        queue->alive = 0;
        queue->domain->users--;
        fake_use_queue(queue->cq, -1);
        fake_counts.xrc_queues--;
    }
    pthread_mutex_unlock(&fake_lock);
    return error;
}

int fake_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct shared_queue *queue = (struct shared_queue *)srq;
    int error = 0;

    pthread_mutex_lock(&fake_lock);
    if (!fake_check("ibv_post_srq_recv", queue->alive) || queue->count == queue->depth || queue->count == MOST) {
        *bad = wr;
        error = ENOMEM;
    } else {
        unsigned place = (queue->first + queue->count++) % MOST;

        queue->receives[place].id = wr->wr_id;
        queue->receives[place].element = wr->num_sge ? wr->sg_list[0] : (struct ibv_sge){0};
    }
    pthread_mutex_unlock(&fake_lock);
    return error;
}

/* ---- messages ---- */

struct fake_message fake_message(const struct ibv_send_wr *wr)
{
    return (struct fake_message){
        .element = wr->num_sge ? wr->sg_list[0] : (struct ibv_sge){0},
        .opcode = wr->opcode,
        .queue = wr->qp_type.xrc.remote_srqn,
        .immediate = wr->imm_data,
        .remote = wr->wr.rdma.remote_addr,
    };
}

/* Called with fake_lock. */
int fake_arrives(struct ibv_qp *receiver, const struct fake_message *message)
{
    struct shared_queue *queue = queues[message->queue % MOST];
    struct ibv_wc completion = {.qp_num = receiver->qp_num, .opcode = IBV_WC_RECV, .byte_len = message->element.length};
    int is_write = message->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    unsigned place;

    if (message->opcode == IBV_WR_RDMA_WRITE) {
        memcpy((void *)(uintptr_t)message->remote, (void *)(uintptr_t)message->element.addr, message->element.length);
        return 1;
    }
    fake_check("send", queue && queue->number == message->queue && queue->alive);
    fake_check("send", are_one(domain_of[receiver->qp_num % 4096], queue->domain));
    if (!queue->count)
        return 0;
    queue->count--;
    place = queue->first++ % MOST;
    completion.wr_id = queue->receives[place].id;
    if (message->opcode != IBV_WR_SEND) {
        completion.wc_flags = IBV_WC_WITH_IMM;
        completion.imm_data = message->immediate;
    }
    if (is_write)
        completion.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    else if (message->element.length > queue->receives[place].element.length)
        completion.status = IBV_WC_LOC_LEN_ERR;
    if (!completion.status)
        memcpy((void *)(uintptr_t)(is_write ? message->remote : queue->receives[place].element.addr),
               (void *)(uintptr_t)message->element.addr, message->element.length);
    fake_add_completion(queue->cq, &completion);
    return 1;
}

/* ---- queue pairs ---- */

struct ibv_qp *fake_create_in_domain(struct ibv_context *context, struct ibv_qp_init_attr_ex *request)
{
    struct domain *domain = (struct domain *)request->xrcd;
    struct ibv_qp *made;

    fake_check("ibv_create_qp_ex", request->comp_mask == IBV_QP_INIT_ATTR_XRCD && domain->alive);
    made = fake_create_receiver(context, request->qp_context);
    pthread_mutex_lock(&fake_lock);
    domain->users++;
    domain_of[made->qp_num % 4096] = domain;
    pthread_mutex_unlock(&fake_lock);
    return made;
}

/* Called with fake_lock. */
void fake_leave_domain(struct ibv_qp *receiver)
{
    domain_of[receiver->qp_num % 4096]->users--;
}

#define TO_INIT (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define PATH    (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)

static const struct {
    enum ibv_qp_type type;
    enum ibv_qp_state from, to;
    int needed;
} changes[] = {
    {IBV_QPT_XRC_SEND, IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT},
    {IBV_QPT_XRC_RECV, IBV_QPS_RESET, IBV_QPS_INIT, TO_INIT},
    {IBV_QPT_XRC_SEND, IBV_QPS_INIT, IBV_QPS_RTR, PATH},
    {IBV_QPT_XRC_RECV, IBV_QPS_INIT, IBV_QPS_RTR, PATH | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPT_XRC_SEND, IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC},
    {IBV_QPT_XRC_RECV, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_TIMEOUT | IBV_QP_SQ_PSN},
};

int fake_takes(const struct ibv_qp *qp, const struct ibv_qp_attr *attributes, int mask)
{
    if ((qp->qp_type != IBV_QPT_XRC_SEND && qp->qp_type != IBV_QPT_XRC_RECV) || !(mask & IBV_QP_STATE) ||
        attributes->qp_state == IBV_QPS_RESET || attributes->qp_state == IBV_QPS_ERR)
        return 1;
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++)
        if (changes[i].type == qp->qp_type && changes[i].from == qp->state && changes[i].to == attributes->qp_state)
            return mask == (changes[i].needed | IBV_QP_STATE);
    return 0;
}

void fake_fill_xrc_operations(struct verbs_context *verbs)
{
    verbs->open_xrcd = open_xrcd;
    verbs->close_xrcd = close_xrcd;
    verbs->create_srq_ex = create_srq_ex;
    verbs->get_srq_num = get_srq_num;
}
