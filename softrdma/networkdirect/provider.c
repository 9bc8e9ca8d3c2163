#include "provider.h"
#include "addresses.h"
#include "face.h"
#include "faults.h"
#include "nd_adapter.h"
#include "trace.h"
#include "settings.h"
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
    return nd_adapter_create(iid, out);
}

static const struct IND2Provider_methods methods = {
    COM_METHODS(IND2Provider),
    provider_addresses,
    provider_resolve,
    provider_open,
};

static const struct object_view view = {
    .methods = &methods,
    .iid = &softnd_iid_IND2Provider,
};

/* ---- Objects without an adapter ---- */

struct plain_object {
    struct com com;
    struct object object;
};

static void destroy(struct object *object)
{
    free(CONTAINER_OF(object, struct plain_object, object));
}

HRESULT plain_object_create(enum object_kind kind, const struct object_view *as, void **out)
{
    static const struct object_class classes[] = {
        [KIND_CLASS_FACTORY] = {.kind = KIND_CLASS_FACTORY, .destroy = destroy},
        [KIND_PROVIDER] = {.kind = KIND_PROVIDER, .destroy = destroy},
    };
    struct plain_object *plain = calloc(1, sizeof *plain);

    if (plain == NULL)
        return ND_NO_MEMORY;
    com_start(&plain->com, as);
    object_start(&plain->object, &classes[kind], NULL, NULL);
    com_attach(&plain->com, &plain->object);
    *out = plain;
    return S_OK;
}

/* ---- The DLL ---- */

const char face_prefix[] = "SOFTND_";
const uint32_t face_patience_ms = 0; /* H.1.2 */
const bool face_gathers = false;

static bool version_served(unsigned version)
{
    uint64_t only = settings_number("VERSION", 0);
    return only == 0 || only == version;
}

/* Gives the provider of version 2 or the class factory of version 1. The consumer passes the provider id from the
 * catalogue, so the class id is ignored (A.3.1). */
HRESULT WINAPI DllGetClassObject(REFCLSID class_id, REFIID iid, void **out)
{
    static volatile LONG winsock_started;
    WSADATA data;

    UNUSED(class_id);
    HRESULT status = com_check_iid(&view, iid, out);
    bool second = status == S_OK && version_served(2);
    if (status != S_OK && status != E_NOINTERFACE)
        return status;
    if (InterlockedCompareExchange(&winsock_started, 1, 0) == 0 && WSAStartup(MAKEWORD(2, 2), &data) != 0) {
        winsock_started = 0;
        return ND_DEVICE_NOT_READY;
    }
    if (second)
        return plain_object_create(KIND_PROVIDER, &view, out);
    return version_served(1) ? version1_class_factory(iid, out) : E_NOINTERFACE;
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
        faults_end();
        guarded_copy_stop();
    }
    return TRUE;
}
