#include "provider.h"
#include "adapter.h"
#include "addresses.h"
#include "guarded_copy.h"
#include "trace.h"
#include "switches.h"
#include "transport.h"
#include "version1/objects.h"

#include <stdlib.h>

static HRESULT STDMETHODCALLTYPE provider_addresses(IND2Provider *self, SOCKET_ADDRESS_LIST *list, ULONG *size)
{
    UNUSED(self);
    return addresses_list(list, size);
}

static HRESULT STDMETHODCALLTYPE provider_resolve(IND2Provider *self, const struct sockaddr *address, ULONG size,
                                                  UINT64 *adapter_id)
{
    struct sockaddr_storage wanted;
    UINT64 id = SOFTND_ADAPTER_ID;
    HRESULT status = address_take(address, size, &wanted);

    UNUSED(self);
    if (status != ND_SUCCESS)
        return status;
    if (!addresses_serve((struct sockaddr *)&wanted))
        return ND_INVALID_ADDRESS;
    return guarded_copy(adapter_id, &id, sizeof id) ? ND_SUCCESS : ND_INVALID_PARAMETER_3;
}

static HRESULT STDMETHODCALLTYPE provider_open(IND2Provider *self, REFIID iid, UINT64 adapter_id, void **out)
{
    void *none = NULL;

    UNUSED(self);
    if (!guarded_copy(out, &none, sizeof none))
        return E_POINTER;
    if (adapter_id != SOFTND_ADAPTER_ID)
        return ND_INVALID_PARAMETER;
    return adapter_create(iid, out);
}

static void provider_destroy(struct object *object)
{
    free(object);
}

static const struct object_class class = {
    .kind = KIND_PROVIDER,
    .destroy = provider_destroy,
};

static const struct IND2Provider_methods methods = {
    OBJECT_METHODS(IND2Provider),
    provider_addresses,
    provider_resolve,
    provider_open,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2Provider,
};

static HRESULT create(void **out)
{
    struct object *object = calloc(1, sizeof *object);

    if (object == NULL)
        return ND_NO_MEMORY;
    object_start(object, &class, &view, NULL);
    *out = object;
    return S_OK;
}

/* Gives the provider of version 2 or the class factory of version 1. The consumer passes the provider id from the
 * catalogue, so the class id is ignored (A.3.1). */
HRESULT WINAPI DllGetClassObject(REFCLSID class_id, REFIID iid, void **out)
{
    static volatile LONG winsock_started;
    WSADATA data;

    UNUSED(class_id);
    HRESULT status = object_check_iid(&view, iid, out);
    bool second = status == S_OK && switches_version(2);
    if (status != S_OK && status != E_NOINTERFACE)
        return status;
    if (InterlockedCompareExchange(&winsock_started, 1, 0) == 0 && WSAStartup(MAKEWORD(2, 2), &data) != 0) {
        winsock_started = 0;
        return ND_DEVICE_NOT_READY;
    }
    if (second)
        return create(out);
    return switches_version(1) ? version1_class_factory(iid, out) : E_NOINTERFACE;
}

HRESULT WINAPI DllCanUnloadNow(void)
{
    return object_live_count() == 0 && !version1_locked() && transport_stopped() ? S_OK : S_FALSE;
}

BOOL WINAPI DllMain(HINSTANCE instance, DWORD reason, void *reserved)
{
    UNUSED(reserved);
    if (reason == DLL_PROCESS_ATTACH) {
        DisableThreadLibraryCalls(instance);
        trace_open();
        return guarded_copy_start();
    }
    if (reason == DLL_PROCESS_DETACH) {
        object_write_statistics();
        trace_close();
        guarded_copy_stop();
    }
    return TRUE;
}
