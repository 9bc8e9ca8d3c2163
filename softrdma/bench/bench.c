/* Measures softnd against plain TCP between two processes on one machine.
 *
 *   bench.exe [PATH\softnd.dll]
 *
 * The results are ratios of one run. The four measurements take turns in rounds, and each ratio is that of the
 * medians, because times on a shared machine vary. The exit status is 0 if both ratios keep what softnd promises.
 */
#include "../networkdirect/version2.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS     5
#define PING_SIZE  64
#define PINGS      2000
#define WRITE_SIZE (1 << 20)
#define WRITES     128
#define DEPTH      4
#define LIMIT_MS   120000

#define MOST_TIMES_TCP 3.0
#define LEAST_OF_TCP   0.5

static void die(const char *what, long number)
{
    fprintf(stderr, "bench: %s: %ld (0x%08lx)\n", what, number, (unsigned long)number);
    exit(1);
}

static void check(const char *what, HRESULT status)
{
    if (status != ND_SUCCESS)
        die(what, status);
}

static double now_s(void)
{
    static LARGE_INTEGER frequency;
    LARGE_INTEGER count;

    if (!frequency.QuadPart)
        QueryPerformanceFrequency(&frequency);
    QueryPerformanceCounter(&count);
    return (double)count.QuadPart / (double)frequency.QuadPart;
}

/* Ends the process if something hangs, so that nothing is left behind. */
static DWORD WINAPI watchdog(void *unused)
{
    (void)unused;
    Sleep(LIMIT_MS);
    die("not done in time, in ms", LIMIT_MS);
    return 0;
}

/* ---- plain TCP ---- */

static void tcp_send(SOCKET socket, const char *data, int size)
{
    while (size) {
        int sent = send(socket, data, size, 0);

        if (sent <= 0)
            die("send", WSAGetLastError());
        data += sent;
        size -= sent;
    }
}

static void tcp_receive(SOCKET socket, char *data, int size)
{
    while (size) {
        int received = recv(socket, data, size, 0);

        if (received <= 0)
            die("recv", WSAGetLastError());
        data += received;
        size -= received;
    }
}

static double tcp_ping(SOCKET socket, char *buffer, int server)
{
    double begin = now_s();

    for (int i = 0; i < PINGS; i++) {
        if (!server)
            tcp_send(socket, buffer, PING_SIZE);
        tcp_receive(socket, buffer, PING_SIZE);
        if (server)
            tcp_send(socket, buffer, PING_SIZE);
    }
    return (now_s() - begin) / PINGS;
}

static double tcp_write(SOCKET socket, char *buffer, int server)
{
    double begin = now_s();
    char end = 0;

    for (int i = 0; i < WRITES; i++) {
        if (server)
            tcp_receive(socket, buffer, WRITE_SIZE);
        else
            tcp_send(socket, buffer, WRITE_SIZE);
    }
    if (server)
        tcp_send(socket, &end, 1);
    else
        tcp_receive(socket, &end, 1);
    return (double)WRITES * WRITE_SIZE / (now_s() - begin);
}

/* ---- softnd ---- */

struct target {
    UINT64 address;
    UINT32 token;
};

struct end {
    IND2Adapter *adapter;
    IND2CompletionQueue *cq;
    IND2MemoryRegion *region;
    IND2QueuePair *queue_pair;
    IND2Connector *connector;
    HANDLE file;
    OVERLAPPED overlapped;
    char *buffer;
    ND2_SGE ping_out, ping_in, block;
    int received, initiated; /* completions that arrived early */
};

static void finish(const char *what, struct end *end, void *object, HRESULT status)
{
    IND2Overlapped *source = object;

    if (status == ND_PENDING)
        status = source->methods->GetOverlappedResult(source, &end->overlapped, TRUE);
    check(what, status);
}

