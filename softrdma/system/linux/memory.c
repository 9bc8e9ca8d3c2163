/* What the process's address space allows, and whole pages. */
#include "internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

/* Larger ranges are looked up instead, so that their untouched pages stay so. */
#define MAX_POPULATED (64u * 1024)

/* ---- /proc/self/maps ---- */

enum verdict { UNDECIDED, ALLOWED, REFUSED };

/* PROCMAP_QUERY of Linux 6.11, which finds a mapping by its address. */
struct mapping_query {
    uint64_t size, flags, address;
    uint64_t begin, end, rights, page_size, offset, inode;
    uint32_t major, minor, name_size, build_id_size;
    uint64_t name, build_id;
};
#define QUERY_MAPPING    _IOWR('f', 17, struct mapping_query)
#define MAPPING_READABLE 1u
#define MAPPING_WRITABLE 2u
#define COVERING_OR_NEXT 16u

static enum verdict queries_allow(int file, uintptr_t begin, uintptr_t end, bool write)
{
    uint64_t needed = MAPPING_READABLE | (write ? MAPPING_WRITABLE : 0);

    for (uintptr_t at = begin; at < end;) {
        struct mapping_query query = {.size = sizeof query, .flags = COVERING_OR_NEXT, .address = at};
        if (ioctl(file, QUERY_MAPPING, &query) != 0)
            return errno == ENOENT ? REFUSED : UNDECIDED;
        if (query.begin > at || (query.rights & needed) != needed)
            return REFUSED;
        at = (uintptr_t)query.end;
    }
    return ALLOWED;
}

/* The entries are in the order of their addresses. */
static enum verdict entries_allow(FILE *maps, uintptr_t at, uintptr_t end, bool write)
{
    uintptr_t first, next;
    char rights[5];

    while (fscanf(maps, "%" SCNxPTR "-%" SCNxPTR " %4s%*[^\n]", &first, &next, rights) == 3) {
        if (next <= at)
            continue;
        if (first > at || rights[0] != 'r' || (write && rights[1] != 'w'))
            return REFUSED;
        at = next;
        if (at >= end)
            return ALLOWED;
    }
    return ferror(maps) ? UNDECIDED : REFUSED;
}

static enum verdict maps_allow(uintptr_t begin, uintptr_t end, bool write)
{
    enum verdict verdict = UNDECIDED;
    int cancel = cancel_off();
    FILE *maps = fopen("/proc/self/maps", "re");

    if (maps != NULL) {
        verdict = queries_allow(fileno(maps), begin, end, write);
        if (verdict == UNDECIDED)
            verdict = entries_allow(maps, begin, end, write);
        fclose(maps);
    }
    cancel_as(cancel);
    return verdict;
}

/* 0 or an errno. EINVAL: the kernel does not know this, or not for such a mapping, or the mapping's rights do not
 * suffice. */
static int populate(uintptr_t begin, uintptr_t end, bool write)
{
    int result;

    do
        result = madvise((void *)begin, end - begin, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    while (result != 0 && (errno == EINTR || errno == EAGAIN));
    return result == 0 ? 0 : errno;
}

/* QEMU's user mode answers 0 to advice that it does not know. */
static bool can_populate(uintptr_t page_size)
{
    static _Atomic int answer; /* 1: no, 2: yes */

    if (answer == 0) {
        void *page = mmap(NULL, page_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED)
            return false;
        answer = populate((uintptr_t)page, (uintptr_t)page + page_size, false) == 0 ? 1 : 2;
        munmap(page, page_size);
    }
    return answer == 2;
}

bool memory_allows(const void *memory, size_t size, bool write)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)memory, end = begin + size;

    if (size == 0)
        return true;
    if (end < begin)
        return false;
    begin &= ~(page - 1);
    if (end > UINTPTR_MAX - page)
        return false;
    end = (end + page - 1) & ~(page - 1);
    if (end - begin <= MAX_POPULATED && can_populate(page)) {
        int error = populate(begin, end, write);
        if (error == 0)
            return true;
        if (error == ENOMEM || error == EFAULT)
            return false;
    }
    enum verdict verdict = maps_allow(begin, end, write);
    if (verdict != UNDECIDED)
        return verdict == ALLOWED;
    /* Without /proc: whether there are mappings at all. */
    return msync((void *)begin, end - begin, MS_ASYNC) == 0;
}

void *pages_take(size_t size)
{
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return pages == MAP_FAILED ? NULL : pages;
}

void pages_give(void *pages, size_t size)
{
    if (pages != NULL)
        munmap(pages, size);
}
