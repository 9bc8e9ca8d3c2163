/* The NetworkDirect 1 part of the data path (see ../../data_path.c). A provider gets the address of an ND_RESULT
   with each request, and returns it with the completion. Each slot has a cell: an ND_RESULT, followed by the address
   of the slot. So the result leads to the slot. The cells live as long as the queue pair's rings (contract I.5). */

/* The extension module has two data paths. The functions of this one get names of their own. */
#define native_request version1_request
#define native_result version1_result
#define native_elements version1_elements
#define native_data_request version1_data_request
#define native_post version1_native_post
#define native_receive version1_native_receive
#define native_poll version1_native_poll
#define native_slot version1_slot
#define native_queue_pair version1_queue_pair
#define status_of version1_status_of
#define native_vendor_status version1_vendor_status
#define native_bytes version1_bytes
#define native_received version1_received
#define post_initiator version1_post_initiator
#define post_receive version1_post_receive
#define translate version1_translate
#define translate_success version1_translate_success
#define translate_other version1_translate_other
#define poll_again version1_poll_again
#define ndpy_post_marker version1_post_marker
#define ndpy_post version1_post
#define ndpy_post_bind version1_post_bind
#define ndpy_post_invalidate version1_post_invalidate
#define ndpy_poll version1_poll
#define ndpy_drain version1_drain
#define ndpy_provider_table version1_provider_table

#undef LARGEST_TOKEN
#define LARGEST_TOKEN UINT64_MAX
#define NATIVE_HAS_NO_SHARED_QUEUES

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

struct native_request {
    const struct nd_sge *elements;
    uint32_t count;
    int invalidates;
    uint64_t offset;
    unsigned char descriptor[ND_MW_DESCRIPTOR_SIZE];
    /* bind and invalidate */
    void *region;
    void *window;
    unsigned char *granted;
    uint64_t address;
    uint64_t length;
    uint32_t access;
};

struct native_result {
    struct version1_cell *cell;
};

struct version1_endpoint *version1_endpoint_new(uint32_t initiator_depth, uint32_t receive_depth, uint32_t max_receive_sge)
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

static const struct nd_sge *native_elements(void *out, const struct ndpy_element *elements, uint32_t count)
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

static void native_data_request(struct native_request *out, uint32_t operation, const struct nd_sge *elements,
    uint32_t count, const struct ndpy_remote *remote)
{
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

static int native_post(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, struct native_request *request, int signaled)
{
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
        return refusal(INDEndpoint_Bind(native, result, request->region, request->window,
            (const void *)(uintptr_t)request->address, (size_t)request->length, flags | request->access,
            request->granted));
    default:
        return refusal(INDEndpoint_Invalidate(native, result, request->window, flags));
    }
}

static int native_receive(struct ndpy_queue_pair *qp, struct ndpy_slot *slot, const struct nd_sge *elements, uint32_t count)
{
    struct version1_endpoint *endpoint = qp->native;
    size_t index = slot->index;

    if (!endpoint->keeps)
        return refusal(INDEndpoint_Receive(endpoint->native, result_of(endpoint->receive, slot),
            elements, count));
    endpoint->kept_counts[index] = count;
    if (count)
        memcpy(&endpoint->kept[index * endpoint->max_receive_sge], elements, count * sizeof *elements);
    return 0;
}

int version1_endpoint_post_kept(struct ndpy_queue_pair *qp)
{
    struct version1_endpoint *endpoint = qp->native;
    struct ndpy_ring *ring = qp->receive;
    uint32_t posted = atomic_load(&ring->posted);
    struct ndpy_slot *place = ring->newest ? ring->newest->next : NULL;
    int error = 0;

    endpoint->keeps = 0;
    for (uint32_t next = atomic_load(&ring->retired); next != posted && !error; next++) {
        struct ndpy_slot *slot = ring_find(&place, next);

        error = INDEndpoint_Receive(endpoint->native, result_of(endpoint->receive, slot),
            &endpoint->kept[(size_t)slot->index * endpoint->max_receive_sge], endpoint->kept_counts[slot->index]);
    }
    return error;
}

_Static_assert(sizeof(struct native_result) == sizeof(struct nd_result *), "an array of results is one of ND_RESULT *");
_Static_assert(offsetof(struct version1_cell, result) == 0, "a result is its cell");

static int native_poll(struct ndpy_completion_queue *cq, struct native_result *results, uint32_t count)
{
    return (int)INDCompletionQueue_GetResults(cq->native, (struct nd_result **)results, count);
}

static struct ndpy_slot *native_slot(const struct native_result *result)
{
    return result->cell->slot;
}

/* Called only for a window's result, which belongs to no queue pair. */
static uint32_t native_queue_pair(const struct native_result *result)
{
    (void)result;
    return 0;
}

static uint32_t status_of(const struct native_result *result)
{
    return (uint32_t)result->cell->result.status;
}

static uint64_t native_bytes(const struct native_result *result)
{
    return result->cell->result.bytes_transferred;
}

#include "../both_versions.c"

#undef ndpy_post_marker
#undef ndpy_post
#undef ndpy_post_bind
#undef ndpy_post_invalidate
#undef ndpy_poll
#undef ndpy_drain
#undef ndpy_provider_table
