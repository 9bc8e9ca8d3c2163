/* One of two hosts falls silent: a router between them stops to forward. The hosts are network namespaces.

   silent_host           the survivor has a write, a read and a send under way, and receives
   silent_host connecting
                         the peer's host falls silent between TCP's connection and the peer's answer
   silent_host idle      nothing is under way, so nothing fails; after 15 s the link is back and the connection works
   silent_host stopped   the peer's process is stopped for 15 s, with its host there: nothing fails

   Exit status 77: it needs root and network namespaces. */

#include "ends.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>

#define SURVIVOR   "10.77.1.1"
#define PEER       "10.77.2.1"
#define PORT       7471
#define SIZE       (1u << 20)
#define SILENCE_MS 15000

static void run(const char *command)
{
    int status = system(command);

    if (status != 0) {
        printf("skipped: %s: %d\n", command, status);
        exit(77);
    }
}

/* A process in a network namespace of its own. It ends when the other end of the pipe is closed. */
static pid_t router(int *keep)
{
    int ready[2], stay[2];
    char byte = 0;

    EXPECT(pipe(ready) == 0 && pipe(stay) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(stay[1]);
        close(ready[0]);
        if (unshare(CLONE_NEWNET) == 0)
            byte = 1;
        EXPECT(write(ready[1], &byte, 1) == 1);
        EXPECT(read(stay[0], &byte, 1) == 0);
        _exit(0);
    }
    close(ready[1]);
    close(stay[0]);
    EXPECT(read(ready[0], &byte, 1) == 1);
    if (byte == 0) {
        printf("skipped: unshare\n");
        exit(77);
    }
    *keep = stay[1];
    fcntl(*keep, F_SETFD, FD_CLOEXEC);
    return pid;
}

static void command(const char *format, ...)
{
    char text[300];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    run(text);
}

static void forward(pid_t pid, bool on)
{
    command("nsenter -t %d -n sh -c 'echo %d > /proc/sys/net/ipv4/ip_forward'", (int)pid, on);
}

struct shared {
    uint64_t address;
    uint32_t rkey;
};

/* The peer: accepts, says where its memory is, and answers one message per message. */
static void serve(bool answers)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    struct rdma_event_channel *events = rdma_create_event_channel();
    struct rdma_cm_id *listener;
    struct end end = {0};

    EXPECT(rdma_create_id(events, &listener, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_bind_addr(listener, (struct sockaddr *)&any) == 0 && rdma_listen(listener, 4) == 0);
    printf("listening\n");
    fflush(stdout);
    end.id = expect_event(events, RDMA_CM_EVENT_CONNECT_REQUEST);
    if (!answers)
        pause();
    give_queue_pair(&end, 16);
    struct ibv_mr *mr = buffer(end.qp->pd, SIZE);
    struct shared shared = {(uintptr_t)mr->addr, mr->rkey};
    struct rdma_conn_param parameters = {
        .responder_resources = 4, .initiator_depth = 4, .private_data = &shared, .private_data_len = sizeof shared};
    for (int i = 0; i < 8; i++)
        EXPECT(receive(end.qp, mr, 0, 64, 1) == 0);
    EXPECT(rdma_accept(end.id, &parameters) == 0);
    expect_event(events, RDMA_CM_EVENT_ESTABLISHED);
    for (struct ibv_wc wc;;)
        if (completion(end.cq, &wc, 1000) && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV)
            EXPECT(receive(end.qp, mr, 0, 64, 1) == 0);
}

static struct rdma_cm_id *resolve(struct rdma_event_channel *events)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    struct rdma_cm_id *id;

    inet_pton(AF_INET, PEER, &address.sin_addr);
    EXPECT(rdma_create_id(events, &id, NULL, RDMA_PS_TCP) == 0);
    EXPECT(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) == 0);
    expect_event(events, RDMA_CM_EVENT_ADDR_RESOLVED);
    EXPECT(rdma_resolve_route(id, 2000) == 0);
    expect_event(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
    return id;
}

static void expect_failure(struct ibv_cq *cq, enum ibv_wc_status status, uint64_t begin)
{
    struct ibv_wc wc;

    if (!completion(cq, &wc, 30000))
        FAIL("nothing has failed after 30 s");
    printf("request %d: %s after %d ms\n", (int)wc.wr_id, ibv_wc_status_str(wc.status), (int)(now_ms() - begin));
    if (wc.status != status)
        FAIL("%s", ibv_wc_status_str(wc.status));
}

