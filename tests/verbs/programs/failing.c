/* failing DEVICE_ADDRESS WHAT [client|server|-] [COMMAND]: two processes talk, and something fails. Prints what each
 * end sees.
 *
 * The client posts two requests, which succeed, and then four with one call. Before these, WHAT happens for real:
 *
 *   nothing         the same without a failure
 *   no_receive      the server has no receives for the last four until the client has its completions
 *   short_receive   the receive of the third message is too short
 *   wrong_key       the third write has a key that nobody gave
 *   own_key         the third send has memory that is not registered
 *   no_queue_pair   the server has destroyed its queue pair
 *   to_error        the client moves its queue pair to the error state while its four requests wait for receives
 *   disconnect      the server disconnects meanwhile
 *   killed          the server is killed meanwhile
 *   overrun         the client's completion queue is too small, and nobody takes what is in it
 *   nobody          there is no listener
 *   reject          the server rejects with the private data "no!"
 *   time_out        the client connects to COMMAND, the address of a host that does not answer
 *   remove          COMMAND removes the device while the four requests wait for receives
 *   command         COMMAND runs
 *
 * client or server: this end has the faults of NDPY_FAULTS, and the other has none. Then WHAT only says what kind of
 * conversation it is: nothing is provoked.
 *
 *   client|server done WR_ID STATUS
 *   client|server cm EVENT STATUS [PRIVATE DATA]
 *   client event EVENT
 *   client state STATE         of its queue pair, after the last four requests
 *   client call NAME ERRNO     calls after COMMAND
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FIRST 2
#define COUNT 6
#define SIZE  64
/* Linux asks a silent host for about a minute (drivers/infiniband/core/cma.c, CMA_MAX_CM_RETRIES). */
#define WAIT_MS  90000
#define PAUSE_MS 1000

static const char *me, *what;
static bool provoke = true;
static int to_other;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *id;
static struct ibv_cq *cq;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char memory[COUNT * SIZE], other_memory[SIZE];
static bool is_over;
static int taken;

static void __attribute__((noreturn, format(printf, 1, 2))) fail(const char *format, ...)
{
    va_list words;
    va_start(words, format);
    printf("%s failed: ", me);
    vprintf(format, words);
    printf(": %s\n", strerror(errno));
    va_end(words);
    exit(1);
}

static bool is(const char *name)
{
    return strcmp(what, name) == 0;
}

static long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static struct rdma_cm_event *next_event(int wait_ms)
{
    struct rdma_cm_event *event;
    struct pollfd waits = {.fd = channel->fd, .events = POLLIN};

    if (poll(&waits, 1, wait_ms) <= 0)
        return NULL;
    if (rdma_get_cm_event(channel, &event) != 0)
        fail("rdma_get_cm_event");
    printf("%s cm %s %d", me, rdma_event_str(event->event), event->status);
    if (event->event == RDMA_CM_EVENT_REJECTED && event->param.conn.private_data_len >= 3)
        printf(" %.3s", (const char *)event->param.conn.private_data);
    puts("");
    return event;
}

/* Returns false for any other event, which is the last one. */
static bool expect(enum rdma_cm_event_type type)
{
    struct rdma_cm_event *event = next_event(WAIT_MS);
    if (event == NULL)
        fail("waiting for %s", rdma_event_str(type));
    bool as_expected = event->event == type;
    if (type == RDMA_CM_EVENT_CONNECT_REQUEST && as_expected)
        id = event->id;
    rdma_ack_cm_event(event);
    return as_expected;
}

static void tell(char word)
{
    if (write(to_other, &word, 1) != 1)
        fail("telling the other end");
}

/* Returns 0 if the other end has gone. */
static char hear(void)
{
    char word;
    return read(to_other, &word, 1) == 1 ? word : 0;
}

static void make(int entries)
{
    struct ibv_qp_init_attr attributes = {
        .cap = {.max_send_wr = COUNT, .max_recv_wr = COUNT, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    pd = ibv_alloc_pd(id->verbs);
    cq = pd != NULL ? ibv_create_cq(id->verbs, entries, NULL, NULL, 0) : NULL;
    mr = cq != NULL ? ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE) : NULL;
    attributes.send_cq = attributes.recv_cq = cq;
    if (mr == NULL || rdma_create_qp(id, pd, &attributes) != 0)
        fail("making the queue pair");
}

/* Prints completions until there were so many in all, or none for so long. */
static void gather(int total, int wait_ms)
{
    struct ibv_wc wc;
    long last = now_ms();

    while (taken < total && now_ms() - last < wait_ms) {
        int count = ibv_poll_cq(cq, 1, &wc);
        if (count < 0)
            return;
        if (count == 0) {
            usleep(500);
            continue;
        }
        printf("%s done %d %d\n", me, (int)wc.wr_id, wc.status);
        taken++;
        last = now_ms();
    }
}

static void post_receives(int begin, int end)
{
    for (int i = begin; i < end; i++) {
        unsigned length = is("short_receive") && provoke && i == FIRST ? SIZE / 2 : SIZE;
        struct ibv_sge sge = {.addr = (uintptr_t)memory + i * SIZE, .length = length, .lkey = mr->lkey};
        struct ibv_recv_wr *bad, wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1};
        if ((errno = ibv_post_recv(id->qp, &wr, &bad)) != 0)
            fail("ibv_post_recv");
    }
}

