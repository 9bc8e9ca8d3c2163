/* The NetworkDirect 1 part of the data path (see ../../data_path.h). A provider gets the address of an ND_RESULT
   with each request, and returns it with the completion. Each slot has a cell: an ND_RESULT, followed by the address
   of the slot. So the result leads to the slot. The cells live as long as the queue pair's rings (contract I.5). */

#define ND_MW_DESCRIPTOR_SIZE 20

_Static_assert(sizeof(struct nd_sge) <= NATIVE_ELEMENT_SIZE, "an element fits");
_Static_assert(sizeof(struct nd_sge) == 24, "ND_SGE");
_Static_assert(sizeof(struct nd_result) == 16, "ND_RESULT");
_Static_assert(offsetof(struct nd_result, bytes_transferred) == 8, "ND_RESULT.BytesTransferred");
_Static_assert(sizeof(struct nd_adapter_info1) == 128, "ND_ADAPTER_INFO1");
_Static_assert(offsetof(struct nd_adapter_info1, max_callee_data) == 120, "ND_ADAPTER_INFO1.MaxCalleeData");

struct version1_cell {
    struct nd_result result;
    struct ndpy_slot *slot;
};

struct version1_endpoint {
    struct INDEndpoint *native;
    struct version1_cell *initiator;
    struct version1_cell *receive;
    /* Receives that wait for a native endpoint: for each slot, the number of elements and the elements. */
    int keeps;
    uint32_t max_receive_sge;
    uint32_t *kept_counts;
    struct nd_sge *kept;
};

struct version1_window {
    struct version1_cell cell;
    struct ndpy_slot slot;
    unsigned char descriptor[ND_MW_DESCRIPTOR_SIZE];
};

struct version1_request {
    const struct nd_sge *elements;
    uint32_t count;
    int invalidates;
    uint64_t offset;
    unsigned char descriptor[ND_MW_DESCRIPTOR_SIZE];
    struct window_request bind;
};

struct version1_endpoint *version1_endpoint_new(uint32_t initiator_depth, uint32_t receive_depth,
                                                uint32_t max_receive_sge)
{
    struct version1_endpoint *endpoint = calloc(1, sizeof *endpoint);

    if (!endpoint)
        return NULL;
    endpoint->keeps = 1;
    endpoint->max_receive_sge = max_receive_sge;
    endpoint->initiator = calloc(initiator_depth + 1, sizeof *endpoint->initiator);
    endpoint->receive = calloc(receive_depth + 1, sizeof *endpoint->receive);
    endpoint->kept_counts = calloc(receive_depth + 1, sizeof *endpoint->kept_counts);
    endpoint->kept = calloc((size_t)receive_depth * max_receive_sge + 1, sizeof *endpoint->kept);
    if (!endpoint->initiator || !endpoint->receive || !endpoint->kept_counts || !endpoint->kept) {
        version1_endpoint_free(endpoint);
        return NULL;
    }
    return endpoint;
}

void version1_endpoint_free(struct version1_endpoint *endpoint)
{
    free(endpoint->initiator);
    free(endpoint->receive);
    free(endpoint->kept_counts);
    free(endpoint->kept);
    free(endpoint);
}

void version1_queue_pair_free(struct ndpy_queue_pair *qp)
{
    version1_endpoint_free(qp->native);
    ndpy_queue_pair_free(qp);
}

void version1_endpoint_use(struct version1_endpoint *endpoint, struct INDEndpoint *native)
{
    endpoint->native = native;
}

struct version1_window *version1_window_new(uint32_t number)
{
    struct version1_window *window = calloc(1, sizeof *window);

    if (!window)
        return NULL;
    window->cell.slot = &window->slot;
    window->slot.sequence = number;
    window->slot.operation = NDPY_INVALIDATE;
    return window;
}

void version1_window_free(struct version1_window *window)
{
    free(window);
}

struct nd_result *version1_window_result(struct version1_window *window)
{
    return &window->cell.result;
}

unsigned char *version1_window_descriptor(struct version1_window *window)
{
    return window->descriptor;
}

/* ---- hooks ---- */

static void *version1_elements(void *out, const struct ndpy_element *elements, uint32_t count)
{
    struct nd_sge *sge = out;

    for (uint32_t i = 0; i < count; i++) {
        sge[i].address = (void *)(uintptr_t)elements[i].address;
        sge[i].length = elements[i].length;
        sge[i].region = (void *)(uintptr_t)elements[i].token;
    }
    return sge;
}

static unsigned char *put(unsigned char *out, uint64_t number, int size)
{
    for (int i = size - 1; i >= 0; i--, number >>= 8)
        out[i] = (unsigned char)number;
    return out + size;
}

/* Writes the descriptor of a window: its base, length and token, in network order (ND_MW_DESCRIPTOR). */
static void describe(unsigned char *out, uint64_t base, uint64_t length, uint32_t token)
{
    put(put(put(out, base, 8), length, 8), token, 4);
}

uint64_t version1_window_of(const struct ndpy_remote *remote, unsigned char *descriptor)
{
    uint64_t offset = remote->address - remote->window_address;

    if (remote->length <= remote->window_length && offset <= remote->window_length - remote->length) {
        describe(descriptor, remote->window_address, remote->window_length, remote->token);
        return offset;
    }
    /* The program has changed the slice. */
    describe(descriptor, remote->address, remote->length, remote->token);
    return 0;
}

