#include "overlapped.h"
#include "face.h"
#include "nd_adapter.h"
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>

#define STATUS_MARK    0x6E640002
#define PENDING_STATUS ((ULONG_PTR)0x103)

struct overlapped_file {
    struct overlapped_file *next;
    LONG references;  /* of the list, the watch and each source */
    LONG users;       /* sources */
    HANDLE consumer;  /* the handle as the consumer knows it; NULL once that value means another file */
    HANDLE duplicate; /* ours, while there are sources: the consumer may close its handle at any time (C.1.3) */
    HANDLE server;
    SRWLOCK lock;    /* one completion at a time, so that reads and written bytes pair up in order */
    struct io watch; /* a read on the server end, which ends when the last reading handle is closed */
    struct io answer;
    char watch_byte, read_byte;
    bool listed;
};

static SRWLOCK files_lock = SRWLOCK_INIT;
static struct overlapped_file *files;

/* For GetOverlappedResult with wait. A completion wakes all waiters, and each looks at its own structure. */
static SRWLOCK done_lock = SRWLOCK_INIT;
static CONDITION_VARIABLE done_changed = CONDITION_VARIABLE_INIT;

static void file_drop(struct overlapped_file *file)
{
    if (InterlockedDecrement(&file->references) > 0)
        return;
    CloseHandle(file->server);
    free(file);
    transport_unhold();
}

static void file_unlist(struct overlapped_file *file)
{
    AcquireSRWLockExclusive(&files_lock);
    bool listed = file->listed;
    if (listed) {
        struct overlapped_file **at = &files;
        while (*at != file)
            at = &(*at)->next;
        *at = file->next;
        file->listed = false;
    }
    ReleaseSRWLockExclusive(&files_lock);
    if (listed)
        file_drop(file);
}

static void watch_ended(struct io *io, nd_status error, size_t bytes)
{
    struct overlapped_file *file = CONTAINER_OF(io, struct overlapped_file, watch);

    UNUSED(error);
    UNUSED(bytes);
    file_unlist(file);
    file_drop(file);
}

static void answer_ended(struct io *io, nd_status error, size_t bytes)
{
    UNUSED(io);
    UNUSED(error);
    UNUSED(bytes);
}

HRESULT overlapped_file_create(HANDLE *handle)
{
    static volatile LONG count;
    char name[96];
    LARGE_INTEGER clock;
    HANDLE consumer = INVALID_HANDLE_VALUE;

    struct overlapped_file *file = calloc(1, sizeof *file);
    if (file == NULL)
        return ND_NO_MEMORY;
    QueryPerformanceCounter(&clock);
    snprintf(name, sizeof name, "\\\\.\\pipe\\softnd-%lu-%ld-%llx", GetCurrentProcessId(), InterlockedIncrement(&count),
             (unsigned long long)clock.QuadPart);
    file->server = CreateNamedPipeA(name, PIPE_ACCESS_DUPLEX | FILE_FLAG_OVERLAPPED | FILE_FLAG_FIRST_PIPE_INSTANCE,
                                    PIPE_TYPE_BYTE | PIPE_REJECT_REMOTE_CLIENTS, 1, 64, 64, 0, NULL);
    if (file->server == INVALID_HANDLE_VALUE)
        goto fail;
    consumer = CreateFileA(name, GENERIC_READ | GENERIC_WRITE, 0, NULL, OPEN_EXISTING, FILE_FLAG_OVERLAPPED, NULL);
    if (consumer == INVALID_HANDLE_VALUE)
        goto fail;
    if (!SetFileCompletionNotificationModes(consumer,
                                            FILE_SKIP_COMPLETION_PORT_ON_SUCCESS | FILE_SKIP_SET_EVENT_ON_HANDLE))
        goto fail;
    if (!worker_attach(file->server, &file->watch.worker) ||
        !SetFileCompletionNotificationModes(file->server, FILE_SKIP_COMPLETION_PORT_ON_SUCCESS))
        goto fail;

    InitializeSRWLock(&file->lock);
    file->watch.done = watch_ended;
    file->answer.done = answer_ended;
    file->consumer = consumer;
    file->references = 2;
    transport_hold();
    AcquireSRWLockExclusive(&files_lock);
    for (struct overlapped_file *other = files; other != NULL; other = other->next)
        if (other->consumer == consumer)
            other->consumer = NULL;
    file->next = files;
    file->listed = true;
    files = file;
    ReleaseSRWLockExclusive(&files_lock);
    if (!ReadFile(file->server, &file->watch_byte, 1, NULL, &file->watch.overlapped) &&
        GetLastError() != ERROR_IO_PENDING)
        file_drop(file);
    *handle = consumer;
    return ND_SUCCESS;

fail:
    if (consumer != INVALID_HANDLE_VALUE)
        CloseHandle(consumer);
    if (file->server != INVALID_HANDLE_VALUE)
        CloseHandle(file->server);
    free(file);
    return ND_INSUFFICIENT_RESOURCES;
}

