/* Registered memory goes away while peers and this process use it: unmapped, protected, or a file that is cut.

   missing_memory [own]: with "own", the program has a handler of its own for SIGSEGV and SIGBUS

   The request fails, the connection ends, and the process goes on. */

#include "ends.h"

#include <setjmp.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#define SIZE  (4u << 20)
#define DEPTH 8u

enum loss { UNMAPPED, NO_ACCESS, READ_ONLY, CUT, LOSSES };
enum use { REMOTE_WRITE, REMOTE_READ, LOCAL_WRITE, LOCAL_READ, MESSAGE, RECEIVED, USES };

static const char *const losses[] = {"unmapped", "without rights", "read-only", "a file that was cut"};
static const char *const uses[] = {"the target of a write",
                                   "the source of a read",
                                   "the source of a write",
                                   "the target of a read",
                                   "a message",
                                   "a receive"};

static _Atomic int own_faults;
static sigjmp_buf resume;

static void on_own_fault(int number)
{
    own_faults++;
    siglongjmp(resume, number);
}

static void have_own_handler(void)
{
    struct sigaction action = {.sa_handler = on_own_fault};

    EXPECT(sigaction(SIGSEGV, &action, NULL) == 0 && sigaction(SIGBUS, &action, NULL) == 0);
}

/* Faults of the program's own still reach its handler. */
static void fault(void)
{
    volatile int *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int before = own_faults;

    if (sigsetjmp(resume, 1) == 0)
        *nowhere = 1;
    EXPECT(own_faults == before + 1);
    munmap((void *)(uintptr_t)nowhere, 4096);
}

static bool matters(enum loss loss, enum use use)
{
    return loss != READ_ONLY || use == REMOTE_WRITE || use == LOCAL_READ || use == RECEIVED;
}

static void lose(enum loss loss, char *memory, int file)
{
    switch (loss) {
    case UNMAPPED:
        EXPECT(munmap(memory, SIZE) == 0);
        break;
    case NO_ACCESS:
        EXPECT(mprotect(memory, SIZE, PROT_NONE) == 0);
        break;
    case READ_ONLY:
        EXPECT(mprotect(memory, SIZE, PROT_READ) == 0);
        break;
    default:
        EXPECT(ftruncate(file, SIZE / 2 + 100) == 0);
    }
}

static void post_use(struct end *ends, struct ibv_mr *gone, struct ibv_mr *there, enum use use)
{
    switch (use) {
    case REMOTE_WRITE:
        post(ends[0].qp, IBV_WR_RDMA_WRITE, there, 0, SIZE, gone, use);
        break;
    case REMOTE_READ:
        post(ends[0].qp, IBV_WR_RDMA_READ, there, 0, SIZE, gone, use);
        break;
    case LOCAL_WRITE:
        post(ends[0].qp, IBV_WR_RDMA_WRITE, gone, 0, SIZE, there, use);
        break;
    case LOCAL_READ:
        post(ends[0].qp, IBV_WR_RDMA_READ, gone, 0, SIZE, there, use);
        break;
    case MESSAGE:
        if (receive(ends[1].qp, there, 0, SIZE, 100) == 0)
            post(ends[0].qp, IBV_WR_SEND, gone, 0, SIZE, NULL, use);
        break;
    default:
        if (receive(ends[1].qp, gone, 0, SIZE, 100) == 0)
            post(ends[0].qp, IBV_WR_SEND, there, 0, SIZE, NULL, use);
    }
}

static bool is_access_error(enum ibv_wc_status status, enum use use)
{
    if (use == REMOTE_WRITE || use == REMOTE_READ)
        return status == IBV_WC_REM_ACCESS_ERR;
    if (use == RECEIVED)
        return status == IBV_WC_REM_OP_ERR;
    return status == IBV_WC_LOC_PROT_ERR;
}

static void try(struct ibv_pd *pd, enum loss loss, enum use use, bool in_use)
{
    struct ibv_wc wc = {0};
    struct end ends[2];

    make_by_hand(pd, ends, DEPTH);
    int file = (int)syscall(SYS_memfd_create, "missing", 0u);
    EXPECT(file >= 0 && ftruncate(file, SIZE) == 0);
    char *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, loss == CUT ? MAP_SHARED : MAP_PRIVATE, file, 0);
    struct ibv_mr *gone = ibv_reg_mr(pd, memory, SIZE, RIGHTS), *there = buffer(pd, SIZE);
    EXPECT(gone != NULL);
    /* It works while the memory is there. */
    post_use(ends, gone, there, use);
    expect_success(ends[0].cq, 1);
    if (use >= MESSAGE)
        expect_success(ends[1].cq, 1);
    if (in_use)
        for (unsigned i = 0; i < DEPTH / 2; i++)
            post_use(ends, gone, there, use);
    lose(loss, memory, file);
    post_use(ends, gone, there, use);
    do
        if (!completion(ends[0].cq, &wc, 10000))
            FAIL("%s, %s: nothing fails", uses[use], losses[loss]);
    while (wc.status == IBV_WC_SUCCESS);
    if (!is_access_error(wc.status, use))
        FAIL("%s, %s: %s", uses[use], losses[loss], ibv_wc_status_str(wc.status));
    if (use == RECEIVED) {
        do
            EXPECT(completion(ends[1].cq, &wc, 10000));
        while (wc.status == IBV_WC_SUCCESS);
        EXPECT(wc.status == IBV_WC_LOC_PROT_ERR);
    }
    EXPECT(ibv_dereg_mr(gone) == 0);
    free_buffer(there);
    close_by_hand(ends);
    if (loss != UNMAPPED)
        munmap(memory, SIZE);
    close(file);
}

int main(int count, char **words)
{
    bool own = count > 1 && strcmp(words[1], "own") == 0;
    struct ibv_context *context = open_device();
    struct ibv_pd *pd = ibv_alloc_pd(context);

    setvbuf(stdout, NULL, _IOLBF, 0);
    for (enum loss loss = 0; loss < LOSSES; loss++)
        for (enum use use = 0; use < USES; use++) {
            if (!matters(loss, use))
                continue;
            if (own) {
                have_own_handler();
                fault();
                /* The library's handler comes above it within a tick of the clock. */
                sleep_ms(15);
            }
            try(pd, loss, use, false);
            try(pd, loss, use, true);
            if (own) {
                EXPECT(own_faults > 0);
                fault();
            }
            printf("%s, %s\n", uses[use], losses[loss]);
        }
    EXPECT(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
    if (own)
        fault();
    printf("ok\n");
    return 0;
}
