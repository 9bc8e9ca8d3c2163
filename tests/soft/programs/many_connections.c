/* Many connections of this process to itself. They are made, used, left idle, and closed.

   many_connections COUNT IDLE_MS cm|hand

   Prints what the process holds at each stage, and the processor time that the idle connections took. */

#include "ends.h"

#define MESSAGE 4096u
#define LARGE   (256u * 1024)
#define DEPTH   4u

static struct held told(const char *stage, struct held before, int connections)
{
    struct held now = holds();
    long each = ((long)now.resident_kib - (long)before.resident_kib) / connections;

    printf("%s: descriptors %d threads %d heap %zu resident_kib %zu kib_each %ld\n", stage, now.descriptors,
           now.threads, now.heap, now.resident_kib, each);
    fflush(stdout);
    return now;
}

static double processor_ms(void)
{
    struct timespec used;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec * 1e3 + (double)used.tv_nsec / 1e6;
}

static void fill(struct ibv_mr *mr, unsigned seed)
{
    uint32_t *words = mr->addr;

    for (size_t i = 0; i < mr->length / 4; i++)
        words[i] = (uint32_t)i * 2654435761u + seed;
}

/* A message, a large write and a large read in each direction, with the bytes checked. */
static void use(struct end *ends, struct ibv_mr *from, struct ibv_mr *to, unsigned seed)
{
    for (int i = 0; i < 2; i++) {
        fill(from, seed * 4 + (unsigned)i);
        memset(to->addr, 0, to->length);
        EXPECT(receive(ends[!i].qp, to, 0, MESSAGE, 1) == 0);
        EXPECT(post(ends[i].qp, IBV_WR_SEND, from, 0, MESSAGE, NULL, 2) == 0);
        expect_success(ends[i].cq, 1);
        expect_success(ends[!i].cq, 1);
        EXPECT(memcmp(from->addr, to->addr, MESSAGE) == 0);
        EXPECT(post(ends[i].qp, IBV_WR_RDMA_WRITE, from, 0, LARGE, to, 3) == 0);
        expect_success(ends[i].cq, 1);
        EXPECT(memcmp(from->addr, to->addr, LARGE) == 0);
        memset(to->addr, 0, to->length);
        EXPECT(post(ends[!i].qp, IBV_WR_RDMA_READ, to, 0, LARGE, from, 4) == 0);
        expect_success(ends[!i].cq, 1);
        EXPECT(memcmp(from->addr, to->addr, LARGE) == 0);
    }
}

int main(int count, char **words)
{
    EXPECT(count == 4);
    int connections = atoi(words[1]), idle_ms = atoi(words[2]);
    bool by_hand = strcmp(words[3], "hand") == 0;
    struct end(*pairs)[2] = calloc((size_t)connections, sizeof *pairs);
    struct rlimit files;
    struct manager manager;

    EXPECT(getrlimit(RLIMIT_NOFILE, &files) == 0);
    files.rlim_cur = files.rlim_max;
    EXPECT(setrlimit(RLIMIT_NOFILE, &files) == 0);
    open_manager(&manager);
    struct ibv_context *context = manager.listener->verbs != NULL ? manager.listener->verbs : open_device();
    struct ibv_pd *pd = by_hand ? ibv_alloc_pd(context) : NULL;

    /* The first connection leaves behind what the process has from then on. */
    if (by_hand) {
        make_by_hand(pd, pairs[0], DEPTH);
        close_by_hand(pairs[0]);
    } else {
        connect_ends(&manager, pairs[0], DEPTH);
        close_end(&pairs[0][0]);
        close_end(&pairs[0][1]);
    }
    sleep_ms(100);
    struct held before = told("before", holds(), connections);

    uint64_t begin = now_ms();
    for (int i = 0; i < connections; i++)
        if (by_hand)
            make_by_hand(pd, pairs[i], DEPTH);
        else
            connect_ends(&manager, pairs[i], DEPTH);
    printf("connected in_ms %d\n", (int)(now_ms() - begin));
    if (!by_hand)
        told("connected", before, connections);

    begin = now_ms();
    pd = by_hand ? pd : pairs[0][0].qp->pd;
    struct ibv_mr *from = buffer(pd, LARGE), *to = buffer(pd, LARGE);
    for (int i = 0; i < connections; i++)
        use(pairs[i], from, to, (unsigned)i);
    printf("used in_ms %d\n", (int)(now_ms() - begin));
    told("used", before, connections);

    sleep_ms(3000);
    told("idle", before, connections);
    double used = processor_ms();
    sleep_ms(idle_ms);
    printf("idle processor_ms %.3f\n", processor_ms() - used);

    /* They still work. */
    for (int i = 0; i < connections; i += 1 + connections / 50)
        use(pairs[i], from, to, (unsigned)i + 7);

    free_buffer(from);
    free_buffer(to);
    begin = now_ms();
    for (int i = 0; i < connections; i++)
        if (by_hand) {
            close_by_hand(pairs[i]);
        } else {
            close_end(&pairs[i][0]);
            close_end(&pairs[i][1]);
        }
    printf("closed in_ms %d\n", (int)(now_ms() - begin));
    /* Freed channels, descriptors that were noted, and glibc's own. */
    expect_held(before, (size_t)connections * 600 + 65536, 5000, "closing all connections");
    told("closed", before, connections);
    printf("ok\n");
    return 0;
}
