/* A listener for the hostile-peer test. Everybody may connect. It reports what was done to its memory.
 *
 *   hostile_target.exe DLL ADDRESS SECRET SECONDS own|shared
 *
 * It prints JSON lines: {"port": ...} first, a report on request, and one at the end. SECRET, eight characters, fills
 * all memory around what is granted, so that the test finds it in anything that was read.
 *
 * Each connection has a slot with 64 KiB of its own. Everybody may use a region of 4 KiB through its remote token. The
 * connection may use a window to write and a window to read, 512 bytes each, in a region of 8 KiB without remote
 * rights. After the connection, all other bytes must be unchanged, and those of the window to read as well.
 *
 * "own": each queue pair has its own Receives. "shared": all queue pairs use one shared receive queue, and a
 * connection's messages may lie in the memory of any slot.
 *
 * The target sends the first message on a connection: what is granted. The peer may then send up to 64 bytes.
 * "invalidate" ends the window to write; the answer is the message "invalidated". "echo..." is sent back. "report
 * SECRET" prints a report. "quit SECRET" ends the program. Any other message is taken and ignored.
 */
#include "networkdirect.h"

#include <psapi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS        6
#define RECEIVES     16
#define RECEIVE_SIZE 64
#define SENDS        8
#define SEND_SIZE    64

#define SECRET_SIZE   8
#define SLOT_SIZE     0x10000
#define OPEN_AT       0x1000 /* the region for everybody */
#define OPEN_SIZE     0x1000
#define HIDDEN_AT     0x3000 /* the region behind the windows */
#define HIDDEN_SIZE   0x2000
#define WRITABLE_AT   (HIDDEN_AT + 0x400)
#define READABLE_AT   (HIDDEN_AT + 0x1000)
#define WINDOW_SIZE   0x200
#define RECEIVE_AT    0x8000 /* at multiples of 2 * RECEIVE_SIZE */
#define RECEIVE_STEP  (2 * RECEIVE_SIZE)
#define SEND_AT       0xC000
#define READABLE_FILL 'r'

enum kind { REQUEST, ACCEPT, GONE, NOTIFY };

struct operation {
    OVERLAPPED overlapped;
    enum kind kind;
    unsigned slot;
};

struct slot {
    unsigned number;
    ULONG_PTR generation;
    IND2Connector *connector;
    IND2QueuePair *queue_pair;
    IND2MemoryWindow *writable, *readable;
    BOOL writable_bound;
    IND2MemoryRegion *open, *hidden, *messages;
    struct operation request, accept, gone;
    unsigned sends;
    unsigned char *memory;
};

/* its file, completion queue and adapter; before the loop, also used to wait for single requests */
static struct end end;
static struct slot slots[SLOTS];
static IND2Listener *listener;
static IND2SharedReceiveQueue *shared; /* NULL: not used */
static struct operation notify = {.kind = NOTIFY};
static char secret[SECRET_SIZE + 1];
static unsigned long long connections, refused, violations, messages, failures;
static BOOL quitting, notify_pending;

static void report(const char *event)
{
    PROCESS_MEMORY_COUNTERS memory = {.cb = sizeof memory};
    /* Wine does not count a process's handles, but a new handle gets the lowest free number. */
    HANDLE next = CreateEventA(NULL, TRUE, FALSE, NULL);

    CloseHandle(next);
    GetProcessMemoryInfo(GetCurrentProcess(), &memory, sizeof memory);
    printf("{\"event\": \"%s\", \"connections\": %llu, \"refused\": %llu, \"violations\": %llu, \"messages\": %llu, "
           "\"failures\": %llu, \"next_handle\": %llu, \"bytes\": %llu, \"resident\": %llu}\n",
           event, connections, refused, violations, messages, failures, (unsigned long long)(ULONG_PTR)next / 4,
           (unsigned long long)memory.PagefileUsage, (unsigned long long)memory.WorkingSetSize);
    fflush(stdout);
}

