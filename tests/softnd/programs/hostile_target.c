/* A listener for the hostile peers. hostile_target.h says what it does.
 *
 *   hostile_target.exe DLL ADDRESS SECRET SECONDS own|shared
 */
#include "networkdirect.h"

#include <psapi.h>
#include <stdlib.h>

enum kind { REQUEST, ACCEPT, GONE, NOTIFY };

struct operation {
    OVERLAPPED overlapped;
    enum kind kind;
    unsigned slot;
};

struct native {
    ULONG_PTR generation;
    IND2Connector *connector;
    IND2QueuePair *queue_pair;
    IND2MemoryWindow *writable, *readable;
    IND2MemoryRegion *open, *hidden, *messages;
    struct operation request, accept, gone;
};

#include "hostile_target.h"

/* its file, completion queue and adapter; before the loop, also used to wait for single requests */
static struct end end;
static IND2Listener *listener;
static IND2SharedReceiveQueue *shared; /* if with_shared */
static struct operation notify = {.kind = NOTIFY};
static bool notify_pending;

/* Wine does not count a process's handles, but a new handle gets the lowest free number. */
static unsigned long long next_handle(void)
{
    HANDLE next = CreateEventA(NULL, TRUE, FALSE, NULL);

    CloseHandle(next);
    return (ULONG_PTR)next / 4;
}

static unsigned long long memory_used(void)
{
    PROCESS_MEMORY_COUNTERS memory = {.cb = sizeof memory};

    GetProcessMemoryInfo(GetCurrentProcess(), &memory, sizeof memory);
    return memory.WorkingSetSize;
}

static bool post_receive(struct slot *slot, unsigned char *buffer)
{
    ND2_SGE sge = {buffer, RECEIVE_SIZE, CALL0(slot->native.messages, GetLocalToken)};

    return (with_shared ? CALL(shared, Receive, buffer, &sge, 1)
                        : CALL(slot->native.queue_pair, Receive, buffer, &sge, 1)) == ND_SUCCESS;
}

static void post_send(struct slot *slot, unsigned char *buffer, uint32_t size)
{
    ND2_SGE sge = {buffer, size, CALL0(slot->native.messages, GetLocalToken)};

    CALL(slot->native.queue_pair, Send, NULL, &sge, 1, ND_OP_FLAG_SILENT_SUCCESS);
}

static void invalidate(struct slot *slot)
{
    CALL(slot->native.queue_pair, Invalidate, NULL, (IUnknown *)slot->native.writable, ND_OP_FLAG_SILENT_SUCCESS);
}

static void listen_again(struct slot *slot)
{
    HRESULT status;

    slot->native.generation++;
    check("CreateConnector",
          CALL(end.adapter, CreateConnector, &softnd_iid_IND2Connector, end.file, (void **)&slot->native.connector));
    status = CALL(listener, GetConnectionRequest, (IUnknown *)slot->native.connector, &slot->native.request.overlapped);
    if (status != ND_SUCCESS && status != ND_PENDING)
        die("GetConnectionRequest", status);
}

static void close_connection(struct slot *slot)
{
    if (slot->native.connector)
        CALL0(slot->native.connector, Release);
    if (slot->native.writable)
        CALL0(slot->native.writable, Release);
    if (slot->native.readable)
        CALL0(slot->native.readable, Release);
    if (slot->native.queue_pair)
        CALL0(slot->native.queue_pair, Release);
    slot->native.connector = NULL;
    slot->native.queue_pair = NULL;
    slot->native.writable = slot->native.readable = NULL;
    check_memory(slot);
    if (!quitting)
        listen_again(slot);
}

static void requested(struct slot *slot, HRESULT status)
{
    void *context = (void *)(slot->native.generation * SLOTS + slot->number);

    if (status != ND_SUCCESS) {
        refused++;
        close_connection(slot);
        return;
    }
    if (with_shared) {
        check("CreateQueuePairWithSrq",
              CALL(end.adapter, CreateQueuePairWithSrq, &softnd_iid_IND2QueuePair, (IUnknown *)end.cq,
                   (IUnknown *)end.cq, (IUnknown *)shared, context, 32, 1, 0, (void **)&slot->native.queue_pair));
    } else {
        check("CreateQueuePair",
              CALL(end.adapter, CreateQueuePair, &softnd_iid_IND2QueuePair, (IUnknown *)end.cq, (IUnknown *)end.cq,
                   context, RECEIVES, 32, 1, 1, 0, (void **)&slot->native.queue_pair));
        if (!post_receives(slot))
            die("Receive", ND_INTERNAL_ERROR);
    }
    status = CALL(slot->native.connector, Accept, (IUnknown *)slot->native.queue_pair, 4, 4, NULL, 0,
                  &slot->native.accept.overlapped);
    if (status != ND_SUCCESS && status != ND_PENDING) {
        refused++;
        close_connection(slot);
    }
}

