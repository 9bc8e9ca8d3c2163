#include "transport.h"
#include "overlapped.h"
#include "stream.h"
#include "trace.h"

#define MAX_WORKERS 4
/* After the last release: how long connections may close by themselves, then how long aborted operations may take to
 * end. */
#define CLOSE_MS 700
#define ABORT_MS 300

enum state { STOPPED, RUNNING, STOPPING };

static SRWLOCK lifecycle_lock = SRWLOCK_INIT;
static CONDITION_VARIABLE lifecycle_changed = CONDITION_VARIABLE_INIT;
static enum state state;
static LONG users;

static HANDLE ports[MAX_WORKERS];
static HANDLE workers[MAX_WORKERS];
static unsigned worker_count;
static volatile LONG next_worker;

static SRWLOCK hold_lock = SRWLOCK_INIT;
static CONDITION_VARIABLE hold_changed = CONDITION_VARIABLE_INIT;
static LONG holds;

static SRWLOCK timer_lock = SRWLOCK_INIT;
static struct timer *timers;

static const ULONG_PTR key_io = 0, key_quit = 1, key_wake = 2;

uint64_t transport_now_ms(void)
{
    return GetTickCount64();
}

/* Fires all due timers and returns the time until the next one. */
static DWORD run_timers(void)
{
    for (;;) {
        uint64_t now = transport_now_ms();
        AcquireSRWLockExclusive(&timer_lock);
        struct timer *first = timers;
        if (first == NULL || first->due_ms > now) {
            DWORD wait = first == NULL ? INFINITE : (DWORD)(first->due_ms - now);
            ReleaseSRWLockExclusive(&timer_lock);
            return wait;
        }
        timers = first->next;
        first->set = false;
        timer_fired *fired = first->fired;
        ReleaseSRWLockExclusive(&timer_lock);
        fired(first);
    }
}

void timer_set(struct timer *timer, uint32_t delay_ms, timer_fired *fired)
{
    AcquireSRWLockExclusive(&timer_lock);
    timer->due_ms = transport_now_ms() + delay_ms;
    timer->fired = fired;
    timer->set = true;
    struct timer **at = &timers;
    while (*at != NULL && (*at)->due_ms <= timer->due_ms)
        at = &(*at)->next;
    timer->next = *at;
    *at = timer;
    bool first = timers == timer;
    ReleaseSRWLockExclusive(&timer_lock);
    /* The first worker sleeps until the timer that was first when it began to wait. */
    if (first)
        PostQueuedCompletionStatus(ports[0], 0, key_wake, NULL);
}

bool timer_cancel(struct timer *timer)
{
    AcquireSRWLockExclusive(&timer_lock);
    bool was_set = timer->set;
    if (was_set) {
        struct timer **at = &timers;
        while (*at != timer)
            at = &(*at)->next;
        *at = timer->next;
        timer->set = false;
    }
    ReleaseSRWLockExclusive(&timer_lock);
    return was_set;
}

static DWORD error_of(OVERLAPPED *overlapped)
{
    static NTSTATUS(WINAPI * to_dos)(NTSTATUS);

    if (overlapped->Internal == 0)
        return 0;
    if (to_dos == NULL)
        to_dos = (NTSTATUS(WINAPI *)(NTSTATUS))(void *)GetProcAddress(GetModuleHandleA("ntdll.dll"),
                                                                    "RtlNtStatusToDosError");
    return (DWORD)to_dos((NTSTATUS)overlapped->Internal);
}

static DWORD WINAPI work(void *argument)
{
    HANDLE *port = argument;
    bool keeps_time = port == &ports[0];

    for (;;) {
        OVERLAPPED *overlapped = NULL;
        ULONG_PTR key = key_wake;
        DWORD bytes = 0;
        DWORD wait = keeps_time ? run_timers() : INFINITE;

        GetQueuedCompletionStatus(*port, &bytes, &key, &overlapped, wait);
        if (overlapped != NULL) {
            struct io *io = CONTAINER_OF(overlapped, struct io, overlapped);
            io->done(io, error_of(&io->overlapped), bytes);
        } else if (key == key_quit) {
            return 0;
        }
    }
}