/* The bytes that may have changed: the open region, the window to write, the receive buffers. */
static BOOL may_change(unsigned at)
{
    if (at >= OPEN_AT && at < OPEN_AT + OPEN_SIZE)
        return TRUE;
    if (at >= WRITABLE_AT && at < WRITABLE_AT + WINDOW_SIZE)
        return TRUE;
    if (at >= RECEIVE_AT && at < RECEIVE_AT + RECEIVES * RECEIVE_STEP)
        return (at - RECEIVE_AT) % RECEIVE_STEP < RECEIVE_SIZE;
    return at >= SEND_AT && at < SEND_AT + SENDS * SEND_SIZE;
}

static unsigned char expected_at(unsigned at)
{
    if (at >= READABLE_AT && at < READABLE_AT + WINDOW_SIZE)
        return READABLE_FILL;
    return (unsigned char)secret[at % SECRET_SIZE];
}

static void fill(struct slot *slot)
{
    for (unsigned at = 0; at < SLOT_SIZE; at++)
        slot->memory[at] = may_change(at) ? 0 : expected_at(at);
}

static void check_memory(struct slot *slot)
{
    unsigned bad = 0, first = 0;

    for (unsigned at = 0; at < SLOT_SIZE; at++)
        if (slot->memory[at] != expected_at(at) && !may_change(at) && !bad++)
            first = at;
    if (bad) {
        violations++;
        printf("{\"event\": \"violation\", \"slot\": %u, \"first\": %u, \"bytes\": %u}\n", slot->number, first, bad);
        fflush(stdout);
        fill(slot);
    }
}

static HRESULT post_receive(struct slot *slot, unsigned number)
{
    ND2_SGE sge = {slot->memory + RECEIVE_AT + number * RECEIVE_STEP, RECEIVE_SIZE,
                   CALL0(slot->messages, GetLocalToken)};

    if (shared)
        return CALL(shared, Receive, sge.Buffer, &sge, 1);
    return CALL(slot->queue_pair, Receive, sge.Buffer, &sge, 1);
}

/* Returns a Receive that has ended, in whatever way, to the shared queue. */
static void post_again(const unsigned char *buffer)
{
    for (unsigned i = 0; i < SLOTS; i++) {
        ULONG_PTR at = (ULONG_PTR)buffer - (ULONG_PTR)slots[i].memory;
        if (at < SLOT_SIZE)
            check("Receive", post_receive(&slots[i], (unsigned)(at - RECEIVE_AT) / RECEIVE_STEP));
    }
}

/* Drops a message if there is no room for it: peers that do not take their messages have no claim to more. */
static void send_message(struct slot *slot, const void *data, ULONG size)
{
    unsigned char *place = slot->memory + SEND_AT + slot->sends++ % SENDS * SEND_SIZE;
    ND2_SGE sge = {place, size, CALL0(slot->messages, GetLocalToken)};

    memcpy(place, data, size);
    CALL(slot->queue_pair, Send, NULL, &sge, 1, ND_OP_FLAG_SILENT_SUCCESS);
}

static void listen_again(struct slot *slot)
{
    HRESULT status;

    slot->generation++;
    check("CreateConnector",
          CALL(end.adapter, CreateConnector, &softnd_iid_IND2Connector, end.file, (void **)&slot->connector));
    status = CALL(listener, GetConnectionRequest, (IUnknown *)slot->connector, &slot->request.overlapped);
    if (status != ND_SUCCESS && status != ND_PENDING)
        die("GetConnectionRequest", status);
}

static void close_connection(struct slot *slot)
{
    if (slot->connector)
        CALL0(slot->connector, Release);
    if (slot->writable)
        CALL0(slot->writable, Release);
    if (slot->readable)
        CALL0(slot->readable, Release);
    if (slot->queue_pair)
        CALL0(slot->queue_pair, Release);
    slot->connector = NULL;
    slot->queue_pair = NULL;
    slot->writable = slot->readable = NULL;
    check_memory(slot);
    if (!quitting)
        listen_again(slot);
}

