/* Contexts and channels that are asked for an event after they were closed. Memory that is freed is overwritten, and
   their descriptors' numbers belong to others. */

#include "ends.h"

static struct ibv_context *context;
static struct ibv_comp_channel *completions;
static struct rdma_event_channel *connections;

static int take_async(void)
{
    struct ibv_async_event event;

    return ibv_get_async_event(context, &event);
}

static int take_completion(void)
{
    struct ibv_cq *cq;
    void *what;

    return ibv_get_cq_event(completions, &cq, &what);
}

static int take_connection(void)
{
    struct rdma_cm_event *event;

    return rdma_get_cm_event(connections, &event);
}

static void close_context(void)
{
    EXPECT(ibv_close_device(context) == 0);
}

static void close_completions(void)
{
    EXPECT(ibv_destroy_comp_channel(completions) == 0);
}

static void close_connections(void)
{
    rdma_destroy_event_channel(connections);
}

struct source {
    const char *name;
    int (*take)(void);
    void (*close)(void);
};

static void expect_closed(const struct source *source)
{
    errno = 0;
    int result = source->take();
    if (result != -1 || errno != EBADF)
        FAIL("%s: %d instead of EBADF", source->name, result);
}

/* The channel of an identifier is closed first, with an event in it, and other events come afterwards. */
static void close_before_identifiers(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = 1};
    struct rdma_event_channel *channel = rdma_create_event_channel();
    struct rdma_cm_id *ids[2];

    for (int i = 0; i < 2; i++)
        EXPECT(rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_resolve_addr(ids[0], NULL, (struct sockaddr *)&address, 1000) == 0);
    rdma_destroy_event_channel(channel);
    EXPECT(rdma_resolve_addr(ids[1], NULL, (struct sockaddr *)&address, 1000) == 0);
    EXPECT(rdma_migrate_id(ids[0], channel) == -1 && errno == EBADF);
    EXPECT((connections = rdma_create_event_channel()) != NULL);
    EXPECT(rdma_migrate_id(ids[1], connections) == 0);
    for (int i = 0; i < 2; i++)
        EXPECT(rdma_destroy_id(ids[i]) == 0);
    rdma_destroy_event_channel(connections);
}

#define SOURCES 3

int main(void)
{
    static const struct source sources[SOURCES] = {
        {"ibv_get_cq_event", take_completion, close_completions},
        {"ibv_get_async_event", take_async, close_context},
        {"rdma_get_cm_event", take_connection, close_connections},
    };

    int others[SOURCES][2];

    mallopt(M_PERTURB, 0xA5);
    alarm(60);
    for (int round = 0; round < 3; round++) {
        EXPECT((context = open_device()) != NULL);
        EXPECT((completions = ibv_create_comp_channel(context)) != NULL);
        EXPECT((connections = rdma_create_event_channel()) != NULL);
        for (size_t i = 0; i < SOURCES; i++) {
            sources[i].close();
            EXPECT(pipe2(others[i], O_NONBLOCK) == 0);
            expect_closed(&sources[i]);
        }
        for (size_t i = 0; i < SOURCES; i++) {
            expect_closed(&sources[i]);
            close(others[i][0]);
            close(others[i][1]);
        }
    }
    close_before_identifiers();
    return 0;
}
