/* Connections of this process to itself that lack memory, and then descriptors: none that is established ends.

   short_of_memory COUNT ROOM_KIB

   All send at once, with room for the buffers of a few of them. */

#include "ends.h"

#define MESSAGE 50000u
#define DEPTH   4u

static struct manager manager;
static struct end (*pairs)[2];
static int connections;

static void limit_to(int what, rlim_t value)
{
    struct rlimit limit;

    EXPECT(getrlimit(what, &limit) == 0);
    if (limit.rlim_max != RLIM_INFINITY && value > limit.rlim_max)
        limit.rlim_max = value; /* for root */
    limit.rlim_cur = value;
    if (setrlimit(what, &limit) != 0) {
        printf("needs the limit %d to be %lld\n", what, (long long)value);
        exit(77);
    }
}

static size_t address_space(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    EXPECT(file != NULL && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void nothing_ended(const char *when)
{
    struct rdma_cm_event *event = next_event(manager.events, 0);

    if (event != NULL)
        FAIL("%s: %s, status %d", when, rdma_event_str(event->event), event->status);
}

/* A message in each direction of each connection, all under way at once. Everything is polled by turns. */
static void all_send(struct ibv_mr *from, struct ibv_mr *to, const char *when)
{
    uint64_t begin = now_ms(), end = begin + 10 * DEADLINE_MS;
    int left = connections * 4;
    struct ibv_wc wc[4];

    for (int i = 0; i < connections; i++)
        for (int j = 0; j < 2; j++)
            EXPECT(receive(pairs[i][j].qp, to, 0, MESSAGE, 1) == 0);
    for (int i = 0; i < connections; i++)
        for (int j = 0; j < 2; j++)
            EXPECT(post(pairs[i][j].qp, IBV_WR_SEND, from, 0, MESSAGE, NULL, 2) == 0);
    while (left > 0) {
        for (int i = 0; i < connections; i++)
            for (int j = 0; j < 2; j++) {
                int count = ibv_poll_cq(pairs[i][j].cq, 4, wc);
                for (int k = 0; k < count; k++)
                    if (wc[k].status != IBV_WC_SUCCESS)
                        FAIL("%s: connection %d: %s, opcode %d", when, i, ibv_wc_status_str(wc[k].status),
                             wc[k].opcode);
                left -= count;
            }
        if (now_ms() > end)
            FAIL("%s: %d of %d completions do not come", when, left, connections * 4);
        usleep(1000);
    }
    printf("%s: in_ms %d\n", when, (int)(now_ms() - begin));
}

/* An identifier connects if it can. Returns the errno of the call that failed. */
static int try_to_connect(void)
{
    struct rdma_conn_param parameters = {.rnr_retry_count = 7};
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;
    int error = 0;

    if (rdma_create_id(manager.events, &id, NULL, RDMA_PS_TCP) != 0)
        return errno;
    if (rdma_resolve_addr(id, NULL, (struct sockaddr *)&manager.address, 1000) != 0) {
        error = errno;
    } else {
        event = next_event(manager.events, DEADLINE_MS);
        EXPECT(event != NULL);
        error = -event->status;
        rdma_ack_cm_event(event);
    }
    if (error == 0) {
        struct ibv_qp_init_attr attributes = qp_attributes(pairs[0][0].cq, DEPTH);
        EXPECT(rdma_resolve_route(id, 1000) == 0);
        expect_event(manager.events, RDMA_CM_EVENT_ROUTE_RESOLVED);
        error = rdma_create_qp(id, NULL, &attributes) != 0 ? errno : rdma_connect(id, &parameters) != 0 ? errno : 0;
        if (id->qp != NULL)
            rdma_destroy_qp(id);
    }
    EXPECT(rdma_destroy_id(id) == 0);
    return error;
}

int main(int count, char **words)
{
    EXPECT(count == 3);
    connections = atoi(words[1]);
    size_t room = (size_t)atol(words[2]) * 1024;

    setvbuf(stdout, NULL, _IOLBF, 0);
    pairs = calloc((size_t)connections, sizeof *pairs);
    limit_to(RLIMIT_NOFILE, (rlim_t)(connections * 2 + connections / 50 + 200)); /* with the ports of numbers */
    open_manager(&manager);
    uint64_t begin = now_ms();
    for (int i = 0; i < connections; i++)
        connect_ends(&manager, pairs[i], DEPTH);
    printf("connected: in_ms %d address_space_kib %zu\n", (int)(now_ms() - begin), address_space() / 1024);
    struct ibv_mr *from = buffer(pairs[0][0].qp->pd, MESSAGE), *to = buffer(pairs[0][0].qp->pd, MESSAGE);

    limit_to(RLIMIT_AS, address_space() + room);
    all_send(from, to, "short of memory");
    nothing_ended("short of memory");
    all_send(from, to, "once more");
    nothing_ended("once more");
    limit_to(RLIMIT_AS, RLIM_INFINITY);

    int used = 0;
    while (fcntl(used, F_GETFD) >= 0)
        used++;
    limit_to(RLIMIT_NOFILE, (rlim_t)used);
    errno = 0;
    int error = try_to_connect();
    if (error != EMFILE)
        FAIL("without descriptors: %s", strerror(error));
    all_send(from, to, "short of descriptors");
    nothing_ended("short of descriptors");
    printf("ok\n");
    _exit(0);
}
