/* A completion with an error satisfies a request for a notification of solicited ones (ibv_req_notify_cq(3)). */

#include "two_ends.h"

int main(int count, char **words)
{
    check(count == 2, "give the name of a device");
    open_two_ends(words[1]);
    receive(&near);
    check(!ibv_req_notify_cq(near.cq, 1), "ibv_req_notify_cq");
    end_natively(&near);
    if (completion(&near, WAIT_MS).status != IBV_WC_WR_FLUSH_ERR)
        return tell(NOT_TRIED, "the receive was not flushed");
    if (!is_notified(&near, 2000))
        return tell(DEFECT, "a flushed receive did not notify for solicited completions");
    return tell(AS_SPECIFIED, "a flushed receive notified for solicited completions");
}
