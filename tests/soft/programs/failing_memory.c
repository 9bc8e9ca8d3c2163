/* Each call that needs memory, or a thread, fails once: the first of them, then the second, and so on.

   failing_memory [FIRST [STEP [COUNT]]]

   Every program step has to fail cleanly or to succeed, and nothing may be left behind. COUNT calls in a row fail. */

#include "everything.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/syscall.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void __libc_free(void *memory);

static _Atomic long calls, fails_from, fails_to, live;

/* For a breakpoint. */
__attribute__((noinline)) static bool fail_here(void)
{
    __asm__ volatile("");
    return true;
}

static bool fails(void)
{
    long from = fails_from;

    if (from == 0)
        return false;
    long call = ++calls;
    return call >= from && call <= fails_to && fail_here();
}

static void *counted(void *memory)
{
    live += memory != NULL;
    if (memory == NULL)
        errno = ENOMEM;
    return memory;
}

void *malloc(size_t size)
{
    return counted(fails() ? NULL : __libc_malloc(size));
}

void *calloc(size_t count, size_t size)
{
    return counted(fails() ? NULL : __libc_calloc(count, size));
}

void *realloc(void *memory, size_t size)
{
    if (memory == NULL)
        return malloc(size);
    if (!fails())
        return __libc_realloc(memory, size);
    errno = ENOMEM;
    return NULL;
}

void free(void *memory)
{
    live -= memory != NULL;
    __libc_free(memory);
}

void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset)
{
    if (!fails())
        return (void *)syscall(SYS_mmap, at, size, protection, flags, file, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    static int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

    if (create == NULL)
        *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    return fails() ? EAGAIN : create(thread, attributes, start, argument);
}

/* Connections end in the background. */
static long settled(long before)
{
    uint64_t end = now_ms() + 3000;

    while (live > before && now_ms() < end)
        sleep_ms(5);
    return live;
}

int main(int count, char **words)
{
    long first = count > 1 ? atol(words[1]) : 1, step = count > 2 ? atol(words[2]) : 1;
    long in_a_row = count > 3 ? atol(words[3]) : 1;
    char what[80];

    setvbuf(stdout, NULL, _IOLBF, 0);
    /* Output is not to need memory. */
    printf("begins\n");
    for (int i = 0; i < 3; i++)
        EXPECT(do_everything(NULL) == 0);
    sleep_ms(300);
    struct held before = holds();
    long begin = live, all = 0, failed_runs = 0;
    bool reached = true;

    for (long n = first; reached; n += step) {
        long had = live;
        uint64_t started = now_ms();
        calls = 0;
        fails_to = n + in_a_row - 1;
        fails_from = n;
        int failures = do_everything(what);
        fails_from = 0;
        reached = calls >= n;
        all = calls > all ? calls : all;
        failed_runs += failures > 0;
        long left = settled(had) - had;
        int ms = (int)(now_ms() - started);
        if (left > 0 || ms > 3000)
            printf("call %ld: %d failures, first %s; %ld left, %d ms\n", n, failures, what, left, ms);
    }
    printf("calls %ld, runs with a failure %ld, left %ld\n", all, failed_runs, live - begin);
    EXPECT(do_everything(NULL) == 0);
    /* Channels of sockets stay, for the next sockets. */
    EXPECT(live - begin < 30);
    expect_held(before, 65536, 5000, "all failures");
    printf("ok\n");
    return 0;
}
