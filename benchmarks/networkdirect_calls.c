/* Measures what posting a Receive and polling its completion cost in C with a NetworkDirect provider, without a peer.
   networkdirect_calls.py compares that with Python.

   networkdirect_calls.exe PROVIDER.dll ROUNDS: prints three lines with the nanoseconds of a post, of a polled completion and of an
   empty poll in each round. */

#include "../softnd/version2.h"

#include <stdio.h>
#include <stdlib.h>

#define DEPTH 512
#define BATCH 64
#define EMPTY_POLLS 1000

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

int main(int count, char **arguments)
{
    typedef HRESULT(WINAPI * get_class_object)(REFIID, REFIID, void **);
    const char *path = count > 1 ? arguments[1] : "softnd.dll";
    int rounds = count > 2 ? atoi(arguments[2]) : 100;
    struct sockaddr_in address = {.sin_family = AF_INET};
    double *posts = calloc(rounds, sizeof *posts), *polls = calloc(rounds, sizeof *polls);
    double *empty = calloc(rounds, sizeof *empty);
    HMODULE module = LoadLibraryA(path);
    IND2Provider *provider;
    IND2Adapter *adapter;
    IND2CompletionQueue *cq;
    IND2QueuePair *queue_pair;
    ND2_RESULT results[BATCH];
    HANDLE file;
    UINT64 id;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (!module || !posts || !polls || !empty)
        return 1;
    get_class_object get = (get_class_object)(void *)GetProcAddress(module, "DllGetClassObject");
    check("DllGetClassObject", get(&softnd_iid_IND2Provider, &softnd_iid_IND2Provider, (void **)&provider));
    check("ResolveAddress", provider->methods->ResolveAddress(provider, (struct sockaddr *)&address, sizeof address, &id));
    check("OpenAdapter", provider->methods->OpenAdapter(provider, &softnd_iid_IND2Adapter, id, (void **)&adapter));
    check("CreateOverlappedFile", adapter->methods->CreateOverlappedFile(adapter, &file));
    check("CreateCompletionQueue", adapter->methods->CreateCompletionQueue(adapter, &softnd_iid_IND2CompletionQueue, file,
                                                                          2 * DEPTH, 0, 0, (void **)&cq));
    check("CreateQueuePair",
          adapter->methods->CreateQueuePair(adapter, &softnd_iid_IND2QueuePair, (IUnknown *)cq, (IUnknown *)cq, NULL,
                                            DEPTH, 1, 1, 1, 0, (void **)&queue_pair));
    for (int round = 0; round < rounds; round++) {
        ND2_SGE sge = {&address, 8, 1};
        double begin = now_ns();
        for (int i = 0; i < DEPTH; i++)
            check("Receive", queue_pair->methods->Receive(queue_pair, NULL, &sge, 1));
        posts[round] = (now_ns() - begin) / DEPTH;
        check("Flush", queue_pair->methods->Flush(queue_pair));
        int taken = 0;
        begin = now_ns();
        while (taken < DEPTH)
            taken += (int)cq->methods->GetResults(cq, results, BATCH);
        polls[round] = (now_ns() - begin) / DEPTH;
        begin = now_ns();
        for (int i = 0; i < EMPTY_POLLS; i++)
            cq->methods->GetResults(cq, results, BATCH);
        empty[round] = (now_ns() - begin) / EMPTY_POLLS;
    }
    print(posts, rounds);
    print(polls, rounds);
    print(empty, rounds);
    return 0;
}
