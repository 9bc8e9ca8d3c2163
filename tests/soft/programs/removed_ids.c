/* removed_ids ADDRESS COUNT: has COUNT identifiers that have found an adapter, which a scenario then removes. Destroys
 * them as soon as the first event of that is there, while the others are told.
 */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WAIT_MS 60000

static void fail(const char *what)
{
    printf("%s failed: %s\n", what, strerror(errno));
    exit(1);
}

int main(int words, char **word)
{
    if (words != 3)
        return 2;
    int count = atoi(word[2]);
    struct addrinfo *found = NULL;
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id **ids = calloc((size_t)count, sizeof(struct rdma_cm_id *));
    if (channel == NULL || ids == NULL || getaddrinfo(word[1], "7471", NULL, &found) != 0)
        fail("preparing");
    for (int i = 0; i < count; i++) {
        struct rdma_cm_event *event;
        if (rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP) != 0)
            fail("rdma_create_id");
        if (rdma_resolve_addr(ids[i], NULL, found->ai_addr, 2000) != 0)
            fail("rdma_resolve_addr");
        if (rdma_get_cm_event(channel, &event) != 0)
            fail("rdma_get_cm_event");
        if (event->event != RDMA_CM_EVENT_ADDR_RESOLVED)
            fail(rdma_event_str(event->event));
        rdma_ack_cm_event(event);
    }
    freeaddrinfo(found);
    struct pollfd waits = {.fd = channel->fd, .events = POLLIN};
    if (poll(&waits, 1, WAIT_MS) != 1)
        fail("poll");
    for (int i = 0; i < count; i++)
        if (rdma_destroy_id(ids[i]) != 0)
            fail("rdma_destroy_id");
    rdma_destroy_event_channel(channel);
    free(ids);
    printf("destroyed %d\n", count);
    return 0;
}
