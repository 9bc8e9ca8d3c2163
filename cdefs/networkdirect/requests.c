/* Overlapped requests and the port on which they complete.

   A provider writes to an OVERLAPPED until its request has completed (contract C.3.1), and the packet of the
   completion points to it. So the structure counts its users: the Python object, and the request from its start to
   its packet.

   The adapter's thread waits in ndpy_take_packets without the interpreter's lock. It passes packets for a poller on
   to the poller's own port. So any number of pollers can wait for these queues, although their file has only the
   adapter's port. */

/* Held while a packet is passed on, so that nobody closes the port that it goes to. */
static SRWLOCK forwarding = SRWLOCK_INIT;

static void release_request(struct ndpy_request *request)
{
    if (InterlockedDecrement(&request->references) == 0) {
        CloseHandle(request->event);
        free(request);
    }
}

struct ndpy_request *ndpy_request_new(uint64_t key, void *forward, int quiet)
{
    struct ndpy_request *request = calloc(1, sizeof *request);

    if (!request)
        return NULL;
    request->event = CreateEventW(NULL, TRUE, FALSE, NULL);
    if (!request->event) {
        free(request);
        return NULL;
    }
    request->key = key;
    request->forward = forward;
    request->quiet = (uint32_t)quiet;
    request->references = 1;
    return request;
}

void ndpy_request_start(struct ndpy_request *request)
{
    InterlockedIncrement(&request->references);
    /* The provider sets this when it accepts the request. Set it now, so that the request never looks ended before. */
    request->overlapped.internal = STATUS_PENDING;
    request->overlapped.internal_high = 0;
    request->overlapped.offset = 0;
    request->overlapped.offset_high = 0;
    /* The low bit keeps the packet away from the port (contract C.3.4). */
    request->overlapped.event = request->quiet ? (void *)((uintptr_t)request->event | 1) : request->event;
    ResetEvent(request->event);
}

void ndpy_request_stop(struct ndpy_request *request)
{
    release_request(request);
}

void ndpy_request_drop(struct ndpy_request *request)
{
    release_request(request);
}

static int still_pending(const struct ndpy_request *request)
{
    return *(const volatile uintptr_t *)&request->overlapped.internal == STATUS_PENDING;
}

static int32_t result_of_ended(struct ndpy_request *request, int32_t status)
{
    if (status == STATUS_PENDING && !request->quiet)
        InterlockedIncrement(&request->references);
    return status;
}

int32_t ndpy_request_result(struct IND2Overlapped *target, struct ndpy_request *request)
{
    if (still_pending(request))
        return STATUS_PENDING;
    return result_of_ended(request, IND2Overlapped_GetOverlappedResult(target, &request->overlapped, FALSE));
}

int32_t version1_request_result(struct INDOverlapped *target, struct ndpy_request *request)
{
    size_t bytes = 0;

    if (still_pending(request))
        return STATUS_PENDING;
    return result_of_ended(request, INDOverlapped_GetOverlappedResult(target, &request->overlapped, &bytes, FALSE));
}

void ndpy_request_forward(struct ndpy_request *request, void *port)
{
    AcquireSRWLockExclusive(&forwarding);
    request->forward = port;
    ReleaseSRWLockExclusive(&forwarding);
}

static int pass_on(struct ndpy_request *request, void *from)
{
    int passed = 0;

    AcquireSRWLockShared(&forwarding);
    if (request->forward && request->forward != from)
        passed = PostQueuedCompletionStatus(request->forward, 0, (ULONG_PTR)request->key,
                                            (OVERLAPPED *)&request->overlapped);
    ReleaseSRWLockShared(&forwarding);
    return passed;
}

#define NDPY_PACKET_BATCH 64

_Static_assert(sizeof(struct nd_overlapped_entry) == sizeof(OVERLAPPED_ENTRY), "OVERLAPPED_ENTRY");
_Static_assert(sizeof(struct nd_overlapped) == sizeof(OVERLAPPED), "OVERLAPPED");
_Static_assert(offsetof(struct nd_overlapped, event) == offsetof(OVERLAPPED, hEvent), "OVERLAPPED.hEvent");
_Static_assert(offsetof(struct ndpy_request, overlapped) == 0, "a packet's OVERLAPPED is its request");

int ndpy_take_packets(void *port, struct ndpy_packet *out, uint32_t count, uint32_t timeout_ms)
{
    OVERLAPPED_ENTRY entries[NDPY_PACKET_BATCH];
    ULONG taken = 0;
    int done = 0;

    if (count > NDPY_PACKET_BATCH)
        count = NDPY_PACKET_BATCH;
    do {
        if (!GetQueuedCompletionStatusEx(port, entries, count, &taken, timeout_ms, FALSE)) {
            DWORD error = GetLastError();
            return error == WAIT_TIMEOUT ? 0 : -(int)error;
        }
        for (ULONG i = 0; i < taken; i++) {
            struct ndpy_request *request = (struct ndpy_request *)entries[i].lpOverlapped;

            if (request && pass_on(request, port))
                continue;
            out[done].key = request ? request->key : entries[i].lpCompletionKey;
            out[done++].request = request;
        }
    } while (!done);
    return done;
}

int32_t ndpy_post_packet(void *port, uint64_t key)
{
    return PostQueuedCompletionStatus(port, 0, (ULONG_PTR)key, NULL);
}
