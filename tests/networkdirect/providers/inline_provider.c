/* A provider that returns each result inline if it is ready in time (contract C.2.1). It loads softnd from the folder
   above and changes softnd's tables of methods in memory. Each overlapped method gets an OVERLAPPED of this DLL, waits
   for it, and returns the final status. A request that takes longer is pending. Its end completes the caller's
   OVERLAPPED through a pipe. The caller holds one end of that pipe as its overlapped file.

   Environment variables, read when an adapter is opened, with their defaults:
     INLINE_WAIT_MS      how long to wait for requests that end by themselves: Register, Deregister, CompleteConnect,
                         Disconnect (5000)
     INLINE_OTHERS_MS    how long to wait for requests that need another party: Connect, Accept, GetConnectionRequest,
                         NotifyDisconnect, Notify (0). Above 100 it does not apply to NotifyDisconnect and
                         GetConnectionRequest, which ndpy always has under way.
     INLINE_PHASES       1: nothing is inline. A request that succeeded is pending once more when its result is read
                         (C.4.5).
     INLINE_BUSY         this many Deregister requests, the first ones, end later with ND_DEVICE_BUSY (0) */

#include "../../../softrdma/networkdirect/version2.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORT         __declspec(dllexport)
#define PENDING_STATUS ((ULONG_PTR)0x103)
#define MARK_ENDED     0x6E640010
#define MARK_PHASE     0x6E640011
#define BUCKETS        4096

struct file {
    struct file *next;
    HANDLE client; /* the caller's */
    HANDLE duplicate;
    HANDLE server;
    HANDLE inner; /* softnd's */
    SRWLOCK lock;
    OVERLAPPED answer;
    char read_byte;
};

struct owned {
    struct owned *next;
    const void *object;
    struct file *file;
};

struct request {
    OVERLAPPED own;
    HANDLE event;
    HANDLE wait;
    OVERLAPPED *theirs;
    IND2Overlapped *object;
    struct file *file;
    HRESULT status;
};

static SRWLOCK lock = SRWLOCK_INIT, patching = SRWLOCK_INIT;
static struct file *files;
static struct owned *owners[BUCKETS];
static HMODULE softnd;
static HRESULT(WINAPI *get_class_object)(REFCLSID, REFIID, void **);
static DWORD wait_ms, others_ms;
static volatile LONG phases, busy;

static struct IND2Provider_methods provider;
static struct IND2Adapter_methods adapter;
static struct IND2CompletionQueue_methods completion_queue;
static struct IND2SharedReceiveQueue_methods shared_queue;
static struct IND2MemoryRegion_methods region;
static struct IND2Connector_methods connector;
static struct IND2Listener_methods listener;

static uint32_t number(const char *name, uint32_t otherwise)
{
    char text[16];
    DWORD length = GetEnvironmentVariableA(name, text, sizeof text);
    return length > 0 && length < sizeof text ? (uint32_t)strtoul(text, NULL, 10) : otherwise;
}

/* Keep a copy of the table, and put the replacement into its slot. */
static void patch(void *kept, const void *methods, size_t size, size_t slot, void *replacement)
{
    void **at = (void **)(uintptr_t)methods + slot;
    DWORD protection;

    AcquireSRWLockExclusive(&patching);
    if (((void **)kept)[0] == NULL)
        memcpy(kept, methods, size);
    if (*at != replacement) {
        VirtualProtect(at, sizeof *at, PAGE_READWRITE, &protection);
        *at = replacement;
        VirtualProtect(at, sizeof *at, protection, &protection);
    }
    ReleaseSRWLockExclusive(&patching);
}

#define SLOT(type, method) (offsetof(struct type##_methods, method) / sizeof(void *))
#define PATCH(kept, object, type, method, replacement) \
    patch(&kept, ((type *)(object))->methods, sizeof kept, SLOT(type, method), (void *)(replacement))

/* ---- completing the caller's OVERLAPPED ---- */

