/* A fenced read behind a send that finds no receive at first: both are sent again, and both end (IBA volume
   1, 9.7.5.2.8 and 10.8.3.3: a fence waits for the reads and atomic operations before it). The word "plain" leaves the
   fence away. */

#include "two_ends.h"

/* The read follows the send at once. */
enum { SOON_MS = 3000 };

int main(int count, char **words)
{
    struct ibv_sge element;
    struct ibv_mr *source, *target;
    struct ibv_wc sent, got;

    check(count == 2 || count == 3, "give the name of a device");
    open_two_ends(words[1]);
    source = pages(1, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    target = pages(1, IBV_ACCESS_LOCAL_WRITE);
    memset(source->addr, 0x5A, PAGE);
    element = (struct ibv_sge){(uintptr_t)target->addr, PAGE, target->lkey};
    post(&near, IBV_WR_SEND, 0, NULL, 0, 0);
    post(&near, IBV_WR_RDMA_READ, count == 2 ? IBV_SEND_FENCE : 0, &element, (uintptr_t)source->addr, source->rkey);
    usleep(100000);
    receive(&far);
    sent = completion(&near, WAIT_MS);
    if (sent.status != IBV_WC_SUCCESS)
        return tell(DEFECT, "the send did not succeed");
    got = completion(&near, SOON_MS);
    if (got.status == (enum ibv_wc_status) - 1)
        return tell(DEFECT, "a fenced read that was sent again never ended");
    if (got.status != IBV_WC_SUCCESS)
        return tell(DEFECT, "the read did not succeed");
    if (memcmp(source->addr, target->addr, PAGE))
        return tell(DEFECT, "the read brought other bytes");
    return tell(AS_SPECIFIED, "both ended");
}
