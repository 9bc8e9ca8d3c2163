/* The peer's process dies, or is stopped, at any moment. The survivor's requests end, it hears of the end, and nothing
   is left.

   killed_peer WHAT ROUNDS SEED

   WHAT: writes, reads, messages, idle, connecting, accepting, all of them: what goes on when the peer is killed.
   stopped: the peer is stopped for a while and goes on; nothing fails. */

#include "ends.h"

#include <sys/prctl.h>

#define SIZE  (1u << 20)
#define DEPTH 16u

enum what { WRITES, READS, MESSAGES, IDLE, CONNECTING, ACCEPTING, KINDS };

static const char *const names[KINDS] = {"writes", "reads", "messages", "idle", "connecting", "accepting"};

static unsigned state = 1;

static unsigned draw(unsigned below)
{
    state = state * 1103515245u + 12345u;
    return (state >> 16) % below;
}

struct hello {
    uint64_t address;
    uint32_t rkey;
};

static void keep_busy(struct end *end, struct ibv_mr *mr, struct ibv_mr *remote, enum what what);

/* ---- The peer ---- */

static void tell(int to, uint16_t port)
{
    EXPECT(write(to, &port, sizeof port) == sizeof port);
}

static void peer_accepts(struct manager *manager, enum what what)
{
    struct rdma_cm_event *event = next_event(manager->events, DEADLINE_MS);
    struct hello hello = {0};

    EXPECT(event != NULL && event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
    struct end end = {.id = event->id};
    if (event->param.conn.private_data_len >= sizeof hello)
        memcpy(&hello, event->param.conn.private_data, sizeof hello);
    rdma_ack_cm_event(event);
    give_queue_pair(&end, DEPTH);
    struct ibv_mr *mr = buffer(end.qp->pd, SIZE),
                  remote = {.addr = (void *)(uintptr_t)hello.address, .rkey = hello.rkey};
    for (unsigned i = 0; i < DEPTH; i++)
        EXPECT(receive(end.qp, mr, 0, 4096, 1000) == 0);
    hello = (struct hello){(uintptr_t)mr->addr, mr->rkey};
    struct rdma_conn_param parameters = {
        .responder_resources = 8, .initiator_depth = 8, .private_data = &hello, .private_data_len = sizeof hello};
    EXPECT(rdma_accept(end.id, &parameters) == 0);
    /* When accepting is what it dies in, it may never get this far. */
    expect_event(manager->events, RDMA_CM_EVENT_ESTABLISHED);
    keep_busy(&end, mr, &remote, what);
}

static void peer(int to, int from, enum what what)
{
    struct manager manager;
    uint16_t port;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    open_manager(&manager);
    tell(to, ntohs(manager.address.sin_port));
    if (what == ACCEPTING) {
        /* It is the survivor that listens. */
        EXPECT(read(from, &port, sizeof port) == sizeof port);
        manager.address.sin_port = htons(port);
        for (;;) {
            struct end end = {.id = resolved(&manager)};
            give_queue_pair(&end, DEPTH);
            struct rdma_conn_param parameters = {.responder_resources = 8, .initiator_depth = 8};
            EXPECT(rdma_connect(end.id, &parameters) == 0);
            struct rdma_cm_event *event = next_event(manager.events, DEADLINE_MS);
            if (event != NULL)
                rdma_ack_cm_event(event);
            close_end(&end);
        }
    }
    peer_accepts(&manager, what);
}

/* ---- Both ---- */

/* Posts as much as there is room for. Returns how many. A failure ends it: the queue pair is in error. */
static unsigned fill(struct end *end, struct ibv_mr *mr, struct ibv_mr *remote, enum what what, uint64_t *posted)
{
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND};
    unsigned count = 0;

    while (what <= MESSAGES && *posted < DEPTH) {
        size_t size = what == MESSAGES ? 1 + draw(4096) : 1 + draw(draw(2) ? SIZE : 4096);
        if (post(end->qp, opcodes[what], mr, 0, size, remote, 1) != 0)
            break;
        ++*posted;
        count++;
    }
    return count;
}

/* Until it is killed, or until its own peer is. */
static void keep_busy(struct end *end, struct ibv_mr *mr, struct ibv_mr *remote, enum what what)
{
    uint64_t posted = 0;
    struct ibv_wc wc;

    for (;;) {
        fill(end, mr, remote, what, &posted);
        if (!completion(end->cq, &wc, 50))
            continue;
        if (wc.status != IBV_WC_SUCCESS)
            _exit(0);
        if (wc.wr_id == 1000)
            EXPECT(receive(end->qp, mr, 0, 4096, 1000) == 0);
        else
            posted--;
    }
}