static HRESULT new_file(HANDLE inner, HANDLE *out)
{
    static volatile LONG count;
    char name[96];
    struct file *file = calloc(1, sizeof *file);

    snprintf(name, sizeof name, "\\\\.\\pipe\\inline-%lu-%p-%ld", GetCurrentProcessId(), (void *)&files,
             InterlockedIncrement(&count));
    file->inner = inner;
    file->server =
        CreateNamedPipeA(name, PIPE_ACCESS_DUPLEX | FILE_FLAG_OVERLAPPED, PIPE_TYPE_BYTE, 1, 64, 64, 0, NULL);
    file->client = CreateFileA(name, GENERIC_READ | GENERIC_WRITE, 0, NULL, OPEN_EXISTING, FILE_FLAG_OVERLAPPED, NULL);
    if (file->client == INVALID_HANDLE_VALUE)
        return ND_INSUFFICIENT_RESOURCES;
    SetFileCompletionNotificationModes(file->client,
                                       FILE_SKIP_COMPLETION_PORT_ON_SUCCESS | FILE_SKIP_SET_EVENT_ON_HANDLE);
    DuplicateHandle(GetCurrentProcess(), file->client, GetCurrentProcess(), &file->duplicate, 0, FALSE,
                    DUPLICATE_SAME_ACCESS);
    AcquireSRWLockExclusive(&lock);
    file->next = files;
    files = file;
    ReleaseSRWLockExclusive(&lock);
    *out = file->client;
    return ND_SUCCESS;
}

static struct file *file_of(HANDLE client)
{
    struct file *file;

    AcquireSRWLockExclusive(&lock);
    for (file = files; file != NULL && file->client != client; file = file->next)
        ;
    ReleaseSRWLockExclusive(&lock);
    return file;
}

static struct owned **bucket(const void *object)
{
    return &owners[((uintptr_t)object >> 4) % BUCKETS];
}

static void own(const void *object, struct file *file)
{
    struct owned *entry;

    AcquireSRWLockExclusive(&lock);
    for (entry = *bucket(object); entry != NULL && entry->object != object; entry = entry->next)
        ;
    if (entry == NULL) {
        entry = calloc(1, sizeof *entry);
        entry->object = object;
        entry->next = *bucket(object);
        *bucket(object) = entry;
    }
    entry->file = file;
    ReleaseSRWLockExclusive(&lock);
}

static struct file *owner(const void *object)
{
    struct owned *entry;

    AcquireSRWLockShared(&lock);
    for (entry = *bucket(object); entry != NULL && entry->object != object; entry = entry->next)
        ;
    ReleaseSRWLockShared(&lock);
    return entry == NULL ? NULL : entry->file;
}

static void mark_pending(OVERLAPPED *theirs)
{
    if (theirs->hEvent != NULL)
        ResetEvent((HANDLE)((ULONG_PTR)theirs->hEvent & ~(ULONG_PTR)1));
    theirs->Internal = PENDING_STATUS;
}

static void deliver(struct file *file, OVERLAPPED *theirs, HRESULT status, DWORD mark)
{
    char byte = 0;

    theirs->Offset = (DWORD)status;
    theirs->OffsetHigh = mark;
    AcquireSRWLockExclusive(&file->lock);
    if (!ReadFile(file->duplicate, &file->read_byte, 1, NULL, theirs) && GetLastError() == ERROR_IO_PENDING) {
        if (status == ND_SUCCESS)
            WriteFile(file->server, &byte, 1, NULL, &file->answer);
        else
            CancelIoEx(file->duplicate, theirs);
    }
    ReleaseSRWLockExclusive(&file->lock);
}

static DWORD WINAPI deliver_later(void *context)
{
    struct request *request = context;

    deliver(request->file, request->theirs, request->status, MARK_ENDED);
    free(request);
    return 0;
}

