/* INDEndpoint: a queue pair that knows its connector and its read limits. */
#include "objects.h"

static bool readable(const ND_RESULT *result)
{
    ND_RESULT probe;
    return guarded_copy(&probe, result, sizeof probe);
}

/* Elements in version 2's form. Their total length is that of the request. */
struct elements {
    ND2_SGE sge[MAX_SGE];
    ULONG count;
    uint64_t length;
};

static HRESULT take_elements(struct elements *out, const ND_SGE *sge, SIZE_T count)
{
    ND_SGE copy[MAX_SGE];

    out->length = 0;
    if (count > MAX_SGE)
        return ND_DATA_OVERRUN;
    out->count = (ULONG)count;
    if (count > 0 && !guarded_copy(copy, sge, count * sizeof *sge))
        return ND_ACCESS_VIOLATION;
    for (SIZE_T i = 0; i < count; i++) {
        ULONG length = version1_size(copy[i].Length);
        out->sge[i] = (ND2_SGE){copy[i].pAddr, length, version1_token(copy[i].hMr)};
        out->length += length;
    }
    return ND_SUCCESS;
}

/* Copies small data during the call. Returns false if they cannot be read; the request then fails in its turn. Data of
 * a request behind a fence are not copied, because they may still be arriving. */
static bool take_inline(const struct queue_pair *qp, struct operation *operation, const struct elements *elements)
{
    bool taken = elements->length <= qp->limits.inline_size && (operation->flags & ND_OP_FLAG_READ_FENCE) == 0;

    for (ULONG i = 0; i < elements->count && taken; i++) {
        const ND2_SGE *sge = &elements->sge[i];
        taken = sge->BufferLength == 0 ||
                memory_read(qp->object.adapter, sge->MemoryRegionToken, (uintptr_t)sge->Buffer,
                            operation->inline_data + operation->length, sge->BufferLength, ACCESS_LOCAL_READ, qp);
        operation->length += sge->BufferLength;
    }
    operation->length = taken ? elements->length : 0;
    return taken;
}

static HRESULT post(struct queue_pair *qp, struct operation *operation, const struct elements *elements)
{
    if (elements->length > MAX_TRANSFER_LENGTH)
        return ND_LOCAL_LENGTH;
    if (elements->count > qp->limits.initiator_sge)
        return ND_DATA_OVERRUN;
    if (operation->type == Nd2RequestTypeRead || !take_inline(qp, operation, elements))
        return nd_post_data(qp, operation, elements->sge, elements->count);
    operation->flags |= ND_OP_FLAG_INLINE;
    return nd_post_data(qp, operation, NULL, 0);
}

#define SEND_FLAGS (FENCE_AND_SILENT | ND_OP_FLAG_SEND_AND_SOLICIT_EVENT)

/* `remote` is the descriptor of what it invalidates; NULL: nothing. */
static HRESULT send_elements(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge, SIZE_T sge_count,
                             const ND_MW_DESCRIPTOR *remote, DWORD flags)
{
    struct operation operation;
    struct elements elements;

    operation_begin(&operation, result, Nd2RequestTypeSend, flags);
    operation.invalidates = remote != NULL;
    operation.remote_token = remote != NULL ? remote->Token : 0;
    HRESULT status = take_elements(&elements, sge, sge_count);
    return status == ND_SUCCESS ? post(qp_of(self), &operation, &elements) : status;
}

static HRESULT STDMETHODCALLTYPE endpoint_send(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge,
                                               SIZE_T sge_count, DWORD flags)
{
    if (!readable(result))
        return ND_INVALID_PARAMETER_1;
    if ((flags & ~(DWORD)SEND_FLAGS) != 0)
        return ND_INVALID_PARAMETER_4;
    return send_elements(self, result, sge, sge_count, NULL, flags);
}

static HRESULT STDMETHODCALLTYPE endpoint_send_and_invalidate(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge,
                                                              SIZE_T sge_count, const ND_MW_DESCRIPTOR *remote,
                                                              DWORD flags)
{
    ND_MW_DESCRIPTOR descriptor;

    if (!readable(result))
        return ND_INVALID_PARAMETER_1;
    if (!guarded_copy(&descriptor, remote, sizeof descriptor))
        return ND_INVALID_PARAMETER_4;
    if ((flags & ~(DWORD)SEND_FLAGS) != 0)
        return ND_INVALID_PARAMETER_5;
    return send_elements(self, result, sge, sge_count, &descriptor, flags);
}

static HRESULT STDMETHODCALLTYPE endpoint_receive(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge,
                                                  SIZE_T sge_count)
{
    struct elements elements;

    if (!readable(result))
        return ND_INVALID_PARAMETER_1;
    HRESULT status = take_elements(&elements, sge, sge_count);
    if (status != ND_SUCCESS)
        return status;
    return nd_receive(qp_of(self), result, elements.sge, elements.count);
}

/* Read and Write: checks the range against the peer's window descriptor, from the offset on. A range outside of it is
 * refused here, so that the connection survives. The peer checks against the real window. */
