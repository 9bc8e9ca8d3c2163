/* The system calls that a message costs. The program counts those of the library: its own write() and so on take the
   place of the C library's, count, and pass the call on. That changes the timing less than a tracer would.

   calls polled|asleep|loop|stream. Two processes send each other a message in turn. They look for it again and again,
   sleep in ibv_get_cq_event(), or sleep in poll() with a descriptor that does not block. Or one writes 64 KiB again and
   again. Prints the calls of a process for each message that it sent and received. On a busy machine the library's
   threads do the work now and then. The numbers are those of the round in which they did least of it. "switches" is how
   often a thread of the process gave up its processor. "moved" is how many bytes of a message the receiver moved within
   its buffer, of all rounds. */

#include "ends.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define ROUNDS 12
#define TURNS  400
#define DEPTH  32
#define LARGE  65536
/* Requests under way in a stream. */
#define WINDOW 16

enum call { SEND, RECEIVE, LOOK, SLEEP, GATE, EVENT_PUT, EVENT_TAKEN, SIGNALS, FLAGS, YIELD, FUTEX, SWITCHES, CALLS };
static const char *const names[CALLS] = {
    [SEND] = "send",      [RECEIVE] = "recv",      [LOOK] = "epoll_wait",     [SLEEP] = "ppoll",
    [GATE] = "epoll_ctl", [EVENT_PUT] = "write",   [EVENT_TAKEN] = "preadv2", [SIGNALS] = "rt_sigprocmask",
    [FLAGS] = "fcntl",    [YIELD] = "sched_yield", [FUTEX] = "futex",         [SWITCHES] = "switches",
};
static _Atomic long counts[CALLS];

#define NEXT(name, ...)            \
    static __typeof__(&name) next; \
    if (next == NULL)              \
    next = (__typeof__(next))dlsym(RTLD_NEXT, #name)
#define COUNTED(call, type, name, parameters, arguments) \
    type name parameters                                 \
    {                                                    \
        NEXT(name);                                      \
        counts[call]++;                                  \
        return next arguments;                           \
    }

COUNTED(SEND, ssize_t, send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags))
COUNTED(RECEIVE, ssize_t, recv, (int fd, void *data, size_t size, int flags), (fd, data, size, flags))
COUNTED(LOOK, int, epoll_wait, (int fd, struct epoll_event *events, int most, int ms), (fd, events, most, ms))
COUNTED(SLEEP, int, ppoll,
        (struct pollfd * states, nfds_t count, const struct timespec *limit, const sigset_t *signals),
        (states, count, limit, signals))