bool transport_attach(HANDLE handle, unsigned *worker)
{
    *worker = (unsigned)InterlockedIncrement(&next_worker) % worker_count;
    return CreateIoCompletionPort(handle, ports[*worker], key_io, 0) != NULL;
}

void transport_post(struct io *io)
{
    io->overlapped.Internal = 0;
    PostQueuedCompletionStatus(ports[io->worker], 0, key_io, &io->overlapped);
}

void transport_hold(void)
{
    InterlockedIncrement(&holds);
}

void transport_unhold(void)
{
    AcquireSRWLockExclusive(&hold_lock);
    bool last = InterlockedDecrement(&holds) == 0;
    ReleaseSRWLockExclusive(&hold_lock);
    if (last)
        WakeAllConditionVariable(&hold_changed);
}

static bool wait_for_holds(uint64_t deadline_ms)
{
    AcquireSRWLockExclusive(&hold_lock);
    while (holds > 0) {
        uint64_t now = transport_now_ms();
        if (now >= deadline_ms)
            break;
        SleepConditionVariableSRW(&hold_changed, &hold_lock, (DWORD)(deadline_ms - now), 0);
    }
    bool none = holds == 0;
    ReleaseSRWLockExclusive(&hold_lock);
    return none;
}

static void stop_workers(void)
{
    for (unsigned i = 0; i < worker_count; i++)
        PostQueuedCompletionStatus(ports[i], 0, key_quit, NULL);
    for (unsigned i = 0; i < worker_count; i++) {
        WaitForSingleObject(workers[i], INFINITE);
        CloseHandle(workers[i]);
    }
    /* A callback of the last worker may have posted to the first worker's port, so all ports are closed together. */
    for (unsigned i = 0; i < worker_count; i++)
        CloseHandle(ports[i]);
    worker_count = 0;
}

static bool start_workers(void)
{
    SYSTEM_INFO system;
    unsigned count = 0;

    GetSystemInfo(&system);
    unsigned wanted = system.dwNumberOfProcessors;
    wanted = wanted < 2 ? 2 : wanted > MAX_WORKERS ? MAX_WORKERS : wanted;
    for (; count < wanted; count++) {
        ports[count] = CreateIoCompletionPort(INVALID_HANDLE_VALUE, NULL, 0, 1);
        if (ports[count] == NULL)
            break;
        workers[count] = CreateThread(NULL, 0, work, &ports[count], 0, NULL);
        if (workers[count] != NULL)
            continue;
        CloseHandle(ports[count]);
        break;
    }
    worker_count = count;
    return count > 0;
}

bool transport_acquire(void)
{
    bool running = true;

    AcquireSRWLockExclusive(&lifecycle_lock);
    while (state == STOPPING)
        SleepConditionVariableSRW(&lifecycle_changed, &lifecycle_lock, INFINITE, 0);
    if (state == STOPPED) {
        running = start_workers();
        state = running ? RUNNING : STOPPED;
    }
    if (running)
        users++;
    ReleaseSRWLockExclusive(&lifecycle_lock);
    return running;
}

void transport_release(void)
{
    AcquireSRWLockExclusive(&lifecycle_lock);
    bool last = --users == 0;
    if (last)
        state = STOPPING;
    ReleaseSRWLockExclusive(&lifecycle_lock);
    if (!last)
        return;

    /* Connections get time to close by themselves. Then the rest is aborted. */
    overlapped_files_close();
    if (!wait_for_holds(transport_now_ms() + CLOSE_MS)) {
        TRACE("transport: aborting %ld connections", holds);
        streams_abort();
        if (!wait_for_holds(transport_now_ms() + ABORT_MS))
            TRACE("transport: %ld operations did not end", holds);
    }
    stop_workers();

    AcquireSRWLockExclusive(&lifecycle_lock);
    state = STOPPED;
    ReleaseSRWLockExclusive(&lifecycle_lock);
    WakeAllConditionVariable(&lifecycle_changed);
}

bool transport_stopped(void)
{
    AcquireSRWLockExclusive(&lifecycle_lock);
    bool stopped = state == STOPPED;
    ReleaseSRWLockExclusive(&lifecycle_lock);
    return stopped;
}
