/* Memory registered for on-demand paging is read and written where the request says. The word "offset" means
   100 bytes into a page. "page" means the beginning of a page that the process never touched. "across" means over the
   edge of a page. */

#include <sys/mman.h>

#include "two_ends.h"

int main(int count, char **words)
{
    const char *where = count == 3 ? words[2] : "";
    uint64_t offset = !strcmp(where, "offset") ? PAGE + 100 : !strcmp(where, "across") ? 2 * PAGE - 10 : PAGE;
    struct ibv_mr *there, *here = NULL;
    struct ibv_sge element;
    char *memory;

    check(offset != PAGE || !strcmp(where, "page"), "give the name of a device, and offset, page or across");
    open_two_ends(words[1]);
    memory = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    there =
        ibv_reg_mr(domain, memory, 4 * PAGE,
                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ON_DEMAND);
    check(there != NULL, "ibv_reg_mr on demand");
    here = pages(1, IBV_ACCESS_LOCAL_WRITE);
    strcpy(here->addr, "twenty bytes of data");
    element = (struct ibv_sge){(uintptr_t)here->addr, 20, here->lkey};
    post(&near, IBV_WR_RDMA_WRITE, 0, &element, (uintptr_t)memory + offset, there->rkey);
    check(completion(&near, WAIT_MS).status == IBV_WC_SUCCESS, "the write");
    if (memcmp(memory + offset, "twenty bytes of data", 20)) {
        for (uint64_t i = 0; i + 20 < 4 * PAGE; i++)
            if (!memcmp(memory + i, "twenty", 6))
                printf("it was written %d bytes into page %d\n", (int)(i % PAGE), (int)(i / PAGE));
        return tell(DEFECT, "a write to memory on demand went somewhere else");
    }
    memset(here->addr, 0, 20);
    memcpy(memory + offset, "bytes to read", 14);
    post(&near, IBV_WR_RDMA_READ, 0, &element, (uintptr_t)memory + offset, there->rkey);
    check(completion(&near, WAIT_MS).status == IBV_WC_SUCCESS, "the read");
    if (memcmp(here->addr, "bytes to read", 14))
        return tell(DEFECT, "a read of memory on demand came from somewhere else");
    return tell(AS_SPECIFIED, "memory on demand was written and read");
}