COUNTED(GATE, int, epoll_ctl, (int epoll, int what, int fd, struct epoll_event *event), (epoll, what, fd, event))
COUNTED(EVENT_PUT, ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
COUNTED(SIGNALS, int, pthread_sigmask, (int how, const sigset_t *set, sigset_t *before), (how, set, before))
COUNTED(YIELD, int, sched_yield, (void), ())

int fcntl(int fd, int command, ...)
{
    va_list arguments;

    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    NEXT(fcntl);
    counts[FLAGS]++;
    return next(fd, command, argument);
}

long syscall(long number, ...)
{
    long words[6];
    va_list arguments;

    va_start(arguments, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(arguments, long);
    va_end(arguments);
    NEXT(syscall);
    counts[EVENT_TAKEN] += number == SYS_preadv2;
    counts[FUTEX] += number == SYS_futex;
    return next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

static _Atomic long moved;

/* The library moves the part of a message that its buffer had no room for. */
void *memmove(void *to, const void *from, size_t size)
{
    NEXT(memmove);
    moved += (long)size;
    return next(to, from, size);
}

/* ---- The two ends ---- */

enum mode { POLLED, ASLEEP, LOOP, STREAM };
static const char *const modes[] = {"polled", "asleep", "loop", "stream"};

struct remote {
    uint64_t address;
    uint32_t key;
};

static struct ibv_mr *memory;
static long received, sent;

static void give_channel_and_queue_pair(struct end *end, enum mode mode)
{
    EXPECT((end->channel = ibv_create_comp_channel(end->id->verbs)) != NULL);
    if (mode == LOOP)
        EXPECT(fcntl(end->channel->fd, F_SETFL, fcntl(end->channel->fd, F_GETFL) | O_NONBLOCK) == 0);
    EXPECT((end->cq = ibv_create_cq(end->id->verbs, DEPTH * 2, NULL, end->channel, 0)) != NULL);
    struct ibv_qp_init_attr attributes = qp_attributes(end->cq, DEPTH);
    EXPECT(ibv_req_notify_cq(end->cq, 0) == 0);
    EXPECT(rdma_create_qp(end->id, NULL, &attributes) == 0);
    end->qp = end->id->qp;
    memory = buffer(end->id->pd, LARGE);
    for (int i = 0; i < DEPTH; i++)
        EXPECT(receive(end->qp, memory, 0, LARGE, 0) == 0);
}

static void take(struct end *end)
{
    struct ibv_wc wc[16];
    int count = ibv_poll_cq(end->cq, 16, wc);

    EXPECT(count >= 0);
    for (int i = 0; i < count; i++) {
        EXPECT(wc[i].status == IBV_WC_SUCCESS);
        if ((wc[i].opcode & IBV_WC_RECV) == 0) {
            sent++;
            continue;
        }
        received++;
        EXPECT(receive(end->qp, memory, 0, LARGE, 0) == 0);
    }
}

static void sleep_until_event(struct end *end, enum mode mode)
{
    struct pollfd state = {.fd = end->channel->fd, .events = POLLIN};
    struct ibv_cq *cq;
    void *context;

    if (mode == LOOP)
        EXPECT(poll(&state, 1, DEADLINE_MS) == 1);
    /* A loop takes events until there is none. */
    while (ibv_get_cq_event(end->channel, &cq, &context) == 0) {
        ibv_ack_cq_events(cq, 1);
        EXPECT(ibv_req_notify_cq(cq, 0) == 0);
        if (mode == ASLEEP)
            return;
    }
    EXPECT(mode == LOOP && errno == EAGAIN);
}

static void wait_for(struct end *end, enum mode mode, const long *what, long number)
{
    while (*what < number) {
        if (mode == ASLEEP || mode == LOOP)
            sleep_until_event(end, mode);
        take(end);
    }
}

static void turns(struct end *end, enum mode mode, bool begins)
{
    for (int i = 0; i < TURNS; i++) {
        long before = received;
        if (!begins)
            wait_for(end, mode, &received, before + 1);
        EXPECT(post(end->qp, IBV_WR_SEND, memory, 0, 64, NULL, 0) == 0);
        if (begins)
            wait_for(end, mode, &received, before + 1);
    }
}

static void stream(struct end *end, const struct ibv_mr *remote)
{
    long before = sent;

    for (int i = 0; i < TURNS; i++) {
        wait_for(end, STREAM, &sent, before + i - WINDOW);
        EXPECT(post(end->qp, IBV_WR_RDMA_WRITE, memory, 0, LARGE, remote, 0) == 0);
    }
    wait_for(end, STREAM, &sent, before + TURNS);
}

/* How much of a round the library's threads did, by the calls of the program's thread when it does the work itself. */
static long others_did(enum mode mode, const long *of_round)
{
    switch (mode) {
    case ASLEEP:
        return TURNS - of_round[SLEEP];
    case LOOP:
        return TURNS - of_round[FLAGS];
    default:
        return of_round[FUTEX] + of_round[RECEIVE];
    }
}

static long switches(void)
{
    struct rusage used;

    EXPECT(getrusage(RUSAGE_SELF, &used) == 0);
    return used.ru_nvcsw + used.ru_nivcsw;
}

static void run(struct end *end, enum mode mode, bool begins, const struct ibv_mr *remote)
{
    long chosen[CALLS], of_round[CALLS];

    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < CALLS; i++)
            of_round[i] = -counts[i];
        of_round[SWITCHES] = -switches();
        if (mode == STREAM)
            stream(end, remote);
        else
            turns(end, mode, begins);
        for (int i = 0; i < CALLS; i++)
            of_round[i] += counts[i];
        of_round[SWITCHES] += switches();
        if (round == 0 || others_did(mode, of_round) < others_did(mode, chosen))
            memcpy(chosen, of_round, sizeof chosen);
    }
    for (int i = 0; i < CALLS; i++)
        printf("%s %.2f\n", names[i], (double)chosen[i] / TURNS);
}

static void client(enum mode mode, int from_server)
{
    struct manager manager = {.events = rdma_create_event_channel()};
    struct end end = {0};
    struct remote remote;

    EXPECT(read(from_server, &manager.address, sizeof manager.address) == sizeof manager.address);
    end.id = resolved(&manager);
    give_channel_and_queue_pair(&end, mode);
    EXPECT(rdma_connect(end.id, NULL) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    EXPECT(read(from_server, &remote, sizeof remote) == sizeof remote);
    run(&end, mode, true, &(struct ibv_mr){.addr = (void *)(uintptr_t)remote.address, .rkey = remote.key});
    EXPECT(rdma_disconnect(end.id) == 0);
    exit(0);
}

static void server(enum mode mode, int to_client)
{
    struct manager manager;
    struct end end = {0};

    open_manager(&manager);
    EXPECT(write(to_client, &manager.address, sizeof manager.address) == sizeof manager.address);
    end.id = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST);
    give_channel_and_queue_pair(&end, mode);
    EXPECT(rdma_accept(end.id, NULL) == 0);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    struct remote here = {(uintptr_t)memory->addr, memory->rkey};
    EXPECT(write(to_client, &here, sizeof here) == sizeof here);
    if (mode != STREAM)
        for (int round = 0; round < ROUNDS; round++)
            turns(&end, mode, false);
    expect_event(manager.events, RDMA_CM_EVENT_DISCONNECTED);
    printf("moved %.0f\n", (double)moved / (ROUNDS * TURNS));
}

int main(int argc, char **argv)
{
    int ends[2], status;
    enum mode mode = POLLED;

    EXPECT(argc == 2 && pipe(ends) == 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (strcmp(argv[1], modes[mode]) != 0)
        EXPECT(++mode <= STREAM);
    pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0)
        client(mode, ends[0]);
    server(mode, ends[1]);
    EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return 0;
}
