/* A request for a notification of solicited messages ignores a plain message and answers to a solicited one
   (ibv_req_notify_cq(3)). With the word "armed" the queue was armed for any completion before. A program leaves it like
   that if it armed, looked again and found something. That request is still valid. The plain message satisfies it. */

#include "two_ends.h"

int main(int count, char **words)
{
    int left_armed = count == 3 && !strcmp(words[2], "armed");

    check(count == 2 || left_armed, "give the name of a device");
    open_two_ends(words[1]);
    receive(&near);
    receive(&near);
    if (left_armed)
        check(!ibv_req_notify_cq(near.cq, 0), "ibv_req_notify_cq");
    check(!ibv_req_notify_cq(near.cq, 1), "ibv_req_notify_cq");
    post(&far, IBV_WR_SEND, 0, NULL, 0, 0);
    check(completion(&near, WAIT_MS).status == IBV_WC_SUCCESS, "the plain message");
    if (left_armed)
        return is_notified(&near, 2000) ? tell(AS_SPECIFIED, "the request for any completion came first")
                                        : tell(DEFECT, "the request for solicited ones took the place of that for any");
    if (is_notified(&near, 500))
        return tell(DEFECT, "a plain message notified for solicited ones");
    post(&far, IBV_WR_SEND, IBV_SEND_SOLICITED, NULL, 0, 0);
    check(completion(&near, WAIT_MS).status == IBV_WC_SUCCESS, "the solicited message");
    if (!is_notified(&near, 2000))
        return tell(DEFECT, "a solicited message did not notify");
    return tell(AS_SPECIFIED, "the plain message passed over, the solicited one notified");
}