/* No source is left. The remaining files have handles that the consumer still holds. */
void face_stopping(void)
{
    AcquireSRWLockExclusive(&files_lock);
    for (struct overlapped_file *file = files; file != NULL; file = file->next)
        CancelIoEx(file->server, &file->watch.overlapped);
    ReleaseSRWLockExclusive(&files_lock);
}

static HRESULT file_use(HANDLE handle, struct overlapped_file **out)
{
    HRESULT status = ND_INVALID_HANDLE;

    AcquireSRWLockExclusive(&files_lock);
    for (struct overlapped_file *file = files; file != NULL; file = file->next) {
        if (file->consumer != handle || handle == NULL)
            continue;
        if (file->users == 0 && !DuplicateHandle(GetCurrentProcess(), handle, GetCurrentProcess(), &file->duplicate, 0,
                                                 FALSE, DUPLICATE_SAME_ACCESS))
            break;
        file->users++;
        InterlockedIncrement(&file->references);
        *out = file;
        status = ND_SUCCESS;
        break;
    }
    ReleaseSRWLockExclusive(&files_lock);
    return status;
}

static void file_leave(struct overlapped_file *file)
{
    HANDLE duplicate = NULL;

    AcquireSRWLockExclusive(&files_lock);
    if (--file->users == 0) {
        duplicate = file->duplicate;
        file->duplicate = NULL;
    }
    ReleaseSRWLockExclusive(&files_lock);
    if (duplicate != NULL)
        CloseHandle(duplicate);
    file_drop(file);
}

static void deliver(struct overlapped_file *file, OVERLAPPED *overlapped, HRESULT status)
{
    DWORD marks[2] = {(DWORD)status, STATUS_MARK};
    bool success = SUCCEEDED(status); /* ND_TIMEOUT too */
    char byte = 0;

    if (!guarded_copy(&overlapped->Offset, marks, sizeof marks))
        return;
    AcquireSRWLockExclusive(&file->lock);
    BOOL read = ReadFile(file->duplicate, &file->read_byte, 1, NULL, overlapped);
    if (!read && GetLastError() == ERROR_IO_PENDING) {
        if (success)
            WriteFile(file->server, &byte, 1, NULL, &file->answer.overlapped);
        else
            CancelIoEx(file->duplicate, overlapped);
    } else if (!read) {
        TRACE("overlapped %p: cannot be completed through its file, error %lu", (void *)overlapped, GetLastError());
        overlapped->Internal = (ULONG_PTR)(DWORD)status;
        if (overlapped->hEvent != NULL)
            SetEvent((HANDLE)((ULONG_PTR)overlapped->hEvent & ~(ULONG_PTR)1));
    }
    ReleaseSRWLockExclusive(&file->lock);

    AcquireSRWLockExclusive(&done_lock);
    ReleaseSRWLockExclusive(&done_lock);
    WakeAllConditionVariable(&done_changed);
}

HRESULT source_open(struct source *source, HANDLE handle)
{
    InitializeSRWLock(&source->lock);
    InitializeConditionVariable(&source->finished);
    source->last = &source->first;
    return file_use(handle, &source->file);
}

void source_start(struct source *source, struct adapter *of, struct object *object)
{
    struct nd_adapter *adapter = CONTAINER_OF(of, struct nd_adapter, adapter);

    source->object = object;
    source->adapter = adapter;
    AcquireSRWLockExclusive(&adapter->sources_lock);
    source->next = adapter->sources;
    source->link = &adapter->sources;
    if (source->next != NULL)
        source->next->link = &source->next;
    adapter->sources = source;
    ReleaseSRWLockExclusive(&adapter->sources_lock);
}

/* Before the object is freed, so that nobody finds the source any more. */
static void source_unlist(struct source *source)
{
    if (source->adapter == NULL)
        return;
    AcquireSRWLockExclusive(&source->adapter->sources_lock);
    if (source->link != NULL) {
        *source->link = source->next;
        if (source->next != NULL)
            source->next->link = source->link;
        source->link = NULL;
    }
    ReleaseSRWLockExclusive(&source->adapter->sources_lock);
}

void source_free(struct source *source)
{
    source_unlist(source);
    if (source->file != NULL)
        file_leave(source->file);
    source->file = NULL;
}