int main(int count, char **words)
{
    const char *mode = count > 1 ? words[1] : "requests";
    bool connecting = strcmp(mode, "connecting") == 0;
    int keep, out[2];

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (geteuid() != 0 || unshare(CLONE_NEWNET) != 0) {
        printf("skipped: no network namespaces\n");
        return 77;
    }
    pid_t between = router(&keep);
    EXPECT(pipe(out) == 0);
    pid_t peer = fork();
    if (peer == 0) {
        EXPECT(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && unshare(CLONE_NEWNET) == 0);
        close(keep);
        dup2(out[1], 1);
        raise(SIGSTOP);
        serve(!connecting);
        return 0;
    }
    close(out[1]);
    EXPECT(waitpid(peer, NULL, WUNTRACED) == peer);
    command(
        "ip link add a0 type veth peer name r0 && ip link set r0 netns %d && ip link add b0 type veth peer name r1 && "
        "ip link set r1 netns %d && ip link set b0 netns %d",
        (int)between, (int)between, (int)peer);
    command("ip link set lo up && ip addr add " SURVIVOR
            "/24 dev a0 && ip link set a0 up && ip route add default via 10.77.1.2");
    command(
        "nsenter -t %d -n sh -c 'ip addr add 10.77.1.2/24 dev r0 && ip link set r0 up && ip addr add 10.77.2.2/24 dev "
        "r1 && ip link set r1 up'",
        (int)between);
    command("nsenter -t %d -n sh -c 'ip link set lo up && ip addr add " PEER
            "/24 dev b0 && ip link set b0 up && ip route "
            "add default via 10.77.2.2'",
            (int)peer);
    forward(between, true);
    kill(peer, SIGCONT);
    char line[100] = "";
    EXPECT(read(out[0], line, sizeof line - 1) > 0 && strstr(line, "listening") != NULL);

    struct rdma_event_channel *events = rdma_create_event_channel();
    struct end end = {.id = resolve(events)};
    struct rdma_conn_param parameters = {.responder_resources = 4, .initiator_depth = 4};
    give_queue_pair(&end, 16);
    EXPECT(rdma_connect(end.id, &parameters) == 0);
    if (connecting) {
        sleep_ms(300);
        forward(between, false);
        uint64_t begin = now_ms();
        struct rdma_cm_event *event = next_event(events, 30000);
        EXPECT(event != NULL);
        printf("%s, status %d, after %d ms\n", rdma_event_str(event->event), event->status, (int)(now_ms() - begin));
        EXPECT(event->event == RDMA_CM_EVENT_UNREACHABLE && event->status == -ETIMEDOUT);
        rdma_ack_cm_event(event);
        close_end(&end);
        kill(peer, SIGKILL);
        printf("ok\n");
        return 0;
    }
    struct rdma_cm_event *event = next_event(events, DEADLINE_MS);
    struct shared shared;
    EXPECT(event != NULL && event->event == RDMA_CM_EVENT_ESTABLISHED);
    memcpy(&shared, event->param.conn.private_data, sizeof shared);
    rdma_ack_cm_event(event);
    struct ibv_mr *mr = buffer(end.qp->pd, SIZE);
    struct ibv_mr remote = {.addr = (void *)(uintptr_t)shared.address, .rkey = shared.rkey};
    EXPECT(post(end.qp, IBV_WR_RDMA_WRITE, mr, 0, SIZE, &remote, 1) == 0);
    expect_success(end.cq, 1);

    if (strcmp(mode, "requests") == 0) {
        EXPECT(receive(end.qp, mr, 0, 64, 2) == 0);
        forward(between, false);
        uint64_t begin = now_ms();
        EXPECT(post(end.qp, IBV_WR_RDMA_WRITE, mr, 0, 64, &remote, 3) == 0);
        EXPECT(post(end.qp, IBV_WR_RDMA_READ, mr, 0, 64, &remote, 4) == 0);
        EXPECT(post(end.qp, IBV_WR_SEND, mr, 0, 64, NULL, 5) == 0);
        expect_failure(end.cq, IBV_WC_RETRY_EXC_ERR, begin);
        for (int i = 0; i < 3; i++)
            expect_failure(end.cq, IBV_WC_WR_FLUSH_ERR, begin);
        EXPECT(now_ms() - begin > 9000);
        EXPECT(now_ms() - begin < 20000);
        expect_event(events, RDMA_CM_EVENT_DISCONNECTED);
    } else if (strcmp(mode, "idle") == 0) {
        EXPECT(receive(end.qp, mr, 0, 64, 2) == 0);
        forward(between, false);
        sleep_ms(SILENCE_MS);
        forward(between, true);
    } else {
        kill(peer, SIGSTOP);
        for (uint64_t i = 10; i < 26; i++)
            EXPECT(post(end.qp, IBV_WR_RDMA_WRITE, mr, 0, SIZE, &remote, i) == 0);
        sleep_ms(SILENCE_MS);
        struct ibv_wc wc;
        while (completion(end.cq, &wc, 0))
            EXPECT(wc.status == IBV_WC_SUCCESS);
        kill(peer, SIGCONT);
        while (wc.wr_id != 25 && completion(end.cq, &wc, DEADLINE_MS))
            EXPECT(wc.status == IBV_WC_SUCCESS);
        EXPECT(wc.wr_id == 25);
    }
    if (strcmp(mode, "requests") != 0) {
        EXPECT(post(end.qp, IBV_WR_RDMA_READ, mr, 0, SIZE, &remote, 30) == 0);
        expect_success(end.cq, 1);
        EXPECT(post(end.qp, IBV_WR_SEND, mr, 0, 64, NULL, 31) == 0);
        expect_success(end.cq, 1);
    }
    free_buffer(mr);
    close_end(&end);
    rdma_destroy_event_channel(events);
    kill(peer, SIGKILL);
    close(keep);
    printf("ok\n");
    return 0;
}
