/* The NetworkDirect 2 part of the data path (see ../data_path.h). With a completion the provider returns two
   contexts. The request's context is the address of its slot. The queue pair's context is the number of the queue
   pair in Python. */

_Static_assert(sizeof(struct nd2_sge) <= NATIVE_ELEMENT_SIZE, "an element fits");
_Static_assert(sizeof(struct nd2_result) == 32, "ND2_RESULT");
_Static_assert(offsetof(struct nd2_result, queue_pair_context) == 8, "ND2_RESULT.QueuePairContext");
_Static_assert(offsetof(struct nd2_result, request_context) == 16, "ND2_RESULT.RequestContext");
_Static_assert(offsetof(struct nd2_result, request_type) == 24, "ND2_RESULT.RequestType");
_Static_assert(sizeof(struct nd2_adapter_info) == 96, "ND2_ADAPTER_INFO");
_Static_assert(offsetof(struct nd2_adapter_info, max_initiator_sge) == 32, "ND2_ADAPTER_INFO.MaxInitiatorSge");
_Static_assert(offsetof(struct nd2_adapter_info, adapter_flags) == 92, "ND2_ADAPTER_INFO.AdapterFlags");

struct version2_request {
    const struct nd2_sge *elements;
    uint32_t count;
    uint32_t remote_token;
    uint64_t remote_address;
    struct window_request bind;
};

/* NetworkDirect has remote tokens in network order (contract D.4.2). For Python they are numbers, as on verbs. */
static uint32_t swap_token(uint32_t token)
{
    return token >> 24 | (token >> 8 & 0xFF00) | (token << 8 & 0xFF0000) | token << 24;
}

static void *version2_elements(void *out, const struct ndpy_element *elements, uint32_t count)
{
    struct nd2_sge *sge = out;

    for (uint32_t i = 0; i < count; i++) {
        sge[i].buffer = (void *)(uintptr_t)elements[i].address;
        sge[i].buffer_length = elements[i].length;
        sge[i].memory_region_token = (uint32_t)elements[i].token;
    }
    return sge;
}

static void version2_data_request(void *request, uint32_t operation, void *elements, uint32_t count,
                                  const struct ndpy_remote *remote)
{
    struct version2_request *out = request;

    (void)operation;
    out->elements = elements;
    out->count = count;
    out->remote_address = remote->address;
    out->remote_token = swap_token(remote->token);
}

static int version2_native_post(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *posted, int signaled)
{
    const struct version2_request *request = posted;
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
        return refusal(IND2QueuePair_Bind(native, slot, request->bind.region, request->bind.window,
                                          (const void *)(uintptr_t)request->bind.address, (size_t)request->bind.length,
                                          flags | request->bind.access));
    default:
        return refusal(IND2QueuePair_Invalidate(native, slot, request->bind.window, flags));
    }
}

static int version2_receive(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *elements, uint32_t count)
{
    return refusal(IND2QueuePair_Receive(qp->native, slot, elements, count));
}

static int version2_receive_shared(struct ndpy_shared_queue *queue, struct ndpy_slot *slot, void *elements,
                                   uint32_t count)
{
    return refusal(IND2SharedReceiveQueue_Receive(queue->native, slot, elements, count));
}

static int version2_native_poll(struct ndpy_completion_queue *cq, void *results, uint32_t count)
{
    return (int)IND2CompletionQueue_GetResults(cq->native, results, count);
}

static struct ndpy_slot *version2_slot(const void *result)
{
    return ((const struct nd2_result *)result)->request_context;
}

static uint32_t version2_queue_pair(const void *result)
{
    return (uint32_t)(uintptr_t)((const struct nd2_result *)result)->queue_pair_context;
}

static uint32_t version2_status(const void *result)
{
    return (uint32_t)((const struct nd2_result *)result)->status;
}

static uint64_t version2_bytes(const void *result)
{
    return ((const struct nd2_result *)result)->bytes_transferred;
}

static uint32_t ndpy_translate_all(const void *results, int got, struct ndpy_completion *out);
static void ndpy_translate_other(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out);

static const struct native_steps version2 = {
    .elements = version2_elements,
    .data_request = version2_data_request,
    .post = version2_native_post,
    .receive = version2_receive,
    .receive_shared = version2_receive_shared,
    .no_memory = (int)ND_INSUFFICIENT_RESOURCES,
    .result_size = sizeof(struct nd2_result),
    .poll = version2_native_poll,
    .slot = version2_slot,
    .queue_pair = version2_queue_pair,
    .status = version2_status,
    .vendor_status = no_vendor_status,
    .bytes = version2_bytes,
    .received = nothing_received,
    .translate_status = translate_status,
    .translate_all = ndpy_translate_all,
    .translate_other = ndpy_translate_other,
};

/* ---- the functions of ndpy_abi.h and shim.h ---- */

int ndpy_post_shared(struct ndpy_shared_queue *queue, uint32_t slot, uint64_t context,
                     const struct ndpy_element *elements, uint32_t count)
{
    return post_shared(&version2, queue, slot, context, elements, count);
}

#define NAME(function) ndpy_##function
#define STEPS          version2
#define REQUEST        struct version2_request
#define RESULT         struct nd2_result
#define LARGEST_TOKEN  UINT32_MAX
#define POST_SHARED    ndpy_post_shared
#include "functions.h"

uint32_t ndpy_region_remote_token(struct IND2MemoryRegion *region)
{
    return swap_token(IND2MemoryRegion_GetRemoteToken(region));
}

uint32_t ndpy_window_remote_token(struct IND2MemoryWindow *window)
{
    return swap_token(IND2MemoryWindow_GetRemoteToken(window));
}