static void offer(struct slot *slot)
{
    unsigned char *memory = slot->memory;

    check("CreateMemoryWindow",
          CALL(end.adapter, CreateMemoryWindow, &softnd_iid_IND2MemoryWindow, (void **)&slot->native.writable));
    check("CreateMemoryWindow",
          CALL(end.adapter, CreateMemoryWindow, &softnd_iid_IND2MemoryWindow, (void **)&slot->native.readable));
    /* The peer may already be gone. */
    if (CALL(slot->native.queue_pair, Bind, NULL, (IUnknown *)slot->native.hidden, (IUnknown *)slot->native.writable,
             memory + WRITABLE_AT, WINDOW_SIZE, ND_OP_FLAG_ALLOW_WRITE | ND_OP_FLAG_SILENT_SUCCESS) != ND_SUCCESS)
        return;
    slot->writable_bound = true;
    if (CALL(slot->native.queue_pair, Bind, NULL, (IUnknown *)slot->native.hidden, (IUnknown *)slot->native.readable,
             memory + READABLE_AT, WINDOW_SIZE, ND_OP_FLAG_ALLOW_READ | ND_OP_FLAG_SILENT_SUCCESS) != ND_SUCCESS)
        return;
    grant(slot, CALL0(slot->native.open, GetRemoteToken), CALL0(slot->native.writable, GetRemoteToken),
          CALL0(slot->native.readable, GetRemoteToken));
}

static void accepted(struct slot *slot, HRESULT status)
{
    if (status == ND_SUCCESS) {
        connections++;
        offer(slot);
        status = CALL(slot->native.connector, NotifyDisconnect, &slot->native.gone.overlapped);
        if (status == ND_SUCCESS || status == ND_PENDING)
            return;
    } else {
        refused++;
    }
    close_connection(slot);
}

static void take_results(void)
{
    ND2_RESULT results[32];
    ULONG count;

    while ((count = CALL(end.cq, GetResults, results, 32)) != 0) {
        for (ULONG i = 0; i < count; i++) {
            ULONG_PTR context = (ULONG_PTR)results[i].QueuePairContext;
            struct slot *slot = &slots[context % SLOTS];

            /* An entry of an earlier connection does not belong to this one. */
            if (results[i].RequestType == Nd2RequestTypeReceive)
                take_receive(context / SLOTS == slot->native.generation && slot->native.queue_pair ? slot : NULL,
                             results[i].RequestContext, results[i].Status == ND_SUCCESS, results[i].BytesTransferred);
        }
    }
}

static void arm(void)
{
    HRESULT status = CALL(end.cq, Notify, ND_CQ_NOTIFY_ANY, &notify.overlapped);

    if (status != ND_SUCCESS && status != ND_PENDING)
        die("Notify", status);
    notify_pending = true;
    take_results(); /* entries that arrived before it was armed */
}

static void handle(struct operation *operation)
{
    struct slot *slot = &slots[operation->slot];
    IND2Connector *connector = slot->native.connector;

    switch (operation->kind) {
    case REQUEST:
        requested(slot, CALL(listener, GetOverlappedResult, &operation->overlapped, FALSE));
        break;
    case ACCEPT:
        accepted(slot, CALL(connector, GetOverlappedResult, &operation->overlapped, FALSE));
        break;
    case GONE:
        take_results();
        close_connection(slot);
        break;
    case NOTIFY:
        notify_pending = false;
        take_results();
        if (!quitting)
            arm();
        break;
    }
}

