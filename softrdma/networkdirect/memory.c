/* Memory regions and memory windows. */
#include "face.h"
#include "nd_objects.h"
#include "trace.h"

/* ---- Region ---- */

static HRESULT STDMETHODCALLTYPE region_register(IND2MemoryRegion *self, const void *buffer, SIZE_T size, ULONG flags,
                                                 OVERLAPPED *overlapped)
{
    struct region *region = region_of(self);
    struct source *source = &((struct com *)self)->source;

    if (adapter_gone(region->object.adapter))
        return ND_DEVICE_REMOVED;
    if (overlapped == NULL)
        return ND_INVALID_PARAMETER;
    HRESULT status = nd_call_fault(region->object.adapter, PLACE_CALL_REG_MR);
    if (status == ND_SUCCESS)
        status = region_begin(region, buffer, size, (uintptr_t)buffer, flags);
    if (status != ND_SUCCESS)
        return status;
    status = request_accept(source, REQUEST_REGION, overlapped, region);
    if (status != ND_PENDING) {
        region_end(region, true);
        return status;
    }
    registration_made();
    request_complete(source, REQUEST_REGION, ND_SUCCESS);
    return ND_PENDING;
}

static HRESULT STDMETHODCALLTYPE region_deregister(IND2MemoryRegion *self, OVERLAPPED *overlapped)
{
    struct region *region = region_of(self);
    struct source *source = &((struct com *)self)->source;
    char probe[sizeof *overlapped];

    if (overlapped == NULL || !guarded_copy(probe, overlapped, sizeof probe))
        return ND_INVALID_PARAMETER;
    HRESULT status = region_end(region, false);
    TRACE("region %p: deregister: 0x%08lx", (void *)region, status);
    if (status != ND_SUCCESS)
        return status;
    registration_ended();
    status = request_accept(source, REQUEST_REGION, overlapped, NULL);
    if (status == ND_PENDING)
        request_complete(source, REQUEST_REGION, ND_SUCCESS);
    return status;
}

static UINT32 STDMETHODCALLTYPE region_get_local_token(IND2MemoryRegion *self)
{
    return region_local_token(region_of(self));
}

static UINT32 STDMETHODCALLTYPE region_get_remote_token(IND2MemoryRegion *self)
{
    return region_remote_token(region_of(self));
}

static const struct IND2MemoryRegion_methods region_methods = {
    COM_OVERLAPPED_METHODS(IND2MemoryRegion, com_cancel),
    region_register,
    region_deregister,
    region_get_local_token,
    region_get_remote_token,
};

static const struct object_view region_view = {
    .methods = &region_methods,
    .iid = &softnd_iid_IND2MemoryRegion,
    .base = &softnd_iid_IND2Overlapped,
};

struct region *region_from(IUnknown *pointer)
{
    struct com *com = com_from(pointer, &region_view, NULL);
    return com == NULL ? NULL : region_of(com);
}

HRESULT nd_region_new(struct adapter *adapter, ND_MR_HANDLE *handle_out, struct region **out)
{
    static const struct object_view none;
    struct nd_region *face = com_new(sizeof *face, &none);

    if (face == NULL)
        return ND_NO_MEMORY;
    face->handle_out = handle_out;
    HRESULT status = region_create(adapter, adapter, face, out);
    if (status != ND_SUCCESS)
        com_discard(face);
    else
        com_attach(&face->com, &(*out)->object);
    return status;
}

HRESULT STDMETHODCALLTYPE nd_region_create(IND2Adapter *self, REFIID iid, HANDLE file, void **out)
{
    struct adapter *adapter = nd_adapter_of(self);
    struct region *region;
    HRESULT status = nd_adapter_check(self, &region_view, iid, out);

    if (status != ND_SUCCESS)
        return status;
    struct nd_region *face = com_new(sizeof *face, &region_view);
    status = com_open(face, file);
    if (status == ND_SUCCESS)
        status = region_create(adapter, adapter, face, &region);
    return com_finish(face, status, &region->object, out);
}

/* ---- Window ---- */

static UINT32 STDMETHODCALLTYPE window_get_remote_token(IND2MemoryWindow *self)
{
    return window_token(window_of(self));
}

static const struct IND2MemoryWindow_methods window_methods = {
    COM_METHODS(IND2MemoryWindow),
    window_get_remote_token,
};

static const struct object_view window_view = {
    .methods = &window_methods,
    .iid = &softnd_iid_IND2MemoryWindow,
};

struct window *window_from(IUnknown *pointer)
{
    struct com *com = com_from(pointer, &window_view, NULL);
    return com == NULL ? NULL : window_of(com);
}

HRESULT STDMETHODCALLTYPE nd_window_create(IND2Adapter *self, REFIID iid, void **out)
{
    struct adapter *adapter = nd_adapter_of(self);
    struct window *window;
    HRESULT status = nd_adapter_check(self, &window_view, iid, out);

    if (status == ND_SUCCESS)
        status = nd_call_fault(adapter, PLACE_CALL_ALLOC_MW);
    if (status != ND_SUCCESS)
        return status;
    struct nd_window *face = com_new(sizeof *face, &window_view);
    status = face == NULL ? ND_NO_MEMORY : window_create(adapter, adapter, face, &window);
    return com_finish(face, status, &window->object, out);
}

/* Writes the result of a version 1 window, which lives as long as the window. */
void *face_window_invalidated(struct window *window)
{
    static const ND_RESULT invalidated = {.Status = ND_SUCCESS};
    ND_RESULT *result = ((struct nd_window *)window->object.face)->invalidate_result;

    if (result != NULL)
        guarded_copy(result, &invalidated, sizeof invalidated);
    return result;
}