static HRESULT transfer(INDEndpoint *self, ND2_REQUEST_TYPE type, ND_RESULT *result, const ND_SGE *sge,
                        SIZE_T sge_count, const ND_MW_DESCRIPTOR *remote, ULONGLONG offset, DWORD flags)
{
    ND_MW_DESCRIPTOR descriptor;
    struct operation operation;
    struct elements elements;

    if (!readable(result))
        return ND_INVALID_PARAMETER_1;
    if (!guarded_copy(&descriptor, remote, sizeof descriptor))
        return ND_INVALID_PARAMETER_4;
    if ((flags & ~(DWORD)FENCE_AND_SILENT) != 0)
        return ND_INVALID_PARAMETER_6;
    HRESULT status = take_elements(&elements, sge, sge_count);
    if (status != ND_SUCCESS)
        return status;
    uint64_t base = ntohll(descriptor.Base), size = ntohll(descriptor.Length);
    bool inside = offset <= size && elements.length <= size - offset && base + offset >= base;
    if (elements.length > 0 && !inside)
        return ND_ACCESS_VIOLATION;
    operation_begin(&operation, result, type, flags);
    operation.remote_address = base + offset;
    operation.remote_token = descriptor.Token;
    return post(qp_of(self), &operation, &elements);
}

static HRESULT STDMETHODCALLTYPE endpoint_read(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge,
                                               SIZE_T sge_count, const ND_MW_DESCRIPTOR *remote, ULONGLONG offset,
                                               DWORD flags)
{
    return transfer(self, Nd2RequestTypeRead, result, sge, sge_count, remote, offset, flags);
}

static HRESULT STDMETHODCALLTYPE endpoint_write(INDEndpoint *self, ND_RESULT *result, const ND_SGE *sge,
                                                SIZE_T sge_count, const ND_MW_DESCRIPTOR *remote, ULONGLONG offset,
                                                DWORD flags)
{
    return transfer(self, Nd2RequestTypeWrite, result, sge, sge_count, remote, offset, flags);
}

static HRESULT STDMETHODCALLTYPE endpoint_bind(INDEndpoint *self, ND_RESULT *result, ND_MR_HANDLE memory,
                                               INDMemoryWindow *window_pointer, const void *buffer, SIZE_T size,
                                               DWORD flags, ND_MW_DESCRIPTOR *out)
{
    static const ND_MW_DESCRIPTOR none;
    struct queue_pair *qp = qp_of(self);
    struct window *window = window_from((IUnknown *)window_pointer);
    struct operation operation;

    if (!readable(result))
        return ND_INVALID_PARAMETER_1;
    if (window == NULL)
        return ND_INVALID_PARAMETER_3;
    if ((flags & ~(DWORD)BIND_FLAGS) != 0)
        return ND_INVALID_PARAMETER_6;
    if (!guarded_copy(out, &none, sizeof none))
        return ND_INVALID_PARAMETER_7;
    struct region *region = region_hold(qp->object.adapter, version1_token(memory));
    if (region == NULL)
        return ND_ACCESS_VIOLATION;
    operation_begin(&operation, result, Nd2RequestTypeBind, flags);
    HRESULT status = nd_post_bind(qp, &operation, region, window, buffer, size);
    object_drop(&region->object);
    if (status == ND_SUCCESS) {
        ND_MW_DESCRIPTOR descriptor = {htonll((uintptr_t)buffer), htonll(size), window_token(window)};
        guarded_copy(out, &descriptor, sizeof descriptor);
    }
    return status;
}

static HRESULT STDMETHODCALLTYPE endpoint_invalidate(INDEndpoint *self, ND_RESULT *result, INDMemoryWindow *window,
                                                     DWORD flags)
{
    if (!readable(result))
        return ND_INVALID_PARAMETER_1;
    return nd_qp_invalidate((IND2QueuePair *)self, result, (IUnknown *)window, flags);
}

static void STDMETHODCALLTYPE endpoint_start_batch(INDEndpoint *self)
{
    qp_start_batch(qp_of(self));
}

static void STDMETHODCALLTYPE endpoint_submit_batch(INDEndpoint *self)
{
    qp_submit_batch(qp_of(self));
}

static const struct INDEndpoint_methods methods = {
    COM_METHODS(INDEndpoint),
    VERSION2_METHOD(nd_qp_flush),
    endpoint_start_batch,
    endpoint_submit_batch,
    endpoint_send,
    endpoint_send_and_invalidate,
    endpoint_receive,
    endpoint_bind,
    endpoint_invalidate,
    endpoint_read,
    endpoint_write,
};

const struct object_view version1_endpoint_view = {
    .methods = &methods,
    .iid = &softnd_iid_INDEndpoint,
};

struct queue_pair *version1_endpoint_from(INDEndpoint *pointer, const struct object *owning_connector)
{
    struct com *com = com_from(pointer, &version1_endpoint_view, owning_connector->adapter);
    return com != NULL && qp_of(com)->owner == owning_connector ? qp_of(com) : NULL;
}
