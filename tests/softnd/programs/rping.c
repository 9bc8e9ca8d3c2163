/* rping's conversation on NetworkDirect. The other end may be rdmacm-utils' rping on any iWARP adapter.
 *
 *   rping.exe DLL server ADDRESS PORT SIZE ROUNDS            SIZE: the most that a client may name; ROUNDS: unused
 *   rping.exe DLL client ADDRESS PORT SIZE ROUNDS
 *   rping.exe DLL access_violation ADDRESS PORT SIZE ROUNDS  a client that finally writes through a wrong token
 *
 * In each round, the client names a source. The server reads it and sends a go-ahead. The client names a sink. The
 * server writes there what it read and sends a go-ahead. The data are those that rping checks: a title with the number
 * of the round, then the characters from 'A' to 'z' in turn, starting one later in each round.
 */
#include "networkdirect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH         16
#define ADVERTISEMENT 16
#define LETTERS       ('z' - 'A' + 1)

static struct end end;
static unsigned char *memory; /* in 0, out 64, source 4096, sink 4096 + the greatest size */
static unsigned char *inbox, *outbox, *source, *sink;
static UINT32 token, remote_token;
static BOOL received;
static HRESULT received_status;
static ULONG received_size;

static void put32(unsigned char *out, UINT32 value)
{
    for (int i = 0; i < 4; i++)
        out[i] = (unsigned char)(value >> (24 - 8 * i));
}

static UINT32 get32(const unsigned char *data)
{
    return (UINT32)data[0] << 24 | (UINT32)data[1] << 16 | (UINT32)data[2] << 8 | data[3];
}

static void expected_text(unsigned char *out, unsigned round, unsigned size)
{
    unsigned title = (unsigned)sprintf((char *)out, "rdma-ping-%u: ", round);

    for (unsigned i = title; i + 1 < size; i++)
        out[i] = (unsigned char)('A' + (round + i - title) % LETTERS);
    out[size - 1] = 0;
}

static void post_receive(void)
{
    ND2_SGE sge = {inbox, ADVERTISEMENT, token};

    check("Receive", CALL(end.queue_pair, Receive, NULL, &sge, 1));
}

/* Takes completions until one of `type` arrives. Returns its status. */
static HRESULT wait_for(ND2_REQUEST_TYPE type)
{
    for (;;) {
        ND2_RESULT result;

        if (type == Nd2RequestTypeReceive && received) {
            received = FALSE;
            return received_status;
        }
        result = next_result(&end);
        if (result.RequestType == Nd2RequestTypeReceive) {
            received = TRUE;
            received_status = result.Status;
            received_size = result.BytesTransferred;
        } else if (result.RequestType == type) {
            return result.Status;
        } else {
            check("completion", result.Status);
        }
    }
}

/* Returns the status of the Send. */
static HRESULT send_advertisement(const unsigned char *buffer, unsigned size)
{
    ND2_SGE sge = {outbox, ADVERTISEMENT, token};
    UINT64 address = (ULONG_PTR)buffer;

    put32(outbox, (UINT32)(address >> 32));
    put32(outbox + 4, (UINT32)address);
    memcpy(outbox + 8, &remote_token, 4); /* remote tokens are already in network order */
    put32(outbox + 12, size);
    check("Send", CALL(end.queue_pair, Send, NULL, &sge, 1, 0));
    return wait_for(Nd2RequestTypeSend);
}

static BOOL next_message(void)
{
    HRESULT status = wait_for(Nd2RequestTypeReceive);

    if (status == ND_CANCELED)
        return FALSE;
    check("Receive completed", status);
    if (received_size != ADVERTISEMENT)
        die("a message of another size", (HRESULT)received_size);
    return TRUE;
}

static void server(unsigned limit)
{
    unsigned rounds = 0;
    HRESULT status;

    while (next_message()) {
        UINT64 address = (UINT64)get32(inbox) << 32 | get32(inbox + 4);
        UINT32 its_token;
        unsigned size = get32(inbox + 12);
        ND2_SGE sge = {sink, size, token};

        if (size > limit)
            die("more than there is room for", (HRESULT)size);
        memcpy(&its_token, inbox + 8, 4);
        memset(sink, 0, limit);
        post_receive();
        check("Read", CALL(end.queue_pair, Read, NULL, &sge, 1, address, its_token, 0));
        check("Read completed", wait_for(Nd2RequestTypeRead));
        expected_text(source, rounds, size);
        if (memcmp(source, sink, size))
            die("not what rping sends", (HRESULT)rounds);
        check("Send completed", send_advertisement(outbox, 0));
        if (!next_message())
            die("gone in the middle of a round", (HRESULT)rounds);
        address = (UINT64)get32(inbox) << 32 | get32(inbox + 4);
        memcpy(&its_token, inbox + 8, 4);
        post_receive();
        check("Write", CALL(end.queue_pair, Write, NULL, &sge, 1, address, its_token, 0));
        check("Write completed", wait_for(Nd2RequestTypeWrite));
        rounds++;
        /* A client that has all it wants disconnects without acknowledging this. */
        status = send_advertisement(outbox, 0);
        if (status != ND_CANCELED)
            check("Send completed", status);
    }
    printf("server: %u rounds verified\n", rounds);
}

