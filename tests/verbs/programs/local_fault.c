/* A request with an unknown local key completes with an error of its own. Those after it are flushed (IBA volume 1,
   10.7.2). */

#include "two_ends.h"

int main(int count, char **words)
{
    struct ibv_sge element;
    struct ibv_mr *region;
    struct ibv_wc first, second;

    check(count == 2, "give the name of a device");
    open_two_ends(words[1]);
    region = pages(1, IBV_ACCESS_LOCAL_WRITE);
    element = (struct ibv_sge){(uintptr_t)region->addr, 8, region->lkey ^ 0x5A00};
    receive(&far);
    post(&near, IBV_WR_SEND, 0, &element, 0, 0);
    post(&near, IBV_WR_SEND, 0, NULL, 0, 0);
    first = completion(&near, WAIT_MS);
    second = completion(&near, WAIT_MS);
    printf("%s, then %s\n", ibv_wc_status_str(first.status), ibv_wc_status_str(second.status));
    if (second.status != IBV_WC_WR_FLUSH_ERR)
        return tell(DEFECT, "the request behind it was not flushed");
    if (first.status == IBV_WC_WR_FLUSH_ERR)
        return tell(DEFECT, "a request with an unknown local key was reported as flushed");
    return tell(AS_SPECIFIED, "the request with an unknown local key has an error of its own");
}