static HRESULT complete_later(IND2Overlapped *object, OVERLAPPED *theirs, HRESULT status)
{
    struct request *request = calloc(1, sizeof *request);

    request->file = owner(object);
    request->theirs = theirs;
    request->status = status;
    mark_pending(theirs);
    QueueUserWorkItem(deliver_later, request, WT_EXECUTEDEFAULT);
    return ND_PENDING;
}

/* ---- requests ---- */

static HRESULT STDMETHODCALLTYPE result(IND2Overlapped *self, OVERLAPPED *theirs, BOOL wait)
{
    (void)wait;
    if (*(volatile ULONG_PTR *)&theirs->Internal == PENDING_STATUS)
        return ND_PENDING;
    if (InterlockedCompareExchange((volatile LONG *)&theirs->OffsetHigh, MARK_ENDED, MARK_PHASE) == MARK_PHASE)
        return complete_later(self, theirs, ND_SUCCESS);
    if (*(volatile ULONG_PTR *)&theirs->Internal == PENDING_STATUS)
        return ND_PENDING;
    return (HRESULT)theirs->Offset;
}

/* The classes of softnd all read the status from the OVERLAPPED, so any of them will do. */
static HRESULT inner_result(struct request *request)
{
    return connector.GetOverlappedResult != NULL
               ? connector.GetOverlappedResult((void *)request->object, &request->own, FALSE)
           : region.GetOverlappedResult != NULL
               ? region.GetOverlappedResult((void *)request->object, &request->own, FALSE)
           : completion_queue.GetOverlappedResult != NULL
               ? completion_queue.GetOverlappedResult((void *)request->object, &request->own, FALSE)
           : shared_queue.GetOverlappedResult != NULL
               ? shared_queue.GetOverlappedResult((void *)request->object, &request->own, FALSE)
               : listener.GetOverlappedResult((void *)request->object, &request->own, FALSE);
}

static struct request *new_request(void *object, OVERLAPPED *theirs)
{
    struct request *request = calloc(1, sizeof *request);

    request->event = CreateEventA(NULL, TRUE, FALSE, NULL);
    request->own.hEvent = (HANDLE)((ULONG_PTR)request->event | 1);
    request->theirs = theirs;
    request->object = object;
    request->file = owner(object);
    return request;
}

static void free_request(struct request *request)
{
    CloseHandle(request->event);
    free(request);
}

static void CALLBACK ended(void *context, BOOLEAN timed_out)
{
    struct request *request = context;
    HRESULT status = inner_result(request);
    HANDLE wait;

    (void)timed_out;
    AcquireSRWLockExclusive(&lock);
    wait = request->wait;
    ReleaseSRWLockExclusive(&lock);
    UnregisterWaitEx(wait, NULL);
    deliver(request->file, request->theirs, status, phases && status == ND_SUCCESS ? MARK_PHASE : MARK_ENDED);
    free_request(request);
}

static HRESULT started(struct request *request, HRESULT status, DWORD limit_ms)
{
    if (status == ND_PENDING && !phases && WaitForSingleObject(request->event, limit_ms) == WAIT_OBJECT_0)
        status = inner_result(request);
    if (status != ND_PENDING) {
        free_request(request);
        return status;
    }
    mark_pending(request->theirs);
    AcquireSRWLockExclusive(&lock);
    RegisterWaitForSingleObject(&request->wait, request->event, ended, request, INFINITE, WT_EXECUTEONLYONCE);
    ReleaseSRWLockExclusive(&lock);
    return ND_PENDING;
}

static HRESULT STDMETHODCALLTYPE notify(IND2CompletionQueue *self, ULONG type, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, completion_queue.Notify(self, type, &request->own), others_ms);
}

static HRESULT STDMETHODCALLTYPE notify_shared(IND2SharedReceiveQueue *self, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, shared_queue.Notify(self, &request->own), others_ms);
}

static HRESULT STDMETHODCALLTYPE do_register(IND2MemoryRegion *self, const void *buffer, SIZE_T size, ULONG flags,
                                             OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, region.Register(self, buffer, size, flags, &request->own), wait_ms);
}

