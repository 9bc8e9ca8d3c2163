/* Measures what posting a Receive and polling its completion cost in C with a NetworkDirect provider.
   networkdirect_calls.py compares that with Python.

   networkdirect_calls.exe PROVIDER.dll ROUNDS: prints three lines with the nanoseconds of a post, of a polled
   completion and of an empty poll in each round. */

#include "../softrdma/networkdirect/version2.h"

#include <stdio.h>
#include <stdlib.h>

#define CONNECTIONS 2
/* Of each connection. A read needs a place too. */
#define MESSAGES 1024
#define DEPTH    (MESSAGES + 1)
#define BATCH    64
/* So long softnd's threads may take to come to rest after the last message. */
#define REST_MS     2
#define EMPTY_POLLS 1000
/* Polls of another queue before those that are timed, so that the processor has their code in its caches. */
#define WARM_UPS 100

static void check(const char *what, HRESULT status)
{
    if (status) {
        fprintf(stderr, "%s: 0x%08lx\n", what, (unsigned long)status);
        exit(1);
    }
}

static double now_ns(void)
{
    LARGE_INTEGER now, frequency;

    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&frequency);
    return now.QuadPart * 1e9 / frequency.QuadPart;
}

static void print(const double *values, int count)
{
    for (int i = 0; i < count; i++)
        printf("%.1f%c", values[i], i == count - 1 ? '\n' : ' ');
}

/* What all calls that may be pending share. */
static OVERLAPPED overlapped;

static void finish(const char *what, void *object, HRESULT status)
{
    IND2Overlapped *source = object;

    if (status == ND_PENDING)
        status = source->methods->GetOverlappedResult(source, &overlapped, TRUE);
    check(what, status);
}

static IND2QueuePair *create_queue_pair(IND2Adapter *adapter, IND2CompletionQueue *receives,
                                        IND2CompletionQueue *others)
{
    IND2QueuePair *queue_pair;

    check("CreateQueuePair",
          adapter->methods->CreateQueuePair(adapter, &softnd_iid_IND2QueuePair, (IUnknown *)receives,
                                            (IUnknown *)others, NULL, DEPTH, DEPTH, 1, 1, 0, (void **)&queue_pair));
    return queue_pair;
}

static IND2CompletionQueue *create_queue(IND2Adapter *adapter, HANDLE file)
{
    IND2CompletionQueue *queue;

    check("CreateCompletionQueue",
          adapter->methods->CreateCompletionQueue(adapter, &softnd_iid_IND2CompletionQueue, file, CONNECTIONS * DEPTH,
                                                  0, 0, (void **)&queue));
    return queue;
}

static void connect_queue_pairs(IND2Adapter *adapter, HANDLE file, IND2QueuePair *client, IND2QueuePair *server)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, local = address;
    ULONG size = sizeof address;
    IND2Connector *ours, *theirs;
    IND2Listener *listener;
    OVERLAPPED connecting = {.hEvent = CreateEventA(NULL, TRUE, FALSE, NULL)};
    IND2Overlapped *source;
    HRESULT status;

    check("CreateListener",
          adapter->methods->CreateListener(adapter, &softnd_iid_IND2Listener, file, (void **)&listener));
    check("Bind", listener->methods->Bind(listener, (struct sockaddr *)&address, sizeof address));
    check("Listen", listener->methods->Listen(listener, 0));
    check("GetLocalAddress", listener->methods->GetLocalAddress(listener, (struct sockaddr *)&address, &size));
    check("CreateConnector",
          adapter->methods->CreateConnector(adapter, &softnd_iid_IND2Connector, file, (void **)&ours));
    check("CreateConnector",
          adapter->methods->CreateConnector(adapter, &softnd_iid_IND2Connector, file, (void **)&theirs));
    check("Bind", ours->methods->Bind(ours, (struct sockaddr *)&local, sizeof local));
    status = ours->methods->Connect(ours, (IUnknown *)client, (struct sockaddr *)&address, sizeof address, 1, 1, NULL,
                                    0, &connecting);
    finish("GetConnectionRequest", listener,
           listener->methods->GetConnectionRequest(listener, (IUnknown *)theirs, &overlapped));
    HRESULT accepting = theirs->methods->Accept(theirs, (IUnknown *)server, 1, 1, NULL, 0, &overlapped);
    source = (void *)ours;
    if (status == ND_PENDING)
        status = source->methods->GetOverlappedResult(source, &connecting, TRUE);
    check("Connect", status);
    status = ours->methods->CompleteConnect(ours, &connecting);
    if (status == ND_PENDING)
        status = source->methods->GetOverlappedResult(source, &connecting, TRUE);
    check("CompleteConnect", status);
    finish("Accept", theirs, accepting);
}