/* Completes every request on the adapter with ND_DEVICE_REMOVED. */
void face_adapter_removed(struct adapter *removed)
{
    struct nd_adapter *adapter = CONTAINER_OF(removed, struct nd_adapter, adapter);
    struct source *sources[64];
    unsigned count;

    /* A source may be closed meanwhile, and then its place in the list says nothing. */
    do {
        count = 0;
        AcquireSRWLockExclusive(&adapter->sources_lock);
        for (struct source *source = adapter->sources; source != NULL && count < COUNT_OF(sources);
             source = source->next) {
            if (source->removed)
                continue;
            source->removed = true;
            object_hold(source->object);
            sources[count++] = source;
        }
        ReleaseSRWLockExclusive(&adapter->sources_lock);
        for (unsigned i = 0; i < count; i++) {
            struct object *object = sources[i]->object;
            request_complete_all(sources[i], REQUEST_ANY, ND_DEVICE_REMOVED);
            object_drop(object);
        }
    } while (count > 0);
}

HRESULT request_accept_to_wait(struct source *source, enum request_kind kind, OVERLAPPED *overlapped, void *subject)
{
    HRESULT status = request_accept(source, kind, overlapped, subject);

    if (status == ND_PENDING && adapter_gone(&source->adapter->adapter))
        request_complete_all(source, kind, ND_DEVICE_REMOVED);
    return status;
}

HRESULT request_accept(struct source *source, enum request_kind kind, OVERLAPPED *overlapped, void *subject)
{
    OVERLAPPED copy;
    ULONG_PTR pending[2] = {PENDING_STATUS, 0};

    if (overlapped == NULL || !guarded_copy(&copy, overlapped, sizeof copy))
        return ND_INVALID_PARAMETER;
    struct request *request = calloc(1, sizeof *request);
    if (request == NULL)
        return ND_NO_MEMORY;
    if (!guarded_copy(overlapped, pending, sizeof pending)) {
        free(request);
        return ND_INVALID_PARAMETER;
    }
    if (copy.hEvent != NULL)
        ResetEvent((HANDLE)((ULONG_PTR)copy.hEvent & ~(ULONG_PTR)1));
    request->overlapped = overlapped;
    request->kind = kind;
    request->subject = subject;
    AcquireSRWLockExclusive(&source->lock);
    *source->last = request;
    source->last = &request->next;
    ReleaseSRWLockExclusive(&source->lock);
    return ND_PENDING;
}

static struct request *take_locked(struct source *source, enum request_kind kind, bool decided, uint64_t due_ms)
{
    for (struct request **at = &source->first; *at != NULL; at = &(*at)->next) {
        struct request *request = *at;
        if (request->decided != decided || (kind != REQUEST_ANY && request->kind != kind))
            continue;
        if (decided && request->due_ms > due_ms)
            continue;
        *at = request->next;
        if (source->last == &request->next)
            source->last = at;
        request->next = NULL;
        source->finishing++;
        return request;
    }
    return NULL;
}

struct request *request_take(struct source *source, enum request_kind kind)
{
    AcquireSRWLockExclusive(&source->lock);
    struct request *request = take_locked(source, kind, false, 0);
    ReleaseSRWLockExclusive(&source->lock);
    return request;
}

static void finish_now(struct source *source, struct request *request, HRESULT status)
{
    if (source->completing != NULL)
        status = source->completing(source, request, status);
    TRACE("overlapped %p: request %d completes 0x%08lx", (void *)request->overlapped, request->kind, status);
    deliver(source->file, request->overlapped, status);
    AcquireSRWLockExclusive(&source->lock);
    if (--source->finishing == 0)
        WakeAllConditionVariable(&source->finished);
    ReleaseSRWLockExclusive(&source->lock);
    free(request);
}

static void delay_passed(struct timer *timer)
{
    struct source *source = CONTAINER_OF(timer, struct source, timer);
    struct object *object = source->object;
    struct request *request;

    for (;;) {
        AcquireSRWLockExclusive(&source->lock);
        request = take_locked(source, REQUEST_ANY, true, now_ms());
        ReleaseSRWLockExclusive(&source->lock);
        if (request == NULL)
            break;
        finish_now(source, request, request->status);
    }
    AcquireSRWLockExclusive(&source->lock);
    uint64_t next_ms = 0;
    for (request = source->first; request != NULL; request = request->next)
        if (request->decided && (next_ms == 0 || request->due_ms < next_ms))
            next_ms = request->due_ms;
    if (next_ms != 0 && !timer->set) {
        uint64_t now = now_ms();
        object_hold(object);
        timer_set(timer, next_ms > now ? (uint32_t)(next_ms - now) : 0, delay_passed);
    }
    ReleaseSRWLockExclusive(&source->lock);
    object_drop(object);
}

