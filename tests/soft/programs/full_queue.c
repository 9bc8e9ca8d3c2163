/* full_queue [twice|late] [destroyed] [single|together]: datagrams of the shim at a driver's send queue that is full.
 * The driver is a list of ROOM numbers, which this program empties; softverbs and rxe have no such moment: the one has
 * no datagrams, and the other sends at once. The program posts by ibv_post_send(). With `single` it posts by
 * ibv_wr_send(), each datagram by itself, and with `together` all in one batch.
 */
#include "../../../softrdma/shim/datagrams.c"
#include "../../../softrdma/shim/extended_posting.c"
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
static struct ibv_qp_ex extended = {.qp_base.qp_type = IBV_QPT_UD};
static const struct fault *faults[ROOM + 2]; /* of the numbers */

/* ---- The driver ---- */

static void driver_take(uint64_t id, unsigned char letter)
{
    adapter_has[in_adapter++] = id;
    printf("%u ", letter);
}

static int driver_post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **refused)
{
    (void)qp;
    *refused = wr;
    if (in_adapter == ROOM)
        return ENOMEM;
    driver_take(wr->wr_id, *(const unsigned char *)(uintptr_t)wr->sg_list[0].addr);
    return 0;
}

static struct {
    uint64_t id;
    unsigned char letter;
} said[2 * ROOM];
static unsigned said_count;

static void driver_wr_start(struct ibv_qp_ex *ex)
{
    (void)ex;
    said_count = 0;
}

static void driver_wr_send(struct ibv_qp_ex *ex)
{
    said[said_count++].id = ex->wr_id;
}

static void driver_wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
    (void)ex, (void)ah, (void)qpn, (void)qkey;
}

static void driver_wr_set_inline_data(struct ibv_qp_ex *ex, void *address, size_t length)
{
    (void)ex, (void)length;
    said[said_count - 1].letter = *(const unsigned char *)address;
}

static int driver_wr_complete(struct ibv_qp_ex *ex)
{
    (void)ex;
    if (in_adapter + said_count > ROOM)
        return ENOSPC;
    for (unsigned i = 0; i < said_count; i++)
        driver_take(said[i].id, said[i].letter);
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

/* ---- The rest of the shim ---- */

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
    (void)qp, (void)operation, (void)kinds, (void)size, (void)content_size, (void)random;
    return faults[*(const unsigned char *)content];
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

struct object *object_find(enum object_kind kind, const void *key)
{
    return kind == OBJECT_QP && key == queue_pair.ibv ? &queue_pair.object : NULL;
}

void lock(void) {}

void unlock(void) {}

bool adapter_gone(void)
{
    return false;
}

int call_fault_locked(enum fault_call call, const struct qp *qp, uint64_t live)
{
    (void)call, (void)qp, (void)live;
    return 0;
}

enum fault_operation operation_of(enum ibv_wr_opcode opcode)
{
    (void)opcode;
    return PLACE_SEND;
}

struct record *send_record(struct qp *qp, uint64_t wr_id, bool signaled, enum fault_operation operation, uint64_t size,
                           const void *content, size_t content_size)
{
    struct record *record = record_new();

    (void)signaled, (void)size, (void)content, (void)content_size;
    record->wr_id = wr_id;
    record->qp = qp;
    record->cq = &completions;
    record->operation = operation;
    record->visible = true;
    return record;
}

void after_posting(struct qp *qp)
{
    queue_deliver(qp, &qp->sends);
}

/* ---- The program ---- */

static int post_together(unsigned first, unsigned last)
{
    ibv_wr_start(&extended);
    for (unsigned number = first; number <= last; number++) {
        unsigned char letter = (unsigned char)number;
        extended.wr_id = number;
        extended.wr_flags = IBV_SEND_SIGNALED;
        ibv_wr_send(&extended);
        ibv_wr_set_ud_addr(&extended, NULL, 1, 1);
        ibv_wr_set_inline_data(&extended, &letter, 1);
        letter = 0;
    }
    return ibv_wr_complete(&extended);
}

/* As post_send() of operations.c does for a request that is inline. */
static int post(unsigned number)
{
    unsigned char letter = (unsigned char)number;
    struct ibv_sge sge = {.addr = (uintptr_t)&letter, .length = 1};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE};
    struct record *record = send_record(&queue_pair, number, true, PLACE_SEND, 1, &letter, 1);

    wr.wr_id = record->id;
    int error = send_post(&queue_pair, &wr, record, faults[number]);
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

static bool is_said(int count, char **words, const char *word)
{
    for (int i = 1; i < count; i++)
        if (strcmp(words[i], word) == 0)
            return true;
    return false;
}

int main(int count, char **words)
{
    static struct context context = {.ops = {.post_send = driver_post, .poll_cq = driver_poll}};
    const struct fault twice = {.kind = FAULT_DUPLICATE}, later = {.kind = FAULT_REORDER};
    bool single = is_said(count, words, "single"), together = is_said(count, words, "together");

    extended.wr_start = driver_wr_start;
    extended.wr_send = driver_wr_send;
    extended.wr_set_ud_addr = driver_wr_set_ud_addr;
    extended.wr_set_inline_data = driver_wr_set_inline_data;
    extended.wr_complete = driver_wr_complete;
    completions.context = queue_pair.context = &context;
    completions.last = &completions.first;
    queue_pair.ibv = &extended.qp_base;
    queue_pair.send_cq = &completions;
    queue_pair.sends.last = &queue_pair.sends.first;
    queue_pair.receives.last = &queue_pair.receives.first;
    extended_qp_take(&queue_pair, &extended);
    for (unsigned i = 1; i <= ROOM; i++)
        if (is_said(count, words, "twice"))
            faults[i] = &twice;
        else if (is_said(count, words, "late") && (i <= 2 || i == ROOM))
            faults[i] = &later;
    if (together && post_together(1, ROOM + 1) != ENOSPC)
        return 4;
    if (together && post_together(1, ROOM) != 0)
        return 1;
    for (unsigned i = 1; i <= ROOM && !together; i++)
        if ((single ? post_together(i, i) : post(i)) != 0)
            return 1;
    if (faults[1] == NULL &&
        (single || together ? post_together(ROOM + 1, ROOM + 1) != ENOSPC : post(ROOM + 1) != ENOMEM))
        return 2;
    if (is_said(count, words, "destroyed")) {
        datagrams_forget(&queue_pair);
        queue_free(&queue_pair.sends);
        records_of_qp_orphan(&queue_pair);
    }
    for (unsigned i = 0; i < TURNS; i++) {
        take();
        pass(ALONE_MS / 4);
    }
    printf("\n");
    extended_qp_give(&queue_pair);
    for (uint32_t i = 0; i < chunk_count; i++)
        free(chunks[i]);
    return queue_pair.kept != NULL || queue_pair.sends.first != NULL ? 3 : 0;
}
