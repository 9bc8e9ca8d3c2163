/* Locks, threads, time, and the workers with their completion ports.
 *
 * Each worker has its own port. A handle stays with one worker, so an operation that this thread started also ends on
 * it, without waking another thread.
 */
#include "compat.h"
#include "status.h"
#include "transport.h"

#define MAX_WORKERS 4

static HANDLE ports[MAX_WORKERS];
static HANDLE workers[MAX_WORKERS];
static unsigned worker_count;

static const ULONG_PTR key_io = 0, key_quit = 1, key_wake = 2;

/* ---- Locks ---- */

void lock_start(struct lock *lock)
{
    InitializeSRWLock(&lock->lock);
}

void lock_acquire(struct lock *lock)
{
    AcquireSRWLockExclusive(&lock->lock);
}

void lock_release(struct lock *lock)
{
    ReleaseSRWLockExclusive(&lock->lock);
}

void lock_share(struct lock *lock)
{
    AcquireSRWLockShared(&lock->lock);
}

void lock_unshare(struct lock *lock)
{
    ReleaseSRWLockShared(&lock->lock);
}

static DWORD milliseconds(uint64_t ms)
{
    return ms < INFINITE ? (DWORD)ms : INFINITE - 1;
}

void condition_start(struct condition *condition)
{
    InitializeConditionVariable(&condition->condition);
}

void condition_wait(struct condition *condition, struct lock *lock)
{
    SleepConditionVariableSRW(&condition->condition, &lock->lock, INFINITE, 0);
}

void condition_wait_ms(struct condition *condition, struct lock *lock, uint64_t ms)
{
    SleepConditionVariableSRW(&condition->condition, &lock->lock, milliseconds(ms), 0);
}

void condition_wake_all(struct condition *condition)
{
    WakeAllConditionVariable(&condition->condition);
}

/* ---- Threads and time ---- */

uint64_t thread_id(void)
{
    return GetCurrentThreadId();
}

void thread_yield(void)
{
    SwitchToThread();
}

uint64_t now_ms(void)
{
    return GetTickCount64();
}

/* ---- Workers ---- */

static nd_status status_of(const OVERLAPPED *overlapped)
{
    static NTSTATUS(WINAPI * to_dos)(NTSTATUS);

    if (overlapped->Internal == 0)
        return ND_SUCCESS;
    if (to_dos == NULL)
        to_dos = (NTSTATUS(WINAPI *)(NTSTATUS))(void *)GetProcAddress(GetModuleHandleA("ntdll.dll"),
                                                                      "RtlNtStatusToDosError");
    DWORD error = (DWORD)to_dos((NTSTATUS)overlapped->Internal);
    return error == 0 ? ND_SUCCESS : handshake_status(error);
}

static DWORD run_timers(void)
{
    uint64_t wait = timers_run();
    return wait == TIMERS_NONE ? INFINITE : milliseconds(wait);
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
            io->done(io, status_of(&io->overlapped), bytes);
        } else if (key == key_quit) {
            return 0;
        }
    }
}

unsigned workers_start(void)
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
    return count;
}

void workers_stop(void)
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

void workers_wake(void)
{
    PostQueuedCompletionStatus(ports[0], 0, key_wake, NULL);
}

void worker_post(struct io *io)
{
    io->overlapped.Internal = 0;
    PostQueuedCompletionStatus(ports[io->worker], 0, key_io, &io->overlapped);
}

bool worker_attach(HANDLE handle, unsigned *worker)
{
    *worker = transport_next_worker();
    return CreateIoCompletionPort(handle, ports[*worker], key_io, 0) != NULL;
}
