#include "networkdirect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static HMODULE module;

void die(const char *what, HRESULT status)
{
    fprintf(stderr, "%s: 0x%08lx\n", what, (unsigned long)status);
    fflush(NULL);
    ExitProcess(1);
}

void check(const char *what, HRESULT status)
{
    if (status != ND_SUCCESS)
        die(what, status);
}

static DWORD WINAPI watch(void *milliseconds)
{
    Sleep((DWORD)(ULONG_PTR)milliseconds);
    fprintf(stderr, "not done after %lu ms\n", (unsigned long)(ULONG_PTR)milliseconds);
    fflush(NULL);
    TerminateProcess(GetCurrentProcess(), 3);
    return 0;
}

void limit_time(DWORD milliseconds)
{
    CloseHandle(CreateThread(NULL, 0, watch, (void *)(ULONG_PTR)milliseconds, 0, NULL));
}

struct sockaddr_in address_of(const char *host, const char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    WSADATA unused;

    WSAStartup(MAKEWORD(2, 2), &unused);
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1)
        die(host, ND_INVALID_ADDRESS);
    address.sin_port = htons((u_short)atoi(port));
    return address;
}

/* For IPv4, the address is at the beginning of the larger structure. */
struct sockaddr_in6 any_address_of(const char *host, const char *port)
{
    struct sockaddr_in6 address = {.sin6_family = AF_INET6};

    if (!strchr(host, ':')) {
        struct sockaddr_in smaller = address_of(host, port);
        memset(&address, 0, sizeof address);
        memcpy(&address, &smaller, sizeof smaller);
        return address;
    }
    address_of("0.0.0.0", port);
    if (inet_pton(AF_INET6, host, &address.sin6_addr) != 1)
        die(host, ND_INVALID_ADDRESS);
    address.sin6_port = htons((u_short)atoi(port));
    return address;
}

IND2Adapter *open_adapter(const char *dll, const void *address, ULONG size_of_address)
{
    typedef HRESULT(WINAPI * get_class_object)(REFIID, REFIID, void **);
    SOCKET_ADDRESS_LIST *list = NULL;
    IND2Provider *provider;
    IND2Adapter *adapter;
    FARPROC procedure;
    get_class_object get;
    ULONG size = 0;
    UINT64 id;

    module = LoadLibraryA(dll);
    procedure = module ? GetProcAddress(module, "DllGetClassObject") : NULL;
    if (!procedure)
        die(dll, HRESULT_FROM_WIN32(GetLastError()));
    memcpy(&get, &procedure, sizeof get);
    check("DllGetClassObject", get(&softnd_iid_IND2Provider, &softnd_iid_IND2Provider, (void **)&provider));
    if (CALL(provider, ResolveAddress, address, size_of_address, &id) != ND_SUCCESS) {
        CALL(provider, QueryAddressList, NULL, &size);
        list = malloc(size);
        if (!list)
            die("malloc", ND_NO_MEMORY);
        check("QueryAddressList", CALL(provider, QueryAddressList, list, &size));
        if (!list->iAddressCount)
            die("no address", ND_DEVICE_NOT_READY);
        check("ResolveAddress", CALL(provider, ResolveAddress, list->Address[0].lpSockaddr,
                                     (ULONG)list->Address[0].iSockaddrLength, &id));
        free(list);
    }
    check("OpenAdapter", CALL(provider, OpenAdapter, &softnd_iid_IND2Adapter, id, (void **)&adapter));
    CALL0(provider, Release);
    return adapter;
}

BOOL can_unload(void)
{
    typedef HRESULT(WINAPI * can_unload_now)(void);
    FARPROC procedure = GetProcAddress(module, "DllCanUnloadNow");
    can_unload_now ask;

    if (!procedure)
        return FALSE;
    memcpy(&ask, &procedure, sizeof ask);
    return ask() == S_OK;
}

void open_end(struct end *end, IND2Adapter *adapter, ULONG depth)
{
    memset(end, 0, sizeof *end);
    end->adapter = adapter;
    check("CreateOverlappedFile", CALL(adapter, CreateOverlappedFile, &end->file));
    end->overlapped.hEvent = CreateEventA(NULL, TRUE, FALSE, NULL);
    check("CreateCompletionQueue", CALL(adapter, CreateCompletionQueue, &softnd_iid_IND2CompletionQueue, end->file,
                                        2 * depth, 0, 0, (void **)&end->cq));
    check("CreateQueuePair", CALL(adapter, CreateQueuePair, &softnd_iid_IND2QueuePair, (IUnknown *)end->cq,
                                  (IUnknown *)end->cq, NULL, depth, depth, 1, 1, 0, (void **)&end->queue_pair));
    check("CreateConnector",
          CALL(adapter, CreateConnector, &softnd_iid_IND2Connector, end->file, (void **)&end->connector));
}

void close_end(struct end *end)
{
    CALL0(end->connector, Release);
    CALL0(end->queue_pair, Release);
    CALL0(end->cq, Release);
    CloseHandle(end->file);
    CloseHandle(end->overlapped.hEvent);
}

IND2MemoryRegion *new_region(struct end *end, void *memory, SIZE_T size, ULONG flags)
{
    IND2MemoryRegion *region;

    check("CreateMemoryRegion",
          CALL(end->adapter, CreateMemoryRegion, &softnd_iid_IND2MemoryRegion, end->file, (void **)&region));
    check("Register", finished(end, region, CALL(region, Register, memory, size, flags, &end->overlapped)));
    return region;
}

void free_region(struct end *end, IND2MemoryRegion *region)
{
    check("Deregister", finished(end, region, CALL(region, Deregister, &end->overlapped)));
    CALL0(region, Release);
}

HRESULT finished(struct end *end, void *object, HRESULT status)
{
    IND2Overlapped *source = object; /* every interface with requests begins with these methods */

    return status == ND_PENDING ? CALL(source, GetOverlappedResult, &end->overlapped, TRUE) : status;
}

ND2_RESULT next_result(struct end *end)
{
    ND2_RESULT result;

    while (!CALL(end->cq, GetResults, &result, 1))
        check("Notify", finished(end, end->cq, CALL(end->cq, Notify, ND_CQ_NOTIFY_ANY, &end->overlapped)));
    return result;
}
