/* The class factory, the provider, and what all objects of version 1 share. */
#include "objects.h"

#include "../addresses.h"
#include "../provider.h"

HRESULT STDMETHODCALLTYPE version1_result(struct com *com, OVERLAPPED *overlapped, SIZE_T *bytes, BOOL wait)
{
    static const SIZE_T none = 0;
    HRESULT status = com_result(com, overlapped, wait);

    /* A request of these objects transfers no bytes of its own. */
    if (status != ND_PENDING && bytes != NULL && !guarded_copy(bytes, &none, sizeof none))
        return ND_INVALID_PARAMETER_2;
    return status;
}

/* ---- Provider ---- */

static HRESULT STDMETHODCALLTYPE provider_addresses(INDProvider *self, SOCKET_ADDRESS_LIST *list, SIZE_T *size)
{
    SIZE_T have;

    UNUSED(self);
    if (!guarded_copy(&have, size, sizeof have))
        return ND_ACCESS_VIOLATION;
    ULONG count = version1_size(have);
    HRESULT status = addresses_list(list, &count);
    have = count;
    return guarded_copy(size, &have, sizeof have) ? status : ND_ACCESS_VIOLATION;
}

static HRESULT STDMETHODCALLTYPE provider_open(INDProvider *self, const struct sockaddr *address, SIZE_T size,
                                               INDAdapter **out)
{
    struct sockaddr_storage wanted;

    UNUSED(self);
    if (!version1_clear(out))
        return ND_INVALID_PARAMETER_3;
    HRESULT status = address_take(address, version1_size(size), &wanted);
    if (status != ND_SUCCESS)
        return status;
    if (!addresses_serve((struct sockaddr *)&wanted))
        return ND_INVALID_ADDRESS;
    return version1_adapter_open(&wanted, out);
}

static const struct INDProvider_methods provider_methods = {
    COM_METHODS(INDProvider),
    provider_addresses,
    provider_open,
};

static const struct object_view provider_view = {
    .methods = &provider_methods,
    .iid = &softnd_iid_INDProvider,
};

/* ---- Class factory ---- */

static volatile LONG locks;

bool version1_locked(void)
{
    return locks > 0;
}

static HRESULT STDMETHODCALLTYPE factory_create(IClassFactory *self, IUnknown *outer, REFIID iid, void **out)
{
    UNUSED(self);
    HRESULT status = com_check_iid(&provider_view, iid, out);
    if (status == S_OK && outer != NULL)
        status = CLASS_E_NOAGGREGATION;
    return status == S_OK ? plain_object_create(KIND_PROVIDER, &provider_view, out) : status;
}

static HRESULT STDMETHODCALLTYPE factory_lock(IClassFactory *self, BOOL lock)
{
    UNUSED(self);
    if (lock)
        InterlockedIncrement(&locks);
    else
        InterlockedDecrement(&locks);
    return S_OK;
}

static const IClassFactoryVtbl factory_methods = {
    COM_METHODS(IClassFactory),
    factory_create,
    factory_lock,
};

static const struct object_view factory_view = {
    .methods = &factory_methods,
    .iid = &softnd_iid_IClassFactory,
};

HRESULT version1_class_factory(REFIID iid, void **out)
{
    HRESULT status = com_check_iid(&factory_view, iid, out);
    return status == S_OK ? plain_object_create(KIND_CLASS_FACTORY, &factory_view, out) : status;
}
