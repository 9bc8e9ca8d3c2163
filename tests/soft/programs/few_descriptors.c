/* There are no descriptors left. Whatever needs one says so; nothing is lost, and all works again when there are some.
 */

#include "everything.h"

static void limit_to(rlim_t count)
{
    struct rlimit limit;

    EXPECT(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = count < limit.rlim_max ? count : limit.rlim_max;
    EXPECT(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static double processor_ms(void)
{
    struct timespec used;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec * 1e3 + (double)used.tv_nsec / 1e6;
}

/* With one descriptor more each time, until all goes well. */
static void try_each_limit(void)
{
    char first[80];
    int used = holds().descriptors, failures, limit = used;

    do {
        limit_to((rlim_t)limit);
        answer_ms = 1000;
        failures = do_everything(first);
        answer_ms = HANG_MS;
        limit_to(RLIM_INFINITY);
        if (failures > 0)
            printf("%d descriptors more: %d failures, first %s\n", limit - used, failures, first);
        if (do_everything(first) != 0)
            FAIL("after the limit %d: %s", limit, first);
    } while (failures > 0 && ++limit < used + 100);
    EXPECT(failures == 0);
}

/* Softverbs leaves a silent connection this time, whoever waits. See engine/guests.c. */
#define GRACE_MS 1000

/* Says whether a connection that asks for nothing is left alone: for long, or for its grace if another one waits. */
static void be_silent(const struct sockaddr_in *address, int told, bool another_waits)
{
    int silent = socket(AF_INET, SOCK_STREAM, 0), waits = socket(AF_INET, SOCK_STREAM, 0);
    struct pollfd state = {.fd = silent, .events = POLLIN | POLLRDHUP};
    uint64_t begin = now_ms();

    EXPECT(silent >= 0 && connect(silent, (const struct sockaddr *)address, sizeof *address) == 0);
    sleep_ms(100);
    if (another_waits)
        EXPECT(waits >= 0 && connect(waits, (const struct sockaddr *)address, sizeof *address) == 0);
    bool ended = poll(&state, 1, another_waits ? 300 : GRACE_MS + 500) != 0;
    if (another_waits && now_ms() - begin >= GRACE_MS)
        ended = false; /* this process was held up for longer than that */
    EXPECT(write(told, ended ? "e" : "s", 1) == 1);
    close(silent);
    close(waits);
}

/* The other process: connects, first in silence, and says when it is connected. */
static void connect_to(int port_from, int told)
{
    struct manager manager = {.address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}};
    struct end end;

    EXPECT(read(port_from, &manager.address.sin_port, 2) == 2);
    be_silent(&manager.address, told, false);
    sleep_ms(200);
    be_silent(&manager.address, told, true);
    while (read(port_from, &manager.address.sin_port, 2) == 2) {
        EXPECT((manager.events = rdma_create_event_channel()) != NULL);
        end.id = resolved(&manager);
        give_queue_pair(&end, 4);
        struct rdma_conn_param parameters = {.responder_resources = 1, .initiator_depth = 1};
        EXPECT(rdma_connect(end.id, &parameters) == 0);
        expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
        EXPECT(write(told, "c", 1) == 1);
        close_end(&end);
        rdma_destroy_event_channel(manager.events);
    }
    _exit(0);
}

static int open_listener(struct manager *manager)
{
    struct end end;
    int used = 0;

    open_manager(manager);
    EXPECT((end.id = resolved(manager)) != NULL);
    EXPECT(rdma_destroy_id(end.id) == 0);
    while (used < 4096 && fcntl(used, F_GETFD) >= 0)
        used++;
    return used;
}

/* Who gets the last descriptor keeps it while nobody else waits, and for a while in any case. */
static void try_last_descriptor(int port_to, int told)
{
    struct manager manager;
    char said;

    limit_to((rlim_t)open_listener(&manager) + 1);
    EXPECT(write(port_to, &manager.address.sin_port, 2) == 2);
    for (int i = 0; i < 2; i++)
        EXPECT(read(told, &said, 1) == 1 && said == 's');
    limit_to(RLIM_INFINITY);
    close_manager(&manager);
}

/* A listener that cannot take a connection does not spin, and takes it when there is a descriptor. */
static void try_accepting(int port_to, int told)
{
    struct pollfd state = {.fd = told, .events = POLLIN};
    struct manager manager;
    struct end end;
    char byte;
    int spare = dup(0);

    limit_to((rlim_t)open_listener(&manager));
    EXPECT(dup(0) < 0 && errno == EMFILE);
    EXPECT(write(port_to, &manager.address.sin_port, 2) == 2);
    sleep_ms(200);
    double before = processor_ms();
    sleep_ms(1000);
    double spent = processor_ms() - before;
    printf("without descriptors: processor_ms %.3f\n", spent);
    EXPECT(poll(&state, 1, 0) == 0);
    close(spare);
    end.id = expect_event(manager.events, RDMA_CM_EVENT_CONNECT_REQUEST);
    limit_to(RLIM_INFINITY);
    give_queue_pair(&end, 4);
    struct rdma_conn_param parameters = {.responder_resources = 1, .initiator_depth = 1};
    EXPECT(rdma_accept(end.id, &parameters) == 0);
    EXPECT(poll(&state, 1, DEADLINE_MS) == 1 && read(told, &byte, 1) == 1);
    expect_event(manager.events, RDMA_CM_EVENT_ESTABLISHED);
    expect_event(manager.events, RDMA_CM_EVENT_DISCONNECTED);
    close_end(&end);
    close_manager(&manager);
    EXPECT(spent < 50);
}

int main(void)
{
    int ports[2], told[2];

    setvbuf(stdout, NULL, _IOLBF, 0);
    EXPECT(pipe(ports) == 0 && pipe(told) == 0);
    pid_t other = fork();
    if (other == 0) {
        close(ports[1]);
        connect_to(ports[0], told[1]);
    }
    EXPECT(do_everything(NULL) == 0);
    struct held before = holds();
    try_each_limit();
    expect_held(before, 65536, 5000, "running out of descriptors");
    try_last_descriptor(ports[1], told[0]);
    try_accepting(ports[1], told[0]);
    expect_held(before, 65536, 5000, "accepting without descriptors");
    close(ports[1]);
    EXPECT(waitpid(other, NULL, 0) == other);
    printf("ok\n");
    return 0;
}
