/* A provider DLL. The macro selects its kind: broken in one way, or with two adapters that can only be opened. See the
   Makefile. */

#include <winsock2.h>
#include <ws2tcpip.h>
#include <windows.h>

#include <stdint.h>
#include <string.h>

#define EXPORT __declspec(dllexport)

/* Sizes have 64 bits in version 1 and 32 in version 2. */
#if defined(VERSION_1) || defined(VERSION_1_NO_PROVIDER) || defined(VERSION_1_NULL_PROVIDER) ||  \
    defined(VERSION_1_NO_OPEN) || defined(VERSION_1_OPEN_NULL) || defined(VERSION_1_NO_QUERY) || \
    defined(VERSION_1_NO_FILE)
#define ONLY_VERSION_1
typedef SIZE_T length;
#else
typedef ULONG length;
#endif

/* An object whose methods all exist. It is never freed. It stands for IND2Provider, INDProvider and IClassFactory. */
struct object {
    const void *const *methods;
};

static HRESULT STDMETHODCALLTYPE query(struct object *self, const GUID *iid, void **out)
{
    (void)iid;
    *out = self;
    return 0;
}

static ULONG STDMETHODCALLTYPE count(struct object *self)
{
    (void)self;
    return 1;
}

/* IND2Provider::QueryAddressList of a provider without adapters. An empty list is a number and padding, 8 bytes. */
static HRESULT STDMETHODCALLTYPE addresses(struct object *self, void *list, length *size)
{
    (void)self;
    if (*size < 8) {
        *size = 8;
        return (HRESULT)0x80000005;
    }
    memset(list, 0, 8);
    *size = 8;
    return 0;
}

/* Two adapters: 7 at 127.0.0.1 and ::1, 8 at 127.0.0.2. */
#if defined(UNLOADS) || defined(KEEPS) || defined(NO_OPEN) || defined(OPEN_UNKNOWN) || defined(OPEN_NULL) || \
    defined(NO_QUERY) || defined(NO_FILE) || defined(ONLY_VERSION_1)
#define ADAPTERS
#endif

#ifdef ADAPTERS
static volatile LONG open_adapters;

struct list { /* SOCKET_ADDRESS_LIST with three entries */
    INT count;
    SOCKET_ADDRESS entries[3];
    struct sockaddr_in v4[2];
    struct sockaddr_in6 v6;
};

static HRESULT STDMETHODCALLTYPE two_adapters(struct object *self, struct list *out, length *size)
{
    (void)self, (void)addresses;
    if (*size < sizeof *out) {
        *size = sizeof *out;
        return (HRESULT)0x80000005;
    }
    memset(out, 0, sizeof *out);
    out->count = 3;
    for (int i = 0; i < 2; i++) {
        out->v4[i].sin_family = AF_INET;
        out->v4[i].sin_addr.s_addr = htonl(0x7F000001 + (ULONG)i);
        out->entries[2 * i].lpSockaddr = (void *)&out->v4[i];
        out->entries[2 * i].iSockaddrLength = sizeof out->v4[i];
    }
    out->v6.sin6_family = AF_INET6;
    out->v6.sin6_addr.s6_addr[15] = 1;
    out->entries[1].lpSockaddr = (void *)&out->v6;
    out->entries[1].iSockaddrLength = sizeof out->v6;
    *size = sizeof *out;
    return 0;
}

static ULONG STDMETHODCALLTYPE release_adapter(struct object *self)
{
    (void)self;
    return (ULONG)InterlockedDecrement(&open_adapters);
}

#ifdef ONLY_VERSION_1
static HANDLE STDMETHODCALLTYPE adapter_file(struct object *self)
{
    (void)self;
#ifdef VERSION_1_NO_FILE
    return NULL;
#else
    return CreateNamedPipeA("\\\\.\\pipe\\fake", PIPE_ACCESS_DUPLEX | FILE_FLAG_OVERLAPPED, PIPE_TYPE_BYTE,
                            PIPE_UNLIMITED_INSTANCES, 64, 64, 0, NULL);
#endif
}

/* Reports 64 in every field, in a structure that is larger than ND_ADAPTER_INFO1. */
static HRESULT STDMETHODCALLTYPE query_adapter(struct object *self, ULONG version, SIZE_T *info, SIZE_T *size)
{
    (void)self;
#ifdef VERSION_1_NO_QUERY
    (void)version, (void)info, (void)size;
    return (HRESULT)0xC00000A3;
#else
    if (version != 1)
        return (HRESULT)0xC00000EF;
    if (*size < 160) {
        *size = 160;
        return (HRESULT)0x80000005;
    }
    for (int i = 0; i < 20; i++)
        info[i] = 64;
    *size = 160;
    return 0;
#endif
}

static const void *const adapter_methods[] = {query, count,        release_adapter, NULL,
                                              NULL,  adapter_file, query_adapter,   NULL};
static struct object adapter = {adapter_methods};

static HRESULT STDMETHODCALLTYPE open(struct object *self, const struct sockaddr *address, SIZE_T size, void **out)
{
    (void)self, (void)address, (void)size, (void)&adapter;
    *out = NULL;
#ifdef VERSION_1_NO_OPEN
    return (HRESULT)0xC0000141;
#elif !defined(VERSION_1_OPEN_NULL)
    InterlockedIncrement(&open_adapters);
    *out = &adapter;
#endif
    return 0;
}
#else
static HRESULT STDMETHODCALLTYPE resolve(struct object *self, const struct sockaddr_in *address, ULONG size, UINT64 *id)
{
    (void)self, (void)size;
    *id = address->sin_family == AF_INET && address->sin_addr.s_addr == htonl(0x7F000002) ? 8 : 7;
    return 0;
}