/* Takes the completions of `wanted` requests, which have succeeded. */
static void take(IND2CompletionQueue *queue, int wanted)
{
    ND2_RESULT results[BATCH];

    while (wanted > 0) {
        int got = (int)queue->methods->GetResults(queue, results, BATCH);

        for (int i = 0; i < got; i++)
            check("a request", results[i].Status);
        wanted -= got;
    }
}

int main(int count, char **arguments)
{
    typedef HRESULT(WINAPI * get_class_object)(REFIID, REFIID, void **);
    const char *path = count > 1 ? arguments[1] : "softnd.dll";
    int rounds = count > 2 ? atoi(arguments[2]) : 100;
    struct sockaddr_in address = {.sin_family = AF_INET};
    double *posts = calloc(rounds, sizeof *posts), *polls = calloc(rounds, sizeof *polls);
    double *empty = calloc(rounds, sizeof *empty);
    char *memory = VirtualAlloc(NULL, 4096, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
    HMODULE module = LoadLibraryA(path);
    IND2CompletionQueue *received, *sent;
    IND2QueuePair *clients[CONNECTIONS], *servers[CONNECTIONS];
    IND2MemoryRegion *region;
    ND2_RESULT results[BATCH];
    IND2Provider *provider;
    IND2Adapter *adapter;
    HANDLE file;
    UINT64 id;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    overlapped.hEvent = CreateEventA(NULL, TRUE, FALSE, NULL);
    if (!module || !posts || !polls || !empty || !memory)
        return 1;
    get_class_object get = (get_class_object)(void *)GetProcAddress(module, "DllGetClassObject");
    check("DllGetClassObject", get(&softnd_iid_IND2Provider, &softnd_iid_IND2Provider, (void **)&provider));
    check("ResolveAddress",
          provider->methods->ResolveAddress(provider, (struct sockaddr *)&address, sizeof address, &id));
    check("OpenAdapter", provider->methods->OpenAdapter(provider, &softnd_iid_IND2Adapter, id, (void **)&adapter));
    check("CreateOverlappedFile", adapter->methods->CreateOverlappedFile(adapter, &file));
    check("CreateMemoryRegion",
          adapter->methods->CreateMemoryRegion(adapter, &softnd_iid_IND2MemoryRegion, file, (void **)&region));
    finish("Register", region,
           region->methods->Register(region, memory, 4096, ND_MR_FLAG_ALLOW_LOCAL_WRITE | ND_MR_FLAG_ALLOW_REMOTE_READ,
                                     &overlapped));
    received = create_queue(adapter, file);
    sent = create_queue(adapter, file);
    for (int i = 0; i < CONNECTIONS; i++) {
        clients[i] = create_queue_pair(adapter, sent, sent);
        servers[i] = create_queue_pair(adapter, received, sent);
        connect_queue_pairs(adapter, file, clients[i], servers[i]);
    }

    UINT32 local_token = region->methods->GetLocalToken(region), remote_token = region->methods->GetRemoteToken(region);
    ND2_SGE sink = {memory + 64, 8, local_token}, source = {memory, 8, local_token},
            answer = {memory + 8, 8, local_token};

    for (int round = 0; round < rounds; round++) {
        int taken = 0;
        double begin = now_ns();

        for (int i = 0; i < CONNECTIONS; i++)
            for (int k = 0; k < MESSAGES; k++)
                check("Receive", servers[i]->methods->Receive(servers[i], NULL, &sink, 1));
        posts[round] = (now_ns() - begin) / (CONNECTIONS * MESSAGES);
        for (int i = 0; i < CONNECTIONS; i++) {
            for (int k = 0; k < MESSAGES; k++)
                check("Send", clients[i]->methods->Send(clients[i], NULL, &source, 1, ND_OP_FLAG_SILENT_SUCCESS));
            /* The answer to a read comes after everything that was sent before it. */
            check("Read",
                  clients[i]->methods->Read(clients[i], NULL, &answer, 1, (UINT64)(UINT_PTR)memory, remote_token, 0));
            take(sent, 1);
        }
        Sleep(REST_MS);
        for (int i = 0; i < WARM_UPS; i++)
            sent->methods->GetResults(sent, results, BATCH);
        begin = now_ns();
        while (taken < CONNECTIONS * MESSAGES)
            taken += (int)received->methods->GetResults(received, results, BATCH);
        polls[round] = (now_ns() - begin) / taken;
        check("a message", results[0].Status);
        begin = now_ns();
        for (int i = 0; i < EMPTY_POLLS; i++)
            received->methods->GetResults(received, results, BATCH);
        empty[round] = (now_ns() - begin) / EMPTY_POLLS;
    }
    print(posts, rounds);
    print(polls, rounds);
    print(empty, rounds);
    return 0;
}