static void version1_data_request(void *request, uint32_t operation, void *elements, uint32_t count,
                                  const struct ndpy_remote *remote)
{
    struct version1_request *out = request;

    out->elements = elements;
    out->count = count;
    out->invalidates = operation == NDPY_SEND_AND_INVALIDATE;
    out->offset = version1_window_of(remote, out->descriptor);
}

static struct nd_result *result_of(struct version1_cell *cells, struct ndpy_slot *slot)
{
    struct version1_cell *cell = &cells[slot->index];

    cell->slot = slot;
    return &cell->result;
}

static int version1_native_post(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *posted, int signaled)
{
    const struct version1_request *request = posted;
    struct version1_endpoint *endpoint = qp->native;
    struct INDEndpoint *native = endpoint->native;
    struct nd_result *result = result_of(endpoint->initiator, slot);
    const struct nd_sge *sge = request->elements;
    uint32_t flags = slot->flags & (NDPY_READ_FENCE | NDPY_SOLICITED);

    /* Version 1 has no inline flag, and takes only registered memory (contract I.4.3). */
    if (slot->flags & NDPY_INLINE)
        return NDPY_INLINE_TOO_LONG;
    if (!signaled)
        flags |= ND_OP_FLAG_SILENT_SUCCESS;
    switch (slot->operation) {
    case NDPY_SEND:
        if (request->invalidates)
            return refusal(
                INDEndpoint_SendAndInvalidate(native, result, sge, request->count, request->descriptor, flags));
        return refusal(INDEndpoint_Send(native, result, sge, request->count, flags));
    case NDPY_READ:
        return refusal(
            INDEndpoint_Read(native, result, sge, request->count, request->descriptor, request->offset, flags));
    case NDPY_WRITE:
        return refusal(
            INDEndpoint_Write(native, result, sge, request->count, request->descriptor, request->offset, flags));
    case NDPY_BIND:
        return refusal(INDEndpoint_Bind(native, result, request->bind.region, request->bind.window,
                                        (const void *)(uintptr_t)request->bind.address, (size_t)request->bind.length,
                                        flags | request->bind.access, request->bind.granted));
    default:
        return refusal(INDEndpoint_Invalidate(native, result, request->bind.window, flags));
    }
}

static int version1_receive(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, void *elements, uint32_t count)
{
    struct version1_endpoint *endpoint = qp->native;
    size_t index = slot->index;

    if (!endpoint->keeps)
        return refusal(INDEndpoint_Receive(endpoint->native, result_of(endpoint->receive, slot), elements, count));
    endpoint->kept_counts[index] = count;
    if (count)
        memcpy(&endpoint->kept[index * endpoint->max_receive_sge], elements, count * sizeof *endpoint->kept);
    return 0;
}

int version1_endpoint_post_kept(struct ndpy_queue_pair *qp)
{
    struct version1_endpoint *endpoint = qp->native;
    struct ndpy_ring *ring = &qp->receive;
    uint32_t posted = atomic_load(&ring->posted);
    struct ndpy_slot *place = ring->newest ? ring->newest->next : NULL;
    int error = 0;

    endpoint->keeps = 0;
    for (uint32_t next = atomic_load(&ring->retired); next != posted && !error; next++) {
        struct ndpy_slot *slot = ring_find(&place, next);

        error = INDEndpoint_Receive(endpoint->native, result_of(endpoint->receive, slot),
                                    &endpoint->kept[(size_t)slot->index * endpoint->max_receive_sge],
                                    endpoint->kept_counts[slot->index]);
    }
    return error;
}

_Static_assert(offsetof(struct version1_cell, result) == 0, "a result is its cell");

static int version1_native_poll(struct ndpy_completion_queue *cq, void *results, uint32_t count)
{
    return (int)INDCompletionQueue_GetResults(cq->native, results, count);
}

/* A result of the data path is the address of one of NetworkDirect. */
static const struct version1_cell *cell_of(const void *result)
{
    return (const struct version1_cell *)*(struct nd_result *const *)result;
}

static struct ndpy_slot *version1_slot(const void *result)
{
    return cell_of(result)->slot;
}

/* Called only for a window's result, which belongs to no queue pair. */
static uint32_t version1_queue_pair(const void *result)
{
    (void)result;
    return 0;
}

static uint32_t version1_status(const void *result)
{
    return (uint32_t)cell_of(result)->result.status;
}

static uint64_t version1_bytes(const void *result)
{
    return cell_of(result)->result.bytes_transferred;
}

static uint32_t version1_translate_all(const void *results, int got, struct ndpy_completion *out);
static void version1_translate_other(const void *result, struct ndpy_slot *slot, struct ndpy_completion *out);

static const struct native_steps version1 = {
    .elements = version1_elements,
    .data_request = version1_data_request,
    .post = version1_native_post,
    .receive = version1_receive,
    .no_memory = (int)ND_INSUFFICIENT_RESOURCES,
    .result_size = sizeof(struct nd_result *),
    .poll = version1_native_poll,
    .slot = version1_slot,
    .queue_pair = version1_queue_pair,
    .status = version1_status,
    .vendor_status = no_vendor_status,
    .bytes = version1_bytes,
    .received = nothing_received,
    .translate_status = translate_status,
    .translate_all = version1_translate_all,
    .translate_other = version1_translate_other,
};

/* ---- the functions of ndpy_abi.h and shim.h ---- */

#define NAME(function) version1_##function
#define STEPS          version1
#define REQUEST        struct version1_request
#define RESULT         struct nd_result *
#define LARGEST_TOKEN  UINT64_MAX
#define POST_SHARED    NULL
#include "../functions.h"