static void requested(struct slot *slot, HRESULT status)
{
    void *context = (void *)(slot->generation * SLOTS + slot->number);

    if (status != ND_SUCCESS) {
        refused++;
        close_connection(slot);
        return;
    }
    if (shared) {
        check("CreateQueuePairWithSrq",
              CALL(end.adapter, CreateQueuePairWithSrq, &softnd_iid_IND2QueuePair, (IUnknown *)end.cq,
                   (IUnknown *)end.cq, (IUnknown *)shared, context, 32, 1, 0, (void **)&slot->queue_pair));
    } else {
        check("CreateQueuePair", CALL(end.adapter, CreateQueuePair, &softnd_iid_IND2QueuePair, (IUnknown *)end.cq,
                                      (IUnknown *)end.cq, context, RECEIVES, 32, 1, 1, 0, (void **)&slot->queue_pair));
        for (unsigned i = 0; i < RECEIVES; i++)
            check("Receive", post_receive(slot, i));
    }
    status = CALL(slot->connector, Accept, (IUnknown *)slot->queue_pair, 4, 4, NULL, 0, &slot->accept.overlapped);
    if (status != ND_SUCCESS && status != ND_PENDING) {
        refused++;
        close_connection(slot);
    }
}

static void offer(struct slot *slot)
{
    struct {
        UINT64 open, writable, readable;
        UINT32 open_token, writable_token, readable_token;
    } grant;
    unsigned char *memory = slot->memory;

    check("CreateMemoryWindow",
          CALL(end.adapter, CreateMemoryWindow, &softnd_iid_IND2MemoryWindow, (void **)&slot->writable));
    check("CreateMemoryWindow",
          CALL(end.adapter, CreateMemoryWindow, &softnd_iid_IND2MemoryWindow, (void **)&slot->readable));
    /* The peer may already be gone. */
    if (CALL(slot->queue_pair, Bind, NULL, (IUnknown *)slot->hidden, (IUnknown *)slot->writable, memory + WRITABLE_AT,
             WINDOW_SIZE, ND_OP_FLAG_ALLOW_WRITE | ND_OP_FLAG_SILENT_SUCCESS) != ND_SUCCESS)
        return;
    slot->writable_bound = TRUE;
    if (CALL(slot->queue_pair, Bind, NULL, (IUnknown *)slot->hidden, (IUnknown *)slot->readable, memory + READABLE_AT,
             WINDOW_SIZE, ND_OP_FLAG_ALLOW_READ | ND_OP_FLAG_SILENT_SUCCESS) != ND_SUCCESS)
        return;
    grant.open = (ULONG_PTR)memory + OPEN_AT;
    grant.writable = (ULONG_PTR)memory + WRITABLE_AT;
    grant.readable = (ULONG_PTR)memory + READABLE_AT;
    grant.open_token = CALL0(slot->open, GetRemoteToken);
    grant.writable_token = CALL0(slot->writable, GetRemoteToken);
    grant.readable_token = CALL0(slot->readable, GetRemoteToken);
    send_message(slot, &grant, sizeof grant - 4);
}

static void accepted(struct slot *slot, HRESULT status)
{
    if (status == ND_SUCCESS) {
        connections++;
        offer(slot);
        status = CALL(slot->connector, NotifyDisconnect, &slot->gone.overlapped);
        if (status == ND_SUCCESS || status == ND_PENDING)
            return;
    } else {
        refused++;
    }
    close_connection(slot);
}

static BOOL is_command(const char *message, ULONG size, const char *word)
{
    size_t length = strlen(word);

    return size == length + SECRET_SIZE && !memcmp(message, word, length) &&
           !memcmp(message + length, secret, SECRET_SIZE);
}

