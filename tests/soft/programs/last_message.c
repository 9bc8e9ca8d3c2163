/* A peer that has taken all messages ends its process, without a disconnect. All of them succeed at the sender.

   last_message HABIT ROUNDS

   HABIT: what the peer does until then. polled: it takes messages. written: it looks at memory, into which the sender
   writes, and polls. The library's own threads are slow to send in the peer. */

#include "ends.h"

#include <dlfcn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define MESSAGES 4u
#define SIZE     (MESSAGES * 64)

static bool is_late;

/* The library's calls come here. In the peer those of its threads come late, once it takes messages. */
ssize_t send(int handle, const void *data, size_t size, int flags)
{
    static ssize_t (*real)(int, const void *, size_t, int);

    if (real == NULL)
        real = (ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send");
    if (is_late && syscall(SYS_gettid) != getpid())
        sleep_ms(5);
    return real(handle, data, size, flags);
}

struct hello {
    uint64_t address;
    uint32_t rkey;
};

static void take_all(struct end *end, const char *habit, const volatile char *memory)
{
    struct ibv_wc wc;

    if (strcmp(habit, "written") == 0) {
        while (memory[SIZE - 1] == 0)
            ibv_poll_cq(end->cq, 1, &wc);
        return;
    }
    for (unsigned left = MESSAGES; left > 0;) {
        if (ibv_poll_cq(end->cq, 1, &wc) == 0)
            continue;
        EXPECT(wc.status == IBV_WC_SUCCESS);
        left--;
    }
}

static void peer(int to, const char *habit)
{
    struct manager manager;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(60);
    open_manager(&manager);
    uint16_t port = ntohs(manager.address.sin_port);
    EXPECT(write(to, &port, sizeof port) == sizeof port);
    struct end end = {.id = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST)};
    give_queue_pair(&end, MESSAGES);
    struct ibv_mr *mr = buffer(end.qp->pd, SIZE);
    memset(mr->addr, 0, SIZE);
    for (unsigned i = 0; i < MESSAGES; i++)
        EXPECT(receive(end.qp, mr, 0, 64, i) == 0);
    struct hello hello = {(uintptr_t)mr->addr, mr->rkey};
    struct rdma_conn_param parameters = {.private_data = &hello, .private_data_len = sizeof hello};
    EXPECT(rdma_accept(end.id, &parameters) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    is_late = true;
    take_all(&end, habit, mr->addr);
}

static void round_of(const char *habit, int number)
{
    struct manager manager = {0};
    struct ibv_wc wc;
    int up[2];
    uint16_t port;

    EXPECT(pipe(up) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        peer(up[1], habit);
        exit(0);
    }
    close(up[1]);
    EXPECT(read(up[0], &port, sizeof port) == sizeof port);
    close(up[0]);
    EXPECT((manager.events = rdma_create_event_channel()) != NULL);
    manager.address =
        (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    struct end end = {.id = resolved(&manager)};
    give_queue_pair(&end, MESSAGES);
    struct ibv_mr *mr = buffer(end.qp->pd, SIZE);
    memset(mr->addr, 1, SIZE);
    struct rdma_conn_param parameters = {0};
    EXPECT(rdma_connect(end.id, &parameters) == 0);
    struct rdma_cm_event *event = next_event(manager.events, DEADLINE_MS);
    EXPECT(event != NULL && event->event == RDMA_CM_EVENT_ESTABLISHED);
    struct hello hello;
    memcpy(&hello, event->param.conn.private_data, sizeof hello);
    rdma_ack_cm_event(event);
    struct ibv_mr remote = {.addr = (void *)(uintptr_t)hello.address, .rkey = hello.rkey};
    /* In the other rounds the peer does the library's work itself by then, and may hold its receipts back. */
    if (number % 2 == 1)
        sleep_ms(5);
    enum ibv_wr_opcode opcode = strcmp(habit, "written") == 0 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND;
    for (unsigned i = 0; i < MESSAGES; i++)
        EXPECT(post(end.qp, opcode, mr, i * 64, 64, &remote, i) == 0);
    for (unsigned i = 0; i < MESSAGES; i++) {
        EXPECT(completion(end.cq, &wc, DEADLINE_MS));
        if (wc.status != IBV_WC_SUCCESS)
            FAIL("%s, round %d: request %d has status %d", habit, number, (int)wc.wr_id, (int)wc.status);
    }
    EXPECT(waitpid(pid, NULL, 0) == pid);
    free_buffer(mr);
    close_end(&end);
    rdma_destroy_event_channel(manager.events);
}

int main(int count, char **arguments)
{
    EXPECT(count == 3);
    for (int i = 0; i < atoi(arguments[2]); i++)
        round_of(arguments[1], i);
    return 0;
}
