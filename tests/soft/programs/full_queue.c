/* full_queue [twice|late [destroyed]]: datagrams of the shim at a driver's send queue that is full. The driver is a
 * list of ROOM numbers, which this program empties; softverbs and rxe have no such moment: the one has no datagrams,
 * and the other sends at once.
 */
#include "../../../softrdma/shim/datagrams.c"
#include "../../../softrdma/shim/requests.c"

#include <stdio.h>

#define ROOM  4
#define TURNS 12

_Thread_local const void *caller;
_Thread_local unsigned inside;

static uint64_t clock_ns, adapter_has[ROOM];
static unsigned in_adapter;
static struct qp queue_pair;
static struct cq completions;

static int driver_post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **refused)
{
    (void)qp;
    *refused = wr;
    if (in_adapter == ROOM)
        return ENOMEM;
    adapter_has[in_adapter++] = wr->wr_id;
    printf("%u ", *(const unsigned char *)(uintptr_t)wr->sg_list[0].addr);
    return 0;
}

static int driver_poll(struct ibv_cq *cq, int count, struct ibv_wc *wcs)
{
    int given = 0;

    (void)cq;
    while (given < count && in_adapter > 0) {
        wcs[given++] = (struct ibv_wc){.wr_id = adapter_has[0], .status = IBV_WC_SUCCESS};
        memmove(adapter_has, adapter_has + 1, --in_adapter * sizeof *adapter_has);
    }
    return given;
}

static int driver_modify(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)
{
    (void)qp, (void)attributes, (void)mask;
    return 0;
}

void *library_function(unsigned library, enum name_index index)
{
    (void)library;
    return index == INDEX_ibv_modify_qp ? (void *)driver_modify : NULL;
}

uint64_t now_ns(void)
{
    return clock_ns;
}

void thread_wake(void) {}

void each_object(enum object_kind kind, void (*act)(struct object *, void *), void *what)
{
    if (kind == OBJECT_QP)
        act(&queue_pair.object, what);
}

struct qp *qp_numbered(const struct context *context, uint32_t qp_num)
{
    (void)context, (void)qp_num;
    return &queue_pair;
}

const struct fault *request_fault(struct qp *qp, enum fault_operation operation, unsigned kinds, bool again,
                                  uint64_t size, const void *content, size_t content_size)
{
    (void)qp, (void)operation, (void)kinds, (void)again, (void)size, (void)content, (void)content_size;
    return NULL;
}

const struct fault *message_fault(const struct qp *qp, enum fault_operation operation, unsigned kinds, uint64_t size,
                                  const void *content, size_t content_size, uint64_t *random)
{
    (void)qp, (void)operation, (void)kinds, (void)size, (void)content, (void)content_size, (void)random;
    return NULL;
}

void channel_raise(struct channel *channel, struct cq *cq)
{
    (void)channel, (void)cq;
}

int extended_cq_poll(struct cq *cq, struct completion *out)
{
    (void)cq, (void)out;
    return ENOENT;
}

/* As post_send() of operations.c does for a request that is inline. */
static int post(unsigned number, const struct fault *fault)
{
    unsigned char letter = (unsigned char)number;
    struct ibv_sge sge = {.addr = (uintptr_t)&letter, .length = 1};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE};
    struct record *record = record_new();

    record->wr_id = number;
    record->qp = &queue_pair;
    record->cq = &completions;
    record->operation = PLACE_SEND;
    record->visible = true;
    wr.wr_id = record->id;
    int error = send_post(&queue_pair, &wr, record, fault);
    letter = 0;
    if (error == 0)
        queue_add(&queue_pair.sends, record);
    else
        record_free(record);
    queue_deliver(&queue_pair, &queue_pair.sends);
    return error;
}

static void take(void)
{
    cq_drain(&completions);
    while (completions.first != NULL) {
        struct completion *completion = completions.first;
        completions.first = completion->next;
        if (completions.first == NULL)
            completions.last = &completions.first;
        printf("[%u]", (unsigned)completion->wc.wr_id);
        if (completion->wc.status != IBV_WC_SUCCESS)
            printf("=%d", completion->wc.status);
        printf(" ");
        free(completion);
    }
}

static void pass(uint64_t ms)
{
    clock_ns += ms * 1000000;
    requests_on_time();
}

int main(int count, char **words)
{
    static struct context context = {.ops = {.post_send = driver_post, .poll_cq = driver_poll}};
    static struct ibv_qp ibv_qp;
    const struct fault twice = {.kind = FAULT_DUPLICATE}, later = {.kind = FAULT_REORDER};
    const char *what = count > 1 ? words[1] : "";

    completions.context = queue_pair.context = &context;
    completions.last = &completions.first;
    queue_pair.ibv = &ibv_qp;
    queue_pair.send_cq = &completions;
    queue_pair.sends.last = &queue_pair.sends.first;
    queue_pair.receives.last = &queue_pair.receives.first;
    for (unsigned i = 1; i <= ROOM; i++) {
        bool is_late = strcmp(what, "late") == 0 && (i <= 2 || i == ROOM);
        if (post(i, strcmp(what, "twice") == 0 ? &twice : is_late ? &later : NULL) != 0)
            return 1;
    }
    if (*what == '\0' && post(ROOM + 1, NULL) != ENOMEM)
        return 2;
    if (count > 2) {
        datagrams_forget(&queue_pair);
        queue_free(&queue_pair.sends);
        records_of_qp_orphan(&queue_pair);
    }
    for (unsigned i = 0; i < TURNS; i++) {
        take();
        pass(ALONE_MS / 4);
    }
    printf("\n");
    for (uint32_t i = 0; i < chunk_count; i++)
        free(chunks[i]);
    return queue_pair.kept != NULL || queue_pair.sends.first != NULL ? 3 : 0;
}