/* ---- The survivor ---- */

static pid_t start_peer(enum what what, int *to, int *from, struct manager *manager)
{
    int down[2], up[2];
    uint16_t port;

    EXPECT(pipe(down) == 0 && pipe(up) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(down[1]);
        close(up[0]);
        peer(up[1], down[0], what);
        _exit(0);
    }
    close(down[0]);
    close(up[1]);
    *to = down[1];
    *from = up[0];
    EXPECT(read(*from, &port, sizeof port) == sizeof port);
    manager->address =
        (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    return pid;
}

static void kill_peer(pid_t pid, int to, int from)
{
    kill(pid, SIGKILL);
    EXPECT(waitpid(pid, NULL, 0) == pid);
    close(to);
    close(from);
}

/* Every request ends, and the connection manager says that the connection has. */
static void expect_end(struct end *end, uint64_t posted, unsigned receives, struct rdma_event_channel *events)
{
    struct ibv_wc wc;
    uint64_t begin = now_ms();
    bool failed = false;

    while (posted > 0 || receives > 0) {
        if (!completion(end->cq, &wc, 5000))
            FAIL("%d requests and %u receives never end", (int)posted, receives);
        if (wc.wr_id == 1000)
            receives--;
        else
            posted--;
        failed = failed || wc.status != IBV_WC_SUCCESS;
        if (wc.status == IBV_WC_SUCCESS && failed && wc.wr_id != 1000)
            FAIL("a request succeeds behind one that failed");
    }
    expect_event(events, RDMA_CM_EVENT_DISCONNECTED);
    if (now_ms() - begin > 3000)
        FAIL("the end took %d ms", (int)(now_ms() - begin));
}

static void survive_connected(enum what what)
{
    struct manager manager = {0};
    struct end end;
    int to, from;

    EXPECT((manager.events = rdma_create_event_channel()) != NULL);
    pid_t pid = start_peer(what, &to, &from, &manager);
    end.id = resolved(&manager);
    give_queue_pair(&end, DEPTH);
    struct ibv_mr *mr = buffer(end.qp->pd, SIZE);
    struct hello hello = {(uintptr_t)mr->addr, mr->rkey};
    struct rdma_conn_param parameters = {
        .responder_resources = 8, .initiator_depth = 8, .private_data = &hello, .private_data_len = sizeof hello};
    for (unsigned i = 0; i < DEPTH; i++)
        EXPECT(receive(end.qp, mr, 0, 4096, 1000) == 0);
    EXPECT(rdma_connect(end.id, &parameters) == 0);
    if (what == CONNECTING) {
        usleep(draw(3000));
        kill_peer(pid, to, from);
        /* Too late, or one of the events of a failure. */
        struct rdma_cm_event *event = next_event(manager.events, 5000);
        EXPECT(event != NULL);
        enum rdma_cm_event_type type = event->event;
        rdma_ack_cm_event(event);
        if (type == RDMA_CM_EVENT_ESTABLISHED)
            expect_end(&end, 0, DEPTH, manager.events);
        else
            EXPECT(type == RDMA_CM_EVENT_REJECTED || type == RDMA_CM_EVENT_CONNECT_ERROR ||
                   type == RDMA_CM_EVENT_UNREACHABLE);
    } else {
        struct rdma_cm_event *event = next_event(manager.events, DEADLINE_MS);
        EXPECT(event != NULL && event->event == RDMA_CM_EVENT_ESTABLISHED);
        memcpy(&hello, event->param.conn.private_data, sizeof hello);
        rdma_ack_cm_event(event);
        struct ibv_mr remote = {.addr = (void *)(uintptr_t)hello.address, .rkey = hello.rkey};
        uint64_t posted = 0, until = now_ms() + draw(30);
        unsigned receives = DEPTH;
        struct ibv_wc wc;
        do {
            fill(&end, mr, &remote, what, &posted);
            while (completion(end.cq, &wc, 0)) {
                EXPECT(wc.status == IBV_WC_SUCCESS);
                if (wc.wr_id == 1000)
                    EXPECT(receive(end.qp, mr, 0, 4096, 1000) == 0);
                else
                    posted--;
            }
        } while (now_ms() < until);
        kill_peer(pid, to, from);
        expect_end(&end, posted, receives, manager.events);
    }
    free_buffer(mr);
    close_end(&end);
    rdma_destroy_event_channel(manager.events);
}

/* The peer connects, and dies before, while or after the survivor accepts. */
static void survive_accepting(void)
{
    struct manager manager, unused;
    struct end end;
    int to, from;

    pid_t pid = start_peer(ACCEPTING, &to, &from, &unused);
    open_manager(&manager);
    tell(to, ntohs(manager.address.sin_port));
    end.id = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST);
    give_queue_pair(&end, DEPTH);
    for (unsigned i = 0; i < DEPTH; i++)
        EXPECT(receive(end.qp, NULL, 0, 0, 1000) == 0);
    struct rdma_conn_param parameters = {.responder_resources = 8, .initiator_depth = 8};
    bool before = draw(2);
    if (before)
        kill_peer(pid, to, from);
    int accepted = rdma_accept(end.id, &parameters);
    usleep(draw(500));
    if (!before)
        kill_peer(pid, to, from);
    bool over = accepted != 0;
    while (!over) {
        struct rdma_cm_event *event = next_event(manager.events, 5000);
        if (event == NULL)
            FAIL("no event after rdma_accept, peer killed %s", before ? "before" : "after");
        over = event->event != RDMA_CM_EVENT_ESTABLISHED && event->event != RDMA_CM_EVENT_CONNECT_REQUEST;
        struct rdma_cm_id *other = event->event == RDMA_CM_EVENT_CONNECT_REQUEST ? event->id : NULL;
        rdma_ack_cm_event(event);
        if (other != NULL)
            EXPECT(rdma_destroy_id(other) == 0);
    }
    close_end(&end);
    close_manager(&manager);
}