static void open_end(struct end *end, const char *path, const struct sockaddr_in *address)
{
    typedef HRESULT(WINAPI * get_class_object)(REFIID, REFIID, void **);
    HMODULE module = LoadLibraryA(path);
    get_class_object get;
    IND2Provider *provider;
    UINT64 id;

    if (!module)
        die(path, (long)GetLastError());
    get = (get_class_object)(void *)GetProcAddress(module, "DllGetClassObject");
    check("DllGetClassObject", get(&softnd_iid_IND2Provider, &softnd_iid_IND2Provider, (void **)&provider));
    check("ResolveAddress",
          provider->methods->ResolveAddress(provider, (const struct sockaddr *)address, sizeof *address, &id));
    check("OpenAdapter", provider->methods->OpenAdapter(provider, &softnd_iid_IND2Adapter, id, (void **)&end->adapter));
    provider->methods->Release(provider);

    IND2Adapter *adapter = end->adapter;
    check("CreateOverlappedFile", adapter->methods->CreateOverlappedFile(adapter, &end->file));
    end->overlapped.hEvent = CreateEventA(NULL, TRUE, FALSE, NULL);
    check("CreateCompletionQueue", adapter->methods->CreateCompletionQueue(adapter, &softnd_iid_IND2CompletionQueue,
                                                                           end->file, 64, 0, 0, (void **)&end->cq));
    check("CreateMemoryRegion", adapter->methods->CreateMemoryRegion(adapter, &softnd_iid_IND2MemoryRegion, end->file,
                                                                     (void **)&end->region));
    end->buffer = VirtualAlloc(NULL, 2 * WRITE_SIZE, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
    finish("Register", end, end->region,
           end->region->methods->Register(end->region, end->buffer, 2 * WRITE_SIZE, ND_MR_FLAG_ALLOW_REMOTE_WRITE,
                                          &end->overlapped));
    check("CreateQueuePair",
          adapter->methods->CreateQueuePair(adapter, &softnd_iid_IND2QueuePair, (IUnknown *)end->cq,
                                            (IUnknown *)end->cq, NULL, 16, 16, 1, 1, 0, (void **)&end->queue_pair));
    check("CreateConnector",
          adapter->methods->CreateConnector(adapter, &softnd_iid_IND2Connector, end->file, (void **)&end->connector));
    UINT32 token = end->region->methods->GetLocalToken(end->region);
    end->ping_out = (ND2_SGE){end->buffer, PING_SIZE, token};
    end->ping_in = (ND2_SGE){end->buffer + 4096, PING_SIZE, token};
    end->block = (ND2_SGE){end->buffer, WRITE_SIZE, token};
}

static void close_end(struct end *end)
{
    finish("Disconnect", end, end->connector, end->connector->methods->Disconnect(end->connector, &end->overlapped));
    end->connector->methods->Release(end->connector);
    end->queue_pair->methods->Release(end->queue_pair);
    finish("Deregister", end, end->region, end->region->methods->Deregister(end->region, &end->overlapped));
    end->region->methods->Release(end->region);
    end->cq->methods->Release(end->cq);
    CloseHandle(end->file);
    end->adapter->methods->Release(end->adapter);
}

/* Polls until `receives` and `initiated` completions have arrived. Those that arrived early count. */
static void take(struct end *end, int receives, int initiated)
{
    ND2_RESULT results[16];

    while (end->received < receives || end->initiated < initiated) {
        ULONG count = end->cq->methods->GetResults(end->cq, results, 16);

        for (ULONG i = 0; i < count; i++) {
            check("completion", results[i].Status);
            if (results[i].RequestType == Nd2RequestTypeReceive)
                end->received++;
            else
                end->initiated++;
        }
    }
    end->received -= receives;
    end->initiated -= initiated;
}

static void post_receive(struct end *end)
{
    check("Receive", end->queue_pair->methods->Receive(end->queue_pair, NULL, &end->ping_in, 1));
}

static void post_send(struct end *end)
{
    check("Send", end->queue_pair->methods->Send(end->queue_pair, NULL, &end->ping_out, 1, ND_OP_FLAG_SILENT_SUCCESS));
}

/* The next Receive is posted before the answer can arrive. One Receive is posted when this begins. */
static double nd_ping(struct end *end, int server)
{
    double begin = now_s();

    for (int i = 0; i < PINGS; i++) {
        if (!server)
            post_send(end);
        take(end, 1, 0);
        post_receive(end);
        if (server)
            post_send(end);
    }
    return (now_s() - begin) / PINGS;
}

static double nd_write(struct end *end, const struct target *target)
{
    IND2QueuePair *queue_pair = end->queue_pair;
    double begin = now_s();

    for (int i = 0; i < WRITES; i++) {
        check("Write", queue_pair->methods->Write(queue_pair, NULL, &end->block, 1, target->address, target->token, 0));
        if (i >= DEPTH - 1)
            take(end, 0, 1);
    }
    take(end, 0, DEPTH - 1);
    return (double)WRITES * WRITE_SIZE / (now_s() - begin);
}

/* ---- the two processes ---- */

static int order(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;

    return (a > b) - (a < b);
}

static double median(double *values)
{
    qsort(values, ROUNDS, sizeof *values, order);
    return values[ROUNDS / 2];
}

static SOCKET new_socket(void)
{
    SOCKET result = socket(AF_INET, SOCK_STREAM, IPPROTO_TCP);

    if (result == INVALID_SOCKET)
        die("socket", WSAGetLastError());
    return result;
}

static void no_delay(SOCKET socket)
{
    BOOL on = TRUE;

    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, (const char *)&on, sizeof on);
}