static HRESULT STDMETHODCALLTYPE create_file(struct object *self, HANDLE *out)
{
    (void)self;
#ifdef NO_FILE
    *out = NULL;
    return (HRESULT)0xC0000017;
#else
    *out = CreateNamedPipeA("\\\\.\\pipe\\fake", PIPE_ACCESS_DUPLEX | FILE_FLAG_OVERLAPPED, PIPE_TYPE_BYTE,
                            PIPE_UNLIMITED_INSTANCES, 64, 64, 0, NULL);
    return 0;
#endif
}

static HRESULT STDMETHODCALLTYPE query_adapter(struct object *self, uint32_t *info, ULONG *size)
{
    (void)self;
#ifdef NO_QUERY
    (void)info, (void)size;
    return (HRESULT)0xC00000A3;
#else
    /* Report 64 in every field. */
    memset(info + 1, 0, 92);
    for (int i = 2; i < 23; i++)
        info[i] = 64;
    *size = 96;
    return 0;
#endif
}

static const void *const adapter_methods[] = {query, count, release_adapter, create_file, query_adapter, NULL};
static struct object adapter = {adapter_methods};

static HRESULT STDMETHODCALLTYPE open(struct object *self, const GUID *iid, UINT64 id, void **out)
{
    (void)self, (void)iid, (void)id;
    *out = NULL;
#if defined(NO_OPEN)
    (void)adapter;
    return (HRESULT)0xC00000A3;
#elif defined(OPEN_UNKNOWN)
    (void)adapter;
    return (HRESULT)0xC0ABCDEF;
#elif defined(OPEN_NULL)
    (void)adapter;
    return 0;
#else
    InterlockedIncrement(&open_adapters);
    *out = &adapter;
    return 0;
#endif
}
#endif
#endif

static HRESULT STDMETHODCALLTYPE refuse(void)
{
    return (HRESULT)0xC00000BB;
}

#ifdef ONLY_VERSION_1
static const void *const methods[] = {query, count, count, two_adapters, open, refuse};
#elif defined(ADAPTERS)
static const void *const methods[] = {query, count, count, two_adapters, resolve, open, addresses, refuse};
#else
static const void *const methods[] = {query, count, count, addresses, refuse, refuse};
#endif
static struct object object = {methods};

#ifdef ONLY_VERSION_1
static const GUID iid_provider = {0x0C5DD316, 0x5FDF, 0x47E6, {0xB2, 0xD0, 0x2A, 0x6E, 0xDA, 0x8D, 0x39, 0xDD}};

static HRESULT STDMETHODCALLTYPE create_instance(struct object *self, void *outer, const GUID *iid, void **out)
{
    (void)self;
    *out = NULL;
#ifdef VERSION_1_NO_PROVIDER
    (void)outer, (void)iid, (void)iid_provider, (void)object;
    return (HRESULT)0x80004002;
#else
    if (outer != NULL || memcmp(iid, &iid_provider, sizeof *iid))
        return (HRESULT)0x80004002;
#ifdef VERSION_1_NULL_PROVIDER
    (void)object;
#else
    *out = &object;
#endif
    return 0;
#endif
}

static const void *const factory_methods[] = {query, count, count, create_instance, refuse};
static struct object factory = {factory_methods};
#endif

static const GUID iid_class_factory = {0x00000001, 0, 0, {0xC0, 0, 0, 0, 0, 0, 0, 0x46}};

#ifndef NO_EXPORTS
EXPORT HRESULT STDMETHODCALLTYPE DllGetClassObject(const GUID *class_id, const GUID *iid, void **out)
{
    (void)class_id, (void)iid;
    *out = NULL;
#if defined(CRASHES)
    *(volatile int *)0 = 1;
#elif defined(EXITS)
    ExitProcess(7);
#elif defined(HANGS)
    Sleep(INFINITE);
#elif defined(NO_INTERFACE)
    return (HRESULT)0x80004002;
#elif defined(UNKNOWN_STATUS)
    return (HRESULT)0xC0ABCDEF;
#elif defined(NULL_OBJECT)
    return 0;
#endif
#if defined(ONLY_VERSION_1)
    if (memcmp(iid, &iid_class_factory, sizeof *iid))
        return (HRESULT)0x80004002;
    *out = &factory;
#else
    if (!memcmp(iid, &iid_class_factory, sizeof *iid))
        return (HRESULT)0x80004002;
    *out = &object;
#endif
    return 0;
}

#ifndef ONE_EXPORT
EXPORT HRESULT STDMETHODCALLTYPE DllCanUnloadNow(void)
{
#if defined(UNLOADS) || defined(VERSION_1)
    return open_adapters == 0 ? 0 : 1;
#else
    return 1;
#endif
}
#endif
#endif

BOOL WINAPI DllMain(HINSTANCE instance, DWORD reason, void *reserved)
{
    (void)instance, (void)reason, (void)reserved, (void)&object, (void)&iid_class_factory;
    return TRUE;
}