/* Nothing fails while the peer is stopped. */
static void survive_stopped(void)
{
    struct manager manager = {0};
    struct end end;
    int to, from;

    EXPECT((manager.events = rdma_create_event_channel()) != NULL);
    pid_t pid = start_peer(WRITES, &to, &from, &manager);
    end.id = resolved(&manager);
    give_queue_pair(&end, DEPTH);
    struct ibv_mr *mr = buffer(end.qp->pd, SIZE);
    struct hello hello = {(uintptr_t)mr->addr, mr->rkey};
    struct rdma_conn_param parameters = {
        .responder_resources = 8, .initiator_depth = 8, .private_data = &hello, .private_data_len = sizeof hello};
    EXPECT(rdma_connect(end.id, &parameters) == 0);
    struct rdma_cm_event *event = next_event(manager.events, DEADLINE_MS);
    EXPECT(event != NULL && event->event == RDMA_CM_EVENT_ESTABLISHED);
    memcpy(&hello, event->param.conn.private_data, sizeof hello);
    rdma_ack_cm_event(event);
    struct ibv_mr remote = {.addr = (void *)(uintptr_t)hello.address, .rkey = hello.rkey};
    kill(pid, SIGSTOP);
    for (unsigned i = 0; i < DEPTH; i++)
        EXPECT(post(end.qp, i % 3 == 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, mr, 0, SIZE, &remote, i) == 0);
    sleep_ms(3000);
    struct ibv_wc wc;
    unsigned done = 0;
    while (completion(end.cq, &wc, 0)) {
        EXPECT(wc.status == IBV_WC_SUCCESS);
        done++;
    }
    kill(pid, SIGCONT);
    expect_success(end.cq, (int)(DEPTH - done));
    kill_peer(pid, to, from);
    expect_end(&end, 0, 0, manager.events);
    free_buffer(mr);
    close_end(&end);
    rdma_destroy_event_channel(manager.events);
}

static void survive(enum what what)
{
    if (what == ACCEPTING)
        survive_accepting();
    else
        survive_connected(what);
}

int main(int count, char **words)
{
    EXPECT(count == 4);
    int rounds = atoi(words[2]);
    state = (unsigned)atoi(words[3]);
    struct held before = {0};

    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("seed %u\n", state);
    for (int i = 0; i < rounds; i++) {
        bool found = false;
        for (enum what what = 0; what < KINDS; what++)
            if (strcmp(words[1], names[what]) == 0 || strcmp(words[1], "all") == 0) {
                survive(what);
                found = true;
            }
        if (!found)
            survive_stopped();
        if (i == 0)
            before = holds();
    }
    expect_held(before, 65536, 5000, "the death of its peers");
    printf("ok\n");
    return 0;
}
