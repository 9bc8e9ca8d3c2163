#include "compat.h"
#include "system.h"

bool memory_allows(const void *memory, size_t size, bool write)
{
    const DWORD readable = PAGE_READONLY | PAGE_READWRITE | PAGE_WRITECOPY | PAGE_EXECUTE_READ |
                           PAGE_EXECUTE_READWRITE | PAGE_EXECUTE_WRITECOPY;
    const DWORD writable = PAGE_READWRITE | PAGE_WRITECOPY | PAGE_EXECUTE_READWRITE | PAGE_EXECUTE_WRITECOPY;
    const char *at = memory, *end = at + size;

    if ((uintptr_t)end < (uintptr_t)at)
        return false;
    while (at < end) {
        MEMORY_BASIC_INFORMATION page;
        if (VirtualQuery(at, &page, sizeof page) == 0 || page.State != MEM_COMMIT)
            return false;
        if ((page.Protect & PAGE_GUARD) != 0 || (page.Protect & (write ? writable : readable)) == 0)
            return false;
        at = (const char *)page.BaseAddress + page.RegionSize;
    }
    return true;
}

void *pages_take(size_t size)
{
    return VirtualAlloc(NULL, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void pages_give(void *pages, size_t size)
{
    UNUSED(size);
    if (pages != NULL)
        VirtualFree(pages, 0, MEM_RELEASE);
}