static void post(int begin, int end, uint64_t remote, uint32_t rkey)
{
    struct ibv_send_wr wr[COUNT], *bad;
    struct ibv_sge sge[COUNT];

    for (int i = begin; i < end; i++) {
        bool is_the_one = provoke && i == FIRST;
        sge[i] = (struct ibv_sge){.addr = (uintptr_t)memory + i * SIZE, .length = SIZE, .lkey = mr->lkey};
        if (is("own_key") && is_the_one)
            sge[i] = (struct ibv_sge){.addr = (uintptr_t)other_memory, .length = SIZE, .lkey = mr->lkey ^ 0x5a5a00};
        wr[i] = (struct ibv_send_wr){
            .wr_id = i,
            .sg_list = &sge[i],
            .num_sge = 1,
            .opcode = is("wrong_key") ? IBV_WR_RDMA_WRITE : IBV_WR_SEND,
            .wr.rdma = {.remote_addr = remote, .rkey = rkey ^ (is("wrong_key") && is_the_one ? 0x5a5a00 : 0)},
            .next = i + 1 < end ? &wr[i + 1] : NULL,
        };
    }
    if ((errno = ibv_post_send(id->qp, &wr[begin], &bad)) != 0)
        printf("%s refused %d %d\n", me, (int)bad->wr_id, errno);
}

static bool waits_for_receives(void)
{
    return (provoke && (is("no_receive") || is("to_error"))) || is("disconnect") || is("killed") || is("command") ||
           is("remove");
}

static void follow_to_the_end(void)
{
    struct rdma_cm_event *event = next_event(WAIT_MS);
    if (event == NULL)
        fail("waiting for the end");
    rdma_ack_cm_event(event);
    if (id->qp == NULL)
        return;
    /* The second end of a connection moves its queue pair only with this call. */
    rdma_disconnect(id);
    gather(COUNT, PAUSE_MS);
}

static struct sockaddr_in address;

static void serve(void)
{
    struct rdma_cm_id *listener;
    struct {
        uint64_t address;
        uint32_t rkey;
    } place = {0};
    char word;

    channel = rdma_create_event_channel();
    if (channel == NULL || rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) != 0 ||
        rdma_bind_addr(listener, (struct sockaddr *)&address) != 0)
        fail("binding");
    address.sin_port = rdma_get_src_port(listener);
    if (is("nobody") && provoke)
        rdma_destroy_id(listener);
    else if (rdma_listen(listener, 1) != 0)
        fail("listening");
    if (write(to_other, &address, sizeof address) != sizeof address)
        fail("telling the address");
    if (is("nobody") || is("time_out") || (is("reject") && !provoke)) {
        /* If the client has a fault, this end never hears of it, or what it hears is no part of the comparison. */
        hear();
        return;
    }
    if (!expect(RDMA_CM_EVENT_CONNECT_REQUEST))
        return;
    if (is("reject")) {
        if (rdma_reject(id, "no!", 3) != 0)
            fail("rejecting");
        hear();
        return;
    }
    make(COUNT + 1);
    int posted = waits_for_receives() ? FIRST : COUNT;
    post_receives(0, posted);
    place.address = (uintptr_t)memory;
    place.rkey = mr->rkey;
    /* Each end says how often the other one may try again. */
    struct rdma_conn_param parameters = {
        .private_data = &place,
        .private_data_len = sizeof place,
        .rnr_retry_count = is("no_receive") ? 1 : 7,
    };
    if (rdma_accept(id, &parameters) != 0 || !expect(RDMA_CM_EVENT_ESTABLISHED))
        fail("accepting");
    while ((word = hear()) != 0) {
        if (word == 'r')
            post_receives(posted, COUNT);
        if (word == 'q')
            rdma_destroy_qp(id);
        if (word == 'd' && rdma_disconnect(id) != 0)
            fail("disconnecting");
        if (word == 'e') {
            follow_to_the_end();
            return;
        }
        tell('+');
    }
}

static void ask(char word)
{
    tell(word);
    if (hear() == 0)
        fail("the server has gone");
}

static void look_for_events(void)
{
    struct ibv_async_event event;
    struct pollfd waits = {.fd = id->verbs->async_fd, .events = POLLIN};

    int wait_ms = is("overrun") || is("command") ? PAUSE_MS : PAUSE_MS / 10;
    while (poll(&waits, 1, wait_ms) > 0 && ibv_get_async_event(id->verbs, &event) == 0) {
        printf("%s event %d\n", me, event.event_type);
        ibv_ack_async_event(&event);
    }
}