static HRESULT STDMETHODCALLTYPE deregister(IND2MemoryRegion *self, OVERLAPPED *theirs)
{
    struct request *request;

    if (InterlockedDecrement(&busy) >= 0)
        return complete_later((IND2Overlapped *)self, theirs, ND_DEVICE_BUSY);
    request = new_request(self, theirs);
    return started(request, region.Deregister(self, &request->own), wait_ms);
}

static HRESULT STDMETHODCALLTYPE do_connect(IND2Connector *self, IUnknown *queue_pair, const struct sockaddr *address,
                                            ULONG size, ULONG inbound, ULONG outbound, const void *data,
                                            ULONG data_size, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(
        request, connector.Connect(self, queue_pair, address, size, inbound, outbound, data, data_size, &request->own),
        others_ms);
}

static HRESULT STDMETHODCALLTYPE complete_connect(IND2Connector *self, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, connector.CompleteConnect(self, &request->own), wait_ms);
}

static HRESULT STDMETHODCALLTYPE do_accept(IND2Connector *self, IUnknown *queue_pair, ULONG inbound, ULONG outbound,
                                           const void *data, ULONG data_size, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, connector.Accept(self, queue_pair, inbound, outbound, data, data_size, &request->own),
                   others_ms);
}

static HRESULT STDMETHODCALLTYPE notify_disconnect(IND2Connector *self, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, connector.NotifyDisconnect(self, &request->own), others_ms > 100 ? 0 : others_ms);
}

static HRESULT STDMETHODCALLTYPE disconnect(IND2Connector *self, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, connector.Disconnect(self, &request->own), wait_ms);
}

static HRESULT STDMETHODCALLTYPE get_request(IND2Listener *self, IUnknown *given, OVERLAPPED *theirs)
{
    struct request *request = new_request(self, theirs);
    return started(request, listener.GetConnectionRequest(self, given, &request->own), others_ms > 100 ? 0 : others_ms);
}

/* ---- creating objects ---- */

static HRESULT STDMETHODCALLTYPE create_file(IND2Adapter *self, HANDLE *out)
{
    HANDLE inner;
    HRESULT status = adapter.CreateOverlappedFile(self, &inner);

    return status == ND_SUCCESS ? new_file(inner, out) : status;
}

static HANDLE inner_file(HANDLE client)
{
    struct file *file = file_of(client);
    return file == NULL ? client : file->inner;
}

/* Record the object's file and patch GetOverlappedResult, which all classes of overlapped requests have. */
#define MADE(kept, type, object, client)                        \
    do {                                                        \
        own(object, file_of(client));                           \
        PATCH(kept, object, type, GetOverlappedResult, result); \
    } while (0)

static HRESULT STDMETHODCALLTYPE create_completion_queue(IND2Adapter *self, REFIID iid, HANDLE client, ULONG depth,
                                                         USHORT group, KAFFINITY affinity, void **out)
{
    HRESULT status = adapter.CreateCompletionQueue(self, iid, inner_file(client), depth, group, affinity, out);

    if (status == ND_SUCCESS) {
        MADE(completion_queue, IND2CompletionQueue, *out, client);
        PATCH(completion_queue, *out, IND2CompletionQueue, Notify, notify);
    }
    return status;
}

static HRESULT STDMETHODCALLTYPE create_region(IND2Adapter *self, REFIID iid, HANDLE client, void **out)
{
    HRESULT status = adapter.CreateMemoryRegion(self, iid, inner_file(client), out);

    if (status == ND_SUCCESS) {
        MADE(region, IND2MemoryRegion, *out, client);
        PATCH(region, *out, IND2MemoryRegion, Register, do_register);
        PATCH(region, *out, IND2MemoryRegion, Deregister, deregister);
    }
    return status;
}