static void received(struct slot *slot, const ND2_RESULT *result)
{
    const char *message = result->RequestContext;
    ULONG size = result->BytesTransferred;

    messages++;
    if (size > RECEIVE_SIZE) {
        failures++;
        return;
    }
    if (size == 10 && !memcmp(message, "invalidate", 10) && slot->writable_bound) {
        slot->writable_bound = FALSE;
        CALL(slot->queue_pair, Invalidate, NULL, (IUnknown *)slot->writable, ND_OP_FLAG_SILENT_SUCCESS);
        send_message(slot, "invalidated", 11);
    } else if (size >= 4 && !memcmp(message, "echo", 4)) {
        send_message(slot, message, size);
    } else if (is_command(message, size, "report ")) {
        report("report");
    } else if (is_command(message, size, "quit ")) {
        quitting = TRUE;
    }
    if (!shared)
        post_receive(slot, (unsigned)((const unsigned char *)message - slot->memory - RECEIVE_AT) / RECEIVE_STEP);
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
            if (results[i].RequestType != Nd2RequestTypeReceive)
                continue;
            if (context / SLOTS == slot->generation && slot->queue_pair && results[i].Status == ND_SUCCESS)
                received(slot, &results[i]);
            if (shared)
                post_again(results[i].RequestContext);
        }
    }
}

static void arm(void)
{
    HRESULT status = CALL(end.cq, Notify, ND_CQ_NOTIFY_ANY, &notify.overlapped);

    if (status != ND_SUCCESS && status != ND_PENDING)
        die("Notify", status);
    notify_pending = TRUE;
    take_results(); /* entries that arrived before it was armed */
}

static void handle(struct operation *operation)
{
    struct slot *slot = &slots[operation->slot];
    IND2Connector *connector = slot->connector;

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
        notify_pending = FALSE;
        take_results();
        if (!quitting)
            arm();
        break;
    }
}

static void open_slot(struct slot *slot, unsigned number)
{
    slot->number = number;
    slot->request = (struct operation){.kind = REQUEST, .slot = number};
    slot->accept = (struct operation){.kind = ACCEPT, .slot = number};
    slot->gone = (struct operation){.kind = GONE, .slot = number};
    slot->memory = VirtualAlloc(NULL, SLOT_SIZE, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
    if (!slot->memory)
        die("VirtualAlloc", ND_NO_MEMORY);
    fill(slot);
    slot->open = new_region(&end, slot->memory + OPEN_AT, OPEN_SIZE,
                            ND_MR_FLAG_ALLOW_REMOTE_READ | ND_MR_FLAG_ALLOW_REMOTE_WRITE);
    slot->hidden = new_region(&end, slot->memory + HIDDEN_AT, HIDDEN_SIZE, ND_MR_FLAG_ALLOW_LOCAL_WRITE);
    slot->messages = new_region(&end, slot->memory + RECEIVE_AT, SLOT_SIZE - RECEIVE_AT, ND_MR_FLAG_ALLOW_LOCAL_WRITE);
}

static void close_slot(struct slot *slot)
{
    free_region(&end, slot->open);
    free_region(&end, slot->hidden);
    free_region(&end, slot->messages);
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
        if (slots[i].connector)
            CALL0(slots[i].connector, CancelOverlappedRequests);
    if (notify_pending)
        CALL0(end.cq, CancelOverlappedRequests);
    for (;;) {
        BOOL open = notify_pending;

        for (unsigned i = 0; i < SLOTS; i++)
            open = open || slots[i].connector;
        if (!open)
            return;
        overlapped = NULL;
        GetQueuedCompletionStatus(port, &bytes, &key, &overlapped, 10000);
        if (!overlapped)
            die("a cancelled request did not complete", ND_TIMEOUT);
        if (CONTAINING_RECORD(overlapped, struct operation, overlapped)->kind == NOTIFY)
            notify_pending = FALSE;
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
    if (!strcmp(arguments[5], "shared"))
        check("CreateSharedReceiveQueue",
              CALL(end.adapter, CreateSharedReceiveQueue, &softnd_iid_IND2SharedReceiveQueue, end.file,
                   SLOTS * RECEIVES, 1, 0, 0, 0, (void **)&shared));
    for (unsigned i = 0; i < SLOTS; i++)
        open_slot(&slots[i], i);
    for (unsigned i = 0; shared && i < SLOTS * RECEIVES; i++)
        check("Receive", post_receive(&slots[i / RECEIVES], i % RECEIVES));
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
    if (shared)
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