static void show_calls(void)
{
    struct ibv_device_attr attributes;
    struct ibv_pd *other;
    errno = 0;
    printf("%s call query_device %d\n", me, ibv_query_device(id->verbs, &attributes));
    errno = 0;
    other = ibv_alloc_pd(id->verbs);
    printf("%s call alloc_pd %d\n", me, other != NULL ? 0 : errno);
    errno = 0;
    printf("%s call reg_mr %d\n", me, ibv_reg_mr(pd, other_memory, SIZE, 0) != NULL ? 0 : errno);
}

static int talk(pid_t server, const char *command)
{
    struct {
        uint64_t address;
        uint32_t rkey;
    } place = {0};
    struct ibv_qp_attr attributes;
    struct ibv_qp_init_attr made;

    if (read(to_other, &address, sizeof address) != sizeof address)
        fail("learning the address");
    if (is("time_out") && provoke && inet_pton(AF_INET, command, &address.sin_addr) != 1)
        fail("%s is no address", command);
    channel = rdma_create_event_channel();
    if (channel == NULL || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) != 0 ||
        rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) != 0 || !expect(RDMA_CM_EVENT_ADDR_RESOLVED))
        fail("resolving the address");
    /* So that a server that does not answer is noticed soon. */
    uint8_t timeout = 12;
    rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout);
    if (rdma_resolve_route(id, 2000) != 0 || !expect(RDMA_CM_EVENT_ROUTE_RESOLVED))
        fail("resolving the route");
    make(is("overrun") && provoke ? 1 : COUNT + 1);
    struct rdma_conn_param parameters = {.retry_count = 1, .rnr_retry_count = 7};
    if (rdma_connect(id, &parameters) != 0)
        fail("connecting");
    struct rdma_cm_event *event = next_event(WAIT_MS);
    if (event == NULL)
        fail("waiting for the connection");
    bool is_there = event->event == RDMA_CM_EVENT_ESTABLISHED;
    if (is_there)
        memcpy(&place, event->param.conn.private_data, sizeof place);
    rdma_ack_cm_event(event);
    if (!is_there)
        return 0;

    post(0, FIRST, place.address, place.rkey);
    if (!is("overrun"))
        gather(FIRST, WAIT_MS);
    if (is("no_queue_pair") && provoke)
        ask('q');
    post(FIRST, COUNT, place.address, place.rkey);
    if (provoke && is("to_error")) {
        attributes.qp_state = IBV_QPS_ERR;
        if ((errno = ibv_modify_qp(id->qp, &attributes, IBV_QP_STATE)) != 0)
            fail("ibv_modify_qp");
    }
    if (provoke && is("disconnect"))
        ask('d');
    if (provoke && is("killed"))
        kill(server, SIGKILL);
    if (provoke && (is("command") || is("remove")) && system(command) != 0)
        fail("%s", command);
    /* siw tells of the end of the connection before. */
    if (is("remove"))
        return expect(RDMA_CM_EVENT_DEVICE_REMOVAL) || expect(RDMA_CM_EVENT_DEVICE_REMOVAL) ? 0 : 1;
    if (is("overrun"))
        look_for_events();
    if (is("disconnect") || is("killed") || is("command")) {
        event = next_event(is("command") ? 5 * PAUSE_MS : WAIT_MS);
        if (event != NULL)
            rdma_ack_cm_event(event);
        is_over = event != NULL;
        if (is_over)
            rdma_disconnect(id);
    }
    if (!is("overrun"))
        gather(COUNT, is_over || is("command") ? PAUSE_MS : WAIT_MS);
    look_for_events();
    if (is("command")) {
        show_calls();
        return 0;
    }
    if (ibv_query_qp(id->qp, &attributes, IBV_QP_STATE, &made) == 0)
        printf("%s state %d\n", me, attributes.qp_state);
    if (is("killed"))
        return 0;
    if (waits_for_receives())
        ask('r');
    tell('e');
    if (!is_over) {
        rdma_disconnect(id);
        if (!is("no_queue_pair"))
            follow_to_the_end();
    }
    return 0;
}

int main(int argc, char **argv)
{
    int ends[2], status = 0;
    pid_t server;

    if (argc < 3 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1)
        return 2;
    address.sin_family = AF_INET;
    what = argv[2];
    const char *faulty = argc > 3 ? argv[3] : "-";
    provoke = strcmp(faulty, "-") == 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0 || (server = fork()) < 0)
        return 2;
    bool is_server = server == 0;
    me = is_server ? "server" : "client";
    to_other = ends[is_server];
    close(ends[!is_server]);
    if (strcmp(faulty, me) != 0)
        unsetenv("NDPY_FAULTS");
    if (is_server) {
        serve();
        return 0;
    }
    int result = talk(server, argc > 4 ? argv[4] : "true");
    close(to_other);
    waitpid(server, &status, 0);
    fflush(stdout);
    /* The kernel frees everything. */
    _exit(result != 0 || !WIFEXITED(status) ? result : WEXITSTATUS(status));
}