static HRESULT STDMETHODCALLTYPE create_shared_queue(IND2Adapter *self, REFIID iid, HANDLE client, ULONG depth,
                                                     ULONG max_sge, ULONG threshold, USHORT group, KAFFINITY affinity,
                                                     void **out)
{
    HRESULT status = adapter.CreateSharedReceiveQueue(self, iid, inner_file(client), depth, max_sge, threshold, group,
                                                      affinity, out);

    if (status == ND_SUCCESS) {
        MADE(shared_queue, IND2SharedReceiveQueue, *out, client);
        PATCH(shared_queue, *out, IND2SharedReceiveQueue, Notify, notify_shared);
    }
    return status;
}

static HRESULT STDMETHODCALLTYPE create_connector(IND2Adapter *self, REFIID iid, HANDLE client, void **out)
{
    HRESULT status = adapter.CreateConnector(self, iid, inner_file(client), out);

    if (status == ND_SUCCESS) {
        MADE(connector, IND2Connector, *out, client);
        PATCH(connector, *out, IND2Connector, Connect, do_connect);
        PATCH(connector, *out, IND2Connector, CompleteConnect, complete_connect);
        PATCH(connector, *out, IND2Connector, Accept, do_accept);
        PATCH(connector, *out, IND2Connector, NotifyDisconnect, notify_disconnect);
        PATCH(connector, *out, IND2Connector, Disconnect, disconnect);
    }
    return status;
}

static HRESULT STDMETHODCALLTYPE create_listener(IND2Adapter *self, REFIID iid, HANDLE client, void **out)
{
    HRESULT status = adapter.CreateListener(self, iid, inner_file(client), out);

    if (status == ND_SUCCESS) {
        MADE(listener, IND2Listener, *out, client);
        PATCH(listener, *out, IND2Listener, GetConnectionRequest, get_request);
    }
    return status;
}

static HRESULT STDMETHODCALLTYPE open_adapter(IND2Provider *self, REFIID iid, UINT64 id, void **out)
{
    HRESULT status = provider.OpenAdapter(self, iid, id, out);

    if (status != ND_SUCCESS)
        return status;
    wait_ms = number("INLINE_WAIT_MS", 5000);
    others_ms = number("INLINE_OTHERS_MS", 0);
    phases = (LONG)number("INLINE_PHASES", 0);
    busy = (LONG)number("INLINE_BUSY", 0);
    PATCH(adapter, *out, IND2Adapter, CreateOverlappedFile, create_file);
    PATCH(adapter, *out, IND2Adapter, CreateCompletionQueue, create_completion_queue);
    PATCH(adapter, *out, IND2Adapter, CreateMemoryRegion, create_region);
    PATCH(adapter, *out, IND2Adapter, CreateSharedReceiveQueue, create_shared_queue);
    PATCH(adapter, *out, IND2Adapter, CreateConnector, create_connector);
    PATCH(adapter, *out, IND2Adapter, CreateListener, create_listener);
    return status;
}

EXPORT HRESULT STDMETHODCALLTYPE DllGetClassObject(REFCLSID class_id, REFIID iid, void **out)
{
    HRESULT status = get_class_object(class_id, iid, out);

    if (status == S_OK)
        PATCH(provider, *out, IND2Provider, OpenAdapter, open_adapter);
    return status;
}

/* softnd's tables point into this DLL until the process ends, so it can never be unloaded. */
EXPORT HRESULT STDMETHODCALLTYPE DllCanUnloadNow(void)
{
    return S_FALSE;
}

BOOL WINAPI DllMain(HINSTANCE instance, DWORD reason, void *reserved)
{
    char path[MAX_PATH];

    (void)reserved;
    if (reason != DLL_PROCESS_ATTACH)
        return TRUE;
    GetModuleFileNameA(instance, path, sizeof path);
    for (int levels = 0; levels < 2; levels++)
        *strrchr(path, '\\') = 0;
    strcat(path, "\\softnd.dll");
    softnd = LoadLibraryA(path);
    if (softnd == NULL)
        return FALSE;
    get_class_object = (void *)GetProcAddress(softnd, "DllGetClassObject");
    return get_class_object != NULL;
}