static int serve(const char *path, unsigned short port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct end end = {0};
    SOCKET tcp = new_socket();
    struct target target;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(tcp, (struct sockaddr *)&address, sizeof address))
        die("connect", WSAGetLastError());
    no_delay(tcp);
    open_end(&end, path, &address);
    post_receive(&end);
    target =
        (struct target){(UINT64)(UINT_PTR)(end.buffer + WRITE_SIZE), end.region->methods->GetRemoteToken(end.region)};

    tcp_receive(tcp, (char *)&address.sin_port, sizeof address.sin_port);
    struct sockaddr_in local = {.sin_family = AF_INET, .sin_addr = address.sin_addr};
    check("Bind", end.connector->methods->Bind(end.connector, (struct sockaddr *)&local, sizeof local));
    finish("Connect", &end, end.connector,
           end.connector->methods->Connect(end.connector, (IUnknown *)end.queue_pair, (struct sockaddr *)&address,
                                           sizeof address, 1, 1, &target, sizeof target, &end.overlapped));
    finish("CompleteConnect", &end, end.connector,
           end.connector->methods->CompleteConnect(end.connector, &end.overlapped));
    for (int round = 0; round < ROUNDS; round++) {
        char go;

        tcp_ping(tcp, end.buffer, 1);
        nd_ping(&end, 1);
        tcp_write(tcp, end.buffer, 1);
        tcp_receive(tcp, &go, 1); /* the other end has written */
    }
    close_end(&end);
    return 0;
}

static HANDLE start_server(const char *self, const char *path, unsigned short port)
{
    STARTUPINFOA startup = {.cb = sizeof startup};
    PROCESS_INFORMATION process;
    char command[2 * MAX_PATH];

    snprintf(command, sizeof command, "\"%s\" \"%s\" %u", self, path, port);
    if (!CreateProcessA(NULL, command, NULL, NULL, FALSE, 0, NULL, NULL, &startup, &process))
        die("CreateProcess", (long)GetLastError());
    CloseHandle(process.hThread);
    return process.hProcess;
}

static int measure(const char *self, const char *path)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    int size = sizeof address;
    ULONG nd_size = sizeof address, private_size = sizeof(struct target);
    SOCKET listening = new_socket(), tcp;
    struct end end = {0};
    struct target target;
    IND2Listener *listener;
    double tcp_times[ROUNDS], nd_times[ROUNDS], tcp_rates[ROUNDS], nd_rates[ROUNDS];

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) || listen(listening, 1) ||
        getsockname(listening, (struct sockaddr *)&address, &size))
        die("listen", WSAGetLastError());
    HANDLE server = start_server(self, path, ntohs(address.sin_port));
    tcp = accept(listening, NULL, NULL);
    if (tcp == INVALID_SOCKET)
        die("accept", WSAGetLastError());
    no_delay(tcp);

    open_end(&end, path, &address);
    post_receive(&end);
    address.sin_port = 0;
    check("CreateListener",
          end.adapter->methods->CreateListener(end.adapter, &softnd_iid_IND2Listener, end.file, (void **)&listener));
    check("Bind", listener->methods->Bind(listener, (struct sockaddr *)&address, sizeof address));
    check("Listen", listener->methods->Listen(listener, 0));
    check("GetLocalAddress", listener->methods->GetLocalAddress(listener, (struct sockaddr *)&address, &nd_size));
    tcp_send(tcp, (const char *)&address.sin_port, sizeof address.sin_port);
    finish("GetConnectionRequest", &end, listener,
           listener->methods->GetConnectionRequest(listener, (IUnknown *)end.connector, &end.overlapped));
    check("GetPrivateData", end.connector->methods->GetPrivateData(end.connector, &target, &private_size));
    finish("Accept", &end, end.connector,
           end.connector->methods->Accept(end.connector, (IUnknown *)end.queue_pair, 1, 1, NULL, 0, &end.overlapped));
    listener->methods->Release(listener);

    for (int round = 0; round < ROUNDS; round++) {
        tcp_times[round] = tcp_ping(tcp, end.buffer, 0);
        nd_times[round] = nd_ping(&end, 0);
        tcp_rates[round] = tcp_write(tcp, end.buffer, 0);
        nd_rates[round] = nd_write(&end, &target);
        tcp_send(tcp, "", 1);
    }
    WaitForSingleObject(server, 10000);
    close_end(&end);

    double tcp_time = median(tcp_times), nd_time = median(nd_times);
    double tcp_rate = median(tcp_rates), nd_rate = median(nd_rates);
    int slow = nd_time / tcp_time > MOST_TIMES_TCP, narrow = nd_rate / tcp_rate < LEAST_OF_TCP;

    printf("%d-byte ping-pong: softnd %.1f us, TCP %.1f us: %.2f times TCP (at most %.1f)%s\n", PING_SIZE,
           nd_time * 1e6, tcp_time * 1e6, nd_time / tcp_time, MOST_TIMES_TCP, slow ? " TOO SLOW" : "");
    printf("1 MiB writes: softnd %.0f MB/s, TCP %.0f MB/s: %.2f of TCP (at least %.1f)%s\n", nd_rate / 1e6,
           tcp_rate / 1e6, nd_rate / tcp_rate, LEAST_OF_TCP, narrow ? " TOO SLOW" : "");
    return slow || narrow;
}

int main(int count, char **arguments)
{
    const char *path = count > 1 ? arguments[1] : "softnd.dll";
    WSADATA data;

    if (WSAStartup(MAKEWORD(2, 2), &data))
        die("WSAStartup", WSAGetLastError());
    CloseHandle(CreateThread(NULL, 0, watchdog, NULL, 0, NULL));
    if (count > 2)
        return serve(path, (unsigned short)atoi(arguments[2]));
    return measure(arguments[0], path);
}
