/* The NetworkDirect 2 part of the data path (see ../data_path.c). With a completion the provider returns two
   contexts. The request's context is the address of its slot. The queue pair's context is the number of the queue
   pair in Python. */

#include "../rings.h"

_Static_assert(sizeof(struct nd2_sge) <= NATIVE_ELEMENT_SIZE, "an element fits");
_Static_assert(sizeof(struct nd2_result) == 32, "ND2_RESULT");
_Static_assert(offsetof(struct nd2_result, queue_pair_context) == 8, "ND2_RESULT.QueuePairContext");
_Static_assert(offsetof(struct nd2_result, request_context) == 16, "ND2_RESULT.RequestContext");
_Static_assert(offsetof(struct nd2_result, request_type) == 24, "ND2_RESULT.RequestType");
_Static_assert(sizeof(struct nd2_adapter_info) == 96, "ND2_ADAPTER_INFO");
_Static_assert(offsetof(struct nd2_adapter_info, max_initiator_sge) == 32, "ND2_ADAPTER_INFO.MaxInitiatorSge");
_Static_assert(offsetof(struct nd2_adapter_info, adapter_flags) == 92, "ND2_ADAPTER_INFO.AdapterFlags");
/* Flags have the same numbers in NetworkDirect and in ndpy. */
_Static_assert((int)ND_OP_FLAG_SILENT_SUCCESS == (int)NDPY_SILENT_SUCCESS, "flags");
_Static_assert((int)ND_OP_FLAG_READ_FENCE == (int)NDPY_READ_FENCE, "flags");
_Static_assert((int)ND_OP_FLAG_SEND_AND_SOLICIT_EVENT == (int)NDPY_SOLICITED, "flags");
_Static_assert((int)ND_OP_FLAG_INLINE == (int)NDPY_INLINE, "flags");

#define LARGEST_TOKEN UINT32_MAX

struct native_request {
    const struct nd2_sge *elements;
    uint32_t count;
    uint32_t remote_token;
    uint64_t remote_address;
    /* bind and invalidate */
    void *region;
    void *window;
    unsigned char *granted;     /* version 1: where the bind writes the window's descriptor */
    uint64_t address;
    uint64_t length;
    uint32_t access;
};

struct native_result {
    struct nd2_result result;
};

#define ND_BUFFER_OVERFLOW 0x80000005u
#define ND_NO_MORE_ENTRIES 0x8000001Au
#define ND_ACCESS_VIOLATION 0xC0000005u
#define ND_INVALID_DEVICE_REQUEST 0xC0000010u
#define ND_DATA_OVERRUN 0xC000003Cu
#define ND_DATA_ERROR 0xC000003Eu
#define ND_INSUFFICIENT_RESOURCES 0xC000009Au
#define ND_IO_TIMEOUT 0xC00000B5u
#define ND_INTERNAL_ERROR 0xC00000E5u
#define ND_CANCELED 0xC0000120u
#define ND_REMOTE_ERROR 0xC000013Du
#define ND_CONNECTION_INVALID 0xC000023Au

#define NATIVE_CANCELED ND_CANCELED
#define NATIVE_NO_MEMORY ((int)ND_INSUFFICIENT_RESOURCES)

#include "../rings.c"

/* NetworkDirect has remote tokens in network order (contract D.4.2). For Python they are numbers, as on verbs. */
static uint32_t swap_token(uint32_t token)
{
    return token >> 24 | (token >> 8 & 0xFF00) | (token << 8 & 0xFF0000) | token << 24;
}

static const struct nd2_sge *native_elements(void *out, const struct ndpy_element *elements, uint32_t count)
{
    struct nd2_sge *sge = out;

    for (uint32_t i = 0; i < count; i++) {
        sge[i].buffer = (void *)(uintptr_t)elements[i].address;
        sge[i].buffer_length = elements[i].length;
        sge[i].memory_region_token = (uint32_t)elements[i].token;
    }
    return sge;
}

static void native_data_request(struct native_request *out, uint32_t operation, const struct nd2_sge *elements,
    uint32_t count, const struct ndpy_remote *remote)
{
    (void)operation;
    out->elements = elements;
    out->count = count;
    out->remote_address = remote->address;
    out->remote_token = swap_token(remote->token);
}