static void client(unsigned size, unsigned rounds)
{
    for (unsigned round = 0; round < rounds; round++) {
        expected_text(source, round, size);
        memset(sink, 0, size);
        for (unsigned half = 0; half < 2; half++) {
            check("Send completed", send_advertisement(half ? sink : source, size));
            if (!next_message())
                die("the server left in round", (HRESULT)round);
            post_receive();
        }
        if (memcmp(source, sink, size))
            die("data mismatch in round", (HRESULT)round);
    }
    printf("client: %u rounds of %u bytes verified\n", rounds, size);
}

/* No peer grants the token 0xFFFFFFFF, so the peer answers with a Terminate. siw leaves it out while its own Send is in
 * progress, also when the Send has arrived here, so that gets time to end. */
static void access_violation(void)
{
    ND2_SGE sge = {source, 64, token};
    HRESULT status;

    Sleep(200);
    check("Write", CALL(end.queue_pair, Write, NULL, &sge, 1, 0x1000, 0xFFFFFFFF, 0));
    status = wait_for(Nd2RequestTypeWrite);
    printf("access_violation: write completed with 0x%08lx, ", (unsigned long)status);
    printf("receive with 0x%08lx\n", (unsigned long)wait_for(Nd2RequestTypeReceive));
}

static void accept_one(const struct sockaddr_in *address)
{
    struct sockaddr_in bound;
    ULONG size = sizeof bound;
    IND2Listener *listener;

    check("CreateListener", CALL(end.adapter, CreateListener, &softnd_iid_IND2Listener, end.file, (void **)&listener));
    check("Bind", CALL(listener, Bind, (const struct sockaddr *)address, sizeof *address));
    check("Listen", CALL(listener, Listen, 1));
    check("GetLocalAddress", CALL(listener, GetLocalAddress, (struct sockaddr *)&bound, &size));
    printf("listening on port %u\n", ntohs(bound.sin_port));
    fflush(stdout);
    check("GetConnectionRequest",
          finished(&end, listener, CALL(listener, GetConnectionRequest, (IUnknown *)end.connector, &end.overlapped)));
    post_receive();
    check("Accept", finished(&end, end.connector,
                             CALL(end.connector, Accept, (IUnknown *)end.queue_pair, 4, 4, NULL, 0, &end.overlapped)));
    CALL0(listener, Release);
}

static void connect_to(const struct sockaddr_in *address)
{
    post_receive();
    check("Connect", finished(&end, end.connector,
                              CALL(end.connector, Connect, (IUnknown *)end.queue_pair, (const struct sockaddr *)address,
                                   sizeof *address, 4, 4, NULL, 0, &end.overlapped)));
    check("CompleteConnect", finished(&end, end.connector, CALL(end.connector, CompleteConnect, &end.overlapped)));
}

int main(int count, char **arguments)
{
    struct sockaddr_in address;
    IND2MemoryRegion *region;
    unsigned size, rounds;
    const char *role;

    if (count != 7) {
        fprintf(stderr, "rping DLL server|client|access_violation ADDRESS PORT SIZE ROUNDS\n");
        return 2;
    }
    role = arguments[2];
    size = (unsigned)atoi(arguments[5]);
    rounds = (unsigned)atoi(arguments[6]);
    limit_time(400000);
    address = address_of(arguments[3], arguments[4]);
    open_end(&end, open_adapter(arguments[1], &address, sizeof address), DEPTH);
    memory = VirtualAlloc(NULL, 0x40000, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
    inbox = memory;
    outbox = memory + 64;
    source = memory + 0x1000;
    sink = memory + 0x20000;
    region = new_region(&end, memory, 0x40000,
                        ND_MR_FLAG_ALLOW_REMOTE_READ | ND_MR_FLAG_ALLOW_REMOTE_WRITE | ND_MR_FLAG_RDMA_READ_SINK);
    token = CALL0(region, GetLocalToken);
    remote_token = CALL0(region, GetRemoteToken);
    if (!strcmp(role, "server")) {
        accept_one(&address);
        server(size);
    } else {
        connect_to(&address);
        client(size, rounds);
        if (!strcmp(role, "access_violation"))
            access_violation();
    }
    finished(&end, end.connector, CALL(end.connector, Disconnect, &end.overlapped));
    close_end(&end);
    CALL(region, Deregister, &end.overlapped);
    CALL0(region, Release);
    CALL0(end.adapter, Release);
    return 0;
}
