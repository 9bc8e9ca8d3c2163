/* Datagrams that come twice, or in another order.
 *
 * A datagram that comes twice is posted twice. The second request has a record of its own before that of the first, so
 * the program learns that it was sent, and may use the memory again, when both were.
 *
 * A datagram that is to be overtaken is kept until the next one that is not was posted. Completions keep the order in
 * which the program posted.
 *
 * The adapter's queue has the room that the program asked for. If second requests take it, others are kept until there
 * is room again.
 *
 * What is kept is posted by ibv_post_send(3), also if the program uses ibv_wr_send(): only the program may touch the
 * members of struct ibv_qp_ex that this reads, and the thread posts too. ibv_wr_post(3) allows both for one queue pair.
 */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define ALONE_MS 100 /* so long a datagram waits for one that overtakes it */
#define FULL_MS  1   /* so long, until the adapter's full queue is tried again */

struct kept {
    struct kept *next;
    struct record *record;
    struct ibv_send_wr wr;
    struct ibv_sge sges[]; /* the bytes of inline data follow them, and those of the header of a TSO request */
};

static int post_now(const struct qp *qp, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *refused;

    return qp->context->ops.post_send(qp->ibv, wr, &refused);
}

/* rxe's ibv_wr_complete() says ENOSPC. */
static bool is_full(int error)
{
    return error == ENOMEM || error == ENOSPC;
}

static int keep(struct qp *qp, const struct ibv_send_wr *wr, struct record *record, uint64_t ms)
{
    bool is_inline = (wr->send_flags & IBV_SEND_INLINE) != 0;
    size_t count = (size_t)wr->num_sge, header = wr->opcode == IBV_WR_TSO ? wr->tso.hdr_sz : 0, size = header;

    for (size_t i = 0; is_inline && i < count; i++)
        size += wr->sg_list[i].length;
    struct kept **at = &qp->kept, *kept = malloc(sizeof *kept + count * sizeof *wr->sg_list + size);
    if (kept == NULL)
        return ENOMEM;
    char *bytes = (char *)&kept->sges[count];
    kept->next = NULL;
    kept->record = record;
    kept->wr = *wr;
    kept->wr.wr_id = record->id;
    kept->wr.sg_list = kept->sges;
    for (size_t i = 0; i < count; i++) {
        kept->sges[i] = wr->sg_list[i];
        if (!is_inline)
            continue;
        memcpy(bytes, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
        kept->sges[i].addr = (uintptr_t)bytes;
        bytes += wr->sg_list[i].length;
    }
    if (header > 0)
        kept->wr.tso.hdr = memcpy(bytes, wr->tso.hdr, header);
    uint64_t until_ns = now_ns() + ms * 1000000;
    if (qp->kept == NULL || until_ns < qp->kept_until_ns)
        qp->kept_until_ns = until_ns;
    while (*at != NULL)
        at = &(*at)->next;
    *at = kept;
    thread_wake();
    return 0;
}

void datagrams_post(struct qp *qp)
{
    while (qp->kept != NULL) {
        struct kept *kept = qp->kept;
        int error = post_now(qp, &kept->wr);
        if (is_full(error) && !qp->failed) {
            qp->kept_until_ns = now_ns() + FULL_MS * 1000000;
            thread_wake();
            return;
        }
        /* A datagram may be lost. */
        if (error != 0)
            record_succeed(kept->record);
        qp->kept = kept->next;
        free(kept);
    }
}

void datagram_repeat(struct qp *qp, const struct ibv_send_wr *wr, const struct record *first)
{
    struct record *record = record_new();

    if (record == NULL)
        return;
    record->qp = qp;
    record->cq = qp->send_cq;
    record->operation = first->operation;
    record->wc_opcode = first->wc_opcode;
    record->extra = true;
    if (keep(qp, wr, record, FULL_MS) == 0)
        queue_add(&qp->sends, record);
    else
        record_free(record);
}

/* Whether requests that the program has not posted take room in the adapter's queue. */
static bool has_extra(const struct qp *qp)
{
    for (const struct record *record = qp->sends.first; record != NULL; record = record->next)
        if (record->extra && !record->done)
            return true;
    return false;
}

bool datagrams_can_wait(const struct qp *qp, int error)
{
    return is_full(error) && has_extra(qp);
}

int datagram_keep(struct qp *qp, const struct ibv_send_wr *wr, struct record *record, bool reorders)
{
    return keep(qp, wr, record, reorders ? ALONE_MS : FULL_MS);
}

int send_post(struct qp *qp, struct ibv_send_wr *wr, struct record *record, const struct fault *fault)
{
    if (fault != NULL && fault->kind == FAULT_REORDER)
        return keep(qp, wr, record, ALONE_MS);
    int error = post_now(qp, wr);
    if (datagrams_can_wait(qp, error))
        error = keep(qp, wr, record, FULL_MS);
    if (error != 0)
        return error;
    if (fault != NULL)
        datagram_repeat(qp, wr, record);
    datagrams_post(qp);
    return 0;
}

uint64_t datagrams_on_time(struct qp *qp, uint64_t now)
{
    if (qp->kept != NULL && (qp->kept_until_ns <= now || qp->failed))
        datagrams_post(qp);
    return qp->kept != NULL ? qp->kept_until_ns : NEVER;
}

void datagrams_forget(struct qp *qp)
{
    while (qp->kept != NULL) {
        struct kept *kept = qp->kept;
        qp->kept = kept->next;
        /* The adapter never gets it. */
        kept->record->absent = true;
        free(kept);
    }
}