/* Puts a request that was taken back into the list with its status. The timer completes it. */
static void finish_later(struct source *source, struct request *request, HRESULT status, uint32_t delay_ms)
{
    request->decided = true;
    request->status = status;
    request->due_ms = now_ms() + delay_ms;
    AcquireSRWLockExclusive(&source->lock);
    source->finishing--;
    *source->last = request;
    source->last = &request->next;
    if (!source->timer.set) {
        object_hold(source->object);
        timer_set(&source->timer, delay_ms, delay_passed);
    }
    ReleaseSRWLockExclusive(&source->lock);
}

void request_finish(struct source *source, struct request *request, HRESULT status)
{
    uint32_t delay_ms = nd_request_delay_ms(&source->adapter->adapter, request);

    if (delay_ms > 0)
        finish_later(source, request, status, delay_ms);
    else
        finish_now(source, request, status);
}

bool request_complete(struct source *source, enum request_kind kind, HRESULT status)
{
    struct request *request = request_take(source, kind);

    if (request == NULL)
        return false;
    request_finish(source, request, status);
    return true;
}

/* Takes all requests of a kind in one step. A request that is accepted meanwhile stays. */
static struct request *take_all(struct source *source, enum request_kind kind)
{
    struct request *first = NULL, **last = &first, *request;

    AcquireSRWLockExclusive(&source->lock);
    while ((request = take_locked(source, kind, false, 0)) != NULL) {
        *last = request;
        last = &request->next;
    }
    ReleaseSRWLockExclusive(&source->lock);
    return first;
}

void request_complete_all(struct source *source, enum request_kind kind, HRESULT status)
{
    struct request *request = take_all(source, kind), *next;

    for (; request != NULL; request = next) {
        next = request->next;
        request->next = NULL;
        request_finish(source, request, status);
    }
}

bool request_pending(struct source *source, enum request_kind kind)
{
    bool found = false;

    AcquireSRWLockExclusive(&source->lock);
    for (struct request *request = source->first; request != NULL && !found; request = request->next)
        found = !request->decided && (kind == REQUEST_ANY || request->kind == kind);
    ReleaseSRWLockExclusive(&source->lock);
    return found;
}

static void wait_until_idle(struct source *source)
{
    AcquireSRWLockExclusive(&source->lock);
    while (source->finishing > 0)
        SleepConditionVariableSRW(&source->finished, &source->lock, INFINITE, 0);
    ReleaseSRWLockExclusive(&source->lock);
}

static void cancel_all(struct source *source, uint32_t delay_ms)
{
    struct request *request = take_all(source, REQUEST_ANY), *next;

    for (; request != NULL; request = next) {
        next = request->next;
        request->next = NULL;
        if (source->abandoned != NULL)
            source->abandoned(source, request);
        if (delay_ms > 0)
            finish_later(source, request, ND_CANCELED, delay_ms);
        else
            finish_now(source, request, ND_CANCELED);
    }
}

HRESULT STDMETHODCALLTYPE source_cancel(struct source *source)
{
    cancel_all(source, nd_cancel_delay_ms(&source->adapter->adapter));
    wait_until_idle(source);
    return ND_SUCCESS;
}

void source_close(struct source *source)
{
    struct request *request;

    source_unlist(source);
    cancel_all(source, 0);
    for (;;) {
        AcquireSRWLockExclusive(&source->lock);
        request = take_locked(source, REQUEST_ANY, true, UINT64_MAX);
        ReleaseSRWLockExclusive(&source->lock);
        if (request == NULL)
            break;
        finish_now(source, request, request->status);
    }
    wait_until_idle(source);
    if (timer_cancel(&source->timer))
        object_drop(source->object);
}

HRESULT overlapped_result(OVERLAPPED *overlapped, BOOL wait)
{
    OVERLAPPED copy;

    if (overlapped == NULL)
        return ND_INVALID_PARAMETER;
    AcquireSRWLockShared(&done_lock);
    bool readable = guarded_copy(&copy, overlapped, sizeof copy);
    while (readable && copy.Internal == PENDING_STATUS && wait) {
        SleepConditionVariableSRW(&done_changed, &done_lock, INFINITE, CONDITION_VARIABLE_LOCKMODE_SHARED);
        readable = guarded_copy(&copy, overlapped, sizeof copy);
    }
    ReleaseSRWLockShared(&done_lock);
    if (!readable)
        return ND_INVALID_PARAMETER;
    if (copy.Internal == PENDING_STATUS)
        return ND_PENDING;
    return copy.OffsetHigh == STATUS_MARK ? (HRESULT)copy.Offset : (HRESULT)copy.Internal;
}
