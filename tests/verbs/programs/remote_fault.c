/* The responder answers a write with an unknown remote key with an error, and the requester completes with that error
   (ibv_poll_cq(3)). With the word "hasty" the responder's program ends its queue pair as soon as it is told of
   IBV_EVENT_QP_ACCESS_ERR, in up to a hundred rounds. If a driver reports this event before it has answered, it then
   does not answer. The requester retries until it gives up. */

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>

#include "two_ends.h"

static atomic_int events, hasty;

static void *watch(void *unused)
{
    struct ibv_async_event event;

    (void)unused;
    for (;;) {
        if (ibv_get_async_event(context, &event))
            continue;
        if (event.event_type == IBV_EVENT_QP_ACCESS_ERR) {
            if (hasty)
                end_natively(&far);
            atomic_fetch_add(&events, 1);
        }
        ibv_ack_async_event(&event);
    }
    return NULL;
}

int main(int count, char **words)
{
    pthread_t watcher;
    struct ibv_sge element;
    struct ibv_mr *region;
    struct ibv_wc wc;
    int rounds;

    hasty = count == 3 && !strcmp(words[2], "hasty");
    check(count == 2 || hasty, "give the name of a device");
    open_two_ends(words[1]);
    /* Poll without sleeping, to be as quick as possible. */
    check(!hasty || !fcntl(context->async_fd, F_SETFL, O_NONBLOCK), "fcntl");
    check(!pthread_create(&watcher, NULL, watch, NULL), "pthread_create");
    region = pages(1, IBV_ACCESS_LOCAL_WRITE);
    element = (struct ibv_sge){(uintptr_t)region->addr, 8, region->lkey};
    for (rounds = 1;; rounds++) {
        post(&near, IBV_WR_RDMA_WRITE, 0, &element, (uintptr_t)region->addr, 0x5A00A5);
        wc = completion(&near, WAIT_MS / 10);
        if (wc.status != IBV_WC_REM_ACCESS_ERR || !hasty || rounds == 100)
            break;
        make_ends();
    }
    printf("%s in round %d, %d access events\n", (int)wc.status < 0 ? "no completion" : ibv_wc_status_str(wc.status),
           rounds, events);
    if (wc.status != IBV_WC_REM_ACCESS_ERR)
        return tell(DEFECT, "the write with an unknown remote key was not answered");
    return tell(AS_SPECIFIED, "the write with an unknown remote key was refused");
}