static void open_slot(struct slot *slot, unsigned number)
{
    slot->number = number;
    slot->native.request = (struct operation){.kind = REQUEST, .slot = number};
    slot->native.accept = (struct operation){.kind = ACCEPT, .slot = number};
    slot->native.gone = (struct operation){.kind = GONE, .slot = number};
    slot->memory = VirtualAlloc(NULL, SLOT_SIZE, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
    if (!slot->memory)
        die("VirtualAlloc", ND_NO_MEMORY);
    fill(slot);
    slot->native.open = new_region(&end, slot->memory + OPEN_AT, OPEN_SIZE,
                                   ND_MR_FLAG_ALLOW_REMOTE_READ | ND_MR_FLAG_ALLOW_REMOTE_WRITE);
    slot->native.hidden = new_region(&end, slot->memory + HIDDEN_AT, HIDDEN_SIZE, ND_MR_FLAG_ALLOW_LOCAL_WRITE);
    slot->native.messages =
        new_region(&end, slot->memory + RECEIVE_AT, SLOT_SIZE - RECEIVE_AT, ND_MR_FLAG_ALLOW_LOCAL_WRITE);
}

static void close_slot(struct slot *slot)
{
    free_region(&end, slot->native.open);
    free_region(&end, slot->native.hidden);
    free_region(&end, slot->native.messages);
    check_memory(slot);
    VirtualFree(slot->memory, 0, MEM_RELEASE);
}

static void print_port(void)
{
    struct sockaddr_in6 bound; /* for IPv4, the port is at the same offset */
    ULONG size = sizeof bound;

    check("GetLocalAddress", CALL(listener, GetLocalAddress, (struct sockaddr *)&bound, &size));
    printf("{\"port\": %u, \"process\": %lu}\n", ntohs(bound.sin6_port), (unsigned long)GetCurrentProcessId());
    fflush(stdout);
}

/* Dequeues everything that is pending. */
static void drain(HANDLE port)
{
    OVERLAPPED *overlapped;
    ULONG_PTR key;
    DWORD bytes;

    CALL0(listener, CancelOverlappedRequests);
    for (unsigned i = 0; i < SLOTS; i++)
        if (slots[i].native.connector)
            CALL0(slots[i].native.connector, CancelOverlappedRequests);
    if (notify_pending)
        CALL0(end.cq, CancelOverlappedRequests);
    for (;;) {
        bool open = notify_pending;

        for (unsigned i = 0; i < SLOTS; i++)
            open = open || slots[i].native.connector;
        if (!open)
            return;
        overlapped = NULL;
        GetQueuedCompletionStatus(port, &bytes, &key, &overlapped, 10000);
        if (!overlapped)
            die("a cancelled request did not complete", ND_TIMEOUT);
        if (CONTAINING_RECORD(overlapped, struct operation, overlapped)->kind == NOTIFY)
            notify_pending = false;
        else
            close_connection(&slots[CONTAINING_RECORD(overlapped, struct operation, overlapped)->slot]);
    }
}

int main(int count, char **arguments)
{
    struct sockaddr_in6 address;
    OVERLAPPED *overlapped;
    ULONG_PTR key;
    DWORD bytes;
    HANDLE port;

    if (count != 6 || strlen(arguments[3]) != SECRET_SIZE) {
        fprintf(stderr, "hostile_target DLL ADDRESS SECRET SECONDS own|shared\n");
        return 2;
    }
    memcpy(secret, arguments[3], SECRET_SIZE);
    limit_time((DWORD)atoi(arguments[4]) * 1000);
    address = any_address_of(arguments[2], "0");
    open_end(&end, open_adapter(arguments[1], &address, sizeof address), 512);
    with_shared = strcmp(arguments[5], "shared") == 0;
    if (with_shared)
        check("CreateSharedReceiveQueue",
              CALL(end.adapter, CreateSharedReceiveQueue, &softnd_iid_IND2SharedReceiveQueue, end.file,
                   SLOTS * RECEIVES, 1, 0, 0, 0, (void **)&shared));
    for (unsigned i = 0; i < SLOTS; i++)
        open_slot(&slots[i], i);
    for (unsigned i = 0; with_shared && i < SLOTS; i++)
        if (!post_receives(&slots[i]))
            die("Receive", ND_INTERNAL_ERROR);
    port = CreateIoCompletionPort(end.file, NULL, 0, 0);
    check("CreateListener", CALL(end.adapter, CreateListener, &softnd_iid_IND2Listener, end.file, (void **)&listener));
    check("Bind", CALL(listener, Bind, (const struct sockaddr *)&address, sizeof address));
    check("Listen", CALL(listener, Listen, 0));
    print_port();
    for (unsigned i = 0; i < SLOTS; i++)
        listen_again(&slots[i]);
    arm();
    while (!quitting) {
        overlapped = NULL;
        GetQueuedCompletionStatus(port, &bytes, &key, &overlapped, INFINITE);
        if (overlapped)
            handle(CONTAINING_RECORD(overlapped, struct operation, overlapped));
    }
    drain(port);
    CALL0(listener, Release);
    CloseHandle(port);
    if (with_shared)
        CALL0(shared, Release);
    for (unsigned i = 0; i < SLOTS; i++)
        close_slot(&slots[i]);
    close_end(&end);
    CALL0(end.adapter, Release);
    if (!can_unload())
        failures++;
    report("end");
    return violations || failures;
}