/* Translate a provider's refusal to enum ndpy_refusal, if that has the same reason. */
static inline int refusal(int32_t status)
{
    switch ((uint32_t)status) {
    case ND_NO_MORE_ENTRIES:
        return NDPY_QUEUE_FULL;
    case ND_CONNECTION_INVALID:
        return NDPY_NOT_CONNECTED;
    default:
        return status;
    }
}

static int native_post(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, struct native_request *request, int signaled)
{
    struct IND2QueuePair *native = qp->native;
    const struct nd2_sge *sge = request->elements;
    uint32_t flags = slot->flags & (NDPY_READ_FENCE | NDPY_SOLICITED | NDPY_INLINE);

    if (!signaled)
        flags |= ND_OP_FLAG_SILENT_SUCCESS;
    switch (slot->operation) {
    case NDPY_SEND:
        return refusal(IND2QueuePair_Send(native, slot, sge, request->count, flags));
    case NDPY_READ:
        return refusal(IND2QueuePair_Read(native, slot, sge, request->count, request->remote_address,
            request->remote_token, flags));
    case NDPY_WRITE:
        return refusal(IND2QueuePair_Write(native, slot, sge, request->count, request->remote_address,
            request->remote_token, flags));
    case NDPY_BIND:
        return refusal(IND2QueuePair_Bind(native, slot, request->region, request->window,
            (const void *)(uintptr_t)request->address, (size_t)request->length, flags | request->access));
    default:
        return refusal(IND2QueuePair_Invalidate(native, slot, request->window, flags));
    }
}

static int native_receive(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, const struct nd2_sge *elements, uint32_t count)
{
    return refusal(IND2QueuePair_Receive(qp->native, slot, elements, count));
}

static int native_receive_shared(struct ndpy_shared_queue *queue, struct ndpy_slot *slot,
    const struct nd2_sge *elements, uint32_t count)
{
    return refusal(IND2SharedReceiveQueue_Receive(queue->native, slot, elements, count));
}

_Static_assert(sizeof(struct native_result) == sizeof(struct nd2_result), "an array of results is one of ND2_RESULT");

static int native_poll(struct ndpy_completion_queue *cq, struct native_result *results, uint32_t count)
{
    return (int)IND2CompletionQueue_GetResults(cq->native, &results->result, count);
}

static struct ndpy_slot *native_slot(const struct native_result *result)
{
    return result->result.request_context;
}

static uint32_t native_queue_pair(const struct native_result *result)
{
    return (uint32_t)(uintptr_t)result->result.queue_pair_context;
}

static uint32_t status_of(const struct native_result *result)
{
    return (uint32_t)result->result.status;
}

static uint32_t native_bytes(const struct native_result *result)
{
    return result->result.bytes_transferred;
}

static uint32_t translate_status(uint32_t status, uint32_t operation, uint32_t flags)
{
    (void)operation;
    (void)flags;
    switch (status) {
    case 0:
        return NDPY_SUCCESS;
    case ND_CANCELED:
        return NDPY_CANCELED;
    case ND_ACCESS_VIOLATION:
        return NDPY_ACCESS_VIOLATION;
    case ND_BUFFER_OVERFLOW:
        return NDPY_BUFFER_OVERFLOW;
    case ND_DATA_OVERRUN:
    case ND_DATA_ERROR:
        return NDPY_DATA_OVERRUN;
    case ND_IO_TIMEOUT:
        return NDPY_IO_TIMEOUT;
    case ND_REMOTE_ERROR:
        return NDPY_REMOTE_ERROR;
    case ND_INVALID_DEVICE_REQUEST:
        return NDPY_INVALID_REQUEST;
    case ND_INTERNAL_ERROR:
        return NDPY_INTERNAL_ERROR;
    default:
        return NDPY_UNKNOWN;
    }
}

static uint64_t native_time_ns(void)
{
    LARGE_INTEGER ticks, frequency;

    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&frequency);
    return (uint64_t)((double)ticks.QuadPart * 1e9 / (double)frequency.QuadPart);
}

#include "both_versions.c"

uint32_t ndpy_region_remote_token(struct IND2MemoryRegion *region)
{
    return swap_token(IND2MemoryRegion_GetRemoteToken(region));
}

uint32_t ndpy_window_remote_token(struct IND2MemoryWindow *window)
{
    return swap_token(IND2MemoryWindow_GetRemoteToken(window));
}
