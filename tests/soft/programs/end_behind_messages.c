/* A peer ends while its messages find no receive, and more of them than the buffers on the way hold. The end is told
   at once, as by a card, whose connection manager sends it beside the messages.

   how: "disconnects" and goes on, disconnects and "exits" at once, or is "killed". The last argument is the address of
   the device, 127.0.0.1 if there is none. */

#include "ends.h"

#define DEPTH 64

static int from_client, from_server;

static void tell(int descriptor, const void *data, size_t size)
{
    EXPECT(write(descriptor, data, size) == (ssize_t)size);
}

static void hear(int descriptor, void *data, size_t size)
{
    struct pollfd state = {.fd = descriptor, .events = POLLIN};

    EXPECT(poll(&state, 1, DEADLINE_MS) == 1 && read(descriptor, data, size) == (ssize_t)size);
}

static void client(const char *how, size_t count, size_t size)
{
    struct manager manager = {.events = rdma_create_event_channel()};
    struct rdma_conn_param parameters = {.retry_count = 7, .rnr_retry_count = 7};
    struct end end = {0};
    char byte;

    hear(from_server, &manager.address, sizeof manager.address);
    end.id = resolved(&manager);
    give_queue_pair(&end, DEPTH);
    struct ibv_mr *memory = buffer(end.id->pd, size);
    EXPECT(rdma_connect(end.id, &parameters) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    for (size_t i = 0; i < count; i++)
        EXPECT(post(end.qp, IBV_WR_SEND, memory, 0, size, NULL, i) == 0);
    sleep_ms(300);
    if (strcmp(how, "killed") != 0)
        EXPECT(rdma_disconnect(end.id) == 0);
    uint64_t at = now_ms();
    tell(from_client, &at, sizeof at);
    if (strcmp(how, "killed") == 0)
        raise(SIGKILL);
    if (strcmp(how, "exits") == 0)
        _exit(0);
    for (size_t i = 0; i < count; i++) {
        struct ibv_wc wc;
        if (!completion(end.cq, &wc, DEADLINE_MS))
            FAIL("the request %zu does not end", i);
        if (wc.status != (i == 0 ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR) && i < 2)
            FAIL("request %zu ends with %s", i, ibv_wc_status_str(wc.status));
    }
    expect_event(manager.events, RDMA_CM_EVENT_DISCONNECTED);
    hear(from_server, &byte, 1);
    _exit(0);
}

static void server(const char *address, size_t size)
{
    struct manager manager = {.address = {.sin_family = AF_INET}};
    struct rdma_conn_param parameters = {.rnr_retry_count = 7};
    struct end end = {0};
    struct ibv_wc wc;
    uint64_t left_ms;

    EXPECT(inet_pton(AF_INET, address, &manager.address.sin_addr) == 1);
    EXPECT((manager.events = rdma_create_event_channel()) != NULL);
    EXPECT(rdma_create_id(manager.events, &manager.listener, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_bind_addr(manager.listener, (struct sockaddr *)&manager.address) == 0);
    EXPECT(rdma_listen(manager.listener, 4) == 0);
    manager.address.sin_port = rdma_get_src_port(manager.listener);
    tell(from_server, &manager.address, sizeof manager.address);
    end.id = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST);
    give_queue_pair(&end, DEPTH);
    struct ibv_mr *memory = buffer(end.id->pd, size);
    EXPECT(receive(end.qp, memory, 0, size, 1) == 0);
    EXPECT(rdma_accept(end.id, &parameters) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    expect_success(end.cq, 1);
    hear(from_client, &left_ms, sizeof left_ms);
    expect_event(manager.events, RDMA_CM_EVENT_DISCONNECTED);
    printf("told after %d ms\n", (int)(now_ms() - left_ms));
    /* None of the messages that waited arrives any more. */
    receive(end.qp, memory, 0, size, 2);
    EXPECT(rdma_disconnect(end.id) == 0);
    EXPECT(completion(end.cq, &wc, DEADLINE_MS) && wc.status == IBV_WC_WR_FLUSH_ERR);
    tell(from_server, "", 1);
}

int main(int argc, char **argv)
{
    int up[2], down[2], status;

    EXPECT(argc >= 4 && pipe(up) == 0 && pipe(down) == 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        from_client = up[1];
        from_server = down[0];
        client(argv[1], strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10));
    }
    from_client = up[0];
    from_server = down[1];
    server(argc > 4 ? argv[4] : "127.0.0.1", strtoul(argv[3], NULL, 10));
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL);
    return 0;
}
